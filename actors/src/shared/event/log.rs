//! The log of the latest events, and its listeners.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bursar_budgets::Hint;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use tokio::sync::broadcast::{self, error::RecvError};

use super::{Event, trace::Spans};

/// Number of events by which a listener may lag before it misses the oldest of them.
const BEHIND_MAX: usize = 1024;

/// Number of events kept for later callers.
const RECENT: usize = 64;

/// An event with its number and time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recorded {
    /// The number of the event. Numbers start at 1 in each runtime and have no gaps.
    pub number: u64,
    /// The time by the system clock. In JSON, seconds since 1970.
    #[serde(serialize_with = "unix_seconds")]
    pub at: SystemTime,
    #[serde(flatten)]
    pub event: Event,
}

fn unix_seconds<S: Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    let since: Duration = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    serializer.serialize_f64(since.as_millis() as f64 / 1e3)
}

/// The events of one device. Actors record events without waiting for readers.
pub struct EventLog {
    state: Mutex<LogState>,
    /// The spans have a separate lock, because a `tracing` subscriber may be slow or may read
    /// events itself.
    spans: Mutex<Spans>,
}

struct LogState {
    next: u64,
    recent: VecDeque<Recorded>,
    /// `None` once the runtime has ended.
    listeners: Option<broadcast::Sender<Recorded>>,
}

impl Default for EventLog {
    fn default() -> Self {
        let listeners = Some(broadcast::channel(BEHIND_MAX).0);
        let state = LogState { next: 1, recent: VecDeque::new(), listeners };
        EventLog { state: Mutex::new(state), spans: Mutex::default() }
    }
}

impl EventLog {
    pub(crate) fn record(&self, event: Event) {
        lock(&self.spans).on_event(&event);
        let mut state = lock(&self.state);
        let recorded = Recorded { number: state.next, at: SystemTime::now(), event };
        state.next += 1;
        if state.recent.len() == RECENT {
            state.recent.pop_front();
        }
        state.recent.push_back(recorded.clone());
        if let Some(listeners) = &state.listeners {
            // The send fails if there is no listener, which is fine.
            drop(listeners.send(recorded));
        }
    }

    /// Creates a listener for all later events.
    pub fn listen(&self) -> Events {
        let state = lock(&self.state);
        let over = || broadcast::channel(1).1;
        Events { receiver: state.listeners.as_ref().map_or_else(over, broadcast::Sender::subscribe) }
    }

    /// Returns the latest events, at most 64, with the oldest first.
    pub fn recent(&self) -> Vec<Recorded> {
        lock(&self.state).recent.iter().cloned().collect()
    }

    /// Records that all of the runtime's own actors run again.
    pub(crate) fn runtime_recovered(&self) {
        lock(&self.spans).runtime_recovered();
    }

    /// Ends the log. Each listener receives the events that are still queued for it, and then the
    /// end.
    pub(crate) fn close(&self) {
        lock(&self.state).listeners = None;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock may be used: each change is complete when the lock is released, even by a
    // panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A listener. It receives every event after its creation, in order, or the number of events that
/// it missed. A listener that lags by more than 1,024 events misses the oldest.
#[derive(Debug)]
pub struct Events {
    receiver: broadcast::Receiver<Recorded>,
}

/// The listener lagged too far and missed events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{events} events were missed, because more than {BEHIND_MAX} were waiting to be read")]
pub struct Missed {
    pub events: u64,
}

impl Hint for Missed {
    type Text = String;

    fn hint(&self) -> String {
        "read events in a dedicated task; a snapshot of the budget shows the current state".to_owned()
    }
}

impl Events {
    /// Waits for the next event. Returns `None` once the runtime has ended. Canceling the wait
    /// loses nothing.
    ///
    /// # Errors
    /// [`Missed`], once for each time that the listener lagged too far. Later calls return later
    /// events.
    pub async fn next(&mut self) -> Option<Result<Recorded, Missed>> {
        match self.receiver.recv().await {
            Ok(recorded) => Some(Ok(recorded)),
            Err(RecvError::Lagged(events)) => Some(Err(Missed { events })),
            Err(RecvError::Closed) => None,
        }
    }
}

/// Returns the latest events of all devices as JSON, oldest first. With several devices, each event
/// has a field `device`.
pub fn latest_of<D: Serialize>(devices: impl ExactSizeIterator<Item = (D, Vec<Recorded>)>) -> Vec<Value> {
    let are_several = devices.len() > 1;
    let of_device = |(device, events): (D, Vec<Recorded>)| {
        events.into_iter().map(move |event| {
            let mut event = json!(event);
            if are_several {
                event["device"] = json!(device);
            }
            event
        })
    };
    let mut events: Vec<_> = devices.flat_map(of_device).collect();
    let at = |event: &Value| event["at"].as_f64().unwrap_or(0.0);
    events.sort_by(|one, other| at(one).total_cmp(&at(other)));
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canary(bytes: u64) -> Event {
        Event::CanaryGiven { bytes: bursar_budgets::Bytes(bytes), card: None }
    }

    #[tokio::test]
    async fn a_listener_receives_every_event_until_the_log_closes() {
        let log = EventLog::default();
        log.record(canary(1));
        let mut events = log.listen();
        (2..=4).for_each(|bytes| log.record(canary(bytes)));
        log.close();
        log.record(canary(5));
        for number in 2..=4 {
            let recorded = events.next().await.expect("the event stream is not over").expect("no event was missed");
            assert_eq!((recorded.number, recorded.event), (number, canary(number)));
        }
        assert_eq!(None, events.next().await);
        assert_eq!(None, log.listen().next().await, "a listener created after the end gets no event");
        assert_eq!((1..=5).collect::<Vec<_>>(), log.recent().iter().map(|event| event.number).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_lagging_listener_learns_how_many_events_it_missed() {
        let log = EventLog::default();
        let mut events = log.listen();
        (0..BEHIND_MAX as u64 + 3).for_each(|bytes| log.record(canary(bytes)));
        assert_eq!(Some(Err(Missed { events: 3 })), events.next().await);
        assert_eq!(4, events.next().await.expect("the event stream is not over").expect("no event was missed").number);
        assert_eq!(RECENT, log.recent().len());
    }

    #[test]
    fn an_event_serializes_as_one_flat_json_object() {
        let log = EventLog::default();
        let event = Event::Oom { model: "demo".into(), phase: "serve" };
        log.record(event.clone());
        let json = serde_json::to_value(&log.recent()[0]).expect("the event serializes");
        assert_eq!((json["number"].as_u64(), json["event"].as_str()), (Some(1), Some(event.name())));
        assert_eq!((json["model"].as_str(), json["phase"].as_str()), (Some("demo"), Some("serve")));
        assert!(json["at"].as_f64().expect("a number") > 1.7e9, "the time is in seconds since 1970");
    }
}
