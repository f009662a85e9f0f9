//! The past of a sequence: the tokens before the token to choose.

use bursar_kernels::UnseenToken;

/// The tokens before the token to choose, or only their number. Tokens are copied only for samplers
/// that read them; see [`Sampler::reads_past`](super::Sampler::reads_past).
#[derive(Clone, Copy, Debug)]
pub struct Past<'a> {
    position: u64,
    tokens: Option<Tokens<'a>>,
}

#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub(super) prompt: &'a [u32],
    pub(super) produced: &'a [u32],
    pub(super) unseen: Option<UnseenToken>,
}

impl<'a> Past<'a> {
    /// The prompt, and the tokens produced so far, including tokens from before a restart. Instead
    /// of the whole prompt, the part that the sampler [reads](super::Sampler::read_of) is enough.
    pub fn new(prompt: &'a [u32], produced: &'a [u32]) -> Self {
        Past { position: produced.len() as u64, tokens: Some(Tokens { prompt, produced, unseen: None }) }
    }

    /// The same past with one more token, which the host has not seen. Only the device can choose
    /// the token after it.
    #[must_use]
    pub fn then(self, unseen: UnseenToken) -> Self {
        let tokens = self.tokens.map(|tokens| Tokens { unseen: Some(unseen), ..tokens });
        Past { position: self.position + 1, tokens }
    }

    /// A past with only the number of tokens produced so far.
    pub fn at(position: u64) -> Self {
        Past { position, tokens: None }
    }

    /// The number of tokens produced so far. The seed and this position determine every random
    /// choice.
    pub fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn tokens(&self) -> Option<Tokens<'a>> {
        self.tokens
    }
}

/// Shows counts, never the tokens, which are the user's text.
impl std::fmt::Debug for Tokens<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} prompt tokens, {} produced", self.prompt.len(), self.produced.len())
    }
}
