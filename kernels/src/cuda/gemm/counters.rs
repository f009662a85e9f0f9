//! Counters through which thread blocks find out which of them finishes a tile last, in the small-m
//! kernel and in the kernel for weights of 4-bit integers.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use bursar_budgets::{Address, Overhead};

use super::super::{
    contract::gemm_small_m::{STREAM_COUNTERS, STREAMS},
    error::OpenError,
    functions::Functions,
    stream::Stream,
};
use crate::DType;

/// Bit mask of the counter sets in use.
#[derive(Default)]
pub(in super::super) struct CounterSets(AtomicU32);

/// The counters of one stream, which are zero between launches. Streams that run concurrently
/// must not share counters.
pub(in super::super) struct Counters {
    pub(super) address: Address,
    set: usize,
    sets: Arc<CounterSets>,
    stream: Arc<Overhead<Stream>>,
}

impl Counters {
    /// Takes a set of counters for `stream`. Returns `None` if the device has neither the small-m
    /// kernel nor the kernel for 4-bit integers, or if eight other streams use all sets. Launches
    /// of both kernels in one stream share a set.
    pub(in super::super) fn take(
        functions: &Functions,
        sets: &Arc<CounterSets>,
        stream: &Arc<Overhead<Stream>>,
    ) -> Result<Option<Counters>, OpenError> {
        let (file, variable) = if functions.is_machine_code() {
            ("gemm_small_m", c"gemm_small_m_counters")
        } else if functions.entry_points().int4.is_some() {
            ("gemm_int4", c"gemm_int4_counters")
        } else {
            return Ok(None);
        };
        let free = |taken: u32| (taken.trailing_ones() < STREAMS as u32).then(|| taken | (taken + 1));
        let Ok(taken) = sets.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, free) else { return Ok(None) };
        let set = taken.trailing_ones() as usize;
        let mut counters = Counters { address: Address(0), set, sets: sets.clone(), stream: stream.clone() };
        let first = functions.variable(file, variable)?;
        counters.address = first.offset(DType::U32.bytes(set * STREAM_COUNTERS));
        Ok(Some(counters))
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // Wait first: running work still uses the counters.
        drop(self.stream.wait());
        self.sets.0.fetch_and(!(1 << self.set), Ordering::AcqRel);
    }
}
