//! A model of a runtime.

use std::{mem, time::Duration};

use super::{
    child::Child,
    sleep_state::{SleepState, Sleepers, WaitingForMemory},
};
use crate::{sleep::SleepLevel, supervise::Intensity};

/// A model, from its load until all its memory is back.
pub struct Model<W, S> {
    /// Identifies it across all its engines. Another model may have its name later.
    pub load: u64,
    /// Whether it is awake.
    pub sleep_state: SleepState<S>,
    /// It is put to sleep when it has had no request for this long.
    pub sleep_after: Option<Duration>,
    /// How often in a row it was to make room and its requests did not end in time.
    pub stayed_busy: u32,
    life: Life,
    /// Once nobody wants it any more: who waits for its end.
    let_go: Option<Vec<W>>,
}

enum Life {
    /// It starts, serves or restarts.
    Goes(Child),
    /// Its actors are being stopped and its memory taken back.
    Ends {
        /// It began to end after the runtime did.
        of_shutdown: bool,
    },
}

/// A model that has ended.
pub struct Ended<W> {
    /// Who waits for its end, if it was let go.
    pub let_go: Option<Vec<W>>,
    /// It began to end after the runtime did.
    pub of_shutdown: bool,
}

impl<W, S> Model<W, S> {
    /// A model whose first engine starts.
    pub fn new(load: u64, intensity: Intensity, sleep_after: Option<Duration>, since: Duration) -> Self {
        let sleep_state =
            SleepState::Waking(WaitingForMemory { reason: None, since, was_tried: false, again: Sleepers::none() });
        Model { load, sleep_state, sleep_after, stayed_busy: 0, life: Life::Goes(Child::new(intensity)), let_go: None }
    }

    /// Whether it is not ending.
    pub fn is_going(&self) -> bool {
        matches!(self.life, Life::Goes(_))
    }

    /// Its engine starts again, if it waited for that.
    pub fn start_waking(&mut self) {
        self.sleep_state = match mem::replace(&mut self.sleep_state, SleepState::Asleep(SleepLevel::Level2)) {
            SleepState::WaitingForMemory(waiting) => SleepState::Waking(waiting),
            sleep_state => sleep_state,
        };
        self.engine().into_iter().for_each(Child::replaced);
    }

    /// Its engine, unless it is ending.
    pub fn engine(&mut self) -> Option<&mut Child> {
        match &mut self.life {
            Life::Goes(engine) => Some(engine),
            Life::Ends { .. } => None,
        }
    }

    /// Whether nobody wants it any more.
    pub fn is_let_go(&self) -> bool {
        self.let_go.is_some()
    }

    /// From now on nobody wants it. `waiter` hears of its end.
    pub fn let_go(&mut self, waiter: Option<W>) {
        self.let_go.get_or_insert_default().extend(waiter);
    }

    /// Begins to end it. False if that has begun before.
    pub fn end(&mut self, of_shutdown: bool) -> bool {
        let begins = matches!(self.life, Life::Goes(_));
        if begins {
            self.life = Life::Ends { of_shutdown };
        }
        begins
    }

    /// What is left of it.
    pub fn into_ended(self) -> Ended<W> {
        let of_shutdown = matches!(self.life, Life::Ends { of_shutdown: true });
        Ended { let_go: self.let_go, of_shutdown }
    }
}
