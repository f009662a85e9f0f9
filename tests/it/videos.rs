//! Videos through the runtime: answered, counted and cached. A refused video fails only its chat.

use std::sync::Arc;

use bursar::{Chat, ChatError, Content, Hint, Image, LoadOptions, MediaError, ModelSource, Role, Video, VideoError};
use image::{Rgb, RgbImage};

use crate::stage::{Stage, about, answer, ask, eventually, listen, picture, png, runtime_on, small, story, text};

/// A square that moves a little with each number.
fn frame(width: u32, height: u32, number: u32) -> Image {
    Image::from_bytes(png(&RgbImage::from_fn(width, height, |x, y| {
        if (10 + number * 6..34 + number * 6).contains(&x) && (20..44).contains(&y) {
            Rgb([220, (number * 30 % 256) as u8, 20])
        } else {
            Rgb([10, 10, 30])
        }
    })))
}

fn test_video(frames: u32, frames_per_second: f64) -> Video {
    Video::from_frames((0..frames).map(|number| frame(84, 84, number)), frames_per_second)
}

fn about_video(video: Video) -> Chat {
    text("What happens?").video(video)
}

#[test]
fn a_video_chat_is_answered_and_its_steps_are_counted() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let tokens = async |frames| {
            let whole = ask(&stage.model, about_video(test_video(frames, 2.0))).await.expect("the model answers");
            assert!(!whole.text.is_empty() && whole.usage.completion_tokens > 0);
            assert!(whole.usage.prompt_tokens > whole.usage.picture_tokens);
            whole.usage.picture_tokens
        };
        // Three by three tokens per time step if they fit. The limit of 128 patches allows two
        // steps of 64 patches or four of 32.
        assert_eq!((tokens(1).await, tokens(2).await, tokens(3).await), (9, 9, 2 * 9));
        assert_eq!(tokens(8).await, 4 * 4);
        stage.settled(&before).await;
        assert_eq!(
            answer(&stage.model, about_video(test_video(4, 2.0))).await,
            answer(&stage.model, about_video(test_video(4, 2.0))).await
        );
        stage.settled(&before).await;
    });
}

#[test]
fn videos_and_pictures_share_turns_and_alternate_between_turns() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let mixed = about_video(test_video(2, 1.0))
            .image(picture(1))
            .assistant("A square.")
            .user("And now?")
            .video(test_video(3, 4.0));
        let whole = ask(&stage.model, mixed).await.expect("the model answers");
        let one = ask(&stage.model, about(1)).await.expect("the model answers").usage.picture_tokens;
        assert!(whole.usage.picture_tokens > one + 2, "one picture and three video steps: {:?}", whole.usage);
        let between =
            vec![Content::Text("Before".into()), Content::Video(test_video(2, 1.0)), Content::Text("after".into())];
        let chat = Chat::new().turn(Role::User, between).temperature(0.0).max_tokens(8);
        assert_eq!(ask(&stage.model, chat).await.expect("the model answers").usage.picture_tokens, 9);
        stage.settled(&before).await;
    });
}

#[test]
fn concurrent_video_chats_are_answered_as_if_alone() {
    story(async {
        let stage = Stage::set(LoadOptions { kv_tokens: Some(512), ..small() }).await;
        let before = stage.snapshot().await;
        let chat = |number: u32| match number % 3 {
            0 => about_video(test_video(1 + number % 8, 2.0)),
            1 => about(number),
            _ => about_video(test_video(2, 1.0)).image(picture(number)),
        };
        let mut alone = Vec::new();
        for number in 0..9 {
            alone.push(answer(&stage.model, chat(number)).await);
        }
        let together: Vec<_> = (0..9)
            .map(|number| {
                let (model, chat) = (stage.model.clone(), chat(number));
                tokio::spawn(async move { answer(&model, chat).await })
            })
            .collect();
        for (number, reply) in together.into_iter().enumerate() {
            assert_eq!(reply.await.expect("no panic"), alone[number], "chat {number} alone and concurrently");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn the_frame_rate_reaches_the_model() {
    story(async {
        let stage = Stage::set(small()).await;
        // The frames and tokens are the same. Only the time between frames differs, and with it the
        // probability of the first token.
        let mut scores = std::collections::BTreeSet::new();
        let mut tokens = std::collections::BTreeSet::new();
        for rate in [30.0, 2.0, 0.5, 0.1, 0.02] {
            let whole =
                ask(&stage.model, about_video(test_video(8, rate)).log_probabilities(0)).await.expect("an answer");
            scores.insert(whole.tokens[0].token.log_probability.to_bits());
            tokens.insert(whole.usage.prompt_tokens);
        }
        assert_eq!((tokens.len(), scores.len()), (1, 5));
    });
}

#[test]
fn a_vision_actors_death_only_pauses_a_video_reply() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let expected = answer(&stage.model, about_video(test_video(6, 2.0))).await;
        let serving = stage.model.serving().await.expect("the model serves");
        let reply = stage.model.chat(about_video(test_video(6, 2.0))).await.expect("accepted");
        serving.vision.expect("the model takes pictures").kill();
        assert_eq!(listen(reply).await.expect("the model answers").text, expected);
        eventually("the ledger is as before", async || stage.snapshot().await == before).await;
    });
}

type Says = fn(&ChatError) -> bool;

/// Name, video, check of the error, and text of its message.
fn table() -> Vec<(&'static str, Video, Says, &'static str)> {
    fn is(error: &ChatError, says: fn(&VideoError) -> bool) -> bool {
        matches!(error, ChatError::Media(MediaError::Video { index: 0, source }) if says(source))
    }
    let mixed = [frame(84, 84, 0), frame(84, 84, 1), frame(84, 56, 2)];
    let strange = [frame(84, 84, 0), Image::from_bytes(&b"my secret diary"[..])];
    vec![
        ("no frames", test_video(0, 2.0), |e| is(e, |v| *v == VideoError::NoFrames), "no frames"),
        (
            "frames of different sizes",
            Video::from_frames(mixed, 2.0),
            |e| is(e, |v| matches!(v, VideoError::FrameSize { frame: 2, height: 56, .. })),
            "84 x 56",
        ),
        (
            "a rate that is no number",
            test_video(2, f64::NAN),
            |e| is(e, |v| matches!(v, VideoError::FrameRate { .. })),
            "NaN",
        ),
        ("a rate of nothing", test_video(2, 0.0), |e| is(e, |v| matches!(v, VideoError::FrameRate { .. })), "0"),
        (
            "too many frames",
            test_video(9, 2.0),
            |e| is(e, |v| *v == VideoError::TooManyFrames { frames: 9, limit: 8 }),
            "9 frames together; the limit is 8",
        ),
        (
            "a frame that is no picture",
            Video::from_frames(strange, 2.0),
            |e| is(e, |v| matches!(v, VideoError::Frame { frame: 1, .. })),
            "frame 1",
        ),
    ]
}

#[test]
fn each_bad_video_fails_alone_with_its_error() {
    story(async {
        let stage = Stage::set(small()).await;
        let expected = answer(&stage.model, about_video(test_video(2, 2.0))).await;
        let before = stage.snapshot().await;
        for (name, video, says, words) in table() {
            let beside = stage.model.chat(about_video(test_video(2, 2.0))).await.expect("the good request is accepted");
            let error = ask(&stage.model, about_video(video)).await.expect_err(name);
            assert!(says(&error), "{name}: {error:?}");
            assert!(error.to_string().contains(words), "{name} does not say '{words}': {error}");
            assert!(!error.hint().is_empty(), "{name} has no hint");
            assert!(!format!("{error} {error:?} {}", error.hint()).contains("secret"), "{error:?}");
            assert_eq!(
                listen(beside).await.expect("the model answers").text,
                expected,
                "the good request, with {name}"
            );
            stage.settled(&before).await;
        }
    });
}

#[test]
fn damaged_or_oversized_videos_fail_only_their_chat() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let mut bytes = png(&RgbImage::from_fn(84, 84, |x, y| Rgb([x as u8, y as u8, 9]))).to_vec();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 40].fill(0xA5);
        let broken = Video::from_frames([frame(84, 84, 0), Image::from_bytes(Arc::<[u8]>::from(bytes))], 2.0);
        let error = ask(&stage.model, about_video(broken)).await.expect_err("the video is damaged");
        assert!(matches!(error, ChatError::Media(MediaError::Video { index: 0, .. })), "{error:?}");
        assert!(error.to_string().contains("video 0: frame 1"), "{error}");
        let large = || Image::from_bytes(png(&RgbImage::new(400, 400)));
        let crowded = about_video(test_video(2, 2.0)).image(large()).image(large());
        let error = ask(&stage.model, crowded).await.expect_err("two large pictures fill the envelope");
        let says = |e: &VideoError| matches!(e, VideoError::TooLarge { limit: 0, .. });
        assert!(
            matches!(&error, ChatError::Media(MediaError::Video { index: 0, source }) if says(source)),
            "{error:?}"
        );
        stage.settled(&before).await;
    });
}

#[test]
fn a_model_without_video_refuses_videos_and_keeps_placeholders_as_text() {
    story(async {
        let device = crate::stage::device();
        let runtime = runtime_on(&device).await;
        let folder = bursar_golden::path("qwen2");
        let model = runtime.load_with(ModelSource::folder(&folder), small(), |_| {}).await;
        let model = model.unwrap_or_else(|error| panic!("{error}: {}", error.hint()));
        let error = ask(&model, about_video(test_video(2, 2.0))).await.expect_err("the model takes no videos");
        assert!(matches!(error, ChatError::Layout(_)), "{error:?}");
        assert!(error.hint().contains("vision model"), "{}", error.hint());
        runtime.shutdown().await;
        let stage = Stage::set(small()).await;
        let typed = "<|vision_start|><|video_pad|><|vision_end|> What is this?";
        match ask(&stage.model, text(typed)).await {
            Ok(whole) => assert_eq!(whole.usage.picture_tokens, 0, "no video was sent"),
            Err(error) => assert!(matches!(error, ChatError::Text(_)), "{error:?}"),
        }
    });
}
