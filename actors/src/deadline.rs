//! The deadlines of a request, as callers, the scheduler and metrics name them.

use std::time::Duration;

/// What must have happened when a deadline passes. All count from the moment at which the request was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Deadline {
    /// Its first step is planned. With several samples, the first of one of them.
    Queue,
    /// The first token of its reply is ready.
    FirstToken,
    /// Its reply is complete.
    Reply,
}

impl Deadline {
    /// All of them, in the order in which they usually pass.
    pub const ALL: [Deadline; 3] = [Deadline::Queue, Deadline::FirstToken, Deadline::Reply];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Deadline::Queue => "queue",
            Deadline::FirstToken => "first_token",
            Deadline::Reply => "reply",
        }
    }

    /// The knob with the model's default.
    pub const fn knob(self) -> &'static str {
        match self {
            Deadline::Queue => "queue_deadline",
            Deadline::FirstToken => "first_token_deadline",
            Deadline::Reply => "reply_deadline",
        }
    }

    /// What has not happened, for errors.
    pub(crate) const fn missing(self) -> &'static str {
        match self {
            Deadline::Queue => "the request did not start",
            Deadline::FirstToken => "the first token was not ready, or could not have become ready,",
            Deadline::Reply => "the reply was not complete",
        }
    }
}

/// A time for each deadline; none where there is no deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// Until its first step is planned.
    pub queue: Option<Duration>,
    /// Until the first token of the reply.
    pub first_token: Option<Duration>,
    /// Until the reply is complete.
    pub reply: Option<Duration>,
}

impl Deadlines {
    /// The time of one of them.
    pub fn of(&self, deadline: Deadline) -> Option<Duration> {
        match deadline {
            Deadline::Queue => self.queue,
            Deadline::FirstToken => self.first_token,
            Deadline::Reply => self.reply,
        }
    }

    /// These, and `usual` ones where there is none.
    pub fn or(self, usual: Deadlines) -> Deadlines {
        Deadlines {
            queue: self.queue.or(usual.queue),
            first_token: self.first_token.or(usual.first_token),
            reply: self.reply.or(usual.reply),
        }
    }

    /// Each time that there is, changed.
    #[must_use]
    pub fn map(self, change: impl Fn(Deadline, Duration) -> Option<Duration>) -> Deadlines {
        let changed = |deadline| self.of(deadline).and_then(|time| change(deadline, time));
        Deadlines {
            queue: changed(Deadline::Queue),
            first_token: changed(Deadline::FirstToken),
            reply: changed(Deadline::Reply),
        }
    }
}
