//! What kernels give on a CPU, and what they refuse. Tests that need a GPU or read the compiled device code are
//! programs of their own.

#[path = "../ground/mod.rs"]
mod ground;

mod arithmetic;
mod copies;
mod faults;
mod fp8;
mod fp8_cache;
mod independence;
mod planning;
mod random_weights;
mod ranks;
mod refusals;
