//! Products by cuBLASLt, each with the algorithm measured to be fastest on this device.
//!
//! The library proposes algorithms from a model of the device, and on small batches its first proposal is often not the
//! fastest. While autotuning (in the stress before READY, whose results are thrown away), each new product of many rows
//! runs all proposals and keeps the fastest. At its end, the products met are measured at few rows (`autotune.rs`).
//! Afterwards, a size that was not measured uses the algorithm of the next larger measured size that supports it, so no
//! kernel of the library is loaded while serving. Only a product that autotuning never met takes the first proposal.

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

/// Proposals that autotuning measures.
const PROPOSALS: usize = 12;

/// A proposal this many times slower than the fastest in the first round is dropped.
const OUT_OF_REACH: f32 = 1.25;

/// Proposals left after the first round, and the rounds in which they take turns. They alternate because a kernel runs
/// faster after one that heats the device less; timing each in one block would measure their order.
const FINALISTS: usize = 4;
const ROUNDS: usize = 4;

/// Milliseconds after which no further round starts: runs this long vary little.
const LONG_ENOUGH: f32 = 30.0;

/// Most rows for which reading the weight bounds a product.
pub(in super::super) const FEW_ROWS: usize = 256;

/// Stands for where scales will be, and is aligned as they are.
const SOME_ADDRESS: u64 = 1 << 12;

/// Most descriptions kept. Prompts come in any length, and a description is a few hundred bytes of host memory.
const KEPT_MAX: usize = 4096;

/// A product's shape: everything its fastest algorithm depends on. `rows` is last, so that sizes sort next to each
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct Product {
    pub numbers: Numbers,
    /// Half of the features are gates for the other half, so half as many are written.
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

impl Product {
    /// Features written per row.
    pub(in super::super) fn features(&self) -> usize {
        if self.gates { self.out_features / 2 } else { self.out_features }
    }

    /// The rows of x.
    pub(in super::super) fn x(&self) -> Rows {
        Rows { rows: self.rows, columns: self.in_features, pitch: self.x_pitch }
    }

    /// The rows of the weight.
    pub(in super::super) fn weight(&self) -> Rows {
        Rows { rows: self.out_features, columns: self.in_features, pitch: self.in_features }
    }
}

/// What the numbers of a weight, and of the rows that it meets, are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in super::super) enum Numbers {
    /// Of the type of activations.
    Plain,
    /// E4M3; each row of either has a scale.
    E4m3Rows,
    /// E4M3; each row of the weight has a scale, and all of x has one.
    E4m3Fixed,
    /// E4M3; each block of the weight of so many rows, and each group of columns of x, has a scale.
    E4m3Blocks { height: usize },
}

impl Numbers {
    pub(in super::super) fn is_plain(self) -> bool {
        self == Numbers::Plain
    }

    /// Bytes of one.
    pub(in super::super) fn size(self) -> usize {
        if self.is_plain() { DType::F16.size() } else { DType::F8E4M3.size() }
    }
}

/// The fastest algorithm measured for a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum GemmAlgorithm {
    /// cuBLASLt.
    Library(Algorithm),
    /// Our kernel for few rows.
    Few(Cut),
    /// Our kernel for gated products of some hundred rows.
    Middle,
    /// Our kernel for many rows.
    Many,
    /// For gated products: an ungated product followed by the gate.
    Apart,
}

/// Device addresses of a product's operands.
#[derive(Clone, Copy)]
pub(in super::super) struct Places {
    pub weight: u64,
    pub x: u64,
    pub bias: Option<u64>,
    /// The weight's scales and those of x, if there are any; one for all of x is in `x_scale`.
    pub weight_scales: u64,
    pub x_scales: u64,
    pub x_scale: f32,
    pub out: u64,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

/// The products of one lane.
pub(in super::super) struct Products {
    known: BTreeMap<Product, Known>,
    /// Products that the library was found to have no algorithm for.
    refused: BTreeSet<Product>,
    clock: Clock,
    /// Products outside autotuning that took the library's first proposal.
    guesses: usize,
}

struct Known {
    described: Described,
    algorithm: Algorithm,
    is_measured: bool,
}

/// A product as cuBLASLt's descriptors.
pub(in super::super) struct Described {
    product: Product,
    desc: Object,
    weight: Object,
    x: Object,
    out: Object,
}

impl Products {
    pub(in super::super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Ok(Products { known: BTreeMap::new(), refused: BTreeSet::new(), clock: Clock::new(device)?, guesses: 0 })
    }

    /// Products outside autotuning whose algorithm no measurement chose.
    pub(in super::super) fn guesses(&self) -> usize {
        self.guesses
    }

    /// Forgets the algorithms chosen for few rows of a product, because a faster one may have been found.
    pub(in super::super) fn forget_few(&mut self, alike: Product) {
        let is_other = |product: &Product| product.rows > FEW_ROWS || Product { rows: alike.rows, ..*product } != alike;
        self.known.retain(|known, _| is_other(known));
        self.refused.retain(is_other);
    }

    /// Asks the library again for what it had no algorithm for.
    pub(in super::super) fn forget_refusals(&mut self) {
        self.refused.clear();
    }

    /// Whether the library has an algorithm for the product: one that was measured for its size or another, or if
    /// `may_guess` any. While autotuning it is measured, after which the output is meaningless.
    ///
    /// # Safety
    /// `places` match the product.
    pub(in super::super) unsafe fn has(
        &mut self,
        blas: &Blas,
        stream: &Stream,
        activation: DType,
        (product, places): (Product, Places),
        (autotunes, may_guess): (bool, bool),
    ) -> Result<bool, DeviceError> {
        if self.is_known(&product, autotunes) {
            return Ok(true);
        }
        if self.refused.contains(&product) {
            return Ok(false);
        }
        // SAFETY: as the caller promises.
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

    /// Launches a product in the stream.
    ///
    /// # Safety
    /// `places` match the product.
    pub(in super::super) unsafe fn multiply(
        &mut self,
        blas: &Blas,
        stream: &Stream,
        activation: DType,
        (product, places): (Product, Places),
        autotunes: bool,
    ) -> Result<(), DeviceError> {
        if !self.is_known(&product, autotunes) {
            // SAFETY: as the caller promises.
            unsafe { self.meet(blas, stream, activation, (product, places), (autotunes, true))? };
        }
        let known = &self.known[&product];
        // SAFETY: as the caller promises.
        unsafe { known.described.multiply(blas, stream, places, &known.algorithm) }
    }

    /// Whether its algorithm is there, while autotuning a measured one if it is to be measured.
    fn is_known(&self, product: &Product, autotunes: bool) -> bool {
        let measures = autotunes && product.rows > FEW_ROWS;
        self.known.get(product).is_some_and(|known| !measures || known.is_measured)
    }

    unsafe fn meet(
        &mut self,
        blas: &Blas,
        stream: &Stream,
        activation: DType,
        (product, places): (Product, Places),
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
                    // SAFETY: as the caller promises.
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
        places: Places,
        algorithms: &[Algorithm],
    ) -> Result<Algorithm, DeviceError> {
        // SAFETY: as the caller promises.
        let run = |algorithm: &Algorithm| unsafe { described.multiply(blas, stream, places, algorithm) };
        let (mut timed, mut refused) = (Vec::with_capacity(algorithms.len()), None);
        for algorithm in algorithms {
            // Warm-up: the first run loads what it needs and is not timed. If one algorithm fails to run, the others
            // are still tried.
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

fn no_algorithm(product: Product) -> DeviceError {
    DeviceError::Driver {
        call: "cublasLtMatmulAlgoGetHeuristic",
        said: format!("cuBLASLt has no algorithm for {product:?}"),
    }
}

/// The library's algorithm measured for exactly this product.
fn measured_for(blas: &Blas, product: Product) -> Option<Algorithm> {
    match blas.measured().get(&product) {
        Some(GemmAlgorithm::Library(algorithm)) => Some(*algorithm),
        _ => None,
    }
}

/// The algorithm of the next larger measured product that supports this one too, otherwise of the next smaller one.
fn tuned_for(blas: &Blas, described: &Described, places: Places) -> Option<Algorithm> {
    let (measured, product) = (blas.measured(), described.product);
    let alike = |rows| Product { rows, ..product };
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
    /// The fastest algorithm of this product, or of the next larger one that was measured.
    pub(in super::super) fn algorithm_of(&self, product: Product) -> Option<GemmAlgorithm> {
        let most = Product { rows: usize::MAX, ..product };
        self.measured().range(product..=most).next().map(|(_, way)| *way)
    }
}

impl Described {
    /// Our rows are cuBLASLt's columns: it computes `out^T [out, rows] = weight^T^T [out, in] @ x^T [in, rows]`.
    pub(in super::super) fn of(blas: &Blas, activation: DType, product: Product) -> Result<Described, DeviceError> {
        let activation = if activation == DType::BF16 { number::R_16BF } else { number::R_16F };
        let out_kind = if product.out_is_f32 { number::R_32F } else { activation };
        let desc = blas.desc()?;
        blas.set(&desc, number::DESC_TRANSA, number::OP_TRANSPOSED)?;
        if product.has_bias {
            blas.set(&desc, number::DESC_EPILOGUE, number::EPILOGUE_BIAS)?;
        }
        let kind = match product.numbers {
            Numbers::Plain => activation,
            Numbers::E4m3Rows => {
                blas.set(&desc, number::DESC_A_SCALE_MODE, number::SCALE_EACH_ROW)?;
                blas.set(&desc, number::DESC_B_SCALE_MODE, number::SCALE_EACH_ROW)?;
                if product.has_bias {
                    blas.set(&desc, number::DESC_BIAS_TYPE, activation)?;
                }
                number::R_8F_E4M3
            }
            Numbers::E4m3Blocks { height: FP8_BLOCK } => {
                blas.set(&desc, number::DESC_A_SCALE_MODE, number::SCALE_EACH_BLOCK)?;
                blas.set(&desc, number::DESC_B_SCALE_MODE, number::SCALE_EACH_128)?;
                if product.has_bias {
                    blas.set(&desc, number::DESC_BIAS_TYPE, activation)?;
                }
                // An algorithm may be checked before the scales are anywhere. This address is not read.
                for pointer in [number::DESC_A_SCALE_POINTER, number::DESC_B_SCALE_POINTER] {
                    blas.set(&desc, pointer, SOME_ADDRESS)?;
                }
                number::R_8F_E4M3
            }
            Numbers::E4m3Fixed | Numbers::E4m3Blocks { .. } => return Err(no_algorithm(product)),
        };
        Ok(Described {
            product,
            desc,
            weight: blas.layout(kind, product.in_features, product.out_features, product.in_features)?,
            x: blas.layout(kind, product.in_features, product.rows, product.x_pitch)?,
            out: blas.layout(out_kind, product.out_features, product.rows, product.out_pitch)?,
        })
    }

    /// Whether an algorithm measured at another size or in another start supports this product within
    /// `workspace_bytes`.
    pub(in super::super) fn is_served_by(&self, blas: &Blas, algorithm: &Algorithm, workspace_bytes: usize) -> bool {
        blas.serves(&self.operands(), algorithm, workspace_bytes)
    }

    fn operands(&self) -> Operands<'_> {
        Operands { desc: &self.desc, weight: &self.weight, x: &self.x, out: &self.out }
    }

    /// cuBLASLt's proposals, best guess first; at least one.
    pub(in super::super) fn proposals(&self, blas: &Blas, places: Places) -> Result<Vec<Algorithm>, DeviceError> {
        // Pointers to bias and scales are part of the description.
        self.point_at(blas, places)?;
        let proposals = blas.proposals(&self.operands(), places.workspace_bytes, PROPOSALS)?;
        let algorithms: Vec<Algorithm> = proposals.iter().map(|proposal| proposal.algorithm).collect();
        if algorithms.is_empty() { Err(no_algorithm(self.product)) } else { Ok(algorithms) }
    }

    fn point_at(&self, blas: &Blas, places: Places) -> Result<(), DeviceError> {
        if !self.product.numbers.is_plain() {
            blas.set(&self.desc, number::DESC_A_SCALE_POINTER, places.weight_scales)?;
            blas.set(&self.desc, number::DESC_B_SCALE_POINTER, places.x_scales)?;
        }
        places.bias.map_or(Ok(()), |bias| blas.set(&self.desc, number::DESC_BIAS_POINTER, bias))
    }

    /// Launches the product in the stream.
    ///
    /// # Safety
    /// `places` match the product.
    pub(in super::super) unsafe fn multiply(
        &self,
        blas: &Blas,
        stream: &Stream,
        places: Places,
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
        // SAFETY: as the caller promises.
        unsafe { blas.multiply(&self.operands(), memory, algorithm, stream.raw()) }
    }
}
