//! `bursar bench --trace` and `--synthetic`: requests that arrive at given times, and the latencies
//! that each caller observes.

mod arrivals;
mod counts;
mod figures;
mod messages;
mod objective;
pub mod options;
mod play;
mod read;
mod report;
mod synthetic;
mod times;

use std::time::Instant;

use bursar::LoadOptions;

pub use report::ReplayReport;

use self::{
    figures::{Ended, Figures},
    play::{Played, Player},
};
use super::{
    fits::Fits,
    machine::{Machine, since_process_start},
    measure::{self, HOST_BYTES, Meter, bar},
    options::Options,
    workload::Prompts,
};
use crate::{DeviceOptions, failure::Failure, model};

/// Number of concurrent requests that warm the model up.
const WARM: usize = 8;

/// Runs the replay. `main` is the time at which the process entered `main`.
pub async fn replay(device: &DeviceOptions, options: &Options, main: Instant) -> Result<ReplayReport, Failure> {
    let seed = options.seed();
    let source = options.model.source(seed)?;
    let mut runs = options.replay.runs(seed, options.is_quick())?;
    options.knobs.report_notes()?;
    // Allow one request for each caller that may send one at the same time, so that requests queue
    // instead of being refused, unless a knob sets a lower limit.
    let callers = runs.iter().map(|run| run.callers.len()).max().unwrap_or(1);
    let at_once = options.replay.max_concurrency().map_or(callers, |most| most.min(callers));
    let requests = at_once.max(WARM);
    let base = LoadOptions {
        requests: Some(requests),
        blas: device.blas(),
        profiles: device.said_profiles(),
        ..LoadOptions::default()
    };
    let load = options.knobs.over(base)?;
    let config = options.knobs.runtime(HOST_BYTES, 1, device.ranks())?;
    let runtime = model::start_with(device, config, vec![(source.clone(), load.clone())]).await?;
    let counter = counts::Counter::install()?;
    let loaded = model::load_with(&runtime, source.clone(), load, !options.json).await?;
    let ready_seconds = since_process_start(main).as_secs_f64();
    let serving = loaded.serving().await?;
    let fits = Fits::of(&serving);
    let facts = loaded.facts().await?;
    let mut player = Player::new(loaded.clone(), measure::ids(fits.text_ids), seed, facts.shows_tools);
    let warm = Prompts { count: fits.sequences.min(WARM), length: 300.min(facts.context_tokens / 2) };
    Meter::new(loaded, fits.text_ids, seed).text(warm, 16).await?;
    let bar = bar(!options.json);
    let mut figures = Vec::new();
    for (number, run) in runs.iter_mut().enumerate() {
        bar.set_message(run.name.clone());
        let cut = run.cut_to(facts.context_tokens);
        player.read_pictures(run)?;
        let watch = counter.watch();
        let Played { time, answered, failed } = player.play(run, number, at_once).await;
        let counts = watch.end().await;
        let name = match options.replay.max_concurrency() {
            Some(most) => format!("{}, at most {most} in flight", run.name),
            None => run.name.clone(),
        };
        let ended = Ended { name, rate: run.rate(), cut, time, answered, failed, counts };
        figures.push(Figures::of(ended, options.replay.objective()));
    }
    bar.finish_and_clear();
    let machine = Machine::of(runtime.device().as_ref(), options.commit.clone());
    let envelope = serving.context.envelope.clone();
    let kv_tokens = serving.record.kv_tokens();
    drop((player, serving));
    runtime.shutdown().await;
    let random_weights = options.model.is_random();
    Ok(ReplayReport {
        model: source.name(),
        random_weights,
        seed,
        machine,
        envelope,
        kv_tokens,
        ready_seconds,
        runs: figures,
    })
}
