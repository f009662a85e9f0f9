//! The GPU that tests run on, if there is one.

use std::sync::Arc;

use bursar_budgets::{CudaDevice, DeviceError, Hint};
use bursar_kernels::{BlasSearch, CudaKernels, CudaTarget};

/// The first GPU. Without a GPU, prints that the test is skipped, and returns `None`.
pub fn first_gpu() -> Option<Arc<CudaDevice>> {
    match CudaDevice::open(0) {
        Ok(device) => Some(Arc::new(device)),
        Err(error @ DeviceError::NoDevice { .. }) => {
            println!("skipped, {error}; {}", error.hint().expect("the error has a hint"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The kernels of `device` for `target`.
pub fn load(device: &Arc<CudaDevice>, target: CudaTarget) -> Arc<CudaKernels> {
    CudaKernels::load(device, target, &search()).expect("the kernels load")
}

/// The folders to search for libraries.
pub fn search() -> BlasSearch {
    // The environment variable lists folders. Outside tests, only `main` may read the environment.
    #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
    let folder = std::env::var("BURSAR_CUDA_LIB");
    let usual = BlasSearch::usual().with_pythons(&["/opt/torch/.venv"]);
    let folders: Vec<_> = folder.iter().flat_map(std::env::split_paths).collect();
    usual.first_in(&folders)
}
