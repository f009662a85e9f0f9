//! Recent events, the newest first.

use ratatui::{
    style::Style,
    text::{Line, Span},
};

use super::{
    panel::{Fit, Panel},
    words,
};
use crate::top::{event::Weight, palette::Colors, view::View};

/// Returns the panel of all events. `now` is in seconds since 1970.
pub fn panel(view: &View, now: f64, width: u16, fit: Fit, colors: Colors) -> Panel {
    let mut lines: Vec<_> = view
        .events
        .iter()
        .rev()
        .flat_map(|event| {
            let style = match event.weight {
                Weight::Usual => Style::new(),
                Weight::Notable => colors.notable(),
                Weight::Bad => colors.bad(),
            };
            let age = if event.at.is_nan() { String::new() } else { words::age(now - event.at) };
            let (title, columns) = (words::cut(&event.title(), 15), usize::from(width).saturating_sub(25));
            let rows = fit.lines(&event.text, columns).into_iter().enumerate();
            let line = move |(place, rows): (usize, String)| {
                let (age, title) = if place == 0 { (&*age, &*title) } else { ("", "") };
                Line::from(vec![
                    Span::styled(format!(" {age:>6} "), colors.faint()),
                    Span::styled(format!("{title:<15}"), style),
                    Span::raw(format!("  {rows}")),
                ])
            };
            rows.map(line).collect::<Vec<_>>()
        })
        .collect();
    lines.extend(
        view.no_events.as_ref().map(|why| Line::styled(words::cut(&format!(" {why}"), width.into()), colors.faint())),
    );
    Panel::titled("events", "newest first", width, colors, lines)
}
