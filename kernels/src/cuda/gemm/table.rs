//! Pure: the kernels that compute GEMMs, and the GEMMs that each of them supports.

use std::ops::RangeInclusive;

use super::{
    super::contract::{
        SmallMRows,
        gemm_small_m::{GATE_ROWS, ROWS_MAX as SMALL_M_ROWS},
    },
    int4_slices,
    problem::{GemmOperands, GemmProblem, MEMORY_BOUND_ROWS},
    scale_scratch,
    tiles::{Int4Tiles, SmallMTiles},
};
use crate::{DType, Quantization, QuantizationScheme, int4::BLOCK_ROWS};

/// A family of kernels that compute GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Streams the weight once, for up to 64 rows, or up to 128 rows with 4-bit integers
    /// (`gemm_small_m.cu`, `gemm_small_m_e4m3.cu`, `gemm_small_m_int4.cu`).
    SmallM,
    /// Gated GEMMs of 65 to 256 rows (`gemm_medium_m.cu`).
    MediumM,
    /// Tall tiles (`gemm_large_m.cu`, `gemm_large_m_e4m3.cu`).
    LargeM,
    /// GEMMs with FP8 weights on GPU generations other than Hopper (`gemm_tiled_e4m3.cu`).
    Tiled,
    /// Streams a weight of 4-bit integers, in launches of up to 64 rows (`gemm_int4.cu`).
    Int4,
    /// Unquantized GEMMs of dequantized slices of a weight of 4-bit integers.
    DequantizedInt4,
    /// cuBLASLt, loaded at run time.
    Library,
}

/// Facts about a GPU, its device code and its cuBLASLt on which the choice of a kernel depends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gpu {
    /// `true` if the Hopper machine code is loaded.
    pub is_hopper: bool,
    /// `true` if this lane has counters for [`Kernel::SmallM`] and [`Kernel::Int4`].
    pub has_counters: bool,
    /// `true` if the kernels of [`Kernel::Tiled`] are loaded.
    pub has_tiled: bool,
    /// `true` if the kernels for weights of 4-bit integers are loaded.
    pub has_int4: bool,
    pub sms: usize,
    /// Version of cuBLASLt, such as 130,002 for 13.0.2.
    pub library_version: usize,
}

/// The quantization schemes to which a row of the table applies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Schemes {
    NotInt4,
    Unquantized,
    QuantizedX,
    ByRows,
    ByBlocks,
    Int4,
}

impl Schemes {
    fn contain(self, problem: GemmProblem) -> bool {
        match self {
            Schemes::NotInt4 => !problem.is_int4(),
            Schemes::Unquantized => problem.is_unquantized(),
            Schemes::QuantizedX => problem.quantizes_x(),
            Schemes::ByRows => problem.scheme == Some(QuantizationScheme::ROW),
            Schemes::ByBlocks => problem.block_rows().is_some(),
            Schemes::Int4 => problem.is_int4(),
        }
    }
}

/// One row of the table: a kernel, and limits that a GEMM must satisfy.
struct Capability {
    kernel: Kernel,
    schemes: Schemes,
    gates: bool,
    rows: RangeInclusive<usize>,
    can_accumulate: bool,
    can_write_f32: bool,
    can_add_bias: bool,
    /// The number of features written per row must be a multiple of this number.
    features_multiple: usize,
    /// Alignment in bytes of the addresses and rows of x and of the weight.
    input_alignment: usize,
    /// Alignment in bytes of the address and rows of the output.
    out_alignment: usize,
    /// Alignment in bytes of the bias.
    bias_alignment: usize,
    /// Alignment in bytes of the weight's scales. Zero points need half of it.
    scale_alignment: usize,
    /// The oldest version of cuBLASLt that supports these GEMMs.
    library_version: usize,
}

/// A kernel without limits.
const ANY: Capability = Capability {
    kernel: Kernel::Library,
    schemes: Schemes::Unquantized,
    gates: false,
    rows: 1..=usize::MAX,
    can_accumulate: true,
    can_write_f32: true,
    can_add_bias: true,
    features_multiple: 1,
    input_alignment: 1,
    out_alignment: 1,
    bias_alignment: 1,
    scale_alignment: 1,
    library_version: 0,
};

/// Alignment in bytes that TMA requires of addresses and rows. Kernels that read 16 bytes at once
/// require the same.
const TMA: usize = 16;

/// Limits of the large-m kernels. TMA writes whole units of 16 bytes, even past the last column,
/// and biases are read in pairs.
const LARGE_M: Capability = Capability {
    kernel: Kernel::LargeM,
    rows: SMALL_M_ROWS + 1..=usize::MAX,
    can_write_f32: false,
    features_multiple: 8,
    input_alignment: TMA,
    out_alignment: TMA,
    bias_alignment: 4,
    ..ANY
};

/// cuBLASLt with scales by rows or blocks. cuBLASLt supports these scales since version 12.9.
const LIBRARY_QUANTIZED: Capability =
    Capability { can_write_f32: false, out_alignment: TMA, library_version: 120_900, ..ANY };

/// Limits of the kernels for weights of 4-bit integers, which read 16 bytes and blocks of rows at
/// once.
const INT4: Capability = Capability {
    kernel: Kernel::Int4,
    schemes: Schemes::Int4,
    features_multiple: BLOCK_ROWS,
    input_alignment: TMA,
    ..ANY
};

/// Limits of GEMMs of dequantized slices. Above `MEMORY_BOUND_ROWS` rows, it is cheaper to
/// dequantize the weight once than to launch a kernel for 4-bit integers many times: the
/// dequantization takes as long as about three launches of the small-m kernel with 128 rows, or
/// four launches of `gemm_int4.cu`. The other limits are the limits of the large-m kernels, so that
/// no GEMM of a slice is planned with the small-m kernel, which would read the slice before the
/// dequantization has ended.
const DEQUANTIZED_INT4: Capability = Capability {
    kernel: Kernel::DequantizedInt4,
    schemes: Schemes::Int4,
    rows: MEMORY_BOUND_ROWS + 1..=usize::MAX,
    features_multiple: BLOCK_ROWS,
    ..LARGE_M
};

/// Limits of the small-m kernel for 4-bit integer weights. It copies the scales of eight rows at
/// once.
const SMALL_M_INT4: Capability =
    Capability { kernel: Kernel::SmallM, rows: 1..=SmallMRows::R128.rows(), scale_alignment: TMA, ..INT4 };

const CAPABILITIES: [Capability; 17] = [
    Capability {
        kernel: Kernel::SmallM,
        schemes: Schemes::NotInt4,
        rows: 1..=SMALL_M_ROWS,
        input_alignment: TMA,
        ..ANY
    },
    Capability {
        kernel: Kernel::SmallM,
        gates: true,
        rows: 1..=SMALL_M_ROWS,
        can_add_bias: false,
        features_multiple: GATE_ROWS,
        input_alignment: TMA,
        ..ANY
    },
    Capability {
        kernel: Kernel::MediumM,
        gates: true,
        rows: SMALL_M_ROWS + 1..=MEMORY_BOUND_ROWS,
        can_accumulate: false,
        can_write_f32: false,
        features_multiple: 2,
        input_alignment: TMA,
        out_alignment: 8,
        bias_alignment: 4,
        ..ANY
    },
    LARGE_M,
    Capability { gates: true, can_accumulate: false, ..LARGE_M },
    Capability { schemes: Schemes::QuantizedX, ..LARGE_M },
    Capability { schemes: Schemes::QuantizedX, gates: true, can_accumulate: false, ..LARGE_M },
    Capability { kernel: Kernel::Tiled, schemes: Schemes::QuantizedX, input_alignment: TMA, ..ANY },
    INT4,
    Capability { gates: true, ..INT4 },
    SMALL_M_INT4,
    Capability { gates: true, can_accumulate: false, can_write_f32: false, can_add_bias: false, ..SMALL_M_INT4 },
    DEQUANTIZED_INT4,
    Capability { gates: true, can_accumulate: false, ..DEQUANTIZED_INT4 },
    ANY,
    Capability { schemes: Schemes::ByRows, ..LIBRARY_QUANTIZED },
    Capability { schemes: Schemes::ByBlocks, ..LIBRARY_QUANTIZED },
];

impl Capability {
    fn covers(&self, problem: GemmProblem, operands: GemmOperands) -> bool {
        let is_aligned =
            |bytes: [usize; 2], alignment: usize| bytes.iter().all(|bytes| bytes.is_multiple_of(alignment));
        // All activation types of CUDA have the size of f16.
        let x_bytes = problem.x_type(DType::F16).bytes(problem.tma_x_pitch()).as_usize();
        let weight_bytes = problem.weight_type(DType::F16).bytes(problem.in_features).as_usize();
        let out = if operands.out_is_quantized { Quantization::ELEMENTS } else { DType::F16 };
        self.schemes.contain(problem)
            && self.gates == problem.gates
            && self.rows.contains(&problem.rows)
            && (self.can_accumulate || !problem.accumulates)
            && (self.can_write_f32 || !problem.out_is_f32)
            && (self.can_add_bias || !problem.has_bias)
            && (!operands.out_is_quantized || self.kernel == Kernel::LargeM)
            && problem.in_features > 0
            && problem.features().is_multiple_of(self.features_multiple)
            && is_aligned([operands.weight as usize, operands.x as usize], self.input_alignment)
            && is_aligned([weight_bytes, x_bytes], self.input_alignment)
            && is_aligned([operands.out as usize, out.bytes(problem.out_pitch).as_usize()], self.out_alignment)
            && operands.bias.is_none_or(|bias| (bias as usize).is_multiple_of(self.bias_alignment))
            && (operands.weight_scales as usize).is_multiple_of(self.scale_alignment)
            && (operands.weight_zero_points as usize).is_multiple_of(self.scale_alignment.div_ceil(2))
    }
}

impl Gpu {
    /// Returns `true` if `kernel` can compute the GEMM on this GPU. cuBLASLt may still have no
    /// algorithm for the GEMM.
    pub(super) fn supports(&self, kernel: Kernel, problem: GemmProblem, operands: GemmOperands) -> bool {
        let is_usable = |row: &Capability| {
            match kernel {
                Kernel::SmallM => {
                    self.is_hopper
                        && (self.has_int4 || !problem.is_int4())
                        && self.has_counters
                        && SmallMTiles::all_fit(problem, self.sms, operands.workspace_bytes)
                }
                Kernel::MediumM | Kernel::LargeM => self.is_hopper,
                Kernel::Tiled => self.has_tiled,
                Kernel::Int4 => {
                    self.has_int4 && self.has_counters && Int4Tiles::fit(problem, self.sms, operands.workspace_bytes)
                }
                Kernel::DequantizedInt4 => self.has_int4 && int4_slices::fits(problem, operands),
                // For quantized GEMMs, kernels of Hopper's machine code convert the scales and
                // compute the rows that the library does not support.
                Kernel::Library => {
                    problem.is_unquantized() || self.is_hopper && self.library_version >= row.library_version
                }
            }
        };
        let needs_scratch = kernel == Kernel::Library && problem.block_rows().is_some();
        CAPABILITIES.iter().any(|row| row.kernel == kernel && row.covers(problem, operands) && is_usable(row))
            && (!needs_scratch || scale_scratch::fit(problem, operands))
    }
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// An H200 with cuBLASLt 13.
    pub(in super::super) const HOPPER: Gpu = Gpu {
        is_hopper: true,
        has_counters: true,
        has_tiled: false,
        has_int4: true,
        sms: 132,
        library_version: 130_002,
    };
    /// An RTX 4090 with cuBLASLt 13.
    pub(in super::super) const ADA: Gpu = Gpu {
        is_hopper: false,
        has_counters: true,
        has_tiled: true,
        has_int4: true,
        sms: 128,
        library_version: 130_002,
    };
}

#[cfg(test)]
mod tests {
    use super::{
        super::problem::testing::{FIXED, gated, int4, operands, problem, quantized},
        testing::{ADA, HOPPER},
        *,
    };

    const WORKSPACE: usize = 32 << 20;

    /// The kernels that support a GEMM on an H200.
    fn kernels(problem: GemmProblem, operands: GemmOperands) -> Vec<Kernel> {
        use Kernel::{DequantizedInt4, Int4, LargeM, Library, MediumM, SmallM, Tiled};
        let all = [SmallM, MediumM, LargeM, Tiled, Int4, DequantizedInt4, Library];
        all.into_iter().filter(|kernel| HOPPER.supports(*kernel, problem, operands)).collect()
    }

    fn aligned(problem: GemmProblem) -> Vec<Kernel> {
        kernels(problem, operands(WORKSPACE))
    }

    #[test]
    fn each_row_count_has_the_kernels_made_for_it() {
        use Kernel::{LargeM, Library, MediumM, SmallM};
        for rows in [1, 8, 64] {
            assert_eq!(aligned(problem(rows, 4608, 3584)), [SmallM, Library]);
            assert_eq!(aligned(gated(rows, 18_944, 3584)), [SmallM]);
        }
        for rows in [65, 256] {
            assert_eq!(aligned(problem(rows, 4608, 3584)), [LargeM, Library]);
            assert_eq!(aligned(gated(rows, 18_944, 3584)), [MediumM, LargeM]);
        }
        for rows in [257, 8192] {
            assert_eq!(aligned(problem(rows, 4608, 3584)), [LargeM, Library]);
            assert_eq!(aligned(gated(rows, 18_944, 3584)), [LargeM]);
        }
    }

    #[test]
    fn quantized_gemms_have_large_m_kernels_from_65_rows_on_and_the_library_by_its_version() {
        use Kernel::{LargeM, Library, SmallM, Tiled};
        let blocks = QuantizationScheme::BLOCK;
        for scheme in [QuantizationScheme::ROW, blocks] {
            assert_eq!(aligned(quantized(scheme, 64)), [SmallM, Library]);
            assert_eq!(aligned(quantized(scheme, 68)), [LargeM, Library]);
            let old = Gpu { library_version: 120_800, ..HOPPER };
            assert!(!old.supports(Library, quantized(scheme, 68), operands(WORKSPACE)));
        }
        assert_eq!(aligned(quantized(blocks, 69)), [LargeM], "the library takes multiples of four rows");
        assert_eq!(aligned(quantized(blocks.in_memory(64), 68)), [LargeM]);
        assert_eq!(aligned(quantized(FIXED, 64)), [SmallM]);
        assert_eq!(aligned(quantized(FIXED, 65)), [LargeM]);
        for rows in [1, 65, 8192] {
            let problem = quantized(blocks, rows);
            assert!(ADA.supports(Tiled, problem, operands(WORKSPACE)));
            assert!(![SmallM, LargeM, Library].iter().any(|kernel| ADA.supports(
                *kernel,
                problem,
                operands(WORKSPACE)
            )));
        }
    }

    #[test]
    fn weights_of_4_bit_integers_have_kernels_on_every_gpu_with_bf16() {
        use Kernel::{DequantizedInt4, Int4, SmallM};
        let ample = operands(256 << 20);
        for group in [32, 64, 128] {
            let whole = int4(64, group);
            let gated = GemmProblem { scheme: whole.scheme, ..gated(64, 18_944, 3584) };
            let logits = GemmProblem { out_is_f32: true, accumulates: true, has_bias: true, ..whole };
            assert_eq!(kernels(GemmProblem { rows: 257, ..logits }, ample), [Int4]);
            assert_eq!(kernels(GemmProblem { has_bias: true, ..gated }, ample), [Int4]);
            for problem in [whole, gated, GemmProblem { has_bias: true, ..whole }] {
                for rows in [1, 64, 65, 128] {
                    assert_eq!(kernels(GemmProblem { rows, ..problem }, ample), [SmallM, Int4], "{rows} rows");
                }
                assert_eq!(kernels(GemmProblem { rows: 129, ..problem }, ample), [Int4]);
                let many = GemmProblem { rows: 257, ..problem };
                assert_eq!(kernels(many, ample), [Int4, DequantizedInt4]);
                assert_eq!(kernels(many, operands(WORKSPACE)), [Int4], "the workspace has no space for a slice");
                assert!([Int4, DequantizedInt4].iter().all(|kernel| ADA.supports(*kernel, many, ample)));
                let turing = Gpu { has_int4: false, ..ADA };
                assert!(![Int4, DequantizedInt4].iter().any(|kernel| turing.supports(*kernel, many, ample)));
            }
        }
        let lacks = |problem, operands| assert_eq!(kernels(problem, operands), []);
        lacks(GemmProblem { out_features: 4604, ..int4(8, 128) }, ample);
        lacks(GemmProblem { x_pitch: 3588, ..int4(8, 128) }, ample);
        lacks(int4(8, 128), GemmOperands { x: 1032, ..ample });
        lacks(int4(8, 128), GemmOperands { weight: 520, ..ample });
        for odd in [GemmOperands { weight_scales: 2056, ..ample }, GemmOperands { weight_zero_points: 4, ..ample }] {
            assert_eq!(kernels(int4(8, 128), odd), [Int4], "the small-m kernel copies 16 and 8 bytes at once");
        }
        let without = Gpu { has_int4: false, ..HOPPER };
        assert!(!without.supports(SmallM, int4(8, 128), ample));
        lacks(int4(8, 128), operands(0));
        lacks(int4(300, 128), GemmOperands { out_is_quantized: true, ..ample });
    }

    #[test]
    fn a_kernel_is_left_out_if_a_limit_is_broken() {
        let (small, medium, large) = (problem(8, 4608, 3584), gated(256, 18_944, 3584), problem(257, 4608, 3584));
        let lacks = |kernel, problem, operands| assert!(!kernels(problem, operands).contains(&kernel), "{problem:?}");
        for (kernel, whole) in [(Kernel::SmallM, small), (Kernel::MediumM, medium), (Kernel::LargeM, large)] {
            assert!(aligned(whole).contains(&kernel));
            let odd_columns = GemmProblem { in_features: 3580, ..whole };
            let odd_pitch = GemmProblem { x_pitch: 3588, ..whole };
            for problem in [odd_columns, odd_pitch] {
                lacks(kernel, problem, operands(WORKSPACE));
            }
            lacks(kernel, whole, GemmOperands { x: 1032, ..operands(WORKSPACE) });
            lacks(kernel, whole, GemmOperands { weight: 520, ..operands(WORKSPACE) });
        }
        for (kernel, whole, multiple, out) in [(Kernel::MediumM, medium, 2, 8), (Kernel::LargeM, large, 8, 16)] {
            let f32_out = GemmProblem { out_is_f32: true, ..whole };
            let wide = GemmProblem { out_pitch: whole.out_pitch + out / 4, ..whole };
            let less = multiple / 2 * whole.rows_per_feature();
            let uneven = GemmProblem { out_features: whole.out_features - less, ..whole };
            for problem in [f32_out, wide, uneven] {
                lacks(kernel, problem, operands(WORKSPACE));
            }
            lacks(kernel, whole, GemmOperands { out: 8192 + out as u64 / 2, ..operands(WORKSPACE) });
            lacks(kernel, whole, GemmOperands { bias: Some(2), ..operands(WORKSPACE) });
        }
        lacks(Kernel::SmallM, small, operands(0));
        lacks(Kernel::SmallM, GemmProblem { has_bias: true, ..gated(8, 18_944, 3584) }, operands(WORKSPACE));
        lacks(Kernel::LargeM, GemmProblem { accumulates: true, ..gated(257, 18_944, 3584) }, operands(WORKSPACE));
        let single = GemmProblem { x_pitch: 3588, ..problem(1, 4608, 3584) };
        assert!(aligned(single).contains(&Kernel::SmallM), "a single row may have any pitch");
    }

    #[test]
    fn only_large_m_kernels_write_quantized_rows() {
        let quantized = GemmOperands { out_is_quantized: true, ..operands(WORKSPACE) };
        for rows in [8, 68, 300] {
            let problem = GemmProblem { scheme: Some(QuantizationScheme::ROW), ..gated(rows, 4608, 3584) };
            let expected = if rows > SMALL_M_ROWS { vec![Kernel::LargeM] } else { vec![] };
            assert_eq!(kernels(problem, quantized), expected, "{rows} rows");
        }
    }
}
