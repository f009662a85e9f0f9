//! Results of kernels on a CPU, and the arguments that they refuse. Tests that need a GPU or read
//! the compiled device code are separate programs.

#[path = "../ground/mod.rs"]
mod ground;

mod arithmetic;
mod block_weights;
mod copies;
mod faults;
mod fp8;
mod fp8_cache;
mod independence;
mod int4_weights;
mod planning;
mod random_weights;
mod ranks;
mod refusals;
mod states;
