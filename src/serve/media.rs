//! Pictures and videos that requests name: data in the request, files of a folder, URLs of hosts that the server allows.

use std::{
    path::{Component, Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use base64::{Engine, engine::general_purpose::STANDARD};
use futures_util::{StreamExt, TryStreamExt, stream};
use schemars::JsonSchema;
use serde::Deserialize;

use super::{
    body::{self, LARGE},
    error::ApiError,
    models::shortened,
    service::Shared,
};
use crate::{Hint, Image, ImageLimits, ModelFacts, Video};

/// Pictures and frames of one request: more than any model takes.
const PICTURES_MAX: usize = 1024;
/// Links of one request that are read at once.
const AT_ONCE: usize = 4;
/// Frames a second of a video that does not say: what Qwen's processors sample.
const USUAL_FPS: f64 = 2.0;

/// What a request wants of its pictures' sizes, beside the model's own settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
pub(super) struct Sizes {
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    #[serde(alias = "max_num", alias = "max_patches")]
    max_dynamic_patch: Option<u32>,
}

impl Sizes {
    /// OpenAI's `detail: low`, whose pictures have 512 pixels a side, or what the model can if that is less.
    fn low(self, facts: &ModelFacts) -> Self {
        const SIDE: u64 = 512;
        let fits = facts.picture_pixels.as_ref().map(|range| (SIDE * SIDE).clamp(*range.start(), *range.end()));
        Sizes { max_pixels: self.max_pixels.or(fits), ..self }
    }

    fn apply(self, mut picture: Image) -> Image {
        if self.min_pixels.is_some() || self.max_pixels.is_some() {
            picture = picture.within_pixels(self.min_pixels, self.max_pixels);
        }
        self.max_dynamic_patch.into_iter().fold(picture, Image::within_tiles)
    }
}

/// What was found at a link.
pub(super) enum Seen {
    Picture(Image),
    Film(Video),
}

/// A picture or video that a request names.
pub(super) struct Link {
    /// The field that it stands in.
    param: String,
    what: What,
    sizes: Sizes,
    is_low: bool,
}

enum What {
    Picture(Source),
    Film(Vec<Source>, f64),
    /// A folder of frames.
    Folder(Source, f64),
}

enum Source {
    /// Decoded already.
    Bytes(Arc<[u8]>),
    File(String),
    Url(String),
}

impl Link {
    fn new(param: String, what: What) -> Self {
        Link { param, what, sizes: Sizes::default(), is_low: false }
    }

    pub(super) fn picture(param: String, url: &str) -> Result<Self, ApiError> {
        let source = source(&param, url)?;
        Ok(Link::new(param, What::Picture(source)))
    }

    /// A picture of these sizes, and of these `detail`s: `low` is coarser, `high` and `auto` are the model's own.
    pub(super) fn sized(self, sizes: Sizes, detail: Option<&str>) -> Self {
        Link { sizes, is_low: detail == Some("low"), ..self }
    }

    /// How many pictures it names, as far as that is known before they are read.
    fn pictures(&self) -> usize {
        match &self.what {
            What::Picture(_) | What::Folder(..) => 1,
            What::Film(frames, _) => frames.len(),
        }
    }

    /// Whether it takes facts of the model to read it.
    pub(super) fn is_low(&self) -> bool {
        self.is_low
    }

    /// A picture that is in the request, in base64.
    pub(super) fn base64(param: String, data: &str) -> Result<Self, ApiError> {
        let source = decoded(&param, data)?;
        Ok(Link::new(param, What::Picture(source)))
    }

    /// A video: vLLM's `data:video/jpeg;base64,FRAME,FRAME…`, or a folder of frames.
    pub(super) fn video(param: String, url: &str, fps: Option<f64>) -> Result<Self, ApiError> {
        let fps = fps.unwrap_or(USUAL_FPS);
        if let Some(frames) = url.strip_prefix("data:video/jpeg;base64,") {
            if frames.split(',').take(PICTURES_MAX + 1).count() > PICTURES_MAX {
                return Err(ApiError::invalid(param, format!("the video has more than {PICTURES_MAX} frames")));
            }
            let frames: Result<Vec<_>, _> = frames.split(',').map(|frame| decoded(&param, frame)).collect();
            let what = What::Film(frames?, fps);
            return Ok(Link::new(param, what));
        }
        match source(&param, url)? {
            folder @ Source::File(_) => Ok(Link::new(param, What::Folder(folder, fps))),
            Source::Bytes(_) | Source::Url(_) => Err(no_film(&param)),
        }
    }

    pub(super) fn frames(param: String, frames: &[String], fps: Option<f64>) -> Result<Self, ApiError> {
        let sources: Result<Vec<_>, _> = frames.iter().map(|frame| source(&param, frame)).collect();
        let what = What::Film(sources?, fps.unwrap_or(USUAL_FPS));
        Ok(Link::new(param, what))
    }
}

fn no_film(param: &str) -> ApiError {
    ApiError::invalid(param, "films in a container, such as MP4, are not decoded by this server").hint(
        "send frames: `data:video/jpeg;base64,FRAME,FRAME…`, or `file:` and a folder of pictures in the media root",
    )
}

fn source(param: &str, url: &str) -> Result<Source, ApiError> {
    let (scheme, rest) = url.split_once(':').unwrap_or(("", url));
    match scheme.to_ascii_lowercase().as_str() {
        "data" => {
            let (head, data) = rest.split_once(',').ok_or_else(|| broken(param, "the data URI has no comma"))?;
            if !head.to_ascii_lowercase().ends_with(";base64") {
                return Err(broken(param, "the data URI is not in base64"));
            }
            decoded(param, data)
        }
        "file" => Ok(Source::File(rest.strip_prefix("//").unwrap_or(rest).to_owned())),
        "http" | "https" => Ok(Source::Url(url.to_owned())),
        _ => {
            let told = format!("`{}` is no URL that this server reads", shortened(url));
            Err(ApiError::invalid(param, told).hint("send a data URI: `data:image/png;base64,…`"))
        }
    }
}

fn broken(param: &str, told: &str) -> ApiError {
    ApiError::invalid(param, told).hint("send `data:image/png;base64,` and the file's bytes in base64")
}

fn decoded(param: &str, text: &str) -> Result<Source, ApiError> {
    let decode = || STANDARD.decode(text.trim_ascii());
    let bytes = if text.len() > LARGE { body::aside(decode) } else { decode() };
    let bytes = bytes.map_err(|error| broken(param, &format!("not base64: {error}")))?;
    if bytes.is_empty() {
        return Err(broken(param, "there is nothing in it"));
    }
    Ok(Source::Bytes(bytes.into()))
}

/// Reads all links, a few at a time. Facts are wanted for those in low detail.
pub(super) async fn read(links: Vec<Link>, facts: Option<&ModelFacts>, shared: &Shared) -> Result<Vec<Seen>, ApiError> {
    let count: usize = links.iter().map(Link::pictures).sum();
    if let Some(link) = links.last().filter(|_| count > PICTURES_MAX) {
        let told = format!("the request shows {count} pictures and frames, at most {PICTURES_MAX} are read");
        return Err(ApiError::invalid(link.param.clone(), told));
    }
    let reading = &Reading { shared, left: AtomicU64::new(shared.options.body_bytes.0) };
    stream::iter(links).map(|link| see(link, facts, reading)).buffered(AT_ONCE).try_collect().await
}

async fn see(link: Link, facts: Option<&ModelFacts>, reading: &Reading<'_>) -> Result<Seen, ApiError> {
    let Link { param, what, sizes, is_low } = link;
    let sizes = facts.filter(|_| is_low).map_or(sizes, |facts| sizes.low(facts));
    match what {
        What::Picture(source) => Ok(Seen::Picture(sizes.apply(picture(source, &param, reading).await?))),
        What::Film(sources, fps) => {
            let mut frames = Vec::with_capacity(sources.len());
            for source in sources {
                frames.push(picture(source, &param, reading).await?);
            }
            Ok(Seen::Film(Video::from_frames(frames, fps)))
        }
        What::Folder(source, fps) => match source {
            Source::File(name) => {
                let files = reading.files(param.clone(), name).await?;
                let mut frames = Vec::with_capacity(files.len());
                for file in files {
                    frames.push(reading.open(file, &param).await?);
                }
                Ok(Seen::Film(Video::from_frames(frames, fps)))
            }
            Source::Bytes(_) | Source::Url(_) => Err(no_film(&param)),
        },
    }
}

async fn picture(source: Source, param: &str, reading: &Reading<'_>) -> Result<Image, ApiError> {
    match source {
        Source::Bytes(bytes) => Ok(Image::from_bytes(bytes)),
        Source::File(name) => {
            let root = reading.shared.options.media_root.clone();
            let file = blocking(param.to_owned(), move |param| allowed_file(&name, param, root.as_deref())).await?;
            reading.open(file, param).await
        }
        Source::Url(url) => {
            let bytes = reading.shared.fetcher.fetch(&url, param).await?;
            reading.count(bytes.len() as u64, param)?;
            Ok(Image::from_bytes(bytes))
        }
    }
}

/// Reading all that one request names, which is bounded together: files and URLs cost a client nothing.
struct Reading<'s> {
    shared: &'s Shared,
    /// Bytes that may still be read.
    left: AtomicU64,
}

impl Reading<'_> {
    fn count(&self, bytes: u64, param: &str) -> Result<(), ApiError> {
        let taken = self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes));
        let limit = self.shared.options.body_bytes;
        taken.map(drop).map_err(|_| {
            let told = format!("the pictures of this request have more than {limit} together");
            ApiError::invalid(param, told).hint("show fewer or smaller ones")
        })
    }

    async fn open(&self, file: PathBuf, param: &str) -> Result<Image, ApiError> {
        let limits = ImageLimits { bytes_max: self.shared.options.body_bytes, ..ImageLimits::default() };
        let open = move |param: &str| {
            let bytes = file.metadata().map_or(0, |file| file.len());
            let opened = Image::open_within(&file, &limits);
            let opened = opened.map_err(|error| ApiError::invalid(param, error.to_string()).hint(error.hint()));
            Ok((opened?, bytes))
        };
        let (picture, bytes) = blocking(param.to_owned(), open).await?;
        self.count(bytes, param)?;
        Ok(picture)
    }

    /// The pictures in a folder, by name.
    async fn files(&self, param: String, name: String) -> Result<Vec<PathBuf>, ApiError> {
        let root = self.shared.options.media_root.clone();
        blocking(param, move |param| files_of(&allowed_file(&name, param, root.as_deref())?, param, root.as_deref()))
            .await
    }
}

/// Runs what waits for a disk on a thread for that.
async fn blocking<T: Send + 'static>(
    param: String,
    work: impl FnOnce(&str) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let died = |_| ApiError::unavailable("the thread that reads files has died");
    tokio::task::spawn_blocking(move || work(&param)).await.map_err(died)?
}

/// The file of this name below the media root.
fn allowed_file(name: &str, param: &str, root: Option<&Path>) -> Result<PathBuf, ApiError> {
    let refused = |told: &str, hint: &str| ApiError::invalid(param, told).hint(hint);
    let Some(root) = root else {
        return Err(refused(
            "this server reads no files for its clients",
            "send a data URI, or start it with --media-root",
        ));
    };
    let outside = || refused("the file is not in the server's media root", "name a file below it");
    let root = root.canonicalize().map_err(|_| outside())?;
    // Absolute names may be those within the root, or of it.
    let name = Path::new(name);
    let below = name.strip_prefix(&root).or_else(|_| name.strip_prefix("/")).unwrap_or(name);
    if !below.components().all(|part| matches!(part, Component::Normal(_))) {
        return Err(outside());
    }
    // After links are followed, too.
    let file = root.join(below).canonicalize().map_err(|_| outside())?;
    if file.starts_with(&root) { Ok(file) } else { Err(outside()) }
}

/// The files in a folder, by name, each of them below the media root after links are followed.
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
            return Err(ApiError::invalid(param, format!("the folder has more than {PICTURES_MAX} frames")));
        }
    }
    files.sort();
    Ok(files)
}
