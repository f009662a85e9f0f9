//! A stream of work on a GPU.

use std::{
    cell::{Cell, RefCell},
    mem::MaybeUninit,
    sync::Arc,
    thread::{self, ThreadId},
};

use bursar_budgets::{CudaDevice, DeviceError, Overhead};
use cudarc::driver::sys;

use super::{
    arguments::{Arguments, Extent, count},
    contract::EntryPoints,
    copy_blocks::CopyStream,
    download_staging::StagingPool,
    error::OpenError,
    functions::Function,
    gemm::{GemmBackend, GemmLane},
    kernels::CudaKernels,
    link::CudaLink,
    rank_link::{RankLink, Witness},
    stream::Stream,
    upload_staging::Stage,
};
use crate::{KernelError, Target};

/// The backend of one lane on a GPU, with a separate stream. A `Cuda` belongs to the lane's thread.
///
/// Every view passed to a `Cuda` must refer to memory of its device.
pub struct Cuda {
    pub(super) target: Target,
    /// Declared before the stream and the staging memory, and therefore dropped first: dropping
    /// this field waits for the stream, whose work still uses both.
    pub(super) gemm: GemmLane,
    /// The lane's stream, shared with the graphs that were captured in it.
    pub(super) stream: Arc<Overhead<Stream>>,
    pub(super) stage: RefCell<Overhead<Stage>>,
    pub(super) arrivals: StagingPool,
    /// `Some` for a lane that copies KV blocks to host memory and back.
    pub(super) copies: Option<CopyStream>,
    /// `true` while launches are recorded into a graph. A copy from the host would be recorded too,
    /// together with the host memory's contents at that moment.
    pub(super) captures: Cell<bool>,
    /// The thread on which the device's context is current.
    pub(super) entered: Cell<Option<ThreadId>>,
    /// Link to the other ranks, if there are any.
    pub(super) link: Option<RankLink>,
    /// This must be the last field: dropping the last reference unloads the modules, and by then
    /// the stream's work must have ended.
    pub(super) kernels: Arc<CudaKernels>,
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
            gemm: GemmLane::new(kernels, &stream)?,
            kernels: kernels.clone(),
            target: kernels.target(),
            stream,
            stage: RefCell::new(stage),
            arrivals: StagingPool::new(device)?,
            copies: None,
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
    pub fn with_gemm_backend(mut self, backend: GemmBackend) -> Self {
        self.gemm.backend = backend;
        self
    }

    /// Returns the number of GEMMs outside autotuning that used cuBLASLt's first proposal, because
    /// no measured algorithm supported them. Each of these GEMMs may have loaded one of cuBLASLt's
    /// kernels. The number is zero if autotuning was complete.
    pub fn guesses(&self) -> usize {
        self.gemm.guesses()
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

    /// Checks that all ranks joined the collectives launched so far. If the device records a
    /// missing rank in a note in device memory, this function waits for a copy of the note.
    pub(super) fn check_link(&self) -> Result<(), KernelError> {
        let Some(witness) = self.link.as_ref().and_then(RankLink::witness) else { return Ok(()) };
        if let Witness::Note(failed_at) = witness {
            let mut failed = [0; CudaLink::NOTE];
            self.stage.borrow_mut().download(&self.stream, failed_at, &mut failed)?;
            CudaLink::check(failed)?;
        }
        Ok(witness.check()?)
    }

    /// Makes the device's context current on this thread, unless it already is.
    pub(super) fn enter(&self) -> Result<(), KernelError> {
        let this = Some(thread::current().id());
        if self.entered.get() != this {
            self.kernels.device.enter()?;
            self.entered.set(this);
        }
        Ok(())
    }

    /// Does the same as [`enter`](Cuda::enter), for a copy between host and device. During a
    /// capture it returns an error, because a graph must not contain such a copy.
    pub(super) fn enter_to_copy(&self) -> Result<(), KernelError> {
        if self.captures.get() {
            let message = "a copy between host and device cannot be part of a graph".to_owned();
            return Err(DeviceError::Driver { call: "cuStreamBeginCapture", message }.into());
        }
        self.enter()
    }

    /// Returns the kernels for this target's activation type.
    pub(super) fn entry_points(&self) -> &EntryPoints<Function> {
        self.kernels.functions.entry_points()
    }

    /// Launches a kernel with arguments in the order of its parameters. An
    /// empty grid launches nothing.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters in order and type, and all addresses among
    /// them must be valid.
    pub(super) unsafe fn launch(
        &self,
        kernel: Function,
        extent: Extent,
        mut arguments: Arguments,
    ) -> Result<(), KernelError> {
        if extent.grid.contains(&0) {
            return Ok(());
        }
        let [x, y, z] = extent.grid.map(count);
        let [wide, tall] = extent.block.map(count);
        let mut early = early_start();
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: wide,
            blockDimY: tall,
            blockDimZ: 1,
            sharedMemBytes: count(extent.shared),
            hStream: self.stream.raw(),
            attrs: &mut early,
            numAttrs: u32::from(kernel.waits),
        };
        let mut pointers = arguments.pointers();
        // SAFETY: the caller guarantees that the arguments match the kernel's parameters. The
        // driver copies the arguments before it returns.
        let launched =
            unsafe { sys::cuLaunchKernelEx(&config, kernel.raw, pointers.as_mut_ptr(), std::ptr::null_mut()) };
        Ok(CudaDevice::check("cuLaunchKernelEx", launched)?)
    }
}

/// Returns the launch attribute for programmatic dependent launch: a kernel that waits on the
/// device may start before the preceding kernel has ended. This hides the launch latency.
fn early_start() -> sys::CUlaunchAttribute {
    // SAFETY: the struct consists of numbers, for which all-zero bytes are valid.
    let mut attribute: sys::CUlaunchAttribute = unsafe { MaybeUninit::zeroed().assume_init() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    attribute
}
