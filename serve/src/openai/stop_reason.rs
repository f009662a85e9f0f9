//! vLLM's `stop_reason`: the stop string or stop token that ended a reply.

use schemars::JsonSchema;
use serde::Serialize;

use bursar::StopReason;

/// The stop string or the stop token that ended the reply.
#[derive(Clone, Serialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum StopReasonBody {
    Text(String),
    Token(u32),
}

impl From<StopReason> for StopReasonBody {
    fn from(reason: StopReason) -> Self {
        match reason {
            StopReason::String(text) => StopReasonBody::Text(text),
            StopReason::Token(id) => StopReasonBody::Token(id),
        }
    }
}
