//! What the headers of a request say of its turn: its deadlines. They are the same for each API.

use std::time::Duration;

use axum::http::HeaderMap;

use super::{error::ApiError, models::shortened};
use crate::Chat;

/// Headers with a deadline each, in milliseconds from the request on, and what they set of a chat.
const DEADLINES: [(&str, fn(Chat, Duration) -> Chat); 3] = [
    ("x-queue-deadline-ms", Chat::queue_deadline),
    ("x-first-token-deadline-ms", Chat::first_token_deadline),
    ("x-deadline-ms", Chat::deadline),
];

/// What a request's headers say.
#[derive(Clone, Default)]
pub(super) struct Standing {
    deadlines: [Option<Duration>; DEADLINES.len()],
}

impl Standing {
    /// Reads the headers.
    ///
    /// # Errors
    /// A header that is no whole number, by its name.
    pub(super) fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        let mut standing = Standing::default();
        for (deadline, (name, _)) in standing.deadlines.iter_mut().zip(DEADLINES) {
            let Some(value) = headers.get(name) else { continue };
            let text = value.to_str().unwrap_or_default();
            let milliseconds = text.trim().parse::<u64>().map_err(|_| {
                let told = format!("`{name}` is `{}`, it must be a whole number of milliseconds", shortened(text));
                ApiError::invalid(name, told).hint("0 is no deadline")
            })?;
            *deadline = Some(if milliseconds == 0 { Duration::MAX } else { Duration::from_millis(milliseconds) });
        }
        Ok(standing)
    }

    /// The chat with this standing.
    pub(super) fn apply(&self, chat: Chat) -> Chat {
        let set = self.deadlines.iter().zip(DEADLINES).filter_map(|(deadline, (_, set))| Some(((*deadline)?, set)));
        set.fold(chat, |chat, (deadline, set)| set(chat, deadline))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::error::Shape;

    #[test]
    fn deadlines_are_whole_milliseconds_and_zero_is_none() {
        let read = |text: &'static str| Standing::of(&HeaderMap::from_iter([("x-deadline-ms".parse().expect("a name"), text.parse().expect("a value"))]));
        assert_eq!(read("250").ok().map(|read| read.deadlines), Some([None, None, Some(Duration::from_millis(250))]));
        assert_eq!(read("0").ok().map(|read| read.deadlines), Some([None, None, Some(Duration::MAX)]));
        for wrong in ["", "-1", "1.5", "soon"] {
            let error = read(wrong).map(drop).expect_err("it is wrong").body(Shape::OpenAi);
            assert_eq!(error["error"]["param"], "x-deadline-ms", "{wrong}");
        }
    }
}
