//! The panel of one model, with all its figures.

use bursar_budgets::grouped;
use ratatui::{
    style::Style,
    text::{Line, Span},
};

use super::{
    device::counted,
    panel::{Fit, Panel, join_columns},
    words,
};
use crate::top::{
    palette::Colors,
    session::Trail,
    view::{Cache, Kv, Latency, ModelState, ModelView, Speed},
};

/// Columns of a line's label.
const ABOUT: usize = 10;
/// Columns of the table of quantiles.
const QUANTILES: u16 = 50;
/// With at least this many columns, the quantiles are next to the other lines.
const WIDE: u16 = QUANTILES + 58;
/// Maximum values in a sparkline.
const SPARKS: usize = 60;

/// Returns the panel, with the most important lines first.
pub fn panel(model: &ModelView, trail: Option<&Trail>, width: u16, fit: Fit, colors: Colors) -> Panel {
    // In two columns, lines are cut. In the full view, where no line is cut,
    // the columns are stacked.
    let is_wide = fit == Fit::Cut && width >= WIDE;
    let left_width = if is_wide { width.saturating_sub(QUANTILES) } else { width };
    let styled = |about: &str, text: &str, style: Style| {
        let lines = fit.lines(text, usize::from(left_width).saturating_sub(ABOUT + 2)).into_iter().enumerate();
        let about = about.to_owned();
        let line = move |(place, text)| {
            let about = if place == 0 { &*about } else { "" };
            Line::from(vec![Span::styled(format!(" {about:<ABOUT$}"), colors.faint()), Span::styled(text, style)])
        };
        lines.map(line).collect::<Vec<_>>()
    };
    let about = |about: &str, text: String| styled(about, &text, Style::new());
    let mut lines = actors(model, left_width, fit, colors);
    let trouble = trouble(model);
    if !trouble.is_empty() {
        lines.extend(styled("trouble", &trouble.join(", "), colors.notable()));
    }
    lines.extend(about("tokens/s", speed(&model.speed)));
    if let Some(trail) = trail {
        let columns = usize::from(left_width).saturating_sub(ABOUT + 3).min(SPARKS);
        for (name, rates) in [("out", &trail.generated), ("in", &trail.prompt)] {
            // A single value does not show a trend.
            if rates.len() > 1 {
                lines.extend(about(name, words::sparkline(rates.iter().copied(), columns)));
            }
        }
    }
    let first = lines.len();
    let permits = model
        .permits
        .iter()
        .map(|permit| format!("{} of {} {}", grouped(permit.used), grouped(permit.all), permit.permit));
    let permits: Vec<_> = permits.collect();
    lines.extend(about("permits", if permits.is_empty() { "-".to_owned() } else { permits.join(", ") }));
    lines.extend(model.kv.iter().flat_map(|kv| about("kv", blocks(kv))));
    lines.extend(about("requests", requests(model)));
    lines.extend(about("caches", format!("prompts {}, pictures {}", found(&model.prefix), found(&model.pictures))));
    lines.extend(about("steps", steps(model)));
    lines.extend(about("sizing", sizing(model)));
    let quantiles = quantiles(&model.latencies, colors);
    let lines = if is_wide {
        join_columns(lines, quantiles, left_width)
    } else {
        // Place the quantiles after the lines that users read first, and before the rest.
        let rest = lines.split_off(first);
        lines.into_iter().chain(quantiles).chain(rest).collect()
    };
    Panel::titled(&model.name, model.state.word(), width, colors, lines)
}

fn actors(model: &ModelView, width: u16, fit: Fit, colors: Colors) -> Vec<Line<'static>> {
    let begin = |about: &str| Line::from(Span::styled(format!(" {about:<0$}", ABOUT - 1), colors.faint()));
    // Before the model serves, a stopped actor is not a problem.
    let is_serving = !matches!(model.state, ModelState::Sizing | ModelState::Starting);
    let mut lines = vec![begin("actors")];
    for actor in &model.actors {
        let words = words::actor_words(actor, is_serving, colors);
        let last = lines.last().map_or(0, Line::width);
        if fit == Fit::Fold && last + words.iter().map(Span::width).sum::<usize>() > width.into() {
            lines.push(begin(""));
        }
        lines.last_mut().expect("a panel has a line").extend(words);
    }
    lines
}

/// Returns the problems that the user should look at.
fn trouble(model: &ModelView) -> Vec<String> {
    let mut trouble = Vec::new();
    if !model.oom.is_empty() {
        trouble.push(format!("memory refused: {}", counted(&model.oom)));
    }
    if !model.preempted.is_empty() {
        trouble.push(format!("preempted: {}", counted(&model.preempted)));
    }
    if model.redone > 0 {
        trouble.push(format!("{} redone", grouped(model.redone)));
    }
    for (class, error) in &model.plan_errors {
        trouble.push(format!("{} is {error:+.0} B off its plan", class.replace('_', " ")));
    }
    trouble
}

fn speed(speed: &Speed) -> String {
    let Speed { prompt_tokens, cached_tokens, generated_tokens, .. } = *speed;
    format!(
        "{} out, {} in ({} cached)",
        words::rate(generated_tokens),
        words::rate(prompt_tokens),
        words::rate(cached_tokens)
    )
}

fn blocks(kv: &Kv) -> String {
    let Kv { blocks, used, cached, swapped, block_tokens, shrinks, growths } = *kv;
    let mut text = format!("{} of {} blocks used", grouped(used), grouped(blocks));
    text += &format!(", {} cached", grouped(cached));
    if swapped > 0 {
        text += &format!(", {} swapped", grouped(swapped));
    }
    if let Some(tokens) = block_tokens {
        text += &format!(", {tokens} tokens each");
    }
    if shrinks > 0 || growths > 0 {
        text += &format!("; shrunk {}, grown {}", grouped(shrinks), grouped(growths));
    }
    text
}

fn requests(model: &ModelView) -> String {
    let active = model.active.map_or("-".to_owned(), grouped);
    let mut text = format!("{active} active");
    if model.speed.requests.is_some() {
        text += &format!(", {} end a second", words::rate(model.speed.requests));
    }
    if !model.ended.is_empty() {
        text += &format!("; ended: {}", counted(&model.ended));
    }
    text
}

fn found(cache: &Cache) -> String {
    let bytes = cache.bytes.map_or(String::new(), |bytes| format!(" ({bytes})"));
    match cache.share() {
        Some(share) => format!("{} found{bytes}", words::percent(share)),
        None => format!("-{bytes}"),
    }
}

fn steps(model: &ModelView) -> String {
    let mut text = words::rate(model.speed.steps) + " a second";
    if let Some(under_way) = model.under_way {
        text += &format!(", {under_way} under way");
    }
    let all = model.replays.saturating_add(model.eager_steps);
    if all > 0 {
        text += &format!(", {} by graph", words::percent(model.replays as f64 / all as f64));
    }
    if let Some(graphs) = model.graphs.filter(|graphs| *graphs > 0) {
        text += &format!(" ({graphs} captured)");
    }
    text
}

fn sizing(model: &ModelView) -> String {
    let attempts =
        if model.attempts.is_empty() { "-".to_owned() } else { format!("attempts: {}", counted(&model.attempts)) };
    let target = model.target_tokens.map_or(String::new(), |tokens| format!(", {} tokens", grouped(tokens)));
    let took = model.profile_seconds.map_or(String::new(), |took| format!(" in {}", words::seconds(took)));
    format!("{attempts}{target}{took}")
}

/// Returns a table of quantiles over the last minute. A row covers all time if the last minute has
/// no observations or the session has just begun.
fn quantiles(latencies: &[Latency], colors: Colors) -> Vec<Line<'static>> {
    if latencies.is_empty() {
        return Vec::new();
    }
    let row = |cells: [&str; 5]| {
        let [of, p50, p90, p99, count] = cells;
        format!(" {of:<12}{p50:>8}{p90:>8}{p99:>8}  {count}")
    };
    let title = Line::styled(row(["", "p50", "p90", "p99", "count"]), colors.faint());
    let rows = latencies.iter().map(|latency| {
        let [p50, p90, p99] = [latency.p50, latency.p90, latency.p99].map(words::seconds);
        let span = if latency.is_recent { "" } else { " in all" };
        Line::from(row([latency.of, &p50, &p90, &p99, &format!("{}{span}", grouped(latency.count))]))
    });
    std::iter::once(title).chain(rows).collect()
}
