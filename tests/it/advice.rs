//! The commonly posted advice for Qwen2.5-VL on a 24 GiB GPU, used verbatim.

use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::{command_line::path, stage::Folder};

/// The flags as people paste them, except for `--dtype`.
const ADVICE: [&str; 11] = [
    "--gpu-memory-utilization=0.9",
    "--max-model-len",
    "16384",
    "--max-num-seqs=256",
    "--mm_processor_kwargs",
    r#"{"max_pixels": 1920*1080}"#,
    "--served-model-name",
    "qwen-omni-7b",
    "--swap-space",
    "8",
    "--disable-log-requests",
];

fn bursar(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    command.args(arguments).env("BURSAR_LOG", "off").output().expect("the binary is there")
}

fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    })
}

fn planned(arguments: &[&str]) -> Value {
    object(&bursar(&[&["plan", "--json"][..], arguments].concat()))
}

#[test]
fn a_plan_accepts_every_flag_of_the_advice() {
    let card = ["--shape", "qwen2.5-vl-7b", "--gpu", "rtx4090", "--dtype=half"];
    let report = planned(&[&card[..], &ADVICE].concat());
    assert_eq!((&report["model"], &report["device"]["dtype"]), (&json!("qwen-omni-7b"), &json!("f16")), "{report}");
    let envelope = &report["envelope"];
    assert_eq!((&envelope["context_tokens"], &envelope["sequences"]), (&json!(16_384), &json!(256)));
    let pixels = report["picture"]["pixels"].as_u64().expect("a number");
    assert!((2_000_000..=1920 * 1080).contains(&pixels), "{pixels}");
    let mut claims = report["claims"].as_object().expect("claims").clone();
    let of_host = claims.remove("host kv").and_then(|bytes| bytes.as_u64()).expect("the claim for --swap-space");
    assert!(of_host <= 8 << 30 && of_host > 8 << 29, "{of_host}");
    let taken: u64 = claims.values().filter_map(Value::as_u64).sum();
    let whole = report["device"]["total"].as_u64().expect("bytes");
    assert!(report["fits"] == false || taken <= whole / 10 * 9 + (256 << 20), "{taken} of {whole} without the canary");
    let notes: Vec<_> = report["notes"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert!(matches!(notes[..], [log] if log.contains("log")), "{notes:?}");
}

#[test]
fn a_host_device_refuses_half_and_accepts_the_other_flags() {
    // The flags are checked before any loading or stress test.
    for command in ["chat", "profile"] {
        let typed =
            [&[command, "--json", "--device=host", "--profile-cache=none", "--dtype=half"][..], &ADVICE].concat();
        let output = bursar(&if command == "chat" { [&typed[..], &["Who are you?"]].concat() } else { typed });
        assert_eq!(output.status.code(), Some(1), "{command}");
        let report = object(&output);
        assert_eq!(report["error"], "dtype is float16, but a host device computes in float32", "{command}");
        assert!(report["hint"].as_str().is_some_and(|hint| hint.contains("auto or float32")), "{report}");
    }
    let small = ["--max-model-len=256", "--max-num-seqs=2", "--gpu-memory-utilization=0.9", "--dtype=float32"];
    let rest = [r#"--mm_processor_kwargs={"max_pixels": 112*112}"#, "--served-model-name=eyes", "--swap-space=8"];
    let host = ["--json", "--device=host", "--capacity=96MiB", "--profile-cache=none", "--disable-log-requests"];
    let profile = object(&bursar(&[&["profile"][..], &host, &small, &rest].concat()));
    assert_eq!(profile["record"]["sequences"], 2, "{profile}");
    let owners = profile["ledger"].to_string();
    assert!(owners.contains("eyes"), "{owners}");
    let asked = ["--max-tokens=2", "--temperature=0", "Who are you?"];
    let chat = bursar(&[&["chat"][..], &host, &small, &rest, &asked].concat());
    assert!(chat.status.success(), "{}", String::from_utf8_lossy(&chat.stdout));
}

#[test]
fn a_type_unsupported_by_the_gpu_is_refused_by_name() {
    for (gpu, dtype, taken) in
        [("t4", "bfloat16", "float16"), ("h200", "float32", "bfloat16 or float16"), ("h200", "int8", "half")]
    {
        let output = bursar(&["plan", "--json", "--shape", "qwen2.5-vl-tiny", "--gpu", gpu, "--dtype", dtype]);
        assert_eq!(output.status.code(), Some(2), "{gpu} {dtype}");
        let report = object(&output);
        let has = |field: &str, text: &str| report[field].as_str().is_some_and(|report| report.contains(text));
        assert!(has("error", dtype) && has("hint", taken), "{report}");
    }
    for (dtype, of_t4, of_h200) in [("auto", "f16", "bf16"), ("half", "f16", "f16")] {
        for (gpu, expected) in [("t4", of_t4), ("h200", of_h200)] {
            let report = planned(&["--shape", "qwen2.5-vl-tiny", "--gpu", gpu, "--dtype", dtype]);
            assert_eq!(report["device"]["dtype"], expected, "{gpu} {dtype}");
        }
    }
    let folder = bursar_golden::path("qwen2").display().to_string();
    assert_eq!(
        planned(&["--model", &folder, "--gpu", "h200"])["device"]["dtype"],
        "f16",
        "auto is the checkpoint's dtype"
    );
}

/// Copies the files of a golden checkpoint for which `passes` is true into a new folder.
fn copied(golden: &str, passes: impl Fn(&str) -> bool) -> Folder {
    let folder = Folder::empty();
    let files = std::fs::read_dir(bursar_golden::path(golden)).expect("the file is there");
    for file in files.map(|file| file.expect("an entry")).filter(|file| file.path().is_file()) {
        let name = file.file_name().into_string().expect("UTF-8");
        if passes(&name) {
            std::fs::copy(file.path(), folder.path().join(name)).expect("the file is copied");
        }
    }
    folder
}

#[test]
fn a_plan_needs_no_weight_files() {
    for golden in ["qwen2", "qwen2_5_vl"] {
        for device in [&["--device", "host"][..], &["--gpu", "h200"]] {
            let plan = |folder: &str| planned(&[&["--model", folder][..], device].concat());
            let whole = plan(&bursar_golden::path(golden).display().to_string());
            let settings = copied(golden, |name| !name.contains("safetensors"));
            let alone = copied(golden, |name| name == "config.json");
            let some = copied(golden, |name| name != "model-00002-of-00002.safetensors" && name != "model.safetensors");
            let pointers = copied(golden, |_| true);
            for file in ["model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
                let file = pointers.path().join(file);
                if file.exists() {
                    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n";
                    std::fs::write(file, pointer).expect("the file is written");
                }
            }
            for folder in [&settings, &some, &pointers] {
                let report = plan(&folder.path().display().to_string());
                for field in ["claims", "kv_tokens", "fits", "picture", "envelope"] {
                    assert_eq!(report[field], whole[field], "{golden} {field}");
                }
                let notes = report["notes"].to_string();
                assert!(
                    notes.contains(&*folder.path().display().to_string()) && notes.contains("config.json"),
                    "{notes}"
                );
            }
            let report = plan(&alone.path().display().to_string());
            assert_eq!(report["claims"]["weights"], whole["claims"]["weights"], "{golden}: {report}");
            assert_eq!(report["picture"].is_null(), golden == "qwen2", "{report}");
        }
    }
    let empty = Folder::empty();
    let output = bursar(&["plan", "--json", "--model", &empty.path().display().to_string()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(object(&output)["error"].as_str().is_some_and(|error| error.contains("has no config.json")));
}

/// The command between backticks in a row's first cell, split into arguments as a shell would.
fn typed(row: &str) -> Vec<String> {
    let command = row.split('`').nth(1).unwrap_or_default();
    let words = command.split('\'').enumerate().flat_map(|(place, part)| match place % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    words.collect()
}

/// The planner's row in the walk-through table, in MiB: weights, vision, steps, KV cache, and the
/// rest or the deficit.
fn row(first: &str, report: &Value) -> String {
    let mib = |bytes: u64| ((bytes + (1 << 19)) >> 20).to_string();
    let claims = report["claims"].as_object().expect("claims");
    let of = |is_of: &dyn Fn(&str) -> bool| {
        mib(claims.iter().filter(|(class, _)| is_of(class)).filter_map(|(_, bytes)| bytes.as_u64()).sum())
    };
    let (fits, number) = (report["fits"] == true, |field: &str| report[field].as_u64().expect("a number"));
    let cells = [
        of(&|class| class == "weights"),
        of(&|class| class.starts_with("vision")),
        of(&|class| !class.starts_with("vision") && !["weights", "kv", "canary", "host kv"].contains(&class)),
        if fits { of(&|class| class == "kv") } else { "-".to_owned() },
        if fits { number("kv_tokens").to_string() } else { "-".to_owned() },
        if fits { mib(number("free")) } else { format!("{} missing", mib(number("short_by"))) },
    ];
    format!("|{first}| {} |", cells.join(" | "))
}

#[test]
fn the_advice_walk_through_matches_the_planner() {
    let page = std::fs::read_to_string(path("docs/knobs.md")).expect("the page is there");
    let head = "| with all flags above, and | weights | pictures | steps | KV cache | KV tokens | left |";
    let rows: Vec<_> =
        page.lines().skip_while(|line| *line != head).skip(2).take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 8, "{rows:?}");
    let command =
        page.lines().find_map(|line| line.strip_prefix("bursar plan --shape qwen2.5-vl-7b --gpu ")).expect("a command");
    let card = command.split_whitespace().next().expect("a card");
    let mut flags: Vec<String> = ["--shape", "qwen2.5-vl-7b", "--gpu", card].map(str::to_owned).into();
    let mut expected = Vec::new();
    for found in &rows {
        flags.extend(typed(found));
        let report = planned(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        let first = found.split('|').nth(1).expect("a first cell");
        expected.push(row(first, &report));
    }
    assert_eq!(rows, expected, "the table would be\n{}", expected.join("\n"));
    let whole = ADVICE.join(" ").replace('=', " ");
    let walked = flags[4..].join(" ").replace('=', " ");
    assert_eq!(walked, format!("{whole} --dtype half"), "the page has a row for each flag of the advice, in order");
}
