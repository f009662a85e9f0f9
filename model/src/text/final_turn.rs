//! Continuation of the model's last turn: the prompt ends where the text of that turn ends.
//!
//! The method is that of `continue_final_message` in transformers 5.17
//! (`utils/chat_template_utils.py`). A tag is appended to the text, and the rendered prompt is
//! truncated at the tag. If the space at the end of the tag is missing from the prompt, the
//! template has trimmed the text, and the white space before the tag is removed too.

use bursar_budgets::Hint;
use serde_json::Value;
use thiserror::Error;

/// A conversation whose last turn cannot be continued.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ContinueError {
    /// The last turn is not the model's.
    #[error("the last turn has the role {role}; only a turn of the model can be continued")]
    NotTheModels {
        /// The role of the last turn, or "none".
        role: String,
    },
    /// The model's last turn does not end with text or reasoning.
    #[error("the model's last turn does not end with text or reasoning, so it cannot be continued")]
    Nothing,
    /// The chat template changes the last turn or omits it.
    #[error("the chat template changes or omits the last turn, so the turn cannot be continued")]
    NotShown,
    /// The prompt would also begin a new turn.
    #[error("the request continues the last turn and also begins a new one")]
    BeginsAnother,
}

impl Hint for ContinueError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            ContinueError::NotTheModels { .. } => "end the chat with a turn of the model, or do not continue it".into(),
            ContinueError::Nothing => "end the turn with its text, and send tool calls in an earlier turn".into(),
            ContinueError::NotShown => {
                "send reasoning as a reasoning part, not as text with tags; some templates drop it from the last turn"
                    .into()
            }
            ContinueError::BeginsAnother => "leave out `add_generation_prompt`, or `continue_final_message`".into(),
        }
    }
}

/// The text of the last turn, and the tag that was appended to it.
pub(super) struct FinalTurn {
    /// Two marks, which occur nowhere else in the conversation, and a space.
    tag: String,
    text: String,
}

impl FinalTurn {
    /// Appends a tag made of `mark` to the last turn of `messages`, a JSON array of messages in the
    /// form that templates take. The tag follows the turn's text, or its reasoning if the turn has
    /// no text.
    pub(super) fn tagging(messages: &mut Value, mark: char) -> Result<Self, ContinueError> {
        let tag = format!("{mark}{mark} ");
        let last = messages.as_array_mut().and_then(|turns| turns.last_mut());
        let role = last.as_ref().and_then(|turn| turn["role"].as_str()).unwrap_or("none").to_owned();
        let Some(Value::Object(turn)) = last.filter(|_| role == "assistant") else {
            return Err(ContinueError::NotTheModels { role });
        };
        let calls = turn.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
        let is_said = match turn.get("content") {
            Some(Value::String(text)) => !text.is_empty() || !turn.contains_key("reasoning_content"),
            Some(Value::Array(parts)) => !parts.is_empty(),
            _ => false,
        };
        let end = match turn.get_mut(if is_said { "content" } else { "reasoning_content" }) {
            Some(Value::Array(parts)) => parts.last_mut().and_then(|part| part.get_mut("text")),
            end => end,
        };
        let Some(Value::String(end)) = end.filter(|_| !calls) else { return Err(ContinueError::Nothing) };
        let text = end.clone();
        end.push_str(&tag);
        Ok(FinalTurn { tag, text })
    }

    /// The rendered conversation up to the tag.
    pub(super) fn cut(&self, mut rendered: String) -> Result<String, ContinueError> {
        let at = rendered.rfind(self.tag.trim_end()).filter(|_| rendered.contains(self.text.trim()));
        let at = at.ok_or(ContinueError::NotShown)?;
        let kept = if rendered[at..].starts_with(&self.tag) { at } else { rendered[..at].trim_end().len() };
        rendered.truncate(kept);
        Ok(rendered)
    }
}
