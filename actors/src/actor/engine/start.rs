//! The start of a model up to its loaded weights, before sizing.

use std::{
    num::NonZeroUsize,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use bursar_budgets::{Bytes, Class, FaultyDevice, Gate, Owner, Priority, Request, Segment};
use bursar_kernels::{OpenError, Target};
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource},
    processor::ImageProcessor,
};

use super::{
    EffectiveLimits, EngineArguments, LoadOptions, ModelContext, Progress, ProgressSink, Question, Records, Shortfall,
    StartError, fetch::fetch, records::RecordQuery, retained::Opened,
};
use crate::{
    budget::LeaseError,
    compute::{Executor, Models},
    profile::{MemoryRequirements, MemoryState, Notice, Phase, ProfileError, ProfileRecord},
    sleep::WakeState,
    tree,
};

/// The maximum number of times that a start asks other models for memory. Asking once may not be
/// enough, because another start or a waiting lease of user code may take the memory first.
const RECLAIM_TRIES: usize = 3;

/// The result of planning, before any memory is taken, without the worst cases.
#[derive(Clone)]
pub struct StartPlan {
    pub(super) inputs: Arc<EffectiveLimits>,
    /// The model without weights, for planning again with other limits.
    pub(super) unloaded: Arc<Model>,
    pub(super) pictures: Option<Arc<ImageProcessor>>,
    pub(super) target: Target,
    /// KV cache blocks that should fit.
    pub(super) expected_blocks: usize,
    /// The recorded profiles of earlier starts. `None` if the user chose no folder.
    pub(super) records: Option<Records>,
    /// The record of the stress-tested sizes from before the model was put to sleep.
    pub(super) woken: Option<Arc<ProfileRecord>>,
}

/// The loaded model, before sizing.
#[derive(Clone)]
pub struct Loaded {
    pub(super) model: Models,
    pub(super) executor: Executor,
    pub(super) context: Arc<ModelContext>,
}

pub struct LoadedModel {
    pub(super) plan: StartPlan,
    /// The worst cases of the plan.
    pub(super) needs: Arc<MemoryRequirements>,
    pub(super) loaded: Loaded,
}

/// A failure to load a model, with the plan that the next attempt can reuse.
pub struct LoadFailed {
    /// The plan, if planning succeeded.
    pub(super) plan: Option<StartPlan>,
    pub(super) error: LoadError,
}

#[derive(Debug)]
pub(super) enum LoadError {
    /// The device or the budget refused memory for the weights. A later attempt may succeed, in
    /// particular if that attempt needs less memory in addition to the weights.
    Refused(ProfileError),
    /// A failure that a further attempt would not avoid.
    Start(StartError),
}

impl<E: Into<StartError>> From<E> for LoadError {
    fn from(error: E) -> Self {
        let (class, doing) = (Some(Box::new(Class::Weights)), "loading the weights");
        match error.into() {
            StartError::Lease(source @ LeaseError::Refused(_)) => {
                LoadError::Refused(ProfileError::Lease { doing, class, source })
            }
            StartError::Device(source) if source.is_refused() => {
                LoadError::Refused(ProfileError::Device { doing, class, source })
            }
            StartError::Backend(OpenError::Device(source)) if source.is_refused() => {
                LoadError::Refused(ProfileError::Device { doing: "loading kernels", class: None, source })
            }
            error => LoadError::Start(error),
        }
    }
}

impl EngineArguments {
    /// Plans and loads the weights, in attempt number `attempt`.
    pub(super) async fn plan_and_load(self, attempt: u32) -> Result<LoadedModel, LoadFailed> {
        let failed = |error| LoadFailed { plan: None, error };
        let (executor, checkpoint, plan, needs) = self.fetch_and_plan().await.map_err(failed)?;
        // Loading and parsing run in parallel, because copying weights needs the bus and parsing
        // the tokenizer needs a CPU core.
        let is_wanted = Arc::new(AtomicBool::new(true));
        let opened = checkpoint.clone();
        let context = async {
            let context = match self.opened() {
                Some(Opened { context, .. }) => Ok(context),
                None => self.context(opened, &plan).await,
            };
            is_wanted.store(context.is_ok(), Relaxed);
            context
        };
        let model = self.load_or_find(&executor, checkpoint.clone(), needs.clone(), attempt, is_wanted.clone());
        match tokio::try_join!(context, model) {
            Ok((context, model)) => {
                self.kept.keep_opened(Opened { checkpoint, context: context.clone() });
                Ok(LoadedModel { plan, needs, loaded: Loaded { model, executor, context } })
            }
            Err(error) => Err(LoadFailed { plan: Some(plan), error }),
        }
    }

    /// Creates the model's host side, which includes parsing the tokenizer.
    async fn context(&self, checkpoint: Arc<Checkpoint>, plan: &StartPlan) -> Result<Arc<ModelContext>, LoadError> {
        let StartPlan { inputs, unloaded, .. } = plan.clone();
        let (name, options) = (self.label.to_string(), self.options.clone());
        let parse = move || {
            let family = unloaded.config().clone();
            let prompts = match &options.chat_template {
                Some(template) => checkpoint.prompts_with(template)?,
                None => checkpoint.prompts()?,
            };
            family.check_vocabulary(prompts.tokenizer())?;
            let prompts = prompts.with_placeholders(family.placeholder_texts());
            Ok(Arc::new(ModelContext::new(name, &checkpoint, family, &options, &inputs, prompts)))
        };
        Ok(off_actor(parse).await?)
    }

    async fn fetch_and_plan(
        &self,
    ) -> Result<(Executor, Arc<Checkpoint>, StartPlan, Arc<MemoryRequirements>), LoadError> {
        self.check_ranks()?;
        self.check_cache_type().await?;
        if let (Some(Opened { checkpoint, .. }), Some(executor)) = (self.opened(), self.weight_store.executor()) {
            self.open_gate().await?;
            let (checkpoint, plan, needs) = self.plan(move |_| Ok(checkpoint), &executor).await?;
            return Ok((executor, checkpoint, plan, needs));
        }
        // Files are fetched before the gate opens, because memory that other processes take is not
        // counted while the gate is open.
        let files = fetch(self.source.clone(), self.progress.clone()).await?;
        let draft_files = match self.options.draft_model() {
            Some(origin) => Some(fetch(origin, self.progress.clone()).await?),
            None => None,
        };
        self.open_gate().await?;
        let (opened, LoadOptions { quantization, tokenizer, .. }) = (files.clone(), self.options.clone());
        let open = off_actor(move || {
            let checkpoint = Checkpoint::open_with_tokenizer(opened, tokenizer)?.with_quantization(quantization);
            Ok(match draft_files {
                Some(files) => checkpoint.with_draft_model(&files)?,
                None => checkpoint,
            })
        });
        let (executor, checkpoint) = tokio::try_join!(self.executor(&files), open)?;
        let options = self.options.clone();
        let applied = move |target: &Target| Ok(Arc::new(options.apply_on(target, checkpoint)?));
        let (checkpoint, plan, needs) = self.plan(applied, &executor).await?;
        Ok((executor, checkpoint, plan, needs))
    }

    /// The checkpoint that was open before the model was put to sleep. `None` if there is no copy
    /// of the weights in host memory.
    fn opened(&self) -> Option<Opened> {
        self.kept.opened().filter(|_| self.weight_store.has_copy())
    }

    async fn open_gate(&self) -> Result<(), StartError> {
        (self.progress)(Progress::Planning);
        // An earlier engine of this model may have left the gate frozen. If the gate is already
        // open, it stays open.
        drop(self.budget.move_gate(self.label.clone(), Gate::Open).await?);
        Ok(())
    }

    /// Fails if the device has fewer ranks than the user asks for.
    fn check_ranks(&self) -> Result<(), StartError> {
        let has = self.device.ranks().len().max(1);
        match self.options.ranks.map(NonZeroUsize::get) {
            Some(wanted) if wanted > has => Err(StartError::TooFewDevices { wanted, has }),
            _ => Ok(()),
        }
    }

    /// Fails if the device has no kernels for the type of the KV cache, before any file is fetched.
    async fn check_cache_type(&self) -> Result<(), StartError> {
        let (device, kv_cache_dtype, threads) =
            (self.device.clone(), self.options.kv_cache_dtype, self.options.threads);
        off_actor(move || Ok(kv_cache_dtype.check_served(&Executor::best_target(&device, threads)?)?)).await
    }

    async fn load_or_find(
        &self,
        executor: &Executor,
        checkpoint: Arc<Checkpoint>,
        needs: Arc<MemoryRequirements>,
        attempt: u32,
        is_wanted: Arc<AtomicBool>,
    ) -> Result<Models, LoadError> {
        // Weights that are still on the device are not loaded again, because a restart must not
        // reload weights (rule 10).
        if let Some(model) = self.weight_store.model() {
            return Ok(model);
        }
        if self.weight_store.is_away() {
            return Ok(self.bring_back(attempt).await?);
        }
        if let Some(unfinished) = self.weight_store.take_unfinished() {
            self.budget.clear(unfinished).await?;
        }
        Ok(self.load(executor, checkpoint, needs, attempt, is_wanted).await?)
    }

    /// Copies the weights of a sleeping model back to their addresses on the device.
    async fn bring_back(&self, attempt: u32) -> Result<Models, StartError> {
        (self.progress)(Progress::Phase(Phase::Load));
        let died = || StartError::Died("its engine has ended".to_owned());
        let weight_store = self.weight_store.clone();
        let segment = weight_store.segment().ok_or_else(died)?;
        let bytes = weight_store.bytes_away().ok_or_else(died)?;
        // If this start is ended, the end waits until this guard is dropped.
        let loading = weight_store.begin(self.owner(attempt).generation).ok_or_else(died)?;
        self.budget.resize(tree::LEASE_FOR_ENGINE, segment.lease(), bytes).await?;
        off_actor(move || {
            let _loading = loading;
            weight_store.bring_back()?;
            weight_store.model().ok_or_else(died)
        })
        .await
    }

    /// Returns the executor, which is loaded once per model, even if engines restart.
    async fn executor(&self, files: &CheckpointSource) -> Result<Executor, StartError> {
        if let Some(executor) = self.weight_store.executor() {
            return Ok(executor);
        }
        let (device, options, files) = (self.device.clone(), self.options.clone(), files.clone());
        let LoadOptions { threads, blas, dtype, disable_custom_all_reduce, .. } = options;
        let load = move || {
            let target = dtype.on(Executor::best_target(&device, threads)?, files.stored_type()?)?;
            Ok(Executor::on(&device, target, &blas, disable_custom_all_reduce)?)
        };
        let executor = off_actor(load).await?;
        self.weight_store.keep_executor(executor.clone());
        Ok(executor)
    }

    /// Plans the start. If too little memory is free for the plan, makes other models give up
    /// memory and plans again.
    async fn plan(
        &self,
        checkpoint: impl FnOnce(&Target) -> Result<Arc<Checkpoint>, StartError> + Send + 'static,
        executor: &Executor,
    ) -> Result<(Arc<Checkpoint>, StartPlan, Arc<MemoryRequirements>), StartError> {
        let target = executor.target();
        let checkpoint = off_actor(move || checkpoint(&target)).await?;
        for _ in 0..RECLAIM_TRIES {
            match self.plan_as_it_is(checkpoint.clone(), executor).await {
                Err(StartError::DoesNotFit(unfit)) if self.is_given_memory(&unfit.shortfall).await? => {}
                planned => return planned.map(|(plan, needs)| (checkpoint, plan, needs)),
            }
        }
        let (plan, needs) = self.plan_as_it_is(checkpoint.clone(), executor).await?;
        Ok((checkpoint, plan, needs))
    }

    /// Makes other models give up the missing memory (ADR 5). A lease of all memory that the start
    /// needs waits in the queue like a lease of user code, but with a higher priority. That lease
    /// is dropped when the gate is open again, and the start then requests its actual leases.
    /// Returns `false` if the other models cannot give up enough memory, or do not give it up in
    /// time.
    async fn is_given_memory(&self, shortfall: &Shortfall) -> Result<bool, StartError> {
        let Shortfall::Memory { needed, short_by, .. } = *shortfall else { return Ok(false) };
        if short_by > self.budget.reclaimable_bytes() {
            return Ok(false);
        }
        // The gate is frozen during the wait, because while a gate is open, memory that other
        // processes take is not counted, and no lease grows.
        drop(self.budget.move_gate(self.label.clone(), Gate::Frozen).await?);
        let owner = Owner::new(format!("{} start", self.label), self.generation);
        let request = Request::new(owner, Class::external("start"), self.label.clone(), needed);
        let given = self.budget.ask(tree::MEMORY_FOR_ENGINE, request.priority(Priority::Serving), true).await;
        drop(self.budget.move_gate(self.label.clone(), Gate::Open).await?);
        Ok(given.is_ok())
    }

    async fn plan_as_it_is(
        &self,
        checkpoint: Arc<Checkpoint>,
        executor: &Executor,
    ) -> Result<(StartPlan, Arc<MemoryRequirements>), StartError> {
        let mut options = self.options.clone();
        if self.kept.record().is_some() {
            // The model gets the KV cache size that it had before, not a fraction of the memory
            // that is left now.
            options = options.with_all_memory();
        }
        let (target, page) = (executor.target(), self.device.page());
        // Measures the memory of other processes again.
        self.budget.available().await?;
        let is_loaded = self.weight_store.model().is_some();
        let woken = self.kept.record().filter(|_| self.wakefulness.state() == WakeState::Waking);
        let ledger = self.budget.snapshot_as(tree::LEDGER_FOR_ENGINE).await?;
        let (is_host, ranks) = (self.device.is_host_memory(), self.device.ranks().len().max(1));
        let (search, executor, progress) = (self.search(&ledger), executor.clone(), self.progress.clone());
        off_actor(move || {
            let model = Model::plan_heaviest(&checkpoint, &target, ranks)?;
            let pictures = checkpoint.image_processor.clone();
            // If the weights are already loaded, this model has already leased their bytes.
            let leased = if is_loaded { model.weight_bytes().round_up(page) } else { Bytes::ZERO };
            let place = MemoryState::of_ledger(&ledger, leased, page, is_host);
            let question = Question {
                model: &model,
                pictures: pictures.as_ref(),
                checkpoint: Some(&checkpoint),
                target,
                options: &options,
                place,
            };
            let (inputs, needs) = question.needs()?;
            let available = ledger.host_total.saturating_sub(ledger.host_granted);
            if needs.host_bytes() > available {
                return Err(StartError::HostMemory { needed: needs.host_bytes(), available });
            }
            let expected_blocks = if is_loaded {
                // If memory has become short since the weights were loaded, the sizing attempts
                // report how much is missing.
                question.kv_blocks(&inputs, &needs).unwrap_or(needs.probe_blocks)
            } else {
                question.settled(&inputs, &needs)?
            };
            notice(&inputs, &progress);
            let sought =
                RecordQuery { checkpoint: &checkpoint, envelope: &inputs.envelope, executor: &executor, needs: &needs };
            let records = search.map(|search| search.look_up(&sought)).transpose()?;
            let (unloaded, pictures) = (Arc::new(model), pictures.map(Arc::new));
            let inputs = Arc::new(inputs);
            let plan = StartPlan { inputs, unloaded, pictures, target, expected_blocks, records, woken };
            Ok((plan, Arc::new(needs)))
        })
        .await
    }

    async fn load(
        &self,
        executor: &Executor,
        checkpoint: Arc<Checkpoint>,
        needs: Arc<MemoryRequirements>,
        attempt: u32,
        is_wanted: Arc<AtomicBool>,
    ) -> Result<Models, StartError> {
        (self.progress)(Progress::Phase(Phase::Load));
        let executor = executor.clone();
        let EngineArguments { label, budget, device, progress, weight_store, .. } = self.clone();
        // Weights outlive engines, so they have a separate owner. Weights of a refused attempt were
        // already cleared by the caller.
        let generation = self.owner(attempt).generation;
        let owner = Owner::new(format!("{label} weights"), generation);
        let is_refused = self.options.faults.is_due(Phase::Load, attempt);
        let loading = weight_store.begin_loading(generation, owner.clone());
        let loading = loading.ok_or_else(|| StartError::Died("its engine has ended".to_owned()))?;
        let request = Request::new(owner, Class::Weights, label, needs.weights).priority(Priority::Startup);
        let lease = budget.ask(tree::LEASE_FOR_ENGINE, request, false).await?;
        off_actor(move || {
            // If this start is ended, the end waits until this guard is dropped. The model is in
            // the store by then.
            let _loading = loading;
            let faulty = FaultyDevice::over(device.clone());
            let refusal = is_refused.then(|| faulty.refuse_next_back());
            let device = if is_refused { faulty } else { device };
            let segment = Segment::reserve(device, needs.weights, lease)?;
            segment.back_to(needs.weights)?;
            drop(refusal);
            let progress = |of: Option<(Bytes, Bytes)>| {
                of.into_iter().for_each(|(done, total)| progress(Progress::Loading { done, total }));
                if is_wanted.load(Relaxed) { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            let model = executor.load(&checkpoint, segment, progress)?;
            // The model is stored here and not by the waiting engine, because weights that were
            // loaded while the engine died are still valid.
            weight_store.keep_model(model.clone());
            Ok(model)
        })
        .await
    }
}

/// Reports to the progress sink which inputs were lowered although the user set no limit.
fn notice(EffectiveLimits { envelope, pictures, own_pixels }: &EffectiveLimits, progress: &ProgressSink) {
    let Some((pictures, from)) = pictures.as_ref().zip(*own_pixels) else { return };
    let (to, context_tokens) = (pictures.config().pixel_bounds.max, envelope.context_tokens);
    progress(Progress::Notice(Notice::PicturesLowered { from, to, context_tokens }));
}

/// Runs blocking work on a thread of tokio's blocking pool.
async fn off_actor<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StartError> + Send + 'static,
) -> Result<T, StartError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(died) => Err(StartError::Died(died.to_string())),
    }
}
