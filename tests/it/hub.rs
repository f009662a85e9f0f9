//! Models from a hub: each is fetched once, a broken download is resumed, and a failure is a typed
//! error.

mod server;

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use bursar::{Bytes, Hint, HubError, HubModel, HubOptions, ModelSource, Progress, RuntimeError, StartError};
use bursar_model::{
    checkpoint::{Checkpoint, CheckpointSource, FetchWatch},
    error::CheckpointError,
};

use serde_json::Value;

use self::server::{Asked, COMMIT, Fault, Hub, ID};
use crate::stage::{Folder, answer, device, runtime_on, small, story, text};

fn golden() -> PathBuf {
    bursar_golden::path("qwen2_5_vl")
}

fn options(hub: &Hub, cache: &Folder) -> HubOptions {
    HubOptions {
        endpoint: hub.endpoint(),
        token: Some("a-token".to_owned()),
        cache: Some(cache.path().to_owned()),
        ..HubOptions::default()
    }
}

fn fetch(hub: &Hub, cache: &Folder) -> Result<PathBuf, CheckpointError> {
    HubModel::new(ID, options(hub, cache)).fetch(&())
}

fn is_about_weights(asked: &Asked) -> bool {
    asked.what.contains("safetensors") && !asked.what.contains("index")
}

#[test]
fn a_sharded_model_is_fetched_once_then_starts_offline() {
    story(async {
        let (hub, cache) = (Hub::of(&golden()), Folder::empty());
        let runtime = runtime_on(&device()).await;
        let moments = Arc::new(Mutex::new(Vec::new()));
        let seen = moments.clone();
        let note = move |moment| seen.lock().expect("no panic").push(moment);
        let source = || ModelSource::hub_with(ID, options(&hub, &cache));
        let model = runtime.load_with(source(), small(), note).await.unwrap_or_else(|error| panic!("{error}"));
        let reply = answer(&model, text("Who are you?").max_tokens(3)).await;

        for file in ["model-00001-of-00002.safetensors", "config.json", "tokenizer.json"] {
            let bytes = std::fs::metadata(golden().join(file)).expect("a file").len();
            let is_end = |moment: &Progress| {
                matches!(moment, Progress::Fetching { file: of, done, total }
                if &**of == file && done == total && total.0 == bytes)
            };
            assert!(moments.lock().expect("no panic").iter().any(is_end), "the end of {file} is reported");
        }
        // The cache layout that all Hugging Face tools share.
        let folder = cache.path().join("models--tiny--model");
        assert_eq!(COMMIT, std::fs::read_to_string(folder.join("refs/main")).expect("a ref"));
        let pointer = folder.join("snapshots").join(COMMIT).join("config.json");
        assert!(
            pointer
                .canonicalize()
                .expect("the link is not dangling")
                .starts_with(folder.join("blobs").canonicalize().expect("blobs"))
        );
        assert!(
            hub.asked().iter().all(|asked| asked.has_token != asked.what.contains("/elsewhere/")),
            "{:?}",
            hub.asked()
        );

        runtime.unload("model").await.expect("the model unloads");
        let questions = hub.asked().len();
        let offline = source();
        drop(hub);
        let model = runtime.load_with(offline, small(), |_| {}).await.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(reply, answer(&model, text("Who are you?").max_tokens(3)).await);
        assert!(questions > 10, "the hub was asked for every file");
        runtime.shutdown().await;
    });
}

#[test]
fn offline_mode_uses_the_cache_and_reports_a_missing_model() {
    let (hub, cache) = (Hub::of(&golden()), Folder::empty());
    let offline = HubOptions { is_offline: true, ..options(&hub, &cache) };
    let fetched = || HubModel::new(ID, offline.clone()).fetch(&());
    let error = fetched().expect_err("nothing is cached");
    assert!(matches!(&error, CheckpointError::Hub(HubError::Offline { file }) if file == "config.json"), "{error:?}");
    assert!(error.hint().contains("HF_HUB_OFFLINE"), "{}", error.hint());
    assert!(hub.asked().is_empty(), "the hub is not asked");
    let folder = fetch(&hub, &cache).unwrap_or_else(|error| panic!("{error}"));
    let asked = hub.asked().len();
    assert_eq!(fetched().unwrap_or_else(|error| panic!("{error}")), folder);
    assert_eq!(hub.asked().len(), asked);
}

#[test]
fn a_draft_model_needs_no_tokenizer_and_may_be_in_torchs_format() {
    let (hub, cache) = (Hub::of(&bursar_golden::path("pytorch/eagle3")), Folder::empty());
    let model = |options| HubModel::new(ID, options).as_draft_model();
    let folder = model(options(&hub, &cache)).fetch(&()).unwrap_or_else(|error| panic!("{error}"));
    let target = Checkpoint::open(CheckpointSource::Folder(bursar_golden::path("llama"))).expect("the model opens");
    target.with_draft_model(&CheckpointSource::Folder(folder.clone())).expect("the head opens");
    // Another tool may not have recorded which files the repository lacks.
    let absent = cache.path().join("models--tiny--model").join(".no_exist");
    std::fs::remove_dir_all(&absent).expect("absent files are remembered");
    let offline = HubOptions { is_offline: true, ..options(&hub, &cache) };
    let asked = hub.asked().len();
    assert_eq!(model(offline).fetch(&()).unwrap_or_else(|error| panic!("{error}")), folder);
    assert_eq!(hub.asked().len(), asked);
    let error = HubModel::new(ID, options(&hub, &cache)).fetch(&()).expect_err("a model needs a tokenizer");
    assert!(
        matches!(&error, CheckpointError::Hub(HubError::NoFile { file, .. }) if file == "tokenizer.json"),
        "{error}"
    );
}

#[test]
fn a_partial_file_of_another_tool_is_not_continued() {
    let hub = Hub::of(&golden());
    let (first, second) = (Folder::empty(), Folder::empty());
    let good = fetch(&hub, &first).unwrap_or_else(|error| panic!("{error}"));
    // Partial files of another tool: the full length, but zeros instead of data.
    let blobs = second.path().join("models--tiny--model/blobs");
    std::fs::create_dir_all(&blobs).expect("a folder");
    for blob in std::fs::read_dir(first.path().join("models--tiny--model/blobs")).expect("blobs") {
        let blob = blob.expect("a blob");
        let bytes = vec![0; blob.metadata().expect("a size").len() as usize];
        std::fs::write(blobs.join(format!("{}.incomplete", blob.file_name().display())), bytes).expect("a file");
    }
    let fetched = fetch(&hub, &second).unwrap_or_else(|error| panic!("{error}"));
    for file in ["config.json", "model-00001-of-00002.safetensors"] {
        let content = |folder: &Path| std::fs::read(folder.join(file)).expect("a file");
        assert!(content(&good) == content(&fetched), "{file} differs from the hub's file");
    }
}

/// A watch that cancels the fetch after this many polls.
struct Waiting(AtomicUsize);

impl FetchWatch for Waiting {
    fn fetched(&self, _: &str, _: Bytes, _: Bytes) {}

    fn is_cancelled(&self) -> bool {
        self.0.fetch_sub(1, Relaxed) == 1
    }
}

#[test]
fn a_fetch_waiting_for_another_process_can_be_cancelled() {
    let hub = Hub::of(&golden());
    let (first, second) = (Folder::empty(), Folder::empty());
    fetch(&hub, &first).unwrap_or_else(|error| panic!("{error}"));
    // Another process holds the lock of every file.
    let locks = |cache: &Folder| cache.path().join(".locks/models--tiny--model");
    std::fs::create_dir_all(locks(&second)).expect("a folder");
    let held = std::fs::read_dir(locks(&first)).expect("locks").map(|lock| {
        let lock = File::create(locks(&second).join(lock.expect("a lock").file_name())).expect("a file");
        lock.lock().expect("no other process holds the lock");
        lock
    });
    let held: Vec<File> = held.collect();
    assert!(!held.is_empty());
    let watch = Waiting(AtomicUsize::new(4));
    let outcome = HubModel::new(ID, options(&hub, &second)).fetch(&watch);
    assert!(matches!(outcome, Err(CheckpointError::Hub(HubError::Cancelled))), "{outcome:?}");
    assert!(!second.path().join("models--tiny--model/snapshots").exists(), "no file was taken from the other process");
}

#[test]
fn each_hub_refusal_is_a_typed_error_without_leftovers() {
    story(async {
        let (hub, cache) = (Hub::of(&golden()), Folder::empty());
        let runtime = runtime_on(&device()).await;
        let before = runtime.budget().snapshot().await.expect("the budget answers");
        type Says = fn(&HubError) -> bool;
        let table: Vec<(&str, &str, Fault, Says, &str)> = vec![
            ("no id", "just-a-name", Fault::Nothing, |e| matches!(e, HubError::Id { .. }), "just-a-name"),
            ("an id that leaves the cache", "../name", Fault::Nothing, |e| matches!(e, HubError::Id { .. }), "../name"),
            ("an id of three parts", "a/b/c", Fault::Nothing, |e| matches!(e, HubError::Id { .. }), "a/b/c"),
            (
                "a revision that leaves the cache",
                "tiny/model@../x",
                Fault::Nothing,
                |e| matches!(e, HubError::Revision { .. }),
                "../x",
            ),
            (
                "no such model",
                "tiny/other",
                Fault::Nothing,
                |e| matches!(e, HubError::NoRepository { .. }),
                "tiny/other@main",
            ),
            ("no such revision", "tiny/model@v9", Fault::Nothing, |e| matches!(e, HubError::NoRepository { .. }), "v9"),
            (
                "no token",
                ID,
                Fault::Status(401, "GatedRepo"),
                |e| matches!(e, HubError::Refused { status: 401, .. }),
                "401",
            ),
            (
                "a license to accept",
                ID,
                Fault::Status(403, "GatedRepo"),
                |e| matches!(e, HubError::Refused { .. }),
                "403",
            ),
            (
                "a hub that is down",
                ID,
                Fault::Status(503, ""),
                |e| matches!(e, HubError::Status { status: 503, .. }),
                "503",
            ),
            (
                "no commit",
                ID,
                Fault::Header("X-Repo-Commit", None),
                |e| matches!(e, HubError::Answer { .. }),
                "x-repo-commit",
            ),
            (
                "a commit that leaves the cache",
                ID,
                Fault::Header("X-Repo-Commit", Some("../../../../etc")),
                |e| matches!(e, HubError::Answer { .. }),
                "x-repo-commit",
            ),
            (
                "an etag that leaves the cache",
                ID,
                Fault::Header("ETag", Some("\"../../config\"")),
                |e| matches!(e, HubError::Answer { .. }),
                "etag",
            ),
            (
                "a config of a terabyte",
                ID,
                Fault::Header("X-Linked-Size", Some("1000000000000")),
                |e| matches!(e, HubError::TooLarge { bytes: 1_000_000_000_000, .. }),
                "134217728",
            ),
            (
                "connections without a byte",
                ID,
                Fault::CutAfter(0),
                |e| matches!(e, HubError::Interrupted { bytes: 0, .. }),
                "0 of",
            ),
            ("a body that is too long", ID, Fault::TooLong, |e| matches!(e, HubError::Size { .. }), "announced"),
        ];
        for (name, id, fault, says, word) in table {
            hub.fail(fault);
            let error = runtime.load_with(ModelSource::hub_with(id, options(&hub, &cache)), small(), |_| {}).await;
            let error = error.err().expect(name);
            let RuntimeError::Start(start) = &error else { panic!("{name}: {error:?}") };
            let StartError::Checkpoint(CheckpointError::Hub(refusal)) = &**start else { panic!("{name}: {error:?}") };
            assert!(says(refusal), "{name}: {refusal:?}");
            assert!(error.to_string().contains(word), "{name} does not say '{word}': {error}");
            assert!(!error.hint().is_empty(), "{name} has no hint");
            assert!(!format!("{error:?}").contains("a-token"), "{name} shows the token");
            let after = runtime.budget().snapshot().await.expect("the budget answers");
            assert_eq!((after.granted, after.leases), (before.granted, before.leases.clone()), "{name}");
        }
        let escaped = ["etc", "config", "x"].map(|name| cache.path().join("..").join(name));
        assert!(escaped.iter().all(|path| !path.exists()), "nothing was written outside the cache");
        hub.fail(Fault::Nothing);
        fetch(&hub, &cache).expect("earlier failures do not break a later fetch");
        runtime.shutdown().await;
    });
}

#[test]
fn an_unreachable_hub_is_distinguished_from_a_refusing_one() {
    let (hub, cache) = (Hub::of(&golden()), Folder::empty());
    let closed = options(&hub, &cache);
    drop(hub);
    let error = HubModel::new(ID, closed).fetch(&()).expect_err("no server listens");
    assert!(matches!(error, CheckpointError::Hub(HubError::Unreachable { .. })), "{error:?}");
    assert!(error.to_string().contains("127.0.0.1") && error.hint().contains("network"), "{error}: {}", error.hint());
}

#[test]
fn a_broken_download_resumes_where_it_broke() {
    let (hub, cache) = (Hub::of(&golden()), Folder::empty());
    hub.fail(Fault::CutAfter(700_000));
    let folder = fetch(&hub, &cache).expect("the fetch ends");
    let mut continued: Vec<_> = hub.asked().iter().map(|asked| asked.from).filter(|from| *from > 0).collect();
    continued.dedup(); // A redirect repeats the request at another URL.
    assert_eq!(vec![700_000, 1_400_000, 700_000, 1_400_000], continued, "each of the two shards is continued twice");
    for file in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        assert_eq!(
            std::fs::read(golden().join(file)).expect("the golden file"),
            std::fs::read(folder.join(file)).expect("the fetched file")
        );
    }
}

#[test]
fn a_hub_that_cannot_resume_discards_the_partial_file() {
    let (hub, cache) = (Hub::of(&golden()), Folder::empty());
    hub.fail(Fault::NoRanges(700_000));
    let error = fetch(&hub, &cache).expect_err("no fetch gets beyond 700,000 bytes");
    let CheckpointError::Hub(HubError::Interrupted { bytes, bytes_total, .. }) = &error else { panic!("{error:?}") };
    assert!(*bytes <= 700_000 && *bytes_total > 1_000_000, "{error}");
    assert!(error.hint().contains("again"), "{}", error.hint());
    // A later fetch continues with the partial files.
    hub.fail(Fault::Nothing);
    fetch(&hub, &cache).expect("the fetch ends");
}

#[test]
fn a_renamed_model_is_found_under_its_old_name() {
    let (hub, cache) = (Hub::of(&golden()), Folder::empty());
    let folder = HubModel::new("old/name", options(&hub, &cache)).fetch(&()).expect("the request is redirected");
    assert!(folder.join("model.safetensors.index.json").is_file());
}

#[test]
fn an_index_may_name_only_existing_plain_files() {
    for (shard, is_right) in [
        (
            "../../../../etc/passwd",
            (|e| matches!(e, CheckpointError::ShardName { .. })) as fn(&CheckpointError) -> bool,
        ),
        ("a?b=c", |e| matches!(e, CheckpointError::ShardName { .. })),
        ("absent.safetensors", |e| matches!(e, CheckpointError::Hub(HubError::NoFile { .. }))),
    ] {
        let (hub, cache) = (Hub::of(&golden()), Folder::empty());
        hub.put("model.safetensors.index.json", &format!(r#"{{"weight_map": {{"a": "{shard}"}}}}"#));
        let error = fetch(&hub, &cache).expect_err(shard);
        assert!(is_right(&error), "{shard}: {error:?}");
        assert!(error.to_string().contains(shard) && !error.hint().is_empty(), "{error}");
        let asked = hub.asked();
        assert!(!asked.iter().any(|asked| asked.what.contains("..") || asked.what.contains('?')), "{asked:?}");
    }
}

#[test]
fn a_file_missing_on_the_hub_is_requested_once() {
    let (hub, cache) = (Hub::of(&golden()), Folder::empty());
    hub.remove("generation_config.json");
    fetch(&hub, &cache).expect("generation_config.json may be missing");
    let before = hub.asked().len();
    assert_eq!(fetch(&hub, &cache).expect("all files are cached"), fetch(&hub, &cache).expect("all files are cached"));
    assert_eq!(before, hub.asked().len(), "the hub is not asked again");
    assert!(hub.asked().iter().any(is_about_weights));
    hub.remove("tokenizer.json");
    let other = Folder::empty();
    let error = fetch(&hub, &other).expect_err("every checkpoint needs a tokenizer");
    assert!(
        matches!(&error, CheckpointError::Hub(HubError::NoFile { file, .. }) if file == "tokenizer.json"),
        "{error}"
    );
    assert!(!hub.asked().iter().skip(before).any(is_about_weights), "no weights for a model that cannot be served");
}

#[test]
fn a_plan_fetches_no_weights() {
    let (hub, cache) = (Hub::of(&golden()), Folder::empty());
    let plan = |model: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        command.args(["plan", "--json", "--device", "host", "--model", model]);
        command.env("HF_ENDPOINT", hub.endpoint()).env("HF_HUB_CACHE", cache.path());
        let output = command.output().expect("the binary is there");
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    };
    let (of_hub, of_folder) = (plan(ID), plan(&golden().display().to_string()));
    assert_eq!(of_hub["claims"], of_folder["claims"]);
    assert!(!hub.asked().is_empty() && !hub.asked().iter().any(is_about_weights), "{:?}", hub.asked());
}

#[test]
fn tokenizer_parts_are_fetched_without_a_tokenizer_json() {
    let (hub, cache) = (Hub::of(&golden()), Folder::empty());
    hub.remove("tokenizer.json");
    hub.put("vocab.json", r#"{"a": 0, "b": 1}"#);
    hub.put("merges.txt", "#version: 0.2\n");
    hub.put("processor_config.json", "{}");
    let folder = fetch(&hub, &cache).unwrap_or_else(|error| panic!("{error}"));
    for file in ["vocab.json", "merges.txt", "processor_config.json"] {
        assert!(folder.join(file).is_file(), "{file}");
    }
    let before = hub.asked().len();
    fetch(&hub, &cache).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(before, hub.asked().len(), "the hub is not asked again");
}

#[test]
fn an_unload_during_a_fetch_does_not_wait_for_downloads() {
    story(async {
        let (hub, cache) = (Hub::of(&golden()), Folder::empty());
        hub.fail(Fault::Stall);
        let runtime = runtime_on(&device()).await;
        let (reached, mut fetching) = tokio::sync::mpsc::channel(1);
        let note = move |moment: Progress| {
            if matches!(&moment, Progress::Fetching { file, .. } if file.ends_with(".safetensors")) {
                let _ = reached.try_send(());
            }
        };
        let source = ModelSource::hub_with(ID, options(&hub, &cache));
        let loading = {
            let runtime = runtime.clone();
            tokio::spawn(async move { runtime.load_with(source, small(), note).await.map(drop) })
        };
        fetching.recv().await;
        let begun = std::time::Instant::now();
        runtime.unload("model").await.expect("the model unloads");
        assert!(begun.elapsed().as_secs() < 5, "an unload does not wait for a silent hub (30 s)");
        assert!(matches!(loading.await.expect("no panic"), Err(RuntimeError::Start(_))));
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert!(ledger.leases.is_empty(), "{ledger}");
        runtime.shutdown().await;
    });
}
