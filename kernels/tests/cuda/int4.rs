//! 4-bit integer weights on a GPU. Without a GPU, the test prints that it is skipped.

use std::sync::Arc;

use bursar_budgets::{Bytes, Workspace};
use bursar_kernels::*;

use crate::{
    gpu_lock,
    ground::{Int4, Way, first_gpu, leased, load},
};

/// The error of the whole output relative to its norm.
fn distance(found: &[f32], expected: &[f64]) -> f64 {
    let of = |squares: &mut dyn Iterator<Item = f64>| squares.map(|number| number * number).sum::<f64>().sqrt();
    let off = of(&mut found.iter().zip(expected).map(|(found, expected)| f64::from(*found) - expected));
    off / of(&mut expected.iter().copied()).max(1e-30)
}

#[test]
fn products_with_4_bit_integers_are_those_of_their_elements() {
    let _lock = gpu_lock();
    let Some(device) = first_gpu() else { return };
    let best = CudaTarget::of(&device).expect("the GPU can be queried");
    if best.capability < (8, 0) {
        println!("skipped, the GPU has no kernels for 4-bit integers");
        return;
    }
    let large = [(300, 2560, 4096, Way::Plain), (257, 7168, 2048, Way::Gated), (1000, 144, 512, Way::Bias)];
    let large = large.map(|(rows, out_features, in_features, way)| Int4 {
        rows,
        out_features,
        in_features,
        group: 128,
        has_zero_points: true,
        way,
    });
    for target in [best, CudaTarget { activation: DType::F16, ..best }] {
        let kernels: Arc<CudaKernels> = load(&device, target);
        for backend in [GemmBackend::Measured, GemmBackend::Ours] {
            let cuda = Cuda::new(&kernels).expect("a stream").with_gemm_backend(backend);
            let (workspace, counter) =
                (Workspace::over(leased(device.clone(), Bytes::mib(512))), WorkCounter::default());
            for case in Int4::cases().into_iter().chain(large) {
                let kept = target.activation;
                let found = case.run(&Scope::new(&cuda, &workspace, &counter), kept).expect("it runs");
                let off = distance(&found, &case.expected(kept, target.activation));
                // The limit allows one rounding to the type of activations. The error of a small
                // output varies more, so its limit is twice as large.
                let limit = if target.activation == DType::BF16 { 3e-3 } else { 4e-4 };
                let limit = if found.len() < 64 { 2.0 * limit } else { limit };
                assert!(off <= limit, "{case:?} in {kept}: {off:.1e}");
            }
        }
    }
}
