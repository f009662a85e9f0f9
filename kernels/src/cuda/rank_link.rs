//! A rank's end of a link between GPU ranks, of any kind.

use bursar_budgets::{Address, DeviceError};

use super::{
    copy_link::CopyLink,
    link::CudaLink,
    nccl::{NcclLink, Watch},
};
use crate::Rank;

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
