//! A bar for loading and profiling, on standard error. Where that is no terminal it stays silent.

use bursar::{AttemptReport, Outcome, Progress};
use indicatif::{ProgressBar, ProgressStyle};

/// Draws the moments of a start.
#[derive(Clone)]
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar that is shown, or one that is not.
    pub fn new(shown: bool) -> Self {
        let bar = if shown { ProgressBar::new(1) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{bar:24} {percent:>3} %  {msg}");
        bar.set_style(style.expect("the template is valid"));
        Bar(bar)
    }

    /// Draws one moment.
    pub fn show(&self, progress: Progress) {
        match progress {
            Progress::Fetching { file, done, total } => {
                self.0.set_message(format!("fetching {file}"));
                self.draw(done.0, total.0);
            }
            Progress::Planning => self.0.set_message("planning the worst cases"),
            Progress::Loading { done, total } => {
                self.0.set_message("loading weights");
                self.draw(done.0, total.0);
            }
            Progress::Profiling { what, done, total } => {
                self.0.set_message(what);
                self.draw(done as u64, total as u64);
            }
            Progress::Phase(_) => {}
            Progress::Attempt(AttemptReport { attempt, outcome: Outcome::Refused { evidence }, .. }) => {
                self.0.println(format!("attempt {attempt}: {evidence}"));
            }
            Progress::Attempt(_) => {}
            Progress::Ready => self.0.finish_and_clear(),
        }
    }

    fn draw(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }
}
