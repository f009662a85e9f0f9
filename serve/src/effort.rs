//! Reasoning settings of a chat: the effort, and variables of the chat template.

use bursar::Chat;
use serde_json::{Map, Value};

/// Sets the effort. Models whose thinking can be turned off read the template variable
/// `enable_thinking`. Models with several levels of thinking read `reasoning_effort`. Templates
/// refuse a level that they do not know, and `none` is not a level.
pub(super) fn with_effort(chat: Chat, effort: Option<String>) -> Chat {
    match effort.as_deref() {
        Some("none") => chat.template_variable("enable_thinking", false),
        Some(effort) => chat.template_variable("reasoning_effort", effort),
        None => chat,
    }
}

/// Sets the template variables of `chat_template_kwargs`, which override other settings.
pub(super) fn with_variables(chat: Chat, variables: Option<Map<String, Value>>) -> Chat {
    variables.into_iter().flatten().fold(chat, |chat, (name, value)| chat.template_variable(name, value))
}
