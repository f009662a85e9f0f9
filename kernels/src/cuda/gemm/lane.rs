//! The state that one lane keeps for its GEMMs.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

use bursar_budgets::Overhead;

use super::{
    super::{
        error::OpenError,
        kernels::CudaKernels,
        stream::{Clock, Stream},
    },
    blas::LaneGemms,
    counters::Counters,
    plan::GemmBackend,
    recorded::RecordedGemms,
    table::Gpu,
};

/// The state that one lane keeps for its GEMMs.
pub(in super::super) struct GemmLane {
    /// `None` if the device has neither the small-m kernel nor the streaming kernel for 4-bit
    /// integers, or if other lanes use all sets of counters.
    pub(super) counters: Option<Counters>,
    pub(super) gpu: Gpu,
    pub(in super::super) backend: GemmBackend,
    pub(super) library: RefCell<LaneGemms>,
    /// `true` while autotuning is on. The results of passes are then discarded, so GEMMs may be
    /// measured.
    pub(super) autotunes: Cell<bool>,
    pub(super) recorded: RefCell<RecordedGemms>,
    pub(super) clock: Clock,
}

impl GemmLane {
    pub(in super::super) fn new(kernels: &CudaKernels, stream: &Arc<Overhead<Stream>>) -> Result<Self, OpenError> {
        let counters = Counters::take(&kernels.functions, &kernels.counter_sets, stream)?;
        let entry_points = kernels.functions.entry_points();
        let gpu = Gpu {
            is_hopper: entry_points.hopper.is_some(),
            has_counters: counters.is_some(),
            has_tiled: entry_points.gemm_tiled.is_some(),
            has_int4: entry_points.int4.is_some(),
            sms: kernels.target.sms,
            library_version: kernels.blas.version(),
        };
        Ok(GemmLane {
            counters,
            gpu,
            backend: GemmBackend::default(),
            library: RefCell::new(LaneGemms::new(&kernels.device)?),
            autotunes: Cell::new(false),
            recorded: RefCell::default(),
            clock: Clock::new(&kernels.device)?,
        })
    }

    /// Starts or ends autotuning.
    pub(in super::super) fn autotune(&self, on: bool) {
        self.autotunes.set(on);
        self.library.borrow_mut().forget_refusals();
        // The recorded weight addresses are valid only while autotuning is on.
        self.recorded.take();
    }

    /// Returns the number of GEMMs outside autotuning that used the library's first proposal.
    pub(in super::super) fn guesses(&self) -> usize {
        self.library.borrow().guesses()
    }
}
