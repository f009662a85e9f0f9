//! Videos that requests name: each gives the same result as its frames sent as pictures, and
//! harmful videos are refused. Tests with container formats need the real `ffmpeg`, from
//! `BURSAR_FFMPEG` or on the PATH. Without it they are skipped with a note.

use std::{
    env, fs,
    io::{Cursor, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use bursar::Bytes;
use bursar_serve::ServeOptions;
use image::{Delay, Frame, ImageFormat, Rgb, RgbImage, Rgba, RgbaImage, codecs::gif::GifEncoder};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::client::{Fixture, hello, pause, posted};
use crate::stage::{eventually, small, story};

/// A test's folder, removed at the end.
struct Root(PathBuf);

impl Root {
    fn new(name: &str) -> Root {
        let root = env::temp_dir().join(format!("bursar-videos-{name}-{}", std::process::id()));
        fs::create_dir_all(&root).expect("a folder");
        Root(root)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let file = self.0.join(name);
        fs::write(&file, bytes).expect("a file");
        file
    }

    /// Writes a script in place of ffmpeg. Another process writes the file, so that no child of
    /// this process holds it open.
    fn script(&self, text: &str) -> PathBuf {
        let script = self.0.join("ffmpeg");
        let copy = format!("cat > '{0}' && chmod +x '{0}'", script.display());
        fed(Command::new("/bin/sh").args(["-c", &copy]), format!("#!/bin/sh\n{text}\n").as_bytes());
        script
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// Runs a program with this standard input.
fn fed(command: &mut Command, input: &[u8]) {
    let mut child = command.stdin(Stdio::piped()).spawn().expect("the program runs");
    child.stdin.take().expect("stdin is piped").write_all(input).expect("the program reads");
    assert!(child.wait().expect("the program ends").success(), "{command:?}");
}

/// The real ffmpeg, if there is one.
fn ffmpeg() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("ffmpeg")).find(|program| program.is_file());
    let found = env::var_os("BURSAR_FFMPEG").map(PathBuf::from).or(on_path);
    if found.is_none() {
        println!("skipped: no ffmpeg on the PATH (or name one by BURSAR_FFMPEG)");
    }
    found
}

/// Makes a video with ffmpeg.
fn make(program: &Path, arguments: &[&str], input: &[u8], video: &Path) {
    let mut command = Command::new(program);
    command.args(["-hide_banner", "-loglevel", "error", "-y"]).args(arguments).arg(video);
    fed(&mut command, input);
}

async fn fixture(root: &Root, ffmpeg: Option<PathBuf>, video_time: Duration) -> Fixture {
    let serve = ServeOptions { media_root: Some(root.0.clone()), ffmpeg, video_time, ..ServeOptions::default() };
    Fixture::with(small(), serve).await
}

const USUAL: Duration = Duration::from_secs(30);

/// A question about a video.
fn about(part: Value) -> Value {
    hello(json!({"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What happens?"}]}],
        "max_tokens": 1, "logprobs": true, "top_logprobs": 3}))
}

fn video_chat(url: &str, fps: f64) -> Value {
    about(json!({"type": "video_url", "video_url": {"url": url}, "fps": fps}))
}

/// The log-probabilities of the first token's candidates, and the picture tokens. Different frames
/// or times would give different log-probabilities.
async fn answer_of(fixture: &Fixture, asked: &Value) -> (Value, Value) {
    let answer = fixture.post("/v1/chat/completions", asked).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    (answer["choices"][0]["logprobs"].clone(), answer["usage"]["prompt_tokens_details"]["image_tokens"].clone())
}

/// A picture of a square. The square moves to the right as `number` grows.
fn frame(number: u32) -> Vec<u8> {
    let picture = RgbImage::from_fn(84, 84, |x, y| {
        if (4 + number * 2..28 + number * 2).contains(&x) && y > 20 {
            Rgb([220, (number * 8) as u8, 20])
        } else {
            Rgb([10, 10, 30])
        }
    });
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, ImageFormat::Png).expect("the picture is encoded");
    bytes.into_inner()
}

fn data(kind: &str, bytes: &[u8]) -> String {
    format!("data:{kind};base64,{}", STANDARD.encode(bytes))
}

#[test]
fn a_video_is_read_as_evenly_spaced_frames() {
    let Some(program) = ffmpeg() else { return };
    story(async {
        let root = Root::new("even");
        let frames: Vec<Vec<u8>> = (0..20).map(frame).collect();
        let lossless = ["-f", "image2pipe", "-framerate", "10", "-c:v", "png", "-i", "pipe:0"];
        let codecs = [("a.mov", &["-c:v", "png"][..]), ("a.mkv", &["-c:v", "ffv1", "-pix_fmt", "bgr0"][..])];
        for (name, codec) in codecs {
            make(&program, &[&lossless[..], codec].concat(), &frames.concat(), &root.0.join(name));
        }
        // This file is written to a pipe, so it does not contain its duration.
        let unmeasured = root.0.join("pipe.mkv");
        let piped = format!(
            "'{}' -loglevel error {} -c:v ffv1 -pix_fmt bgr0 -f matroska - | cat > '{}'",
            program.display(),
            lossless.join(" "),
            unmeasured.display()
        );
        fed(Command::new("/bin/sh").args(["-c", &piped]), &frames.concat());
        let fixture = fixture(&root, Some(program), USUAL).await;
        let before = fixture.stage.snapshot().await;
        for (fps, picked, rate) in [(2.0, vec![0, 5, 10, 15], 2.0), (10.0, vec![0, 2, 5, 7, 10, 12, 15, 17], 4.0)] {
            let shown: Vec<String> = picked.iter().map(|&number: &usize| data("image/png", &frames[number])).collect();
            let expected = answer_of(&fixture, &about(json!({"type": "video", "video": shown, "fps": rate}))).await;
            let bytes = fs::read(root.0.join("a.mov")).expect("the file is there");
            for url in ["file:a.mov".to_owned(), "file:a.mkv".to_owned(), data("video/mp4", &bytes)] {
                assert_eq!(answer_of(&fixture, &video_chat(&url, fps)).await, expected, "{} at {fps}", &url[..10]);
            }
        }
        // Twenty frames at 10 fps. The file does not contain its duration, so the server drops
        // every second frame until the rest fits into the frame limit: twenty, ten, five.
        let shown: Vec<String> = (0..5).map(|number| data("image/png", &frames[4 * number])).collect();
        let expected = answer_of(&fixture, &about(json!({"type": "video", "video": shown, "fps": 2.5}))).await;
        assert_eq!(answer_of(&fixture, &video_chat("file:pipe.mkv", 10.0)).await, expected);
        fixture.stage.settled(&before).await;
        fixture.end().await;
    });
}

#[test]
fn videos_of_common_codecs_and_container_layouts_are_read() {
    let Some(program) = ffmpeg() else { return };
    story(async {
        let root = Root::new("codecs");
        let picture = ["-f", "lavfi", "-i", "testsrc=duration=2.8:size=320x240:rate=10"];
        let sound = ["-f", "lavfi", "-i", "sine=duration=2"];
        for (name, codec) in [
            ("end.mp4", &["-c:v", "mpeg4", "-c:a", "aac"][..]),
            ("begin.mp4", &["-c:v", "mpeg4", "-c:a", "aac", "-movflags", "+faststart"]),
            ("parts.mp4", &["-c:v", "mpeg4", "-c:a", "aac", "-movflags", "frag_keyframe+empty_moov"]),
            ("clip.mov", &["-c:v", "mjpeg", "-c:a", "pcm_s16le"]),
            ("clip.mkv", &["-c:v", "ffv1", "-c:a", "pcm_s16le"]),
        ] {
            make(&program, &[&picture[..], &sound, codec].concat(), b"", &root.0.join(name));
        }
        // Not every build of ffmpeg has these encoders.
        for (encoder, layout, name) in [
            ("libx264", "yuv420p", "x264.mp4"),
            ("libvpx-vp9", "yuv420p", "vp9.webm"),
            // Ten bits per sample, as phones record.
            ("ffv1", "yuv420p10le", "ten.mkv"),
            ("libx264", "yuv420p10le", "ten_x264.mp4"),
            ("libx265", "yuv420p10le", "ten_x265.mp4"),
            ("libvpx-vp9", "yuv420p10le", "ten_vp9.webm"),
            ("libsvtav1", "yuv420p10le", "ten_av1.mp4"),
            ("prores_ks", "yuv422p10le", "ten_prores.mov"),
        ] {
            let has = Command::new(&program).args(["-hide_banner", "-encoders"]).output().expect("the program runs");
            if String::from_utf8_lossy(&has.stdout).contains(encoder) {
                make(
                    &program,
                    &[&picture[..], &["-pix_fmt", layout, "-c:v", encoder]].concat(),
                    b"",
                    &root.0.join(name),
                )
            } else {
                println!("skipped: this ffmpeg has no {encoder}")
            }
        }
        let fixture = fixture(&root, Some(program), USUAL).await;
        let mut tokens = Vec::new();
        for entry in fs::read_dir(&root.0).expect("a folder") {
            let name = entry.expect("a file").file_name().into_string().expect("a name of ours");
            tokens.push(answer_of(&fixture, &video_chat(&format!("file:{name}"), 2.0)).await.1);
        }
        assert!(tokens.len() >= 6 && tokens.iter().all(|each| *each == tokens[0]), "{tokens:?}");
        fixture.end().await;
    });
}

#[test]
fn only_a_few_frames_of_a_long_video_are_decoded() {
    let Some(program) = ffmpeg() else { return };
    story(async {
        let root = Root::new("hours");
        // The brightness changes once a minute, which shows which frame was picked.
        let picture = "color=black:size=84x84:rate=1:duration=7200,geq=lum='16+T/60':cb=128:cr=128,format=yuv420p";
        let long = root.0.join("long.mkv");
        make(&program, &["-f", "lavfi", "-i", picture, "-c:v", "ffv1", "-g", "60"], b"", &long);
        let frames: Vec<String> = (0..8)
            .map(|number| {
                let mut command = Command::new(&program);
                let at = (number * 900).to_string();
                command.args(["-loglevel", "error", "-ss", &at, "-i"]).arg(&long);
                command.args(["-frames:v", "1", "-f", "image2pipe", "-c:v", "png", "-pix_fmt", "rgb24", "-"]);
                data("image/png", &command.output().expect("the program runs").stdout)
            })
            .collect();
        let fixture = fixture(&root, Some(program), USUAL).await;
        let expected =
            answer_of(&fixture, &about(json!({"type": "video", "video": frames, "fps": 8.0 / 7200.0}))).await;
        let started = Instant::now();
        assert_eq!(answer_of(&fixture, &video_chat("file:long.mkv", 2.0)).await, expected);
        assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
        fixture.end().await;
    });
}

#[test]
fn animations_are_read_without_ffmpeg() {
    story(async {
        let root = Root::new("animations");
        let mut bytes = Vec::new();
        let mut encoder = GifEncoder::new(&mut bytes);
        for number in 0..12_u8 {
            let grey = number * 20;
            let picture = RgbaImage::from_pixel(84, 84, Rgba([grey, grey, grey, 255]));
            let delay = Delay::from_numer_denom_ms(250, 1);
            encoder.encode_frame(Frame::from_parts(picture, 0, 0, delay)).expect("a frame");
        }
        drop(encoder);
        root.write("a.gif", &bytes);
        let fixture = fixture(&root, None, USUAL).await;
        let whole = answer_of(&fixture, &video_chat("file:a.gif", 2.0)).await;
        assert_eq!(whole.1, 3 * 9, "six frames make three steps");
        assert_eq!(answer_of(&fixture, &video_chat(&data("image/gif", &bytes), 2.0)).await, whole);
        let by_kwargs = json!({"mm_processor_kwargs": {"fps": 2.0}});
        let mut asked = about(json!({"type": "video_url", "video_url": {"url": "file:a.gif"}}));
        asked.as_object_mut().expect("an object").extend(by_kwargs.as_object().cloned().unwrap_or_default());
        assert_eq!(answer_of(&fixture, &asked).await, whole);
        // Two videos share the frame limit of the model.
        let part = json!({"type": "video_url", "video_url": {"url": "file:a.gif"}, "fps": 4});
        let both = json!({"messages": [{"role": "user", "content": [part, part]}], "max_tokens": 1});
        let both = fixture.chat(both).await;
        assert_eq!((both.status, &both.json()["usage"]["prompt_tokens_details"]["image_tokens"]), (200, &json!(4 * 4)));
        fixture.end().await;
    });
}

/// Checks that a video is refused with status 400 and with these words.
async fn refused(fixture: &Fixture, url: &str, words: &str) {
    let answer = fixture.post("/v1/chat/completions", &video_chat(url, 2.0)).await;
    assert_eq!(answer.status, 400, "{url}: {}", answer.body);
    let error = answer.error();
    assert_eq!(error["param"], "messages[0].content[0].video_url.url", "{error}");
    assert!(error["message"].as_str().is_some_and(|text| text.contains(words)), "{url}: {words} is not in {error}");
}

#[test]
fn video_frames_count_toward_the_limit_of_all_bodies() {
    story(async {
        let root = Root::new("held");
        let mut bytes = Vec::new();
        let mut encoder = GifEncoder::new(&mut bytes);
        for grey in [0, 200] {
            let picture = RgbaImage::from_pixel(84, 84, Rgba([grey, grey, grey, 255]));
            let delay = Delay::from_numer_denom_ms(2000, 1);
            encoder.encode_frame(Frame::from_parts(picture, 0, 0, delay)).expect("a frame");
        }
        drop(encoder);
        root.write("a.gif", &bytes);
        let media_root = Some(root.0.clone());
        let serve = ServeOptions { media_root, bodies_bytes: Bytes::kib(100), ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        for _ in 0..3 {
            // Four frames of 21 KiB fit. Eight do not.
            assert_eq!(answer_of(&fixture, &video_chat("file:a.gif", 1.0)).await.1, 2 * 9);
            let full = fixture.post("/v1/chat/completions", &video_chat("file:a.gif", 2.0)).await;
            assert_eq!(full.status, 503, "{}", full.body);
        }
        fixture.end().await;
    });
}

#[test]
fn without_ffmpeg_a_video_is_refused_with_a_hint() {
    story(async {
        let root = Root::new("without");
        root.write("a.mp4", b"\0\0\0\x18ftypisom\0\0\0\0isom");
        root.write("list.mp4", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n");
        root.write("short.gif", b"GIF89a");
        let fixture = fixture(&root, None, USUAL).await;
        refused(&fixture, "file:a.mp4", "install ffmpeg").await;
        refused(&fixture, "file:list.mp4", "not a video that this server can read").await;
        refused(&fixture, "file:short.gif", "the animation").await;
        refused(&fixture, &data("video/mp4", b"\0\0\0\x18ftypisom"), "install ffmpeg").await;
        let mut bomb = b"GIF89a\x20\x4e\x20\x4e\0\0\0".to_vec();
        bomb.extend(b",\0\0\0\0\x20\x4e\x20\x4e\0\x02\x02\x44\x01\0;");
        refused(&fixture, &data("image/gif", &bomb), "400000000 pixels").await;
        let gone = self::fixture(&root, Some(root.0.join("none")), USUAL).await;
        refused(&gone, "file:a.mp4", "cannot be started").await;
        gone.end().await;
        fixture.end().await;
    });
}

#[test]
fn malicious_videos_are_refused_and_read_no_other_file() {
    let Some(program) = ffmpeg() else { return };
    story(async {
        let root = Root::new("harm");
        let outside = Root::new("outside");
        let picture = ["-f", "lavfi", "-i", "testsrc=duration=3:size=320x240:rate=10"];
        make(&program, &[&picture[..], &["-c:v", "mpeg4"]].concat(), b"", &root.0.join("whole.mp4"));
        make(&program, &[&picture[..], &["-c:v", "mjpeg"]].concat(), b"", &root.0.join("large.mov"));
        make(&program, &["-f", "lavfi", "-i", "sine=duration=1", "-c:a", "aac"], b"", &root.0.join("sound.mp4"));
        let whole = fs::read(root.0.join("whole.mp4")).expect("the file is there");
        root.write("cut.mp4", &whole[..whole.len() / 2]);
        let secret = outside.write("secret.mp4", &whole);
        std::os::unix::fs::symlink(&secret, root.0.join("link.mp4")).expect("the link is created");
        // The header of each frame says 20,000 x 20,000 pixels.
        let mut large = fs::read(root.0.join("large.mov")).expect("the file is there");
        for at in 0..large.len() - 9 {
            if large[at..].starts_with(&[0xff, 0xc0, 0, 17, 8]) {
                large[at + 5..at + 9].copy_from_slice(&[0x4e, 0x20, 0x4e, 0x20]);
            }
        }
        root.write("large.mov", &large);
        let hidden = format!("ffconcat version 1.0\nfile {}\n", secret.display());
        root.write("list.mp4", format!("#EXTM3U\n#EXTINF:1,\n{}\n", secret.display()).as_bytes());
        root.write("concat.mp4", hidden.as_bytes());
        root.write("head.mp4", &[b"\0\0\0\x18ftypisom", hidden.as_bytes()].concat());
        root.write("head.mkv", &[b"\x1a\x45\xdf\xa3", hidden.as_bytes()].concat());
        let pipe = root.0.join("pipe.mp4");
        assert!(Command::new("mkfifo").arg(&pipe).status().expect("the program runs").success());
        let fixture = fixture(&root, Some(program), USUAL).await;
        let before = fixture.stage.snapshot().await;
        for (url, words) in [
            ("file:cut.mp4", "moov atom not found"),
            ("file:large.mov", "cannot be decoded: Picture size 20000x20000"),
            ("file:sound.mp4", "cannot be decoded"),
            ("file:link.mp4", "not in the media root of the server"),
            ("file:../outside/secret.mp4", "not in the media root of the server"),
            ("file:list.mp4", "not a video that this server can read"),
            ("file:concat.mp4", "not a video that this server can read"),
            ("file:head.mp4", "cannot be decoded"),
            ("file:head.mkv", "cannot be decoded"),
            ("file:pipe.mp4", "the path is not a regular file"),
            ("file:none.mp4", "not in the media root of the server"),
            ("https://example.org/a.mp4", "not on a host"),
        ] {
            refused(&fixture, url, words).await;
        }
        for fps in [0.0, -1.0, 1e-300] {
            let answer = fixture.post("/v1/chat/completions", &video_chat("file:whole.mp4", fps)).await;
            assert_eq!(answer.status, 400, "{fps}: {}", answer.body);
        }
        assert_eq!(fixture.post("/v1/chat/completions", &video_chat("file:whole.mp4", 1e300)).await.status, 200);
        fixture.stage.settled(&before).await;
        fixture.end().await;
    });
}

#[test]
fn a_hanging_ffmpeg_is_ended_by_timeout_or_disconnect() {
    story(async {
        let root = Root::new("hangs");
        root.write("a.mp4", b"\0\0\0\x18ftypisom\0\0\0\0isom");
        let pid_file = root.0.join("pid");
        let script =
            root.script(&format!("echo $$ > '{0}.new'; mv '{0}.new' '{0}'; exec /bin/sleep 600", pid_file.display()));
        let running = async || {
            let mut pid = None;
            eventually("ffmpeg runs", async || {
                pid = fs::read_to_string(&pid_file).ok();
                pid.is_some()
            })
            .await;
            fs::remove_file(&pid_file).expect("the file is removed");
            PathBuf::from("/proc").join(pid.expect("the program runs").trim())
        };
        let gone = async |process: PathBuf| eventually("ffmpeg has ended", async || !process.exists()).await;
        let short = fixture(&root, Some(script.clone()), Duration::from_secs(1)).await;
        refused(&short, "file:a.mp4", "takes longer than 1 s").await;
        gone(running().await).await;
        short.end().await;
        let patient = fixture(&root, Some(script), Duration::from_secs(600)).await;
        let mut client = patient.connect().await;
        let asked = posted("/v1/chat/completions", "", video_chat("file:a.mp4", 2.0).to_string().as_bytes());
        client.write_all(&asked).await.expect("the server reads");
        let process = running().await;
        assert!(process.exists());
        // If a client closes its side together with the request, the server assumes that the client
        // still reads. This client therefore disconnects later.
        pause(Duration::from_millis(150)).await;
        drop(client);
        gone(process).await;
        patient.end().await;
    });
}

#[test]
fn endless_ffmpeg_output_is_bounded() {
    story(async {
        let root = Root::new("talks");
        root.write("a.mp4", b"\0\0\0\x18ftypisom\0\0\0\0isom");
        // Endless frames of a video that claims three seconds, and endless messages.
        let length = "printf 'Input\\n  Duration: 00:00:03.00, start\\n' >&2";
        let frames = "while :; do printf 'P6\\n2 2\\n255\\nabcdefghijkl'; echo noise >&2; done";
        let script = root.script(&format!("case \"$*\" in *image2pipe*) {frames};; *) {length};; esac"));
        let fixture = fixture(&root, Some(script), Duration::from_secs(2)).await;
        refused(&fixture, "file:a.mp4", "takes longer than 2 s").await;
        fixture.end().await;
        let large =
            root.script(&format!("case \"$*\" in *image2pipe*) printf 'P6\\n9 9\\n255\\nabc';; *) {length};; esac"));
        let fixture = self::fixture(&root, Some(large), USUAL).await;
        refused(&fixture, "file:a.mp4", "the frames end early").await;
        assert_eq!(fixture.service.options().body_bytes, Bytes::mib(64));
        fixture.end().await;
    });
}
