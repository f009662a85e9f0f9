//! Chats with hybrid models, whose prefixes can be resumed only where a state was kept. Most tests
//! use a random model to reproduce a bug that was reported for another server (vLLM, Atlas,
//! llama.cpp or ik_llama), and give the number of the report. Every reply is compared with the
//! reply to the same chat without cached tokens. One test asks the trained demo about pictures that
//! were not in its training data.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use bursar::{
    Bytes, Chat, ChatEvent, DeviceChoice, Envelope, Image, LoadOptions, ModelHandle, ModelSource, Runtime,
    RuntimeConfig,
};
use image::{Rgb, RgbImage};

use crate::{
    metrics_log::MetricsLog,
    stage::{Whole, ask, device_of, eventually, placed, png, ranks, small, story},
};

/// Tokens between positions at which states are kept.
const STEP: usize = 64;

/// A runtime with a random hybrid model.
struct HybridModel {
    model: ModelHandle,
    /// Keeps the model running.
    _runtime: Runtime,
}

impl HybridModel {
    async fn sized(envelope: Envelope, kv_tokens: usize) -> HybridModel {
        let options = LoadOptions { envelope: Some(envelope), kv_tokens: Some(kv_tokens), ..small() };
        HybridModel::with(options, Bytes::mib(96)).await
    }

    async fn with(options: LoadOptions, memory: Bytes) -> HybridModel {
        let device = placed(&device_of(memory));
        let config = RuntimeConfig { device: DeviceChoice::Custom(device), ..RuntimeConfig::default() };
        let runtime = Runtime::start(config).await.expect("host devices start");
        let source = ModelSource::folder(bursar_golden::path("qwen3_5"));
        let model = runtime.load_with(source, options, |_| {}).await.expect("the model starts");
        HybridModel { model, _runtime: runtime }
    }

    /// Sends a chat, and sends it again with a new salt, so that no cached tokens are found. The
    /// two replies must be equal. Returns the token counts of the first one.
    async fn ask(&self, chat: Chat) -> Answered {
        static COLD: AtomicUsize = AtomicUsize::new(0);
        let warm = ask(&self.model, chat.clone()).await.expect("the model answers");
        let salt = format!("cold {}", COLD.fetch_add(1, Relaxed));
        let cold = ask(&self.model, chat.cache_salt(salt)).await.expect("the model answers");
        assert_eq!(cold.cached_tokens, 0, "nothing has this salt");
        assert_eq!(reasoning_and_text(&warm), reasoning_and_text(&cold), "{} tokens were cached", warm.cached_tokens);
        Answered { cached: warm.cached_tokens, prompt: warm.usage.prompt_tokens }
    }
}

struct Answered {
    /// Prompt tokens that were found in the prefix cache.
    cached: usize,
    /// Tokens of the prompt.
    prompt: usize,
}

/// The reasoning and the reply. The chat template starts the reasoning.
fn reasoning_and_text(reply: &Whole) -> String {
    [&*reply.reasoning, &reply.text].concat()
}

fn envelope(context_tokens: usize, sequences: usize) -> Envelope {
    Envelope {
        context_tokens,
        sequences,
        step_tokens: 96,
        draft_tokens: 0,
        picture_patches: 208,
        pictures: 3,
        largest_pictures: 3,
        video_frames: 16,
        launch_patches: 256,
    }
}

fn greedy(chat: Chat) -> Chat {
    chat.temperature(0.0).repetition_penalty(1.0).max_tokens(12)
}

/// Different words, so that no part of a prompt repeats.
fn words(numbers: Range<usize>) -> String {
    numbers.map(|number| format!("word {number} ")).collect()
}

fn picture(name: &str) -> Image {
    Image::open(bursar_golden::path("pictures").join(name)).expect("the picture opens")
}

/// The last multiple of [`STEP`] before the last token.
fn last_kept(prompt: usize) -> usize {
    (prompt - 1) / STEP * STEP
}

#[test]
fn a_repeated_long_prompt_is_resumed() {
    // vLLM issues 51250 and 51198; Atlas `prefix_hit_reanchor`, for prompts of whole steps.
    story(async {
        let hybrid = HybridModel::sized(envelope(512, 2), 2048).await;
        let mut lengths = Vec::new();
        for words_of_prompt in 20..40 {
            let chat =
                greedy(Chat::new().user(words(1000 * words_of_prompt..1000 * words_of_prompt + words_of_prompt)));
            let first = hybrid.ask(chat.clone()).await;
            let again = hybrid.ask(chat).await;
            assert_eq!(again.cached, last_kept(again.prompt), "a prompt of {} tokens", again.prompt);
            lengths.push(first.prompt);
        }
        assert!(lengths.iter().any(|length| length % STEP < 8), "some prompts end just after a step: {lengths:?}");
    });
}

#[test]
fn each_agent_turn_resumes_after_the_previous_turn() {
    // vLLM issue 42317: one client in a loop never found its own prefix.
    story(async {
        let hybrid = HybridModel::sized(envelope(1024, 2), 4096).await;
        let mut chat = Chat::new().system(words(0..20));
        let mut before = 0;
        for turn in 1..6 {
            chat = chat.user(words(100 * turn..100 * turn + 8));
            let answered = hybrid.ask(greedy(chat.clone())).await;
            assert_eq!(answered.cached, before, "turn {turn}");
            before = last_kept(answered.prompt);
            chat = chat.assistant(format!("Answer {turn}."));
        }
        assert!(before >= 4 * STEP, "the chat has grown");
    });
}

#[test]
fn the_next_turn_resumes_within_the_previous_reply() {
    // The turns are sent as tokens, because tokenizing the text of a random model's reply may give
    // other tokens than the model generated.
    story(async {
        let hybrid = HybridModel::sized(envelope(1024, 2), 4096).await;
        let tokens = |first: u32, count: u32| (0..count).map(|at| 20 + (first + at * 7) % 200).collect::<Vec<u32>>();
        let mut turns = tokens(0, 150);
        let chat = greedy(Chat::from_tokens(turns.clone())).max_tokens(120).ignore_end().token_ids();
        let mut reply = hybrid.model.chat(chat).await.expect("accepted");
        while let Some(event) = reply.next().await {
            if let ChatEvent::TokenId(token) = event.expect("the reply goes on") {
                turns.push(token);
            }
        }
        turns.extend(tokens(3, 30));
        let next = hybrid.ask(greedy(Chat::from_tokens(turns))).await;
        // The last token of a reply is not computed, so there is a state after 256 of 269 tokens.
        assert_eq!((next.cached, next.prompt), (4 * STEP, 300));
    });
}

#[test]
fn a_common_system_prompt_is_cached_after_two_prompts() {
    // vLLM issues 45238 and 40696: states were kept only in the part that no other prompt had.
    story(async {
        let hybrid = HybridModel::sized(envelope(512, 4), 4096).await;
        let system = words(0..30);
        let mut found = Vec::new();
        for question in 1..6 {
            let chat = Chat::new().system(system.clone()).user(words(100 * question..100 * question + 20));
            found.push(hybrid.ask(greedy(chat)).await.cached);
        }
        let [first, second, others @ ..] = &found[..] else { unreachable!() };
        assert_eq!([first, second], [&0, &0], "the second prompt shows where the common part ends");
        assert!(others.iter().all(|cached| *cached >= STEP && cached == &others[0]), "{found:?}");
    });
}

#[test]
fn later_questions_about_a_picture_resume_after_the_picture() {
    // llama.cpp issue 26994; ik_llama issues 1383 and 1398: each turn read the picture again.
    story(async {
        let hybrid = HybridModel::sized(envelope(512, 2), 4096).await;
        let about = |question: &str| {
            let chat = Chat::new().system(words(0..12)).image(picture("scene_101x157.png"));
            greedy(chat.user(format!("{} {question}", words(50..60))))
        };
        let mut found = Vec::new();
        for question in ["What is this?", "Which colour?", "How many?", "Where?"] {
            found.push(hybrid.ask(about(question)).await.cached);
        }
        let [_, _, third, fourth] = found[..] else { unreachable!() };
        assert!(third >= 2 * STEP && fourth == third, "{found:?}");
        // A later turn of the same chat also resumes after the picture.
        let chat = about("What is this?").assistant("A scene.").user("Look again.");
        assert!(hybrid.ask(chat).await.cached >= third, "the picture is not read again");
    });
}

/// Bytes of a state of the random model on one rank: in each of six layers, the last three inputs
/// of a convolution over 256 channels, and four heads of 32 x 32 numbers.
fn state_bytes() -> f64 {
    (6 * 4 * (3 * 256 + 4 * 32 * 32) / ranks()) as f64
}

#[test]
fn metrics_of_states_count_slots_snapshots_and_copied_bytes() {
    let metrics_log = MetricsLog::open();
    story(async {
        // Two sequences may run. Two further slots are for snapshots.
        let options = LoadOptions {
            name: Some("counted".to_owned()),
            envelope: Some(envelope(512, 2)),
            kv_tokens: Some(4096),
            swap_space: Bytes::mib(4),
            ..small()
        };
        let hybrid = HybridModel::with(options, Bytes::mib(96)).await;
        let gauge = |what: &str| metrics_log.now(&format!("bursar_state_{what}{{model=counted}}"));
        let gauges = || ["slots", "slots_used", "snapshots", "snapshots_swapped"].map(gauge);
        let copied = |direction: &str| {
            let name = format!("bursar_state_copied_bytes_total{{model=counted,direction={direction}}}");
            metrics_log.now(&name) / state_bytes()
        };
        let settled = async |expected: [f64; 4]| {
            eventually(&format!("{expected:?}"), async || gauges() == expected).await;
        };
        settled([4.0, 0.0, 0.0, 0.0]).await;
        let prompt = |number: usize| greedy(Chat::new().user(words(100 * number..100 * number + 15))).max_tokens(1);
        let answered = async |number| ask(&hybrid.model, prompt(number)).await.expect("the model answers");
        // Each prompt leaves one snapshot. A running sequence needs one slot, so three are left.
        for (number, (snapshots, swapped)) in [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3)].into_iter().enumerate() {
            let answered = answered(number).await;
            assert!((STEP..512).contains(&answered.usage.prompt_tokens), "{}", answered.usage.prompt_tokens);
            settled([4.0, 0.0, f64::from(snapshots), f64::from(swapped)]).await;
            assert_eq!((copied("to_host"), copied("to_device")), (f64::from(swapped), 0.0), "after prompt {number}");
        }
        // The first prompt resumes from host memory. Its snapshot is on the device again, and
        // another snapshot was evicted for it.
        let again = answered(0).await;
        assert_eq!(again.cached_tokens, last_kept(again.usage.prompt_tokens));
        settled([4.0, 0.0, 3.0, 4.0]).await;
        assert_eq!((copied("to_host"), copied("to_device")), (4.0, 1.0));
        let mut both = [6, 7].map(|number| {
            let (model, chat) = (hybrid.model.clone(), prompt(number).max_tokens(200).ignore_end());
            tokio::spawn(async move { ask(&model, chat).await.expect("the model answers") })
        });
        eventually("both sequences hold a slot", async || gauge("slots_used") == 2.0).await;
        for whole in &mut both {
            whole.await.expect("no panic");
        }
        eventually("the slots are free", async || gauge("slots_used") == 0.0).await;
        assert_eq!(metrics_log.most("bursar_state_slots_used{model=counted}"), Some(2.0));
    });
}

#[test]
fn the_state_of_one_picture_is_never_used_for_another() {
    // ik_llama issues 1893 and 1985: the second turn described the first turn's picture.
    story(async {
        let hybrid = HybridModel::sized(envelope(512, 4), 4096).await;
        let system = words(0..30);
        // The pictures have one size, so the prompts have the same tokens. Only the pixels differ.
        let [dark, grey, light] = [20, 120, 230].map(|level| {
            Image::from_bytes(png(&RgbImage::from_fn(160, 256, |x, y| Rgb([level, (x % 40) as u8, (y % 100) as u8]))))
        });
        let chat = || Chat::new().system(system.clone());
        let about = |shown: &Image| greedy(chat().image(shown.clone()).user(words(50..60)));
        let before_picture = hybrid.ask(greedy(chat().user(""))).await.prompt;
        let mut prompts = Vec::new();
        for shown in [&dark, &light, &grey] {
            let Answered { cached, prompt } = hybrid.ask(about(shown)).await;
            assert!(cached <= before_picture, "{cached} tokens of another picture's prompt were resumed");
            let again = hybrid.ask(about(shown)).await.cached;
            assert!(again == last_kept(prompt) && again > before_picture, "{again} of {prompt} tokens");
            hybrid.ask(about(shown).assistant("A scene.").user("And this?").image(dark.clone())).await;
            prompts.push(prompt);
        }
        assert!(prompts.iter().all(|prompt| *prompt == prompts[0]), "the tokens are equal: {prompts:?}");
    });
}

#[test]
fn the_longest_prompt_is_answered_while_other_requests_run() {
    // vLLM issue 40420: one long prompt stopped the engine although the pool had enough free
    // blocks.
    story(async {
        let hybrid = HybridModel::sized(envelope(2048, 4), 4096).await;
        let long = greedy(Chat::new().user(words(0..250)));
        let short = |number: usize| greedy(Chat::new().user(words(100 * number..100 * number + 10)));
        let others = (1..=6).map(|number| hybrid.ask(short(number)));
        let (long, _) = tokio::join!(hybrid.ask(long), futures_util::future::join_all(others));
        assert!(long.prompt > 1500, "{}", long.prompt);
    });
}

#[test]
fn a_start_with_defaults_fits_small_devices() {
    // vLLM recipes issue 831: the default number of sequences exceeded the states that fit.
    story(async {
        for mebibytes in [52, 64, 96] {
            let hybrid = HybridModel::with(LoadOptions::default(), Bytes::mib(mebibytes)).await;
            hybrid.ask(greedy(Chat::new().user(words(0..30)))).await;
        }
    });
}

/// Questions about pictures that the demo was not trained on, with the right answers.
fn unseen() -> Vec<(Chat, String)> {
    let folder = bursar_golden::path("unseen_pictures");
    let questions = std::fs::read_to_string(folder.join("questions.jsonl")).expect("the archive has questions");
    let read = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("each line is JSON");
        let text = |key: &str| line[key].as_str().expect("a string").to_owned();
        let image = Image::open(folder.join(text("image"))).expect("the picture opens");
        (Chat::new().image(image).user(text("question")).temperature(0.0).max_tokens(40), text("answer"))
    };
    questions.lines().map(read).collect()
}

#[test]
fn the_trained_hybrid_answers_questions_about_unseen_pictures() {
    story(async {
        let device = placed(&device_of(Bytes::mib(96)));
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(device),
            host_bytes: Bytes::mib(64),
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("host devices start");
        // The device has blocks and states for two of the 32 questions that are asked at once. The
        // other questions wait, and evicted blocks and states move to host memory.
        let options = LoadOptions {
            envelope: Some(Envelope {
                context_tokens: 512,
                picture_patches: 1024,
                launch_patches: 1024,
                ..envelope(512, 4)
            }),
            kv_tokens: Some(640),
            swap_space: Bytes::mib(16),
            requests: Some(64),
            ..small()
        };
        let source = ModelSource::folder(bursar_golden::hybrid_demo_checkpoint());
        let model = runtime.load_with(source, options, |_| {}).await.expect("the model starts");
        let questions = unseen();
        let mut alone = Vec::new();
        for (chat, _) in &questions {
            alone.push(ask(&model, chat.clone()).await.expect("the model answers").text);
        }
        let exact = alone.iter().zip(&questions).filter(|(found, (_, right))| *found == right).count();
        println!("{exact} of {} answers are exact", questions.len());
        assert!(exact * 100 >= questions.len() * 80, "{exact} of {} answers are exact", questions.len());
        let together =
            futures_util::future::join_all(questions.iter().map(|(chat, _)| ask(&model, chat.clone()))).await;
        for ((found, alone), (_, right)) in together.into_iter().zip(&alone).zip(&questions) {
            assert_eq!(found.expect("the model answers").text, *alone, "the right answer is {right}");
        }
        // A second question about the same picture, after the first answer.
        for ((chat, _), answer) in questions.iter().zip(&alone).take(8) {
            let again = chat.clone().assistant(answer).user("Is the background light or dark?");
            let first = ask(&model, again.clone()).await.expect("the model answers");
            let second = ask(&model, again.cache_salt("cold")).await.expect("the model answers");
            assert_eq!((&first.text, second.cached_tokens), (&second.text, 0));
            assert!(["light", "dark", "patterned"].contains(&&*first.text), "{}", first.text);
        }
    });
}
