//! Error messages of the command line: complete, and in terms that users know. A closed pipe causes
//! no message.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

use crate::{
    command_line::{bursar, chat, command, events, feed, object, of_type, path},
    stage::Folder,
};

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The standard error output and the exit code of a refused chat.
fn refused(arguments: &[&str]) -> (String, Option<i32>) {
    let output = chat(arguments, "");
    assert!(!output.status.success(), "{arguments:?} must be refused");
    (stderr_of(&output), output.status.code())
}

#[test]
fn a_closed_pipe_ends_a_command_quietly() {
    let chat = command(&["--temperature", "0", "hello"]).get_args().map(|a| a.to_owned()).collect::<Vec<_>>();
    let commands: [Vec<std::ffi::OsString>; 5] = [
        vec!["plan".into()],
        vec!["plan".into(), "--json".into()],
        chat,
        vec!["drill".into(), "--fault".into(), "load:9".into(), "--json".into()],
        ["--device", "host", "--profile-cache", "none"].map(Into::into).to_vec(),
    ];
    for arguments in commands {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        command.args(&arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary exists");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("the program ends");
        assert_eq!(stderr_of(&output), "", "{arguments:?}");
        let is_refused = arguments[0] == "drill";
        assert_eq!(output.status.code(), Some(if is_refused { 2 } else { 0 }), "{arguments:?}");
    }
    // The program does not panic either when standard error is closed.
    let mut child = Command::new(env!("CARGO_BIN_EXE_bursar"))
        .args(["chat", "--model", "nowhere/at/all", "hello"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary exists");
    drop(child.stderr.take());
    assert_eq!(child.wait().expect("the program ends").code(), Some(1));
}

#[test]
fn a_schema_error_is_reported_with_its_path() {
    let folder = Folder::empty();
    let schema = folder.path().join("schema.json");
    let fault = json!({"type": "object", "properties": {"size": {"type": "integer"}, "kind": {"type": "zebra"}}});
    fs::write(&schema, fault.to_string()).expect("the file is written");
    let (message, _) = refused(&["--json-schema", &schema.display().to_string(), "hello"]);
    assert!(message.contains("zebra") && message.contains("/properties/kind"), "{message}");
}

#[test]
fn a_templates_error_message_is_reported_verbatim() {
    let folder = Folder::empty();
    for entry in fs::read_dir(bursar_golden::demo_checkpoint()).expect("the demo's checkpoint").flatten() {
        fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("a copy");
    }
    let template = "{{ raise_exception('quietly, please: ' + messages[0].role) }}";
    fs::write(folder.path().join("chat_template.jinja"), template).expect("the file is written");
    let (message, _) = refused(&["--model", &folder.path().display().to_string(), "hello"]);
    assert!(message.contains("quietly, please: user"), "{message}");
}

#[test]
fn errors_name_settings_as_flags_and_pictures_by_file() {
    let picture = path("model/demo/pictures/shapes.png");
    let shown = ["--image", &picture, "hello"];
    for (flag, value) in [("--picture-file-bytes", "1KiB"), ("--picture-source-pixels", "1000")] {
        let (message, _) = refused(&[&[flag, value], &shown[..]].concat());
        assert!(message.contains(flag) && message.contains("shapes.png"), "{message}");
        assert!(!message.contains("::") && !message.contains("_max"), "{message}");
    }
    let (message, _) = refused(&["--pictures", "1", "--image", &picture, "--image", &picture, "hello"]);
    assert!(message.contains("raise --pictures"), "{message}");
    let (message, _) = refused(&["--max-tokens", "3", "--min-tokens", "7", "hello"]);
    assert!(message.contains("--min-tokens is 7") && message.contains("raise --max-tokens"), "{message}");
}

#[test]
fn a_nonexistent_folder_is_reported_as_missing() {
    let (message, _) = refused(&["--model", "./nowhere", "hello"]);
    assert!(message.contains("there is no folder ./nowhere"), "{message}");
    let (message, _) = refused(&["--model", &path("docs"), "hello"]);
    assert!(message.contains("has no config.json"), "an existing folder is not reported as missing: {message}");
}

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    let cases = [
        (&["--deadline", "-1"][..], "--deadline", "above 0 and at most 31536000", 2),
        (&["--deadline", "0"], "--deadline", "above 0", 2),
        (&["--deadline", "1e300"], "--deadline", "at most 31536000", 2),
        (&["--temperature", "-1"], "--temperature is -1", "from 0 to 100", 1),
        (&["--min-p", "-0.5"], "--min-p is -0.5", "from 0 to 1", 1),
        (&["-n", "0"], "0 samples", "from 1 to 1024", 1),
        (&["-n", "20000"], "20000 samples", "from 1 to 1024", 1),
        (&["--capacity", "100TiB"], "--capacity", "expected 2.0 MiB to ", 2),
        (&["--capacity", "1MiB"], "--capacity", "expected 2.0 MiB to ", 2),
        (&["--capacity", "5MB"], "--capacity", "B, KiB, MiB, GiB or TiB", 2),
        (&["--capacity", "much"], "--capacity", "512MiB", 2),
    ];
    for (arguments, named, range, code) in cases {
        let (message, exit) = refused(&[arguments, &["hello"]].concat());
        assert!(message.contains(named) && message.contains(range), "{arguments:?}: {message}");
        assert_eq!(exit, Some(code), "{arguments:?}: {message}");
    }
}

/// The value of a flag in a hint's sentence.
fn flag<'h>(hint: &'h str, name: &str) -> &'h str {
    let at = hint.find(name).unwrap_or_else(|| panic!("{name}: {hint}"));
    hint[at + name.len()..].trim_start_matches("to ").split_whitespace().next().expect("a value")
}

#[test]
fn a_start_error_suggests_the_same_capacity_as_a_plan() {
    for options in [&["--capacity", "16MiB"][..], &["--capacity", "60MiB", "--canary", "1MiB", "--kv-tokens", "16384"]]
    {
        let own = ["--device", "host"];
        let planned = object(&bursar(&[&["plan", "--json"], &own, options].concat()));
        let suggestion = planned["suggestions"].as_array().expect("a list")[0].clone();
        let planned = suggestion["to"].as_u64().expect("bytes");
        let started = bursar(&[&["chat", "--profile-cache", "none", "hello"], &own[..], options].concat());
        let stderr = stderr_of(&started);
        let capacity = flag(&stderr, "--capacity ");
        assert_eq!(capacity, format!("{}MiB", planned >> 20), "{stderr}\n{suggestion}");
        // The capacity suggested is the smallest that fits, to the MiB.
        let with = |capacity: &str| {
            let others = options.iter().copied().skip(2);
            let fits =
                bursar(&["plan", "--capacity", capacity].into_iter().chain(own).chain(others).collect::<Vec<_>>());
            fits.status.success()
        };
        assert!(with(capacity) && !with(&format!("{}MiB", (planned >> 20) - 1)), "{capacity}");
    }
}

#[test]
fn each_failed_sample_reports_its_number() {
    let samples = |arguments: &[&str]| {
        let output = chat(&[&["-n", "3", "--json"], arguments, &["hello"]].concat(), "");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let errors = of_type(&events(&output), "error");
        errors.iter().map(|error| error["sample"].as_u64()).collect::<Vec<_>>()
    };
    assert_eq!(samples(&["--top-p", "7"]), [Some(0), Some(1), Some(2)], "refused before any model loads");
    assert_eq!(samples(&["--context-tokens", "64", "--step-tokens", "64", "--min-tokens", "80"]).len(), 3);
    let mut late = samples(&["--deadline", "0.05", "--regex", "[a-z]{4000}"]);
    late.sort_unstable();
    assert_eq!(late, [Some(0), Some(1), Some(2)], "each sample misses its deadline during the reply");
}

/// A command's output on a terminal.
#[cfg(target_os = "linux")]
fn on_a_terminal(arguments: &str) -> Option<String> {
    let typed = format!("{} {arguments}", env!("CARGO_BIN_EXE_bursar"));
    let mut command = Command::new("script");
    command.args(["-qec", &typed, "/dev/null"]).env("CUDA_VISIBLE_DEVICES", "");
    match command.stdin(Stdio::null()).output() {
        // A container may not be able to open a terminal.
        Ok(output) if output.stdout.is_empty() && !output.stderr.is_empty() => {
            println!("not run: {}", String::from_utf8_lossy(&output.stderr));
            None
        }
        Ok(output) => Some(String::from_utf8_lossy(&output.stdout).into_owned()),
        Err(error) => {
            println!("not run: there is no `script` to make a terminal with ({error})");
            None
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn the_tour_names_its_device_once() {
    let Some(shown) = on_a_terminal("--profile-cache none") else { return };
    assert_eq!(shown.matches("stands in for a GPU").count(), 1, "{shown}");
    assert!(shown.contains("The ledger is back to its earlier state."), "{shown}");
}

/// The reply and the token count of a JSON object with two properties.
fn json_tokens(folder: &Path, whitespace: &[&str]) -> (String, u64) {
    let schema = folder.join("schema.json");
    let shape = json!({
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}, "round": {"type": "boolean"}},
        "required": ["count", "round"],
        "additionalProperties": false,
    });
    fs::write(&schema, shape.to_string()).expect("the file is written");
    let schema = schema.display().to_string();
    let asked = ["--json", "--temperature", "0", "--json-schema", &schema, "How many shapes are there?"];
    let output = feed(command(&[whitespace, &asked].concat()), "");
    let [done] = of_type(&events(&output), "done").try_into().expect("one reply");
    let text = done["text"].as_str().expect("text").to_owned();
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text:?}"));
    assert!(value["count"].is_u64() && value["round"].is_boolean(), "{text}");
    (text, done["usage"]["completion_tokens"].as_u64().expect("a number"))
}

#[test]
fn json_replies_have_the_chosen_whitespace() {
    let folder = Folder::empty();
    let (compact, tokens) = json_tokens(folder.path(), &[]);
    assert!(!compact.contains(char::is_whitespace), "{compact:?}");
    assert!(tokens <= compact.len() as u64, "{tokens} tokens for {compact}");
    let (spaced, _) = json_tokens(folder.path(), &["--json-whitespace", "spaced"]);
    assert!(spaced.starts_with("{\"count\": ") && spaced.contains(", \"round\": "), "{spaced:?}");
    json_tokens(folder.path(), &["--json-whitespace", "free"]);
}
