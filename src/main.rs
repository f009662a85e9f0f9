//! The command line.

mod chat;
mod device;
mod failure;
#[cfg(feature = "hub")]
mod hub;
mod model;
mod progress;
mod tour;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use device::DeviceOptions;

/// Serves vision-language models and leases every byte of device memory.
///
/// Without a command: a tour with the embedded demo model.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    device: DeviceOptions,
}

#[derive(Subcommand)]
enum Command {
    /// Asks a model a question, or talks with it.
    Chat(chat::Options),
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        None => failure::report(tour::run(&cli.device).await),
        Some(Command::Chat(options)) => chat::run(&cli.device, options).await,
    }
}
