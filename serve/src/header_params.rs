//! Request parameters in HTTP headers: the tenant and the deadlines. They are the
//! same for all APIs.

use std::time::Duration;

use axum::http::HeaderMap;
use bursar::{Chat, Tenant};

use super::{error::ApiError, models::shortened};

type Set = fn(Chat, Duration) -> Chat;

/// Deadline headers, in milliseconds from the arrival of the request, with the chat
/// option that each sets.
const DEADLINES: [(&str, Set); 3] = [
    ("x-queue-deadline-ms", Chat::queue_deadline),
    ("x-first-token-deadline-ms", Chat::first_token_deadline),
    ("x-deadline-ms", Chat::deadline),
];

/// Header that names the tenant of the request.
const TENANT: &str = "x-tenant";

#[derive(Clone, Default)]
pub(super) struct HeaderParams {
    tenant: Option<String>,
    deadlines: [Option<Duration>; DEADLINES.len()],
}

impl HeaderParams {
    /// Parses the headers. If the client's key determines the tenant (`of_key`), the
    /// header cannot change it.
    ///
    /// # Errors
    /// The value of a header is invalid. The error names the header.
    pub(super) fn of(headers: &HeaderMap, of_key: Option<String>) -> Result<Self, ApiError> {
        let mut header_params = HeaderParams { tenant: of_key, ..HeaderParams::default() };
        if header_params.tenant.is_none()
            && let Some(value) = headers.get(TENANT)
        {
            let name = value.to_str().unwrap_or_default();
            if !(1..=Tenant::BYTES_MAX).contains(&name.len()) {
                let message =
                    format!("`{TENANT}` is invalid; expected 1 to {} printable ASCII characters", Tenant::BYTES_MAX);
                return Err(ApiError::invalid(TENANT, message));
            }
            header_params.tenant = Some(name.to_owned());
        }
        for (deadline, (name, _)) in header_params.deadlines.iter_mut().zip(DEADLINES) {
            let Some(value) = headers.get(name) else { continue };
            let text = value.to_str().unwrap_or_default();
            let milliseconds = text.trim().parse::<u64>().map_err(|_| {
                let message = format!("`{name}` is `{}`; expected a whole number of milliseconds", shortened(text));
                ApiError::invalid(name, message).hint("0 sets no deadline")
            })?;
            *deadline = Some(if milliseconds == 0 { Duration::MAX } else { Duration::from_millis(milliseconds) });
        }
        Ok(header_params)
    }

    /// Sets the tenant and the deadlines of the chat.
    pub(super) fn apply(&self, chat: Chat) -> Chat {
        let chat = self.tenant.iter().fold(chat, Chat::tenant);
        let set = self.deadlines.iter().zip(DEADLINES).filter_map(|(deadline, (_, set))| Some(((*deadline)?, set)));
        set.fold(chat, |chat, (deadline, set)| set(chat, deadline))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Shape;

    #[test]
    fn the_tenant_of_a_key_overrides_the_tenant_header() {
        let read = |name: &str, of_key: Option<&str>| {
            let headers = HeaderMap::from_iter([(TENANT.parse().expect("a name"), name.parse().expect("a value"))]);
            let header_params = HeaderParams::of(&headers, of_key.map(str::to_owned));
            header_params
                .map_err(|error| error.body(Shape::OpenAi)["error"]["param"].clone())
                .map(|header_params| header_params.tenant)
        };
        assert_eq!(read("gold", None), Ok(Some("gold".to_owned())));
        assert_eq!(read("gold", Some("key-2")), Ok(Some("key-2".to_owned())));
        for wrong in ["", &"t".repeat(65)] {
            assert_eq!(read(wrong, None), Err("x-tenant".into()), "{wrong}");
        }
    }

    #[test]
    fn header_deadlines_are_whole_milliseconds_and_zero_means_none() {
        let read = |text: &'static str| {
            HeaderParams::of(
                &HeaderMap::from_iter([("x-deadline-ms".parse().expect("a name"), text.parse().expect("a value"))]),
                None,
            )
        };
        assert_eq!(read("250").ok().map(|read| read.deadlines), Some([None, None, Some(Duration::from_millis(250))]));
        assert_eq!(read("0").ok().map(|read| read.deadlines), Some([None, None, Some(Duration::MAX)]));
        for wrong in ["", "-1", "1.5", "soon"] {
            let error = read(wrong).map(drop).expect_err("the request is invalid").body(Shape::OpenAi);
            assert_eq!(error["error"]["param"], "x-deadline-ms", "{wrong}");
        }
    }
}
