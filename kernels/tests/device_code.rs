//! The compiled device code that is embedded is that of the sources beside it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use sha2::{Digest, Sha256};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")
}

/// The file and all of ours that it includes, sorted.
fn sources_of(source: &Path) -> BTreeSet<PathBuf> {
    let (mut found, mut left) = (BTreeSet::new(), vec![source.to_owned()]);
    while let Some(file) = left.pop() {
        if !found.insert(file.clone()) {
            continue;
        }
        let text = fs::read_to_string(&file).expect("a source that is included is there");
        let included = text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.strip_suffix('"'));
        left.extend(included.map(|name| match file.with_file_name(name) {
            beside if beside.exists() => beside,
            _ => folder().join("include").join(name),
        }));
    }
    found
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn kernels() -> Vec<PathBuf> {
    let files = fs::read_dir(folder()).expect("the sources are there").map(|entry| entry.expect("it is read").path());
    let mut kernels: Vec<PathBuf> = files.filter(|file| file.extension().is_some_and(|name| name == "cu")).collect();
    kernels.sort();
    assert!(!kernels.is_empty());
    kernels
}

#[test]
fn compiled_device_code_is_that_of_its_sources() {
    let manifest = fs::read_to_string(folder().join("compiled/manifest.json")).expect("it was compiled");
    let manifest: Value = serde_json::from_str(&manifest).expect("JSON");
    let options = manifest["options"].as_str().expect("text");
    let hint = "run `python3 kernels/cuda/compile.py`";
    for source in kernels() {
        let name = source.file_stem().expect("a name").to_string_lossy();
        let known = &manifest["files"][&*name];
        let mut digest = Sha256::new();
        for file in sources_of(&source) {
            let place = file.strip_prefix(folder()).expect("ours").to_string_lossy().into_owned();
            digest.update(format!("{place}\n"));
            digest.update(fs::read(&file).expect("it is read"));
        }
        digest.update(options);
        assert_eq!(known["sources"].as_str(), Some(&*hex(digest)), "{name} is not what was compiled: {hint}");
        for (ending, expected) in known["compiled"].as_object().expect("one a target") {
            let compiled = fs::read(folder().join(format!("compiled/{name}.{ending}"))).expect("it was compiled");
            let digest = hex(Sha256::new_with_prefix(compiled));
            assert_eq!(expected.as_str(), Some(&*digest), "{name}.{ending} is not what was written: {hint}");
        }
    }
}

#[test]
fn every_kernel_is_embedded_and_all_of_them_take_ten_megabytes_at_most() {
    let embedded = include_str!("../src/cuda/images.rs");
    for source in kernels() {
        let name = source.file_stem().expect("a name").to_string_lossy().into_owned();
        assert!(embedded.contains(&format!("\"{name}\"")), "{name} is not in src/cuda/images.rs");
    }
    let compiled = fs::read_dir(folder().join("compiled")).expect("it was compiled");
    let bytes: u64 = compiled.map(|entry| entry.and_then(|entry| entry.metadata()).expect("it is there").len()).sum();
    assert!(bytes <= 10 << 20, "{bytes} bytes of device code");
}
