//! The tokenizer, the chat templates and the generation defaults of a GGUF file, converted to the
//! files of a Hugging Face folder.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::settings::Settings;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::layout::TOKENIZER;
use crate::text::{CONTROL, MergeOrder, SPLITTERS, SentencePieceLists, TokenLists, UNKNOWN};

const MODEL: &str = "tokenizer.ggml.model";
const SPLITTER: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
const UNKNOWN_ID: &str = "tokenizer.ggml.unknown_token_id";
/// The tokenizer model of SentencePiece.
const SENTENCEPIECE: &str = "llama";
const GEMMA4: &str = "gemma4";
const TEMPLATE: &str = "tokenizer.chat_template";
const TEMPLATES: &str = "tokenizer.chat_templates";

/// Special tokens of the file, by their names in `tokenizer_config.json`.
const SPECIAL: [(&str, &str); 4] =
    [("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")];

/// Roles of the tokens that end a text, a turn and a message.
const ENDS: [&str; 3] = ["eos", "eot", "eom"];

/// Names of special tokens that end a turn, a message or a text in the supported architectures, as
/// in llama.cpp (`src/llama-vocab.cpp`, `special_eog_ids`).
const NAMED_ENDS: [&str; 5] = ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>"];

/// Like [`NAMED_ENDS`], for Gemma. Many files declare some of these tokens as text.
const GEMMA_ENDS: [&str; 4] = ["<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>"];

/// The tokens before Gemma's turns, which many files declare as text.
const GEMMA_TURNS: [&str; 2] = ["<start_of_turn>", "<|turn>"];

/// Sampling settings that a file can recommend, with their names in `generation_config.json`.
const SAMPLING: [(&str, &str); 5] = [
    ("general.sampling.temp", "temperature"),
    ("general.sampling.top_k", "top_k"),
    ("general.sampling.top_p", "top_p"),
    ("general.sampling.min_p", "min_p"),
    ("general.sampling.penalty_repeat", "repetition_penalty"),
];

/// The generated files, by name.
pub(super) fn of(settings: &Settings<'_>) -> Result<BTreeMap<&'static str, Vec<u8>>, CheckpointError> {
    let tokens = settings.required(TOKENS, settings.texts(TOKENS)?)?;
    let ids = Ids { settings, tokens: &tokens };
    let files = [
        ("tokenizer_config.json", ids.tokenizer_config()?.to_string().into_bytes()),
        ("generation_config.json", ids.generation_config()?.to_string().into_bytes()),
        (TOKENIZER, ids.tokenizer()?),
    ];
    Ok(files.into())
}

/// The ids of the placeholders of pictures and videos.
pub(super) fn placeholders(settings: &Settings<'_>) -> Result<[u64; 2], CheckpointError> {
    let tokens = settings.required(TOKENS, settings.texts(TOKENS)?)?;
    let id = |name: &str| {
        let at = tokens.iter().position(|token| *token == name).map(|at| at as u64);
        at.ok_or_else(|| settings.refused(TOKENS, format!("a list without {name}"), "a list of all added tokens"))
    };
    Ok([id("<|image_pad|>")?, id("<|video_pad|>")?])
}

/// Token ids that are given in the settings.
struct Ids<'s, 'f> {
    settings: &'s Settings<'f>,
    tokens: &'s [&'f str],
}

impl<'f> Ids<'_, 'f> {
    /// The id and the text of the token with this role. The id must be one of the file's tokens.
    fn id(&self, role: &str) -> Result<Option<(u64, &'f str)>, CheckpointError> {
        let name = format!("tokenizer.ggml.{role}_token_id");
        let Some(id) = self.settings.number(&name)? else { return Ok(None) };
        match usize::try_from(id).ok().and_then(|id| self.tokens.get(id)) {
            Some(token) => Ok(Some((id, token))),
            None => {
                Err(self.settings.refused(&name, id, &format!("less than {}, the number of tokens", self.tokens.len())))
            }
        }
    }

    fn index(&self, role: &str) -> Result<Option<usize>, CheckpointError> {
        Ok(self.id(role)?.map(|(id, _)| id as usize))
    }

    /// The token that `tokenizer.json` adds before each text.
    fn added_bos(&self, default: bool) -> Result<Option<usize>, CheckpointError> {
        let is_added = self.settings.switch(ADD_BOS)?.unwrap_or(default);
        Ok(self.index("bos")?.filter(|_| is_added))
    }

    /// Tokens that are special even if the file declares them as text: tokens with a role, and the tokens
    /// around Gemma's turns.
    fn special(&self) -> Result<BTreeSet<usize>, CheckpointError> {
        let roles = SPECIAL.map(|(role, _)| role).into_iter().chain(ENDS);
        let with_role = roles.filter_map(|role| self.index(role).transpose()).collect::<Result<Vec<_>, _>>()?;
        let is_named = |token: &str| GEMMA_ENDS.contains(&token) || GEMMA_TURNS.contains(&token);
        let named = (0..self.tokens.len()).filter(|at| is_named(self.tokens[*at]));
        Ok(with_role.into_iter().chain(named).collect())
    }

    fn tokenizer(&self) -> Result<Vec<u8>, CheckpointError> {
        let settings = self.settings;
        let model = settings.required(MODEL, settings.text(MODEL)?)?;
        let tokens = self.tokens.to_vec();
        let kinds = || settings.required(KINDS, settings.numbers(KINDS)?);
        let merges = || settings.required(MERGES, settings.texts(MERGES)?);
        let order = match model {
            "gpt2" => {
                let name = settings.required(SPLITTER, settings.text(SPLITTER)?)?;
                let known = || SPLITTERS.map(|splitter| splitter.name).join(", ");
                let splitter = SPLITTERS.into_iter().find(|splitter| splitter.name == name);
                let splitter = splitter.ok_or_else(|| settings.refused(SPLITTER, name, &known()))?;
                let bos = self.added_bos(splitter.adds_bos())?;
                return Ok(TokenLists { tokens, kinds: kinds()?, merges: merges()?, splitter, bos }.tokenizer_json()?);
            }
            SENTENCEPIECE => MergeOrder::Scores(settings.required(SCORES, settings.floats(SCORES)?)?),
            GEMMA4 => MergeOrder::Listed(merges()?),
            other => return Err(settings.refused(MODEL, other, "gpt2, llama and gemma4")),
        };
        // Without the setting, llama.cpp adds a space before each text.
        if settings.switch(ADD_SPACE)?.unwrap_or(true) {
            return Err(settings.refused(ADD_SPACE, true, "false, as in Gemma's files"));
        }
        let kinds = kinds()?;
        // Some files of Gemma 4 say that no such token is added. llama.cpp ignores this too.
        let bos = if model == GEMMA4 { self.index("bos")? } else { self.added_bos(true)? };
        let of_kind = || kinds.iter().take(tokens.len()).position(|kind| *kind == UNKNOWN);
        let unknown = self.index("unknown")?.or_else(of_kind);
        let unknown = settings.required(UNKNOWN_ID, unknown)?;
        let special = self.special()?;
        Ok(SentencePieceLists { pieces: tokens, kinds, order, unknown, bos, special }.tokenizer_json()?)
    }

    fn tokenizer_config(&self) -> Result<Value, CheckpointError> {
        let mut config = Map::new();
        for (role, name) in SPECIAL {
            if let Some((_, token)) = self.id(role)? {
                config.insert(name.to_owned(), token.into());
            }
        }
        let template = |name: &str| Ok((name.to_owned(), self.settings.text(&format!("{TEMPLATE}.{name}"))?));
        let mut templates = match self.settings.texts(TEMPLATES)? {
            Some(names) => names.into_iter().map(template).collect::<Result<Vec<_>, CheckpointError>>()?,
            None => Vec::new(),
        };
        templates.push(("default".to_owned(), self.settings.text(TEMPLATE)?));
        let listed =
            templates.into_iter().filter_map(|(name, source)| Some(json!({ "name": name, "template": source? })));
        config.insert("chat_template".to_owned(), listed.collect());
        Ok(Value::Object(config))
    }

    /// The ids of special tokens whose names are in [`NAMED_ENDS`], and in a vocabulary of Gemma of all
    /// [`GEMMA_ENDS`]. Most files declare only one of their end tokens.
    fn named_ends(&self) -> Result<Vec<u64>, CheckpointError> {
        let kinds = self.settings.numbers(KINDS)?.unwrap_or_default();
        let has_pieces = self.settings.text(MODEL)?.is_some_and(|model| [SENTENCEPIECE, GEMMA4].contains(&model));
        let tokens = self.tokens.iter().zip(kinds).zip(0..);
        let ends = tokens.filter(|((token, kind), _)| {
            *kind == CONTROL && NAMED_ENDS.contains(token) || has_pieces && GEMMA_ENDS.contains(token)
        });
        Ok(ends.map(|(_, id)| id).collect())
    }

    fn generation_config(&self) -> Result<Value, CheckpointError> {
        let mut config = Map::new();
        let mut ends = Vec::new();
        for role in ENDS {
            ends.extend(self.id(role)?.map(|(id, _)| id).filter(|id| !ends.contains(id)));
        }
        ends.extend(self.named_ends()?.into_iter().filter(|id| !ends.contains(id)).collect::<Vec<_>>());
        config.insert("eos_token_id".to_owned(), ends.into());
        config.insert("bos_token_id".to_owned(), self.id("bos")?.map(|(id, _)| id).into());
        for (theirs, ours) in SAMPLING {
            let value = match self.settings.get(theirs) {
                Some(_) if ours == "top_k" => self.settings.number(theirs)?.map(Value::from),
                _ => self.settings.float(theirs)?.map(Value::from),
            };
            config.extend(value.map(|value| (ours.to_owned(), value)));
        }
        let draws = config.get("temperature").and_then(Value::as_f64).is_some_and(|temperature| temperature > 0.0);
        config.insert("do_sample".to_owned(), draws.into());
        Ok(Value::Object(config))
    }
}
