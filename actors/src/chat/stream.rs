//! The reply as a stream.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures_core::Stream;
use tokio::sync::mpsc;

use super::{ChatError, ChatEvent};

/// The events of one reply: texts and what else was asked for, then exactly one end, `Done` or an error. Dropping it cancels the request.
#[derive(Debug)]
pub struct Reply {
    events: mpsc::Receiver<Result<ChatEvent, ChatError>>,
    ended: bool,
}

impl Reply {
    pub(super) fn new(events: mpsc::Receiver<Result<ChatEvent, ChatError>>) -> Self {
        Reply { events, ended: false }
    }

    /// The next event; none after the end.
    pub async fn next(&mut self) -> Option<Result<ChatEvent, ChatError>> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// All of the reply at once.
    ///
    /// # Errors
    /// What ended it early.
    pub async fn text(mut self) -> Result<String, ChatError> {
        let mut whole = String::new();
        while let Some(event) = self.next().await {
            match event? {
                ChatEvent::Done { text, .. } => whole = text,
                ChatEvent::Prompt(_) | ChatEvent::Token(_) | ChatEvent::Text(_) => {}
            }
        }
        Ok(whole)
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<ChatEvent, ChatError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = std::task::ready!(self.events.poll_recv(context));
        // A driver that is gone without an end was dropped with its tokio runtime.
        let event = event.unwrap_or_else(|| Err(ChatError::Stopped { reason: "the runtime is gone".into() }));
        self.ended = matches!(event, Ok(ChatEvent::Done { .. }) | Err(_));
        Poll::Ready(Some(event))
    }
}

impl Stream for Reply {
    type Item = Result<ChatEvent, ChatError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_event(context)
    }
}
