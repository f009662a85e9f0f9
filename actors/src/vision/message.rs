//! What the vision actor can be asked.

use std::sync::Arc;

use bursar_budgets::{Hint, Lease};
use bursar_model::{
    error::MediaError,
    flow::{Grid, PictureHash},
    processor::{EncoderInput, MediaKey, MediaPlan},
};
use thiserror::Error;

use super::{PinnedSet, Ticket};
use crate::{
    budget::LeaseError, compute::lane::LaneError, order::Priority, responder::Responder, supervise::FaultInjection,
};

/// Messages from chat drivers (credit: one per accepted request), from its own CPU threads and from the vision lane.
pub enum VisionMessage {
    /// Asks for a request's pictures and videos in the cache; see [`crate::tree::EMBED_PICTURES`].
    Embed {
        /// In the order of the request.
        pictures: Vec<MediaPlan>,
        /// What decides when they are decoded and encoded.
        rank: Priority,
        /// The rows of the pictures and of each step of the videos.
        reply: Responder<Result<PinnedSet, VisionError>>,
    },
    /// Asks for the names of pictures; see [`crate::tree::NAME_PICTURES`].
    Name {
        /// The files of a request, in its order.
        files: Vec<MediaKey>,
        /// The pictures that each was decoded to, up to the first file that is not known.
        reply: Responder<Vec<Vec<PictureHash>>>,
    },
    /// A request's pictures are decoded and resized.
    Prepared {
        /// The request.
        request: Box<EmbedRequest>,
        /// For each file its pictures, if they need no pixels.
        held: Vec<Option<Vec<(PictureHash, Grid)>>>,
        /// Those of the others, in their order. A video is one picture per step.
        pictures: Vec<EncoderInput>,
        /// The lease that pays for their pixels.
        host: Arc<Lease>,
    },
    /// A thread that decoded is free for another request.
    DecoderFree,
    /// A request that is to be decoded has host memory, or waits for it no longer.
    Leased,
    /// The lane's answer to the oldest launch. At most two run.
    Encoded(Result<(), LaneError>),
    /// The lane's answer to the oldest copies of rows.
    Copied(Result<(), LaneError>),
    /// A request no longer needs these pictures. One entry per pin.
    Unpin(Vec<PictureHash>),
    /// Sets the gauges again. The actor sends this to itself, for a recorder installed since.
    Show,
    /// Fails the actor on purpose.
    InjectFault(FaultInjection),
}

/// A request for pictures on its way to the cache.
pub struct EmbedRequest {
    pub(super) ticket: Ticket,
    pub(super) rank: Priority,
    /// The files, in the order of the request.
    pub(super) plans: Arc<[MediaPlan]>,
    pub(super) reply: Responder<Result<PinnedSet, VisionError>>,
}

/// Why pictures did not get into the cache. Only their own request fails.
#[derive(Debug, Error)]
pub enum VisionError {
    /// A picture or a video is damaged or outside the limits.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The pictures together exceed the cache or a launch.
    #[error("the pictures take {rows} rows of the vision cache; the limit is {limit}")]
    TooLarge {
        /// Rows needed.
        rows: usize,
        /// Rows of the cache.
        limit: usize,
    },
    /// Host memory for the pixels could not be leased.
    #[error(transparent)]
    Host(#[from] LeaseError),
    /// The thread that decoded the pictures panicked.
    #[error("the decoder crashed on a picture")]
    DecoderDied,
}

impl Hint for VisionError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            VisionError::Media(error) => error.hint(),
            VisionError::TooLarge { .. } => "send fewer or smaller pictures, or enlarge the vision cache".to_owned(),
            VisionError::Host(error) => error.hint(),
            VisionError::DecoderDied => {
                "this is a bug in Bursar; please report it, with the picture if you can".to_owned()
            }
        }
    }
}
