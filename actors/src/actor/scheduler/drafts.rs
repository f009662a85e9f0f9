//! Pure: draft tokens for speculative decoding. Prompt lookup (Saxena 2023), vLLM's `ngram` method,
//! drafts the tokens that followed the same tokens earlier in the sequence. Replies that quote
//! their prompt, such as summaries and edited code, repeat long parts of it.

use std::fmt;

/// Maximum number of earlier occurrences that one lookup compares.
const COMPARED_MAX: usize = 32;

/// Maximum size of the index's hash table, in entries of 4 bytes.
const HEADS_MAX: usize = 1 << 17;

/// Maximum number of steps for which drafts are withheld after a rejection.
const WITHHELD_MAX: u32 = 64;

/// Length, in tokens, of the n-gram at the end of a sequence. Drafts require an earlier occurrence
/// of this n-gram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramSizes {
    /// Tokens of the shortest n-gram that is looked up; at least 1.
    pub min: usize,
    /// Tokens of the longest n-gram that is looked up; at least `min`.
    pub max: usize,
}

impl Default for NgramSizes {
    /// The defaults of vLLM's `prompt_lookup_min` and `prompt_lookup_max`.
    fn default() -> Self {
        NgramSizes { min: 5, max: 5 }
    }
}

/// How tokens are drafted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftSource {
    /// Prompt lookup: the tokens that followed an earlier occurrence of the last tokens.
    PromptLookup(NgramSizes),
    /// The draft head of the model (multi-token prediction), as in Qwen3.5.
    DraftHead,
}

impl Default for DraftSource {
    fn default() -> Self {
        DraftSource::PromptLookup(NgramSizes::default())
    }
}

/// The drafter of one sequence.
#[derive(Clone, Debug)]
pub enum Drafter {
    None,
    PromptLookup(PromptLookup),
    /// Each step of the sequence also proposes drafts.
    DraftHead,
}

/// An index of the n-grams of a sequence: hash chains, as in zlib's `deflate`. The cost of a token
/// does not depend on the length of the sequence.
#[derive(Clone)]
pub struct PromptLookup {
    sizes: NgramSizes,
    /// `[power of two]`: for each hash, the end of the latest n-gram of `sizes.min` tokens, or 0.
    heads: Vec<u32>,
    /// Indexed by the end of an n-gram: the end of the latest earlier n-gram with the same hash, or
    /// 0.
    before: Vec<u32>,
}

impl PromptLookup {
    /// An empty index for a sequence of about `tokens` tokens. In a longer sequence, more n-grams
    /// share an entry, so some occurrences are missed.
    ///
    /// # Panics
    /// If `sizes.min` is 0 or exceeds `sizes.max`.
    pub fn new(sizes: NgramSizes, tokens: usize) -> Self {
        assert!((1..=sizes.max).contains(&sizes.min), "{sizes:?}");
        let heads = tokens.clamp(1, HEADS_MAX).next_power_of_two();
        PromptLookup { sizes, heads: vec![0; heads], before: vec![0] }
    }

    /// Adds the n-grams of `tokens` that are not in the index yet. `tokens` continues the tokens of
    /// earlier calls.
    pub fn extend(&mut self, tokens: &[u32]) {
        for end in self.before.len()..=tokens.len() {
            let Some(first) = end.checked_sub(self.sizes.min) else {
                self.before.push(0);
                continue;
            };
            let head = hash(&tokens[first..end]) & (self.heads.len() - 1);
            self.before.push(std::mem::replace(&mut self.heads[head], end as u32));
        }
    }

    /// Drafts up to `count` tokens: the tokens that followed the latest earlier occurrence of the
    /// longest n-gram at the end of `tokens` that occurred before. Empty if no n-gram of
    /// `sizes.min` tokens occurred before. At most `COMPARED_MAX` earlier occurrences are compared.
    /// The draft ends before the first token at whose index `may_draft` returns `false`. All of
    /// `tokens` must be in the index.
    pub fn draft(&self, tokens: &[u32], count: usize, may_draft: impl Fn(usize) -> bool) -> Vec<u32> {
        assert_eq!(self.before.len(), tokens.len() + 1, "the index covers all tokens");
        let (mut longest, mut from) = (self.sizes.min - 1, 0);
        let mut end = self.before[tokens.len()] as usize;
        for _ in 0..COMPARED_MAX {
            if end == 0 || longest == self.sizes.max {
                break;
            }
            let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
            let equal = pairs.take(self.sizes.max).take_while(|(earlier, last)| earlier == last).count();
            if equal > longest {
                (longest, from) = (equal, end);
            }
            end = self.before[end] as usize;
        }
        let mut drafts = Vec::new();
        if longest < self.sizes.min {
            return drafts;
        }
        // If the n-gram overlaps its continuation, the draft repeats itself.
        while drafts.len() < count && may_draft(from + drafts.len()) {
            let next = from + drafts.len();
            drafts.push(if next < tokens.len() { tokens[next] } else { drafts[next - tokens.len()] });
        }
        drafts
    }
}

/// Prints sizes, never tokens or their hashes.
impl fmt::Debug for PromptLookup {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "PromptLookup({:?}, {} tokens)", self.sizes, self.before.len() - 1)
    }
}

/// FNV-1a over words, with the high half folded in, because the index takes the low bits.
fn hash(tokens: &[u32]) -> usize {
    let mixed = tokens
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, token| (hash ^ u64::from(*token)).wrapping_mul(0x0000_0100_0000_01b3));
    (mixed ^ mixed >> 32) as usize
}

/// Drafted tokens that steps have verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifiedDrafts {
    /// Number of drafted tokens that were verified, accepted or not.
    pub drafted: usize,
    /// Accepted tokens, by their position among the drafts of a step.
    pub accepted: Vec<usize>,
}

impl VerifiedDrafts {
    pub(super) fn count(&mut self, drafted: usize, accepted: usize) {
        self.drafted += drafted;
        self.accepted.resize(self.accepted.len().max(accepted), 0);
        self.accepted[..accepted].iter_mut().for_each(|count| *count += 1);
    }
}

/// Withholds drafts while they are rejected. A step with drafts cannot be planned ahead, so drafts
/// that are never accepted cost time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Backoff {
    /// Number of consecutive steps whose drafts may all be rejected before drafts are paused.
    tolerated: u32,
    /// Number of steps in a row in which every draft was rejected.
    rejections: u32,
    /// Steps for which drafts are still withheld.
    withheld: u32,
}

impl Backoff {
    /// Backoff for the drafts of a draft head. Their rejections say little about the next draft.
    pub(super) fn of_draft_head() -> Self {
        Backoff { tolerated: 3, ..Backoff::default() }
    }

    /// Backoff without effect, for a fixed number of drafts.
    pub(super) fn never() -> Self {
        Backoff { tolerated: u32::MAX, ..Backoff::default() }
    }

    /// Whether the drafts after the running step are withheld.
    pub(super) fn withholds_next(&self) -> bool {
        self.withheld > 1
    }

    /// Whether the next step may have drafts. `verified` is the number of drafts that the last step
    /// verified, and the number that it accepted. The first `tolerated` steps in a row without an
    /// accepted draft have no effect. The next such step pauses drafts for one step, and each
    /// further one doubles the pause, up to [`WITHHELD_MAX`] steps.
    pub(super) fn allows(&mut self, verified: Option<(usize, usize)>) -> bool {
        match verified {
            Some((_, 0)) => {
                if let Some(doublings) = self.rejections.checked_sub(self.tolerated) {
                    self.withheld = (1 << doublings.min(31)).min(WITHHELD_MAX);
                }
                self.rejections += 1;
            }
            Some(_) => self.rejections = 0,
            None => self.withheld = self.withheld.saturating_sub(1),
        }
        self.withheld == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn indexed(tokens: &[u32], min: usize, max: usize) -> PromptLookup {
        let mut lookup = PromptLookup::new(NgramSizes { min, max }, tokens.len());
        lookup.extend(tokens);
        lookup
    }

    fn draft(tokens: &[u32], min: usize, max: usize, count: usize) -> Vec<u32> {
        indexed(tokens, min, max).draft(tokens, count, |_| true)
    }

    #[test]
    fn a_draft_follows_the_longest_and_then_the_latest_match() {
        let tokens = [1, 2, 3, 50, 9, 3, 60, 8, 3, 70, 1, 2, 3];
        assert_eq!(draft(&tokens, 1, 1, 2), [70, 1], "the latest of several equally long matches is used");
        assert_eq!(draft(&tokens, 1, 3, 2), [50, 9], "a match of three tokens is preferred to a match of one");
        assert_eq!(draft(&tokens, 3, 3, 9), [50, 9, 3, 60, 8, 3, 70, 1, 2]);
        assert_eq!((draft(&tokens, 4, 5, 2), draft(&tokens[..2], 1, 5, 2)), (vec![], vec![]));
        assert_eq!(draft(&[5, 6, 5, 6, 5], 2, 3, 5), [6, 5, 6, 5, 6], "a repetition continues");
    }

    #[test]
    fn a_draft_ends_before_a_forbidden_token() {
        let tokens = [1, 2, 3, 4, 9, 1];
        let lookup = indexed(&tokens, 1, 3);
        assert_eq!(lookup.draft(&tokens, 4, |token| token != 3), [2, 3]);
        assert_eq!(lookup.draft(&tokens, 4, |token| token != 1), [0; 0]);
    }

    #[test]
    fn a_long_sequence_costs_a_bounded_number_of_comparisons() {
        // Every n-gram occurred about 50,000 times before. A search that compared each occurrence
        // would exceed the time limit.
        let tokens: Vec<u32> = (0..100_000).map(|at| at % 2).collect();
        let began = std::time::Instant::now();
        let lookup = indexed(&tokens, 5, 1000);
        for _ in 0..1000 {
            assert_eq!(lookup.draft(&tokens, 4, |_| true), [0, 1, 0, 1]);
        }
        assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    }

    #[test]
    fn rejected_drafts_pause_drafting_for_doubling_intervals() {
        let mut backoff = Backoff::default();
        assert!(backoff.allows(None) && backoff.allows(Some((4, 1))));
        for withheld in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert!(!backoff.allows(Some((4, 0))));
            let waits = (1..=200).find(|_| backoff.allows(None));
            assert_eq!(waits, Some(withheld));
        }
        assert!(backoff.allows(Some((4, 2))) && !backoff.allows(Some((4, 0))) && backoff.allows(None));
        let mut backoff = Backoff::of_draft_head();
        let allowed: Vec<_> = (0..5).map(|_| backoff.allows(Some((1, 0)))).collect();
        assert_eq!(allowed, [true, true, true, false, false]);
        assert!(backoff.withholds_next() && !backoff.allows(None) && !backoff.withholds_next() && backoff.allows(None));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_ngram_index_agrees_with_a_full_search(
            tokens in prop::collection::vec(0u32..4, 1..COMPARED_MAX), min in 1usize..4, more in 0usize..3, count in 0usize..6,
        ) {
            let (max, len) = (min + more, tokens.len());
            let equal = |end: usize| (0..end.min(max)).take_while(|back| tokens[end - 1 - back] == tokens[len - 1 - back]).count();
            let found = (1..len).filter(|end| equal(*end) >= min).max_by_key(|end| (equal(*end), *end));
            let mut extended = tokens.clone();
            for from in found.into_iter().flat_map(|end| end..end + count) {
                extended.push(extended[from]);
            }
            prop_assert_eq!(draft(&tokens, min, max, count), &extended[len..]);
        }
    }
}
