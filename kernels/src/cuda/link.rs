//! The link between GPU ranks through kernels: all ranks have mapped each other's exchange memory,
//! and their kernels synchronize in it.

use std::time::Duration;

use bursar_budgets::{Address, Bytes, DeviceError};

use super::{
    arguments::{Argument, count},
    contract::all_reduce::{BLOCKS_MAX, DATA_AT, FAILED_AT, RANKS_MAX, UNIT},
};
use crate::Rank;

/// A rank's end of the link between the GPU ranks of a group.
///
/// All ranks must launch the same operations in the same order. A rank that does not join in time
/// breaks the link: the results of the other ranks are undefined from then on, and the other ranks
/// get [`DeviceError::Lost`] when they next wait for results.
pub struct CudaLink {
    pub(super) exchange: Exchange,
    /// Maximum number of thread blocks of a launch.
    pub(super) blocks: usize,
}

/// Description of the exchange memory for a launch, in the layout of `struct Exchange` in
/// `include/exchange.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Exchange {
    control: [u64; RANKS_MAX],
    data: [u64; RANKS_MAX],
    /// Bytes of each half of the data.
    pub(super) half: u64,
    patience: u64,
    rank: u32,
    ranks: u32,
    apart: u32,
}

impl Argument for Exchange {}

impl CudaLink {
    /// Bytes of the note that names a rank that did not join.
    pub(super) const NOTE: usize = 4;

    /// Returns the bytes of exchange memory that each rank leases for collectives of up to
    /// `largest` bytes. Larger operations are split into several collectives.
    pub fn bytes(largest: Bytes) -> Bytes {
        Bytes(DATA_AT as u64) + largest.round_up(Bytes(UNIT as u64)) * 2
    }

    /// Creates the ends of a link between ranks, in the order of their indices. `memory` is the
    /// address of each rank's exchange memory, which has the size that [`bytes`](CudaLink::bytes)
    /// returns for `largest` and was [cleared](CudaLink::clear). In each operation a rank waits up
    /// to `patience` for the other ranks. `sms` is the number of SMs of a device, and `sharing` is
    /// the number of ranks on one device. Each of these ranks uses an equal part of the SMs, so
    /// that all thread blocks that wait for other ranks can run at once.
    ///
    /// # Safety
    /// Each memory must begin on a page, and must be backed and mapped by the devices of all ranks
    /// until all work of all ranks has ended.
    ///
    /// # Panics
    /// If there are no ranks, or more than 8.
    pub unsafe fn between(
        memory: &[Address],
        largest: Bytes,
        patience: Duration,
        sms: usize,
        sharing: usize,
    ) -> Vec<CudaLink> {
        assert!((1..=RANKS_MAX).contains(&memory.len()), "a link of {} ranks; expected 1 to {RANKS_MAX}", memory.len());
        let (mut control, mut data) = ([0; RANKS_MAX], [0; RANKS_MAX]);
        for (rank, memory) in memory.iter().enumerate() {
            (control[rank], data[rank]) = (memory.0, memory.offset(Bytes(DATA_AT as u64)).0);
        }
        let half = largest.round_up(Bytes(UNIT as u64)).0;
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        let end = |rank: Rank| {
            let (rank, ranks, apart) = (count(rank.index()), count(rank.of()), u32::from(sharing == 1));
            let exchange = Exchange { control, data, half, patience, rank, ranks, apart };
            CudaLink { exchange, blocks: (sms / sharing).clamp(1, BLOCKS_MAX) }
        };
        Rank::all(memory.len()).map(end).collect()
    }

    /// Returns this rank's position in the group.
    pub fn rank(&self) -> Rank {
        Rank::new(self.exchange.rank as usize, self.exchange.ranks as usize)
    }

    /// Returns the address of the note, where the device records the rank that did not join.
    pub(super) fn failed_at(&self) -> Address {
        Address(self.exchange.control[self.rank().index()]).offset(Bytes(FAILED_AT as u64))
    }

    /// Returns an error if the note `failed` names a rank that did not join.
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
