//! Every entry point of the device code as a field. A launch names its kernel by a field, not by a
//! string, so it cannot request a kernel that does not exist.

use super::numbers::attention_paged_hopper::E4M3_HEAD_DIM;
use super::sizes::{
    ByHeadDim, ByHopperHeadDim, ByPackedHeadDim, BySmallMRows, GATED_WIDTHS, HeadDim, HopperHeadDim, PLACES,
    PackedHeadDim, SmallMRows, TILED_ROWS,
};
use super::sources::{
    ALL_REDUCE, ATTENTION_PREFILL, ATTENTION_PREFILL_HOPPER, DEQUANTIZE_INT4, EXPERTS, EXPERTS_LARGE_M,
    EXPERTS_LARGE_M_E4M3, EXPERTS_SMALL_M, EXPERTS_SMALL_M_E4M3, GATED_DELTA, GELU, GEMM_INT4, GEMM_LARGE_M,
    GEMM_LARGE_M_E4M3, GEMM_SMALL_M, GEMM_SMALL_M_E4M3, GEMM_SMALL_M_INT4, GEMM_TILED_E4M3, LAYER_NORM, MEAN_ROWS,
    QUANTIZE, QUANTIZE_LARGE_M, RMS_NORM, ROTARY, ROUTE, SAMPLING, SIGMOID_MUL, SILU_MUL, Source, in_order, waiting,
};
use crate::{DType, QuantizationScheme, StateDtype};

/// An entry point under the name that it has in the compiled code.
pub(in crate::cuda) struct EntryPoint {
    /// The source file's name without its extension.
    pub source: &'static str,
    pub name: String,
    /// `true` if the kernel waits for the preceding kernel on the device.
    pub waits: bool,
}

/// The groups of entry points that the device code for a GPU generation has.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Generation {
    /// `true` for Hopper's machine code.
    pub is_hopper: bool,
    /// `true` from sm_80 on.
    pub has_int4: bool,
}

/// A value `F` for each entry point, for one activation type. In a launch, `F`
/// is the loaded function.
pub(in crate::cuda) struct EntryPoints<F> {
    pub add_experts: F,
    pub add_experts_rms_norm: F,
    pub add_rows: F,
    pub argmax: F,
    pub argmax_f32: F,
    pub attention_decode: ByHeadDim<F>,
    pub attention_packed: ByPackedHeadDim<F>,
    pub attention_paged: ByHeadDim<F>,
    /// `None` for head dimensions that have no such kernel.
    pub attention_windows: ByPackedHeadDim<Option<F>>,
    pub clamp: F,
    pub clustered_argmax: F,
    pub embed: F,
    pub embed_scaled: F,
    pub experts: F,
    pub fill_random: F,
    pub fill_random_quantized: F,
    pub fill_random_f32: F,
    pub gated_experts: F,
    pub gather_rows: F,
    pub gelu: F,
    pub gelu_mul: F,
    pub gelu_mul_rounded: F,
    pub gelu_tanh: F,
    pub gelu_quick: F,
    pub layer_norm: F,
    pub mean_rows: F,
    /// `None` if Hopper's kernels replace these kernels.
    pub gemm_tiled: Option<Tiled<F>>,
    /// `None` on GPUs before sm_80.
    pub int4: Option<Int4<F>>,
    pub patchify: F,
    pub position_grid: F,
    pub quantize: F,
    pub rms_norm: F,
    pub rms_norm_add: F,
    pub rms_norm_rounded: F,
    pub rotary: F,
    pub rotary_normed: F,
    pub rotary_kv_write: F,
    pub rotary_kv_write_normed: F,
    pub route_small_m: F,
    pub route_choose: F,
    pub route_sort: F,
    pub sample_previous: F,
    pub sample_slices: F,
    pub sample_plan: F,
    pub sample_gather: F,
    pub sample_choose: F,
    pub scatter_rows: F,
    pub silu_mul: F,
    pub soft_cap: F,
    pub standardize: F,
    pub silu_mul_rounded: F,
    pub states: States<F>,
    /// Entry points that exist only in Hopper's machine code.
    pub hopper: Option<HopperEntryPoints<F>>,
}

/// Entry points that exist only in Hopper's machine code.
pub(in crate::cuda) struct HopperEntryPoints<F> {
    pub add_experts_rms_norm_rounded: F,
    pub all_gather: F,
    /// Kernel for rows whose starts or lengths are not multiples of 16 bytes.
    pub all_gather_odd: F,
    pub all_reduce: F,
    /// Kernel for rows whose starts or lengths are not multiples of 16 bytes.
    pub all_reduce_odd: F,
    pub all_reduce_pieces: F,
    pub all_reduce_two_shot: F,
    pub all_reduce_rms_norm: SumAndNorm<F>,
    pub all_reduce_rms_norm_rounded: SumAndNorm<F>,
    /// Kernel for more than four ranks, without quantization.
    pub all_reduce_rms_norm_shares_8: F,
    pub attention_paged: ByHopperHeadDim<PagedHopper<F>>,
    pub attention_packed: ByPackedHeadDim<F>,
    pub best_of_ranks: F,
    pub part_from_ranks: F,
    pub quantized_cache: QuantizedCache<F>,
    pub experts: Experts<F>,
    pub experts_quantized: ByScales<Experts<F>>,
    pub gemm_small_m_gated: BySmallMRows<F>,
    /// Indexed like [`GATED_WIDTHS`].
    pub gemm_medium_m: [F; GATED_WIDTHS.len()],
    pub gemm_small_m: BySmallMRows<F>,
    pub gemm_small_m_quantized: ByScales<BySmallMRows<F>>,
    pub gemm_large_m: F,
    pub gemm_large_m_add: F,
    pub gemm_large_m_gated: F,
    pub gemm_large_m_quantized: ByScales<LargeMQuantized<F>>,
    pub route_normed: F,
    pub silu_mul_rounded_small_m: F,
    /// Kernels with at most 640 and with at most 1024 threads per thread block.
    pub quantize_long: [F; 2],
    /// Kernels with at most 640 and with at most 1024 threads per thread block.
    pub silu_mul_rounded_long: [F; 2],
    /// Kernels in which a thread keeps one and two vectors of a row in registers.
    pub quantize_large_m: [F; 2],
    /// Kernels in which a thread keeps one and two vectors of a row in registers.
    pub rms_norm_rounded_large_m: [F; 2],
    pub transpose_scales: F,
}

/// Attention of many rows over the KV cache.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct PagedHopper<F> {
    pub whole: F,
    /// Kernel that splits the keys of a tile among several jobs.
    pub split: F,
    /// Kernel that merges the partial results of split tiles.
    pub combine: F,
}

/// Kernels for quantized weights, with a scale per block or per row.
pub(in crate::cuda) struct ByScales<K> {
    blocks: K,
    rows: K,
}

impl<K> ByScales<K> {
    fn find<E>(mut find: impl FnMut(&str) -> Result<K, E>) -> Result<Self, E> {
        Ok(ByScales { blocks: find("blocks")?, rows: find("rows")? })
    }

    pub(in crate::cuda) fn of(&self, scheme: QuantizationScheme) -> &K {
        if scheme.weights.block_rows().is_some() { &self.blocks } else { &self.rows }
    }
}

/// The gated delta rule for one type of matrices.
pub(in crate::cuda) struct Delta<F> {
    pub by_token: F,
    /// Kernel for keys of 128 elements.
    pub by_token_128: F,
    /// Kernel for keys of 128 elements and one row per sequence, with several rows of a matrix per
    /// lane group.
    pub by_token_128_held: F,
    /// Kernel for keys of 128 elements and any number of rows, in chunks on the tensor cores.
    pub chunked: F,
}

/// Layers with a recurrent state.
pub(in crate::cuda) struct States<F> {
    pub causal_conv: F,
    pub delta_f32: Delta<F>,
    pub delta_bf16: Delta<F>,
    /// The part of the gated delta rule in chunks that does not depend on the state.
    pub gated_delta_prepare: F,
    pub gated_rms_norm: F,
    pub sigmoid_mul: F,
    /// Kernel for one gate per row.
    pub sigmoid_mul_rows: F,
}

/// GEMMs with experts' weights.
pub(in crate::cuda) struct Experts<F> {
    /// Indexed like [`PLACES`].
    pub small_m: [F; PLACES.len()],
    /// Indexed like [`PLACES`].
    pub gated_small_m: [F; PLACES.len()],
    pub large_m: F,
    pub gated_large_m: F,
}

/// Variants of the all-reduce that is fused with an RMS norm, whose output is unquantized
/// or quantized.
pub(in crate::cuda) struct SumAndNorm<F> {
    pub read: F,
    /// Kernels for pieces of two and of four rows.
    pub pieces: [F; 2],
    /// Kernels for two ranks and for more than two ranks.
    pub pushed: [F; 2],
    /// Kernel for three or four ranks.
    pub shares_4: F,
}

/// Kernels that read and write quantized keys and values. Each kernel has the same parameters as
/// the entry point of the same name for a cache in the activation type.
pub(in crate::cuda) struct QuantizedCache<F> {
    pub attention_decode: ByHeadDim<F>,
    pub attention_paged: ByHeadDim<F>,
    /// Kernels for heads of `attention_paged_hopper::E4M3_HEAD_DIM` elements.
    pub attention_paged_hopper: PagedHopper<F>,
    pub rotary_kv_write: F,
    pub rotary_kv_write_normed: F,
}

/// GEMMs with FP8 weights on GPU generations other than Hopper.
pub(in crate::cuda) struct Tiled<F> {
    /// Indexed like [`TILED_ROWS`].
    pub small_m: [F; TILED_ROWS.len()],
    pub large_m: F,
}

/// GEMMs with weights of 4-bit integers.
pub(in crate::cuda) struct Int4<F> {
    /// Kernels of `gemm_int4.cu`.
    pub streamed: BySmallMRows<F>,
    /// `None` on GPU generations other than Hopper.
    pub small_m: Option<Int4SmallM<F>>,
    pub dequantize: F,
}

/// Kernels of `gemm_small_m_int4.cu`.
pub(in crate::cuda) struct Int4SmallM<F> {
    pub plain: BySmallMRows<F, { SmallMRows::ALL.len() }>,
    pub gated: BySmallMRows<F, { SmallMRows::ALL.len() }>,
}

/// GEMMs of many rows with quantized weights.
pub(in crate::cuda) struct LargeMQuantized<F> {
    pub plain: F,
    pub add: F,
    pub gated: F,
    /// The gated GEMM with its output quantized.
    pub gated_rounded: F,
}

impl<F> EntryPoints<F> {
    /// Calls `find` for each entry point that `generation` has for activations of type
    /// `activation`.
    ///
    /// # Errors
    /// The first error that `find` returns.
    pub(in crate::cuda) fn find<E>(
        activation: DType,
        generation: Generation,
        find: impl FnMut(EntryPoint) -> Result<F, E>,
    ) -> Result<Self, E> {
        let mut all = Finder { activation: activation.name(), find };
        let Generation { is_hopper: hopper, has_int4 } = generation;
        Ok(EntryPoints {
            add_experts: all.typed(EXPERTS, "add_experts")?,
            add_experts_rms_norm: all.typed(RMS_NORM, "add_experts_rms_norm")?,
            add_rows: all.typed(waiting("add_rows"), "add_rows")?,
            argmax: all.typed(waiting("argmax"), "argmax")?,
            argmax_f32: all.named(waiting("argmax"), "argmax_f32")?,
            attention_decode: all.by_head_dim(waiting("attention_decode"), "attention_decode")?,
            attention_packed: all.by_packed_head_dim(ATTENTION_PREFILL, "attention_packed")?,
            attention_paged: all.by_head_dim(ATTENTION_PREFILL, "attention_paged")?,
            attention_windows: all.of_windows(ATTENTION_PREFILL, "attention_windows")?,
            clamp: all.typed(waiting("clamp"), "clamp")?,
            clustered_argmax: all.typed(waiting("clustered_argmax"), "clustered_argmax")?,
            embed: all.typed(waiting("embed"), "embed")?,
            embed_scaled: all.typed(waiting("embed"), "embed_scaled")?,
            experts: all.typed(EXPERTS, "experts")?,
            fill_random: all.typed(in_order("fill_random"), "fill_random")?,
            fill_random_quantized: all.named(in_order("fill_random"), "fill_random_e4m3")?,
            fill_random_f32: all.named(in_order("fill_random"), "fill_random_f32")?,
            gated_experts: all.typed(EXPERTS, "gated_experts")?,
            gather_rows: all.named(waiting("gather_rows"), "gather_rows")?,
            gelu: all.typed(GELU, "gelu")?,
            gelu_mul: all.typed(SILU_MUL, "gelu_mul")?,
            gelu_mul_rounded: all.typed(QUANTIZE, "gelu_mul_rounded")?,
            gelu_tanh: all.typed(GELU, "gelu_tanh")?,
            gelu_quick: all.typed(GELU, "gelu_quick")?,
            layer_norm: all.typed(LAYER_NORM, "layer_norm")?,
            mean_rows: all.typed(MEAN_ROWS, "mean_rows")?,
            gemm_tiled: if hopper { None } else { Some(Tiled::find(&mut all)?) },
            int4: if has_int4 { Some(Int4::find(&mut all, hopper)?) } else { None },
            patchify: all.typed(in_order("patchify"), "patchify")?,
            position_grid: all.typed(waiting("position_grid"), "position_grid")?,
            quantize: all.typed(QUANTIZE, "quantize")?,
            rms_norm: all.typed(RMS_NORM, "rms_norm")?,
            rms_norm_add: all.typed(RMS_NORM, "rms_norm_add")?,
            rms_norm_rounded: all.typed(QUANTIZE, "rms_norm_rounded")?,
            rotary: all.typed(ROTARY, "rotary")?,
            rotary_normed: all.typed(ROTARY, "rotary_normed")?,
            rotary_kv_write: all.typed(ROTARY, "rotary_kv_write")?,
            rotary_kv_write_normed: all.typed(ROTARY, "rotary_kv_write_normed")?,
            route_small_m: all.named(ROUTE, "route_small_m_f32")?,
            route_choose: all.named(ROUTE, "route_choose_f32")?,
            route_sort: all.named(ROUTE, "route_sort_u32")?,
            sample_previous: all.named(SAMPLING, "sample_previous_u32")?,
            sample_slices: all.named(SAMPLING, "sample_slices_f32")?,
            sample_plan: all.named(SAMPLING, "sample_plan_f32")?,
            sample_gather: all.named(SAMPLING, "sample_gather_f32")?,
            sample_choose: all.named(SAMPLING, "sample_choose_f32")?,
            scatter_rows: all.named(waiting("scatter_rows"), "scatter_rows")?,
            silu_mul: all.typed(SILU_MUL, "silu_mul")?,
            silu_mul_rounded: all.typed(QUANTIZE, "silu_mul_rounded")?,
            soft_cap: all.named(waiting("soft_cap"), "soft_cap")?,
            standardize: all.typed(waiting("standardize"), "standardize")?,
            states: States::find(&mut all)?,
            hopper: if hopper { Some(HopperEntryPoints::find(&mut all)?) } else { None },
        })
    }
}

impl<F> HopperEntryPoints<F> {
    fn find<E>(all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>) -> Result<Self, E> {
        Ok(HopperEntryPoints {
            add_experts_rms_norm_rounded: all.typed(QUANTIZE, "add_experts_rms_norm_rounded")?,
            all_gather: all.named(ALL_REDUCE, "all_gather")?,
            all_gather_odd: all.named(ALL_REDUCE, "all_gather_odd")?,
            all_reduce: all.typed(ALL_REDUCE, "all_reduce")?,
            all_reduce_odd: all.typed(ALL_REDUCE, "all_reduce_odd")?,
            all_reduce_pieces: all.typed(ALL_REDUCE, "all_reduce_pieces")?,
            all_reduce_two_shot: all.typed(ALL_REDUCE, "all_reduce_two_shot")?,
            all_reduce_rms_norm: SumAndNorm::find(all, "")?,
            all_reduce_rms_norm_rounded: SumAndNorm::find(all, "_rounded")?,
            all_reduce_rms_norm_shares_8: all.typed(ALL_REDUCE, "all_reduce_rms_norm_shares_8")?,
            attention_paged: by_hopper_head_dim(|size| PagedHopper::find(all, "", size))?,
            attention_packed: all.by_packed_head_dim(ATTENTION_PREFILL_HOPPER, "attention_packed_hopper")?,
            best_of_ranks: all.named(ALL_REDUCE, "best_of_ranks")?,
            part_from_ranks: all.named(ALL_REDUCE, "part_from_ranks")?,
            quantized_cache: QuantizedCache::find(all)?,
            experts: Experts::find(all, EXPERTS_SMALL_M, EXPERTS_LARGE_M, "")?,
            experts_quantized: ByScales::find(|scales| {
                Experts::find(all, EXPERTS_SMALL_M_E4M3, EXPERTS_LARGE_M_E4M3, &format!("_e4m3_{scales}"))
            })?,
            gemm_small_m_gated: all.by_small_m_rows(GEMM_SMALL_M, "gemm_small_m_gated")?,
            gemm_medium_m: all.by_gated_widths(waiting("gemm_medium_m"), "gemm_medium_m")?,
            gemm_small_m: all.by_small_m_rows(GEMM_SMALL_M, "gemm_small_m")?,
            gemm_small_m_quantized: ByScales::find(|scales| {
                all.by_small_m_rows(GEMM_SMALL_M_E4M3, &format!("gemm_small_m_e4m3_{scales}"))
            })?,
            gemm_large_m: all.typed(GEMM_LARGE_M, "gemm_large_m")?,
            gemm_large_m_add: all.typed(GEMM_LARGE_M, "gemm_large_m_add")?,
            gemm_large_m_gated: all.typed(GEMM_LARGE_M, "gemm_large_m_gated")?,
            gemm_large_m_quantized: ByScales::find(|scales| LargeMQuantized::find(all, scales))?,
            route_normed: all.typed(waiting("route_normed"), "route_normed")?,
            silu_mul_rounded_small_m: all.typed(QUANTIZE, "silu_mul_rounded_small_m")?,
            quantize_long: [
                all.typed(QUANTIZE_LARGE_M, "quantize_long_640")?,
                all.typed(QUANTIZE_LARGE_M, "quantize_long_1024")?,
            ],
            silu_mul_rounded_long: [
                all.typed(QUANTIZE_LARGE_M, "silu_mul_rounded_long_640")?,
                all.typed(QUANTIZE_LARGE_M, "silu_mul_rounded_long_1024")?,
            ],
            quantize_large_m: [
                all.typed(QUANTIZE_LARGE_M, "quantize_large_m_1")?,
                all.typed(QUANTIZE_LARGE_M, "quantize_large_m_2")?,
            ],
            rms_norm_rounded_large_m: [
                all.typed(QUANTIZE_LARGE_M, "rms_norm_rounded_large_m_1")?,
                all.typed(QUANTIZE_LARGE_M, "rms_norm_rounded_large_m_2")?,
            ],
            transpose_scales: all.named(waiting("transpose_scales"), "transpose_scales")?,
        })
    }
}

/// Calls `find` with the elements per head of each [`HopperHeadDim`].
fn by_hopper_head_dim<K, E>(mut find: impl FnMut(usize) -> Result<K, E>) -> Result<ByHopperHeadDim<K>, E> {
    let [a, b] = HopperHeadDim::ALL.map(HopperHeadDim::elements);
    Ok(ByHopperHeadDim([find(a)?, find(b)?]))
}

impl<F> PagedHopper<F> {
    fn find<E>(
        all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>,
        cached: &str,
        head_dim: usize,
    ) -> Result<Self, E> {
        let mut of = |operation: &str| all.sized(ATTENTION_PREFILL_HOPPER, operation, 'd', head_dim);
        Ok(PagedHopper {
            whole: of(&format!("attention_paged_hopper{cached}"))?,
            split: of(&format!("attention_paged_hopper_split{cached}"))?,
            combine: all.sized(in_order("attention_paged_combine"), "attention_paged_combine", 'd', head_dim)?,
        })
    }
}

impl<F> Delta<F> {
    fn find<E>(all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>, stored: &str) -> Result<Self, E> {
        Ok(Delta {
            by_token: all.typed(GATED_DELTA, &format!("gated_delta{stored}"))?,
            by_token_128: all.typed(GATED_DELTA, &format!("gated_delta_128{stored}"))?,
            by_token_128_held: all.typed(GATED_DELTA, &format!("gated_delta_128_held{stored}"))?,
            chunked: all.typed(waiting("gated_delta_chunked"), &format!("gated_delta_chunked{stored}"))?,
        })
    }
}

impl<F> States<F> {
    /// The kernels of the gated delta rule for states of this type.
    pub(in crate::cuda) fn delta(&self, dtype: StateDtype) -> &Delta<F> {
        match dtype {
            StateDtype::F32 => &self.delta_f32,
            StateDtype::Bf16 => &self.delta_bf16,
        }
    }

    fn find<E>(all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>) -> Result<Self, E> {
        Ok(States {
            causal_conv: all.typed(waiting("causal_conv"), "causal_conv")?,
            delta_f32: Delta::find(all, "")?,
            delta_bf16: Delta::find(all, "_stored_bf16")?,
            gated_delta_prepare: all.typed(waiting("gated_delta_prepare"), "gated_delta_prepare")?,
            gated_rms_norm: all.typed(waiting("gated_rms_norm"), "gated_rms_norm")?,
            sigmoid_mul: all.typed(SIGMOID_MUL, "sigmoid_mul")?,
            sigmoid_mul_rows: all.typed(SIGMOID_MUL, "sigmoid_mul_rows")?,
        })
    }
}

impl<F> SumAndNorm<F> {
    fn find<E>(all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>, rounded: &str) -> Result<Self, E> {
        let mut form = |form| all.typed(ALL_REDUCE, &format!("all_reduce_rms_norm{form}{rounded}"));
        Ok(SumAndNorm {
            read: form("")?,
            pieces: [form("_pieces_2")?, form("_pieces_4")?],
            pushed: [form("_pushed_2")?, form("_pushed_8")?],
            shares_4: form("_shares_4")?,
        })
    }
}

impl<F> Experts<F> {
    fn find<E>(
        all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>,
        small_m: Source,
        large_m: Source,
        numbers: &str,
    ) -> Result<Self, E> {
        Ok(Experts {
            small_m: all.by_places(small_m, &format!("experts_small_m{numbers}"))?,
            gated_small_m: all.by_places(small_m, &format!("gated_experts_small_m{numbers}"))?,
            large_m: all.typed(large_m, &format!("experts_large_m{numbers}"))?,
            gated_large_m: all.typed(large_m, &format!("gated_experts_large_m{numbers}"))?,
        })
    }
}

impl<F> QuantizedCache<F> {
    fn find<E>(all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>) -> Result<Self, E> {
        Ok(QuantizedCache {
            attention_paged_hopper: PagedHopper::find(all, "_e4m3", E4M3_HEAD_DIM)?,
            attention_decode: all.by_head_dim(waiting("attention_decode_e4m3"), "attention_decode_e4m3")?,
            attention_paged: all.by_head_dim(ATTENTION_PREFILL, "attention_paged_e4m3")?,
            rotary_kv_write: all.typed(ROTARY, "rotary_kv_write_e4m3")?,
            rotary_kv_write_normed: all.typed(ROTARY, "rotary_kv_write_normed_e4m3")?,
        })
    }
}

impl<F> Tiled<F> {
    fn find<E>(all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>) -> Result<Self, E> {
        let [a, b, c] = TILED_ROWS;
        let mut small_m = |rows| all.named(GEMM_TILED_E4M3, &format!("gemm_tiled_e4m3_small_m_r{rows}"));
        Ok(Tiled {
            small_m: [small_m(a)?, small_m(b)?, small_m(c)?],
            large_m: all.named(GEMM_TILED_E4M3, "gemm_tiled_e4m3_large_m")?,
        })
    }
}

impl<F> Int4<F> {
    fn find<E>(all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>, is_hopper: bool) -> Result<Self, E> {
        let small_m = if is_hopper {
            Some(Int4SmallM {
                plain: all.by_int4_rows("gemm_small_m_int4")?,
                gated: all.by_int4_rows("gemm_small_m_int4_gated")?,
            })
        } else {
            None
        };
        let streamed = all.by_small_m_rows(GEMM_INT4, "gemm_int4")?;
        Ok(Int4 { streamed, small_m, dequantize: all.typed(DEQUANTIZE_INT4, "dequantize_int4")? })
    }
}

impl<F> LargeMQuantized<F> {
    fn find<E>(all: &mut Finder<impl FnMut(EntryPoint) -> Result<F, E>>, scales: &str) -> Result<Self, E> {
        let mut of = |operation: &str| all.typed(GEMM_LARGE_M_E4M3, &format!("{operation}_e4m3_{scales}"));
        Ok(LargeMQuantized {
            plain: of("gemm_large_m")?,
            add: of("gemm_large_m_add")?,
            gated: of("gemm_large_m_gated")?,
            gated_rounded: of("gemm_large_m_gated_rounded")?,
        })
    }
}

/// Builds the names of entry points: the operation, then the activation type, then a size.
struct Finder<Find> {
    activation: &'static str,
    find: Find,
}

impl<F, E, Find: FnMut(EntryPoint) -> Result<F, E>> Finder<Find> {
    /// Finds an entry point that does not depend on the activation type.
    fn named(&mut self, source: Source, name: &str) -> Result<F, E> {
        (self.find)(EntryPoint { source: source.name, name: name.to_owned(), waits: source.waits })
    }

    fn typed(&mut self, source: Source, operation: &str) -> Result<F, E> {
        self.named(source, &format!("{operation}_{}", self.activation))
    }

    fn sized(&mut self, source: Source, operation: &str, letter: char, size: usize) -> Result<F, E> {
        self.named(source, &format!("{operation}_{}_{letter}{size}", self.activation))
    }

    fn by_head_dim(&mut self, source: Source, operation: &str) -> Result<ByHeadDim<F>, E> {
        let [a, b, c, d, e, f] = HeadDim::ELEMENTS;
        let mut of = |size| self.sized(source, operation, 'd', size);
        Ok(ByHeadDim([of(a)?, of(b)?, of(c)?, of(d)?, of(e)?, of(f)?]))
    }

    fn by_packed_head_dim(&mut self, source: Source, operation: &str) -> Result<ByPackedHeadDim<F>, E> {
        let [a, b, c, d, e] = PackedHeadDim::ELEMENTS;
        let mut of = |size| self.sized(source, operation, 'd', size);
        Ok(ByPackedHeadDim([of(a)?, of(b)?, of(c)?, of(d)?, of(e)?]))
    }

    fn of_windows(&mut self, source: Source, operation: &str) -> Result<ByPackedHeadDim<Option<F>>, E> {
        let [a, b, c, d, e] = PackedHeadDim::ALL;
        let mut of = |size: PackedHeadDim| {
            let is_there = PackedHeadDim::OF_WINDOWS.contains(&size);
            is_there.then(|| self.sized(source, operation, 'd', size.elements())).transpose()
        };
        Ok(ByPackedHeadDim([of(a)?, of(b)?, of(c)?, of(d)?, of(e)?]))
    }

    fn by_places(&mut self, source: Source, operation: &str) -> Result<[F; PLACES.len()], E> {
        let [a, b, c, d] = PLACES;
        let mut of = |size| self.sized(source, operation, 'r', size);
        Ok([of(a)?, of(b)?, of(c)?, of(d)?])
    }

    fn by_gated_widths(&mut self, source: Source, operation: &str) -> Result<[F; GATED_WIDTHS.len()], E> {
        let [a, b, c] = GATED_WIDTHS;
        let mut of = |width| self.sized(source, operation, 'f', width);
        Ok([of(a)?, of(b)?, of(c)?])
    }

    fn by_small_m_rows(&mut self, source: Source, operation: &str) -> Result<BySmallMRows<F>, E> {
        let [a, b, c, d] = SmallMRows::UP_TO_64.map(SmallMRows::rows);
        let mut of = |size| self.sized(source, operation, 'r', size);
        Ok(BySmallMRows([of(a)?, of(b)?, of(c)?, of(d)?]))
    }

    fn by_int4_rows(&mut self, operation: &str) -> Result<BySmallMRows<F, { SmallMRows::ALL.len() }>, E> {
        let [a, b, c, d, e] = SmallMRows::ALL.map(SmallMRows::rows);
        let mut of = |size| self.sized(GEMM_SMALL_M_INT4, operation, 'r', size);
        Ok(BySmallMRows([of(a)?, of(b)?, of(c)?, of(d)?, of(e)?]))
    }
}
