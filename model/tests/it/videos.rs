//! Videos on the host: plans, refusals, and the cache key of a step.

use bursar_budgets::{Bytes, Hint};
use bursar_model::{
    Envelope,
    checkpoint::{Checkpoint, CheckpointSource},
    error::{ImageError, MediaError, ProcessorError, VideoError},
    flow::{EncodedImage, FileName, Grid, ImageLimits, Media, MediaGrid, ResizeLimits, ResizedImage, Video},
    processor::{
        CountedPixels, ImageProcessor, ImageProcessorConfig, MediaLimits, MediaPlan, MediaProcessors, PixelBounds,
        VideoProcessor,
    },
    registry::{FamilyConfig, random_checkpoint},
};
use image::{ImageFormat, Rgb, RgbImage};
use proptest::prelude::*;

use crate::bench;
use crate::common::{golden_bytes, qwen_tokenizer};

fn png(picture: &RgbImage) -> EncodedImage {
    let mut encoded = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut encoded, ImageFormat::Png).expect("a PNG can be written to memory");
    EncodedImage::new(encoded.into_inner())
}

/// A frame with different pixels for each `number`.
fn frame(width: u32, height: u32, number: u32) -> EncodedImage {
    png(&RgbImage::from_fn(width, height, |x, y| Rgb([(x * 3 + number) as u8, (y * 5) as u8, number as u8])))
}

fn test_video(frames: u32, width: u32, height: u32) -> Video {
    Video::new((0..frames).map(|number| frame(width, height, number)).collect::<Vec<_>>(), 2.0)
}

fn config() -> ImageProcessorConfig {
    ImageProcessorConfig { pixel_bounds: PixelBounds { min: 28 * 28, max: 40 * 28 * 28 }, ..Default::default() }
}

fn processor() -> VideoProcessor {
    VideoProcessor::new(config()).expect("valid settings")
}

fn limits() -> ImageLimits {
    ImageLimits::default()
}

/// Settings whose bounds count the pixels of a whole video.
fn whole_video(tokens_max: Option<u64>) -> ImageProcessorConfig {
    let pixel_bounds = PixelBounds { min: 4 * 32 * 32, max: 60 * 32 * 32 };
    ImageProcessorConfig { patch_size: 16, counted: CountedPixels::Video { tokens_max }, pixel_bounds, ..config() }
}

fn plan(envelope: &Envelope, visuals: &[Media]) -> Result<Vec<MediaPlan>, MediaError> {
    plan_with(config(), envelope, visuals)
}

/// Plans videos with these settings, and pictures with the same settings, except that the bounds
/// count the pixels of one picture.
fn plan_with(
    settings: ImageProcessorConfig,
    envelope: &Envelope,
    visuals: &[Media],
) -> Result<Vec<MediaPlan>, MediaError> {
    plan_written(settings, 0, envelope, visuals)
}

/// Like [`plan_with`], with `step_text_tokens` tokens of text for each time step of a video.
fn plan_written(
    settings: ImageProcessorConfig,
    step_text_tokens: usize,
    envelope: &Envelope,
    visuals: &[Media],
) -> Result<Vec<MediaPlan>, MediaError> {
    let pixels = envelope.picture_patches as u64 * u64::from(settings.patch_size).pow(2);
    let pictures = ImageProcessorConfig { counted: CountedPixels::Picture, ..settings.clone() };
    let pictures = ImageProcessor::new(pictures).expect("valid settings").limited(pixels).expect("a limit");
    let videos = VideoProcessor::new(settings).expect("valid settings");
    let processors = MediaProcessors { pictures, videos: Some(videos), step_text_tokens };
    processors.plan(visuals, MediaLimits { envelope, image: &limits() })
}

fn envelope() -> Envelope {
    Envelope { picture_patches: 64, largest_pictures: 2, video_frames: 12, ..Envelope::default() }
}

#[test]
fn a_video_is_planned_from_headers_and_processed_as_planned() {
    for (frames, steps) in [(1, 1), (2, 1), (3, 2), (8, 4)] {
        let video = test_video(frames, 90, 61);
        let plan = processor().plan(&video, &limits(), usize::MAX).expect("a plan");
        assert_eq!((plan.steps, plan.step.grid.t), (steps, 1));
        let processed = processor().process(&video, &plan, &limits()).expect("the video is processed");
        assert_eq!(processed.len(), steps);
        assert!(processed.iter().all(|step| step.image.grid == plan.step.grid));
        let bytes: Bytes = processed.iter().map(|step| step.image.bytes()).sum();
        assert_eq!(plan.patches_bytes(), bytes);
        let MediaGrid::Video { step, steps: counted, frames_per_second, .. } = plan.grid() else {
            panic!("the grid of a video is a video grid");
        };
        assert_eq!((step, counted, frames_per_second), (plan.step.grid, steps, 2.0));
    }
}

/// Videos and pictures have different processors, which may normalize differently.
#[test]
fn a_one_frame_video_and_its_picture_have_different_keys() {
    let shown = [Media::Image(frame(90, 61, 0)), Media::Video(test_video(1, 90, 61)), Media::Image(frame(90, 61, 0))];
    let keys: Vec<_> = plan(&envelope(), &shown).expect("a plan").iter().map(MediaPlan::key).collect();
    assert_eq!(keys[0], keys[2]);
    assert_ne!(keys[0], keys[1]);
}

#[test]
fn a_video_step_keeps_frame_order_and_repeats_the_last() {
    let [a, b] = [0, 200].map(|number| frame(56, 56, number));
    let steps = |frames: Vec<EncodedImage>| {
        let video = Video::new(frames, 2.0);
        let plan = processor().plan(&video, &limits(), usize::MAX).expect("a plan");
        processor().process(&video, &plan, &limits()).expect("the video is processed")
    };
    let odd = steps(vec![a.clone(), b.clone(), a.clone()]);
    assert_eq!(odd[0].image, steps(vec![a.clone(), b.clone()])[0].image);
    assert_eq!(odd[0].hash, steps(vec![a.clone(), b.clone()])[0].hash);
    assert_ne!(odd[0].hash, steps(vec![b.clone(), a.clone()])[0].hash, "frames in another order form another step");
    let twice = steps(vec![a.clone(), a.clone()]);
    let cut = |step: &ResizedImage| bench::cut(step, &config());
    assert_eq!(cut(&odd[1].image), cut(&twice[0].image), "a single frame is shown twice");
    assert_eq!(odd[1].image.bytes() * 2, twice[0].image.bytes(), "the repeated frame is stored once");
    // A single frame equals the same picture, and shares its entry in the cache.
    let decoded = a.decode(&limits()).expect("a PNG");
    let picture = ImageProcessor::new(config()).expect("valid settings").process(&decoded).expect("a picture");
    assert_eq!((odd[1].hash, &odd[1].image), (picture.hash, &picture.image));
    assert_ne!(odd[0].hash, picture.hash);
}

#[test]
fn invalid_videos_are_refused_with_the_value() {
    let refused = |video: &Video| processor().plan(video, &limits(), usize::MAX).expect_err("the video is refused");
    assert_eq!(refused(&Video::new(Vec::new(), 2.0)), VideoError::NoFrames);
    for rate in [0.0, -1.0, f64::INFINITY, f64::NAN] {
        let error = refused(&Video::new(vec![frame(56, 56, 1)], rate));
        assert!(matches!(error, VideoError::FrameRate { .. }), "{error:?}");
        assert!(error.to_string().contains(&rate.to_string()), "{error}");
    }
    // The longest video is two frames that last 2^24 seconds together.
    for rate in [1e-300, f64::MIN_POSITIVE, 0.99 * 2.0 / f64::from(1 << 24)] {
        let error = refused(&Video::new(vec![frame(56, 56, 1); 2], rate));
        assert_eq!(error, VideoError::FrameRate { frames_per_second: rate });
        assert!(error.to_string().len() < 160 && error.to_string().contains("16777216 seconds"), "{error}");
    }
    let slowest = Video::new(vec![frame(56, 56, 1); 2], 2.0 / f64::from(1 << 24));
    processor().plan(&slowest, &limits(), usize::MAX).expect("a video of half a year is planned");
    let mixed = Video::new(vec![frame(56, 84, 1), frame(56, 84, 2), frame(84, 56, 3)], 2.0);
    let expected = VideoError::FrameSize { frame: 2, width: 84, height: 56, first_width: 56, first_height: 84 };
    assert_eq!(refused(&mixed), expected);
    let strange = Video::new(vec![frame(56, 84, 1), EncodedImage::new(&b"a secret text"[..])], 2.0);
    let error = refused(&strange);
    assert_eq!(error, VideoError::Frame { frame: 1, file: FileName::default(), source: ImageError::UnknownFormat });
    assert!(!format!("{error} {error:?} {}", error.hint()).contains("secret"));
    let thin = refused(&test_video(2, 3, 900));
    assert!(matches!(thin, VideoError::Frame { frame: 0, source: ImageError::AspectRatio { .. }, .. }), "{thin:?}");
}

#[test]
fn a_damaged_frame_is_named_while_decoding() {
    let whole = frame(90, 70, 3);
    let cut = EncodedImage::new(&whole.bytes()[..whole.bytes().len() / 2]);
    let video = Video::new(vec![whole.clone(), whole, cut], 2.0);
    let plan = processor().plan(&video, &limits(), usize::MAX).expect("all headers are valid");
    let error = processor().process(&video, &plan, &limits()).expect_err("one frame is damaged");
    assert!(matches!(error, VideoError::Frame { frame: 2, source: ImageError::Damaged { .. }, .. }), "{error:?}");
}

#[test]
fn a_media_key_depends_on_size_but_not_on_limits() {
    let within =
        |max| Media::Image(frame(90, 61, 0).within(ResizeLimits { pixels_max: max, ..ResizeLimits::default() }));
    let plans = plan(&envelope(), &[None, Some(28 * 28 * 14)].map(within)).expect("a plan");
    assert_eq!(plans[0].key(), plans[1].key(), "the size is the same as without the limit");
    let smaller = plan(&envelope(), &[within(Some(28 * 28 * 2))]).expect("a plan");
    assert_ne!(plans[0].key(), smaller[0].key());
    assert!(smaller[0].grid().patches() <= 8 && plans[0].grid().patches() > 8);
    let error = plan(&envelope(), &[within(Some(1 << 30))]).expect_err("the limit exceeds the envelope");
    let MediaError::Picture { source: ImageError::OwnLimitTooHigh { most, .. }, .. } = error else { panic!("{error}") };
    assert_eq!(most, envelope().picture_patches as u64 * 196);
    let small = frame(90, 61, 0).within(ResizeLimits { pixels_max: Some(784), ..ResizeLimits::default() });
    let video = Media::Video(Video::new(vec![small; 2], 2.0));
    let error = plan(&envelope(), &[video]).expect_err("a frame's size differs from its video's");
    assert!(error.to_string().contains("`max_pixels`") && error.hint().contains("leave"), "{error}");
}

#[test]
fn video_steps_share_the_patches_that_pictures_leave() {
    let picture = Media::Image(frame(400, 400, 1));
    let patches = |visuals: &[Media]| {
        let plans = plan(&envelope(), visuals).expect("a plan");
        plans.iter().map(|plan| plan.grid().patches()).collect::<Vec<_>>()
    };
    let video = |frames| Media::Video(test_video(frames, 400, 400));
    // A prompt may have 128 patches: two pictures of the maximum of 64 patches. A step never has
    // more patches than a picture may have.
    assert_eq!(patches(&[picture.clone(), picture.clone()]), [64, 64]);
    assert_eq!(patches(&[video(2)]), [64]);
    assert_eq!(patches(&[video(4)]), [64 + 64]);
    // 32 patches per step become a square of 16.
    assert_eq!(patches(&[video(8)]), [4 * 16]);
    assert_eq!(patches(&[video(4), picture.clone(), video(4)]), [2 * 16, 64, 2 * 16]);
    let full = plan(&envelope(), &[picture.clone(), video(1), picture.clone()])
        .expect_err("the pictures leave no tokens for the video");
    assert_eq!(full, MediaError::Video { index: 0, source: VideoError::TooLarge { patches: 4, limit: 0 } });
    assert!(full.hint().contains("fewer"), "{}", full.hint());
    let many = plan(&envelope(), &[video(7), video(6)]).expect_err("the request has more than twelve frames");
    assert_eq!(many, MediaError::Video { index: 1, source: VideoError::TooManyFrames { frames: 13, limit: 12 } });
    // A short context reserves tokens for text: 12 of 16 tokens remain.
    let short = Envelope { context_tokens: 16, ..envelope() };
    assert_eq!(plan(&short, &[video(2)]).expect("a plan")[0].grid().patches(), 36);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Rule 3: every admitted picture and video has rows in the cache and fits an encoder batch.
    #[test]
    fn media_plans_never_exceed_the_envelope(
        shown in prop::collection::vec((any::<bool>(), 1u32..8, 1u32..300, 1u32..300), 1..4),
        picture_patches in 4usize..200,
        largest_pictures in 1usize..4,
        counts_whole in any::<bool>(),
    ) {
        let envelope = Envelope { picture_patches, largest_pictures, video_frames: 16, ..Envelope::default() };
        let visuals: Vec<Media> = shown
            .into_iter()
            .map(|(still, frames, width, height)| {
                if still {
                    Media::Image(frame(width, height, frames))
                } else {
                    Media::Video(test_video(frames, width, height))
                }
            })
            .collect();
        let settings = if counts_whole { whole_video(None) } else { config() };
        if let Ok(plans) = plan_with(settings, &envelope, &visuals) {
            let all: usize = plans.iter().map(|plan| plan.grid().patches()).sum();
            prop_assert!(all <= envelope.largest_pictures * envelope.picture_patches, "{all} of {envelope:?}");
            for plan in &plans {
                let largest = plan.grid().patches() / plan.grid().pictures();
                prop_assert!(largest <= envelope.picture_patches, "{largest} of {envelope:?}");
            }
        }
    }
}

#[test]
fn the_frames_of_a_video_share_its_pixel_limit() {
    let patches = |settings: &ImageProcessorConfig, frames: u32| {
        let processor = VideoProcessor::new(settings.clone()).expect("valid settings");
        let plan = processor.plan(&test_video(frames, 400, 400), &limits(), usize::MAX).expect("a plan");
        plan.step.grid.patches()
    };
    // A limit of 60 tokens over all frames leaves 30 tokens for each of two frames, 15 for
    // each of four, and 7.5 for each of eight. The largest squares within these limits have
    // 25, 9 and 4 tokens.
    let free = whole_video(None);
    assert_eq!([2, 4, 8].map(|frames| patches(&free, frames)), [4 * 25, 4 * 9, 4 * 4]);
    // A limit per frame never reduces a video below its minimum pixels.
    assert_eq!([2, 8].map(|frames| patches(&whole_video(Some(16)), frames)), [4 * 16, 4 * 4]);
    assert_eq!(patches(&whole_video(Some(1)), 2), 4 * 4);
    let lone = VideoProcessor::new(free).expect("valid settings").plan(&test_video(1, 400, 400), &limits(), usize::MAX);
    let lone = lone.expect_err("the limit is less than one step");
    assert_eq!(lone, VideoError::TooFewFrames { frames: 1, least: 2 });
    assert!(lone.hint().contains("picture"), "{}", lone.hint());
}

#[test]
fn the_minimum_pixels_are_kept_unless_a_limit_forbids() {
    let settings = ImageProcessorConfig { pixel_bounds: PixelBounds { min: 30 * 784, max: 40 * 784 }, ..config() };
    let processor = VideoProcessor::new(settings).expect("valid settings");
    let patches = |limit| processor.plan(&test_video(2, 56, 56), &limits(), limit).expect("a plan").step.grid.patches();
    // The smallest square with at least 30 tokens has 36, as in transformers.
    assert_eq!((patches(usize::MAX), patches(60 * 4)), (4 * 36, 4 * 36));
    assert_eq!(patches(40 * 4), 4 * 16, "the size is rounded down if rounding up would exceed the limit");
}

#[test]
fn all_allowed_frames_and_their_text_fit_the_context() {
    let released =
        ImageProcessorConfig { pixel_bounds: PixelBounds { min: 4096, max: 25_165_824 }, ..whole_video(None) };
    let tokens = |envelope: &Envelope, step_text_tokens: usize| {
        let video = Video::new(vec![png(&RgbImage::new(1280, 720)); envelope.video_frames], 2.0);
        let plans = plan_written(released.clone(), step_text_tokens, envelope, &[Media::Video(video)]);
        let grid = plans.expect("the number of frames is within `video_frames`")[0].grid();
        grid.patches() / 4 + grid.pictures() * step_text_tokens
    };
    for envelope in [Envelope::gpu(), Envelope::default(), Envelope::small()] {
        for step_text_tokens in [0, 12] {
            let (taken, most) = (tokens(&envelope, step_text_tokens), envelope.context_tokens * 3 / 4);
            assert!(taken <= most, "{taken} tokens of at most {most} at {step_text_tokens} text tokens per step");
        }
    }
}

#[test]
fn the_text_tokens_of_a_video_step_match_the_tokenizer() {
    let random = random_checkpoint("qwen3-vl-tiny", 0).expect("a known shape");
    let checkpoint =
        Checkpoint::open(CheckpointSource::Random(std::sync::Arc::new(random))).expect("the checkpoint opens");
    let family = FamilyConfig::of(&checkpoint).expect("the family is known");
    let text_tokens = |frames_per_second| {
        let step = Grid { t: 1, h: 2, w: 2 };
        let grid = MediaGrid::Video { step, steps: 2, frames: 4, frames_per_second };
        let written = family.write_visuals("<|video_pad|>".to_owned(), &[grid]);
        let (_, second) = written.split_once("<|vision_end|>").expect("two steps");
        qwen_tokenizer().encode(second, false).expect("the text encodes").len() - 1
    };
    // The second step lasts from frame 2 to frame 3, so its time is 2.5 / rate seconds.
    assert_eq!(text_tokens(2.5), 8, "the text is <1.0 seconds>");
    assert_eq!(text_tokens(2.5 / 99_999.9), family.step_text_tokens(), "the text is <99999.9 seconds>");
}

#[test]
fn unsupported_video_settings_are_refused_by_name() {
    let read = |class: &str, more: &str| {
        let json = format!(r#"{{"video_processor_type": "{class}", {more}}}"#);
        ImageProcessorConfig::from_video_json(json.as_bytes())
    };
    let (whole, each) = ("Qwen3VLVideoProcessor", "Qwen2VLVideoProcessor");
    for (class, setting, value, hint) in [
        (whole, "min_pixels", "4096", "set `size`"),
        (whole, "max_pixels", "90000", "set `size`"),
        (each, "cap_pixels_per_frame", "true", "false or null"),
    ] {
        let error = read(class, &format!(r#""{setting}": {value}"#)).expect_err("the setting is refused");
        assert!(error.to_string().contains(&format!("`{setting}` is {value}")), "{error}");
        assert!(error.hint().contains(hint), "{}", error.hint());
    }
    read(whole, r#""min_pixels": null, "max_pixels": null, "cap_pixels_per_frame": true"#)
        .expect("null settings are accepted");
    read(each, r#""min_pixels": 4096, "cap_pixels_per_frame": false"#).expect("the settings are accepted");
}

#[test]
fn video_settings_have_a_separate_file_and_defaults() {
    let own =
        br#"{"video_processor_type": "Qwen2VLVideoProcessor", "size": {"shortest_edge": 4000, "longest_edge": 90000}}"#;
    let config = ImageProcessorConfig::from_video_json(own).expect("the video settings are read");
    assert_eq!(config.pixel_bounds, PixelBounds { min: 4000, max: 90000 });
    let bare = ImageProcessorConfig::from_video_json(br#"{"video_processor_type": "Qwen2VLVideoProcessor"}"#);
    assert_eq!(
        bare.expect("the video settings are read").pixel_bounds,
        PixelBounds { min: 128 * 28 * 28, max: 768 * 28 * 28 }
    );
    let whole = |more: &str| {
        let json = format!(r#"{{"video_processor_type": "Qwen3VLVideoProcessor"{more}}}"#);
        ImageProcessorConfig::from_video_json(json.as_bytes()).expect("the video settings are read")
    };
    let bare = whole("");
    assert_eq!(bare.pixel_bounds, PixelBounds { min: 128 * 32 * 32, max: 768 * 32 * 32 });
    assert_eq!(
        (bare.patch_size, bare.image_mean, bare.counted),
        (16, [0.5; 3], CountedPixels::Video { tokens_max: None })
    );
    let capped = |more: &str| whole(&format!(r#", "cap_pixels_per_frame": true{more}"#)).counted;
    assert_eq!(capped(""), CountedPixels::Video { tokens_max: Some(768) });
    assert_eq!(capped(r#", "max_video_tokens": 5"#), CountedPixels::Video { tokens_max: Some(5) });
    // Checkpoints without video settings (video_preprocessor_config.json, or `video_processor` in
    // processor_config.json) use the picture settings, as in transformers.
    let pictures = golden_bytes("qwen2_5_vl/preprocessor_config.json");
    let fallen = ImageProcessorConfig::from_video_json(&pictures).expect("the video settings are read");
    assert_eq!(fallen, ImageProcessorConfig::from_json(&pictures).expect("the video settings are read"));
    let other = ImageProcessorConfig::from_video_json(br#"{"video_processor_type": "VivitVideoProcessor"}"#);
    assert!(matches!(other, Err(ProcessorError::UnknownProcessor { .. })), "{other:?}");
}

#[test]
fn decoding_memory_does_not_grow_with_the_number_of_frames() {
    let bytes = |frames| {
        let plan = processor().plan(&test_video(frames, 1200, 900), &limits(), 16).expect("a plan");
        assert_eq!(plan.step.grid, Grid { t: 1, h: 2, w: 4 });
        (plan.decoding_bytes, plan.patches_bytes())
    };
    let ((two, step), (twelve, steps)) = (bytes(2), bytes(12));
    assert_eq!(step * 6, steps);
    // The encoded bytes of the largest frame are included, and frames differ by a few bytes.
    assert!(twelve.0.abs_diff(two.0) < 100, "{two} {twelve}");
    assert!(two >= Bytes(1200 * 900 * 3), "the cost includes a decoded frame");
}
