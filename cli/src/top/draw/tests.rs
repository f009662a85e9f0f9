//! The rendered view, compared with the recordings in `src/top/recorded`.
//!
//! `BURSAR_RECORD=1 cargo test -p bursar-cli --bins top::draw` rewrites the recordings for review.

use std::{env, fs, path::PathBuf};

use ratatui::{Terminal, backend::TestBackend, buffer::Buffer};

use super::{super::*, *};
use crate::top::{event, exposition, keys::Key, scrape::Events};

/// Unix time, in seconds: one second after the last event of the `card` recording.
const NOW: f64 = 1_800_000_000.0;
/// Unix time, in seconds: half a minute after the last event of the `demo` recording.
const DEMO: f64 = 1795287436.9;

fn scrape(metrics: &str, events: &str) -> Scrape {
    let samples = exposition::read(metrics, "bursar_").expect("the recording is there");
    Scrape { samples, events: Events::Listed(event::read(events).expect("the recording is there")) }
}

/// A GPU with two models, a tenant, another process and some problems.
fn card() -> Session {
    let mut session = Session::new("10.0.0.7:9464".to_owned(), Duration::from_secs(1));
    let events = include_str!("../recorded/card_events.json");
    session.record(Ok(scrape(include_str!("../recorded/card_before.prom"), events)), Duration::from_secs(4));
    session.record(Ok(scrape(include_str!("../recorded/card.prom"), events)), Duration::from_secs(5));
    session
}

/// The demo model in a chat about pictures: `bursar chat --metrics`, with two scrapes 1.5 s apart.
fn demo() -> Session {
    let mut session = Session::new("127.0.0.1:9464".to_owned(), Duration::from_secs(1));
    let events = include_str!("../recorded/demo_events.json");
    session.record(Ok(scrape(include_str!("../recorded/demo_before.prom"), events)), Duration::from_millis(3500));
    session.record(Ok(scrape(include_str!("../recorded/demo.prom"), events)), Duration::from_secs(5));
    session
}

fn at(seconds: u64) -> Now {
    Now { elapsed: Duration::from_secs(seconds), unix: NOW }
}

fn drawn(session: &Session, (columns, rows): (u16, u16), now: Now, colors: Colors) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a terminal in memory");
    terminal.draw(|frame| _ = draw(frame, session, now, colors)).expect("it is drawn");
    terminal.backend().buffer().clone()
}

/// Returns the screen's content, with colors as terminal codes.
fn printed(buffer: &Buffer, colors: Colors) -> String {
    force_color_output(true);
    let width = usize::from(buffer.area.width).max(1);
    let line = |cells: &[ratatui::buffer::Cell]| {
        let cell = |cell: &ratatui::buffer::Cell| Span::styled(cell.symbol().to_owned(), cell.style());
        let mut line = Line::default();
        for next in cells.iter().map(cell) {
            match line.spans.last_mut() {
                Some(last) if last.style == next.style => last.content.to_mut().push_str(&next.content),
                _ => line.push_span(next),
            }
        }
        line
    };
    let lines: Vec<_> = buffer.content.chunks(width).map(line).collect();
    let mut out = Vec::new();
    once::print(&mut out, &lines, colors).expect("writing to memory succeeds");
    String::from_utf8(out).expect("UTF-8")
}

#[track_caller]
fn assert_recorded(name: &str, shown: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/top/recorded").join(name);
    if env::var_os("BURSAR_RECORD").is_some() {
        return fs::write(&path, shown).expect("the file is written");
    }
    let recorded = fs::read_to_string(&path).unwrap_or_default();
    assert!(recorded == shown, "{name} was recorded as\n{recorded}\nand is now\n{shown}");
}

#[test]
fn the_view_matches_its_snapshots_at_several_sizes_and_colors() {
    let session = card();
    for (name, size, colors) in [
        ("card_120x44.txt", (120, 44), Colors::None),
        ("card_120x44_true.ansi", (120, 44), Colors::True),
        ("card_80x24.txt", (80, 24), Colors::None),
        ("card_80x24_sixteen.ansi", (80, 24), Colors::Sixteen),
        ("card_40x10.txt", (40, 10), Colors::None),
    ] {
        assert_recorded(name, &printed(&drawn(&session, size, at(5), colors), colors));
    }
}

#[test]
fn a_recorded_run_shows_every_byte_and_no_problem() {
    let session = demo();
    let view = session.view().expect("the session has a view");
    let device = &view.devices[0];
    assert_eq!(device.pieces.iter().map(|piece| piece.bytes).sum::<bursar::Bytes>(), device.total);
    let text = printed(&drawn(&session, (100, 30), Now { unix: DEMO, ..at(5) }, Colors::None), Colors::None);
    assert!(!text.contains("trouble") && !text.contains("other leases"), "{text}");
    assert_recorded("demo_100x30.txt", &text);
}

#[test]
fn the_text_form_shows_the_whole_view() {
    for (name, session, now) in
        [("card_once.txt", card(), at(5)), ("demo_once.txt", demo(), Now { unix: DEMO, ..at(5) })]
    {
        let mut lines = vec![header(&session, now, 100, Colors::None)];
        lines.extend(whole(&session, now, 100, Colors::None));
        let mut out = Vec::new();
        once::print(&mut out, &lines, Colors::None).expect("writing to memory succeeds");
        assert_recorded(name, &String::from_utf8(out).expect("UTF-8"));
    }
}

#[test]
fn a_lost_paused_or_restarted_process_is_shown_with_its_age() {
    let mut session = card();
    let text = |session: &Session, now| printed(&drawn(session, (80, 24), now, Colors::None), Colors::None);
    assert!(text(&session, at(5)).contains("every 1 s"));
    assert!(session.press(Key::Pause));
    assert!(text(&session, at(70)).contains("paused, figures 65 s old"));
    assert!(session.press(Key::Pause));
    let error = ScrapeError::Unreachable { address: "10.0.0.7:9464".to_owned(), why: "connection refused".to_owned() };
    session.record(Err(error.clone()), Duration::from_secs(9));
    let lost = text(&session, at(20));
    assert!(lost.contains("LOST for 11 s, figures 15 s old"), "{lost}");
    assert!(lost.contains("no answer from 10.0.0.7:9464: connection refused"), "{lost}");
    assert!(lost.contains("--metrics 10.0.0.7:9464") && lost.contains("in your own program"), "{lost}");
    assert!(lost.contains("weights"), "the last known state is still shown: {lost}");
    session.record(
        Ok(scrape("bursar_device_total_bytes{device=\"cuda:0\"} 9\nbursar_kv_shrinks_total{model=\"a\"} 0\n", "[]")),
        Duration::from_secs(30),
    );
    assert!(text(&session, at(33)).contains("restarted 3 s ago"));

    let mut stranger = Session::new("10.0.0.7:9464".to_owned(), Duration::from_secs(1));
    assert!(text(&stranger, at(0)).contains("waiting for the first answer"));
    stranger.record(Err(error), Duration::from_secs(1));
    let never = text(&stranger, at(3));
    assert!(never.contains("no answer yet") && never.contains("--metrics 10.0.0.7:9464"), "{never}");
}

#[test]
fn each_card_of_a_group_has_a_named_bar() {
    let of_card = |card: &str, foreign: u64| {
        let gauge = |what: &str, bytes: u64| {
            format!("bursar_card_{what}_bytes{{group=\"cuda:0,1\",device=\"{card}\"}} {bytes}\n")
        };
        [gauge("total", 1 << 30), gauge("overhead", 0), gauge("foreign", foreign), gauge("drift", 5)].concat()
    };
    let group = "bursar_device_total_bytes{device=\"cuda:0,1\"} 1073741824\n\
                 bursar_foreign_bytes{device=\"cuda:0,1\"} 268435456\nbursar_drift_bytes{device=\"cuda:0,1\"} 5\n\
                 bursar_lease_bytes{device=\"cuda:0,1\",model=\"a\",class=\"weights\"} 536870912\n";
    let metrics = [group, &of_card("cuda:0", 0), &of_card("cuda:1", 1 << 28)].concat();
    let mut session = Session::new("10.0.0.7:9464".to_owned(), Duration::from_secs(1));
    session.record(Ok(scrape(&metrics, "[]")), Duration::from_secs(5));
    let shown = |columns| printed(&drawn(&session, (columns, 20), at(5), Colors::None), Colors::None);
    let (wide, narrow) = (shown(80), shown(40));
    let bar = |shown: &str, card: &str| {
        let line = shown.lines().find(|line| line.starts_with(card)).unwrap_or_else(|| panic!("no {card} in\n{shown}"));
        let bar = line.split_whitespace().nth(1).expect("a bar after the name");
        ["W", "f", "."].map(|letter| bar.matches(letter).count())
    };
    assert!(wide.contains("512.0 MiB free") && wide.contains("256.0 MiB free"), "{wide}");
    assert!(wide.contains("drift 5 B, 5 B of it on cuda:0, 5 B of it on cuda:1"), "{wide}");
    for shown in [&wide, &narrow] {
        let ([weights, foreign, free], [same, of_others, left]) = (bar(shown, "cuda:0 "), bar(shown, "cuda:1 "));
        assert!(weights.abs_diff(same) <= 1 && foreign == 0 && of_others > 0 && left < free, "{shown}");
    }
}

#[test]
fn the_smallest_screen_shows_the_bar_problems_and_chosen_model() {
    let mut session = card();
    assert!(session.press(Key::Next));
    let text = printed(&drawn(&session, (40, 10), at(5), Colors::None), Colors::None);
    for kept in [
        "cuda:0",
        "3.2 GiB of 149.0 GiB free",
        "WWWW",
        "W weights 21.6 GiB",
        "canary 96.0 MiB of 256.0 MiB",
        "›captions",
        "recovery",
    ] {
        assert!(text.contains(kept), "{kept} is not on\n{text}");
    }
}

/// Presses a key and draws the session, which records the size of its viewport. Returns the rows of
/// the screen.
fn pressed(session: &mut Session, key: Key, size: (u16, u16)) -> Vec<String> {
    assert!(session.press(key), "the session goes on");
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).expect("a terminal in memory");
    let mut viewport = session.viewport;
    terminal.draw(|frame| viewport = draw(frame, session, at(5), Colors::None)).expect("it is drawn");
    session.viewport = viewport;
    let buffer = terminal.backend().buffer();
    let rows = buffer.content.chunks(size.0.into());
    rows.map(|row| row.iter().map(ratatui::buffer::Cell::symbol).collect::<String>().trim_end().to_owned()).collect()
}

#[test]
fn keys_reach_every_line_of_the_view_at_80x24() {
    let (mut session, size) = (card(), (80, 24));
    let all: Vec<_> =
        whole(&session, at(5), 80, Colors::None).iter().map(|line| line.to_string().trim_end().to_owned()).collect();
    assert!(all.len() > 3 * 22, "the lines fill more than three pages: {}", all.len());
    assert!(!all.iter().any(|line| line.contains('…') && !line.contains("Qwen")), "only names are cut: {all:#?}");
    let first = pressed(&mut session, Key::PageDown, size);
    assert_eq!((&first[1..23], first[23].contains("lines 1 to 22 of")), (&all[..22], true));
    let mut seen = first[1..23].to_vec();
    while seen.len() < all.len() {
        let page = pressed(&mut session, Key::PageDown, size);
        let more = (all.len() - seen.len()).min(21);
        seen.extend_from_slice(&page[23 - more..23]);
    }
    assert_eq!(seen, all);
    let top = pressed(&mut session, Key::First, size);
    assert_eq!(top, first);
    let end = pressed(&mut session, Key::Last, size);
    assert_eq!(end[1..23], all[all.len() - 22..]);
    // A larger terminal can show more lines than follow the current one.
    let large = pressed(&mut session, Key::Next, (80, 50));
    assert_eq!(large[1..49], all[all.len() - 48..]);
    assert_recorded("card_80x24_second_page.txt", &{
        pressed(&mut session, Key::First, size);
        pressed(&mut session, Key::PageDown, size).join("\n") + "\n"
    });
}

#[test]
fn no_size_or_content_panics() {
    let mut session = card();
    let long = "模型".repeat(80);
    let hostile = format!(
        "bursar_device_total_bytes{{device=\"{long}\"}} NaN\nbursar_lease_bytes{{device=\"{long}\",class=\"\\n\"}} +Inf\n\
         bursar_lease_bytes{{device=\"{long}\",class=\"kv\",model=\"{long}\"}} 1e300\nbursar_lease_bytes 7\n\
         bursar_kv_blocks{{model=\"{long}\"}} -3\nbursar_kv_blocks_used{{model=\"{long}\"}} +Inf\n\
         bursar_actor_up{{model=\"{long}\",actor=\"{long}\"}} NaN\nbursar_permits{{model=\"{long}\"}} 1e99\n\
         bursar_restarts_total{{model=\"{long}\",actor=\"{long}\"}} 1e99\nbursar_overhead_bytes 1e30\n\
         bursar_time_to_first_token_seconds_bucket{{model=\"{long}\",le=\"-1e308\"}} 4\n\
         bursar_time_to_first_token_seconds_bucket{{model=\"{long}\",le=\"1e308\"}} 1e308\n\
         bursar_time_to_first_token_seconds_bucket{{model=\"{long}\",le=\"+Inf\"}} 1e308\n"
    );
    let events = format!("[{{\"number\":1,\"at\":-1e300,\"event\":\"{long}\",\"{long}\":\"{long}\"}}]");
    let mut stranger = Session::new(long.clone(), Duration::from_secs(1));
    stranger.record(Ok(scrape(&hostile, &events)), Duration::from_secs(1));
    stranger.record(Ok(scrape(&hostile, &events)), Duration::from_secs(2));
    assert!(session.press(Key::Help) && stranger.press(Key::Last));
    let mut paged = card();
    assert!(paged.press(Key::PageDown));
    paged.top = Some(usize::MAX);
    for session in [&session, &stranger, &paged] {
        for columns in [0, 1, 2, 7, 13, 39, 40, 79, 100, 240] {
            for (rows, colors) in
                [0, 1, 2, 3, 5, 9, 12, 24, 70].into_iter().zip([Colors::None, Colors::True].into_iter().cycle())
            {
                let buffer = drawn(session, (columns, rows), at(5), colors);
                assert_eq!((buffer.area.width, buffer.area.height), (columns, rows));
            }
            let widest = whole(session, at(5), columns, Colors::Sixteen).iter().map(Line::width).max();
            assert!(widest <= Some(usize::from(columns)), "the widest line has {widest:?} of {columns} columns");
        }
    }
}
