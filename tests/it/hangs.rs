//! Issues of mistral.rs: requests that made that server hang or corrupted its output. Other files
//! test further issues, given here by their numbers. The scheduler's `core/tests.rs` tests buckets
//! by length (2024). `chats.rs`, the scheduler's `core/tests/queue.rs` and the simulation
//! (`actors/tests/sim.rs`) test a deadlock of preemptions (1470), a second request (1376) and
//! callers that disconnect (2147, 213). `generation.rs` tests one picture after another (1786).

use bursar::{Envelope, Image, LoadOptions};
use image::{Rgb, RgbImage};

use crate::{
    metrics_log::MetricsLog,
    stage::{Stage, about, answer, ask, png, small, small_envelope, story, text},
};

/// Two concurrent requests with pictures never ended (issue 2321).
#[test]
fn two_concurrent_picture_chats_get_the_same_replies_as_alone() {
    story(async {
        let stage = Stage::set(small()).await;
        for pair in [[1, 2], [3, 3]] {
            let [first, second] = pair.map(|number| ask(&stage.model, about(number)));
            let (first, second) = tokio::join!(first, second);
            for (number, together) in pair.into_iter().zip([first, second]) {
                let alone = ask(&stage.model, about(number)).await.expect("the model answers");
                assert_eq!(together.expect("the model answers").text, alone.text, "picture {number}");
            }
        }
    });
}

/// Two identical pictures in one prompt caused a shape error or a silently
/// wrong reply (issue 2323).
#[test]
fn a_repeated_picture_equals_two_pictures_with_the_same_pixels() {
    story(async {
        let stage = Stage::set(small()).await;
        let drawn = RgbImage::from_fn(56, 84, |x, y| Rgb([(x * 4) as u8, (y * 3) as u8, 90]));
        let file = Image::from_bytes(png(&drawn));
        let pixels = Image::from_rgb(56, 84, drawn.into_raw()).expect("the bytes match the size");
        let chat = |pictures: [&Image; 2]| {
            let chat = text("What do you see?").log_probabilities(0);
            pictures.into_iter().cloned().fold(chat, |chat, picture| chat.image(picture))
        };
        let twice = ask(&stage.model, chat([&file, &file])).await.expect("the model answers");
        let two = ask(&stage.model, chat([&file, &pixels])).await.expect("the model answers");
        assert_eq!((&twice.text, &twice.usage), (&two.text, &two.usage));
        for (once, other) in twice.tokens.iter().zip(&two.tokens) {
            assert!((once.token.log_probability - other.token.log_probability).abs() < 1e-4);
        }
    });
}

/// 32 concurrent requests took longer than the same requests one after the other (issue 2343). In
/// this runtime, concurrent requests share steps.
#[test]
fn thirty_two_concurrent_chats_share_steps() {
    let metrics_log = MetricsLog::open();
    story(async {
        let envelope = Some(Envelope { sequences: 8, ..small_envelope() });
        let stage = Stage::set(LoadOptions { name: Some("32".to_owned()), envelope, ..small() }).await;
        let steps = || metrics_log.now("bursar_step_seconds{model=32}");
        let chat = |number: u32| text(&format!("Question {number}?")).max_tokens(12).ignore_end();
        let mut alone = Vec::new();
        for number in 0..32 {
            alone.push(answer(&stage.model, chat(number)).await);
        }
        let serial = steps();
        let together: Vec<_> = (0..32)
            .map(|number| {
                let model = stage.model.clone();
                tokio::spawn(async move { answer(&model, chat(number)).await })
            })
            .collect();
        for (reply, alone) in together.into_iter().zip(alone) {
            assert_eq!(reply.await.expect("no panic"), alone);
        }
        let concurrent = steps() - serial;
        assert!(concurrent * 3.0 < serial, "{concurrent} steps, and {serial} one after the other");
    });
}
