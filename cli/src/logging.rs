//! Output on standard error: progress, notices, errors and panics. Other modules only draw progress
//! bars there, and not with `--log json`, so each line is then a JSON object.

use std::{
    any::Any,
    backtrace::{Backtrace, BacktraceStatus},
    env,
    fmt::Display,
    io::{self, IsTerminal, Write},
    panic::{self, PanicHookInfo},
    process, thread,
};

use clap::{Args, ValueEnum};
use tracing::{Level, error, info, level_filters::LevelFilter};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    fmt::{self, format::FmtSpan},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

/// How to log leases, restarts and requests. Logs never contain prompts, pictures or replies.
#[derive(Args)]
pub struct LogOptions {
    /// Logs leases, restarts and requests to standard error, together with the command's own
    /// messages: as lines of text, or as one JSON object per line. By default, `serve` logs text
    /// and the other commands log nothing.
    #[arg(long, value_enum, env = "BURSAR_LOG", global = true)]
    log: Option<Form>,
    /// Lowest level that is logged. debug follows each request from actor to actor.
    #[arg(long, value_name = "LEVEL", default_value = "info", env = "BURSAR_LOG_LEVEL", global = true)]
    log_level: Level,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// No log.
    Off,
    /// One line of text per message.
    Text,
    /// One JSON object per line.
    Json,
}

/// Target of the command's own messages, which are logged at every level.
const MESSAGES: &str = "bursar::said";

/// Target of lease and restart events. Their spans log their duration when they close.
const LASTING: &str = "bursar_actors::event";
/// Target of lease events. A server hides them by default, because there are many and its log is
/// mainly read for requests.
const LEASES: &str = "bursar_actors::event::lease";
/// Targets of request events, including the events of actors that work on a request.
const REQUESTS: [&str; 4] =
    [SERVED, "bursar_actors::chat::driver", "bursar_actors::scheduler::actor", "bursar_actors::compute::lane::pending"];
/// Target of the access log: one line for each request that the server has answered.
const SERVED: &str = bursar_serve::ACCESS_LOG;

/// How much is logged about requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    /// Each step and the total duration.
    Steps,
    /// One line for each answered request. At debug level, also each step.
    Answered,
    /// Only warnings and errors.
    Nothing,
}

impl Requests {
    /// Returns the targets that log only warnings, and the most verbose log level at which they do
    /// so.
    fn hushed(self) -> (&'static [&'static str], Level) {
        match self {
            Requests::Steps => (&[], Level::TRACE),
            // The access log already has one line for each answered request.
            Requests::Answered => (&REQUESTS[1..], Level::INFO),
            Requests::Nothing => (&REQUESTS, Level::TRACE),
        }
    }
}

impl LogOptions {
    /// Installs the log subscriber.
    pub fn begin(&self, requests: Requests) {
        let usual = if requests == Requests::Steps { Form::Off } else { Form::Text };
        begin(self.log.unwrap_or(usual), self.log_level, requests);
    }
}

fn begin(form: Form, level: Level, requests: Requests) {
    // Libraries log under their own targets and may log a lot, so only their warnings are shown.
    let mut ours =
        Targets::new().with_default(LevelFilter::WARN).with_target("bursar", level).with_target(MESSAGES, Level::INFO);
    let (hushed, up_to) = requests.hushed();
    for target in hushed.iter().filter(|_| level <= up_to) {
        ours = ours.with_target(*target, level.min(Level::WARN));
    }
    let colors = io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
    let lines = |spans| fmt::layer().with_writer(io::stderr).with_ansi(colors).with_span_events(spans);
    let closing = match requests {
        Requests::Steps => FmtSpan::CLOSE,
        _ => FmtSpan::NONE,
    };
    let lasting = Targets::new().with_target(LASTING, level);
    let lasting = match requests {
        Requests::Answered | Requests::Nothing if level <= Level::INFO => {
            lasting.with_target(LEASES, level.min(Level::WARN))
        }
        _ => lasting,
    };
    let others = ours.with_target(LASTING, LevelFilter::OFF);
    let registry = tracing_subscriber::registry();
    match form {
        Form::Off => {}
        Form::Text => {
            let others = lines(closing).with_filter(others.with_target(MESSAGES, LevelFilter::OFF));
            registry.with(vec![lines(FmtSpan::CLOSE).with_filter(lasting), others]).init();
        }
        Form::Json => {
            let lines = |spans| lines(spans).json().flatten_event(true);
            registry.with(vec![lines(FmtSpan::CLOSE).with_filter(lasting), lines(closing).with_filter(others)]).init();
            panic::set_hook(Box::new(report_panic));
        }
    }
}

/// Whether standard error has one JSON object per line. Nothing may be drawn there in that case.
pub fn is_json() -> bool {
    // Only the JSON form enables this target.
    tracing::enabled!(target: MESSAGES, Level::INFO)
}

/// Whether a person reads standard error.
pub fn is_watched() -> bool {
    io::stderr().is_terminal()
}

/// Prints a notice for the user.
pub fn note(text: impl Display) {
    if is_json() { info!(target: MESSAGES, "{text}") } else { print(text) }
}

pub fn progress(what: &str, done: u64, total: u64) {
    info!(target: MESSAGES, done, total, "{what}");
}

/// Prints an error and its hint.
pub fn fail(error: &str, hint: &str) {
    if is_json() {
        error!(target: MESSAGES, hint, "{error}")
    } else {
        print(format_args!("error: {error}\n hint: {hint}"))
    }
}

/// Reports a bad command line and exits. Looks for the `--log` form itself, because no options have
/// been parsed yet.
pub fn refuse(error: &clap::Error) -> ! {
    if !error.use_stderr() || !asks_for_json() {
        error.exit();
    }
    begin(Form::Json, Level::INFO, Requests::Steps);
    let error_text = error.render().to_string();
    let message = error_text.trim_start_matches("error: ").trim_end();
    fail(message, "see --help");
    process::exit(error.exit_code());
}

fn asks_for_json() -> bool {
    let words: Vec<_> = env::args_os().skip(1).take_while(|word| word != "--").collect();
    let is_said = |pair: &[std::ffi::OsString]| pair[0] == "--log" && pair[1] == "json";
    let is_json = words.iter().any(|word| word == "--log=json") || words.windows(2).any(is_said);
    is_json || env::var_os("BURSAR_LOG").is_some_and(|form| form == "json")
}

/// Prints a line to standard error. A closed standard error is ignored, because it is no reason to
/// exit.
fn print(text: impl Display) {
    drop(writeln!(io::stderr(), "{text}"));
}

fn report_panic(panic: &PanicHookInfo<'_>) {
    let location = panic.location().map(ToString::to_string);
    let (thread, trace) = (thread::current(), Backtrace::capture());
    let backtrace = (trace.status() == BacktraceStatus::Captured).then(|| trace.to_string());
    let message = message(panic.payload());
    error!(target: MESSAGES, thread = thread.name(), location, backtrace, "panicked: {message}");
}

fn message(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("with a value that is not text")
}
