//! The contract between the host and the device code: constants, and the table of entry points.
//!
//! `numbers.rs` and `row_numbers.rs` have tile sizes, thread counts, shared memory sizes and flags;
//! `kernels/cuda/include/contract.cuh` is generated from them. `entry_points.rs` has every kernel
//! as a typed handle. Tests compare the constants with the generated header, and the table of entry
//! points with the kernel sources and the compiled code.

#[cfg(test)]
mod compiled;
mod entry_points;
mod families;
#[cfg(test)]
mod header;
mod numbers;
mod row_numbers;
mod sizes;
mod sources;

pub(super) use entry_points::{
    EntryPoint, EntryPoints, Experts, Generation, HopperEntryPoints, Int4, PagedHopper, QuantizedCache,
};
pub(super) use numbers::{fp8 as quantize, *};
pub(super) use row_numbers::*;
pub(super) use sizes::{GATED_WIDTHS, PLACES, SmallMRows, TILED_ROWS};
pub(crate) use sizes::{HeadDim, HopperHeadDim, PackedHeadDim};
