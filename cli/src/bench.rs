//! `bursar bench`: the key figures of a server, measured through the serving engine, each next to
//! the roofline bound of the device.

mod draw;
mod fits;
mod machine;
mod measure;
mod options;
mod replay;
mod report;
mod roofline;
mod workload;

use std::{
    fmt::Display,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use bursar::{LoadOptions, ModelSource, Runtime, StartError};
use bursar_actors::runtime::open_settings;
use bursar_kernels::{KernelError, Target, Work};
use bursar_model::{Model, checkpoint::Checkpoint, checkpoint::CheckpointSource, registry, registry::FamilyConfig};
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::json;

use self::{
    fits::Fits,
    machine::{Machine, since_process_start},
    measure::{HOST_BYTES, Meter, Run, bar},
    report::{Figure, LeftOut, PlannedWork, Report, Roofline, Unit},
    roofline::{Planner, Rates},
    workload::{Measurement, PatchGeometry, PictureLoad, Prompts, Workload},
};
use crate::{
    DeviceOptions,
    failure::{Failure, report},
    model, shared_output,
    signals::Signals,
};

pub use options::Options;

/// Number of runs of a text measurement. The fastest run counts. vLLM was measured in the same way
/// (`benches/README.md`).
const TEXT_RUNS: usize = 2;

/// Number of runs of a picture measurement after one warm-up. The median run counts.
const PICTURE_RUNS: usize = 3;

/// Runs the command. `main` is the time at which the process entered `main`.
pub async fn run(device: &DeviceOptions, options: Options, main: Instant) -> ExitCode {
    let outcome = if options.replay.is_wanted() {
        replay::replay(device, &options, main).await.and_then(|report| {
            show(&report, options.json);
            if report.is_a_failure() {
                Err(Failure {
                    error: "a run received no replies".to_owned(),
                    hint: "the errors of its requests are printed above".to_owned(),
                })
            } else {
                Ok(())
            }
        })
    } else {
        match measure(device, &options, main).await {
            Ok(false) => return ExitCode::FAILURE,
            outcome => outcome.map(drop),
        }
    };
    match (options.json, outcome) {
        (true, Err(failure)) => {
            println!("{}", shared_output::failure(&failure));
            ExitCode::FAILURE
        }
        (_, outcome) => report(outcome),
    }
}

fn show<R: Display + Serialize>(report: &R, as_json: bool) {
    if as_json { println!("{}", json!(report)) } else { print!("{report}") }
}

/// Measures and prints the figures. Returns `false` if the measurement ended early and the JSON
/// output says why.
async fn measure(device: &DeviceOptions, options: &Options, main: Instant) -> Result<bool, Failure> {
    let seed = options.seed();
    let source = options.model.source(seed)?;
    let workload = match picture_cut(&source).await {
        Some(cut) => options.workload().cut_by(cut),
        None => options.workload(),
    };
    let load = LoadOptions { profiles: device.said_profiles(), ..options.load(&workload, device.blas())? };
    options.knobs.report_notes()?;
    let config = options.knobs.runtime(HOST_BYTES, 1, device.ranks())?;
    let runtime = model::start_with(device, config, vec![(source.clone(), load.clone())]).await?;
    let ranks = runtime.device().ranks().len().max(1);
    let loaded = model::load_with(&runtime, source.clone(), load.clone(), !options.json).await?;
    let ready = since_process_start(main);
    let serving = loaded.serving().await?;
    let fits = Fits::of(&serving);
    let planner = Planner {
        model: planned(source.clone(), serving.target, ranks, load).await?,
        target: serving.target,
        step_tokens: serving.record.step_tokens,
        launch_patches: serving.record.launch_patches,
    };
    let machine = Machine::of(runtime.device().as_ref(), options.commit.clone());
    let rates = options.rates().or_else(|| Rates::of(&machine.device));
    let report = Report {
        model: source.name(),
        random_weights: options.model.is_random(),
        seed,
        machine,
        envelope: serving.context.envelope.clone(),
        rates,
        figures: Vec::new(),
        left_out: Vec::new(),
        ended_by: None,
    };
    let mut bench = Bench {
        workload,
        meter: Meter::new(loaded.clone(), fits.text_ids, seed),
        planner,
        fits,
        report,
        is_text: !options.json,
        bar: bar(!options.json),
        draft_acceptance: options.draft_acceptance,
    };
    bench.say(&bench.report);
    if options.wants(Measurement::Start) {
        let milliseconds = ready.as_secs_f64() * 1e3;
        bench.add(Figure::plain("start", "process start to ready", milliseconds, Unit::Milliseconds));
        let snapshot = runtime.budget().snapshot().await.map_err(|error| Failure {
            error: error.to_string(),
            hint: "the runtime has stopped; start the command again".to_owned(),
        })?;
        let memory = report::memory(&snapshot, serving.record.kv_tokens());
        memory.into_iter().chain(driver_free(&runtime, "ready", "at READY")).for_each(|figure| bench.add(figure));
    }
    // Text output prints each figure at once. JSON is printed at the end, so catch signals: after a
    // signal, the output still contains the figures measured so far.
    let mut signals = if options.json { Some(Signals::listen()?) } else { None };
    let outcome = tokio::select! {
        outcome = bench.run(options) => outcome,
        signal = ended(&mut signals) => Err(signal),
    };
    match outcome {
        Err(failure) if options.json => bench.report.ended_by = Some(shared_output::failure(&failure)),
        outcome => outcome?,
    }
    let is_whole = bench.report.ended_by.is_none();
    if options.wants(Measurement::Start) && is_whole {
        // If less memory is free here than at READY, this process allocated memory outside leases,
        // or another process took memory.
        driver_free(&runtime, "end", "at the end").into_iter().for_each(|figure| bench.add(figure));
    }
    bench.bar.finish_and_clear();
    if options.json {
        show(&bench.report, true);
    }
    // A second signal ends the program at once.
    tokio::select! {
        () = runtime.shutdown() => {}
        _ = ended(&mut signals) => {}
    }
    Ok(is_whole)
}

/// Waits for a signal that asks the program to end. Waits forever if signals are not caught.
async fn ended(signals: &mut Option<Signals>) -> Failure {
    let Some(signals) = signals else { return std::future::pending().await };
    let hint = "the output contains the figures that were measured before the signal".to_owned();
    Failure { error: format!("{} ended the measurement", signals.next().await), hint }
}

/// Returns the free bytes that the driver reports, independent of the ledger.
fn driver_free(runtime: &Runtime, id: &str, when: &str) -> Option<Figure> {
    let free = runtime.device().memory().ok()?.free.0 as f64;
    let name = format!("bytes, free {when} as the driver reports");
    Some(Figure::plain(&format!("driver_free_{id}"), &name, free, Unit::Bytes))
}

/// Returns how the model cuts pictures into patches, or `None` if the model takes no pictures.
/// Invalid settings are not reported here, because loading reports them.
async fn picture_cut(source: &ModelSource) -> Option<PatchGeometry> {
    let origin = source.origin().clone();
    let cut = move || {
        let random = registry::without_weights(origin.fetch_settings().ok()?).ok()?;
        let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).ok()?;
        let family = FamilyConfig::of(&checkpoint).ok()?;
        let (patch, merge) = (family.patch()?.side as u32, family.merge()?);
        Some(PatchGeometry { patch, merge, tiling: checkpoint.image_processor?.config().tiling })
    };
    tokio::task::spawn_blocking(cut).await.ok()?
}

/// Returns the model as planned for the rank with the most weights. No weights are loaded.
async fn planned(source: ModelSource, target: Target, ranks: usize, load: LoadOptions) -> Result<Model, Failure> {
    let plan = move || {
        // Loading has already fetched the model's files.
        let (checkpoint, _) = open_settings(source.origin().clone().fetch(&())?, &load)?;
        let checkpoint = checkpoint.with_quantization(load.quantization);
        let checkpoint = load.apply_on(&target, checkpoint).map_err(StartError::from)?;
        Ok(Model::plan_heaviest(&checkpoint, &target, ranks)?)
    };
    let planned = tokio::task::spawn_blocking(plan).await;
    let planned = planned.map_err(|died| Failure {
        error: format!("the planning task failed: {died}"),
        hint: "this is a bug in Bursar; please report it with the model".to_owned(),
    })?;
    planned.map_err(|error: StartError| Failure::of(&error))
}

struct Bench {
    workload: Workload,
    meter: Meter,
    planner: Planner,
    fits: Fits,
    report: Report,
    /// Whether each figure is printed as soon as it is measured, so that an interrupted run has
    /// already printed partial results.
    is_text: bool,
    bar: ProgressBar,
    /// The probability with which a draft is accepted. `None`: a draft is accepted if it is the
    /// sampled token.
    draft_acceptance: Option<f64>,
}

/// A measurement: its name, and the numbers that its value is computed from.
struct Measured {
    id: String,
    name: String,
    unit: Unit,
    /// The number of steps, tokens or requests that took `time`.
    count: f64,
    time: Duration,
    /// Seconds by which the slowest run exceeded the fastest.
    spread: f64,
    runs: Vec<f64>,
}

fn longest(runs: &[f64]) -> f64 {
    runs.iter().copied().fold(0.0, f64::max)
}

impl Bench {
    async fn run(&mut self, options: &Options) -> Result<(), Failure> {
        let warm = Prompts { count: self.fits.sequences.min(8), length: 32 };
        self.bar.set_message("nothing: warming up");
        self.meter.text(warm, 8).await?;
        let workload = self.workload;
        if options.wants(Measurement::Decode) {
            for &batch in workload.batches {
                self.decode(batch).await?;
            }
        }
        if options.wants(Measurement::Prefill) {
            for &prompts in workload.prefill {
                self.prefill(prompts).await?;
            }
        }
        if options.wants(Measurement::Pictures) {
            for pictures in &workload.pictures {
                for &reply in pictures.replies {
                    self.pictures(pictures, reply).await?;
                }
            }
        }
        Ok(())
    }

    /// Measures the time of a decode step. From the time of long replies, subtracts the time of
    /// one-token replies, and divides the difference by the number of steps.
    async fn decode(&mut self, batch: usize) -> Result<(), Failure> {
        let Workload { context, steps, .. } = self.workload;
        let mut id = format!("decode_{batch}");
        let mut name = format!("decode, a step of batch {batch} at {context} to {}", context + steps);
        if let Some(rate) = self.draft_acceptance {
            // Steps have different numbers of tokens, so only the time for each token is measured.
            id = format!("{id}_accepted_{rate}");
            name = format!("decode, a token of batch {batch} at {context} to {}, {rate} accepted", context + steps);
        }
        let prompts = Prompts { count: batch, length: context };
        if let Err(reason) = self.fits.together(prompts, steps + 1) {
            self.leave_out(id, name, reason);
            return Ok(());
        }
        self.bar.set_message(name.clone());
        let (short, mut runs) = self.fastest(prompts, 1).await?;
        let (long, more) = self.fastest(prompts, steps + 1).await?;
        let of_long = longest(&more) - long.time.as_secs_f64();
        runs.extend(more);
        let Some(time) = long.time.checked_sub(short.time).filter(|time| !time.is_zero()) else {
            let reason = "long replies took no longer than one-token replies, so the time of a step is unknown";
            self.leave_out(id, name, reason.to_owned());
            return Ok(());
        };
        let work = self.plan(|planner| {
            let step = planner.decode(batch, context + steps / 2)?;
            Ok(step.repeat(steps))
        })?;
        self.add_row(
            Measured { id, name, unit: Unit::Milliseconds, count: steps as f64, time, spread: of_long, runs },
            &work,
        );
        Ok(())
    }

    async fn prefill(&mut self, prompts: Prompts) -> Result<(), Failure> {
        let Prompts { count, length } = prompts;
        let (id, name) = (format!("prefill_{count}x{length}"), format!("prefill, {count} prompts of {length} tokens"));
        if let Err(reason) = self.fits.each(length, 1) {
            self.leave_out(id, name, reason);
            return Ok(());
        }
        self.bar.set_message(name.clone());
        let (fastest, runs) = self.fastest(prompts, 1).await?;
        let work = self.plan(|planner| planner.prefill(count, length))?;
        let (tokens, time) = ((count * length) as f64, fastest.time);
        let spread = longest(&runs) - time.as_secs_f64();
        self.add_row(Measured { id, name, unit: Unit::TokensPerSecond, count: tokens, time, spread, runs }, &work);
        Ok(())
    }

    async fn pictures(&mut self, pictures: &PictureLoad, reply: usize) -> Result<(), Failure> {
        let PictureLoad { count, width, height, .. } = *pictures;
        let id = format!("pictures_{count}x{width}x{height}_{reply}");
        let plural = if reply == 1 { "" } else { "s" };
        let name = format!("{count} requests with a picture of {width} x {height}, {reply} token{plural} out");
        let picture = match self.fits.picture(width, height, reply) {
            Ok(picture) => picture,
            Err(reason) => {
                self.leave_out(id, name, reason);
                return Ok(());
            }
        };
        self.bar.set_message(name.clone());
        let prompt_tokens = self.meter.pictures(pictures, reply).await?.prompt_tokens;
        let mut times = Vec::new();
        for _ in 0..PICTURE_RUNS {
            times.push(self.meter.pictures(pictures, reply).await?.time);
        }
        let runs = times.iter().map(Duration::as_secs_f64).collect();
        times.sort();
        let work = self.plan(|planner| {
            let mut work = planner.encode(count * picture.pictures(), picture.each())?;
            work.extend(planner.prefill(count, prompt_tokens)?);
            let step = planner.decode(count, prompt_tokens + reply / 2)?;
            work.extend(step.repeat(reply - 1));
            Ok(work)
        })?;
        let (time, spread) = (times[PICTURE_RUNS / 2], (times[PICTURE_RUNS - 1] - times[0]).as_secs_f64());
        let count = count as f64;
        self.add_row(Measured { id, name, unit: Unit::RequestsPerSecond, count, time, spread, runs }, &work);
        Ok(())
    }

    /// Returns the fastest of several runs, and the seconds of each run.
    async fn fastest(&mut self, prompts: Prompts, reply: usize) -> Result<(Run, Vec<f64>), Failure> {
        let mut fastest = self.meter.text(prompts, reply).await?;
        let mut runs = vec![fastest.time.as_secs_f64()];
        for _ in 1..TEXT_RUNS {
            let run = self.meter.text(prompts, reply).await?;
            runs.push(run.time.as_secs_f64());
            if run.time < fastest.time {
                fastest = run;
            }
        }
        Ok((fastest, runs))
    }

    fn plan(&self, plan: impl FnOnce(&Planner) -> Result<Vec<Work>, KernelError>) -> Result<Vec<Work>, Failure> {
        plan(&self.planner).map_err(|error| Failure {
            error: error.to_string(),
            hint: "this is a bug in Bursar; please report it with the model".to_owned(),
        })
    }

    /// Records a figure with the roofline bound of its passes.
    fn add_row(&mut self, measured: Measured, passes: &[Work]) {
        let Measured { id, name, unit, count, time, spread, runs } = measured;
        let lower_is_better = unit == Unit::Milliseconds;
        let figure = |seconds: f64| if lower_is_better { 1e3 * seconds / count } else { count / seconds };
        let seconds = time.as_secs_f64();
        let floor = self.report.rates.as_ref().map(|rates| rates.floor_seconds(passes));
        let roofline = floor.map(|floor| Roofline { bound: figure(floor), share: floor / seconds });
        let work = PlannedWork {
            flops: passes.iter().map(|work| work.flops).sum(),
            quantized_flops: passes.iter().map(|work| work.quantized_flops).sum(),
            bytes: passes.iter().map(|work| work.bytes).sum(),
        };
        let value = figure(seconds);
        let spread = Some(spread / seconds);
        self.add(Figure { id, name, value, unit, lower_is_better, runs, spread, work: Some(work), roofline });
    }

    fn add(&mut self, figure: Figure) {
        self.say(&figure);
        self.report.figures.push(figure);
    }

    fn leave_out(&mut self, id: String, name: String, reason: String) {
        let left_out = LeftOut { id, name, reason };
        self.say(&left_out);
        self.report.left_out.push(left_out);
    }

    fn say(&self, line: &impl Display) {
        if self.is_text {
            self.bar.suspend(|| println!("{line}"));
        }
    }
}
