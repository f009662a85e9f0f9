//! `bursar chat`: one question, or a session with history.

mod command;
mod input;
mod options;
mod print;
mod session;
mod shown;

use std::process::ExitCode;

use bursar::{ChatError, LoadOptions};

pub use options::Options;

use self::{
    input::Interrupts,
    print::{Ended, Outcome},
    session::Session,
    shown::Shown,
};
use crate::{DeviceOptions, failure::Failure, model};

/// The exit code of shells for SIGINT: 128 plus the number of the signal.
const INTERRUPTED: u8 = 130;

pub async fn run(device: &DeviceOptions, options: Options) -> ExitCode {
    let over = talk(device, &options).await.unwrap_or_else(|failure| {
        print::failure_of_all(&failure, &options);
        Outcome::Failed
    });
    match over {
        Outcome::Answered => ExitCode::SUCCESS,
        Outcome::Failed => ExitCode::FAILURE,
        Outcome::Interrupted => ExitCode::from(INTERRUPTED),
    }
}

async fn talk(device: &DeviceOptions, options: &Options) -> Result<Outcome, Failure> {
    // Check all options before loading a model, so that a mistake is reported at once.
    let load = LoadOptions { profiles: device.profiles(), ..options.knobs.options(device.blas())? };
    let limit = load.requests_for(true);
    if !(1..=limit).contains(&options.n) {
        return Err(ChatError::Samples { samples: options.n, limit }.into());
    }
    let limits = load.image_limits.clone();
    let (shown, blank) = (Shown::of(options, &limits)?, options.blank()?);
    let source = model::source(&options.model);
    let runtime = model::start_with_knobs(device, &options.knobs, vec![(source.clone(), load.clone())]).await?;
    let model = model::load_with(&runtime, source, load, !options.json).await?;
    let mut interrupts = Interrupts::listen();
    let outcome = match &options.question {
        Some(question) if options.n > 1 => {
            let asked = shown.ask(blank, question);
            tokio::select! {
                outcome = print::samples(&model, asked, options) => outcome,
                () = interrupts.next() => Ok(Outcome::Interrupted),
            }
        }
        Some(question) => {
            let ended = print::stream(&model, shown.ask(blank, question), options, &mut interrupts).await;
            ended.map_err(Failure::from).map(|ended| match ended {
                Ended::Interrupted { .. } => Outcome::Interrupted,
                Ended::Done { .. } | Ended::OutputClosed => Outcome::Answered,
            })
        }
        None => Session::new(&model, options, &limits, blank, shown).run(&mut interrupts).await,
    };
    tokio::select! {
        () = runtime.shutdown() => outcome,
        // A second Ctrl-C ends the command at once.
        () = interrupts.next() => Ok(Outcome::Interrupted),
    }
}
