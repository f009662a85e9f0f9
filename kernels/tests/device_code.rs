//! Checks that the embedded device code was compiled from the sources in `kernels/cuda`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read,
    iter,
    path::{Path, PathBuf},
};

use lzma_rust2::XzReader;
use serde_json::Value;
use sha2::{Digest, Sha256};

const HINT: &str = "run `python3 kernels/cuda/compile.py`";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")
}

/// The string literals of a variable in `compile.py`: one text per line of the list, which joins
/// the literals of the line with spaces.
fn texts_of(variable: &str) -> Vec<String> {
    let script = fs::read_to_string(folder().join("compile.py")).expect("the file exists");
    let mut lines = script.lines().skip_while(|line| !line.starts_with(&format!("{variable} = ")));
    let first = lines.next().unwrap_or_else(|| panic!("{variable} is not in compile.py"));
    let is_open = first.ends_with(['[', '{']);
    let others = lines.take_while(|line| is_open && !line.starts_with([']', '}']));
    let texts = |line: &str| line.split('"').skip(1).step_by(2).collect::<Vec<_>>().join(" ");
    iter::once(first).chain(others).map(texts).filter(|text| !text.is_empty()).collect()
}

/// Compiler and options, as they are in `compile.py` now.
fn options() -> String {
    ["WHEELS", "COMMON", "TARGETS", "PTX_VERSION"].map(texts_of).concat().join("\n")
}

/// File name endings of the code that is compiled from the source: the targets in its `// Targets:`
/// line, or, without such a line, all targets except those in `NAMED_ALONE` of `compile.py`.
fn endings_of(source: &Path) -> BTreeSet<String> {
    let all = texts_of("TARGETS").into_iter().map(|text| text.split(' ').next().expect("an ending").to_owned());
    let text = fs::read_to_string(source).expect("the file exists");
    let Some(targets) = text.lines().find_map(|line| line.strip_prefix("// Targets: ")) else {
        let named_alone = texts_of("NAMED_ALONE");
        return all.filter(|ending| !named_alone.contains(ending)).collect();
    };
    let targets: BTreeSet<&str> = targets.split(", ").collect();
    let is_asked = |ending: &String| ending.split('.').next().is_some_and(|target| targets.contains(target));
    let asked: BTreeSet<String> = all.filter(is_asked).collect();
    assert_eq!(asked.len(), targets.len(), "{} names a target that compile.py does not have", source.display());
    asked
}

fn name_of(source: &Path) -> String {
    source.file_stem().expect("a name").to_string_lossy().into_owned()
}

fn manifest() -> Value {
    let manifest = fs::read_to_string(folder().join("compiled/manifest.json")).expect("the kernels were compiled");
    serde_json::from_str(&manifest).expect("JSON")
}

/// The files of all archives by name, such as `rms_norm.sm_80.ptx`. Each file must be in the
/// archive of its target.
fn compiled() -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for target in texts_of("TARGETS").iter().map(|text| text.split('.').next().expect("a target")) {
        let path = folder().join(format!("compiled/{target}.tar.xz"));
        let archive = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}: {HINT}", path.display()));
        for entry in tar::Archive::new(XzReader::new(&archive[..], false)).entries().expect("a tar archive") {
            let mut entry = entry.expect("an entry");
            let name = entry.path().expect("a name").to_string_lossy().into_owned();
            assert_eq!(name.split('.').nth(1), Some(target), "{name} is in {}", path.display());
            let mut code = Vec::new();
            entry.read_to_end(&mut code).expect("the contents of the entry are read");
            files.insert(name, code);
        }
    }
    files
}

/// The file and all files of this project that it includes, sorted by path.
fn sources_of(source: &Path) -> BTreeSet<PathBuf> {
    let (mut found, mut left) = (BTreeSet::new(), vec![source.to_owned()]);
    while let Some(file) = left.pop() {
        if !found.insert(file.clone()) {
            continue;
        }
        let text = fs::read_to_string(&file).expect("the included source exists");
        let included = text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.strip_suffix('"'));
        left.extend(included.map(|name| match file.with_file_name(name) {
            beside if beside.exists() => beside,
            _ => folder().join("include").join(name),
        }));
    }
    found
}

/// Like `code_of` in `compile.py`: the text without comments, trailing spaces and empty lines.
fn code_of(text: &str) -> String {
    let (mut kept, mut continues) = (String::new(), false);
    for line in text.split('\n') {
        let is_comment = line.trim_start().starts_with("//");
        let is_block = line.contains("/*") || line.contains("*/");
        let is_special = continues || line.ends_with('\\') || is_block || line.contains('"') && !is_comment;
        let line = if is_special { line } else { line.split("//").next().unwrap_or_default().trim_end() };
        continues = line.ends_with('\\');
        if !line.is_empty() || is_special {
            kept += line;
            kept.push('\n');
        }
    }
    kept
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn kernels() -> Vec<PathBuf> {
    let files =
        fs::read_dir(folder()).expect("the sources exist").map(|entry| entry.expect("the entry is read").path());
    let mut kernels: Vec<PathBuf> = files.filter(|file| file.extension().is_some_and(|name| name == "cu")).collect();
    kernels.sort();
    assert!(!kernels.is_empty());
    kernels
}

#[test]
fn compiled_device_code_matches_its_sources() {
    let (manifest, options, compiled) = (manifest(), options(), compiled());
    assert_eq!(
        manifest["options"].as_str(),
        Some(&*options),
        "the compiler or its options differ from compile.py: {HINT}"
    );
    for source in kernels() {
        let name = name_of(&source);
        let known = &manifest["files"][&name];
        let mut digest = Sha256::new();
        for file in sources_of(&source) {
            let place =
                file.strip_prefix(folder()).expect("the source is in the kernel folder").to_string_lossy().into_owned();
            digest.update(format!("{place}\n{}", code_of(&fs::read_to_string(&file).expect("the file is read"))));
        }
        digest.update(&options);
        assert_eq!(
            known["sources"].as_str(),
            Some(&*hex(digest)),
            "the sources of {name} changed after compilation: {HINT}"
        );
        for (ending, expected) in known["compiled"].as_object().expect("the manifest lists the targets") {
            let file = format!("{name}.{ending}");
            let code = compiled.get(&file).unwrap_or_else(|| panic!("no archive has {file}: {HINT}"));
            let digest = hex(Sha256::new_with_prefix(code));
            assert_eq!(expected.as_str(), Some(&*digest), "{file} differs from the compiled file: {HINT}");
        }
    }
}

#[test]
fn the_compiled_files_are_exactly_the_kernels_declared_targets() {
    let compiled_names = |source: &PathBuf| {
        endings_of(source).into_iter().map(|ending| format!("{}.{ending}", name_of(source))).collect::<Vec<_>>()
    };
    let expected: BTreeSet<String> = kernels().iter().flat_map(compiled_names).collect();

    let manifest = manifest();
    let files = manifest["files"].as_object().expect("the manifest lists the kernels").iter();
    let stated = files.flat_map(|(name, file)| {
        let compiled = file["compiled"].as_object().expect("the manifest lists the targets");
        compiled.keys().map(move |ending| format!("{name}.{ending}"))
    });
    assert_eq!(stated.collect::<BTreeSet<_>>(), expected, "the manifest lists other files: {HINT}");

    assert_eq!(compiled().into_keys().collect::<BTreeSet<_>>(), expected, "the archives hold other files: {HINT}");
}

#[test]
fn device_code_archives_are_embedded_and_stay_below_their_limit() {
    let embedded = include_str!("../src/cuda/module_images.rs");
    let mut bytes = 0;
    for file in fs::read_dir(folder().join("compiled")).expect("the kernels were compiled") {
        let file = file.expect("an entry");
        bytes += file.metadata().expect("a size").len();
        let name = file.file_name().to_string_lossy().into_owned();
        let Some(target) = name.strip_suffix(".tar.xz") else {
            assert_eq!(name, "manifest.json", "compiled/ holds only archives and their manifest");
            continue;
        };
        assert!(embedded.contains(&format!("archive!(\"{target}\")")), "{name} is not in src/cuda/module_images.rs");
    }
    assert!(bytes <= 11 << 18, "device code takes {bytes} bytes");
}

#[test]
fn a_thread_block_holds_the_scores_of_every_allowed_cluster() {
    let source = fs::read_to_string(folder().join("clustered_argmax.cu")).expect("the kernel's source");
    let line = format!("constexpr uint32_t CLUSTERS_MAX = {};", bursar_kernels::ops::clustered_argmax::CLUSTERS_MAX);
    assert!(source.contains(&line), "clustered_argmax.cu does not have `{line}`");
}
