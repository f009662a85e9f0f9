//! Everything that a command prints on standard error: progress, notices, errors and panics. Nothing else writes there,
//! so with `--log json` each line is an object.

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
    /// Logs leases, restarts and requests to standard error, with the command's own messages: as lines of text, or
    /// everything as JSON objects, one per line.
    #[arg(long, value_enum, default_value_t = Form::Off, env = "BURSAR_LOG", global = true)]
    log: Form,
    /// The least level that is logged. debug follows each request from actor to actor.
    #[arg(long, value_name = "LEVEL", default_value = "info", env = "BURSAR_LOG_LEVEL", global = true)]
    log_level: Level,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// No log.
    Off,
    /// Lines of text.
    Text,
    /// JSON objects, one per line.
    Json,
}

/// The target of the command's own messages, which pass at every level.
const SAID: &str = "bursar::said";

impl LogOptions {
    /// Installs the log subscriber.
    pub fn begin(&self) {
        begin(self.log, self.log_level);
    }
}

fn begin(form: Form, level: Level) {
    // Libraries log under their own targets, and may log a lot.
    let ours =
        Targets::new().with_default(LevelFilter::WARN).with_target("bursar", level).with_target(SAID, Level::INFO);
    // A closing span reports its duration.
    let colours = io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
    let lines = fmt::layer().with_writer(io::stderr).with_ansi(colours).with_span_events(FmtSpan::CLOSE);
    let registry = tracing_subscriber::registry();
    match form {
        Form::Off => {}
        Form::Text => registry.with(lines.with_filter(ours.with_target(SAID, LevelFilter::OFF))).init(),
        Form::Json => {
            registry.with(lines.json().flatten_event(true).with_filter(ours)).init();
            panic::set_hook(Box::new(tell_of_panic));
        }
    }
}

/// Whether standard error is JSON; then nothing may be drawn there.
pub fn is_json() -> bool {
    // Only the JSON form enables this target.
    tracing::enabled!(target: SAID, Level::INFO)
}

/// Whether a person reads standard error.
pub fn is_watched() -> bool {
    io::stderr().is_terminal()
}

/// Prints a notice for the user.
pub fn note(text: impl Display) {
    match is_json() {
        true => info!(target: SAID, "{text}"),
        false => print(text),
    }
}

/// Reports progress.
pub fn progress(what: &str, done: u64, total: u64) {
    info!(target: SAID, done, total, "{what}");
}

/// Prints an error and its hint.
pub fn fail(error: &str, hint: &str) {
    match is_json() {
        true => error!(target: SAID, hint, "{error}"),
        false => print(format_args!("error: {error}\n hint: {hint}")),
    }
}

/// Reports a bad command line and exits. It finds the `--log` form itself, as nothing has been parsed yet.
pub fn refuse(error: &clap::Error) -> ! {
    if !error.use_stderr() || !asks_for_json() {
        error.exit();
    }
    begin(Form::Json, Level::INFO);
    let told = error.render().to_string();
    let told = told.trim_start_matches("error: ").trim_end();
    fail(told, "see --help");
    process::exit(error.exit_code());
}

fn asks_for_json() -> bool {
    let words: Vec<_> = env::args_os().skip(1).take_while(|word| word != "--").collect();
    let is_said = |pair: &[std::ffi::OsString]| pair[0] == "--log" && pair[1] == "json";
    let said = words.iter().any(|word| word == "--log=json") || words.windows(2).any(is_said);
    said || env::var_os("BURSAR_LOG").is_some_and(|form| form == "json")
}

/// Ignores a closed standard error: that is no reason to end.
fn print(text: impl Display) {
    drop(writeln!(io::stderr(), "{text}"));
}

fn tell_of_panic(panic: &PanicHookInfo<'_>) {
    let location = panic.location().map(ToString::to_string);
    let (thread, trace) = (thread::current(), Backtrace::capture());
    let backtrace = (trace.status() == BacktraceStatus::Captured).then(|| trace.to_string());
    let message = message(panic.payload());
    error!(target: SAID, thread = thread.name(), location, backtrace, "panicked: {message}");
}

fn message(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("with a value that is not text")
}
