//! Sessions of `bursar chat`: an error ends only its turn, and Ctrl-C ends only the reply or the
//! session that it was meant for.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdout, Command, Output, Stdio},
};

use image::{Rgb, RgbImage};
use serde_json::Value;

use crate::{
    command_line::{chat, command, events, of_type, path},
    stage::{Folder, png},
};

/// The lines of standard output. Without --json, these are the session's replies.
fn replies(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn notes(events: &[Value]) -> Vec<String> {
    of_type(events, "note").iter().map(|note| note["note"].as_str().expect("text").to_owned()).collect()
}

const GREEDY: [&str; 4] = ["--temperature", "0", "--max-tokens", "24"];

#[test]
fn an_unreadable_picture_is_dropped_and_named() {
    let folder = Folder::empty();
    let (bad, damaged) = (folder.path().join("bad.gif"), folder.path().join("damaged.png"));
    fs::write(&bad, b"no picture at all").expect("the file is written");
    // The header of this file is complete. The damage is found while decoding, so only the turn
    // with this picture fails.
    let whole = png(&RgbImage::from_fn(90, 70, |x, y| Rgb([x as u8, y as u8, (x * y) as u8])));
    fs::write(&damaged, &whole[..whole.len() / 2]).expect("the file is written");

    let output = chat(&GREEDY, format!("/image {}\nhello\nhello\n", bad.display()));
    assert!(output.status.success(), "{}", stderr_of(&output));
    assert_eq!(replies(&output).len(), 2, "{}", stderr_of(&output));
    assert!(stderr_of(&output).contains("bad.gif"), "{}", stderr_of(&output));

    let good = path("model/demo/pictures/shapes.png");
    let lines = format!("/image {} {good}\nhello\n/images\nDescribe the picture.\n", damaged.display());
    let output = chat(&[&GREEDY[..], &["--json"]].concat(), lines);
    let events = events(&output);
    let [error] = of_type(&events, "error").try_into().expect("one turn fails");
    assert!(error["error"].as_str().expect("text").contains("damaged.png"), "{error}");
    let [_, _, dropped, left] = notes(&events).try_into().expect("two added, one dropped, one listed");
    assert!(dropped.contains("damaged.png") && !dropped.contains(&good), "{dropped}");
    assert!(left.contains(&good), "the readable picture stays: {left}");
    let [done] = of_type(&events, "done").try_into().expect("the next question is answered");
    assert!(done["usage"]["picture_tokens"].as_u64().expect("a number") > 0, "the reply is about the picture: {done}");
}

#[test]
fn a_full_context_suggests_commands_that_work() {
    let small = ["--context-tokens", "128", "--step-tokens", "64", "--temperature", "0", "--max-tokens", "4"];
    let long = "shapes ".repeat(30);
    let lines = format!("{long}\n{long}\n{long}\n/undo\n/forget\n{long}\n/clear\n{long}\n");
    let output = chat(&small, &lines);
    let ways = stderr_of(&output);
    assert!(["/clear", "/undo", "/forget", "--forget-oldest"].iter().all(|way| ways.contains(way)), "{ways}");
    let answered = replies(&output).len();
    assert!((2..5).contains(&answered), "some questions did not fit, and one after /clear did: {ways}");

    let output = chat(&[&small[..], &["--forget-oldest"]].concat(), format!("{long}\n{long}\n{long}\n{long}\n"));
    assert_eq!(replies(&output).len(), 4, "{}", stderr_of(&output));
    assert!(stderr_of(&output).contains("oldest turn was dropped"), "{}", stderr_of(&output));
}

#[test]
fn commands_report_their_effect_and_typos_ask_no_question() {
    let folder = Folder::empty();
    let spaced = folder.path().join("my shapes.png");
    fs::copy(path("model/demo/pictures/shapes.png"), &spaced).expect("the file is copied");
    let lines = format!(
        "/imgae cat.png\n/help\n/images\n/image '{}'\n/images\n/drop 1\n/images\n/image ~/shapes.png\n/drop\nhello\n/undo\n/undo\n\
         /quit\nnever\n",
        spaced.display()
    );
    let mut command = command(&[&GREEDY[..], &["--json"]].concat());
    fs::copy(&spaced, folder.path().join("shapes.png")).expect("the file is copied");
    command.env("HOME", folder.path());
    let output = crate::command_line::feed(command, lines);
    assert!(output.status.success(), "{}", stderr_of(&output));
    let events = events(&output);
    let [wrong] = of_type(&events, "error").try_into().expect("one command is wrong");
    assert!(wrong["error"].as_str().expect("text").contains("/imgae"), "{wrong}");
    let notes = notes(&events);
    let expected = [
        "/undo",
        "shows nothing",
        "my shapes.png, 336 x 252 pixels",
        "1  ",
        "dropped: ",
        "shows nothing",
        "shapes.png",
        "dropped: ",
        "the last turn was removed",
        "there is no turn to remove",
    ];
    assert_eq!(notes.len(), expected.len(), "{notes:?}");
    for (note, expected) in notes.iter().zip(expected) {
        assert!(note.contains(expected), "{note:?} does not say {expected:?}");
    }
    assert_eq!(of_type(&events, "done").len(), 1, "only the question before /quit is answered");
}

#[test]
fn only_a_line_of_invalid_utf8_is_skipped() {
    let output = chat(&GREEDY, &b"hello\ncaf\xe9?\nhello\n"[..]);
    assert!(output.status.success(), "{}", stderr_of(&output));
    assert_eq!(replies(&output).len(), 2, "{}", stderr_of(&output));
    assert!(stderr_of(&output).contains("UTF-8") && stderr_of(&output).contains("byte 4"), "{}", stderr_of(&output));
}

/// A reply as long as the context allows.
const ENDLESS: [&str; 4] = ["--regex", "[a-z ]{4000}", "--temperature", "1"];

#[test]
fn a_reply_cut_off_by_length_prints_a_notice() {
    let output = chat(&["--max-tokens", "3", "--regex", "[a-z]{90}", "hello"], "");
    assert!(
        stderr_of(&output).contains("cut after 3 tokens, as many as --max-tokens allows"),
        "{}",
        stderr_of(&output)
    );
    let small = ["--context-tokens", "128", "--step-tokens", "64", "hello"];
    let output = chat(&[&ENDLESS[..], &small].concat(), "");
    assert!(stderr_of(&output).contains("the context is full"), "{}", stderr_of(&output));
    let output = chat(&["--choice", "yes", "hello"], "");
    assert_eq!(stderr_of(&output), "", "a complete reply prints no notice");
}

#[test]
fn an_error_during_a_reply_starts_a_new_line() {
    // Try longer and longer deadlines, until a deadline is long enough for some text of the reply
    // on this machine.
    for deadline in ["0.1", "0.3", "1", "3", "10"] {
        let output = chat(&[&ENDLESS[..], &["--deadline", deadline, "hello"]].concat(), "");
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(1), "{}", stderr_of(&output));
        assert!(stderr_of(&output).starts_with("error: "), "{}", stderr_of(&output));
        if !stdout.is_empty() {
            assert!(stdout.ends_with('\n'), "{stdout:?}");
            return;
        }
    }
    panic!("no deadline is long enough for a reply to begin");
}

struct Spoken {
    child: Child,
    received: BufReader<ChildStdout>,
}

impl Spoken {
    fn begin() -> Self {
        let mut command = command(&[&ENDLESS[..], &["--json"]].concat());
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("the binary is there");
        let received = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Spoken { child, received }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().expect("stdin is piped"), "{line}").expect("the program reads");
    }

    /// The next event of this type.
    fn wait_for_event(&mut self, kind: &str) -> Value {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.received.read_line(&mut line).expect("UTF-8") > 0, "the program ended before {kind}");
            let event: Value = serde_json::from_str(&line).expect("an event");
            if event["type"] == kind {
                return event;
            }
        }
    }

    fn press_ctrl_c(&self) {
        let pressed = Command::new("sh").args(["-c", &format!("kill -INT {}", self.child.id())]).status();
        assert!(pressed.expect("a shell can be started").success());
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_reply_and_then_the_session() {
    let mut session = Spoken::begin();
    for question in ["hello", "and again"] {
        session.say(question);
        session.wait_for_event("token");
        session.press_ctrl_c();
        let interrupted = session.wait_for_event("interrupted");
        assert!(!interrupted["text"].as_str().expect("text").is_empty(), "{interrupted}");
    }
    session.press_ctrl_c();
    let over = session.child.wait().expect("the program ends");
    assert_eq!(over.code(), Some(130));
}
