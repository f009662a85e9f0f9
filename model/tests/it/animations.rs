//! Animated GIF and WebP as videos: frames sampled at even times, and malicious files.

use std::time::{Duration, Instant};

use bursar_budgets::Bytes;
use bursar_model::{
    error::{ImageError, VideoError},
    flow::{ImageLimits, Video},
    processor::FrameSampling,
};
use image::{
    Delay, ExtendedColorType, Frame, ImageEncoder, Rgba, RgbaImage,
    codecs::{gif::GifEncoder, webp::WebPEncoder},
};

/// A screen of a single gray level.
fn screen(side: u32, grey: u8) -> RgbaImage {
    RgbaImage::from_pixel(side, side, Rgba([grey, grey, grey, 255]))
}

/// Frames with these gray levels, each shown for the given number of milliseconds.
fn gif(side: u32, frames: &[(u8, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = GifEncoder::new(&mut bytes);
    for &(grey, milliseconds) in frames {
        let frame = Frame::from_parts(screen(side, grey), 0, 0, Delay::from_numer_denom_ms(milliseconds, 1));
        encoder.encode_frame(frame).expect("a frame");
    }
    drop(encoder);
    bytes
}

/// A chunk of RIFF.
fn chunk(name: &[u8; 4], content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).expect("the length fits u32").to_le_bytes();
    let padding = &[0][..content.len() % 2];
    [name, &length[..], content, padding].concat()
}

/// A frame of an animated WebP, with the layout of RFC 9649, section 2.7.
fn webp_frame(side: u32, milliseconds: u32, bitstream: &[u8]) -> Vec<u8> {
    let three = |number: u32| number.to_le_bytes()[..3].to_vec();
    let head = [three(0), three(0), three(side - 1), three(side - 1), three(milliseconds), vec![0]];
    chunk(b"ANMF", &[&head.concat(), bitstream].concat())
}

fn webp_of(side: u32, frames: &[Vec<u8>]) -> Vec<u8> {
    let three = |number: u32| number.to_le_bytes()[..3].to_vec();
    let head = [vec![2, 0, 0, 0], three(side - 1), three(side - 1)].concat();
    let parts = [chunk(b"VP8X", &head), chunk(b"ANIM", &[0; 6]), frames.concat()].concat();
    chunk(b"RIFF", &[b"WEBP", &parts[..]].concat())
}

fn webp(side: u32, frames: &[(u8, u32)]) -> Vec<u8> {
    let frame = |&(grey, milliseconds): &(u8, u32)| {
        let mut still = Vec::new();
        let encoder = WebPEncoder::new_lossless(&mut still);
        encoder.write_image(&screen(side, grey), side, side, ExtendedColorType::Rgba8).expect("a picture");
        webp_frame(side, milliseconds, &still[12..])
    };
    webp_of(side, &frames.iter().map(frame).collect::<Vec<_>>())
}

fn sampling(frames_per_second: f64, frames_max: usize) -> FrameSampling {
    FrameSampling { frames_per_second, frames_max, bytes_max: Bytes::mib(8) }
}

fn read(encoded: &[u8], sampling: &FrameSampling) -> Result<Video, VideoError> {
    Video::from_animation(encoded, sampling, &ImageLimits::default())
}

/// The gray level of each frame's first pixel, rounded to the nearest ten, because a GIF's palette
/// may be off by one level.
fn greys(video: &Video) -> Vec<u8> {
    video.frames().iter().map(|frame| (frame.bytes()[0] + 5) / 10 * 10).collect()
}

#[test]
fn animation_frames_are_sampled_at_even_times() {
    let even: Vec<_> = (0..10).map(|number| (20 * number, 100)).collect();
    let uneven = [(0, 500), (40, 100), (80, 400), (120, 1000)];
    for write in [gif, webp] {
        let five = read(&write(16, &even), &sampling(5.0, 8)).expect("an animation");
        assert_eq!((greys(&five), five.frames_per_second()), (vec![0, 40, 80, 120, 160], 5.0));
        let two = read(&write(16, &uneven), &sampling(2.0, 8)).expect("an animation");
        assert_eq!(greys(&two), [0, 40, 120, 120], "a frame with a longer duration is sampled twice");
        let three = read(&write(16, &even), &sampling(10.0, 3)).expect("an animation");
        assert_eq!(
            (greys(&three), three.frames_per_second()),
            (vec![0, 60, 120], 3.0),
            "frames are sampled over the whole second"
        );
        let hasty = read(&write(16, &[(0, 0), (80, 0)]), &sampling(10.0, 8)).expect("an animation");
        assert_eq!(greys(&hasty), [0, 80], "a frame without a duration is shown for 0.1 seconds");
    }
}

#[test]
fn large_animation_frames_shrink_and_still_pictures_are_one_frame() {
    let moving = gif(64, &[(0, 500), (200, 500)]);
    let small = FrameSampling { bytes_max: Bytes(600), ..sampling(2.0, 8) };
    let video = read(&moving, &small).expect("an animation");
    let sides: Vec<_> = video.frames().iter().filter_map(|frame| frame.pixel_size()).map(|size| size.width).collect();
    assert_eq!(sides, [10, 10]);
    let mut still = Vec::new();
    let encoder = WebPEncoder::new_lossless(&mut still);
    encoder.write_image(&screen(8, 9), 8, 8, ExtendedColorType::Rgba8).expect("a picture");
    assert_eq!(read(&still, &small).expect("a picture").frames().len(), 1);
}

#[test]
fn animation_bombs_are_refused_before_decoding() {
    let started = Instant::now();
    let mut large = gif(16, &[(0, 100); 2]);
    large[6..10].copy_from_slice(&[0x20, 0x4e, 0x20, 0x4e]); // 20,000 x 20,000
    let refused = read(&large, &sampling(2.0, 8)).expect_err("the frame is too large");
    assert!(matches!(refused, VideoError::Frame { source: ImageError::TooManyPixels { pixels: 400_000_000, .. }, .. }));
    // 10,000 frames of a megapixel, each of a few bytes. All frames up to the last are needed.
    let mut long = gif(16, &[(0, 100)]);
    long[6..10].copy_from_slice(&[0xe8, 3, 0xe8, 3]);
    let frame = long.iter().position(|byte| *byte == 0x21).expect("the animation has a first block");
    let blocks = long[frame..long.len() - 1].repeat(10_000);
    let long = [&long[..frame], &blocks, &[0x3b]].concat();
    let refused = read(&long, &sampling(2.0, 8)).expect_err("the animation has too many frames");
    assert!(matches!(refused, VideoError::TooManyPixels { limit: 512_000_000, .. }), "{refused:?}");
    // A frame whose own header states a larger size than the animation.
    let vp8 = [&[0, 0, 0, 0x9d, 1, 0x2a, 0xff, 0x3f, 0xff, 0x3f][..], &[0; 8]].concat();
    let lying = webp_of(16, &[webp_frame(16, 100, &chunk(b"VP8 ", &vp8))]);
    let refused = read(&lying, &sampling(2.0, 8)).expect_err("the frame header contradicts the container");
    assert!(matches!(refused, VideoError::Frame { source: ImageError::Damaged { .. }, .. }), "{refused:?}");
    let tight = ImageLimits { decode_bytes_max: Bytes::mib(1), ..ImageLimits::default() };
    let refused = Video::from_animation(&gif(512, &[(0, 100)]), &sampling(2.0, 8), &tight)
        .expect_err("the animation exceeds the memory limit");
    assert!(matches!(refused, VideoError::Frame { source: ImageError::TooMuchDecodeMemory { .. }, .. }));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn a_damaged_animation_never_panics() {
    for whole in [gif(16, &[(0, 100), (99, 100), (200, 100)]), webp(16, &[(0, 100), (99, 100), (200, 100)])] {
        for length in 0..whole.len() {
            drop(read(&whole[..length], &sampling(10.0, 8)));
        }
        let half = read(&whole[..whole.len() / 2], &sampling(10.0, 8));
        assert!(matches!(half, Err(VideoError::Frame { .. })), "{half:?}");
        for at in 0..whole.len() {
            for value in [0, 0xff, whole[at] ^ 0x10] {
                let mut wrong = whole.clone();
                wrong[at] = value;
                drop(read(&wrong, &sampling(10.0, 8)));
            }
        }
    }
    for other in [&b""[..], b"GIF89a", b"#EXTM3U\nhttp://host/", b"\x89PNG\r\n\x1a\n"] {
        assert!(read(other, &sampling(2.0, 8)).is_err());
    }
}
