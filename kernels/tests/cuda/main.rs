//! Tests of kernels and collectives on a GPU. Without a GPU, each test prints that it is skipped.

#[path = "../ground/mod.rs"]
mod ground;

mod copies;
mod graph;
mod int4;
mod links;
mod operations;
mod ranks;
mod states;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The lock that each test holds while it uses the GPU, because all tests share one GPU.
type GpuLock = MutexGuard<'static, ()>;

fn gpu_lock() -> GpuLock {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
