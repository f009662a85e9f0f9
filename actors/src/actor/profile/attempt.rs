//! An attempt at sizing: probe, stress, capture, measure, back, validate.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use bursar_budgets::{
    Bytes, Class, Device, FaultyDevice, Label, Lease, NextBackRefused, Owner, Priority, Request, Segment,
};
use bursar_model::{
    Depth, Envelope,
    worst_cases::{self, Footprint, Pass, WorstCase},
};

use super::{
    Evidence, FaultPlan, KvCapacity, KvChoice, LaneResources, Lanes, MemoryRequirements, Phase, ProfileError,
    ProfileRecord, Progress, ProgressSink, RecordedProfile, Records, StressLevel, WeightStore, shrunk,
};
use crate::{
    budget::Budget,
    capture::{self, CaptureError},
    compute::graph::GraphKey,
    compute::lane::{Answer, Job, Lane, StressJob},
    compute::memory::{
        EngineBuffers, EngineMemory, ExchangeMemory, GraphInputs, HostSlot, HostTier, KvMemory, SamplingMemory,
        StateMemory, VisionCache,
    },
    compute::{Executor, Models},
    metric,
    responder::Responder,
    token_interval::GpuLoad,
    tree,
};

/// Inputs of an attempt. Every clone can run the attempt.
#[derive(Clone)]
pub struct Attempt {
    /// The budget that grants the leases of this attempt.
    pub budget: Budget,
    /// The device on which leased memory is backed.
    pub device: Arc<dyn Device>,
    pub owner: Owner,
    /// The model's label in leases and metrics.
    pub label: Label,
    pub model: Models,
    /// The memory requirements according to the plan.
    pub needs: Arc<MemoryRequirements>,
    pub envelope: Envelope,
    /// The user's choice of the KV cache size.
    pub kv: KvChoice,
    /// The attempt's number, from 0.
    pub number: u32,
    /// Number of earlier attempts that were refused memory.
    pub shrinks: u32,
    /// KV cache size that the first measurement yielded, in blocks. `None` before that measurement.
    pub first: Option<usize>,
    /// Phases in which memory is refused on purpose.
    pub faults: FaultPlan,
    /// Determines how many layers the worst cases run through, before sizing and at the final size.
    pub stress_level: StressLevel,
    pub attempt_progress: AttemptProgress,
    /// The recorded profile, if one applies. Its KV cache size is backed if this start measures
    /// about the same size, and the worst cases run only at that size.
    pub warm: Option<Arc<RecordedProfile>>,
    /// KV blocks that the model had when it last served. If enough memory is free and the user
    /// fixed no size, the target is at least this size, even if other models have taken memory
    /// since then and the user's share of the remaining memory is now smaller.
    pub had: Option<usize>,
    /// Set if the model wakes up: the record of the sizes that were stressed before the model went
    /// to sleep. No worst case runs again, because the same process runs the same kernels on the
    /// same amount of memory. For the same reason, the model never gets more KV blocks than
    /// recorded.
    pub woken: Option<Arc<ProfileRecord>>,
    /// Destination of the profile, if the user chose a folder.
    pub records: Option<Records>,
    pub executor: Executor,
    /// Called for each step of the start.
    pub progress: ProgressSink,
    /// Keeps the lanes, so that they can be shut down if this attempt dies.
    pub weight_store: WeightStore,
    /// Load of the GPU that this model shares with other models.
    pub card: Arc<GpuLoad>,
}

/// The progress of an attempt. It stays readable after the attempt has succeeded, failed or died.
/// Clones share the same progress.
#[derive(Clone, Debug, Default)]
pub struct AttemptProgress(Arc<Mutex<AttemptState>>);

/// State that an attempt has reached.
#[derive(Clone, Debug, Default)]
pub struct AttemptState {
    /// The current phase. `None` before the first one.
    pub phase: Option<Phase>,
    /// KV cache size that the measurement of the available memory yielded, in blocks.
    pub measured: Option<usize>,
    /// KV blocks that the attempt settled on.
    pub target: Option<usize>,
    /// The evidence, if the attempt was refused memory.
    pub evidence: Option<Evidence>,
}

impl AttemptProgress {
    pub fn passed(&self) -> AttemptState {
        self.lock().clone()
    }

    pub fn enter(&self, phase: Phase) {
        self.lock().phase = Some(phase);
    }

    /// Records that the attempt settled on `target` blocks. `measured` is the number of blocks that
    /// the measurement of the available memory yielded, if there was one.
    pub fn settle(&self, measured: Option<usize>, target: usize) {
        let mut passed = self.lock();
        (passed.measured, passed.target) = (measured, Some(target));
    }

    /// Records the phase in which the attempt ended, with the evidence if memory was refused.
    pub fn end_in(&self, phase: Phase, evidence: Option<Evidence>) {
        let mut passed = self.lock();
        (passed.phase, passed.evidence) = (Some(phase), evidence);
    }

    fn lock(&self) -> MutexGuard<'_, AttemptState> {
        // Poisoning is ignored: a panic cannot leave a half-changed state, because each change is
        // one assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A sized model: its memory, the threads that work in this memory, and its permits.
pub struct Profiled {
    /// Record of the sizes that were stressed.
    pub record: ProfileRecord,
    pub memory: Arc<EngineMemory>,
    pub lanes: Lanes,
    /// Load that the model's threads put on the GPU. It is part of the sum over all models.
    pub card: Arc<GpuLoad>,
}

impl Attempt {
    /// Runs the attempt.
    ///
    /// # Errors
    /// If memory was refused, the evidence is in the attempt's [progress](Self::attempt_progress).
    /// Leases are returned to the budget when the values that hold them are dropped.
    pub async fn run(&self) -> Result<Profiled, ProfileError> {
        let outcome = self.run_phases().await;
        if let Err(error) = &outcome
            && error.is_out_of_memory()
        {
            let phase = self.attempt_progress.passed().phase.unwrap_or(Phase::Probe);
            let ledger = self.budget.measure_after_refusal().await.ok();
            self.attempt_progress.lock().evidence = Evidence::of(error, phase, ledger.as_ref());
        }
        outcome
    }

    async fn run_phases(&self) -> Result<Profiled, ProfileError> {
        self.enter(Phase::Probe);
        let faulty = FaultyDevice::over(self.device.clone());
        let memory = Arc::new(self.take_memory(&faulty).await?);
        let place = LaneResources {
            executor: self.executor.clone(),
            device: self.device.clone(),
            models: self.model.clone(),
            memory: memory.clone(),
        };
        let lanes = self.weight_store.start_lanes(None, place, self.owner.generation).await?.ok_or_else(ended)?;
        if self.stressed() > 0 {
            self.stress(&lanes).await?;
        }
        self.enter(Phase::Capture);
        self.capture(&lanes, &memory).await?;
        self.enter(Phase::Back);
        let blocks = self.settle(&memory, &faulty).await?;
        if let Some(slept) = &self.woken {
            let record = ProfileRecord { kv_blocks: blocks, ..slept.as_ref().clone() };
            return Ok(Profiled { record, memory, lanes, card: Arc::new(self.card.of_another_engine()) });
        }
        self.enter(Phase::Validate);
        self.refuse_a_job_if_due(&lanes.step, Phase::Validate);
        let peaks = self.validate(&lanes).await?;
        let cache_rows = memory.vision_cache.as_ref().map_or(0, VisionCache::rows);
        let costs = self.measure_costs(&lanes, blocks, cache_rows).await?;
        // This call makes the budget count memory that was allocated outside leases during
        // validation as overhead, before the budget grants any further request.
        self.budget.available_while_sizing().await?;
        let record = ProfileRecord {
            sequences: self.envelope.sequences,
            step_tokens: self.envelope.step_tokens,
            draft_tokens: self.envelope.draft_tokens,
            launch_patches: self.envelope.launch_patches,
            cache_rows,
            kv_blocks: blocks,
            peaks,
            costs,
        };
        self.write_down(&record).await;
        Ok(Profiled { record, memory, lanes, card: Arc::new(self.card.of_another_engine()) })
    }

    /// Records the measurements of this start for later starts, unless this start relied on a
    /// recorded profile. A failure to record them does not fail the start.
    async fn write_down(&self, record: &ProfileRecord) {
        let (None, Some(records)) = (&self.warm, self.records.clone()) else { return };
        let (record, shrinks) = (record.clone(), self.shrinks);
        let work = move || {
            records.keep(&record, shrinks);
            Ok(())
        };
        drop(self.on_a_thread(work).await);
    }

    fn enter(&self, phase: Phase) {
        self.attempt_progress.enter(phase);
        (self.progress)(Progress::Phase(phase));
    }

    /// Refuses the next backing of memory if the fault plan has a refusal in this phase.
    fn refusal(&self, faulty: &Arc<FaultyDevice>, phase: Phase) -> Option<NextBackRefused> {
        self.faults.is_due(phase, self.number).then(|| faulty.refuse_next_back())
    }

    fn refuse_a_job_if_due(&self, lane: &Lane, phase: Phase) {
        if self.faults.is_due(phase, self.number) {
            lane.submit(Job::Refuse);
        }
    }

    /// Takes all leases first and then backs the memory on a blocking thread, because calls to
    /// the device are slow.
    async fn take_memory(&self, faulty: &Arc<FaultyDevice>) -> Result<EngineMemory, ProfileError> {
        let (needs, workspaces) = (self.needs.clone(), "leasing workspaces");
        let step = self.lease(Class::StepWorkspace, needs.step_workspace, workspaces).await?;
        let sampling = self.lease(Class::StepWorkspace, needs.sampling_bytes(), workspaces).await?;
        let mut exchange = None;
        if let (Some(largest), Some(bytes)) = (needs.exchange, needs.exchange_bytes()) {
            exchange = Some((largest, bytes, self.lease(Class::StepWorkspace, bytes, workspaces).await?));
        }
        let mut graphs = None;
        if let Some(shape) = needs.graphs {
            let bytes = shape.bytes(self.device.page());
            graphs = Some((shape, bytes, self.lease(Class::Graphs, bytes, workspaces).await?));
        }
        let mut states = None;
        if let Some(slots) = needs.states {
            states = Some((slots, Arc::new(self.lease(Class::States, needs.state_bytes(), workspaces).await?)));
        }
        let mut vision = None;
        if needs.cache_rows > 0 {
            let workspace = self.lease(Class::VisionWorkspace, needs.vision_workspace, workspaces).await?;
            vision = Some((workspace, self.lease(Class::VisionCache, needs.vision_cache, workspaces).await?));
        }
        let [blocks, rows, of_states] = needs.host_tiers();
        let host = self.lease_host(blocks).await?;
        let host_rows = self.lease_host(rows).await?;
        let host_states = self.lease_host(of_states).await?;
        let probe = Arc::new(self.lease(Class::Kv, needs.probe(), PROBE).await?);
        let (refusal, row_width) = (self.refusal(faulty, Phase::Probe), self.model.config().embedding_layout().width());
        let activation = self.executor.target().activation();
        // Without faults to inject, memory is backed on the device itself, not through
        // `FaultyDevice`.
        let device = if self.faults.is_empty() { self.device.clone() } else { faulty.clone() };
        self.on_a_thread(move || {
            let _refusal = refusal;
            let step_workspace = Arc::new(backed_segment(&device, needs.step_workspace, step)?);
            let sampling =
                SamplingMemory::over(backed_segment(&device, needs.sampling_bytes(), sampling)?, needs.sampling);
            let exchange = match exchange {
                Some((largest, bytes, lease)) => {
                    let memory = ExchangeMemory::over(backed_segment(&device, bytes, lease)?, largest);
                    let class = Some(Box::new(Class::StepWorkspace));
                    Some(memory.map_err(|source| ProfileError::Device { doing: workspaces, class, source })?)
                }
                None => None,
            };
            let graphs = match graphs {
                Some((shape, bytes, lease)) => Some(GraphInputs::over(backed_segment(&device, bytes, lease)?, shape)),
                None => None,
            };
            let (mut vision_workspace, mut vision_cache) = (None, None);
            if let Some((workspace, cache)) = vision {
                let launches = backed_segment(&device, needs.vision_workspace, workspace)?;
                // This rank encodes rows into this workspace, and other ranks copy the rows from
                // there.
                launches.open_to_ranks().map_err(|source| {
                    let class = Some(Box::new(Class::VisionWorkspace));
                    ProfileError::Device { doing: workspaces, class, source }
                })?;
                vision_workspace = Some(Arc::new(launches));
                let segment = backed_segment(&device, needs.vision_cache, cache)?;
                vision_cache = Some(VisionCache::over(segment, row_width, activation));
            }
            let kv = backed_probe(&device, &needs, probe)?;
            let states = match states {
                Some((slots, lease)) => {
                    let memory = StateMemory::back(&device, slots.shape, slots.slots(), lease);
                    let class = Some(Box::new(Class::States));
                    Some(memory.map_err(|source| ProfileError::Device { doing: workspaces, class, source })?)
                }
                None => None,
            };
            let take = |tier: Option<(HostSlot, usize, Lease)>| {
                let taken = tier.map(|(slot, slots, lease)| HostTier::take(&device, slot, slots, lease)).transpose();
                let class = || Some(Box::new(Class::HostKv));
                taken.map_err(|source| ProfileError::Device { doing: HOST_KV, class: class(), source })
            };
            let (host_kv, host_pictures, host_states) = (take(host)?, take(host_rows)?, take(host_states)?);
            Ok(EngineMemory::new(EngineBuffers {
                step_workspace,
                sampling,
                vision_workspace,
                vision_cache,
                kv,
                states,
                host_kv,
                host_states,
                host_pictures,
                graphs,
                exchange,
            }))
        })
        .await
    }

    /// Runs `work` with [`WeightStore::on_a_thread`]. Returns an error if the attempt has already
    /// ended.
    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ProfileError> + Send + 'static,
    ) -> Result<T, ProfileError> {
        self.weight_store.on_a_thread(self.owner.generation, work).await?.ok_or_else(ended)
    }

    async fn lease(&self, class: Class, bytes: Bytes, doing: &'static str) -> Result<Lease, ProfileError> {
        let request =
            Request::new(self.owner.clone(), class.clone(), self.label.clone(), bytes).priority(Priority::Startup);
        let asked = self.budget.ask(tree::LEASE_FOR_PROFILE, request, false).await;
        asked.map_err(|source| ProfileError::Lease { doing, class: Some(Box::new(class)), source })
    }

    /// Leases the memory of a host tier, unless it has no slots.
    async fn lease_host(&self, tier: (HostSlot, usize)) -> Result<Option<(HostSlot, usize, Lease)>, ProfileError> {
        let (slot, slots) = tier;
        if slots == 0 {
            return Ok(None);
        }
        let lease = self.lease(Class::HostKv, self.needs.host_tier_bytes(tier), HOST_KV).await?;
        Ok(Some((slot, slots, lease)))
    }

    async fn stress(&self, lanes: &Lanes) -> Result<(), ProfileError> {
        for (done, worst_case) in self.needs.worst_cases.iter().enumerate() {
            self.run_worst_case(lanes, worst_case, false, done).await?;
        }
        Ok(())
    }

    /// Captures decode steps in every size and leases the memory that the captures took. Only then
    /// is the memory left for the KV cache known.
    async fn capture(&self, lanes: &Lanes, memory: &EngineMemory) -> Result<(), ProfileError> {
        self.refuse_a_job_if_due(&lanes.step, Phase::Capture);
        let Some(inputs) = &memory.graphs else {
            // A device without graphs captures nothing. If the fault plan has a refusal in this
            // phase, one step is captured anyway, so that the refusal takes effect.
            return if self.faults.is_due(Phase::Capture, self.number) {
                Ok(capture::capture_one(&lanes.step, GraphKey::decode(1), tree::CAPTURE).await.map(drop)?)
            } else {
                Ok(())
            };
        };
        self.report(CAPTURING, self.stressed());
        let taken = capture::capture(&lanes.step, inputs.shape(), tree::CAPTURE, inputs.captured()).await?;
        if !taken.is_zero() {
            inputs.pay(self.lease(Class::Graphs, taken, CAPTURING).await?);
        }
        Ok(())
    }

    /// Measures the remaining memory, leases it for the KV cache and backs it.
    async fn settle(&self, memory: &Arc<EngineMemory>, faulty: &Arc<FaultyDevice>) -> Result<usize, ProfileError> {
        let (doing, class) = (SETTLING, Some(Box::new(Class::Kv)));
        self.report(doing, self.stressed());
        let (shape, page) = (self.needs.kv_shape, self.device.page());
        let capacity = self.kv_capacity(memory.kv.lease().bytes()).await?;
        let sizing = self.kv.sizing(&capacity, shape, page).blocks(shape, page);
        let all = KvMemory::blocks_in(shape, capacity.available + capacity.probe, page);
        let measured = match self.had.filter(|_| !self.kv.is_pinned()) {
            Some(had) => sizing.max(had.min(all)),
            None => sizing,
        };
        // If other processes have taken memory since the first attempt, the target shrinks. If they
        // have freed memory since, the target does not grow, because a larger size was not
        // stressed.
        let shrinks = self.warm.as_ref().map_or(self.shrinks, |written| written.shrinks);
        let found = if self.kv.is_pinned() {
            measured
        } else {
            shrunk(self.first.map_or(measured, |first| first.min(measured)), shrinks)
        };
        let found = self.woken.as_ref().map_or(found, |slept| slept.kv_blocks.min(found));
        let blocks = self.written_blocks(found)?.unwrap_or(found);
        if let Some(tokens) = self.needs.too_few_tokens(blocks, &self.envelope) {
            return Err(ProfileError::TooSmall { tokens, context_tokens: self.envelope.context_tokens });
        }
        // The probe is backed already, so the cache is never smaller than the probe.
        let blocks = blocks.max(self.needs.probe_blocks);
        // For later attempts, the size of a warm attempt counts as the first target.
        let first = if self.warm.is_some() { blocks } else { measured };
        self.attempt_progress.settle(Some(first), blocks);
        let bytes = KvMemory::bytes(shape, blocks, page);
        let resized = self.budget.resize(tree::LEASE_FOR_PROFILE, memory.kv.lease(), bytes).await;
        resized.map_err(|source| ProfileError::Lease { doing, class: class.clone(), source })?;
        let (memory, refusal) = (memory.clone(), self.refusal(faulty, Phase::Back));
        self.on_a_thread(move || {
            let _refusal = refusal;
            memory.kv.grow_to(blocks).map_err(|source| ProfileError::Device { doing, class, source })?;
            Ok(blocks)
        })
        .await
    }

    /// Returns the recorded size if this attempt uses a recorded profile. Returns an error if the
    /// size `found` by this start differs much from the recorded size. A recorded size that is
    /// slightly too large is safe, because its lease is refused if memory is short. A recorded size
    /// that is much too small is rejected, because memory may have been freed since.
    fn written_blocks(&self, found: usize) -> Result<Option<usize>, ProfileError> {
        let Some(written) = &self.warm else { return Ok(None) };
        match written.differs_from(found.max(self.needs.probe_blocks)) {
            Some(difference) => Err(ProfileError::RecordedProfileDiffers(difference)),
            None => Ok(Some(written.kv_blocks)),
        }
    }

    /// Returns the memory that is available for the KV cache, and separately the `probe` bytes that
    /// the cache already has.
    async fn kv_capacity(&self, probe: Bytes) -> Result<KvCapacity, ProfileError> {
        let available = self.budget.available_while_sizing().await?;
        let ledger = self.budget.snapshot_as(tree::SNAPSHOT_FOR_PROFILE).await?;
        let outside_pool = (ledger.overhead + ledger.granted).saturating_sub(probe);
        Ok(KvCapacity { total: ledger.total, outside_pool, available, probe, is_host: self.device.is_host_memory() })
    }

    /// Runs the worst cases at the final size, on both lanes at once. Returns the name and the peak
    /// workspace of each worst case, in the order of the plan.
    async fn validate(&self, lanes: &Lanes) -> Result<Vec<(&'static str, Bytes)>, ProfileError> {
        let before = self.stressed() + 1;
        self.report("validating at the final size", before);
        let passed = AtomicUsize::new(0);
        let all_of = async |is_step: bool| {
            let mut peaks = Vec::new();
            for (place, worst_case) in self.needs.worst_cases.iter().enumerate() {
                if matches!(worst_case.0.pass, Pass::Step(_)) == is_step {
                    let done = before + passed.load(Relaxed);
                    peaks.push((place, worst_case.0.name, self.run_worst_case(lanes, worst_case, true, done).await?));
                    passed.fetch_add(1, Relaxed);
                }
            }
            Ok::<_, ProfileError>(peaks)
        };
        let (steps, launches) = tokio::try_join!(all_of(true), all_of(false))?;
        let mut peaks = [steps, launches].concat();
        peaks.sort_by_key(|(place, ..)| *place);
        Ok(peaks.into_iter().map(|(_, worst_case, peak)| (worst_case, peak)).collect())
    }

    /// Runs a worst case and returns its workspace peak, which must equal the plan to the byte.
    async fn run_worst_case(
        &self,
        lanes: &Lanes,
        (worst_case, planned): &(Arc<WorstCase>, Footprint),
        is_final: bool,
        done: usize,
    ) -> Result<Bytes, ProfileError> {
        let of_worst_case = |source| ProfileError::Stress { worst_case: worst_case.name, source };
        let proof = || worst_cases::proof(&self.model, self.executor.target(), &worst_case.pass);
        let depth = self.stress_level.depth(is_final, proof).map_err(|error| of_worst_case(error.into()))?;
        self.report_at(worst_case.name, depth, done);
        let (reply, answer) = Responder::new();
        let job =
            StressJob { worst_case: worst_case.clone(), depth, answer: Answer::to(|outcome| reply.answer(outcome)) };
        self.lane(lanes, worst_case).submit(Job::Stress(Box::new(job)));
        let outcome = tree::STRESS.wait(answer).await?;
        let measured = outcome.map_err(of_worst_case)?.workspace;
        let class = match &worst_case.pass {
            Pass::Step(_) => Class::StepWorkspace,
            Pass::Encode(_) => Class::VisionWorkspace,
        };
        let difference = measured.0 as f64 - planned.workspace.0 as f64;
        metric::PLAN_ERROR_BYTES.set(&(self.label.clone(), class), difference);
        if measured == planned.workspace {
            return Ok(measured);
        }
        Err(ProfileError::PlanDiffers { worst_case: worst_case.name, planned: planned.workspace, measured })
    }

    fn lane<'l>(&self, lanes: &'l Lanes, worst_case: &WorstCase) -> &'l Lane {
        match &worst_case.pass {
            Pass::Step(_) => &lanes.step,
            Pass::Encode(_) => lanes.vision.as_ref().expect("a model with encoder launches has a lane for them"),
        }
    }

    /// Number of worst cases that run before sizing.
    pub(super) fn stressed(&self) -> usize {
        if self.warm.is_none() && self.woken.is_none() && self.stress_level.runs_before_sizing() {
            self.needs.worst_cases.len()
        } else {
            0
        }
    }

    pub(super) fn report(&self, what: &'static str, done: usize) {
        self.report_at(what, Depth::Whole, done);
    }

    fn report_at(&self, what: &'static str, depth: Depth, done: usize) {
        // Progress is counted in units: one for each worst case before sizing, one for backing the
        // KV cache, and one for each worst case at the final size.
        let total = self.stressed() + 1 + self.needs.worst_cases.len();
        (self.progress)(Progress::Profiling { what, depth, done, total });
    }
}

const CAPTURING: &str = "capturing decode steps as graphs";

impl From<CaptureError> for ProfileError {
    fn from(error: CaptureError) -> Self {
        match error {
            CaptureError::Refused { source, .. } => ProfileError::Stress { worst_case: CAPTURING, source },
            CaptureError::Unanswered(error) => error.into(),
        }
    }
}

fn ended() -> ProfileError {
    ProfileError::Died { reason: "its engine has ended".to_owned() }
}

const PROBE: &str = "backing the probe";

const HOST_KV: &str = "taking host memory for keys, values and pictures";

const SETTLING: &str = "backing the keys and values";

fn backed_segment(device: &Arc<dyn Device>, bytes: Bytes, lease: Lease) -> Result<Segment, ProfileError> {
    let class = Some(Box::new(lease.holding().class));
    let device_error = |source| ProfileError::Device { doing: "backing workspaces", class: class.clone(), source };
    let segment = Segment::reserve(device.clone(), bytes, lease).map_err(device_error)?;
    segment.back_to(bytes).map_err(device_error)?;
    Ok(segment)
}

/// Reserves addresses for a KV cache as large as the device's whole memory, and backs the probe.
fn backed_probe(
    device: &Arc<dyn Device>,
    needs: &MemoryRequirements,
    lease: Arc<Lease>,
) -> Result<KvMemory, ProfileError> {
    let device_error = |source| ProfileError::Device { doing: PROBE, class: Some(Box::new(Class::Kv)), source };
    let shape = needs.kv_shape;
    let total = device.memory().map_err(device_error)?.total;
    let blocks_max = (total / shape.layers as u64 / shape.block_bytes()) as usize;
    let kv = KvMemory::reserve(device, shape, blocks_max.max(needs.probe_blocks), lease).map_err(device_error)?;
    kv.grow_to(needs.probe_blocks).map_err(device_error)?;
    Ok(kv)
}
