//! Starts that reuse an earlier profile, and starts that must not.

use bursar_budgets::testing::HostControl;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bursar::{
    Bytes, DeviceChoice, DeviceError, Envelope, FaultPlan, HostConfig, HostDevice, LoadOptions, MeasuredCosts,
    ModelHandle, ModelSource, Notice, Phase, ProfileRecord, Progress, Runtime, RuntimeConfig, Serving,
};
use bursar_actors::{engine::EngineMessage, engine::WhichLane};
use bursar_budgets::testing::Script;

use crate::stage::{Folder, about, answer, device, runtime_on, small, small_envelope, story};

/// All progress reports of a start with their times, and its result.
struct Start {
    reports: Vec<(Progress, Instant)>,
    began: Instant,
    model: ModelHandle,
    serving: Serving,
}

/// A record without its measured times, which differ between two measurements.
fn sizes(record: &ProfileRecord) -> ProfileRecord {
    ProfileRecord { costs: MeasuredCosts::default(), ..record.clone() }
}

/// Options whose worst cases take a while, with the full stress of a GPU. The KV cache gets nine
/// tenths of the memory that is left.
fn sized(profiles: &Path) -> LoadOptions {
    let profiles = Some(profiles.to_owned());
    LoadOptions { profiles, kv_tokens: None, full_stress: true, envelope: Some(small_envelope()), ..small() }
}

impl Start {
    async fn on(runtime: &Runtime, source: ModelSource, options: LoadOptions) -> Start {
        let reports = Arc::new(Mutex::new(Vec::new()));
        let began = Instant::now();
        let listen = {
            let reports = reports.clone();
            move |progress| reports.lock().expect("no panic").push((progress, Instant::now()))
        };
        let model = runtime.load_with(source, options, listen).await.expect("the model starts");
        let serving = model.serving().await.expect("the model serves");
        let reports = std::mem::take(&mut *reports.lock().expect("no panic"));
        Start { reports, began, model, serving }
    }

    async fn demo(runtime: &Runtime, options: LoadOptions) -> Start {
        Start::on(runtime, ModelSource::demo(), options).await
    }

    /// The number of runs of each worst case, by name.
    fn runs(&self) -> Vec<(&'static str, usize)> {
        let runs_of = |worst_case: &str| {
            let is_run = |(moment, _): &&(Progress, Instant)| matches!(moment, Progress::Profiling { what, .. } if *what == worst_case);
            self.reports.iter().filter(is_run).count()
        };
        self.serving.record.peaks.iter().map(|(worst_case, _)| (*worst_case, runs_of(worst_case))).collect()
    }

    fn notices(&self) -> Vec<Notice> {
        let notice = |(moment, _): &(Progress, Instant)| match moment {
            Progress::Notice(notice) => Some(notice.clone()),
            _ => None,
        };
        self.reports.iter().filter_map(notice).collect()
    }

    /// The reasons why a profile was ignored, if one was.
    fn reasons(&self) -> Vec<String> {
        let of = |notice| match notice {
            Notice::ProfileIgnored { reasons, .. } => reasons,
            notice => panic!("expected another notice: {notice}"),
        };
        self.notices().into_iter().flat_map(of).collect()
    }

    #[track_caller]
    fn assert_ran(&self, times: usize) {
        let runs = self.runs();
        assert!(runs.len() >= 3, "a vision model has several worst cases: {runs:?}");
        assert!(runs.iter().all(|(_, runs)| *runs == times), "each worst case runs {times} times: {runs:?}");
        assert_eq!(self.serving.is_warm, times == 1);
    }

    /// The time from the first progress report of sizing to READY.
    fn sizing(&self) -> Duration {
        let sizes = |(moment, _): &&(Progress, Instant)| matches!(moment, Progress::Profiling { .. });
        let first = self.reports.iter().find(sizes).map_or(self.began, |(_, at)| *at);
        self.reports.last().expect("READY was reported").1 - first
    }
}

/// Shuts down a runtime, so that the next start finds the whole device free.
async fn end(runtime: Runtime) {
    runtime.shutdown().await;
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

#[test]
fn a_warm_start_runs_each_worst_case_only_once() {
    story(async {
        let folder = Folder::empty();
        let runtime = runtime_on(&device()).await;
        let cold = Start::demo(&runtime, sized(folder.path())).await;
        cold.assert_ran(2);
        assert_eq!(cold.notices(), [], "a first start has nothing to report");
        let expected = answer(&cold.model, about(1)).await;
        end(runtime).await;
        assert_eq!(files(folder.path()).len(), 1, "one file per model and device");

        let runtime = runtime_on(&device()).await;
        let warm = Start::demo(&runtime, sized(folder.path())).await;
        warm.assert_ran(1);
        assert_eq!(warm.notices(), []);
        assert_eq!(warm.serving.record, cold.serving.record, "warm and cold start have the same record");
        assert_eq!(answer(&warm.model, about(1)).await, expected);
        let (cold_lease, warm_lease) = (cold.serving.record.kv_tokens(), warm.serving.record.kv_tokens());
        assert_eq!(cold_lease, warm_lease);
        end(runtime).await;
    });
}

#[test]
fn a_warm_start_takes_less_time_for_sizing() {
    story(async {
        let folder = Folder::empty();
        let large = |profiles: Option<PathBuf>| LoadOptions {
            profiles,
            envelope: Some(Envelope { context_tokens: 480, sequences: 32, step_tokens: 256, ..small_envelope() }),
            kv_tokens: None,
            full_stress: true,
            ..small()
        };
        let (mut cold, mut warm) = (Vec::new(), Vec::new());
        // The machine may be busy, so only the fastest of several runs counts.
        for round in 0..4 {
            let runtime = runtime_on(&device()).await;
            let profiles = (round > 0).then(|| folder.path().to_owned());
            let start = Start::demo(&runtime, large(profiles.clone())).await;
            let of_its_kind = if start.serving.is_warm { &mut warm } else { &mut cold };
            of_its_kind.push(start.sizing());
            end(runtime).await;
        }
        assert_eq!((cold.len(), warm.len()), (2, 2), "two cold starts and two warm starts");
        let (cold, warm) = (cold.iter().min().expect("two starts"), warm.iter().min().expect("two starts"));
        println!("sizing took {} ms cold and {} ms warm", cold.as_millis(), warm.as_millis());
        assert!(warm < cold, "a warm start took {warm:?} with half the work, a cold one {cold:?}");
    });
}

#[test]
fn no_profile_is_written_or_read_without_a_folder() {
    story(async {
        let folder = Folder::empty();
        let runtime = runtime_on(&device()).await;
        let silent = LoadOptions { profiles: None, ..sized(folder.path()) };
        Start::demo(&runtime, silent.clone()).await.assert_ran(2);
        runtime.unload("demo").await.expect("the model unloads");
        Start::demo(&runtime, silent).await.assert_ran(2);
        assert_eq!(files(folder.path()), [] as [PathBuf; 0]);
        end(runtime).await;
    });
}

#[test]
fn a_new_envelope_share_or_canary_is_measured_once() {
    story(async {
        let folder = Folder::empty();
        let usual = || sized(folder.path());
        let wider = || LoadOptions { envelope: Some(Envelope { sequences: 9, ..small_envelope() }), ..usual() };
        let smaller = || LoadOptions { memory_fraction: Some(0.5), ..usual() };
        let runtime = runtime_on(&device()).await;
        let start = async |options: LoadOptions| {
            let start = Start::demo(&runtime, options).await;
            runtime.unload("demo").await.expect("the model unloads");
            start
        };
        start(usual()).await.assert_ran(2);
        let first = start(wider()).await;
        first.assert_ran(2);
        assert_eq!(first.reasons(), ["envelope.sequences was 8, is 9"]);
        let first = start(smaller()).await;
        first.assert_ran(2);
        assert_eq!(first.reasons(), ["memory_fraction was not set, is 0.5"]);
        let pinned = || LoadOptions { kv_tokens: Some(2000), ..usual() };
        let first = start(pinned()).await;
        first.assert_ran(2);
        assert_eq!(first.reasons(), ["kv_tokens was not set, is 2000"]);
        for known in [usual(), wider(), smaller(), pinned()] {
            let again = start(known).await;
            again.assert_ran(1);
            assert_eq!(again.notices(), []);
        }
        end(runtime).await;
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(device()),
            canary: Some(Bytes::mib(3)),
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let other = Start::demo(&runtime, usual()).await;
        other.assert_ran(2);
        assert_eq!(other.reasons(), ["canary was 4,194,304 B, is 3,145,728 B"]);
        end(runtime).await;
    });
}

#[test]
fn a_changed_capacity_page_or_driver_is_named() {
    story(async {
        let folder = Folder::empty();
        let start = async |config: HostConfig| {
            let device = Arc::new(HostDevice::new(config).expect("small pages are powers of two"));
            let runtime = runtime_on(&device).await;
            let start = Start::demo(&runtime, sized(folder.path())).await;
            end(runtime).await;
            start
        };
        let host = || HostConfig { driver: "580.1".into(), ..HostConfig::small(Bytes::mib(64)) };
        start(host()).await.assert_ran(2);
        start(host()).await.assert_ran(1);
        let updated = start(HostConfig { driver: "580.2".into(), ..host() }).await;
        updated.assert_ran(2);
        assert_eq!(updated.reasons(), ["driver was 580.1, is 580.2"]);
        let larger = start(HostConfig { capacity: Bytes::mib(80), ..host() }).await;
        larger.assert_ran(2);
        let total = "total was 67,108,864 B, is 83,886,080 B";
        assert_eq!(larger.reasons(), ["canary was 4,194,304 B, is 5,242,880 B", total]);
        assert!(larger.serving.record.kv_blocks > updated.serving.record.kv_blocks);
        let coarser = start(HostConfig { page: Bytes::kib(128), ..host() }).await;
        coarser.assert_ran(2);
        assert_eq!(coarser.reasons(), ["page was 65,536 B, is 131,072 B"]);
        assert!(coarser.notices()[0].to_string().contains(&folder.path().display().to_string()), "names the folder");
    });
}

/// A folder with the demo model, with `change` applied to its processor's settings.
fn demo_folder(folder: &Folder, change: impl FnOnce(&mut serde_json::Value)) -> ModelSource {
    let from = bursar_golden::demo_checkpoint();
    for file in files(&from) {
        let name = file.file_name().expect("a file has a name");
        fs::copy(&file, folder.path().join(name)).expect("the file is copied");
    }
    let settings = folder.path().join("preprocessor_config.json");
    let mut json = serde_json::from_slice(&fs::read(&settings).expect("the file is there")).expect("JSON");
    change(&mut json);
    fs::write(settings, json.to_string()).expect("the file is written");
    ModelSource::folder(folder.path())
}

#[test]
fn a_changed_processor_setting_is_named_with_old_and_new_values() {
    story(async {
        let (profiles, model) = (Folder::empty(), Folder::empty());
        let runtime = runtime_on(&device()).await;
        let start = async |source: ModelSource| {
            let name = Some("eyes".to_owned());
            let start = Start::on(&runtime, source, LoadOptions { name, ..sized(profiles.path()) }).await;
            runtime.unload("eyes").await.expect("the model unloads");
            start
        };
        start(demo_folder(&model, |_| {})).await.assert_ran(2);
        start(demo_folder(&model, |json| json["note"] = "not a setting".into())).await.assert_ran(1);
        let changed = start(demo_folder(&model, |json| json["max_pixels"] = 100_352.into())).await;
        changed.assert_ran(2);
        let expected =
            ["processor.max_pixels was 200704, is 100352", "video_processor.max_pixels was 200704, is 100352"];
        assert_eq!(changed.reasons(), expected);
        let back = start(demo_folder(&model, |_| {})).await;
        back.assert_ran(1);
        end(runtime).await;
    });
}

#[test]
fn a_warm_start_refused_memory_becomes_a_cold_one() {
    story(async {
        let folder = Folder::empty();
        let runtime = runtime_on(&device()).await;
        let cold = Start::demo(&runtime, sized(folder.path())).await;
        end(runtime).await;
        for phase in [Phase::Probe, Phase::Capture, Phase::Back, Phase::Validate] {
            let device = device();
            let runtime = runtime_on(&device).await;
            let faults = FaultPlan::none().refuse(phase, 1);
            let start = Start::demo(&runtime, LoadOptions { faults, ..sized(folder.path()) }).await;
            assert!(!start.serving.is_warm, "{phase}");
            let [Notice::ProfileDropped { reason, .. }] = &*start.notices() else {
                panic!("{phase}: {:?}", start.notices())
            };
            assert!(reason.contains("refused"), "{phase}: {reason}");
            assert_eq!(
                sizes(&start.serving.record),
                sizes(&cold.serving.record),
                "{phase}: a new measurement gives the cold size"
            );
            assert_eq!(start.serving.refusals, 0, "{phase}: no refusal counts against the new profile");
            answer(&start.model, about(1)).await;
            let ledger = runtime.budget().snapshot().await.expect("the budget answers");
            assert_eq!(ledger.granted, device.counts().backed, "{phase}: no memory of the warm attempt is left");
            end(runtime).await;
            assert_eq!(device.counts().backed, Bytes::ZERO, "{phase}");
        }
    });
}

#[test]
fn a_warm_attempt_counts_as_one_of_four() {
    story(async {
        let folder = Folder::empty();
        let runtime = runtime_on(&device()).await;
        Start::demo(&runtime, sized(folder.path())).await;
        runtime.unload("demo").await.expect("the model unloads");
        let targets = Arc::new(Mutex::new(Vec::new()));
        let listen = {
            let targets = targets.clone();
            move |progress| {
                if let Progress::Attempt(report) = progress {
                    targets.lock().expect("no panic").push(report.target_tokens);
                }
            }
        };
        let faults = FaultPlan::none().refuse(Phase::Validate, 4);
        let load = LoadOptions { faults, ..sized(folder.path()) };
        let error = runtime.load_with(ModelSource::demo(), load, listen).await.err().expect("every attempt is refused");
        assert!(error.to_string().contains("attempt 4"), "{error}");
        let targets = std::mem::take(&mut *targets.lock().expect("no panic"));
        let [warm, first, second, third] = targets.try_into().expect("four attempts");
        assert_eq!(warm, first, "the warm attempt has the same size as the first cold one");
        let of = |blocks: usize, part: usize| blocks / 16 * part / 100 * 16;
        assert_eq!(second, of(first, 95));
        assert!(third < second);
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert!(ledger.leases.is_empty(), "{ledger}");
        end(runtime).await;
    });
}

#[test]
fn a_profile_is_measured_again_after_foreign_memory_changed() {
    story(async {
        let folder = Folder::empty();
        let start = async |foreign: Bytes| {
            let device = device();
            assert_eq!(device.foreign_takes(foreign), foreign);
            let runtime = runtime_on(&device).await;
            let start = Start::demo(&runtime, sized(folder.path())).await;
            end(runtime).await;
            start
        };
        let alone = start(Bytes::ZERO).await;
        let beside = start(Bytes::mib(16)).await;
        assert!(!beside.serving.is_warm && beside.serving.record.kv_blocks < alone.serving.record.kv_blocks);
        let [Notice::ProfileDropped { reason, .. }] = &*beside.notices() else { panic!("{:?}", beside.notices()) };
        let tokens = |start: &Start| format!("{} tokens", start.serving.record.kv_tokens());
        assert!(reason.contains(&format!("was {}, is {}", tokens(&alone), tokens(&beside))), "{reason}");
        assert!(start(Bytes::mib(16)).await.serving.is_warm, "the new profile is used");
        let again = start(Bytes::ZERO).await;
        assert!(!again.serving.is_warm, "more memory is free, so the size is measured again");
        assert_eq!(again.serving.record.kv_blocks, alone.serving.record.kv_blocks);
        // A difference of a few pages does not invalidate a profile, because such amounts vary from
        // start to start.
        let nearly = start(Bytes::kib(128)).await;
        assert!(nearly.serving.is_warm, "{:?}", nearly.notices());
    });
}

#[test]
fn a_shrunk_size_is_used_by_the_next_warm_start() {
    story(async {
        let folder = Folder::empty();
        let counted = device();
        let runtime = runtime_on(&counted).await;
        Start::demo(&runtime, LoadOptions { profiles: None, ..sized(folder.path()) }).await;
        let backs = counted.counts().backs;
        end(runtime).await;
        let scripted = device();
        // The last call of a start that backs memory is for the KV cache at its final size.
        scripted.play(Script::new().refuse_back(backs));
        let runtime = runtime_on(&scripted).await;
        let shrunk = Start::demo(&runtime, sized(folder.path())).await;
        assert_eq!(shrunk.serving.refusals, 1, "the first attempt was refused");
        end(runtime).await;
        let runtime = runtime_on(&device()).await;
        let warm = Start::demo(&runtime, sized(folder.path())).await;
        warm.assert_ran(1);
        assert_eq!(warm.serving.record, shrunk.serving.record, "the refused size is not tried again");
        // A further refusal shrinks the cache from this size.
        let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        assert!(engine.send_message(EngineMessage::RefuseMemory(WhichLane::Step)).is_ok(), "the engine is alive");
        answer(&warm.model, about(1)).await;
        let blocks = warm.model.serving().await.expect("the model serves").record.kv_blocks;
        assert_eq!(blocks, shrunk.serving.record.kv_blocks * 95 / 100);
        end(runtime).await;
    });
}

#[test]
fn a_broken_or_edited_profile_is_reported_and_replaced() {
    story(async {
        let folder = Folder::empty();
        let runtime = runtime_on(&device()).await;
        let start = async || {
            let start = Start::demo(&runtime, sized(folder.path())).await;
            runtime.unload("demo").await.expect("the model unloads");
            start
        };
        let cold = start().await;
        let [file] = files(folder.path()).try_into().expect("one file");
        let good = fs::read_to_string(&file).expect("text");
        let written = |pointer: &str, value: serde_json::Value| {
            let mut json: serde_json::Value = serde_json::from_str(&good).expect("JSON");
            *json.pointer_mut(pointer).expect("the field is there") = value;
            json.to_string()
        };
        let huge = u64::MAX.into();
        for (content, reason) in [
            (good[..good.len() / 2].to_owned(), "it is not valid at line"),
            (String::new(), "it is not valid at line 1, column 0"),
            (written("/format", 7.into()), "format was 7, is "),
            (written("/profiles/0/sequences", 800.into()), "sequences was 800, is 8"),
            (written("/profiles/0/kv_blocks", 1.into()), "kv_blocks was 1, is "),
            (written("/profiles/0/cache_rows", 1.into()), "rows of the vision cache was 1, is "),
            (written("/profiles/0/shrinks", 4_000_000_000u32.into()), "shrinks was 4000000000, is 3"),
            (written("/profiles/0/peaks/0/workspace", 1.into()), "the peak of '"),
            (written("/profiles/0/peaks", serde_json::json!([])), "was unknown, is "),
            (written("/profiles/0/basis/driver", "old".into()), "driver was old, is "),
            (written("/profiles/0/kv_blocks", huge), "size of the KV cache was "),
        ] {
            fs::write(&file, &content).expect("the file is written");
            let started = start().await;
            started.assert_ran(2);
            let [notice] = started.notices().try_into().expect("one notice");
            assert!(notice.to_string().contains(reason), "{reason}: {notice}");
            assert!(!notice.to_string().contains("sequences\":"), "the notice quotes no line of the file: {notice}");
            assert_eq!(sizes(&started.serving.record), sizes(&cold.serving.record), "{reason}");
            start().await.assert_ran(1);
        }
        end(runtime).await;
    });
}

#[test]
fn an_unwritable_folder_is_reported_without_an_error() {
    story(async {
        let folder = Folder::empty();
        let file = folder.path().join("a file");
        fs::write(&file, "no folder").expect("the file is written");
        let runtime = runtime_on(&device()).await;
        let start = Start::demo(&runtime, sized(&file.join("profiles"))).await;
        start.assert_ran(2);
        let notices: Vec<_> = start.notices().iter().map(Notice::to_string).collect();
        assert!(notices.iter().any(|notice| notice.contains("cannot be written")), "{notices:?}");
        answer(&start.model, about(1)).await;
        end(runtime).await;
    });
}

#[test]
fn two_simultaneous_starts_do_not_disturb_each_other() {
    story(async {
        let folder = Folder::empty();
        for round in 0..3 {
            let (one, two) = (runtime_on(&device()).await, runtime_on(&device()).await);
            let options = || sized(folder.path());
            let (first, second) = tokio::join!(Start::demo(&one, options()), Start::demo(&two, options()));
            assert_eq!(sizes(&first.serving.record), sizes(&second.serving.record));
            for start in [&first, &second] {
                assert_eq!(start.serving.is_warm, round > 0);
                assert_eq!(start.notices(), []);
            }
            end(one).await;
            end(two).await;
            assert_eq!(files(folder.path()).len(), 1, "only the profile is left in the folder");
        }
    });
}

#[test]
fn a_dead_engine_restarts_from_its_written_profile() {
    story(async {
        let folder = Folder::empty();
        let runtime = runtime_on(&device()).await;
        let start = Start::demo(&runtime, sized(folder.path())).await;
        let expected = answer(&start.model, about(1)).await;
        let supervised = runtime.supervised().await.expect("the runtime answers");
        supervised.engines["demo"].kill();
        let again = start.model.serving_after(start.serving.generation).await.expect("the model serves again");
        assert!(again.is_warm && !start.serving.is_warm);
        assert_eq!(again.record, start.serving.record);
        assert_eq!(answer(&start.model, about(1)).await, expected);
        end(runtime).await;
    });
}

#[test]
fn a_device_lost_in_a_warm_attempt_ends_the_start() {
    story(async {
        let folder = Folder::empty();
        let counted = device();
        let runtime = runtime_on(&counted).await;
        Start::demo(&runtime, sized(folder.path())).await;
        let backs = counted.counts().backs;
        end(runtime).await;
        let losing = device();
        losing.play(Script::new().lose_at_back(backs));
        let runtime = runtime_on(&losing).await;
        let error = runtime.load_with(ModelSource::demo(), sized(folder.path()), |_| {}).await.err().expect("lost");
        assert!(
            matches!(&error, bursar::RuntimeError::Device(DeviceError::Lost { .. }))
                || error.to_string().contains("lost"),
            "{error}"
        );
    });
}

#[test]
fn a_profile_actor_killed_during_a_warm_start_measures_again() {
    story(async {
        let folder = Folder::empty();
        let runtime = runtime_on(&device()).await;
        let cold = Start::demo(&runtime, sized(folder.path())).await;
        end(runtime).await;
        let device = device();
        let runtime = runtime_on(&device).await;
        let (reached, mut sizing) = tokio::sync::mpsc::channel(1);
        let (sender, mut notices) = tokio::sync::mpsc::channel(4);
        let listen = move |progress| match progress {
            // This is the first progress report of a warm attempt. No worst case has run yet.
            Progress::Profiling { done: 0, .. } => drop(reached.try_send(())),
            Progress::Notice(notice) => drop(sender.try_send(notice)),
            _ => {}
        };
        let loading = {
            let (runtime, options) = (runtime.clone(), sized(folder.path()));
            tokio::spawn(async move { runtime.load_with(ModelSource::demo(), options, listen).await })
        };
        sizing.recv().await;
        let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        engine.get_children().iter().for_each(|child| child.kill());
        let model = loading.await.expect("no panic").expect("the model starts");
        let serving = model.serving().await.expect("the model serves");
        assert!(!serving.is_warm);
        assert_eq!(sizes(&serving.record), sizes(&cold.serving.record));
        let notice = notices.recv().await.expect("the notice names the reason");
        assert!(matches!(notice, Notice::ProfileDropped { .. }), "{notice}");
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!(ledger.granted, device.counts().backed, "no memory of the dead attempt is left");
        end(runtime).await;
    });
}
