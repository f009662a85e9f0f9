//! How much a model shall think.

use crate::Chat;

/// The chat with an effort, in both words that templates know: models that can do without thinking read
/// `enable_thinking`, those that think by degrees `reasoning_effort`.
pub(super) fn with_effort(chat: Chat, effort: Option<String>) -> Chat {
    let Some(effort) = effort else { return chat };
    let chat = if effort == "none" { chat.template_variable("enable_thinking", false) } else { chat };
    chat.template_variable("reasoning_effort", effort)
}
