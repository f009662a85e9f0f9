//! The order of those that wait, for sequences and for pictures (ADR 13): the most urgent first, then by what their tenants
//! were given, then by age. None waits for good. Pure.

mod line;
mod rank;
mod tenants;
mod turn;

pub(crate) use line::Line;
pub use rank::Rank;
pub(crate) use tenants::Tenants;
pub(crate) use turn::{PASSES_MAX, Place, Turn};
