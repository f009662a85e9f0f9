//! Videos: animations, which are decoded in this process, and container formats, which `ffmpeg`
//! decodes. The first bytes of a file determine its format.

use std::{
    fs::File,
    io::{self, Read, Seek},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use bursar::{Bytes, FrameSampling, Hint, ImageLimits, Video};
use tokio::{sync::Semaphore, time::timeout};

use super::{
    error::ApiError,
    ffmpeg::{self, Fault, Input},
    options::ServeOptions,
};

/// Videos that are decoded concurrently, over all clients. Further videos wait.
const AT_ONCE: usize = 4;
/// Limits of an animation: about twice the pixels of 4K, and the memory for decoding it.
const SCREEN: ImageLimits =
    ImageLimits { bytes_max: Bytes::mib(64), pixels_max: 16_000_000, decode_bytes_max: Bytes::mib(256) };
/// Highest sampling rate. Videos have fewer frames per second, so a higher rate
/// would only repeat frames.
const FRAMES_PER_SECOND_MAX: f64 = 240.0;
/// Alternative to a video file, for error hints.
const FRAMES: &str = "frames: `data:video/jpeg;base64,FRAME,FRAME…`, or `file:` and a folder of pictures";

/// Decodes videos for all requests of a server.
pub(super) struct VideoDecoder {
    ffmpeg: Option<PathBuf>,
    time: Duration,
    bytes_max: Bytes,
    permits: Arc<Semaphore>,
}

/// A video that is not decoded yet.
pub(super) enum VideoSource {
    Bytes(Arc<[u8]>),
    File(File),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Animation,
    /// A container format, with the name of ffmpeg's demuxer for it.
    Contained(&'static str),
}

impl Kind {
    /// Detects the format from the first bytes: GIF89a, section 17; RFC 9649, 2.4; ISO 14496-12,
    /// 4.2 and 4.3; RFC 8794, 11.2.
    fn of(head: &[u8]) -> Option<Self> {
        match head {
            [b'G', b'I', b'F', b'8', ..] | [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => {
                Some(Kind::Animation)
            }
            [0x1a, 0x45, 0xdf, 0xa3, ..] => Some(Kind::Contained("matroska")),
            [_, _, _, _, name @ ..] => {
                let boxes = [b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"];
                boxes.iter().any(|known| name.starts_with(*known)).then_some(Kind::Contained("mov"))
            }
            _ => None,
        }
    }
}

impl VideoDecoder {
    pub(super) fn new(options: &ServeOptions) -> Self {
        let (ffmpeg, time, bytes_max) = (options.ffmpeg.clone(), options.video_time, options.body_bytes);
        VideoDecoder { ffmpeg, time, bytes_max, permits: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Decodes frames of a video.
    ///
    /// # Errors
    /// 400 if the video cannot be read or decoded; 503 if too many videos are still being decoded
    /// after a wait as long as the time limit for decoding.
    pub(super) async fn decode(
        &self,
        source: VideoSource,
        sampling: FrameSampling,
        param: &str,
    ) -> Result<Video, ApiError> {
        let sampling =
            FrameSampling { frames_per_second: sampling.frames_per_second.min(FRAMES_PER_SECOND_MAX), ..sampling };
        let full = |_| {
            ApiError::busy("the server is already decoding its maximum number of videos").hint("try again in a moment")
        };
        let permit = timeout(self.time, self.permits.clone().acquire_owned()).await.map_err(full)?;
        let unreadable = |error: io::Error| ApiError::invalid(param, format!("the video cannot be read: {error}"));
        let (source, head) = blocking(move || source.head()).await?.map_err(unreadable)?;
        let kind = Kind::of(&head).ok_or_else(|| {
            let message = "the file is not a video that this server can read";
            ApiError::invalid(param, message).hint(format!("send MP4, MOV, WebM, MKV, GIF or WebP, or {FRAMES}"))
        })?;
        match kind {
            Kind::Animation => {
                let limits = ImageLimits { bytes_max: self.bytes_max, ..SCREEN };
                let read = blocking(move || {
                    // Keep the permit until decoding ends, even if the request ends earlier.
                    let _permit = permit;
                    source.bytes(limits.bytes_max).map(|bytes| Video::from_animation(&bytes, &sampling, &limits))
                });
                let video = read.await?.map_err(unreadable)?;
                video.map_err(|error| {
                    ApiError::invalid(param, format!("the animation cannot be decoded: {error}")).hint(error.hint())
                })
            }
            Kind::Contained(demuxer) => self.decode_container(source, demuxer, &sampling, param).await,
        }
    }

    async fn decode_container(
        &self,
        source: VideoSource,
        demuxer: &'static str,
        sampling: &FrameSampling,
        param: &str,
    ) -> Result<Video, ApiError> {
        let refused = |message: String, hint: &str| ApiError::invalid(param, message).hint(hint.to_owned());
        let Some(program) = self.ffmpeg.as_deref().filter(|_| cfg!(target_os = "linux")) else {
            let message = "this server has no `ffmpeg`, so it cannot decode this video";
            return Err(refused(message.to_owned(), &format!("install ffmpeg on the server, or send {FRAMES}")));
        };
        let opened = blocking(move || source.file()).await?;
        let source =
            opened.map_err(|error| refused(format!("the video cannot be read: {error}"), "name another file"))?;
        let input = Input { program, file: &source, demuxer, seconds: self.time.as_secs_f64() };
        let decoded = timeout(self.time, ffmpeg::video(input, sampling)).await.map_err(|_| {
            let message = format!("decoding the video takes longer than {} s", self.time.as_secs());
            refused(message, &format!("lower `fps`, send a smaller video, or send {FRAMES}"))
        })?;
        decoded.map_err(|fault| match fault {
            Fault::Video(reason) => {
                refused(format!("the video cannot be decoded: {reason}"), &format!("send {FRAMES}"))
            }
            Fault::Program(error) => {
                tracing::warn!(%error, program = %program.display(), "ffmpeg cannot be started");
                refused("the `ffmpeg` of this server cannot be started".to_owned(), &format!("send {FRAMES}"))
            }
        })
    }
}

impl VideoSource {
    /// Reads the first bytes and rewinds the file.
    fn head(mut self) -> io::Result<(Self, Vec<u8>)> {
        const BYTES: usize = 16;
        let mut head = Vec::new();
        match &mut self {
            VideoSource::Bytes(bytes) => head.extend(bytes.iter().take(BYTES)),
            VideoSource::File(file) => {
                file.take(BYTES as u64).read_to_end(&mut head)?;
                file.rewind()?;
            }
        }
        Ok((self, head))
    }

    /// Reads the whole file, but at most one byte more than `limit`. The decoder rejects a
    /// file above the limit.
    fn bytes(self, limit: Bytes) -> io::Result<Arc<[u8]>> {
        match self {
            VideoSource::Bytes(bytes) => Ok(bytes),
            VideoSource::File(file) => {
                let mut bytes = Vec::new();
                file.take(limit.0.saturating_add(1)).read_to_end(&mut bytes)?;
                Ok(bytes.into())
            }
        }
    }

    /// Returns a file that another process can seek in. Bytes of a request are written to an
    /// unnamed file in memory.
    fn file(self) -> io::Result<File> {
        match self {
            VideoSource::File(file) => Ok(file),
            VideoSource::Bytes(bytes) => unnamed(&bytes),
        }
    }
}

#[cfg(target_os = "linux")]
fn unnamed(bytes: &[u8]) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let mut file = File::from(memfd_create(c"source", MemfdFlags::CLOEXEC)?);
    io::Write::write_all(&mut file, bytes)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_: &[u8]) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Runs disk I/O or a long computation on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let died = |_| ApiError::unavailable("the thread that reads videos has died");
    tokio::task::spawn_blocking(work).await.map_err(died)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_video_format_is_recognized_by_its_first_bytes() {
        let (mov, matroska) = (Some(Kind::Contained("mov")), Some(Kind::Contained("matroska")));
        for (head, kind) in [
            (&b"\0\0\0\x20ftypisom"[..], mov),
            (b"\0\0\0\x08wide\0\0", mov),
            (b"\x1a\x45\xdf\xa3\x9f", matroska),
            (b"GIF89a", Some(Kind::Animation)),
            (b"RIFF\x10\0\0\0WEBPVP8X", Some(Kind::Animation)),
            (b"RIFF\x10\0\0\0AVI LIST", None),
            (b"#EXTM3U\nhttp://host/", None),
            (b"ffconcat version 1.0\n", None),
            (b"<?xml version=\"1.0\"?><MPD", None),
            (b"\x89PNG\r\n\x1a\n", None),
            (b"fty", None),
            (b"", None),
        ] {
            assert_eq!(Kind::of(head), kind, "{}", head.escape_ascii());
        }
    }
}
