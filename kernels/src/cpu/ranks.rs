//! What host ranks compute together: sums of partial results, and columns side by side.

use super::{
    link::{Brought, HostLink},
    memory::write_rows,
    threads::Threads,
};
use crate::{
    KernelError,
    ops::{all_gather, all_reduce},
};

/// Numbers that are added up at a time; few enough for registers and the nearest cache.
const AT_ONCE: usize = 256;

/// Every rank reads all others' rows, as one shot over peer-mapped memory does.
pub(super) fn all_reduce(
    threads: &Threads,
    link: Option<&HostLink>,
    call: all_reduce::Call<'_>,
) -> Result<(), KernelError> {
    let own = Brought::of("all_reduce", &call.partial);
    let sum = |all: &[Brought]| {
        write_rows(threads, &call.out, all.len(), |row, out| {
            for (part, out) in out.chunks_mut(AT_ONCE).enumerate() {
                let mut total = [0.0; AT_ONCE];
                let total = &mut total[..out.len()];
                for (rank, brought) in all.iter().enumerate() {
                    // SAFETY: this runs during the meeting.
                    let other = &unsafe { brought.row(row) }[part * AT_ONCE..][..out.len()];
                    match rank {
                        0 => total.copy_from_slice(other),
                        _ => total.iter_mut().zip(other).for_each(|(total, other)| *total += other),
                    }
                }
                match call.accumulate {
                    true => out.iter_mut().zip(&*total).for_each(|(out, total)| *out += total),
                    false => out.copy_from_slice(total),
                }
            }
        });
    };
    meet(link, own, sum)
}

pub(super) fn all_gather(
    threads: &Threads,
    link: Option<&HostLink>,
    call: all_gather::Call<'_>,
) -> Result<(), KernelError> {
    let (own, columns) = (Brought::of("all_gather", &call.part), call.part.columns());
    let gather = |all: &[Brought]| {
        write_rows(threads, &call.out, 1, |row, out| {
            for (out, part) in out.chunks_exact_mut(columns.max(1)).zip(all) {
                // SAFETY: this runs during the meeting.
                out.copy_from_slice(unsafe { part.row(row) });
            }
        });
    };
    meet(link, own, gather)
}

/// One rank alone reads what it has itself.
fn meet(link: Option<&HostLink>, own: Brought, read: impl FnOnce(&[Brought])) -> Result<(), KernelError> {
    match link {
        Some(link) => link.meet(own, read),
        None => {
            read(&[own]);
            Ok(())
        }
    }
}
