//! The load that the lanes of all models put on a shared GPU, for the actors of
//! other lanes to read.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// One model's load on a GPU, and the sum over all models. Dropping the value removes the model's
/// load from the sum.
///
/// Each number is written by one actor. Other actors read the sums when they decide. No decision
/// depends on the exact moment of a change.
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
    /// Creates the load of another model on the same GPU.
    pub fn of_another_engine(&self) -> Self {
        GpuLoad { own: Use::default(), all: self.all.clone() }
    }

    /// Sets how many replies of the scheduler are in progress.
    pub fn set_streams(&self, streams: usize) {
        set(&self.own.streams, &self.all.streams, streams);
    }

    /// Whether a reply of any model is in progress.
    pub fn has_streams(&self) -> bool {
        self.all.streams.load(Relaxed) > 0
    }

    /// Sets how many patches the vision lane is encoding.
    pub fn set_patches(&self, patches: usize) {
        set(&self.own.patches, &self.all.patches, patches);
    }

    /// Whether pictures of any model are being encoded.
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

/// Sets a model's number, and changes the sum by the difference.
fn set(own: &AtomicUsize, all: &AtomicUsize, to: usize) {
    let before = own.swap(to, Relaxed);
    all.fetch_add(to.wrapping_sub(before), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_on_one_card_see_each_others_load_until_dropped() {
        let card = GpuLoad::default();
        let [first, second] = [card.of_another_engine(), card.of_another_engine()];
        first.set_streams(3);
        second.set_patches(40);
        assert!(first.encodes() && second.has_streams());
        second.set_streams(1);
        first.set_streams(0);
        assert!(first.has_streams(), "the other engine has streams");
        drop(second);
        assert!(!first.has_streams() && !first.encodes() && !card.encodes());
        assert!(!GpuLoad::default().of_another_engine().has_streams(), "an engine on another card is not counted");
    }
}
