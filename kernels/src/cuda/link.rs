//! The link between GPU ranks: memory of each that all have mapped, and kernels that meet in it.

use std::{ops::Range, time::Duration};

use bursar_budgets::{Address, Bytes, DeviceError};

use super::{
    Cuda,
    contract::all_reduce::{
        BLOCKS_MAX, DATA_AT, FAILED_AT, NORM_THREADS_MAX, ODD_UNIT, PUSHED_UNITS, RANKS_MAX, THREADS, UNIT,
    },
    launch::{Extent, Function, arguments, count},
    quantize,
};
use crate::{
    Backend, DType, KernelError, Rank, Tensor,
    ops::{all_gather, all_reduce, all_reduce_rms_norm, best_of_ranks, transfer},
};

/// A rank's end of the link between the GPU ranks of a group.
///
/// All ranks come to the same operations in the same order. One that does not come in time breaks the link: what the
/// others compute is undefined from then on, and they get [`DeviceError::Lost`] when they next wait for results.
pub struct CudaLink {
    exchange: Exchange,
    /// Most blocks of a launch.
    blocks: usize,
}

/// What a launch is told of the exchange memory, as `all_reduce.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Exchange {
    control: [u64; RANKS_MAX],
    data: [u64; RANKS_MAX],
    half: u64,
    patience: u64,
    rank: u32,
    ranks: u32,
    apart: u32,
}

/// Where rows of units are.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Rows {
    start: Address,
    columns: u32,
    pitch: u32,
}

/// Of more than two ranks, from here on two shots, each of a part, are faster than one of all. On four H200s of one host they
/// take 23.1 us and one 25.9 of 1.75 MiB, and 19.6 and 18.4 of 1 MiB (`tools/gpu/ranks.py`).
const TWO_SHOTS_FROM: Bytes = Bytes::kib(1536);

/// The same of sums with a norm, in which ranks write their shares into each other's memory: 17.6 us and 19.6 of 1 MiB, 13.4
/// and 12.4 of 448 KiB.
const SHARES_FROM: Bytes = Bytes::kib(768);

/// Least of each of several exchanges in shares, of which each takes 10 us more than a part of one that is read.
const SEVERAL_SHARES_FROM: Bytes = Bytes::mib(3);

/// Most that is pushed to more than two ranks at once: of 7 KiB it takes 6.5 us there and reading 6.8, of 16 KiB 10.0 and 7.8.
const PUSHED_TO_MANY_MAX: Bytes = Bytes::kib(8);

/// Most threads of a norm whose pieces have four rows; above, they have two. Both make 32 KiB at most. Four take all
/// registers of a multiprocessor, so they are for blocks that have more than two rows: with fewer, a step is short, and the
/// next product begins to read its weights beside it.
const PIECES_OF_4_THREADS_MAX: usize = NORM_THREADS_MAX / 2;

/// Bytes that a rank brings of a row for the best of all: a number and its place.
const BEST_BYTES: usize = 8;

impl CudaLink {
    /// Bytes of the note of a rank that did not come.
    pub(super) const NOTE: usize = 4;

    /// Bytes of exchange memory that each rank leases, for exchanges of `largest` at once. What is larger takes
    /// several.
    pub fn bytes(largest: Bytes) -> Bytes {
        Bytes(DATA_AT as u64) + largest.round_up(Bytes(UNIT as u64)) * 2
    }

    /// Makes a rank's exchange memory ready for its first exchange.
    ///
    /// # Errors
    /// The copy fails.
    ///
    /// # Safety
    /// The memory has [`bytes`](CudaLink::bytes) that are backed, and nothing else uses them yet.
    pub unsafe fn clear(cuda: &Cuda, memory: Address) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        let mut control = unsafe { Tensor::persistent(memory, [DATA_AT], DType::U8) };
        transfer::fill(cuda, &vec![0; DATA_AT], &mut control)?;
        cuda.wait()
    }

    /// The ends of a link between ranks, in the order of their indices. `memory` is each rank's exchange memory, of
    /// [`bytes`](CudaLink::bytes) of `largest`, [cleared](CudaLink::clear). A rank waits `patience` for the others in
    /// each operation. Of `processors` multiprocessors of a device each of the `sharing` ranks on it has a part, so that
    /// all blocks that wait for others can run at once.
    ///
    /// # Safety
    /// Each memory is backed, begins on a page, is mapped by the devices of all ranks, and stays so until all work of
    /// all ranks has ended.
    ///
    /// # Panics
    /// Unless there are 1 to 8 ranks.
    pub unsafe fn between(
        memory: &[Address],
        largest: Bytes,
        patience: Duration,
        processors: usize,
        sharing: usize,
    ) -> Vec<CudaLink> {
        assert!((1..=RANKS_MAX).contains(&memory.len()), "{} ranks", memory.len());
        let (mut control, mut data) = ([0; RANKS_MAX], [0; RANKS_MAX]);
        for (rank, memory) in memory.iter().enumerate() {
            (control[rank], data[rank]) = (memory.0, memory.offset(Bytes(DATA_AT as u64)).0);
        }
        let half = largest.round_up(Bytes(UNIT as u64)).0;
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        let end = |rank: Rank| {
            let (rank, ranks, apart) = (count(rank.index()), count(rank.of()), u32::from(sharing == 1));
            let exchange = Exchange { control, data, half, patience, rank, ranks, apart };
            CudaLink { exchange, blocks: (processors / sharing).clamp(1, BLOCKS_MAX) }
        };
        Rank::all(memory.len()).map(end).collect()
    }

    /// Its place in the group.
    pub fn rank(&self) -> Rank {
        Rank::new(self.exchange.rank as usize, self.exchange.ranks as usize)
    }

    /// How many rows of so many bytes exchange memory holds at once.
    fn at_once(&self, row: usize) -> usize {
        self.exchange.half as usize / row.max(1)
    }

    /// The same of `rows` in shares, as even exchanges. None if they would be small. Of N ranks, exchange memory then holds the
    /// sums of an exchange's rows and, from each other rank, its part of those of a share: at most 1/N of them, and one for
    /// each block. See `all_reduce.cu`.
    fn at_once_in_shares(&self, rows: usize, row: usize) -> Option<usize> {
        let of = self.rank().of();
        let most = self.at_once(row).saturating_sub((of - 1) * self.blocks) * of / (2 * of - 1);
        let turns = rows.div_ceil(most.max(1)).max(1);
        let (at_once, least) = (rows.div_ceil(turns), if turns > 1 { SEVERAL_SHARES_FROM } else { SHARES_FROM });
        (of > 2 && most > 0 && at_once * row >= least.as_usize()).then_some(at_once)
    }

    /// Where the device notes who did not come.
    pub(super) fn failed_at(&self) -> Address {
        Address(self.exchange.control[self.rank().index()]).offset(Bytes(FAILED_AT as u64))
    }

    /// The error of a link whose note is `failed`.
    pub(super) fn check(failed: [u8; CudaLink::NOTE]) -> Result<(), DeviceError> {
        match u32::from_le_bytes(failed).checked_sub(1) {
            None => Ok(()),
            Some(rank) => {
                let reason = format!("a collective of the model's ranks failed: rank {rank} did not join it in time");
                Err(DeviceError::Lost { reason })
            }
        }
    }
}

/// Rows, `at_once` at a time. None if that is not one.
fn in_turns(rows: usize, at_once: usize) -> Option<impl Iterator<Item = Range<usize>>> {
    (at_once > 0).then(|| (0..rows).step_by(at_once).map(move |first| first..rows.min(first + at_once)))
}

fn bytes_of_a_row(part: &Tensor<'_>) -> usize {
    part.dtype().bytes(part.columns()).as_usize()
}

/// A unit that all of the rows of both begin and end with.
fn unit(tensors: [&Tensor<'_>; 2]) -> usize {
    let is_whole = |tensor: &Tensor<'_>| {
        let [pitch, columns] = [tensor.pitch(), tensor.columns()].map(|count| tensor.dtype().bytes(count).as_usize());
        tensor.address().0.is_multiple_of(UNIT as u64) && pitch.is_multiple_of(UNIT) && columns.is_multiple_of(UNIT)
    };
    if tensors.into_iter().all(is_whole) { UNIT } else { ODD_UNIT }
}

fn rows(tensor: &Tensor<'_>, unit: usize) -> Rows {
    let units = |elements: usize| count(tensor.dtype().bytes(elements).as_usize() / unit);
    Rows { start: tensor.address(), columns: units(tensor.columns()), pitch: units(tensor.pitch()) }
}

impl Cuda {
    /// Launches `kernel` over rows of `part` and `out`, as many at a time as exchange memory holds.
    fn exchange(
        &self,
        link: &CudaLink,
        (op, [whole, odd]): (&'static str, [Function; 2]),
        part: &Tensor<'_>,
        out: &Tensor<'_>,
        accumulate: Option<bool>,
    ) -> Result<(), KernelError> {
        self.enter()?;
        let (unit, row) = (unit([part, out]), bytes_of_a_row(part));
        for some in in_turns(part.rows(), link.at_once(row)).ok_or(KernelError::NoKernel { op })? {
            let (part, out) = (part.row_range(some.clone()), out.row_range(some));
            let units = part.rows() * row / unit;
            let extent = Extent::line(units.div_ceil(THREADS).min(link.blocks), THREADS);
            let arguments = arguments![link.exchange, rows(&part, unit), rows(&out, unit), units as u64];
            let arguments = match accumulate {
                Some(accumulate) => arguments.with(u32::from(accumulate)),
                None => arguments,
            };
            // SAFETY: these are the kernel's parameters, the front has checked the shapes, and the maker of the link
            // vouches for its memory.
            unsafe { self.launch(if unit == UNIT { whole } else { odd }, extent, arguments)? };
        }
        Ok(())
    }
}

pub(super) fn all_reduce(cuda: &Cuda, link: &CudaLink, call: all_reduce::Call<'_>) -> Result<(), KernelError> {
    const OP: &str = "all_reduce";
    let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
    let whole = match (cuda.rank().of(), call.partial.bytes() >= TWO_SHOTS_FROM) {
        (2, _) => hopper.all_reduce_pieces,
        (3.., true) => hopper.all_reduce_two_shot,
        _ => hopper.all_reduce,
    };
    let kernels = [whole, hopper.all_reduce_odd];
    cuda.exchange(link, (OP, kernels), &call.partial, &call.out, Some(call.accumulate))
}

pub(super) fn all_reduce_rms_norm(
    cuda: &Cuda,
    link: &CudaLink,
    call: all_reduce_rms_norm::Call<'_>,
) -> Result<(), KernelError> {
    const OP: &str = "all_reduce_rms_norm";
    let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
    let (row, of) = (bytes_of_a_row(&call.partial), cuda.rank().of());
    let in_shares = link.at_once_in_shares(call.partial.rows(), row);
    let at_once = in_shares.unwrap_or_else(|| link.at_once(row));
    let is_whole = unit([&call.partial, &call.residual]) == UNIT && call.weight.address().0.is_multiple_of(UNIT as u64);
    let turns = in_turns(call.partial.rows(), at_once).filter(|_| is_whole && row / UNIT <= NORM_THREADS_MAX);
    // Of more than four ranks shares are not rounded in the same kernel.
    let turns = turns.filter(|_| call.out.rounded.is_none() || in_shares.is_none() || of <= 4);
    let Some(turns) = turns else { return all_reduce_rms_norm::in_two(cuda, call) };
    cuda.enter()?;
    let threads = (row / UNIT).next_multiple_of(32);
    let forms = match call.out.rounded {
        Some(_) => &hopper.all_reduce_rms_norm_rounded,
        None => &hopper.all_reduce_rms_norm,
    };
    for some in turns {
        let bytes = some.len() * row;
        let kernel = match of {
            2 if bytes > PUSHED_UNITS * UNIT => {
                let has_four = threads <= PIECES_OF_4_THREADS_MAX && some.len() > 2 * link.blocks;
                forms.pieces[usize::from(has_four)]
            }
            2 => forms.pushed[0],
            5.. if in_shares.is_some() => hopper.all_reduce_rms_norm_shares_8,
            3.. if in_shares.is_some() => forms.shares_4,
            3.. if bytes <= PUSHED_TO_MANY_MAX.as_usize() => forms.pushed[1],
            _ => forms.read,
        };
        let extent = Extent::line(some.len().min(link.blocks), threads);
        let before = arguments![
            link.exchange,
            rows(&call.partial.row_range(some.clone()), UNIT),
            rows(&call.residual.row_range(some.clone()), UNIT),
            call.weight.address(),
            call.epsilon,
        ];
        let out = call.out.row_range(some.clone());
        let arguments = match &out.rounded {
            Some(rounded) => quantize::with_target(before, out.plain.as_ref(), rounded),
            None => before.with(out.any().address()),
        }
        .with(count(some.len()));
        // SAFETY: these are the kernels' parameters, the front has checked the shapes, and the maker of the link vouches for
        // its memory.
        unsafe { cuda.launch(kernel, extent, arguments)? };
    }
    Ok(())
}

pub(super) fn all_gather(cuda: &Cuda, link: &CudaLink, call: all_gather::Call<'_>) -> Result<(), KernelError> {
    const OP: &str = "all_gather";
    let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
    let kernels = [hopper.all_gather, hopper.all_gather_odd];
    cuda.exchange(link, (OP, kernels), &call.part, &call.out, None)
}

/// As [`Backend::part`]. Of a device that takes no launch the others learn after their patience.
pub(super) fn part(cuda: &Cuda, link: &CudaLink) {
    if let (Some(hopper), Ok(())) = (&cuda.entry_points().hopper, cuda.enter()) {
        // SAFETY: this is the kernel's parameter, and the maker of the link vouches for its memory.
        drop(unsafe { cuda.launch(hopper.part_from_ranks, Extent::line(1, 32), arguments![link.exchange]) });
    }
}

pub(super) fn best_of_ranks(cuda: &Cuda, link: &CudaLink, call: best_of_ranks::Call<'_>) -> Result<(), KernelError> {
    const OP: &str = "best_of_ranks";
    let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
    cuda.enter()?;
    for some in in_turns(call.x.rows(), link.at_once(BEST_BYTES)).ok_or(KernelError::NoKernel { op: OP })? {
        let extent = Extent::line(some.len().div_ceil(THREADS).min(link.blocks), THREADS);
        let arguments = arguments![
            link.exchange,
            call.x.row_range(some.clone()).address(),
            count(call.x.pitch()),
            count(call.first),
            call.out.row_range(some.clone()).address(),
            count(some.len()),
        ];
        // SAFETY: these are the kernel's parameters, the front has checked the shapes, and the maker of the link vouches for
        // its memory.
        unsafe { cuda.launch(hopper.best_of_ranks, extent, arguments)? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(of: usize, largest: Bytes, processors: usize) -> CudaLink {
        let memory = vec![Address(0); of];
        // SAFETY: nothing is launched.
        let ends = unsafe { CudaLink::between(&memory, largest, Duration::ZERO, processors, 1) };
        ends.into_iter().next().expect("a rank")
    }

    #[test]
    fn shares_fit_a_half_and_are_large() {
        let row = 7168;
        for of in 2..=RANKS_MAX {
            for (tokens, processors) in [(128, 132), (512, 132), (1100, 132), (2048, 66), (8448, 132), (8448, 16)] {
                let link = link(of, Bytes(tokens * row as u64), processors);
                for rows in (1..=tokens as usize).step_by(37) {
                    let Some(at_once) = link.at_once_in_shares(rows, row) else { continue };
                    let grid = at_once.min(link.blocks);
                    let pieces = at_once.div_ceil(grid).div_ceil(of);
                    let used = at_once + (of - 1) * pieces * grid;
                    assert!(used <= tokens as usize, "{at_once} of {rows} rows, {of} ranks, {tokens} tokens");
                    assert!(of > 2 && at_once * row >= SHARES_FROM.as_usize());
                }
                let of_all = link.at_once_in_shares(tokens as usize, row);
                assert_eq!(of_all.is_some(), of > 2 && tokens >= 2048, "{tokens} tokens of {of} ranks: {of_all:?}");
            }
        }
    }
}
