//! Dying on purpose: how you find out whether whoever supervises, waits or links does what you think.

use thiserror::Error;

/// A death as a bug would bring it. Every actor of this crate takes one in a `Drill` message and dies of it, in its
/// handler and in the middle of whatever else it had under way. A lane dies through its engine's
/// [`DrillLane`](crate::engine::EngineMessage::DrillLane), and a GPU refuses launches by
/// [`DrillLaunches`](crate::engine::EngineMessage::DrillLaunches).
///
/// ```
/// use bursar_actors::supervise::Drill;
/// assert_eq!(Drill::Fail.strike().to_string(), "this is a drill");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drill {
    /// The handler panics.
    Panic,
    /// The handler ends in an `Err`.
    Fail,
}

/// What an actor says that died of a [`Drill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("this is a drill")]
pub struct Drilled;

impl Drill {
    /// The error to end the handler with.
    ///
    /// # Panics
    /// That is what [`Drill::Panic`] is for.
    pub fn strike(self) -> Drilled {
        match self {
            Drill::Panic => panic!("{Drilled}"),
            Drill::Fail => Drilled,
        }
    }
}
