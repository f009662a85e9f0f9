//! A chat as a user writes it.

use std::{fmt, fs::File, path::Path, sync::Arc};

use bursar_budgets::Bytes;
use bursar_model::{
    error::{ImageError, VideoError},
    flow::{self, EncodedImage, ImageLimits, Media, ResizeLimits},
    processor::FrameSampling,
    text::{Message, Part, ReplyFormat, Role},
};

use super::{ToolChoice, generation::Generation, scheduling::ChatScheduling};

/// The most bytes read from a file before its model is known: a bound against endless files.
const FILE_BYTES_MAX: Bytes = Bytes::gib(1);

/// A picture for a chat: encoded as PNG, JPEG, WebP, GIF (first frame), BMP or TIFF, or given as pixels.
#[derive(Clone, Debug)]
pub struct Image(pub(super) EncodedImage);

impl Image {
    /// Reads a file of up to 1 GiB. The model's own limit, by default 20 MiB, is part of its
    /// [`image_limits`](crate::engine::LoadOptions::image_limits) and is checked when the model is asked.
    ///
    /// # Errors
    /// The file cannot be read, or is larger.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ImageError> {
        Image::open_within(path, &ImageLimits { bytes_max: FILE_BYTES_MAX, ..ImageLimits::default() })
    }

    /// Reads a file within `limits`: those of the model to be asked.
    ///
    /// # Errors
    /// The file cannot be read, or is larger.
    pub fn open_within(path: impl AsRef<Path>, limits: &ImageLimits) -> Result<Self, ImageError> {
        EncodedImage::open(path, limits).map(Image)
    }

    /// As [`open_within`](Self::open_within), for a file that is open. Errors call it `name`.
    ///
    /// # Errors
    /// See [`open_within`](Self::open_within).
    pub fn read_within(file: &File, name: impl Into<String>, limits: &ImageLimits) -> Result<Self, ImageError> {
        EncodedImage::read(file, name.into(), limits).map(Image)
    }

    /// Its width and height in pixels as shown, if its header can be read and is within `limits`. Nothing is decoded,
    /// so the file may still be damaged.
    ///
    /// # Errors
    /// Those with which a model with these limits would refuse the picture before decoding it.
    pub fn size(&self, limits: &ImageLimits) -> Result<(u32, u32), ImageError> {
        self.0.probe(limits).map(|header| (header.width, header.height))
    }

    /// Takes encoded bytes. They are checked when a model is asked.
    pub fn from_bytes(encoded: impl Into<Arc<[u8]>>) -> Self {
        Image(EncodedImage::new(encoded))
    }

    /// Takes decoded pixels: `[height, width, 3]` bytes of red, green and blue, rows from the top. For pictures from a
    /// camera, a renderer or another decoder.
    ///
    /// # Errors
    /// A side is zero, or the number of bytes does not match.
    pub fn from_rgb(width: u32, height: u32, pixels: impl Into<Arc<[u8]>>) -> Result<Self, ImageError> {
        EncodedImage::from_rgb(width, height, pixels).map(Image)
    }
}

/// Limits of one picture, instead of the settings of the model's processor.
impl Image {
    /// Resizes the picture to at least and at most this many pixels: `min_pixels` and `max_pixels` of transformers'
    /// Qwen processors, and what OpenAI's `detail` asks for. Without a least number the model's own gives way to the
    /// most. For a model whose pictures are tiles, the most counts the pixels of all tiles. A limit above what the
    /// model's envelope allows, or that the model cannot follow, is refused when the model is asked.
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

    /// Cuts the picture into at most this many tiles, without its thumbnail: `max_patches` of transformers'
    /// processor for InternVL, and `max_dynamic_patch` of its releases. Refused as above, and for a model whose
    /// pictures are in one piece.
    pub fn within_tiles(self, max: u32) -> Self {
        let own = ResizeLimits { tiles_max: Some(max), ..self.0.own_limits() };
        Image(self.0.within(own))
    }
}

/// A video for a chat, given as frames: pictures of one size, in the order in which they are shown. Of an animated GIF or
/// WebP they are picked here; of any other film the caller decodes and picks them.
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
    /// Takes frames, and the number of *these* frames per second. If every twelfth frame of a film of 24 frames per
    /// second was picked, that is 2. The model reads the time between frames from it. The frames are checked when a
    /// model is asked.
    pub fn from_frames(frames: impl IntoIterator<Item = Image>, frames_per_second: f64) -> Self {
        let frames: Vec<EncodedImage> = frames.into_iter().map(|frame| frame.0).collect();
        Video(flow::Video::new(frames, frames_per_second))
    }

    /// Decodes an animated GIF or WebP at even distances. Nothing is decoded before the file's blocks have told how
    /// much that is.
    ///
    /// # Errors
    /// The file is neither, is damaged, or exceeds `limits` or what is decoded of an animation in all.
    pub fn from_animation(encoded: &[u8], sampling: &FrameSampling, limits: &ImageLimits) -> Result<Self, VideoError> {
        flow::Video::from_animation(encoded, sampling, limits).map(Video)
    }

    /// The bytes of its frames as they are kept: encoded, or pixels.
    pub fn bytes(&self) -> Bytes {
        self.0.frames().iter().map(|frame| Bytes::of_slice(frame.bytes())).sum()
    }
}

/// A piece of a turn.
#[derive(Clone)]
pub enum Content {
    /// Text.
    Text(String),
    /// A picture.
    Image(Image),
    /// A video.
    Video(Video),
    /// Reasoning of the model; see [`Chat::reasoning`].
    Reasoning(String),
    /// A function call; see [`Chat::tool_call`].
    ToolCall(serde_json::Value),
    /// The id of the call whose result the turn is; see [`Chat::tool_result`].
    ResultOf(String),
}

/// Shows kinds and sizes, never the content, which is the user's.
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

/// A conversation and how to answer it: a value that can be kept, cloned and continued. Nothing is checked before a
/// model is asked. Then anything outside the model's limits is refused, with the limit, the value and a hint.
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
/// let next_turn = chat.assistant("blue").user("And the circle?"); // what was computed before is found again
/// ```
#[derive(Clone, Default)]
pub struct Chat {
    turns: Vec<(Role, Vec<Content>)>,
    /// A prompt in tokens, instead of rendered turns.
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

/// Shows kinds and sizes only, because content, stop strings and forms are the user's.
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
    /// An empty conversation, answered with the settings of the checkpoint's `generation_config.json`.
    pub fn new() -> Self {
        Chat::default()
    }

    /// A prompt as tokens of the model's vocabulary, used as they are: nothing is rendered or added. The placeholder
    /// token of the model's templates must occur once for each picture or video, or for each step of a video where the
    /// model's prompts have text between them (ADR 18). The pictures follow by [`image`](Chat::image), in order. For
    /// prompts made elsewhere, and for measurements.
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

    /// Adds a user turn. A picture that follows joins this turn and comes before its text.
    pub fn user(self, text: impl Into<String>) -> Self {
        self.turn(Role::User, vec![Content::Text(text.into())])
    }

    /// Adds a turn of the model.
    pub fn assistant(self, text: impl Into<String>) -> Self {
        self.turn(Role::Assistant, vec![Content::Text(text.into())])
    }

    /// Adds a picture to the last user turn, after its other pictures and videos and before its text, the order in
    /// which models are trained. For another order see [`turn`](Chat::turn).
    pub fn image(self, image: Image) -> Self {
        self.show(Content::Image(image))
    }

    /// Adds a video to the last user turn, at the place where [`image`](Chat::image) puts a picture.
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

    /// Adds a turn with its pieces in this order.
    pub fn turn(mut self, role: Role, contents: Vec<Content>) -> Self {
        self.turns.push((role, contents));
        self
    }

    /// Functions that the model may call; [`ChatEvent::ToolCall`](super::ChatEvent::ToolCall) tells that it does. Each as the JSON that its chat template expects: usually OpenAI's `{"type":
    /// "function", "function": {"name": .., "description": .., "parameters": ..}}`.
    pub fn tools(mut self, tools: impl IntoIterator<Item = serde_json::Value>) -> Self {
        self.tools.extend(tools);
        self
    }

    /// Whether the model calls tools: by default as it likes. To make it call one, its format of calls has to be
    /// known, and the tool's schema must be one that [`format`](Chat::format) could take.
    pub fn tool_choice(mut self, choice: ToolChoice) -> Self {
        self.tool_choice = choice;
        self
    }

    /// Whether the reply may have more than one call; true by default. If not, it ends with its first whole
    /// one.
    pub fn parallel_tool_calls(mut self, may: bool) -> Self {
        self.calls_one_tool = !may;
        self
    }

    pub(super) fn is_parallel(&self) -> bool {
        !self.calls_one_tool && !matches!(self.tool_choice, ToolChoice::Named(_))
    }

    /// How the model writes calls and reasoning, in place of what its chat template tells.
    /// `ReplyFormat::default()` leaves all of the reply as text.
    pub fn reply_format(mut self, format: ReplyFormat) -> Self {
        self.reply_format = Some(format);
        self
    }

    /// Adds a function call to the model's last turn: a [`ToolCall`](super::ToolCall) of an earlier reply, or what the
    /// chat template expects, usually OpenAI's `{"type": "function", "function": {"name": .., "arguments": {..}}}`.
    pub fn tool_call(self, call: impl Into<serde_json::Value>) -> Self {
        self.answered(Content::ToolCall(call.into()))
    }

    /// Adds reasoning to the model's last turn. Templates show it as they please, often only since the last question.
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

    /// Adds the result of the function call with this id ([`ToolCall::id`](super::ToolCall::id)). Few chat templates
    /// show ids to the model. With other templates the model matches results to calls by order, so add one result for
    /// each call, in the order of the calls.
    pub fn tool_result(self, id: impl Into<String>, text: impl Into<String>) -> Self {
        self.turn(Role::Tool, vec![Content::ResultOf(id.into()), Content::Text(text.into())])
    }

    /// Sets a variable that the chat template reads, such as `enable_thinking`, with which some models reason or not.
    pub fn template_variable(mut self, name: impl Into<String>, value: impl Into<serde_json::Value>) -> Self {
        self.template_variables.insert(name.into(), value.into());
        self
    }

    /// The reply goes on where the last turn ends, which is the model's and has text, or only reasoning. What was
    /// said before is not part of the reply. The prompt is cut as `continue_final_message` of transformers 5.17 does.
    ///
    /// ```
    /// use bursar_actors::chat::Chat;
    /// let chat = Chat::new().user("Name three colours.").assistant("1. Red\n2.").continue_final_message();
    /// ```
    pub fn continue_final_message(mut self) -> Self {
        self.continues = true;
        self
    }

    /// Whether the prompt ends with the beginning of a turn of the model. By default it does, unless the last turn is
    /// [continued](Chat::continue_final_message).
    pub fn add_generation_prompt(mut self, does: bool) -> Self {
        self.begins_turn = Some(does);
        self
    }

    /// Whether there is no turn and no token.
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty() && self.tokens.as_ref().is_none_or(|tokens| tokens.is_empty())
    }

    /// Whether the chat contains something that only a template could combine with tokens.
    pub(super) fn says_more_than_tokens(&self) -> bool {
        let is_shown = |content: &Content| matches!(content, Content::Image(_) | Content::Video(_));
        let is_rendered = self.continues || self.begins_turn.is_some() || !self.tools.is_empty();
        is_rendered || self.turns.iter().any(|(_, contents)| !contents.iter().all(is_shown))
    }

    /// Bytes of its texts and tools, about.
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

    /// The turns as templates take them, and the pictures and videos in order of appearance.
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
