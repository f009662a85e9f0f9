//! What the two lanes of a model do on the card that they share, for the actor of the other lane to see.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// One actor writes each number, and the other reads it when it decides. Nothing depends on when exactly.
#[derive(Debug, Default)]
pub struct Card {
    streams: AtomicUsize,
    patches: AtomicUsize,
}

impl Card {
    /// The scheduler has this many replies under way that have begun.
    pub fn set_streams(&self, streams: usize) {
        self.streams.store(streams, Relaxed);
    }

    /// Whether a reply is under way.
    pub fn has_streams(&self) -> bool {
        self.streams.load(Relaxed) > 0
    }

    /// The vision lane is encoding this many patches.
    pub fn set_patches(&self, patches: usize) {
        self.patches.store(patches, Relaxed);
    }

    /// Whether pictures are being encoded.
    pub fn encodes(&self) -> bool {
        self.patches.load(Relaxed) > 0
    }
}
