//! What the lanes of all models do on the card that they share, for the actors of other lanes to see.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// One model's part of what is done on a card, and the sum of all models' parts. It ends with its value.
///
/// One actor writes each number, and others read the sums when they decide. Nothing depends on when exactly.
#[derive(Debug, Default)]
pub struct GpuLoad {
    own: Use,
    all: Arc<Use>,
}

#[derive(Debug, Default)]
struct Use {
    streams: AtomicUsize,
    patches: AtomicUsize,
}

impl GpuLoad {
    /// The part of another model on the same card.
    pub fn beside(&self) -> Self {
        GpuLoad { own: Use::default(), all: self.all.clone() }
    }

    /// The scheduler has this many replies under way that have begun.
    pub fn set_streams(&self, streams: usize) {
        set(&self.own.streams, &self.all.streams, streams);
    }

    /// Whether a reply is under way, of any model.
    pub fn has_streams(&self) -> bool {
        self.all.streams.load(Relaxed) > 0
    }

    /// The vision lane is encoding this many patches.
    pub fn set_patches(&self, patches: usize) {
        set(&self.own.patches, &self.all.patches, patches);
    }

    /// Whether pictures are being encoded, of any model.
    pub fn encodes(&self) -> bool {
        self.all.patches.load(Relaxed) > 0
    }
}

impl Drop for GpuLoad {
    fn drop(&mut self) {
        self.set_streams(0);
        self.set_patches(0);
    }
}

/// Sets a model's number, and changes the sum by as much.
fn set(own: &AtomicUsize, all: &AtomicUsize, to: usize) {
    let before = own.swap(to, Relaxed);
    all.fetch_add(to.wrapping_sub(before), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_on_one_card_see_each_other_until_they_end() {
        let card = GpuLoad::default();
        let [first, second] = [card.beside(), card.beside()];
        first.set_streams(3);
        second.set_patches(40);
        assert!(first.encodes() && second.has_streams());
        second.set_streams(1);
        first.set_streams(0);
        assert!(first.has_streams(), "the other's");
        drop(second);
        assert!(!first.has_streams() && !first.encodes() && !card.encodes());
        assert!(!GpuLoad::default().beside().has_streams(), "another card");
    }
}
