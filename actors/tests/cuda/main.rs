//! Tests of engines and lanes on a GPU. Without a GPU, each test prints a note and passes. After the
//! loss of a GPU, its process cannot use a GPU again, so `cuda_lost.rs` is a separate program.

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
