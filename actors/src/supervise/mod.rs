//! Restart policies. ractor tells of deaths; what to do about them is decided here.

mod policy;

pub use policy::{Decision, Intensity, Policy, RestartLog};
