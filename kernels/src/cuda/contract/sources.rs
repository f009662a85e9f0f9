//! The source files of the device code, and whether their kernels wait for the preceding kernel.

/// A source file in `kernels/cuda`.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub(super) name: &'static str,
    /// `true` if the kernel may start before the preceding kernel has ended. Such a kernel waits
    /// for the preceding kernel on the device.
    pub(super) waits: bool,
}

/// A source whose kernels wait for the preceding kernel on the device (`include/kernel_order.cuh`).
/// These kernels may start before the preceding kernel has ended.
pub(super) const fn waiting(name: &'static str) -> Source {
    Source { name, waits: true }
}

/// A source whose kernels must not start before the preceding kernel has ended.
pub(super) const fn in_order(name: &'static str) -> Source {
    Source { name, waits: false }
}

pub(super) const ALL_REDUCE: Source = waiting("all_reduce");
pub(super) const ATTENTION_PREFILL: Source = in_order("attention_prefill");
pub(super) const ATTENTION_PREFILL_HOPPER: Source = in_order("attention_prefill_hopper");
pub(super) const EXPERTS: Source = waiting("experts");
pub(super) const EXPERTS_SMALL_M: Source = waiting("experts_small_m");
pub(super) const EXPERTS_SMALL_M_E4M3: Source = waiting("experts_small_m_e4m3");
pub(super) const EXPERTS_LARGE_M: Source = waiting("experts_large_m");
pub(super) const EXPERTS_LARGE_M_E4M3: Source = waiting("experts_large_m_e4m3");
pub(super) const GATED_DELTA: Source = waiting("gated_delta");
pub(super) const GELU: Source = waiting("gelu");
pub(super) const LAYER_NORM: Source = waiting("layer_norm");
pub(super) const GEMM_TILED_E4M3: Source = in_order("gemm_tiled_e4m3");
pub(super) const GEMM_SMALL_M: Source = waiting("gemm_small_m");
pub(super) const GEMM_SMALL_M_E4M3: Source = waiting("gemm_small_m_e4m3");
pub(super) const DEQUANTIZE_INT4: Source = waiting("dequantize_int4");
pub(super) const GEMM_INT4: Source = waiting("gemm_int4");
pub(super) const GEMM_SMALL_M_INT4: Source = waiting("gemm_small_m_int4");
pub(super) const GEMM_LARGE_M: Source = waiting("gemm_large_m");
pub(super) const GEMM_LARGE_M_E4M3: Source = waiting("gemm_large_m_e4m3");
pub(super) const MEAN_ROWS: Source = waiting("mean_rows");
pub(super) const QUANTIZE: Source = waiting("quantize");
pub(super) const QUANTIZE_LARGE_M: Source = waiting("quantize_large_m");
pub(super) const RMS_NORM: Source = waiting("rms_norm");
pub(super) const ROTARY: Source = waiting("rotary");
pub(super) const ROUTE: Source = waiting("route");
pub(super) const SAMPLING: Source = in_order("sampling");
pub(super) const SIGMOID_MUL: Source = waiting("sigmoid_mul");
pub(super) const SILU_MUL: Source = waiting("silu_mul");
