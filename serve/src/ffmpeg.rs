//! Decoding of video frames by the program `ffmpeg` in a separate process, so that a file that
//! crashes a decoder fails only its own request. The process gets one open file, one demuxer
//! and a list of video decoders: no network, no other file, no playlist. Dropping the future
//! kills the process.

use std::{
    fs::File,
    path::Path,
    process::{ExitStatus, Stdio},
};

use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader},
    process::{Child, Command},
};

use bursar::{FrameSampling, Image, Video};

/// Standard input of ffmpeg as a path. Opening the path allows seeking, and each process gets
/// a separate file offset.
const INPUT: &str = "file:/dev/fd/0";
/// Decoders that ffmpeg may use.
const DECODERS: &str = "h264,hevc,av1,libdav1d,vp8,vp9,libvpx,libvpx-vp9,mpeg4,mpeg1video,mpeg2video,h263,mjpeg,prores,ffv1,rawvideo,png,theora,qtrle";
/// Maximum pixels of a decoded frame before scaling: nearly twice the pixels of a 4K frame. A
/// decoder may hold 17 such frames.
const PIXELS_MAX: &str = "16000000";
/// Largest single allocation that ffmpeg may make, in bytes.
const PIECE_BYTES: &str = "134217728";
/// Distance between sampled frames, in seconds, above which ffmpeg seeks to each frame instead of
/// decoding the whole video. A seek decodes only from the preceding keyframe. Videos have a
/// keyframe about every 10 seconds.
const SPARSE_SECONDS: f64 = 5.0;
/// Concurrent ffmpeg processes that seek to frames of one video.
const AT_ONCE: usize = 2;
/// Estimated seconds of video that are decoded for a seek to one frame.
const SOUGHT_SECONDS: f64 = 10.0;
/// A pixel rate that no machine decodes with two threads: twice the rate of 8K video at 60 frames
/// per second.
const PIXELS_PER_SECOND: f64 = 4e9;
/// Bytes of ffmpeg's messages that are kept.
const STDERR_BYTES: usize = 16 << 10;
/// Characters of ffmpeg's message that an error shows.
const REASON_CHARS: usize = 200;

/// A video file, with the demuxer that reads it.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub(super) program: &'a Path,
    pub(super) file: &'a File,
    pub(super) demuxer: &'static str,
    /// Time limit for decoding.
    pub(super) seconds: f64,
}

/// Why no frames were decoded.
#[derive(Debug)]
pub(super) enum Fault {
    /// ffmpeg could not be run.
    Program(std::io::Error),
    /// The file is not a readable video. The text is ffmpeg's message.
    Video(String),
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Fault::Program(error)
    }
}

/// Decodes frames of a video at even distances.
pub(super) async fn video(input: Input<'_>, sampling: &FrameSampling) -> Result<Video, Fault> {
    let refused = |error: bursar::VideoError| Fault::Video(error.to_string());
    let Stream { seconds, pixels_per_second } = stream(input).await?;
    let Some(seconds) = seconds else {
        return unmeasured(input, sampling).await;
    };
    let (count, rate) = sampling.frames(seconds).map_err(refused)?;
    let decoded = seconds.min(count as f64 * SOUGHT_SECONDS) * pixels_per_second.unwrap_or(0.0);
    if decoded > PIXELS_PER_SECOND * input.seconds {
        let reason = format!("{decoded:.1e} pixels would be decoded, and there are {} s for it", input.seconds);
        return Err(Fault::Video(reason));
    }
    let pixels = sampling.pixels(count);
    let frames = if rate < 1.0 / SPARSE_SECONDS && count > 1 {
        sought(input, count, rate, pixels).await?
    } else {
        let mut frames = Vec::with_capacity(count);
        run(input, None, &filter(Some(rate), pixels), Some(count), |frame| frames.push(frame)).await?;
        frames
    };
    Ok(Video::from_frames(frames, rate))
}

/// Duration and pixel rate that the container reports.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stream {
    seconds: Option<f64>,
    pixels_per_second: Option<f64>,
}

async fn stream(input: Input<'_>) -> Result<Stream, Fault> {
    let mut command = command(input, "info", None);
    let mut child = command.stdout(Stdio::null()).spawn()?;
    let stderr = stderr_of(&mut child).await?;
    child.wait().await?;
    // Without an output file ffmpeg always fails, but only after it has printed the
    // properties of the input.
    if stderr.contains("\n  Duration: ") {
        Ok(Stream { seconds: duration(&stderr), pixels_per_second: pixels_per_second(&stderr) })
    } else {
        Err(Fault::Video(reason(&stderr)))
    }
}

/// Seconds from the line `  Duration: 00:01:02.50, …`.
fn duration(stderr: &str) -> Option<f64> {
    let line = stderr.lines().find_map(|line| line.strip_prefix("  Duration: "))?;
    let mut parts = line.split(',').next()?.trim().split(':');
    let mut part = || parts.next()?.parse::<f64>().ok().filter(|part| part.is_finite() && *part >= 0.0);
    Some(part()? * 3600.0 + part()? * 60.0 + part()?)
}

/// Pixels per second from the size and frame rate in the line `  Stream #0:0: Video: h264 (High),
/// yuv420p(tv, bt709), 1920x1080 [SAR 1:1], 4999 kb/s, 29.97 fps, …`.
fn pixels_per_second(stderr: &str) -> Option<f64> {
    // Some files have a cover picture as an additional stream.
    let is_video =
        |line: &&str| line.starts_with("  Stream #") && line.contains(": Video: ") && !line.ends_with("(attached pic)");
    let line = stderr.lines().find(is_video)?;
    let size = |word: &str| {
        let (width, height) = word.split_once('x')?;
        Some(f64::from(width.parse::<u32>().ok()?) * f64::from(height.parse::<u32>().ok()?))
    };
    let pixels = line.split([' ', ',']).find_map(size)?;
    // Without a frame rate (`fps`), use the rate that ffmpeg estimates from timestamps (`tbr`).
    // ffmpeg writes thousands as `1k`.
    let number = |text: &str| match text.strip_suffix('k') {
        Some(thousands) => thousands.parse::<f64>().ok().map(|rate| rate * 1000.0),
        None => text.parse().ok(),
    };
    let rate = |unit: &str| line.split(", ").find_map(|part| number(part.strip_suffix(unit)?.trim()));
    // A higher estimate is not a frame rate but the resolution of the timestamps, as in videos
    // recorded by browsers: `1k tbr, 1k tbn`.
    const ESTIMATED_RATE_MAX: f64 = 480.0;
    let estimated = || rate(" tbr").filter(|rate| *rate <= ESTIMATED_RATE_MAX);
    rate(" fps").or_else(estimated).map(|rate| rate * pixels)
}

/// Seeks to each frame separately. Each seek decodes only from the preceding keyframe.
async fn sought(input: Input<'_>, count: usize, rate: f64, pixels: u64) -> Result<Vec<Image>, Fault> {
    let filter = &filter(None, pixels);
    let frame = |number: usize| async move {
        let mut found = None;
        let begun = run(input, Some(number as f64 / rate), filter, Some(1), |frame| found = Some(frame)).await;
        match (begun, number) {
            (Err(fault), 0) => Err(fault),
            // A video may end before its reported duration.
            _ => Ok(found),
        }
    };
    let found: Vec<Option<Image>> = stream::iter(0..count).map(frame).buffered(AT_ONCE).try_collect().await?;
    Ok(found.into_iter().map_while(|frame| frame).collect())
}

/// Samples a video that reports no duration, such as a recording of a browser. Each time that there
/// are too many frames, every second frame is dropped.
async fn unmeasured(input: Input<'_>, sampling: &FrameSampling) -> Result<Video, Fault> {
    let (_, rate) = sampling.frames(0.0).map_err(|error| Fault::Video(error.to_string()))?;
    let mut thinned = Thinned { kept: Vec::new(), most: sampling.frames_max, stride: 1, seen: 0 };
    let filter = filter(Some(rate), sampling.pixels(sampling.frames_max));
    run(input, None, &filter, None, |frame| thinned.take(frame)).await?;
    Ok(Video::from_frames(thinned.kept, rate / thinned.stride as f64))
}

/// Samples at most `most` items at even distances from a sequence of unknown length.
struct Thinned<T> {
    kept: Vec<T>,
    most: usize,
    stride: u64,
    seen: u64,
}

impl<T> Thinned<T> {
    fn take(&mut self, thing: T) {
        if self.seen.is_multiple_of(self.stride) {
            self.kept.push(thing);
        }
        self.seen += 1;
        if self.kept.len() > self.most {
            let mut index = 0;
            self.kept.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.stride *= 2;
        }
    }
}

/// Filter that samples decoded frames at `rate` and scales them down to at most `pixels`.
fn filter(rate: Option<f64>, pixels: u64) -> String {
    let scale = format!("min(1,sqrt({pixels}/(iw*ih)))");
    let side = |side: &str| format!("'max(1,trunc({side}*{scale}))'");
    let scaled = format!("scale=w={}:h={}", side("iw"), side("ih"));
    // With `round=up`, the frame for a point in time is the last frame that has started by then.
    rate.map_or(scaled.clone(), |rate| format!("fps=fps={rate:.9}:round=up,{scaled}"))
}

fn command(input: Input<'_>, level: &str, from_seconds: Option<f64>) -> Command {
    let Input { program, demuxer, seconds, .. } = input;
    // ffmpeg exits after this much CPU time, which is twice the time limit (and at least 2 s)
    // because ffmpeg has two threads.
    let processor_seconds = (2.0 * seconds).ceil().max(2.0);
    let mut command = Command::new(program);
    command.args(["-hide_banner", "-nostdin", "-loglevel", level, "-max_alloc", PIECE_BYTES]);
    command.args(["-timelimit", &processor_seconds.to_string(), "-filter_threads", "1"]);
    command.args(["-protocol_whitelist", "file", "-format_whitelist", demuxer, "-codec_whitelist", DECODERS]);
    command.args(["-max_pixels", PIXELS_MAX, "-threads", "2", "-an", "-sn", "-dn"]);
    if demuxer == "mov" {
        // A QuickTime file may refer to frames in another file.
        command.args(["-enable_drefs", "0"]);
    }
    if let Some(seconds) = from_seconds {
        command.args(["-ss", &format!("{seconds:.3}")]);
    }
    command.args(["-f", demuxer, "-i", INPUT]);
    command.env_clear().current_dir("/").stderr(Stdio::piped()).kill_on_drop(true);
    // A separate process group, so that Ctrl-C reaches only the server, which then ends ffmpeg.
    command.process_group(0);
    // Duplicate the descriptor for the process. If that fails, ffmpeg gets an empty input and
    // reports an unreadable video.
    match input.file.try_clone() {
        Ok(file) => command.stdin(file),
        Err(_) => command.stdin(Stdio::null()),
    };
    command
}

/// Decodes frames and passes each to `hand` as soon as it arrives.
///
/// # Errors
/// [`Fault::Video`] with ffmpeg's message if there is no frame, or with another message if a frame
/// is incomplete; [`Fault::Program`] if ffmpeg cannot be run.
async fn run(
    input: Input<'_>,
    from_seconds: Option<f64>,
    filter: &str,
    count: Option<usize>,
    mut hand: impl FnMut(Image),
) -> Result<ExitStatus, Fault> {
    let mut command = command(input, "error", from_seconds);
    // `V`: the first video stream that is not a cover picture.
    command.args(["-map", "0:V:0", "-vf", filter]);
    count.map(|count| command.args(["-frames:v", &count.to_string()]));
    command.args(["-c:v", "ppm", "-pix_fmt", "rgb24", "-f", "image2pipe", "pipe:1"]);
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut frames = BufReader::new(child.stdout.take().ok_or_else(no_pipe)?);
    let mut handed = 0;
    let taking = async {
        while count.is_none_or(|count| handed < count) {
            let Some(frame) = ppm(&mut frames).await? else { break };
            handed += 1;
            hand(frame);
        }
        Ok(())
    };
    let ((), stderr) = tokio::try_join!(taking, stderr_of(&mut child))?;
    let status = child.wait().await?;
    match handed {
        0 => Err(Fault::Video(reason(&stderr))),
        _ => Ok(status),
    }
}

fn no_pipe() -> std::io::Error {
    std::io::ErrorKind::BrokenPipe.into()
}

/// Reads the next image of a PPM stream: a text header with the size, then the pixels. Returns
/// `None` at the end.
async fn ppm(frames: &mut (impl AsyncBufRead + Unpin)) -> Result<Option<Image>, Fault> {
    let broken = || Fault::Video("the frames end early".to_owned());
    let Some(kind) = line(frames).await? else { return Ok(None) };
    let size = line(frames).await?.ok_or_else(broken)?;
    let levels = line(frames).await?.ok_or_else(broken)?;
    let size = size.split_once(' ').and_then(|(width, height)| Some((width.parse().ok()?, height.parse().ok()?)));
    let (width, height): (u16, u16) = size.filter(|_| kind == "P6" && levels == "255").ok_or_else(broken)?;
    let (width, height) = (u32::from(width), u32::from(height));
    let bytes = u64::from(width) * u64::from(height) * 3;
    let mut pixels = Vec::new();
    // Memory is allocated as bytes arrive, whatever size the header claims.
    frames.take(bytes).read_to_end(&mut pixels).await?;
    Image::from_rgb(width, height, pixels).map(Some).map_err(|_| broken())
}

/// Reads a line of at most `BYTES_MAX` bytes, without its line break. Returns `None` at the end and
/// for an empty line.
async fn line(frames: &mut (impl AsyncBufRead + Unpin)) -> Result<Option<String>, Fault> {
    const BYTES_MAX: u64 = 32;
    let mut line = Vec::new();
    frames.take(BYTES_MAX).read_until(b'\n', &mut line).await?;
    let line = String::from_utf8_lossy(&line).trim_end().to_owned();
    Ok(Some(line).filter(|line| !line.is_empty()))
}

/// Reads the standard error of ffmpeg until it is closed, and returns the first `STDERR_BYTES`
/// bytes.
async fn stderr_of(child: &mut Child) -> Result<String, Fault> {
    let mut stream = child.stderr.take().ok_or_else(no_pipe)?;
    let mut kept = Vec::new();
    read_some(&mut stream, &mut kept).await?;
    Ok(String::from_utf8_lossy(&kept).into_owned())
}

async fn read_some(stream: &mut (impl AsyncRead + Unpin), kept: &mut Vec<u8>) -> Result<(), std::io::Error> {
    let mut piece = [0; 4096];
    loop {
        let bytes = stream.read(&mut piece).await?;
        if bytes == 0 {
            return Ok(());
        }
        let left = STDERR_BYTES.saturating_sub(kept.len());
        kept.extend_from_slice(&piece[..bytes.min(left)]);
    }
}

/// First line of ffmpeg's message, without prefixes such as `[mov @ 0x55]`.
fn reason(stderr: &str) -> String {
    let mut line = stderr.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("ffmpeg printed no reason");
    while let Some((_, rest)) = line.split_once("] ").filter(|(place, _)| place.starts_with('[')) {
        line = rest;
    }
    line.replace(INPUT, "the video").chars().take(REASON_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_videos_duration_is_parsed_from_the_duration_line() {
        let stderr_with =
            |line: &str| format!("Input #0, mov, from 'file':\n  Metadata:\n    title: Duration: 9\n{line}\n");
        assert_eq!(duration(&stderr_with("  Duration: 01:02:03.50, start: 0.0, bitrate: 32 kb/s")), Some(3723.5));
        for none in ["  Duration: N/A, start: 0.0", "  Duration: ", "  Duration: -1:00:00", "  Duration: 1", ""] {
            assert_eq!(duration(&stderr_with(none)), None, "{none}");
        }
    }

    #[test]
    fn a_videos_pixel_rate_is_parsed_from_the_stream_line() {
        let stderr_with =
            |line: &str| format!("  Metadata:\n    title: : Video: 9x9, 9 fps\n{line}\n  Stream #0:1: Audio: aac\n");
        for (line, pixels) in [
            (
                "  Stream #0:0[0x1](und): Video: h264 (High) (avc1 / 0x31637661), yuv420p(tv, bt709), 1920x1080 [SAR 1:1 DAR 16:9], 1 kb/s, 29.97 fps, 30 tbr",
                Some(1920.0 * 1080.0 * 29.97),
            ),
            (
                "  Stream #0:0: Video: vp9, yuv420p10le(tv), 640x480, SAR 1:1, 25 tbr, 1k tbn",
                Some(640.0 * 480.0 * 25.0),
            ),
            ("  Stream #0:0: Video: vp9, yuv420p, 640x480, 1.2k fps", Some(640.0 * 480.0 * 1200.0)),
            ("  Stream #0:0: Video: vp8, yuv420p, 1920x1080, SAR 1:1 DAR 16:9, 1k tbr, 1k tbn", None),
            (
                "  Stream #0:1: Video: png, rgb24, 10x10, 90k tbr, 90k tbn (attached pic)\n  Stream #0:0: Video: vp9, yuv420p, 640x480, 25 fps",
                Some(640.0 * 480.0 * 25.0),
            ),
            ("  Stream #0:0: Video: none, 30 fps", None),
            ("", None),
        ] {
            assert_eq!(pixels_per_second(&stderr_with(line)), pixels, "{line}");
        }
    }

    #[test]
    fn too_many_frames_are_thinned_evenly() {
        let thinned = |count: u64, most| {
            let mut thinned = Thinned { kept: Vec::new(), most, stride: 1, seen: 0 };
            (0..count).for_each(|number| thinned.take(number));
            (thinned.kept, thinned.stride)
        };
        assert_eq!(thinned(3, 4), (vec![0, 1, 2], 1));
        assert_eq!(thinned(9, 4), (vec![0, 4, 8], 4));
        assert_eq!(thinned(1000, 1), (vec![0], 1024));
    }

    #[test]
    fn an_ffmpeg_error_is_shortened_and_names_no_path() {
        assert_eq!(reason("\n[mov @ 0x55] [in @ 0x6] moov atom not found\nmore"), "moov atom not found");
        assert_eq!(reason("file:/dev/fd/0: Invalid data"), "the video: Invalid data");
        assert_eq!(reason(&"x".repeat(5000)).len(), REASON_CHARS);
    }

    #[tokio::test]
    async fn frames_are_read_by_size_and_truncated_frames_refused() {
        let mut two = &b"P6\n2 1\n255\nabcdefP6\n1 1\n255\nxyz"[..];
        let mut sizes = Vec::new();
        while let Some(frame) = ppm(&mut two).await.expect("a frame") {
            sizes.push(frame.size(&bursar::ImageLimits::default()).expect("pixels"));
        }
        assert_eq!(sizes, [(2, 1), (1, 1)]);
        for cut in [
            "P6\n2 1\n255\nabc",
            "P6\n2 1\n",
            "P5\n2 1\n255\nabcdef",
            "P6\n2\n255\n",
            "P6\n0 1\n255\n",
            "P6\n70000 1\n255\n",
        ] {
            assert!(ppm(&mut cut.as_bytes()).await.is_err(), "{cut}");
        }
        assert!(ppm(&mut &b"P6\n60000 60000\n255\nabc"[..]).await.is_err(), "a huge frame takes no memory");
    }
}
