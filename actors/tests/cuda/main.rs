//! Tests of engines and lanes on a GPU. Without a GPU, each test prints a note and passes. On a
//! GPU, run each module in its own process, as `tools/gpu/check.sh` does, because CUDA libraries
//! keep memory until the process ends. `cuda_lost.rs` is a separate program, because a process that
//! has lost a GPU cannot use any GPU again.

#[path = "../leased/mod.rs"]
mod leased;

mod drills;
mod elastic;
mod faults;
mod full_card;
mod gpu;
mod graphs;
mod group;
mod memory;
mod serving;
