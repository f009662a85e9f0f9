//! A line of a session: a question, or a command that begins with a slash.

use std::{
    env::home_dir,
    path::{Path, PathBuf},
};

use crate::failure::Failure;

#[derive(Debug, PartialEq)]
pub enum Line {
    Empty,
    Question(String),
    Help,
    Image(Vec<PathBuf>),
    /// Folders of frames for the next question.
    Video(Vec<PathBuf>),
    /// Lists the pictures and videos of the next question.
    Images,
    /// Drops all pictures and videos of the next question, or the item with this name or number.
    Drop(Option<String>),
    /// Removes the last turn.
    Undo,
    /// Drops this many of the oldest turns.
    Forget(usize),
    /// Starts a new conversation.
    Clear,
    Quit,
}

/// The list of commands.
pub const HELP: &str = "\
/image FILE ...  shows pictures with the next question; put names with spaces in quotes; ~ is your home
/video DIR ...   shows folders of frames with the next question
/images          lists the pictures and videos of the next question
/drop [NAME|N]   removes one of them, or all, from the next question
/undo            removes the last turn
/forget [N]      drops the oldest turn, or the N oldest
/clear           starts the session over
/quit            ends the session
Ctrl-C ends a reply; at the prompt, it ends the session. A line that begins with a space is always a question.";

impl Line {
    /// Parses a typed line, with or without its newline.
    pub fn read(bytes: &[u8]) -> Result<Line, Failure> {
        let text = str::from_utf8(bytes).map_err(|error| Failure {
            error: format!("the line is not UTF-8: byte {} is not part of a character", error.valid_up_to() + 1),
            hint: "type it again; only this line is lost".to_owned(),
        })?;
        let trimmed = text.trim();
        if !text.starts_with('/') {
            return Ok(if trimmed.is_empty() { Line::Empty } else { Line::Question(trimmed.to_owned()) });
        }
        let (word, rest) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
        let rest = Some(rest.trim()).filter(|rest| !rest.is_empty());
        match (word, rest) {
            ("/image", Some(rest)) => Ok(Line::Image(paths(rest)?)),
            ("/video", Some(rest)) => Ok(Line::Video(paths(rest)?)),
            ("/image" | "/video", None) => Err(wrong(format!("{word} needs a file"))),
            ("/drop", rest) => Ok(Line::Drop(rest.map(str::to_owned))),
            ("/forget", None) => Ok(Line::Forget(1)),
            ("/forget", Some(turns)) => match turns.parse() {
                Ok(turns @ 1..) => Ok(Line::Forget(turns)),
                _ => Err(wrong(format!("{turns} is not a number of turns; expected at least 1"))),
            },
            ("/help", None) => Ok(Line::Help),
            ("/images", None) => Ok(Line::Images),
            ("/undo", None) => Ok(Line::Undo),
            ("/clear", None) => Ok(Line::Clear),
            ("/quit", None) => Ok(Line::Quit),
            ("/help" | "/images" | "/undo" | "/clear" | "/quit", Some(_)) => {
                Err(wrong(format!("{word} takes no argument")))
            }
            _ => Err(wrong(format!("unknown command {word}"))),
        }
    }
}

fn wrong(error: String) -> Failure {
    Failure {
        error,
        hint: "/help lists the commands; put a space before a question that begins with a slash".to_owned(),
    }
}

/// Returns the named files: one file if the whole text is its name, or else several, with quotes
/// around names that contain spaces.
fn paths(text: &str) -> Result<Vec<PathBuf>, Failure> {
    let whole = at_home(text);
    if whole.exists() {
        return Ok(vec![whole]);
    }
    let names = shlex::split(text).ok_or_else(|| wrong(format!("{text} has an unclosed quote")))?;
    Ok(names.iter().map(|name| at_home(name)).collect())
}

/// Replaces a leading `~` by the user's home folder.
fn at_home(name: &str) -> PathBuf {
    match (Path::new(name).strip_prefix("~"), home_dir()) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Line {
        Line::read(line.as_bytes()).unwrap_or_else(|failure| panic!("{line}: {failure}"))
    }

    #[test]
    fn a_line_without_a_leading_slash_is_a_question() {
        assert_eq!(read("  \r\n"), Line::Empty);
        assert_eq!(read("What is this?\n"), Line::Question("What is this?".to_owned()));
        assert_eq!(read(" /etc/hosts is what?"), Line::Question("/etc/hosts is what?".to_owned()));
        assert_eq!((read("/quit"), read("/forget 3"), read("/forget")), (Line::Quit, Line::Forget(3), Line::Forget(1)));
        for wrong in ["/imgae cat.png", "/", "/image", "/clear all", "/forget 0", "/image \"cat.png"] {
            let failure = Line::read(wrong.as_bytes()).expect_err(wrong);
            assert!(failure.hint.contains("/help"), "{wrong}: {failure}");
        }
        assert!(Line::read(b"caf\xe9").expect_err("Latin-1 is not valid UTF-8").error.contains("byte 4"));
    }

    #[test]
    fn file_names_may_have_quotes_spaces_and_a_tilde() {
        let home = home_dir().expect("the tests run with a home directory");
        let image = |names: &[&str]| Line::Image(names.iter().map(PathBuf::from).collect());
        assert_eq!(read("/image a.png 'my cat.png' my\\ dog.png"), image(&["a.png", "my cat.png", "my dog.png"]));
        assert_eq!(read("/image \"~/a b.png\""), Line::Image(vec![home.join("a b.png")]));
        assert_eq!(read("/image ~user.png"), image(&["~user.png"]));
    }
}
