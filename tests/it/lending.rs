//! Models that share a device lend each other KV cache memory while they are idle, and release
//! memory for a waiting tenant, a load or a wake-up.

use bursar_budgets::testing::HostControl;
use std::{sync::Arc, time::Duration};

use bursar::{
    Bytes, Class, DeviceChoice, Envelope, FaultInjection, HostDevice, LoadOptions, ModelHandle, ModelSource, Runtime,
    RuntimeConfig, Serving, SleepLevel, Snapshot, WatchOptions,
    messages::{EngineMessage, SchedulerMessage},
};
use tokio::task::JoinHandle;

use crate::{
    metrics_log::MetricsLog,
    stage::{Whole, about, answer, ask, device_of, eventually, placed, ranks, small, small_envelope, story, text},
};

/// Options for a model whose KV cache has no fixed size and can hold many replies.
fn shared(name: &str, memory_fraction: f64) -> LoadOptions {
    let envelope = Envelope { sequences: 22, context_tokens: 768, step_tokens: 128, ..small_envelope() };
    LoadOptions {
        name: Some(name.to_owned()),
        envelope: Some(envelope),
        kv_tokens: None,
        memory_fraction: Some(memory_fraction),
        requests: Some(64),
        ..small()
    }
}

struct Fixture {
    device: Arc<HostDevice>,
    runtime: Runtime,
    before: Option<Snapshot>,
}

impl Fixture {
    async fn of(capacity: Bytes) -> Fixture {
        Fixture::where_models_sleep(capacity, None).await
    }

    /// Starts a runtime whose models may put each other to sleep. `turn` is the value of
    /// [`RuntimeConfig::sleep_for_memory`].
    async fn where_models_sleep(capacity: Bytes, turn: Option<Duration>) -> Fixture {
        let device = device_of((capacity / ranks() as u64).round_up(Bytes::mib(1)));
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(placed(&device)),
            watch: WatchOptions { every: Duration::from_millis(5), patience: Duration::from_millis(60) },
            sleep_for_memory: turn,
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        Fixture { device, runtime, before: None }
    }

    async fn with(&mut self, options: LoadOptions) -> ModelHandle {
        let model = self.runtime.load_with(ModelSource::demo(), options, |_| {}).await.expect("the model starts");
        self.before = Some(self.ledger().await);
        model
    }

    /// A device that the models "busy" and "idle" share, with the bytes of each model's KV cache.
    async fn of_two() -> (Self, [(ModelHandle, Bytes); 2]) {
        let mut fixture = Fixture::of(Bytes::mib(84)).await;
        let [busy, idle] = [fixture.with(shared("busy", 0.4)).await, fixture.with(shared("idle", 1.0)).await];
        let both = [(busy, fixture.kv("busy").await), (idle, fixture.kv("idle").await)];
        (fixture, both)
    }

    async fn ledger(&self) -> Snapshot {
        self.runtime.budget().snapshot().await.expect("the budget answers")
    }

    /// The bytes of a model's KV cache.
    async fn kv(&self, model: &str) -> Bytes {
        let ledger = self.ledger().await;
        let of_it = |lease: &&bursar::LeaseLine| lease.model.as_str() == model && lease.class == Class::Kv;
        ledger.leases.iter().filter(of_it).map(|lease| lease.bytes).sum()
    }

    /// Kills a model's engine and returns its serving actors before and after.
    async fn engine_dies(&self, name: &str, model: &ModelHandle) -> [Serving; 2] {
        let before = model.serving().await.expect("the model serves");
        let engine = self.runtime.supervised().await.expect("the runtime answers").engines[name].clone();
        drop(engine.send_message(EngineMessage::InjectFault(FaultInjection::Panic)));
        let after = model.serving_after(before.generation).await.expect("the model starts again");
        [before, after]
    }

    /// Waits until all leases are as they were when the last model became READY.
    async fn regained(&self) {
        let before = self.before.as_ref().expect("a model is loaded");
        eventually("all leases are as at READY, and backed", async || {
            self.ledger().await == *before && self.device.counts().backed == before.granted
        })
        .await;
    }
}

/// Starts more chats than one model's share of the device can hold, but not more than the shares of
/// both models can hold.
fn crowd(model: &ModelHandle) -> Vec<JoinHandle<Whole>> {
    let long = |number: usize| text(&format!("Say {number}. ").repeat(25)).max_tokens(560).ignore_end();
    let ask = |number| {
        let model = model.clone();
        tokio::spawn(async move { ask(&model, long(number)).await.expect("the model answers") })
    };
    (0..22).map(ask).collect()
}

#[test]
fn an_idle_model_lends_kv_memory_until_its_next_requests() {
    let metrics_log = MetricsLog::open();
    story(async {
        let (fixture, [(busy, own), (idle, lent)]) = Fixture::of_two().await;
        let expected = answer(&idle, about(1)).await;
        let alone = answer(&busy, text(&"Say 3. ".repeat(25)).max_tokens(560).ignore_end()).await;
        let replies = crowd(&busy);
        // 768 tokens of 2 KiB each, divided among the ranks.
        let floor = Bytes::kib(1536) / ranks() as u64;
        eventually("the busy model has nearly all KV cache memory", async || {
            let (busy, idle) = (fixture.kv("busy").await, fixture.kv("idle").await);
            busy > own && busy + idle <= own + lent && idle <= floor
        })
        .await;
        eventually("the metric shows the borrowed bytes", async || {
            metrics_log.now("bursar_kv_borrowed_bytes{model=busy}") > 0.0
        })
        .await;
        assert_eq!(answer(&idle, about(1)).await, expected);
        eventually("the lender has its share again", async || {
            // Sequential requests keep the model from becoming idle.
            answer(&idle, about(2)).await;
            fixture.kv("idle").await == lent && fixture.kv("busy").await <= own
        })
        .await;
        for (number, reply) in replies.into_iter().enumerate() {
            let reply = reply.await.expect("no panic");
            assert_eq!(reply.usage.completion_tokens, 560);
            assert!(number != 3 || reply.text == alone, "a reply is the same with borrowed blocks");
        }
        // The model may have lent memory again in the meantime.
        answer(&idle, about(3)).await;
        fixture.regained().await;
        fixture.runtime.shutdown().await;
    });
}

#[test]
fn lent_memory_returns_when_the_lender_unloads_or_dies() {
    story(async {
        let (fixture, [(busy, own), (idle, lent)]) = Fixture::of_two().await;
        let replies = crowd(&busy);
        eventually("the busy model borrows", async || fixture.kv("busy").await > own).await;
        // The lender's engine dies. Its successor gets the lender's share.
        let [before, after] = fixture.engine_dies("idle", &idle).await;
        assert_eq!(after.record.kv_blocks, before.record.kv_blocks);
        assert!(fixture.kv("idle").await <= lent);
        eventually("the busy model borrows again", async || fixture.kv("busy").await > own).await;
        // The borrower's scheduler dies while it holds borrowed blocks.
        let scheduler = busy.serving().await.expect("the model serves").scheduler.clone();
        drop(scheduler.send_message(SchedulerMessage::InjectFault(FaultInjection::Panic)));
        fixture.runtime.unload("idle").await.expect("the model is loaded");
        eventually("nothing is borrowed", async || fixture.kv("busy").await == own).await;
        for reply in replies {
            assert_eq!(reply.await.expect("no panic").usage.completion_tokens, 560);
        }
        assert_eq!(fixture.device.counts().backed, fixture.ledger().await.granted);
        fixture.runtime.shutdown().await;
    });
}

#[test]
fn models_keep_their_device_fractions_through_deaths_and_sleep() {
    story(async {
        let mut fixture = Fixture::of(Bytes::mib(84)).await;
        let first = fixture.with(shared("first", 0.4)).await;
        let _second = fixture.with(shared("second", 1.0)).await;
        let (own, other) = (fixture.kv("first").await, fixture.kv("second").await);
        let expected = answer(&first, about(1)).await;
        for level in [None, Some(SleepLevel::Level1), Some(SleepLevel::Level2), None] {
            match level {
                Some(level) => first.sleep(level, Duration::from_secs(60)).await.expect("the model sleeps"),
                None => drop(fixture.engine_dies("first", &first).await),
            }
            assert_eq!(answer(&first, about(1)).await, expected, "after {level:?}");
            assert_eq!((fixture.kv("first").await, fixture.kv("second").await), (own, other), "after {level:?}");
        }
        fixture.runtime.shutdown().await;
    });
}

#[test]
fn only_an_idle_model_gives_memory_to_a_waiting_tenant() {
    story(async {
        let mut fixture = Fixture::of(Bytes::mib(40)).await;
        let model = fixture.with(shared("demo", 1.0)).await;
        let ledger = fixture.ledger().await;
        let (kv, more) = (ledger.of_class(&Class::Kv), Bytes::mib(2));
        let wanted = ledger.free + more;
        let budget = fixture.runtime.budget().clone();
        let expected = answer(&model, about(1)).await;
        let tenant = budget.lease(Class::external("index"), wanted).await.expect("the idle model gives memory");
        assert!(fixture.kv("demo").await <= kv - more, "the model gave memory to the tenant");
        assert_eq!(answer(&model, about(1)).await, expected, "the reply is the same with less memory");
        drop(tenant);
        fixture.regained().await;
        // While a request does not end, the model keeps its memory.
        let unread = model.chat(about(1).max_tokens(200).temperature(20.0).top_k(0).seed(1)).await.expect("accepted");
        let waits = tokio::spawn(async move { budget.lease(Class::external("index"), wanted).await.map(drop) });
        eventually("the tenant's lease request waits", async || fixture.ledger().await.waiting.len() == 1).await;
        let looked = fixture.runtime.budget().measure().await.expect("the budget answers");
        assert_eq!(looked.of_class(&Class::Kv), kv);
        drop(unread);
        waits.await.expect("no panic").expect("the tenant gets memory when the model is idle");
        fixture.regained().await;
        fixture.runtime.shutdown().await;
    });
}

#[test]
fn a_load_recalls_borrowed_memory_and_replies_continue() {
    story(async {
        let (fixture, [(busy, own), (idle, lent)]) = Fixture::of_two().await;
        let expected = answer(&idle, about(1)).await;
        let replies = crowd(&busy);
        let needed = Bytes::mib(16) / ranks() as u64;
        eventually("the model borrows more than a load needs", async || fixture.kv("busy").await > own + needed).await;
        let full = fixture.ledger().await;
        let small = LoadOptions { name: Some("third".to_owned()), ..small() };
        let third = fixture.runtime.load_with(ModelSource::demo(), small, |_| {}).await.expect("the load succeeds");
        let ledger = fixture.ledger().await;
        let taken: Bytes =
            ledger.leases.iter().filter(|lease| lease.model.as_str() == "third").map(|lease| lease.bytes).sum();
        assert!(full.free < taken, "{taken} were taken, and {} were free\n{ledger}", full.free);
        assert_eq!([answer(&third, about(1)).await, answer(&idle, about(1)).await], [expected.clone(), expected]);
        for reply in replies {
            assert_eq!(reply.await.expect("no panic").usage.completion_tokens, 560);
        }
        fixture.runtime.unload("third").await.expect("the model is loaded");
        eventually("all have their shares again", async || {
            answer(&idle, about(3)).await;
            (fixture.kv("busy").await, fixture.kv("idle").await) == (own, lent)
        })
        .await;
        fixture.runtime.shutdown().await;
    });
}

#[test]
fn an_idle_model_shrinks_for_loads_and_wakes_without_sleeping() {
    story(async {
        // Each model could put the other model to sleep if nothing else freed enough memory.
        let mut fixture = Fixture::where_models_sleep(Bytes::mib(40), Some(Duration::from_millis(1))).await;
        let first = fixture.with(shared("first", 1.0)).await;
        let (kv, expected) = (fixture.kv("first").await, answer(&first, about(1)).await);
        let small = LoadOptions { name: Some("second".to_owned()), ..small() };
        let second = fixture.runtime.load_with(ModelSource::demo(), small, |_| {}).await.expect("the load succeeds");
        for _ in 0..2 {
            assert!(fixture.kv("first").await < kv && first.is_asleep().is_none());
            for model in [&first, &second] {
                assert_eq!(answer(model, about(1)).await, expected);
            }
            second.sleep(SleepLevel::Level1, Duration::from_secs(60)).await.expect("the model sleeps");
            eventually("the first model has its memory back", async || fixture.kv("first").await == kv).await;
            second.wake().await.expect("the model wakes up");
        }
        let events = serde_json::json!(fixture.runtime.recent_events());
        let slept = |event: &&serde_json::Value| event["event"] == "asleep" && event["model"] == "first";
        assert_eq!(events.as_array().expect("a list").iter().filter(slept).count(), 0, "{events}");
        fixture.runtime.unload("second").await.expect("the model is loaded");
        eventually("the first model has its memory back, and all leases are backed", async || {
            fixture.kv("first").await == kv && fixture.device.counts().backed == fixture.ledger().await.granted
        })
        .await;
        fixture.runtime.shutdown().await;
    });
}
