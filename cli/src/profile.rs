//! `bursar profile`: sizes a model on this device again, and records the result.

use std::{
    collections::BTreeMap,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use bursar::{
    AttemptReport, Bytes, LoadOptions, ModelSource, Phase, ProfileRecord, Progress, Runtime, RuntimeError, Snapshot,
    StepWork,
};
use bursar_budgets::grouped;
use clap::Args;
use serde::Serialize;

use crate::{
    DeviceOptions,
    failure::{Failure, report},
    knobs::KnobOptions,
    model,
    progress::Bar,
    shared_output,
};

/// Sizes a model on this device, even if a profile is recorded. Prints the result, and records
/// it for later starts.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    model: model::ModelOptions,
    /// Prints one JSON object instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    knobs: KnobOptions,
}

/// The seed of random weights. No measurement here depends on it.
const SEED: u64 = 0;

#[derive(Debug, Serialize)]
struct Profile {
    /// All attempts, in the order in which they ran.
    attempts: Vec<AttemptReport>,
    /// Seconds of each phase of the last attempt, and of the whole start.
    seconds: BTreeMap<&'static str, f64>,
    /// The permits: how much may run at once while the model serves.
    record: ProfileRecord,
    /// Memory that this process holds outside leases, by source. Empty for a host device.
    overhead: BTreeMap<&'static str, Bytes>,
    ledger: Snapshot,
}

/// The progress events of a start.
#[derive(Default)]
struct StartEvents {
    attempts: Vec<AttemptReport>,
    phases: Vec<(Phase, Instant)>,
}

pub async fn run(device: &DeviceOptions, options: Options) -> ExitCode {
    match profile(device, &options).await {
        Ok(profile) if options.json => {
            println!("{}", serde_json::to_string(&profile).expect("numbers and text are valid JSON"));
            ExitCode::SUCCESS
        }
        Ok(profile) => {
            print(&profile);
            ExitCode::SUCCESS
        }
        Err(failure) if options.json => {
            println!("{}", shared_output::failure(&failure));
            ExitCode::FAILURE
        }
        Err(failure) => report(Err(failure)),
    }
}

async fn profile(device: &DeviceOptions, options: &Options) -> Result<Profile, Failure> {
    let load =
        LoadOptions { profiles: device.profiles(), measures_anew: true, ..options.knobs.options(device.blas())? };
    let source = options.model.source(SEED)?;
    let runtime = model::start_with_knobs(device, &options.knobs, vec![(source.clone(), load.clone())]).await?;
    let outcome = size(&runtime, source, load, options).await;
    runtime.shutdown().await;
    outcome
}

async fn size(
    runtime: &Runtime,
    source: ModelSource,
    load: LoadOptions,
    options: &Options,
) -> Result<Profile, Failure> {
    let recorded = Arc::new(Mutex::new(StartEvents::default()));
    let (bar, listening, begun) = (Bar::new(!options.json), recorded.clone(), Instant::now());
    let listen = move |progress: Progress| {
        let mut events = listening.lock().unwrap_or_else(PoisonError::into_inner);
        match &progress {
            Progress::Phase(phase) => events.phases.push((*phase, Instant::now())),
            Progress::Attempt(report) => events.attempts.push(report.clone()),
            _ => {}
        }
        bar.show(progress);
    };
    let model = runtime.load_with(source, load, listen).await?;
    let ready = Instant::now();
    let serving = model.serving().await?;
    let ledger = runtime.budget().measure().await.map_err(RuntimeError::from)?;
    let StartEvents { attempts, phases } =
        std::mem::take(&mut *recorded.lock().unwrap_or_else(PoisonError::into_inner));
    let ends = phases.iter().skip(1).map(|(_, at)| *at).chain([ready]);
    // A phase that a later attempt repeats replaces the same phase of the earlier attempt.
    let mut seconds: BTreeMap<_, _> =
        phases.iter().zip(ends).map(|((phase, at), end)| (phase.name(), (end - *at).as_secs_f64())).collect();
    seconds.insert("start", (ready - begun).as_secs_f64());
    let mut overhead: BTreeMap<_, _> = runtime.device().overhead_by_source().into_iter().collect();
    // Overhead that the budget measured but that the device does not attribute to any source.
    let unattributed = ledger.overhead.saturating_sub(overhead.values().sum());
    if !overhead.is_empty() && !unattributed.is_zero() {
        overhead.insert("loaded at first use", unattributed);
    }
    Ok(Profile { attempts, seconds, record: (*serving.record).clone(), overhead, ledger })
}

fn print(Profile { attempts, seconds, record, overhead, ledger }: &Profile) {
    shared_output::attempts(attempts);
    println!();
    for (worst_case, workspace) in &record.peaks {
        println!("{:>14}  {worst_case}", workspace.to_string());
    }
    println!();
    println!("{:>14}  tokens in the KV cache", grouped(record.kv_tokens() as u64));
    println!("{:>14}  sequences in a step", grouped(record.sequences as u64));
    println!("{:>14}  tokens in a step", grouped(record.step_tokens as u64));
    println!("{:>14}  patches in a vision batch", grouped(record.launch_patches as u64));
    println!("{:>14}  rows of the vision cache", grouped(record.cache_rows as u64));
    println!();
    for step in &record.costs.steps {
        let (work, milliseconds) = (step.work, step.micros as f64 / 1e3);
        let StepWork { prompt_tokens, decoding, context_tokens, .. } = work;
        let context = grouped(context_tokens);
        println!("{milliseconds:>11.2} ms  {prompt_tokens} prompt tokens, {decoding} decoding, {context} in context");
    }
    for launch in &record.costs.launches {
        println!("{:>11.2} ms  a vision batch of {} patches", launch.micros as f64 / 1e3, launch.patches);
    }
    println!();
    for phase in Phase::ALL {
        if let Some(seconds) = seconds.get(phase.name()) {
            println!("{seconds:>12.3} s  {phase}");
        }
    }
    println!("{:>12.3} s  from start to ready", seconds["start"]);
    println!();
    for (source, bytes) in overhead {
        println!("{:>14}  overhead: {source}", bytes.to_string());
    }
    println!("{ledger}");
}
