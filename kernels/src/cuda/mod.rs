//! The backend for NVIDIA GPUs: kernels of this project, compiled ahead of time, and cuBLASLt's
//! GEMMs. Activations, weights and the KV cache are bf16 (f16 on Turing); sums are f32.

mod attention;
mod autotune;
mod blas;
mod contract;
mod copy_blocks;
mod copy_link;
mod decode_launch;
mod download_staging;
mod e4m3_cache;
mod elementwise;
mod error;
mod experts;
mod gate_up_middle;
mod graph;
mod launch;
mod linear;
mod linear_e4m3;
mod linear_few;
mod linear_many;
mod link;
mod module_images;
mod nccl;
mod pipelined_fill;
mod quantize;
mod rank_link;
mod rotary;
mod sample;
mod stream;
mod target;
mod tensor_map;
mod transposed_scales;
mod tuning;
mod upload_staging;

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
    thread::{self, ThreadId},
};

use bursar_budgets::{Address, CudaDevice, DeviceError, Overhead};

pub use blas::BlasSearch;
pub(crate) use contract::{HeadDim as CudaHeadDim, PackedHeadDim as CudaPackedHeadDim};
pub use copy_link::CopyLink;
pub use error::OpenError;
pub(crate) use experts::cuda_route_scratch;
pub use linear_few::GemmBackend;
pub use link::CudaLink;
pub use nccl::{Nccl, NcclLink, keep_multicast_off};
pub use rank_link::RankLink;
pub(crate) use sample::cuda_sample_scratch;
pub use target::CudaTarget;
pub(crate) use target::{CUDA_FEATURES, CUDA_LINEAR_SCRATCH};
pub use tuning::Tuning;

use crate::{Backend, Graph, KernelError, Rank, Target, ops, ops::transfer::Arrival};
use autotune::Autotuner;
use blas::{Blas, LaneGemms};
use contract::EntryPoints;
use copy_blocks::CopyStream;
use download_staging::StagingPool;
use launch::{Function, Functions};
use linear_few::{CounterSets, Counters};
use module_images::ModuleImages;
use rank_link::Witness;
use stream::{Clock, Stream};
use tuning::Agreement;
use upload_staging::Stage;

/// State that all lanes of a device share: the loaded kernels, the cuBLASLt handle, and the
/// algorithms measured to be fastest on this device.
pub struct CudaKernels {
    functions: Overhead<Functions>,
    blas: Overhead<Blas>,
    /// Address of the decode counters, which are all zero between launches. Only one stream at a
    /// time may decode with these kernels: the step lane of the model that they are loaded for.
    decode_counters: Address,
    /// Counters for GEMMs of few rows, one set per lane.
    counter_sets: Arc<CounterSets>,
    target: CudaTarget,
    device: Arc<CudaDevice>,
}

impl CudaKernels {
    /// Loads the device code and cuBLASLt. The device memory that they take counts as overhead
    /// until they are dropped.
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
        let blas = device.with_overhead("cuBLASLt", || Blas::open(device, search, agreement))?;
        let decode_counters = functions.variable("attention_decode", c"attention_decode_counters")?;
        let (counter_sets, device) = (Arc::default(), device.clone());
        Ok(Arc::new(CudaKernels { functions, blas, decode_counters, counter_sets, target, device }))
    }

    /// Returns the target for which memory plans for these kernels must be made.
    pub fn target(&self) -> Target {
        Target::Cuda(self.target)
    }
}

/// The backend of one lane on a GPU, with a separate stream. A `Cuda` belongs to the lane's thread.
///
/// Every view passed to a `Cuda` must refer to memory of its device.
pub struct Cuda {
    target: Target,
    /// Counters for this project's GEMM kernels for few rows; `None` if the device has no such
    /// kernels. This field is declared before the stream and the staging memory, because dropping
    /// the counters waits for the stream's work, which uses both.
    counters: Option<Counters>,
    /// The lane's stream, shared with the graphs that were captured in it.
    stream: Arc<Overhead<Stream>>,
    stage: RefCell<Overhead<Stage>>,
    products: RefCell<LaneGemms>,
    products_by: GemmBackend,
    arrivals: StagingPool,
    /// `Some` for a lane that copies KV blocks to host memory and back.
    copies: Option<CopyStream>,
    /// True while autotuning is on: results are discarded, so GEMMs may be measured.
    autotunes: Cell<bool>,
    autotuner: RefCell<Autotuner>,
    clock: Clock,
    /// True while launches are recorded into a graph. A copy would be recorded too, together with
    /// the host memory's contents at that moment.
    captures: Cell<bool>,
    /// The thread on which the device's context is current.
    entered: Cell<Option<ThreadId>>,
    /// Link to the other ranks, if there are any.
    link: Option<RankLink>,
    /// This must be the last field: dropping the last reference unloads the modules, and by then
    /// the stream's work must have ended.
    kernels: Arc<CudaKernels>,
}

impl Cuda {
    /// Opens a stream of work on the device of `kernels`.
    ///
    /// # Errors
    /// The driver refuses a stream or page-locked memory.
    pub fn new(kernels: &Arc<CudaKernels>) -> Result<Self, OpenError> {
        let device = &kernels.device;
        let stream = Arc::new(device.with_overhead("streams", || Stream::new(device))?);
        let stage = device.with_overhead("staging", || Stage::new(device))?;
        Ok(Cuda {
            counters: Counters::take(&kernels.functions, &kernels.counter_sets, &stream)?,
            products_by: GemmBackend::default(),
            kernels: kernels.clone(),
            target: kernels.target(),
            stream,
            stage: RefCell::new(stage),
            products: RefCell::new(LaneGemms::new(device)?),
            arrivals: StagingPool::new(device)?,
            copies: None,
            autotunes: Cell::new(false),
            autotuner: RefCell::default(),
            clock: Clock::new(device)?,
            captures: Cell::new(false),
            entered: Cell::new(None),
            link: None,
        })
    }

    /// Makes this backend one of several ranks that compute a model together.
    pub fn linked(self, link: impl Into<RankLink>) -> Self {
        Cuda { link: Some(link.into()), ..self }
    }

    /// Enables copies of blocks to host memory and back, in a separate stream.
    ///
    /// # Errors
    /// The driver refuses the stream.
    pub fn with_copies(self) -> Result<Self, OpenError> {
        Ok(Cuda { copies: Some(CopyStream::new(&self.kernels.device)?), ..self })
    }

    /// Sets which implementation computes GEMMs.
    pub fn with_products_by(self, products_by: GemmBackend) -> Self {
        Cuda { products_by, ..self }
    }

    /// Returns the number of GEMMs that were first called outside autotuning. Each of these used
    /// cuBLASLt's first proposal and may have loaded one of cuBLASLt's kernels. The number is zero
    /// if autotuning was complete.
    pub fn guesses(&self) -> usize {
        self.products.borrow().guesses()
    }

    /// Waits until the stream, and the stream for copies if there is one, have
    /// finished all their work.
    ///
    /// # Errors
    /// Any error that the device reports for that work.
    pub fn wait(&self) -> Result<(), KernelError> {
        self.enter()?;
        let copies = self.copies.as_ref().map_or(Ok(()), CopyStream::wait);
        self.stream.wait()?;
        copies?;
        self.check_link()
    }

    /// Checks that all ranks joined the collectives launched so far. If the note of a missing rank
    /// is in device memory, this function waits for a copy of the note.
    fn check_link(&self) -> Result<(), KernelError> {
        let Some(witness) = self.link.as_ref().and_then(RankLink::witness) else { return Ok(()) };
        if let Witness::Note(failed_at) = witness {
            let mut failed = [0; CudaLink::NOTE];
            self.stage.borrow_mut().download(&self.stream, failed_at, &mut failed)?;
            CudaLink::check(failed)?;
        }
        Ok(witness.check()?)
    }

    /// Makes the device's context current on this thread, unless it already is.
    fn enter(&self) -> Result<(), KernelError> {
        let this = Some(thread::current().id());
        if self.entered.get() != this {
            self.kernels.device.enter()?;
            self.entered.set(this);
        }
        Ok(())
    }

    /// Does the same as [`enter`](Cuda::enter), for a copy between host and device. During a
    /// capture it returns an error, because a graph must not contain such a copy.
    fn enter_to_copy(&self) -> Result<(), KernelError> {
        if self.captures.get() {
            let said = "a copy between host and device cannot be part of a graph".to_owned();
            return Err(DeviceError::Driver { call: "cuStreamBeginCapture", said }.into());
        }
        self.enter()
    }

    /// Returns the kernels for this target's activation type.
    fn entry_points(&self) -> &EntryPoints<Function> {
        self.kernels.functions.entry_points()
    }
}

impl Backend for Cuda {
    const COMPUTES: bool = true;

    fn target(&self) -> &Target {
        &self.target
    }

    fn rank(&self) -> Rank {
        self.link.as_ref().map_or(Rank::ALONE, RankLink::rank)
    }

    fn abort_collectives(&self) {
        rank_link::abort_collectives(self);
    }

    fn wait_for_all(&self) -> Result<(), KernelError> {
        self.wait()
    }

    fn upload(&self, call: ops::transfer::Upload<'_>) -> Result<(), KernelError> {
        self.enter_to_copy()?;
        Ok(self.stage.borrow_mut().upload(&self.stream, call.source, call.out.address())?)
    }

    fn download(&self, call: ops::transfer::Download<'_>) -> Result<(), KernelError> {
        self.enter_to_copy()?;
        self.stage.borrow_mut().download(&self.stream, call.source.address(), call.out)?;
        self.check_link()
    }

    fn download_later(&self, call: ops::transfer::DownloadLater<'_>) -> Result<Box<dyn Arrival>, KernelError> {
        self.enter_to_copy()?;
        let device = &self.kernels.device;
        let witness = self.link.as_ref().and_then(RankLink::witness);
        Ok(Box::new(download_staging::Download::begin(&self.arrivals, device, &self.stream, &call.source, witness)?))
    }

    fn copy_blocks(&self, call: ops::copy_blocks::Call<'_>) -> Result<Box<dyn ops::copy_blocks::Copying>, KernelError> {
        copy_blocks::copy_blocks(self, call)
    }

    fn autotune(&self, on: bool) {
        self.autotunes.set(on);
        self.products.borrow_mut().forget_refusals();
        // The recorded weight addresses are valid only while autotuning is on.
        self.autotuner.take();
    }

    fn measure(&self, call: ops::measure::Call<'_>) -> Result<(), KernelError> {
        autotune::measure(self, call)
    }

    fn capture(&self, run: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Option<Box<dyn Graph>>, KernelError> {
        Ok(Some(Box::new(graph::Captured::of(self, run)?)))
    }

    fn fill_random(&self, call: ops::fill_random::Call<'_>) -> Result<(), KernelError> {
        elementwise::fill_random(self, call)
    }

    fn patchify(&self, call: ops::patchify::Call<'_>) -> Result<(), KernelError> {
        elementwise::patchify(self, call)
    }

    fn position_grid(&self, call: ops::position_grid::Call<'_>) -> Result<(), KernelError> {
        elementwise::position_grid(self, call)
    }

    fn all_reduce(&self, call: ops::all_reduce::Call<'_>) -> Result<(), KernelError> {
        rank_link::all_reduce(self, call)
    }

    fn all_reduce_rms_norm(&self, call: ops::all_reduce_rms_norm::Call<'_>) -> Result<(), KernelError> {
        rank_link::all_reduce_rms_norm(self, call)
    }

    fn all_gather(&self, call: ops::all_gather::Call<'_>) -> Result<(), KernelError> {
        rank_link::all_gather(self, call)
    }

    fn best_of_ranks(&self, call: ops::best_of_ranks::Call<'_>) -> Result<(), KernelError> {
        rank_link::best_of_ranks(self, call)
    }

    fn chooses_among_ranks(&self) -> bool {
        matches!(self.link, None | Some(RankLink::Kernels(_)))
    }

    fn embed(&self, call: ops::embed::Call<'_>) -> Result<(), KernelError> {
        elementwise::embed(self, call)
    }

    fn route(&self, call: ops::route::Call<'_>) -> Result<(), KernelError> {
        experts::route(self, call)
    }

    fn rms_norm_route(&self, call: ops::rms_norm_route::Call<'_>) -> Result<(), KernelError> {
        experts::rms_norm_route(self, call)
    }

    fn gated_experts(&self, call: ops::gated_experts::Call<'_>) -> Result<(), KernelError> {
        experts::gated_experts(self, call)
    }

    fn add_experts(&self, call: ops::add_experts::Call<'_>) -> Result<(), KernelError> {
        experts::add_experts(self, call)
    }

    fn add_experts_rms_norm(&self, call: ops::add_experts_rms_norm::Call<'_>) -> Result<(), KernelError> {
        experts::add_experts_rms_norm(self, call)
    }

    fn rms_norm(&self, call: ops::rms_norm::Call<'_>) -> Result<(), KernelError> {
        elementwise::rms_norm(self, call)
    }

    fn layer_norm(&self, call: ops::layer_norm::Call<'_>) -> Result<(), KernelError> {
        elementwise::layer_norm(self, call)
    }

    fn linear(&self, call: ops::linear::Call<'_>) -> Result<(), KernelError> {
        linear::linear(self, call)
    }

    fn gated_linear(&self, call: ops::gated_linear::Call<'_>) -> Result<(), KernelError> {
        linear::gated_linear(self, call)
    }

    fn rotary(&self, call: ops::rotary::Call<'_>) -> Result<(), KernelError> {
        rotary::rotary(self, call)
    }

    fn rotary_kv_write(&self, call: ops::rotary_kv_write::Call<'_>) -> Result<(), KernelError> {
        rotary::rotary_kv_write(self, call)
    }

    fn attention_paged(&self, call: ops::attention_paged::Call<'_>) -> Result<(), KernelError> {
        attention::paged(self, call)
    }

    fn attention_packed(&self, call: ops::attention_packed::Call<'_>) -> Result<(), KernelError> {
        attention::packed(self, call)
    }

    fn silu_mul(&self, call: ops::silu_mul::Call<'_>) -> Result<(), KernelError> {
        elementwise::silu_mul(self, call)
    }

    fn quantize(&self, call: ops::quantize::Call<'_>) -> Result<(), KernelError> {
        quantize::quantize(self, call)
    }

    fn gelu(&self, call: ops::gelu::Call<'_>) -> Result<(), KernelError> {
        elementwise::gelu(self, call)
    }

    fn gather_rows(&self, call: ops::gather_rows::Call<'_>) -> Result<(), KernelError> {
        elementwise::gather_rows(self, call)
    }

    fn scatter_rows(&self, call: ops::scatter_rows::Call<'_>) -> Result<(), KernelError> {
        elementwise::scatter_rows(self, call)
    }

    fn add_rows(&self, call: ops::add_rows::Call<'_>) -> Result<(), KernelError> {
        elementwise::add_rows(self, call)
    }

    fn argmax(&self, call: ops::argmax::Call<'_>) -> Result<(), KernelError> {
        elementwise::argmax(self, call)
    }

    fn sample(&self, call: ops::sample::Call<'_>) -> Result<(), KernelError> {
        sample::sample(self, call)
    }
}
