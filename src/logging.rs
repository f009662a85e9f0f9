//! What a command tells of its work while it works, on its standard error.

use std::{
    env,
    io::{self, IsTerminal},
};

use clap::{Args, ValueEnum};
use tracing::{Level, level_filters::LevelFilter};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    fmt::{self, format::FmtSpan},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

/// How it tells of leases, restarts and requests. None of it has content: no prompt, no picture, no reply.
#[derive(Args)]
pub struct LogOptions {
    /// Tells of leases, restarts and requests on standard error, beside what the command itself says there: as lines of
    /// text, or as one JSON object a line.
    #[arg(long, value_enum, default_value_t = Form::Off, env = "BURSAR_LOG", global = true)]
    log: Form,
    /// How much of it: debug follows each request from actor to actor.
    #[arg(long, value_name = "LEVEL", default_value = "info", env = "BURSAR_LOG_LEVEL", global = true)]
    log_level: Level,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// Nothing.
    Off,
    /// For people.
    Text,
    /// For machines.
    Json,
}

impl LogOptions {
    /// Begins to tell.
    pub fn begin(&self) {
        // What libraries tell is theirs, and may be much.
        let ours = Targets::new().with_default(LevelFilter::WARN).with_target("bursar", self.log_level);
        // A span that closes says how long it was.
        let colours = io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
        let lines = fmt::layer().with_writer(io::stderr).with_ansi(colours).with_span_events(FmtSpan::CLOSE);
        let registry = tracing_subscriber::registry();
        match self.log {
            Form::Off => {}
            Form::Text => registry.with(lines.with_filter(ours)).init(),
            Form::Json => registry.with(lines.json().flatten_event(true).with_filter(ours)).init(),
        }
    }
}
