//! The table of all models, with one row each.

use bursar_budgets::grouped;
use ratatui::{
    style::Style,
    text::{Line, Span},
};

use super::{panel::Panel, words};
use crate::top::{
    palette::Colors,
    view::{ModelState, ModelView, View},
};

/// A column. Its width includes a leading blank.
struct Column {
    title: &'static str,
    width: usize,
    cell: fn(&ModelView) -> String,
}

/// The columns, from left to right.
const COLUMNS: [Column; 9] = [
    Column { title: "state", width: 9, cell: |model| model.state.word().to_owned() },
    Column { title: "run", width: 6, cell: |model| count(model.running) },
    Column { title: "wait", width: 6, cell: |model| count(model.waiting) },
    Column { title: "kv", width: 6, cell: kv },
    Column { title: "in/s", width: 8, cell: |model| words::rate(model.speed.prompt_tokens) },
    Column { title: "out/s", width: 8, cell: |model| words::rate(model.speed.generated_tokens) },
    Column { title: "first token", width: 13, cell: |model| half(model, "first token") },
    Column { title: "next token", width: 12, cell: |model| half(model, "next token") },
    Column { title: "restarts", width: 10, cell: |model| grouped(model.restarts()) },
];

/// Indexes of the columns, the most important first. If the table is too narrow, columns at the end
/// of this list are omitted.
const KEPT: [usize; 9] = [0, 5, 1, 2, 3, 4, 6, 8, 7];

/// Minimum and maximum width of a name, in columns.
const NAME: (usize, usize) = (8, 40);

/// Returns the table. The chosen model is marked.
pub fn panel(view: &View, chosen: Option<usize>, width: u16, colors: Colors) -> Panel {
    let mut free_columns = usize::from(width).saturating_sub(NAME.0 + 1);
    let mut is_kept = [false; COLUMNS.len()];
    for place in KEPT {
        is_kept[place] = COLUMNS[place].width <= free_columns;
        if !is_kept[place] {
            break;
        }
        free_columns -= COLUMNS[place].width;
    }
    let columns: Vec<_> =
        COLUMNS.iter().zip(is_kept).filter_map(|(column, is_kept)| is_kept.then_some(column)).collect();
    let name = (NAME.0 + free_columns).min(NAME.1);
    let mut titles = format!("{:─<1$}", "─ model ", name + 1);
    for column in &columns {
        let fill = column.width - column.title.len() - 1;
        let blank = if titles.ends_with('─') { "" } else { " " };
        titles += &format!("{blank}{} {}", "─".repeat(fill - blank.len().min(fill)), column.title);
    }
    let rest = usize::from(width).saturating_sub(words::width(&titles) + 1);
    let titles = if rest > 0 { format!("{titles} {}", "─".repeat(rest)) } else { titles };
    let mut lines = vec![Line::styled(words::cut(&titles, width.into()), colors.faint())];
    for (place, model) in view.models.iter().enumerate() {
        let is_chosen = chosen == Some(place);
        let shown = words::cut(&model.name, name);
        let padding = " ".repeat(name.saturating_sub(words::width(&shown)));
        let mark = if is_chosen { "›" } else { " " };
        let mut line = Line::from(vec![Span::raw(mark), Span::styled(shown, colors.strong()), Span::raw(padding)]);
        for (at, column) in columns.iter().enumerate() {
            let cell = words::cut(&(column.cell)(model), column.width - 1);
            let padding = " ".repeat(column.width.saturating_sub(words::width(&cell)));
            let style = if at == 0 { state(model.state, colors) } else { Style::new() };
            line.extend([Span::raw(padding), Span::styled(cell, style)]);
        }
        lines.push(if is_chosen && view.models.len() > 1 { line.style(colors.chosen()) } else { line });
    }
    if view.models.is_empty() {
        lines.push(Line::styled(" no model is loaded", colors.faint()));
    }
    Panel { lines, seen: chosen.map(|place| place + 1) }
}

/// Returns the style of a state.
pub fn state(state: ModelState, colors: Colors) -> Style {
    match state {
        ModelState::Up => colors.good(),
        ModelState::Sizing | ModelState::Starting | ModelState::Recovering => colors.notable(),
        ModelState::Down => colors.bad(),
        ModelState::Asleep | ModelState::Unknown => colors.faint(),
    }
}

fn count(count: Option<u64>) -> String {
    count.map_or("-".to_owned(), |count| count.to_string())
}

fn kv(model: &ModelView) -> String {
    match model.kv {
        Some(kv) if kv.blocks > 0 => words::percent(kv.used as f64 / kv.blocks as f64),
        _ => "-".to_owned(),
    }
}

fn half(model: &ModelView, of: &str) -> String {
    model
        .latencies
        .iter()
        .find(|latency| latency.of == of)
        .map_or("-".to_owned(), |latency| words::seconds(latency.p50))
}
