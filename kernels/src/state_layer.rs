//! One layer's recurrent states in device memory, one slot for each sequence or snapshot.

use bursar_budgets::{Address, Bytes};

use crate::DType;

/// The matrices of a slot start at a multiple of this many bytes from the start of the slot, so
/// that kernels can read them in vectors.
const ALIGNMENT: Bytes = Bytes(256);

/// Slot sizes are rounded up to a multiple of this, because matrices of two-byte elements may have
/// odd sizes and kernels require slots that are aligned to 16 bytes.
const SLOT_ALIGNMENT: Bytes = Bytes(16);

/// The shape of one sequence's state in the gated delta net layers of a model: the last inputs of
/// the causal convolution, and one matrix for each value head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateShape {
    /// Layers, each with a separate segment.
    pub layers: usize,
    /// Columns that the convolution reads: queries and keys of all key heads, then the values of
    /// all value heads.
    pub channels: usize,
    /// Inputs of the convolution that a sequence keeps: the width of the convolution minus 1.
    pub conv_rows: usize,
    /// Heads of queries and keys. Value heads share them in groups.
    pub key_heads: usize,
    pub value_heads: usize,
    /// Elements of a query or key of one head.
    pub key_dim: usize,
    /// Elements of a value of one head.
    pub value_dim: usize,
    /// Element type of the convolution's inputs: the type of activations.
    pub activation: DType,
    /// Element type of the matrices in a slot.
    pub state_dtype: StateDtype,
}

/// The element type in which slots store the matrices. Kernels keep and update the matrices in f32
/// for both. The kernels for chunks round the operands of their products to f16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateDtype {
    #[default]
    F32,
    /// Half the bytes. A matrix is rounded at the end of each step, so decoding without drafts
    /// rounds it once per token.
    Bf16,
}

impl StateDtype {
    pub fn dtype(self) -> DType {
        match self {
            StateDtype::F32 => DType::F32,
            StateDtype::Bf16 => DType::BF16,
        }
    }
}

impl StateShape {
    /// Returns the bytes of one slot in one layer.
    pub fn slot_bytes(&self) -> Bytes {
        (self.conv_bytes() + self.matrix_bytes() * self.value_heads as u64).round_up(SLOT_ALIGNMENT)
    }

    /// Returns the bytes of one sequence's state over all layers.
    pub fn sequence_bytes(&self) -> Bytes {
        self.slot_bytes() * self.layers as u64
    }

    /// Returns the bytes before the matrices of a slot: `[conv_rows, channels]` inputs, padded.
    pub(crate) fn conv_bytes(&self) -> Bytes {
        self.activation.bytes(self.conv_rows * self.channels).round_up(ALIGNMENT)
    }

    /// Returns the bytes of one value head's matrix `[value_dim, key_dim]`.
    fn matrix_bytes(&self) -> Bytes {
        self.state_dtype.dtype().bytes(self.value_dim * self.key_dim)
    }

    /// Returns `true` if the numbers of heads and channels are consistent.
    pub(crate) fn is_consistent(&self) -> bool {
        let StateShape { key_heads, value_heads, key_dim, value_dim, .. } = *self;
        self.channels == 2 * key_heads * key_dim + value_heads * value_dim
            && key_heads > 0
            && value_heads.is_multiple_of(key_heads)
            && self.conv_rows > 0
    }
}

/// One layer of the states: `[slot]`, each with the convolution's inputs
/// `[conv_rows, channels]` of the activation type, the oldest first, followed by the matrices
/// `[value_heads, value_dim, key_dim]`, whose type is the shape's [`StateDtype`].
///
/// A matrix is stored as the transpose of the matrix in the papers, so that each vector that is
/// multiplied by a key or a query is contiguous.
#[derive(Debug)]
pub struct StateLayer {
    address: Address,
    slots: usize,
    shape: StateShape,
}

impl StateLayer {
    /// Creates a layer of `slots` slots at `address`.
    ///
    /// # Safety
    /// As long as operations use the layer, `address` must be the start of
    /// `slots * shape.slot_bytes()` bytes of backed device memory, aligned to 256 bytes, that only
    /// operations of the same lane access.
    pub unsafe fn new(address: Address, slots: usize, shape: StateShape) -> Self {
        assert!(shape.is_consistent(), "the channels are the queries, keys and values: {shape:?}");
        StateLayer { address, slots, shape }
    }

    /// Returns the number of slots that are backed by memory.
    pub fn slots(&self) -> usize {
        self.slots
    }

    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// Returns the address of the first slot.
    pub(crate) fn address(&self) -> Address {
        self.address
    }

    /// Returns the address of the convolution's inputs in a slot.
    ///
    /// # Panics
    /// If the slot is out of bounds.
    pub(crate) fn conv(&self, slot: u32) -> Address {
        assert!((slot as usize) < self.slots, "slot {slot} is outside a layer of {} slots", self.slots);
        self.address.offset(self.shape.slot_bytes() * u64::from(slot))
    }

    /// Returns the address of a value head's matrix in a slot.
    ///
    /// # Panics
    /// If the slot or the head is out of bounds.
    pub(crate) fn matrix(&self, slot: u32, head: usize) -> Address {
        assert!(head < self.shape.value_heads, "head {head} is outside {:?}", self.shape);
        self.conv(slot).offset(self.shape.conv_bytes() + self.shape.matrix_bytes() * head as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_slots_have_the_bytes_of_the_released_models() {
        let shape = |value_heads: usize, layers| StateShape {
            layers,
            channels: 2 * 16 * 128 + value_heads * 128,
            conv_rows: 3,
            key_heads: 16,
            value_heads,
            key_dim: 128,
            value_dim: 128,
            activation: DType::BF16,
            state_dtype: StateDtype::F32,
        };
        // Qwen3.5-2B, 9B and 27B.
        assert_eq!(shape(16, 18).slot_bytes(), Bytes(1_085_440));
        assert_eq!(shape(32, 24).slot_bytes(), Bytes(2_146_304));
        assert_eq!(shape(48, 48).slot_bytes(), Bytes(3_207_168));
        assert_eq!(shape(48, 48).sequence_bytes(), Bytes(153_944_064));
        let half = StateShape { state_dtype: StateDtype::Bf16, ..shape(48, 48) };
        assert_eq!(half.slot_bytes() - half.conv_bytes(), Bytes(48 * 128 * 128 * 2));
    }

    #[test]
    fn state_slots_and_matrices_do_not_overlap() {
        let shape = StateShape {
            layers: 1,
            channels: 2 * 2 * 8 + 4 * 4,
            conv_rows: 3,
            key_heads: 2,
            value_heads: 4,
            key_dim: 8,
            value_dim: 4,
            activation: DType::F32,
            state_dtype: StateDtype::F32,
        };
        // SAFETY: no operation uses the layer.
        let layer = unsafe { StateLayer::new(Address(4096), 3, shape) };
        assert_eq!(layer.matrix(0, 0), Address(4096 + 768), "576 bytes of inputs are padded");
        assert_eq!(layer.matrix(0, 1), layer.matrix(0, 0).offset(Bytes(4 * 8 * 4)));
        assert_eq!(layer.conv(1), layer.matrix(0, 3).offset(Bytes(4 * 8 * 4)));
    }
}
