//! Copies into a weight segment: the source, the destination and the conversion of each copy.

use bursar_budgets::{Address, Bytes};
use bursar_kernels::{BlockType, DType, ScaledBy};

use super::RoutingSkew;
use super::cut::Cut;
use crate::checkpoint::RandomTensor;

/// A copy to one address of the segment.
#[derive(Clone, Debug)]
pub struct WeightCopy {
    pub to: Address,
    /// Bytes at the destination.
    pub bytes: Bytes,
    /// Number of elements in a row, and number of zeros after each row.
    pub row: (usize, usize),
    /// The element type at the destination, to which the file's elements are rounded.
    pub kept: DType,
    pub source: WeightSource,
    /// The part of the source that is read; `None` for all of it.
    pub cut: Option<Cut>,
    /// The name of the checkpoint's vector that the rows are multiplied by.
    pub scale: Option<String>,
    /// Whether the file has each matrix of the tensor with its axes swapped.
    pub swapped: bool,
    /// If set, each row of the file is a matrix of this shape whose axes are swapped.
    pub row_matrix: Option<[usize; 2]>,
    /// The type of the blocks, if they are copied as they are. Then `kept` is u8.
    pub blocks: Option<BlockType>,
    /// How the weight of a norm is changed while it is read.
    pub norm: Option<NormScaling>,
    /// The scales to compute, if the elements are quantized while they are read.
    pub quantized: Option<ComputedScales>,
    /// The other parts of a weight of 4-bit integers. Then `kept` is u4.
    pub int4: Option<Int4Copy>,
    /// Whether an earlier copy has the same elements of the checkpoint in another format.
    pub is_duplicate: bool,
}

impl WeightCopy {
    /// A copy of all of `source`, without changes. The segment's layout sets the address.
    pub(super) fn of(source: WeightSource, kept: DType, row: (usize, usize), bytes: Bytes) -> Self {
        let to = Address(0);
        WeightCopy {
            to,
            bytes,
            row,
            kept,
            source,
            cut: None,
            scale: None,
            swapped: false,
            row_matrix: None,
            blocks: None,
            norm: None,
            quantized: None,
            int4: None,
            is_duplicate: false,
        }
    }

    /// Elements of the checkpoint that are copied, without padding.
    pub(super) fn elements(&self) -> usize {
        let (row, zeros) = self.row;
        match self.blocks {
            Some(kind) => self.bytes.as_usize() / kind.bytes() * kind.elements(),
            None => self.kept.elements(self.bytes) / (row + zeros).max(1) * row,
        }
    }
}

/// A factor for the first elements that a norm returns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormScaling {
    pub elements: usize,
    /// Added to the weights of the norm, as in [`RmsNorm`](bursar_kernels::ops::rms_norm::RmsNorm).
    pub weight_offset: f32,
    pub factor: f32,
}

impl NormScaling {
    /// Changes the weight of the norm.
    pub(super) fn apply(&self, weight: &mut [f32]) {
        for weight in &mut weight[..self.elements] {
            *weight = (*weight + self.weight_offset) * self.factor - self.weight_offset;
        }
    }
}

/// Scales that are computed while weights are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputedScales {
    /// The address of the scales of the copy's first row.
    pub to: Address,
    /// The parts of the weight that have separate scales.
    pub by: ScaledBy,
    /// Number of rows of a block. With one scale per matrix, this is the number of rows of a
    /// matrix, because the scale is stored once for each row.
    pub height: usize,
}

/// The scales and zero points of a copy of 4-bit integers. They are written together with the
/// integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int4Copy {
    /// The address of the scales of the copy's first row.
    pub scales: Address,
    pub scale_type: DType,
    /// The address of the zero points of the copy's first row, if the weight has zero points.
    pub zero_points: Option<Address>,
    /// Columns that share a scale.
    pub group: usize,
}

#[derive(Clone, Debug)]
pub enum WeightSource {
    /// The checkpoint's tensor with this name.
    Tensor(String),
    /// The random checkpoint's tensor with this name.
    Random(String, RandomTensor),
    /// The random checkpoint's router with this name, drawn from a seed. The router prefers some
    /// experts.
    SkewedRouter(String, u64, RoutingSkew),
    /// Numbers from the host: rotary frequencies, or the scales of cached keys and values.
    Constant(Vec<f32>),
    /// Token ids from the host.
    Ids(Vec<u32>),
    /// Zeros in every element: padding rows, or counters that start at 0.
    Zeros,
    /// The checkpoint's scales of quantized numbers with this name.
    WeightScales(String, SpreadScales),
    /// This number in every element.
    Same(f32),
    /// Scales that are written together with the rows that they scale.
    Made,
}

/// The conversion of a checkpoint's scales to the scales of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpreadScales {
    /// Number of matrices of scales, one after the other.
    pub count: usize,
    /// Rows and columns of each matrix of scales, in the model's order.
    pub shape: [usize; 2],
    /// Whether the file has the two axes of each matrix swapped.
    pub swapped: bool,
    /// Number of times that each row is repeated.
    pub times: usize,
    /// Rows of each matrix after the repetition. The last row may be repeated fewer times.
    pub rows: usize,
    /// Whether scales must be greater than zero.
    pub is_above_zero: bool,
}

impl WeightSource {
    /// The tensor's name in the checkpoint, if the source is a tensor of the checkpoint.
    pub fn name(&self) -> Option<&str> {
        match self {
            WeightSource::Tensor(name)
            | WeightSource::Random(name, _)
            | WeightSource::SkewedRouter(name, ..)
            | WeightSource::WeightScales(name, _) => Some(name),
            WeightSource::Constant(_)
            | WeightSource::Ids(_)
            | WeightSource::Zeros
            | WeightSource::Same(_)
            | WeightSource::Made => None,
        }
    }
}
