//! Choice of a token from a row of logits: the options, and
//! the arithmetic of [`sample`](crate::Scope::sample_into).
//!
//! The steps follow vLLM's `v1/sample/sampler.py`, and transformers 5.17's
//! `generation/logits_process.py` for the steps that both have:
//!
//! 1. log-probabilities are computed from the unchanged logits; a row whose token is given, as in
//!    prompt scoring, skips the remaining steps;
//! 2. a grammar's mask forbids tokens that cannot follow;
//! 3. single tokens are forbidden;
//! 4. biases are added;
//! 5. repetition, frequency and presence penalties are applied;
//! 6. the likeliest token is chosen, or temperature, top-k, min-p and top-p are applied and a token
//!    is drawn. The result is the same as vLLM's. transformers applies min-p after top-p.

mod batch;
mod candidates;
mod changes;
mod choose;
mod distribution;
mod layout;
pub mod philox;
mod row;

pub(crate) use batch::NO_MASK;
pub use batch::SampleBatch;
pub use candidates::Candidate;
pub use changes::restrict;
pub use choose::{ChoiceScratch, choose, fault_of};
pub use distribution::Distribution;
pub use layout::{LISTED_MAX, SampleLayout, SampleList};
pub(crate) use row::NONE_GIVEN;
pub use row::{Fault, NO_REPORT, ROW_WORDS, RowLists, SampleRow, TOP_MAX};
