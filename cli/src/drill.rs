//! `bursar drill`: memory refused on purpose, with a report of each attempt.

use bursar_budgets::testing::HostControl;
use std::{
    process::ExitCode,
    slice,
    sync::{Arc, Mutex, PoisonError},
};

use bursar::{
    AttemptReport, Bytes, Chat, Device, DeviceChoice, DeviceGroup, FaultPlan, FaultPlanError, HostConfig, HostDevice,
    LoadOptions, ModelSource, Outcome, Phase, Progress, Runtime, RuntimeConfig, RuntimeError,
};
use clap::Args;
use serde::Serialize;

use crate::{
    DeviceOptions,
    failure::{self, Failure, report},
    knobs::KnobOptions,
    model, shared_output,
};

/// Tests on host memory how a start behaves when the device refuses memory in each phase. With
/// several devices, a fault inside a job is injected only on the last device. Device options other
/// than the number of devices and --capacity have no effect. No profile is read or written.
#[derive(Args)]
pub struct Options {
    /// Faults to inject: memory is refused once in PHASE of each of the first N attempts. Phases
    /// are load, probe, capture, back, validate and serve. There are four attempts.
    #[arg(long, value_name = "PHASE:N[,PHASE:N]")]
    fault: String,
    /// `demo`, a checkpoint folder, a GGUF file, or a model of the hub (`org/name`).
    #[arg(long, default_value = "demo")]
    model: String,
    /// Prints one JSON object instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    knobs: KnobOptions,
}

#[derive(Debug, Serialize)]
struct Drilled {
    /// All attempts, in the order in which they ran.
    attempts: Vec<AttemptReport>,
    /// Whether the model serves at the end.
    ready: bool,
    /// The error, if the model does not serve.
    error: Option<String>,
    hint: Option<String>,
    /// Bytes still missing from the device at the end.
    leaked_bytes: Bytes,
}

const NAME: &str = "drill";

/// Runs the command. It succeeds if the model serves in the end, or if the start fails because of
/// the refused memory. It fails on any other error and on leaked bytes.
pub async fn run(device: &DeviceOptions, options: Options) -> ExitCode {
    let faults = match options.fault.parse() {
        Ok(faults) => faults,
        Err(error) => return refuse(error, options.json),
    };
    let drilled = match drill(device, faults, &options).await {
        Ok(drilled) => drilled,
        Err(failure) if options.json => {
            println!("{}", shared_output::failure(&failure));
            return ExitCode::FAILURE;
        }
        Err(failure) => return report(Err(failure)),
    };
    if options.json {
        println!("{}", serde_json::to_string(&drilled).expect("numbers and text are valid JSON"))
    } else {
        print(&drilled)
    }
    match drilled.leaked_bytes {
        Bytes::ZERO => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// The exit code for faults that cannot be parsed, the same as for any bad flag. Leaked bytes have
/// a different exit code.
const CANNOT_BE_READ: u8 = 2;

fn refuse(error: FaultPlanError, is_json: bool) -> ExitCode {
    let failure = Failure::from(error);
    if is_json {
        println!("{}", shared_output::failure(&failure))
    } else {
        failure::print(&failure)
    }
    ExitCode::from(CANNOT_BE_READ)
}

async fn drill(device: &DeviceOptions, faults: FaultPlan, options: &Options) -> Result<Drilled, Failure> {
    let host = |_| HostDevice::new(HostConfig::small(device.capacity())).map(Arc::new);
    // Refuses --device and --tensor-parallel-size with different numbers of devices.
    device.choice()?;
    let ranks = device.ranks();
    let hosts = (0..ranks).map(host).collect::<Result<Vec<_>, _>>().map_err(RuntimeError::from)?;
    let each: Vec<_> = hosts.iter().map(|host| host.clone() as Arc<dyn Device>).collect();
    let choice = DeviceChoice::Custom(match &each[..] {
        [alone] => alone.clone(),
        _ => Arc::new(DeviceGroup::of(each, format!("host:{ranks}")).map_err(RuntimeError::from)?),
    });
    options.knobs.report_notes()?;
    let knobs = options.knobs.runtime(RuntimeConfig::default().host_bytes, 1, ranks)?;
    let config = RuntimeConfig { device: choice, ..knobs };
    let runtime = Runtime::start(config).await?;
    device.serve_metrics(slice::from_ref(&runtime)).await?;
    let asks = faults.has(Phase::Serve);
    let load = options.knobs.over(LoadOptions { name: Some(NAME.to_owned()), faults, ..LoadOptions::small() })?;
    let (attempts, outcome) = start(&runtime, model::source(&options.model), load, asks).await;
    // Count leaked bytes before the runtime shuts down, because the shutdown would free everything.
    runtime.unload(NAME).await?;
    let ledger = runtime.budget().snapshot().await.map_err(RuntimeError::from)?;
    // Every lease is backed on each device, so the maximum counts each leaked byte once.
    let backed = hosts.iter().map(|host| host.counts().backed).max().unwrap_or_default();
    let leaked_bytes = ledger.granted.max(backed);
    runtime.shutdown().await;
    let is_refused = attempts.iter().any(|report| matches!(report.outcome, Outcome::Refused { .. }));
    let (error, hint) = match outcome {
        Ok(()) => (None, None),
        // The start failed for a reason other than refused memory, so the drill did not run.
        Err(failure) if !is_refused && leaked_bytes.is_zero() => return Err(failure),
        Err(Failure { error, hint }) => (Some(error), Some(hint)),
    };
    Ok(Drilled { attempts, ready: error.is_none(), error, hint, leaked_bytes })
}

/// Starts the model. If memory is to be refused while it serves, also sends it a request. Returns
/// each attempt.
async fn start(
    runtime: &Runtime,
    source: ModelSource,
    load: LoadOptions,
    asks: bool,
) -> (Vec<AttemptReport>, Result<(), Failure>) {
    let attempts = Arc::new(Mutex::new(Vec::<AttemptReport>::new()));
    let listener = attempts.clone();
    let listen = move |progress| {
        if let Progress::Attempt(report) = progress {
            let mut attempts = listener.lock().unwrap_or_else(PoisonError::into_inner);
            // An attempt that became ready, and is then refused memory while serving, is reported
            // again.
            attempts.retain(|earlier| earlier.attempt != report.attempt);
            attempts.push(report);
        }
    };
    let outcome = async {
        let model = runtime.load_with(source, load, listen).await?;
        if asks {
            let mut reply = model.chat(Chat::new().user("Who are you?").max_tokens(8)).await?;
            while let Some(event) = reply.next().await {
                event?;
            }
        }
        Ok(())
    };
    let outcome = outcome.await;
    (std::mem::take(&mut *attempts.lock().unwrap_or_else(PoisonError::into_inner)), outcome)
}

fn print(drilled: &Drilled) {
    shared_output::attempts(&drilled.attempts);
    match (&drilled.error, &drilled.hint) {
        (Some(error), Some(hint)) => println!("not ready: {error}\nhint: {hint}"),
        _ => println!("the model is ready"),
    }
    println!("{} were not returned", drilled.leaked_bytes.exact());
}
