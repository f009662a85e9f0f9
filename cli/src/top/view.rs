//! Pure: the view, computed from scrapes.

mod device;
mod model;

use serde::Serialize;

pub use self::{
    device::{DeviceView, GpuView, LeaseView, MemoryPart, Piece},
    model::{Cache, Kv, Latency, ModelState, ModelView, Speed},
};
use super::{
    event::Event,
    rate::Since,
    samples::{Labels, Samples, Series},
    scrape::{Events, Scrape},
};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct View {
    pub devices: Vec<DeviceView>,
    pub models: Vec<ModelView>,
    /// Actors that do not belong to a model.
    pub actors: Vec<Actor>,
    pub events: Vec<Event>,
    /// The reason why there are no events, if any.
    pub no_events: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Actor {
    pub actor: String,
    pub is_up: bool,
    /// Number of times that the actor was restarted.
    pub restarts: u64,
}

/// A count by reason, phase or class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Count {
    /// The reason, phase or class.
    pub of: String,
    pub count: u64,
}

/// A scrape, and the earlier scrapes that it is compared with.
#[derive(Clone, Copy, Debug)]
pub struct ScrapeWindow<'a> {
    pub now: &'a Samples,
    /// The scrape before it, for rates.
    pub last: Option<Since<'a>>,
    /// A scrape about a minute older, for quantiles and shares.
    pub minute: Option<Since<'a>>,
}

impl View {
    /// Computes the view of `scrape`, given earlier scrapes.
    pub fn of(scrape: &Scrape, last: Option<Since<'_>>, minute: Option<Since<'_>>) -> Self {
        let look = ScrapeWindow { now: &scrape.samples, last, minute };
        let (events, no_events) = match &scrape.events {
            Events::Told(events) => (events.clone(), None),
            Events::NotTold => (Vec::new(), Some("this process does not serve events".to_owned())),
            Events::Unreadable(why) => (Vec::new(), Some(why.clone())),
        };
        View {
            devices: DeviceView::all(look),
            models: ModelView::all(look),
            actors: Actor::of_runtimes(look.now),
            events,
            no_events,
        }
    }
}

impl Actor {
    /// Returns each runtime and its budget. If there are several runtimes, the names include the
    /// device.
    fn of_runtimes(now: &Samples) -> Vec<Self> {
        // A runtime does not restart, so it has no counter.
        let of = |actor: &str, name: &str, restarts: Option<&str>| -> Vec<Self> {
            let are_several = now.of(name, &[]).count() > 1;
            let one = |series: &Series| {
                let device = series.label("device");
                let restarts = restarts.and_then(|restarts| now.count(restarts, &[("device", device)])).unwrap_or(0);
                let actor = if are_several { format!("{actor} {device}") } else { actor.to_owned() };
                Actor { actor, is_up: series.value > 0.0, restarts }
            };
            let mut all: Vec<_> = now.of(name, &[]).map(one).collect();
            all.sort_by(|one, other| one.actor.cmp(&other.actor));
            all
        };
        let runtimes = of("runtime", "bursar_runtime_up", None);
        [runtimes, of("budget", "bursar_budget_up", Some("bursar_budget_restarts_total"))].concat()
    }

    /// Returns the actors of a model, from the top of its supervision tree down.
    fn of(now: &Samples, model: &str) -> Vec<Self> {
        const ORDER: [&str; 5] = ["engine", "profile", "vision", "kv", "scheduler"];
        let mut actors: Vec<_> = now
            .of("bursar_actor_up", &[("model", model)])
            .map(|series| {
                let actor = series.label("actor").to_owned();
                let restarts = now.count("bursar_restarts_total", &[("model", model), ("actor", &actor)]);
                Actor { is_up: series.value > 0.0, restarts: restarts.unwrap_or(0), actor }
            })
            .collect();
        let place = |actor: &Actor| ORDER.iter().position(|name| *name == actor.actor).unwrap_or(ORDER.len());
        actors.sort_by(|one, other| place(one).cmp(&place(other)).then_with(|| one.actor.cmp(&other.actor)));
        actors
    }
}

/// Returns counts by the values of a label, without zeros, the highest first.
fn counts(now: &Samples, name: &str, labels: Labels<'_>, by: &str) -> Vec<Count> {
    let all = now.of(name, labels).map(|series| Count { of: series.label(by).to_owned(), count: series.value as u64 });
    let mut all: Vec<_> = all.filter(|tally| tally.count > 0).collect();
    all.sort_by(|one, other| other.count.cmp(&one.count).then_with(|| one.of.cmp(&other.of)));
    all
}

#[cfg(test)]
mod tests;
