//! Pictures of every kind: each is read as the reference reads it. A refused picture fails only its
//! chat, with the limit, the value and a hint.

use bursar::{
    Bytes, Chat, ChatError, DeviceChoice, Envelope, Hint, Image, ImageError, ImageLimits, LoadOptions, MediaError,
    Runtime, RuntimeConfig,
};
use image::{DynamicImage, Rgb, RgbImage};

use crate::stage::{
    Stage, about, answer, ask, demo, device, eventually, listen, picture, png, small, small_envelope, story, text,
};

fn golden(file: &str) -> Vec<u8> {
    let path = bursar_golden::path("pictures").join(file);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn half(bytes: &[u8]) -> Vec<u8> {
    bytes[..bytes.len() / 2].to_vec()
}

/// A PNG whose header announces this many RGBA pixels, without any pixel data.
fn announced(width: u32, height: u32, bits: u8) -> Vec<u8> {
    let mut header = b"IHDR".to_vec();
    header.extend(width.to_be_bytes());
    header.extend(height.to_be_bytes());
    header.extend([bits, 6, 0, 0, 0]);
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
    png.extend(&header);
    png.extend(crc32(&header).to_be_bytes());
    png.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e");
    png
}

/// The CRC-32 of ISO 3309, as in annex D of the PNG specification.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 })
    })
}

fn sixteen_bits() -> Vec<u8> {
    let picture = RgbImage::from_fn(90, 70, |x, y| Rgb([x as u8, y as u8, 99]));
    let mut encoded = std::io::Cursor::new(Vec::new());
    let deep = DynamicImage::from(picture).to_rgb16();
    DynamicImage::from(deep).write_to(&mut encoded, image::ImageFormat::Png).expect("the PNG is encoded");
    encoded.into_inner()
}

/// Limits that a small picture can exceed.
fn limits() -> ImageLimits {
    ImageLimits { bytes_max: Bytes(200_000), pixels_max: 4_000_000, decode_bytes_max: Bytes::mib(16) }
}

type Says = fn(&ImageError) -> bool;

/// Refused pictures: name, bytes, check of the error, and words of the message (the
/// value and the limit).
fn refused() -> Vec<(&'static str, Vec<u8>, Says, &'static [&'static str])> {
    let (damaged, unknown): (Says, Says) =
        (|e| matches!(e, ImageError::Damaged { .. }), |e| matches!(e, ImageError::UnknownFormat));
    let empty: Says = |e| matches!(e, ImageError::Empty { .. });
    let large = png(&RgbImage::from_fn(400, 400, |x, y| Rgb([(x * y) as u8, (x * x + y) as u8, (y * y * x) as u8])));
    vec![
        ("half a PNG", half(&golden("scene_84x56.png")), damaged, &["PNG"]),
        ("half a JPEG", half(&golden("photo_420.jpg")), damaged, &["JPEG"]),
        ("half a progressive JPEG", half(&golden("photo_progressive.jpg")), damaged, &["JPEG"]),
        ("half a JPEG in CMYK", half(&golden("cmyk.jpg")), damaged, &["JPEG"]),
        ("half a WebP", half(&golden("scene_lossless.webp")), damaged, &["WebP"]),
        ("half an animation", half(&golden("animated.webp")), damaged, &["WebP"]),
        ("a PNG's first bytes", golden("scene_84x56.png")[..20].to_vec(), damaged, &["PNG"]),
        (
            "more pixels than are decoded",
            announced(60_000, 60_000, 8),
            |e| matches!(e, ImageError::TooManyPixels { .. }),
            &["3600000000", "4000000"],
        ),
        (
            "more memory than decoding may take",
            announced(2000, 2000, 16),
            |e| matches!(e, ImageError::TooMuchDecodeMemory { .. }),
            &["16777216"],
        ),
        (
            "more bytes than a picture may have",
            large.to_vec(),
            |e| matches!(e, ImageError::TooManyBytes { .. }),
            &["200000"],
        ),
        ("no width", announced(0, 5, 8), empty, &["0 x 5"]),
        ("no height", announced(5, 0, 8), empty, &["5 x 0"]),
        (
            "1 x 20,000",
            png(&RgbImage::new(1, 20_000)).to_vec(),
            |e| matches!(e, ImageError::AspectRatio { .. }),
            &["20000", "200"],
        ),
        (
            "20,000 x 1",
            png(&RgbImage::new(20_000, 1)).to_vec(),
            |e| matches!(e, ImageError::AspectRatio { .. }),
            &["20000", "200"],
        ),
        ("a GIF without a frame", b"GIF89a\x01\0\x01\0\0\0\0;".to_vec(), damaged, &["GIF"]),
        ("half a GIF", half(&golden("scene_interlaced.gif")), damaged, &["GIF"]),
        ("half a BMP", half(&golden("scene_24.bmp")), damaged, &["BMP"]),
        ("half a TIFF", half(&golden("photo_lzw.tif")), damaged, &["TIFF"]),
        (
            "an AVIF",
            b"\0\0\0\x18ftypavif\0\0\0\0mif1avif".to_vec(),
            |e| matches!(e, ImageError::Unsupported { .. }),
            &["AVIF picture uses AV1 compression"],
        ),
        ("a script", b"#!/bin/sh\necho no\n".to_vec(), unknown, &["not PNG, JPEG, WebP, GIF, BMP or TIFF"]),
        ("nothing", Vec::new(), unknown, &["not PNG"]),
    ]
}

/// Accepted pictures: name and bytes.
fn accepted() -> Vec<(&'static str, Vec<u8>)> {
    let goldens = [
        ("16-bit gray", "grey_16_bit.png"),
        ("gray", "scene_grey.png"),
        ("gray with alpha", "scene_grey_alpha.png"),
        ("with alpha", "scene_rgba.png"),
        ("a palette", "scene_palette.png"),
        ("a palette with a transparent color", "scene_palette_transparent.png"),
        ("one bit", "scene_two_colours.png"),
        ("one pixel", "scene_1x1.png"),
        ("turned by EXIF", "scene_turned.jpg"),
        ("progressive", "photo_progressive.jpg"),
        ("CMYK", "cmyk.jpg"),
        ("CMYK as YCCK", "ycck.jpg"),
        ("an animated WebP", "animated.webp"),
        ("an animated PNG", "animated.png"),
        ("an animated GIF", "animated.gif"),
        ("a run-length encoded BMP", "scene_runs.bmp"),
        ("a TIFF of two pages", "pages.tif"),
    ];
    let mut accepted: Vec<_> = goldens.into_iter().map(|(name, file)| (name, golden(file))).collect();
    accepted.push(("16-bit RGB", sixteen_bits()));
    accepted
}

#[track_caller]
fn of_picture(error: &ChatError) -> &ImageError {
    match error {
        ChatError::Media(MediaError::Picture { index: 1, source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_bad_picture_fails_alone_and_at_once() {
    story(async {
        let stage = Stage::set(LoadOptions { image_limits: limits(), ..small() }).await;
        let expected = answer(&stage.model, about(1)).await;
        let before = stage.snapshot().await;
        for (name, bytes, says, words) in refused() {
            let beside = stage.model.chat(about(1)).await.expect("the good request is accepted");
            // The bad picture follows a good picture of the same chat. The memory of the good
            // picture must be released too.
            let error = ask(&stage.model, about(2).image(Image::from_bytes(bytes))).await.expect_err(name);
            assert!(says(of_picture(&error)), "{name}: {error:?}");
            for word in words {
                assert!(error.to_string().contains(word), "{name} does not say '{word}': {error}");
            }
            assert!(!error.hint().is_empty(), "{name} has no hint");
            assert_eq!(listen(beside).await.expect("the model answers").text, expected, "next to {name}");
            stage.settled(&before).await;
        }
        assert_eq!(answer(&stage.model, about(1)).await, expected);
    });
}

#[test]
fn every_picture_format_of_the_reference_is_read() {
    story(async {
        let stage = Stage::set(LoadOptions { image_limits: limits(), ..small() }).await;
        let before = stage.snapshot().await;
        for (name, bytes) in accepted() {
            let whole = ask(&stage.model, text("What?").image(Image::from_bytes(bytes)).max_tokens(2)).await;
            let whole = whole.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(whole.usage.picture_tokens > 0, "{name}");
            stage.settled(&before).await;
        }
        // 157 x 101 pixels as stored, 101 x 157 as displayed.
        let turned = ask(&stage.model, text("What?").image(Image::from_bytes(golden("scene_turned.jpg")))).await;
        let upright = ask(&stage.model, text("What?").image(Image::from_bytes(golden("scene_101x157.png")))).await;
        let tokens = |whole: Result<crate::stage::Whole, ChatError>| whole.expect("an answer").usage.picture_tokens;
        assert_eq!(tokens(turned), tokens(upright));
    });
}

#[test]
fn each_chat_may_limit_the_pixels_of_a_picture() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let drawn = RgbImage::from_fn(190, 130, |x, y| Rgb([(x * 5) as u8, (y * 3) as u8, (x ^ y) as u8]));
        let drawn = || Image::from_bytes(png(&drawn));
        let chat = |image: Image| text("What?").image(image).max_tokens(8);
        let whole = ask(&stage.model, chat(drawn())).await.expect("the model answers");
        let same = ask(&stage.model, chat(drawn().within_pixels(None, Some(64 * 196)))).await.expect("an answer");
        assert!(same.cached_tokens > whole.usage.picture_tokens, "the size limit changes nothing: {same:?}");
        assert_eq!(same.text, whole.text);
        let coarse = ask(&stage.model, chat(drawn().within_pixels(None, Some(4 * 784)))).await.expect("an answer");
        assert!(coarse.usage.picture_tokens <= 4 && whole.usage.picture_tokens > 4, "{coarse:?}");
        let placeholder = stage.model.serving().await.expect("the model serves").context.family.image_token();
        let prompt = stage.model.prompt_of(chat(drawn())).await.expect("a prompt").token_ids;
        let place = prompt.iter().position(|id| Some(*id) == placeholder).expect("a picture token");
        assert!(coarse.cached_tokens <= place, "blocks of the other size are not reused: {coarse:?}, {place}");
        let again = ask(&stage.model, chat(drawn())).await.expect("the model answers");
        assert_eq!((again.text, again.cached_tokens), (whole.text, same.cached_tokens), "coarse blocks are not reused");
        for (image, limit) in [
            (drawn().within_pixels(None, Some(64 * 196 + 1)), "`max_pixels` is 12545; expected at most 12544"),
            (drawn().within_pixels(None, Some(783)), "`max_pixels` is 783; expected at least 784"),
            (drawn().within_pixels(Some(9000), Some(8000)), "`min_pixels` is 9000; expected at most 8000"),
            (drawn().within_tiles(2), "`tiles` cannot be applied"),
        ] {
            let error = ask(&stage.model, chat(image)).await.expect_err("the picture is refused");
            assert!(matches!(error, ChatError::Media(MediaError::Picture { index: 0, .. })), "{error:?}");
            assert!(error.to_string().contains(limit) && !error.hint().is_empty(), "{error}");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn host_memory_for_pictures_is_leased_and_bounded() {
    story(async {
        // A picture of 800 x 600 takes about 4 MB of host memory. Two fit at a time, eight do not.
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(device()),
            host_bytes: Bytes::mib(10),
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let model = demo(&runtime, small()).await;
        let before = runtime.budget().snapshot().await.expect("the budget answers");
        let photo = |number: u8| Image::from_bytes(png(&RgbImage::from_pixel(800, 600, Rgb([number, 9, 77]))));
        let asked: Vec<_> = (0..8)
            .map(|number| {
                let model = model.clone();
                tokio::spawn(async move { ask(&model, text("What?").image(photo(number)).max_tokens(2)).await })
            })
            .collect();
        let mut most = Bytes::ZERO;
        for reply in asked {
            let mut reply = reply;
            let mut looks = tokio::time::interval(std::time::Duration::from_millis(1));
            let whole = loop {
                tokio::select! {
                    whole = &mut reply => break whole.expect("no panic"),
                    _ = looks.tick() => {
                        let host = runtime.budget().snapshot().await.expect("the budget answers").host_granted;
                        most = most.max(host);
                    }
                }
            };
            whole.expect("the reply ends well");
        }
        assert!(!most.is_zero() && most <= Bytes::mib(10), "{most} of host memory at most");
        // A picture that can never fit is refused with the limit instead of waiting forever.
        let huge = Image::from_bytes(png(&RgbImage::from_pixel(3000, 2000, Rgb([1, 2, 3]))));
        let error = ask(&model, text("What?").image(huge)).await.expect_err("the picture needs 18 MB of host memory");
        assert!(matches!(error, ChatError::Vision(_)), "{error:?}");
        assert!(!error.hint().is_empty() && error.to_string().contains("10"), "{error}: {}", error.hint());
        eventually("the ledger is as before", async || {
            runtime.budget().snapshot().await.expect("the budget answers") == before
        })
        .await;
        runtime.shutdown().await;
    });
}

#[test]
fn a_conversation_may_have_a_picture_in_every_turn() {
    story(async {
        let Envelope { pictures, .. } = Envelope::gpu();
        let envelope = Envelope { context_tokens: 1024, pictures, largest_pictures: 14, ..small_envelope() };
        let stage = Stage::set(LoadOptions { envelope: Some(envelope), kv_tokens: Some(2048), ..small() }).await;
        let before = stage.snapshot().await;
        let mut chat = Chat::new().temperature(0.0).max_tokens(8);
        for turn in 0..12 {
            chat = chat.user("Describe the picture.").image(picture(turn));
            let reply = ask(&stage.model, chat.clone()).await.expect("the model answers");
            chat = chat.assistant(&reply.text);
        }
        // All pictures of a chat together may take as many tokens as fourteen of the largest.
        let largest = Image::from_bytes(png(&RgbImage::new(112, 112)));
        let fifteen = (0..15).fold(Chat::new().user("What?"), |chat, _| chat.image(largest.clone()));
        let refused = stage.model.chat(fifteen).await.expect_err("the request is refused");
        assert!(
            matches!(refused, ChatError::Media(MediaError::PicturesTooLarge { tokens: 240, limit: 224 })),
            "{refused}"
        );
        assert!(refused.hint().contains("smaller pictures"), "{}", refused.hint());
        stage.settled(&before).await;
    });
}
