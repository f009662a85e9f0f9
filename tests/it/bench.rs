//! `bursar bench` as its user sees it: every figure is measured for real, on the demo model and on random weights.

use std::{
    collections::BTreeMap,
    process::{Command, Output},
};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    // Otherwise it would take a GPU.
    command.args(["bench", "--device", "host"]).args(arguments).output().expect("the binary is there")
}

/// The single JSON object that it printed.
fn report(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn figures(report: &Value) -> BTreeMap<String, Value> {
    let figures = report["figures"].as_array().expect("a list");
    figures.iter().map(|figure| (figure["id"].as_str().expect("an id").to_owned(), figure.clone())).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

#[test]
fn every_demo_figure_is_measured_or_named_as_left_out() {
    let arguments = ["--quick", "--json", "--seed", "7", "--sequences", "4", "--commit", "c0ffee"];
    let report = report(&bench(&[&arguments[..], &["--teraflops", "5", "--terabytes", "0.5"]].concat()));
    let figures = figures(&report);
    let measured = |id: &str| figures.get(id).unwrap_or_else(|| panic!("no {id} in {:?}", figures.keys()));
    // On a busy machine the noise of the prompts can hide sixteen steps of a small model.
    let (noisy, left_out): (Vec<&Value>, Vec<&Value>) = report["left_out"]
        .as_array()
        .expect("a list")
        .iter()
        .partition(|left_out| left_out["reason"].as_str().is_some_and(|reason| reason.contains("noise")));
    for (id, unit, runs) in [
        ("decode_1", "ms", 4),
        ("decode_4", "ms", 4),
        ("prefill_4x64", "tokens/s", 2),
        ("prefill_2x256", "tokens/s", 2),
        ("pictures_4x224x224_1", "requests/s", 3),
        ("pictures_4x224x224_8", "requests/s", 3),
        ("pictures_2x448x336_8", "requests/s", 3),
    ] {
        if noisy.iter().any(|left_out| left_out["id"] == id) && id.starts_with("decode") {
            continue;
        }
        let figure = measured(id);
        assert!(figure["unit"] == unit && number(&figure["value"]) > 0.0, "{figure}");
        assert_eq!(figure["runs"].as_array().expect("a list").len(), runs, "{figure}");
        assert!(number(&figure["work"]["flops"]) > 1e6 && number(&figure["work"]["bytes"]) > 1e6, "{figure}");
        let (share, bound) = (number(&figure["roofline"]["share"]), number(&figure["roofline"]["bound"]));
        assert!(share > 0.0 && share < 1.0, "no CPU reaches what was claimed for it: {figure}");
        let ratio = number(&figure["value"]) / bound;
        let of_bound = if figure["lower_is_better"] == true { 1.0 / ratio } else { ratio };
        assert!((of_bound / share - 1.0).abs() < 1e-6, "{figure}");
    }
    let [left_out] = left_out[..] else { panic!("{}", report["left_out"]) };
    assert_eq!((&left_out["id"], &left_out["reason"]), (&"decode_16".into(), &"16 sequences, a step takes 4".into()));
    // Starting takes some time, and the memory figures sum to the device's.
    assert!(number(&measured("start")["value"]) > 10.0);
    assert!(number(&measured("kv_tokens")["value"]) >= 4.0 * 81.0);
    let bytes = figures.iter().filter(|(id, _)| id.starts_with("bytes_"));
    let total: f64 = bytes.map(|(_, figure)| number(&figure["value"])).sum();
    assert_eq!(total, number(&report["device_bytes"]), "every byte of the device has its line");
    let free = ["ready", "end"].map(|when| number(&measured(&format!("driver_free_{when}"))["value"]));
    assert!(free[0] > 0.0 && free[0] == free[1], "the device gives no byte after READY: {free:?}");
    assert_eq!((&report["device"], &report["commit"], &report["seed"]), (&"host".into(), &"c0ffee".into(), &7.into()));
    assert_eq!((&report["model"], &report["random_weights"]), (&"demo".into(), &false.into()));
    assert!(report["date"].as_str().is_some_and(|date| date.starts_with("20") && date.ends_with('Z')));
}

#[test]
fn random_weights_of_a_shape_print_a_table_of_figures() {
    let arguments = ["--shape", "qwen2.5-vl-tiny", "--random", "--quick", "--only", "prefill,pictures"];
    let output = bench(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(table.starts_with("qwen2.5-vl-tiny, random weights on host"), "{table}");
    for line in ["prefill, 2 prompts of 256 tokens", "2 requests with a picture of 448 x 336, 1 token out"] {
        assert_eq!(table.lines().filter(|found| found.starts_with(line)).count(), 1, "{line}: {table}");
    }
    assert!(!table.contains("decode,") && !table.contains("start"), "nobody asked for it: {table}");
    assert!(!table.contains('%'), "nobody said what this device can do: {table}");
}

#[test]
fn a_figure_that_cannot_be_measured_gets_a_hint() {
    let output = bench(&["--shape", "gpt-9", "--random", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let told: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert!(told["error"].as_str().is_some_and(|error| error.contains("gpt-9")), "{told}");
    assert!(told["hint"].as_str().is_some_and(|hint| hint.contains("plan --shapes")), "{told}");
    // 16 GB of weights; the error says what would fit.
    let output = bench(&["--shape", "qwen2.5-vl-7b", "--random", "--quick"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("--capacity 17148MiB instead of 512MiB would fit"), "{told}");
    for arguments in [&["--random"][..], &["--shape", "qwen2.5-vl-7b"], &["--terabytes", "4"], &["--teraflops", "-1"]] {
        assert_eq!(bench(arguments).status.code(), Some(2), "{arguments:?}");
    }
}
