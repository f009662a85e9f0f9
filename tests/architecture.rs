//! Rules about the source: allowed dependencies, and the code that may allocate memory or read the
//! clock.

#[path = "architecture/language.rs"]
mod language;
#[path = "architecture/modules.rs"]
mod modules;
#[path = "architecture/pages.rs"]
mod pages;

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The folders of the crates, in an order in which each crate depends only on crates before it. The
/// facade in `src` is not listed: it depends on the crates of [`BELOW_THE_FACADE`], and `serve` and
/// `cli` depend on it.
const CRATES: [&str; 6] = ["budgets", "kernels", "model", "actors", "serve", "cli"];
const BELOW_THE_FACADE: [&str; 4] = ["budgets", "kernels", "model", "actors"];
/// The folders with the sources of all crates.
const SOURCES: [&str; 7] = ["budgets/src", "kernels/src", "model/src", "actors/src", "src", "serve/src", "cli/src"];

/// Every Rust file below a folder of the repository: its path from the root, and its text.
fn sources(folder: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![root.join(folder)];
    let mut files: Vec<PathBuf> = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of this repository can be listed") {
            let path = entry.expect("a folder entry").path();
            if path.is_dir() {
                // Skip build output: integrations/dynamo has its own `target` folder.
                folders.extend((!path.ends_with("target")).then_some(path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    let name = |path: &Path| path.strip_prefix(root).expect("below the root").display().to_string().replace('\\', "/");
    let sources: Vec<_> =
        files.iter().map(|path| (name(path), fs::read_to_string(path).expect("a readable source file"))).collect();
    assert!(!sources.is_empty(), "there are sources in {folder}");
    sources
}

/// A file's code without comments and without items that only tests compile.
fn code(text: &str) -> String {
    let mut code = Vec::new();
    let mut lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            code.push(line);
            continue;
        }
        let item = lines.by_ref().find(|line| !line.trim_start().starts_with("#[")).unwrap_or_default();
        if !item.ends_with([';', ',', '}']) {
            // rustfmt indents the closing brace of an item like its first line.
            let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
            lines.by_ref().find(|line| line.starts_with(&end));
        }
    }
    code.join("\n")
}

/// The files of `folder` whose code contains one of `words`, except the `allowed` ones.
fn offenders(folder: &str, words: &[&str], allowed: &[&str]) -> Vec<String> {
    sources(folder)
        .into_iter()
        .filter(|(name, _)| !allowed.iter().any(|allowed| name.starts_with(allowed)))
        .filter_map(|(name, text)| {
            let code = code(&text);
            words.iter().find(|word| code.contains(**word)).map(|word| format!("{name}: {word}"))
        })
        .collect()
}

#[track_caller]
fn assert_none(offenders: Vec<String>, rule: &str) {
    assert!(offenders.is_empty(), "{rule}:\n  {}", offenders.join("\n  "));
}

/// The manifest of the crate in `folder`, up to its dev-dependencies.
fn manifest(folder: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join("Cargo.toml");
    let text = fs::read_to_string(path).expect("each crate has a manifest");
    text.split("[dev-dependencies]").next().unwrap_or_default().to_owned()
}

#[test]
fn crates_depend_only_on_lower_crates() {
    for (place, name) in CRATES.iter().enumerate() {
        let manifest = manifest(name);
        for above in &CRATES[place..] {
            let dependency = format!("bursar-{above}.workspace");
            assert!(!manifest.contains(&dependency), "{name} must not depend on {above}");
        }
        let names_the_facade = ["\nbursar.", "\nbursar "].iter().any(|start| manifest.contains(start));
        assert!(!names_the_facade || !BELOW_THE_FACADE.contains(name), "{name} must not depend on the facade");
    }
}

#[test]
fn each_crate_uses_only_its_allowed_modules() {
    assert_none(
        offenders("budgets/src", &["candle", "ractor::", "tokio", "async fn", "bursar_kernels", "Tensor"], &[]),
        "budgets knows bytes and owners, never tensors, async or actors",
    );
    assert_none(
        // These two files may use `std::fs`: one searches for a library at run time, and the other
        // counts the threads that Linux lists under /proc.
        offenders(
            "kernels/src",
            &["ractor::", "tokio", "std::fs", "safetensors", "tokenizer"],
            &["kernels/src/cuda/search.rs", "kernels/src/cuda/nccl/environment.rs"],
        ),
        "kernels knows shapes and launches, never files or actors",
    );
    assert_none(offenders("model/src", &["ractor::", "tokio::"], &[]), "model knows no actor");
    assert_none(
        offenders("actors/src", &["candle", "gemm::", "std::fs", "File::open", "include_bytes!"], &[]),
        "actors knows messages and deaths, never mathematics or files",
    );
    assert_none(offenders("src", &["axum", "hyper", "clap"], &[]), "the facade knows no HTTP and no command line");
    assert_none(offenders("serve/src", &["clap", "ratatui"], &[]), "the server knows no command line");
    let dependencies = manifest("").split("\n[dependencies]").nth(1).expect("dependencies of the facade").to_owned();
    for name in ["axum", "hyper", "clap", "bursar-serve"] {
        assert!(!dependencies.contains(&format!("\n{name}")), "the facade depends on {name}");
    }
    assert!(!manifest("serve").contains("\nclap"), "the server depends on clap");
}

#[test]
fn compute_modules_of_actors_do_not_use_actors() {
    let words = ["ractor", "crate::tree", "crate::responder", "tokio::spawn"];
    assert_none(offenders("actors/src/compute", &words, &[]), "a lane takes jobs and answers with closures");
}

#[test]
fn files_of_a_crate_have_no_import_cycle() {
    for folder in SOURCES {
        // `main.rs` uses every command, and `failure.rs` uses `Cli` from `main.rs` to list the
        // flags, so this cycle is allowed.
        let is_checked = |name: &str| !name.contains("tests") && name != "cli/src/main.rs";
        let files = sources(folder).into_iter().filter(|(name, _)| is_checked(name));
        let below = |name: &str| name[folder.len() + 1..].to_owned();
        let known = modules::Crate::of(files.map(|(name, text)| (below(&name), code(&text))));
        let (arrows, cycles) = (known.arrows(), known.cycles());
        let within = |file: &&str, cycle: &Vec<&str>| {
            let to: Vec<&str> = arrows[*file].iter().filter(|to| cycle.contains(to)).copied().collect();
            format!("{file} -> {}", to.join(", "))
        };
        let lines = cycles.iter().flat_map(|cycle| cycle.iter().map(|file| within(file, cycle)));
        let lines: Vec<String> = lines.collect();
        assert_none(lines, &format!("files in {folder} form no cycle"));
    }
}

#[test]
fn only_device_files_of_budgets_allocate_memory() {
    let words =
        ["mmap(", "mprotect(", "munmap(", "cuMemAlloc", "cuMemCreate", "cuMemHostAlloc", "cudaMalloc", "alloc_zeroed"];
    for name in CRATES {
        assert_none(
            offenders(&format!("{name}/src"), &words, &["budgets/src/device/"]),
            "only the device files of budgets allocate memory",
        );
    }
}

#[test]
fn unsafe_code_is_only_in_allowed_files() {
    let allowed = [
        "budgets/src/device/",
        "kernels/src/cpu/",
        "kernels/src/cuda/",
        "kernels/src/host_store.rs",
        "kernels/src/kv_layer.rs",
        "kernels/src/ops/transfer.rs",
        "kernels/src/state_layer.rs",
        "kernels/src/tensor.rs",
        "model/src/checkpoint/shard.rs",
        "model/src/worst_cases.rs",
        "model/src/model.rs",
        "model/src/processor/resample.rs",
        "model/src/weights/map.rs",
        "model/src/weights/segment_layout.rs",
        "model/src/weights/upload.rs",
        "actors/src/compute/",
    ];
    for folder in SOURCES {
        assert_none(offenders(folder, &["unsafe ", "unsafe{"], &allowed), "only the listed files have unsafe code");
    }
}

#[test]
fn families_are_named_only_in_their_folder_and_registry() {
    let families: Vec<String> = std::fs::read_dir("model/src/families")
        .expect("the folder of families")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.is_dir())
        .map(|path| path.file_name().expect("a name").to_string_lossy().into_owned())
        .collect();
    assert!(families.len() > 3, "{families:?}");
    let modules: Vec<String> = families.iter().map(|family| format!("{family}::")).collect();
    let mut words: Vec<&str> = modules.iter().map(String::as_str).collect();
    words.extend(["ForCausalLM", "ForConditionalGeneration"]);
    for name in BELOW_THE_FACADE {
        assert_none(
            offenders(&format!("{name}/src"), &words, &["model/src/families/", "model/src/registry.rs"]),
            "all knowledge of a family is in its folder",
        );
    }
    for family in &families {
        let others: Vec<String> =
            families.iter().filter(|other| *other != family).map(|other| format!("families::{other}")).collect();
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        assert_none(offenders(&format!("model/src/families/{family}"), &others, &[]), "no family imports another");
    }
}

#[test]
fn rule_12_decisions_contain_no_clock_device_or_actor() {
    // The order of a `HashMap` or `HashSet` differs from run to run.
    let words = [
        ["async ", "tokio", "ractor::", "thread::", "Mutex", "Atomic"].as_slice(),
        &["Instant", "SystemTime", "HashMap", "HashSet", "rand::"],
        &["dyn Device", "fs::", "File::", "std::env", "std::net", "std::process", "tracing", "metrics::"],
    ]
    .concat();
    let says_pure = |text: &str| text.lines().any(|line| line.starts_with("//! Pure"));
    let is_core = |name: &str| name.starts_with("actors/") && (name.ends_with("/core.rs") || name.contains("/core/"));
    let is_pure = |name: &str, text: &str| says_pure(text) || is_core(name);
    let mut seen = 0;
    for folder in SOURCES {
        let pure: Vec<_> = sources(folder).into_iter().filter(|(name, text)| is_pure(name, text)).collect();
        seen += pure.len();
        let impure = pure.iter().filter_map(|(name, text)| {
            let code = code(text);
            words.iter().find(|word| code.contains(**word)).map(|word| format!("{name}: {word}"))
        });
        assert_none(impure.collect(), "rule 12: decisions are pure");
    }
    assert!(seen > 80, "only {seen} files say that they are pure");
}

#[test]
fn code_that_needs_host_memory_chooses_a_host_device() {
    // By default a runtime leases memory of a GPU if there is one, and a CPU
    // cannot access that memory.
    let needs = ["from_raw_parts", "a host device starts", "default()).await?; // host memory"];
    let folders =
        ["examples", "benches", "actors/src/actor/budget", "actors/src/actor/runtime", "src", "serve/src", "cli/src"];
    let sources = folders.into_iter().flat_map(sources);
    let offenders = sources
        .filter(|(_, text)| text.contains("RuntimeConfig::default()") && needs.iter().any(|need| text.contains(need)))
        .filter(|(_, text)| !text.contains("DeviceChoice::Host"));
    assert_none(offenders.map(|(name, _)| name).collect(), "code that needs host memory chooses DeviceChoice::Host");
    let pages = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).expect("the file is there");
    assert!(!pages.contains(needs[2]), "a GPU is the default, so README.md must not name host memory");
}

#[test]
fn metrics_are_recorded_through_their_table() {
    let words = ["use metrics::", "metrics::with_", "gauge!(", "counter!(", "histogram!("];
    for folder in SOURCES {
        assert_none(offenders(folder, &words, &["actors/src/shared/metric/"]), "only the metric table records metrics");
    }
}

#[test]
fn only_one_file_writes_to_standard_error() {
    let words = ["eprint!(", "eprintln!(", "dbg!(", "stderr()"];
    for folder in SOURCES {
        let allowed = ["cli/src/logging.rs"];
        assert_none(offenders(folder, &words, &allowed), "with --log json, each line of stderr is a JSON object");
    }
}

#[test]
fn every_file_begins_with_a_doc_comment_and_stays_short() {
    for folder in CRATES.into_iter().chain(["src", "tests", "examples", "benches"]) {
        for (name, text) in sources(folder) {
            assert!(text.starts_with("//!"), "{name} must begin with a `//!` line");
            let lines = text.lines().count();
            assert!(lines <= 600, "{name} has {lines} lines; the limit is 600, so split the file");
        }
    }
}

#[test]
fn actors_ask_questions_only_through_the_table() {
    let asks = offenders("actors/src", &["RpcReplyPort", "call!(", "call_t!(", ".call("], &[]);
    assert_none(asks, "actors ask questions through tree.rs, which sets the deadline");
}

#[test]
fn examples_are_numbered_documented_and_run() {
    let script = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(".ci/run")).expect("the script");
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/embedding.md")).expect("the page");
    let mut examples = Vec::new();
    for (path, text) in sources("examples") {
        let name = path.trim_start_matches("examples/").trim_end_matches(".rs").to_owned();
        let number: usize = name.split('_').next().and_then(|number| number.parse().ok()).unwrap_or(0);
        let opening: String = text.lines().take_while(|line| line.starts_with("//!")).collect();
        let shows_command = opening.contains(&format!("cargo run --example {name}"))
            || opening.contains(&format!("cargo run --release --example {name}"));
        assert!(shows_command, "{path} shows its command in its first lines");
        let is_run = script.lines().any(|line| line.split(' ').take(2).eq(["example", &name]));
        assert!(is_run, ".ci/run runs {path}");
        assert!(page.contains(&format!("`{name}`")), "docs/embedding.md says what {path} shows");
        examples.push(number);
    }
    examples.sort_unstable();
    assert!(examples.iter().copied().eq(1..=examples.len()), "examples are numbered from 1: {examples:?}");
}

#[test]
fn the_facade_and_the_server_deny_missing_documentation() {
    for path in ["src/lib.rs", "serve/src/lib.rs"] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect("a library");
        assert!(text.contains("#![deny(missing_docs)]"), "{path} denies missing documentation");
    }
}

#[test]
fn rule_9_no_source_makes_an_unbounded_queue() {
    // The mailboxes of ractor are unbounded. Credits bound them: a message that asks for work needs
    // a credit.
    let words = ["unbounded", "mpsc::channel()", "SegQueue", "LinkedList", "crossbeam", "flume"];
    for folder in SOURCES {
        assert_none(offenders(folder, &words, &[]), "rule 9: every queue is bounded, and a full queue is an answer");
    }
    let bans = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("clippy.toml")).expect("the file");
    for banned in ["tokio::sync::mpsc::unbounded_channel", "std::sync::mpsc::channel"] {
        assert!(bans.contains(banned), "clippy.toml does not ban {banned}");
    }
}

#[test]
fn each_test_and_file_in_the_table_of_rules_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = fs::read_to_string(root.join("docs/rules.md")).expect("the table is there");
    let tests: String = CRATES
        .into_iter()
        .chain(["src", "tests"])
        .flat_map(|folder| sources(folder).into_iter().map(|(_, text)| text))
        .collect();
    // A test is a function, or a prefix ending in `…` from which a macro makes functions.
    let is_there = |test: &str| match test.strip_suffix('…') {
        Some(start) => tests.contains(&format!("fn {start}")) || tests.contains(&format!("\n    {start}")),
        None => tests.contains(&format!("fn {test}(")) || tests.contains(&format!("\n    {test}: ")),
    };
    let mut rules = Vec::new();
    for row in table.lines().filter(|line| line.starts_with("| ") && line.as_bytes()[2].is_ascii_digit()) {
        let number = row[2..].split(' ').next().expect("a rule has a number");
        let mut has_named_test = false;
        for word in row.split('`').skip(1).step_by(2) {
            if word.contains('/') {
                assert!(root.join(word).exists(), "rule {number} names {word}, which does not exist");
            } else {
                assert!(is_there(word), "rule {number} names the test {word}, which does not exist");
                has_named_test |= word.starts_with(&format!("rule_{number}_"));
            }
        }
        if has_named_test {
            rules.push(number.to_owned());
        }
    }
    for rule in ["1", "4", "7", "9", "11", "12", "13", "15"] {
        assert!(rules.iter().any(|named| named == rule), "a test of rule {rule} is listed in the table");
    }
}
