//! Columns that line up, and bars: how ledgers and plans print.

use crate::Bytes;

/// Cells of a bar: enough to tell twentieths apart, short enough for a line of 100.
const BAR: u64 = 24;

/// Pads every cell of a column to the widest; a column marked `true` is right-aligned.
pub(crate) fn align<const N: usize>(rows: &[[String; N]], right: [bool; N]) -> Vec<String> {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).zip(right).map(|((cell, width), right)| match right {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

/// `part` of `whole` as a bar. What is there at all is seen: at least one cell.
pub(crate) fn bar(part: Bytes, whole: Bytes) -> String {
    let cells = match (part.0, whole.0) {
        (0, _) | (_, 0) => 0,
        (part, whole) => {
            let twice = 2 * u128::from(part) * u128::from(BAR) / u128::from(whole);
            (twice.div_ceil(2) as u64).clamp(1, BAR) as usize
        }
    };
    "█".repeat(cells) + &"░".repeat(BAR as usize - cells)
}
