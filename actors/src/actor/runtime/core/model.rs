//! State of one model of a runtime.

use std::{mem, time::Duration};

use super::{
    child::Child,
    sleep_state::{SleepState, SleepWaiters, WaitingForMemory},
};
use crate::{sleep::SleepLevel, supervise::Intensity};

/// A model, from its load until all its memory is returned.
pub struct Model<W, S> {
    /// Identifies the model across all its engines. The model's name may later belong to another
    /// model.
    pub load: u64,
    pub sleep_state: SleepState<S>,
    /// The model is put to sleep when it has had no request for this long.
    pub sleep_after: Option<Duration>,
    /// Number of times in a row that the model was asked to free memory and its requests did not
    /// end in time.
    pub stayed_busy: u32,
    life: Life,
    /// Callers that wait for the end of the model. `Some` once the model is unloading.
    forgotten: Option<Vec<W>>,
}

enum Life {
    /// The engine starts, serves or restarts.
    Goes(Child),
    /// The actors of the model are being stopped, and its memory is being released.
    Ends {
        /// Whether the model began to end after the runtime's shutdown was requested.
        of_shutdown: bool,
    },
}

pub struct Ended<W> {
    /// Callers that wait for the end of the model, if it was unloading.
    pub forgotten: Option<Vec<W>>,
    /// Whether the model began to end after the runtime's shutdown was requested.
    pub of_shutdown: bool,
}

impl<W, S> Model<W, S> {
    /// Returns a model whose first engine starts.
    pub fn new(load: u64, intensity: Intensity, sleep_after: Option<Duration>, since: Duration) -> Self {
        let sleep_state =
            SleepState::Waking(WaitingForMemory { reason: None, since, was_tried: false, again: SleepWaiters::none() });
        Model {
            load,
            sleep_state,
            sleep_after,
            stayed_busy: 0,
            life: Life::Goes(Child::new(intensity)),
            forgotten: None,
        }
    }

    pub fn is_going(&self) -> bool {
        matches!(self.life, Life::Goes(_))
    }

    /// Moves a model that waits for memory to `Waking`, because its engine starts.
    pub fn start_waking(&mut self) {
        self.sleep_state = match mem::replace(&mut self.sleep_state, SleepState::Asleep(SleepLevel::Level2)) {
            SleepState::WaitingForMemory(waiting) => SleepState::Waking(waiting),
            sleep_state => sleep_state,
        };
        self.engine().into_iter().for_each(Child::replaced);
    }

    /// Returns the engine, or `None` if the model is ending.
    pub fn engine(&mut self) -> Option<&mut Child> {
        match &mut self.life {
            Life::Goes(engine) => Some(engine),
            Life::Ends { .. } => None,
        }
    }

    /// Whether the model takes no more requests: it was unloaded, its loader gave up, or the
    /// runtime shuts down.
    pub fn is_forgotten(&self) -> bool {
        self.forgotten.is_some()
    }

    /// Marks the model as unloading. `waiter` is answered when the model has ended.
    pub fn forgotten(&mut self, waiter: Option<W>) {
        self.forgotten.get_or_insert_default().extend(waiter);
    }

    /// Begins to end the model. Returns `false` if the model is already ending.
    pub fn end(&mut self, of_shutdown: bool) -> bool {
        let begins = matches!(self.life, Life::Goes(_));
        if begins {
            self.life = Life::Ends { of_shutdown };
        }
        begins
    }

    pub fn into_ended(self) -> Ended<W> {
        let of_shutdown = matches!(self.life, Life::Ends { of_shutdown: true });
        Ended { forgotten: self.forgotten, of_shutdown }
    }
}
