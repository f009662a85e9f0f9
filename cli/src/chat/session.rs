//! A chat session with history. A failed turn is reported and dropped, and the session continues.

use std::{io::IsTerminal, mem, path::Path};

use bursar::{Chat, ChatError, ErrorKind, ImageLimits, MediaError, ModelHandle};
use serde_json::json;

use super::{
    command::{HELP, Line},
    input::{Interrupts, lines},
    options::Options,
    print::{self, Ended, Outcome},
    shown::Shown,
};
use crate::{failure::Failure, logging};

struct ConversationTurn {
    question: String,
    shown: Shown,
    answer: String,
}

/// The state of a conversation.
pub struct Session<'s> {
    model: &'s ModelHandle,
    options: &'s Options,
    limits: &'s ImageLimits,
    /// The chat without turns.
    blank: Chat,
    turns: Vec<ConversationTurn>,
    /// Pictures and videos of the next question.
    shown: Shown,
}

/// The next action of a session: reading another line, or ending.
enum Next {
    Line,
    End(Outcome),
}

impl<'s> Session<'s> {
    /// Creates a session whose first question shows `shown`.
    pub fn new(
        model: &'s ModelHandle,
        options: &'s Options,
        limits: &'s ImageLimits,
        blank: Chat,
        shown: Shown,
    ) -> Self {
        Session { model, options, limits, blank, turns: Vec::new(), shown }
    }

    /// Reads lines from standard input until the end of the input, `/quit`, or Ctrl-C outside a
    /// reply. Also ends when standard output is closed.
    pub async fn run(mut self, interrupts: &mut Interrupts) -> Result<Outcome, Failure> {
        let is_terminal = std::io::stdin().is_terminal() && !self.options.json;
        if is_terminal {
            println!("/help lists all commands; /image FILE shows a picture, /quit ends.");
        }
        let mut lines = lines();
        loop {
            if is_terminal {
                print!("? ");
            }
            let line = tokio::select! {
                biased;
                () = interrupts.next() => Err(Outcome::Interrupted),
                line = lines.recv() => line.ok_or(Outcome::Answered),
            };
            let line = match line {
                Ok(line) => line?,
                Err(over) => {
                    if is_terminal {
                        // End the line of the prompt.
                        println!();
                    }
                    return Ok(over);
                }
            };
            let outcome = match Line::read(&line) {
                Ok(line) => self.act(line, interrupts).await,
                Err(failure) => Err(failure),
            };
            match outcome {
                Ok(Next::Line) => {}
                Ok(Next::End(over)) => return Ok(over),
                Err(failure) => print::failure(&failure, self.options.json),
            }
        }
    }

    async fn act(&mut self, line: Line, interrupts: &mut Interrupts) -> Result<Next, Failure> {
        match line {
            Line::Empty => {}
            Line::Question(question) => return self.ask(question, interrupts).await,
            Line::Help => self.note(HELP),
            Line::Image(paths) => self.each(&paths, Shown::open_image)?,
            Line::Video(paths) => self.each(&paths, Shown::open_video)?,
            Line::Images => match self.shown.names() {
                names if names.is_empty() => self.note("the next question shows nothing"),
                names => {
                    let lines = names.iter().enumerate().map(|(index, name)| format!("{}  {name}", index + 1));
                    self.note(&lines.collect::<Vec<_>>().join("\n"));
                }
            },
            Line::Drop(None) => match mem::take(&mut self.shown).names() {
                names if names.is_empty() => self.note("there was nothing to drop"),
                names => self.note(&format!("dropped: {}", names.join(", "))),
            },
            Line::Drop(Some(which)) => match self.shown.drop(&which) {
                Some(name) => self.note(&format!("dropped: {name}")),
                None => {
                    return Err(Failure {
                        error: format!("the next question does not show {which}"),
                        hint: "/images lists the pictures and videos, with numbers".to_owned(),
                    });
                }
            },
            Line::Undo => match self.turns.pop() {
                Some(_) => self.note("the last turn was removed"),
                None => self.note("there is no turn to remove"),
            },
            Line::Forget(turns) => {
                let forgotten = self.turns.drain(..turns.min(self.turns.len())).count();
                self.note(&format!("dropped the oldest turns: {forgotten}"));
            }
            Line::Clear => {
                self.turns.clear();
                self.shown = Shown::default();
                self.note("the session starts over");
            }
            Line::Quit => return Ok(Next::End(Outcome::Answered)),
        }
        Ok(Next::Line)
    }

    /// Opens the files one by one and reports each. At the first bad file, keeps the files before
    /// it and skips the files after it.
    fn each(
        &mut self,
        paths: &[impl AsRef<Path>],
        open: fn(&mut Shown, &Path, &Options, &ImageLimits) -> Result<String, Failure>,
    ) -> Result<(), Failure> {
        for path in paths {
            let took = open(&mut self.shown, path.as_ref(), self.options, self.limits)?;
            self.note(&format!("the next question shows {took}"));
        }
        Ok(())
    }

    async fn ask(&mut self, question: String, interrupts: &mut Interrupts) -> Result<Next, Failure> {
        let ended = loop {
            let asked = self.shown.ask(self.conversation(), &question);
            match print::stream(self.model, asked, self.options, interrupts).await {
                Err(ChatError::TooLong { .. }) if self.options.forget_oldest && !self.turns.is_empty() => {
                    self.turns.remove(0);
                    self.note("the context is full; the oldest turn was dropped");
                }
                ended => break ended,
            }
        };
        match ended {
            Ok(Ended::OutputClosed) => return Ok(Next::End(Outcome::Answered)),
            // No text arrived, so the turn is not kept, and the next question shows the same files.
            Ok(Ended::Interrupted { text }) if text.is_empty() => {}
            Ok(Ended::Done { text } | Ended::Interrupted { text }) => {
                self.turns.push(ConversationTurn { question, shown: mem::take(&mut self.shown), answer: text });
            }
            Err(error) => {
                self.forget_what_fails(&error);
                return Err(self.failure(error));
            }
        }
        Ok(Next::Line)
    }

    /// Returns all turns as one chat.
    fn conversation(&self) -> Chat {
        self.turns
            .iter()
            .fold(self.blank.clone(), |chat, turn| turn.shown.ask(chat, &turn.question).assistant(turn.answer.clone()))
    }

    /// Drops the pictures and videos that would make the next question fail too: the item at fault,
    /// or all items if the error names none. Keeps all items if the failure is temporary, or if
    /// removing turns may resolve it.
    fn forget_what_fails(&mut self, error: &ChatError) {
        let shown = &mut self.shown;
        let of_turns = |count: fn(&Shown) -> usize| self.turns.iter().map(|turn| count(&turn.shown)).sum::<usize>();
        let dropped = match at_fault(error) {
            Some(Visible::Picture(index)) => {
                index.checked_sub(of_turns(Shown::images)).and_then(|index| shown.drop_image(index))
            }
            Some(Visible::Video(index)) => {
                index.checked_sub(of_turns(Shown::videos)).and_then(|index| shown.drop_video(index))
            }
            // `/clear` or `/undo` may free enough of the context, so keep the pictures and videos.
            None if matches!(error, ChatError::TooLong { .. }) && !self.turns.is_empty() => None,
            None if error.kind() == ErrorKind::Request => {
                Some(mem::take(shown).names().join(", ")).filter(|names| !names.is_empty())
            }
            None => None,
        };
        if let Some(name) = dropped {
            self.note(&format!("dropped: {name}"));
        }
    }

    fn failure(&self, error: ChatError) -> Failure {
        let is_full = matches!(error, ChatError::TooLong { .. }) && !self.turns.is_empty();
        let failure = Failure::from(error);
        if is_full {
            Failure {
                hint: "/clear starts the session over, /undo removes the last turn, /forget N drops the oldest turns, \
                       `forget_oldest` always drops them; or raise `context_tokens`"
                    .to_owned(),
                ..failure
            }
        } else {
            failure
        }
    }

    /// Prints a message that is neither a reply nor an error.
    fn note(&self, text: &str) {
        if self.options.json { println!("{}", json!({ "type": "note", "note": text })) } else { logging::note(text) }
    }
}

/// A picture or a video of a chat, by its index within its kind.
enum Visible {
    Picture(usize),
    Video(usize),
}

/// Returns the picture or video that made a chat fail, if the error names one.
fn at_fault(error: &ChatError) -> Option<Visible> {
    match error {
        ChatError::Media(MediaError::Picture { index, .. } | MediaError::PictureTooLarge { index, .. }) => {
            Some(Visible::Picture(*index))
        }
        ChatError::Media(MediaError::Video { index, .. }) => Some(Visible::Video(*index)),
        _ => None,
    }
}
