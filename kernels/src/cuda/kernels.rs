//! The kernels that are loaded on one device.

use std::sync::Arc;

use bursar_budgets::{Address, CudaDevice, Overhead};

use super::{
    error::OpenError,
    functions::Functions,
    gemm::{Agreement, Blas, CounterSets, Tuned},
    module_images::{self, ModuleImages},
    search::BlasSearch,
    target::CudaTarget,
};
use crate::Target;

/// State that all lanes of a device share: the loaded kernels, the cuBLASLt handle, and the
/// algorithms measured to be fastest on this device.
pub struct CudaKernels {
    pub(super) functions: Overhead<Functions>,
    pub(super) blas: Overhead<Blas>,
    pub(super) tuned: Tuned,
    /// Address of the decode counters, which are all zero between launches. Only one stream at a
    /// time may decode with these kernels: the step lane of the model that they are loaded for.
    pub(super) decode_counters: Address,
    /// Counters for GEMMs of few rows, one set per lane.
    pub(super) counter_sets: Arc<CounterSets>,
    pub(super) target: CudaTarget,
    pub(super) device: Arc<CudaDevice>,
}

impl CudaKernels {
    /// Loads the device code and cuBLASLt. The device memory that both occupy counts as overhead
    /// until the returned value is dropped.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn load(device: &Arc<CudaDevice>, target: CudaTarget, search: &BlasSearch) -> Result<Arc<Self>, OpenError> {
        Self::load_rank(device, target, search, &module_images::images_for(target.capability), &Arc::default())
    }

    /// Loads the device code and cuBLASLt on the GPU of each rank of a model. All ranks compute the
    /// same GEMM with the same algorithm.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn load_ranks(
        devices: &[Arc<CudaDevice>],
        target: CudaTarget,
        search: &BlasSearch,
    ) -> Result<Vec<Arc<Self>>, OpenError> {
        let (images, agreement) = (module_images::images_for(target.capability), Arc::default());
        devices.iter().map(|device| Self::load_rank(device, target, search, &images, &agreement)).collect()
    }

    fn load_rank(
        device: &Arc<CudaDevice>,
        target: CudaTarget,
        search: &BlasSearch,
        images: &[ModuleImages],
        agreement: &Arc<Agreement>,
    ) -> Result<Arc<Self>, OpenError> {
        let mut functions = Err(OpenError::TooOld { found: target.capability });
        for images in images {
            // Decompress the modules before the memory measurement starts, because other models
            // must wait until the measurement ends.
            images.modules();
            functions = device.with_overhead("kernels", || Functions::load(device, images, target.activation));
            if !matches!(functions, Err(OpenError::Image { .. })) {
                break;
            }
        }
        let functions = functions?;
        let blas = device.with_overhead("cuBLASLt", || Blas::open(device, search))?;
        let tuned = Tuned::new(agreement);
        let decode_counters = functions.variable("attention_decode", c"attention_decode_counters")?;
        let (counter_sets, device) = (Arc::default(), device.clone());
        Ok(Arc::new(CudaKernels { functions, blas, tuned, decode_counters, counter_sets, target, device }))
    }

    /// Returns the target for which memory plans for these kernels must be made.
    pub fn target(&self) -> Target {
        Target::Cuda(self.target)
    }
}
