//! A reply as a stream of events.

mod answer;
mod driver;
mod event;
mod reasoning_count;
mod tool_call;

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use futures_core::Stream;
use tokio::sync::mpsc;

pub(crate) use self::driver::Driver;
pub use self::{
    event::{ChatEvent, ScoredToken, TokenScore, Usage},
    tool_call::{ToolCall, ToolCallEvent},
};
use super::ChatError;

/// The events of one reply: text and the other requested events, then exactly one end, which is
/// [`ChatEvent::Done`] or an error. This type is also a [`Stream`]. Dropping the reply cancels the
/// request.
///
/// ```
/// # use bursar_actors::{chat::{Chat, ChatError, ChatEvent}, engine::LoadOptions};
/// # use bursar_actors::runtime::{ModelSource, Runtime, RuntimeConfig};
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let runtime = Runtime::start(RuntimeConfig::default()).await?;
/// # let model = runtime.load_with(ModelSource::demo(), LoadOptions::small(), |_| {}).await?;
/// let mut reply = model.chat(Chat::new().user("Hello!").max_tokens(5)).await?;
/// let mut received = String::new();
/// while let Some(event) = reply.next().await {
///     match event? {
///         ChatEvent::Text(piece) => received += &piece,
///         ChatEvent::Done { text, usage, .. } => assert!(text == received && usage.completion_tokens <= 5),
///         _ => {} // Other events, which this chat and model do not produce.
///     }
/// }
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
pub struct Reply {
    events: mpsc::Receiver<Result<ChatEvent, ChatError>>,
    ended: bool,
    /// A future that completes when the reply must end early.
    cut: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl fmt::Debug for Reply {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reply").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl Reply {
    pub(crate) fn new(events: mpsc::Receiver<Result<ChatEvent, ChatError>>) -> Self {
        Reply { events, ended: false, cut: None }
    }

    /// Ends the reply with [`ChatError::Stopped`] when `cut` completes, unless the reply has
    /// already ended. Servers use this method when they shut down.
    pub fn until(self, cut: impl Future<Output = ()> + Send + 'static) -> Self {
        Reply { cut: Some(Box::pin(cut)), ..self }
    }

    /// Returns the next event, or `None` after the end.
    pub async fn next(&mut self) -> Option<Result<ChatEvent, ChatError>> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// Waits for the end of the reply and returns its whole text, without reasoning and tool calls.
    ///
    /// # Errors
    /// The error that ended the reply early.
    pub async fn text(mut self) -> Result<String, ChatError> {
        let mut whole = String::new();
        while let Some(event) = self.next().await {
            if let ChatEvent::Done { text, .. } = event? {
                whole = text;
            }
        }
        Ok(whole)
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<ChatEvent, ChatError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = match self.events.poll_recv(context) {
            Poll::Ready(event) => event,
            Poll::Pending => {
                let cut = self.cut.as_mut().map(|cut| cut.as_mut().poll(context));
                if !matches!(cut, Some(Poll::Ready(()))) {
                    return Poll::Pending;
                }
                Some(Err(ChatError::Stopped { reason: "the server is shutting down".into() }))
            }
        };
        // A driver that ended without sending an end was dropped together with its tokio runtime.
        let event = event.unwrap_or_else(|| Err(ChatError::Stopped { reason: "the runtime has ended".into() }));
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
