//! Pictures that the cache holds for a request.

use std::sync::Arc;

use bursar_model::flow::{Grid, PictureHash};
use ractor::ActorRef;

use super::VisionMessage;

/// The place of a picture in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedRows {
    /// The picture's key.
    pub key: PictureHash,
    /// The layout of its patches.
    pub grid: Grid,
    /// The rows of its embeddings.
    pub rows: Arc<[u32]>,
}

/// A request's pictures. Dropping this releases them.
#[derive(Debug)]
pub struct PinnedSet {
    /// In the order of the request.
    pub pictures: Vec<PinnedRows>,
    pub(crate) vision: ActorRef<VisionMessage>,
}

impl Drop for PinnedSet {
    fn drop(&mut self) {
        // An actor that is gone has forgotten its pins already.
        drop(self.vision.send_message(VisionMessage::Unpin(self.pictures.iter().map(|picture| picture.key).collect())));
    }
}
