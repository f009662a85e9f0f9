//! Input without a template or a file: prompts as tokens, pictures as pixels, weights from a seed.

use std::fs;

use bursar::{Bytes, Chat, ChatError, ChatEvent, Hint, Image, ImageError, MediaError, ModelSource, SamplingError};
use bursar_model::registry::random_checkpoint;
use bursar_model::{text::ContentPart, text::Message, text::Role, text::TemplateInputs};
use image::{Rgb, RgbImage};
use serde_json::{Value, json};

use crate::stage::{Folder, Stage, about, ask, device, device_of, picture, png, runtime_on, small, story, text};

const QUESTION: &str = "Describe the picture.";

/// A question about a picture as tokens, rendered with the model's template.
async fn rendered(stage: &Stage) -> Vec<u32> {
    let context = stage.model.serving().await.expect("the model serves").context;
    let content = vec![ContentPart::Image, ContentPart::Text(QUESTION.to_owned())];
    let messages = [Message { role: Role::User, content }];
    context.prompts.encode(&messages, &TemplateInputs::default()).expect("the prompt is encoded")
}

#[test]
fn a_token_prompt_is_answered_like_the_turns_it_encodes() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let turns = text(QUESTION).image(picture(3)).max_tokens(12);
        let expected = ask(&stage.model, turns).await.expect("the model answers");
        let tokens = Chat::from_tokens(rendered(&stage).await).image(picture(3)).temperature(0.0).max_tokens(12);
        let found = ask(&stage.model, tokens.clone()).await.expect("the model answers");
        assert_eq!((found.text, found.usage.prompt_tokens), (expected.text, expected.usage.prompt_tokens));
        assert!(found.cached_tokens > 0, "the same prompt is found in the cache");
        assert!(format!("{tokens:?}").contains("tokens: Some("), "the debug output shows only the length: {tokens:?}");
        stage.settled(&before).await;
    });
}

#[test]
fn prompt_and_token_ids_are_sent_on_request() {
    story(async {
        let stage = Stage::set(small()).await;
        let chat = text(QUESTION).image(picture(3)).max_tokens(40).token_ids();
        let expected = ask(&stage.model, text(QUESTION).image(picture(3)).max_tokens(40)).await.expect("an answer");
        let context = stage.model.serving().await.expect("the model serves").context;
        let mut replies = stage.model.samples(chat.seed(1), 2).await.expect("accepted");
        for reply in &mut replies {
            let (mut events, mut ids, mut so_far) = (0, Vec::new(), String::new());
            while let Some(event) = reply.next().await {
                match event.expect("the reply goes on") {
                    ChatEvent::PromptIds(prompt) => {
                        assert_eq!((events, prompt.len()), (0, expected.usage.prompt_tokens), "the ids come first");
                    }
                    ChatEvent::TokenId(id) => ids.push(id),
                    ChatEvent::Text(piece) => {
                        so_far += &piece;
                        let body = context.prompts.tokenizer().decode(&ids, true).expect("known ids");
                        assert!(body.starts_with(&so_far), "token ids come before the text that they complete");
                    }
                    ChatEvent::Done { text, usage, end_token, .. } => {
                        assert_eq!((text.as_str(), usage.completion_tokens), (expected.text.as_str(), ids.len()));
                        let end = end_token.expect("the model ended the reply");
                        assert!(context.generation.eos_ids.contains(&end) && !ids.contains(&end));
                    }
                    event => panic!("an event that was not asked for: {event:?}"),
                }
                events += 1;
            }
            assert!(events > 3, "the reply had more than three events");
        }
    });
}

#[test]
fn a_reply_ignoring_its_end_has_exactly_the_requested_tokens() {
    story(async {
        let stage = Stage::set(small()).await;
        let chat = Chat::from_tokens((40..90).collect::<Vec<u32>>()).temperature(0.0).max_tokens(30).ignore_end();
        let whole = ask(&stage.model, chat).await.expect("the model answers");
        assert_eq!((whole.usage.prompt_tokens, whole.usage.completion_tokens), (50, 30));
    });
}

#[test]
fn invalid_token_prompts_fail_only_their_chat() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let refused = async |chat: Chat| ask(&stage.model, chat).await.expect_err("the request is refused");
        let error = refused(Chat::from_tokens([3, 864])).await;
        let ChatError::Sampling(source) = &error else { panic!("{error:?}") };
        assert!(
            matches!(**source, SamplingError::UnknownToken { parameter: "prompt", token: 864, vocabulary: 864 }),
            "{error:?}"
        );
        assert!(matches!(refused(Chat::from_tokens([])).await, ChatError::Empty));
        for chat in [Chat::from_tokens([3]).user("And this?"), Chat::from_tokens([3]).tools([true.into()])] {
            let error = refused(chat).await;
            assert!(matches!(error, ChatError::TokensAndTurns) && error.hint().contains("tokens"), "{error:?}");
        }
        let error = refused(Chat::from_tokens([3]).image(picture(1))).await;
        assert!(matches!(error, ChatError::Layout(_)), "the prompt has no token for the picture: {error:?}");
        let error = refused(Chat::from_tokens(vec![3; 256])).await;
        assert!(matches!(error, ChatError::TooLong { tokens: 256, has_more: false, limit: 256 }), "{error:?}");
        ask(&stage.model, about(1)).await.expect("a good request is answered");
        stage.settled(&before).await;
    });
}

#[test]
fn prompts_of_any_length_are_returned_without_a_reply() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let chat = || text(QUESTION).image(picture(3)).user("And?").image(picture(40)).max_tokens(1);
        let prompt = stage.model.prompt_of(chat()).await.expect("a prompt");
        let whole = ask(&stage.model, chat()).await.expect("the model answers");
        assert_eq!(prompt.token_ids.len(), whole.usage.prompt_tokens);
        assert_eq!(prompt.picture_tokens.len(), 2);
        assert_eq!(prompt.picture_tokens.iter().sum::<usize>(), whole.usage.picture_tokens);
        assert!(format!("{prompt:?}").starts_with("Prompt { token_ids: "), "{prompt:?}");
        let again = ask(&stage.model, Chat::from_tokens(prompt.token_ids).max_tokens(1)).await;
        assert!(matches!(again, Err(ChatError::Layout(_))), "the pictures are missing, not their tokens: {again:?}");
        let facts = stage.model.facts().await.expect("the facts are known");
        let long = stage.model.prompt_of(text("shape ".repeat(900).as_str())).await.expect("a prompt");
        assert!(long.token_ids.len() > facts.context_tokens, "{long:?}, {facts:?}");
        let too_long = ask(&stage.model, text("shape ".repeat(900).as_str())).await.expect_err("the text is too long");
        let ChatError::TooLong { tokens, limit, has_more: false } = too_long else { panic!("{too_long}") };
        assert_eq!((tokens, limit), (long.token_ids.len(), facts.context_tokens));
        let error = stage.model.prompt_of(Chat::new()).await.expect_err("the chat is empty");
        assert!(matches!(error, ChatError::Empty), "{error}");
        let error =
            stage.model.prompt_of(text("Hm?").image(Image::from_bytes(*b"script"))).await.expect_err("no picture");
        assert!(matches!(error, ChatError::Media(MediaError::Picture { index: 0, .. })), "{error}");
        stage.settled(&before).await;
    });
}

#[test]
fn tokenize_and_detokenize_work_while_every_credit_is_taken() {
    story(async {
        let stage = Stage::set(small()).await;
        let (_, limit) = stage.model.requests();
        let running = stage.model.samples(text("Who are you?").temperature(1.0), limit).await.expect("accepted");
        let (tokenizer, model) = (stage.model.serving().await.expect("the model serves").context, &stage.model);
        let tokenizer = tokenizer.prompts.tokenizer();
        let ids = model.tokenize("<|im_start|>A red star", true).await.expect("tokens");
        assert_eq!(ids[0], tokenizer.id_of("<|im_start|>").expect("a token"));
        assert_eq!(model.detokenize(ids.clone()).await.expect("text"), "<|im_start|>A red star");
        let spelled = model.token_strs(ids.clone()).await.expect("words");
        let expected: Vec<_> = ids.iter().map(|id| tokenizer.token_of(*id).expect("a known token")).collect();
        assert_eq!((spelled[0].as_str(), &spelled), ("<|im_start|>", &expected));
        for unknown in [model.detokenize([3, 864]).await.err(), model.token_strs([864]).await.err()] {
            let Some(ChatError::Sampling(source)) = unknown else { panic!("{unknown:?}") };
            assert!(
                matches!(*source, SamplingError::UnknownToken { parameter: "tokens", token: 864, vocabulary: 864 }),
                "{source}"
            );
        }
        let error = model.tokenize("a ".repeat(8 << 20), false).await.expect_err("the text is too long");
        assert!(matches!(error, ChatError::TooLong { tokens: 8704, has_more: true, limit: 256 }), "{error:?}");
        assert_eq!(model.tokenize("", false).await.expect("tokens"), [0; 0]);
        drop(running);
    });
}

#[test]
fn added_tokens_without_logits_can_be_detokenized_but_not_prompted() {
    story(async {
        let folder = Folder::empty();
        for entry in fs::read_dir(bursar_golden::path("qwen2")).expect("the golden folder") {
            let entry = entry.expect("an entry");
            if entry.file_type().expect("a type").is_file() {
                fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("a copy");
            }
        }
        let read = |name: &str| fs::read(folder.path().join(name)).expect("the file is there");
        let json = |name: &str| serde_json::from_slice::<Value>(&read(name)).expect("JSON");
        let rows = json("config.json")["vocab_size"].as_u64().expect("a number") as u32;
        let mut tokenizer = json("tokenizer.json");
        let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
        let used = added.iter().filter_map(|token| token["id"].as_u64()).max().expect("the folder has added tokens");
        added.extend((used as u32 + 1..=rows).map(|id| {
            json!({"id": id, "content": format!("<extra {id}>"), "special": true, "single_word": false,
                   "lstrip": false, "rstrip": false, "normalized": false})
        }));
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("the file can be written");
        let runtime = runtime_on(&device_of(Bytes::mib(96))).await;
        let model = runtime.load_with(ModelSource::folder(folder.path()), small(), |_| {}).await.expect("a model");
        // The last token is in the tokenizer, but the model has no row and no logit for it.
        let extra = format!("<extra {rows}>");
        let ids = model.tokenize(extra.clone(), false).await.expect("tokens");
        assert_eq!(ids, [rows]);
        assert_eq!(model.detokenize(ids.clone()).await.expect("text"), extra);
        assert_eq!(model.token_strs(ids.clone()).await.expect("words"), [extra]);
        let unknown = |error: Option<ChatError>, token: u32, vocabulary: u32| {
            let Some(ChatError::Sampling(source)) = error else { panic!("{error:?}") };
            let SamplingError::UnknownToken { token: found, vocabulary: limit, .. } = *source else {
                panic!("{source}")
            };
            assert_eq!((found, limit), (token, vocabulary as usize), "{source}");
        };
        unknown(model.detokenize([rows + 1]).await.err(), rows + 1, rows + 1);
        unknown(ask(&model, Chat::from_tokens(ids)).await.err(), rows, rows);
    });
}

#[test]
fn model_facts_match_the_folder_and_envelope() {
    story(async {
        let stage = Stage::set(small()).await;
        let context = stage.model.serving().await.expect("the model serves").context;
        let facts = stage.model.facts().await.expect("the facts are known");
        assert_eq!((facts.vocabulary, facts.name.as_str()), (864, context.name.as_str()));
        assert_eq!(facts.context_tokens, context.envelope.context_tokens);
        assert_eq!((facts.pictures, facts.video_frames), (context.envelope.pictures, context.envelope.video_frames));
        assert!(facts.shows_tools && facts.reply_format.tools == bursar::ToolFormat::Hermes, "{facts:?}");
        assert_eq!((facts.picture_pixels, facts.picture_tiles), (Some(784..=64 * 196), None));
        // A model without pictures.
        let runtime = runtime_on(&device()).await;
        let folder = bursar_golden::path("qwen2");
        let text_only = runtime.load_with(ModelSource::folder(folder), small(), |_| {}).await.expect("a model");
        let facts = text_only.facts().await.expect("the facts are known");
        assert_eq!((facts.pictures, facts.video_frames), (0, 0), "{facts:?}");
        assert_eq!((facts.picture_pixels, facts.picture_tiles), (None, None));
        runtime.shutdown().await;
    });
}

#[test]
fn raw_pixels_give_the_same_reply_as_a_lossless_file() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let drawn = RgbImage::from_fn(97, 61, |x, y| Rgb([(x * 5) as u8, (y * 3) as u8, (x ^ y) as u8]));
        // Token probabilities distinguish pictures with the same description. The salt prevents
        // reuse of computed blocks.
        let chat = |salt: &str| text(QUESTION).max_tokens(16).log_probabilities(3).cache_salt(salt);
        let file = ask(&stage.model, chat("1").image(Image::from_bytes(png(&drawn)))).await.expect("a file");
        let pixels = Image::from_rgb(97, 61, drawn.clone().into_raw()).expect("three bytes for each pixel");
        assert_eq!(format!("{pixels:?}"), "Image(EncodedImage { name: None, bytes: 17751 })", "pixels are not shown");
        assert_eq!(ask(&stage.model, chat("2").image(pixels)).await.expect("pixels"), file);
        let turned = Image::from_rgb(61, 97, drawn.clone().into_raw()).expect("three bytes a pixel");
        let turned = ask(&stage.model, chat("3").image(turned)).await.expect("pixels");
        assert_ne!(turned.tokens, file.tokens, "the same bytes with another width are another picture");
        let error = Image::from_rgb(97, 62, drawn.into_raw()).expect_err("a row is missing");
        assert!(matches!(error, ImageError::PixelBytes { expected: 18_042, found: 17_751, .. }), "{error:?}");
        assert!(error.hint().contains("alpha"), "{}", error.hint());
        let error = Image::from_rgb(0, 9, Vec::new()).expect_err("the picture has no pixels");
        assert!(matches!(error, ImageError::Empty { width: 0, height: 9 }), "{error:?}");
        stage.settled(&before).await;
    });
}

#[test]
fn a_random_weight_model_is_planned_stressed_and_served_normally() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let answers = async |seed: u64| {
            let checkpoint = random_checkpoint("qwen2.5-vl-tiny", seed).expect("a known shape");
            let model = runtime.load_with(ModelSource::random(checkpoint), small(), |_| {}).await.expect("a model");
            let chat = text(QUESTION).image(picture(2)).max_tokens(24).ignore_end();
            let whole = ask(&model, chat).await.expect("the model answers");
            runtime.unload("qwen2.5-vl-tiny").await.expect("the model unloads");
            assert!(whole.usage.picture_tokens > 0 && whole.usage.completion_tokens == 24, "{:?}", whole.usage);
            whole.text
        };
        let first = answers(1).await;
        assert_eq!(first, answers(1).await, "the same seed gives the same reply");
        assert_ne!(first, answers(2).await, "another seed gives another reply");
        runtime.shutdown().await;
    });
}
