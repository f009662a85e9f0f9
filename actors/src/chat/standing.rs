//! A chat's standing among others: how urgent it is.

use super::Chat;

/// What a chat says of its turn.
#[derive(Clone, Debug, Default)]
pub(super) struct ChatStanding {
    pub(super) priority: i32,
}

impl Chat {
    /// How urgent the chat is: lower numbers are served earlier, as in vLLM, and 0 is the default. A more urgent chat is
    /// admitted before others that wait, and takes the place of less urgent ones that run, from each twice at most: they
    /// pause, and lose nothing. Every eighth admission is of the oldest that waits, however urgent it is, so that none
    /// starves (ADR 44).
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// let summary = Chat::new().user("Summarise the log of last night.").priority(10); // when nobody waits
    /// ```
    pub fn priority(mut self, priority: i32) -> Self {
        self.standing.priority = priority;
        self
    }
}
