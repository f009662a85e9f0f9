//! KV blocks and picture rows that move to host memory when other requests need their slots, and
//! that are copied back: replies do not change, and nothing is computed twice.

use bursar::{
    Bytes, Chat, Class, DeviceChoice, Envelope, Hint, Intensity, LoadOptions, ModelSource, Runtime, RuntimeConfig,
    StartError,
};
use bursar_actors::{engine::EngineMessage, engine::WhichLane, responder::Responder};
use bursar_budgets::testing::HostControl;
use futures_util::future::join_all;

use crate::{
    metrics_log::MetricsLog,
    stage::{
        Stage, Whole, about, answer, ask, device, eventually, picture, placed, ranks, small, small_envelope, story,
        text,
    },
};

/// Options for one sequence of up to 1,536 tokens at a time. The device cannot hold the KV blocks
/// of a second sequence.
fn for_one(name: &str, swap_space: Bytes) -> LoadOptions {
    let envelope = Envelope { sequences: 1, context_tokens: 1536, step_tokens: 256, ..small_envelope() };
    let kv_tokens = Some(envelope.context_tokens);
    LoadOptions { name: Some(name.to_owned()), envelope: Some(envelope), swap_space, kv_tokens, ..small() }
}

/// Host memory for a few thousand tokens of the demo model.
const SOME: Bytes = Bytes::mib(32);

/// The first `count` tokens of a sequence that is different for each `number`.
fn tokens(number: usize, count: usize) -> impl Iterator<Item = u32> {
    (0..count).map(move |at| (40 + (at * 7 + number * 31 + at / 16 * number) % 200) as u32)
}

/// A chat of another user, long enough to evict everything else from the device.
fn other(number: usize) -> Chat {
    Chat::from_tokens(tokens(100 + number, 1500).collect::<Vec<_>>()).temperature(0.0).max_tokens(3).ignore_end()
}

/// Checks that two replies are equal, including each bit of the log-probabilities.
fn assert_same(with: &Whole, without: &Whole, what: &str) {
    assert_eq!(with.text, without.text, "{what}");
    let bits = |whole: &Whole| -> Vec<u32> {
        whole.tokens.iter().map(|score| score.token.log_probability.to_bits()).collect()
    };
    let (with, without) = (bits(with), bits(without));
    let first = with.iter().zip(&without).position(|(with, without)| with != without);
    assert!(first.is_none() && with.len() == without.len(), "{what}: token {first:?} of {} differs", with.len());
}

/// A chat of eight turns, with a chat of another user after each turn.
async fn eight_turns(stage: &Stage) -> Vec<Whole> {
    let mut replies = Vec::new();
    let mut history = Vec::new();
    for turn in 0..8 {
        history.extend(tokens(turn, 117));
        let chat = Chat::from_tokens(history.clone()).temperature(0.0).max_tokens(4).ignore_end();
        replies.push(ask(&stage.model, chat.log_probabilities(2)).await.expect("the model answers"));
        answer(&stage.model, other(turn)).await;
    }
    replies
}

#[test]
fn the_eighth_turn_of_a_swapped_chat_is_hardly_recomputed() {
    let metrics_log = MetricsLog::open();
    story(async {
        let with = Stage::set(for_one("eight turns", SOME)).await;
        let before = with.snapshot().await;
        let replies = eight_turns(&with).await;
        let [.., seventh, eighth] = &replies[..] else { unreachable!("eight turns give eight replies") };
        let (computed, prompt) = (seventh.usage.prompt_tokens, eighth.usage.prompt_tokens);
        assert!(prompt > 800, "the eighth prompt has only {prompt} tokens");
        let again = computed.saturating_sub(eighth.cached_tokens);
        assert!(again * 50 < prompt, "{again} of {prompt} tokens were computed again");
        let [came_back, left, returned] = [
            "bursar_prefix_cache_host_hits_total{model=eight turns}",
            "bursar_kv_copied_bytes_total{model=eight turns,direction=to_host}",
            "bursar_kv_copied_bytes_total{model=eight turns,direction=to_device}",
        ]
        .map(|name| metrics_log.now(name));
        assert!(came_back >= eighth.cached_tokens as f64, "{came_back} tokens came back from the host");
        assert!(left > returned && returned > 0.0, "{left} bytes went to the host, {returned} came back");
        assert!(metrics_log.now("bursar_kv_blocks_swapped{model=eight turns}") > 0.0);
        with.settled(&before).await;

        let without = Stage::set(for_one("eight turns alone", Bytes::ZERO)).await;
        let recomputed = eight_turns(&without).await;
        let cached = recomputed[7].cached_tokens;
        assert!(cached * 10 < prompt, "without a host tier {cached} of {prompt} tokens were found");
        for (turn, (with, without)) in replies.iter().zip(&recomputed).enumerate() {
            assert_same(with, without, &format!("turn {turn}"));
        }
    });
}

#[test]
fn a_picture_with_swapped_blocks_is_encoded_once() {
    let metrics_log = MetricsLog::open();
    story(async {
        let stage = Stage::set(for_one("seen once", SOME)).await;
        let before = stage.snapshot().await;
        let (mut chat, mut replies) = (about(1), Vec::new());
        let encoded = || metrics_log.now("bursar_encoder_cache_queries_total{model=seen once}");
        for turn in 0..4 {
            let whole = ask(&stage.model, chat.clone()).await.expect("the model answers");
            chat = chat.assistant(&whole.text).user(format!("And {turn}?"));
            replies.push(whole.text);
            // These chats take over the picture's vision cache rows and its blocks.
            for number in 0..8 {
                answer(&stage.model, about(10 + 8 * turn + number)).await;
            }
            answer(&stage.model, other(turn as usize)).await;
            assert_eq!(encoded(), f64::from(1 + 8 * (turn + 1)), "turn {turn}");
        }
        assert_eq!(metrics_log.now("bursar_pictures_found_computed_total{model=seen once}"), 3.0);
        stage.settled(&before).await;
        // The same chats on models with empty caches.
        let mut chat = about(1);
        for (turn, reply) in replies.into_iter().enumerate() {
            let fresh = Stage::set(for_one("computed again", Bytes::ZERO)).await;
            assert_eq!(answer(&fresh.model, chat.clone()).await, reply, "turn {turn}");
            chat = chat.assistant(&reply).user(format!("And {turn}?"));
        }
    });
}

/// More pictures than the vision cache of [`small`] holds.
const PICTURES: u32 = 40;

/// Asks for a short reply about a picture. Chats with a different `visit` share no blocks.
fn visited(number: u32, visit: usize) -> Chat {
    let chat = Chat::new().system(format!("Visit {visit}.")).user("Describe the picture.").image(picture(number));
    chat.temperature(0.0).max_tokens(4).ignore_end().log_probabilities(1)
}

async fn visit(stage: &Stage, visit: usize) -> Vec<Whole> {
    let mut replies = Vec::new();
    for number in 0..PICTURES {
        replies.push(ask(&stage.model, visited(number, visit)).await.expect("the model answers"));
    }
    replies
}

fn with_rows(name: &str, swap_space: Bytes) -> LoadOptions {
    LoadOptions { name: Some(name.to_owned()), swap_space, ..small() }
}

#[test]
fn an_evicted_picture_is_copied_back_and_not_encoded_again() {
    let metrics_log = MetricsLog::open();
    story(async {
        let with = Stage::set(with_rows("rows", SOME)).await;
        let before = with.snapshot().await;
        let count = |what: &str| metrics_log.now(&format!("bursar_encoder_cache_{what}{{model=rows}}"));
        let encoded = || count("queries_total") - count("hits_total");
        let first = visit(&with, 0).await;
        let pictures = f64::from(PICTURES);
        assert_eq!((encoded(), count("host_hits_total")), (pictures, 0.0));
        let without = Stage::set(with_rows("no rows", Bytes::ZERO)).await;
        for again in 1..3 {
            let expected = visit(&without, again).await;
            for (number, (now, then)) in visit(&with, again).await.iter().zip(&expected).enumerate() {
                assert_same(now, then, &format!("picture {number}, visit {again}"));
            }
        }
        assert_eq!((encoded(), count("host_hits_total")), (pictures, 2.0 * pictures), "each was encoded once");
        assert!(count("host_bytes") > 0.0);
        // Ask about all pictures concurrently, each in two requests.
        let all = (0..2 * PICTURES as usize).map(|at| ask(&with.model, visited(at as u32 % PICTURES, 3 + at)));
        for (at, reply) in join_all(all).await.into_iter().enumerate() {
            let expected = answer(&without.model, visited(at as u32 % PICTURES, 3 + at)).await;
            assert_eq!(reply.expect("the model answers").text, expected);
        }
        assert_eq!(encoded(), pictures);
        // Ask about two pictures that were evicted in the meantime, each together with a new
        // picture.
        visit(&with, 200).await;
        let beside =
            |number| about(number).image(picture(number + 500)).max_tokens(4).ignore_end().log_probabilities(1);
        let mut both = Vec::new();
        for number in [0, 1] {
            let (were, came) = (encoded(), count("host_hits_total"));
            both.push(ask(&with.model, beside(number)).await.expect("the model answers"));
            assert_eq!((encoded(), count("host_hits_total")), (were + 1.0, came + 1.0), "picture {number}");
        }
        with.settled(&before).await;

        for (number, (now, then)) in visit(&without, 0).await.iter().zip(&first).enumerate() {
            assert_same(now, then, &format!("picture {number} without a host tier"));
        }
        for (number, then) in [0, 1].into_iter().zip(&both) {
            // Bring the picture into the vision cache first, so that the new picture is in a
            // separate encoder batch, as in the other run.
            answer(&without.model, visited(number, 1)).await;
            let now = ask(&without.model, beside(number)).await.expect("the model answers");
            assert_same(&now, then, &format!("picture {number} and another"));
        }
    });
}

#[test]
fn vision_failures_during_copies_lose_no_request() {
    let metrics_log = MetricsLog::open();
    story(async {
        let patient = Intensity { restarts_max: 1000, back_off: std::time::Duration::ZERO, ..Intensity::default() };
        let stage =
            Stage::set(LoadOptions { intensity: patient, requests: Some(64), ..with_rows("blows", SOME) }).await;
        let without = Stage::set(with_rows("no blows", Bytes::ZERO)).await;
        visit(&stage, 0).await;
        let engine = stage.runtime.supervised().await.expect("the runtime answers").engines["blows"].clone();
        for round in 1..5 {
            let (first, later) = (visit(&without, round).await, visit(&without, 100 + round).await);
            let asked: Vec<_> = (0..PICTURES)
                .map(|number| {
                    let model = stage.model.clone();
                    tokio::spawn(async move { ask(&model, visited(number, round)).await })
                })
                .collect();
            let host_hits = || metrics_log.now("bursar_encoder_cache_host_hits_total{model=blows}");
            let were = host_hits();
            if round > 1 {
                // The visit after the previous fault has filled the host tier again.
                eventually("rows come back", async || host_hits() > were).await;
            }
            match round % 3 {
                0 => {
                    let (ended, end) = Responder::new();
                    engine.send_message(EngineMessage::KillLane { which: WhichLane::Vision, ended }).expect("an actor");
                    end.await.expect("the lane has ended");
                }
                1 => stage.model.serving().await.expect("the model serves").vision.expect("the demo model sees").kill(),
                _ => engine.send_message(EngineMessage::RefuseMemory(WhichLane::Vision)).expect("the engine lives"),
            }
            for (number, reply) in asked.into_iter().enumerate() {
                let reply = reply.await.expect("no panic").expect("the request is answered");
                assert_eq!(reply.text, first[number].text, "picture {number} in round {round}");
            }
            for (number, reply) in visit(&stage, 100 + round).await.iter().enumerate() {
                assert_eq!(reply.text, later[number].text, "picture {number} after round {round}");
            }
        }
        stage.runtime.unload("blows").await.expect("the model unloads");
        let ledger = stage.snapshot().await;
        assert_eq!((ledger.granted, ledger.host_granted), (Bytes::ZERO, Bytes::ZERO), "{ledger}");
    });
}

/// Runs more sequences than the KV cache (8,192 tokens) can hold at their full length. The short
/// replies before them make the scheduler's predictions optimistic, so the scheduler has to preempt
/// some sequences.
async fn crowded(name: &str, swap_space: Bytes) -> Vec<Whole> {
    let envelope = Envelope { sequences: 22, context_tokens: 512, step_tokens: 256, ..small_envelope() };
    let options = LoadOptions {
        name: Some(name.to_owned()),
        envelope: Some(envelope),
        swap_space,
        requests: Some(64),
        ..small()
    };
    let stage = Stage::set(options).await;
    let before = stage.snapshot().await;
    for number in 0..4 {
        answer(&stage.model, text(&format!("{number}?")).max_tokens(1).ignore_end()).await;
    }
    let long =
        |number: usize| text(&format!("Say {number}. ").repeat(30)).max_tokens(300).ignore_end().log_probabilities(1);
    let replies = join_all((0..22).map(|number| ask(&stage.model, long(number)))).await;
    stage.settled(&before).await;
    replies.into_iter().map(|reply| reply.expect("the model answers")).collect()
}

#[test]
fn preempted_replies_resume_from_the_host_unchanged() {
    let metrics_log = MetricsLog::open();
    story(async {
        let with = crowded("crowded", SOME).await;
        let preempted = metrics_log.now("bursar_preemptions_total{model=crowded,reason=blocks}");
        assert!(preempted > 0.0, "no sequence was preempted");
        let came_back = metrics_log.now("bursar_prefix_cache_host_hits_total{model=crowded}");
        assert!(came_back > 0.0, "{preempted} sequences were preempted, and no blocks came back");
        for (number, (with, without)) in with.iter().zip(&crowded("crowded alone", Bytes::ZERO).await).enumerate() {
            // On any device, the last bits of the log-probabilities depend on the other rows in the
            // step. Two runs can therefore differ in these bits even without a host tier.
            assert_eq!(with.text, without.text, "reply {number}");
            for (with, without) in with.tokens.iter().zip(&without.tokens) {
                let [with, without] = [with, without].map(|score| score.token.log_probability);
                assert!((with - without).abs() < 1e-3, "reply {number}: {with}, without {without}");
            }
        }
    });
}

#[test]
fn a_lane_or_scheduler_death_during_copies_loses_no_request() {
    story(async {
        let patient = Intensity { restarts_max: 1000, back_off: std::time::Duration::ZERO, ..Intensity::default() };
        let stage = Stage::set(LoadOptions { intensity: patient, ..for_one("deaths", SOME) }).await;
        let before = stage.snapshot().await;
        let mut expected = Vec::new();
        for number in 0..3 {
            expected.push(answer(&stage.model, other(number)).await);
        }
        let engine = stage.runtime.supervised().await.expect("the runtime answers").engines["deaths"].clone();
        for round in 0..6 {
            let asked: Vec<_> = (0..3)
                .map(|number| {
                    let model = stage.model.clone();
                    tokio::spawn(async move { ask(&model, other(number)).await })
                })
                .collect();
            if round % 2 == 0 {
                let (ended, end) = Responder::new();
                engine.send_message(EngineMessage::KillLane { which: WhichLane::Step, ended }).expect("an actor");
                end.await.expect("the lane has ended");
            } else {
                stage.model.serving().await.expect("the model serves").scheduler.kill();
            }
            for (number, reply) in asked.into_iter().enumerate() {
                assert_eq!(reply.await.expect("no panic").expect("an answer").text, expected[number], "{round}");
            }
        }
        stage.settled(&before).await;
    });
}

#[test]
fn host_memory_is_leased_and_released_on_unload() {
    story(async {
        let stage = Stage::set(for_one("leased", SOME)).await;
        let leased = stage.snapshot().await;
        let of_host = leased.of_class(&Class::HostKv);
        let slot = Bytes::kib(32) / ranks() as u64;
        assert!(of_host <= SOME * ranks() as u64 && of_host + slot * 4 > SOME, "{of_host}");
        assert_eq!(leased.host_granted, of_host);
        assert_eq!(leased.granted, stage.device.counts().backed, "host leases are not counted as device memory");
        stage.runtime.unload("leased").await.expect("the model unloads");
        assert_eq!(stage.snapshot().await.host_granted, Bytes::ZERO);
    });
}

#[test]
fn more_swap_space_than_host_memory_is_refused_before_loading() {
    story(async {
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(placed(&device())),
            host_bytes: Bytes::mib(8),
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let loaded = runtime.load_with(ModelSource::demo(), for_one("too much", SOME), |_| {}).await.map(drop);
        let error = loaded.expect_err("the swap space exceeds the host memory");
        let bursar::RuntimeError::Start(start) = &error else { panic!("{error:?}") };
        assert!(matches!(**start, StartError::HostMemory { available, .. } if available == Bytes::mib(8)), "{start:?}");
        assert!(error.hint().contains("swap_space"), "{}", error.hint());
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!((ledger.granted, ledger.host_granted), (Bytes::ZERO, Bytes::ZERO));
    });
}
