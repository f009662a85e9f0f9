//! A byte-level tokenizer built from the contents of a GGUF file: a list of tokens, a list of
//! merges, and the name of a splitter.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::error::TextError;
use super::vocabulary_files::WORDS;

// The kinds of tokens, by llama.cpp's numbers (`include/llama.h`, `llama_token_type`).
/// The token for text that has no other token.
pub const UNKNOWN: i64 = 2;
/// A special token that represents no text.
pub const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// Llama 3's word pattern (transformers 5.17, `convert_slow_tokenizer.py`, `TikTokenConverter`). It
/// is Qwen2's pattern, except that a number has up to three digits.
const LLAMA_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The word pattern of Qwen3.5, which keeps combining marks in the word of their letters
/// (`tokenizer.json` of Qwen/Qwen3.5-9B).
const MARKED_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Mistral's word pattern since Nemo (transformers 5.17, `tokenization_utils_tokenizers.py`,
/// `_patch_mistral_regex`).
const TEKKEN_WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A method of splitting text into words, before merges apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Splitter {
    /// The name in GGUF files.
    pub name: &'static str,
    /// The word pattern. `None` means GPT-2's pattern.
    words: Option<&'static str>,
    has_single_digits: bool,
    /// Whether text is first normalized to its composed form (NFC).
    is_composed: bool,
    /// Whether a word that is itself a token skips the merges.
    has_whole_words: bool,
}

const fn splitter(name: &'static str, words: Option<&'static str>) -> Splitter {
    Splitter { name, words, has_single_digits: false, is_composed: false, has_whole_words: false }
}

/// All known splitters. Each splits text in the same way as the `tokenizer.json` of the
/// models that use it.
pub const SPLITTERS: [Splitter; 6] = [
    splitter("gpt-2", None),
    Splitter { has_whole_words: true, ..splitter("llama-bpe", Some(LLAMA_WORDS)) },
    Splitter { is_composed: true, ..splitter("qwen2", Some(WORDS)) },
    Splitter { is_composed: true, ..splitter("qwen35", Some(MARKED_WORDS)) },
    Splitter { has_single_digits: true, ..splitter("smollm", None) },
    Splitter { has_whole_words: true, ..splitter("tekken", Some(TEKKEN_WORDS)) },
];

/// The lists of tokens and merges. A token's id is its index.
pub struct TokenLists<'f> {
    /// The tokens in byte-level spelling. Added tokens are plain text.
    pub tokens: Vec<&'f str>,
    pub kinds: Vec<i64>,
    /// Pairs of tokens with a space between the two, in the order of the merges.
    pub merges: Vec<&'f str>,
    pub splitter: Splitter,
    /// The index of the token before each text.
    pub bos: Option<usize>,
}

impl TokenLists<'_> {
    /// Builds the `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`]: lists of different lengths, a token that occurs twice, or a merge
    /// that is not a pair of tokens.
    pub fn tokenizer_json(&self) -> Result<Vec<u8>, TextError> {
        let (tokens, kinds) = (self.tokens.len(), self.kinds.len());
        if tokens != kinds {
            return Err(refused(format!("there are {tokens} tokens, but {kinds} of them have a kind")));
        }
        let (mut vocabulary, mut added, mut seen) = (Map::new(), Vec::new(), BTreeSet::new());
        for (id, (token, kind)) in self.tokens.iter().zip(&self.kinds).enumerate() {
            if is_padding(id, token, *kind) {
                continue;
            }
            if !seen.insert(*token) {
                return Err(refused(format!("the token {id} occurs earlier with another id")));
            }
            if is_added(*kind) {
                added.push(added_token(id, token, *kind != USER_DEFINED));
            }
            vocabulary.insert((*token).to_owned(), id.into());
        }
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": self.splitter.is_composed.then(|| json!({ "type": "NFC" })),
            "pre_tokenizer": self.splitter.pre_tokenizer(),
            "post_processor": self.bos.map(|bos| bos_first(bos, self.tokens[bos])),
            "decoder": byte_level(true),
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": self.merges()?,
                "ignore_merges": self.splitter.has_whole_words,
            },
        });
        Ok(tokenizer.to_string().into_bytes())
    }

    fn merges(&self) -> Result<Vec<[&str; 2]>, TextError> {
        self.merges.iter().enumerate().map(|(at, merge)| pair(at, merge)).collect()
    }
}

/// Whether a row of the vocabulary does not represent text. Such rows have names with their index.
pub(super) fn is_padding(id: usize, token: &str, kind: i64) -> bool {
    kind == UNUSED && token == format!("[PAD{id}]")
}

/// Whether a text is searched for this token before it is divided into words.
pub(super) fn is_added(kind: i64) -> bool {
    [UNKNOWN, CONTROL, USER_DEFINED].contains(&kind)
}

/// A post-processor that adds the token `bos` with the index `id` before each text.
pub(super) fn bos_first(id: usize, bos: &str) -> Value {
    let token = json!({ "SpecialToken": { "id": bos, "type_id": 0 } });
    let text = |sequence: &str, kind: u8| json!({ "Sequence": { "id": sequence, "type_id": kind } });
    json!({
        "type": "TemplateProcessing",
        "single": [token, text("A", 0)],
        "pair": [token, text("A", 0), token, text("B", 1)],
        "special_tokens": { bos: { "id": bos, "ids": [id], "tokens": [bos] } },
    })
}

/// The two tokens of the merge with the index `at`.
pub(super) fn pair(at: usize, merge: &str) -> Result<[&str; 2], TextError> {
    match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => Ok([left, right]),
        _ => Err(refused(format!("the merge {at} does not have two tokens"))),
    }
}

impl Splitter {
    /// Whether a token comes before each text if the file does not say it, as in llama.cpp
    /// (`src/llama-vocab.cpp`).
    pub fn adds_bos(self) -> bool {
        ["llama-bpe", "tekken"].contains(&self.name)
    }

    fn pre_tokenizer(self) -> Value {
        let first = match (self.words, self.has_single_digits) {
            (Some(words), _) => {
                json!({ "type": "Split", "pattern": { "Regex": words }, "behavior": "Isolated", "invert": false })
            }
            (None, true) => json!({ "type": "Digits", "individual_digits": true }),
            (None, false) => return byte_level(true),
        };
        json!({ "type": "Sequence", "pretokenizers": [first, byte_level(self.words.is_none())] })
    }
}

fn byte_level(has_words: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": has_words })
}

pub(super) fn added_token(id: usize, content: &str, is_special: bool) -> Value {
    json!({
        "id": id,
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": is_special,
    })
}

pub(super) fn refused(reason: String) -> TextError {
    TextError::Tokenizer { reason }
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    /// `tests/golden/recording/gguf_files.py` recorded the expected pieces with transformers.
    #[test]
    fn each_splitter_gives_the_recorded_pieces_of_transformers() {
        let path = bursar_golden::path("gguf/pieces.json");
        let recorded: Value = serde_json::from_slice(&std::fs::read(path).expect("the file exists")).expect("JSON");
        let texts = recorded["texts"].as_array().expect("texts");
        for splitter in SPLITTERS {
            let lists = TokenLists { tokens: vec!["a"], kinds: vec![1], merges: Vec::new(), splitter, bos: None };
            let tokenizer =
                tokenizers::Tokenizer::from_bytes(lists.tokenizer_json().expect("the tokenizer JSON is built"))
                    .expect("the JSON is a tokenizer");
            for (text, pieces) in texts.iter().zip(recorded["pieces"][splitter.name].as_array().expect("pieces")) {
                let mut split = PreTokenizedString::from(text.as_str().expect("a text"));
                tokenizer
                    .get_pre_tokenizer()
                    .expect("the tokenizer has a pre-tokenizer")
                    .pre_tokenize(&mut split)
                    .expect("the text is split");
                let ours: Vec<_> = split
                    .get_splits(OffsetReferential::Original, OffsetType::Byte)
                    .into_iter()
                    .map(|piece| piece.0)
                    .collect();
                assert_eq!(json!(ours), *pieces, "{text} by {}", splitter.name);
            }
        }
    }
}
