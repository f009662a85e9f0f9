//! Keys, values and recurrent states of a model, in leased memory.

use bursar_budgets::{Class, Segment};
use bursar_kernels::{Backend, KvLayer, StateLayer, Target};
use bursar_model::{Model, blocks::layer_cache::LayerCache};

use super::Memory;

/// One segment for each layer of the decoder.
pub struct Caches {
    kv: Vec<Segment>,
    states: Vec<Segment>,
    blocks: usize,
}

impl Caches {
    /// Slots of recurrent states, more than the number of sequences that any test runs at a time.
    pub const STATES: usize = 24;

    /// Memory full of NaN for `blocks` blocks of keys and values and [`STATES`](Self::STATES)
    /// states.
    pub fn poisoned<B: Backend>(memory: &Memory, backend: &B, model: &Model, blocks: usize) -> Self {
        let (kv, states) = (model.kv_shape(backend.target()), model.state_shape(backend.target()));
        let of_kv = |_| memory.poisoned(backend, Class::Kv, kv.block_bytes() * blocks as u64);
        let of_states = states.map_or(0, |states| states.layers);
        let of_state = |_| {
            let bytes = states.expect("the model has layers with states").slot_bytes() * Self::STATES as u64;
            memory.poisoned(backend, Class::States, bytes)
        };
        let (kv, states) = ((0..kv.layers).map(of_kv).collect(), (0..of_states).map(of_state).collect());
        Caches { kv, states, blocks }
    }

    /// The cache of each layer of the decoder.
    pub fn layers(&self, model: &Model, target: &Target) -> Vec<LayerCache> {
        let (kv, states) = (model.kv_shape(target), model.state_shape(target));
        // SAFETY: the segments are backed for as long as they live, and only the test's thread
        // accesses them.
        let of_kv = |segment: &Segment| unsafe { KvLayer::new(segment.address(), self.blocks, kv) };
        let of_state = |segment: &Segment| {
            let shape = states.expect("the model has layers with states");
            // SAFETY: the segments are backed for as long as they live, and only the test's thread
            // accesses them.
            unsafe { StateLayer::new(segment.address(), Self::STATES, shape) }
        };
        model.layer_caches(self.kv.iter().map(of_kv), self.states.iter().map(of_state))
    }
}
