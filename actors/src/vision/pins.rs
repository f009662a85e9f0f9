//! Pictures that are held in the cache for a request.

use std::sync::Arc;

use bursar_model::flow::Grid;
use ractor::ActorRef;

use super::{PictureKey, VisionMessage};

/// One picture's place in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedPicture {
    /// What it shows.
    pub key: PictureKey,
    /// Its patches.
    pub grid: Grid,
    /// Its embeddings' rows.
    pub rows: Arc<[u32]>,
}

/// A request's pictures; dropping this lets them go.
#[derive(Debug)]
pub struct PinnedPictures {
    /// In the order of the request.
    pub pictures: Vec<PinnedPicture>,
    pub(crate) vision: ActorRef<VisionMessage>,
}

impl Drop for PinnedPictures {
    fn drop(&mut self) {
        // An actor that is gone has forgotten its pins already.
        drop(self.vision.send_message(VisionMessage::Unpin(self.pictures.iter().map(|picture| picture.key).collect())));
    }
}
