//! Products by cuBLASLt, each with the algorithm that was fastest here.
//!
//! The library proposes algorithms by a model of the device; on small batches its first guess is often not its best. In a
//! rehearsal (the stress before READY, whose results nobody wants) each new product runs all proposals and keeps the
//! fastest. Afterwards a product of a size that was never rehearsed takes the algorithm of a larger size that was, so that
//! no kernel of the library is loaded while serving. Few rows whose next larger size is more than twice theirs are the
//! exception: they take the first guess.

use std::{collections::BTreeMap, sync::Arc};

use bursar_budgets::{CudaDevice, DeviceError};

use super::{
    super::stream::{Event, Stream},
    library::{Algorithm, Blas, Memory, Object, Operands, number},
};
use crate::DType;

/// Proposals that a rehearsal measures.
const PROPOSALS: usize = 12;

/// Times that each is run. The first brings what it needs into the caches and is not counted.
const RUNS: usize = 5;

/// Rows up to which a product is bound by reading its weight.
const FEW_ROWS: usize = 256;

/// Descriptions that are kept. Prompts come in any length, and a description is some hundred bytes of the host.
const KEPT_MAX: usize = 4096;

/// What a product looks like: all that its algorithm depends on, the rows last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct Product {
    pub out_features: usize,
    pub in_features: usize,
    pub out_pitch: usize,
    pub x_pitch: usize,
    pub out_is_f32: bool,
    pub has_bias: bool,
    pub accumulates: bool,
    pub rows: usize,
}

/// Where a product's operands lie.
#[derive(Clone, Copy)]
pub(in super::super) struct Places {
    pub weight: u64,
    pub x: u64,
    pub bias: Option<u64>,
    pub out: u64,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

/// The products of one lane.
pub(in super::super) struct Products {
    known: BTreeMap<Product, Known>,
    before: Event,
    behind: Event,
}

struct Known {
    desc: Object,
    weight: Object,
    x: Object,
    out: Object,
    algorithm: Algorithm,
    is_measured: bool,
}

impl Known {
    fn operands(&self) -> Operands<'_> {
        Operands { desc: &self.desc, weight: &self.weight, x: &self.x, out: &self.out }
    }
}

impl Products {
    pub(in super::super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Ok(Products { known: BTreeMap::new(), before: Event::timed(device)?, behind: Event::timed(device)? })
    }

    /// Puts a product into the stream.
    ///
    /// # Safety
    /// The places are as the product says.
    pub(in super::super) unsafe fn multiply(
        &mut self,
        blas: &Blas,
        stream: &Stream,
        activation: DType,
        (product, places): (Product, Places),
        rehearses: bool,
    ) -> Result<(), DeviceError> {
        let is_new = self.known.get(&product).is_none_or(|known| rehearses && !known.is_measured);
        if is_new {
            // SAFETY: as the caller promises.
            unsafe { self.meet(blas, stream, activation, (product, places), rehearses)? };
        }
        let known = &self.known[&product];
        if let Some(bias) = places.bias {
            blas.set(&known.desc, number::DESC_BIAS_POINTER, bias)?;
        }
        // SAFETY: as the caller promises.
        unsafe { blas.multiply(&known.operands(), memory(product, places), &known.algorithm, stream.raw()) }
    }

    unsafe fn meet(
        &mut self,
        blas: &Blas,
        stream: &Stream,
        activation: DType,
        (product, places): (Product, Places),
        rehearses: bool,
    ) -> Result<(), DeviceError> {
        let mut known = describe(blas, activation, product)?;
        if let Some(bias) = places.bias {
            blas.set(&known.desc, number::DESC_BIAS_POINTER, bias)?;
        }
        let measured = blas.measured().get(&product).copied();
        let rehearsed = measured.or_else(|| if rehearses { None } else { rehearsed_for(blas, product) });
        let rehearsed = rehearsed.filter(|algorithm| blas.serves(&known.operands(), algorithm, places.workspace_bytes));
        known.algorithm = match rehearsed {
            Some(algorithm) => algorithm,
            None => {
                let proposals = blas.proposals(&known.operands(), places.workspace_bytes, PROPOSALS)?;
                let algorithms: Vec<Algorithm> = proposals.iter().map(|proposal| proposal.algorithm).collect();
                let first = *algorithms.first().ok_or_else(|| DeviceError::Driver {
                    call: "cublasLtMatmulAlgoGetHeuristic",
                    said: format!("no algorithm for {product:?}"),
                })?;
                if rehearses {
                    // SAFETY: as the caller promises.
                    let fastest = unsafe { self.fastest(blas, stream, &known, (product, places), &algorithms)? };
                    blas.measured().insert(product, fastest);
                    fastest
                } else {
                    first
                }
            }
        };
        known.is_measured = rehearses;
        if self.known.len() >= KEPT_MAX {
            self.known.retain(|_, known| known.is_measured);
        }
        self.known.insert(product, known);
        Ok(())
    }

    unsafe fn fastest(
        &self,
        blas: &Blas,
        stream: &Stream,
        known: &Known,
        (product, places): (Product, Places),
        algorithms: &[Algorithm],
    ) -> Result<Algorithm, DeviceError> {
        let mut best: Result<(f32, Algorithm), Option<DeviceError>> = Err(None);
        for algorithm in algorithms {
            // SAFETY: as the caller promises.
            let run = || unsafe { blas.multiply(&known.operands(), memory(product, places), algorithm, stream.raw()) };
            // One that does not run after all is no reason to go without the others.
            match run() {
                Ok(()) => {}
                Err(error) if error.is_lost() => return Err(error),
                Err(error) => {
                    best = best.map_err(|_| Some(error));
                    continue;
                }
            }
            self.before.record(stream)?;
            for _ in 1..RUNS {
                run()?;
            }
            self.behind.record(stream)?;
            self.behind.wait()?;
            let milliseconds = self.behind.milliseconds_since(&self.before)?;
            if best.as_ref().is_ok_and(|(fastest, _)| *fastest <= milliseconds) {
                continue;
            }
            best = Ok((milliseconds, *algorithm));
        }
        best.map(|(_, algorithm)| algorithm).map_err(|error| error.expect("there was one to try"))
    }
}

/// The algorithm of the next larger product that was measured, or else of the largest. What is fast for many rows is
/// slow for few: few take none of a product of more than twice as many.
fn rehearsed_for(blas: &Blas, product: Product) -> Option<Algorithm> {
    let measured = blas.measured();
    let alike = |rows| Product { rows, ..product };
    let most = if product.rows <= FEW_ROWS { 2 * product.rows } else { usize::MAX };
    let larger = measured.range(product..=alike(most)).next();
    let largest = || measured.range(alike(0)..product).next_back().filter(|_| product.rows > FEW_ROWS);
    larger.or_else(largest).map(|(_, algorithm)| *algorithm)
}

fn memory(product: Product, places: Places) -> Memory {
    Memory {
        weight: places.weight,
        x: places.x,
        out: places.out,
        keep: if product.accumulates { 1.0 } else { 0.0 },
        workspace: places.workspace,
        workspace_bytes: places.workspace_bytes,
    }
}

/// Our rows are the library's columns: it computes `out^T [out, rows] = weight^T^T [out, in] @ x^T [in, rows]`.
fn describe(blas: &Blas, activation: DType, product: Product) -> Result<Known, DeviceError> {
    let kind = if activation == DType::BF16 { number::R_16BF } else { number::R_16F };
    let out_kind = if product.out_is_f32 { number::R_32F } else { kind };
    let desc = blas.desc()?;
    blas.set(&desc, number::DESC_TRANSA, number::OP_TRANSPOSED)?;
    if product.has_bias {
        blas.set(&desc, number::DESC_EPILOGUE, number::EPILOGUE_BIAS)?;
    }
    Ok(Known {
        desc,
        weight: blas.layout(kind, product.in_features, product.out_features, product.in_features)?,
        x: blas.layout(kind, product.in_features, product.rows, product.x_pitch)?,
        out: blas.layout(out_kind, product.out_features, product.rows, product.out_pitch)?,
        algorithm: super::library::Proposal::NONE.algorithm,
        is_measured: false,
    })
}
