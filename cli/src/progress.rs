//! A progress bar for loading and profiling, on standard error, with notices above it. If standard
//! error is not a terminal, only notices are printed. With `--log json`, progress is logged as
//! lines.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bursar::{AttemptReport, Outcome, Progress};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::logging;

/// Draws the progress of a start.
#[derive(Clone)]
pub struct Bar {
    bar: ProgressBar,
    is_shown: bool,
    /// The last logged line and its time, if progress is logged as lines.
    last_printed: Arc<Mutex<Option<(String, Instant)>>>,
}

/// The minimum time between two logged lines about the same activity.
const APART: Duration = Duration::from_secs(1);

impl Bar {
    /// Creates a single bar, visible or hidden.
    pub fn new(is_shown: bool) -> Self {
        let is_drawn = is_shown && !logging::is_json();
        Bar::around(if is_drawn { ProgressBar::new(1) } else { ProgressBar::hidden() }, is_shown, "")
    }

    /// Creates one of several visible bars. Its prefix is the name of its model.
    pub fn among(bars: &MultiProgress, whose: &str) -> Self {
        let bar = if logging::is_json() { ProgressBar::hidden() } else { bars.add(ProgressBar::new(1)) };
        Bar::around(bar, true, &format!("{whose}: "))
    }

    fn around(bar: ProgressBar, is_shown: bool, prefix: &str) -> Self {
        let style = ProgressStyle::with_template("{bar:24} {percent:>3} %  {prefix}{msg}");
        bar.set_style(style.expect("the template is valid"));
        bar.set_prefix(prefix.to_owned());
        Bar { bar, is_shown, last_printed: Arc::default() }
    }

    /// Draws one progress event.
    pub fn show(&self, progress: Progress) {
        match progress {
            Progress::Fetching { file, done, total } => self.draw(&format!("fetching {file}"), done.0, total.0),
            Progress::Planning => self.draw("planning the worst cases", 0, 1),
            Progress::Loading { done, total } => self.draw("loading weights", done.0, total.0),
            Progress::Profiling { what, done, total, .. } => self.draw(what, done as u64, total as u64),
            Progress::Phase(_) => {}
            Progress::Attempt(AttemptReport { attempt, outcome: Outcome::Refused { evidence }, .. }) => {
                let text = format!("{}attempt {attempt}: {evidence}", self.bar.prefix());
                if self.tells_lines() { logging::note(text) } else { self.bar.println(text) }
            }
            Progress::Attempt(_) => {}
            Progress::Notice(notice) if self.is_shown => {
                // Read the prefix first, because it cannot be read while the bar is suspended.
                let text = format!("{}{notice}", self.bar.prefix());
                self.bar.suspend(|| logging::note(text));
            }
            Progress::Notice(_) => {}
            Progress::Ready if self.tells_lines() => logging::note(format_args!("{}ready", self.bar.prefix())),
            Progress::Ready => self.bar.finish_and_clear(),
        }
    }

    fn tells_lines(&self) -> bool {
        self.is_shown && logging::is_json()
    }

    fn draw(&self, what: &str, done: u64, total: u64) {
        if self.tells_lines() {
            return self.print_line(&format!("{}{what}", self.bar.prefix()), done, total);
        }
        self.bar.set_message(what.to_owned());
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    /// Logs the first line about each activity, then at most one line per second.
    fn print_line(&self, what: &str, done: u64, total: u64) {
        let mut last_printed = self.last_printed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last_printed.as_ref().is_none_or(|(before, at)| before != what || at.elapsed() >= APART);
        if is_due {
            logging::progress(what, done, total);
            *last_printed = Some((what.to_owned(), Instant::now()));
        }
    }
}
