//! Models served by two GPUs, or by two ranks on the only one, which checks all but the links: their replies, those of a
//! mixture too, lanes that die or are refused a launch, a neighbour on one GPU, and that every byte comes home. Without a GPU, each story says so and passes.

mod gpu;

use std::{path::Path, sync::Arc, time::Duration};

use bursar_actors::{
    chat::{Chat, ChatEvent, ModelHandle},
    engine::{EngineMessage, LoadOptions, WhichLane},
    responder::Responder,
    runtime::{DeviceChoice, ModelSource, Runtime, RuntimeConfig},
    supervise::Intensity,
};
use bursar_budgets::{Bytes, Class, CudaDevice, Device, DeviceGroup};
use gpu::{
    Stage, answer, eventually,
    neighbour::{self, Neighbour},
    options, picture, question, story,
};

/// The test that is the neighbour of others.
const NEIGHBOUR: &str = "a_neighbour_takes_the_requested_bytes";

/// Two GPUs, or one twice.
fn pair(first: &Arc<CudaDevice>) -> Vec<Arc<CudaDevice>> {
    let second = CudaDevice::open(1).or_else(|_| CudaDevice::open(0)).expect("the first one opens");
    println!("ranks on {} and {}", first.label(), second.label());
    vec![first.clone(), Arc::new(second)]
}

async fn served(devices: &[Arc<CudaDevice>], source: ModelSource) -> (Runtime, ModelHandle) {
    loaded(devices, source, roomy()).await
}

async fn loaded(devices: &[Arc<CudaDevice>], source: ModelSource, options: LoadOptions) -> (Runtime, ModelHandle) {
    let ranks = devices.iter().map(|device| device.clone() as Arc<dyn Device>).collect();
    let group = DeviceGroup::of(ranks, "cuda:a,b").expect("of one kind");
    let config = RuntimeConfig { device: DeviceChoice::Custom(Arc::new(group)), ..RuntimeConfig::default() };
    let runtime = Runtime::start(config).await.expect("it starts");
    let intensity = Intensity { restarts_max: 100, back_off: Duration::ZERO, ..Intensity::default() };
    let options = LoadOptions { intensity, ..options };
    let model = runtime.load_with(source, options, |_| {}).await.expect("it starts");
    (runtime, model)
}

fn roomy() -> LoadOptions {
    LoadOptions { kv_tokens: Some(4096), ..options() }
}

fn chats() -> Vec<Chat> {
    vec![
        question("Who are you?", 24),
        question("Describe the picture.", 30).image(picture(3)),
        Chat::new().user("Tell me about the sea.").temperature(1.0).seed(7).max_tokens(40),
    ]
}

async fn answers(model: &ModelHandle) -> Vec<String> {
    let mut answers = Vec::new();
    for chat in chats() {
        answers.push(answer(model, chat).await.expect("it answers"));
    }
    answers
}

/// The log-probability of a reply's first token.
async fn first(model: &ModelHandle) -> f32 {
    let mut reply = model.chat(question("Who are you?", 2).log_probabilities(0)).await.expect("it is accepted");
    loop {
        match reply.next().await.expect("it goes on").expect("it succeeds") {
            ChatEvent::Token(score) => return score.token.log_probability,
            _ => continue,
        }
    }
}

#[test]
fn replies_are_the_same_each_time_and_close_to_one_ranks() {
    story(async |Stage { runtime, device }| {
        let mixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qwen3_vl_moe");
        for source in [ModelSource::demo(), ModelSource::folder(mixture)] {
            let model = runtime.load_with(source.clone(), roomy(), |_| {}).await.expect("it starts");
            let of_one = first(&model).await;
            runtime.unload(model.name()).await.expect("it unloads");
            let devices = pair(&device);
            let (ranks, model) = served(&devices, source).await;
            let (said, of_two) = (answers(&model).await, first(&model).await);
            println!("{said:?}; the first token: {of_one} on one rank, {of_two} on two");
            assert!((of_one - of_two).abs() < 0.1, "{of_one} on one rank, {of_two} on two");
            for _ in 0..3 {
                assert_eq!(answers(&model).await, said);
            }
            let ledger = ranks.budget().snapshot().await.expect("the budget answers");
            println!("{ledger}");
            ranks.shutdown().await;
            for device in &devices {
                assert_eq!(device.counts().backed, Bytes::ZERO, "{}", device.label());
            }
        }
    });
}

/// All tokens of a reply with the bits of their log-probabilities. Replies with one salt share what is cached.
async fn scored(model: &ModelHandle, tokens: usize, salt: &str) -> Vec<(u32, u32)> {
    let chat = question("Tell me about the sea.", tokens).log_probabilities(0).cache_salt(salt);
    let (mut reply, mut scores) = (model.chat(chat).await.expect("it is accepted"), Vec::new());
    while let Some(event) = reply.next().await {
        if let ChatEvent::Token(score) = event.expect("it goes on") {
            scores.push((score.token.id, score.token.log_probability.to_bits()));
        }
    }
    scores
}

#[test]
fn a_thousand_steps_have_the_same_bits_in_two_runs() {
    story(async |Stage { device, .. }| {
        let devices = pair(&device);
        let (ranks, model) = served(&devices, ModelSource::demo()).await;
        // The demo's context holds some 500 tokens.
        let (model, mut runs) = (&model, Vec::new());
        // A run that found its prompt cached would compute it in other steps, which round otherwise.
        for salt in ["one", "other"] {
            let replies =
                [scored(model, 350, salt).await, scored(model, 350, salt).await, scored(model, 350, salt).await];
            runs.push(replies.concat());
        }
        assert_eq!(runs[0].len(), 1050);
        let differs = runs[0].iter().zip(&runs[1]).position(|(one, other)| one != other);
        assert!(runs[0] == runs[1], "the runs differ from token {differs:?} on");
        ranks.shutdown().await;
    });
}

#[test]
fn a_neighbour_takes_the_requested_bytes() {
    neighbour::live();
}

#[test]
fn a_neighbour_on_one_gpu_makes_all_ranks_shrink_and_grow_again() {
    story(async |Stage { device, .. }| {
        let devices = pair(&device);
        if devices[0].label() == devices[1].label() {
            return println!("skipped, this wants two GPUs");
        }
        let (ranks, model) = loaded(&devices, ModelSource::demo(), options()).await;
        let kv = async || ranks.budget().measure().await.expect("the budget answers").of_class(&Class::Kv);
        let (before, said, wanted) = (kv().await, answers(&model).await, Bytes::gib(8));
        // It is on the first GPU alone.
        let mut neighbour = Neighbour::moves_in(NEIGHBOUR);
        let has = async || tokio::task::block_in_place(|| neighbour.hold(wanted)) == wanted;
        eventually("the neighbour has it", has).await;
        eventually("all is made room for", async || {
            let now = ranks.budget().measure().await.expect("the budget answers");
            now.canary == now.canary_wanted && now.deficit.is_zero() && now.foreign >= wanted
        })
        .await;
        let backed: Vec<_> = devices.iter().map(|device| device.counts().backed).collect();
        println!("{before} of keys and values before, {} now; {backed:?} backed", kv().await);
        assert!(kv().await + Bytes::gib(6) < before && backed[0] == backed[1]);
        assert_eq!(answers(&model).await, said);
        drop(neighbour);
        eventually("all is regained", async || kv().await == before).await;
        assert_eq!(answers(&model).await, said);
        ranks.shutdown().await;
    });
}

#[test]
fn a_lane_that_loses_a_rank_starts_again_and_no_request_is_lost() {
    story(async |Stage { device, .. }| {
        let devices = pair(&device);
        let (ranks, model) = served(&devices, ModelSource::demo()).await;
        let said = answers(&model).await;
        let backed: Vec<_> = devices.iter().map(|device| device.counts().backed).collect();
        let engine = ranks.supervised().await.expect("the runtime answers").engines["demo"].clone();
        for which in [WhichLane::Step, WhichLane::Vision] {
            let (ended, end) = Responder::new();
            engine.send_message(EngineMessage::KillLane { which, ended }).expect("the engine lives");
            end.await.expect("all of its threads have ended");
            assert_eq!(answers(&model).await, said, "{which:?}");
        }
        // In the middle of a pass: the other rank waits for as long as it has patience.
        let refused = EngineMessage::FailLaunches { which: WhichLane::Step, after: 7, count: 1 };
        engine.send_message(refused).expect("the engine lives");
        assert_eq!(answers(&model).await, said);
        assert_eq!(devices.iter().map(|device| device.counts().backed).collect::<Vec<_>>(), backed);
        ranks.shutdown().await;
        for device in &devices {
            assert_eq!(device.counts().backed, Bytes::ZERO, "{}", device.label());
        }
    });
}
