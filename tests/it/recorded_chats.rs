//! Recorded chats with pictures and videos through the whole runtime: each family is started,
//! profiled and served on host memory, and gives the same answers as transformers.

use std::{fs, path::PathBuf};

use bursar::{
    Bytes, Chat, Content, DeviceChoice, Envelope, Image, LoadOptions, ModelSource, Role, Runtime, RuntimeConfig, Video,
};
use serde_json::Value;

use crate::stage::{Whole, ask, device_of, eventually, shared_out, small, story};

/// The reasoning and the reply.
fn reasoning_and_text(reply: &Whole) -> String {
    [&*reply.reasoning, &reply.text].concat()
}

/// Checks that a reply is the recorded text, except for incomplete characters. Where a token limit cuts
/// a character, transformers returns U+FFFD and Bursar leaves the character out. For a run of byte
/// tokens that is not valid UTF-8, transformers returns U+FFFD for every byte, and Bursar returns the
/// valid characters in it.
fn assert_recorded(found: &str, expected: &str, what: &str) {
    let mut rest = expected;
    for character in found.chars() {
        let bytes = char::REPLACEMENT_CHARACTER.to_string().repeat(character.len_utf8());
        let after = rest.strip_prefix(character).or_else(|| rest.strip_prefix(&*bytes));
        rest = after.unwrap_or_else(|| panic!("{what}: {found:?} in place of {expected:?}"));
    }
    assert_eq!(rest.trim_end_matches(char::REPLACEMENT_CHARACTER), "", "{what}: {found:?} in place of {expected:?}");
}

/// The chat of a recorded case, and the recorded answer.
fn recorded(folder: &str, case: &str) -> (Chat, String) {
    let json = fs::read(bursar_golden::path(format!("{folder}/cases/{case}.json"))).expect("the case file");
    let json: Value = serde_json::from_slice(&json).expect("JSON");
    let messages = json["messages"].as_array().expect("messages");
    let chat = messages.iter().fold(Chat::new(), |chat, message| {
        let role = match message["role"].as_str().expect("a role") {
            "system" => Role::System,
            "assistant" => Role::Assistant,
            _ => Role::User,
        };
        let contents = match &message["content"] {
            Value::String(text) => vec![Content::Text(text.clone())],
            parts => parts.as_array().expect("parts").iter().map(content).collect(),
        };
        chat.turn(role, contents)
    });
    let answer = json["greedy_text"].as_str().expect("an answer").to_owned();
    // The recorded answers are greedy, regardless of the checkpoint's own sampling settings.
    (chat.temperature(0.0).repetition_penalty(1.0).max_tokens(32), answer)
}

fn content(part: &Value) -> Content {
    let name = |key: &str| part[key].as_str().expect("a name");
    let open = |path: PathBuf| Image::open(path).expect("the picture opens");
    match name("type") {
        "image" => Content::Image(open(bursar_golden::path("pictures").join(name("image")))),
        "video" => {
            let frame = |index: usize| bursar_golden::path("videos").join(format!("{}_{index}.png", name("video")));
            let frames = (0..).map(frame).take_while(|path| path.exists()).map(open);
            Content::Video(Video::from_frames(frames, part["frames_per_second"].as_f64().expect("a rate")))
        }
        _ => Content::Text(name("text").to_owned()),
    }
}

fn recorded_chats_are_answered(folder: &'static str, cases: &'static [&'static str]) {
    recorded_chats_are_answered_by(1, folder, cases);
}

fn recorded_chats_are_answered_by(ranks: usize, folder: &'static str, cases: &'static [&'static str]) {
    story(async move {
        let device = shared_out(&device_of(Bytes::mib(96)), ranks);
        let config = RuntimeConfig { device: DeviceChoice::Custom(device), ..RuntimeConfig::default() };
        let runtime = Runtime::start(config).await.expect("host devices start");
        // Gemma 4 scales each picture and frame up to its patch limit, so a chat with a video needs as
        // many patches as several pictures.
        let (picture_patches, launch_patches, largest_pictures, context_tokens) =
            if folder.starts_with("gemma4") { (630, 1300, 5, 640) } else { (208, 256, 3, 512) };
        let envelope = Envelope {
            context_tokens,
            sequences: 4,
            step_tokens: 96,
            draft_tokens: 0,
            picture_patches,
            pictures: largest_pictures,
            largest_pictures,
            video_frames: 16,
            launch_patches,
        };
        // Fewer tokens than all chats take together. A model with windows has several cache groups, and
        // each of them takes blocks for the same tokens.
        let kv_tokens = match &folder[..folder.len().min(6)] {
            "gemma3" => 1952,
            "gemma4" => 2400,
            _ => 528,
        };
        let options = LoadOptions { envelope: Some(envelope), kv_tokens: Some(kv_tokens), ..small() };
        let source = ModelSource::folder(bursar_golden::path(folder));
        let model = runtime.load_with(source, options, |_| {}).await.expect("the model starts");
        let chats: Vec<(Chat, String)> = cases.iter().map(|case| recorded(folder, case)).collect();
        for ((chat, expected), case) in chats.iter().zip(cases) {
            let first = ask(&model, chat.clone()).await.expect("the model answers");
            assert_recorded(&reasoning_and_text(&first), expected, &format!("{folder}: {case}"));
            let again = ask(&model, chat.clone()).await.expect("the model answers");
            let what = format!("{folder}: {case}, with its prefix in the cache");
            assert_recorded(&reasoning_and_text(&again), expected, &what);
            // A model with recurrent states resumes at multiples of 64 tokens.
            let step = if folder.starts_with("qwen3_5") { 64 } else { 16 };
            let is_long = again.usage.prompt_tokens > step.max(31);
            assert!(!is_long || again.cached_tokens >= step, "{folder}: {case} begins with cached tokens");
        }
        let together: Vec<_> = chats
            .into_iter()
            .chain(cases.iter().map(|case| recorded(folder, case)))
            .map(|(chat, expected)| {
                let model = model.clone();
                tokio::spawn(async move {
                    (reasoning_and_text(&ask(&model, chat).await.expect("the model answers")), expected)
                })
            })
            .collect();
        for reply in together {
            let (found, expected) = reply.await.expect("no panic");
            assert_recorded(&found, &expected, &format!("{folder}, concurrently"));
        }
        eventually("no request holds anything", async || model.requests().0 == 0).await;
    });
}

#[test]
fn pictures_and_videos_of_qwen2_5_vl_are_answered_as_recorded() {
    recorded_chats_are_answered("qwen2_5_vl", &["several_images", "two_turns", "video_and_picture"]);
}

#[test]
fn several_ranks_answer_as_recorded() {
    recorded_chats_are_answered_by(2, "qwen2_5_vl", &["several_images", "two_turns", "video_and_picture"]);
    recorded_chats_are_answered_by(2, "internvl", &["several_images", "text_only"]);
    for ranks in [2, 4] {
        recorded_chats_are_answered_by(ranks, "qwen3_vl", &["several_images", "two_turns", "text_only", "two_videos"]);
        recorded_chats_are_answered_by(ranks, "qwen3_vl_moe", &["several_images", "video_even"]);
    }
}

#[test]
fn pictures_and_videos_of_qwen2_vl_are_answered_as_recorded() {
    recorded_chats_are_answered("qwen2_vl", &["several_images", "two_turns", "text_only", "two_videos"]);
}

#[test]
fn pictures_and_videos_of_qwen3_vl_are_answered_as_recorded() {
    recorded_chats_are_answered(
        "qwen3_vl",
        &["several_images", "two_turns", "text_only", "video_and_picture", "two_videos"],
    );
    recorded_chats_are_answered("qwen3_vl_72", &["several_images", "video_even"]);
    recorded_chats_are_answered("qwen3_vl_moe", &["several_images", "video_even"]);
}

#[test]
fn chats_with_gemma_are_answered_as_recorded() {
    recorded_chats_are_answered("gemma3_text", &["short", "long"]);
    recorded_chats_are_answered("gemma3", &["one_image", "several_images", "two_turns"]);
    recorded_chats_are_answered_by(2, "gemma3", &["short", "long", "several_images"]);
}

#[test]
fn chats_with_gemma_4_are_answered_as_recorded() {
    recorded_chats_are_answered("gemma4_text", &["short", "long"]);
    recorded_chats_are_answered("gemma4_sharing", &["short", "long"]);
    recorded_chats_are_answered("gemma4_moe", &["short", "long"]);
    recorded_chats_are_answered(
        "gemma4",
        &["one_image", "several_images", "two_turns", "video_odd_slow", "video_and_picture"],
    );
    recorded_chats_are_answered("gemma4_clipped", &["one_image", "several_images", "two_turns"]);
    recorded_chats_are_answered("gemma4_unified", &["one_image", "two_turns", "video_and_picture"]);
    for folder in ["gemma4_text", "gemma4_sharing", "gemma4_moe"] {
        recorded_chats_are_answered_by(2, folder, &["short", "long"]);
    }
}

/// Chats with lengths around the chunk size of gated delta nets (64 tokens), and chats with
/// pictures or a video. The recorded replies consist of reasoning, because the template opens the
/// reasoning.
const HYBRID_CHATS: [&str; 6] = ["tokens_64", "tokens_65", "tokens_200", "single_image", "two_turns", "video_fraction"];

#[test]
fn chats_with_hybrid_models_are_answered_as_recorded() {
    recorded_chats_are_answered("qwen3_5", &HYBRID_CHATS);
    recorded_chats_are_answered("qwen3_5_moe", &["short", "long", "single_image"]);
    recorded_chats_are_answered("qwen3_5_text", &["short", "long"]);
    recorded_chats_are_answered_by(2, "qwen3_5", &HYBRID_CHATS);
    recorded_chats_are_answered_by(2, "qwen3_5_moe", &["short", "single_image"]);
}

#[test]
fn pictures_and_videos_of_internvl_are_answered_as_recorded() {
    recorded_chats_are_answered(
        "internvl",
        &["several_images", "two_turns", "text_only", "video_and_picture", "two_videos"],
    );
    recorded_chats_are_answered("internvl_chat", &["several_images", "video_even"]);
}
