//! What kernels give on a CPU, and what they refuse. Whoever wants a GPU, or reads the compiled device code, is a program
//! of its own.

#[path = "../ground/mod.rs"]
mod ground;

mod arithmetic;
mod independence;
mod planning;
mod random_weights;
mod refusals;
