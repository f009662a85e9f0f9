//! Messages of the vision actor, and its answers: pinned pictures, or an error.

use std::sync::Arc;

use bursar_budgets::{Hint, Lease};
use bursar_model::{
    error::MediaError,
    flow::{Grid, PictureHash},
    processor::{EncoderInput, MediaKey, MediaPlan},
};
use ractor::ActorRef;
use thiserror::Error;

use super::{PicturesTooLarge, Ticket};
use crate::{
    budget::LeaseError, compute::lane::LaneError, order::Priority, responder::Responder, supervise::FaultInjection,
};

/// Messages from chat drivers (credit: one per accepted request), from the actor's own CPU threads
/// and from the vision lane.
pub enum VisionMessage {
    /// Asks the actor to put a request's pictures and videos into the cache; see
    /// [`crate::tree::EMBED_PICTURES`].
    Embed {
        /// The pictures and videos, in the order of the request.
        pictures: Vec<MediaPlan>,
        /// The priority with which the pictures are decoded and encoded.
        priority: Priority,
        /// Answered with the rows of each picture, and of each time step of the videos.
        reply: Responder<Result<PinnedSet, VisionError>>,
    },
    /// Asks for the hashes of pictures; see [`crate::tree::HASH_PICTURES`].
    Name {
        /// The files of a request, in the request's order.
        files: Vec<MediaKey>,
        /// Answered with the pictures that each file was decoded to, up to the first unknown file.
        reply: Responder<Vec<Vec<PictureHash>>>,
    },
    /// A request's pictures are decoded and resized.
    Prepared {
        request: Box<EmbedRequest>,
        /// One entry per file: the file's pictures if they need no pixels, otherwise `None`.
        held: Vec<Option<Vec<(PictureHash, Grid)>>>,
        /// The decoded pictures of the files for which `held` is `None`, in order. A video is one
        /// picture per time step.
        pictures: Vec<EncoderInput>,
        /// The lease of the host memory for the pixels.
        host: Arc<Lease>,
    },
    /// A decoding thread is free for another request.
    DecoderFree,
    /// A request that is about to be decoded has received host memory, or no longer waits for it.
    Leased,
    /// The lane's answer to the oldest encoder batch. At most two batches run at once.
    Encoded(Result<(), LaneError>),
    /// The lane's answer to the oldest copies of rows.
    Copied(Result<(), LaneError>),
    /// A request no longer needs these pictures. The list has one entry per pin.
    Unpin(Vec<PictureHash>),
    /// Sets the gauges again, in case a recorder was installed since the last time. The actor sends
    /// this message to itself.
    Show,
    /// Fails the actor on purpose.
    InjectFault(FaultInjection),
}

/// A request whose pictures are being prepared.
pub struct EmbedRequest {
    pub(super) ticket: Ticket,
    pub(super) priority: Priority,
    /// The files, in the order of the request.
    pub(super) plans: Arc<[MediaPlan]>,
    pub(super) reply: Responder<Result<PinnedSet, VisionError>>,
}

/// The rows of a picture in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedRows {
    pub key: PictureHash,
    /// The layout of the picture's patches.
    pub grid: Grid,
    /// The rows of the picture's embeddings.
    pub rows: Arc<[u32]>,
}

/// A request's pictures in the cache. Dropping the set unpins them.
#[derive(Debug)]
pub struct PinnedSet {
    /// The pictures, in the order of the request.
    pub pictures: Vec<PinnedRows>,
    pub(crate) vision: ActorRef<VisionMessage>,
}

impl Drop for PinnedSet {
    fn drop(&mut self) {
        // An actor that has ended has no pins any more.
        drop(self.vision.send_message(VisionMessage::Unpin(self.pictures.iter().map(|picture| picture.key).collect())));
    }
}

/// The reason why pictures did not get into the cache. Only the request with these pictures fails.
#[derive(Debug, Error)]
pub enum VisionError {
    /// A picture or a video is damaged or outside the limits.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The pictures exceed the vision cache, or a picture exceeds an encoder batch.
    #[error(transparent)]
    TooLarge(#[from] PicturesTooLarge),
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
            VisionError::TooLarge(PicturesTooLarge::Request { .. }) => {
                "send fewer or smaller pictures, or enlarge the vision cache".to_owned()
            }
            VisionError::TooLarge(PicturesTooLarge::Picture { .. }) => {
                "send smaller pictures, or raise `launch_patches`".to_owned()
            }
            VisionError::Host(error) => error.hint(),
            VisionError::DecoderDied => {
                "this is a bug in Bursar; please report it, with the picture if you can".to_owned()
            }
        }
    }
}
