//! The tokenizer: text to ids and back, with or without special tokens.

use std::sync::Arc;

use tokenizers::{Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer};

use super::error::TextError;
use super::special_guard::SpecialGuard;

/// A checkpoint's `tokenizer.json`. Cloning shares it.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    inner: tokenizers::Tokenizer,
    added: Vec<AddedToken>,
    guard: SpecialGuard,
    vocabulary_size: usize,
}

/// A token that is matched as a whole in text, before merges apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedToken {
    /// Its id.
    pub id: u32,
    /// The text that it matches.
    pub content: String,
    /// Whether it is a control token: users cannot write it, and decoding can skip it.
    pub special: bool,
}

impl Tokenizer {
    /// Parses a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn from_bytes(json: &[u8]) -> Result<Self, TextError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(json)
            .map_err(|error| TextError::Tokenizer { reason: error.to_string() })?;
        // Some files have padding and truncation from their training. Prompts need neither.
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
        let vocabulary_size = vocabulary_size(&inner);
        Ok(Tokenizer { shared: Arc::new(Shared { inner, added, guard, vocabulary_size }) })
    }

    /// Ids of `text`, in which names of special tokens become those tokens. Use it for text from this crate or the
    /// checkpoint. For users' text use [`encode_plain`](Self::encode_plain) or a
    /// [`PromptEncoder`](super::PromptEncoder).
    ///
    /// `add_special_tokens` also applies the file's post-processor (a leading bos, say).
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.shared.inner.encode_fast(text, add_special_tokens);
        encoding.map(|encoding| encoding.get_ids().to_vec()).map_err(|_| TextError::Encode { bytes: text.len() })
    }

    /// Ids of `text` without special tokens: names of added tokens are encoded like any other text.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        // The library's own steps (`TokenizerImpl::encode`) without the search for added tokens.
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

    /// One more than the largest id, added tokens included. A model's logits may be wider, because checkpoints pad
    /// them.
    pub fn vocabulary_size(&self) -> usize {
        self.shared.vocabulary_size
    }

    /// The id of a token by its text.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.shared.inner.token_to_id(token)
    }

    /// The text of a token as the vocabulary spells it (byte-level tokens look odd; see [`decode`](Self::decode)).
    pub fn token_of(&self, id: u32) -> Option<String> {
        self.shared.inner.id_to_token(id)
    }

    /// Added tokens, sorted by id: control tokens and a few text tokens.
    pub fn added_tokens(&self) -> &[AddedToken] {
        &self.shared.added
    }

    /// Whether this is a control token.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.added_tokens();
        added.binary_search_by_key(&id, |token| token.id).is_ok_and(|at| added[at].special)
    }

    /// The file's decoder, which defines how tokens spell text.
    pub(super) fn decoder(&self) -> Option<&tokenizers::DecoderWrapper> {
        self.shared.inner.get_decoder()
    }

    /// The guard that keeps users from writing special tokens.
    pub fn guard(&self) -> &SpecialGuard {
        &self.shared.guard
    }

    /// The text after the tokenizer's normalizer, which may turn a full-width letter into an ASCII one.
    pub(super) fn normalized(&self, text: &str) -> String {
        let mut normalized = NormalizedString::from(text);
        match self.shared.inner.get_normalizer().map(|normalizer| normalizer.normalize(&mut normalized)) {
            Some(Ok(())) => normalized.get().to_owned(),
            _ => text.to_owned(),
        }
    }
}

/// `get_vocab_size` would count tokens, but ids may have gaps, as in the demo's vocabulary or a pruned one.
fn vocabulary_size(inner: &tokenizers::Tokenizer) -> usize {
    inner.get_vocab(true).into_values().max().map_or(0, |largest| largest as usize + 1)
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Tokenizer({} tokens)", self.shared.vocabulary_size)
    }
}
