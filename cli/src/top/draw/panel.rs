//! Panels: a title with lines below it, and the division of rows among panels.

use ratatui::text::{Line, Span};

use super::words;
use crate::top::palette::Colors;

/// How a text that is longer than its line is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The text is cut and ends in an ellipsis.
    Cut,
    /// The text wraps to the next line.
    Fold,
}

impl Fit {
    /// Splits a text into lines.
    pub fn lines(self, text: &str, columns: usize) -> Vec<String> {
        match self {
            Fit::Cut => vec![words::cut(text, columns)],
            Fit::Fold => words::fold(text, columns),
        }
    }
}

/// A title line, followed by the other lines in order of importance.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    pub lines: Vec<Line<'static>>,
    /// Index of a line that must be visible if the panel has at least two rows. The first line is
    /// always visible. Lines between the first line and this line are shown as far as they fit.
    pub seen: Option<usize>,
}

impl Panel {
    /// Builds a panel from a title, a right-aligned note and lines.
    pub fn titled(title: &str, right: &str, width: u16, colors: Colors, lines: Vec<Line<'static>>) -> Self {
        let width = usize::from(width);
        let right = words::cut(right, width.saturating_sub(12));
        let title = words::cut(title, width.saturating_sub(words::width(&right) + 7));
        let mut spans = vec![Span::styled("─ ", colors.faint()), Span::styled(title, colors.strong())];
        let taken = 3 + words::width(&spans[1].content) + if right.is_empty() { 0 } else { words::width(&right) + 3 };
        spans.push(Span::styled(format!(" {}", "─".repeat(width.saturating_sub(taken))), colors.faint()));
        if !right.is_empty() {
            spans.extend([Span::raw(format!(" {right} ")), Span::styled("─", colors.faint())]);
        }
        Panel { lines: std::iter::once(Line::from(spans)).chain(lines).collect(), seen: None }
    }

    /// Returns at most `rows` lines, none wider than `width`.
    pub fn rows(self, rows: u16, width: u16) -> Vec<Line<'static>> {
        let rows = usize::from(rows);
        let past = match self.seen {
            Some(seen) if rows > 1 && seen >= rows => seen + 1 - rows,
            _ => 0,
        };
        let is_shown = |(place, line)| (place == 0 || place > past).then_some(line);
        let shown = self.lines.into_iter().enumerate().filter_map(is_shown).take(rows);
        shown.map(|line| cut(line, width)).collect()
    }
}

/// Divides `rows` among panels. Each request is the index of a panel and the number of rows that
/// this panel should have before later requests get any. A panel that would get only its title gets
/// nothing.
pub fn share(panels: &[Panel], requests: &[(usize, u16)], rows: u16) -> Vec<u16> {
    let mut given = vec![0; panels.len()];
    let mut left = rows;
    for &(place, request) in requests {
        let Some(panel) = panels.get(place) else { continue };
        let request = request.min(u16::try_from(panel.lines.len()).unwrap_or(u16::MAX));
        let more = request.saturating_sub(given[place]).min(left);
        if given[place] + more > 1 {
            given[place] += more;
            left -= more;
        }
    }
    given
}

/// Cuts a line to a width.
pub fn cut(line: Line<'static>, width: u16) -> Line<'static> {
    if line.width() <= usize::from(width) {
        return line;
    }
    let style = line.style;
    ends(line.spans, Span::raw(""), width).style(style)
}

/// Returns a line with text at both ends. If the two texts do not fit, the left text is cut.
pub fn ends(left: Vec<Span<'static>>, right: Span<'static>, width: u16) -> Line<'static> {
    let width = usize::from(width);
    let mut free_columns = width.saturating_sub(right.width());
    let mut spans = Vec::new();
    for span in left {
        let taken = span.width().min(free_columns);
        if taken > 0 {
            spans.push(Span::styled(words::cut(&span.content, free_columns), span.style));
        }
        free_columns -= taken;
    }
    spans.push(Span::raw(" ".repeat(free_columns)));
    spans.push(right);
    Line::from(spans)
}

/// Joins two columns of lines. The second column starts at `at`.
pub fn join_columns(left: Vec<Line<'static>>, right: Vec<Line<'static>>, at: u16) -> Vec<Line<'static>> {
    let rows = left.len().max(right.len());
    let (mut left, mut right) = (left.into_iter(), right.into_iter());
    let row = |_| {
        let left = left.next().unwrap_or_default();
        let mut line = ends(left.spans, Span::raw(""), at);
        line.spans.extend(right.next().unwrap_or_default().spans);
        line
    };
    (0..rows).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(lines: usize) -> Panel {
        Panel { lines: (0..lines).map(|line| Line::from(line.to_string())).collect(), seen: None }
    }

    #[test]
    fn panels_get_rows_in_order_and_never_only_titles() {
        let panels = [panel(5), panel(3), panel(0)];
        let requests = [(0, 2), (1, 2), (0, 9), (1, 9), (2, 9), (7, 1)];
        let shared = |rows| share(&panels, &requests, rows);
        assert_eq!(shared(0), [0, 0, 0]);
        assert_eq!(shared(1), [0, 0, 0]);
        assert_eq!(shared(3), [3, 0, 0], "one row is too few for the second panel");
        assert_eq!(shared(4), [2, 2, 0]);
        assert_eq!(shared(6), [4, 2, 0]);
        assert_eq!(shared(100), [5, 3, 0]);
    }

    #[test]
    fn a_panel_always_shows_the_line_that_must_be_seen() {
        let rows = |seen, rows| -> Vec<String> {
            let panel = Panel { seen, ..panel(6) };
            panel.rows(rows, 9).iter().map(Line::to_string).collect()
        };
        assert_eq!(rows(None, 3), ["0", "1", "2"]);
        assert_eq!(rows(Some(2), 3), ["0", "1", "2"]);
        assert_eq!(rows(Some(5), 3), ["0", "4", "5"]);
        assert_eq!(rows(Some(5), 2), ["0", "5"]);
        assert_eq!(rows(Some(5), 9).len(), 6);
        assert_eq!(rows(Some(5), 0).len(), 0);
    }

    #[test]
    fn the_left_part_of_a_line_is_cut_first() {
        let line = |width| ends(vec![Span::raw("left side")], Span::raw("right"), width).to_string();
        assert_eq!(line(16), "left side  right");
        assert_eq!(line(10), "left…right");
        assert_eq!(line(3), "right");
    }
}
