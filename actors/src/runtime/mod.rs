//! The runtime: budgets, engines, and the handle that users hold.

mod actor;
mod device;
mod handle;
mod health;
mod loss;
mod message;
mod show;
mod unwinding;

pub use actor::{RuntimeActor, RuntimeArguments};
pub use device::{DeviceChoice, MakeDevice};
pub use handle::{ModelSource, Runtime, RuntimeConfig, RuntimeError};
pub use health::{Health, ModelHealth};
pub use loss::{Losses, Shown};
pub use message::{Home, RuntimeMessage, Supervised};
