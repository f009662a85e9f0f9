//! The view on a terminal: panels from top to bottom, each with as many lines as fit.

mod bar;
mod device;
mod events;
mod model;
mod panel;
mod table;
pub mod words;

use std::time::Duration;

use bursar::Hint;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Wrap},
};

use self::panel::{Fit, Panel};
use super::{
    keys::EXPLAINED,
    palette::Colors,
    session::{Session, Viewport},
    view::{ModelView, View},
};

#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Time since the session began.
    pub elapsed: Duration,
    /// Unix time in seconds.
    pub unix: f64,
}

/// Minimum number of terminal rows at which the line of keys is shown.
const ROWS_WITH_KEYS: u16 = 12;
/// Minimum number of columns at which the first line shows all actors. A narrower first line omits
/// actors that run.
const ALL_ACTORS: u16 = 70;
/// Minimum number of rows at which the bar is two rows high.
const ROWS_WITH_HIGH_BAR: u16 = 30;

/// Draws the screen. Returns how much of the full view fits.
pub fn draw(frame: &mut Frame<'_>, session: &Session, now: Now, colors: Colors) -> Viewport {
    let area = frame.area();
    let keys = u16::from(area.height >= ROWS_WITH_KEYS);
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(keys)]).areas(area);
    frame.render_widget(header(session, now, head.width, colors), head);
    let body = complaint(frame, session, body, colors);
    let whole = whole(session, now, body.width, colors);
    let viewport = Viewport { rows: body.height.into(), lines: whole.len() };
    let explained = match (session.view(), session.top) {
        (None, _) => {
            frame.render_widget(Line::styled("waiting for the first answer", colors.faint()), body);
            OVERVIEW.to_owned()
        }
        (Some(view), None) => {
            draw_view(frame, session, view, body, now, colors);
            OVERVIEW.to_owned()
        }
        (Some(_), Some(top)) => {
            let top = top.min(viewport.last_top());
            let shown: Vec<_> = whole.into_iter().skip(top).take(viewport.rows).collect();
            let (first, last, all) = (top + 1, top + shown.len(), viewport.lines);
            frame.render_widget(Paragraph::new(shown), body);
            format!(" lines {first} to {last} of {all}  PgDn PgUp j k g G scroll  Esc back  ? help")
        }
    };
    frame.render_widget(Line::styled(explained, colors.faint()), foot);
    if session.shows_help {
        draw_help(frame, area, colors);
    }
    viewport
}

/// The last line of the fitted view.
const OVERVIEW: &str = " q quit  j k model  PgDn full view  p pause  + - interval  ? help";

/// Returns the lines of all panels at full length.
pub fn whole(session: &Session, now: Now, width: u16, colors: Colors) -> Vec<Line<'static>> {
    let (Some(view), fit) = (session.view(), Fit::Fold) else { return Vec::new() };
    let mut panels: Vec<_> = view.devices.iter().map(|device| device::panel(device, width, 1, fit, colors)).collect();
    panels.push(table::panel(view, None, width, colors));
    let in_full = |model: &ModelView| model::panel(model, session.trail(&model.name), width, fit, colors);
    panels.extend(view.models.iter().map(in_full));
    panels.push(device::leases(view, width, colors));
    panels.push(events::panel(view, now.unix, width, fit, colors));
    // Skip panels that have only a title.
    let shown = panels.into_iter().filter(|panel| panel.lines.len() > 1);
    shown.flat_map(|panel| panel.rows(u16::MAX, width)).collect()
}

/// Returns the first line: the address, the actors, and the age of the figures.
pub fn header(session: &Session, now: Now, width: u16, colors: Colors) -> Line<'static> {
    let age = |age: Duration| words::age(age.as_secs_f64());
    let right = match (session.lost(), session.age(now.elapsed), session.began_anew(now.elapsed)) {
        (Some(_), None, _) => Span::styled("no answer yet ", colors.bad()),
        (Some(lost), Some(old), _) => {
            let since = age(now.elapsed.saturating_sub(lost.since));
            Span::styled(format!("LOST for {since}, figures {} old ", age(old)), colors.bad())
        }
        (None, Some(old), _) if session.is_paused => {
            Span::styled(format!("paused, figures {} old ", age(old)), colors.notable())
        }
        (_, _, Some(ago)) => Span::styled(format!("restarted {} ago ", age(ago)), colors.notable()),
        _ => Span::styled(format!("every {} ", words::seconds(session.every.as_secs_f64())), colors.faint()),
    };
    let mut left = vec![Span::styled(format!(" bursar top {} ", session.address), colors.strong())];
    // If the line is short, show only actors that do not run.
    for actor in session.view().map_or(&[][..], |view| &view.actors) {
        if width >= ALL_ACTORS || !actor.is_up {
            left.extend(words::actor_words(actor, true, colors));
        }
    }
    left.push(Span::raw(" "));
    panel::ends(left, right, width)
}

/// Draws the reason why there are no newer figures, if it fits. Returns the remaining area.
fn complaint(frame: &mut Frame<'_>, session: &Session, area: Rect, colors: Colors) -> Rect {
    let Some(lost) = session.lost() else { return area };
    let mut lines = vec![Line::styled(lost.error.to_string(), colors.bad())];
    if session.view().is_none() || area.height >= ROWS_WITH_KEYS {
        lines.push(Line::styled(lost.error.hint(), colors.faint()));
    }
    // Assume 12 fewer columns, because a word that wraps to the next row leaves the end of the
    // previous row empty.
    let rows: usize =
        lines.iter().map(|line| line.width().div_ceil(usize::from(area.width.saturating_sub(12).max(1)))).sum();
    let rows = u16::try_from(rows).unwrap_or(u16::MAX).min(area.height.div_ceil(2));
    let [upper, rest] = Layout::vertical([Constraint::Length(rows), Constraint::Fill(1)]).areas(area);
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }), upper);
    rest
}

fn draw_view(frame: &mut Frame<'_>, session: &Session, view: &View, area: Rect, now: Now, colors: Colors) {
    let width = area.width;
    let bar_rows = if area.height >= ROWS_WITH_HIGH_BAR { 2 } else { 1 };
    let mut panels: Vec<Panel> =
        view.devices.iter().map(|device| device::panel(device, width, bar_rows, Fit::Cut, colors)).collect();
    let devices = panels.len();
    panels.push(table::panel(view, session.chosen(), width, colors));
    let chosen = session.chosen().map(|place| &view.models[place]);
    panels.push(match chosen {
        Some(chosen) => model::panel(chosen, session.trail(&chosen.name), width, Fit::Cut, colors),
        None => Panel::default(),
    });
    panels.push(events::panel(view, now.unix, width, Fit::Cut, colors));
    let rows = panel::share(&panels, &row_priorities(devices), area.height);
    let areas = Layout::vertical(rows.iter().map(|rows| Constraint::Length(*rows))).split(area);
    for ((panel, rows), area) in panels.into_iter().zip(rows).zip(areas.iter()) {
        frame.render_widget(Paragraph::new(panel.rows(rows, width)), *area);
    }
}

/// Returns the order in which panels get rows. Each entry is the index of a panel and the number of
/// rows that this panel should have before later entries get any.
fn row_priorities(devices: usize) -> Vec<(usize, u16)> {
    const ALL: u16 = u16::MAX;
    let (models, chosen, events) = (devices, devices + 1, devices + 2);
    let others = 1..devices.max(1);
    let mut priorities = vec![(0, 2), (models, 2)];
    priorities.extend([(0, 6), (chosen, 3)]);
    priorities.extend(others.clone().map(|device| (device, 2)));
    priorities.extend([(models, 4), (events, 2), (0, ALL), (chosen, 6), (events, 4), (models, 8), (chosen, ALL)]);
    priorities.extend(others.map(|device| (device, ALL)));
    priorities.extend([(models, ALL), (events, ALL)]);
    priorities
}

fn draw_help(frame: &mut Frame<'_>, area: Rect, colors: Colors) {
    let line = |(keys, does): &(&str, &str)| {
        Line::from(vec![Span::styled(format!(" {keys:<15} "), colors.strong()), Span::raw(format!("{does} "))])
    };
    let lines: Vec<_> = EXPLAINED.iter().map(line).collect();
    let width = lines.iter().map(Line::width).max().unwrap_or(0) as u16 + 2;
    let place = area.centered(Constraint::Length(width), Constraint::Length(lines.len() as u16 + 2));
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" keys ")), place);
}

#[cfg(test)]
mod tests;
