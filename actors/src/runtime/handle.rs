//! The runtime, as users hold it.

use std::{sync::Arc, time::Duration};

use bursar_budgets::{Bytes, Device, DeviceError, LedgerConfig};
use bursar_model::checkpoint::{CheckpointOrigin, CheckpointSource, RandomCheckpoint};
#[cfg(feature = "hub")]
use bursar_model::checkpoint::{HubModel, HubOptions};
use ractor::{Actor, ActorCell, ActorRef};
use thiserror::Error;

use super::{
    DeviceChoice, Health, RuntimeActor, RuntimeArguments, RuntimeMessage, Shown, Supervised, device::Opened, unwinding,
};
use crate::{
    budget::{Budget, BudgetMailbox, WatchOptions},
    chat::ModelHandle,
    engine::{LoadOptions, Progress, ProgressSink, StartError},
    event::{Events, Recorded},
    profile::default_canary,
    responder::AskError,
    supervise::Intensity,
    tree,
};

/// How a runtime starts. By default it leases the first GPU; where there is none, 512 MiB of host memory stand in for one,
/// and [`Runtime::stands_in`] says why.
#[derive(Clone)]
pub struct RuntimeConfig {
    /// The device: by default [`DeviceChoice::Auto`] with 512 MiB.
    pub device: DeviceChoice,
    /// Device bytes kept free of use: the first thing given up when another process takes memory. By default 256 MiB, or a
    /// sixteenth of a device smaller than 4 GiB.
    pub canary: Option<Bytes>,
    /// Host memory that decoded pictures may take together.
    pub host_bytes: Bytes,
    /// When restarts of the budget actor become a crash loop, which ends the runtime.
    pub budget_intensity: Intensity,
    /// How often the budget looks what other processes hold, and when memory that they gave back is taken.
    pub watch: WatchOptions,
    /// How often the device may be lost and made again before the runtime ends with the reason.
    pub device_intensity: Intensity,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        RuntimeConfig {
            device: DeviceChoice::Auto(Bytes::mib(512)),
            canary: None,
            host_bytes: Bytes::gib(1),
            budget_intensity: Intensity::BUDGET,
            watch: WatchOptions::default(),
            device_intensity: Intensity::DEVICE,
        }
    }
}

/// Why a runtime did not start or did not do what it was asked.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The runtime supervisor could not be started.
    #[error("the runtime supervisor did not start: {0}")]
    Spawn(String),
    /// A model did not start.
    #[error(transparent)]
    Start(#[from] Arc<StartError>),
    /// The runtime supervisor did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// Panics end the process in this build, so no supervisor could act on one.
    #[error("this program is built with panic = \"abort\", which takes supervision away")]
    PanicAborts,
}

impl RuntimeError {
    /// What to change.
    pub fn hint(&self) -> String {
        match self {
            RuntimeError::Start(error) => error.hint(),
            RuntimeError::PanicAborts => "set panic = \"unwind\" in the profile of Cargo.toml".to_owned(),
            RuntimeError::Device(error) => {
                bursar_budgets::Hint::hint(error).unwrap_or_else(|| "choose another device".to_owned())
            }
            RuntimeError::Spawn(_) | RuntimeError::Unanswered(_) => "start the runtime again".to_owned(),
        }
    }
}

/// One device with its budget and its models. Cloning shares it. When the last clone is dropped everything ends without
/// waiting; [`shutdown`](Runtime::shutdown) waits.
///
/// ```
/// use bursar_actors::{
///     engine::{LoadOptions, Progress},
///     runtime::{DeviceChoice, ModelSource, Runtime, RuntimeConfig},
/// };
/// use bursar_budgets::Bytes;
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = RuntimeConfig { device: DeviceChoice::Host(Bytes::mib(128)), ..RuntimeConfig::default() };
/// let runtime = Runtime::start(config).await?;
/// let options = LoadOptions { name: Some("eyes".into()), ..LoadOptions::small() };
/// let model = runtime
///     .load_with(ModelSource::demo(), options, |progress| match progress {
///         Progress::Loading { done, total } => println!("{done} of {total} are loaded"),
///         _ => {}
///     })
///     .await?;
/// println!("{}", runtime.budget().snapshot().await?); // every byte, by class and model
/// runtime.unload("eyes").await?;
/// assert_eq!(runtime.budget().snapshot().await?.granted, Bytes::ZERO);
/// runtime.shutdown().await;
/// # drop(model);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Runtime {
    inner: Arc<Inner>,
}

struct Inner {
    actor: ActorRef<RuntimeMessage>,
    budget: Budget,
    shown: Shown,
    stands_in: Option<DeviceError>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.actor.stop(None);
    }
}

impl Runtime {
    /// Starts a runtime. It must be called within a tokio runtime with threads.
    ///
    /// # Errors
    /// The device is not there, or the program is built with `panic = "abort"`.
    pub async fn start(config: RuntimeConfig) -> Result<Self, RuntimeError> {
        Runtime::start_under(config, None).await
    }

    /// Starts a runtime that is supervised by an actor of your own: it hears of the runtime's end as ractor tells of it,
    /// may start another, and takes the runtime with it when it dies. It hears of an end too when the last clone of this
    /// handle is dropped. Requests and leases of a runtime that died are over; memory that they had backed is home when
    /// their handles are dropped. Use [`ractor`](crate::ractor) as this crate exports it, so that both mean the same
    /// version.
    ///
    /// # Errors
    /// As [`start`](Runtime::start), or the supervisor is ending.
    pub async fn start_linked(config: RuntimeConfig, supervisor: ActorCell) -> Result<Self, RuntimeError> {
        Runtime::start_under(config, Some(supervisor)).await
    }

    async fn start_under(config: RuntimeConfig, supervisor: Option<ActorCell>) -> Result<Self, RuntimeError> {
        if unwinding::panics_abort() {
            return Err(RuntimeError::PanicAborts);
        }
        let choice = config.device;
        let opened = tokio::task::spawn_blocking(move || choice.open()).await;
        let Opened { device, stands_in, again } = opened.map_err(|died| RuntimeError::Spawn(died.to_string()))??;
        if let Some(why) = &stands_in {
            tracing::info!(%why, "host memory stands in for a GPU");
        }
        let total = device.memory()?.total;
        let ledger = LedgerConfig { host_total: config.host_bytes, ..LedgerConfig::of(device.as_ref()) };
        let (mailbox, shown) = (Arc::new(BudgetMailbox::default()), Shown::new(device));
        let arguments = RuntimeArguments {
            canary: config.canary.unwrap_or_else(|| default_canary(total)),
            shown: shown.clone(),
            again,
            device_intensity: config.device_intensity,
            ledger,
            mailbox: mailbox.clone(),
            budget_intensity: config.budget_intensity,
            watch: config.watch,
        };
        let spawned = match supervisor {
            Some(supervisor) => RuntimeActor::spawn_linked(None, RuntimeActor, arguments, supervisor).await,
            None => RuntimeActor::spawn(None, RuntimeActor, arguments).await,
        };
        let (actor, _) = spawned.map_err(|error| RuntimeError::Spawn(error.to_string()))?;
        Ok(Runtime { inner: Arc::new(Inner { actor, budget: Budget::at(mailbox), shown, stands_in }) })
    }

    /// Loads a model with the default options.
    ///
    /// # Errors
    /// As [`load_with`](Runtime::load_with).
    pub async fn load(&self, source: ModelSource) -> Result<ModelHandle, RuntimeError> {
        self.load_with(source, LoadOptions::default(), |_| {}).await
    }

    /// Loads a model: plan, weights, stress, READY. `progress` hears of every moment and must not block.
    ///
    /// # Errors
    /// [`RuntimeError::Start`] with the reason and a hint; nothing stays leased then.
    pub async fn load_with(
        &self,
        source: ModelSource,
        options: LoadOptions,
        progress: impl Fn(Progress) + Send + Sync + 'static,
    ) -> Result<ModelHandle, RuntimeError> {
        let progress: ProgressSink = Arc::new(progress);
        let name = options.name.clone().unwrap_or_else(|| source.name());
        let (source, options) = (source.checkpoint, Box::new(options));
        let loaded = tree::LOAD_MODEL
            .ask(&self.inner.actor, |reply| RuntimeMessage::Load { name, source, options, progress, reply })
            .await;
        match (loaded, self.device().check()) {
            // A runtime that ended with its device has said why.
            (Err(AskError::Gone { .. }), Err(lost)) => Err(lost.into()),
            (loaded, _) => Ok(loaded??),
        }
    }

    /// Ends a model by its name; returns when every byte that it had is home. Requests under way end with
    /// [`ChatError::Stopped`](crate::chat::ChatError::Stopped).
    ///
    /// # Errors
    /// The runtime supervisor did not answer.
    pub async fn unload(&self, name: impl Into<String>) -> Result<(), RuntimeError> {
        self.unload_within(name, Duration::ZERO).await.map(drop)
    }

    /// As [`unload`](Runtime::unload), but requests under way may go on to their end until the deadline; new ones are
    /// refused from now on with [`ChatError::ShuttingDown`](crate::chat::ChatError::ShuttingDown). Gives how many were
    /// cut off: those that were under way at the deadline, one counting as under way until its caller has room for its
    /// end.
    ///
    /// # Errors
    /// The runtime supervisor did not answer.
    pub async fn unload_within(&self, name: impl Into<String>, deadline: Duration) -> Result<usize, RuntimeError> {
        let (name, within) = (name.into(), deadline);
        let question = tree::SHUT_DOWN.after(deadline);
        Ok(question.ask(&self.inner.actor, |reply| RuntimeMessage::Unload { name, within, reply }).await?)
    }

    /// The actors that the runtime supervises, to link to, watch, or kill; a model's own are found through its handle's
    /// [`serving`](ModelHandle::serving), which says how to link and watch.
    ///
    /// # Errors
    /// The runtime supervisor did not answer.
    pub async fn supervised(&self) -> Result<Supervised, RuntimeError> {
        Ok(tree::SUPERVISED.ask(&self.inner.actor, RuntimeMessage::Supervised).await?)
    }

    /// Whether it lives, and how each model is. `serve_metrics` answers the same at `/health`.
    ///
    /// ```
    /// # use bursar_actors::{engine::LoadOptions, runtime::{ModelHealth, ModelSource, Runtime, RuntimeConfig}};
    /// # #[tokio::main(flavor = "multi_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let runtime = Runtime::start(RuntimeConfig::default()).await?;
    /// let health = runtime.health().await;
    /// assert!(health.is_live && !health.is_ready(), "there is no model yet");
    /// runtime.load_with(ModelSource::demo(), LoadOptions::small(), |_| {}).await?;
    /// assert_eq!(runtime.health().await.models["demo"], ModelHealth::Ready);
    /// # runtime.shutdown().await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn health(&self) -> Health {
        Runtime::health_of(&self.inner.actor).await
    }

    /// The same for who must not keep a runtime from ending.
    pub(crate) async fn health_of(actor: &ActorRef<RuntimeMessage>) -> Health {
        tree::HEALTH.ask(actor, RuntimeMessage::Health).await.unwrap_or_default()
    }

    /// The supervisor, which ends though this is held.
    #[cfg(feature = "prometheus")]
    pub(crate) fn actor(&self) -> ActorRef<RuntimeMessage> {
        self.inner.actor.clone()
    }

    /// Ends everything and waits for it.
    ///
    /// Requests under way end with [`ChatError::Stopped`](crate::chat::ChatError::Stopped); every byte of every model is
    /// home when this returns. Leases of your own stay yours until you drop them.
    pub async fn shutdown(self) {
        self.shutdown_within(Duration::ZERO).await;
    }

    /// As [`shutdown`](Runtime::shutdown), but requests under way may go on to their end until the deadline. From now on,
    /// for every clone of this handle, new chats are refused with
    /// [`ChatError::ShuttingDown`](crate::chat::ChatError::ShuttingDown) and new loads with [`StartError::ShuttingDown`];
    /// loads under way end at once. Returns as soon as everything has ended; gives how many requests were cut off, as
    /// [`unload_within`](Runtime::unload_within) counts them. Another call with a shorter deadline, or `shutdown`, cuts
    /// this one short.
    pub async fn shutdown_within(self, deadline: Duration) -> usize {
        let question = tree::SHUT_DOWN.after(deadline);
        let ask = |reply| RuntimeMessage::ShutDown { within: deadline, reply };
        // One that does not answer is gone already, or is stopped below.
        let cut_off = question.ask(&self.inner.actor, ask).await.unwrap_or_default();
        self.inner.actor.stop(None);
        drop(self.inner.actor.wait(None).await);
        cut_off
    }

    /// The runtime supervisor itself, to watch or to kill. It takes [`RuntimeMessage`]s.
    pub fn cell(&self) -> ActorCell {
        self.inner.actor.get_cell()
    }

    /// The ledger of this device.
    pub fn budget(&self) -> &Budget {
        &self.inner.budget
    }

    /// All that happens to the device's memory and its models from now on: leases, shrinks, restarts, models that are
    /// ready or over.
    ///
    /// ```
    /// # use bursar_actors::{event::Event, runtime::{Runtime, RuntimeConfig}};
    /// # use bursar_budgets::{Class, MIB};
    /// # #[tokio::main(flavor = "multi_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let runtime = Runtime::start(RuntimeConfig::default()).await?;
    /// let mut events = runtime.events();
    /// drop(runtime.budget().lease(Class::tenant("my-index"), 64 * MIB).await?);
    /// runtime.shutdown().await;
    /// while let Some(recorded) = events.next().await {
    ///     match recorded?.event {
    ///         Event::LeaseGranted(leased) => println!("{} for {}", leased.bytes, leased.class),
    ///         other => println!("{}", other.name()),
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn events(&self) -> Events {
        self.inner.budget.events().listen()
    }

    /// What happened last, the oldest first: 64 events at most.
    pub fn recent_events(&self) -> Vec<Recorded> {
        self.inner.budget.events().recent()
    }

    /// The device that it has now. When one is lost another takes its place, once; leases of the first are then worth
    /// nothing.
    pub fn device(&self) -> Arc<dyn Device> {
        self.inner.shown.device.borrow().clone()
    }

    /// Why host memory stands in for a GPU, if [`DeviceChoice::Auto`] found none.
    pub fn stands_in(&self) -> Option<&DeviceError> {
        self.inner.stands_in.as_ref()
    }
}

/// Where a model comes from.
#[derive(Clone, Debug)]
pub struct ModelSource {
    checkpoint: CheckpointOrigin,
    name: String,
}

impl ModelSource {
    /// A Hugging Face checkpoint folder. Its last component is the model's name.
    pub fn folder(path: impl Into<std::path::PathBuf>) -> Self {
        let path = path.into();
        let name = path.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
        ModelSource { checkpoint: CheckpointOrigin::Local(CheckpointSource::Folder(path)), name }
    }

    /// A model on the Hugging Face hub, `org/name` or `org/name@revision`, from the public hub into the user's own
    /// cache. What is in the cache is not fetched again. The part behind the slash is the model's name.
    #[cfg(feature = "hub")]
    pub fn hub(id: &str) -> Self {
        ModelSource::hub_with(id, HubOptions::default())
    }

    /// The same with another hub, a token, another cache.
    #[cfg(feature = "hub")]
    pub fn hub_with(id: &str, options: HubOptions) -> Self {
        let model = HubModel::new(id, options);
        ModelSource { name: model.name().to_owned(), checkpoint: CheckpointOrigin::Hub(model) }
    }

    /// The demo model that is embedded in the library.
    pub fn demo() -> Self {
        ModelSource { checkpoint: CheckpointOrigin::Local(bursar_model::demo::checkpoint()), name: "demo".to_owned() }
    }

    /// A model of random weights, for measurements: see [`bursar_model::registry::random_checkpoint`].
    pub fn random(checkpoint: RandomCheckpoint) -> Self {
        let name = checkpoint.name().to_owned();
        ModelSource { checkpoint: CheckpointOrigin::Local(CheckpointSource::Random(Arc::new(checkpoint))), name }
    }

    /// Where its files are, or are fetched from.
    pub fn origin(&self) -> &CheckpointOrigin {
        &self.checkpoint
    }

    /// Its name, unless the options give another.
    pub fn name(&self) -> String {
        self.name.clone()
    }
}
