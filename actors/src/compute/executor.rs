//! Executors of a model: CPU threads over host memory, or the kernels of a GPU.

use std::{
    ops::{ControlFlow, Deref},
    panic::resume_unwind,
    slice,
    sync::Arc,
    thread,
    time::Duration,
};

use bursar_budgets::{Bytes, CudaDevice, Device, Segment};
use bursar_kernels::{
    BlasSearch, CopyLink, Cpu, Cuda, CudaKernels, CudaLink, CudaTarget, GemmBackend, HostLink, KernelError, Nccl,
    NcclLink, OpenError, Rank, RankLink, Target, Tuning,
};
use bursar_model::{LoadError, Model, checkpoint::Checkpoint};
use tokio::runtime::RuntimeFlavor;

use crate::{
    compute::lane::{Lane, ModelRunner},
    compute::memory::EngineMemory,
};

/// Runs the passes of a model, with CPU threads or the loaded kernels of a GPU for each rank.
/// Passes are planned for the executor's target. Clones share the same kernels.
#[derive(Clone)]
pub struct Executor {
    ranks: Arc<[OfRank]>,
    /// NCCL, for the collectives of steps on several GPUs. `None` on a CPU or a single GPU, and if
    /// Bursar's own kernels run the collectives.
    nccl: Option<Arc<Nccl>>,
}

/// The executor of one rank.
#[derive(Clone)]
enum OfRank {
    /// CPU threads that share the work of each operation, over host memory.
    Cpu {
        threads: usize,
    },
    Cuda(Loaded),
}

/// How long a rank waits for the other ranks before it treats them as dead.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a rank that has encoded its own pictures waits for the other ranks. Each picture is
/// encoded by one rank, so the other ranks may have all the work. The death of a rank is noticed at
/// once.
const PICTURES_PATIENCE: Duration = Duration::from_secs(600);

/// The loaded kernels of a GPU.
///
/// Unloading takes a moment, and waits for any thread that allocates or measures memory of the
/// device. If the last clone is dropped on a thread of a multi-threaded tokio runtime, the other
/// tasks of that thread move to other threads. The drop returns only when unloading is complete: if
/// the program exited earlier, it would unload the driver while the driver still unloads the
/// kernels.
#[derive(Clone)]
pub struct Loaded(Option<Arc<CudaKernels>>);

impl Deref for Loaded {
    type Target = Arc<CudaKernels>;

    fn deref(&self) -> &Arc<CudaKernels> {
        self.0.as_ref().expect("the kernels exist until the value is dropped")
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

impl Executor {
    /// Returns the target for `device` with the best data types of that device. Ranks on a CPU
    /// share its threads.
    ///
    /// # Errors
    /// A GPU cannot be queried.
    pub fn best_target(device: &Arc<dyn Device>, threads: usize) -> Result<Target, OpenError> {
        let ranks = devices(device);
        match ranks[0].clone().as_cuda() {
            Some(cuda) => Ok(Target::Cuda(CudaTarget::of(&cuda)?)),
            None => Ok(Target::Cpu { threads }.of_ranks(ranks.len())),
        }
    }

    /// Opens the executor for `target` on `device`. On a GPU this loads the kernels and cuBLASLt.
    /// On several GPUs it also loads NCCL if they cannot access each other's memory, if they are
    /// not Hopper GPUs, or if `through_nccl` is set.
    ///
    /// # Errors
    /// A library or a kernel that a GPU needs is missing.
    pub fn on(
        device: &Arc<dyn Device>,
        target: Target,
        search: &BlasSearch,
        through_nccl: bool,
    ) -> Result<Self, OpenError> {
        let gpus = gpus(device);
        // NCCL is opened first, so that a missing library is reported before
        // anything else is loaded.
        let nccl = match why_nccl(&gpus, target, through_nccl)? {
            Some(why) => Some(Arc::new(Nccl::open(&gpus, search, &why)?)),
            None => None,
        };
        let ranks = match target {
            Target::Cpu { threads } => devices(device).iter().map(|_| OfRank::Cpu { threads }).collect(),
            Target::Cuda(target) => {
                let kernels = CudaKernels::load_ranks(&gpus, target, search)?;
                kernels.into_iter().map(|kernels| OfRank::Cuda(Loaded(Some(kernels)))).collect()
            }
        };
        Ok(Executor { ranks, nccl })
    }

    pub fn target(&self) -> Target {
        match &self.ranks[0] {
            OfRank::Cpu { threads } => Target::Cpu { threads: *threads },
            OfRank::Cuda(kernels) => kernels.target(),
        }
    }

    /// Returns the loaded libraries with their versions. `None` on a CPU.
    pub fn library(&self) -> Option<String> {
        let products = self.kernels().next().map(|kernels| kernels.library())?;
        let exchanges = self.nccl.as_ref().map(|nccl| format!(", NCCL {}", nccl.version()));
        Some(products + &exchanges.unwrap_or_default())
    }

    /// Returns the fastest algorithm measured for each GEMM. `None` on a CPU, which has only one
    /// algorithm.
    pub fn tuning(&self) -> Option<Tuning> {
        self.kernels().next().map(|kernels| kernels.tuning())
    }

    /// Replaces the measured algorithms on all ranks. If `tuning` does not apply to one of the
    /// ranks, no rank uses it, and all ranks forget the algorithms that they have measured. Does
    /// nothing on a CPU.
    pub fn tune(&self, tuning: &Tuning) {
        let (all, none) = (self.kernels().all(|kernels| kernels.takes(tuning)), Tuning::default());
        self.kernels().for_each(|kernels| kernels.tune(if all { tuning } else { &none }));
    }

    fn kernels(&self) -> impl Iterator<Item = &Loaded> {
        self.ranks.iter().filter_map(|rank| match rank {
            OfRank::Cpu { .. } => None,
            OfRank::Cuda(kernels) => Some(kernels),
        })
    }

    /// Starts a lane over the ranks' `workspace`, which must belong to `memory`. `is_linked` links
    /// the ranks, which is required if they run steps or encode different pictures.
    ///
    /// # Errors
    /// A GPU refuses a stream or page-locked memory.
    pub fn start_lane(
        &self,
        name: &str,
        device_of_all: &Arc<dyn Device>,
        workspace: &Arc<Segment>,
        models: &Models,
        memory: &Arc<EngineMemory>,
        is_linked: bool,
    ) -> Result<Lane, OpenError> {
        let ranks = || self.ranks.iter().zip(models.iter()).zip(devices(device_of_all));
        let is_step = Arc::ptr_eq(workspace, &memory.step_workspace);
        let copies = memory.copies_in(workspace);
        let is_linked = is_linked && self.ranks.len() > 1;
        let patience = if is_step { PATIENCE } else { PICTURES_PATIENCE };
        let mut on_host = Vec::new();
        let mut links = if is_linked { HostLink::between(self.ranks.len(), patience) } else { Vec::new() }.into_iter();
        for ((rank, model), device) in ranks() {
            if let OfRank::Cpu { threads } = rank {
                let cpu = links.next().map_or_else(|| Cpu::new(*threads), |link| Cpu::linked(*threads, link));
                let runner = ModelRunner::new(cpu, workspace.clone(), model.clone(), memory.clone());
                on_host.push((runner, device.timeline()));
            }
        }
        if !on_host.is_empty() {
            return Ok(Lane::of_ranks(name, on_host));
        }
        let mut links = match (is_linked, is_step) {
            (false, _) => Vec::new(),
            (true, true) => self.link(device_of_all, memory)?,
            // Ranks of the vision lane exchange data by copies, not by kernels. If kernels of two
            // lanes waited for other ranks at the same time, they could deadlock.
            (true, false) => {
                CopyLink::between(&gpus(device_of_all), patience)?.into_iter().map(RankLink::from).collect()
            }
        }
        .into_iter();
        let mut on_gpus = Vec::new();
        for ((rank, model), device) in ranks() {
            if let OfRank::Cuda(kernels) = rank {
                let mut cuda = Cuda::new(kernels)?;
                if let Some(link) = links.next() {
                    cuda = cuda.linked(link);
                }
                if copies {
                    cuda = cuda.with_copies()?;
                }
                if ranks_of_a_device(devices(device_of_all)) > 1 {
                    // Do not use cuBLASLt here. Before it loads a kernel, it waits for running
                    // kernels, which may in turn wait for this rank: a deadlock.
                    cuda = cuda.with_gemm_backend(GemmBackend::Ours);
                }
                let runner = ModelRunner::new(cuda, workspace.clone(), model.clone(), memory.clone());
                on_gpus.push((runner, device.timeline()));
            }
        }
        Ok(Lane::of_ranks(name, on_gpus))
    }

    /// Creates the link that GPUs use for the collectives of steps, and returns one end per rank.
    /// No lane that uses an earlier link may still exist.
    fn link(&self, device: &Arc<dyn Device>, memory: &EngineMemory) -> Result<Vec<RankLink>, OpenError> {
        let exchange = memory.exchange.as_ref().expect("several GPU ranks have exchange memory");
        let addresses = exchange.addresses(self.ranks.len());
        if let Some(nccl) = &self.nccl {
            let kernels: Vec<_> = self.kernels().map(|kernels| &**kernels).collect();
            // SAFETY: the memory is backed for exchanges of `largest` bytes and open to the ranks
            // that can reach it, no lane uses it yet, and the runners of all ranks keep it alive
            // until their work has ended.
            let links = unsafe { NcclLink::between(nccl, &kernels, &addresses, exchange.largest(), PATIENCE) }?;
            return Ok(links.into_iter().map(RankLink::from).collect());
        }
        for (kernels, address) in self.kernels().zip(&addresses) {
            let cuda = Cuda::new(kernels)?;
            // SAFETY: `address` points to memory that is backed for exchanges of `largest` bytes.
            // No lane uses that memory yet, so no other access races with the clear.
            unsafe { CudaLink::clear(&cuda, *address) }.map_err(of_device)?;
        }
        let Target::Cuda(CudaTarget { sms, .. }) = self.target() else { unreachable!("the target is a GPU") };
        let sharing = ranks_of_a_device(devices(device));
        // SAFETY: the memory is mapped for all ranks and was cleared above, and the runners of all
        // ranks keep it alive until their work has ended.
        let links = unsafe { CudaLink::between(&addresses, exchange.largest(), PATIENCE, sms, sharing) };
        Ok(links.into_iter().map(RankLink::from).collect())
    }

    /// Copies each rank's part of a checkpoint's weights into `segment`, on all ranks at the same
    /// time; see [`Model::load`]. `progress` is called by every rank and decides whether that rank
    /// continues. Only the first rank passes numbers: the bytes done and the total bytes.
    ///
    /// # Errors
    /// The errors of [`Model::load`].
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        segment: Segment,
        progress: impl Fn(Option<(Bytes, Bytes)>) -> ControlFlow<()> + Sync,
    ) -> Result<Models, LoadError> {
        let segment = Arc::new(segment);
        let ranks = Rank::all(self.ranks.len()).zip(self.ranks.iter());
        let load = |(rank, on): (Rank, &OfRank)| {
            let report = |done, total| progress((rank.index() == 0).then_some((done, total)));
            on.load(checkpoint, rank, segment.clone(), report).map(Arc::new)
        };
        let models: Result<_, LoadError> = thread::scope(|scope| {
            let load = &load;
            let loading: Vec<_> = ranks.map(|rank| scope.spawn(move || load(rank))).collect();
            loading.into_iter().map(|rank| rank.join().unwrap_or_else(|died| resume_unwind(died))).collect()
        });
        models.map(Models)
    }
}

impl OfRank {
    fn load(
        &self,
        checkpoint: &Checkpoint,
        rank: Rank,
        segment: Arc<Segment>,
        progress: impl FnMut(Bytes, Bytes) -> ControlFlow<()>,
    ) -> Result<Model, LoadError> {
        match self {
            // One thread is enough to copy weights.
            OfRank::Cpu { .. } => Model::load_rank(checkpoint, rank, &Cpu::new(1), segment, progress),
            OfRank::Cuda(kernels) => {
                let cuda = Cuda::new(kernels).map_err(|error| match error {
                    OpenError::Device(error) => KernelError::Device(error),
                    error => unreachable!("loaded kernels are not searched again: {error}"),
                })?;
                let model = Model::load_rank(checkpoint, rank, &cuda, segment, progress)?;
                // The copies are still running, and lanes use other streams, so wait for them here.
                cuda.wait()?;
                Ok(model)
            }
        }
    }
}

/// A loaded model: one [`Model`] per rank, with the weights of that rank. Clones share the weights.
/// Values that are equal on all ranks are read from the first rank.
#[derive(Clone)]
pub struct Models(Arc<[Arc<Model>]>);

impl Models {
    /// Returns the model of the first rank, which also has all data other than weights.
    pub fn of_first_rank(&self) -> Arc<Model> {
        self.0[0].clone()
    }

    fn iter(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.0.iter()
    }
}

impl Deref for Models {
    type Target = Model;

    fn deref(&self) -> &Model {
        &self.0[0]
    }
}

/// The devices of the ranks of a group, or the device itself.
fn devices(device: &Arc<dyn Device>) -> &[Arc<dyn Device>] {
    match device.ranks() {
        [] => slice::from_ref(device),
        ranks => ranks,
    }
}

/// The GPUs of the ranks. Empty on a host device.
fn gpus(device: &Arc<dyn Device>) -> Vec<Arc<CudaDevice>> {
    devices(device).iter().filter_map(|device| device.clone().as_cuda()).collect()
}

/// The reason why steps on these GPUs use NCCL for collectives. `None` if they do not.
fn why_nccl(gpus: &[Arc<CudaDevice>], target: Target, is_wanted: bool) -> Result<Option<String>, OpenError> {
    let Target::Cuda(target) = target else { return Ok(None) };
    if gpus.len() < 2 {
        return Ok(None);
    }
    if is_wanted {
        return Ok(Some("disable_custom_all_reduce is set".to_owned()));
    }
    for (one, other) in gpus.iter().flat_map(|one| gpus.iter().map(move |other| (one, other))) {
        if !one.reaches(other)? {
            return Ok(Some(format!("{} cannot access the memory of {}", one.label(), other.label())));
        }
    }
    let is_hopper = target.capability == (9, 0);
    Ok((!is_hopper).then(|| format!("{} has no kernels for collectives", Target::Cuda(target).name())))
}

/// The largest number of ranks that share a device. The number is 1 except in tests on a machine
/// with one GPU.
fn ranks_of_a_device(devices: &[Arc<dyn Device>]) -> usize {
    let sharers = |one: &Arc<dyn Device>| devices.iter().filter(|other| other.label() == one.label()).count();
    devices.iter().map(sharers).max().unwrap_or(1)
}

/// Converts an error of `CudaLink::clear`. That call only copies, so any failure is a failure of
/// the device.
fn of_device(error: KernelError) -> OpenError {
    match error {
        KernelError::Device(error) => OpenError::Device(error),
        error => unreachable!("a copy fails only on its device: {error}"),
    }
}
