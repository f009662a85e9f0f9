//! Autotuning of products of few rows: for each that a pass has met, at some numbers of rows, whose product
//! is the fastest. A product of a number in between is computed as the next larger one that was measured.
//!
//! A step of decoding reads each weight once, and no cache holds the last layer's when the next step comes. So a trial
//! goes over the weights of several layers. Small kernels stand between the products, as they do in a model: what may
//! start early does it behind one of them. What is measured here has run here: nothing of up to 256 rows has to be loaded
//! later.

use std::{collections::BTreeMap, mem};

use bursar_budgets::{Address, CudaDevice};
use cudarc::driver::sys;

use super::{
    Cuda,
    blas::{Described, FEW_ROWS, GemmAlgorithm, Places, Product},
    elementwise, gate_up_middle,
    linear_few::{self, CUTS, ProductsBy},
    linear_many,
    target::CUDA_LINEAR_SCRATCH,
};
use crate::{AUTOTUNED_LAYERS, DType, KernelError, Shape, Tensor, ops};

/// Numbers of rows that are measured. Up to 64 they are those that our kernels are compiled for, and one: between two of
/// them the same kernel runs, and takes as long. Beyond that they are whole tiles of 64 rows.
const MEASURED_ROWS: [usize; 8] = [1, 8, 16, 32, 64, 128, 192, FEW_ROWS];

/// Of those, the ones of a product that no pass has met with few rows: it is the vision tower's, where only the smallest
/// picture alone has few, or a prompt's, and will be met with fewer when decoding is autotuned.
const SELDOM_FEW: [usize; 2] = [64, FEW_ROWS];

/// Weights of one trial at most: those of the layers that autotuning should run through.
const WEIGHTS_MAX: usize = AUTOTUNED_LAYERS;

/// Weights of so many bytes are not in the L2 cache when their turn comes again: it holds half of them.
const COLD_BYTES: usize = 96 << 20;

/// What is written before a trial of fewer: more than the L2 cache holds.
const WRITTEN_MAX: usize = 192 << 20;

/// Products of a trial, for the first that each way has and for those of the finalists: fewer where so many would read
/// more than this.
const FIRST_TURNS: usize = 3;
const TURNS: usize = 8;
const READ_MAX: usize = 2 << 30;

/// Proposals of the library that are tried where ours serves the product too, and how many times as long as ours the faster
/// of them may take for the others to be tried as well. The driver loads each kernel of the library at its first use, which
/// takes it three milliseconds: often most of what a trial takes. What was let go by is in `benches/h200.md`.
const GUESSES: usize = 2;
const FAR_BEHIND: f32 = 1.15;

/// Ways that are tried more than once, and how often: the shortest is what counts.
const FINALISTS: usize = 4;
const TRIALS: usize = 3;

/// Milliseconds that `linear_few.cu` may take longer than the library and is chosen all the same. It reads weights while
/// the kernel in front still runs and lets the one behind begin, which is worth more behind a kernel whose blocks end one
/// by one, as attention's do, than behind the even one of a trial: in a step of 64 rows of 7B's shape that is about so much
/// a product (`tools/gpu/products.py`).
const HEAD_START: f32 = 1.5e-3;

/// The products of autotuning.
#[derive(Default)]
pub(super) struct Autotuner {
    /// By how they look, with no rows.
    met: BTreeMap<Product, Met>,
}

#[derive(Default)]
struct Met {
    /// Weights and biases of some layers.
    weights: Vec<(u64, Option<u64>)>,
    has_few_rows: bool,
}

impl Autotuner {
    /// Remembers a product.
    pub(super) fn meet(&mut self, product: Product, places: Places) {
        let met = self.met.entry(Product { rows: 0, ..product }).or_default();
        let weight = (places.weight, places.bias);
        met.has_few_rows |= product.rows <= FEW_ROWS;
        if met.weights.len() < WEIGHTS_MAX && !met.weights.contains(&weight) {
            met.weights.push(weight);
        }
    }
}

/// Measures what it has met and no other has measured.
pub(super) fn measure(cuda: &Cuda, call: ops::measure::Call<'_>) -> Result<(), KernelError> {
    cuda.enter()?;
    let Autotuner { met } = mem::take(&mut *cuda.autotuner.borrow_mut());
    // What gates is held against the product that does not, so that comes first.
    for gates in [false, true] {
        for (alike, met) in met.iter().filter(|(alike, _)| alike.gates == gates) {
            let measured = if met.has_few_rows { &MEASURED_ROWS[..] } else { &SELDOM_FEW };
            for &rows in measured {
                let product = Product { rows, ..*alike };
                if cuda.kernels.blas.measured().contains_key(&product) {
                    continue;
                }
                // What has no room here has none in a pass either.
                let Some(trial) = Trial::within(cuda, product, &met.weights, &call.room) else { break };
                if let Some(way) = trial.fastest()? {
                    cuda.kernels.blas.measured().insert(product, way);
                }
            }
            cuda.products.borrow_mut().forget_few(*alike);
        }
    }
    Ok(())
}

/// Of what was timed; infinite if nothing was.
fn shortest(timed: &[(f32, GemmAlgorithm)]) -> f32 {
    timed.iter().map(|(milliseconds, _)| *milliseconds).fold(f32::INFINITY, f32::min)
}

/// Whether one of the library's other proposals may be faster than ours, by how long its first ones and ours take. They are
/// tried too where ours does not serve, or none of the first ones runs.
fn may_win(guessed: f32, ours: f32) -> bool {
    guessed.is_infinite() || guessed <= FAR_BEHIND * ours
}

/// One product of one size, and memory to try it in.
struct Trial<'t> {
    cuda: &'t Cuda,
    product: Product,
    weights: &'t [(u64, Option<u64>)],
    /// All of it may be written.
    room: (Address, usize),
    scratch: u64,
    x: u64,
    out: u64,
    /// What comes between a product and its gate.
    gate_up: u64,
}

impl<'t> Trial<'t> {
    /// A trial in `room`, if that is enough.
    fn within(
        cuda: &'t Cuda,
        product: Product,
        weights: &'t [(u64, Option<u64>)],
        room: &Tensor<'_>,
    ) -> Option<Trial<'t>> {
        let start = room.address().0;
        let mut end = start;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(256) as u64;
            at
        };
        let activation = cuda.kernels.target.activation;
        let scratch = take(CUDA_LINEAR_SCRATCH.as_usize());
        let x = take(activation.bytes(product.rows * product.x_pitch).as_usize());
        let out_type = if product.out_is_f32 { DType::F32 } else { activation };
        let out = take(out_type.bytes(product.rows * product.out_pitch).as_usize());
        let between = if product.gates { product.rows * product.out_features } else { 0 };
        let gate_up = take(activation.bytes(between).as_usize());
        let has_room = end - start <= room.bytes().0;
        let room = (room.address(), room.bytes().as_usize());
        has_room.then_some(Trial { cuda, product, weights, room, scratch, x, out, gate_up })
    }

    /// The fastest way; none if none runs.
    fn fastest(&self) -> Result<Option<GemmAlgorithm>, KernelError> {
        let blas = &self.cuda.kernels.blas;
        let activation = self.cuda.kernels.target.activation;
        let mut described = None;
        let mut others = Vec::new();
        if self.product.gates {
            others.push(GemmAlgorithm::Apart);
        } else {
            let product = described.insert(Described::of(blas, activation, self.product)?);
            match product.proposals(blas, self.places(0)) {
                Ok(algorithms) => others.extend(algorithms.into_iter().map(GemmAlgorithm::Library)),
                Err(error) if error.is_lost() => return Err(error.into()),
                // It may never be asked for in this size.
                Err(_) => {}
            }
        }
        let mut timed = self.try_each(described.as_ref(), &self.ours())?;
        let ours = shortest(&timed);
        let (guesses, rest) = others.split_at(GUESSES.min(others.len()));
        let guessed = self.try_each(described.as_ref(), guesses)?;
        if may_win(shortest(&guessed), ours) {
            timed.extend(self.try_each(described.as_ref(), rest)?);
        }
        timed.extend(guessed);
        timed.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        timed.truncate(FINALISTS);
        timed.iter_mut().for_each(|(shortest, _)| *shortest = f32::INFINITY);
        for _ in 0..TRIALS {
            for (shortest, way) in &mut timed {
                *shortest = shortest.min(self.time(described.as_ref(), *way, TURNS)?);
            }
        }
        Ok(timed.into_iter().min_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, way)| way))
    }

    /// The ways that are ours.
    fn ours(&self) -> Vec<GemmAlgorithm> {
        let mut ours = Vec::new();
        if self.cuda.products_by == ProductsBy::Library {
            return ours;
        }
        if linear_few::serves(self.cuda, self.product, self.places(0)) {
            ours.extend(CUTS.map(GemmAlgorithm::Few));
        }
        if gate_up_middle::serves(self.cuda, self.product, self.places(0)) {
            ours.push(GemmAlgorithm::Middle);
        }
        ours
    }

    /// Those of `ways` that run, with their milliseconds.
    fn try_each(
        &self,
        described: Option<&Described>,
        ways: &[GemmAlgorithm],
    ) -> Result<Vec<(f32, GemmAlgorithm)>, KernelError> {
        let mut timed = Vec::new();
        for way in ways {
            // The first run brings what it needs, and is not counted. A way that does not run after all is none.
            match self.run(described, *way, 0).and_then(|()| Ok(self.cuda.stream.wait()?)) {
                Ok(()) => timed.push((self.time(described, *way, FIRST_TURNS)?, *way)),
                Err(KernelError::Device(error)) if !error.is_lost() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(timed)
    }

    /// Milliseconds of the product, the mean of so many at most, with weights none of which is in the L2 cache; less
    /// its head start.
    fn time(&self, described: Option<&Described>, way: GemmAlgorithm, turns: usize) -> Result<f32, KernelError> {
        let weight_bytes = 2 * self.product.out_features * self.product.in_features;
        let mut turns = turns.min(READ_MAX / weight_bytes).max(1);
        if self.weights.len() * weight_bytes < COLD_BYTES {
            turns = turns.min(self.weights.len());
            let (address, bytes) = (self.room.0.0, self.room.1.min(WRITTEN_MAX));
            // SAFETY: the room is this call's, and the stream lives.
            let written = unsafe { sys::cuMemsetD8Async(address, 0, bytes, self.cuda.stream.raw()) };
            CudaDevice::said("cuMemsetD8Async", written)?;
        }
        let milliseconds = self.cuda.clock.time(&self.cuda.stream, || {
            (0..turns).try_for_each(|turn| {
                self.stand_between()?;
                self.run(described, way, turn % self.weights.len())
            })
        })?;
        let head_start = if matches!(way, GemmAlgorithm::Few(_)) { HEAD_START } else { 0.0 };
        Ok(milliseconds / turns as f32 - head_start)
    }

    /// A small kernel that writes what the product reads.
    fn stand_between(&self) -> Result<(), KernelError> {
        let (cuda, shape) = (self.cuda, [self.product.rows, self.product.in_features]);
        let x = Tensor::over(Address(self.x), shape.into(), cuda.kernels.target.activation);
        elementwise::gelu(cuda, ops::gelu::Call { x })
    }

    /// Puts the product with one of the weights into the stream.
    fn run(&self, described: Option<&Described>, way: GemmAlgorithm, turn: usize) -> Result<(), KernelError> {
        let (cuda, places) = (self.cuda, self.places(turn));
        match (way, described) {
            (GemmAlgorithm::Library(algorithm), Some(described)) => {
                // SAFETY: there is room for the operands, and the weights are those of a pass whose autotuning lasts.
                unsafe { described.multiply(&cuda.kernels.blas, &cuda.stream, places, &algorithm) }?;
                Ok(())
            }
            // SAFETY: as above, and it serves: that was asked first.
            (GemmAlgorithm::Few(cut), _) => unsafe { linear_few::launch(cuda, self.product, places, cut) },
            // SAFETY: as above.
            (GemmAlgorithm::Middle, _) => unsafe { gate_up_middle::launch(cuda, self.product, places) },
            // SAFETY: as above. It is never tried here, where rows are few.
            (GemmAlgorithm::Many, _) => unsafe { linear_many::launch(cuda, self.product, places) },
            (GemmAlgorithm::Apart | GemmAlgorithm::Library(_), _) => self.run_apart(places),
        }
    }

    /// The product, and the gate behind it, as a pass runs them.
    fn run_apart(&self, places: Places) -> Result<(), KernelError> {
        let Product { rows, out_features, in_features, out_pitch, x_pitch, .. } = self.product;
        let activation = self.cuda.kernels.target.activation;
        let tensor = |address: u64, shape: [usize; 2], dtype| Tensor::over(Address(address), shape.into(), dtype);
        let (x, out) =
            (tensor(places.x, [rows, x_pitch], activation), tensor(places.out, [rows, out_pitch], activation));
        let scratch = tensor(self.scratch, [1, places.workspace_bytes / DType::F32.size()], DType::F32);
        let gate_up = tensor(self.gate_up, [rows, out_features], activation);
        let bias = places.bias.map(|bias| Tensor::over(Address(bias), Shape::new(&[out_features]), activation));
        super::linear::linear(
            self.cuda,
            ops::linear::Call {
                x: x.column_range(0..in_features),
                weight: tensor(places.weight, [out_features, in_features], activation),
                bias,
                accumulate: false,
                scratch,
                out: gate_up.view(),
            },
        )?;
        elementwise::silu_mul(
            self.cuda,
            ops::silu_mul::Call { gate_up: gate_up.view(), out: out.column_range(0..out_features / 2) },
        )
    }

    fn places(&self, turn: usize) -> Places {
        let (weight, bias) = self.weights[turn];
        let workspace_bytes = CUDA_LINEAR_SCRATCH.as_usize();
        Places { weight, x: self.x, bias, out: self.out, workspace: self.scratch, workspace_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_tried_unless_the_first_are_far_behind_ours() {
        assert!(may_win(1.1, 1.0) && may_win(0.5, 1.0));
        assert!(!may_win(1.2, 1.0));
        assert!(!may_win(1e-3, -2e-4), "ours may take less than its head start");
        assert!(may_win(1.0, f32::INFINITY), "ours does not serve");
        assert!(may_win(f32::INFINITY, 1.0), "the first do not run");
    }
}
