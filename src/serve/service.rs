//! The routes of a server, and what they share.

use std::{
    fmt,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use axum::{
    Extension, Router,
    extract::{MatchedPath, Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
        header::{HOST, ORIGIN, RETRY_AFTER},
        uri::Authority,
    },
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use tokio::sync::watch;
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowHeaders, AllowOrigin, CorsLayer},
};
use tracing::Instrument;

use super::{
    access::{self, Access, Used},
    anthropic,
    body::{self, Bodies},
    error::{ApiError, Shape},
    fetch::Fetcher,
    film::FilmReader,
    guard::{Client, Guard, Local},
    header_params::HeaderParams,
    health, id, memory,
    models::{ModelState, Models, shortened},
    neighbour,
    openai::{self, responses::store::Responses},
    openapi,
    options::ServeOptions,
    page, sleep, tokens,
};
use crate::{ModelHandle, Reply, Runtime};

/// The name of a request, the client's own or ours, in its answer and in logs.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same, where Anthropic's clients look for it.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Models of one runtime or several, as OpenAI's and Anthropic's clients reach them. Clones share everything.
#[derive(Clone)]
pub struct Service {
    shared: Arc<Shared>,
}

/// A runtime whose models are served.
pub(super) struct Served {
    pub(super) runtime: Runtime,
    pub(super) last_told: memory::LastTold,
}

impl Served {
    fn of(runtime: &Runtime) -> Self {
        Served { runtime: runtime.clone(), last_told: memory::LastTold::default() }
    }
}

/// What all requests share.
pub(super) struct Shared {
    /// Each with devices of its own; at least one.
    pub(super) served: Vec<Served>,
    pub(super) models: Models,
    pub(super) options: ServeOptions,
    pub(super) bodies: Bodies,
    pub(super) fetcher: Fetcher,
    pub(super) films: FilmReader,
    pub(super) responses: Responses,
    #[cfg(feature = "prometheus")]
    pub(super) metrics: Option<crate::MetricsText>,
    guard: Guard,
    /// Held by the one neighbour of a drill.
    pub(super) neighbour: Arc<tokio::sync::Mutex<()>>,
    is_ending: AtomicBool,
    /// True from when running replies have to end.
    is_cut: watch::Sender<bool>,
}

/// Shows no key.
impl fmt::Debug for Service {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Service({:?})", self.shared.guard)
    }
}

impl Shared {
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Relaxed)
    }

    /// Whether these headers are of a client that may ask.
    pub(super) fn is_client(&self, headers: &HeaderMap) -> bool {
        self.guard.admit_at(headers, false).is_ok()
    }

    /// The reply, which ends with an error when the server has waited long enough for it.
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
    /// A service without models. Add them with [`add`](Self::add) as they become ready, or tell with [`set`](Self::set) how far they are.
    pub fn new(runtime: &Runtime, options: ServeOptions) -> Self {
        Service::over(std::slice::from_ref(runtime), options)
    }

    /// The same over several runtimes, each with devices of its own ([`Placing`](crate::Placing)). No two models may have
    /// the same name.
    ///
    /// # Panics
    /// Without a runtime.
    pub fn over(runtimes: &[Runtime], options: ServeOptions) -> Self {
        assert!(!runtimes.is_empty(), "models run somewhere");
        let (bodies, guard) = (Bodies::new(options.bodies_bytes), Guard::new(&options));
        let responses = Responses::new(options.responses, options.responses_bytes.as_usize());
        let (fetcher, films) = (Fetcher::new(&options), FilmReader::new(&options));
        let shared = Shared {
            served: runtimes.iter().map(Served::of).collect(),
            models: Models::default(),
            options,
            bodies,
            fetcher,
            films,
            responses,
            #[cfg(feature = "prometheus")]
            metrics: crate::MetricsText::install().inspect_err(|error| tracing::warn!(%error, "no metrics")).ok(),
            guard,
            neighbour: Arc::default(),
            is_ending: AtomicBool::new(false),
            is_cut: watch::Sender::new(false),
        };
        Service { shared: Arc::new(shared) }
    }

    /// Serves a model by these names. The first is its own.
    pub fn add<N: Into<String>>(&self, names: impl IntoIterator<Item = N>, model: ModelHandle) {
        self.set(names, ModelState::Ready(model));
    }

    /// Says how far a model is. Until it is ready its requests are answered with 503, and if it failed with 404.
    ///
    /// # Panics
    /// Without a name.
    pub fn set<N: Into<String>>(&self, names: impl IntoIterator<Item = N>, state: ModelState) {
        let names: Vec<String> = names.into_iter().map(N::into).collect();
        assert!(!names.is_empty(), "a model has a name");
        self.shared.models.set(names, state);
    }

    /// Answers requests for `alias` with the model whose first name is `of`, and does not list it. `/health` shows the
    /// model by it: names that clients use may be paths.
    pub fn alias(&self, alias: impl Into<String>, of: impl Into<String>) {
        self.shared.models.alias(alias.into(), of.into());
    }

    /// From now on new requests are refused with 503, while running ones go on.
    pub fn end(&self) {
        self.shared.is_ending.store(true, Relaxed);
    }

    /// From now on running replies end, with an error.
    pub(super) fn cut(&self) {
        self.shared.is_cut.send_replace(true);
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The limits that it was made with.
    pub fn options(&self) -> &ServeOptions {
        &self.shared.options
    }

    /// Its routes, to merge with yours or to nest below a path of yours. Paths that are none of them are left to you.
    pub fn router(&self) -> Router {
        self.layered(self.routes())
    }

    /// The same for a server of its own, which answers every path. One that only this machine reaches, without keys,
    /// answers by no other name: a page could give its own name this machine's address.
    pub(super) fn whole(&self, is_local: bool) -> Router {
        let routes = self.layered(self.routes().fallback(missing));
        if is_local && self.shared.guard.is_open() {
            routes.layer(middleware::from_fn(by_local_name)).layer(Extension(Local))
        } else {
            routes
        }
    }

    fn routes(&self) -> Router<Arc<Shared>> {
        let administrative = Router::new()
            .route("/v1/budget/neighbour", post(neighbour::drill))
            .route("/sleep", post(sleep::sleep))
            .route("/wake_up", post(sleep::wake_up))
            .route_layer(middleware::from_fn_with_state(self.shared.clone(), by_administrator));
        let of_all_tenants = Router::new()
            .route("/v1/budget", get(memory::snapshot))
            .route("/v1/budget/events", get(memory::events))
            .route("/events", get(memory::latest))
            .route("/v1/budget/neighbour", get(neighbour::shown))
            .route_layer(middleware::from_fn_with_state(self.shared.clone(), by_administrator_or_only_key));
        let guarded = Router::new()
            .route("/v1/chat/completions", post(openai::chat::complete))
            .route("/v1/completions", post(openai::completions::complete))
            .route("/v1/messages", post(anthropic::messages::create))
            .route("/v1/messages/count_tokens", post(anthropic::messages::count_tokens))
            .route("/v1/messages/batches", any(unserved))
            .route("/v1/responses", post(openai::responses::create::create))
            .route("/v1/responses/{id}", get(openai::responses::kept::read).delete(openai::responses::kept::delete))
            .route("/v1/responses/{id}/cancel", post(openai::responses::kept::cancel))
            .route("/v1/responses/{id}/input_items", get(openai::responses::kept::input_items))
            .route("/v1/responses/compact", any(unserved))
            .route("/v1/responses/input_tokens", post(openai::responses::create::input_tokens))
            .route("/v1/conversations", any(unserved))
            .route("/v1/conversations/{*rest}", any(unserved))
            .route("/v1/models", get(openai::list::all))
            .route("/v1/models/{*name}", get(openai::list::one))
            .route("/tokenize", post(tokens::tokenize))
            .route("/detokenize", post(tokens::detokenize))
            .route("/is_sleeping", get(sleep::is_sleeping))
            .route("/v1/embeddings", any(unserved))
            .route("/v1/audio/{*rest}", any(unserved))
            .route("/v1/images/{*rest}", any(unserved))
            .route("/v1/moderations", any(unserved))
            .route("/v1/rerank", any(unserved))
            .route("/v1/score", any(unserved))
            .merge(administrative)
            .merge(of_all_tenants)
            .route_layer(middleware::from_fn_with_state(self.shared.clone(), admitted));
        let open = Router::new()
            .route("/", get(page::html))
            .route("/page.css", get(page::style))
            .route("/page.js", get(page::script))
            .route("/markdown.js", get(page::markdown))
            .route("/health", get(health::ready))
            .route("/health/ready", get(health::ready))
            .route("/health/live", get(health::live))
            .route("/ping", get(health::live))
            .route("/version", get(health::version))
            .route("/openapi.json", get(openapi::document))
            .route("/metrics", get(health::metrics));
        guarded.merge(open).method_not_allowed_fallback(wrong_method)
    }

    fn layered(&self, routes: Router<Arc<Shared>>) -> Router {
        let routes = routes
            .layer(CatchPanicLayer::custom(panicked))
            .layer(middleware::from_fn_with_state(self.shared.clone(), named));
        // Outside of all, so that a page reads refusals too.
        let routes = if self.shared.options.origins.is_empty() {
            routes
        } else {
            routes.layer(cors(&self.shared.options.origins))
        };
        routes.with_state(self.shared.clone())
    }
}

/// Lets requests with a key pass, while the server is not ending.
async fn admitted(State(shared): State<Arc<Shared>>, mut request: Request, next: Next) -> Response {
    if shared.is_ending() {
        return ApiError::unavailable("the server is shutting down")
            .hint("send the request to another server")
            .into_response();
    }
    if !is_welcome(request.headers(), &shared.options.origins) {
        let error = ApiError::new(
            StatusCode::FORBIDDEN,
            "permission_error",
            "pages of this origin may not send requests to this server",
        );
        return error.hint("start the server with --allow-origin and the origin of the page").into_response();
    }
    let is_local = request.extensions().get::<Local>().is_some();
    let admitted = shared.guard.admit_at(request.headers(), is_local);
    match admitted.and_then(|client| {
        let header_params = HeaderParams::of(request.headers(), shared.guard.tenant_of(&client))?;
        Ok((client, header_params))
    }) {
        Ok((client, header_params)) => {
            let used = request.extensions_mut().remove::<Used>().unwrap_or_default();
            request.extensions_mut().insert(client.asking(header_params, used));
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

/// Lets administrators pass.
async fn by_administrator(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    request: Request,
    next: Next,
) -> Response {
    if client.is_admin() { next.run(request).await } else { shared.guard.admin_only().into_response() }
}

/// Lets administrators pass, and all clients where they have one key: they see their own load only.
async fn by_administrator_or_only_key(
    state: State<Arc<Shared>>,
    client: Extension<Client>,
    request: Request,
    next: Next,
) -> Response {
    if state.guard.has_tenants() {
        by_administrator(state, client, request, next).await
    } else {
        next.run(request).await
    }
}

/// Whether no page of another server asks. Browsers say where a page is from, also where they send without asking first.
fn is_welcome(headers: &HeaderMap, origins: &[String]) -> bool {
    let Some(origin) = headers.get(ORIGIN) else { return true };
    let origin = origin.to_str().unwrap_or_default();
    let own = headers.get(HOST).and_then(|host| host.to_str().ok());
    let is_own = origin.split_once("://").is_some_and(|(_, from)| own == Some(from));
    is_own || origins.iter().any(|allowed| allowed == "*" || allowed == origin)
}

/// Lets requests pass that name this machine by its address, or as `localhost`.
async fn by_local_name(request: Request, next: Next) -> Response {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.parse::<Authority>().map(|host| host.host().to_ascii_lowercase()).unwrap_or_default();
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    if address.is_ok() || name == "localhost" || name.ends_with(".localhost") {
        return next.run(request).await;
    }
    let told = format!("a server without API keys does not accept the host name `{}`", shortened(&name));
    let error = ApiError::new(StatusCode::FORBIDDEN, "permission_error", told);
    error.hint("use localhost, or start the server with --api-key-file").response(shape_of(&request))
}

fn shape_of(request: &Request) -> Shape {
    if request.uri().path().starts_with("/v1/messages") { Shape::Anthropic } else { Shape::OpenAi }
}

/// Gives each request a name, for its answer, logs and spans.
async fn named(State(shared): State<Arc<Shared>>, mut request: Request, next: Next) -> Response {
    let name = name_of(request.headers()).unwrap_or_else(|| id::fresh("req_"));
    let (method, path, shape) = (request.method().clone(), request.uri().path().to_owned(), shape_of(&request));
    let span = tracing::info_span!("http", request_id = %name);
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).into();
    let access = Access::begin(span.clone(), method, path, route);
    request.extensions_mut().insert(access.used());
    let is_large = body::told_bytes(request.headers()).is_some_and(|bytes| bytes >= body::LARGE as u64);
    let response = next.run(request).instrument(span).await;
    if is_large {
        shared.bodies.tidy_up();
    }
    let mut response = access.answered(shaped(response, shape));
    if let Ok(value) = HeaderValue::from_str(&name) {
        if shape == Shape::Anthropic {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, value.clone());
        }
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// An error in the shape of the client's API, wherever it was found.
fn shaped(response: Response, shape: Shape) -> Response {
    match (shape, response.extensions().get::<ApiError>()) {
        (Shape::Anthropic, Some(error)) => error.response(shape),
        _ => response,
    }
}

/// The client's own name of a request, if it is one that logs can show.
fn name_of(headers: &HeaderMap) -> Option<String> {
    const BYTES_MAX: usize = 128;
    let name = headers.get(REQUEST_ID)?.to_str().ok()?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    (!name.is_empty() && name.len() <= BYTES_MAX && name.bytes().all(is_plain)).then(|| name.to_owned())
}

fn cors(origins: &[String]) -> CorsLayer {
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, ANTHROPIC_REQUEST_ID, RETRY_AFTER])
}

/// Lets requests pass that programs watch a server with. Others come on a connection beyond the limits.
pub(super) async fn only_probes(State(service): State<Service>, request: Request, next: Next) -> Response {
    // A server that ends says so itself.
    if access::is_probe(request.uri().path()) || service.shared.is_ending() {
        return next.run(request).await;
    }
    let error = ApiError::busy("the server has too many open connections, in total or from your address");
    error.code("connections_exhausted").hint("close connections, or try again in a moment").response(shape_of(&request))
}

async fn missing(request: Request) -> Response {
    let told = format!("unknown route {} {}", request.method(), shortened(request.uri().path()));
    ApiError::not_found(told).hint("GET /openapi.json lists all routes").into_response()
}

async fn unserved(request: Request) -> Response {
    let told =
        format!("{} is not supported: Bursar serves chats about text and pictures", shortened(request.uri().path()));
    ApiError::not_found(told).code("not_served").hint("use POST /v1/chat/completions").into_response()
}

async fn wrong_method(request: Request) -> Response {
    let told = format!("{} does not support the method {}", shortened(request.uri().path()), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", told).into_response()
}

/// A panic is a bug of ours; its text is in the log, and none of the client's business.
fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    tracing::error!("a request panicked");
    let error = ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "server_error",
        "this request failed because of a bug in Bursar",
    );
    error.hint("please report the bug with the request").into_response()
}
