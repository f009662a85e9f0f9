//! A bar for loading and profiling, on standard error, with notices above it. Where that is no terminal there are only
//! notices.

use bursar::{AttemptReport, Outcome, Progress};
use indicatif::{ProgressBar, ProgressStyle};

/// Draws the moments of a start.
#[derive(Clone)]
pub struct Bar {
    bar: ProgressBar,
    is_shown: bool,
}

impl Bar {
    /// A bar that is shown, or one that is not.
    pub fn new(is_shown: bool) -> Self {
        let bar = if is_shown { ProgressBar::new(1) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{bar:24} {percent:>3} %  {msg}");
        bar.set_style(style.expect("the template is valid"));
        Bar { bar, is_shown }
    }

    /// Draws one moment.
    pub fn show(&self, progress: Progress) {
        match progress {
            Progress::Fetching { file, done, total } => {
                self.bar.set_message(format!("fetching {file}"));
                self.draw(done.0, total.0);
            }
            Progress::Planning => self.bar.set_message("planning the worst cases"),
            Progress::Loading { done, total } => {
                self.bar.set_message("loading weights");
                self.draw(done.0, total.0);
            }
            Progress::Profiling { what, done, total, .. } => {
                self.bar.set_message(what);
                self.draw(done as u64, total as u64);
            }
            Progress::Phase(_) => {}
            Progress::Attempt(AttemptReport { attempt, outcome: Outcome::Refused { evidence }, .. }) => {
                self.bar.println(format!("attempt {attempt}: {evidence}"));
            }
            Progress::Attempt(_) => {}
            Progress::Notice(notice) if self.is_shown => self.bar.suspend(|| eprintln!("{notice}")),
            Progress::Notice(_) => {}
            Progress::Ready => self.bar.finish_and_clear(),
        }
    }

    fn draw(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}
