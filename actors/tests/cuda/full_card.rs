//! A model that fills a whole GPU except for its reserve. The model serves, a dead lane restarts in
//! the remaining memory, and all memory is returned. Without a GPU, the test prints a note and
//! passes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use crate::gpu::TURN;
use bursar_actors::{
    chat::{Chat, ChatEvent, Image, ModelHandle},
    compute::graph::buckets,
    engine::{EngineMessage, LoadOptions, WhichLane},
    profile::RESERVE_MAX,
    responder::Responder,
    runtime::{DeviceChoice, ModelSource, Runtime, RuntimeConfig, RuntimeError},
};
use bursar_budgets::{Bytes, Class, DeviceError, Hint};
use bursar_model::{Envelope, registry::random_checkpoint};
use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// The values of all gauges and counters of this process, by name.
#[derive(Clone, Default)]
struct MetricsLog(Arc<Mutex<BTreeMap<String, f64>>>);

struct MetricValue(String, MetricsLog);

impl MetricValue {
    fn change(&self, change: impl FnOnce(f64) -> f64) {
        let mut all = self.1.0.lock().expect("the lock is not poisoned");
        let value = all.entry(self.0.clone()).or_default();
        *value = change(*value);
    }
}

impl GaugeFn for MetricValue {
    fn increment(&self, by: f64) {
        self.change(|value| value + by);
    }

    fn decrement(&self, by: f64) {
        self.change(|value| value - by);
    }

    fn set(&self, to: f64) {
        self.change(|_| to);
    }
}

impl CounterFn for MetricValue {
    fn increment(&self, by: u64) {
        self.change(|value| value + by as f64);
    }

    fn absolute(&self, to: u64) {
        self.change(|_| to as f64);
    }
}

impl Recorder for MetricsLog {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(MetricValue(key.name().to_owned(), self.clone())))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(MetricValue(key.name().to_owned(), self.clone())))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

impl MetricsLog {
    fn open() -> MetricsLog {
        static METRICS_LOG: OnceLock<MetricsLog> = OnceLock::new();
        let open = || {
            let metrics_log = MetricsLog::default();
            metrics::set_global_recorder(metrics_log.clone()).expect("no other recorder is set in this process");
            metrics_log
        };
        METRICS_LOG.get_or_init(open).clone()
    }

    fn value(&self, name: &str) -> f64 {
        self.0.lock().expect("the lock is not poisoned").get(name).copied().unwrap_or_default()
    }
}

/// Checks that the reply has the requested number of tokens, whatever tokens
/// the random weights choose.
async fn answer(model: &ModelHandle, chat: Chat, tokens: usize) {
    let mut reply = model.chat(chat.temperature(0.0).max_tokens(tokens).ignore_end()).await.expect("an accepted chat");
    while let Some(event) = reply.next().await {
        if let ChatEvent::Done { usage, .. } = event.expect("the reply has no error") {
            return assert_eq!(usage.completion_tokens, tokens);
        }
    }
    panic!("a reply has an end")
}

fn shown(side: u32) -> Chat {
    let pixels: Vec<u8> = (0..3 * side * side).map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    Chat::new().user("Describe.").image(Image::from_rgb(side, side, pixels).expect("the byte count matches the size"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_model_that_fills_the_card_serves_and_recaptures_graphs() {
    let _turn = TURN.lock().await;
    let metrics_log = MetricsLog::open();
    let config = RuntimeConfig { device: DeviceChoice::Cuda(0), ..RuntimeConfig::default() };
    let runtime = match Runtime::start(config).await {
        Ok(runtime) => runtime,
        Err(RuntimeError::Device(error @ DeviceError::NoDevice { .. })) => {
            println!("skipped, {error}; {}", error.hint().expect("the error has a hint"));
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let budget = runtime.budget().clone();
    let empty = budget.snapshot().await.expect("the budget answers");
    let checkpoint = random_checkpoint("qwen2.5-vl-7b", 7).expect("a known shape");
    let sequences = 32;
    let envelope =
        Envelope { sequences, largest_pictures: 1, picture_patches: 5_476, launch_patches: 10_952, ..Envelope::gpu() };
    let options = LoadOptions { name: Some("seven".into()), envelope: Some(envelope), ..LoadOptions::default() };
    let model = runtime.load_with(ModelSource::random(checkpoint), options, |_| {}).await.expect("the model starts");
    let full = budget.measure().await.expect("the budget answers");
    println!("{full}\nthe driver has {} free", runtime.device().memory().expect("the device reports its memory").free);
    // The KV cache of each of the 28 layers is rounded to whole pages of 2 MiB.
    let rounding = Bytes::mib(2 * 28);
    let reserve = RESERVE_MAX.min(Bytes(full.total.0 / 64));
    assert!((reserve..=reserve + rounding).contains(&full.free), "{} are free in addition to the canary", full.free);
    let sizes = buckets(sequences).len() as f64;
    assert_eq!(metrics_log.value("bursar_graphs_captured"), sizes);

    let steps = || (metrics_log.value("bursar_graph_replays_total"), metrics_log.value("bursar_eager_steps_total"));
    assert_eq!(steps(), (0.0, 0.0), "no request has been sent yet");
    answer(&model, Chat::new().user("Who are you?"), 64).await;
    let (replays, eager) = steps();
    println!("a prompt and 64 tokens: {replays} steps by a graph, {eager} launch by launch");
    assert!(replays >= 63.0, "each token after the first comes from a graph: {replays}");
    assert!(eager > 0.0, "the step of a prompt has no graph");
    answer(&model, shown(1036), 8).await;
    let engine =
        runtime.supervised().await.expect("the runtime answers").engines.remove("seven").expect("a loaded model");
    // These pictures are new. A picture that was sent before is cached and would not reach the
    // vision lane.
    for (which, side) in [(WhichLane::Step, 1008), (WhichLane::Vision, 980)] {
        let (ended, end) = Responder::new();
        engine.send_message(EngineMessage::KillLane { which, ended }).expect("the engine is running");
        end.await.expect("the engine has the lane");
        answer(&model, Chat::new().user("Who are you now?"), 64).await;
        answer(&model, shown(side), 8).await;
    }
    let (deadline, mut looks) =
        (Instant::now() + Duration::from_secs(30), tokio::time::interval(Duration::from_millis(5)));
    while metrics_log.value("bursar_graphs_captured") < sizes {
        assert!(Instant::now() < deadline, "{} of {sizes} sizes captured", metrics_log.value("bursar_graphs_captured"));
        looks.tick().await;
    }
    assert_eq!(metrics_log.value("bursar_graphs_not_recaptured_total"), 0.0);
    let now = budget.measure().await.expect("the budget answers");
    println!("after both lanes have died:\n{now}");
    assert_eq!((now.granted, now.canary), (full.granted, full.canary), "the reserve covered the new bytes");
    runtime.unload("seven").await.expect("the model unloads");
    let after = budget.measure().await.expect("the budget answers");
    assert_eq!((after.granted, after.of_class(&Class::Kv)), (empty.granted, Bytes::ZERO), "{after}");
    runtime.shutdown().await;
}
