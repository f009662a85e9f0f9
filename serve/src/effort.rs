//! Reasoning effort of a chat.

use bursar::Chat;

/// Sets the effort in both template variables. Models whose thinking can be turned off read
/// `enable_thinking`; models with several levels of thinking read `reasoning_effort`.
pub(super) fn with_effort(chat: Chat, effort: Option<String>) -> Chat {
    let Some(effort) = effort else { return chat };
    let chat = if effort == "none" { chat.template_variable("enable_thinking", false) } else { chat };
    chat.template_variable("reasoning_effort", effort)
}
