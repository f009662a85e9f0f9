//! Questions between actors. Each question is answered once, within a deadline.

use ractor::{ActorRef, Message};
use thiserror::Error;
use tokio::sync::oneshot;
use tracing::Span;

use crate::tree::{Question, Role};

/// The answering end of a question. If it is dropped without an answer, the caller gets
/// [`AskError::Gone`] at once.
#[derive(Debug)]
pub struct Responder<T> {
    caller: oneshot::Sender<T>,
    span: Span,
}

impl<T> Responder<T> {
    /// Creates a responder and the receiver of its answer.
    pub fn new() -> (Self, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Responder { caller: sender, span: Span::current() }, receiver)
    }

    /// Sends the answer. If the caller has given up, the answer is dropped.
    pub fn answer(self, answer: T) {
        drop(self.caller.send(answer));
    }

    /// The caller's `tracing` span, in which the asked actor records its work on the question.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Whether the caller has given up.
    pub fn is_given_up(&self) -> bool {
        self.caller.is_closed()
    }

    /// Returns when the caller has given up.
    pub async fn given_up(&mut self) {
        self.caller.closed().await;
    }
}

/// A question that was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AskError {
    /// The asked actor does not exist, or died before it answered.
    #[error("{role:?} is not running: {what}")]
    Gone {
        /// The role that was asked.
        role: Role,
        /// The question, in words.
        what: &'static str,
    },
    #[error("{role:?} did not answer within {seconds} s: {what}")]
    TimedOut {
        /// The role that was asked.
        role: Role,
        /// The question, in words.
        what: &'static str,
        seconds: u64,
    },
}

impl Question {
    /// The error for an actor that does not exist or died.
    pub fn gone(&self) -> AskError {
        AskError::Gone { role: self.to, what: self.what }
    }

    /// The error for a deadline that passed.
    pub fn timed_out(&self) -> AskError {
        AskError::TimedOut { role: self.to, what: self.what, seconds: self.deadline.as_secs() }
    }

    /// Waits for an answer until the deadline.
    pub async fn wait<T>(&self, answer: oneshot::Receiver<T>) -> Result<T, AskError> {
        match tokio::time::timeout(self.deadline, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(self.gone()),
            Err(_) => Err(self.timed_out()),
        }
    }

    /// Asks `actor` and waits for its answer.
    pub async fn ask<M: Message, T>(
        &self,
        actor: &ActorRef<M>,
        message: impl FnOnce(Responder<T>) -> M,
    ) -> Result<T, AskError> {
        let (reply, answer) = Responder::new();
        actor.send_message(message(reply)).map_err(|_| self.gone())?;
        self.wait(answer).await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const QUESTION: Question =
        Question { from: Role::User, to: Role::Budget, what: "the time", deadline: Duration::from_secs(3) };

    #[tokio::test(start_paused = true)]
    async fn a_dropped_responder_ends_the_wait_at_once() {
        let (reply, answer) = Responder::<u8>::new();
        drop(reply);
        let asked = tokio::time::Instant::now();
        assert_eq!(QUESTION.wait(answer).await, Err(AskError::Gone { role: Role::Budget, what: "the time" }));
        assert_eq!(asked.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_times_out_at_its_deadline_and_not_before() {
        let (reply, answer) = Responder::<u8>::new();
        let asked = tokio::time::Instant::now();
        let error = QUESTION.wait(answer).await.expect_err("the actor never answers");
        assert_eq!(error, AskError::TimedOut { role: Role::Budget, what: "the time", seconds: 3 });
        assert_eq!(asked.elapsed(), Duration::from_secs(3));
        reply.answer(1); // Too late, and harmless.
    }

    #[tokio::test]
    async fn an_answer_arrives_and_a_dropped_caller_is_noticed() {
        let (reply, answer) = Responder::new();
        reply.answer(7);
        assert_eq!(QUESTION.wait(answer).await, Ok(7));
        let (mut reply, answer) = Responder::<u8>::new();
        drop(answer);
        reply.given_up().await;
    }
}
