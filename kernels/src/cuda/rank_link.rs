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
    /// Ranks synchronize on the host and copy each other's rows.
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
    /// Returns this rank's position in the group.
    pub fn rank(&self) -> Rank {
        match self {
            RankLink::Kernels(link) => link.rank(),
            RankLink::Copies(link) => link.rank(),
            RankLink::Nccl(link) => link.rank(),
        }
    }

    /// Returns the means by which the host detects that a rank did not join a collective, once the
    /// device has completed the collective. Returns `None` if the host does not have to check.
    pub(super) fn witness(&self) -> Option<Witness> {
        match self {
            RankLink::Kernels(link) => Some(Witness::Note(link.failed_at())),
            RankLink::Nccl(link) => Some(Witness::Watch(link.watch().clone())),
            // These ranks synchronize on the host before they launch copies.
            RankLink::Copies(_) => None,
        }
    }
}

/// The means by which the host detects that a rank did not join a collective.
pub(super) enum Witness {
    /// The device writes a [note](CudaLink::check) at this address if a rank does not join.
    Note(Address),
    /// The host counts the collectives that each rank has launched.
    Watch(Watch),
}

impl Witness {
    /// Returns an error if the host knows that the link is broken. Notes
    /// must be checked separately.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        match self {
            Witness::Note(_) => Ok(()),
            Witness::Watch(watch) => watch.check(),
        }
    }
}
