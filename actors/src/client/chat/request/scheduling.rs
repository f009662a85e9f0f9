//! Scheduling settings of a chat: priority, tenant and deadlines.

use std::time::Duration;

use super::Chat;
use crate::tenant::Tenant;

impl Chat {
    /// Sets the priority: lower numbers are served first, as in vLLM. Default: 0.
    ///
    /// A more urgent chat is admitted before less urgent waiting chats, and may preempt less urgent
    /// running chats. A running chat is preempted for urgency at most twice. A preempted chat
    /// pauses and loses no tokens. Every eighth admission goes to the chat that has waited longest,
    /// regardless of its priority, so that no chat waits forever (ADR 13).
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// // Less urgent than chats with the default priority of 0.
    /// let summary = Chat::new().user("Summarize the log of last night.").priority(10);
    /// ```
    pub fn priority(mut self, priority: impl Into<Option<i32>>) -> Self {
        self.scheduling.priority = priority.into().unwrap_or(self.scheduling.priority);
        self
    }

    /// Sets the tenant that the chat is charged to. Among waiting chats of equal priority, the
    /// tenant that has received the fewest tokens, relative to its weight in the model's
    /// `tenant_weights`, is served first. If only one tenant has waiting chats, it gets the whole
    /// model. Chats without a tenant share one tenant.
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// let chat = Chat::new().user("Hello!").tenant("customer-17");
    /// ```
    pub fn tenant(mut self, name: impl Into<String>) -> Self {
        self.scheduling.tenant = Tenant::new(name.into());
        self
    }

    /// Sets the time within which the reply must be complete, counted from the request. Otherwise
    /// the reply ends with [`ChatError::TooLate`](crate::chat::ChatError::TooLate). Default: the
    /// model's `reply_deadline`. `Duration::MAX` means no deadline.
    pub fn deadline(mut self, deadline: impl Into<Option<Duration>>) -> Self {
        self.scheduling.deadlines.reply = deadline.into().or(self.scheduling.deadlines.reply);
        self
    }

    /// Sets the time within which the chat's first step must be planned, counted from the request.
    /// A chat that waits longer ends before it uses any KV cache. Its pictures may have been
    /// encoded by then. Default: the model's `queue_deadline`.
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// use std::time::Duration;
    /// // If this chat is not scheduled within 500 ms, it fails and can be sent to another server.
    /// let chat = Chat::new().user("Which way?").queue_deadline(Duration::from_millis(500));
    /// ```
    pub fn queue_deadline(mut self, deadline: Duration) -> Self {
        self.scheduling.deadlines.queue = Some(deadline);
        self
    }

    /// Sets the time within which the first token of the reply must be ready, counted from the
    /// request. If the duration of the model's steps shows that a chat can no longer meet this
    /// deadline, the chat ends before it uses any KV cache. Default: the model's
    /// `first_token_deadline`.
    pub fn first_token_deadline(mut self, deadline: Duration) -> Self {
        self.scheduling.deadlines.first_token = Some(deadline);
        self
    }
}
