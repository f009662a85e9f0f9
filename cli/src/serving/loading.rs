//! Loading of the models of `bursar serve` while the server already listens. Models that share a
//! device load one after another.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use bursar::{LoadOptions, ModelSource, Placement, Progress, Runtime};
use bursar_serve::{ModelState, Service};
use futures_util::future::join_all;
use indicatif::MultiProgress;

use super::options::{Options, Wanted};
use crate::{
    DeviceOptions,
    failure::{self, Failure},
    hub, logging,
    progress::Bar,
};

/// One model to load.
pub struct Plan {
    source: ModelSource,
    options: LoadOptions,
    names: Vec<String>,
    /// The model's own name, which clients may use as an alias. `Some` only if `names` contains the
    /// model as typed on the command line.
    alias: Option<String>,
}

impl Plan {
    /// Returns the model's source and load options.
    pub fn model(&self) -> (ModelSource, LoadOptions) {
        (self.source.clone(), self.options.clone())
    }

    /// Returns the first of the names that clients use.
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    /// Registers the model with the service as loading, so that clients can see it.
    pub fn announce(&self, service: &Service) {
        service.set(self.names.clone(), ModelState::Loading("waiting to start".into()));
        if let Some(alias) = &self.alias {
            service.alias(alias, self.name());
        }
    }
}

/// Returns the source, options and names of each model, before models are placed on devices.
pub fn plans(wanted: Vec<Wanted>, serving: &Options, device: &DeviceOptions) -> Result<Vec<Plan>, Failure> {
    let ranks = device.ranks_of_each(wanted.len())?;
    let plans = wanted.into_iter().zip(ranks).map(|(wanted, ranks)| {
        let source = serving.source(&wanted.model);
        let base = LoadOptions { blas: device.blas(), profiles: device.profiles(), ..LoadOptions::default() };
        let mut options = serving.load(hub::used_by(serving.knobs().over(base)?))?;
        let is_named = options.name.is_some();
        let own = wanted.names.first().cloned().or(options.name).unwrap_or_else(|| source.name());
        (options.name, options.ranks) = (Some(own.clone()), ranks);
        // If the user gave no name, clients use the model as typed on the command line, as in vLLM.
        let (names, alias) = if !wanted.names.is_empty() {
            (wanted.names, None)
        } else if is_named || own == wanted.model {
            (vec![own], None)
        } else {
            (vec![wanted.model], Some(own))
        };
        Ok(Plan { source, options, names, alias })
    });
    let plans: Vec<Plan> = plans.collect::<Result<_, Failure>>()?;
    let mut seen = BTreeSet::new();
    match plans.iter().flat_map(|plan| &plan.names).find(|name| !seen.insert(*name)) {
        None => Ok(plans),
        Some(name) => Err(Failure {
            error: format!("two models are named {name}"),
            hint: "give each model a different name with `--name`".to_owned(),
        }),
    }
}

/// Assigns the models to their runtimes. Models that share a device and set no option for their
/// size get equal shares of the memory that is left. With `in_turn`, the other models sleep while
/// one model is awake, so each model may use all of that memory.
pub fn placed(
    plans: Vec<Plan>,
    runtimes: &[Runtime],
    placed: &[Placement],
    in_turn: bool,
) -> Vec<(Runtime, Vec<Plan>)> {
    let mut plans: Vec<_> = plans.into_iter().map(Some).collect();
    let of = |(runtime, Placement { models, .. }): (&Runtime, &Placement)| {
        let one = |(before, model): (usize, &usize)| {
            let mut plan = plans[*model].take().expect("a model is placed once");
            let (options, others) = (&mut plan.options, models.len() - 1 - before);
            let is_sized = options.memory_fraction.is_some()
                || options.device_fraction.is_some()
                || options.kv_tokens.is_some()
                || options.kv_bytes.is_some();
            if !is_sized && !in_turn && others > 0 {
                options.memory_fraction = Some(1.0 / (others + 1) as f64);
            }
            plan
        };
        (runtime.clone(), models.iter().enumerate().map(one).collect())
    };
    let placed = runtimes.iter().zip(placed).map(of).collect();
    assert!(plans.iter().all(Option::is_none), "each model was assigned to a runtime");
    placed
}

/// Loads the models of each runtime one after another, and the runtimes in parallel. Reports
/// progress to the service. A model that cannot be loaded is reported, and the other models are
/// served.
///
/// # Errors
/// No model could be loaded. With a single model, the failure is the model's error. With several
/// models, the failure refers to the errors that were printed.
pub async fn load_all(service: Service, plans: Vec<(Runtime, Vec<Plan>)>) -> Result<(), Failure> {
    let count: usize = plans.iter().map(|(_, plans)| plans.len()).sum();
    let (bars, are_several) = (MultiProgress::new(), plans.len() > 1);
    let in_turn = async |(runtime, plans): (Runtime, Vec<Plan>)| {
        let mut failed = Vec::new();
        for plan in plans {
            let name = plan.names.join(", ");
            let bar = if are_several { Bar::among(&bars, &name) } else { Bar::new(true) };
            match load(&service, &runtime, plan, bar).await {
                Ok(()) => bars.suspend(|| logging::note(format_args!("ready: {name}"))),
                Err(mut failure) => {
                    if count > 1 {
                        failure.error = format!("{name} failed to load: {}", failure.error);
                        bars.suspend(|| failure::print(&failure));
                    }
                    failed.push((name, failure));
                }
            }
        }
        failed
    };
    let mut failed: Vec<_> = join_all(plans.into_iter().map(in_turn)).await.into_iter().flatten().collect();
    if failed.len() < count {
        if !failed.is_empty() {
            let names = failed.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ");
            logging::note(format_args!("warning: these models failed to load: {names}; the other models are served"));
        }
        return Ok(());
    }
    Err(match failed.pop() {
        Some((_, failure)) if count == 1 => failure,
        _ => Failure {
            error: format!("none of the {count} models could be loaded"),
            hint: "see the errors above, which say what to change for each model".to_owned(),
        },
    })
}

/// Loads a model and adds it to the service. During the load, the service shows the progress.
async fn load(service: &Service, runtime: &Runtime, plan: Plan, bar: Bar) -> Result<(), Failure> {
    let Plan { source, options, names, .. } = plan;
    let (shown, loading) = (service.clone(), names.clone());
    // The last shown text, or `None` once the model is loaded. Progress also arrives during later
    // starts, after a crash or a sleep. During these starts, the service must not show the model as
    // loading for the first time.
    let last = Arc::new(Mutex::new(Some(String::new())));
    let shown_last = last.clone();
    let on_progress = move |progress: Progress| {
        let mut last = shown_last.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = &mut *last else { return };
        if let Some(now) = described(&progress).filter(|now| now != last) {
            shown.set(loading.clone(), ModelState::Loading(now.as_str().into()));
            *last = now;
        }
        bar.show(progress);
    };
    match runtime.load_with(source, options, on_progress).await {
        Ok(model) => {
            last.lock().unwrap_or_else(PoisonError::into_inner).take();
            service.add(names, model);
            Ok(())
        }
        Err(error) => {
            let failure = Failure::from(error);
            service.set(names, ModelState::Failed(failure.error_and_hint().0.as_str().into()));
            Err(failure)
        }
    }
}

/// Describes the current activity in words, with its progress in percent.
fn described(progress: &Progress) -> Option<String> {
    let share = |done: u64, total: u64| done.saturating_mul(100).checked_div(total).unwrap_or(0);
    match progress {
        Progress::Fetching { file, done, total } => Some(format!("fetching {file}: {} %", share(done.0, total.0))),
        Progress::Planning => Some("planning the worst cases".to_owned()),
        Progress::Loading { done, total } => Some(format!("loading weights: {} %", share(done.0, total.0))),
        Progress::Profiling { what, done, total, .. } => {
            Some(format!("{what}: {} %", share(*done as u64, *total as u64)))
        }
        Progress::Phase(_) | Progress::Attempt(_) | Progress::Notice(_) | Progress::Ready => None,
    }
}
