//! The memory in which a decoder layer keeps what earlier tokens left.

use bursar_kernels::{KvLayer, StateLayer};

/// The cache of one decoder layer.
#[derive(Debug)]
pub enum LayerCache {
    /// Keys and values of a sequence's tokens, in blocks. An attention layer has them.
    Kv {
        layer: KvLayer,
        /// The layer's [cache group](crate::flow::CacheGroups), whose block tables list the blocks.
        group: usize,
    },
    /// One state of fixed size for each sequence, in slots. A gated delta net has them.
    State(StateLayer),
}

impl LayerCache {
    /// Keys and values, and the cache group of the layer.
    ///
    /// # Panics
    /// If the layer has states, which is a bug in the code that made the caches.
    pub fn kv(&self) -> (&KvLayer, usize) {
        match self {
            LayerCache::Kv { layer, group } => (layer, *group),
            LayerCache::State(layer) => panic!("an attention layer was given states: {layer:?}"),
        }
    }

    /// # Panics
    /// If the layer has keys and values, which is a bug in the code that made the caches.
    pub fn state(&self) -> &StateLayer {
        match self {
            LayerCache::State(layer) => layer,
            LayerCache::Kv { layer, .. } => panic!("a gated delta net was given keys and values: {layer:?}"),
        }
    }
}
