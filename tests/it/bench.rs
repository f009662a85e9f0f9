//! Tests of the `bursar bench` command. Every figure is really measured, on the demo model
//! and on random weights.

use std::{
    collections::BTreeMap,
    fs,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::stage::{Folder, eventually};

fn bench(arguments: &[&str]) -> Output {
    // Without `--device host` the command would use a GPU.
    bench_on("host", arguments)
}

fn bench_on(device: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    command.args(["bench", "--device", device]).args(arguments).output().expect("the binary is there")
}

fn report(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn figures(report: &Value) -> BTreeMap<String, Value> {
    let figures = report["figures"].as_array().expect("a list");
    figures.iter().map(|figure| (figure["id"].as_str().expect("an id").to_owned(), figure.clone())).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("not a number: {value}"))
}

#[test]
fn every_demo_figure_is_measured_or_named_as_left_out() {
    let arguments = ["--quick", "--json", "--seed", "7", "--sequences", "4", "--commit", "c0ffee"];
    let report = report(&bench(&[&arguments[..], &["--teraflops", "5", "--terabytes", "0.5"]].concat()));
    let figures = figures(&report);
    let measured = |id: &str| figures.get(id).unwrap_or_else(|| panic!("no {id} in {:?}", figures.keys()));
    // On a busy machine, noise in the prefill times can exceed the time of sixteen decode steps
    // of a small model.
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
        assert!(share > 0.0 && share < 1.0, "a measured share is below the claimed peak of a CPU: {figure}");
        let ratio = number(&figure["value"]) / bound;
        let of_bound = if figure["lower_is_better"] == true { 1.0 / ratio } else { ratio };
        assert!((of_bound / share - 1.0).abs() < 1e-6, "{figure}");
    }
    let [left_out] = left_out[..] else { panic!("{}", report["left_out"]) };
    let why = "16 sequences; a step takes at most 4";
    assert_eq!((&left_out["id"], &left_out["reason"]), (&"decode_16".into(), &why.into()));
    // A start takes measurable time, and the memory figures add up to the device's total.
    assert!(number(&measured("start")["value"]) > 10.0);
    assert!(number(&measured("kv_tokens")["value"]) >= 4.0 * 81.0);
    let bytes = figures.iter().filter(|(id, _)| id.starts_with("bytes_"));
    let total: f64 = bytes.map(|(_, figure)| number(&figure["value"])).sum();
    assert_eq!(total, number(&report["device_bytes"]), "the memory figures add up to the device's total");
    let free = ["ready", "end"].map(|when| number(&measured(&format!("driver_free_{when}"))["value"]));
    assert!(free[0] > 0.0 && free[0] == free[1], "the device's free memory stays the same after READY: {free:?}");
    assert_eq!((&report["device"], &report["commit"], &report["seed"]), (&"host".into(), &"c0ffee".into(), &7.into()));
    assert_eq!((&report["model"], &report["random_weights"]), (&"demo".into(), &false.into()));
    assert!(report["date"].as_str().is_some_and(|date| date.starts_with("20") && date.ends_with('Z')));
}

#[test]
fn bench_prints_a_table_of_figures_for_random_weights() {
    let arguments = ["--shape", "qwen2.5-vl-tiny", "--random", "--quick", "--only", "prefill,pictures"];
    let output = bench(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(table.starts_with("qwen2.5-vl-tiny, random weights on host"), "{table}");
    for line in ["prefill, 2 prompts of 256 tokens", "2 requests with a picture of 448 x 336, 1 token out"] {
        assert_eq!(table.lines().filter(|found| found.starts_with(line)).count(), 1, "{line}: {table}");
    }
    assert!(!table.contains("decode,") && !table.contains("start"), "only the chosen figures are measured: {table}");
    assert!(table.contains("spread") && !table.contains(" % of "), "no rates, so no share is shown: {table}");
}

#[test]
fn decoding_is_measured_at_the_requested_context_and_batches() {
    let asked = ["--quick", "--json", "--seed", "7", "--only", "decode", "--decode-context", "200", "--batches", "2,3"];
    let report = report(&bench(&asked));
    let of = |list: &str| report[list].as_array().expect("a list").clone();
    // On a busy machine a figure can be left out as noise. Its name is then in `left_out`.
    let mut names: Vec<_> =
        of("figures").into_iter().chain(of("left_out")).map(|one| one["name"].to_string()).collect();
    names.sort();
    let expected = [2, 3].map(|batch| format!("\"decode, a step of batch {batch} at 200 to 216\""));
    assert_eq!(names, expected);
    assert_eq!(bench(&["--batches", "0"]).status.code(), Some(2));
}

#[test]
fn the_roofline_of_several_ranks_counts_the_work_of_one() {
    let asked = ["--quick", "--json", "--seed", "7", "--only", "prefill", "--teraflops", "5", "--terabytes", "0.5"];
    let work = |device| {
        let figures = figures(&report(&bench_on(device, &asked)));
        number(&figures["prefill_2x256"]["work"]["flops"])
    };
    let (one, two) = (work("host"), work("host:2"));
    assert!((0.45..0.75).contains(&(two / one)), "two ranks: {two}; one rank: {one}");
}

/// The only run in the report of a replay.
fn run(arguments: &[&str]) -> Value {
    let report = report(&bench(&[&["--json", "--seed", "7"], arguments].concat()));
    let [run] = &report["runs"].as_array().expect("a list")[..] else { panic!("{report}") };
    run.clone()
}

#[test]
fn agent_conversations_are_replayed_with_tools_and_pictures() {
    let run = run(&["--synthetic", "agents", "--quick", "--rate", "6", "--seconds", "1"]);
    let requests = run["requests"].as_u64().expect("a number");
    assert!(requests >= 6 && run["answered"] == requests, "{run}");
    assert!(number(&run["throughput"]) > 0.0 && number(&run["first_token_ms"]["picture"]["p50"]) > 0.0, "{run}");
    // Each turn finds the KV blocks of the turns before it.
    assert!(number(&run["cached_tokens"]) * 2.0 > number(&run["prompt_tokens"]), "{run}");
    let counts = &run["counts"];
    assert!(number(&counts["pictures_encoded"]) >= 1.0, "{run}");
    assert!(counts["pictures_encoded"].as_u64() < counts["pictures_wanted"].as_u64(), "pictures are cached: {run}");
    assert!(number(&counts["sequences"]["permits"]) > 0.0, "{run}");
}

#[test]
fn bytes_copied_to_and_from_the_host_are_counted() {
    // Seven different prompts of 1,000 tokens each, with 4,096 tokens of KV cache on the device.
    // The eighth request repeats the prompt of the first.
    let line = |number: u64| {
        let hashes = format!("[{}, {}]", number % 7 * 2, number % 7 * 2 + 1);
        let at = number * 200;
        format!("{{\"timestamp\": {at}, \"input_length\": 1000, \"output_length\": 4, \"hash_ids\": {hashes}}}\n")
    };
    let folder = Folder::empty();
    let trace = folder.path().join("again.jsonl");
    fs::write(&trace, (0..8).map(line).collect::<String>()).expect("the file is written");
    let kept = ["--kv-tokens", "4096", "--sequences", "4", "--context-tokens", "1024", "--step-tokens", "256"];
    // On a busy machine the measured copy rate may be so low that recomputing
    // is preferred to copying.
    let mut runs = (0..5).map(|_| {
        let run = run(&[&["--trace", trace.to_str().expect("UTF-8"), "--swap-space", "0.1"][..], &kept].concat());
        assert!(run["answered"] == 8 && number(&run["counts"]["kv_bytes_to_host"]) >= 512.0, "{run}");
        run
    });
    let came_back = |run: &Value| {
        let counts = ["kv_bytes_from_host", "prefix_tokens_from_host"].map(|name| number(&run["counts"][name]));
        assert_eq!(counts[0] > 0.0, counts[1] > 0.0, "{run}");
        counts[0] >= 512.0 && counts[1] >= 512.0
    };
    let run = runs.find(came_back).expect("blocks come back from the host in one of five runs");
    let counts = &run["counts"];
    assert!(number(&counts["prediction_error_p50"]) <= number(&counts["prediction_error_p99"]), "{run}");
}

#[test]
fn a_trace_is_replayed_at_its_own_or_another_rate() {
    let folder = Folder::empty();
    let lines = [(0, "[1]"), (300, "[1]"), (900, "[2]")].map(|(at, hashes)| {
        format!("{{\"timestamp\": {at}, \"input_length\": 200, \"output_length\": 40, \"hash_ids\": {hashes}}}\n")
    });
    let request =
        "{\"timestamp\": 1000, \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 3}";
    let trace = folder.path().join("day.jsonl");
    fs::write(&trace, lines.concat() + request).expect("the file is written");
    let trace = trace.to_str().expect("UTF-8");
    let own = run(&["--trace", trace]);
    assert_eq!(
        (&own["name"], &own["answered"], &own["reply_tokens"]),
        (&"day".into(), &4.into(), &123.into()),
        "{own}"
    );
    assert!(number(&own["seconds"]) >= 1.0 && number(&own["rate"]) == 4.0, "{own}");
    // The cached tokens are all whole blocks of 16 tokens of the second prompt, except the block
    // with the last token.
    assert_eq!(own["cached_tokens"], 192, "{own}");
    let slower = run(&["--trace", trace, "--rate", "2"]);
    assert_eq!((&slower["name"], &slower["rate"]), (&"day at 2/s".into(), &2.0.into()), "{slower}");
    assert!(number(&slower["seconds"]) >= 2.0, "{slower}");
    // With one request at a time, each request finds the blocks of the previous requests, and its
    // times are measured from the moment at which the request is sent. The replies are long enough
    // for `counts` to be sampled several times.
    let in_turn = run(&["--trace", trace, "--rate", "1000", "--max-concurrency", "1"]);
    assert_eq!(in_turn["name"], "day at 1000/s, at most 1 in flight", "{in_turn}");
    assert_eq!((&in_turn["answered"], &in_turn["cached_tokens"]), (&4.into(), &192.into()), "{in_turn}");
    assert_eq!(in_turn["counts"]["sequences"]["most"], 1.0, "{in_turn}");
    let whole = &in_turn["whole_ms"];
    assert!(number(&whole["mean"]) * 4.0 <= number(&in_turn["seconds"]) * 1e3, "times exclude the wait: {in_turn}");
    assert_eq!(bench(&["--trace", trace, "--max-concurrency", "0"]).status.code(), Some(2));
    let refused = bench(&["--trace", folder.path().join("none").to_str().expect("UTF-8"), "--json"]);
    let report: Value = serde_json::from_slice(&refused.stdout).expect("one JSON object");
    assert!(report["hint"].as_str().is_some_and(|hint| hint.contains("docs/commands.md")), "{report}");
    for wrong in [&["--synthetic", "dreams"][..], &["--rate", "0"], &["--objective", "ttft"]] {
        assert_eq!(bench(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn an_impossible_bench_run_fails_with_a_hint() {
    let output = bench(&["--shape", "gpt-9", "--random", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert!(report["error"].as_str().is_some_and(|error| error.contains("gpt-9")), "{report}");
    assert!(report["hint"].as_str().is_some_and(|hint| hint.contains("plan --shapes")), "{report}");
    // The weights need 16 GB. The error says which settings would fit.
    let output = bench(&["--shape", "qwen2.5-vl-7b", "--random", "--quick"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("set --capacity to 17148MiB instead of 512MiB"), "{stderr}");
    for arguments in [&["--random"][..], &["--shape", "qwen2.5-vl-7b"], &["--terabytes", "4"], &["--teraflops", "-1"]] {
        assert_eq!(bench(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

#[tokio::test]
async fn a_signal_ends_a_measurement_with_the_figures_so_far() {
    let asked = ["--quick", "--json", "--only", "start,decode", "--batches", "1", "--decode-steps", "3000"];
    let command = |asked: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        command.args(["bench", "--device", "host"]).args(asked).stdout(Stdio::piped());
        command
    };
    for signal in ["INT", "TERM"] {
        let child = tokio::process::Command::from(command(&asked)).kill_on_drop(true).spawn().expect("a child");
        let process = child.id().expect("the program runs").to_string();
        // `SigCgt` has one bit per signal that the process handles. The handler of SIGTERM (signal
        // 15) is installed last.
        eventually("the process handles both signals", async || {
            let status = fs::read_to_string(format!("/proc/{process}/status")).expect("the program runs");
            let received = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("Linux reports it");
            let both = 1 << 1 | 1 << 14;
            u64::from_str_radix(received.trim(), 16).expect("a signal mask") & both == both
        })
        .await;
        // Use the shell's built-in `kill`, because some machines have no `kill` program.
        let kill = format!("kill -s {signal} {process}");
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell can be started").success());
        let output = child.wait_with_output().await.expect("the program ends");
        assert_eq!(output.status.code(), Some(1));
        let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(report["ended_by"]["error"], format!("SIG{signal} ended the measurement"));
        let figures = figures(&report);
        assert!(figures.contains_key("start") && !figures.contains_key("decode_1"), "{:?}", figures.keys());
    }
}
