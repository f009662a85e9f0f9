//! The runtime: budgets, engines, and the handle that users hold.

mod actor;
mod handle;
mod message;

pub use actor::{RuntimeActor, RuntimeArguments};
pub use handle::{DeviceChoice, ModelSource, Runtime, RuntimeConfig, RuntimeError};
pub use message::{RuntimeMessage, Supervised};
