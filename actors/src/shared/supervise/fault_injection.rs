//! Faults injected into actors, to test the code that supervises them, waits for them
//! or links to them.

use thiserror::Error;

/// A failure that looks like the effect of a bug. Every actor of this crate accepts a fault in an
/// `InjectFault` message. The message handler then panics or returns the error, even while other
/// work is in progress. To kill a lane, send its engine
/// [`KillLane`](crate::engine::EngineMessage::KillLane). To make a GPU refuse launches, send
/// [`FailLaunches`](crate::engine::EngineMessage::FailLaunches).
///
/// ```
/// use bursar_actors::supervise::FaultInjection;
/// assert_eq!(FaultInjection::Fail.inject().to_string(), "this error was injected by a drill");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultInjection {
    /// The message handler panics.
    Panic,
    /// The handler returns an `Err`.
    Fail,
}

/// The error of an actor that died of a [`FaultInjection`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("this error was injected by a drill")]
pub struct InjectedFault;

impl FaultInjection {
    /// The error with which the handler must return.
    ///
    /// # Panics
    /// For [`FaultInjection::Panic`], on purpose.
    pub fn inject(self) -> InjectedFault {
        match self {
            FaultInjection::Panic => panic!("{InjectedFault}"),
            FaultInjection::Fail => InjectedFault,
        }
    }
}
