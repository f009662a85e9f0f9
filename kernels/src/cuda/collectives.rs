//! Collectives of the GPU ranks: dispatch to the kind of link in use, and collectives through
//! kernels of this project.

use std::ops::Range;

use bursar_budgets::{Address, Bytes};

use super::{
    arguments::{Argument, Extent, arguments, count},
    contract::all_reduce::{DATA_AT, NORM_THREADS_MAX, ODD_UNIT, PUSHED_UNITS, THREADS, UNIT},
    functions::Function,
    lane::Cuda,
    link::CudaLink,
    quantize,
    rank_link::RankLink,
};
use crate::{Backend, DType, KernelError, Tensor, backend::all_reduce_then_rms_norm, calls, ops::transfer};

/// Minimum size at which, with more than two ranks, the two-shot all-reduce (each rank sums its
/// share and reads the sums of the other ranks) is faster than the one-shot all-reduce. On four
/// H200s of one host, two-shot takes 23.1 us and one-shot 25.9 us for 1.75 MiB; for 1 MiB, two-shot
/// takes 19.6 us and one-shot 18.4 us (`tools/gpu/ranks.py`).
const TWO_SHOTS_FROM: Bytes = Bytes::kib(1536);

/// Minimum size at which, with more than two ranks, the all-reduce with a norm is faster in shares
/// (ranks write their shares into each other's memory) than in one shot. For 1 MiB, shares take
/// 17.6 us and one shot takes 19.6 us. For 448 KiB, shares take 13.4 us and one shot takes 12.4 us.
const SHARES_FROM: Bytes = Bytes::kib(768);

/// Minimum size of each collective if an all-reduce with a norm in shares is split into several
/// collectives. Each of these collectives takes 10 us longer than a one-shot collective of the same
/// size.
const SEVERAL_SHARES_FROM: Bytes = Bytes::mib(3);

/// Maximum size that is pushed at once to more than two ranks. For 7 KiB, pushing takes 6.5 us and
/// reading takes 6.8 us. For 16 KiB, pushing takes 10.0 us and reading takes 7.8 us.
const PUSHED_TO_MANY_MAX: Bytes = Bytes::kib(8);

/// Maximum threads per thread block for a norm that processes pieces of four rows. With more
/// threads, pieces have two rows. In both cases a piece is at most 32 KiB. The kernel for four rows
/// uses all registers of an SM, so it is used only for thread blocks that have more than two rows.
/// With fewer rows, the step is short, and registers are left free so that the next GEMM can begin
/// to read its weights on the same SM during the norm.
const PIECES_OF_4_THREADS_MAX: usize = NORM_THREADS_MAX / 2;

/// Bytes per row that a rank contributes to `best_of_ranks`: a number and its index.
const BEST_BYTES: usize = 8;

/// Address, columns and pitch of rows. Columns and pitch are counted in units.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    start: Address,
    columns: u32,
    pitch: u32,
}

impl Argument for Rows {}

pub(super) fn all_reduce(cuda: &Cuda, call: calls::AllReduce<'_>) -> Result<(), KernelError> {
    match &cuda.link {
        Some(RankLink::Kernels(link)) => link.all_reduce(cuda, call),
        Some(RankLink::Nccl(link)) => link.all_reduce(cuda, call),
        Some(RankLink::Copies(_)) | None => Err(KernelError::NoKernel { op: "all_reduce" }),
    }
}

pub(super) fn all_reduce_rms_norm(cuda: &Cuda, call: calls::AllReduceRmsNorm<'_>) -> Result<(), KernelError> {
    match &cuda.link {
        Some(RankLink::Kernels(link)) => link.all_reduce_rms_norm(cuda, call),
        _ => all_reduce_then_rms_norm(cuda, call),
    }
}

pub(super) fn all_gather(cuda: &Cuda, call: calls::AllGather<'_>) -> Result<(), KernelError> {
    match &cuda.link {
        Some(RankLink::Kernels(link)) => link.all_gather(cuda, call),
        Some(RankLink::Nccl(link)) => link.all_gather(cuda, call),
        Some(RankLink::Copies(link)) => {
            cuda.enter_to_copy()?;
            link.all_gather(&cuda.stream, call)
        }
        None => Err(KernelError::NoKernel { op: "all_gather" }),
    }
}

pub(super) fn best_of_ranks(cuda: &Cuda, call: calls::BestOfRanks<'_>) -> Result<(), KernelError> {
    match &cuda.link {
        Some(RankLink::Kernels(link)) => link.best_of_ranks(cuda, call),
        _ => Err(KernelError::NoKernel { op: "best_of_ranks" }),
    }
}

/// Notifies the other ranks that this rank takes part in no further collective.
pub(super) fn abort_collectives(cuda: &Cuda) {
    if let Some(RankLink::Kernels(link)) = &cuda.link {
        link.abort_collectives(cuda);
    }
}

impl CudaLink {
    /// Prepares a rank's exchange memory for its first collective.
    ///
    /// # Errors
    /// The copy fails.
    ///
    /// # Safety
    /// The memory must have the size that [`bytes`](CudaLink::bytes) returns and must be backed,
    /// and nothing else may use it yet.
    pub unsafe fn clear(cuda: &Cuda, memory: Address) -> Result<(), KernelError> {
        // SAFETY: the caller guarantees that the memory is backed and that nothing else uses it.
        let mut control = unsafe { Tensor::persistent(memory, [DATA_AT], DType::U8) };
        transfer::fill(cuda, &vec![0; DATA_AT], &mut control)?;
        cuda.wait()
    }

    /// Returns the number of rows of `row` bytes that fit in exchange memory at once.
    fn at_once(&self, row: usize) -> usize {
        self.exchange.half as usize / row.max(1)
    }

    /// Returns the number of rows per collective if `rows` rows are exchanged in shares, in
    /// collectives of equal size. Returns `None` if there are only two ranks, or if the collectives
    /// would be too small. Exchange memory must hold the sums of all rows of a collective. In
    /// addition, it must hold the partial sums that each other rank has for this rank's share: with
    /// N ranks, at most 1/N of the rows, plus one row for each thread block. See `all_reduce.cu`.
    fn at_once_in_shares(&self, rows: usize, row: usize) -> Option<usize> {
        let of = self.rank().of();
        let most = self.at_once(row).saturating_sub((of - 1) * self.blocks) * of / (2 * of - 1);
        let turns = rows.div_ceil(most.max(1)).max(1);
        let (at_once, least) = (rows.div_ceil(turns), if turns > 1 { SEVERAL_SHARES_FROM } else { SHARES_FROM });
        (of > 2 && most > 0 && at_once * row >= least.as_usize()).then_some(at_once)
    }

    /// Launches a kernel over the rows of `part` and `out`, as many rows at a time as fit in
    /// exchange memory. `whole` is the kernel for units of 16 bytes, `odd` the kernel for
    /// units of 2 bytes.
    fn launch(
        &self,
        cuda: &Cuda,
        (op, [whole, odd]): (&'static str, [Function; 2]),
        part: &Tensor<'_>,
        out: &Tensor<'_>,
        accumulate: Option<bool>,
    ) -> Result<(), KernelError> {
        cuda.enter()?;
        let (unit, row) = (unit([part, out]), bytes_of_a_row(part));
        for some in in_turns(part.rows(), self.at_once(row)).ok_or(KernelError::NoKernel { op })? {
            let (part, out) = (part.row_range(some.clone()), out.row_range(some));
            let units = part.rows() * row / unit;
            let extent = Extent::line(units.div_ceil(THREADS).min(self.blocks), THREADS);
            let arguments = arguments![self.exchange, rows(&part, unit), rows(&out, unit), units as u64];
            let arguments = match accumulate {
                Some(accumulate) => arguments.with(u32::from(accumulate)),
                None => arguments,
            };
            // SAFETY: the arguments match the kernel's parameters, the op layer has checked the
            // shapes, and the creator of the link guarantees that its memory is valid.
            unsafe { cuda.launch(if unit == UNIT { whole } else { odd }, extent, arguments)? };
        }
        Ok(())
    }

    fn all_reduce(&self, cuda: &Cuda, call: calls::AllReduce<'_>) -> Result<(), KernelError> {
        const OP: &str = "all_reduce";
        let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
        let whole = match (cuda.rank().of(), call.partial.bytes() >= TWO_SHOTS_FROM) {
            (2, _) => hopper.all_reduce_pieces,
            (3.., true) => hopper.all_reduce_two_shot,
            _ => hopper.all_reduce,
        };
        let kernels = [whole, hopper.all_reduce_odd];
        self.launch(cuda, (OP, kernels), &call.partial, &call.out, Some(call.accumulate))
    }

    fn all_reduce_rms_norm(&self, cuda: &Cuda, call: calls::AllReduceRmsNorm<'_>) -> Result<(), KernelError> {
        const OP: &str = "all_reduce_rms_norm";
        let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
        let (row, of) = (bytes_of_a_row(&call.partial), cuda.rank().of());
        let in_shares = self.at_once_in_shares(call.partial.rows(), row);
        let at_once = in_shares.unwrap_or_else(|| self.at_once(row));
        let is_whole =
            unit([&call.partial, &call.residual]) == UNIT && call.weight.address().0.is_multiple_of(UNIT as u64);
        let turns = in_turns(call.partial.rows(), at_once).filter(|_| is_whole && row / UNIT <= NORM_THREADS_MAX);
        // With more than four ranks, there is no kernel that both sums in shares and quantizes.
        let turns = turns.filter(|_| call.out.quantized.is_none() || in_shares.is_none() || of <= 4);
        let Some(turns) = turns else { return all_reduce_then_rms_norm(cuda, call) };
        cuda.enter()?;
        let threads = (row / UNIT).next_multiple_of(32);
        let forms = match call.out.quantized {
            Some(_) => &hopper.all_reduce_rms_norm_rounded,
            None => &hopper.all_reduce_rms_norm,
        };
        for some in turns {
            let bytes = some.len() * row;
            let kernel = match of {
                2 if bytes > PUSHED_UNITS * UNIT => {
                    let has_four = threads <= PIECES_OF_4_THREADS_MAX && some.len() > 2 * self.blocks;
                    forms.pieces[usize::from(has_four)]
                }
                2 => forms.pushed[0],
                5.. if in_shares.is_some() => hopper.all_reduce_rms_norm_shares_8,
                3.. if in_shares.is_some() => forms.shares_4,
                3.. if bytes <= PUSHED_TO_MANY_MAX.as_usize() => forms.pushed[1],
                _ => forms.read,
            };
            let extent = Extent::line(some.len().min(self.blocks), threads);
            let before = arguments![
                self.exchange,
                rows(&call.partial.row_range(some.clone()), UNIT),
                rows(&call.residual.row_range(some.clone()), UNIT),
                call.weight.address(),
                call.epsilon,
                call.weight_offset,
            ];
            let out = call.out.row_range(some.clone());
            let arguments = match &out.quantized {
                Some(quantized) => quantize::with_target(before, out.plain.as_ref(), quantized),
                None => before.with(out.any().address()),
            }
            .with(count(some.len()));
            // SAFETY: the arguments match the kernels' parameters, the op layer has checked the
            // shapes, and the creator of the link guarantees that its memory is valid.
            unsafe { cuda.launch(kernel, extent, arguments)? };
        }
        Ok(())
    }

    fn all_gather(&self, cuda: &Cuda, call: calls::AllGather<'_>) -> Result<(), KernelError> {
        const OP: &str = "all_gather";
        let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
        let kernels = [hopper.all_gather, hopper.all_gather_odd];
        self.launch(cuda, (OP, kernels), &call.part, &call.out, None)
    }

    /// Implements [`Backend::abort_collectives`]. If this rank's device accepts no launch, the
    /// other ranks notice only after `patience` that this rank is missing.
    fn abort_collectives(&self, cuda: &Cuda) {
        if let (Some(hopper), Ok(())) = (&cuda.entry_points().hopper, cuda.enter()) {
            // SAFETY: the argument matches the kernel's only parameter, and the creator of the link
            // guarantees that its memory is valid.
            drop(unsafe { cuda.launch(hopper.part_from_ranks, Extent::line(1, 32), arguments![self.exchange]) });
        }
    }

    fn best_of_ranks(&self, cuda: &Cuda, call: calls::BestOfRanks<'_>) -> Result<(), KernelError> {
        const OP: &str = "best_of_ranks";
        let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
        cuda.enter()?;
        for some in in_turns(call.x.rows(), self.at_once(BEST_BYTES)).ok_or(KernelError::NoKernel { op: OP })? {
            let extent = Extent::line(some.len().div_ceil(THREADS).min(self.blocks), THREADS);
            let arguments = arguments![
                self.exchange,
                call.x.row_range(some.clone()).address(),
                count(call.x.pitch()),
                count(call.first),
                call.out.row_range(some.clone()).address(),
                count(some.len()),
            ];
            // SAFETY: the arguments match the kernel's parameters, the op layer has checked the
            // shapes, and the creator of the link guarantees that its memory is valid.
            unsafe { cuda.launch(hopper.best_of_ranks, extent, arguments)? };
        }
        Ok(())
    }
}

/// Splits the rows into ranges of `at_once` rows. Returns `None` if `at_once` is 0.
fn in_turns(rows: usize, at_once: usize) -> Option<impl Iterator<Item = Range<usize>>> {
    (at_once > 0).then(|| (0..rows).step_by(at_once).map(move |first| first..rows.min(first + at_once)))
}

fn bytes_of_a_row(part: &Tensor<'_>) -> usize {
    part.dtype().bytes(part.columns()).as_usize()
}

/// Returns the bytes of a unit: `UNIT` if in both tensors each row begins on a multiple of `UNIT`
/// and is a whole number of such units, otherwise `ODD_UNIT`.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{super::contract::all_reduce::RANKS_MAX, *};

    fn link(of: usize, largest: Bytes, sms: usize) -> CudaLink {
        let memory = vec![Address(0); of];
        // SAFETY: these tests launch nothing, so no kernel accesses the memory.
        let ends = unsafe { CudaLink::between(&memory, largest, Duration::ZERO, sms, 1) };
        ends.into_iter().next().expect("a rank")
    }

    #[test]
    fn reduction_shares_fit_the_buffer_and_are_large() {
        let row = 7168;
        for of in 2..=RANKS_MAX {
            for (tokens, sms) in [(128, 132), (512, 132), (1100, 132), (2048, 66), (8448, 132), (8448, 16)] {
                let link = link(of, Bytes(tokens * row as u64), sms);
                for rows in (1..=tokens as usize).step_by(37) {
                    let Some(at_once) = link.at_once_in_shares(rows, row) else { continue };
                    let grid = at_once.min(link.blocks);
                    let pieces = at_once.div_ceil(grid).div_ceil(of);
                    let used = at_once + (of - 1) * pieces * grid;
                    assert!(used <= tokens as usize, "{at_once} of {rows} rows on {of} ranks exceed {tokens} tokens");
                    assert!(of > 2 && at_once * row >= SHARES_FROM.as_usize());
                }
                let of_all = link.at_once_in_shares(tokens as usize, row);
                assert_eq!(of_all.is_some(), of > 2 && tokens >= 2048, "{tokens} tokens of {of} ranks: {of_all:?}");
            }
        }
    }
}
