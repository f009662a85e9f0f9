//! The runtime: budgets, engines, and the handle that users hold.

mod actor;
mod handle;
mod message;
mod unwinding;

pub use actor::{RuntimeActor, RuntimeArguments};
pub use handle::{DeviceChoice, ModelSource, Runtime, RuntimeConfig, RuntimeError};
pub use message::{Home, RuntimeMessage, Supervised};
