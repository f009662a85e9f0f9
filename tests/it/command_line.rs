//! The command line as a user sees it.

use std::{
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

use crate::stage::Folder;

/// The path of a file in this repository.
pub fn path(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(name).display().to_string()
}

/// Runs a command until it exits.
pub fn bursar(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    // The test must not write profiles into the user's cache.
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.args(arguments).output().expect("the binary is there")
}

/// The command's output, which must be a single JSON object.
pub fn object(output: &Output) -> Value {
    let printed = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    serde_json::from_str(&printed).unwrap_or_else(|_| panic!("expected one JSON object: {printed}"))
}

/// Limits that are large enough for the pictures of these tests. With them, the stress phase takes
/// a tenth of the usual time.
const LIMITS: [&str; 8] =
    ["--launch-patches", "512", "--picture-pixels", "100352", "--context-tokens", "1024", "--step-tokens", "256"];

/// `bursar chat` with small limits, unless the arguments set the limits.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    // Profiles from other runs must not affect this test.
    let limits = LIMITS.chunks(2).filter(|limit| !arguments.contains(&limit[0])).flatten();
    command.args(["chat", "--profile-cache", "none"]).args(limits).args(arguments);
    command
}

/// Runs `bursar chat` with these lines on standard input.
pub fn chat(arguments: &[&str], lines: impl AsRef<[u8]>) -> Output {
    feed(command(arguments), lines)
}

/// Runs a command with these lines on standard input.
pub fn feed(mut command: Command, lines: impl AsRef<[u8]>) -> Output {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("the binary is there");
    // A command that ends early does not read its input, so a failed write is ignored.
    drop(child.stdin.take().expect("stdin is piped").write_all(lines.as_ref()));
    child.wait_with_output().expect("the program ends")
}

/// The printed events, one per line.
pub fn events(output: &Output) -> Vec<Value> {
    let printed = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    printed.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"))).collect()
}

pub fn of_type(events: &[Value], kind: &str) -> Vec<Value> {
    events.iter().filter(|event| event["type"] == kind).cloned().collect()
}

#[test]
fn a_session_reports_events_and_failures_and_continues() {
    let picture = path("model/demo/pictures/shapes.png");
    let lines = "Describe the picture.\n/image nowhere.png\n/video nowhere\nHow many shapes are there?\n/quit\nnever\n";
    let output = chat(&["--json", "--temperature", "0", "--image", &picture], lines);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let events = events(&output);
    let [first, second] = of_type(&events, "done").try_into().expect("two replies end");
    assert_eq!(first["text"], "a red circle, a blue star and an orange triangle on a light background");
    assert_eq!((&second["text"], &second["finish_reason"]), (&json!("3"), &json!("stop")));
    let pieces = of_type(&events, "token");
    let body: String = pieces.iter().map(|piece| piece["text"].as_str().expect("text")).collect();
    assert_eq!(body, format!("{}3", first["text"].as_str().expect("text")));
    let usage = &second["usage"];
    assert_eq!(usage["picture_tokens"], first["usage"]["picture_tokens"], "the picture is counted once");
    assert!(usage["cached_tokens"].as_u64().expect("a number") > 0, "the first turn is found in the cache: {usage}");
    let [image, video] = of_type(&events, "error").try_into().expect("both missing files are reported");
    for (error, name) in [(image, "nowhere.png"), (video, "nowhere")] {
        assert!(error["error"].as_str().expect("text").contains(name), "{error}");
        assert!(!error["hint"].as_str().expect("text").is_empty(), "{error}");
    }
}

#[test]
fn a_failed_chat_is_an_event_and_an_exit_code() {
    let output = chat(&["--json", "--top-p", "7", "Hello"], "");
    assert_eq!(output.status.code(), Some(1));
    let [error] = events(&output).try_into().expect("one event");
    assert_eq!(error["type"], "error");
    let field = |part: &str| error[part].as_str().expect("text").to_owned();
    assert!(field("error").contains('7') && field("hint").contains("--top-p"), "{error}");
}

#[test]
fn impossible_options_are_refused_before_a_model_is_loaded() {
    let refused = [
        (&["--temperature", "hot", "Hello"][..], "--temperature"),
        (&["--deadline=-3", "Hello"], "--deadline"),
        (&["--regex", "a", "--choice", "b", "Hello"], "--choice"),
        (&["-n", "2"], "QUESTION"),
    ];
    for (arguments, named) in refused {
        let output = chat(arguments, "");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(stderr.contains(named), "{arguments:?}: {stderr}");
    }
    let files = [
        (["--json-schema", "nowhere.json"], "nowhere.json"),
        (["--video", "nowhere.png"], "nowhere.png"),
        // An existing folder that contains source files.
        (["--video", env!("CARGO_MANIFEST_DIR")], "contains no frames"),
    ];
    for (arguments, named) in files {
        let output = chat(&[&arguments[..], &["--json", "Hello"]].concat(), "");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let [error] = events(&output).try_into().expect("one event");
        assert!(error["error"].as_str().expect("text").contains(named), "{arguments:?}: {error}");
    }
}

#[test]
fn video_samples_with_a_schema_are_numbered_and_scored() {
    let folder = std::env::temp_dir().join(format!("bursar-command-line-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a temporary folder");
    let frames = folder.join("frames");
    fs::create_dir_all(&frames).expect("a folder of frames");
    for frame in 0..4 {
        let name = format!("even_{frame}.png");
        fs::copy(bursar_golden::path(format!("videos/{name}")), frames.join(name)).expect("a frame is copied");
    }
    let schema = folder.join("schema.json");
    let shape = json!({
        "type": "object",
        "properties": { "shapes": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["shapes"],
        "additionalProperties": false,
    });
    fs::write(&schema, shape.to_string()).expect("a file is written");
    let (frames, schema) = (frames.display().to_string(), schema.display().to_string());
    let arguments =
        ["--json", "-n", "2", "--video", &frames, "--fps", "2", "--json-schema", &schema, "--logprobs", "1"];
    let output = chat(&[&arguments[..], &["--system", "Be brief.", "How many shapes are there?"]].concat(), "");
    drop(fs::remove_dir_all(&folder));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let events = events(&output);
    for sample in 0..2 {
        let own: Vec<_> = events.iter().filter(|event| event["sample"] == sample).cloned().collect();
        let [done] = of_type(&own, "done").try_into().expect("each sample ends once");
        let reply: Value = serde_json::from_str(done["text"].as_str().expect("text")).expect("JSON");
        assert!(reply["shapes"].is_u64(), "{reply}");
        let shown = done["usage"]["picture_tokens"].as_u64().expect("a number");
        assert!(shown > 0 && shown % 2 == 0, "four frames make two steps of one size: {shown}");
        let scores = of_type(&own, "score");
        assert_eq!(scores.len() as u64, done["usage"]["completion_tokens"].as_u64().expect("a number"));
        assert!(scores.iter().all(|score| score["token"]["top"].as_array().is_some_and(|top| top.len() == 1)));
    }
    assert!(events.iter().all(|event| event["sample"].is_u64()));
}

#[test]
fn a_device_is_chosen_by_name_or_refused_with_a_hint() {
    let output = chat(&["--json", "--device", "host", "--temperature", "0", "--max-tokens", "2", "Who are you?"], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = chat(&["--json", "--device", "cuda:4096", "Who are you?"], "");
    assert!(!output.status.success());
    let [error] = of_type(&events(&output), "error").try_into().expect("one error");
    assert!(!error["hint"].as_str().expect("text").is_empty(), "{error}");
    let output = chat(&["--device", "gpu", "Who are you?"], "");
    assert!(String::from_utf8_lossy(&output.stderr).contains("cuda:0"), "the error lists the devices");
}

#[test]
fn a_drill_reports_each_attempt_and_leaks_no_byte() {
    for (device, fault, attempts, ready) in [
        ("host", "validate:2", 3, true),
        ("host", "validate:4", 4, false),
        ("host", "load:1,serve:1", 2, true),
        ("host:2", "load:1", 2, true),
        ("host:2", "probe:1", 2, true),
        ("host:2", "capture:1", 2, true),
        ("host:2", "back:1", 2, true),
        ("host:2", "validate:1", 2, true),
        ("host:2", "serve:1", 2, true),
    ] {
        let output = bursar(&["drill", "--device", device, "--fault", fault, "--json"]);
        assert!(output.status.success(), "{fault} on {device}: {}", String::from_utf8_lossy(&output.stdout));
        let report = object(&output);
        let targets: Vec<u64> = report["attempts"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|attempt| attempt["target_tokens"].as_u64().expect("a number"))
            .collect();
        assert_eq!(targets.len(), attempts, "{report}");
        assert!(targets.windows(2).all(|pair| pair[1] < pair[0] && pair[1] * 100 >= pair[0] * 94), "{targets:?}");
        assert_eq!((&report["ready"], &report["leaked_bytes"]), (&json!(ready), &json!(0)), "{report}");
        assert_eq!((report["error"].is_null(), report["hint"].is_null()), (ready, ready), "{report}");
        let outcomes: Vec<_> =
            report["attempts"].as_array().expect("a list of attempts").iter().map(|a| &a["outcome"]).collect();
        assert_eq!(outcomes.iter().filter(|outcome| **outcome == "refused").count(), attempts - usize::from(ready));
    }
}

#[test]
fn a_drill_of_a_missing_model_fails() {
    let arguments = ["drill", "--fault", "probe:1", "--model", "/no/such/model"];
    let output = bursar(&arguments);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/model"), "{output:?}");
    let output = bursar(&[&arguments[..], &["--json"]].concat());
    let [error] = events(&output).try_into().expect("one event");
    assert!(output.status.code() == Some(1) && error["type"] == "error", "{error}");
}

#[test]
fn an_invalid_drill_script_is_refused_with_valid_values() {
    for (fault, hint) in
        [("warmup:1", "load, probe, capture, back, validate, serve"), ("load:5", "1 to 4"), ("load", "validate:2")]
    {
        let output = bursar(&["drill", "--fault", fault, "--json"]);
        assert_eq!(output.status.code(), Some(2), "{fault}");
        assert!(object(&output)["hint"].as_str().expect("text").contains(hint), "{fault}");
        let output = bursar(&["drill", "--fault", fault]);
        assert!(String::from_utf8_lossy(&output.stderr).contains(hint), "{fault}");
    }
}

#[test]
fn the_profile_command_prints_its_measurements() {
    let output = bursar(&[&["profile", "--json", "--device", "host"], &LIMITS[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = object(&output);
    let record = &report["record"];
    assert_eq!(report["attempts"][0]["target_tokens"].as_u64(), record["kv_blocks"].as_u64().map(|blocks| blocks * 16));
    assert!(record["peaks"].as_array().expect("a list").len() >= 4, "{record}");
    for phase in ["load", "probe", "capture", "back", "validate", "start"] {
        assert!(report["seconds"][phase].as_f64().expect("seconds") >= 0.0, "{report}");
    }
    assert!(report["ledger"]["granted"].as_u64().expect("bytes") > 0, "{report}");
}

#[test]
fn profiles_are_kept_in_the_cache_folder_and_changes_are_named() {
    let cache = Folder::empty();
    let chat = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        let limits = ["--context-tokens", "128", "--sequences", "2", "--step-tokens", "32", "--launch-patches", "64"];
        let ask = ["--device", "host", "--choice", "I", "Who are you?"];
        command.env("XDG_CACHE_HOME", cache.path()).arg("chat").args(arguments).args(limits).args(ask);
        command.stdin(Stdio::null());
        let output = command.output().expect("the program ends");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{stderr}");
        stderr
    };
    let profiles = cache.path().join("bursar/profiles");
    let measure = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        let limits = ["--context-tokens", "128", "--sequences", "2", "--step-tokens", "32", "--launch-patches", "64"];
        command.env("XDG_CACHE_HOME", cache.path()).args(["profile", "--device", "host"]).args(limits);
        let output = command.output().expect("the program ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    chat(&["--profile-cache", "none"]);
    assert!(!profiles.exists(), "`--profile-cache none` writes no file");
    assert_eq!(chat(&[]), "", "a first start has nothing to report");
    assert_eq!(fs::read_dir(&profiles).expect("the folder was made").count(), 1);
    let report = chat(&["--capacity", "528MiB"]);
    let changed = ["canary was 33,554,432 B, is 34,603,008 B", "total was 536,870,912 B, is 553,648,128 B"];
    assert!(changed.iter().all(|change| report.contains(change)), "{report}");
    assert!(report.contains(&profiles.display().to_string()), "the message names the folder: {report}");
    // A command that always measures also saves its profile. The command reports nothing about the
    // existing profile, which it ignores.
    fs::remove_dir_all(&profiles).expect("the folder was made");
    measure();
    let files = || fs::read_dir(&profiles).expect("the folder was made").map(|file| file.expect("a file").path());
    let [file] = files().collect::<Vec<_>>().try_into().expect("one file");
    // Times differ between two measurements.
    let written = || {
        let text = fs::read_to_string(&file).expect("the profile was written");
        let mut profile: Value = serde_json::from_str(&text).expect("the profile is JSON");
        let costs = profile["profiles"][0].as_object_mut().and_then(|profile| profile.remove("costs"));
        assert!(costs.is_some_and(|costs| costs["steps"].as_array().is_some_and(|steps| !steps.is_empty())), "{text}");
        profile
    };
    let first = written();
    fs::write(&file, "{").expect("the profile can be overwritten");
    measure();
    assert_eq!(written(), first);
    assert_eq!(chat(&[]), "", "the profile applies to a start with the same limits");
}

#[test]
fn the_log_follows_a_request_between_actors_without_its_content() {
    let picture = path("model/demo/pictures/shapes.png");
    let logging = ["--log", "json", "--log-level", "debug"];
    let asked = ["--json", "--temperature", "0", "--image", &picture, "Describe the picture, quetzalcoatl."];
    let output = chat(&[&logging[..], &asked[..]].concat(), "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stderr = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    let lines: Vec<Value> = stderr.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();

    let message = |line: &Value| line["message"].as_str().unwrap_or_default().to_owned();
    let in_request = |line: &&Value| {
        let spans = line["spans"].as_array().cloned().unwrap_or_default();
        spans.iter().chain([&line["span"]]).any(|span| span["name"] == "request")
    };
    let request: Vec<String> = lines.iter().filter(in_request).map(message).collect();
    for step in ["decoded", "encoded", "waiting for blocks", "started", "last step finished", "ended", "close"] {
        assert!(request.iter().any(|stderr| stderr == step), "{step}: {request:?}");
    }
    let ids = lines.iter().filter(in_request).flat_map(|line| line["spans"].as_array().cloned().unwrap_or_default());
    let ids: Vec<_> = ids.filter(|span| span["name"] == "request").map(|span| span["id"].clone()).collect();
    assert!(!ids.is_empty() && ids.iter().all(|id| *id == ids[0]), "all lines of a request have one id: {ids:?}");

    let leases: Vec<&Value> = lines.iter().filter(|line| line["span"]["name"] == "lease").collect();
    let granted = leases.iter().filter(|line| message(line) == "granted").count();
    let closed = leases.iter().filter(|line| message(line) == "close").count();
    assert!(granted > 3 && granted == closed, "{granted} leases begin and {closed} end");

    let answer = of_type(&events(&output), "done");
    let answer = answer[0]["text"].as_str().expect("text").to_owned();
    assert!(answer.len() > 3, "{answer}");
    for content in ["quetzalcoatl", "Describe", &answer, "shapes.png"] {
        assert!(!stderr.contains(content), "{content}: {stderr}");
    }
}
