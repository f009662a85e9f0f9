//! `bursar chat`: one question, or a session with history.

mod options;
mod told;

use std::{
    io::{BufRead, IsTerminal, Write, stdin, stdout},
    path::Path,
    process::ExitCode,
};

use bursar::{Chat, Image, LoadOptions, ModelHandle};

pub use options::Options;
use options::Shown;

use crate::{
    DeviceOptions,
    failure::{Failure, report, tell},
    model,
};

/// Runs the command.
pub async fn run(device: &DeviceOptions, options: Options) -> ExitCode {
    let outcome = talk(device, &options).await;
    match (options.json, outcome) {
        (true, Err(failure)) => {
            println!("{}", crate::told::failure(&failure));
            ExitCode::FAILURE
        }
        (_, outcome) => report(outcome),
    }
}

async fn talk(device: &DeviceOptions, options: &Options) -> Result<(), Failure> {
    // What can be refused at once is, before a model is loaded.
    let (shown, blank) = (options.shown()?, options.blank()?);
    let load = LoadOptions { profiles: device.profiles(), ..options.knobs.options(device.blas())? };
    let runtime = model::start_knowing(device, &options.knobs).await?;
    let model = model::load_with(&runtime, model::source(&options.model), load, !options.json).await?;
    let outcome = match &options.question {
        Some(question) => {
            let chat = shown.ask(blank, question);
            match options.n {
                1 => told::stream(&model, chat, options.json).await.map(drop),
                several => told::samples(&model, chat, several, options.json).await,
            }
        }
        None => session(&model, blank, shown, options).await,
    };
    runtime.shutdown().await;
    outcome
}

/// Reads turns from standard input until its end. A turn that fails is told and forgotten; the session goes on.
async fn session(model: &ModelHandle, blank: Chat, shown: Shown, options: &Options) -> Result<(), Failure> {
    let is_terminal = stdin().is_terminal() && !options.json;
    if is_terminal {
        println!("/image FILE and /video DIR add to the next question, /quit ends.");
    }
    let (mut chat, mut shown) = (blank, shown);
    loop {
        if is_terminal {
            print!("? ");
            stdout().flush()?;
        }
        let Some(line) = tokio::task::block_in_place(|| stdin().lock().lines().next()).transpose()? else {
            return Ok(());
        };
        let line = line.trim();
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let outcome = match word {
            "" => Ok(()),
            "/quit" => return Ok(()),
            "/image" => Image::open(rest.trim()).map(|image| shown.images.push(image)).map_err(Failure::from),
            "/video" => options.video(Path::new(rest.trim())).map(|video| shown.videos.push(video)),
            _ => {
                let asked = shown.ask(chat.clone(), line);
                told::stream(model, asked.clone(), options.json).await.map(|answer| {
                    chat = asked.assistant(answer);
                    shown = Shown::default();
                })
            }
        };
        match outcome {
            Err(failure) if options.json => println!("{}", crate::told::failure(&failure)),
            Err(failure) => tell(&failure),
            Ok(()) => {}
        }
    }
}
