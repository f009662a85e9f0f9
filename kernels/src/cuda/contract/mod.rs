//! What the host and the device code agree on, once: numbers, and which entry points there are.
//!
//! `numbers.rs` has tile sizes, threads, shared memory and flags; `kernels/cuda/include/contract.cuh` is generated from
//! it. `entry_points.rs` has every kernel as a typed handle. Tests hold both to the sources and to the compiled code.

#[cfg(test)]
mod compiled;
mod entry_points;
#[cfg(test)]
mod header;
mod numbers;
mod sizes;

pub(super) use entry_points::{E4m3Cache, EntryPoint, EntryPoints, Experts, HopperEntryPoints, LinearE4m3, TiledE4m3};
pub(super) use numbers::*;
pub(super) use sizes::{FewRows, GATED_WIDTHS, PLACES, TILED_ROWS};
pub(crate) use sizes::{HeadDim, PackedHeadDim};
