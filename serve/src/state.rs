//! State of a server, and the handle with which a program sets it.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use axum::http::HeaderMap;
use bursar::{MetricsText, ModelHandle, Reply, Runtime};
use tokio::{
    sync::{Mutex, watch},
    time::Instant,
};

use super::{
    body::Bodies,
    fetch::Fetcher,
    guard::Guard,
    models::{ModelState, Models},
    openai::responses::store::Responses,
    options::ServeOptions,
    video::VideoDecoder,
};

/// OpenAI's and Anthropic's APIs for the models of one or several runtimes. Clones share all state.
#[derive(Clone)]
pub struct Service {
    pub(super) shared: Arc<Shared>,
}

/// Never prints a key.
impl fmt::Debug for Service {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Service({:?})", self.shared.guard)
    }
}

/// The last snapshot as JSON, and the time when it was taken.
#[derive(Default)]
pub(super) struct SnapshotCache(pub(super) Mutex<Option<(Instant, Arc<str>)>>);

/// A runtime whose models are served.
pub(super) struct Served {
    pub(super) runtime: Runtime,
    pub(super) snapshot_cache: SnapshotCache,
}

impl Served {
    fn of(runtime: &Runtime) -> Self {
        Served { runtime: runtime.clone(), snapshot_cache: SnapshotCache::default() }
    }
}

/// State that all requests share.
pub(super) struct Shared {
    /// At least one runtime. Runtimes do not share devices.
    pub(super) served: Vec<Served>,
    pub(super) models: Models,
    pub(super) options: ServeOptions,
    pub(super) bodies: Bodies,
    pub(super) fetcher: Fetcher,
    pub(super) video_decoder: VideoDecoder,
    pub(super) responses: Responses,
    pub(super) metrics: Option<MetricsText>,
    pub(super) guard: Guard,
    /// Locked while a drill runs, which simulates another process that takes memory. Only one drill
    /// runs at a time.
    pub(super) other_process: Arc<Mutex<()>>,
    is_ending: AtomicBool,
    /// `true` once running replies must end.
    is_cut: watch::Sender<bool>,
}

impl AsRef<Bodies> for Shared {
    fn as_ref(&self) -> &Bodies {
        &self.bodies
    }
}

impl Shared {
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Relaxed)
    }

    /// Whether the headers contain a valid key, or the server has no keys.
    pub(super) fn is_client(&self, headers: &HeaderMap) -> bool {
        self.guard.admit_at(headers, false).is_ok()
    }

    /// Wraps a reply, so that it ends with an error when the server no longer waits for running
    /// replies.
    pub(super) fn served(&self, reply: Reply) -> Reply {
        let mut is_cut = self.is_cut.subscribe();
        reply.until(async move {
            if is_cut.wait_for(|is_cut| *is_cut).await.is_err() {
                std::future::pending().await
            }
        })
    }
}

impl Service {
    /// Creates a service without models. Add each model with [`add`](Self::add) when it is ready.
    /// Until then, report its state with [`set`](Self::set).
    pub fn new(runtime: &Runtime, options: ServeOptions) -> Self {
        Service::over(std::slice::from_ref(runtime), options)
    }

    /// Creates a service for several runtimes with separate devices
    /// ([`PlacementRequest`](bursar::PlacementRequest)). No two models may have the same name.
    ///
    /// # Panics
    /// If there is no runtime.
    pub fn over(runtimes: &[Runtime], options: ServeOptions) -> Self {
        assert!(!runtimes.is_empty(), "a service needs at least one runtime");
        let (bodies, guard) = (Bodies::new(&options), Guard::new(&options));
        let responses = Responses::new(options.responses, options.responses_bytes.as_usize());
        let (fetcher, video_decoder) = (Fetcher::new(&options), VideoDecoder::new(&options));
        let shared = Shared {
            served: runtimes.iter().map(Served::of).collect(),
            models: Models::default(),
            options,
            bodies,
            fetcher,
            video_decoder,
            responses,
            metrics: MetricsText::install().inspect_err(|error| tracing::warn!(%error, "no metrics")).ok(),
            guard,
            other_process: Arc::default(),
            is_ending: AtomicBool::new(false),
            is_cut: watch::Sender::new(false),
        };
        Service { shared: Arc::new(shared) }
    }

    /// Serves a model under these names. The first name is the model's own name.
    ///
    /// # Panics
    /// If there is no name.
    pub fn add<N: Into<String>>(&self, names: impl IntoIterator<Item = N>, model: ModelHandle) {
        self.set(names, ModelState::Ready(model));
    }

    /// Sets the state of a model. Requests for it get 503 until it is ready, and 404 if it failed.
    ///
    /// # Panics
    /// If there is no name.
    pub fn set<N: Into<String>>(&self, names: impl IntoIterator<Item = N>, state: ModelState) {
        let names: Vec<String> = names.into_iter().map(N::into).collect();
        assert!(!names.is_empty(), "every model has a name");
        self.shared.models.set(names, state);
    }

    /// Serves a model under one more name, which is not listed. `of` is the first name of the
    /// model, and `alias` is the additional name. `/health` shows the alias, because the model's
    /// names may be paths.
    pub fn alias(&self, alias: impl Into<String>, of: impl Into<String>) {
        self.shared.models.alias(alias.into(), of.into());
    }

    /// Refuses new requests with 503 from now on. Running requests continue.
    pub fn end(&self) {
        self.shared.is_ending.store(true, Relaxed);
    }

    /// Ends all running replies with an error.
    pub(super) fn cut(&self) {
        self.shared.is_cut.send_replace(true);
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Options that the service was created with.
    pub fn options(&self) -> &ServeOptions {
        &self.shared.options
    }
}
