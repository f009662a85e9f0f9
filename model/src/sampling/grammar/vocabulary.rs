//! The vocabulary for grammars: a trie of the tokens' bytes.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use super::error::GrammarError;
use crate::text::Tokenizer;

/// Maximum bytes of all tokens: the trie can address 2^22 nodes and has at most one node per byte.
const BYTES_MAX: usize = (1 << 22) - 1;
/// Maximum bytes of a token: the trie steps back at most 1,024 levels. Longer tokens are left out,
/// because shorter tokens can spell the same text.
const TOKEN_BYTES_MAX: usize = 1000;
/// Maximum number of ids: the trie has 24 bits for an id, and the largest value means "no token".
const TOKENS_MAX: usize = (1 << 24) - 1;

/// The text tokens with their bytes, and the end tokens.
pub(super) struct Vocabulary {
    pub(super) tokens: TokEnv,
    /// Text tokens and end tokens. All other tokens are always forbidden.
    pub(super) allowed: SimpleVob, // [logits]
    pub(super) ends: SimpleVob, // [logits]
}

impl Vocabulary {
    /// # Errors
    /// [`GrammarError::Spelling`], [`GrammarError::Vocabulary`], [`GrammarError::NoEndToken`].
    pub(super) fn new(tokenizer: &Tokenizer, logits: usize, end_tokens: &[u32]) -> Result<Self, GrammarError> {
        let end_tokens: Vec<u32> = end_tokens.iter().copied().filter(|&id| (id as usize) < logits).collect();
        let &[first_end, ..] = &*end_tokens else { return Err(GrammarError::NoEndToken) };
        let words = words(tokenizer, logits, &end_tokens)?;
        let bytes = words.iter().map(Vec::len).sum();
        if bytes > BYTES_MAX || logits > TOKENS_MAX {
            return Err(GrammarError::Vocabulary { tokens: logits, bytes, bytes_max: BYTES_MAX });
        }
        let trie = TokTrie::from(&TokRxInfo::new(logits as u32, first_end), &words).with_eos_tokens(&end_tokens);
        let ends = trie.eos_token_set();
        let mut allowed = ends.clone();
        let text = words.iter().zip(0u32..).filter(|(word, _)| !word.is_empty());
        text.for_each(|(_, id)| allowed.allow_token(id));
        // "Approximate" means that llguidance does not choose the tokens of forced text. The model
        // chooses among all ways to spell the text.
        Ok(Vocabulary { tokens: Arc::new(ApproximateTokEnv::new(trie)), allowed, ends })
    }
}

/// The bytes of each id: empty for special tokens, end tokens, ids without a token, and
/// tokens over 1,000 bytes.
fn words(tokenizer: &Tokenizer, logits: usize, end_tokens: &[u32]) -> Result<Vec<Vec<u8>>, GrammarError> {
    let spelling = tokenizer.spelling().map_err(|_| GrammarError::Spelling)?;
    let spell = |id| tokenizer.token_of(id).map(|token| spelling.bytes(&token)).unwrap_or_default();
    let mut words: Vec<Vec<u8>> = (0..logits as u32).map(spell).collect();
    let special = tokenizer.added_tokens().iter().filter(|token| token.special).map(|token| token.id);
    for id in special.chain(end_tokens.iter().copied()) {
        if let Some(word) = words.get_mut(id as usize) {
            word.clear();
        }
    }
    words.iter_mut().filter(|word| word.len() > TOKEN_BYTES_MAX).for_each(Vec::clear);
    Ok(words)
}
