//! The content of a turn: texts, pictures, videos and tool calls.

use std::{fmt, fs::File, path::Path, sync::Arc};

use bursar_budgets::Bytes;
use bursar_model::{
    error::{ImageError, VideoError},
    flow::{self, EncodedImage, ImageLimits, ResizeLimits},
    processor::FrameSampling,
};

/// Maximum bytes read from a file before the model is known, as a guard against endless files.
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

    /// Creates a picture from encoded bytes, which are checked when the chat is sent.
    pub fn from_bytes(encoded: impl Into<Arc<[u8]>>) -> Self {
        Image(EncodedImage::new(encoded))
    }

    /// Creates a picture from decoded pixels: `[height, width, 3]` bytes of red, green and blue,
    /// with the top row first. This constructor is meant for pictures from a camera, a renderer or
    /// another decoder.
    ///
    /// # Errors
    /// A side is zero, or the number of bytes does not match.
    pub fn from_rgb(width: u32, height: u32, pixels: impl Into<Arc<[u8]>>) -> Result<Self, ImageError> {
        EncodedImage::from_rgb(width, height, pixels).map(Image)
    }
}

/// Limits of a single picture, which override the settings of the model's processor.
impl Image {
    /// Resizes the picture to at least `min` and at most `max` pixels, like `min_pixels` and
    /// `max_pixels` of transformers' Qwen processors and OpenAI's `detail`. If `min` is not set and
    /// the model's own minimum is above `max`, the minimum is lowered to `max`. `None` keeps the
    /// limit that the picture has. For a model that cuts pictures into tiles, `max` counts the
    /// pixels of all tiles. A limit that exceeds the model's envelope, or that the model cannot
    /// apply, is refused when the chat is sent.
    ///
    /// ```
    /// use bursar_actors::chat::Image;
    /// let picture = Image::from_bytes(bursar_model::demo::pictures()[0].bytes);
    /// let coarse = picture.within_pixels(None, Some(512 * 512));
    /// ```
    pub fn within_pixels(self, min: Option<u64>, max: Option<u64>) -> Self {
        let own = self.0.own_limits();
        let (pixels_min, pixels_max) = (min.or(own.pixels_min), max.or(own.pixels_max));
        let own = ResizeLimits { pixels_min, pixels_max, ..own };
        Image(self.0.within(own))
    }

    /// Cuts the picture into at most `max` tiles, not counting the thumbnail. `max` has the meaning
    /// of `max_patches` in transformers' processor for InternVL, and of `max_dynamic_patch` in
    /// InternVL's releases. A picture with this limit is refused when the chat is sent if `max` is
    /// above the model's envelope, or if the model does not cut pictures into tiles. `None` keeps
    /// the limit that the picture has.
    pub fn within_tiles(self, max: impl Into<Option<u32>>) -> Self {
        let own = self.0.own_limits();
        let own = ResizeLimits { tiles_max: max.into().or(own.tiles_max), ..own };
        Image(self.0.within(own))
    }
}

/// A video for a chat, given as frames: pictures of one size, in the order in which they are shown.
/// [`from_animation`](Video::from_animation) picks the frames of an animated GIF or WebP. The
/// caller decodes any other video and picks its frames.
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
    /// Creates a video from frames and the number of *these* frames per second. For example, if
    /// every twelfth frame of a video of 24 frames per second was picked, pass 2. The model derives
    /// the time between frames from this number. The frames are checked when the chat is sent.
    pub fn from_frames(frames: impl IntoIterator<Item = Image>, frames_per_second: f64) -> Self {
        let frames: Vec<EncodedImage> = frames.into_iter().map(|frame| frame.0).collect();
        Video(flow::Video::new(frames, frames_per_second))
    }

    /// Decodes evenly spaced frames of an animated GIF or WebP. No frame is decoded until the total
    /// size of all frames has been read from the file's blocks.
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
    /// Reasoning of the model. See [`Chat::reasoning`](super::Chat::reasoning).
    Reasoning(String),
    /// A function call. See [`Chat::tool_call`](super::Chat::tool_call).
    ToolCall(serde_json::Value),
    /// The id of the call whose result this turn contains. See
    /// [`Chat::tool_result`](super::Chat::tool_result).
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
