//! Films: animations, decoded here, and films in a container, decoded by `ffmpeg`. What a file is, its first bytes say.

use std::{
    fs::File,
    io::{self, Read, Seek},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tokio::{sync::Semaphore, time::timeout};

use super::{
    error::ApiError,
    ffmpeg::{self, Fault, Input},
    options::ServeOptions,
};
use crate::{Bytes, FrameSampling, Hint, ImageLimits, Video};

/// Films that are decoded at once, for all clients; more wait.
const AT_ONCE: usize = 4;
/// Pixels of an animation's screen, twice those of 4K, and the memory that decoding it takes.
const SCREEN: ImageLimits =
    ImageLimits { bytes_max: Bytes::mib(64), pixels_max: 16_000_000, decode_bytes_max: Bytes::mib(256) };
/// More than films have; a frame would be shown several times.
const FRAMES_PER_SECOND_MAX: f64 = 240.0;
/// What a client may do instead.
const FRAMES: &str = "frames: `data:video/jpeg;base64,FRAME,FRAME…`, or `file:` and a folder of pictures";

/// Decodes films for all requests of a server.
pub(super) struct FilmReader {
    ffmpeg: Option<PathBuf>,
    time: Duration,
    bytes_max: Bytes,
    permits: Arc<Semaphore>,
}

/// A film, not decoded.
pub(super) enum Film {
    Bytes(Arc<[u8]>),
    File(File),
}

/// What kind of film it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Animation,
    /// In a container, with the name of ffmpeg's demuxer for it.
    Contained(&'static str),
}

impl Kind {
    /// By the first bytes: GIF89a, section 17; RFC 9649, 2.4; ISO 14496-12, 4.2 and 4.3; RFC 8794, 11.2.
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

impl FilmReader {
    pub(super) fn new(options: &ServeOptions) -> Self {
        let (ffmpeg, time, bytes_max) = (options.ffmpeg.clone(), options.film_time, options.body_bytes);
        FilmReader { ffmpeg, time, bytes_max, permits: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// The frames of a film.
    ///
    /// # Errors
    /// 400 with what is wrong with it; 503 if too many are being decoded.
    pub(super) async fn read(&self, film: Film, sampling: FrameSampling, param: &str) -> Result<Video, ApiError> {
        let sampling =
            FrameSampling { frames_per_second: sampling.frames_per_second.min(FRAMES_PER_SECOND_MAX), ..sampling };
        let full = |_| {
            ApiError::busy("the server is already decoding its maximum number of videos").hint("try again in a moment")
        };
        let permit = timeout(self.time, self.permits.clone().acquire_owned()).await.map_err(full)?;
        let unreadable = |error: io::Error| ApiError::invalid(param, format!("the video cannot be read: {error}"));
        let (film, head) = blocking(move || film.head()).await?.map_err(unreadable)?;
        let kind = Kind::of(&head).ok_or_else(|| {
            let told = "the file is not a video that this server can read";
            ApiError::invalid(param, told).hint(format!("send MP4, MOV, WebM, MKV, GIF or WebP, or {FRAMES}"))
        })?;
        match kind {
            Kind::Animation => {
                let limits = ImageLimits { bytes_max: self.bytes_max, ..SCREEN };
                let read = blocking(move || {
                    // Also when the request that wanted it has ended.
                    let _permit = permit;
                    film.bytes(limits.bytes_max).map(|bytes| Video::from_animation(&bytes, &sampling, &limits))
                });
                let video = read.await?.map_err(unreadable)?;
                video.map_err(|error| {
                    ApiError::invalid(param, format!("the animation cannot be decoded: {error}")).hint(error.hint())
                })
            }
            Kind::Contained(demuxer) => self.decode(film, demuxer, &sampling, param).await,
        }
    }

    async fn decode(
        &self,
        film: Film,
        demuxer: &'static str,
        sampling: &FrameSampling,
        param: &str,
    ) -> Result<Video, ApiError> {
        let refused = |told: String, hint: &str| ApiError::invalid(param, told).hint(hint.to_owned());
        let Some(program) = self.ffmpeg.as_deref().filter(|_| cfg!(target_os = "linux")) else {
            let told = "this server has no `ffmpeg`, so it cannot decode this video";
            return Err(refused(told.to_owned(), &format!("install ffmpeg on the server, or send {FRAMES}")));
        };
        let opened = blocking(move || film.file()).await?;
        let film =
            opened.map_err(|error| refused(format!("the video cannot be read: {error}"), "name another file"))?;
        let input = Input { program, film: &film, demuxer, seconds: self.time.as_secs_f64() };
        let decoded = timeout(self.time, ffmpeg::video(input, sampling)).await.map_err(|_| {
            let told = format!("decoding the video takes longer than {} s", self.time.as_secs());
            refused(told, &format!("lower `fps`, send a smaller video, or send {FRAMES}"))
        })?;
        decoded.map_err(|fault| match fault {
            Fault::Film(reason) => refused(format!("the video cannot be decoded: {reason}"), &format!("send {FRAMES}")),
            Fault::Program(error) => {
                tracing::warn!(%error, program = %program.display(), "ffmpeg cannot be started");
                refused("the `ffmpeg` of this server cannot be started".to_owned(), &format!("send {FRAMES}"))
            }
        })
    }
}

impl Film {
    /// Its first bytes.
    fn head(mut self) -> io::Result<(Self, Vec<u8>)> {
        const BYTES: usize = 16;
        let mut head = Vec::new();
        match &mut self {
            Film::Bytes(bytes) => head.extend(bytes.iter().take(BYTES)),
            Film::File(file) => {
                file.take(BYTES as u64).read_to_end(&mut head)?;
                file.rewind()?;
            }
        }
        Ok((self, head))
    }

    /// All of its bytes, or one more than the limit, which is refused after.
    fn bytes(self, limit: Bytes) -> io::Result<Arc<[u8]>> {
        match self {
            Film::Bytes(bytes) => Ok(bytes),
            Film::File(file) => {
                let mut bytes = Vec::new();
                file.take(limit.0.saturating_add(1)).read_to_end(&mut bytes)?;
                Ok(bytes.into())
            }
        }
    }

    /// A file that another process can seek in. Bytes of a request are one in memory, without a name.
    fn file(self) -> io::Result<File> {
        match self {
            Film::File(file) => Ok(file),
            Film::Bytes(bytes) => unnamed(&bytes),
        }
    }
}

#[cfg(target_os = "linux")]
fn unnamed(bytes: &[u8]) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let mut file = File::from(memfd_create(c"film", MemfdFlags::CLOEXEC)?);
    io::Write::write_all(&mut file, bytes)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_: &[u8]) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Does what waits for a disk, or computes for long, on a thread for that.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let died = |_| ApiError::unavailable("the thread that reads videos has died");
    tokio::task::spawn_blocking(work).await.map_err(died)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_film_is_known_by_its_first_bytes_and_a_playlist_is_none() {
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
