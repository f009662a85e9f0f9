//! Aligned columns and bars, for printing ledgers and plans.

use crate::Bytes;

/// Width of a bar in characters: fine enough to show a twentieth, and short enough for
/// lines of 100 characters.
const BAR: u64 = 24;

/// Pads each column to its widest cell. Columns marked `true` are right-aligned.
pub(crate) fn align<const N: usize>(rows: &[[String; N]], right: [bool; N]) -> Vec<String> {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |row: &[String; N]| {
        let cells =
            row.iter().zip(widths).zip(right).map(|((cell, width), right)| {
                if right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

/// A bar that shows `part` of `whole`. Any `part` above 0 fills at least one cell.
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
