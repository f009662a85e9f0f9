//! Errors for Dynamo's frontend: errors that the client caused, and errors after which
//! another worker may answer.

use bursar::{ChatError, ErrorKind, Hint};
use bursar_serve::PictureReadError;
use dynamo_backend_common::{BackendError, DynamoError, ErrorType};

/// An error of this kind. The message is also sent to clients, so it must not repeat a request's
/// content. Bursar's messages contain only the sizes of a request.
fn error_of(kind: ErrorType, message: impl std::fmt::Display) -> DynamoError {
    DynamoError::builder().error_type(kind).message(message.to_string()).public_message(message.to_string()).build()
}

/// The request is invalid: status 400, and no other worker is tried.
pub(crate) fn invalid(what: impl std::fmt::Display) -> DynamoError {
    error_of(ErrorType::Backend(BackendError::InvalidArgument), what)
}

/// This worker has not started, has ended, or sleeps. The frontend tries another worker.
pub(crate) fn away(why: impl std::fmt::Display) -> DynamoError {
    error_of(ErrorType::WorkerUnavailable, why)
}

/// The error of a failed chat. If the worker is full or has lost its state, the frontend migrates
/// the request. A request that may have killed its worker is not sent to another worker.
pub(crate) fn of_chat(error: &ChatError) -> DynamoError {
    let kind = match (error.kind(), error) {
        (ErrorKind::Request, _) => ErrorType::Backend(BackendError::InvalidArgument),
        (_, ChatError::TooLate { .. }) => ErrorType::DeadlineExceeded,
        (ErrorKind::Busy, _) => ErrorType::WorkerOverloaded,
        (_, ChatError::GivenUp { .. } | ChatError::NonFiniteLogits | ChatError::PreparationDied) => {
            ErrorType::Backend(BackendError::Unknown)
        }
        (ErrorKind::Model, _) => ErrorType::Backend(BackendError::EngineShutdown),
    };
    error_of(kind, format!("{error}; {}", error.hint()))
}

/// The error of a picture that could not be read. The message leaves out the URL, which
/// may contain a secret.
pub(crate) fn of_picture(error: &PictureReadError) -> DynamoError {
    let kind =
        if error.is_busy() { ErrorType::WorkerOverloaded } else { ErrorType::Backend(BackendError::InvalidArgument) };
    error_of(kind, format!("a picture could not be read; {}", error.hint()))
}

/// The worker's runtime or model did not start.
pub(crate) fn of_engine(error: impl std::fmt::Display) -> DynamoError {
    DynamoError::builder()
        .error_type(ErrorType::Backend(BackendError::EngineShutdown))
        .message(error.to_string())
        .build()
}
