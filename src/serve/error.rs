//! Errors as clients read them: OpenAI's and Anthropic's shapes.

use axum::{
    Extension, Json,
    http::{
        HeaderValue, StatusCode,
        header::{RETRY_AFTER, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::client_names;
use crate::{ChatError, Deadline, ErrorKind, Hint, LayoutError, SamplingError, TextError};

/// Seconds after which a client may ask a full model again: about a reply.
const FULL_SECONDS: u64 = 1;
/// Seconds after which a client may ask a model again that is being loaded.
const LOADING_SECONDS: u64 = 2;

/// A message may name fields of a request, which clients choose: longer ones are cut.
const MESSAGE_CHARACTERS: usize = 2048;
/// The same for the field at fault, which is also logged.
const PARAM_CHARACTERS: usize = 128;

fn bounded(text: String, characters_max: usize) -> String {
    match text.char_indices().nth(characters_max) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// Why a request was not answered.
#[derive(Clone, Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    told: Box<ErrorDetails>,
}

/// What is told with the status.
#[derive(Clone, Debug, Default)]
struct ErrorDetails {
    /// OpenAI's `type`.
    kind: &'static str,
    /// OpenAI's `code`.
    code: Option<&'static str>,
    /// The field of the request at fault.
    param: Option<String>,
    message: String,
    hint: String,
    /// In Anthropic's own words, where its clients look for them.
    anthropic: Option<String>,
    retry_after: Option<u64>,
}

/// The shape of an error's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    OpenAi,
    Anthropic,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = bounded(message.into(), MESSAGE_CHARACTERS);
        ApiError { status, told: Box::new(ErrorDetails { kind, message, ..ErrorDetails::default() }) }
    }

    /// A field is wrong.
    pub(super) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        error.told.param = Some(bounded(param.into(), PARAM_CHARACTERS));
        error
    }

    /// There is no such thing.
    pub(super) fn not_found(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    /// Too much at once; the client may ask again.
    pub(super) fn full(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message).after(FULL_SECONDS)
    }

    /// The model does not answer now.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message)
    }

    /// The model is being loaded.
    pub(super) fn loading(message: impl Into<String>) -> Self {
        ApiError::unavailable(message).after(LOADING_SECONDS)
    }

    /// There is no room for it now.
    pub(super) fn busy(message: impl Into<String>) -> Self {
        ApiError::unavailable(message).after(FULL_SECONDS)
    }

    pub(super) fn code(mut self, code: &'static str) -> Self {
        self.told.code = Some(code);
        self
    }

    /// The error about a field that this API has under another name.
    pub(super) fn renamed(mut self, names: &[(&str, &str)]) -> Self {
        if let Some((_, theirs)) = names.iter().find(|(ours, _)| self.told.param.as_deref() == Some(ours)) {
            self.told.param = Some((*theirs).to_owned());
        }
        self
    }

    /// The same error, about this field.
    pub(super) fn of_field(mut self, param: &str) -> Self {
        self.told.param = Some(bounded(param.to_owned(), PARAM_CHARACTERS));
        self
    }

    /// What is wrong, for people.
    pub(super) fn message(&self) -> &str {
        &self.told.message
    }

    /// What to change.
    pub(super) fn hint_text(&self) -> &str {
        &self.told.hint
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.told.hint = bounded(hint.into(), MESSAGE_CHARACTERS);
        self
    }

    fn after(mut self, seconds: u64) -> Self {
        self.told.retry_after = Some(seconds);
        self
    }

    /// The body of the answer, and of the event that ends a broken stream.
    pub(super) fn body(&self, shape: Shape) -> Value {
        let ErrorDetails { kind, code, param, message, hint, anthropic, .. } = &*self.told;
        let message = anthropic.as_ref().filter(|_| shape == Shape::Anthropic).unwrap_or(message);
        let message = if hint.is_empty() { message.clone() } else { format!("{message} ({hint})") };
        match shape {
            Shape::OpenAi => json!({"error": {
                "message": message, "type": kind, "param": param, "code": code,
            }}),
            Shape::Anthropic => json!({"type": "error", "error": {"type": self.anthropic_kind(), "message": message}}),
        }
    }

    /// What kind of error it is and the field at fault, for logs: its message may repeat the request.
    pub(super) fn fault(&self) -> (&'static str, Option<String>) {
        let ErrorDetails { kind, code, param, .. } = &*self.told;
        (code.unwrap_or(kind), param.clone())
    }

    /// As Anthropic names statuses (docs.anthropic.com, "Errors").
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

    /// The answer keeps the error beside its body, so that another shape can be made of it.
    pub(super) fn response(&self, shape: Shape) -> Response {
        let mut response = (self.status, Extension(self.clone()), Json(self.body(shape))).into_response();
        if let Some(seconds) = self.told.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The client's own time is over. OpenAI's and Anthropic's clients would ask twice more.
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
            // In OpenAI's words, which litellm and agents look for.
            (ChatError::TooLong { tokens, has_more, limit }, _) => {
                let more = if *has_more { "more than " } else { "" };
                let told = format!(
                    "this model's maximum context length is {limit} tokens, but the prompt has {more}{tokens} tokens"
                );
                let mut error = ApiError::invalid("messages", told).code("context_length_exceeded");
                // In Anthropic's, which its agents look for.
                error.told.anthropic = Some(format!("prompt is too long: {tokens} tokens > {limit} maximum"));
                error
            }
            (_, ErrorKind::Request) => ApiError::invalid(param(&error), message),
            (ChatError::Overloaded { .. }, _) => ApiError::full(message).code("overloaded"),
            // Another server may have room. After the others the client's own time is over.
            (ChatError::TooLate { deadline: Deadline::Queue, .. }, _) => ApiError::busy(message).code("queue_deadline"),
            (ChatError::TooLate { .. }, _) => {
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message).code("deadline_exceeded")
            }
            (_, ErrorKind::Busy) => ApiError::busy(message),
            (ChatError::NotNumbers | ChatError::PreparationDied | ChatError::GivenUp { .. }, _) => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
            }
            (_, ErrorKind::Model) => ApiError::unavailable(message),
        };
        answer.hint(hint)
    }
}

/// The field of a chat request that an error is about.
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
