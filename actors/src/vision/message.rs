//! What may be asked of the vision actor.

use std::sync::Arc;

use bursar_budgets::Lease;
use bursar_model::{
    error::VisualError,
    processor::{ProcessedPicture, VisualKey, VisualPlan},
};
use thiserror::Error;

use super::{PictureKey, PinnedPictures};
use crate::{budget::LeaseError, compute::lane::LaneError, responder::Responder, supervise::FaultInjection};

/// From chat drivers (credit: one accepted request each), from its own CPU threads, and from the vision lane.
pub enum VisionMessage {
    /// Pictures and videos of a request, to be held in the cache; see [`crate::tree::EMBED_PICTURES`].
    Embed {
        /// In the order of the request.
        pictures: Vec<VisualPlan>,
        /// The places of the pictures and of each step of the videos.
        reply: Responder<Result<PinnedPictures, VisionError>>,
    },
    /// A request's pictures are decoded and resized.
    Prepared {
        /// What they can be recognised by the next time, and how many pictures each has become.
        keys: Vec<(VisualKey, usize)>,
        /// In the order of the request; a video is a picture for each of its steps.
        pictures: Vec<ProcessedPicture>,
        /// Pays for their pixels.
        host: Arc<Lease>,
        /// To the request.
        reply: Responder<Result<PinnedPictures, VisionError>>,
    },
    /// The lane's answer to the oldest launch; two at most are under way.
    Encoded(Result<(), LaneError>),
    /// A request no longer needs these; one entry a pin.
    Unpin(Vec<PictureKey>),
    /// Set the gauges again: from itself, for a recorder that has come since.
    Show,
    /// Die of this.
    InjectFault(FaultInjection),
}

/// Pictures that did not get into the cache. The request fails alone.
#[derive(Debug, Error)]
pub enum VisionError {
    /// A picture or a video is broken or outside the limits.
    #[error(transparent)]
    Visual(#[from] VisualError),
    /// The pictures together are larger than the cache or a launch.
    #[error("the pictures take {rows} rows of the vision cache, which has {limit}")]
    TooLarge {
        /// Rows wanted.
        rows: usize,
        /// Rows there are.
        limit: usize,
    },
    /// Host memory for the pixels could not be leased.
    #[error(transparent)]
    Host(#[from] LeaseError),
    /// The thread that decoded the pictures panicked.
    #[error("the decoder died of a picture")]
    DecoderDied,
}

impl VisionError {
    /// What to change.
    pub fn hint(&self) -> String {
        match self {
            VisionError::Visual(error) => error.hint(),
            VisionError::TooLarge { .. } => "send fewer or smaller pictures, or enlarge the vision cache".to_owned(),
            VisionError::Host(error) => error.hint(),
            VisionError::DecoderDied => {
                "this is a bug in Bursar; please report it, if you can with the picture".to_owned()
            }
        }
    }
}
