//! Pictures and videos of requests: data in the request, files below the media root, and
//! URLs of allowed hosts.

use std::{
    fs::{File, OpenOptions},
    path::{Component, Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use bursar::{Bytes, FrameSampling, Hint, Image, ImageLimits, ModelFacts, Video};
use futures_util::{StreamExt, TryStreamExt, stream};
use percent_encoding::percent_decode_str;
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::{
    body::{self, BodyPermit, LARGE},
    data_uri::{self, DataUri},
    error::ApiError,
    models::shortened,
    state::Shared,
    video::VideoSource,
};

/// Maximum pictures and frames of one request: more than any model accepts.
const PICTURES_MAX: usize = 1024;
/// Maximum number of links of one request that are read concurrently.
const AT_ONCE: usize = 4;
/// Default frames per second of a video: the sampling rate of Qwen's processors.
const USUAL_FPS: f64 = 2.0;

/// Picture sizes of a request. They override the settings of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, JsonSchema)]
pub(super) struct Sizes {
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    /// The same limits under the names of newer processors.
    size: Option<EdgeSizes>,
    #[serde(alias = "max_num", alias = "max_patches")]
    max_dynamic_patch: Option<u32>,
    /// Frames per second of videos that do not set their own `fps`.
    pub(super) fps: Option<f64>,
}

/// Limits on the pixels of the whole picture, under the names of Qwen's processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, JsonSchema)]
struct EdgeSizes {
    shortest_edge: Option<u64>,
    longest_edge: Option<u64>,
}

impl Sizes {
    /// Sizes for OpenAI's `detail: low`: 512 × 512 pixels, clamped to the range of the model. A
    /// `max_pixels` of the request takes precedence.
    fn low(self, facts: &ModelFacts) -> Self {
        const SIDE: u64 = 512;
        let fits = facts.picture_pixels.as_ref().map(|range| (SIDE * SIDE).clamp(*range.start(), *range.end()));
        Sizes { max_pixels: self.max_pixels.or(fits), ..self }
    }

    fn apply(self, picture: Image) -> Image {
        let size = self.size.unwrap_or_default();
        let (least, most) = (self.min_pixels.or(size.shortest_edge), self.max_pixels.or(size.longest_edge));
        picture.within_pixels(least, most).within_tiles(self.max_dynamic_patch)
    }
}

/// A picture or video that was read.
pub(super) enum LoadedMedia {
    Picture(Image),
    Video(Video),
}

/// A picture or video in a request, before it is read.
pub(super) struct Link {
    /// Request field that contains the link.
    param: String,
    kind: MediaKind,
    sizes: Sizes,
    is_low: bool,
}

enum MediaKind {
    Picture(Source),
    Frames(Vec<Source>, f64),
    /// A video file, or a folder of frames, with the frames per second.
    Video(Source, f64),
}

enum Source {
    /// Data in the request, already decoded.
    Bytes(Arc<[u8]>),
    File(String),
    Url(String),
}

impl Link {
    fn new(param: String, kind: MediaKind) -> Self {
        Link { param, kind, sizes: Sizes::default(), is_low: false }
    }

    pub(super) fn picture(param: String, url: &str) -> Result<Self, ApiError> {
        let source = source(&param, url)?;
        Ok(Link::new(param, MediaKind::Picture(source)))
    }

    /// Sets the sizes. A `detail` of `low` makes the picture coarser; `high` and `auto`
    /// use the model's size.
    pub(super) fn sized(self, sizes: Sizes, detail: Option<&str>) -> Self {
        Link { sizes, is_low: detail == Some("low"), ..self }
    }

    pub(super) fn param(&self) -> &str {
        &self.param
    }

    /// Whether the link is a video: a file, or frames.
    pub(super) fn is_video(&self) -> bool {
        !matches!(self.kind, MediaKind::Picture(_))
    }

    /// Number of pictures, as far as it is known before reading. A video file counts as one
    /// picture.
    fn pictures(&self) -> usize {
        match &self.kind {
            MediaKind::Picture(_) | MediaKind::Video(..) => 1,
            MediaKind::Frames(frames, _) => frames.len(),
        }
    }

    /// Whether [`ModelFacts`] are needed to read the link.
    pub(super) fn wants_facts(&self) -> bool {
        self.is_low || matches!(self.kind, MediaKind::Video(..))
    }

    /// Creates a link to a picture that the request contains in base64.
    pub(super) fn base64(param: String, data: &str) -> Result<Self, ApiError> {
        let source = decoded(&param, data)?;
        Ok(Link::new(param, MediaKind::Picture(source)))
    }

    /// Creates a link to a video: vLLM's `data:video/jpeg;base64,FRAME,FRAME…`, a video file, or a
    /// folder of frames.
    pub(super) fn video(param: String, url: &str, fps: Option<f64>) -> Result<Self, ApiError> {
        let fps = fps.unwrap_or(USUAL_FPS);
        let (scheme, rest) = scheme(url);
        let frames = DataUri::read(rest).filter(|uri| uri.is_base64 && uri.media_type == "video/jpeg");
        if let Some(DataUri { body: frames, .. }) = frames.filter(|_| scheme == "data") {
            if frames.split(',').take(PICTURES_MAX + 1).count() > PICTURES_MAX {
                return Err(ApiError::invalid(
                    param,
                    format!("the video has too many frames; the limit is {PICTURES_MAX}"),
                ));
            }
            let frames: Result<Vec<_>, _> = frames.split(',').map(|frame| decoded(&param, frame)).collect();
            let kind = MediaKind::Frames(frames?, fps);
            return Ok(Link::new(param, kind));
        }
        let source = source(&param, url)?;
        Ok(Link::new(param, MediaKind::Video(source, fps)))
    }

    pub(super) fn frames(param: String, frames: &[String], fps: Option<f64>) -> Result<Self, ApiError> {
        let sources: Result<Vec<_>, _> = frames.iter().map(|frame| source(&param, frame)).collect();
        let kind = MediaKind::Frames(sources?, fps.unwrap_or(USUAL_FPS));
        Ok(Link::new(param, kind))
    }
}

/// Splits a URL into its scheme, in lower case, and the part after the colon. White space around
/// the URL is ignored.
fn scheme(url: &str) -> (String, &str) {
    let url = url.trim_ascii();
    let (scheme, rest) = url.split_once(':').unwrap_or(("", url));
    (scheme.to_ascii_lowercase(), rest)
}

fn source(param: &str, url: &str) -> Result<Source, ApiError> {
    let (scheme, rest) = scheme(url);
    match scheme.as_str() {
        "data" => match DataUri::read(rest) {
            None => Err(broken(param, "the data URI has no comma")),
            Some(DataUri { is_base64: true, body, .. }) => decoded(param, body),
            Some(DataUri { media_type, .. }) if media_type == "base64" => {
                Err(broken(param, "the data URI has no `;` before `base64`"))
            }
            Some(DataUri { body, .. }) => bytes(param, percent_decode_str(body).collect()),
        },
        "file" => Ok(Source::File(rest.strip_prefix("//").unwrap_or(rest).to_owned())),
        "http" | "https" => Ok(Source::Url(url.trim_ascii().to_owned())),
        _ => {
            let message = format!("`{}` is not a URL that this server can read", shortened(url));
            Err(ApiError::invalid(param, message).hint("send a data URI: `data:image/png;base64,…`"))
        }
    }
}

fn broken(param: &str, message: &str) -> ApiError {
    ApiError::invalid(param, message).hint("send `data:image/png;base64,` and the bytes of the file in base64")
}

fn decoded(param: &str, text: &str) -> Result<Source, ApiError> {
    let decode = || data_uri::base64(text);
    let decoded = if text.len() > LARGE { body::aside(decode) } else { decode() };
    bytes(param, decoded.map_err(|error| broken(param, &format!("the data is not valid base64: {error}")))?)
}

fn bytes(param: &str, bytes: Vec<u8>) -> Result<Source, ApiError> {
    if bytes.is_empty() { Err(broken(param, "the data is empty")) } else { Ok(Source::Bytes(bytes.into())) }
}

/// Reads all links, `AT_ONCE` at a time. `facts` are needed for video files, and for pictures with
/// `detail: low`. The bytes that are read count toward the limit of request bytes in memory,
/// because a small request may name large files.
pub(super) async fn read(
    links: Vec<Link>,
    facts: Option<&ModelFacts>,
    shared: &Shared,
    permit: &mut BodyPermit,
) -> Result<Vec<LoadedMedia>, ApiError> {
    let count: usize = links.iter().map(Link::pictures).sum();
    if let Some(link) = links.last().filter(|_| count > PICTURES_MAX) {
        let message = format!("the request has {count} pictures and frames; the limit is {PICTURES_MAX}");
        return Err(ApiError::invalid(link.param.clone(), message));
    }
    let bytes = shared.options.body_bytes;
    let (video_limits, taken) = (VideoLimits::of(&links, facts, bytes), Mutex::new(permit));
    let reading = &Reading { shared, left: AtomicU64::new(bytes.0), video_limits, permit: taken };
    stream::iter(links).map(|link| load(link, facts, reading)).buffered(AT_ONCE).try_collect().await
}

/// Limits of each video file of a request.
#[derive(Clone, Copy)]
struct VideoLimits {
    frames_max: usize,
    bytes_max: Bytes,
}

impl VideoLimits {
    /// Divides frames and bytes evenly among the video files. The frames are the frames that the
    /// model accepts, up to `PICTURES_MAX`, less the frames that the request contains. The bytes
    /// are half of `bytes`.
    fn of(links: &[Link], facts: Option<&ModelFacts>, bytes: Bytes) -> Self {
        let videos = links.iter().filter(|link| matches!(link.kind, MediaKind::Video(..))).count().max(1);
        let given = links.iter().map(|link| match &link.kind {
            MediaKind::Frames(frames, _) => frames.len(),
            MediaKind::Picture(_) | MediaKind::Video(..) => 0,
        });
        let most = facts.map_or(0, |facts| facts.video_frames).min(PICTURES_MAX);
        let frames_max = most.saturating_sub(given.sum()) / videos;
        VideoLimits { frames_max, bytes_max: Bytes(bytes.0 / 2 / videos as u64) }
    }
}

async fn load(link: Link, facts: Option<&ModelFacts>, reading: &Reading<'_>) -> Result<LoadedMedia, ApiError> {
    let Link { param, kind, sizes, is_low } = link;
    let sizes = facts.filter(|_| is_low).map_or(sizes, |facts| sizes.low(facts));
    match kind {
        MediaKind::Picture(source) => Ok(LoadedMedia::Picture(sizes.apply(picture(source, &param, reading).await?))),
        MediaKind::Frames(sources, fps) => {
            let mut frames = Vec::with_capacity(sources.len());
            for source in sources {
                frames.push(picture(source, &param, reading).await?);
            }
            Ok(LoadedMedia::Video(Video::from_frames(frames, fps)))
        }
        MediaKind::Video(Source::Bytes(bytes), fps) => reading.video(VideoSource::Bytes(bytes), fps, &param).await,
        MediaKind::Video(Source::Url(url), fps) => {
            let bytes = reading.shared.fetcher.fetch(&url, &param).await?;
            reading.count(bytes.len() as u64, &param)?;
            reading.video(VideoSource::Bytes(bytes.into()), fps, &param).await
        }
        MediaKind::Video(Source::File(name), fps) => match reading.open_local(&param, name).await? {
            LocalMedia::Video(file) => reading.video(VideoSource::File(file), fps, &param).await,
            LocalMedia::Frames(files) => {
                let mut frames = Vec::with_capacity(files.len());
                for file in files {
                    frames.push(reading.open(file, &param).await?);
                }
                Ok(LoadedMedia::Video(Video::from_frames(frames, fps)))
            }
        },
    }
}

async fn picture(source: Source, param: &str, reading: &Reading<'_>) -> Result<Image, ApiError> {
    match source {
        Source::Bytes(bytes) => Ok(Image::from_bytes(bytes)),
        Source::File(name) => {
            let root = reading.shared.options.media_root.clone();
            let file = reading.on_disk(param, move |param| allowed_file(&name, param, root.as_deref())).await?;
            reading.open(file, param).await
        }
        Source::Url(url) => {
            let bytes = reading.shared.fetcher.fetch(&url, param).await?;
            reading.count(bytes.len() as u64, param)?;
            Ok(Image::from_bytes(bytes))
        }
    }
}

/// State for reading all links of one request. The links share one byte limit, because naming large
/// files and URLs costs a client nothing.
struct Reading<'s> {
    shared: &'s Shared,
    /// Bytes that may still be read.
    left: AtomicU64,
    video_limits: VideoLimits,
    permit: Mutex<&'s mut BodyPermit>,
}

/// A video file or a folder below the media root.
enum LocalMedia {
    Video(File),
    /// The pictures in a folder, sorted by name.
    Frames(Vec<PathBuf>),
}

impl Reading<'_> {
    fn count(&self, bytes: u64, param: &str) -> Result<(), ApiError> {
        let taken = self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes));
        let limit = self.shared.options.body_bytes;
        taken.map_err(|_| {
            let message = format!("the pictures of this request are too large; the limit for all of them is {limit}");
            ApiError::invalid(param, message).hint("send fewer or smaller pictures")
        })?;
        let more = self.shared.bodies.reserve(bytes)?;
        let mut permit = self.permit.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut **permit {
            Some(permit) => permit.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }

    async fn open(&self, file: PathBuf, param: &str) -> Result<Image, ApiError> {
        let limits = ImageLimits { bytes_max: self.shared.options.body_bytes, ..ImageLimits::default() };
        let open = move |param: &str| {
            let plain = plain(&file, param)?;
            let bytes = plain.metadata().map_or(0, |file| file.len());
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let opened = Image::read_within(&plain, name, &limits);
            let opened = opened.map_err(|error| ApiError::invalid(param, error.to_string()).hint(error.hint()));
            Ok((opened?, bytes))
        };
        let (picture, bytes) = self.on_disk(param, open).await?;
        self.count(bytes, param)?;
        Ok(picture)
    }

    /// Opens the video file, or lists the folder, with this name.
    async fn open_local(&self, param: &str, name: String) -> Result<LocalMedia, ApiError> {
        let root = self.shared.options.media_root.clone();
        let look = move |param: &str| {
            let found = allowed_file(&name, param, root.as_deref())?;
            if found.is_dir() {
                files_of(&found, param, root.as_deref()).map(LocalMedia::Frames)
            } else {
                plain(&found, param).map(LocalMedia::Video)
            }
        };
        self.on_disk(param, look).await
    }

    async fn video(&self, source: VideoSource, fps: f64, param: &str) -> Result<LoadedMedia, ApiError> {
        let VideoLimits { frames_max, bytes_max } = self.video_limits;
        if frames_max == 0 {
            let error = ApiError::invalid(
                param,
                "the model does not take videos, or not as many video frames as this request has",
            );
            return Err(error.hint("use a model that takes videos, or send fewer videos"));
        }
        let sampling = FrameSampling { frames_per_second: fps, frames_max, bytes_max };
        let video = self.shared.video_decoder.decode(source, sampling, param).await?;
        self.count(video.bytes().0, param)?;
        Ok(LoadedMedia::Video(video))
    }
}

/// Threads that may wait for a disk. A thread that waits for an unresponsive
/// disk cannot be stopped.
const DISK_THREADS: usize = 32;
static DISK: Semaphore = Semaphore::const_new(DISK_THREADS);

impl Reading<'_> {
    /// Runs disk I/O on a blocking thread, with a time limit.
    async fn on_disk<T: Send + 'static>(
        &self,
        param: &str,
        work: impl FnOnce(&str) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let within = self.shared.options.media_time;
        let owned = param.to_owned();
        let reading = async {
            let permit = DISK.acquire().await.expect("the semaphore is never closed");
            let work = move || {
                let _permit = permit;
                work(&owned)
            };
            let died = |_| ApiError::unavailable("the thread that reads files has died");
            tokio::task::spawn_blocking(work).await.map_err(died)?
        };
        tokio::time::timeout(within, reading).await.unwrap_or_else(|_| {
            let message = format!("the file could not be read within {} s", within.as_secs());
            Err(ApiError::invalid(param, message)
                .hint("the server's disk is too slow or does not respond; try again, or send a data URI"))
        })
    }
}

/// Opens a regular file. `NONBLOCK` avoids a wait for a writer if the path is a pipe, or has become
/// one since it was checked.
fn plain(file: &Path, param: &str) -> Result<File, ApiError> {
    let failed = |message: String| ApiError::invalid(param, message).hint("name a file with a picture or video");
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    let opened = options.open(file).and_then(|opened| Ok((opened.metadata()?.is_file(), opened)));
    match opened {
        Ok((true, opened)) => Ok(opened),
        Ok((false, _)) => Err(failed("the path is not a regular file".to_owned())),
        Err(error) => Err(failed(format!("the file cannot be read: {error}"))),
    }
}

/// Resolves a name to a path below the media root.
fn allowed_file(name: &str, param: &str, root: Option<&Path>) -> Result<PathBuf, ApiError> {
    let refused = |message: &str, hint: &str| ApiError::invalid(param, message).hint(hint);
    let Some(root) = root else {
        return Err(refused(
            "this server does not read files",
            "send a data URI, or start the server with --media-root",
        ));
    };
    let outside = || refused("the file is not in the media root of the server", "name a file below the media root");
    let root = root.canonicalize().map_err(|_| outside())?;
    // An absolute name may start with the media root, or be relative to it.
    let name = Path::new(name);
    let below = name.strip_prefix(&root).or_else(|_| name.strip_prefix("/")).unwrap_or(name);
    if !below.components().all(|part| matches!(part, Component::Normal(_))) {
        return Err(outside());
    }
    // Check again after symbolic links are resolved.
    let file = root.join(below).canonicalize().map_err(|_| outside())?;
    if file.starts_with(&root) { Ok(file) } else { Err(outside()) }
}

/// Files in a folder, sorted by name. Each must be below the media root after
/// symbolic links are resolved.
fn files_of(folder: &Path, param: &str, root: Option<&Path>) -> Result<Vec<PathBuf>, ApiError> {
    let failed = |error: std::io::Error| {
        ApiError::invalid(param, format!("the frames cannot be read: {error}")).hint("name a folder of pictures")
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_file() {
            files.push(allowed_file(&path.to_string_lossy(), param, root)?);
        }
        if files.len() > PICTURES_MAX {
            return Err(ApiError::invalid(
                param,
                format!("the folder has too many frames; the limit is {PICTURES_MAX}"),
            ));
        }
    }
    files.sort();
    Ok(files)
}
