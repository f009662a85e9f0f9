//! The memory in which a decoder layer keeps what earlier tokens left.

use bursar_kernels::{KvLayer, StateLayer};

/// The cache of one decoder layer.
#[derive(Debug)]
pub enum LayerCache {
    /// Keys and values of all tokens of a sequence, in blocks. An attention layer has them.
    Kv(KvLayer),
    /// One state of fixed size for each sequence, in slots. A gated delta net has them.
    State(StateLayer),
}

impl LayerCache {
    /// # Panics
    /// If the layer has states, which is a bug in the code that made the caches.
    pub fn kv(&self) -> &KvLayer {
        match self {
            LayerCache::Kv(layer) => layer,
            LayerCache::State(layer) => panic!("an attention layer was given states: {layer:?}"),
        }
    }

    /// # Panics
    /// If the layer has keys and values, which is a bug in the code that made the caches.
    pub fn state(&self) -> &StateLayer {
        match self {
            LayerCache::State(layer) => layer,
            LayerCache::Kv(layer) => panic!("a gated delta net was given keys and values: {layer:?}"),
        }
    }
}
