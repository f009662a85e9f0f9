//! Choosing a place in a row of numbers: the arithmetic of [`sample`](crate::Scope::sample_into), and what it is asked.
//!
//! The order is that of vLLM's `v1/sample/sampler.py`, and of transformers 5.17's `generation/logits_process.py` where both
//! have a step:
//!
//! 1. log-probabilities are read off, before anything is changed; a row whose token is given is done then;
//! 2. a grammar's mask forbids what cannot follow;
//! 3. single tokens are forbidden;
//! 4. biases are added;
//! 5. repetition, frequency and presence penalties;
//! 6. greedy choice; or temperature, top-k, top-p, min-p (in transformers' order; vLLM has min-p before top-k), and a
//!    draw.

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
pub use row::{Fault, NO_REPORT, ROW_WORDS, SampleRow, TOP_MAX, Wishes};
