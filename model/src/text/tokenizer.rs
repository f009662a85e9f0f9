//! The tokenizer, which converts text to token ids and back, with or without special tokens.

use std::{
    borrow::Cow,
    collections::HashMap,
    ops::Range,
    sync::{Arc, OnceLock},
};

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer};

use super::error::TextError;
use super::seams::{PIECE_BYTES, Seams};
use super::special_guard::SpecialGuard;
use super::spelling::Spelling;

/// The tokenizer of a checkpoint's `tokenizer.json`. Cloning shares the data.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    inner: tokenizers::Tokenizer,
    added: Vec<AddedToken>,
    /// Finds the first added token in a text, and the longest if several tokens begin
    /// at the same position.
    finder: Option<AhoCorasick>,
    guard: SpecialGuard,
    vocabulary_size: usize,
    seams: Seams,
    spelling: OnceLock<Option<Spelling>>,
    /// The tokens that the post-processor adds before and after a text. `None` if they
    /// depend on the text.
    around: Option<(Vec<u32>, Vec<u32>)>,
}

/// A token that is matched as a whole in text, before merges apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedToken {
    pub id: u32,
    /// The text that the token matches.
    pub content: String,
    /// Whether the token is a control token, which users cannot write and decoding can skip.
    pub special: bool,
}

/// A token for a single byte of text.
#[derive(Clone, Copy)]
pub(super) struct ByteToken {
    pub value: u8,
    /// The id of `<0x41>`, the token for the byte of an ASCII letter.
    pub ascii: u32,
}

impl Tokenizer {
    /// Parses a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn from_bytes(json: &[u8]) -> Result<Self, TextError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(json)
            .map_err(|error| TextError::Tokenizer { reason: error.to_string() })?;
        // Some files contain padding and truncation settings from training. Prompts need neither.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| TextError::Tokenizer { reason: error.to_string() })?;
        let mut added: Vec<_> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| !token.content.is_empty())
            .map(|(id, token)| AddedToken { id, content: token.content, special: token.special })
            .collect();
        added.sort_by_key(|token| token.id);
        let guard = SpecialGuard::new(added.iter().filter(|token| token.special).map(|token| token.content.as_str()));
        let contents: Vec<&str> = added.iter().map(|token| token.content.as_str()).collect();
        let vocabulary = inner.get_vocab(true);
        let decoder = inner.get_added_tokens_decoder();
        let strips = decoder.values().map(|token| (token.content.as_str(), token.rstrip || token.single_word));
        let seams = Seams::of(&inner, &vocabulary, &strips.collect::<Vec<_>>());
        let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&contents).ok();
        let (vocabulary_size, around) = (size_of(&vocabulary), around(&inner));
        let shared = Shared { inner, added, finder, guard, vocabulary_size, seams, spelling: OnceLock::new(), around };
        Ok(Tokenizer { shared: Arc::new(shared) })
    }

    /// Ids of `text`. Names of special tokens are encoded as those tokens. Use this function for
    /// text from this crate or the checkpoint. For users' text, use
    /// [`encode_plain`](Self::encode_plain) or a [`PromptEncoder`](super::PromptEncoder).
    ///
    /// `add_special_tokens` also applies the file's post-processor, which may add a leading `bos`
    /// token.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.encode_up_to(text, add_special_tokens, usize::MAX)
    }

    /// Same as [`encode`](Self::encode), but stops soon after `tokens_max` tokens. Time and memory
    /// do not depend on the rest of the text, unless the tokens that the post-processor adds depend
    /// on the text. The whole text is then encoded. Long texts are encoded in pieces, which
    /// together have the same tokens as the whole text. There are two exceptions, in which a word
    /// may be split between two pieces: 64 KiB of text have no blank or punctuation mark after a
    /// word, or a text is longer than 1 MiB and no safe place to split is known for the tokenizer.
    /// An added token is never split.
    ///
    /// # Errors
    /// [`TextError::TooManyTokens`] and [`TextError::Encode`].
    pub fn encode_up_to(&self, text: &str, add_special_tokens: bool, tokens_max: usize) -> Result<Vec<u32>, TextError> {
        let whole = |text: &str, with_special: bool| {
            let encoding = self.shared.inner.encode_fast(text, with_special);
            encoding.map(|encoding| encoding.get_ids().to_vec()).map_err(|_| TextError::Encode { bytes: text.len() })
        };
        let one = |ids: Vec<u32>| {
            if ids.len() > tokens_max { Err(TextError::TooManyTokens { limit: tokens_max }) } else { Ok(ids) }
        };
        if text.len() <= PIECE_BYTES {
            return one(whole(text, add_special_tokens)?);
        }
        match &self.shared.around {
            Some((before, after)) if add_special_tokens => {
                let tokens_max_between = tokens_max.saturating_sub(before.len() + after.len());
                let between = self.in_pieces(text, tokens_max_between, |piece| whole(piece, false));
                Ok([before, &between.map_err(|error| error.up_to(tokens_max))?[..], after].concat())
            }
            None if add_special_tokens => one(whole(text, true)?),
            _ => self.in_pieces(text, tokens_max, |piece| whole(piece, false)),
        }
    }

    /// Encodes the pieces of `text` until there are more than `tokens_max` tokens.
    fn in_pieces(
        &self,
        text: &str,
        tokens_max: usize,
        encode: impl Fn(&str) -> Result<Vec<u32>, TextError>,
    ) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        for piece in self.shared.seams.pieces(text, PIECE_BYTES, |at, text| self.before_added(at, text)) {
            ids.extend(encode(piece)?);
            if ids.len() > tokens_max {
                return Err(TextError::TooManyTokens { limit: tokens_max });
            }
        }
        Ok(ids)
    }

    /// Ids of `text` without special tokens: names of added tokens are encoded like any other text.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_plain_up_to(text, usize::MAX)
    }

    /// Same as [`encode_plain`](Self::encode_plain), with the limit of
    /// [`encode_up_to`](Self::encode_up_to).
    ///
    /// # Errors
    /// [`TextError::TooManyTokens`] and [`TextError::Encode`].
    pub fn encode_plain_up_to(&self, text: &str, tokens_max: usize) -> Result<Vec<u32>, TextError> {
        self.in_pieces(text, tokens_max, |piece| self.plain_ids(piece))
    }

    fn plain_ids(&self, text: &str) -> Result<Vec<u32>, TextError> {
        // The steps of the tokenizers library (`TokenizerImpl::encode`), without the
        // search for added tokens.
        let inner = &self.shared.inner;
        let encode = || -> tokenizers::Result<Vec<u32>> {
            let mut normalized = NormalizedString::from(text);
            if let Some(normalizer) = inner.get_normalizer() {
                normalizer.normalize(&mut normalized)?;
            }
            let mut split = PreTokenizedString::from(normalized);
            if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut split)?;
            }
            split.tokenize(|piece| inner.get_model().tokenize(piece.get()))?;
            Ok(split.into_encoding(None, 0, OffsetType::Byte)?.get_ids().to_vec())
        };
        encode().map_err(|_| TextError::Encode { bytes: text.len() })
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Decode`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        self.shared.inner.decode(ids, skip_special_tokens).map_err(|_| TextError::Decode { tokens: ids.len() })
    }

    /// One more than the largest id, including added tokens. A model may have more logits,
    /// because checkpoints pad them.
    pub fn vocabulary_size(&self) -> usize {
        self.shared.vocabulary_size
    }

    /// The id of a token by its text.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.shared.inner.token_to_id(token)
    }

    /// The text of a token in the vocabulary's spelling. Byte-level tokens are not readable in
    /// this spelling; see [`decode`](Self::decode).
    pub fn token_of(&self, id: u32) -> Option<String> {
        self.shared.inner.id_to_token(id)
    }

    /// The bytes of text that a token represents, which may be part of a character. `None` if the
    /// token is unknown, or if [`Spelling`] does not support this kind of tokenizer.
    pub fn bytes_of(&self, id: u32) -> Option<Vec<u8>> {
        let spelling = self.shared.spelling.get_or_init(|| self.spelling().ok()).as_ref()?;
        let added = self.added_tokens();
        match added.binary_search_by_key(&id, |token| token.id) {
            Ok(at) => Some(added[at].content.as_bytes().to_vec()),
            Err(_) => Some(spelling.bytes(&self.token_of(id)?)),
        }
    }

    /// The byte that a token represents, if the decoder joins the bytes of consecutive tokens to
    /// characters and this is such a token (`<0xE4>`). `None` for the tokens of a byte-level
    /// vocabulary, which are decoded as they are.
    pub(super) fn byte_token(&self, id: u32) -> Option<ByteToken> {
        let spelling = self.shared.spelling.get_or_init(|| self.spelling().ok()).as_ref()?;
        let Spelling::Plain { bytes: true, .. } = spelling else { return None };
        let value = spelling.byte_of_token(&self.token_of(id)?)?;
        Some(ByteToken { value, ascii: self.id_of("<0x41>")? })
    }

    /// The added tokens, sorted by id: control tokens and a few text tokens.
    pub fn added_tokens(&self) -> &[AddedToken] {
        &self.shared.added
    }

    pub fn is_special(&self, id: u32) -> bool {
        let added = self.added_tokens();
        added.binary_search_by_key(&id, |token| token.id).is_ok_and(|at| added[at].special)
    }

    /// The way in which the vocabulary spells text, which the file's decoder defines.
    ///
    /// # Errors
    /// See [`Spelling::of`].
    pub fn spelling(&self) -> Result<Spelling, TextError> {
        Spelling::of(self.shared.inner.get_decoder())
    }

    /// The guard that keeps users from writing special tokens.
    pub fn guard(&self) -> &SpecialGuard {
        &self.shared.guard
    }

    /// The result of the tokenizer's normalizer, which may turn a full-width letter
    /// into an ASCII letter.
    pub(super) fn normalized<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let Some(normalizer) = self.shared.inner.get_normalizer() else { return Cow::Borrowed(text) };
        let mut whole = String::with_capacity(text.len());
        for piece in self.shared.seams.pieces(text, PIECE_BYTES, |at, text| self.before_added(at, text)) {
            let mut normalized = NormalizedString::from(piece);
            match normalizer.normalize(&mut normalized) {
                Ok(()) => whole.push_str(normalized.get()),
                Err(_) => whole.push_str(piece),
            }
        }
        Cow::Owned(whole)
    }

    /// Returns `at`, or the start of the added token that a cut at `at` would split.
    fn before_added(&self, at: usize, text: &str) -> usize {
        let longest = self.shared.added.iter().map(|token| token.content.len()).max().unwrap_or_default();
        let boundary = |at: usize| (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default();
        let (from, to) = (boundary(at.saturating_sub(longest)), boundary((at + longest).min(text.len())));
        let mut from = from;
        while let Some((place, _)) = self.first_added(&text[from..to]) {
            if from + place.start >= at {
                break;
            }
            if from + place.end > at {
                return from + place.start;
            }
            from += place.end;
        }
        at
    }

    /// The byte range and id of the first added token in `text`. If several tokens begin at the
    /// same position, returns the longest.
    pub(super) fn first_added(&self, text: &str) -> Option<(Range<usize>, u32)> {
        let found = self.shared.finder.as_ref()?.find(text)?;
        Some((found.range(), self.shared.added[found.pattern()].id))
    }
}

/// One more than the largest id. `get_vocab_size` counts tokens, but ids may have gaps, as in the
/// demo's vocabulary or a pruned vocabulary.
fn size_of(vocabulary: &HashMap<String, u32>) -> usize {
    vocabulary.values().max().map_or(0, |largest| *largest as usize + 1)
}

/// The tokens that the post-processor adds before and after a text. `None` if they
/// depend on the text.
fn around(inner: &tokenizers::Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let ids = |text: &str, with_special: bool| Some(inner.encode_fast(text, with_special).ok()?.get_ids().to_vec());
    let place = |text: &str| {
        let (alone, between) = (ids(text, false)?, ids(text, true)?);
        let at = between.windows(alone.len().max(1)).position(|window| window == alone)?;
        Some((between[..at].to_vec(), between[at + alone.len()..].to_vec()))
    };
    place("one").filter(|one| place("a b").as_ref() == Some(one))
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Tokenizer({} tokens)", self.shared.vocabulary_size)
    }
}
