//! The stacked bar: every byte of a device in one line.

use ratatui::{
    style::Style,
    text::{Line, Span},
};

use super::words;
use crate::top::{
    palette::{Colors, letter},
    view::{MemoryPart, Piece},
};

/// Steps in a column of a colored bar, because block characters have eight widths.
const EIGHTHS: u64 = 8;

/// Draws the bar, `columns` wide. Each piece that is not empty gets at least one column. If there
/// are fewer columns than pieces, the smallest pieces are omitted. A colored bar is drawn in
/// eighths of a column.
pub fn bar(pieces: &[Piece], columns: u16, colors: Colors) -> Line<'static> {
    let bytes: Vec<_> = pieces.iter().map(|piece| piece.bytes.0).collect();
    let fine = if colors == Colors::None { 1 } else { EIGHTHS };
    let widths = shares(&bytes, u64::from(columns) * fine, fine);
    let mut ends = Vec::new();
    let mut end = 0;
    for (piece, width) in pieces.iter().zip(widths) {
        end += width;
        if width > 0 {
            ends.push((piece.part, end));
        }
    }
    let mut line = Line::default();
    for column in 0..u64::from(columns) {
        let (from, to) = (column * fine, (column + 1) * fine);
        let Some(&(part, end)) = ends.iter().find(|(_, end)| *end > from) else { break };
        let next = ends.iter().find(|(_, next)| *next > end).map(|(part, _)| *part);
        let cell = match next {
            // A piece is at least one column wide, so a column shows at most two pieces.
            Some(next) if end < to => meeting(part, next, end - from, colors),
            _ => full(part, colors),
        };
        match line.spans.last_mut() {
            Some(last) if last.style == cell.style => last.content.to_mut().push_str(&cell.content),
            _ => line.push_span(cell),
        }
    }
    line
}

/// Returns the legend of the parts, on as many lines as needed: in aligned columns, or without
/// alignment if that takes at least two fewer lines.
pub fn legend(pieces: &[Piece], columns: u16, colors: Colors) -> Vec<Line<'static>> {
    let columns = usize::from(columns);
    let entry = |piece: &Piece| (piece.part, format!(" {} {}", piece.part.name(), piece.bytes));
    let entries: Vec<_> = pieces.iter().map(entry).collect();
    let widest = entries.iter().map(|(_, text)| words::width(text)).max().unwrap_or(0);
    // Each entry has a letter before it and two blanks after it.
    let aligned = lines(&entries, columns, |_| widest + 3);
    let packed = lines(&entries, columns, |text| words::width(text) + 3);
    let (lines, width): (_, Option<usize>) =
        if packed.len() + 1 < aligned.len() { (packed, None) } else { (aligned, Some(widest)) };
    let blanks = |text: &str| " ".repeat(width.map_or(0, |width| width - words::width(text)) + 2);
    let line = |entries: &[(MemoryPart, String)]| {
        let mut line = Line::default();
        for (place, (part, text)) in entries.iter().enumerate() {
            let blanks = if place + 1 < entries.len() { blanks(text) } else { String::new() };
            line.extend([key(*part, colors), Span::raw(format!("{text}{blanks}"))]);
        }
        line
    };
    lines.into_iter().map(line).collect()
}

/// Breaks entries into lines by width. The blanks at the end of a line may exceed the width.
fn lines(
    entries: &[(MemoryPart, String)],
    columns: usize,
    width: impl Fn(&str) -> usize,
) -> Vec<&[(MemoryPart, String)]> {
    let (mut lines, mut first, mut taken) = (Vec::new(), 0, 0);
    for (place, (_, text)) in entries.iter().enumerate() {
        if place > first && taken + width(text) > columns + 2 {
            lines.push(&entries[first..place]);
            (first, taken) = (place, 0);
        }
        taken += width(text);
    }
    lines.extend((first < entries.len()).then(|| &entries[first..]));
    lines
}

fn key(part: MemoryPart, colors: Colors) -> Span<'static> {
    match colors.part(part) {
        Some(color) if part == MemoryPart::Free => Span::styled("░", Style::new().fg(color)),
        Some(color) => Span::styled("█", Style::new().fg(color)),
        None => Span::raw(letter(part).to_string()),
    }
}

fn full(part: MemoryPart, colors: Colors) -> Span<'static> {
    key(part, colors)
}

/// Draws a column whose first `eighths` eighths show `part` and whose remaining eighths show
/// `next`.
fn meeting(part: MemoryPart, next: MemoryPart, eighths: u64, colors: Colors) -> Span<'static> {
    const LEFT: [&str; 9] = [" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█"];
    let style = colors.part(part).map_or(Style::new(), |color| Style::new().fg(color));
    let style = match colors.part(next) {
        Some(color) if next != MemoryPart::Free => style.bg(color),
        _ => style,
    };
    Span::styled(LEFT[eighths.min(EIGHTHS) as usize], style)
}

/// Divides `units` in proportion to sizes, with at least `least` units for each size above zero. If
/// there are too few units for that, only the largest sizes get units. The sum of the result is
/// `units`, unless all sizes are zero.
fn shares(sizes: &[u64], units: u64, least: u64) -> Vec<u64> {
    let mut order: Vec<_> = (0..sizes.len()).filter(|place| sizes[*place] > 0).collect();
    order.sort_by_key(|place| (sizes[*place], *place));
    let shown_max = usize::try_from(units / least.max(1)).unwrap_or(usize::MAX);
    let mut shares = vec![0; sizes.len()];
    let mut left = units;
    let mut sum: u128 = 0;
    let shown = &order[order.len().saturating_sub(shown_max)..];
    for place in shown {
        sum += u128::from(sizes[*place]);
    }
    // Start with the smallest size, so that the largest absorbs rounding. A size that would get
    // less than `least` gets `least`, and the other sizes share the rest.
    for place in shown {
        let size = u128::from(sizes[*place]);
        let by_size = (u128::from(left) * size + sum / 2) / sum;
        shares[*place] = (by_size as u64).clamp(least.min(left), left);
        left -= shares[*place];
        sum -= size;
    }
    shares
}

#[cfg(test)]
mod tests {
    use bursar::Bytes;
    use proptest::prelude::*;

    use super::*;

    fn pieces(sizes: &[(MemoryPart, u64)]) -> Vec<Piece> {
        sizes.iter().map(|(part, bytes)| Piece { part: *part, bytes: Bytes(*bytes) }).collect()
    }

    #[test]
    fn parts_are_distinguished_by_letters_without_colors() {
        let all = pieces(&[
            (MemoryPart::Weights, 20),
            (MemoryPart::KvUsed, 50),
            (MemoryPart::Canary, 1),
            (MemoryPart::Free, 29),
        ]);
        assert_eq!(bar(&all, 20, Colors::None).to_string(), "WWWWKKKKKKKKKC......");
        let legend: Vec<_> = legend(&all, 40, Colors::None).iter().map(Line::to_string).collect();
        assert_eq!(legend, ["W weights 20 B  K kv used 50 B", "C canary 1 B    . free 29 B"]);
        let narrow: Vec<_> = super::legend(&all, 14, Colors::None).iter().map(Line::to_string).collect();
        assert_eq!(narrow, ["W weights 20 B", "K kv used 50 B", "C canary 1 B", ". free 29 B"]);
        let many = pieces(&[
            (MemoryPart::VisionWorkspace, 1),
            (MemoryPart::KvUsed, 5),
            (MemoryPart::KvFree, 1),
            (MemoryPart::Canary, 1),
            (MemoryPart::Free, 2),
        ]);
        let packed: Vec<_> = super::legend(&many, 28, Colors::None).iter().map(Line::to_string).collect();
        assert_eq!(packed, ["V vision workspace 1 B", "K kv used 5 B  - kv free 1 B", "C canary 1 B  . free 2 B"]);
    }

    #[test]
    fn a_colored_part_may_end_within_a_column() {
        let all = pieces(&[(MemoryPart::Weights, 25), (MemoryPart::KvUsed, 25), (MemoryPart::Free, 50)]);
        assert_eq!(bar(&all, 10, Colors::True).to_string(), "██▌██░░░░░");
        let part = |part| Colors::True.part(part).expect("a color");
        let meeting = &bar(&all, 10, Colors::True).spans[1];
        assert_eq!(
            (meeting.style.fg, meeting.style.bg),
            (Some(part(MemoryPart::Weights)), Some(part(MemoryPart::KvUsed)))
        );
        let into_free = bar(&pieces(&[(MemoryPart::Weights, 25), (MemoryPart::Free, 75)]), 10, Colors::Sixteen);
        assert_eq!(into_free.to_string(), "██▌░░░░░░░");
        assert_eq!(into_free.spans[1].style.bg, None, "the gap before free memory has no background");
    }

    #[test]
    fn the_smallest_parts_vanish_when_columns_are_too_few() {
        let all = pieces(&[
            (MemoryPart::Overhead, 1),
            (MemoryPart::Weights, 20),
            (MemoryPart::KvUsed, 50),
            (MemoryPart::Free, 29),
        ]);
        assert_eq!(bar(&all, 3, Colors::None).to_string(), "WK.");
        assert_eq!(bar(&all, 0, Colors::None).to_string(), "");
        assert_eq!(bar(&[], 3, Colors::None).to_string(), "");
    }

    proptest! {
        #[test]
        fn a_bar_has_the_requested_width_for_any_parts(
            sizes in prop::collection::vec(prop_oneof![0_u64..9, any::<u64>()], 1..15),
            columns in 0_u16..300,
        ) {
            let all: Vec<_> = sizes.iter().zip(MemoryPart::ALL).map(|(size, part)| (part, *size)).collect();
            let is_empty = sizes.iter().all(|size| *size == 0);
            for colors in [Colors::None, Colors::Sixteen, Colors::True] {
                let line = bar(&pieces(&all), columns, colors);
                prop_assert_eq!(line.width(), if is_empty { 0 } else { usize::from(columns) });
            }
            let shown = shares(&sizes, u64::from(columns), 1);
            prop_assert!(columns < 15 || sizes.iter().zip(&shown).all(|(size, shown)| (*size > 0) == (*shown > 0)));
        }
    }
}
