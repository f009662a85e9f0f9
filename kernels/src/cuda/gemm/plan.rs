//! Pure: the choice of the kernel that computes a GEMM.
//!
//! The table of kernels (`table.rs`) lists the kernels that support a GEMM. If several kernels
//! support the GEMM, the [`GemmBackend`] decides. With the default backend, the kernel that
//! autotuning measured to be fastest is chosen.

use super::{
    algorithm::GemmAlgorithm,
    problem::{GemmOperands, GemmProblem, MEMORY_BOUND_ROWS},
    scale_scratch,
    table::{Gpu, Kernel},
    tiles::Cut,
};
use crate::{DType, KernelError};

/// Minimum number of rows at which a GEMM is split so that the library computes all rows except the
/// last one to three. The small-m kernel reads the whole weight for the last rows, which takes
/// as long as the library takes for about 140 rows (4 TB/s, 1,100 TFLOP/s).
const SPLIT_FROM: usize = 2048;

/// Maximum number of rows at which a GEMM that was not measured uses the streaming kernel for 4-bit
/// integers. On an H200, with the largest weights of a 7B model, the streaming kernel is faster up
/// to this number of rows, and the small-m kernel is faster above it.
const INT4_ROWS: usize = 16;

/// The implementation that computes GEMMs of any number of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmBackend {
    /// The implementation that autotuning measured to be fastest. If nothing was measured, cuBLASLt
    /// computes unquantized GEMMs, and this project's kernels compute the quantized GEMMs that they
    /// support.
    #[default]
    Measured,
    /// This project's kernels for every GEMM that they support: for comparison, and for ranks that
    /// share a GPU.
    Ours,
    /// cuBLASLt for every GEMM that it supports, for comparison.
    Library,
}

/// The implementation that computes one GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GemmPlan {
    SmallM(Cut),
    /// The small-m kernel, in launches of as many rows as it supports. This is the fallback for
    /// quantized GEMMs whose output is not aligned for any other kernel, for GEMMs with 4-bit
    /// integers and more rows than one launch supports, and for f32 outputs if the library is not
    /// used.
    SmallMPieces(Cut),
    MediumM,
    LargeM,
    Tiled,
    /// The kernel of `gemm_int4.cu` for weights of 4-bit integers.
    Int4,
    /// Unquantized GEMMs of dequantized slices of a weight of 4-bit integers.
    DequantizedInt4,
    /// cuBLASLt, except for the last `rest` rows, which the small-m kernel computes.
    Library {
        rest: usize,
    },
}

/// Results of autotuning, and the library's answers about the GEMMs that it supports.
pub(super) trait Measurements {
    /// Returns the algorithm measured for this GEMM, or for the next larger measured number of
    /// rows.
    fn fastest(&self, problem: GemmProblem) -> Option<GemmAlgorithm>;

    /// Returns `true` if the large-m kernel was measured to be faster than the library for this
    /// ungated GEMM, or for the same GEMM with up to a third more rows.
    fn is_large_m_faster(&self, problem: GemmProblem) -> bool;

    /// Returns `true` if the library has an algorithm for the GEMM. The table must say that the
    /// library supports the GEMM.
    ///
    /// # Errors
    /// The device is lost.
    fn library_has(&mut self, problem: GemmProblem, operands: GemmOperands) -> Result<bool, KernelError>;
}

/// The choice of a kernel on one GPU.
pub(super) struct Planner<'m, M> {
    pub gpu: Gpu,
    pub backend: GemmBackend,
    pub activation: DType,
    pub measurements: &'m mut M,
}

impl<M: Measurements> Planner<'_, M> {
    /// Chooses how the GEMM is computed. The GEMM has at least one row and one feature. Returns
    /// `None` for a gated GEMM that is computed as an ungated GEMM followed by the gate.
    ///
    /// # Errors
    /// The device is lost, or no kernel supports a GEMM with a weight of 4-bit integers.
    pub(super) fn plan(
        &mut self,
        problem: GemmProblem,
        operands: GemmOperands,
    ) -> Result<Option<GemmPlan>, KernelError> {
        if problem.is_int4() {
            return self.int4(problem, operands);
        }
        if let Some(cut) = self.small_m(problem, operands)? {
            return Ok(Some(GemmPlan::SmallM(cut)));
        }
        if self.is_medium_m(problem, operands) {
            return Ok(Some(GemmPlan::MediumM));
        }
        if self.is_large_m(problem, operands)? {
            return Ok(Some(GemmPlan::LargeM));
        }
        if problem.gates {
            return Ok(None);
        }
        if self.gpu.supports(Kernel::Tiled, problem, operands) {
            return Ok(Some(GemmPlan::Tiled));
        }
        // When cuBLASLt loads one of its kernels, it waits for running kernels. Ranks that share a
        // GPU must avoid this wait, so with the `Ours` backend the small-m kernel computes the GEMM
        // in pieces if it can. An example is an f32 output with more rows than one launch of the
        // small-m kernel supports.
        let is_ours = self.backend == GemmBackend::Ours && self.has_pieces(problem, operands);
        let has_library = !is_ours && self.library_has(problem, operands)?;
        Ok(Some(if has_library {
            GemmPlan::Library { rest: rest_of(problem) }
        } else {
            GemmPlan::SmallMPieces(Cut::DEFAULT)
        }))
    }

    /// Chooses the kernel for a weight of 4-bit integers. A gated GEMM that no kernel supports is
    /// computed as an ungated GEMM followed by the gate.
    fn int4(&self, problem: GemmProblem, operands: GemmOperands) -> Result<Option<GemmPlan>, KernelError> {
        if self.gpu.supports(Kernel::DequantizedInt4, problem, operands) {
            return Ok(Some(GemmPlan::DequantizedInt4));
        }
        let rows = problem.rows.min(problem.small_m_rows_max());
        let measured = match self.backend {
            GemmBackend::Measured => self.measurements.fastest(GemmProblem { rows, ..problem }),
            GemmBackend::Ours | GemmBackend::Library => None,
        };
        let has_int4 = self.gpu.supports(Kernel::Int4, problem, operands);
        let is_int4_faster = match measured {
            Some(algorithm) => algorithm == GemmAlgorithm::Int4,
            None => rows <= INT4_ROWS,
        };
        if self.has_pieces(problem, operands) && !(has_int4 && is_int4_faster) {
            let cut = if let Some(GemmAlgorithm::SmallM(cut)) = measured { cut } else { Cut::DEFAULT };
            return Ok(Some(if rows == problem.rows { GemmPlan::SmallM(cut) } else { GemmPlan::SmallMPieces(cut) }));
        }
        if has_int4 {
            return Ok(Some(GemmPlan::Int4));
        }
        if problem.gates { Ok(None) } else { Err(KernelError::NoKernel { op: "linear" }) }
    }

    /// Returns `true` if the small-m kernel supports the GEMM when the GEMM is split into launches
    /// of as many rows as the kernel supports.
    fn has_pieces(&self, problem: GemmProblem, operands: GemmOperands) -> bool {
        let rows = problem.rows.min(problem.small_m_rows_max());
        let (piece, operands) = problem.rows_of(operands, self.activation, 0, rows);
        self.gpu.supports(Kernel::SmallM, piece, operands)
    }

    /// Returns the cut to use, or `None` if the small-m kernel should not compute the GEMM.
    fn small_m(&mut self, problem: GemmProblem, operands: GemmOperands) -> Result<Option<Cut>, KernelError> {
        if !self.gpu.supports(Kernel::SmallM, problem, operands) {
            return Ok(None);
        }
        Ok(match self.backend {
            GemmBackend::Library => (!self.library_has(problem, operands)?).then_some(Cut::DEFAULT),
            GemmBackend::Ours => Some(Cut::DEFAULT),
            GemmBackend::Measured => match self.measurements.fastest(problem) {
                Some(GemmAlgorithm::SmallM(cut)) => Some(cut),
                None if !problem.is_unquantized() => Some(Cut::DEFAULT),
                _ => None,
            },
        })
    }

    fn is_medium_m(&self, problem: GemmProblem, operands: GemmOperands) -> bool {
        self.gpu.supports(Kernel::MediumM, problem, operands)
            && match self.backend {
                GemmBackend::Library => false,
                GemmBackend::Ours => true,
                GemmBackend::Measured => self.measurements.fastest(problem) == Some(GemmAlgorithm::MediumM),
            }
    }

    fn is_large_m(&mut self, problem: GemmProblem, operands: GemmOperands) -> Result<bool, KernelError> {
        if !self.gpu.supports(Kernel::LargeM, problem, operands) {
            return Ok(false);
        }
        let is_unquantized = problem.is_unquantized();
        // The large-m kernel's tall tiles are slow for up to `MEMORY_BOUND_ROWS` rows, and cuBLASLt
        // supports every unquantized GEMM.
        if is_unquantized && problem.rows <= MEMORY_BOUND_ROWS && self.backend != GemmBackend::Ours {
            return Ok(false);
        }
        match self.backend {
            // cuBLASLt does not support quantized GEMMs with a fixed scale, and supports other
            // quantized GEMMs only in some versions.
            GemmBackend::Library => return Ok(!is_unquantized && !self.library_has(problem, operands)?),
            GemmBackend::Ours => return Ok(true),
            GemmBackend::Measured => {}
        }
        let fastest = self.measurements.fastest(problem);
        if problem.gates {
            // At the measured size, the fastest implementation may be the library's ungated GEMM
            // followed by the gate, but the library may not support the size of this GEMM.
            let is_odd = problem.block_rows().is_some() && !problem.rows.is_multiple_of(scale_scratch::ROWS);
            let lacks_library = is_odd
                && problem.rows > MEMORY_BOUND_ROWS
                && !library_supports(&self.gpu, self.activation, problem, operands);
            let is_only = !is_unquantized && (fastest.is_none() || lacks_library);
            return Ok(fastest == Some(GemmAlgorithm::LargeM) || is_only);
        }
        let has_library = matches!(fastest, Some(GemmAlgorithm::Library(_))) && self.library_has(problem, operands)?;
        if !is_unquantized && !has_library {
            return Ok(true);
        }
        Ok(self.measurements.is_large_m_faster(problem))
    }

    /// Returns `true` if autotuning can compare the large-m kernel with another implementation, on
    /// the operands of the pass. A gated GEMM can always be compared with an ungated GEMM followed
    /// by the gate. An ungated GEMM can only be compared with the library. A GEMM that is split is
    /// not measured: it uses the measurement of a size that is not split.
    ///
    /// # Errors
    /// The device is lost.
    pub(super) fn can_compare_large_m(
        &mut self,
        problem: GemmProblem,
        operands: GemmOperands,
    ) -> Result<bool, KernelError> {
        let is_candidate = self.backend == GemmBackend::Measured
            && problem.rows > MEMORY_BOUND_ROWS
            && self.gpu.supports(Kernel::LargeM, problem, operands);
        Ok(is_candidate && (problem.gates || rest_of(problem) == 0 && self.library_has(problem, operands)?))
    }

    /// Returns `true` if the library supports the GEMM and has an algorithm for it. For a gated
    /// GEMM, the result is `true` if the library supports the ungated GEMM: whether it has an
    /// algorithm for the ungated GEMM is checked separately.
    fn library_has(&mut self, problem: GemmProblem, operands: GemmOperands) -> Result<bool, KernelError> {
        if !library_supports(&self.gpu, self.activation, problem, operands) {
            return Ok(false);
        }
        if problem.is_unquantized() || problem.gates {
            return Ok(true);
        }
        let whole = GemmProblem { rows: problem.rows - rest_of(problem), ..problem };
        self.measurements.library_has(whole, operands)
    }
}

/// Returns the number of last rows that cuBLASLt does not compute. With scales by blocks, cuBLASLt
/// requires a multiple of four rows.
fn rest_of(problem: GemmProblem) -> usize {
    if problem.block_rows().is_some() && problem.rows >= SPLIT_FROM { problem.rows % scale_scratch::ROWS } else { 0 }
}

/// Returns `true` if the library supports the GEMM, or all of its rows except the last [`rest_of`]
/// rows. For a gated GEMM, the result applies to the ungated GEMM before the gate.
pub(super) fn library_supports(gpu: &Gpu, activation: DType, problem: GemmProblem, operands: GemmOperands) -> bool {
    if problem.is_unquantized() {
        return true;
    }
    let rest = rest_of(problem);
    let whole = GemmProblem { gates: false, rows: problem.rows - rest, ..problem };
    let is_rest_served = || {
        let (last, operands) = problem.rows_of(operands, activation, whole.rows, rest);
        gpu.supports(Kernel::SmallM, last, operands)
    };
    gpu.supports(Kernel::Library, whole, GemmOperands { out_is_quantized: false, ..operands })
        && (problem.gates || rest == 0 || is_rest_served())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::{
        super::{
            problem::testing::{FIXED, gated, int4, operands, problem, quantized},
            table::testing::{ADA, HOPPER},
        },
        *,
    };
    use crate::QuantizationScheme;

    /// Measurements that are the same for all GEMMs.
    #[derive(Default)]
    struct Found {
        fastest: Option<GemmAlgorithm>,
        is_large_m_faster: bool,
        library_refuses: bool,
        /// Number of rows in the last call of `library_has`.
        asked_rows: Cell<usize>,
    }

    impl Measurements for Found {
        fn fastest(&self, _: GemmProblem) -> Option<GemmAlgorithm> {
            self.fastest
        }

        fn is_large_m_faster(&self, _: GemmProblem) -> bool {
            self.is_large_m_faster
        }

        fn library_has(&mut self, problem: GemmProblem, _: GemmOperands) -> Result<bool, KernelError> {
            self.asked_rows.set(problem.rows);
            Ok(!self.library_refuses)
        }
    }

    fn planner(gpu: Gpu, backend: GemmBackend, measurements: &mut Found) -> Planner<'_, Found> {
        Planner { gpu, backend, activation: DType::BF16, measurements }
    }

    fn plan(backend: GemmBackend, mut found: Found, problem: GemmProblem) -> Option<GemmPlan> {
        planner(HOPPER, backend, &mut found).plan(problem, operands(32 << 20)).expect("the device answers")
    }

    const WHOLE: Option<GemmPlan> = Some(GemmPlan::Library { rest: 0 });
    const SMALL_M: Option<GemmPlan> = Some(GemmPlan::SmallM(Cut::DEFAULT));

    fn measured(algorithm: GemmAlgorithm) -> Found {
        Found { fastest: Some(algorithm), ..Found::default() }
    }

    const BLOCKS: QuantizationScheme = QuantizationScheme::BLOCK;

    #[test]
    fn without_measurements_the_library_computes_what_is_not_quantized() {
        let unmeasured = |problem| plan(GemmBackend::Measured, Found::default(), problem);
        for rows in [1, 64, 65, 257, 8192] {
            assert_eq!(unmeasured(problem(rows, 4608, 3584)), WHOLE, "{rows} rows");
            assert_eq!(unmeasured(gated(rows, 18_944, 3584)), None, "{rows} rows: unfused");
        }
        assert_eq!(unmeasured(quantized(BLOCKS, 64)), SMALL_M);
        assert_eq!(unmeasured(quantized(BLOCKS, 68)), Some(GemmPlan::LargeM));
        let gated = GemmProblem { scheme: Some(BLOCKS), ..gated(300, 18_944, 3584) };
        assert_eq!(unmeasured(gated), Some(GemmPlan::LargeM));
        assert_eq!(unmeasured(GemmProblem { rows: 64, ..gated }), None, "no gated quantized kernel supports 64 rows");
    }

    #[test]
    fn a_measured_algorithm_is_followed_where_its_kernel_supports_the_size() {
        let follow = |algorithm, problem| plan(GemmBackend::Measured, measured(algorithm), problem);
        let cut = Cut::ALL[2];
        assert_eq!(follow(GemmAlgorithm::SmallM(cut), problem(8, 4608, 3584)), Some(GemmPlan::SmallM(cut)));
        assert_eq!(follow(GemmAlgorithm::SmallM(cut), problem(65, 4608, 3584)), WHOLE);
        assert_eq!(follow(GemmAlgorithm::MediumM, gated(256, 18_944, 3584)), Some(GemmPlan::MediumM));
        assert_eq!(follow(GemmAlgorithm::MediumM, gated(64, 18_944, 3584)), None);
        assert_eq!(follow(GemmAlgorithm::LargeM, gated(300, 18_944, 3584)), Some(GemmPlan::LargeM));
        assert_eq!(follow(GemmAlgorithm::Unfused, gated(300, 18_944, 3584)), None);
        let faster = Found { is_large_m_faster: true, ..Found::default() };
        assert_eq!(plan(GemmBackend::Measured, faster, problem(300, 4608, 3584)), Some(GemmPlan::LargeM));
    }

    #[test]
    fn the_backends_for_comparison_use_one_implementation_wherever_it_can() {
        let by = |backend, problem| plan(backend, Found::default(), problem);
        for (problem, ours) in [
            (problem(8, 4608, 3584), SMALL_M),
            (problem(100, 4608, 3584), Some(GemmPlan::LargeM)),
            (problem(300, 4608, 3584), Some(GemmPlan::LargeM)),
            (quantized(QuantizationScheme::ROW, 300), Some(GemmPlan::LargeM)),
        ] {
            assert_eq!(by(GemmBackend::Ours, problem), ours, "{problem:?}");
            assert_eq!(by(GemmBackend::Library, problem), WHOLE, "{problem:?}");
        }
        let logits = GemmProblem { out_is_f32: true, ..problem(100, 152_064, 3584) };
        assert_eq!(
            by(GemmBackend::Ours, logits),
            Some(GemmPlan::SmallMPieces(Cut::DEFAULT)),
            "large-m kernels write no f32"
        );
        assert_eq!(by(GemmBackend::Measured, logits), WHOLE);
        assert_eq!(by(GemmBackend::Ours, gated(256, 18_944, 3584)), Some(GemmPlan::MediumM));
        assert_eq!(by(GemmBackend::Library, gated(256, 18_944, 3584)), None);
        assert_eq!(by(GemmBackend::Library, quantized(FIXED, 8)), SMALL_M, "the library has no algorithm");
        assert_eq!(by(GemmBackend::Library, quantized(FIXED, 300)), Some(GemmPlan::LargeM));
    }

    #[test]
    fn the_library_leaves_the_last_rows_of_long_gemms_with_block_scales() {
        for (rows, rest) in [(2048, 0), (2049, 1), (8191, 3)] {
            let mut found = Found::default();
            let mut planner = planner(HOPPER, GemmBackend::Library, &mut found);
            let plan = planner.plan(quantized(BLOCKS, rows), operands(32 << 20)).expect("the device answers");
            assert_eq!(plan, Some(GemmPlan::Library { rest }));
            assert_eq!(found.asked_rows.get(), rows - rest);
        }
        assert_eq!(plan(GemmBackend::Library, Found::default(), quantized(BLOCKS, 2047)), Some(GemmPlan::LargeM));
    }

    #[test]
    fn an_unaligned_quantized_output_is_computed_in_pieces() {
        let unaligned = GemmProblem { out_pitch: 4609, ..quantized(QuantizationScheme::ROW, 300) };
        assert_eq!(
            plan(GemmBackend::Measured, Found::default(), unaligned),
            Some(GemmPlan::SmallMPieces(Cut::DEFAULT))
        );
        let refused = Found { library_refuses: true, ..Found::default() };
        assert_eq!(
            plan(GemmBackend::Library, refused, quantized(QuantizationScheme::ROW, 300)),
            Some(GemmPlan::LargeM)
        );
    }

    #[test]
    fn other_gpus_have_tiled_kernels_for_quantized_gemms_and_the_library_for_the_rest() {
        let mut found = Found::default();
        let mut planner = planner(ADA, GemmBackend::Measured, &mut found);
        let mut plan = |problem| planner.plan(problem, operands(32 << 20)).expect("the device answers");
        for rows in [1, 65, 8192] {
            assert_eq!(plan(quantized(BLOCKS, rows)), Some(GemmPlan::Tiled));
            assert_eq!(plan(problem(rows, 4608, 3584)), WHOLE);
            assert_eq!(plan(gated(rows, 18_944, 3584)), None);
        }
    }

    #[test]
    fn weights_of_4_bit_integers_are_dequantized_for_many_rows() {
        for (gpu, backend) in
            [(HOPPER, GemmBackend::Measured), (HOPPER, GemmBackend::Ours), (ADA, GemmBackend::Library)]
        {
            let mut found = Found { library_refuses: true, ..Found::default() };
            let mut planner = planner(gpu, backend, &mut found);
            let (few, more) = if gpu.is_hopper {
                (GemmPlan::SmallM(Cut::DEFAULT), GemmPlan::SmallMPieces(Cut::DEFAULT))
            } else {
                (GemmPlan::Int4, GemmPlan::Int4)
            };
            let sizes = [(1, GemmPlan::Int4), (17, few), (128, few), (256, more), (257, GemmPlan::DequantizedInt4)];
            for (rows, expected) in sizes {
                let gated = GemmProblem { scheme: int4(rows, 64).scheme, ..gated(rows, 18_944, 3584) };
                for problem in [int4(rows, 64), gated] {
                    let plan = planner.plan(problem, operands(256 << 20)).expect("there is a kernel");
                    assert_eq!(plan, Some(expected), "{problem:?}");
                    assert!(!planner.can_compare_large_m(problem, operands(256 << 20)).expect("the device answers"));
                }
            }
            planner.plan(int4(1, 64), GemmOperands { x: 8, ..operands(256 << 20) }).expect_err("x is not aligned");
        }
    }

    #[test]
    fn a_weight_of_4_bit_integers_has_the_fastest_of_its_kernels() {
        let cut = Cut::ALL[2];
        let follow = |algorithm, rows| plan(GemmBackend::Measured, measured(algorithm), int4(rows, 64));
        assert_eq!(follow(GemmAlgorithm::SmallM(cut), 8), Some(GemmPlan::SmallM(cut)));
        assert_eq!(follow(GemmAlgorithm::SmallM(cut), 200), Some(GemmPlan::SmallMPieces(cut)));
        assert_eq!(follow(GemmAlgorithm::Int4, 8), Some(GemmPlan::Int4));
        let biased = GemmProblem { scheme: int4(8, 64).scheme, has_bias: true, ..gated(8, 18_944, 3584) };
        assert_eq!(plan(GemmBackend::Measured, Found::default(), biased), Some(GemmPlan::Int4));
    }

    /// The plans of a GEMM, each with the first number of rows for which it is chosen.
    fn choices(gpu: Gpu, fastest: Option<GemmAlgorithm>, gemm: GemmProblem) -> String {
        let plan = |rows| {
            let mut found = Found { fastest, ..Found::default() };
            let mut planner = planner(gpu, GemmBackend::Measured, &mut found);
            match planner.plan(GemmProblem { rows, ..gemm }, operands(256 << 20)).expect("a kernel supports the GEMM") {
                Some(plan) => format!("{plan:?}"),
                None => "unfused".to_owned(),
            }
        };
        let plans: Vec<_> = (1..=512).chain([2047, 2048, 8191, 8192]).map(|rows| (rows, plan(rows))).collect();
        let ranges = plans.chunk_by(|(_, one), (_, other)| one == other);
        ranges.map(|same| format!(" from {} {},", same[0].0, same[0].1)).collect()
    }

    /// The choices for the GEMMs of a 7B model, before and after autotuning has found the small-m
    /// kernel to be the fastest: a line for each GPU, format and GEMM.
    fn choices_for_7b() -> Vec<String> {
        let formats = [
            ("bf16", None),
            ("fp8 by rows", Some(QuantizationScheme::ROW)),
            ("fp8 by blocks", Some(BLOCKS)),
            ("int4", Some(QuantizationScheme::int4(128, false))),
        ];
        let gemms = [
            ("qkv", GemmProblem { has_bias: true, ..problem(1, 4608, 3584) }),
            ("attention output", GemmProblem { accumulates: true, ..problem(1, 3584, 3584) }),
            ("gate and up", gated(1, 18_944, 3584)),
            ("down", GemmProblem { accumulates: true, ..problem(1, 3584, 18_944) }),
            ("logits", GemmProblem { out_is_f32: true, ..problem(1, 152_064, 3584) }),
        ];
        let all = [("H200", HOPPER), ("RTX 4090", ADA)].into_iter().flat_map(|gpu| formats.map(|format| (gpu, format)));
        let all = all.flat_map(|(gpu, format)| gemms.map(|gemm| (gpu, format, gemm)));
        all.flat_map(|((gpu_name, gpu), (format, scheme), (name, gemm))| {
            let line = |measured, fastest| {
                format!(
                    "{gpu_name}, {format}, {name}{measured}:{}",
                    choices(gpu, fastest, GemmProblem { scheme, ..gemm })
                )
            };
            [line("", None), line(", small-m is fastest", Some(GemmAlgorithm::SmallM(Cut::ALL[2])))]
        })
        .collect()
    }

    /// `BURSAR_RECORD=1 cargo test -p bursar-kernels --lib plan` rewrites the recording for review.
    #[test]
    fn choices_for_a_7b_model_are_as_recorded() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/gemm/recorded_choices.txt");
        let found = choices_for_7b();
        if std::env::var_os("BURSAR_RECORD").is_some() {
            std::fs::write(path, found.join("\n") + "\n").expect("the recording is written");
        }
        let recorded = std::fs::read_to_string(path).expect("the recording is read");
        assert_eq!(found, recorded.lines().collect::<Vec<_>>());
    }

    #[test]
    fn only_whole_gemms_of_many_rows_are_compared() {
        let mut found = Found::default();
        let mut can = |problem| {
            let mut planner = planner(HOPPER, GemmBackend::Measured, &mut found);
            planner.can_compare_large_m(problem, operands(32 << 20)).expect("the device answers")
        };
        assert!(can(problem(257, 4608, 3584)) && can(gated(257, 18_944, 3584)) && can(quantized(BLOCKS, 2048)));
        assert!(!can(problem(256, 4608, 3584)), "autotuning measures few rows separately");
        assert!(!can(quantized(BLOCKS, 2049)), "split");
        assert!(!can(quantized(FIXED, 300)), "the library has no algorithm");
        let mut planner = planner(HOPPER, GemmBackend::Ours, &mut found);
        assert!(!planner.can_compare_large_m(problem(257, 4608, 3584), operands(0)).expect("the device answers"));
    }
}
