//! GEMMs by cuBLASLt, each with the algorithm measured to be fastest on this device.
//!
//! The library proposes algorithms from a model of the device, and on small batches its first
//! proposal is often not the fastest. During autotuning (in the stress before READY, whose results
//! are discarded), all proposals are tried for each new GEMM of many rows, and the fastest is kept.
//! At the end of autotuning, the GEMMs called so far are measured with few rows (`autotune.rs`).
//! Afterwards, a size that was not measured uses the algorithm of the next larger measured size
//! that supports it, so no kernel of the library is loaded while serving. Only a GEMM that was
//! never called during autotuning uses the first proposal.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bursar_budgets::{CudaDevice, DeviceError};
use serde::{Deserialize, Serialize};

use super::{
    super::{
        linear_few::Cut,
        stream::{Clock, Stream},
        tensor_map::Rows,
    },
    library::{Algorithm, Blas, Memory, Object, Operands, number},
};
use crate::{DType, FP8_BLOCK};

/// Number of proposals that autotuning measures.
const PROPOSALS: usize = 12;

/// A proposal this many times slower than the fastest in the first round is dropped.
const OUT_OF_REACH: f32 = 1.25;

/// Maximum number of proposals left after the first round.
const FINALISTS: usize = 4;

/// Rounds in which the finalists alternate. They alternate because a kernel runs faster after a
/// kernel that heats the device less. If all runs of a proposal were consecutive, the result would
/// depend on the order of the proposals.
const ROUNDS: usize = 4;

/// After this many milliseconds of timing, no further round starts, because runs
/// this long vary little.
const LONG_ENOUGH: f32 = 30.0;

/// Maximum number of rows for which a GEMM is bound by reading its weight.
pub(in super::super) const FEW_ROWS: usize = 256;

/// Placeholder for the address of the scales, with the same alignment.
const SOME_ADDRESS: u64 = 1 << 12;

/// Maximum number of descriptions kept. Prompts have any length, and a description takes a few
/// hundred bytes of host memory.
const KEPT_MAX: usize = 4096;

/// The shape of a GEMM: everything that its fastest algorithm depends on. `rows` is the last field,
/// so that sizes of the same GEMM sort next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct GemmProblem {
    #[serde(rename = "numbers")]
    pub scheme: QuantScheme,
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
    /// Features written per row.
    pub(in super::super) fn features(&self) -> usize {
        if self.gates { self.out_features / 2 } else { self.out_features }
    }

    /// Dimensions and pitch of x.
    pub(in super::super) fn x(&self) -> Rows {
        Rows { rows: self.rows, columns: self.in_features, pitch: self.x_pitch }
    }

    /// Dimensions and pitch of the weight.
    pub(in super::super) fn weight(&self) -> Rows {
        Rows { rows: self.out_features, columns: self.in_features, pitch: self.in_features }
    }
}

/// Number format and scales of a weight and of the activations that it is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in super::super) enum QuantScheme {
    /// Weight and activations have the activation type.
    #[serde(rename = "Plain")]
    Unquantized,
    /// E4M3, with a scale for each row of the weight and each row of x.
    E4m3Rows,
    /// E4M3, with a scale for each row of the weight and one scale for all of x.
    E4m3Fixed,
    /// E4M3, with a scale for each block of the weight (`height` rows by `FP8_BLOCK` columns) and
    /// for each group of columns of x.
    E4m3Blocks { height: usize },
}

impl QuantScheme {
    pub(in super::super) fn is_unquantized(self) -> bool {
        self == QuantScheme::Unquantized
    }

    /// Bytes per element.
    pub(in super::super) fn size(self) -> usize {
        if self.is_unquantized() { DType::F16.size() } else { DType::F8E4M3.size() }
    }
}

/// The fastest algorithm measured for a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum GemmAlgorithm {
    /// An algorithm of cuBLASLt.
    Library(Algorithm),
    /// The project's kernel for few rows (`linear_few.cu`).
    Few(Cut),
    /// The project's kernel for gated GEMMs of some hundred rows (`gate_up_middle.cu`).
    Middle,
    /// The project's kernel for many rows (`linear_gated_hopper.cu`, `linear_many_e4m3.cu`).
    Many,
    /// For gated GEMMs: an ungated GEMM followed by the gate.
    Apart,
}

/// Device addresses of a GEMM's operands.
#[derive(Clone, Copy)]
pub(in super::super) struct GemmOperands {
    pub weight: u64,
    pub x: u64,
    pub bias: Option<u64>,
    /// Address of the weight's scales, if the weight has scales.
    pub weight_scales: u64,
    /// Address of the scales of x, if x has several scales.
    pub x_scales: u64,
    /// The scale of x, if one scale applies to all of x.
    pub x_scale: f32,
    pub out: u64,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

/// The GEMMs of one lane.
pub(in super::super) struct LaneGemms {
    known: BTreeMap<GemmProblem, Known>,
    /// GEMMs for which the library was found to have no algorithm.
    refused: BTreeSet<GemmProblem>,
    clock: Clock,
    /// Number of GEMMs outside autotuning that took the library's first proposal.
    guesses: usize,
}

struct Known {
    described: Described,
    algorithm: Algorithm,
    is_measured: bool,
}

/// The cuBLASLt descriptors of a GEMM.
pub(in super::super) struct Described {
    product: GemmProblem,
    desc: Object,
    weight: Object,
    x: Object,
    out: Object,
}

impl LaneGemms {
    pub(in super::super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Ok(LaneGemms { known: BTreeMap::new(), refused: BTreeSet::new(), clock: Clock::new(device)?, guesses: 0 })
    }

    /// Returns the number of GEMMs outside autotuning whose algorithm was not measured.
    pub(in super::super) fn guesses(&self) -> usize {
        self.guesses
    }

    /// Forgets the algorithms chosen for a GEMM with few rows, because a faster one may have been
    /// found. `alike` is the GEMM with any number of rows.
    pub(in super::super) fn forget_few(&mut self, alike: GemmProblem) {
        let is_other =
            |product: &GemmProblem| product.rows > FEW_ROWS || GemmProblem { rows: alike.rows, ..*product } != alike;
        self.known.retain(|known, _| is_other(known));
        self.refused.retain(is_other);
    }

    /// Lets the library be asked again for GEMMs for which it had no algorithm.
    pub(in super::super) fn forget_refusals(&mut self) {
        self.refused.clear();
    }

    /// Returns `true` if the library has an algorithm for the GEMM: an algorithm that was measured
    /// for this or another size, or any algorithm if `may_guess` is true. During autotuning, this
    /// call also measures the GEMM, which leaves meaningless numbers in the output.
    ///
    /// # Safety
    /// `places` must match the product.
    pub(in super::super) unsafe fn has(
        &mut self,
        blas: &Blas,
        stream: &Stream,
        activation: DType,
        (product, places): (GemmProblem, GemmOperands),
        (autotunes, may_guess): (bool, bool),
    ) -> Result<bool, DeviceError> {
        if self.is_known(&product, autotunes) {
            return Ok(true);
        }
        if self.refused.contains(&product) {
            return Ok(false);
        }
        // SAFETY: the caller guarantees that `places` match the product.
        match unsafe { self.meet(blas, stream, activation, (product, places), (autotunes, may_guess)) } {
            Ok(()) => Ok(true),
            Err(error) if error.is_lost() => Err(error),
            Err(_) => {
                if self.refused.len() >= KEPT_MAX {
                    self.refused.clear();
                }
                self.refused.insert(product);
                Ok(false)
            }
        }
    }

    /// Launches a GEMM in the stream.
    ///
    /// # Safety
    /// `places` must match the product.
    pub(in super::super) unsafe fn multiply(
        &mut self,
        blas: &Blas,
        stream: &Stream,
        activation: DType,
        (product, places): (GemmProblem, GemmOperands),
        autotunes: bool,
    ) -> Result<(), DeviceError> {
        if !self.is_known(&product, autotunes) {
            // SAFETY: the caller guarantees that `places` match the product.
            unsafe { self.meet(blas, stream, activation, (product, places), (autotunes, true))? };
        }
        let known = &self.known[&product];
        // SAFETY: the caller guarantees that `places` match the product.
        unsafe { known.described.multiply(blas, stream, places, &known.algorithm) }
    }

    /// Returns `true` if the GEMM's algorithm is known. During autotuning, an algorithm for many
    /// rows counts only if it was measured.
    fn is_known(&self, product: &GemmProblem, autotunes: bool) -> bool {
        let measures = autotunes && product.rows > FEW_ROWS;
        self.known.get(product).is_some_and(|known| !measures || known.is_measured)
    }

    unsafe fn meet(
        &mut self,
        blas: &Blas,
        stream: &Stream,
        activation: DType,
        (product, places): (GemmProblem, GemmOperands),
        (autotunes, may_guess): (bool, bool),
    ) -> Result<(), DeviceError> {
        let described = Described::of(blas, activation, product)?;
        let measures = autotunes && product.rows > FEW_ROWS;
        let own = measured_for(blas, product);
        let known = own.or_else(|| (!measures).then(|| tuned_for(blas, &described, places)).flatten());
        let algorithm = match known {
            Some(algorithm) => algorithm,
            None if !may_guess => return Err(no_algorithm(product)),
            None => {
                let algorithms = described.proposals(blas, places)?;
                if measures {
                    // SAFETY: the caller guarantees that `places` match the product.
                    let fastest = unsafe { self.fastest(blas, stream, &described, places, &algorithms)? };
                    match blas.found(product, GemmAlgorithm::Library(fastest)) {
                        GemmAlgorithm::Library(agreed) => agreed,
                        _ => fastest,
                    }
                } else {
                    self.guesses += usize::from(!autotunes);
                    algorithms[0]
                }
            }
        };
        if self.known.len() >= KEPT_MAX {
            self.known.retain(|_, known| known.is_measured);
        }
        self.known.insert(product, Known { described, algorithm, is_measured: measures || own.is_some() });
        Ok(())
    }

    unsafe fn fastest(
        &self,
        blas: &Blas,
        stream: &Stream,
        described: &Described,
        places: GemmOperands,
        algorithms: &[Algorithm],
    ) -> Result<Algorithm, DeviceError> {
        // SAFETY: the caller guarantees that `places` match the product.
        let run = |algorithm: &Algorithm| unsafe { described.multiply(blas, stream, places, algorithm) };
        let (mut timed, mut refused) = (Vec::with_capacity(algorithms.len()), None);
        for algorithm in algorithms {
            // Warm-up: the first run loads the algorithm's kernels and is not timed. If one
            // algorithm fails to run, the remaining algorithms are still tried.
            match run(algorithm) {
                Ok(()) => timed.push((0.0, *algorithm)),
                Err(error) if error.is_lost() => return Err(error),
                Err(error) => refused = Some(error),
            }
        }
        let by_time = |(one, _): &(f32, Algorithm), (other, _): &(f32, Algorithm)| one.total_cmp(other);
        for (rounds, rest) in [(1, FINALISTS), (ROUNDS, 1)] {
            let mut spent = 0.0;
            for _ in 0..rounds {
                if spent > LONG_ENOUGH {
                    break;
                }
                for (milliseconds, algorithm) in &mut timed {
                    let took = self.clock.time(stream, || run(algorithm))?;
                    *milliseconds += took;
                    spent += took;
                }
            }
            timed.sort_by(by_time);
            timed.truncate(rest);
            let most = timed.first().map_or(0.0, |(fastest, _)| OUT_OF_REACH * fastest);
            timed.retain(|(milliseconds, _)| *milliseconds <= most);
        }
        match (timed.first(), refused) {
            (Some((_, fastest)), _) => Ok(*fastest),
            (None, refused) => Err(refused.expect("there was one to try")),
        }
    }
}

fn no_algorithm(product: GemmProblem) -> DeviceError {
    DeviceError::Driver {
        call: "cublasLtMatmulAlgoGetHeuristic",
        said: format!("cuBLASLt has no algorithm for {product:?}"),
    }
}

/// Returns the library's algorithm that was measured for exactly this GEMM, if any.
fn measured_for(blas: &Blas, product: GemmProblem) -> Option<Algorithm> {
    match blas.measured().get(&product) {
        Some(GemmAlgorithm::Library(algorithm)) => Some(*algorithm),
        _ => None,
    }
}

/// Returns the algorithm of the next larger measured size whose algorithm also supports this size.
/// If there is no such size, smaller sizes are tried in descending order.
fn tuned_for(blas: &Blas, described: &Described, places: GemmOperands) -> Option<Algorithm> {
    let (measured, product) = (blas.measured(), described.product);
    let alike = |rows| GemmProblem { rows, ..product };
    let larger = measured.range(product..=alike(usize::MAX));
    let smaller = measured.range(alike(0)..product).rev();
    larger.chain(smaller).find_map(|(_, way)| match way {
        GemmAlgorithm::Library(algorithm) => {
            described.is_served_by(blas, algorithm, places.workspace_bytes).then_some(*algorithm)
        }
        _ => None,
    })
}

impl Blas {
    /// Returns the fastest algorithm measured for this GEMM, or for the next larger measured size.
    pub(in super::super) fn algorithm_of(&self, product: GemmProblem) -> Option<GemmAlgorithm> {
        let most = GemmProblem { rows: usize::MAX, ..product };
        self.measured().range(product..=most).next().map(|(_, way)| *way)
    }
}

impl Described {
    /// Creates the descriptors. A row of this project is a column of cuBLASLt, which computes
    /// `out^T [out, rows] = weight^T^T [out, in] @ x^T [in, rows]`.
    pub(in super::super) fn of(blas: &Blas, activation: DType, product: GemmProblem) -> Result<Described, DeviceError> {
        let activation = if activation == DType::BF16 { number::R_16BF } else { number::R_16F };
        let out_kind = if product.out_is_f32 { number::R_32F } else { activation };
        let desc = blas.desc()?;
        blas.set(&desc, number::DESC_TRANSA, number::OP_TRANSPOSED)?;
        if product.has_bias {
            blas.set(&desc, number::DESC_EPILOGUE, number::EPILOGUE_BIAS)?;
        }
        let kind = match product.scheme {
            QuantScheme::Unquantized => activation,
            QuantScheme::E4m3Rows => {
                blas.set(&desc, number::DESC_A_SCALE_MODE, number::SCALE_EACH_ROW)?;
                blas.set(&desc, number::DESC_B_SCALE_MODE, number::SCALE_EACH_ROW)?;
                if product.has_bias {
                    blas.set(&desc, number::DESC_BIAS_TYPE, activation)?;
                }
                number::R_8F_E4M3
            }
            QuantScheme::E4m3Blocks { height: FP8_BLOCK } => {
                blas.set(&desc, number::DESC_A_SCALE_MODE, number::SCALE_EACH_BLOCK)?;
                blas.set(&desc, number::DESC_B_SCALE_MODE, number::SCALE_EACH_128)?;
                if product.has_bias {
                    blas.set(&desc, number::DESC_BIAS_TYPE, activation)?;
                }
                // An algorithm may be checked before the scales have an address. This
                // placeholder is not read.
                for pointer in [number::DESC_A_SCALE_POINTER, number::DESC_B_SCALE_POINTER] {
                    blas.set(&desc, pointer, SOME_ADDRESS)?;
                }
                number::R_8F_E4M3
            }
            QuantScheme::E4m3Fixed | QuantScheme::E4m3Blocks { .. } => return Err(no_algorithm(product)),
        };
        Ok(Described {
            product,
            desc,
            weight: blas.layout(kind, product.in_features, product.out_features, product.in_features)?,
            x: blas.layout(kind, product.in_features, product.rows, product.x_pitch)?,
            out: blas.layout(out_kind, product.out_features, product.rows, product.out_pitch)?,
        })
    }

    /// Returns `true` if an algorithm that was measured for another size, or in another start of
    /// the model, supports this GEMM within `workspace_bytes`.
    pub(in super::super) fn is_served_by(&self, blas: &Blas, algorithm: &Algorithm, workspace_bytes: usize) -> bool {
        blas.serves(&self.operands(), algorithm, workspace_bytes)
    }

    fn operands(&self) -> Operands<'_> {
        Operands { desc: &self.desc, weight: &self.weight, x: &self.x, out: &self.out }
    }

    /// Returns cuBLASLt's proposals, best guess first, or an error if there are no proposals.
    pub(in super::super) fn proposals(&self, blas: &Blas, places: GemmOperands) -> Result<Vec<Algorithm>, DeviceError> {
        // The pointers to the bias and the scales are part of the description.
        self.point_at(blas, places)?;
        let proposals = blas.proposals(&self.operands(), places.workspace_bytes, PROPOSALS)?;
        let algorithms: Vec<Algorithm> = proposals.iter().map(|proposal| proposal.algorithm).collect();
        if algorithms.is_empty() { Err(no_algorithm(self.product)) } else { Ok(algorithms) }
    }

    fn point_at(&self, blas: &Blas, places: GemmOperands) -> Result<(), DeviceError> {
        if !self.product.scheme.is_unquantized() {
            blas.set(&self.desc, number::DESC_A_SCALE_POINTER, places.weight_scales)?;
            blas.set(&self.desc, number::DESC_B_SCALE_POINTER, places.x_scales)?;
        }
        places.bias.map_or(Ok(()), |bias| blas.set(&self.desc, number::DESC_BIAS_POINTER, bias))
    }

    /// Launches the GEMM in the stream.
    ///
    /// # Safety
    /// `places` must match the product.
    pub(in super::super) unsafe fn multiply(
        &self,
        blas: &Blas,
        stream: &Stream,
        places: GemmOperands,
        algorithm: &Algorithm,
    ) -> Result<(), DeviceError> {
        self.point_at(blas, places)?;
        let memory = Memory {
            weight: places.weight,
            x: places.x,
            out: places.out,
            keep: if self.product.accumulates { 1.0 } else { 0.0 },
            workspace: places.workspace,
            workspace_bytes: places.workspace_bytes,
        };
        // SAFETY: the caller guarantees that `places` match the product.
        unsafe { blas.multiply(&self.operands(), memory, algorithm, stream.raw()) }
    }
}
