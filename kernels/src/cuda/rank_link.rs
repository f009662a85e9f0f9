//! A rank's end of a link between GPU ranks, and the dispatch of operations to the kind
//! of link in use.

use bursar_budgets::{Address, DeviceError};

use super::{
    copy_link::CopyLink,
    lane::Cuda,
    link::{self, CudaLink},
    nccl::{NcclLink, Watch},
};
use crate::{KernelError, Rank, backend::all_reduce_then_rms_norm, calls};

/// A rank's end of a link between the GPU ranks of a group.
pub enum RankLink {
    /// Kernels of this project synchronize in memory that all ranks have mapped.
    Kernels(CudaLink),
    /// Ranks meet on the host and copy each other's rows.
    Copies(CopyLink),
    /// NCCL sums and gathers.
    Nccl(NcclLink),
}

impl From<CudaLink> for RankLink {
    fn from(link: CudaLink) -> Self {
        RankLink::Kernels(link)
    }
}

impl From<CopyLink> for RankLink {
    fn from(link: CopyLink) -> Self {
        RankLink::Copies(link)
    }
}

impl From<NcclLink> for RankLink {
    fn from(link: NcclLink) -> Self {
        RankLink::Nccl(link)
    }
}

impl RankLink {
    /// This rank's position in the group.
    pub fn rank(&self) -> Rank {
        match self {
            RankLink::Kernels(link) => link.rank(),
            RankLink::Copies(link) => link.rank(),
            RankLink::Nccl(link) => link.rank(),
        }
    }

    /// How the host finds out whether all ranks joined a collective, once the
    /// device has completed it.
    pub(super) fn witness(&self) -> Option<Witness> {
        match self {
            RankLink::Kernels(link) => Some(Witness::Note(link.failed_at())),
            RankLink::Nccl(link) => Some(Witness::Watch(link.watch().clone())),
            // These ranks have met on the host before anything was launched.
            RankLink::Copies(_) => None,
        }
    }
}

/// Source of the information whether all ranks joined the collectives so far.
pub(super) enum Witness {
    /// The device has written a [note](CudaLink::check) at this address.
    Note(Address),
    /// The host counts the collectives.
    Watch(Watch),
}

impl Witness {
    /// Returns an error if the link is broken, as far as the host knows.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        match self {
            Witness::Note(_) => Ok(()),
            Witness::Watch(watch) => watch.check(),
        }
    }
}

pub(super) fn all_reduce(cuda: &Cuda, call: calls::AllReduce<'_>) -> Result<(), KernelError> {
    match &cuda.link {
        Some(RankLink::Kernels(link)) => link::all_reduce(cuda, link, call),
        Some(RankLink::Nccl(link)) => link.all_reduce(cuda, call),
        Some(RankLink::Copies(_)) | None => Err(KernelError::NoKernel { op: "all_reduce" }),
    }
}

pub(super) fn all_reduce_rms_norm(cuda: &Cuda, call: calls::AllReduceRmsNorm<'_>) -> Result<(), KernelError> {
    match &cuda.link {
        Some(RankLink::Kernels(link)) => link::all_reduce_rms_norm(cuda, link, call),
        _ => all_reduce_then_rms_norm(cuda, call),
    }
}

pub(super) fn all_gather(cuda: &Cuda, call: calls::AllGather<'_>) -> Result<(), KernelError> {
    match &cuda.link {
        Some(RankLink::Kernels(link)) => link::all_gather(cuda, link, call),
        Some(RankLink::Nccl(link)) => link.all_gather(cuda, call),
        Some(RankLink::Copies(link)) => link.all_gather(cuda, call),
        None => Err(KernelError::NoKernel { op: "all_gather" }),
    }
}

pub(super) fn best_of_ranks(cuda: &Cuda, call: calls::BestOfRanks<'_>) -> Result<(), KernelError> {
    match &cuda.link {
        Some(RankLink::Kernels(link)) => link::best_of_ranks(cuda, link, call),
        _ => Err(KernelError::NoKernel { op: "best_of_ranks" }),
    }
}

pub(super) fn abort_collectives(cuda: &Cuda) {
    if let Some(RankLink::Kernels(link)) = &cuda.link {
        link::abort_collectives(cuda, link);
    }
}
