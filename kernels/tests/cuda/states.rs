//! The states of gated delta nets on a GPU, carried from step to step. Without a GPU, the GPU test
//! prints that it is skipped.

use std::sync::Arc;

use bursar_budgets::{Bytes, Workspace};
use bursar_kernels::*;

use crate::{
    gpu_lock,
    ground::{assert_close, compute, divided, first_gpu, leased, load, widened},
};

/// Each row lists the tokens at which a prompt of 200 tokens is divided into steps: one step, short
/// steps, steps of whole chunks, and steps that end inside chunks.
const CUTS: [&[usize]; 6] = [
    &[0, 200],
    &[0, 1, 2, 3, 200],
    &[0, 2, 5, 6, 199, 200],
    &[0, 64, 128, 192, 200],
    &[0, 63, 64, 129, 200],
    &[0, 70, 71, 100, 200],
];

#[test]
fn a_prompt_divided_into_steps_has_the_numbers_of_one_step() {
    let _lock = gpu_lock();
    let Some(device) = first_gpu() else { return };
    let best = CudaTarget::of(&device).expect("the GPU can be queried");
    for target in [best, CudaTarget { activation: DType::F16, ..best }] {
        let kernels: Arc<CudaKernels> = load(&device, target);
        let (cuda, counter) = (Cuda::new(&kernels).expect("a stream"), WorkCounter::default());
        let workspace = Workspace::over(leased(device.clone(), Bytes::mib(64)));
        let expected = widened(&compute(2, |scope| divided(scope, target.activation, CUTS[0])));
        for cuts in CUTS {
            let found = divided(&Scope::new(&cuda, &workspace, &counter), target.activation, cuts).expect("it runs");
            // Chunks multiply f16 operands, whose rounding errors add up in the state.
            assert_close(&format!("{cuts:?} in {}", target.activation), &found, &expected, 1.0 / 384.0);
        }
    }
}

#[test]
fn the_steps_of_a_prompt_are_divided_without_loss_on_the_cpu() {
    let whole = compute(1, |scope| divided(scope, DType::BF16, CUTS[0]));
    for cuts in CUTS {
        assert!(compute(2, |scope| divided(scope, DType::BF16, cuts)) == whole, "{cuts:?}");
    }
}
