//! Generation of a response: whole, streamed, or in the background.

use std::sync::Arc;

use axum::{
    Json,
    response::{IntoResponse, Response, sse::Event},
};
use bursar::{ChatError, ChatEvent, Reply};
use futures_util::{StreamExt, stream};
use serde_json::Value;
use tokio::sync::mpsc;
use tracing::{Instrument, Span};

use super::{
    encoder::ResponseEncoder,
    store::{HeldTurn, StoredResponse},
};
use crate::{access, guard::Held, openai::usage::UsageBody, sse, state::Shared};

/// Maximum number of events that are queued for a client that watches a background response.
const AHEAD: usize = 64;

pub(super) struct Run {
    pub(super) shared: Arc<Shared>,
    pub(super) encoder: ResponseEncoder,
    pub(super) keeping: Keeping,
    pub(super) held: Held,
}

/// When the response is stored, if it is stored at all.
pub(super) enum Keeping {
    No,
    /// The response is stored when it has ended.
    Later {
        owner: Option<usize>,
        turns: Vec<Arc<HeldTurn>>,
    },
    /// The response is stored before it starts, so that clients can poll and cancel it.
    Now(Arc<StoredResponse>),
}

impl Run {
    fn encode(&mut self, event: Result<ChatEvent, ChatError>) -> (Vec<Value>, bool) {
        if let Ok(ChatEvent::Done { usage, .. }) = &event {
            self.held.used(UsageBody::of([*usage]));
        }
        let (events, is_last) = self.encoder.encode(event);
        if is_last {
            // Store the response before the client receives its end, so that the client can
            // continue the conversation at once.
            self.end();
        }
        (events, is_last)
    }

    fn end(&mut self) {
        self.held = Held::default();
        let (store, response) = (&self.shared.responses, &self.encoder.response);
        match std::mem::replace(&mut self.keeping, Keeping::No) {
            Keeping::No => {}
            Keeping::Later { owner, turns } => {
                let mut running = response.clone();
                running["status"] = "in_progress".into();
                let kept = store.keep(owner, turns, running);
                store.ended(&kept, response);
            }
            Keeping::Now(kept) => store.ended(&kept, response),
        }
    }

    /// Waits for the whole response. Dropping the future, as on a client
    /// disconnect, cancels the reply.
    pub(super) async fn whole(mut self, mut reply: Reply) -> Result<Response, ChatError> {
        while let Some(event) = reply.next().await {
            if self.encode(Ok(event?)).1 {
                break;
            }
        }
        Ok(Json(self.encoder.response).into_response())
    }

    pub(super) fn streamed(mut self, reply: Reply) -> Response {
        let keep_alive = self.shared.options.keep_alive;
        let greetings: Vec<Event> = self.encoder.begin().iter().map(sse::typed).collect();
        let events = sse::encoded(reply, self, |run, event| {
            let (events, is_last) = run.encode(event);
            (events.iter().map(sse::typed).collect(), is_last)
        });
        sse::response(stream::iter(greetings).chain(events), keep_alive)
    }

    /// Generates the response even if the client disconnects. The client gets the unfinished
    /// response at once, or a stream of its events.
    pub(super) fn in_background(mut self, reply: Reply, kept: &Arc<StoredResponse>, is_streamed: bool) -> Response {
        let keep_alive = self.shared.options.keep_alive;
        let greetings: Vec<Event> = self.encoder.begin().iter().map(sse::typed).collect();
        let answer = Json(kept.response()).into_response();
        let (sender, events) = mpsc::channel(AHEAD);
        let watched = self.watched(reply, kept.clone(), is_streamed.then_some(sender));
        tokio::spawn(watched.instrument(Span::current()));
        if is_streamed {
            let events = stream::unfold(events, |mut events| async { Some((events.recv().await?, events)) });
            sse::response(stream::iter(greetings).chain(events), keep_alive)
        } else {
            answer
        }
    }

    async fn watched(mut self, mut reply: Reply, kept: Arc<StoredResponse>, mut watcher: Option<mpsc::Sender<Event>>) {
        loop {
            let (events, is_last) = tokio::select! {
                biased;
                () = kept.stopped() => (self.encoder.cancel(), true),
                event = reply.next() => match event {
                    Some(event) => self.encode(event),
                    None => return,
                },
            };
            if is_last {
                access::ended(&self.encoder.response);
                // A canceled reply must release its resources before this task waits
                // for a slow client.
                drop((reply, std::mem::take(&mut self.held)));
                return watch(&events, &mut watcher).await;
            }
            watch(&events, &mut watcher).await;
        }
    }
}

/// Sends events to the client that watches, until it disconnects.
async fn watch(events: &[Value], watcher: &mut Option<mpsc::Sender<Event>>) {
    for event in events {
        if let Some(sender) = watcher
            && sender.send(sse::typed(event)).await.is_err()
        {
            *watcher = None;
        }
    }
}
