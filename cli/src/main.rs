//! The `bursar` program: command line and commands.

#![warn(clippy::match_bool)]

#[macro_use]
mod output;

mod bench;
mod chat;
mod device;
mod drill;
mod failure;
mod flag_spelling;
mod hub;
mod knobs;
mod logging;
mod metrics;
mod model;
mod plan;
mod profile;
mod progress;
#[cfg(test)]
mod reference;
mod serving;
mod shared_output;
mod signals;
mod top;
mod tour;

use std::{
    env,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Parser, Subcommand};
use device::DeviceOptions;
use logging::{LogOptions, Requests};

/// Serves vision-language models and leases every byte of device memory.
///
/// Without a command, it runs a tour with the embedded demo model.
#[derive(Parser)]
#[command(name = "bursar", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    log: LogOptions,
}

#[derive(Subcommand)]
enum Command {
    /// Asks a model one question, or starts a chat session.
    Chat(Box<chat::Options>),
    /// Measures a model on this machine.
    Bench(Box<bench::Options>),
    /// Measures and sizes a model on this device again, prints the result, and records
    /// it for later starts.
    Profile(Box<profile::Options>),
    /// Refuses memory on purpose and reports each attempt. Runs on host memory, with as many
    /// devices as are named, and ignores --profile-cache. Exits with 1 if memory leaked, and with 2
    /// if the faults cannot be parsed.
    Drill(Box<drill::Options>),
    /// Shows how much memory a model would take on a device and what it could serve there,
    /// without a GPU. Exits with 0 if the model fits, with 1 if it does not, and with 2 if
    /// it cannot be planned.
    Plan(Box<plan::Options>),
    /// Serves models over HTTP to OpenAI and Anthropic clients.
    Serve(Box<serving::Options>),
    /// Shows a running process live: memory by class, actors, requests, rates and events.
    Top(top::Options),
}

impl Command {
    /// How much is logged about requests.
    fn requests(&self) -> Requests {
        match self {
            Command::Serve(options) => options.requests(),
            _ => Requests::Steps,
        }
    }
}

/// How long threads that wait for a disk or a network may delay the exit of the program.
const LAST_THREADS: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    // Changes the environment, so it must run before any other thread starts.
    bursar::keep_multicast_off();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failure::report(Err(error.into())),
    };
    let code = runtime.block_on(run());
    runtime.shutdown_timeout(LAST_THREADS);
    code
}

async fn run() -> ExitCode {
    let main = Instant::now();
    let cli =
        Cli::try_parse_from(flag_spelling::as_ours(env::args_os())).unwrap_or_else(|error| logging::refuse(&error));
    cli.log.begin(cli.command.as_ref().map_or(Requests::Steps, Command::requests));
    let serves = matches!(cli.command, Some(Command::Serve(_)));
    if let (false, Err(failure)) = (serves, cli.device.ranks_of_each(1)) {
        return failure::report(Err(failure));
    }
    match cli.command {
        None => failure::report(tour::run(&cli.device).await),
        Some(Command::Chat(options)) => chat::run(&cli.device, *options).await,
        Some(Command::Profile(options)) => profile::run(&cli.device, *options).await,
        Some(Command::Drill(options)) => drill::run(&cli.device, *options).await,
        Some(Command::Bench(options)) => bench::run(&cli.device, *options, main).await,
        Some(Command::Plan(options)) => plan::run(&cli.device, *options).await,
        Some(Command::Serve(options)) => failure::report(serving::run(&cli.device, *options).await),
        Some(Command::Top(options)) => top::run(options, cli.device.metrics()).await,
    }
}
