//! Collectives of host ranks: sums of partial results, concatenated columns, and the
//! largest of all elements.

use std::slice;

use super::{
    memory::{Rows, start_of, write_rows},
    threads::Threads,
};
use crate::{
    DType, KernelError, Tensor,
    calls::{self, NO_CHOICE},
    host_link::{Contribution, HostLink},
};

/// Numbers that are summed at a time, few enough for registers and the L1 cache.
const AT_ONCE: usize = 256;

/// Every rank reads the rows of all other ranks, like a one-shot
/// all-reduce over peer-mapped memory.
pub(super) fn all_reduce(
    threads: &Threads,
    link: Option<&HostLink>,
    call: calls::AllReduce<'_>,
) -> Result<(), KernelError> {
    let own = contribution("all_reduce", &call.partial);
    let sum = |all: &[Contribution]| {
        write_rows(threads, &call.out, all.len(), |row, out| {
            for (part, out) in out.chunks_mut(AT_ONCE).enumerate() {
                let mut total = [0.0; AT_ONCE];
                let total = &mut total[..out.len()];
                for (rank, contributed) in all.iter().enumerate() {
                    // SAFETY: this closure runs during the collective, so every rank's rows
                    // are valid and unchanged.
                    let other = &unsafe { row_of(contributed, row) }[part * AT_ONCE..][..out.len()];
                    match rank {
                        0 => total.copy_from_slice(other),
                        _ => total.iter_mut().zip(other).for_each(|(total, other)| *total += other),
                    }
                }
                if call.accumulate {
                    out.iter_mut().zip(&*total).for_each(|(out, total)| *out += total)
                } else {
                    out.copy_from_slice(total)
                }
            }
        });
    };
    exchange(link, own, sum)
}

pub(super) fn all_gather(
    threads: &Threads,
    link: Option<&HostLink>,
    call: calls::AllGather<'_>,
) -> Result<(), KernelError> {
    let (own, columns) = (contribution("all_gather", &call.part), call.part.columns());
    let gather = |all: &[Contribution]| {
        write_rows(threads, &call.out, 1, |row, out| {
            for (out, part) in out.chunks_exact_mut(columns.max(1)).zip(all) {
                // SAFETY: this closure runs during the collective, so every rank's rows
                // are valid and unchanged.
                out.copy_from_slice(unsafe { row_of(part, row) });
            }
        });
    };
    exchange(link, own, gather)
}

pub(super) fn best_of_ranks(link: Option<&HostLink>, call: calls::BestOfRanks<'_>) -> Result<(), KernelError> {
    let x = Rows::<f32>::of(&call.x);
    // SAFETY: the op layer has checked that `out` is writable `[rows]` u32, and nothing else
    // accesses it during the call.
    let out = unsafe { slice::from_raw_parts_mut(start_of::<u32>(&call.out), call.out.rows()) };
    // For each row, a value and the bits of its index among all columns.
    let found = out.iter().enumerate().flat_map(|(row, place)| match *place {
        NO_CHOICE => [0.0, f32::from_bits(NO_CHOICE)],
        place => [x.row(row)[place as usize], f32::from_bits(call.first as u32 + place)],
    });
    let own: Vec<f32> = found.collect();
    let pick = |all: &[Contribution]| {
        for (row, out) in out.iter_mut().enumerate() {
            // SAFETY: this closure runs during the collective, so every rank's rows
            // are valid and unchanged.
            let found =
                all.iter().map(|contributed| unsafe { row_of(contributed, row) }).map(|row| (row[0], row[1].to_bits()));
            let numbers = found.filter(|(_, place)| *place != NO_CHOICE);
            let best = numbers.reduce(|best, next| if next.0 > best.0 { next } else { best });
            *out = best.map_or(NO_CHOICE, |(_, place)| place);
        }
    };
    exchange(link, Contribution::rows("best_of_ranks", &own, 2), pick)
}

/// Calls `read` with the data of all ranks. Without a link there is one rank, which
/// reads its own data.
fn exchange(link: Option<&HostLink>, own: Contribution, read: impl FnOnce(&[Contribution])) -> Result<(), KernelError> {
    match link {
        Some(link) => link.exchange(own, read),
        None => {
            read(&[own]);
            Ok(())
        }
    }
}

/// Prepares an f32 tensor in host memory for a collective.
fn contribution(op: &'static str, tensor: &Tensor<'_>) -> Contribution {
    // This call panics if the tensor has another type or is not in host memory.
    start_of::<f32>(tensor);
    Contribution::of(op, tensor)
}

/// Returns row `row` of the data that a rank contributed to a collective.
///
/// # Safety
/// The collective to which the data was contributed must not be over while the slice is alive.
unsafe fn row_of(contributed: &Contribution, row: usize) -> &[f32] {
    let [rows, columns] = contributed.shape;
    assert!(row < rows && contributed.dtype == DType::F32, "row {row} of {rows}");
    // SAFETY: the rank that contributed the data guarantees that its rows are valid, and it neither
    // frees nor writes them during the collective.
    unsafe { std::slice::from_raw_parts((contributed.start.0 as *const f32).add(row * contributed.pitch), columns) }
}
