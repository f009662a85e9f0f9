//! `bursar top`: a live view of a running process, read from its metrics address.

mod address;
mod draw;
mod event;
mod exposition;
mod histogram;
mod keys;
mod once;
mod palette;
mod rate;
mod samples;
mod scrape;
mod session;
mod terminal;
mod view;

use std::{
    env,
    io::{IsTerminal, stdout},
    net::SocketAddr,
    process::ExitCode,
    str::FromStr,
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use clap::Args;
use ratatui::crossterm::style::force_color_output;
use serde_json::json;

use self::{
    address::{Address, PORT},
    draw::Now,
    palette::{Colors, Surroundings, When},
    scrape::{Scrape, ScrapeError, Scraper},
    session::Session,
    terminal::{Input, Screen},
};
use crate::failure::{self, Failure};

pub use self::samples::Samples;

/// Parses the metrics text of this process itself, which is well-formed.
pub fn read(text: &str) -> Samples {
    exposition::read(text, "bursar_").unwrap_or_default()
}

/// Options of `bursar top`.
#[derive(Args)]
pub struct Options {
    /// Address where the process serves its metrics (its --metrics): HOST:PORT, or a port
    /// of this machine. By default, the value of --metrics or BURSAR_METRICS for this
    /// command, or else 127.0.0.1:9464.
    #[arg(value_name = "ADDR")]
    address: Option<Address>,
    /// Time between two updates, from 100ms to 1m.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    every: Every,
    /// Reads the metrics twice, --every apart, prints the figures as text, and exits. Exits with 1
    /// if there is nothing to show.
    #[arg(long)]
    once: bool,
    /// With --once, prints one JSON object instead of text.
    #[arg(long, requires = "once")]
    json: bool,
    /// When to use colors. auto respects NO_COLOR, and uses more than 16 colors
    /// if COLORTERM is truecolor.
    #[arg(long, value_enum, default_value = "auto")]
    color: When,
}

/// The time between two scrapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Every(Duration);

/// Columns to print if the width is unknown.
const COLUMNS: u16 = 100;
/// How long to wait for terminal input before checking for scrapes again.
const PATIENCE: Duration = Duration::from_millis(50);
/// Interval at which ages are redrawn.
const REDRAW: Duration = Duration::from_millis(500);

/// Runs the command. Exits with 1 if there is nothing to show.
pub async fn run(options: Options, served: Option<SocketAddr>) -> ExitCode {
    let is_json = options.json;
    // A server that listens on an unspecified address, such as 0.0.0.0, is reachable through the
    // loopback address.
    let here = served
        .map(|served| if served.ip().is_unspecified() { Address::port(served.port()) } else { Address::of(served) });
    let address = options.address.clone().or(here).unwrap_or_else(|| Address::port(PORT));
    let seen = tokio::task::spawn_blocking(move || show(&options, &address)).await;
    let seen = seen.unwrap_or_else(|died| {
        Err(Failure {
            error: format!("the view died: {died}"),
            hint: "this is a bug in Bursar; please report it with what `bursar top --once` prints".to_owned(),
        })
    });
    match seen {
        Err(ref failure) if is_json => {
            println!("{}", crate::shared_output::failure(failure));
            ExitCode::FAILURE
        }
        seen => failure::report(seen),
    }
}

fn show(options: &Options, address: &Address) -> Result<(), Failure> {
    let (no_color, colorterm, term) = (env::var_os("NO_COLOR"), env::var_os("COLORTERM"), env::var_os("TERM"));
    let surroundings = Surroundings {
        no_color: no_color.as_deref(),
        colorterm: colorterm.as_deref(),
        term: term.as_deref(),
        is_terminal: stdout().is_terminal(),
    };
    let colors = Colors::of(options.color, surroundings);
    // The user's flag has priority over NO_COLOR, which the library reads itself.
    force_color_output(colors != Colors::None);
    if options.once {
        print_once(options, address, colors)
    } else if stdout().is_terminal() {
        watch(options, address, colors)
    } else {
        Err(Failure {
            error: "standard output is not a terminal".to_owned(),
            hint: "use `bursar top --once`, which prints the view once as text, or as JSON with --json".to_owned(),
        })
    }
}

/// Prints the view once. Scrapes twice, because rates need two scrapes.
fn print_once(options: &Options, address: &Address, colors: Colors) -> Result<(), Failure> {
    let scraper = Scraper::new(address.clone());
    let mut session = Session::new(address.to_string(), options.every.0);
    let begun = Instant::now();
    session.record(Ok(scraper.scrape()?), begun.elapsed());
    wait(options.every.0.saturating_sub(begun.elapsed()));
    session.record(Ok(scraper.scrape()?), begun.elapsed());
    if options.json {
        println!("{}", json!({ "type": "view", "address": session.address, "view": session.view() }));
        return Ok(());
    }
    let columns = ratatui::crossterm::terminal::size().ok().filter(|_| stdout().is_terminal());
    let columns = columns.map_or(COLUMNS, |(columns, _)| columns.max(40));
    let now = now(begun);
    let mut lines = vec![draw::header(&session, now, columns, colors)];
    lines.extend(draw::whole(&session, now, columns, colors));
    let mut text = Vec::new();
    once::print(&mut text, &lines, colors)?;
    print!("{}", String::from_utf8_lossy(&text));
    Ok(())
}

/// Draws until the user quits.
fn watch(options: &Options, address: &Address, colors: Colors) -> Result<(), Failure> {
    let (mut session, begun) = (Session::new(address.to_string(), options.every.0), Instant::now());
    let looks = Looks::start(Scraper::new(address.clone()), begun);
    let mut screen = Screen::take()?;
    let (mut drawn, mut asked, mut is_asked, mut is_news) = (None::<Instant>, None::<Instant>, false, true);
    loop {
        let is_due = asked.is_none_or(|asked| asked.elapsed() >= session.every);
        if is_due && !is_asked && !session.is_paused {
            // Run one scrape at a time, so that a slow process does not get another request before
            // it has answered.
            (asked, is_asked) = (Some(Instant::now()), looks.ask.try_send(()).is_ok());
        }
        match looks.results.try_recv() {
            Ok((scraped, at)) => {
                session.record(scraped, at);
                (is_asked, is_news) = (false, true);
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                return Err(Failure {
                    error: "the thread that reads the metrics has died".to_owned(),
                    hint: "this is a bug in Bursar; please report it".to_owned(),
                });
            }
        }
        if is_news || drawn.is_none_or(|drawn| drawn.elapsed() >= REDRAW) {
            let mut viewport = session.viewport;
            screen.draw(|frame| viewport = draw::draw(frame, &session, now(begun), colors))?;
            session.viewport = viewport;
            (drawn, is_news) = (Some(Instant::now()), false);
        }
        match screen.wait(PATIENCE)? {
            Input::Key(key) if !session.press(key) => return Ok(()),
            Input::Key(_) | Input::Other => is_news = true,
            Input::Nothing => {}
        }
    }
}

/// A thread that scrapes on request.
struct Looks {
    ask: SyncSender<()>,
    results: Receiver<(Result<Scrape, ScrapeError>, Duration)>,
}

impl Looks {
    /// Starts the thread. The thread ends when `ask` is dropped, or with the process if it still
    /// waits for an answer.
    fn start(scraper: Scraper, begun: Instant) -> Self {
        let ((ask, asked), (send, results)) = (sync_channel(1), sync_channel(1));
        thread::spawn(move || {
            while asked.recv().is_ok() {
                let scraped = scraper.scrape();
                if send.send((scraped, begun.elapsed())).is_err() {
                    break;
                }
            }
        });
        Looks { ask, results }
    }
}

fn now(begun: Instant) -> Now {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Now { elapsed: begun.elapsed(), unix: unix.as_secs_f64() }
}

/// Sleeps. clippy.toml bans `thread::sleep` because other threads must wait on queues; this command
/// has nothing else to wait for.
fn wait(time: Duration) {
    let (_keep, nobody) = sync_channel::<()>(1);
    let waited: Result<(), RecvTimeoutError> = nobody.recv_timeout(time);
    debug_assert_eq!(waited, Err(RecvTimeoutError::Timeout));
}

impl FromStr for Every {
    type Err = String;

    fn from_str(typed: &str) -> Result<Self, String> {
        let (number, unit) =
            typed.split_at(typed.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(typed.len()));
        let seconds = match unit {
            "ms" => Some(0.001),
            "s" | "" => Some(1.0),
            "m" | "min" => Some(60.0),
            _ => None,
        };
        let every = seconds.zip(number.trim().parse::<f64>().ok()).map(|(unit, number)| unit * number);
        match every {
            Some(every) if (0.1..=60.0).contains(&every) => Ok(Every(Duration::from_secs_f64(every))),
            _ => Err(format!("{typed:?} is not a time; expected 100ms to 1m, such as 500ms or 2s")),
        }
    }
}

impl From<ScrapeError> for Failure {
    fn from(error: ScrapeError) -> Self {
        Failure::of(&error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scrape_interval_has_bounds() {
        for (typed, millis) in [("1s", 1000), ("500ms", 500), ("0.5", 500), ("2 s", 2000), ("1m", 60_000)] {
            assert_eq!(typed.parse(), Ok(Every(Duration::from_millis(millis))), "{typed}");
        }
        for typed in ["", "s", "99ms", "61s", "2m", "1h", "-1s", "NaN", "inf"] {
            assert!(typed.parse::<Every>().is_err(), "{typed}");
        }
    }
}
