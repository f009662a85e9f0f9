//! API errors in OpenAI's and Anthropic's formats.

use axum::{
    Extension, Json,
    http::{
        HeaderValue, StatusCode,
        header::{RETRY_AFTER, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
};
use bursar::{ChatError, Deadline, ErrorKind, Hint, LayoutError, SamplingError, TextError};
use serde_json::{Value, json};

use super::client_names;

/// `Retry-After` if a limit is reached, in seconds: about the duration of a reply.
const FULL_SECONDS: u64 = 1;
/// `Retry-After` while a model is loading, in seconds.
const LOADING_SECONDS: u64 = 2;

/// Maximum length of an error message. A message may repeat field names, which clients choose, so
/// longer messages are cut.
const MESSAGE_CHARACTERS: usize = 2048;
/// Maximum length of the name of the field at fault. The name is also logged.
const PARAM_CHARACTERS: usize = 128;

fn bounded(text: String, characters_max: usize) -> String {
    match text.char_indices().nth(characters_max) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// The error response to a request.
#[derive(Clone, Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    details: Box<ErrorDetails>,
}

/// Everything in the response except the status.
#[derive(Clone, Debug, Default)]
struct ErrorDetails {
    /// Field `type` of OpenAI's errors.
    kind: &'static str,
    /// Field `code` of OpenAI's errors.
    code: Option<&'static str>,
    /// The field of the request at fault.
    param: Option<String>,
    message: String,
    hint: String,
    /// Message in Anthropic's wording, which its clients search for.
    anthropic: Option<String>,
    retry_after: Option<u64>,
}

/// API that determines the format of an error body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    OpenAi,
    Anthropic,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = bounded(message.into(), MESSAGE_CHARACTERS);
        ApiError { status, details: Box::new(ErrorDetails { kind, message, ..ErrorDetails::default() }) }
    }

    /// 400: the field `param` is wrong.
    pub(super) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        error.details.param = Some(bounded(param.into(), PARAM_CHARACTERS));
        error
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    /// 429: a limit is reached, and the client may retry.
    pub(super) fn full(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message).after(FULL_SECONDS)
    }

    /// 503 without `Retry-After`.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message)
    }

    /// 503 with `Retry-After`: the model is loading.
    pub(super) fn loading(message: impl Into<String>) -> Self {
        ApiError::unavailable(message).after(LOADING_SECONDS)
    }

    /// 503 with `Retry-After`: resources are exhausted.
    pub(super) fn busy(message: impl Into<String>) -> Self {
        ApiError::unavailable(message).after(FULL_SECONDS)
    }

    pub(super) fn code(mut self, code: &'static str) -> Self {
        self.details.code = Some(code);
        self
    }

    /// Renames the field at fault if it is in `names`, which are pairs of the chat API's name
    /// and this API's name.
    pub(super) fn renamed(mut self, names: &[(&str, &str)]) -> Self {
        if let Some((_, theirs)) = names.iter().find(|(ours, _)| self.details.param.as_deref() == Some(ours)) {
            self.details.param = Some((*theirs).to_owned());
        }
        self
    }

    /// Sets the field at fault.
    pub(super) fn of_field(mut self, param: &str) -> Self {
        self.details.param = Some(bounded(param.to_owned(), PARAM_CHARACTERS));
        self
    }

    pub(super) fn message(&self) -> &str {
        &self.details.message
    }

    pub(super) fn hint_text(&self) -> &str {
        &self.details.hint
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.details.hint = bounded(hint.into(), MESSAGE_CHARACTERS);
        self
    }

    fn after(mut self, seconds: u64) -> Self {
        self.details.retry_after = Some(seconds);
        self
    }

    /// Returns the JSON of the response, or of the event that ends a broken stream.
    pub(super) fn body(&self, shape: Shape) -> Value {
        let ErrorDetails { kind, code, param, message, hint, anthropic, .. } = &*self.details;
        let message = anthropic.as_ref().filter(|_| shape == Shape::Anthropic).unwrap_or(message);
        let message = if hint.is_empty() { message.clone() } else { format!("{message} ({hint})") };
        match shape {
            Shape::OpenAi => json!({"error": {
                "message": message, "type": kind, "param": param, "code": code,
            }}),
            Shape::Anthropic => json!({"type": "error", "error": {"type": self.anthropic_kind(), "message": message}}),
        }
    }

    /// Error code and field at fault, for logs. The message is not logged, because it
    /// may repeat the request.
    pub(super) fn fault(&self) -> (&'static str, Option<String>) {
        let ErrorDetails { kind, code, param, .. } = &*self.details;
        (code.unwrap_or(kind), param.clone())
    }

    /// Anthropic's error type for the status (docs.anthropic.com, "Errors").
    fn anthropic_kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            400..500 => "invalid_request_error",
            _ => "api_error",
        }
    }

    /// Returns the response. The error is attached as an extension, so that a later layer can
    /// change its shape.
    pub(super) fn response(&self, shape: Shape) -> Response {
        let mut response = (self.status, Extension(self.clone()), Json(self.body(shape))).into_response();
        if let Some(seconds) = self.details.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The client's own deadline has passed. Without this header, OpenAI's and Anthropic's
        // clients would retry twice.
        if self.status == StatusCode::GATEWAY_TIMEOUT {
            response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.response(Shape::OpenAi)
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        let message = client_names::for_clients(&error.for_author());
        let hint = match &error {
            ChatError::Stopped { .. } | ChatError::ShuttingDown | ChatError::NotStarted(_) => {
                "use another model or server, or tell the operator of this one".to_owned()
            }
            error => client_names::for_clients(&error.hint()),
        };
        let answer = match (&error, error.kind()) {
            // OpenAI's wording, which litellm and agents search for.
            (ChatError::TooLong { tokens, has_more, limit }, _) => {
                let more = if *has_more { "more than " } else { "" };
                let text = format!(
                    "this model's maximum context length is {limit} tokens, but the prompt has {more}{tokens} tokens"
                );
                let mut error = ApiError::invalid("messages", text).code("context_length_exceeded");
                // Anthropic's wording, which its agents search for.
                error.details.anthropic = Some(format!("prompt is too long: {tokens} tokens > {limit} maximum"));
                error
            }
            (_, ErrorKind::Request) => ApiError::invalid(param(&error), message),
            (ChatError::Overloaded { .. }, _) => ApiError::full(message).code("overloaded"),
            // After the queue deadline the client may retry, because another server may have
            // capacity. After any other deadline, a retry would be too late for the client.
            (ChatError::TooLate { deadline: Deadline::Queue, .. }, _) => ApiError::busy(message).code("queue_deadline"),
            (ChatError::TooLate { .. }, _) => {
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message).code("deadline_exceeded")
            }
            (_, ErrorKind::Busy) => ApiError::busy(message),
            (ChatError::NonFiniteLogits | ChatError::PreparationDied | ChatError::GivenUp { .. }, _) => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
            }
            (_, ErrorKind::Model) => ApiError::unavailable(message),
        };
        answer.hint(hint)
    }
}

/// Field of a chat request that the error is about.
fn param(error: &ChatError) -> &'static str {
    match error {
        ChatError::NoTokens => "max_tokens",
        ChatError::MinTokens { .. } => "min_tokens",
        ChatError::Samples { .. } => "n",
        ChatError::TenantName { .. } => "x-tenant",
        ChatError::FormatWithoutEnd => "ignore_eos",
        ChatError::Format(_) => "response_format",
        ChatError::Tools(_) => "tools",
        ChatError::Layout(LayoutError::TextOnly { .. } | LayoutError::NoVideos { .. }) => "messages",
        ChatError::Sampling(error) => match &**error {
            SamplingError::OutOfRange { parameter, .. }
            | SamplingError::TooManyTokens { parameter, .. }
            | SamplingError::UnknownToken { parameter, .. } => parameter,
            SamplingError::TooManyLogProbabilities { .. } => "top_logprobs",
            _ => "messages",
        },
        ChatError::Text(error) if matches!(**error, TextError::StopStrings { .. }) => "stop",
        _ => "messages",
    }
}
