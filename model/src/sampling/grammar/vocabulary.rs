//! The vocabulary as grammars see it: a trie of the bytes that tokens stand for.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use super::error::GrammarError;
use crate::text::{Spelling, Tokenizer};

/// Bytes of all tokens: the trie addresses 2^22 nodes, of which it has at most one a byte.
const BYTES_MAX: usize = (1 << 22) - 1;
/// Bytes of a token: the trie counts up to 1,024 on the way back. A longer one can be spelled by others.
const TOKEN_BYTES_MAX: usize = 1000;
/// Ids: the trie has 24 bits for one, the largest of which means none.
const TOKENS_MAX: usize = (1 << 24) - 1;

/// Tokens that are text, by their bytes, and those that end a reply.
pub(super) struct Vocabulary {
    /// For the parser.
    pub(super) tokens: TokEnv,
    /// Text and ends: nothing else is ever allowed.
    pub(super) allowed: SimpleVob, // [logits]
    /// End tokens.
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
        // "Approximate": forced text is not cut into tokens for the model, which chooses among all ways to spell it.
        Ok(Vocabulary { tokens: Arc::new(ApproximateTokEnv::new(trie)), allowed, ends })
    }
}

/// What each id stands for: nothing for special tokens, end tokens and ids without a token, which no text can contain.
fn words(tokenizer: &Tokenizer, logits: usize, end_tokens: &[u32]) -> Result<Vec<Vec<u8>>, GrammarError> {
    let spelling = Spelling::of(tokenizer).map_err(|_| GrammarError::Spelling)?;
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
