//! Routes of a server: the handler of each path, and the layers around the handlers.

use std::{net::IpAddr, sync::Arc};

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
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowHeaders, AllowOrigin, CorsLayer},
};
use tracing::Instrument;

use super::{
    access::{self, Access, Used},
    anthropic, body,
    error::{ApiError, Shape},
    guard::{Client, Local},
    header_params::HeaderParams,
    health, id, memory,
    models::shortened,
    openai, openapi, other_process, page, sleep,
    state::{Service, Shared},
    tokens,
};

/// Header with the id of a request, for its response and for logs. The client may send an id.
/// Otherwise the server generates one.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Header in which Anthropic's clients look for the id.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The former name of `/v1/budget/other_process`, which works for one more release.
const OTHER_PROCESS_BEFORE: &str = "/v1/budget/neighbour";

impl Service {
    /// Routes of the service, to merge with your own routes or to nest below a path. Other paths
    /// are left to you.
    pub fn router(&self) -> Router {
        self.layered(self.routes())
    }

    /// Routes for a standalone server, which answers every path. A server without keys that only
    /// this machine can reach accepts only local host names. Otherwise, a web page could point its
    /// own name at this machine's address (DNS rebinding).
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
            .route("/v1/budget/other_process", post(other_process::drill))
            .route(OTHER_PROCESS_BEFORE, post(other_process::drill))
            .route("/sleep", post(sleep::sleep))
            .route("/wake_up", post(sleep::wake_up))
            .route_layer(middleware::from_fn_with_state(self.shared.clone(), by_administrator));
        let of_all_tenants = Router::new()
            .route("/v1/budget", get(memory::snapshot))
            .route("/v1/budget/events", get(memory::events))
            .route("/events", get(memory::latest))
            .route("/v1/budget/other_process", get(other_process::shown))
            .route(OTHER_PROCESS_BEFORE, get(other_process::shown))
            .route_layer(middleware::from_fn_with_state(self.shared.clone(), by_administrator_or_only_key));
        let guarded = Router::new()
            .route("/v1/chat/completions", post(openai::chat::complete))
            .route("/v1/completions", post(openai::completions::complete))
            .route("/v1/messages", post(anthropic::messages::create))
            .route("/v1/messages/count_tokens", post(anthropic::messages::count_tokens))
            .route("/v1/messages/batches", any(unsupported_route))
            .route("/v1/responses", post(openai::responses::create::create))
            .route("/v1/responses/{id}", get(openai::responses::stored::read).delete(openai::responses::stored::delete))
            .route("/v1/responses/{id}/cancel", post(openai::responses::stored::cancel))
            .route("/v1/responses/{id}/input_items", get(openai::responses::stored::input_items))
            .route("/v1/responses/compact", any(unsupported_route))
            .route("/v1/responses/input_tokens", post(openai::responses::create::input_tokens))
            .route("/v1/conversations", any(unsupported_route))
            .route("/v1/conversations/{*rest}", any(unsupported_route))
            .route("/v1/models", get(openai::list::all))
            .route("/v1/models/{*name}", get(openai::list::one))
            .route("/tokenize", post(tokens::tokenize))
            .route("/detokenize", post(tokens::detokenize))
            .route("/is_sleeping", get(sleep::is_sleeping))
            .route("/v1/embeddings", any(unsupported_route))
            .route("/v1/audio/{*rest}", any(unsupported_route))
            .route("/v1/images/{*rest}", any(unsupported_route))
            .route("/v1/moderations", any(unsupported_route))
            .route("/v1/rerank", any(unsupported_route))
            .route("/v1/score", any(unsupported_route))
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
        // CORS is the outermost layer, so that web pages can read error responses too.
        let routes = if self.shared.options.origins.is_empty() {
            routes
        } else {
            routes.layer(cors(&self.shared.options.origins))
        };
        routes.with_state(self.shared.clone())
    }
}

/// Admits requests with a valid key from allowed origins, unless the server is shutting down.
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

/// Admits requests of administrators only.
async fn by_administrator(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    request: Request,
    next: Next,
) -> Response {
    if client.is_admin() { next.run(request).await } else { shared.guard.admin_only().into_response() }
}

/// Admits administrators. Admits all clients if there is at most one key, because no client can
/// then see the load of others.
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

/// Whether the request has no origin, the server's own origin or an allowed origin. Browsers send
/// `Origin` even with requests that need no CORS preflight.
fn is_welcome(headers: &HeaderMap, origins: &[String]) -> bool {
    let Some(origin) = headers.get(ORIGIN) else { return true };
    let origin = origin.to_str().unwrap_or_default();
    let own = headers.get(HOST).and_then(|host| host.to_str().ok());
    let is_own = origin.split_once("://").is_some_and(|(_, from)| own == Some(from));
    is_own || origins.iter().any(|allowed| allowed == "*" || allowed == origin)
}

/// Admits requests whose `Host` is an IP address, `localhost` or a name that ends in `.localhost`.
async fn by_local_name(request: Request, next: Next) -> Response {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.parse::<Authority>().map(|host| host.host().to_ascii_lowercase()).unwrap_or_default();
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    if address.is_ok() || name == "localhost" || name.ends_with(".localhost") {
        return next.run(request).await;
    }
    let message = format!("a server without API keys does not accept the host name `{}`", shortened(&name));
    let error = ApiError::new(StatusCode::FORBIDDEN, "permission_error", message);
    error.hint("use localhost, or start the server with --api-key-file").response(shape_of(&request))
}

fn shape_of(request: &Request) -> Shape {
    if request.uri().path().starts_with("/v1/messages") { Shape::Anthropic } else { Shape::OpenAi }
}

/// Gives each request an id, for its response, logs and spans.
async fn named(State(shared): State<Arc<Shared>>, mut request: Request, next: Next) -> Response {
    let name = name_of(request.headers()).unwrap_or_else(|| id::fresh("req_"));
    let (method, path, shape) = (request.method().clone(), request.uri().path().to_owned(), shape_of(&request));
    let span = tracing::info_span!("http", request_id = %name);
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).into();
    let access = Access::begin(span.clone(), method, path, route);
    request.extensions_mut().insert(access.used());
    let is_large = body::content_length(request.headers()).is_some_and(|bytes| bytes >= body::LARGE as u64);
    let response = next.run(request).instrument(span).await;
    if is_large {
        shared.bodies.schedule_trim();
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

/// Converts an error to the format of the client's API, whichever layer returned it.
fn shaped(response: Response, shape: Shape) -> Response {
    match (shape, response.extensions().get::<ApiError>()) {
        (Shape::Anthropic, Some(error)) => error.response(shape),
        _ => response,
    }
}

/// Returns the id that the client has sent, if the id is safe to log.
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

/// On connections beyond the limit, admits only health and metrics requests.
pub(super) async fn only_probes(State(service): State<Service>, request: Request, next: Next) -> Response {
    // During shutdown, `admitted` refuses requests with a better message.
    if access::is_probe(request.uri().path()) || service.shared.is_ending() {
        return next.run(request).await;
    }
    let error = ApiError::busy("the server has too many open connections, in total or from your address");
    error.code("connections_exhausted").hint("close connections, or try again in a moment").response(shape_of(&request))
}

async fn missing(request: Request) -> Response {
    let message = format!("unknown route {} {}", request.method(), shortened(request.uri().path()));
    ApiError::not_found(message).hint("GET /openapi.json lists all routes").into_response()
}

async fn unsupported_route(request: Request) -> Response {
    let message =
        format!("{} is not supported: Bursar serves chats about text and pictures", shortened(request.uri().path()));
    ApiError::not_found(message).code("not_served").hint("use POST /v1/chat/completions").into_response()
}

async fn wrong_method(request: Request) -> Response {
    let message = format!("{} does not support the method {}", shortened(request.uri().path()), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message).into_response()
}

/// Builds the response after a panic, which is a bug in Bursar. The panic's message is in the log
/// and is not sent to the client.
fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    tracing::error!("a request panicked");
    let error = ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "server_error",
        "this request failed because of a bug in Bursar",
    );
    error.hint("please report the bug with the request").into_response()
}
