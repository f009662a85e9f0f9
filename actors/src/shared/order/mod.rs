//! The queue order of sequences and pictures (ADR 13): the most urgent first, then the tenant with
//! the smallest token counter, then the oldest. No entry waits forever.

mod fairness;
mod line;
mod tenants;

pub use fairness::Priority;
pub(crate) use line::Line;
