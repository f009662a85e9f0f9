//! Pictures that the vision cache holds for a request.

use std::sync::Arc;

use bursar_model::flow::{Grid, PictureHash};
use ractor::ActorRef;

use super::VisionMessage;

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
    /// In the order of the request.
    pub pictures: Vec<PinnedRows>,
    pub(crate) vision: ActorRef<VisionMessage>,
}

impl Drop for PinnedSet {
    fn drop(&mut self) {
        // An actor that has ended has no pins any more.
        drop(self.vision.send_message(VisionMessage::Unpin(self.pictures.iter().map(|picture| picture.key).collect())));
    }
}
