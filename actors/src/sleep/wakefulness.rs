//! The state of a model: awake or not, its active requests, and the callers that
//! wait to be admitted.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, time::Instant};

use super::{NotWoken, SleepLevel};

/// Whether a model takes requests or sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeState {
    /// New requests are admitted.
    Awake,
    /// Active requests continue to their ends, and no new requests are admitted.
    Draining,
    /// The model holds no device memory.
    Asleep(SleepLevel),
    /// The model is starting again, or waits for the memory to start.
    Waking,
}

/// A model's [`WakeState`] and its active requests, written by its runtime and read by its handles
/// and its engine. Clones share the state.
#[derive(Clone, Debug)]
pub struct Wakefulness(Arc<watch::Sender<State>>);

#[derive(Debug)]
struct State {
    wake_state: WakeState,
    /// Requests that were admitted and have not ended.
    inside: usize,
    /// Callers that wait to be admitted.
    waiting: usize,
    /// The latest time at which the last active request ended, the last caller stopped waiting, or
    /// the state of an idle model changed.
    idle_since: Instant,
    /// How many wakes have failed.
    failures: u64,
    /// The error of the last failed wake.
    failure: Option<NotWoken>,
}

impl State {
    fn is_idle(&self) -> bool {
        self.inside == 0 && self.waiting == 0
    }

    fn has_left(&mut self) {
        if self.is_idle() {
            self.idle_since = Instant::now();
        }
    }
}

/// An admitted request. The model does not go to sleep while this value lives.
#[derive(Debug)]
pub struct Inside(Arc<watch::Sender<State>>);

/// A caller that waits until the model is awake.
#[derive(Debug)]
pub struct Waiting(Arc<watch::Sender<State>>);

impl Wakefulness {
    pub fn new(wake_state: WakeState) -> Self {
        let idle_since = Instant::now();
        Wakefulness(Arc::new(watch::Sender::new(State {
            wake_state,
            inside: 0,
            waiting: 0,
            idle_since,
            failures: 0,
            failure: None,
        })))
    }

    pub fn state(&self) -> WakeState {
        self.0.borrow().wake_state
    }

    /// Requests that were admitted and have not ended.
    pub fn inside(&self) -> usize {
        self.0.borrow().inside
    }

    /// Whether callers wait to be admitted.
    pub fn is_awaited(&self) -> bool {
        self.0.borrow().waiting > 0
    }

    /// How long there has been no active request and no waiting caller. `None` if there is an
    /// active request or a waiting caller.
    pub fn idle_for(&self) -> Option<Duration> {
        let state = self.0.borrow();
        state.is_idle().then(|| state.idle_since.elapsed())
    }

    pub fn set(&self, wake_state: WakeState) {
        self.0.send_modify(|state| {
            state.wake_state = wake_state;
            state.has_left();
        });
    }

    /// Publishes that a wake has failed. Callers that wait receive the error.
    pub fn fail(&self, level: SleepLevel, failure: NotWoken) {
        self.0.send_modify(|state| {
            (state.wake_state, state.failures, state.failure) =
                (WakeState::Asleep(level), state.failures + 1, Some(failure));
        });
    }

    /// Admits a request if the model is awake.
    fn enter(&self) -> Option<Inside> {
        let is_in = self.0.send_if_modified(|state| {
            let is_awake = state.wake_state == WakeState::Awake;
            state.inside += usize::from(is_awake);
            is_awake
        });
        is_in.then(|| Inside(self.0.clone()))
    }

    /// Waits until the model is awake, then admits a request. `wake` is called when the model
    /// sleeps or is about to sleep.
    ///
    /// # Errors
    /// A wake that was in progress or was requested has failed.
    pub async fn enter_awake(&self, wake: impl Fn()) -> Result<Inside, NotWoken> {
        if let Some(inside) = self.enter() {
            return Ok(inside);
        }
        let mut states = self.0.subscribe();
        let failures = states.borrow().failures;
        self.0.send_modify(|state| state.waiting += 1);
        let _waiting = Waiting(self.0.clone());
        let mut seen = None;
        loop {
            if let Some(inside) = self.enter() {
                return Ok(inside);
            }
            let wake_state = {
                let state = states.borrow_and_update();
                if let Some(failure) = state.failure.as_ref().filter(|_| state.failures > failures) {
                    return Err(failure.clone());
                }
                state.wake_state
            };
            if seen.replace(wake_state) != Some(wake_state)
                && matches!(wake_state, WakeState::Draining | WakeState::Asleep(_))
            {
                wake();
            }
            // `self` keeps the sender alive, so this wait cannot fail.
            drop(states.changed().await);
        }
    }

    /// Waits until no request is active.
    pub async fn empty(&self) {
        drop(self.0.subscribe().wait_for(|state| state.inside == 0).await);
    }

    /// Waits until no request is active and no caller waits.
    pub async fn idle(&self) {
        drop(self.0.subscribe().wait_for(State::is_idle).await);
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.send_modify(|state| {
            state.inside -= 1;
            state.has_left();
        });
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.send_modify(|state| {
            state.waiting -= 1;
            state.has_left();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_wakes_the_model_once_and_waits() {
        let model = Wakefulness::new(WakeState::Asleep(SleepLevel::Level1));
        let wakes = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let waiting = tokio::spawn({
            let (model, wakes) = (model.clone(), wakes.clone());
            async move {
                let wake = || {
                    wakes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                };
                model.enter_awake(wake).await
            }
        });
        tokio::task::yield_now().await;
        assert!(model.is_awaited() && model.idle_for().is_none());
        model.set(WakeState::Waking);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "the model is not awake yet");
        model.set(WakeState::Awake);
        let inside = waiting.await.expect("the waiting task does not panic").expect("the model is awake");
        assert_eq!((model.inside(), wakes.load(std::sync::atomic::Ordering::Relaxed)), (1, 1));
        model.set(WakeState::Draining);
        let emptied = tokio::time::timeout(Duration::from_secs(1), model.empty()).await;
        assert!(emptied.is_err(), "one request is still inside");
        drop(inside);
        model.empty().await;
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(model.idle_for(), Some(Duration::from_secs(7)));
    }

    #[tokio::test]
    async fn a_failed_wake_fails_waiting_requests_but_not_later_ones() {
        let model = Wakefulness::new(WakeState::Waking);
        let error = NotWoken { reason: "no memory".into(), hint: "free some".into(), lacks_memory: true };
        let waiting = tokio::spawn({
            let model = model.clone();
            async move { model.enter_awake(|| {}).await.map(drop) }
        });
        while !model.is_awaited() {
            tokio::task::yield_now().await;
        }
        model.fail(SleepLevel::Level2, error.clone());
        assert_eq!(waiting.await.expect("the waiting task does not panic"), Err(error));
        model.set(WakeState::Awake);
        assert!(model.enter_awake(|| {}).await.is_ok());
    }
}
