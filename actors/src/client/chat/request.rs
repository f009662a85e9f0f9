//! A chat as a user builds it: its turns, pictures, videos and tools.

use std::{fmt, fs::File, path::Path, sync::Arc};

use bursar_budgets::Bytes;
use bursar_model::{
    error::{ImageError, VideoError},
    flow::{self, EncodedImage, ImageLimits, Media, ResizeLimits},
    processor::FrameSampling,
    text::{Message, Part, ReplyFormat, Role},
};

use super::{ToolChoice, generation::Generation, scheduling::ChatScheduling};

/// Maximum bytes read from a file before the model is known, as a bound against endless files.
const FILE_BYTES_MAX: Bytes = Bytes::gib(1);

/// A picture for a chat: encoded as PNG, JPEG, WebP, GIF (first frame), BMP or TIFF,
/// or given as pixels.
#[derive(Clone, Debug)]
pub struct Image(pub(super) EncodedImage);

impl Image {
    /// Reads a file of up to 1 GiB. The model's own limit
    /// ([`image_limits`](crate::engine::LoadOptions::image_limits), by default 20 MiB) is checked
    /// when the chat is sent.
    ///
    /// # Errors
    /// The file cannot be read or is too large.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ImageError> {
        Image::open_within(path, &ImageLimits { bytes_max: FILE_BYTES_MAX, ..ImageLimits::default() })
    }

    /// Reads a file within `limits`, usually the limits of the model that the chat will be sent to.
    ///
    /// # Errors
    /// The file cannot be read or is too large.
    pub fn open_within(path: impl AsRef<Path>, limits: &ImageLimits) -> Result<Self, ImageError> {
        EncodedImage::open(path, limits).map(Image)
    }

    /// Reads an open file; see [`open_within`](Self::open_within). Errors call the file `name`.
    ///
    /// # Errors
    /// See [`open_within`](Self::open_within).
    pub fn read_within(file: &File, name: impl Into<String>, limits: &ImageLimits) -> Result<Self, ImageError> {
        EncodedImage::read(file, name.into(), limits).map(Image)
    }

    /// Returns the displayed width and height in pixels, if the header can be read and is within
    /// `limits`. Nothing is decoded, so the file may still be damaged.
    ///
    /// # Errors
    /// The errors with which a model with these limits would refuse the picture before decoding it.
    pub fn size(&self, limits: &ImageLimits) -> Result<(u32, u32), ImageError> {
        self.0.probe(limits).map(|header| (header.width, header.height))
    }

    /// Takes encoded bytes. They are checked when the chat is sent.
    pub fn from_bytes(encoded: impl Into<Arc<[u8]>>) -> Self {
        Image(EncodedImage::new(encoded))
    }

    /// Takes decoded pixels: `[height, width, 3]` bytes of red, green and blue, rows from the top.
    /// For pictures from a camera, a renderer or another decoder.
    ///
    /// # Errors
    /// A side is zero, or the number of bytes does not match.
    pub fn from_rgb(width: u32, height: u32, pixels: impl Into<Arc<[u8]>>) -> Result<Self, ImageError> {
        EncodedImage::from_rgb(width, height, pixels).map(Image)
    }
}

/// Limits of one picture, which replace the settings of the model's processor.
impl Image {
    /// Resizes the picture to at least `min` and at most `max` pixels, like `min_pixels` and
    /// `max_pixels` of transformers' Qwen processors and OpenAI's `detail`. If `min` is not set and
    /// the model's own minimum is above `max`, the minimum is lowered to `max`. For a model that
    /// cuts pictures into tiles, `max` counts the pixels of all tiles. A limit above the model's
    /// envelope, or one that the model cannot follow, is refused when the chat is sent.
    ///
    /// ```
    /// use bursar_actors::chat::Image;
    /// let picture = Image::from_bytes(bursar_model::demo::pictures()[0].bytes);
    /// let coarse = picture.within_pixels(None, Some(512 * 512));
    /// ```
    pub fn within_pixels(self, min: Option<u64>, max: Option<u64>) -> Self {
        let own = ResizeLimits { pixels_min: min, pixels_max: max, ..self.0.own_limits() };
        Image(self.0.within(own))
    }

    /// Cuts the picture into at most `max` tiles, not counting the thumbnail. `max` has the meaning
    /// of `max_patches` in transformers' processor for InternVL, and of `max_dynamic_patch` in
    /// InternVL's releases. A picture with this limit is refused when the chat is sent if `max` is
    /// above the model's envelope, or if the model does not cut pictures into tiles.
    pub fn within_tiles(self, max: u32) -> Self {
        let own = ResizeLimits { tiles_max: Some(max), ..self.0.own_limits() };
        Image(self.0.within(own))
    }
}

/// A video for a chat, given as frames: pictures of one size, in the order in which they are shown.
/// For an animated GIF or WebP, the frames are picked here. For any other video, the caller decodes
/// it and picks the frames.
///
/// ```
/// use bursar_actors::chat::{Chat, Image, Video};
/// let frame = Image::from_bytes(bursar_model::demo::pictures()[0].bytes);
/// let video = Video::from_frames(vec![frame; 4], 2.0); // two seconds
/// let chat = Chat::new().user("What happens?").video(video);
/// ```
#[derive(Clone, Debug)]
pub struct Video(pub(super) flow::Video);

impl Video {
    /// Takes frames, and the number of *these* frames per second. For example, if every twelfth
    /// frame of a video of 24 frames per second was picked, pass 2. The model derives the time
    /// between frames from this number. The frames are checked when the chat is sent.
    pub fn from_frames(frames: impl IntoIterator<Item = Image>, frames_per_second: f64) -> Self {
        let frames: Vec<EncodedImage> = frames.into_iter().map(|frame| frame.0).collect();
        Video(flow::Video::new(frames, frames_per_second))
    }

    /// Decodes evenly spaced frames of an animated GIF or WebP. Nothing is decoded before the size
    /// of all frames is known from the file's blocks.
    ///
    /// # Errors
    /// The file is neither GIF nor WebP, is damaged, exceeds `limits`, or has more pixels in all
    /// frames together than may be decoded.
    pub fn from_animation(encoded: &[u8], sampling: &FrameSampling, limits: &ImageLimits) -> Result<Self, VideoError> {
        flow::Video::from_animation(encoded, sampling, limits).map(Video)
    }

    /// Bytes of the frames as stored: encoded files or pixels.
    pub fn bytes(&self) -> Bytes {
        self.0.frames().iter().map(|frame| Bytes::of_slice(frame.bytes())).sum()
    }
}

/// One part of a turn.
#[derive(Clone)]
pub enum Content {
    Text(String),
    Image(Image),
    Video(Video),
    /// Reasoning of the model. See [`Chat::reasoning`].
    Reasoning(String),
    /// A function call. See [`Chat::tool_call`].
    ToolCall(serde_json::Value),
    /// The id of the call whose result this turn contains. See [`Chat::tool_result`].
    ResultOf(String),
}

/// Prints kinds and sizes, never the content, because it belongs to the user.
impl fmt::Debug for Content {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Content::Text(text) => write!(formatter, "Text({} bytes)", text.len()),
            Content::Image(image) => write!(formatter, "{image:?}"),
            Content::Video(video) => write!(formatter, "{video:?}"),
            Content::Reasoning(text) => write!(formatter, "Reasoning({} bytes)", text.len()),
            Content::ToolCall(_) => formatter.write_str("ToolCall(..)"),
            Content::ResultOf(_) => formatter.write_str("ResultOf(..)"),
        }
    }
}

/// A conversation with the settings for its reply. A chat is an ordinary value that can be stored,
/// cloned and continued. Nothing is checked until the chat is sent to a model. Then anything
/// outside the model's limits is refused, with the limit, the value and a hint.
///
/// ```
/// use bursar_actors::chat::{Chat, Image};
/// use bursar_model::sampling::OutputFormat;
/// use std::time::Duration;
/// let chat = Chat::new()
///     .system("Answer in one word.")
///     .user("What colour is the star?")
///     .image(Image::from_bytes(bursar_model::demo::pictures()[0].bytes))
///     .max_tokens(16);
/// let colours = ["red", "blue"].map(str::to_owned).to_vec();
/// let formed = chat.clone().format(OutputFormat::Choice(colours));
/// let scored = chat.clone().log_probabilities(5).deadline(Duration::from_secs(10)).stop("\n\n");
/// let next_turn = chat.assistant("blue").user("And the circle?"); // reuses the cached first turn
/// ```
#[derive(Clone, Default)]
pub struct Chat {
    turns: Vec<(Role, Vec<Content>)>,
    /// A prompt as tokens, instead of rendered turns.
    pub(super) tokens: Option<Arc<[u32]>>,
    pub(super) tools: Vec<serde_json::Value>,
    pub(super) tool_choice: ToolChoice,
    pub(super) calls_one_tool: bool,
    pub(super) reply_format: Option<ReplyFormat>,
    pub(super) template_variables: serde_json::Map<String, serde_json::Value>,
    pub(super) continues: bool,
    pub(super) begins_turn: Option<bool>,
    pub(super) generation: Generation,
    pub(super) standing: ChatScheduling,
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

    /// Adds a picture to the last user turn, after its other pictures and videos
    /// and before its text, which is the order in which models are trained. For
    /// another order, see [`turn`](Chat::turn).
    pub fn image(self, image: Image) -> Self {
        self.show(Content::Image(image))
    }

    /// Adds a video to the last user turn, in the position that [`image`](Chat::image)
    /// uses for a picture.
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

    pub(super) fn is_parallel(&self) -> bool {
        !self.calls_one_tool && !matches!(self.tool_choice, ToolChoice::Named(_))
    }

    /// Sets how the model writes tool calls and reasoning, instead of deriving that from its chat
    /// template. `ReplyFormat::default()` leaves the whole reply as text.
    pub fn reply_format(mut self, format: ReplyFormat) -> Self {
        self.reply_format = Some(format);
        self
    }

    /// Adds a function call to the last assistant turn. The call is a [`ToolCall`](super::ToolCall)
    /// of an earlier reply, or JSON in the form that the chat template expects, usually OpenAI's
    /// `{"type": "function", "function": {"name": .., "arguments": {..}}}`.
    pub fn tool_call(self, call: impl Into<serde_json::Value>) -> Self {
        self.answered(Content::ToolCall(call.into()))
    }

    /// Adds reasoning to the last assistant turn. The template decides whether the model sees it.
    /// Many templates show only reasoning after the last user turn.
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
    /// let chat = Chat::new().user("Name three colours.").assistant("1. Red\n2.").continue_final_message();
    /// ```
    pub fn continue_final_message(mut self) -> Self {
        self.continues = true;
        self
    }

    /// Sets whether the prompt ends with the beginning of an assistant turn. By default, the prompt
    /// ends with it, unless the last turn is [continued](Chat::continue_final_message).
    pub fn add_generation_prompt(mut self, does: impl Into<Option<bool>>) -> Self {
        self.begins_turn = does.into().or(self.begins_turn);
        self
    }

    /// Returns `true` if the chat has neither turns nor tokens.
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty() && self.tokens.as_ref().is_none_or(|tokens| tokens.is_empty())
    }

    /// Returns `true` if the chat contains anything that only a template could combine with tokens.
    pub(super) fn says_more_than_tokens(&self) -> bool {
        let is_shown = |content: &Content| matches!(content, Content::Image(_) | Content::Video(_));
        let is_rendered = self.continues || self.begins_turn.is_some() || !self.tools.is_empty();
        is_rendered || self.turns.iter().any(|(_, contents)| !contents.iter().all(is_shown))
    }

    /// Approximate bytes of all texts, tool calls and tools.
    pub(super) fn text_bytes(&self) -> usize {
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
    pub(super) fn split(&self) -> (Vec<Message>, Vec<Media>) {
        let mut visuals = Vec::new();
        let messages = self.turns.iter().map(|(role, contents)| {
            let content = contents.iter().map(|content| match content {
                Content::Text(text) => Part::Text(text.clone()),
                Content::Image(image) => {
                    visuals.push(Media::Image(image.0.clone()));
                    Part::Image
                }
                Content::Reasoning(text) => Part::Reasoning(text.clone()),
                Content::ToolCall(call) => Part::ToolCall(call.clone()),
                Content::ResultOf(id) => Part::ResultOf(id.clone()),
                Content::Video(video) => {
                    visuals.push(Media::Video(video.0.clone()));
                    Part::Video
                }
            });
            Message { role: *role, content: content.collect() }
        });
        (messages.collect(), visuals)
    }
}
