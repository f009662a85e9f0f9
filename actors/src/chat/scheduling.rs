//! A chat's standing among others: how urgent it is, whose it is, and how long it may take.

use std::time::Duration;

use super::{Chat, ChatError};
use crate::{deadline::Deadlines, tenant::Tenant};

/// What a chat says of its turn.
#[derive(Clone, Debug, Default)]
pub(super) struct ChatScheduling {
    pub(super) priority: i32,
    pub(super) tenant: Tenant,
    pub(super) deadlines: Deadlines,
}

impl ChatScheduling {
    /// # Errors
    /// [`ChatError::TenantName`].
    pub(super) fn check(&self) -> Result<(), ChatError> {
        match self.tenant.as_str().len() {
            0..=Tenant::BYTES_MAX => Ok(()),
            bytes => Err(ChatError::TenantName { bytes, limit: Tenant::BYTES_MAX }),
        }
    }
}

impl Chat {
    /// How urgent the chat is: lower numbers are served earlier, as in vLLM, and 0 is the default. A more urgent chat is
    /// admitted before others that wait, and takes the place of less urgent ones that run, from each twice at most: they
    /// pause, and lose nothing. Every eighth admission is of the oldest that waits, however urgent it is, so that none
    /// starves (ADR 13).
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// let summary = Chat::new().user("Summarise the log of last night.").priority(10); // after all others
    /// ```
    pub fn priority(mut self, priority: i32) -> Self {
        self.standing.priority = priority;
        self
    }

    /// Whose the chat is. Of equally urgent chats that wait, those of the tenant that was given the fewest tokens are
    /// next, by its weight in the model's `tenant_weights`; a tenant alone has all of the model. Chats without a tenant
    /// share one.
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// let chat = Chat::new().user("Hello!").tenant("customer-17");
    /// ```
    pub fn tenant(mut self, name: impl Into<String>) -> Self {
        self.standing.tenant = Tenant::new(name.into());
        self
    }

    /// The time within which the reply must be complete, from the moment it is asked for. Otherwise it ends with
    /// [`ChatError::TooLate`](super::ChatError::TooLate). Default: the model's `reply_deadline`; `Duration::MAX` is none.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.standing.deadlines.reply = Some(deadline);
        self
    }

    /// The time within which the chat's first step must be planned, likewise. A chat that waits longer ends before it
    /// takes any of the model's memory. Default: the model's `queue_deadline`.
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// use std::time::Duration;
    /// let chat = Chat::new().user("Which way?").queue_deadline(Duration::from_millis(500)); // or ask another server
    /// ```
    pub fn queue_deadline(mut self, deadline: Duration) -> Self {
        self.standing.deadlines.queue = Some(deadline);
        self
    }

    /// The time within which the first token of the reply must be ready, likewise. A chat that could not keep it any
    /// more, by what the model's steps cost, ends before it takes any of the model's memory. Default: the model's
    /// `first_token_deadline`.
    pub fn first_token_deadline(mut self, deadline: Duration) -> Self {
        self.standing.deadlines.first_token = Some(deadline);
        self
    }
}
