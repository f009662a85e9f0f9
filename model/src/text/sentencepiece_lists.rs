//! A SentencePiece tokenizer built from the contents of a GGUF file: a list of pieces with their
//! kinds, and either their scores or a list of merges.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::error::TextError;
use super::token_lists::{USER_DEFINED, added_token, bos_first, is_added, is_padding, pair, refused};

/// SentencePiece's spelling of a space.
const SPACE: char = '▁';
/// An ordinary piece, by llama.cpp's number (`include/llama.h`, `llama_token_type`).
const NORMAL: i64 = 1;

/// Limits that keep a damaged file from using all memory. Pieces of released vocabularies have at most
/// tens of characters.
const PIECE_BYTES_MAX: usize = 256;
const MERGE_BYTES_MAX: usize = 64 << 20;

/// Special tokens of Gemma 4 that llama.cpp declares as text, because its chat parser reads them in
/// the text of replies (`conversion/gemma.py`, `visible_tokens`).
const SPECIAL_OF_GEMMA4: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

/// The order in which pieces are merged.
pub enum MergeOrder<'f> {
    /// Pairs of pieces with a space between the two, in the order of the merges.
    Listed(Vec<&'f str>),
    /// Two adjacent pieces are merged if the result is a piece, the piece with the highest score
    /// first.
    Scores(Vec<f64>),
}

/// The pieces of a vocabulary. A piece's id is its index.
pub struct SentencePieceLists<'f> {
    /// The pieces, in which spaces may be written as `▁`.
    pub pieces: Vec<&'f str>,
    pub kinds: Vec<i64>,
    pub order: MergeOrder<'f>,
    /// The index of the piece for text that has no other piece.
    pub unknown: usize,
    /// The index of the piece before each text.
    pub bos: Option<usize>,
    /// The indices of pieces that are special whatever their kind.
    pub special: BTreeSet<usize>,
}

impl SentencePieceLists<'_> {
    /// Builds the `tokenizer.json`, in the form that transformers gives to Gemma's tokenizers
    /// (5.17, `convert_slow_tokenizer.py`, `GemmaConverter`).
    ///
    /// # Errors
    /// [`TextError::Tokenizer`]: lists of different lengths, a piece that occurs twice, or a merge that
    /// is not a pair of pieces.
    ///
    /// # Panics
    /// If `unknown` or `bos` is outside the list.
    pub fn tokenizer_json(&self) -> Result<Vec<u8>, TextError> {
        let (count, kinds) = (self.pieces.len(), self.kinds.len());
        if count != kinds {
            return Err(refused(format!("there are {count} tokens, but {kinds} of them have a kind")));
        }
        let (mut vocabulary, mut added) = (BTreeMap::new(), Vec::new());
        for (id, (text, kind)) in self.pieces.iter().zip(&self.kinds).enumerate() {
            if is_padding(id, text, *kind) {
                continue;
            }
            if vocabulary.insert(spelled(text), id).is_some() {
                return Err(refused(format!("the token {id} occurs earlier with another id")));
            }
            // A run of spaces is a piece of the text around it, because the normalizer spells spaces
            // before the text is searched for pieces.
            let is_special = self.special.contains(&id);
            if is_special || is_added(*kind) && text.chars().any(|letter| letter != ' ' && letter != SPACE) {
                let is_text = *kind == USER_DEFINED && !SPECIAL_OF_GEMMA4.contains(text);
                added.push(added_token(id, text, is_special || !is_text));
            }
        }
        let merges = match &self.order {
            MergeOrder::Listed(merges) => {
                merges.iter().enumerate().map(|(at, merge)| pair(at, merge)).collect::<Result<Vec<_>, _>>()?
            }
            MergeOrder::Scores(scores) if scores.len() == count => self.merges_by_score(scores, &vocabulary)?,
            MergeOrder::Scores(scores) => {
                return Err(refused(format!("there are {count} tokens, but {} of them have a score", scores.len())));
            }
        };
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": SPACE },
            "pre_tokenizer": {
                "type": "Split",
                "pattern": { "String": " " },
                "behavior": "MergedWithPrevious",
                "invert": false,
            },
            "post_processor": self.bos.map(|bos| bos_first(bos, self.pieces[bos])),
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    { "type": "Replace", "pattern": { "String": SPACE }, "content": " " },
                    { "type": "ByteFallback" },
                    { "type": "Fuse" },
                ],
            },
            "model": {
                "type": "BPE",
                "unk_token": self.pieces[self.unknown],
                "fuse_unk": true,
                "byte_fallback": true,
                "vocab": vocabulary.iter().map(|(text, id)| (text.clone(), (*id).into())).collect::<Map<_, Value>>(),
                "merges": merges,
            },
        });
        Ok(tokenizer.to_string().into_bytes())
    }

    /// All pairs of pieces whose concatenation is a piece, ordered by the score of that piece.
    /// User-defined pieces come first, because SentencePiece never splits them. Of the ways to split
    /// a piece, the one with the longest beginning comes first, as in transformers
    /// (`generate_merges`).
    ///
    /// # Errors
    /// A piece is longer than [`PIECE_BYTES_MAX`], or the pairs have more than [`MERGE_BYTES_MAX`].
    fn merges_by_score<'v>(
        &self,
        scores: &[f64],
        vocabulary: &'v BTreeMap<String, usize>,
    ) -> Result<Vec<[&'v str; 2]>, TextError> {
        let (mut merges, mut bytes) = (Vec::new(), 0);
        for (piece, &id) in vocabulary {
            let score = match self.kinds[id] {
                NORMAL => scores[id],
                USER_DEFINED => f64::INFINITY,
                _ => continue,
            };
            if piece.len() > PIECE_BYTES_MAX {
                let found = piece.len();
                return Err(refused(format!("the token {id} has {found} bytes; the limit is {PIECE_BYTES_MAX}")));
            }
            let letters = piece.chars().count();
            for (before, (at, _)) in piece.char_indices().enumerate().skip(1) {
                let (left, right) = piece.split_at(at);
                if vocabulary.contains_key(left) && vocabulary.contains_key(right) {
                    merges.push((score, before, letters - before, id, [left, right]));
                    bytes += piece.len();
                }
            }
            if bytes > MERGE_BYTES_MAX {
                return Err(refused(format!("the merges have more than {MERGE_BYTES_MAX} bytes")));
            }
        }
        merges.sort_by(|one, other| {
            let by_score = other.0.total_cmp(&one.0);
            by_score.then((other.1, other.2).cmp(&(one.1, one.2))).then(one.3.cmp(&other.3))
        });
        Ok(merges.into_iter().map(|(.., pair)| pair).collect())
    }
}

/// A piece as it is spelled in the vocabulary.
fn spelled(piece: &str) -> String {
    piece.replace(' ', &SPACE.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use tokenizers::Tokenizer;

    use super::*;

    const CONTROL: i64 = 3;

    static LONG: LazyLock<String> = LazyLock::new(|| "a".repeat(257));

    fn tokenizer(pieces: &[(&'static str, i64, f64)]) -> Tokenizer {
        let lists = SentencePieceLists {
            pieces: pieces.iter().map(|(piece, ..)| *piece).collect(),
            kinds: pieces.iter().map(|(_, kind, _)| *kind).collect(),
            order: MergeOrder::Scores(pieces.iter().map(|(.., score)| *score).collect()),
            unknown: 0,
            bos: None,
            special: [].into(),
        };
        Tokenizer::from_bytes(lists.tokenizer_json().expect("the JSON is built")).expect("the JSON is a tokenizer")
    }

    fn texts(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        tokenizer.encode(text, false).expect("the text encodes").get_tokens().to_vec()
    }

    #[test]
    fn the_piece_with_the_highest_score_is_merged_first() {
        let letters = ["<unk>", "a", "b", "c"].map(|letter| (letter, NORMAL, -9.0));
        let by_scores = |of_ab, of_bc| {
            texts(&tokenizer(&[&letters[..], &[("ab", NORMAL, of_ab), ("bc", NORMAL, of_bc)]].concat()), "abc")
        };
        assert_eq!(by_scores(-1.0, -2.0), ["ab", "c"]);
        assert_eq!(by_scores(-2.0, -1.0), ["a", "bc"]);
    }

    #[test]
    fn user_defined_pieces_are_never_split() {
        let pieces = [
            ("<unk>", 2, 0.0),
            ("▁", NORMAL, -1.0),
            ("a", NORMAL, -1.0),
            ("▁a", NORMAL, -1.0),
            // llama.cpp writes user-defined runs of spaces as spaces.
            ("  ", USER_DEFINED, -1000.0),
            ("   ", USER_DEFINED, -1000.0),
            ("\n", NORMAL, -1.0),
            ("\n\n", USER_DEFINED, -1000.0),
            ("<end>", CONTROL, -1000.0),
            ("<|channel>", USER_DEFINED, -1000.0),
        ];
        let tokenizer = tokenizer(&pieces);
        assert_eq!(texts(&tokenizer, "a  a   a a"), ["a", "▁▁", "a", "▁▁▁", "a", "▁a"]);
        assert_eq!(texts(&tokenizer, "\n\n\n<end>"), ["\n\n", "\n", "<end>"]);
        let shown = |id: u32| tokenizer.decode(&[2, id, 2], true).expect("the ids decode");
        assert_eq!((shown(8), shown(9), shown(7)), ("aa".to_owned(), "aa".to_owned(), "a\n\na".to_owned()));
    }

    #[test]
    fn merges_with_too_many_bytes_are_refused() {
        let text = "a".repeat(PIECE_BYTES_MAX);
        let texts: Vec<_> = (0..16).flat_map(|first| (1..=PIECE_BYTES_MAX).map(move |end| (first, end))).collect();
        let texts: Vec<_> = texts
            .into_iter()
            .map(|(first, end)| text[..end].replacen('a', &"abcdefghijklmnop"[first..first + 1], 1))
            .collect();
        let pieces: Vec<_> = texts.iter().map(String::as_str).collect();
        let count = pieces.len();
        let order = MergeOrder::Scores(vec![0.0; count]);
        let lists =
            SentencePieceLists { pieces, kinds: vec![NORMAL; count], order, unknown: 0, bos: None, special: [].into() };
        let error = lists.tokenizer_json().expect_err("the merges have many bytes").to_string();
        assert!(error.contains("the merges have more than 67108864 bytes"), "{error}");
    }

    #[test]
    fn lists_that_disagree_are_refused() {
        let lists = |kinds: Vec<i64>, scores: Vec<f64>, pieces: [&'static str; 2]| SentencePieceLists {
            pieces: pieces.to_vec(),
            kinds,
            order: MergeOrder::Scores(scores),
            unknown: 0,
            bos: None,
            special: [].into(),
        };
        for (lists, expected) in [
            (lists(vec![1], vec![0.0; 2], ["a", "b"]), "2 tokens, but 1 of them have a kind"),
            (lists(vec![1; 2], vec![0.0; 3], ["a", "b"]), "2 tokens, but 3 of them have a score"),
            (lists(vec![1; 2], vec![0.0; 2], [" ", "▁"]), "the token 1 occurs earlier"),
            (lists(vec![1; 2], vec![0.0; 2], ["a", &LONG]), "the token 1 has 257 bytes; the limit is 256"),
        ] {
            let error = lists.tokenizer_json().expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
