//! A tokenizer in several files: `vocab.json` and `merges.txt` as in GPT-2. The files are combined
//! in the same way as in transformers if there is no `tokenizer.json` (5.17,
//! `tokenization_qwen2.py`).

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::error::TextError;

/// The tokenizer classes whose pre-tokenization is implemented here.
const KNOWN_CLASSES: [&str; 2] = ["Qwen2Tokenizer", "Qwen2TokenizerFast"];

/// The pattern with which these classes split text before merges apply.
pub(super) const WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

// Settings with one special token each, and settings with a list of special tokens.
const NAMED: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];
const LISTED: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// The files that replace a `tokenizer.json`.
pub struct VocabularyFiles<'f> {
    /// `vocab.json`: ids by token.
    pub vocabulary: &'f [u8],
    /// `merges.txt`: two tokens per line, the most frequent pair first.
    pub merges: &'f [u8],
    /// `added_tokens.json`: ids by text. Newer checkpoints have a list of added
    /// tokens in `tokenizer_config.json` instead.
    pub added: Option<&'f [u8]>,
    /// `tokenizer_config.json`.
    pub config: Option<&'f [u8]>,
}

impl VocabularyFiles<'_> {
    /// Builds the `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] for a damaged file, an unknown tokenizer class, or special tokens
    /// without an id, which would be encoded as other tokens.
    pub fn tokenizer_json(&self) -> Result<Vec<u8>, TextError> {
        let config = self.config.map(|json| object("tokenizer_config.json", json)).transpose()?.unwrap_or_default();
        if let Some(class) = config.get("tokenizer_class").and_then(Value::as_str)
            && !KNOWN_CLASSES.contains(&class)
        {
            let known = KNOWN_CLASSES.join(", ");
            return Err(refused(format!("without tokenizer.json only a {known} can be assembled, not a {class}")));
        }
        let vocabulary = object("vocab.json", self.vocabulary)?;
        let special = special(&config);
        let added = self.added_tokens(&config, &special)?;
        let is_known =
            |token: &str| vocabulary.contains_key(token) || added.values().any(|one| one["content"] == token);
        if let Some(token) = special.iter().find(|token| !is_known(token)) {
            return Err(refused(format!(
                "the special token {token} has no id in vocab.json or among the added tokens"
            )));
        }
        let prefix = config.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(false);
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": added.into_values().collect::<Vec<_>>(),
            "normalizer": { "type": "NFC" },
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    { "type": "Split", "pattern": { "Regex": WORDS }, "behavior": "Isolated", "invert": false },
                    { "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": false },
                ],
            },
            "post_processor": null,
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": { "type": "BPE", "vocab": vocabulary, "merges": self.merges()? },
        });
        Ok(tokenizer.to_string().into_bytes())
    }

    /// The pairs of tokens, without lines that begin with `#version`.
    fn merges(&self) -> Result<Vec<[&str; 2]>, TextError> {
        let text = str::from_utf8(self.merges).map_err(|_| refused("merges.txt is not UTF-8".into()))?;
        let lines = text.lines().zip(1..).filter(|(line, _)| !line.starts_with("#version") && !line.is_empty());
        let merge = |(line, number)| match str::split_once(line, ' ') {
            Some((left, right)) if !right.contains(' ') => Ok([left, right]),
            _ => Err(refused(format!("merges.txt does not have two tokens in line {number}"))),
        };
        lines.map(merge).collect()
    }

    fn added_tokens(&self, config: &Map<String, Value>, special: &[String]) -> Result<BTreeMap<u32, Value>, TextError> {
        let flags = ["single_word", "lstrip", "rstrip", "normalized", "special"];
        let token = |id: u32, content: &Value, is: &dyn Fn(&str) -> bool| {
            let mut token = json!({ "id": id, "content": content });
            flags.iter().for_each(|flag| token[*flag] = is(flag).into());
            (id, token)
        };
        if let Some(listed) = config.get("added_tokens_decoder").and_then(Value::as_object) {
            let read = |(id, one): (&String, &Value)| {
                let id = id.parse().map_err(|_| refused(format!("the id {id} of an added token is not a number")))?;
                Ok(token(id, &one["content"], &|flag| one[flag] == true))
            };
            return listed.iter().map(read).collect();
        }
        let Some(json) = self.added else {
            let text = "neither tokenizer_config.json nor added_tokens.json lists the added tokens".to_owned();
            return Err(refused(text));
        };
        let read = |(content, id): (&String, &Value)| {
            let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = number
                .ok_or_else(|| refused(format!("the added token {content} has the id {id}, which is not a number")))?;
            let is_special = special.contains(content);
            Ok(token(id, &content.as_str().into(), &|flag| flag == "special" && is_special))
        };
        object("added_tokens.json", json)?.iter().map(read).collect()
    }
}

fn special(config: &Map<String, Value>) -> Vec<String> {
    let text = |token: &Value| token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned);
    let named = NAMED.iter().filter_map(|key| config.get(*key));
    let listed = LISTED.iter().filter_map(|key| config.get(*key)?.as_array()).flatten();
    named.chain(listed).filter_map(text).collect()
}

fn object(file: &str, json: &[u8]) -> Result<Map<String, Value>, TextError> {
    serde_json::from_slice(json).map_err(|error| refused(format!("{file}: {error}")))
}

fn refused(reason: String) -> TextError {
    TextError::Tokenizer { reason }
}
