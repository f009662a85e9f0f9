//! Dying on purpose: how you find out whether whoever supervises, waits or links does what you think.

use thiserror::Error;

/// A death as a bug would bring it. Every actor of this crate takes one in an `InjectFault` message and dies of it, in its
/// handler and in the middle of whatever else it had under way. A lane dies through its engine's
/// [`KillLane`](crate::engine::EngineMessage::KillLane), and a GPU refuses launches by
/// [`FailLaunches`](crate::engine::EngineMessage::FailLaunches).
///
/// ```
/// use bursar_actors::supervise::FaultInjection;
/// assert_eq!(FaultInjection::Fail.strike().to_string(), "this is a drill");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultInjection {
    /// The handler panics.
    Panic,
    /// The handler ends in an `Err`.
    Fail,
}

/// What an actor says that died of a [`FaultInjection`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("this is a drill")]
pub struct InjectedFault;

impl FaultInjection {
    /// The error to end the handler with.
    ///
    /// # Panics
    /// That is what [`FaultInjection::Panic`] is for.
    pub fn strike(self) -> InjectedFault {
        match self {
            FaultInjection::Panic => panic!("{InjectedFault}"),
            FaultInjection::Fail => InjectedFault,
        }
    }
}
