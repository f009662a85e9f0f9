//! A chat as a user builds it: its turns and tools, and the settings for its reply.

mod content;
mod generation;
mod scheduling;
mod settings;

use std::{fmt, sync::Arc};

use bursar_model::{
    flow::Media,
    text::{ContentPart, Message, ReplyFormat, Role},
};

pub use content::{Content, Image, Video};
pub use settings::ToolChoice;
pub(crate) use settings::{ChatScheduling, Generation};

/// A conversation with the settings for its reply. A chat is an ordinary value that can be stored,
/// cloned and continued. Nothing is checked until the chat is sent to a model. Then large
/// pictures are resized, and anything else outside the model's limits is refused, with the limit,
/// the value and a hint.
///
/// ```
/// use bursar_actors::chat::{Chat, Image};
/// use bursar_model::sampling::OutputFormat;
/// use std::time::Duration;
/// let chat = Chat::new()
///     .system("Answer in one word.")
///     .user("What color is the star?")
///     .image(Image::from_bytes(bursar_model::demo::pictures()[0].bytes))
///     .max_tokens(16);
/// let colors = ["red", "blue"].map(str::to_owned).to_vec();
/// let formed = chat.clone().format(OutputFormat::Choice(colors));
/// let scored = chat.clone().log_probabilities(5).deadline(Duration::from_secs(10)).stop("\n\n");
/// let next_turn = chat.assistant("blue").user("And the circle?"); // reuses the cached first turn
/// ```
#[derive(Clone, Default)]
pub struct Chat {
    turns: Vec<(Role, Vec<Content>)>,
    /// A prompt as tokens, instead of rendered turns.
    pub(crate) tokens: Option<Arc<[u32]>>,
    pub(crate) tools: Vec<serde_json::Value>,
    pub(crate) tool_choice: ToolChoice,
    pub(crate) calls_one_tool: bool,
    pub(crate) reply_format: Option<ReplyFormat>,
    pub(crate) template_variables: serde_json::Map<String, serde_json::Value>,
    pub(crate) continues: bool,
    pub(crate) begins_turn: Option<bool>,
    pub(crate) generation: Generation,
    pub(crate) scheduling: ChatScheduling,
}

/// Prints kinds and sizes only, because content, stop strings and output formats
/// belong to the user.
impl fmt::Debug for Chat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Chat")
            .field("turns", &self.turns)
            .field("tokens", &self.tokens.as_ref().map(|tokens| tokens.len()))
            .field("tools", &self.tools.len())
            .finish_non_exhaustive()
    }
}

impl Chat {
    /// Creates an empty conversation. Its reply uses the settings
    /// of the checkpoint's `generation_config.json`.
    pub fn new() -> Self {
        Chat::default()
    }

    /// Creates a chat from a prompt of tokens, which are used as they are: nothing is rendered or
    /// added. The placeholder token of the model's templates must occur once for each picture or
    /// video, or once for each step of a video if the model's prompts have text between steps (ADR
    /// 18). Add the pictures with [`image`](Chat::image), in order. This constructor is meant for
    /// prompts that another program tokenized, and for measurements.
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// let chat = Chat::from_tokens([11, 7, 500]).temperature(0.0).max_tokens(8).ignore_end();
    /// ```
    pub fn from_tokens(tokens: impl Into<Arc<[u32]>>) -> Self {
        Chat { tokens: Some(tokens.into()), ..Chat::default() }
    }

    /// Adds a system turn.
    pub fn system(self, text: impl Into<String>) -> Self {
        self.turn(Role::System, vec![Content::Text(text.into())])
    }

    /// Adds a user turn. A picture that is added next joins this turn and precedes its text.
    pub fn user(self, text: impl Into<String>) -> Self {
        self.turn(Role::User, vec![Content::Text(text.into())])
    }

    /// Adds an assistant turn.
    pub fn assistant(self, text: impl Into<String>) -> Self {
        self.turn(Role::Assistant, vec![Content::Text(text.into())])
    }

    /// Adds a picture to the last turn if that is a user turn, otherwise to a new user turn. The
    /// picture follows other pictures and videos of the turn and precedes its text, which is the
    /// order in which models are trained. For another order, see [`turn`](Chat::turn).
    pub fn image(self, image: Image) -> Self {
        self.show(Content::Image(image))
    }

    /// Adds a video to the turn and at the position that [`image`](Chat::image) uses for a picture.
    pub fn video(self, video: Video) -> Self {
        self.show(Content::Video(video))
    }

    fn show(mut self, visual: Content) -> Self {
        if !matches!(self.turns.last(), Some((Role::User, _))) {
            self.turns.push((Role::User, Vec::new()));
        }
        if let Some((_, contents)) = self.turns.last_mut() {
            let shown = contents.iter().take_while(|content| !matches!(content, Content::Text(_))).count();
            contents.insert(shown, visual);
        }
        self
    }

    /// Adds a turn with its contents in this order.
    pub fn turn(mut self, role: Role, contents: Vec<Content>) -> Self {
        self.turns.push((role, contents));
        self
    }

    /// Adds functions that the model may call. [`ChatEvent::ToolCall`](super::ChatEvent::ToolCall)
    /// reports its calls. Each tool is JSON in the form that the chat template expects, usually
    /// OpenAI's
    /// `{"type": "function", "function": {"name": .., "description": .., "parameters": ..}}`.
    pub fn tools(mut self, tools: impl IntoIterator<Item = serde_json::Value>) -> Self {
        self.tools.extend(tools);
        self
    }

    /// Sets whether the model calls tools. By default the model decides. Forcing a call
    /// requires that the model's format of tool calls is known, and that
    /// [`format`](Chat::format) supports the tool's schema.
    pub fn tool_choice(mut self, choice: impl Into<Option<ToolChoice>>) -> Self {
        self.tool_choice = choice.into().unwrap_or(self.tool_choice);
        self
    }

    /// Sets whether the reply may have more than one tool call, `true` by default. If `may` is
    /// `false`, the reply ends with its first complete call.
    pub fn parallel_tool_calls(mut self, may: impl Into<Option<bool>>) -> Self {
        self.calls_one_tool = may.into().map_or(self.calls_one_tool, |may| !may);
        self
    }

    pub(crate) fn is_parallel(&self) -> bool {
        !self.calls_one_tool && !matches!(self.tool_choice, ToolChoice::Named(_))
    }

    /// Sets how the model writes tool calls and reasoning, instead of deriving that from its chat
    /// template. `ReplyFormat::default()` leaves the whole reply as text.
    pub fn reply_format(mut self, format: ReplyFormat) -> Self {
        self.reply_format = Some(format);
        self
    }

    /// Adds a function call to the last turn if that is an assistant turn, otherwise to a new
    /// assistant turn. The call is a [`ToolCall`](super::ToolCall) of an earlier reply, or JSON in
    /// the form that the chat template expects, usually OpenAI's
    /// `{"type": "function", "function": {"name": .., "arguments": {..}}}`.
    pub fn tool_call(self, call: impl Into<serde_json::Value>) -> Self {
        self.answered(Content::ToolCall(call.into()))
    }

    /// Adds reasoning to the last turn if that is an assistant turn, otherwise to a new assistant
    /// turn. The template decides whether the model sees the reasoning. Many templates show only
    /// reasoning after the last user turn.
    pub fn reasoning(self, text: impl Into<String>) -> Self {
        self.answered(Content::Reasoning(text.into()))
    }

    fn answered(mut self, content: Content) -> Self {
        if !matches!(self.turns.last(), Some((Role::Assistant, _))) {
            self.turns.push((Role::Assistant, Vec::new()));
        }
        if let Some((_, contents)) = self.turns.last_mut() {
            contents.push(content);
        }
        self
    }

    /// Adds the result of the function call with this id ([`ToolCall::id`](super::ToolCall::id)).
    /// Few chat templates show ids to the model. With other templates the model matches results to
    /// calls by order, so add one result for each call, in the order of the calls.
    pub fn tool_result(self, id: impl Into<String>, text: impl Into<String>) -> Self {
        self.turn(Role::Tool, vec![Content::ResultOf(id.into()), Content::Text(text.into())])
    }

    /// Sets a variable of the chat template, such as `enable_thinking`, which turns the reasoning
    /// of some models on or off.
    pub fn template_variable(mut self, name: impl Into<String>, value: impl Into<serde_json::Value>) -> Self {
        self.template_variables.insert(name.into(), value.into());
        self
    }

    /// Makes the reply continue the last turn, which must be an assistant turn with text or only
    /// reasoning. The existing text of that turn is not part of the reply. The prompt is cut as
    /// `continue_final_message` of transformers 5.17 does.
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// let chat = Chat::new().user("Name three colors.").assistant("1. Red\n2.").continue_final_message();
    /// ```
    pub fn continue_final_message(mut self) -> Self {
        self.continues = true;
        self
    }

    /// Sets whether the prompt ends with the beginning of an assistant turn. Default: `true`,
    /// unless the last turn is [continued](Chat::continue_final_message).
    pub fn add_generation_prompt(mut self, does: impl Into<Option<bool>>) -> Self {
        self.begins_turn = does.into().or(self.begins_turn);
        self
    }

    /// Returns `true` if the chat has neither turns nor tokens.
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty() && self.tokens.as_ref().is_none_or(|tokens| tokens.is_empty())
    }

    /// Returns `true` if the chat has anything that only a template could render: tools, settings
    /// for the end of the prompt, or content other than pictures and videos.
    pub(crate) fn says_more_than_tokens(&self) -> bool {
        let is_shown = |content: &Content| matches!(content, Content::Image(_) | Content::Video(_));
        let is_rendered = self.continues || self.begins_turn.is_some() || !self.tools.is_empty();
        is_rendered || self.turns.iter().any(|(_, contents)| !contents.iter().all(is_shown))
    }

    /// Approximate bytes of all texts, tool calls and tools.
    pub(crate) fn text_bytes(&self) -> usize {
        let contents = self.turns.iter().flat_map(|(_, contents)| contents);
        contents
            .map(|content| match content {
                Content::Text(text) | Content::Reasoning(text) => text.len(),
                Content::ToolCall(call) => call.to_string().len(),
                Content::Image(_) | Content::Video(_) | Content::ResultOf(_) => 0,
            })
            .sum::<usize>()
            + self.tools.iter().map(|tool| tool.to_string().len()).sum::<usize>()
    }

    /// Splits the chat into the turns as templates expect them, and the pictures and videos
    /// in order of appearance.
    pub(crate) fn split(&self) -> (Vec<Message>, Vec<Media>) {
        let mut visuals = Vec::new();
        let messages = self.turns.iter().map(|(role, contents)| {
            let content = contents.iter().map(|content| match content {
                Content::Text(text) => ContentPart::Text(text.clone()),
                Content::Image(image) => {
                    visuals.push(Media::Image(image.0.clone()));
                    ContentPart::Image
                }
                Content::Reasoning(text) => ContentPart::Reasoning(text.clone()),
                Content::ToolCall(call) => ContentPart::ToolCall(call.clone()),
                Content::ResultOf(id) => ContentPart::ResultOf(id.clone()),
                Content::Video(video) => {
                    visuals.push(Media::Video(video.0.clone()));
                    ContentPart::Video
                }
            });
            Message { role: *role, content: content.collect() }
        });
        (messages.collect(), visuals)
    }
}
