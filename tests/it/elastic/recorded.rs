//! The metrics recorded in a run, compared with the table of metrics and with its
//! page in the documentation.

use bursar_budgets::testing::HostControl;
use std::{collections::BTreeMap, fs};

use bursar::{Device, DeviceError, DeviceGroup, FaultInjection, MIB, ModelSource, SleepLevel};
use bursar_actors::{
    budget::BudgetMessage, engine::EngineMessage, engine::WhichLane, metric::Kind, metric::Row, metric::TABLE,
    scheduler::SchedulerMessage,
};

use super::*;
use crate::{
    command_line::path,
    stage::{Stage, ask, device, device_of, listen, picture, runtime_on},
};

/// Runs a test and all its actors on one thread with a separate recorder, because other tests
/// record at the same time.
fn recorded_by(story: impl AsyncFnOnce(&MetricsLog)) -> MetricsLog {
    let metrics_log = MetricsLog::default();
    let actors = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    metrics::with_local_recorder(&metrics_log, || actors.block_on(story(&metrics_log)));
    metrics_log
}

/// A metric's name, and its labels with their values.
fn parts(series: &str) -> (&str, Vec<(&str, &str)>) {
    let (name, labels) = series.trim_end_matches('}').split_once('{').expect("a name with labels");
    (name, labels.split(',').filter_map(|label| label.split_once('=')).collect())
}

fn row(name: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.name == name)
}

/// Checks that every recorded metric is in the table, with the same type and labels.
fn assert_in_the_table(metrics_log: &MetricsLog) {
    for (series, what) in metrics_log.all() {
        let (name, labels) = parts(&series);
        let row = row(name).unwrap_or_else(|| panic!("{series} is not in the table of metrics"));
        assert_eq!(row.kind.name(), what.kind, "{series}");
        assert!(labels.iter().map(|(label, _)| *label).eq(row.labels.iter().copied()), "{series}: {:?}", row.labels);
    }
}

#[test]
fn request_metrics_match_the_replies_of_callers() {
    recorded_by(async |metrics_log| {
        let stage = Stage::set(LoadOptions { requests: Some(2), ..small() }).await;
        let count = |name: &str| metrics_log.now(&format!("bursar_{name}{{model=demo}}"));
        let ended = |reason: &str| metrics_log.now(&format!("bursar_requests_total{{model=demo,reason={reason}}}"));
        let chat = || about(1).max_tokens(9).ignore_end();
        let first = ask(&stage.model, chat()).await.expect("the model answers");
        let prompt = first.usage.prompt_tokens as f64;
        assert_eq!((count("prompt_tokens_total"), count("generated_tokens_total")), (prompt, 9.0));
        assert_eq!((count("prefix_cache_queries_total"), count("prefix_cache_hits_total")), (prompt, 0.0));
        assert_eq!((count("encoder_cache_queries_total"), count("encoder_cache_hits_total")), (1.0, 0.0));
        let second = ask(&stage.model, chat()).await.expect("the model answers");
        let cached = second.cached_tokens as f64;
        assert!(cached > 0.0, "a prefix is found in the cache");
        assert_eq!((count("prompt_tokens_total"), count("cached_prompt_tokens_total")), (2.0 * prompt, cached));
        assert_eq!((count("prefix_cache_queries_total"), count("prefix_cache_hits_total")), (2.0 * prompt, cached));
        let pictures = ["encoder_cache_queries_total", "encoder_cache_hits_total", "pictures_found_computed_total"];
        assert_eq!(pictures.map(count), [1.0, 0.0, 1.0]);
        for (name, times) in [
            ("time_to_first_token_seconds", 2.0),
            ("token_interval_seconds", 16.0),
            ("queue_seconds", 2.0),
            ("request_seconds", 2.0),
            ("prefill_seconds", 2.0),
            ("decode_seconds", 2.0),
            ("request_prompt_tokens", 2.0),
            ("request_generated_tokens", 2.0),
        ] {
            assert_eq!(count(name), times, "{name}");
        }
        // The last step is discarded if it was planned ahead.
        let (steps, eager) = (count("step_seconds"), count("eager_steps_total"));
        assert!(steps == eager && (18.0..=24.0).contains(&steps), "{steps} steps, {eager} of them eager");
        assert_eq!(count("step_tokens"), steps, "the size of each step is recorded");
        assert_eq!((ended("length"), count("requests_active")), (2.0, 0.0));

        // Each finish reason is counted as often as callers saw it.
        assert!(ask(&stage.model, text("Short.").max_tokens(0)).await.is_err());
        let held =
            [stage.model.chat(chat()).await.expect("accepted"), stage.model.chat(chat()).await.expect("accepted")];
        assert!(matches!(stage.model.chat(chat()).await, Err(bursar::ChatError::Overloaded { .. })));
        assert_eq!(count("requests_active"), 2.0);
        drop(held);
        eventually("both are gone", async || ended("cancelled") == 2.0 && count("requests_active") == 0.0).await;
        // This caller reads too slowly: one event every 10 ms, and each token is a separate event.
        // The deadline is well after the preparation and long before the last token.
        let chat_for = Duration::from_millis(400);
        let mut late =
            stage.model.chat(long(1).max_tokens(190).log_probabilities(0).deadline(chat_for)).await.expect("accepted");
        let mut looks = tokio::time::interval(Duration::from_millis(10));
        let error = loop {
            looks.tick().await;
            if let Err(error) = late.next().await.expect("the reply has an end") {
                break error;
            }
        };
        assert!(matches!(error, bursar::ChatError::TooLate { .. }), "{error:?}");
        let dies = stage.model.chat(long(2)).await.expect("accepted");
        let scheduler = stage.model.serving().await.expect("the model serves").scheduler.clone();
        drop(scheduler.send_message(SchedulerMessage::InjectFault(FaultInjection::Panic)));
        listen(dies).await.expect("the request is computed again");
        assert_eq!(count("requests_redone_total"), 1.0);
        assert_eq!(metrics_log.now("bursar_restarts_total{model=demo,actor=scheduler}"), 1.0);
        let up = |actor: &str| metrics_log.now(&format!("bursar_actor_up{{model=demo,actor={actor}}}"));
        assert!(["engine", "vision", "scheduler"].iter().all(|actor| up(actor) == 1.0));
        assert_eq!(up("profile"), 0.0);
        stage.runtime.unload("demo").await.expect("the model unloads");
        assert!(ask(&stage.model, chat()).await.is_err());
        let expected = [
            ("stop", 0.0),
            ("length", 3.0),
            ("cancelled", 2.0),
            ("overloaded", 1.0),
            ("too_late", 1.0),
            ("stopped", 1.0),
        ];
        expected.into_iter().for_each(|(reason, times)| assert_eq!(ended(reason), times, "{reason}"));
        // The gauges of an unloaded model are 0, except peak bytes. Its counters remain.
        for (series, what) in metrics_log.all() {
            let (name, labels) = parts(&series);
            let is_of_it = labels.contains(&("model", "demo")) && !name.ends_with("_peak_bytes");
            assert!(what.kind != "gauge" || !is_of_it || what.now == 0.0, "{series} is {}", what.now);
        }
        let of_the_device = |name: &str| metrics_log.now(&format!("bursar_{name}{{device=host}}"));
        let budget = stage.runtime.supervised().await.expect("the runtime answers").budget;
        budget.send_message(BudgetMessage::InjectFault(FaultInjection::Panic)).expect("the budget lives");
        let is_back = async || of_the_device("budget_restarts_total") == 1.0 && of_the_device("budget_up") == 1.0;
        eventually("another budget runs", is_back).await;
        assert_eq!(of_the_device("runtime_up"), 1.0);
        stage.runtime.shutdown().await;
        assert_eq!((of_the_device("runtime_up"), of_the_device("budget_up")), (0.0, 0.0));
        assert_in_the_table(metrics_log);
    });
}

#[test]
fn a_metric_shows_the_imbalance_of_experts() {
    recorded_by(async |metrics_log| {
        let runtime = runtime_on(&device_of(Bytes::mib(96))).await;
        let folder = bursar_golden::path("qwen3_moe");
        let model = runtime.load_with(ModelSource::folder(folder), small(), |_| {}).await.expect("the model starts");
        let imbalance = || metrics_log.most("bursar_expert_imbalance{model=qwen3_moe}");
        eventually("the metric is recorded after a second of steps", async || {
            ask(&model, Chat::new().user("Hello!").max_tokens(20).ignore_end()).await.expect("the model answers");
            imbalance().is_some_and(|most| most > 0.0)
        })
        .await;
        // Each token goes to three of eight experts, so the busiest expert gets at most all tokens:
        // 8/3 of the mean.
        assert!(imbalance().is_some_and(|most| most > 1.0 && most <= 8.0 / 3.0), "{:?}", imbalance());
        runtime.shutdown().await;
    });
}

async fn ask_of(model: ModelHandle, chat: Chat) {
    assert!(!answer(&model, chat).await.is_empty());
}

#[test]
fn each_card_of_a_group_has_separate_gauges() {
    recorded_by(async |metrics_log| {
        let devices = [0, 1].map(|_| device_of(Bytes::mib(32)));
        let group = DeviceGroup::of(devices.iter().map(|device| device.clone() as _).collect(), "host:2");
        let device = DeviceChoice::Custom(Arc::new(group.expect("devices of one kind")));
        let runtime = Runtime::start(RuntimeConfig { device, watch: watchful(), ..RuntimeConfig::default() })
            .await
            .expect("the runtime starts");
        demo(&runtime, small()).await;
        devices[1].foreign_takes(Bytes::mib(1));
        devices[0].drifts(Bytes::mib(2));
        let card =
            |what: &str, rank| metrics_log.now(&format!("bursar_card_{what}_bytes{{group=host:2,device=host#{rank}}}"));
        let mib = |count: u64| Bytes::mib(count).0 as f64;
        eventually("each card shows its foreign memory and drift", async || {
            [0, 1].map(|rank| (card("foreign", rank), card("drift", rank))) == [(mib(2), mib(2)), (mib(1), 0.0)]
        })
        .await;
        for (rank, device) in devices.iter().enumerate() {
            assert_eq!(card("backed", rank), device.counts().backed.0 as f64);
            let parts = ["free", "overhead", "backed", "foreign"].map(|what| card(what, rank));
            assert_eq!(parts.iter().sum::<f64>(), card("total", rank), "{parts:?}");
        }
        let of_group = |name: &str| metrics_log.now(&format!("bursar_{name}_bytes{{device=host:2}}"));
        assert_eq!((of_group("foreign"), of_group("drift")), (mib(2), mib(2)), "a group shows its fullest card");
        assert!(
            metrics_log
                .all()
                .keys()
                .all(|series| !series.starts_with("bursar_device") || series.contains("device=host:2"))
        );
        runtime.shutdown().await;
        assert_eq!([0, 1].map(|rank| card("total", rank)), [0.0, 0.0], "the gauges of the cards are reset");
        assert_in_the_table(metrics_log);
    });
}

/// Gauges that may be above 0 only within the handling of one message.
const BY_CHANCE: [&str; 3] = ["bursar_deficit_bytes", "bursar_owed_bytes", "bursar_leases_waiting"];

/// The metrics that the test below does not record, with the reason.
const NOT_MET: [(&str, &str); 37] = [
    ("bursar_kv_group_blocks", "the demo model has one cache group; `windows.rs` covers it"),
    ("bursar_state_slots", "the demo model has no recurrent states; `hybrids.rs` and `host_tier.rs` cover it"),
    ("bursar_state_slots_used", "likewise"),
    ("bursar_state_snapshots", "likewise"),
    ("bursar_state_snapshots_swapped", "likewise"),
    ("bursar_state_copied_bytes_total", "likewise"),
    ("bursar_http_requests_total", "only `bursar serve` records it; `serve/forms.rs` covers it"),
    ("bursar_http_errors_total", "likewise"),
    ("bursar_http_connections", "likewise"),
    ("process_start_time_seconds", "only Bursar's own recorder reads the process, and only during a scrape"),
    ("process_cpu_seconds_total", "likewise"),
    ("process_resident_memory_bytes", "likewise"),
    ("process_virtual_memory_bytes", "likewise"),
    ("process_open_fds", "likewise"),
    ("process_max_fds", "likewise"),
    ("bursar_graphs_captured", "a host device captures no graphs"),
    ("bursar_drift_bytes", "nothing drifts"),
    ("bursar_card_drift_bytes", "likewise"),
    ("bursar_overhead_bytes", "a host device has no overhead"),
    ("bursar_card_overhead_bytes", "likewise"),
    ("bursar_kv_blocks_swapped", "no host memory is set; `host_tier.rs` covers it"),
    ("bursar_prefix_cache_host_hits_total", "likewise"),
    ("bursar_kv_copied_bytes_total", "likewise"),
    ("bursar_kv_copy_seconds", "likewise"),
    ("bursar_encoder_cache_host_hits_total", "likewise"),
    ("bursar_encoder_cache_host_bytes", "likewise"),
    ("bursar_kv_borrowed_bytes", "a single model has no other model to borrow from; `lending.rs` covers it"),
    ("bursar_plan_error_bytes", "the plan is exact"),
    ("bursar_graph_replays_total", "a host device captures no graphs"),
    ("bursar_graphs_not_recaptured_total", "likewise"),
    ("bursar_expert_imbalance", "the demo model has no experts; another test in this file loads a model with experts"),
    ("bursar_budget_restarts_total", "another test in this file kills the budget"),
    ("bursar_deadlines_missed_total", "`queues.rs` covers it"),
    ("bursar_tenant_tokens_total", "likewise"),
    ("bursar_draft_tokens_total", "`drafts.rs` covers it"),
    ("bursar_draft_tokens_accepted_total", "likewise"),
    ("bursar_pictures_wanted_again_total", "it needs two dozen long chats at the same time; `chats.rs` covers it"),
];

#[test]
fn a_run_of_all_features_records_every_metric() {
    let metrics_log = recorded_by(async |metrics_log| {
        let filled = FilledDevice::filled(watchful()).await;
        let (budget, was) = (filled.runtime.budget(), filled.before.clone());
        answer(&filled.model, about(1)).await;
        answer(&filled.model, about(1)).await;
        let other_words =
            Chat::new().system("Be brief.").user("What?").image(picture(1)).temperature(0.0).max_tokens(4);
        answer(&filled.model, other_words).await;
        drop(budget.lease(Class::external("index"), Bytes::kib(64)).await.expect("memory is free"));
        assert!(budget.try_lease(Class::external("index"), 512 * MIB).await.is_err(), "the device has less memory");
        // Another process takes everything while chats run, and frees it.
        let talk = |number| tokio::spawn(ask_of(filled.model.clone(), long(number)));
        let chats: Vec<_> = (0..6).map(talk).collect();
        eventually("a shrink preempts a sequence", async || {
            filled.device.foreign_takes(Bytes::gib(1));
            metrics_log.now("bursar_preemptions_total{model=demo,reason=shrink}") > 0.0
        })
        .await;
        filled.device.foreign_gives_back(Bytes::gib(1));
        for chat in chats {
            chat.await.expect("no panic");
        }
        filled.regained().await;
        // A step is refused memory, and an actor dies during a request.
        let engine = filled.runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        assert!(engine.send_message(EngineMessage::RefuseMemory(WhichLane::Step)).is_ok(), "the engine lives");
        answer(&filled.model, about(2)).await;
        let dies = filled.model.chat(long(2)).await.expect("accepted");
        let scheduler = filled.model.serving().await.expect("the model serves").scheduler.clone();
        drop(scheduler.send_message(SchedulerMessage::InjectFault(FaultInjection::Panic)));
        listen(dies).await.expect("the request is computed again");
        let lease = |name: &str| {
            metrics_log.all().get(&format!("bursar_lease_{name}{{device=host,model=demo,class=kv}}")).copied()
        };
        let kv = was.of_class(&Class::Kv).0 as f64;
        assert_eq!(lease("peak_bytes").expect("the cache was leased").now, kv, "the peak is the lease at READY");
        // The gauge is updated once a second.
        eventually("all leased bytes are used", async || {
            let (used, leased) =
                (lease("used_bytes").map(|series| series.now), lease("bytes").map(|series| series.now));
            // The used bytes are fewer than at READY, because a step was refused memory.
            used == leased && used.is_some_and(|used| used > 0.0)
        })
        .await;
        filled.runtime.shutdown().await;
        assert_eq!(lease("bytes").expect("the cache was leased").now, 0.0, "the cache's lease was returned");

        // A device is lost.
        let devices = [device(), device()];
        let (first, spares) = (devices[0].clone(), std::sync::Mutex::new(devices.into_iter()));
        let make = move || match spares.lock().expect("no holder panicked").next() {
            Some(device) => Ok(device as Arc<dyn Device>),
            None => Err(DeviceError::Lost { reason: "there are two".to_owned() }),
        };
        let device = DeviceChoice::Made(Arc::new(make));
        let runtime = Runtime::start(RuntimeConfig { device, ..RuntimeConfig::default() }).await.expect("a runtime");
        let model = demo(&runtime, small()).await;
        model.sleep(SleepLevel::Level1, Duration::from_secs(60)).await.expect("the model sleeps");
        answer(&model, about(1)).await;
        first.lose("a script says so");
        assert!(ask(&model, about(1)).await.is_err(), "the model's device is lost");
        assert_eq!(metrics_log.now("bursar_device_losses_total{device=host}"), 1.0);
        assert_eq!(metrics_log.now("bursar_requests_total{model=demo,reason=device_lost}"), 1.0);
        runtime.shutdown().await;
    });
    assert_in_the_table(&metrics_log);
    let mut met = BTreeMap::<&str, f64>::new();
    let all = metrics_log.all();
    for (series, what) in &all {
        let most = met.entry(parts(series).0).or_insert(f64::MIN);
        *most = most.max(what.most);
    }
    let mut wrong = Vec::new();
    for Row { name, kind, .. } in TABLE {
        let is_met = match (met.get(name), kind) {
            (None, _) => false,
            // Whether such a value lasts long enough to be recorded depends on thread timing.
            (Some(_), Kind::Gauge) if BY_CHANCE.contains(name) => true,
            // Gauges end at 0, so the highest value counts.
            (Some(most), Kind::Gauge | Kind::Counter | Kind::Histogram) => *most > 0.0,
        };
        let excuse = NOT_MET.iter().find(|(excused, _)| excused == name);
        if is_met != excuse.is_none() {
            wrong.push((name, met.get(name), excuse));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn the_metrics_page_lists_every_metric_with_advice() {
    let page = fs::read_to_string(path("docs/metrics.md")).expect("the file is there");
    let rows = page.lines().filter(|line| line.starts_with("| `bursar_") || line.starts_with("| `process_"));
    let (found, watched): (Vec<_>, Vec<_>) =
        rows.map(|row| row.trim_end_matches(" |").rsplit_once(" | ").expect("cells")).unzip();
    let expected: Vec<_> = TABLE
        .iter()
        .map(|Row { name, kind, labels, help, .. }| {
            format!("| `{name}` | {} | {} | {help}", kind.name(), labels.join(", "))
        })
        .collect();
    assert_eq!(found, expected, "the page would be\n{}", expected.join(" | |\n"));
    assert!(watched.iter().all(|watch| watch.ends_with('.')), "each metric has a sentence on what to watch");
}
