//! One attempt at sizing: probe, stress, measure, back, validate.

use std::sync::Arc;

use bursar_budgets::{Bytes, Class, Device, Label, Lease, Owner, Priority, Request, Segment};
use bursar_kernels::BLOCK_TOKENS;
use bursar_model::{
    Envelope, Model,
    corners::{Corner, Footprint, Pass},
};

use super::{KvChoice, KvRoom, Needs, ProfileError, ProfileRecord};
use crate::{
    budget::Budget,
    engine::{Lanes, LanesPlace, Processor, Progress, ProgressSink, Shelf},
    graph,
    lane::{Answer, Job, Lane, StressJob},
    memory::{DeskMemory, EngineMemory, EngineParts, GraphInputs, KvMemory, VisionCache},
    reply::Reply,
    tree,
};

/// Everything an attempt works with.
#[derive(Clone)]
pub struct Attempt {
    /// Where leases come from.
    pub budget: Budget,
    /// Where memory comes from.
    pub device: Arc<dyn Device>,
    /// As whom leases are asked for.
    pub owner: Owner,
    /// Of which model.
    pub label: Label,
    /// The loaded model.
    pub model: Arc<Model>,
    /// What the plan says.
    pub needs: Arc<Needs>,
    /// The limits that are stressed.
    pub envelope: Envelope,
    /// What the user has said of the cache's size.
    pub kv: KvChoice,
    /// Attempts before this one that were refused memory.
    pub shrinks: u32,
    /// What passes run on.
    pub processor: Processor,
    /// Who watches.
    pub progress: ProgressSink,
    /// Where the lanes are found if this attempt dies.
    pub shelf: Shelf,
}

/// A sized model: memory, threads that work in it, and what they may do at once.
pub struct Profiled {
    /// What was stressed.
    pub record: ProfileRecord,
    /// What is leased.
    pub memory: Arc<EngineMemory>,
    /// The threads.
    pub lanes: Lanes,
}

impl Attempt {
    /// Runs the attempt.
    ///
    /// # Errors
    /// With the evidence; everything that was leased goes back as what holds it is dropped.
    pub async fn run(&self) -> Result<Profiled, ProfileError> {
        let memory = Arc::new(self.take_memory().await?);
        let place = LanesPlace {
            processor: self.processor.clone(),
            device: self.device.clone(),
            model: self.model.clone(),
            memory: memory.clone(),
        };
        let lanes = Lanes::start(None, place, &self.shelf, self.owner.generation).await?.ok_or_else(ended)?;
        let peaks = self.stress(&lanes).await?;
        self.capture(&lanes, &memory).await?;
        let blocks = self.settle(&memory).await?;
        self.validate(&lanes).await?;
        let record = ProfileRecord {
            sequences: self.envelope.sequences,
            step_tokens: self.envelope.step_tokens,
            launch_patches: self.envelope.launch_patches,
            cache_rows: memory.vision_cache.as_ref().map_or(0, VisionCache::rows),
            kv_blocks: blocks,
            peaks,
        };
        Ok(Profiled { record, memory, lanes })
    }

    /// Leases first, then the device: it takes its time, so a thread of its own asks it.
    async fn take_memory(&self) -> Result<EngineMemory, ProfileError> {
        let (needs, workspaces) = (self.needs.clone(), "leasing workspaces");
        let step = self.lease(Class::StepWorkspace, needs.step_workspace, workspaces).await?;
        let desk = self.lease(Class::StepWorkspace, needs.desk_bytes(), workspaces).await?;
        let mut graphs = None;
        if let Some(shape) = needs.graphs {
            let bytes = shape.bytes(self.device.page());
            graphs = Some((shape, bytes, self.lease(Class::Graphs, bytes, workspaces).await?));
        }
        let mut vision = None;
        if needs.cache_rows > 0 {
            let workspace = self.lease(Class::VisionWorkspace, needs.vision_workspace, workspaces).await?;
            vision = Some((workspace, self.lease(Class::VisionCache, needs.vision_cache, workspaces).await?));
        }
        let probe = Arc::new(self.lease(Class::Kv, needs.probe(), PROBE).await?);
        let (device, hidden) = (self.device.clone(), self.model.config().decoder().hidden);
        self.on_a_thread(move || {
            let step_workspace = Arc::new(backed_segment(&device, needs.step_workspace, step)?);
            let desk = DeskMemory::over(backed_segment(&device, needs.desk_bytes(), desk)?, needs.desk);
            let graphs = match graphs {
                Some((shape, bytes, lease)) => Some(GraphInputs::over(backed_segment(&device, bytes, lease)?, shape)),
                None => None,
            };
            let (mut vision_workspace, mut vision_cache) = (None, None);
            if let Some((workspace, cache)) = vision {
                vision_workspace = Some(Arc::new(backed_segment(&device, needs.vision_workspace, workspace)?));
                let segment = backed_segment(&device, needs.vision_cache, cache)?;
                vision_cache = Some(VisionCache::over(segment, hidden, needs.kv_shape.dtype));
            }
            let kv = backed_probe(&device, &needs, probe)?;
            Ok(EngineMemory::new(EngineParts { step_workspace, desk, vision_workspace, vision_cache, kv, graphs }))
        })
        .await
    }

    /// As [`Shelf::on_a_thread`].
    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ProfileError> + Send + 'static,
    ) -> Result<T, ProfileError> {
        self.shelf.on_a_thread(self.owner.generation, work).await?.ok_or_else(ended)
    }

    async fn lease(&self, class: Class, bytes: Bytes, phase: &'static str) -> Result<Lease, ProfileError> {
        let request = Request::new(self.owner.clone(), class, self.label.clone(), bytes).priority(Priority::Startup);
        let asked = self.budget.ask(tree::LEASE_FOR_PROFILE, request, false).await;
        asked.map_err(|source| ProfileError::Lease { phase, source })
    }

    /// Every corner for real, one after the other.
    async fn stress(&self, lanes: &Lanes) -> Result<Vec<(&'static str, Bytes)>, ProfileError> {
        let mut peaks = Vec::new();
        for (done, (corner, planned)) in self.needs.corners.iter().enumerate() {
            self.report(corner.name, done);
            peaks.push((corner.name, self.run_corner(lanes, corner, planned).await?));
        }
        Ok(peaks)
    }

    /// Captures decoding in every size, and leases what that took: what is left for the cache is known only behind it.
    async fn capture(&self, lanes: &Lanes, memory: &EngineMemory) -> Result<(), ProfileError> {
        let Some(inputs) = &memory.graphs else { return Ok(()) };
        self.report(CAPTURING, self.needs.corners.len());
        let taken = graph::capture(&lanes.step, inputs.shape(), tree::CAPTURE, &graph::captured(&self.label)).await?;
        if !taken.is_zero() {
            inputs.pay(self.lease(Class::Graphs, taken, CAPTURING).await?);
        }
        Ok(())
    }

    /// Measures what is left, leases it, and backs it.
    async fn settle(&self, memory: &Arc<EngineMemory>) -> Result<usize, ProfileError> {
        let phase = SETTLING;
        self.report(phase, self.needs.corners.len());
        let (shape, page) = (self.needs.kv_shape, self.device.page());
        let room = self.room(memory.kv.lease().bytes()).await?;
        let blocks = self.kv.sizing(&room, self.shrinks, shape, page).blocks(shape, page);
        let context_tokens = self.envelope.context_tokens;
        if blocks * BLOCK_TOKENS < context_tokens {
            return Err(ProfileError::TooSmall { tokens: blocks * BLOCK_TOKENS, context_tokens });
        }
        // The probe stays as it is where the target is smaller: its blocks are backed already.
        let blocks = blocks.max(self.needs.probe_blocks);
        let bytes = KvMemory::bytes(shape, blocks, page);
        let resized = self.budget.resize(tree::LEASE_FOR_PROFILE, memory.kv.lease(), bytes).await;
        resized.map_err(|source| ProfileError::Lease { phase, source })?;
        let memory = memory.clone();
        self.on_a_thread(move || {
            memory.kv.grow_to(blocks).map_err(|source| ProfileError::Device { phase, source })?;
            Ok(blocks)
        })
        .await
    }

    /// What there is to be shared, beside what the cache holds already.
    async fn room(&self, probe: Bytes) -> Result<KvRoom, ProfileError> {
        let available = self.budget.available().await?;
        let ledger = self.budget.snapshot_as(tree::SNAPSHOT_FOR_PROFILE).await?;
        let beside = (ledger.overhead + ledger.granted).saturating_sub(probe);
        Ok(KvRoom { total: ledger.total, beside, available, probe, is_host: self.device.is_host_memory() })
    }

    /// The worst cases again at the final size, the lanes beside each other.
    async fn validate(&self, lanes: &Lanes) -> Result<(), ProfileError> {
        self.report("validating at the final size", self.needs.corners.len() + 1);
        let of_lane = |is_step: bool| {
            self.needs.corners.iter().filter(move |(corner, _)| matches!(corner.pass, Pass::Step(_)) == is_step)
        };
        let steps = async {
            for (corner, planned) in of_lane(true) {
                self.run_corner(lanes, corner, planned).await?;
            }
            Ok::<_, ProfileError>(())
        };
        let launches = async {
            for (corner, planned) in of_lane(false) {
                self.run_corner(lanes, corner, planned).await?;
            }
            Ok(())
        };
        tokio::try_join!(steps, launches)?;
        Ok(())
    }

    /// Runs a corner for real; it must take what the plan says, to the byte.
    async fn run_corner(
        &self,
        lanes: &Lanes,
        corner: &Arc<Corner>,
        planned: &Footprint,
    ) -> Result<Bytes, ProfileError> {
        let (reply, answer) = Reply::new();
        let job = StressJob { corner: corner.clone(), answer: Answer::to(|outcome| reply.answer(outcome)) };
        self.lane(lanes, corner).submit(Job::Stress(Box::new(job)));
        let outcome = tree::STRESS.wait(answer).await?;
        let measured = outcome.map_err(|source| ProfileError::Stress { corner: corner.name, source })?.workspace;
        if measured == planned.workspace {
            return Ok(measured);
        }
        Err(ProfileError::PlanDiffers { corner: corner.name, planned: planned.workspace, measured })
    }

    fn lane<'l>(&self, lanes: &'l Lanes, corner: &Corner) -> &'l Lane {
        match &corner.pass {
            Pass::Step(_) => &lanes.step,
            Pass::Encode(_) => lanes.vision.as_ref().expect("a model with launches has a lane for them"),
        }
    }

    fn report(&self, what: &'static str, done: usize) {
        // The corners, the backing, and the validation.
        (self.progress)(Progress::Profiling { what, done, total: self.needs.corners.len() + 2 });
    }
}

pub(super) const CAPTURING: &str = "capturing decode steps as graphs";

fn ended() -> ProfileError {
    ProfileError::Died { reason: "its engine has ended".to_owned() }
}

const PROBE: &str = "backing the probe";

const SETTLING: &str = "backing the keys and values";

fn backed_segment(device: &Arc<dyn Device>, bytes: Bytes, lease: Lease) -> Result<Segment, ProfileError> {
    let device_error = |source| ProfileError::Device { phase: "backing workspaces", source };
    let segment = Segment::reserve(device.clone(), bytes, lease).map_err(device_error)?;
    segment.back_to(bytes).map_err(device_error)?;
    Ok(segment)
}

/// Reserves addresses for all the device has, and backs the probe.
fn backed_probe(device: &Arc<dyn Device>, needs: &Needs, lease: Arc<Lease>) -> Result<KvMemory, ProfileError> {
    let device_error = |source| ProfileError::Device { phase: PROBE, source };
    let shape = needs.kv_shape;
    let total = device.memory().map_err(device_error)?.total;
    let blocks_max = (total.0 / shape.layers as u64 / shape.block_bytes().0) as usize;
    let kv = KvMemory::reserve(device, shape, blocks_max.max(needs.probe_blocks), lease).map_err(device_error)?;
    kv.grow_to(needs.probe_blocks).map_err(device_error)?;
    Ok(kv)
}
