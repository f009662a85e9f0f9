//! What is copied where: one tensor of the checkpoint, or what stands in for one.

use bursar_budgets::{Address, Bytes};
use bursar_kernels::DType;

use super::RoutingSkew;
use super::cut::Cut;
use crate::checkpoint::{RandomTensor, ScaledBy};

/// A copy to one place of the segment.
#[derive(Clone, Debug)]
pub struct WeightCopy {
    /// The destination address.
    pub to: Address,
    /// Bytes at the destination.
    pub bytes: Bytes,
    /// Elements of a row, and zeros after each row.
    pub row: (usize, usize),
    /// The element type at the destination, to which the file's elements are rounded.
    pub kept: DType,
    /// Where the values come from.
    pub source: WeightSource,
    /// The part of the source that is read; `None` is all of it.
    pub cut: Option<Cut>,
    /// The checkpoint's vector that rows are multiplied by.
    pub scale: Option<String>,
    /// The file has each matrix of the tensor with its axes swapped.
    pub swapped: bool,
    /// The elements are rounded to FP8 while they are read.
    pub rounded: Option<MadeScales>,
}

/// Scales that are made while weights are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadeScales {
    /// Where those of the copy's first row stand.
    pub to: Address,
    /// What has one.
    pub by: ScaledBy,
    /// Rows of a block, or of a matrix that has one scale for each row to hold.
    pub height: usize,
}

/// The source of a copy.
#[derive(Clone, Debug)]
pub enum WeightSource {
    /// The checkpoint's tensor with this name.
    Tensor(String),
    /// The random checkpoint's tensor with this name.
    Random(String, RandomTensor),
    /// The random checkpoint's router with this name, drawn from a seed, which prefers some experts.
    SkewedRouter(String, u64, RoutingSkew),
    /// Numbers that the configuration implies.
    Constant(Vec<f32>),
    /// Zero padding between tensors.
    Zeros,
    /// The checkpoint's scales of FP8 numbers with this name.
    WeightScales(String, SpreadScales),
    /// The same number everywhere.
    Same(f32),
    /// Written together with the rows that it scales.
    Made,
}

/// How a checkpoint's scales become those of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpreadScales {
    /// Matrices of scales that stand one after the other.
    pub count: usize,
    /// Rows and columns of each in the model's order.
    pub shape: [usize; 2],
    /// The file has the two axes of each swapped.
    pub swapped: bool,
    /// How often each row is repeated.
    pub times: usize,
    /// Rows of each after that; the last may be repeated less often.
    pub rows: usize,
    /// Whether zero is no scale.
    pub is_above_zero: bool,
}

impl WeightSource {
    /// The tensor's name in the checkpoint, if it is from there.
    pub fn name(&self) -> Option<&str> {
        match self {
            WeightSource::Tensor(name)
            | WeightSource::Random(name, _)
            | WeightSource::SkewedRouter(name, ..)
            | WeightSource::WeightScales(name, _) => Some(name),
            WeightSource::Constant(_) | WeightSource::Zeros | WeightSource::Same(_) | WeightSource::Made => None,
        }
    }
}
