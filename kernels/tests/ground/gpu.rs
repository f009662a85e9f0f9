//! The GPU that stories run on, if there is one.

use std::sync::Arc;

use bursar_budgets::{CudaDevice, DeviceError, Hint};
use bursar_kernels::{BlasSearch, CudaKernels, CudaTarget};

/// The first GPU. Without one it prints that and returns `None`.
pub fn first_gpu() -> Option<Arc<CudaDevice>> {
    match CudaDevice::open(0) {
        Ok(device) => Some(Arc::new(device)),
        Err(error @ DeviceError::NoDevice { .. }) => {
            println!("skipped, {error}; {}", error.hint().expect("there is something to do"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Its kernels for `target`.
pub fn load(device: &Arc<CudaDevice>, target: CudaTarget) -> Arc<CudaKernels> {
    CudaKernels::load(device, target, &search()).expect("its kernels load")
}

/// Where libraries are.
pub fn search() -> BlasSearch {
    // The environment says so; only this place below `main` reads it.
    #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
    let folder = std::env::var("BURSAR_CUDA_LIB");
    let usual = BlasSearch::usual().with_python("/opt/torch/.venv");
    let folders: Vec<_> = folder.iter().flat_map(std::env::split_paths).collect();
    folders.into_iter().rev().fold(usual, BlasSearch::first_in)
}
