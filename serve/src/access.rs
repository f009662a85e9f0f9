//! Access log: one line per request, written when the response has been sent or the client has
//! disconnected. The line contains the outcome of the request, never its content.

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes},
    http::{Method, StatusCode},
    response::Response,
};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use serde_json::Value;
use tokio::time::Instant;
use tracing::Span;

use super::{error::ApiError, models::shortened, openai::usage::UsageBody};
use bursar_actors::metric::{HTTP_ERRORS_TOTAL, HTTP_REQUESTS_TOTAL, HttpError, HttpStatus, Route};

/// Target of the access log, whose lines are written with `tracing`.
pub const ACCESS_LOG: &str = "bursar::serve::access";

/// Token counts of a request. The counts are set when all replies of the request have ended.
#[derive(Clone, Debug, Default)]
pub(super) struct Used(Arc<OnceLock<UsageBody>>);

impl Used {
    pub(super) fn record(&self, usage: UsageBody) {
        // Keep the first value: later calls report the end of the same request again.
        self.0.get_or_init(|| usage);
    }
}

/// A request that is being answered. Dropping the `Access` writes its line.
pub(super) struct Access {
    span: Span,
    method: Method,
    path: String,
    /// Path pattern of the matched route.
    route: Arc<str>,
    began: Instant,
    used: Used,
    /// `None` until the response has been created.
    status: Option<StatusCode>,
    /// Error code and the request field at fault.
    fault: Option<(&'static str, Option<String>)>,
    /// Whether the whole response was sent.
    is_whole: bool,
}

impl Access {
    pub(super) fn begin(span: Span, method: Method, path: String, route: Arc<str>) -> Self {
        let (used, began) = (Used::default(), Instant::now());
        Access { span, method, path, route, began, used, status: None, fault: None, is_whole: false }
    }

    pub(super) fn used(&self) -> Used {
        self.used.clone()
    }

    /// Wraps the response, so that the line is written when the response has been sent.
    pub(super) fn answered(mut self, response: Response) -> Response {
        self.status = Some(response.status());
        self.fault = response.extensions().get::<ApiError>().map(ApiError::fault);
        // The body of a `HEAD` response is never sent.
        self.is_whole = self.method == Method::HEAD;
        response.map(|body| Body::new(LoggedBody { body, access: self }))
    }
}

/// Whether monitoring polls this path. Such requests are logged at debug level only.
pub(super) fn is_probe(path: &str) -> bool {
    matches!(path, "/health" | "/health/live" | "/health/ready" | "/ping" | "/metrics")
}

impl Drop for Access {
    fn drop(&mut self) {
        let status = HttpStatus(self.status.map_or(0, |status| status.as_u16()));
        HTTP_REQUESTS_TOTAL.add(&(Route(self.route.clone()), status), 1);
        if let Some((code, _)) = &self.fault {
            HTTP_ERRORS_TOTAL.add(&HttpError(code), 1);
        }
        let _within = self.span.enter();
        let (method, path) = (&self.method, shortened(&self.path));
        let milliseconds = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let status = self.status.map(|status| status.as_u16());
        let (kind, param) = self.fault.clone().unzip();
        let param = param.flatten();
        let tokens = self.used.0.get().map(UsageBody::counts);
        let (prompt, cached, completion) = (tokens.map(|of| of[0]), tokens.map(|of| of[1]), tokens.map(|of| of[2]));
        macro_rules! line {
            ($level:ident, $message:literal) => {
                tracing::$level!(
                    target: ACCESS_LOG,
                    %method, %path, status, milliseconds, prompt_tokens = prompt, cached_tokens = cached,
                    completion_tokens = completion, error = kind, param, $message
                )
            };
        }
        match (is_probe(&self.path), self.is_whole) {
            (true, _) => line!(debug, "answered"),
            (false, true) => line!(info, "answered"),
            (false, false) => line!(info, "the client disconnected"),
        }
    }
}

/// Logs the end of a background response, whose request was answered earlier.
pub(super) fn ended(response: &Value) {
    let tokens = |name: &str| response["usage"][name].as_u64();
    let (prompt_tokens, completion_tokens) = (tokens("input_tokens"), tokens("output_tokens"));
    let (id, status) = (response["id"].as_str(), response["status"].as_str());
    tracing::info!(target: ACCESS_LOG, id, status, prompt_tokens, completion_tokens, "a background response ended");
}

/// A response body that records whether it was sent completely.
struct LoggedBody {
    body: Body,
    access: Access,
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        // A body of known length is not polled again after its last frame.
        self.access.is_whole |= matches!(polled, Poll::Ready(None)) || self.body.is_end_stream();
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
