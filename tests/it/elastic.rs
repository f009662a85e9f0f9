//! Another process takes memory of a GPU that a model fills, and later frees it.

use bursar_budgets::testing::HostControl;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bursar::{
    Bytes, Chat, Class, DeviceChoice, HostDevice, Intensity, KvCacheType, LoadOptions, ModelHandle, Runtime,
    RuntimeConfig, Snapshot, WatchOptions,
};
use tokio::task::JoinHandle;

use crate::metrics_log::MetricsLog;
use crate::stage::{about, answer, demo, device_of, eventually, placed, ranks, small, small_envelope, story, text};

mod deaths;
mod events;
mod recorded;
mod refused;

/// Options of a watch that probes the device often and waits only a short time before it returns
/// free memory to the KV cache.
fn watchful() -> WatchOptions {
    WatchOptions { every: Duration::from_millis(2), patience: Duration::from_millis(60) }
}

/// An intensity without a crash loop limit and without waits.
fn patient() -> Intensity {
    Intensity { restarts_max: 10_000, back_off: Duration::ZERO, ..Intensity::default() }
}

/// Options with which the KV cache takes nine tenths of the free memory of a device that holds a
/// few dozen sequences.
fn filling() -> LoadOptions {
    let options = small();
    LoadOptions { kv_tokens: None, intensity: patient(), engine_intensity: patient(), ..options }
}

/// The minimum KV cache, one sequence of 256 tokens: two heads with 256 bytes per token in each of
/// four layers, divided among the ranks.
fn floor() -> Bytes {
    (Bytes::kib(64) * 2 / ranks() as u64).round_up(Bytes::kib(64)) * 4
}

/// A device that a model fills, and whose memory another process also uses.
struct FilledDevice {
    device: Arc<HostDevice>,
    runtime: Runtime,
    model: ModelHandle,
    /// The ledger when the model was READY.
    before: Snapshot,
}

impl FilledDevice {
    async fn filled(watch: WatchOptions) -> FilledDevice {
        FilledDevice::with(watch, filling()).await
    }

    async fn with(watch: WatchOptions, options: LoadOptions) -> FilledDevice {
        let (device, runtime) = FilledDevice::empty(watch).await;
        let model = demo(&runtime, options).await;
        let before = runtime.budget().snapshot().await.expect("the budget answers");
        FilledDevice { device, runtime, model, before }
    }

    async fn empty(watch: WatchOptions) -> (Arc<HostDevice>, Runtime) {
        let device = device_of(Bytes::mib(24));
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(placed(&device)),
            watch,
            budget_intensity: patient(),
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        (device, runtime)
    }

    async fn ledger(&self) -> Snapshot {
        self.runtime.budget().snapshot().await.expect("the budget answers")
    }

    async fn kv(&self) -> Bytes {
        self.ledger().await.of_class(&Class::Kv)
    }

    /// Takes `bytes` as another process would: it takes the memory that is free, and tries again
    /// until it has the rest.
    async fn other_process_takes(&self, bytes: Bytes) {
        let mut left = bytes;
        eventually("the other process gets the memory that it asks for", async || {
            left -= self.device.foreign_takes(left);
            left.is_zero()
        })
        .await;
    }

    /// Waits until nothing is owed and no change is in progress. Leased bytes
    /// then equal backed bytes.
    async fn quiet(&self) -> Snapshot {
        eventually("the canary has its full size, and all leased memory is backed", async || {
            let ledger = self.runtime.budget().measure().await.expect("the budget answers");
            let foreign = self.device.counts().foreign;
            ledger.canary == ledger.canary_wanted
                && ledger.foreign == foreign
                && ledger.granted == self.device.counts().backed
        })
        .await;
        self.ledger().await
    }

    /// Waits until the ledger and the KV cache have the sizes that they had at READY.
    async fn regained(&self) {
        eventually("all is regained", async || {
            // The order of growth: blocks are leased, then backed, then used.
            let serving = self.model.serving().await.expect("the model serves");
            let (reply, usage) = bursar_actors::responder::Responder::new();
            drop(serving.scheduler.send_message(bursar::messages::SchedulerMessage::KvUse(reply)));
            let is_used = usage.await.is_ok_and(|usage| usage.blocks == serving.record.kv_blocks);
            // Another model may still be backing memory that it was granted.
            is_used && self.ledger().await == self.before && self.device.counts().backed == self.before.granted
        })
        .await;
    }
}

/// Several tasks, each of which runs one chat after another until the test has seen enough.
struct Crowd {
    enough: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    chats: Vec<JoinHandle<()>>,
}

impl Crowd {
    fn of(model: &ModelHandle, expected: &Arc<Vec<String>>, chat: fn(u32) -> Chat) -> Crowd {
        let (enough, answers) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let talk = |first: usize| {
            let (model, expected) = (model.clone(), expected.clone());
            let (enough, answers) = (enough.clone(), answers.clone());
            tokio::spawn(async move {
                for number in (0..expected.len()).cycle().skip(first) {
                    if enough.load(Relaxed) {
                        return;
                    }
                    let reply = answer(&model, chat(number as u32)).await;
                    assert_eq!(reply, expected[number], "chat {number}");
                    answers.fetch_add(1, Relaxed);
                }
            })
        };
        let chats = (0..6).map(talk).collect();
        Crowd { enough, answers, chats }
    }

    /// Waits for some more answers.
    async fn goes_on(&self) {
        let before = self.answers.load(Relaxed);
        eventually("chats are still answered", async || self.answers.load(Relaxed) >= before + 3).await;
    }

    /// Waits until all chats have ended, and checks that each reply was the
    /// same as without disturbance.
    async fn finish(self) {
        self.enough.store(true, Relaxed);
        for chat in self.chats {
            chat.await.expect("no request fails, and each answer is the same");
        }
        assert!(self.answers.load(Relaxed) >= 6, "each chat has had at least one answer");
    }
}

async fn undisturbed(model: &ModelHandle, chats: u32, chat: fn(u32) -> Chat) -> Arc<Vec<String>> {
    let mut expected = Vec::new();
    for number in 0..chats {
        expected.push(answer(model, chat(number)).await);
    }
    Arc::new(expected)
}

/// Long greedy chats that begin differently.
fn long(number: u32) -> Chat {
    text(&format!("{number} Tell me of {number} things. ").repeat(3)).max_tokens(70).ignore_end()
}

fn of_a_picture(number: u32) -> Chat {
    about(number).max_tokens(40).ignore_end()
}

#[test]
fn another_process_takes_and_returns_memory_stepwise_during_chats() {
    [KvCacheType::Auto, KvCacheType::Fp8].into_iter().for_each(takes_and_returns_memory_stepwise);
}

fn takes_and_returns_memory_stepwise(kv_cache_dtype: KvCacheType) {
    story(async {
        let filled = FilledDevice::with(watchful(), LoadOptions { kv_cache_dtype, ..filling() }).await;
        let expected = undisturbed(&filled.model, 9, long).await;
        let crowd = Crowd::of(&filled.model, &expected, long);
        let (kv, free) = (filled.kv().await, filled.before.free);
        let mut taken = Bytes::ZERO;
        for step in [Bytes::mib(1), Bytes::mib(2), Bytes::mib(4)] {
            filled.other_process_takes(step).await;
            taken += step;
            let now = filled.quiet().await;
            let given = kv - now.of_class(&Class::Kv);
            assert!(given >= taken.saturating_sub(free), "{given} given, {taken} taken, {free} were free: {now}");
            assert!(given <= taken + filled.before.canary_wanted, "not much more is given than was taken: {now}");
            crowd.goes_on().await;
        }
        assert_eq!(filled.device.foreign_gives_back(taken), taken);
        filled.regained().await;
        crowd.finish().await;
    });
}

#[test]
fn another_process_comes_and_goes_during_picture_chats() {
    story(async {
        let filled = FilledDevice::filled(watchful()).await;
        let expected = undisturbed(&filled.model, 8, of_a_picture).await;
        let crowd = Crowd::of(&filled.model, &expected, of_a_picture);
        for _ in 0..2 {
            filled.other_process_takes(Bytes::mib(6)).await;
            filled.quiet().await;
            crowd.goes_on().await;
            filled.device.foreign_gives_back(Bytes::mib(6));
            filled.regained().await;
        }
        crowd.finish().await;
    });
}

#[test]
fn another_process_taking_everything_leaves_the_floor_and_requests_finish() {
    story(async {
        let (metrics_log, name) = (MetricsLog::open(), Some("floor".to_owned()));
        let filled = FilledDevice::with(watchful(), LoadOptions { name, ..filling() }).await;
        let expected = undisturbed(&filled.model, 6, long).await;
        let crowd = Crowd::of(&filled.model, &expected, long);
        // The floor holds one sequence of the full context, which is longer than a step.
        let shape = filled.model.serving().await.expect("the model serves").context.envelope.clone();
        assert_eq!((shape.context_tokens, shape.step_tokens), (256, 48));
        let floor = floor();
        eventually("keys and values are at their floor", async || {
            filled.device.foreign_takes(Bytes::gib(1));
            filled.kv().await == floor && filled.device.foreign_takes(Bytes::gib(1)).is_zero()
        })
        .await;
        let ledger = filled.runtime.budget().measure().await.expect("the budget answers");
        assert!(ledger.canary.is_zero() && ledger.free.is_zero(), "no memory is free: {ledger}");
        assert_eq!(ledger.granted, filled.device.counts().backed, "{ledger}");
        let preempted = metrics_log.most("bursar_preemptions_total{model=floor,reason=shrink}");
        assert!(preempted.is_some_and(|most| most > 0.0), "sequences were preempted by the shrink: {preempted:?}");
        crowd.goes_on().await;
        // Sequences that run one after another have enough memory.
        assert_eq!(answer(&filled.model, long(1)).await, expected[1]);
        crowd.finish().await;
        filled.device.foreign_gives_back(Bytes::gib(1));
        filled.regained().await;
        assert_eq!(answer(&filled.model, long(2)).await, expected[2]);
    });
}

#[test]
fn another_process_is_noticed_before_the_next_full_probe() {
    story(async {
        // The first full probe is 20 s after the start. Until then, the budget makes a brief check
        // every second.
        let filled = FilledDevice::filled(WatchOptions { every: Duration::from_secs(20), ..watchful() }).await;
        let (before, began) = (filled.kv().await, Instant::now());
        filled.device.foreign_takes(Bytes::gib(1));
        eventually("keys and values shrink", async || filled.kv().await < before).await;
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    });
}

#[test]
fn repeated_foreign_growth_shrinks_the_cache_only_once() {
    story(async {
        let patience = Duration::from_secs(600);
        let filled = FilledDevice::filled(WatchOptions { patience, ..watchful() }).await;
        filled.other_process_takes(Bytes::mib(4)).await;
        let kv = filled.quiet().await.of_class(&Class::Kv);
        let unbacks = filled.device.counts().unbacks;
        for _ in 0..20 {
            filled.device.foreign_gives_back(Bytes::mib(4));
            filled.quiet().await;
            filled.other_process_takes(Bytes::mib(4)).await;
            assert_eq!(filled.quiet().await.of_class(&Class::Kv), kv);
        }
        assert_eq!(filled.device.counts().unbacks, unbacks, "the cache shrank only once");
    });
}

#[test]
fn memory_is_unbacked_only_after_its_fences_pass() {
    story(async {
        let filled = FilledDevice::filled(watchful()).await;
        let expected = answer(&filled.model, long(3)).await;
        let blocks = async || {
            let serving = filled.model.serving().await.expect("the model serves");
            let (reply, usage) = bursar_actors::responder::Responder::new();
            drop(serving.scheduler.send_message(bursar::messages::SchedulerMessage::KvUse(reply)));
            usage.await.expect("the scheduler answers").blocks
        };
        let all = blocks().await;
        filled.device.hold_fences();
        filled.other_process_takes(filled.before.free + filled.before.canary).await;
        eventually("no sequence uses the removed blocks", async || blocks().await < all).await;
        assert_eq!(answer(&filled.model, long(3)).await, expected, "the model still answers with the remaining cache");
        let ledger = filled.ledger().await;
        assert_eq!((filled.device.counts().unbacks, ledger.granted), (0, filled.before.granted), "{ledger}");
        filled.device.let_fences_pass();
        let ledger = filled.quiet().await;
        assert!(ledger.granted < filled.before.granted, "{ledger}");
    });
}

#[test]
fn refused_growth_changes_nothing_and_is_retried() {
    story(async {
        let filled = FilledDevice::filled(watchful()).await;
        filled.other_process_takes(Bytes::mib(4)).await;
        let small = filled.quiet().await;
        // Two layers are backed, and then the third is refused.
        let backs = filled.device.counts().backs;
        filled.device.play(bursar_budgets::testing::Script::new().refuse_back(backs + 3));
        filled.device.foreign_gives_back(Bytes::mib(4));
        eventually("growth was tried", async || filled.device.counts().backs >= backs + 3).await;
        filled.regained().await;
        assert!(filled.device.counts().unbacks >= 2, "memory backed before the refusal was unbacked: {small}");
        assert!(filled.device.counts().backs >= backs + 7, "growth was retried");
    });
}

#[test]
fn the_cache_shrinks_for_unleased_overhead() {
    story(async {
        let filled = FilledDevice::filled(watchful()).await;
        let kv = filled.kv().await;
        let taken = filled.device.overhead_grows(filled.before.free + Bytes::mib(1));
        let now = filled.quiet().await;
        assert_eq!(now.overhead, taken);
        assert!(kv - now.of_class(&Class::Kv) >= Bytes::mib(1), "{now}");
        assert!(!answer(&filled.model, long(1)).await.is_empty());
    });
}

#[test]
fn the_younger_of_two_models_shrinks_first() {
    story(async {
        let device = device_of(Bytes::mib(40));
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(placed(&device)),
            watch: watchful(),
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let older = demo(&runtime, LoadOptions { kv_tokens: Some(2048), ..filling() }).await;
        let younger = demo(&runtime, filling()).await;
        assert_eq!(small_envelope().context_tokens, 256);
        let before = runtime.budget().snapshot().await.expect("the budget answers");
        let kv = |ledger: &Snapshot, model: &str| {
            let mut lines = ledger.leases.iter();
            lines.find(|line| line.class == Class::Kv && line.model.to_string() == model).expect("a KV lease").bytes
        };
        let filled = FilledDevice { device, runtime, model: younger, before };
        filled.other_process_takes(filled.before.free + Bytes::mib(2)).await;
        let now = filled.quiet().await;
        assert_eq!(kv(&now, "demo"), kv(&filled.before, "demo"), "the older model keeps its cache: {now}");
        assert!(kv(&now, "demo 2") < kv(&filled.before, "demo 2"), "{now}");
        let floor = floor();
        let all = kv(&now, "demo 2") - floor + Bytes::mib(1);
        filled.other_process_takes(all).await;
        let now = filled.quiet().await;
        assert_eq!(kv(&now, "demo 2"), floor, "{now}");
        assert!(kv(&now, "demo") < kv(&filled.before, "demo"), "the older model gives the missing memory: {now}");
        assert_eq!(answer(&older, long(1)).await, answer(&filled.model, long(1)).await);
        filled.device.foreign_gives_back(Bytes::gib(1));
        filled.regained().await;
    });
}

#[test]
fn drift_is_zero_until_uncounted_bytes_appear() {
    // The recorder and all actors are on one thread, because other tests set the same gauges
    // at the same time.
    let metrics_log = MetricsLog::default();
    let actors = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    metrics::with_local_recorder(&metrics_log, || {
        actors.block_on(async {
            let filled = FilledDevice::filled(watchful()).await;
            assert!(!answer(&filled.model, about(1)).await.is_empty());
            filled.other_process_takes(Bytes::mib(5)).await;
            filled.quiet().await;
            filled.device.foreign_gives_back(Bytes::mib(5));
            filled.regained().await;
            eventually("the device was probed", async || metrics_log.most("bursar_drift_bytes{device=host}").is_some())
                .await;
            assert_eq!(
                metrics_log.most("bursar_drift_bytes{device=host}"),
                Some(0.0),
                "drift is zero while all allocated memory is leased"
            );
            assert!(metrics_log.most("bursar_foreign_bytes{device=host}") >= Some(Bytes::mib(5).0 as f64));
            assert_eq!(metrics_log.most("bursar_device_total_bytes{device=host}"), Some(Bytes::mib(24).0 as f64));
            assert_eq!(metrics_log.most("bursar_canary_bytes{device=host}"), Some(filled.before.canary.0 as f64));
            let bytes = filled.device.drifts(Bytes::kib(100));
            eventually("the drift is shown", async || {
                metrics_log.most("bursar_drift_bytes{device=host}") == Some(bytes.0 as f64)
            })
            .await;
            let ledger = filled.runtime.budget().measure().await.expect("the budget answers");
            assert_eq!(ledger.foreign, bytes, "rule 1 counts drift as foreign: {ledger}");
            filled.runtime.shutdown().await;
        });
    });
}
