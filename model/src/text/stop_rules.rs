//! Stop rules: which tokens and which strings end a reply, and what text must wait because it could become one.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::error::TextError;

/// Stop strings in a request, as OpenAI's API and vLLM bound them, with room.
const STRINGS_MAX: usize = 16;
/// Bytes of a stop string.
const STRING_BYTES_MAX: usize = 1024;

/// What ends a reply. Cloning shares it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct StopRules {
    ids: BTreeSet<u32>,
    strings: Arc<[String]>,
}

/// Never the strings: they are the user's.
impl std::fmt::Debug for StopRules {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("StopRules").field("ids", &self.ids).field("strings", &self.strings.len()).finish()
    }
}

/// Which rule ended a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// An end token.
    Token(u32),
    /// The stop string of this index.
    String(usize),
}

impl StopRules {
    /// End tokens of the checkpoint and stop strings of the request.
    ///
    /// # Errors
    /// [`TextError::StopStrings`] for an empty one, more than 16, or more than 1,024 bytes.
    pub fn new(ids: impl IntoIterator<Item = u32>, strings: Vec<String>) -> Result<Self, TextError> {
        let empty = strings.iter().filter(|string| string.is_empty()).count();
        let too_long = strings.iter().any(|string| string.len() > STRING_BYTES_MAX);
        if empty > 0 || too_long || strings.len() > STRINGS_MAX {
            return Err(TextError::StopStrings {
                count: strings.len(),
                count_max: STRINGS_MAX,
                empty,
                bytes_max: STRING_BYTES_MAX,
            });
        }
        Ok(StopRules { ids: ids.into_iter().collect(), strings: strings.into() })
    }

    /// The end tokens.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.ids.iter().copied()
    }

    /// Whether `token` ends the reply. Its text is not part of it.
    pub fn stops_at(&self, token: u32) -> bool {
        self.ids.contains(&token)
    }

    /// A filter for one reply's text.
    pub fn filter(&self) -> StopFilter {
        StopFilter { strings: self.strings.clone(), waiting: String::new(), stopped: None }
    }
}

/// Passes a reply's text on, up to the first stop string, which may lie across pieces.
#[derive(Clone)]
pub struct StopFilter {
    strings: Arc<[String]>,
    waiting: String,
    stopped: Option<usize>,
}

impl std::fmt::Debug for StopFilter {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "StopFilter({} bytes waiting, stopped: {:?})", self.waiting.len(), self.stopped)
    }
}

impl StopFilter {
    /// The text that is safe to show now, and the rule that ended the reply, if one did. After that nothing more comes.
    pub fn feed(&mut self, piece: &str) -> (String, Option<StopReason>) {
        if let Some(index) = self.stopped {
            return (String::new(), Some(StopReason::String(index)));
        }
        self.waiting.push_str(piece);
        if let Some((at, index)) = self.earliest_stop() {
            self.waiting.truncate(at);
            self.stopped = Some(index);
            return (std::mem::take(&mut self.waiting), Some(StopReason::String(index)));
        }
        let held = self.strings.iter().map(|string| overlap(&self.waiting, string)).max().unwrap_or(0);
        let rest = self.waiting.split_off(self.waiting.len() - held);
        (std::mem::replace(&mut self.waiting, rest), None)
    }

    /// What waited for a stop string that did not come; empty after one came.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.waiting)
    }

    /// The stop string that is complete first, so that the reply does not depend on how its text came in pieces; of
    /// several that end at one place, the longest.
    fn earliest_stop(&self) -> Option<(usize, usize)> {
        let found = self.strings.iter().enumerate().filter_map(|(index, string)| {
            let at = self.waiting.find(string.as_str())?;
            Some((at + string.len(), at, index))
        });
        found.min().map(|(_, at, index)| (at, index))
    }
}

/// The longest end of `text` that begins `stop` without completing it, in bytes.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    let borders = (1..=longest).rev().filter(|&length| stop.is_char_boundary(length));
    borders.into_iter().find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length])).unwrap_or(0)
}
