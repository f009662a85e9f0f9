//! Restart policies. ractor tells of deaths; what to do about them is decided here.

mod drill;
mod errand;
mod news;
mod policy;

pub use drill::{Drill, Drilled};
pub use errand::{Errand, ErrandDied, Latest};
pub use news::{end_of, runs};
pub use policy::{Decision, Intensity, Policy, RestartLog};
