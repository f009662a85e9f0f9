//! The backend without arithmetic: a plan runs the code of a pass on shapes only.

use std::time::Duration;

use crate::{Backend, KernelError, Rank, Target, backend::each_operation, calls};

/// A backend that runs a pass on shapes only. With
/// [`Workspace::dry`](bursar_budgets::Workspace::dry), a plan computes the workspace's peak, the
/// number of operations and the bytes moved. It takes milliseconds and no device memory. Downloads
/// leave the host buffer unchanged.
#[derive(Clone, Debug)]
pub struct Plan {
    target: Target,
    rank: Rank,
}

impl Plan {
    pub fn new(target: Target) -> Self {
        Plan::of_rank(target, Rank::ALONE)
    }

    /// Creates a plan for `target` as one rank of a group.
    pub fn of_rank(target: Target, rank: Rank) -> Self {
        Plan { target, rank }
    }
}

/// A download that copies nothing and is complete from the start.
struct Nothing;

impl calls::Arrival for Nothing {
    fn is_ready(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>, _: &mut [u8]) -> Result<(), KernelError> {
        Ok(())
    }
}

macro_rules! nothing_to_compute {
    ($($op:ident: $call:ty,)*) => {
        $(fn $op(&self, _: $call) -> Result<(), KernelError> { Ok(()) })*
    };
}

impl Backend for Plan {
    const COMPUTES: bool = false;

    fn target(&self) -> &Target {
        &self.target
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn download_later(&self, _: calls::DownloadLater<'_>) -> Result<Box<dyn calls::Arrival>, KernelError> {
        Ok(Box::new(Nothing))
    }

    fn copy_blocks(&self, _: calls::CopyBlocks<'_>) -> Result<Box<dyn calls::Copying>, KernelError> {
        Ok(Box::new(calls::Copied(Duration::ZERO)))
    }

    nothing_to_compute! {
        upload: calls::Upload<'_>,
        download: calls::Download<'_>,
        all_reduce: calls::AllReduce<'_>,
        all_gather: calls::AllGather<'_>,
        best_of_ranks: calls::BestOfRanks<'_>,
    }
    each_operation!(nothing_to_compute);
}
