//! Memory in which a decoder layer keeps the results of earlier tokens: keys and values, or a
//! state.

use bursar_kernels::{KvLayer, StateLayer};

/// The cache of one decoder layer.
#[derive(Debug)]
pub enum LayerCache {
    /// Keys and values of each token, in blocks. Used by attention layers.
    Kv {
        layer: KvLayer,
        /// The layer's [cache group](crate::flow::CacheGroups), whose block tables list the blocks.
        group: usize,
    },
    /// A state of fixed size per sequence, in slots. Used by gated delta nets.
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
