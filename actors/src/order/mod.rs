//! The order of those that wait, for sequences and for pictures (ADR 13): the most urgent first, then by what their tenants
//! were given, then by age. None waits for good. Pure.

mod fairness;
mod line;
mod priority;
mod tenants;

pub(crate) use fairness::{OldestWaiting, PASSES_MAX, QueuePosition};
pub(crate) use line::Line;
pub use priority::Priority;
pub(crate) use tenants::Tenants;
