//! Pure: the kernels that compute GEMMs, and the GEMMs that each of them supports.

use std::ops::RangeInclusive;

use super::{
    super::contract::gemm_small_m::{GATE_ROWS, ROWS_MAX as SMALL_M_ROWS},
    problem::{GemmOperands, GemmProblem, MEMORY_BOUND_ROWS, QuantScheme},
    scale_scratch,
    tiles::SmallMTiles,
};
use crate::DType;

/// A family of kernels that compute GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Streams the weight once, for up to 64 rows (`gemm_small_m.cu`).
    SmallM,
    /// Gated GEMMs of 65 to 256 rows (`gemm_medium_m.cu`).
    MediumM,
    /// Tall tiles (`gemm_large_m.cu`, `gemm_large_m_e4m3.cu`).
    LargeM,
    /// E4M3 on GPU generations other than Hopper (`gemm_tiled_e4m3.cu`).
    TiledE4m3,
    /// cuBLASLt, loaded at run time.
    Library,
}

/// Facts about a GPU, its device code and its cuBLASLt on which the choice of a kernel depends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gpu {
    /// `true` if the Hopper machine code is loaded.
    pub is_hopper: bool,
    /// `true` if this lane has counters for [`Kernel::SmallM`].
    pub has_counters: bool,
    /// `true` if the kernels of [`Kernel::TiledE4m3`] are loaded.
    pub has_tiled: bool,
    pub sms: usize,
    /// Version of cuBLASLt, such as 130,002 for 13.0.2.
    pub library_version: usize,
}

/// The quantization schemes to which a row of the table applies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Schemes {
    All,
    Unquantized,
    E4m3,
    E4m3Rows,
    E4m3Blocks,
}

impl Schemes {
    fn contain(self, scheme: QuantScheme) -> bool {
        match self {
            Schemes::All => true,
            Schemes::Unquantized => scheme.is_unquantized(),
            Schemes::E4m3 => !scheme.is_unquantized(),
            Schemes::E4m3Rows => scheme == QuantScheme::E4m3Rows,
            Schemes::E4m3Blocks => matches!(scheme, QuantScheme::E4m3Blocks { .. }),
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
const LIBRARY_E4M3: Capability =
    Capability { can_write_f32: false, out_alignment: TMA, library_version: 120_900, ..ANY };

const CAPABILITIES: [Capability; 11] = [
    Capability { kernel: Kernel::SmallM, schemes: Schemes::All, rows: 1..=SMALL_M_ROWS, input_alignment: TMA, ..ANY },
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
    Capability { schemes: Schemes::E4m3, ..LARGE_M },
    Capability { schemes: Schemes::E4m3, gates: true, can_accumulate: false, ..LARGE_M },
    Capability { kernel: Kernel::TiledE4m3, schemes: Schemes::E4m3, input_alignment: TMA, ..ANY },
    ANY,
    Capability { schemes: Schemes::E4m3Rows, ..LIBRARY_E4M3 },
    Capability { schemes: Schemes::E4m3Blocks, ..LIBRARY_E4M3 },
];

impl Capability {
    fn covers(&self, problem: GemmProblem, operands: GemmOperands) -> bool {
        let is_aligned =
            |bytes: [usize; 2], alignment: usize| bytes.iter().all(|bytes| bytes.is_multiple_of(alignment));
        let size = problem.scheme.size();
        let out = if operands.out_is_e4m3 { DType::F8E4M3 } else { DType::F16 };
        self.schemes.contain(problem.scheme)
            && self.gates == problem.gates
            && self.rows.contains(&problem.rows)
            && (self.can_accumulate || !problem.accumulates)
            && (self.can_write_f32 || !problem.out_is_f32)
            && (self.can_add_bias || !problem.has_bias)
            && (!operands.out_is_e4m3 || self.kernel == Kernel::LargeM)
            && problem.in_features > 0
            && problem.features().is_multiple_of(self.features_multiple)
            && is_aligned([operands.weight as usize, operands.x as usize], self.input_alignment)
            && is_aligned([problem.in_features * size, problem.tma_x_pitch() * size], self.input_alignment)
            && is_aligned([operands.out as usize, out.bytes(problem.out_pitch).as_usize()], self.out_alignment)
            && operands.bias.is_none_or(|bias| (bias as usize).is_multiple_of(self.bias_alignment))
    }
}

impl Gpu {
    /// Returns `true` if `kernel` can compute the GEMM on this GPU. cuBLASLt may still have no
    /// algorithm for the GEMM.
    pub(super) fn supports(&self, kernel: Kernel, problem: GemmProblem, operands: GemmOperands) -> bool {
        let is_usable = |row: &Capability| {
            match kernel {
                Kernel::SmallM => {
                    self.has_counters && SmallMTiles::all_fit(problem, self.sms, operands.workspace_bytes)
                }
                Kernel::MediumM | Kernel::LargeM => self.is_hopper,
                Kernel::TiledE4m3 => self.has_tiled,
                // For E4M3, kernels of Hopper's machine code convert the scales and compute the
                // rows that the library does not support.
                Kernel::Library => {
                    problem.scheme.is_unquantized() || self.is_hopper && self.library_version >= row.library_version
                }
            }
        };
        let has_scratch = || match (kernel, problem.scheme) {
            (Kernel::Library, QuantScheme::E4m3Blocks { .. }) => scale_scratch::fit(problem, operands),
            _ => true,
        };
        CAPABILITIES.iter().any(|row| row.kernel == kernel && row.covers(problem, operands) && is_usable(row))
            && has_scratch()
    }
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// An H200 with cuBLASLt 13.
    pub(in super::super) const HOPPER: Gpu =
        Gpu { is_hopper: true, has_counters: true, has_tiled: false, sms: 132, library_version: 130_002 };
    /// An RTX 4090 with cuBLASLt 13.
    pub(in super::super) const ADA: Gpu =
        Gpu { is_hopper: false, has_counters: false, has_tiled: true, sms: 128, library_version: 130_002 };
}

#[cfg(test)]
mod tests {
    use super::{
        super::problem::testing::{gated, operands, problem},
        testing::{ADA, HOPPER},
        *,
    };

    const WORKSPACE: usize = 32 << 20;

    /// The kernels that support a GEMM on an H200.
    fn kernels(problem: GemmProblem, operands: GemmOperands) -> Vec<Kernel> {
        use Kernel::{LargeM, Library, MediumM, SmallM, TiledE4m3};
        let all = [SmallM, MediumM, LargeM, TiledE4m3, Library];
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
    fn e4m3_has_large_m_kernels_from_65_rows_on_and_the_library_by_its_version() {
        use Kernel::{LargeM, Library, SmallM, TiledE4m3};
        let rows_of = |scheme, rows| GemmProblem { scheme, ..problem(rows, 4608, 3584) };
        let blocks = QuantScheme::E4m3Blocks { height: 128 };
        for scheme in [QuantScheme::E4m3Rows, blocks] {
            assert_eq!(aligned(rows_of(scheme, 64)), [SmallM, Library]);
            assert_eq!(aligned(rows_of(scheme, 68)), [LargeM, Library]);
            let old = Gpu { library_version: 120_800, ..HOPPER };
            assert!(!old.supports(Library, rows_of(scheme, 68), operands(WORKSPACE)));
        }
        assert_eq!(aligned(rows_of(blocks, 69)), [LargeM], "the library takes row counts that are multiples of four");
        assert_eq!(aligned(rows_of(QuantScheme::E4m3Blocks { height: 64 }, 68)), [LargeM]);
        assert_eq!(aligned(rows_of(QuantScheme::E4m3Fixed, 64)), [SmallM]);
        assert_eq!(aligned(rows_of(QuantScheme::E4m3Fixed, 65)), [LargeM]);
        for rows in [1, 65, 8192] {
            let problem = rows_of(blocks, rows);
            assert!(ADA.supports(TiledE4m3, problem, operands(WORKSPACE)));
            assert!(![SmallM, LargeM, Library].iter().any(|kernel| ADA.supports(
                *kernel,
                problem,
                operands(WORKSPACE)
            )));
        }
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
            let less = multiple / 2 * if whole.gates { 2 } else { 1 };
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
    fn only_large_m_kernels_write_e4m3() {
        let rounded = GemmOperands { out_is_e4m3: true, ..operands(WORKSPACE) };
        for rows in [8, 68, 300] {
            let problem = GemmProblem { scheme: QuantScheme::E4m3Rows, ..gated(rows, 4608, 3584) };
            let expected = if rows > SMALL_M_ROWS { vec![Kernel::LargeM] } else { vec![] };
            assert_eq!(kernels(problem, rounded), expected, "{rows} rows");
        }
    }
}
