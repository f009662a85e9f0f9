//! GEMMs with weights, and the norms, gates and conversions around them.

use crate::{Activations, QuantizedRows, Tensor, Weight};

/// Computes `out = x @ weight^T + bias`, or adds the result to `out` if `accumulate` is set. Sums
/// are computed in `f32`.
///
/// With a quantized weight and quantized activations, products of quantized numbers are summed in
/// f32 within each group of columns that has a scale, and each sum is multiplied by the
/// scales of both operands.
#[non_exhaustive]
pub struct Linear<'a> {
    /// `[rows, in_features]` activations, only in the format that the weight requires. A gap
    /// between unquantized rows is allowed.
    pub x: Activations<'a>,
    /// `[out_features, in_features]`, contiguous.
    pub weight: Weight<'a>,
    /// `[out_features]`, floating point.
    pub bias: Option<Tensor<'a>>,
    /// `true` to add to the contents of `out` instead of replacing them.
    pub accumulate: bool,
    /// Scratch declared with
    /// [`Target::linear_scratch`](crate::Target::linear_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// `[rows, out_features]` activations. f32 is also allowed if `accumulate` is not set.
    pub out: Tensor<'a>,
}

/// Computes `out = activation(gate) * up` where `[gate | up] = x @ weight^T + bias`.
#[non_exhaustive]
pub struct GatedLinear<'a> {
    /// `[rows, in_features]` activations, only in the format that the weight requires. A gap
    /// between unquantized rows is allowed.
    pub x: Activations<'a>,
    /// `[2 * features, in_features]`, contiguous: gate, then up.
    pub weight: Weight<'a>,
    /// `[2 * features]`, floating point.
    pub bias: Option<Tensor<'a>>,
    pub activation: GateActivation,
    /// `[rows, 2 * features]` activations: space for the result before the gate. The contents are
    /// undefined afterward.
    pub gate_up: Tensor<'a>,
    /// Scratch declared with
    /// [`Target::linear_scratch`](crate::Target::linear_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// `[rows, features]` in the requested formats.
    pub out: Activations<'a>,
}

/// The activation function of a gated MLP's gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateActivation {
    /// `x / (1 + exp(-x))`, elsewhere named `silu` or `swish`.
    Silu,
    /// [`Gelu::Tanh`], elsewhere named `gelu_pytorch_tanh`.
    GeluTanh,
}

/// Computes `out = activation(gate) * up`.
#[non_exhaustive]
pub struct GateMul<'a> {
    /// `[rows, features]` activations. A gap between rows is allowed.
    pub gate: Tensor<'a>,
    /// `[rows, features]` activations. A gap between rows is allowed. If `out` requests quantized
    /// rows, each row of `up` directly follows its row of `gate` in memory.
    pub up: Tensor<'a>,
    pub activation: GateActivation,
    /// `[rows, features]` in the requested formats.
    pub out: Activations<'a>,
}

/// Clamps elements to a range. NaN stays NaN.
#[non_exhaustive]
pub struct Clamp<'a> {
    /// `[rows, columns]` activations; `None` means the output itself. A gap between rows is allowed.
    pub x: Option<Tensor<'a>>,
    /// `[2]` f32: the least and the largest element.
    pub bounds: Tensor<'a>,
    /// `[rows, columns]` activations. A gap between rows is allowed.
    pub out: Tensor<'a>,
}

/// Computes `x = (x * factor - shift) * scale` in f32.
#[non_exhaustive]
pub struct Standardize<'a> {
    /// `[rows, columns]` activations, changed in place. A gap between rows is allowed.
    pub x: Tensor<'a>,
    pub factor: f32,
    /// `[columns]` f32.
    pub shift: Tensor<'a>,
    /// `[columns]` f32.
    pub scale: Tensor<'a>,
}

/// Computes `x = cap * tanh(x / cap)`.
#[non_exhaustive]
pub struct SoftCap<'a> {
    /// `[rows, columns]` f32, changed in place. A gap between rows is allowed.
    pub x: Tensor<'a>,
    /// Greater than 0.
    pub cap: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// The definition: `x / 2 * (1 + erf(x / sqrt(2)))`.
    Erf,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`, elsewhere
    /// named `gelu_pytorch_tanh` or `gelu_new`.
    Tanh,
    /// `x / (1 + exp(-1.702 * x))`, elsewhere named `quick_gelu`.
    Quick,
}

#[non_exhaustive]
pub struct ApplyGelu<'a> {
    /// `[rows, features]` activations, changed in place.
    pub x: Tensor<'a>,
    pub kind: Gelu,
}

/// Computes `out = x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)`, row by row, with the
/// mean in `f32`.
#[non_exhaustive]
pub struct RmsNorm<'a> {
    /// `[rows, hidden]` activations.
    pub x: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub weight: Tensor<'a>,
    /// Added to each weight: 1 for norms whose stored weights are centered on zero, otherwise 0.
    pub weight_offset: f32,
    /// Constant added to the mean square.
    pub epsilon: f32,
    /// `[rows, hidden]` in the requested formats.
    pub out: Activations<'a>,
}

/// Computes `sum = (sum + x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)) * factor`, row by
/// row, with all arithmetic in `f32`.
#[non_exhaustive]
pub struct RmsNormAdd<'a> {
    /// `[rows, hidden]` activations.
    pub x: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub weight: Tensor<'a>,
    /// Added to each weight: 1 for norms whose stored weights are centered on zero, otherwise 0.
    pub weight_offset: f32,
    /// Constant added to the mean square.
    pub epsilon: f32,
    /// `[1]` f32; `None` means 1.
    pub factor: Option<Tensor<'a>>,
    /// `[rows, hidden]` activations, changed in place.
    pub sum: Tensor<'a>,
}

/// Computes `out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias`, row by row, with
/// mean and variance in `f32`. The variance is the mean squared distance from the mean.
#[non_exhaustive]
pub struct LayerNorm<'a> {
    /// `[rows, hidden]` activations.
    pub x: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub weight: Tensor<'a>,
    /// `[hidden]`, floating point.
    pub bias: Tensor<'a>,
    /// Constant added to the variance.
    pub epsilon: f32,
    /// `[rows, hidden]` activations.
    pub out: Tensor<'a>,
}

/// Computes `data = x / scale`, rounded to the nearest with ties to even, and clamped to a
/// magnitude of 448. Unless the scale is [fixed](crate::Quantization::Fixed), each row or each
/// group of a row has the scale `largest magnitude / 448` in f32, at least the smallest normal
/// number. NaN stays NaN, and the scale ignores NaN.
#[non_exhaustive]
pub struct Quantize<'a> {
    /// `[rows, columns]` activations. A gap between rows is allowed.
    pub x: Tensor<'a>,
    /// Quantized rows `[rows, columns]` and their scales.
    pub out: QuantizedRows<'a>,
}

/// Memory in which a backend may measure GEMMs.
#[non_exhaustive]
pub struct Measure<'a> {
    /// `[bytes]` u8 with arbitrary contents: all free memory of the workspace.
    pub memory: Tensor<'a>,
}
