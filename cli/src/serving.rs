//! `bursar serve`: models over HTTP.

mod loading;
mod options;
mod vllm_flags;

pub use options::Options;

use std::time::{Duration, Instant};

use bursar::{Placement, Runtime, RuntimeConfig};
use bursar_serve::{KeyError, ListenError, Server, Service};
use futures_util::future::join_all;

use crate::{DeviceOptions, failure::Failure, logging, signals::Signals};

/// Serves until a signal arrives, then waits for running replies as long as the drain time allows.
pub async fn run(device: &DeviceOptions, options: Options) -> Result<(), Failure> {
    bursar_budgets::give_large_blocks_back();
    let wanted = options.models()?;
    let serve = options.serve()?;
    let knobs = options.knobs();
    knobs.report_notes()?;
    let plans = loading::plans(wanted, &options, device)?;
    // This step may fetch settings from the hub. It runs before signals are caught, so that Ctrl-C
    // can end it.
    let placed = device.placed(plans.iter().map(loading::Plan::model).collect(), knobs.canary()?).await?;
    let mut signals = Signals::listen()?;
    let drain = serve.drain;
    let is_open = serve.keys.is_empty();
    let (mut runtimes, mut in_turn) = (Vec::new(), false);
    for Placement { device: choice, ranks, models } in &placed {
        let config = knobs.runtime(RuntimeConfig::default().host_bytes, models.len(), *ranks)?;
        in_turn = config.sleep_for_memory.is_some();
        let runtime = Runtime::start(RuntimeConfig { device: choice.clone(), ..config }).await?;
        if placed.len() > 1 {
            let names: Vec<_> = models.iter().map(|model| plans[*model].name()).collect();
            logging::note(format_args!("{}: {}", runtime.device().label(), names.join(", ")));
        }
        runtimes.push(runtime);
    }
    device.serve_metrics(&runtimes).await?;
    device.report_missing_gpu(&runtimes[0]);
    let service = Service::over(&runtimes, serve);
    for plan in &plans {
        plan.announce(&service);
    }
    let names = plans.iter().map(loading::Plan::name).collect::<Vec<_>>().join(", ");
    let plans = loading::placed(plans, &runtimes, &placed, in_turn);
    let server = Server::start(service.clone(), &options.address(), options.tls().as_ref()).await?;
    println!("listening on {}://{}", server.scheme(), server.addr());
    if is_open && !server.addr().ip().is_loopback() {
        logging::note("warning: everyone who can reach this address can use the models; set --api-key-file");
    }
    let loading = tokio::spawn(loading::load_all(service, plans));
    let served =
        format!("serving {names} at {}://{}/ (API at /v1, and a page for chats)", server.scheme(), server.addr());
    let outcome = tokio::select! {
        outcome = loaded_or_served(loading, &served) => outcome,
        _ = signals.next() => Ok(()),
    };
    if outcome.is_ok() {
        logging::note("shutting down: waiting for running replies");
    }
    let ending = end(runtimes, server, drain);
    tokio::select! {
        () = ending => {}
        // A second signal ends the program at once.
        _ = signals.next() => {}
    }
    outcome
}

/// Returns an error if no model can be loaded. Otherwise never returns.
async fn loaded_or_served(loading: tokio::task::JoinHandle<Result<(), Failure>>, served: &str) -> Result<(), Failure> {
    match loading.await {
        Ok(Ok(())) => {
            // Print the address again after the startup messages, because users look for it there.
            if logging::is_watched() {
                logging::note(served);
            }
            std::future::pending().await
        }
        Ok(Err(failure)) => Err(failure),
        Err(died) => {
            Err(Failure { error: died.to_string(), hint: "this is a bug in Bursar; please report it".to_owned() })
        }
    }
}

async fn end(runtimes: Vec<Runtime>, server: Server, drain: Duration) {
    let until = Instant::now() + drain;
    server.shutdown().await;
    // Requests in the background get the rest of the drain time.
    let rest = until.saturating_duration_since(Instant::now());
    join_all(runtimes.into_iter().map(|runtime| runtime.shutdown_within(rest))).await;
}

impl From<ListenError> for Failure {
    fn from(error: ListenError) -> Self {
        Failure::of(&error)
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        Failure::of(&error)
    }
}
