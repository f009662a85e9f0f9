//! Errors as Dynamo's frontend understands them: which are the client's, and which another worker may answer.

use bursar::{ChatError, ErrorKind, Hint, serve::NotRead};
use dynamo_backend_common::{BackendError, DynamoError, ErrorType};

/// An error of this kind. Clients read it too, so it has nothing of a request but its sizes: Bursar's errors are so.
fn told(kind: ErrorType, told: impl std::fmt::Display) -> DynamoError {
    DynamoError::builder().error_type(kind).message(told.to_string()).public_message(told.to_string()).build()
}

/// The request is wrong: 400, and no other worker is tried.
pub(crate) fn invalid(what: impl std::fmt::Display) -> DynamoError {
    told(ErrorType::Backend(BackendError::InvalidArgument), what)
}

/// This worker is no longer, or not yet, to be asked. Another one is tried.
pub(crate) fn away(why: impl std::fmt::Display) -> DynamoError {
    told(ErrorType::WorkerUnavailable, why)
}

/// Why a chat was not answered. Where the worker is full or has lost what it had, the frontend migrates the request.
/// One that may be what kills its worker is not handed to the next.
pub(crate) fn of_chat(error: &ChatError) -> DynamoError {
    let kind = match (error.kind(), error) {
        (ErrorKind::Request, _) => ErrorType::Backend(BackendError::InvalidArgument),
        (_, ChatError::TooLate { .. }) => ErrorType::DeadlineExceeded,
        (ErrorKind::Busy, _) => ErrorType::WorkerOverloaded,
        (_, ChatError::GivenUp { .. } | ChatError::NotNumbers | ChatError::PreparationDied) => {
            ErrorType::Backend(BackendError::Unknown)
        }
        (ErrorKind::Model, _) => ErrorType::Backend(BackendError::EngineShutdown),
    };
    told(kind, format!("{error}; {}", error.hint()))
}

/// Why a picture was not read. Its URL may have a secret, so it is not told.
pub(crate) fn of_picture(error: &NotRead) -> DynamoError {
    let kind =
        if error.is_busy() { ErrorType::WorkerOverloaded } else { ErrorType::Backend(BackendError::InvalidArgument) };
    told(kind, format!("a picture could not be read; {}", error.hint()))
}

/// The model did not start, or did not obey.
pub(crate) fn of_engine(error: impl std::fmt::Display) -> DynamoError {
    DynamoError::builder()
        .error_type(ErrorType::Backend(BackendError::EngineShutdown))
        .message(error.to_string())
        .build()
}
