//! Numbers and names in display form.

use bursar_budgets::grouped;
use ratatui::text::Span;

use crate::top::{palette::Colors, view::Actor};

/// Returns the number of terminal columns of a text.
pub fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// Cuts a text to this many columns. A text that was cut ends in a mark.
pub fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let mut kept = String::new();
    // Some characters have no width, and some change the width of the preceding character, so
    // measure the whole text. Four characters per column are enough.
    for letter in text.chars().take(4 * columns) {
        kept.push(letter);
        // Leave a column for the mark.
        if width(&kept) >= columns {
            kept.pop();
            break;
        }
    }
    if columns > 0 { kept + "…" } else { kept }
}

/// Wraps a text to this many columns, between words if possible.
pub fn fold(text: &str, columns: usize) -> Vec<String> {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split_inclusive(' ') {
        if width(&line) + width(word.trim_end()) > columns && !line.is_empty() {
            lines.push(std::mem::take(&mut line));
        }
        // A word longer than a line breaks anywhere.
        for letter in word.chars() {
            line.push(letter);
            if width(line.trim_end()) > columns && line.chars().count() > 1 {
                line.pop();
                lines.push(std::mem::replace(&mut line, letter.to_string()));
            }
        }
    }
    lines.push(line);
    lines.iter_mut().for_each(|line| line.truncate(line.trim_end().len()));
    lines
}

/// Formats a rate per second.
pub fn rate(per_second: Option<f64>) -> String {
    match per_second {
        None => "-".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(rate) if rate < 9.95 => format!("{rate:.1}"),
        Some(rate) if rate < 999.5 => format!("{rate:.0}"),
        Some(rate) if rate < 999_950.0 => format!("{:.1}k", rate / 1e3),
        Some(rate) => format!("{:.1}M", rate / 1e6),
    }
}

pub fn seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 0.0009995 => format!("{:.0} µs", seconds * 1e6),
        seconds if seconds < 0.00995 => format!("{:.1} ms", seconds * 1e3),
        seconds if seconds < 0.9995 => format!("{:.0} ms", seconds * 1e3),
        seconds if seconds < 9.95 => format!("{}", Short(seconds)),
        seconds if seconds < 119.5 => format!("{seconds:.0} s"),
        seconds => format!("{:.0} min", seconds / 60.0),
    }
}

/// Seconds with one decimal, unless the decimal is zero.
struct Short(f64);

impl std::fmt::Display for Short {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tenths = format!("{:.1}", self.0);
        write!(f, "{} s", tenths.strip_suffix(".0").unwrap_or(&tenths))
    }
}

/// Formats how long ago something was. Times in the future, which occur if the clocks of two
/// machines differ, become 0.
pub fn age(seconds: f64) -> String {
    match seconds.max(0.0) {
        seconds if seconds < 120.0 => format!("{seconds:.0} s"),
        seconds if seconds < 2.0 * 3600.0 => format!("{:.0} min", (seconds / 60.0).floor()),
        seconds if seconds < 48.0 * 3600.0 => format!("{:.0} h", (seconds / 3600.0).floor()),
        seconds if seconds.is_finite() => format!("{:.0} d", (seconds / 86400.0).floor()),
        _ => "?".to_owned(),
    }
}

/// Formats a share from 0 to 1 in percent.
pub fn percent(share: f64) -> String {
    match share * 100.0 {
        0.0 => "0 %".to_owned(),
        percent if percent < 9.95 => format!("{percent:.1} %"),
        percent => format!("{percent:.0} %"),
    }
}

/// Draws values as bars of eight heights, the newest last, scaled to the highest value shown.
pub fn sparkline(values: impl DoubleEndedIterator<Item = f64> + Clone, columns: usize) -> String {
    const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let shown = values.rev().take(columns);
    let highest = shown.clone().fold(0.0, f64::max);
    let height = |value: f64| HEIGHTS[((value / highest * 8.0).ceil() as usize).saturating_sub(1).min(7)];
    let bar = |value: f64| if value > 0.0 { height(value) } else { '▁' };
    let bars: Vec<_> = shown.map(bar).collect();
    bars.into_iter().rev().collect()
}

/// Formats an actor as a mark and its name. A stopped actor is highlighted as
/// bad only with `is_missed`.
pub fn actor_words(actor: &Actor, is_missed: bool, colors: Colors) -> Vec<Span<'static>> {
    let (mark, style) = match (actor.is_up, actor.actor.as_str()) {
        (true, _) => ("●", colors.good()),
        // The profile actor exists only while a model is sized.
        (false, "profile") => ("○", colors.faint()),
        (false, _) => ("○", if is_missed { colors.bad() } else { colors.faint() }),
    };
    let mut words = vec![Span::styled(format!(" {mark} "), style), Span::raw(cut(&actor.actor, 16))];
    if actor.restarts > 0 {
        let plural = if actor.restarts == 1 { "restart" } else { "restarts" };
        words.push(Span::styled(format!(" {} {plural}", grouped(actor.restarts)), colors.notable()));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_have_units() {
        let rates = [None, Some(0.0), Some(0.44), Some(9.96), Some(340.2), Some(1234.0), Some(2.5e6)];
        assert_eq!(rates.map(rate), ["-", "0", "0.4", "10", "340", "1.2k", "2.5M"]);
        let times = [0.0, 0.000_25, 0.0042, 0.035, 0.9996, 1.25, 12.4, 200.0];
        assert_eq!(times.map(seconds), ["0 µs", "250 µs", "4.2 ms", "35 ms", "1 s", "1.2 s", "12 s", "3 min"]);
        let ages = [-3.0, 12.4, 119.0, 600.0, 7300.0, 3e5, f64::NAN, f64::INFINITY];
        assert_eq!(ages.map(age), ["0 s", "12 s", "119 s", "10 min", "2 h", "3 d", "0 s", "?"]);
        assert_eq!([0.0, 0.004, 0.5, 1.0].map(percent), ["0 %", "0.4 %", "50 %", "100 %"]);
    }

    #[test]
    fn text_is_cut_by_columns_not_characters() {
        assert_eq!(cut("model", 5), "model");
        assert_eq!(cut("models", 5), "mode…");
        assert_eq!(cut("模型模型", 5), "模型…");
        assert_eq!(cut("模型模型", 4), "模…");
        assert_eq!(cut("models", 1), "…");
        assert_eq!(cut("models", 0), "");
        // Characters that are wider together than apart, and characters without width.
        for text in ["#\u{fe0f}️ and more", "❤️❤️❤️❤️", "👩‍👩‍👧‍👦 four of them", &"\u{301}".repeat(100)]
        {
            (0..12).for_each(|columns| assert!(width(&cut(text, columns)) <= columns, "{text} in {columns}"));
        }
    }

    #[test]
    fn long_text_wraps_between_words() {
        assert_eq!(fold("one two three", 20), ["one two three"]);
        assert_eq!(fold("one two three", 8), ["one two", "three"]);
        assert_eq!(fold("one twothreefour 5", 7), ["one", "twothre", "efour 5"]);
        assert_eq!(fold("模型模型", 5), ["模型", "模型"]);
        assert_eq!(fold("", 5), [""]);
        assert_eq!(fold("ab", 0), ["a", "b"], "one letter a line if no letter fits");
    }

    #[test]
    fn a_sparkline_shows_the_newest_values_scaled_to_the_highest() {
        let line = |values: &[f64], columns| sparkline(values.iter().copied(), columns);
        assert_eq!(line(&[900.0, 0.0, 1.0, 4.0, 8.0], 4), "▁▁▄█");
        assert_eq!(line(&[0.0, 0.0], 4), "▁▁");
        assert_eq!(line(&[], 4), "");
        assert_eq!(line(&[f64::NAN, f64::INFINITY, 3.0], 4).chars().count(), 3);
    }
}
