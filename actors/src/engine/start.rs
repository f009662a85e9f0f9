//! The start of a model up to its loaded weights: what an engine does before it sizes.

use std::sync::Arc;

use bursar_budgets::{Class, Gate, Owner, Priority, Request, Segment};
use bursar_model::{Model, checkpoint::Checkpoint};

use super::{EngineArguments, Kit, Processor, Progress, StartError, fetch::fetch};
use crate::{
    profile::{ATTEMPTS_MAX, Needs},
    tree,
};

/// What is known before sizing.
#[derive(Clone)]
pub struct Planned {
    pub(super) kit: Arc<Kit>,
    /// Until READY: its corners hold blank pictures, which are large.
    pub(super) needs: Option<Arc<Needs>>,
    pub(super) model: Arc<Model>,
    pub(super) processor: Processor,
}

impl EngineArguments {
    /// The owner of an attempt, and so of everything that it leases and that serving then lives on.
    pub(super) fn owner(&self, attempt: u32) -> Owner {
        let generation = self.generation * u64::from(ATTEMPTS_MAX) + u64::from(attempt);
        Owner::new(format!("{} engine", self.label), generation)
    }

    /// The owner of the last attempt that this engine could make, and so of all that it holds apart from weights.
    pub(crate) fn last_owner(&self) -> Owner {
        self.owner(ATTEMPTS_MAX - 1)
    }

    /// As whom host memory for pictures is leased.
    pub(crate) fn vision_owner(&self) -> Owner {
        Owner::new(format!("{} vision", self.label), self.generation)
    }

    pub(super) async fn plan_and_load(self) -> Result<Planned, StartError> {
        (self.progress)(Progress::Planning);
        // After an earlier engine of this name it is frozen; one that is open already stays so.
        drop(self.budget.move_gate(self.label.clone(), Gate::Open).await?);
        let processor = self.processor().await?;
        let (checkpoint, kit, needs) = self.plan(&processor).await?;
        let model = match self.shelf.model() {
            // Rule 10: weights that are still on the device are not loaded again.
            Some(model) => model,
            None => {
                if let Some(unfinished) = self.shelf.take_unfinished() {
                    self.budget.clear(unfinished).await?;
                }
                self.load(&processor, checkpoint, needs.clone()).await?
            }
        };
        Ok(Planned { kit, needs: Some(needs), model, processor })
    }

    /// What computes here. It is loaded once a model, whatever becomes of engines.
    async fn processor(&self) -> Result<Processor, StartError> {
        if let Some(processor) = self.shelf.processor() {
            return Ok(processor);
        }
        let (device, threads, search) = (self.device.clone(), self.options.threads, self.options.blas.clone());
        let processor = off_actor(move || Ok(Processor::of(&device, threads, &search)?)).await?;
        self.shelf.keep_processor(processor.clone());
        Ok(processor)
    }

    async fn plan(&self, processor: &Processor) -> Result<(Arc<Checkpoint>, Arc<Kit>, Arc<Needs>), StartError> {
        let source = fetch(self.source.clone(), self.progress.clone()).await?;
        let options = self.options.clone();
        let (name, target, page) = (self.label.to_string(), processor.target(), self.device.page());
        // Weights that are there already have been weighed.
        let available = match self.shelf.model() {
            Some(_) => None,
            None => Some(self.budget.available().await?),
        };
        off_actor(move || {
            let checkpoint = Checkpoint::open(source)?;
            let model = Model::plan(&checkpoint, &target)?;
            let kit = Kit::new(name, &checkpoint, model.config().clone(), &options)?;
            let needs = Needs::plan(&model, target, &kit.envelope, page)?;
            if let Some(available) = available {
                needs.fits(&model, target, &kit.envelope, available)?;
            }
            Ok((Arc::new(checkpoint), Arc::new(kit), Arc::new(needs)))
        })
        .await
    }

    async fn load(
        &self,
        processor: &Processor,
        checkpoint: Arc<Checkpoint>,
        needs: Arc<Needs>,
    ) -> Result<Arc<Model>, StartError> {
        let processor = processor.clone();
        let EngineArguments { label, budget, device, progress, shelf, .. } = self.clone();
        // The weights outlive engines, so no engine owns them.
        let owner = Owner::new(format!("{label} weights"), self.generation);
        let loading = shelf.begin_loading(self.owner(0).generation, owner.clone());
        let loading = loading.ok_or_else(|| StartError::Died("its engine has ended".to_owned()))?;
        let request = Request::new(owner, Class::Weights, label, needs.weights).priority(Priority::Startup);
        let lease = budget.ask(tree::LEASE_FOR_ENGINE, request, false).await?;
        off_actor(move || {
            // Whoever ends this start waits until this is dropped: behind the model's way onto the shelf.
            let _loading = loading;
            let segment = Segment::reserve(device, needs.weights, lease)?;
            segment.back_to(needs.weights)?;
            let progress = |done, total| progress(Progress::Loading { done, total });
            let model = Arc::new(processor.load(&checkpoint, segment, progress)?);
            // Here and not where this is waited for: weights that were loaded while their engine died are good weights.
            shelf.keep_model(model.clone());
            Ok(model)
        })
        .await
    }
}

/// Runs blocking work on a thread of its own.
async fn off_actor<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StartError> + Send + 'static,
) -> Result<T, StartError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(died) => Err(StartError::Died(died.to_string())),
    }
}
