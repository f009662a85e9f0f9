//! Pure: the description of a GEMM (general matrix multiplication), `out = x * weight^T + bias`,
//! with its quantization scheme and the addresses of its operands.

use bursar_budgets::{Address, Bytes};
use serde::{Deserialize, Serialize};

use super::super::{contract::SmallMRows, tensor_map::Rows};
use crate::{DType, QuantizationScheme, calls::GateActivation};

/// The largest number of rows for which the time of a GEMM is bound by reading the weight.
pub(in super::super) const MEMORY_BOUND_ROWS: usize = 256;

/// The shape of a GEMM: everything that its fastest algorithm depends on. `rows` is the last field,
/// so that sizes of the same GEMM sort next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct GemmProblem {
    /// How weight and x are quantized. If `None`, both have the activation type.
    pub scheme: Option<QuantizationScheme>,
    /// `true` if half of the features are gates for the other half. Only half as many
    /// features are then written.
    pub gates: bool,
    pub out_features: usize,
    pub in_features: usize,
    pub out_pitch: usize,
    pub x_pitch: usize,
    pub out_is_f32: bool,
    pub has_bias: bool,
    pub accumulates: bool,
    pub rows: usize,
}

impl GemmProblem {
    /// Returns the number of features written per row.
    pub(in super::super) fn features(&self) -> usize {
        self.out_features / self.rows_per_feature()
    }

    /// Returns the number of weight rows from which a written feature is computed: two with gates
    /// (a gate row and an up row), otherwise one.
    pub(super) fn rows_per_feature(&self) -> usize {
        if self.gates { 2 } else { 1 }
    }

    /// Returns the dimensions and pitch of x.
    pub(in super::super) fn x(&self) -> Rows {
        Rows { rows: self.rows, columns: self.in_features, pitch: self.x_pitch }
    }

    /// Returns the dimensions and pitch of the weight.
    pub(in super::super) fn weight(&self) -> Rows {
        Rows { rows: self.out_features, columns: self.in_features, pitch: self.in_features }
    }

    pub(in super::super) fn is_unquantized(&self) -> bool {
        self.scheme.is_none()
    }

    /// Returns `true` if the weight has 4-bit integers, so that x is not quantized.
    pub(super) fn is_int4(&self) -> bool {
        self.scheme.is_some_and(QuantizationScheme::is_int4)
    }

    /// Returns the numbers of rows that the small-m kernel is compiled for.
    pub(super) fn small_m_sizes(&self) -> &'static [SmallMRows] {
        if self.is_int4() { &SmallMRows::ALL } else { &SmallMRows::UP_TO_64 }
    }

    /// Returns the maximum number of rows per launch of the small-m kernel.
    pub(super) fn small_m_rows_max(&self) -> usize {
        self.small_m_sizes().last().expect("the list is not empty").rows()
    }

    /// Returns `true` if x is quantized like the weight, to the same type.
    pub(super) fn quantizes_x(&self) -> bool {
        self.scheme.is_some_and(|scheme| scheme.activations.is_some())
    }

    /// Returns the type of the elements of the weight.
    pub(super) fn weight_type(&self, activation: DType) -> DType {
        self.scheme.map_or(activation, |scheme| scheme.elements)
    }

    /// Returns the type of the elements of x.
    pub(super) fn x_type(&self, activation: DType) -> DType {
        self.scheme.map_or(activation, |scheme| scheme.operand(activation))
    }

    /// Returns the number of rows of a block with one scale, or `None` if x is not quantized or the
    /// scales are not by blocks.
    pub(super) fn block_rows(&self) -> Option<usize> {
        self.scheme.filter(|_| self.quantizes_x())?.weights.block_rows()
    }

    /// Returns the number of scales that each row of x has in memory.
    pub(super) fn x_scales(&self) -> usize {
        let quantized = self.scheme.and_then(|scheme| scheme.activations);
        quantized.map_or(0, |quantized| quantized.row_scales(self.in_features))
    }

    /// Returns the pitch of x for tensor maps and alignment checks. A single row may have any
    /// pitch, but TMA requires a multiple of 16 bytes even if it reads no second row.
    pub(super) fn tma_x_pitch(&self) -> usize {
        if self.rows == 1 { self.in_features } else { self.x_pitch }
    }

    /// Returns a GEMM with only `rows` rows of this GEMM, starting at row `first`, and the operands
    /// of the returned GEMM.
    pub(super) fn rows_of(
        self,
        operands: GemmOperands,
        activation: DType,
        first: usize,
        rows: usize,
    ) -> (GemmProblem, GemmOperands) {
        let out = if self.out_is_f32 { DType::F32 } else { activation };
        let x_row_bytes = self.x_type(activation).bytes(self.x_pitch).0;
        let offset = |address: u64, bytes: Bytes| Address(address).offset(bytes).0;
        let operands = GemmOperands {
            x: offset(operands.x, Bytes(first as u64 * x_row_bytes)),
            x_scales: offset(operands.x_scales, DType::F32.bytes(first * self.x_scales())),
            out: offset(operands.out, out.bytes(first * self.out_pitch)),
            ..operands
        };
        (GemmProblem { rows, ..self }, operands)
    }
}

/// Device addresses of a GEMM's operands.
#[derive(Clone, Copy)]
pub(in super::super) struct GemmOperands {
    pub weight: u64,
    pub x: u64,
    pub bias: Option<u64>,
    /// Address of the weight's scales, if the weight has scales.
    pub weight_scales: u64,
    /// Address of the zero points of 4-bit integers, or 0 if there are no zero points.
    pub weight_zero_points: u64,
    /// Address of the scales of x, if x has several scales.
    pub x_scales: u64,
    /// The scale of x, if one scale applies to all of x.
    pub x_scale: f32,
    pub out: u64,
    /// `true` if the output is quantized. Only the kernels for gated GEMMs of many rows support
    /// this.
    pub out_is_quantized: bool,
    /// The activation of a gated GEMM. It must be SiLU if the weight is quantized.
    pub activation: GateActivation,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;
    use crate::{Quantization, ScaledBy};

    /// A scale for each row of the weight and one scale for all of x.
    pub(in super::super) const FIXED: QuantizationScheme =
        QuantizationScheme::fp8(ScaledBy::Row, Quantization::Fixed(()));

    /// A GEMM with a quantized weight.
    pub(in super::super) fn quantized(scheme: QuantizationScheme, rows: usize) -> GemmProblem {
        GemmProblem { scheme: Some(scheme), ..problem(rows, 4608, 3584) }
    }

    /// A GEMM with a weight of 4-bit integers with a scale for each `group` columns.
    pub(in super::super) fn int4(rows: usize, group: usize) -> GemmProblem {
        quantized(QuantizationScheme::int4(group, false), rows)
    }

    /// An ungated, unquantized GEMM without a bias whose rows have no gaps.
    pub(in super::super) fn problem(rows: usize, out_features: usize, in_features: usize) -> GemmProblem {
        GemmProblem {
            scheme: None,
            gates: false,
            out_features,
            in_features,
            out_pitch: out_features,
            x_pitch: in_features,
            out_is_f32: false,
            has_bias: false,
            accumulates: false,
            rows,
        }
    }

    /// A gated GEMM whose weight has `features` gate rows and as many up rows.
    pub(in super::super) fn gated(rows: usize, features: usize, in_features: usize) -> GemmProblem {
        GemmProblem { gates: true, out_pitch: features, ..problem(rows, 2 * features, in_features) }
    }

    /// Operands that are aligned for every kernel.
    pub(in super::super) fn operands(workspace_bytes: usize) -> GemmOperands {
        GemmOperands {
            weight: 512,
            x: 1024,
            bias: None,
            weight_scales: 2048,
            weight_zero_points: 0,
            x_scales: 4096,
            x_scale: 1.0,
            out: 8192,
            out_is_quantized: false,
            activation: GateActivation::Silu,
            workspace: 1 << 20,
            workspace_bytes,
        }
    }
}
