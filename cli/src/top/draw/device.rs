//! The panel of a device: its bar, its problems, the bar's legend and the leases.

use bursar::Bytes;
use bursar_budgets::grouped;
use ratatui::text::Line;

use super::{
    bar,
    panel::{Fit, Panel},
    words,
};
use crate::top::{
    palette::Colors,
    view::{Count, DeviceView, GpuView, LeaseView, View},
};

/// Below this number of columns, derived figures are omitted.
const NARROW: u16 = 60;

/// Returns the panel of one device. Problems are shown directly below the bar.
pub fn panel(device: &DeviceView, width: u16, bar_rows: usize, fit: Fit, colors: Colors) -> Panel {
    let mut lines = match &device.cards[..] {
        [] => vec![bar::bar(&device.pieces, width, colors); bar_rows],
        cards => cards.iter().map(|card| card_line(card, cards, width, colors)).collect(),
    };
    let wrong = wrong(device);
    if !wrong.is_empty() {
        let wrong = fit.lines(&wrong.join(", "), width.into());
        lines.extend(wrong.into_iter().map(|text| Line::styled(text, colors.bad())));
    }
    lines.extend(bar::legend(&device.pieces, width, colors));
    let usual = fit.lines(&usual(device).join("   "), width.into());
    lines.extend(usual.into_iter().map(|text| Line::styled(text, colors.faint())));
    let (free, total) = (device.free(), device.total);
    let share = words::percent(free.0 as f64 / total.0.max(1) as f64);
    // Omit the share if the bar is narrow: the reader can derive it.
    let right =
        if width < NARROW { format!("{free} of {total} free") } else { format!("{free} of {total} free, {share}") };
    Panel::titled(&device.name, &right, width, colors, lines)
}

/// Draws the bar of one of `cards`, between the GPU's name and its free bytes.
fn card_line(card: &GpuView, cards: &[GpuView], width: u16, colors: Colors) -> Line<'static> {
    let widest = cards.iter().map(|card| words::width(&card.name)).max().unwrap_or(0).min(usize::from(width) / 4);
    let name = words::cut(&card.name, widest);
    let free = if width < NARROW { String::new() } else { format!(" {:>10} free", card.free().to_string()) };
    let left = usize::from(width).saturating_sub(widest + 1 + free.len());
    let bar = bar::bar(&card.pieces, u16::try_from(left).unwrap_or(u16::MAX), colors);
    let mut line = Line::from(format!("{name:<widest$} "));
    line.extend(bar.spans);
    line.push_span(free);
    line
}

/// Returns a panel of all leases, device by device, the largest first.
pub fn leases(view: &View, width: u16, colors: Colors) -> Panel {
    let row = |device: &str, cells: [&str; 5]| {
        let [class, model, granted, backed, peak] = cells;
        let (device, model) = (words::cut(device, 8), words::cut(model, 20));
        Line::from(format!("{device:<8} {class:<16} {model:<20} {granted:>10} {backed:>10} {peak:>10}"))
    };
    let bytes = |bytes: Option<Bytes>| bytes.map_or("-".to_owned(), |bytes| bytes.to_string());
    let mut lines = vec![row("device", ["class", "model", "granted", "backed", "peak"]).style(colors.faint())];
    for device in &view.devices {
        for LeaseView { model, class, bytes: granted, used, peak } in &device.leases {
            let class = class.replace('_', " ");
            lines.push(row(&device.name, [&class, model, &granted.to_string(), &bytes(*used), &bytes(*peak)]));
        }
    }
    Panel::titled("leases", "", width, colors, lines)
}

/// Returns the problems that the user should look at.
fn wrong(device: &DeviceView) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut add = |bytes: Bytes, text: String| {
        if !bytes.is_zero() {
            wrong.push(text);
        }
    };
    add(device.drift, format!("drift {}", device.drift));
    for card in &device.cards {
        add(card.drift, format!("{} of it on {}", card.drift, card.name));
    }
    add(device.deficit, format!("short by {}", device.deficit));
    add(device.owed, format!("models owe {}", device.owed));
    let missing = device.canary_wanted.saturating_sub(device.canary);
    add(missing, format!("canary {} of {}", device.canary, device.canary_wanted));
    if device.losses > 0 {
        wrong.push(format!("lost {}", times(device.losses)));
    }
    if device.waiting > 0 {
        wrong.push(format!(
            "{} {}",
            grouped(device.waiting),
            if device.waiting == 1 { "lease waits" } else { "leases wait" }
        ));
    }
    wrong
}

/// Returns the figures that do not indicate a problem.
fn usual(device: &DeviceView) -> Vec<String> {
    let mut usual = vec![format!("drift {}", device.drift)];
    if let Some(free) = device.driver_free {
        usual.push(format!("driver says {free} free"));
    }
    if let Some((leased, total)) = device.host {
        usual.push(format!("host memory {leased} of {total}"));
    }
    if device.canary_given > 0 {
        usual.push(format!("canary given {}", times(device.canary_given)));
    }
    if !device.refused.is_empty() {
        usual.push(format!("leases refused: {}", counted(&device.refused)));
    }
    usual
}

/// Formats counts like `3 stop, 1 length`.
pub fn counted(counts: &[Count]) -> String {
    let each = counts.iter().map(|Count { of, count }| format!("{} {of}", grouped(*count)));
    each.collect::<Vec<_>>().join(", ")
}

fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        count => format!("{} times", grouped(count)),
    }
}
