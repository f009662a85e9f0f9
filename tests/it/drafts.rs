//! Drafted tokens: replies equal the replies without drafts, whatever happens to a sequence while
//! its drafts are verified.

use std::{collections::BTreeMap, process::Command};

use bursar::messages::SchedulerMessage;
use bursar::{
    Bytes, Chat, ChatEvent, Class, DraftQuantization, DraftSource, Envelope, LoadOptions, ModelSource, NgramSizes,
    OutputFormat, TokenScore,
};
use bursar_actors::responder::Responder;
use futures_util::future::join_all;
use serde_json::json;

use crate::{
    metrics_log::MetricsLog,
    stage::{Stage, Whole, about, ask, device, listen, runtime_on, small, small_envelope, story, text},
};

/// Options that draft tokens after any token that has occurred earlier in the sequence.
fn drafting(name: &str) -> LoadOptions {
    let mut options = LoadOptions { name: Some(name.to_owned()), ..small() };
    options.limits.draft_tokens = Some(4);
    // Fixed, so that the number of drafts does not depend on step times.
    options.has_fixed_drafts = true;
    options.draft_source = DraftSource::PromptLookup(NgramSizes { min: 1, max: 3 });
    options
}

/// Options with up to `count` drafts of the model's draft head.
fn by_head(name: &str, count: usize) -> LoadOptions {
    let mut options = LoadOptions { draft_source: DraftSource::DraftHead, ..drafting(name) };
    options.limits.draft_tokens = Some(count);
    options
}

/// The same options without drafts.
fn plain(name: &str) -> LoadOptions {
    let mut options = drafting(name);
    options.limits.draft_tokens = None;
    options
}

/// The drafts of this model so far, and how many of them were accepted.
fn drafts(metrics_log: &MetricsLog, model: &str) -> (f64, f64) {
    let of = |name: &str| {
        let all = metrics_log.all();
        let is_of = |series: &&String| series.starts_with(name) && series.contains(&format!("model={model}"));
        all.iter().filter(|(series, _)| is_of(series)).map(|(_, value)| value.now).sum::<f64>()
    };
    (of("bursar_draft_tokens_total"), of("bursar_draft_tokens_accepted_total"))
}

/// Greedy chats that end at their token limit, with log-probabilities: two about pictures, one with
/// text, and three whose prompts repeat themselves.
fn greedy() -> Vec<Chat> {
    let repeated = |period: u32| Chat::from_tokens((0..60).map(|at| 40 + at % period).collect::<Vec<u32>>());
    let chats = [about(1), about(2), text("Tell me something."), repeated(3), repeated(7), repeated(20)];
    chats.map(|chat| chat.temperature(0.0).max_tokens(60).ignore_end().log_probabilities(2)).into()
}

/// A sampled chat. `seed` also selects its parameters: penalties, min-p with a bias, top-k, or
/// top-p with a minimum number of tokens.
fn sampled(seed: u64) -> Chat {
    let chat = about(3).temperature(1.5).seed(seed).max_tokens(60).ignore_end().log_probabilities(2);
    match seed % 4 {
        0 => chat.repetition_penalty(1.3).presence_penalty(0.5).frequency_penalty(0.5),
        1 => chat.min_p(0.1).logit_bias(50, 3.0),
        2 => chat.top_k(3),
        _ => chat.min_tokens(30).top_p(0.7),
    }
}

/// Checks that two replies are equal.
fn assert_same(found: &Whole, expected: &Whole, what: &str) {
    assert_eq!((&found.text, found.finish_reason), (&expected.text, expected.finish_reason), "{what}");
    assert_eq!((&found.usage, &found.stop_reason), (&expected.usage, &expected.stop_reason), "{what}");
    assert_same_tokens(&found.tokens, &expected.tokens, what);
}

/// Checks that two replies have the same tokens, with the same log-probabilities except for the
/// rounding of sums, which depends on the rows of a step.
fn assert_same_tokens(found: &[TokenScore], expected: &[TokenScore], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let of = |score: &TokenScore| {
            let all: Vec<_> = std::iter::once(&score.token).chain(&score.top).cloned().collect();
            all.into_iter().map(|scored| (scored.id, scored.log_probability)).unzip::<_, _, Vec<u32>, Vec<f32>>()
        };
        let ((ids, found), (expected_ids, expected)) = (of(found), of(expected));
        assert_eq!(ids, expected_ids, "{what}: token {place}");
        let differ = found.iter().zip(&expected).any(|(found, expected)| (found - expected).abs() > 1e-3);
        assert!(!differ, "{what}: token {place} has {found:?}, not {expected:?}");
    }
}

async fn ask_all(stage: &Stage, chats: &[Chat]) -> Vec<Whole> {
    let mut replies = Vec::new();
    for chat in chats {
        replies.push(ask(&stage.model, chat.clone()).await.expect("the model answers"));
    }
    replies
}

/// A model in which three of four layers have recurrent states. Its weights are random.
fn hybrid() -> ModelSource {
    ModelSource::folder(bursar_golden::path("qwen3_5"))
}

/// A trained model with recurrent states and a draft head.
fn hybrid_demo() -> ModelSource {
    ModelSource::folder(bursar_golden::hybrid_demo_checkpoint())
}

/// The same chat with a reply of only four different tokens, so that drafts are accepted even if
/// the model's weights are random.
fn of_few_tokens(chat: Chat) -> Chat {
    (40..44).fold(chat, |chat, token| chat.logit_bias(token, 60.0))
}

#[test]
fn greedy_and_sampled_replies_are_equal_with_and_without_drafts() {
    replies_are_equal(ModelSource::demo, drafting("drafting"), |chat| chat, 500.0);
}

#[test]
fn replies_of_hybrid_models_are_equal_with_and_without_drafts() {
    replies_are_equal(hybrid, drafting("hybrid"), of_few_tokens, 200.0);
}

#[test]
fn replies_are_equal_with_one_draft_of_a_draft_head() {
    replies_are_equal(hybrid_demo, by_head("one draft", 1), |chat| chat, 200.0);
}

#[test]
fn replies_are_equal_with_several_drafts_of_a_draft_head() {
    replies_are_equal(hybrid_demo, by_head("three drafts", 3), |chat| chat, 200.0);
}

#[test]
fn replies_are_equal_with_the_drafts_of_an_eagle3_head() {
    let target = || ModelSource::folder(bursar_golden::path("qwen3_vl"));
    let head = ModelSource::folder(bursar_golden::path("eagle3_vl"));
    let options = LoadOptions { draft_model: Some(head.into()), ..by_head("eagle3", 3) };
    // The weights are random, so the head guesses hardly any token.
    replies_are_equal(target, options, of_few_tokens, -1.0);
}

#[test]
fn replies_are_equal_with_the_drafts_of_gemma_4s_assistants() {
    let options = |name: &str| {
        let head = ModelSource::folder(bursar_golden::path(name));
        // Pictures are enlarged to up to 70 tokens, which must be in one step. Each cache group needs
        // separate blocks.
        let envelope = Envelope { step_tokens: 160, picture_patches: 630, launch_patches: 1300, ..small_envelope() };
        let sizes = LoadOptions { envelope: Some(envelope), kv_tokens: Some(4096), ..by_head(name, 3) };
        LoadOptions { draft_model: Some(head.into()), ..sizes }
    };
    let pictures = || ModelSource::folder(bursar_golden::path("gemma4"));
    replies_are_equal(pictures, options("gemma4_assistant_vl"), of_few_tokens, -1.0);
    let text = || ModelSource::folder(bursar_golden::path("gemma4_sharing"));
    replies_to_text_are_equal(text, options("gemma4_assistant"), of_few_tokens, -1.0);
}

#[test]
fn replies_are_equal_with_a_rounded_draft_projection() {
    let rounded = Some(DraftQuantization::Int4);
    let options = LoadOptions { draft_quantization: rounded, ..by_head("rounded drafts", 3) };
    replies_are_equal(hybrid_demo, options.clone(), |chat| chat, 200.0);
    story(async {
        let weights = async |options| {
            let stage = Stage::of(hybrid_demo(), options).await;
            let snapshot = stage.snapshot().await;
            snapshot.classes.iter().find(|line| line.class == Class::Weights).expect("weights are leased").bytes
        };
        let [rounded, plain] = [weights(options).await, weights(by_head("unrounded drafts", 3)).await];
        assert!(rounded > plain, "{rounded} with a second projection, {plain} without");
    });
}

/// Checks that a model gives the same replies with and without drafts. At least `least` drafts must
/// be accepted.
fn replies_are_equal(source: fn() -> ModelSource, options: LoadOptions, varied: fn(Chat) -> Chat, least: f64) {
    let chats = greedy().into_iter().chain((0..8).map(sampled)).map(varied).collect();
    replies_to_chats_are_equal(source, options, chats, least);
}

/// Like [`replies_are_equal`], with only the chats without pictures.
fn replies_to_text_are_equal(source: fn() -> ModelSource, options: LoadOptions, varied: fn(Chat) -> Chat, least: f64) {
    replies_to_chats_are_equal(source, options, greedy().into_iter().skip(2).map(varied).collect(), least);
}

fn replies_to_chats_are_equal(source: fn() -> ModelSource, options: LoadOptions, chats: Vec<Chat>, least: f64) {
    let name = &options.name.clone().expect("a name");
    let metrics_log = MetricsLog::open();
    story(async {
        let without =
            LoadOptions { envelope: options.envelope.clone(), kv_tokens: options.kv_tokens, ..plain("plain") };
        let with = Stage::of(source(), options.clone()).await;
        let without = Stage::of(source(), without).await;
        let before = with.snapshot().await;
        let expected = ask_all(&without, &chats).await;
        for round in ["first", "with prefix hits"] {
            for (found, expected) in ask_all(&with, &chats).await.iter().zip(&expected) {
                assert_same(found, expected, round);
            }
        }
        let together = join_all(chats.iter().map(|chat| ask(&with.model, chat.clone()))).await;
        for (found, expected) in together.iter().zip(&expected) {
            assert_same(found.as_ref().expect("the model answers"), expected, "together");
        }
        let (drafted, accepted) = drafts(&metrics_log, name);
        assert!(accepted > least && drafted > accepted, "{accepted} of {drafted} drafts were accepted");
        assert_eq!(drafts(&metrics_log, "plain"), (0.0, 0.0));
        with.settled(&before).await;
    });
}

/// vLLM issue 43559: the reply to a chat differed after another chat was answered.
#[test]
fn a_chat_is_answered_the_same_before_and_after_other_chats() {
    story(async {
        let stage = Stage::set(drafting("repeated")).await;
        let first = ask_all(&stage, &greedy()).await;
        let mut longer = Vec::new();
        for (chat, reply) in greedy().into_iter().take(3).zip(&first) {
            longer.push(chat.assistant(&reply.text).user("And then?"));
        }
        let turns = ask_all(&stage, &longer).await;
        for (again, first) in ask_all(&stage, &greedy()).await.iter().zip(&first) {
            assert_same(again, first, "A, B, A");
        }
        for (again, first) in ask_all(&stage, &longer).await.iter().zip(&turns) {
            assert_same(again, first, "the second turn again");
            assert!(again.cached_tokens > 16, "the second turn finds the first");
        }
    });
}

#[test]
fn a_reply_may_end_at_any_accepted_draft() {
    let metrics_log = MetricsLog::open();
    story(async {
        let (with, without) = (Stage::set(drafting("ending")).await, Stage::set(plain("whole")).await);
        let chat = greedy().swap_remove(3);
        let whole = ask(&without.model, chat.clone()).await.expect("the model answers");
        for tokens in 1..=30 {
            let limited = chat.clone().max_tokens(tokens);
            let expected = ask(&without.model, limited.clone()).await.expect("the model answers");
            let found = ask(&with.model, limited).await.expect("the model answers");
            assert_same(&found, &expected, &format!("{tokens} tokens"));
            assert_eq!(found.usage.completion_tokens, tokens);
            assert_same_tokens(&found.tokens, &whole.tokens[..tokens], "the whole reply");
        }
        // End the reply at each of these tokens, once with a stop token and once with a stop text.
        for place in 5..25 {
            let token = &whole.tokens[place].token;
            let by_token = chat.clone().stop_token(token.id);
            for stopped in [by_token, chat.clone().stop(token.text.trim())] {
                if token.text.trim().is_empty() {
                    continue;
                }
                let expected = ask(&without.model, stopped.clone()).await.expect("the model answers");
                let found = ask(&with.model, stopped).await.expect("the model answers");
                assert_same(&found, &expected, &format!("stopped by token {place}"));
            }
        }
        assert!(drafts(&metrics_log, "ending").1 > 100.0, "runs of several tokens were accepted");
    });
}

/// The event that disturbs running replies.
#[derive(Clone, Copy, PartialEq)]
enum Event {
    Nothing,
    /// The KV cache shrinks to a quarter, so that sequences lose their blocks, and grows back.
    Shrink,
    /// The scheduler dies.
    Death,
}

/// Runs 16 sequences. The event occurs once the last sequence has a token.
async fn disturbed(source: ModelSource, varied: fn(Chat) -> Chat, options: LoadOptions, event: Event) -> Vec<Whole> {
    let envelope = Envelope { sequences: 16, context_tokens: 512, step_tokens: 256, ..small_envelope() };
    let stage = Stage::of(source, LoadOptions { envelope: Some(envelope), requests: Some(64), ..options }).await;
    let before = stage.snapshot().await;
    let chat = |number: u64| {
        let prompt: Vec<u32> = (0..200).map(|at| (40 + (at * 7 + number * 31) % 200) as u32).collect();
        let chat = varied(Chat::from_tokens(prompt).max_tokens(200).ignore_end().log_probabilities(1));
        let is_sampled = number.is_multiple_of(3);
        if is_sampled { chat.temperature(1.0).repetition_penalty(1.1).seed(number) } else { chat.temperature(0.0) }
    };
    let mut replies = join_all((0..16).map(|number| stage.model.chat(chat(number)))).await;
    let last = replies[15].as_mut().expect("accepted");
    let first = last.next().await.expect("an event").expect("a token");
    assert!(matches!(first, ChatEvent::Token(_)), "the chat asks for tokens");
    let scheduler = stage.model.serving().await.expect("the model serves").scheduler.clone();
    match event {
        Event::Nothing => {}
        Event::Shrink => {
            for blocks in [128, 512] {
                let (reply, resized) = Responder::new();
                scheduler.send_message(SchedulerMessage::Resize { blocks, reply }).expect("the scheduler lives");
                resized.await.expect("the scheduler answers");
            }
        }
        Event::Death => scheduler.kill(),
    }
    let replies = join_all(replies.into_iter().map(|reply| listen(reply.expect("accepted")))).await;
    stage.settled(&before).await;
    replies.into_iter().map(|reply| reply.expect("the model answers")).collect()
}

#[test]
fn drafts_survive_deaths_preemption_and_host_memory() {
    let cases = [("shrunk", 0, Event::Shrink), ("swapped drafts", 32, Event::Shrink), ("died", 0, Event::Death)];
    drafts_survive(ModelSource::demo, |chat| chat, drafting, cases, 500.0);
}

#[test]
fn hybrid_drafts_survive_deaths_preemption_and_swapping() {
    let cases =
        [("shrunk hybrid", 0, Event::Shrink), ("swapped hybrid", 64, Event::Shrink), ("died hybrid", 0, Event::Death)];
    drafts_survive(hybrid, of_few_tokens, drafting, cases, 500.0);
}

#[test]
fn draft_head_drafts_survive_deaths_preemption_and_swapping() {
    let cases =
        [("shrunk head", 0, Event::Shrink), ("swapped head", 64, Event::Shrink), ("died head", 0, Event::Death)];
    // The prompts are random tokens, after which the trained head is seldom right.
    drafts_survive(hybrid_demo, |chat| chat, |name| by_head(name, 2), cases, 20.0);
}

/// For each case, checks that replies survive its event and that at least `least` drafts are
/// accepted. A case has a name, MiB of swap memory and an event.
fn drafts_survive(
    source: fn() -> ModelSource,
    varied: fn(Chat) -> Chat,
    options: fn(&str) -> LoadOptions,
    cases: [(&str, u64, Event); 3],
    least: f64,
) {
    let metrics_log = MetricsLog::open();
    story(async {
        let expected = disturbed(source(), varied, plain("undisturbed"), Event::Nothing).await;
        for (name, swap_mib, event) in cases {
            let occurred = || {
                let of = |metric: String| metrics_log.now(&metric) > 0.0;
                match event {
                    Event::Nothing => true,
                    Event::Shrink => {
                        of(format!("bursar_preemptions_total{{model={name},reason=shrink}}"))
                            && (swap_mib == 0 || of(format!("bursar_prefix_cache_host_hits_total{{model={name}}}")))
                    }
                    Event::Death => of(format!("bursar_requests_redone_total{{model={name}}}")),
                }
            };
            // On a busy machine, the replies may have ended before the event, or before blocks came
            // back from host memory.
            for _ in 0..5 {
                let options = LoadOptions { swap_space: Bytes::mib(swap_mib), ..options(name) };
                for (number, (found, expected)) in
                    disturbed(source(), varied, options, event).await.iter().zip(&expected).enumerate()
                {
                    assert_eq!(found.text, expected.text, "{name}: reply {number}");
                    assert_same_tokens(&found.tokens, &expected.tokens, name);
                }
                if occurred() {
                    break;
                }
            }
            assert!(occurred(), "{name}: the event disturbed no reply, or no blocks came back");
            let (drafted, accepted) = drafts(&metrics_log, name);
            assert!(accepted > least, "{name}: {accepted} of {drafted} drafts were accepted");
        }
    });
}

#[test]
fn replies_with_a_format_are_equal_with_and_without_drafts() {
    let metrics_log = MetricsLog::open();
    story(async {
        let (with, without) = (Stage::set(drafting("formed")).await, Stage::set(plain("plain")).await);
        let member = json!({ "type": "object", "properties": { "name": { "enum": ["red", "green"] }, "size": { "type": "integer" } }, "required": ["name", "size"] });
        let list = json!({ "type": "array", "items": member, "minItems": 4, "maxItems": 4 });
        let pattern = |pattern: &str| OutputFormat::Regex(pattern.to_owned());
        let formats = [pattern("(ab){20}"), pattern("([a-c]{2}-){9}"), OutputFormat::json(list)];
        let chats: Vec<_> = formats
            .iter()
            .flat_map(|format| [0.0, 1.0].map(|temperature| (format.clone(), temperature)))
            .map(|(format, temperature)| {
                about(1).format(format).temperature(temperature).seed(7).max_tokens(120).log_probabilities(1)
            })
            .collect();
        let expected = ask_all(&without, &chats).await;
        assert_eq!(expected[0].text, "ab".repeat(20));
        let together = join_all(chats.iter().map(|chat| ask(&with.model, chat.clone()))).await;
        for (found, expected) in together.iter().zip(&expected) {
            assert_same(found.as_ref().expect("the model answers"), expected, "with a format");
        }
        let (drafted, accepted) = drafts(&metrics_log, "formed");
        assert!(accepted > 50.0 && drafted > accepted, "{accepted} of {drafted} drafts were accepted");
    });
}

/// Pearson's statistic of these counts, for the tokens that are expected at least five times. The
/// other tokens are one class.
fn chi_square(counts: &BTreeMap<u32, usize>, expected: &BTreeMap<u32, f64>) -> (f64, usize) {
    let all: usize = counts.values().sum();
    let (mut sum, mut classes, mut rest, mut rest_expected) = (0.0, 0, all as f64, all as f64);
    for (token, probability) in expected {
        let (found, wanted) = (counts.get(token).copied().unwrap_or(0) as f64, probability * all as f64);
        if wanted >= 5.0 {
            sum += (found - wanted).powi(2) / wanted;
            (classes, rest, rest_expected) = (classes + 1, rest - found, rest_expected - wanted);
        }
    }
    if rest_expected >= 5.0 {
        (sum, classes) = (sum + (rest - rest_expected).powi(2) / rest_expected, classes + 1);
    }
    (sum, classes)
}

#[test]
fn sampled_tokens_have_the_models_distribution_with_drafts() {
    let metrics_log = MetricsLog::open();
    story(async {
        const SAMPLES: u64 = 600;
        let stage = Stage::set(drafting("distributed")).await;
        let chat = |seed| {
            let chat = Chat::from_tokens((0..40).map(|at| 40 + at % 5).collect::<Vec<u32>>()).ignore_end();
            chat.temperature(1.0).top_k(0).top_p(1.0).max_tokens(4).log_probabilities(20).seed(seed)
        };
        // For each beginning of a reply, the tokens that followed it and the probabilities that the
        // model reports.
        let mut followed = BTreeMap::<Vec<u32>, (BTreeMap<u32, usize>, BTreeMap<u32, f64>)>::new();
        for seed in 0..SAMPLES {
            let whole = ask(&stage.model, chat(seed)).await.expect("the model answers");
            let mut beginning = Vec::new();
            for score in &whole.tokens {
                let (counts, expected) = followed.entry(beginning.clone()).or_default();
                *counts.entry(score.token.id).or_default() += 1;
                expected.extend(score.top.iter().map(|top| (top.id, f64::from(top.log_probability).exp())));
                beginning.push(score.token.id);
            }
        }
        let (drafted, accepted) = drafts(&metrics_log, "distributed");
        assert!(accepted > 50.0 && drafted - accepted > 50.0, "{accepted} of {drafted} drafts were accepted");
        let mut tested = [0; 3];
        for (beginning, (counts, expected)) in followed {
            let (sum, classes) = chi_square(&counts, &expected);
            if classes > 1 {
                // Four standard deviations above the mean of the distribution.
                let freedom = (classes - 1) as f64;
                let most = freedom + 4.0 * (2.0 * freedom).sqrt() + 4.0;
                assert!(sum < most, "{sum} after {beginning:?}, with {classes} classes");
                tested[beginning.len().min(2)] += 1;
            }
        }
        assert!(tested.iter().all(|count| *count > 0), "{tested:?} beginnings of each length were tested");
    });
}

#[test]
fn hybrid_drafts_need_two_spare_step_tokens() {
    story(async {
        let runtime = runtime_on(&device()).await;
        let source = ModelSource::folder(bursar_golden::path("qwen3_5"));
        let mut options = drafting("hybrid");
        (options.limits.sequences, options.limits.step_tokens) = (Some(4), Some(5));
        let Err(error) = runtime.load_with(source, options, |_| {}).await else {
            panic!("a step_tokens of 5 was accepted")
        };
        assert!(error.to_string().contains("`step_tokens` is 5; expected at least 6"), "{error}");
        runtime.shutdown().await;
    });
}

/// The output of `bursar plan` for a model on an H200.
fn plan(shape: &str, more: &[&str]) -> (bool, String) {
    let arguments = ["plan", "--json", "--gpu", "h200", "--shape", shape];
    let output = Command::new(env!("CARGO_BIN_EXE_bursar")).args(arguments).args(more).output().expect("the binary");
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).expect("text"))
}

#[test]
fn memory_for_drafts_is_planned_from_vllms_flag() {
    let claim = |shape, more: &[&str], claim| {
        let (fits, output) = plan(shape, more);
        assert!(fits, "{output}");
        let plan: serde_json::Value = serde_json::from_str(&output).expect("JSON");
        plan["claims"][claim].as_u64().expect("a number")
    };
    let step_workspace = |more: &[&str]| claim("qwen2.5-vl-7b", more, "step workspace");
    let config = r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}"#;
    let [with, without] = [&["--speculative-config", config][..], &[]].map(step_workspace);
    // The logits of 64 drafts, in f32.
    let logits = 64 * 152_064 * 4;
    assert!((logits..2 * logits).contains(&(with - without)), "{with} bytes with drafts, {without} without");
    // On a GPU, a draft head has a copy of the output projection with half a byte for each number
    // and two bytes for each group of 128 numbers.
    let weights = |quantization| {
        let config = format!(r#"{{"method": "mtp", "num_speculative_tokens": 3{quantization}}}"#);
        claim("qwen3.5-9b", &["--speculative-config", &config], "weights")
    };
    let [default, int4, none] = ["", r#", "quantization": "int4""#, r#", "quantization": "none""#].map(weights);
    let copy = 248_320 * 4096 / 128 * (64 + 2);
    assert!(default == int4 && (copy..copy + (2 << 20)).contains(&(int4 - none)), "{default}, {int4}, {none}");
    // The head has two KV heads of 64 elements.
    let folder = |name: &str| bursar_golden::path(name).display().to_string();
    let arguments = ["plan", "--gpu", "h200", "--model", &folder("llama"), "--draft-model", &folder("eagle3")];
    let output = Command::new(env!("CARGO_BIN_EXE_bursar")).args(arguments).output().expect("the binary");
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    let note = "Note: the draft head accounts for ";
    assert!(output.contains(note) && output.contains(" of the weights and 512 B of each token's KV cache"), "{output}");
    for (config, expected) in [
        (r#"{"method": "mtp", "quantization": "fp8"}"#, "expected int4 or none"),
        (r#"{"method": "ngram", "quantization": "int4"}"#, "because int4 needs --draft-method mtp"),
        (r#"{"method": "eagle"}"#, "other draft models are not supported yet"),
        (r#"{"method": "eagle3"}"#, "to an EAGLE-3 head"),
        (r#"{"method": "eagle3", "model": "/nowhere"}"#, "/nowhere"),
        (r#"{"method": "mtp"}"#, "has no draft head"),
        (r#"{"method": "ngram", "num_speculative_tokens": 65}"#, "is 65; expected at most 64"),
        (
            r#"{"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}"#,
            "3; expected a whole number of at most",
        ),
        (r#"{"method": "ngram", "draft_model": "a/b"}"#, "speculative_config.draft_model"),
    ] {
        let (fits, output) = plan("qwen2.5-vl-7b", &["--speculative-config", config]);
        assert!(!fits && output.contains(expected), "{config}: {output}");
    }
}
