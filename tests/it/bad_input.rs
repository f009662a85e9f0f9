//! Bad input: only the bad request fails, at once, with a typed error, the limit and a hint. Other
//! requests are not affected.

use std::fs;

use bursar::{
    Bytes, Chat, ChatError, Hint, Image, ImageError, Limits, LoadOptions, MediaError, ModelSource, Role, SamplingError,
};
use image::{Rgb, RgbImage};

use crate::metrics_log::MetricsLog;
use crate::stage::{Folder, Stage, about, answer, ask, damaged_png, picture, png, runtime_on, small, story, text};

type Says = fn(&ChatError) -> bool;

fn truncated() -> Image {
    let whole = png(&RgbImage::from_pixel(90, 70, Rgb([1, 2, 3])));
    Image::from_bytes(&whole[..whole.len() / 2])
}

fn damaged() -> Image {
    Image::from_bytes(damaged_png())
}

fn is_too_many(error: &ChatError) -> bool {
    let ChatError::Sampling(error) = error else { return false };
    matches!(error.as_ref(), SamplingError::TooManyLogProbabilities { asked: 21, limit: 20 })
}

fn thin() -> Image {
    Image::from_bytes(png(&RgbImage::new(1, 20_000)))
}

/// Name, chat, check of the error, and text that the message must contain: the limit or the value.
fn table() -> Vec<(&'static str, Chat, Says, &'static str)> {
    vec![
        ("no turn", Chat::new(), |e| matches!(e, ChatError::Empty), "no turn"),
        ("no tokens", about(1).max_tokens(0), |e| matches!(e, ChatError::NoTokens), "0"),
        (
            "too many pictures",
            about(1).image(picture(2)).image(picture(3)),
            |e| matches!(e, ChatError::Media(MediaError::TooManyPictures { pictures: 3, limit: 2 })),
            "2",
        ),
        (
            "a truncated picture",
            text("What?").image(truncated()),
            |e| matches!(e, ChatError::Media(MediaError::Picture { index: 0, .. })),
            "",
        ),
        (
            "a damaged picture",
            about(1).image(damaged()),
            |e| matches!(e, ChatError::Media(MediaError::Picture { index: 1, .. })),
            "",
        ),
        (
            "not a picture",
            text("What?").image(Image::from_bytes(&b"#!/bin/sh\necho no\n"[..])),
            |e| matches!(e, ChatError::Media(MediaError::Picture { index: 0, .. })),
            "picture 0",
        ),
        (
            "an empty picture",
            text("What?").image(Image::from_bytes(&[][..])),
            |e| matches!(e, ChatError::Media(MediaError::Picture { index: 0, .. })),
            "picture 0",
        ),
        (
            "a picture far too thin",
            text("What?").image(thin()),
            |e| matches!(e, ChatError::Media(MediaError::Picture { index: 0, .. })),
            "200",
        ),
        (
            "a prompt longer than the context",
            text(&"shapes ".repeat(600)),
            |e| matches!(e, ChatError::TooLong { limit: 256, .. }),
            "256",
        ),
        (
            "a temperature that is no number",
            about(1).temperature(f64::NAN),
            |e| matches!(e, ChatError::Sampling(_)),
            "NaN",
        ),
        ("a negative temperature", about(1).temperature(-1.0), |e| matches!(e, ChatError::Sampling(_)), "-1"),
        ("a top_p of nothing", about(1).top_p(0.0), |e| matches!(e, ChatError::Sampling(_)), "0"),
        ("more candidates per token than a report holds", about(1).log_probabilities(21), is_too_many, "20"),
        (
            "more candidates per prompt token than a report holds",
            about(1).prompt_log_probabilities(21),
            is_too_many,
            "20",
        ),
        (
            "a minimum reply that does not fit into the context",
            about(1).min_tokens(400).max_tokens(400),
            |e| matches!(e, ChatError::MinTokens { tokens_min: 400, .. }),
            "400",
        ),
        ("an endless top_p", about(1).top_p(f64::INFINITY), |e| matches!(e, ChatError::Sampling(_)), "inf"),
    ]
}

#[test]
fn each_bad_chat_fails_alone_with_its_error() {
    story(async {
        let stage = Stage::set(small()).await;
        let expected = answer(&stage.model, about(1)).await;
        let before = stage.snapshot().await;
        for (name, chat, says, word) in table() {
            let other = stage.model.chat(about(1)).await.expect("the good request is accepted");
            let error = ask(&stage.model, chat).await.expect_err(name);
            assert!(says(&error), "{name}: {error:?}");
            assert!(error.to_string().contains(word), "{name} does not say '{word}': {error}");
            assert!(!error.hint().is_empty(), "{name} has no hint");
            assert_eq!(crate::stage::listen(other).await.expect("the model answers").text, expected, "next to {name}");
            stage.settled(&before).await;
        }
        assert_eq!(answer(&stage.model, about(1)).await, expected);
    });
}

#[test]
fn a_damaged_picture_after_cached_pictures_keeps_its_index() {
    let metrics_log = MetricsLog::open();
    story(async {
        let stage = Stage::set(LoadOptions { name: Some("damaged".to_owned()), ..small() }).await;
        let first = about(1);
        let reply = answer(&stage.model, first.clone()).await;
        let later = |shown: Image| first.clone().assistant(&reply).user("And this?").image(shown);
        let found = || metrics_log.now("bursar_pictures_found_computed_total{model=damaged}");
        answer(&stage.model, later(picture(2))).await;
        assert_eq!(found(), 1.0, "the tokens of the first picture are in the prefix cache");
        let error = ask(&stage.model, later(damaged())).await.expect_err("the second picture is damaged");
        assert!(matches!(error, ChatError::Media(MediaError::Picture { index: 1, .. })), "{error}");
    });
}

#[test]
fn a_broken_pictures_error_shows_none_of_its_content() {
    story(async {
        let stage = Stage::set(small()).await;
        let secret = Image::from_bytes(&b"my secret diary"[..]);
        let error = ask(&stage.model, text("a secret question").image(secret)).await.expect_err("not a picture");
        let message = format!("{error} {error:?} {}", error.hint());
        assert!(!message.contains("secret"), "{message}");
    });
}

#[test]
fn a_broken_picture_is_reported_by_file_name() {
    story(async {
        let (stage, folder) = (Stage::set(small()).await, Folder::empty());
        let path = folder.path().join("cat.png");
        fs::write(&path, b"no picture").expect("the file is written");
        let opened = Image::open(&path).expect("a file");
        let error = ask(&stage.model, about(1).image(opened)).await.expect_err("the file is not a picture");
        assert!(error.to_string().contains("picture 1 (cat.png)"), "{error}");
    });
}

#[test]
fn a_picture_file_may_reach_its_models_size_limit() {
    story(async {
        let folder = Folder::empty();
        let path = folder.path().join("large.png");
        // Bytes after the end of a PNG are not part of the picture, but they count toward the size
        // of the file: 21 MiB.
        let mut file = png(&RgbImage::from_pixel(56, 56, Rgb([200, 10, 10]))).to_vec();
        file.resize(21 << 20, 0);
        fs::write(&path, file).expect("the file is written");
        let usual = Stage::set(small()).await;
        let large = || Image::open(&path).expect("a file is read before its model's limit is known");
        let error = ask(&usual.model, text("What?").image(large())).await.expect_err("the default limit is 20 MiB");
        assert!(error.to_string().contains("the limit is 20971520"), "{error}");
        let mut options = small();
        options.image_limits.bytes_max = Bytes::mib(32);
        let raised = Stage::set(options).await;
        ask(&raised.model, text("What?").image(large())).await.expect("the raised limit is 32 MiB");
    });
}

#[test]
fn a_typed_picture_placeholder_stays_text() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let typed = "<|vision_start|><|image_pad|><|vision_end|> What is this?";
        let whole = ask(&stage.model, text(typed)).await;
        match whole {
            Ok(whole) => assert_eq!(whole.usage.picture_tokens, 0, "no picture was sent"),
            Err(error) => assert!(matches!(error, ChatError::Text(_) | ChatError::Layout(_)), "{error:?}"),
        }
        let real = ask(&stage.model, text(typed).image(picture(1))).await;
        let one = ask(&stage.model, about(1)).await.expect("the model answers").usage.picture_tokens;
        if let Ok(real) = real {
            assert_eq!(real.usage.picture_tokens, one, "one picture was sent");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn a_text_model_refuses_a_picture_and_says_why() {
    story(async {
        let device = crate::stage::device();
        let runtime = runtime_on(&device).await;
        let folder = bursar_golden::path("qwen2");
        let model = runtime.load_with(ModelSource::folder(&folder), small(), |_| {}).await;
        let model = model.unwrap_or_else(|error| panic!("{error}: {}", error.hint()));
        let before = runtime.budget().snapshot().await.expect("the budget answers");
        let error = ask(&model, about(1)).await.expect_err("a text model takes no pictures");
        assert!(matches!(error, ChatError::Layout(_)), "{error:?}");
        assert!(error.hint().contains("vision model"), "{}", error.hint());
        assert!(ask(&model, text("Hello").max_tokens(3)).await.is_ok(), "a text-only request is answered");
        assert_eq!(runtime.budget().snapshot().await.expect("the budget answers"), before);
    });
}

#[test]
fn a_picture_of_any_size_is_resized_into_the_envelope() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        for (width, height) in [(1, 1), (2000, 400), (900, 700), (29, 31)] {
            let sized = Image::from_bytes(png(&RgbImage::from_pixel(width, height, Rgb([200, 10, 10]))));
            let whole = ask(&stage.model, text("What?").image(sized)).await;
            let whole = whole.unwrap_or_else(|error| panic!("{width} x {height}: {error}"));
            // At most 64 patches, merged in groups of four.
            assert!((1..=16).contains(&whole.usage.picture_tokens), "{width} x {height}: {:?}", whole.usage);
        }
        // Rule 3: a picture that is still too large after resizing never reaches the device.
        let thin = Image::from_bytes(png(&RgbImage::new(1, 180)));
        let error = ask(&stage.model, text("What?").image(thin)).await.expect_err("the picture is too thin");
        assert!(
            matches!(error, ChatError::Media(MediaError::PictureTooLarge { index: 0, patches: 65.., limit: 64, .. })),
            "{error:?}"
        );
        stage.settled(&before).await;
    });
}

/// A picture of one color.
fn plain(width: u32, height: u32) -> Image {
    Image::from_rgb(width, height, vec![120; 3 * (width * height) as usize]).expect("three bytes for each pixel")
}

#[test]
fn pixel_limits_set_by_the_user_hold_within_the_envelope() {
    story(async {
        let tokens = async |limits: Limits, width, height| {
            let stage = Stage::set(LoadOptions { limits, ..small() }).await;
            let whole = ask(&stage.model, text("What?").image(plain(width, height))).await;
            let tokens = whole.unwrap_or_else(|error| panic!("{error}")).usage.picture_tokens;
            stage.runtime.shutdown().await;
            tokens
        };
        let none = Limits::default();
        // An encoder batch has up to 128 patches (32 tokens). A picture has up to 64 patches
        // (16 tokens) by default.
        assert_eq!(tokens(none.clone(), 500, 500).await, 16);
        let fewer = Limits { picture_pixels: Some(9 * 28 * 28 + 100), ..none.clone() };
        assert_eq!(tokens(fewer.clone(), 500, 500).await, 9, "the user's limit is below the model's minimum");
        let more = Limits { picture_pixels: Some(60 * 28 * 28), launch_patches: Some(128), ..none.clone() };
        assert_eq!(tokens(more, 500, 500).await, 25, "a batch of 32 tokens limits the picture to 5 x 5");
        let larger = Limits { picture_pixels: Some(60 * 28 * 28), ..none.clone() };
        assert_eq!(tokens(larger, 500, 500).await, 49, "60 tokens allow 7 x 7, which fits a batch");
        let enlarged = Limits { picture_pixels_min: Some(7 * 28 * 28), ..none.clone() };
        assert_eq!(tokens(enlarged, 28, 28).await, 9, "a small picture is enlarged to the minimum");
        let device = crate::stage::device();
        let runtime = runtime_on(&device).await;
        let enlarged = Limits { picture_pixels_min: Some(1 << 20), ..none.clone() };
        let error = runtime.load_with(ModelSource::demo(), LoadOptions { limits: enlarged, ..small() }, |_| {}).await;
        let error = error.err().expect("the minimum exceeds the maximum");
        assert!(
            error.to_string().contains("`picture_pixels_min` is 1048576") && error.hint().contains("at most"),
            "{error}"
        );
    });
}

#[test]
fn a_processor_without_resizing_refuses_large_pictures_with_the_limit() {
    story(async {
        let folder = Folder::empty();
        let demo = bursar_golden::demo_checkpoint();
        for entry in fs::read_dir(demo).expect("the demo's checkpoint").flatten() {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("the file is copied");
        }
        let settings = folder.path().join("preprocessor_config.json");
        let written = fs::read_to_string(&settings).expect("the file was copied");
        fs::write(&settings, written.replace(r#""do_resize": true"#, r#""do_resize": false"#)).expect("written");
        let device = crate::stage::device();
        let runtime = runtime_on(&device).await;
        let model = runtime.load_with(ModelSource::folder(folder.path()), small(), |_| {}).await;
        let model = model.unwrap_or_else(|error| panic!("{error}: {}", error.hint()));
        let picture_tokens = async |width, height| {
            ask(&model, text("What?").image(plain(width, height))).await.map(|whole| whole.usage.picture_tokens)
        };
        assert_eq!(picture_tokens(112, 84).await.expect("twelve tokens fit the limit"), 12);
        assert_eq!(picture_tokens(112, 112).await.expect("sixteen tokens fit the limit"), 16);
        let error = picture_tokens(140, 112).await.expect_err("five by four are 80 patches");
        assert!(
            matches!(error, ChatError::Media(MediaError::PictureTooLarge { index: 0, patches: 80, limit: 64, .. })),
            "{error:?}"
        );
        let error = picture_tokens(100, 84).await.expect_err("without resizing, 100 x 84 is refused");
        let is_no_multiple = |e: &ImageError| matches!(e, ImageError::NotAMultiple { multiple: 28, .. });
        assert!(
            matches!(&error, ChatError::Media(MediaError::Picture { index: 0, source, .. }) if is_no_multiple(source)),
            "{error:?}"
        );
        assert_eq!(picture_tokens(28, 28).await.expect("the model still answers"), 1);
    });
}

#[test]
fn an_unreadable_file_or_missing_folder_is_named() {
    let error = Image::open("/no/such/picture.png").expect_err("the file does not exist");
    assert!(matches!(error, ImageError::Unreadable { .. }) && error.to_string().contains("picture.png"), "{error}");
    story(async {
        let device = crate::stage::device();
        let runtime = runtime_on(&device).await;
        let before = runtime.budget().snapshot().await.expect("the budget answers");
        let error = runtime.load(ModelSource::folder("/no/such/model")).await.err().expect("the file does not exist");
        assert!(!error.hint().is_empty() && error.to_string().contains("/no/such/model"), "{error}");
        let after = runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!((after.granted, after.leases), (before.granted, before.leases));
    });
}

#[test]
fn system_turns_and_turns_of_mixed_content_are_answered() {
    story(async {
        let stage = Stage::set(small()).await;
        let chat = Chat::new()
            .system("Answer briefly.")
            .turn(Role::User, vec![bursar::Content::Text("Look:".into()), bursar::Content::Image(picture(1))])
            .temperature(0.0)
            .max_tokens(8);
        assert!(ask(&stage.model, chat).await.expect("the model answers").usage.picture_tokens > 0);
    });
}
