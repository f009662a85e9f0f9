//! Profile records on disk: a written record is read back, and any other content is
//! ignored with a reason.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use bursar_actors::{
    profile::{Peak, ProfileKey, RecordError, RecordLookup, RecordPath, RecordedProfile},
    token_interval::{MeasuredCosts, MeasuredStep, StepWork},
};
use bursar_budgets::Bytes;
use bursar_kernels::Tuning;
use bursar_model::cache_file::{BYTES_MAX, CacheFileError};
use proptest::{collection::vec, option::of, prelude::*};

/// A folder for one test, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn empty() -> Self {
        static FOLDERS: AtomicUsize = AtomicUsize::new(0);
        let name = format!("records-{}-{}", std::process::id(), FOLDERS.fetch_add(1, Relaxed));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&folder).expect("a temporary folder");
        Folder(folder)
    }

    fn place(&self) -> RecordPath {
        RecordPath::new(&self.0, "demo", "(embedded)", "NVIDIA H200")
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("the folder exists").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn profile_key(facts: &[(&str, &str)]) -> ProfileKey {
    let mut profile_key = ProfileKey::default();
    facts.iter().for_each(|(name, fact)| profile_key.add(*name, *fact));
    profile_key
}

fn profile(profile_key: ProfileKey) -> RecordedProfile {
    RecordedProfile {
        profile_key,
        sequences: 8,
        step_tokens: 48,
        launch_patches: 128,
        cache_rows: 96,
        kv_blocks: 1234,
        shrinks: 1,
        peaks: vec![Peak { worst_case: "largest step".into(), workspace: Bytes(7_777_777) }],
        tuning: Some(Tuning::default()),
        costs: Some(costs(&[1, 700])),
    }
}

/// Measured steps with only prompt tokens, which took these times in µs.
fn costs(micros: &[u64]) -> MeasuredCosts {
    let step =
        |micros: &u64| MeasuredStep { work: StepWork { prompt_tokens: 16, ..StepWork::default() }, micros: *micros };
    MeasuredCosts { steps: micros.iter().map(step).collect(), launches: Vec::new() }
}

fn on(driver: &str) -> ProfileKey {
    profile_key(&[("driver", driver), ("weights", "c0ffee")])
}

prop_compose! {
    fn any_profile()(
        facts in vec((".{0,24}", ".{0,24}"), 0..12),
        numbers in any::<[usize; 5]>(),
        shrinks in any::<u32>(),
        peaks in vec((".{0,24}", any::<u64>()), 0..8),
        micros in of(vec(any::<u64>(), 0..4)),
    ) -> RecordedProfile {
        let mut profile_key = ProfileKey::default();
        facts.into_iter().for_each(|(name, fact)| profile_key.add(name, fact));
        let [sequences, step_tokens, launch_patches, cache_rows, kv_blocks] = numbers;
        let peaks = peaks.into_iter().map(|(worst_case, bytes)| Peak { worst_case, workspace: Bytes(bytes) }).collect();
        let (tuning, costs) = (None, micros.map(|micros| costs(&micros)));
        RecordedProfile {
            profile_key, sequences, step_tokens, launch_patches, cache_rows, kv_blocks, shrinks, peaks, tuning, costs,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_profile_read_back_equals_the_one_written(first in any_profile(), second in any_profile()) {
        let folder = Folder::empty();
        let place = folder.place();
        place.keep(first.clone()).expect("the record is written");
        prop_assert_eq!(place.find(&first.profile_key), Ok(RecordLookup::Applies(first.clone())));
        place.keep(second.clone()).expect("the record is written");
        prop_assert_eq!(place.find(&second.profile_key), Ok(RecordLookup::Applies(second.clone())));
        if first.profile_key != second.profile_key {
            prop_assert_eq!(place.find(&first.profile_key), Ok(RecordLookup::Applies(first)), "each key keeps its record");
        }
    }

    #[test]
    fn a_truncated_profile_file_is_an_error_without_a_panic(profile in any_profile(), cut in 0.0..1.0f64) {
        let folder = Folder::empty();
        let place = folder.place();
        place.keep(profile.clone()).expect("the record is written");
        let whole = fs::read(place.path()).expect("the file exists");
        // At least two bytes are cut, because a file without its last line break
        // may still be complete.
        let cut = ((whole.len() - 2) as f64 * cut) as usize;
        fs::write(place.path(), &whole[..cut]).expect("the file is truncated");
        prop_assert!(matches!(place.find(&profile.profile_key), Err(RecordError::Broken { .. })), "cut at {}", cut);
    }
}

#[test]
fn a_profile_with_another_key_lists_every_difference() {
    let folder = Folder::empty();
    let place = folder.place();
    assert_eq!(place.find(&on("580.1")), Ok(RecordLookup::Nothing));
    place.keep(profile(on("580.1"))).expect("the record is written");
    let Ok(RecordLookup::Differs(differences)) = place.find(&on("580.2")) else {
        panic!("the lookup reports no differences")
    };
    let reasons: Vec<_> = differences.iter().map(ToString::to_string).collect();
    assert_eq!(reasons, ["driver was 580.1, is 580.2"]);
    let other = profile_key(&[("driver", "580.2"), ("weights", "decaf"), ("rotation", "on")]);
    let Ok(RecordLookup::Differs(differences)) = place.find(&other) else {
        panic!("the lookup reports no differences")
    };
    let reasons: Vec<_> = differences.iter().map(ToString::to_string).collect();
    assert_eq!(reasons, ["driver was 580.1, is 580.2", "weights was c0ffee, is decaf", "rotation was unknown, is on"]);
}

#[test]
fn the_four_latest_profiles_are_kept_and_the_nearest_compared() {
    let folder = Folder::empty();
    let place = folder.place();
    for driver in ["1", "2", "3", "4"] {
        place.keep(profile(on(driver))).expect("the record is written");
    }
    // A profile written again replaces its older version.
    place.keep(RecordedProfile { kv_blocks: 5, ..profile(on("1")) }).expect("the record is written");
    place.keep(profile(on("5"))).expect("the record is written");
    let kv_blocks = |driver: &str| match place.find(&on(driver)) {
        Ok(RecordLookup::Applies(profile)) => Some(profile.kv_blocks),
        _ => None,
    };
    assert_eq!(["1", "2", "3", "4", "5"].map(kv_blocks), [Some(5), None, Some(1234), Some(1234), Some(1234)]);
    let near = profile_key(&[("driver", "3"), ("weights", "decaf")]);
    let Ok(RecordLookup::Differs(differences)) = place.find(&near) else { panic!("the lookup reports no differences") };
    assert_eq!(differences.len(), 1, "the nearest record has the same driver: {differences:?}");
}

#[test]
fn each_model_and_device_has_a_separate_profile_file() {
    let folder = Folder::empty();
    let of = |model, origin, device| RecordPath::new(&folder.0, model, origin, device).path();
    let one = of("demo", "/models/demo", "NVIDIA H200");
    for other in [
        of("demo 2", "/models/demo", "NVIDIA H200"),
        of("demo", "/other/demo", "NVIDIA H200"),
        of("demo", "/models/demo", "NVIDIA H100"),
        of("demo/models", "demo", "NVIDIA H200"),
    ] {
        assert_ne!(one, other);
        assert_eq!(other.parent(), Some(&*folder.0), "no model name leads out of the folder");
    }
    assert_eq!(of("../../etc", "x", "..").parent(), Some(&*folder.0));
}

/// The format number of a file written now. The tests below use this number, so they stay valid
/// when it changes.
fn current_format() -> u64 {
    let folder = Folder::empty();
    folder.place().keep(profile(on("1"))).expect("the record is written");
    let file = fs::read(folder.place().path()).expect("the record exists");
    serde_json::from_slice::<serde_json::Value>(&file).expect("the record is JSON")["format"]
        .as_u64()
        .expect("a number")
}

#[test]
fn an_invalid_profile_is_ignored_with_a_reason_and_replaced() {
    let good = |change: fn(serde_json::Value) -> serde_json::Value| {
        let folder = Folder::empty();
        folder.place().keep(profile(on("1"))).expect("the record is written");
        let value = serde_json::from_slice(&fs::read(folder.place().path()).expect("the file exists")).expect("JSON");
        serde_json::to_vec(&change(value)).expect("JSON")
    };
    let header = format!("{{\"format\": {}, \"profiles\": ", current_format());
    let format = |text: &str| text.starts_with("format was ");
    let broken = |text: &str| text.starts_with("it is not valid at line ");
    type Matches = fn(&str) -> bool;
    let files: Vec<(&str, Vec<u8>, Matches)> = vec![
        ("nothing", Vec::new(), broken),
        ("zeros, as after a crash", vec![0; 4096], broken),
        ("not JSON", b"profile".to_vec(), broken),
        ("not UTF-8", [header.as_bytes(), b"[\"\xff\"]}"].concat(), broken),
        ("another kind of JSON", b"[1, 2]".to_vec(), broken),
        ("no format", b"{\"profiles\": []}".to_vec(), broken),
        (
            "a later format",
            format!("{{\"format\": {}, \"measured\": {{}}}}", current_format() + 1).into_bytes(),
            format,
        ),
        ("the largest format number", b"{\"format\": 18446744073709551615}".to_vec(), format),
        ("a format that is text", b"{\"format\": \"1\", \"profiles\": []}".to_vec(), broken),
        ("two objects", [good(|value| value), b"{}".to_vec()].concat(), broken),
        (
            "a missing field",
            good(|mut value| {
                value["profiles"][0].as_object_mut().expect("an object").remove("kv_blocks");
                value
            }),
            broken,
        ),
        (
            "an additional field",
            good(|mut value| {
                value["profiles"][0]["more"] = 1.into();
                value
            }),
            broken,
        ),
        (
            "a negative size",
            good(|mut value| {
                value["profiles"][0]["kv_blocks"] = (-1).into();
                value
            }),
            broken,
        ),
        (
            "a size that is not a number",
            good(|mut value| {
                value["profiles"][0]["cache_rows"] = "many".into();
                value
            }),
            broken,
        ),
        (
            "a fact that is not text",
            good(|mut value| {
                value["profiles"][0]["basis"]["driver"] = 580.into();
                value
            }),
            broken,
        ),
        ("deeply nested", [header.into_bytes(), b"[".repeat(100_000)].concat(), broken),
    ];
    for (what, content, is_expected) in files {
        let folder = Folder::empty();
        let place = folder.place();
        fs::write(place.path(), content).expect("the file is written");
        let error = place.find(&on("1")).expect_err(what);
        assert!(is_expected(&error.to_string()), "{what}: {error}");
        place.keep(profile(on("1"))).expect("the record is replaced");
        assert_eq!(place.find(&on("1")), Ok(RecordLookup::Applies(profile(on("1")))), "{what}");
        assert_eq!(folder.names().len(), 1, "no temporary file is left");
    }
}

#[test]
fn an_empty_profile_list_finds_nothing() {
    let folder = Folder::empty();
    let file = format!("{{\"format\": {}, \"profiles\": []}}", current_format());
    fs::write(folder.place().path(), file).expect("the file is written");
    assert_eq!(folder.place().find(&on("1")), Ok(RecordLookup::Nothing));
}

#[test]
fn a_special_or_oversized_profile_file_is_not_read() {
    let folder = Folder::empty();
    let place = folder.place();
    fs::create_dir(place.path()).expect("a folder with the name of the file is created");
    assert_eq!(place.find(&on("1")), Err(CacheFileError::NotAFile.into()));
    assert!(matches!(place.keep(profile(on("1"))), Err(RecordError::File(CacheFileError::Unwritable { .. }))));
    assert_eq!(folder.names().len(), 1, "a failed write leaves no temporary file");
    fs::remove_dir(place.path()).expect("the folder is empty");
    fs::write(place.path(), vec![b' '; BYTES_MAX as usize + 1]).expect("the file is written");
    assert_eq!(place.find(&on("1")), Err(CacheFileError::TooLarge { bytes: BYTES_MAX + 1 }.into()));
}

#[test]
fn an_unusable_profile_folder_is_a_typed_error() {
    let folder = Folder::empty();
    let file = folder.0.join("file");
    fs::write(&file, "no folder").expect("the file is written");
    let place = RecordPath::new(&file.join("below"), "demo", "(embedded)", "host");
    assert!(matches!(place.find(&on("1")), Err(RecordError::File(CacheFileError::Unreadable { .. }))));
    assert!(matches!(place.keep(profile(on("1"))), Err(RecordError::File(CacheFileError::Unwritable { .. }))));
    let deep = RecordPath::new(&folder.0.join("not/yet/there"), "demo", "(embedded)", "host");
    assert_eq!(deep.find(&on("1")), Ok(RecordLookup::Nothing));
    deep.keep(profile(on("1"))).expect("missing folders are created");
    assert_eq!(deep.find(&on("1")), Ok(RecordLookup::Applies(profile(on("1")))));
}

#[test]
fn concurrent_readers_always_find_a_complete_profile() {
    let folder = Folder::empty();
    let place = folder.place();
    place.keep(profile(on("1"))).expect("the record is written");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let place = &place;
            scope.spawn(move || {
                for round in 0..50 {
                    let kv_blocks = thread * 1000 + round;
                    place.keep(RecordedProfile { kv_blocks, ..profile(on("1")) }).expect("the record is written");
                    let found = place.find(&on("1"));
                    assert!(matches!(found, Ok(RecordLookup::Applies(_))), "{found:?}");
                }
            });
        }
    });
    assert_eq!(folder.names().len(), 1, "no temporary file is left: {:?}", folder.names());
}
