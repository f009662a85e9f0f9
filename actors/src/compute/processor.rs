//! What a model computes with: the CPU's threads over host memory, or a GPU's kernels.

use std::{
    ops::{ControlFlow, Deref},
    sync::Arc,
};

use bursar_budgets::{Bytes, Device, Segment};
use bursar_kernels::{BlasSearch, Cpu, Cuda, CudaKernels, CudaTarget, KernelError, OpenError, Target, Tuning};
use bursar_model::{LoadError, Model, checkpoint::Checkpoint};
use tokio::runtime::RuntimeFlavor;

use crate::{
    compute::lane::{Lane, ModelRunner},
    compute::memory::EngineMemory,
};

/// What passes are planned for and run on. Clones share it.
#[derive(Clone)]
pub enum Processor {
    /// Threads of the CPU, over host memory.
    Cpu {
        /// Threads that share an operation.
        threads: usize,
    },
    /// The loaded kernels of a GPU.
    Cuda(Loaded),
}

/// The loaded kernels of a GPU. Unloading takes a moment, and waits for any thread that takes or measures memory of the
/// device. If the last clone is dropped on a tokio thread, other threads take over that thread's tasks. The drop
/// returns only when unloading is done, because a program that ended earlier would take the driver away from under it.
#[derive(Clone)]
pub struct Loaded(Option<Arc<CudaKernels>>);

impl Deref for Loaded {
    type Target = Arc<CudaKernels>;

    fn deref(&self) -> &Arc<CudaKernels> {
        self.0.as_ref().expect("they are there until this drops")
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let last = self.0.take().and_then(Arc::into_inner);
        match tokio::runtime::Handle::try_current() {
            Ok(threads) if last.is_some() && threads.runtime_flavor() == RuntimeFlavor::MultiThread => {
                tokio::task::block_in_place(|| drop(last));
            }
            _ => drop(last),
        }
    }
}

impl Processor {
    /// The target for `device`, in the best of its types.
    ///
    /// # Errors
    /// A GPU cannot be queried.
    pub fn best_target(device: &Arc<dyn Device>, threads: usize) -> Result<Target, OpenError> {
        match device.clone().as_cuda() {
            Some(cuda) => Ok(Target::Cuda(CudaTarget::of(&cuda)?)),
            None => Ok(Target::Cpu { threads }),
        }
    }

    /// The processor for `target` on `device`. On a GPU this loads the kernels and cuBLASLt.
    ///
    /// # Errors
    /// Something that a GPU needs is missing.
    pub fn on(device: &Arc<dyn Device>, target: Target, search: &BlasSearch) -> Result<Self, OpenError> {
        match (target, device.clone().as_cuda()) {
            (Target::Cuda(target), Some(cuda)) => {
                Ok(Processor::Cuda(Loaded(Some(CudaKernels::load(&cuda, target, search)?))))
            }
            (Target::Cuda(_), None) => unreachable!("a GPU's target is of a GPU"),
            (Target::Cpu { threads }, _) => Ok(Processor::Cpu { threads }),
        }
    }

    /// The target that plans are made for.
    pub fn target(&self) -> Target {
        match self {
            Processor::Cpu { threads } => Target::Cpu { threads: *threads },
            Processor::Cuda(kernels) => kernels.target(),
        }
    }

    /// The library of matrix products, with its version. None on a CPU.
    pub fn library(&self) -> Option<String> {
        match self {
            Processor::Cpu { .. } => None,
            Processor::Cuda(kernels) => Some(kernels.library()),
        }
    }

    /// The fastest algorithm measured for each product. None on a CPU, which has no choice.
    pub fn tuning(&self) -> Option<Tuning> {
        match self {
            Processor::Cpu { .. } => None,
            Processor::Cuda(kernels) => Some(kernels.tuning()),
        }
    }

    /// Replaces the measured algorithms. Does nothing on a CPU.
    pub fn tune(&self, tuning: &Tuning) {
        if let Processor::Cuda(kernels) = self {
            kernels.tune(tuning);
        }
    }

    /// Starts a lane's thread over `workspace`, which must belong to `memory`.
    ///
    /// # Errors
    /// A GPU refuses a stream or page-locked memory.
    pub fn start_lane(
        &self,
        name: &str,
        device: &Arc<dyn Device>,
        workspace: &Arc<Segment>,
        model: &Arc<Model>,
        memory: &Arc<EngineMemory>,
    ) -> Result<Lane, OpenError> {
        let (workspace, model, memory) = (workspace.clone(), model.clone(), memory.clone());
        Ok(match self {
            Processor::Cpu { threads } => {
                let runner = ModelRunner::new(Cpu::new(*threads), workspace, model, memory);
                Lane::start(name, runner, device.timeline())
            }
            Processor::Cuda(kernels) => {
                let runner = ModelRunner::new(Cuda::new(kernels)?, workspace, model, memory);
                Lane::start(name, runner, device.timeline())
            }
        })
    }

    /// Copies a checkpoint's weights into `segment`; see [`Model::load`].
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        segment: Segment,
        progress: impl FnMut(Bytes, Bytes) -> ControlFlow<()>,
    ) -> Result<Model, LoadError> {
        match self {
            // Copying needs only one thread.
            Processor::Cpu { .. } => Model::load(checkpoint, &Cpu::new(1), segment, progress),
            Processor::Cuda(kernels) => {
                let cuda = Cuda::new(kernels).map_err(|error| match error {
                    OpenError::Device(error) => KernelError::Device(error),
                    error => unreachable!("what is loaded is not looked for again: {error}"),
                })?;
                let model = Model::load(checkpoint, &cuda, segment, progress)?;
                // The copies are still running, and lanes use other streams.
                cuda.wait()?;
                Ok(model)
            }
        }
    }
}
