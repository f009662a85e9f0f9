//! Stop rules: the tokens and strings that end a reply, and the text that is withheld because it
//! may become a stop string.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::error::TextError;

/// Maximum stop strings per request, more than OpenAI's API and vLLM allow.
const STRINGS_MAX: usize = 16;
/// Maximum bytes per stop string.
const STRING_BYTES_MAX: usize = 1024;

/// The tokens and strings that end a reply. Cloning shares the strings.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct StopRules {
    ids: BTreeSet<u32>,
    strings: Arc<[String]>,
}

/// Shows the number of strings, but not the strings, which are the user's data.
impl std::fmt::Debug for StopRules {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("StopRules").field("ids", &self.ids).field("strings", &self.strings.len()).finish()
    }
}

/// The stop rule that ended a reply.
#[derive(Clone, PartialEq, Eq)]
pub enum StopReason {
    /// An end token, which is not part of the reply.
    Token(u32),
    /// A stop string, which is not part of the reply.
    String(String),
}

/// Shows the length of the string, but not the string, which is the user's data.
impl std::fmt::Debug for StopReason {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StopReason::Token(token) => write!(formatter, "Token({token})"),
            StopReason::String(string) => write!(formatter, "String({} bytes)", string.len()),
        }
    }
}

impl StopRules {
    /// Rules from the checkpoint's end tokens and the request's stop strings.
    ///
    /// # Errors
    /// [`TextError::StopStrings`] for an empty string, more than 16 strings, or a string of
    /// more than 1,024 bytes.
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

    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.ids.iter().copied()
    }

    /// Whether `token` ends the reply. The token's text is not part of the reply.
    pub fn stops_at(&self, token: u32) -> bool {
        self.ids.contains(&token)
    }

    /// A filter for one reply's text.
    pub fn filter(&self) -> StopFilter {
        StopFilter { strings: self.strings.clone(), waiting: String::new(), stopped: None }
    }
}

/// Passes on a reply's text up to the first stop string, which may span several pieces.
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
    /// Returns the text that is safe to show now, and the rule that ended the reply, if a rule did.
    /// After the end of the reply, the text is always empty.
    pub fn feed(&mut self, piece: &str) -> (String, Option<StopReason>) {
        if let Some(index) = self.stopped {
            return (String::new(), Some(self.reason(index)));
        }
        self.waiting.push_str(piece);
        if let Some((at, index)) = self.earliest_stop() {
            self.waiting.truncate(at);
            self.stopped = Some(index);
            return (std::mem::take(&mut self.waiting), Some(self.reason(index)));
        }
        let held = self.strings.iter().map(|string| overlap(&self.waiting, string)).max().unwrap_or(0);
        let rest = self.waiting.split_off(self.waiting.len() - held);
        (std::mem::replace(&mut self.waiting, rest), None)
    }

    fn reason(&self, index: usize) -> StopReason {
        StopReason::String(self.strings[index].clone())
    }

    /// Returns the text that was withheld as the possible beginning of a stop string. The text is
    /// empty after a stop.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.waiting)
    }

    /// Finds the stop string that is completed first, so that the reply does not depend on how
    /// its text is split into pieces. If several stop strings end at the same position, the
    /// longest stop string wins.
    fn earliest_stop(&self) -> Option<(usize, usize)> {
        let found = self.strings.iter().enumerate().filter_map(|(index, string)| {
            let at = self.waiting.find(string.as_str())?;
            Some((at + string.len(), at, index))
        });
        found.min().map(|(_, at, index)| (at, index))
    }
}

/// Bytes of the longest suffix of `text` that is a proper prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    let borders = (1..=longest).rev().filter(|&length| stop.is_char_boundary(length));
    borders.into_iter().find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length])).unwrap_or(0)
}
