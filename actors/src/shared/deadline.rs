//! The deadlines of a request, as callers, the scheduler and metrics name them.

use std::time::Duration;

/// A deadline of a request, named after the event that must happen before it passes. All deadlines
/// count from the moment at which the request was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Deadline {
    /// The request's first step is planned. With several samples, it is enough that one sample's
    /// first step is planned.
    Queue,
    /// The first token of the reply is ready.
    FirstToken,
    Reply,
}

impl Deadline {
    /// All deadlines, in the order in which they usually pass.
    pub const ALL: [Deadline; 3] = [Deadline::Queue, Deadline::FirstToken, Deadline::Reply];

    pub const fn name(self) -> &'static str {
        match self {
            Deadline::Queue => "queue",
            Deadline::FirstToken => "first_token",
            Deadline::Reply => "reply",
        }
    }

    /// The knob that sets the model's default.
    pub const fn knob(self) -> &'static str {
        match self {
            Deadline::Queue => "queue_deadline",
            Deadline::FirstToken => "first_token_deadline",
            Deadline::Reply => "reply_deadline",
        }
    }

    /// The event that has not happened, as error messages word it.
    pub(crate) const fn missing(self) -> &'static str {
        match self {
            Deadline::Queue => "the request did not start",
            Deadline::FirstToken => "the first token was not ready, or could not have become ready,",
            Deadline::Reply => "the reply was not complete",
        }
    }
}

/// The time allowed for each deadline. `None` means no deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// Time until the first step is planned.
    pub queue: Option<Duration>,
    /// Time until the first token of the reply is ready.
    pub first_token: Option<Duration>,
    /// Time until the reply is complete.
    pub reply: Option<Duration>,
}

impl Deadlines {
    /// The time allowed for `deadline`.
    pub fn of(&self, deadline: Deadline) -> Option<Duration> {
        match deadline {
            Deadline::Queue => self.queue,
            Deadline::FirstToken => self.first_token,
            Deadline::Reply => self.reply,
        }
    }

    /// Returns these deadlines. A deadline that is not set is taken from `usual`.
    pub fn or(self, usual: Deadlines) -> Deadlines {
        Deadlines {
            queue: self.queue.or(usual.queue),
            first_token: self.first_token.or(usual.first_token),
            reply: self.reply.or(usual.reply),
        }
    }

    /// Applies `change` to each time that is set.
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
