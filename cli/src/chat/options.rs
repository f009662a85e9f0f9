//! The options of `bursar chat`, and the chat that they describe.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use bursar::{Chat, ChatError, Image, ImageError, ImageLimits, JsonWhitespace, OutputFormat, SamplingError, Video};
use bursar_model::sampling::SamplingParams;
use clap::{ArgGroup, Args, ValueEnum};
use serde_json::Value;

use crate::{failure::Failure, knobs::KnobOptions};

/// Options of `bursar chat`.
#[derive(Args)]
#[command(group(ArgGroup::new("form").args(["json_schema", "regex", "choice"])))]
pub struct Options {
    /// A Hugging Face checkpoint folder, a GGUF file, a model of the hub (`org/name`
    /// or `org/name@revision`), or `demo`.
    #[arg(long, default_value = "demo")]
    pub model: String,
    /// Prints one JSON event per line instead of text.
    #[arg(long)]
    pub json: bool,
    /// Question to ask. Without it, starts a session with history that reads
    /// questions from standard input.
    pub question: Option<String>,
    /// Drops the oldest turns of a session when its context is full.
    #[arg(long, conflicts_with = "question")]
    pub forget_oldest: bool,

    /// System message, which precedes the first question.
    #[arg(long, value_name = "TEXT", help_heading = "Question")]
    system: Option<String>,
    /// Picture to show (PNG, JPEG, WebP, GIF, BMP, TIFF). May be given several times.
    #[arg(long, value_name = "FILE", help_heading = "Question")]
    pub image: Vec<PathBuf>,
    /// Folder with the frames of one video, in the order of their names, or a single frame. All
    /// single frames together are one video. May be given several times.
    #[arg(long, value_name = "DIR|FILE", help_heading = "Question")]
    pub video: Vec<PathBuf>,
    /// Frames per second of the videos.
    #[arg(long, value_name = "RATE", default_value_t = 2.0, allow_negative_numbers = true, help_heading = "Question")]
    fps: f64,

    /// Maximum tokens of a reply. By default, as many as the context allows.
    #[arg(long, value_name = "N", help_heading = "End of the reply")]
    pub max_tokens: Option<usize>,
    /// Minimum tokens of a reply.
    #[arg(long, value_name = "N", help_heading = "End of the reply")]
    min_tokens: Option<usize>,
    /// Text that ends a reply; the reply does not include it. May be given several times.
    #[arg(long, value_name = "TEXT", help_heading = "End of the reply")]
    stop: Vec<String>,
    /// Time limit for a complete reply, in seconds; above 0.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true, help_heading = "End of the reply")]
    deadline: Option<Duration>,

    /// Sampling temperature, from 0 to 100. 0 always takes the likeliest token.
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = "Sampling")]
    temperature: Option<f64>,
    /// Samples only from the likeliest tokens whose probabilities add up to this value.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    top_p: Option<f64>,
    /// Samples only from this many of the likeliest tokens. 0 uses all tokens.
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    top_k: Option<usize>,
    /// Samples only from tokens with at least this fraction of the probability
    /// of the likeliest token.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    min_p: Option<f64>,
    /// Values above 1 make tokens of the prompt and of the reply so far less likely.
    #[arg(long, value_name = "R", allow_negative_numbers = true, help_heading = "Sampling")]
    repetition_penalty: Option<f64>,
    /// Value subtracted from the logit of each token that is already in the reply; -2 to 2.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    presence_penalty: Option<f64>,
    /// Value subtracted from the logit of each token once per occurrence in the reply; -2 to 2.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    frequency_penalty: Option<f64>,
    /// Seed for sampling. Equal seeds give equal replies.
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    seed: Option<u64>,

    /// Restricts the reply to JSON that matches the schema in this file.
    #[arg(long, value_name = "FILE", help_heading = "Reply")]
    json_schema: Option<PathBuf>,
    /// Whitespace in the JSON of --json-schema.
    #[arg(long, value_name = "KIND", default_value = "compact", requires = "json_schema", help_heading = "Reply")]
    json_whitespace: Whitespace,
    /// Restricts the reply to text that matches this regular expression as a whole.
    #[arg(long, value_name = "PATTERN", help_heading = "Reply")]
    regex: Option<String>,
    /// Restricts the reply to one of these texts. May be given several times.
    #[arg(long, value_name = "TEXT", help_heading = "Reply")]
    choice: Vec<String>,
    /// Shows the log-probability of each token and of this many likely alternatives; at most 20.
    #[arg(long, value_name = "N", help_heading = "Reply")]
    pub logprobs: Option<usize>,
    /// Number of replies to the question, with consecutive seeds.
    #[arg(short, long, value_name = "N", default_value_t = 1, requires = "question", help_heading = "Reply")]
    pub n: usize,

    #[command(flatten)]
    pub knobs: KnobOptions,
}

/// Values of --json-whitespace.
#[derive(Clone, Copy, ValueEnum)]
enum Whitespace {
    /// No whitespace, for the fewest tokens.
    Compact,
    /// A space after each comma and colon.
    Spaced,
    /// Any whitespace that the model writes.
    Free,
}

impl From<Whitespace> for JsonWhitespace {
    fn from(typed: Whitespace) -> Self {
        match typed {
            Whitespace::Compact => JsonWhitespace::Compact,
            Whitespace::Spaced => JsonWhitespace::Spaced,
            Whitespace::Free => JsonWhitespace::Free,
        }
    }
}

/// One year. A longer deadline would never be reached in practice.
const DEADLINE_SECONDS_MAX: f64 = 31_536_000.0;

fn seconds(text: &str) -> Result<Duration, String> {
    let is_in_range = |seconds: &f64| *seconds > 0.0 && *seconds <= DEADLINE_SECONDS_MAX;
    let seconds = text.parse().ok().filter(is_in_range);
    let seconds = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| format!("expected a number of seconds, above 0 and at most {DEADLINE_SECONDS_MAX}"))
}

impl Options {
    /// Opens pictures as the frames of one video.
    pub fn frames<'p>(&self, paths: impl Iterator<Item = &'p Path>, limits: &ImageLimits) -> Result<Video, Failure> {
        let frames = paths.map(|path| picture(path, limits).map(|(frame, _)| frame)).collect::<Result<Vec<_>, _>>()?;
        Ok(Video::from_frames(frames, self.fps))
    }

    /// Opens a folder of frames, in the order of their names.
    pub fn video(&self, folder: &Path, limits: &ImageLimits) -> Result<Video, Failure> {
        let unreadable = |error: std::io::Error| Failure {
            error: format!("{}: {error}", folder.display()),
            hint: "name a folder of PNG, JPEG, WebP, GIF, BMP or TIFF frames".to_owned(),
        };
        let entries = fs::read_dir(folder).map_err(unreadable)?.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        let is_frame = |path: &PathBuf| {
            let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
            path.is_file() && ["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"].contains(&extension.as_str())
        };
        let mut paths: Vec<_> = entries.into_iter().map(|entry| entry.path()).filter(is_frame).collect();
        paths.sort();
        if paths.is_empty() {
            return Err(Failure {
                error: format!("{} contains no frames", folder.display()),
                hint: "frames are .png, .jpg, .jpeg, .webp, .gif, .bmp, .tif or .tiff files".to_owned(),
            });
        }
        self.frames(paths.iter().map(PathBuf::as_path), limits)
    }

    /// Returns a chat without questions, with these options applied.
    pub fn blank(&self) -> Result<Chat, Failure> {
        let mut chat = self.system.iter().fold(Chat::new(), Chat::system);
        chat = chat.max_tokens(self.max_tokens);
        chat = chat.min_tokens(self.min_tokens);
        chat = self.stop.iter().fold(chat, Chat::stop);
        chat = chat.deadline(self.deadline);
        chat = chat.temperature(self.temperature);
        chat = chat.top_p(self.top_p);
        chat = chat.top_k(self.top_k);
        chat = chat.min_p(self.min_p);
        chat = chat.repetition_penalty(self.repetition_penalty);
        chat = chat.presence_penalty(self.presence_penalty);
        chat = chat.frequency_penalty(self.frequency_penalty);
        chat = chat.seed(self.seed);
        chat = chat.log_probabilities(self.logprobs);
        self.check_sampling().map_err(ChatError::from)?;
        Ok(chat.format(self.format()?))
    }

    /// Checks that the typed sampling parameters are in range.
    fn check_sampling(&self) -> Result<(), SamplingError> {
        let own = SamplingParams::default();
        let typed = SamplingParams {
            temperature: self.temperature.unwrap_or(own.temperature),
            top_p: self.top_p.unwrap_or(own.top_p),
            min_p: self.min_p.unwrap_or(own.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(own.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(own.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(own.frequency_penalty),
            ..own
        };
        typed.check()
    }

    fn format(&self) -> Result<Option<OutputFormat>, Failure> {
        if let Some(path) = &self.json_schema {
            let whitespace = self.json_whitespace.into();
            return Ok(Some(OutputFormat::JsonSchema { schema: schema(path)?, whitespace }));
        }
        let choice = (!self.choice.is_empty()).then(|| OutputFormat::Choice(self.choice.clone()));
        Ok(self.regex.clone().map(OutputFormat::Regex).or(choice))
    }
}

fn schema(path: &Path) -> Result<Value, Failure> {
    let failure = |error: String| Failure {
        error: format!("{}: {error}", path.display()),
        hint: "name a file that contains a JSON schema".to_owned(),
    };
    let text = fs::read_to_string(path).map_err(|error| failure(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| failure(error.to_string()))
}

/// Opens a picture, which must have a readable header and a size within the limits. Also returns
/// its width and height in pixels.
pub fn picture(path: &Path, limits: &ImageLimits) -> Result<(Image, (u32, u32)), Failure> {
    let opened = Image::open_within(path, limits).and_then(|image| {
        let size = image.size(limits)?;
        Ok((image, size))
    });
    opened.map_err(|error: ImageError| {
        let failure = Failure::from(error);
        Failure { error: format!("{}: {}", path.display(), failure.error), ..failure }
    })
}
