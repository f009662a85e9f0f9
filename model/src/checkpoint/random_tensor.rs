//! Tensors that are drawn at random, for checkpoints without weights.

/// Standard deviation of the weights: `initializer_range` of the released checkpoints. With norms
/// between the layers, activations stay finite at any depth.
pub const DEVIATION: f32 = 0.02;

/// The content of a tensor of a random checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomTensor {
    /// Roughly normally distributed numbers with mean 0 and standard deviation [`DEVIATION`].
    Drawn {
        /// The seed of this tensor.
        seed: u64,
    },
    /// Ones, for the weights of norms and for layer scalars.
    Ones,
    /// A bound that no activation exceeds, for clipped projections.
    Bound {
        /// Whether activations are at most this bound, rather than at least.
        is_upper: bool,
    },
}

impl RandomTensor {
    /// The content of the tensor `name` with `axes` axes. A vector whose name ends in `.weight`
    /// belongs to a norm and holds ones, as do layer scalars. `input_min` and similar names are bounds
    /// of clipped projections. All other tensors are drawn.
    pub(super) fn of(seed: u64, name: &str, axes: usize) -> Self {
        if axes <= 1 && (name.ends_with("put_min") || name.ends_with("put_max")) {
            return RandomTensor::Bound { is_upper: name.ends_with("_max") };
        }
        if axes <= 1 && (name.ends_with(".weight") || name.ends_with(".layer_scalar")) {
            return RandomTensor::Ones;
        }
        let mut hasher = blake3::Hasher::new_derive_key("bursar 2026 random tensor v1");
        hasher.update(&seed.to_le_bytes()).update(name.as_bytes());
        let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
        RandomTensor::Drawn { seed: u64::from_le_bytes([a, b, c, d, e, f, g, h]) }
    }
}
