//! The public handle of a runtime, its configuration and its errors.

use std::{sync::Arc, time::Duration};

use bursar_budgets::{Bytes, Device, DeviceError, Hint, LedgerConfig};
use ractor::{Actor, ActorCell, ActorRef};
use thiserror::Error;

use super::{
    DeviceChoice, Health, LoadRequest, ModelSource, RuntimeActor, RuntimeArguments, RuntimeMessage, Shown, Supervised,
    device::Opened, unwinding,
};
use crate::{
    budget::{Budget, BudgetMailbox, WatchOptions},
    chat::ModelHandle,
    engine::{LoadOptions, Progress, ProgressSink, StartError},
    event::{Event, Events, Recorded},
    profile::default_canary,
    responder::AskError,
    supervise::Intensity,
    tree,
};

/// Configuration of a runtime. By default the runtime uses the first GPU. Without a GPU, it uses
/// 512 MiB of host memory instead, and [`Runtime::host_fallback_reason`] returns the reason.
#[derive(Clone)]
pub struct RuntimeConfig {
    /// The device. Default: [`DeviceChoice::Auto`] with 512 MiB.
    pub device: DeviceChoice,
    /// Device bytes that are kept free on purpose. These bytes are given up first when another
    /// process takes memory. Default: 256 MiB, or a sixteenth of a device smaller than 4 GiB.
    pub canary: Option<Bytes>,
    /// Host memory for decoded pictures of all requests together, for the weights of sleeping
    /// models, and for the host tiers of [`LoadOptions::swap_space`]. Default: 1 GiB.
    pub host_bytes: Bytes,
    /// How many restarts of the budget actor are tolerated, and within what time. One more restart
    /// ends the runtime. Default: [`Intensity::BUDGET`].
    pub budget_intensity: Intensity,
    /// How often the budget checks the memory of other processes, and how long memory must stay
    /// free before the budget returns it to KV caches.
    pub watch: WatchOptions,
    /// How many losses of the device are tolerated, and within what time. The device is reopened
    /// after each loss. One more loss ends the runtime.
    pub device_intensity: Intensity,
    /// If set, models are put to sleep to free memory for other models. When the device lacks
    /// memory for a load or a wake, the least recently used model without requests is put to sleep.
    /// If all models have requests, the model that has been awake longest is put to sleep once it
    /// has been awake for at least this time: its running requests end first, and its new requests
    /// wait until it is awake again. Default: `None`. In that case a load that does not fit fails,
    /// and models sleep only when asked to or by [`LoadOptions::sleep_after`].
    pub sleep_for_memory: Option<Duration>,
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
            sleep_for_memory: None,
        }
    }
}

/// Reasons why a runtime did not start, or did not complete a request.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The device could not be opened, or was lost.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The runtime supervisor could not be spawned.
    #[error("the runtime supervisor did not start: {0}")]
    Spawn(String),
    #[error(transparent)]
    Start(#[from] Arc<StartError>),
    /// The runtime supervisor did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// The program is built with `panic = "abort"`. A panic would end the process, so supervision
    /// cannot work.
    #[error("this program is built with panic = \"abort\", which disables supervision")]
    PanicAborts,
}

impl Hint for RuntimeError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            RuntimeError::Start(error) => error.hint(),
            RuntimeError::PanicAborts => "set panic = \"unwind\" in the profile of Cargo.toml".to_owned(),
            RuntimeError::Device(error) => error.hint().unwrap_or_else(|| "choose another device".to_owned()),
            RuntimeError::Spawn(_) | RuntimeError::Unanswered(_) => "start the runtime again".to_owned(),
        }
    }
}

/// One device with its budget and its models. Clones share the runtime. When the last clone is
/// dropped, the runtime stops, but the drop does not wait until it has stopped.
/// [`shutdown`](Runtime::shutdown) waits.
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
    host_fallback_reason: Option<DeviceError>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.actor.stop(None);
    }
}

impl Runtime {
    /// Starts a runtime. Call this function within a multi-threaded tokio runtime.
    ///
    /// # Errors
    /// The device cannot be opened, or the program is built with `panic = "abort"`. With
    /// [`DeviceChoice::MinDevices`], also if the models do not fit on any number of devices, or if
    /// a model cannot be planned.
    pub async fn start(config: RuntimeConfig) -> Result<Self, RuntimeError> {
        Runtime::start_under(config, None).await
    }

    /// Starts a runtime that is supervised by one of your actors. Your actor gets ractor's
    /// supervision event when the runtime ends, including when the last clone of this handle is
    /// dropped, and may then start another runtime. If your actor dies, the runtime dies too.
    ///
    /// Requests of a dead runtime end. Leases that you hold stay valid until you drop them; their
    /// memory is then returned. Use [`ractor`](crate::ractor) as this crate exports it, so that
    /// your program and this crate use the same version.
    ///
    /// # Errors
    /// The errors of [`start`](Runtime::start). This function also fails if the supervisor is
    /// ending.
    pub async fn start_linked(config: RuntimeConfig, supervisor: ActorCell) -> Result<Self, RuntimeError> {
        Runtime::start_under(config, Some(supervisor)).await
    }

    async fn start_under(config: RuntimeConfig, supervisor: Option<ActorCell>) -> Result<Self, RuntimeError> {
        if unwinding::panics_abort() {
            return Err(RuntimeError::PanicAborts);
        }
        let (choice, canary) = (config.device, config.canary);
        let open = move || {
            let (choice, chosen) = choice.chosen(canary).map_err(Arc::new)?;
            Ok::<_, RuntimeError>((choice.open()?, chosen))
        };
        let opened = tokio::task::spawn_blocking(open).await;
        let (Opened { device, host_fallback_reason, again }, chosen) =
            opened.map_err(|died| RuntimeError::Spawn(died.to_string()))??;
        if let Some(why) = &host_fallback_reason {
            tracing::info!(%why, "host memory stands in for a GPU");
        }
        let total = device.memory()?.total;
        let ledger = LedgerConfig { host_total: config.host_bytes, ..LedgerConfig::of(device.as_ref()) };
        let (mailbox, shown) = (Arc::new(BudgetMailbox::default()), Shown::new(device));
        for choice in chosen {
            let (reason, ranks) = (choice.to_string(), choice.ranks);
            mailbox.events().record(Event::RanksChosen { model: choice.model.as_str().into(), ranks, reason });
        }
        let arguments = RuntimeArguments {
            canary: config.canary.unwrap_or_else(|| default_canary(total)),
            shown: shown.clone(),
            again,
            device_intensity: config.device_intensity,
            ledger,
            mailbox: mailbox.clone(),
            budget_intensity: config.budget_intensity,
            watch: config.watch,
            turn: config.sleep_for_memory,
        };
        let spawned = match supervisor {
            Some(supervisor) => RuntimeActor::spawn_linked(None, RuntimeActor::default(), arguments, supervisor).await,
            None => RuntimeActor::spawn(None, RuntimeActor::default(), arguments).await,
        };
        let (actor, _) = spawned.map_err(|error| RuntimeError::Spawn(error.to_string()))?;
        Ok(Runtime { inner: Arc::new(Inner { actor, budget: Budget::at(mailbox), shown, host_fallback_reason }) })
    }

    /// Loads a model with the default options.
    ///
    /// # Errors
    /// The errors of [`load_with`](Runtime::load_with).
    pub async fn load(&self, source: ModelSource) -> Result<ModelHandle, RuntimeError> {
        self.load_with(source, LoadOptions::default(), |_| {}).await
    }

    /// Loads a model: it is planned, its weights are loaded, its worst cases are run, and it
    /// becomes READY. `progress` is called for each step and must not block.
    ///
    /// # Errors
    /// [`RuntimeError::Start`] with the reason and a hint. Nothing stays leased. If the runtime has
    /// ended: [`RuntimeError::Device`] if its device was lost, otherwise
    /// [`RuntimeError::Unanswered`].
    pub async fn load_with(
        &self,
        source: ModelSource,
        options: LoadOptions,
        progress: impl Fn(Progress) + Send + Sync + 'static,
    ) -> Result<ModelHandle, RuntimeError> {
        let progress: ProgressSink = Arc::new(progress);
        let name = options.name.clone().unwrap_or_else(|| source.name());
        let request = |reply| Box::new(LoadRequest { source: source.origin().clone(), options, progress, reply });
        let loaded = tree::LOAD_MODEL
            .ask(&self.inner.actor, |reply| RuntimeMessage::Load { name, request: request(reply) })
            .await;
        match (loaded, self.device().check()) {
            // If the runtime ended because its device was lost, the loss is the reason to return.
            (Err(AskError::Gone { .. }), Err(lost)) => Err(lost.into()),
            (loaded, _) => Ok(loaded??),
        }
    }

    /// Ends the model with this name, and waits until all memory of the model is released. Running
    /// requests end with [`ChatError::Stopped`](crate::chat::ChatError::Stopped).
    ///
    /// # Errors
    /// The runtime supervisor did not answer.
    pub async fn unload(&self, name: impl Into<String>) -> Result<(), RuntimeError> {
        self.unload_within(name, Duration::ZERO).await.map(drop)
    }

    /// Ends a model like [`unload`](Runtime::unload), but running requests may finish until the
    /// deadline. New requests are refused at once with
    /// [`ChatError::ShuttingDown`](crate::chat::ChatError::ShuttingDown).
    ///
    /// Returns how many requests were cut off at the deadline. A request counts as running until
    /// there is a slot for its last event in the caller's channel.
    ///
    /// # Errors
    /// The runtime supervisor did not answer.
    pub async fn unload_within(&self, name: impl Into<String>, deadline: Duration) -> Result<usize, RuntimeError> {
        let (name, within) = (name.into(), deadline);
        let question = tree::SHUT_DOWN.after(deadline);
        Ok(question.ask(&self.inner.actor, |reply| RuntimeMessage::Unload { name, within, reply }).await?)
    }

    /// Returns the actors that the runtime supervises, to link to, watch or kill. For the actors of
    /// a model, call [`serving`](ModelHandle::serving) on its handle, which explains linking and
    /// watching.
    ///
    /// # Errors
    /// The runtime supervisor did not answer.
    pub async fn supervised(&self) -> Result<Supervised, RuntimeError> {
        Ok(tree::SUPERVISED.ask(&self.inner.actor, RuntimeMessage::Supervised).await?)
    }

    /// Returns whether the runtime is alive, and the health of each model. The endpoint of
    /// `serve_metrics` returns the same data at `/health`.
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

    /// Returns the same as [`health`](Runtime::health), without keeping the runtime alive.
    pub(crate) async fn health_of(actor: &ActorRef<RuntimeMessage>) -> Health {
        tree::HEALTH.ask(actor, RuntimeMessage::Health).await.unwrap_or_default()
    }

    /// Returns a reference to the supervisor. The reference does not keep the runtime alive.
    #[cfg(feature = "prometheus")]
    pub(crate) fn actor(&self) -> ActorRef<RuntimeMessage> {
        self.inner.actor.clone()
    }

    /// Stops the runtime and waits until it has stopped.
    ///
    /// Running requests end with [`ChatError::Stopped`](crate::chat::ChatError::Stopped). When this
    /// function returns, all memory of every model is released. Leases that you hold stay valid
    /// until you drop them.
    pub async fn shutdown(self) {
        self.shutdown_within(Duration::ZERO).await;
    }

    /// Stops the runtime like [`shutdown`](Runtime::shutdown), but running requests may finish
    /// until the deadline. From now on, every clone of this handle refuses new chats with
    /// [`ChatError::ShuttingDown`](crate::chat::ChatError::ShuttingDown) and new loads with
    /// [`StartError::ShuttingDown`]. Loads in progress end at once.
    ///
    /// Returns as soon as the runtime has stopped, with the number of requests that were cut off,
    /// counted as in [`unload_within`](Runtime::unload_within). Another call with an earlier
    /// deadline, or `shutdown`, ends this wait early.
    pub async fn shutdown_within(self, deadline: Duration) -> usize {
        let question = tree::SHUT_DOWN.after(deadline);
        let ask = |reply| RuntimeMessage::ShutDown { within: deadline, reply };
        // A supervisor that does not answer has ended already, or is stopped below.
        let cut_off = question.ask(&self.inner.actor, ask).await.unwrap_or_default();
        self.inner.actor.stop(None);
        drop(self.inner.actor.wait(None).await);
        cut_off
    }

    /// Returns the runtime supervisor, to watch or kill. It accepts [`RuntimeMessage`]s.
    pub fn cell(&self) -> ActorCell {
        self.inner.actor.get_cell()
    }

    /// Returns the handle to the budget of this device.
    pub fn budget(&self) -> &Budget {
        &self.inner.budget
    }

    /// Subscribes to the events of the device's memory and models from now on: leases, shrinks,
    /// restarts, and models that become ready or end.
    ///
    /// ```
    /// # use bursar_actors::{event::Event, runtime::{Runtime, RuntimeConfig}};
    /// # use bursar_budgets::{Class, MIB};
    /// # #[tokio::main(flavor = "multi_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let runtime = Runtime::start(RuntimeConfig::default()).await?;
    /// let mut events = runtime.events();
    /// drop(runtime.budget().lease(Class::external("my-index"), 64 * MIB).await?);
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

    /// Returns the latest events, oldest first, at most 64.
    pub fn recent_events(&self) -> Vec<Recorded> {
        self.inner.budget.events().recent()
    }

    /// Returns the current device. A lost device is replaced as often as
    /// [`RuntimeConfig::device_intensity`] allows. Leases on a lost device are unusable.
    pub fn device(&self) -> Arc<dyn Device> {
        self.inner.shown.device.borrow().clone()
    }

    /// Returns the reason why host memory is used, if [`DeviceChoice::Auto`] or
    /// [`DeviceChoice::AutoRanks`] found no GPU.
    pub fn host_fallback_reason(&self) -> Option<&DeviceError> {
        self.inner.host_fallback_reason.as_ref()
    }
}
