//! Tests that no admitted request costs more of any resource than the stress run used. Costs are
//! counted here without the pricing code that admission and the stress run share.

use std::cell::Cell;

use bursar_budgets::{Bytes, Hint};
use bursar_kernels::{BLOCK_TOKENS, Target};
use bursar_model::{
    Envelope, Model,
    checkpoint::Checkpoint,
    demo,
    error::{MediaError, VideoError},
    sampling::OutputFormat,
    text::{ReplyFormat, ReplyPart, ToolFormat},
    worst_cases::Pass,
};
use proptest::{prelude::*, test_runner::TestRunner};

use super::*;
use crate::{
    chat::{Image, ToolChoice, Video},
    engine::{LoadOptions, ModelBounds},
    profile::MemoryRequirements,
};

/// Largest inputs that the worst cases of a start have run.
struct Stressed {
    context: ModelContext,
    /// Tokens of the longest sequence. `blocks` is the length of its block table.
    tokens: usize,
    blocks: usize,
    /// Patches of the largest encoder batch.
    launch_patches: usize,
    cache_rows: usize,
}

const TARGET: Target = Target::Cpu { threads: 1 };

fn demo_checkpoint() -> Checkpoint {
    Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded")
}

fn context_of(checkpoint: &Checkpoint, model: &Model, envelope: Envelope) -> ModelContext {
    let options = LoadOptions { envelope: Some(envelope), ..LoadOptions::default() };
    let own = ModelBounds { family: model.config(), pictures: checkpoint.image_processor.as_ref(), is_host: true };
    let inputs = options.lowered(&own).expect("the limits are consistent");
    ModelContext::new(
        "demo".to_owned(),
        checkpoint,
        model.config().clone(),
        &options,
        &inputs,
        checkpoint.prompts().expect("the checkpoint has a tokenizer"),
    )
}

fn stressed(envelope: Envelope) -> Stressed {
    let checkpoint = demo_checkpoint();
    let model = Model::plan(&checkpoint, &TARGET).expect("the model can be planned");
    let context = context_of(&checkpoint, &model, envelope);
    let needs = MemoryRequirements::plan(&model, TARGET, &context.envelope, Bytes::kib(64))
        .expect("the worst cases are consistent");
    let mut stressed =
        Stressed { context, tokens: 0, blocks: needs.probe_blocks, launch_patches: 0, cache_rows: needs.cache_rows };
    for (worst_case, _) in &needs.worst_cases {
        match &worst_case.pass {
            Pass::Encode(batch) => stressed.launch_patches = stressed.launch_patches.max(batch.patches()),
            Pass::Step(batch) => {
                let longest = batch.context_lengths.iter().max().map_or(0, |most| *most as usize);
                stressed.tokens = stressed.tokens.max(longest);
            }
        }
    }
    stressed
}

fn picture((width, height): (u32, u32)) -> Image {
    Image::from_rgb(width, height, vec![90; 3 * (width * height) as usize]).expect("the byte count matches the size")
}

/// A picture. Some pictures set a maximum number of pixels, and some also set a minimum close to
/// the maximum.
fn limited((width, height): (u32, u32)) -> Image {
    let (image, pixels) = (picture((width, height)), u64::from(width) * u64::from(height));
    match (width + height) % 5 {
        0 => image.within_pixels(None, Some(784 + pixels / 2)),
        1 => image.within_pixels(Some(784 + pixels), Some(784 + pixels + pixels / 9)),
        _ => image,
    }
}

/// Side length of a picture in pixels, including small and thin pictures.
fn side() -> impl Strategy<Value = u32> {
    prop_oneof![1u32..60, 28u32..400, 300u32..900]
}

fn envelopes() -> impl Strategy<Value = Envelope> {
    let sizes = (40usize..700, 1usize..9, 9usize..200, 4usize..700, 1usize..5, 1usize..9, 4usize..900);
    sizes.prop_map(
        |(context_tokens, sequences, step_tokens, picture_patches, pictures, video_frames, launch_patches)| Envelope {
            context_tokens,
            sequences,
            step_tokens,
            draft_tokens: 0,
            picture_patches,
            pictures: 2 * pictures,
            largest_pictures: pictures,
            video_frames,
            launch_patches,
        },
    )
}

/// A random request: words, sides of each picture, sides and frame count of
/// each video, and `max_tokens`.
type Asked = (usize, Vec<(u32, u32)>, Vec<((u32, u32), usize)>, Option<usize>);

fn asked() -> impl Strategy<Value = Asked> {
    let pictures = proptest::collection::vec((side(), side()), 0..5);
    let videos = proptest::collection::vec(((side(), side()), 1usize..6), 0..3);
    (0usize..400, pictures, videos, proptest::option::of(1usize..2000))
}

fn chat((words, pictures, videos, tokens_max): Asked) -> Chat {
    let chat = Chat::new().user("shape ".repeat(words));
    let chat = pictures.into_iter().fold(chat, |chat, sides| chat.image(limited(sides)));
    let video = |(sides, frames)| Video::from_frames(vec![picture(sides); frames], 2.0);
    let chat = videos.into_iter().fold(chat, |chat, shown| chat.video(video(shown)));
    chat.max_tokens(tokens_max)
}

#[test]
fn no_admitted_request_exceeds_the_stressed_limits() {
    let (let_in, shown) = (Cell::new(0), Cell::new(0));
    let requests = proptest::collection::vec(asked(), 1..6);
    let mut runner = TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) });
    let outcome = runner.run(&(envelopes(), requests), |(envelope, requests)| {
        let stressed = stressed(envelope);
        let kv_tokens = stressed.blocks * BLOCK_TOKENS;
        for asked in requests {
            let Ok(prepared) = Preparation::of(&chat(asked), &stressed.context, kv_tokens, 1) else { continue };
            let Preparation { prompt, pictures, tokens_max, .. } = &prepared[0];
            let tokens = prompt.tokens.len() + tokens_max;
            prop_assert!(tokens <= stressed.tokens, "{} tokens, {} were stressed", tokens, stressed.tokens);
            prop_assert!(tokens.div_ceil(BLOCK_TOKENS) <= stressed.blocks);
            let rows: usize = prompt.pictures.iter().map(|span| span.tokens.len()).sum();
            prop_assert!(rows <= stressed.cache_rows, "{} rows of {}", rows, stressed.cache_rows);
            for plan in pictures {
                let patches = plan.grid().patches() / plan.grid().pictures();
                prop_assert!(patches <= stressed.launch_patches, "{} patches of {}", patches, stressed.launch_patches);
            }
            let_in.set(let_in.get() + 1);
            shown.set(shown.get() + usize::from(!pictures.is_empty()));
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(
        let_in.get() >= 20 && shown.get() >= 5,
        "{} chats were admitted, {} of them with pictures",
        let_in.get(),
        shown.get()
    );
}

#[test]
fn a_video_without_a_processor_is_refused_naming_its_file() {
    let mut checkpoint = demo_checkpoint();
    checkpoint.video_processor = None;
    let model = Model::plan(&checkpoint, &TARGET).expect("the model can be planned");
    let context = context_of(&checkpoint, &model, Envelope { context_tokens: 400, ..Envelope::small() });
    let asked = |chat: Chat| Preparation::of(&chat, &context, 400, 1);
    let prepared = asked(Chat::new().user("What?").image(picture((50, 50)))).expect("the model takes pictures");
    assert_eq!(prepared[0].pictures.len(), 1);
    let video = Video::from_frames(vec![picture((50, 50)); 2], 2.0);
    let Err(refused) = asked(Chat::new().user("What?").video(video)) else { panic!("the video was accepted") };
    assert!(matches!(refused, ChatError::Media(MediaError::Video { index: 0, source: VideoError::NoProcessor })));
    for message in [refused.to_string(), refused.hint()] {
        assert!(message.contains("video_preprocessor_config.json"), "{message}");
    }
}

#[test]
fn requests_of_every_kind_are_admitted() {
    let envelope = Envelope { context_tokens: 400, video_frames: 8, largest_pictures: 3, ..Envelope::small() };
    let stressed = stressed(envelope);
    let chat = Chat::new().user("What?").image(picture((500, 300))).image(picture((30, 30)));
    let chat = chat.video(Video::from_frames(vec![picture((200, 100)); 5], 2.0));
    let prepared = Preparation::of(&chat, &stressed.context, 4096, 1).unwrap_or_else(|error| panic!("{error}"));
    let Preparation { prompt, tokens_max, .. } = &prepared[0];
    assert_eq!(prompt.pictures.len(), 2 + 3, "two pictures and three steps of the video");
    assert_eq!(prompt.tokens.len() + tokens_max, 400, "the reply may fill the rest of the context");
}

#[test]
fn an_oversized_prompt_is_refused_before_its_schema_is_compiled() {
    let stressed = stressed(Envelope { context_tokens: 400, ..Envelope::small() });
    let zebra = OutputFormat::json(serde_json::json!({"type": "zebra"}));
    let asked = |words: usize| {
        let chat = Chat::new().user("shape ".repeat(words)).format(zebra.clone());
        Preparation::of(&chat, &stressed.context, 4096, 1).err().expect("the chat is refused")
    };
    assert!(matches!(asked(1), ChatError::Format(_)));
    assert!(matches!(asked(1000), ChatError::TooLong { limit: 400, .. }), "{}", asked(1000));
}

#[test]
fn an_explicit_reply_format_parses_tool_calls_of_token_prompts() {
    let stressed = stressed(Envelope::small());
    let hermes = ReplyFormat { tools: ToolFormat::Hermes, ..ReplyFormat::default() };
    let call = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";
    let is_read = |chat: Chat| {
        let prepared = Preparation::of(&chat, &stressed.context, 4096, 1).unwrap_or_else(|error| panic!("{error}"));
        let parts = prepared[0].reply.parser.clone().feed(call);
        parts.iter().any(|part| matches!(part, ReplyPart::CallBegin { .. }))
    };
    let tokens = || Chat::from_tokens([5, 6, 7]);
    assert!(is_read(tokens().reply_format(hermes)));
    // An output format can be combined with a reply format, although the chat has no tools that a
    // grammar could call.
    assert!(is_read(tokens().reply_format(hermes).format(OutputFormat::Regex("a".into()))));
    assert!(!is_read(tokens().reply_format(hermes).tool_choice(ToolChoice::None)));
    assert!(!is_read(tokens()));
}
