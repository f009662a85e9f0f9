//! Pure: the view, computed from scrapes.

mod device;
mod model;
mod window;

use serde::Serialize;

pub use self::{
    device::{DeviceView, GpuView, LeaseView, MemoryPart, Piece},
    model::{Cache, Kv, Latency, ModelState, ModelView, Speed},
    window::{Actor, Count, ScrapeWindow},
};
use super::{
    event::Event,
    rate::Since,
    samples::{Samples, Series},
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

impl View {
    /// Computes the view of `scrape`, given earlier scrapes.
    pub fn of(scrape: &Scrape, last: Option<Since<'_>>, minute: Option<Since<'_>>) -> Self {
        let look = ScrapeWindow { now: &scrape.samples, last, minute };
        let (events, no_events) = match &scrape.events {
            Events::Listed(events) => (events.clone(), None),
            Events::Unavailable => (Vec::new(), Some("this process does not serve events".to_owned())),
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
    /// The actors of a model, from the top of its supervision tree down.
    const OF_A_MODEL: [&str; 4] = ["engine", "profile", "vision", "scheduler"];

    /// The actors that run only while a model is ready.
    const SERVING: [&str; 2] = ["vision", "scheduler"];

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

    /// Returns the actors of a model in the order of [`Actor::OF_A_MODEL`], and then actors with
    /// other names, which a process of another version may have.
    fn of(now: &Samples, model: &str) -> Vec<Self> {
        let mut actors: Vec<_> = now
            .of("bursar_actor_up", &[("model", model)])
            .map(|series| {
                let actor = series.label("actor").to_owned();
                let restarts = now.count("bursar_restarts_total", &[("model", model), ("actor", &actor)]);
                Actor { is_up: series.value > 0.0, restarts: restarts.unwrap_or(0), actor }
            })
            .collect();
        let order = Actor::OF_A_MODEL;
        let place = |actor: &Actor| order.iter().position(|name| *name == actor.actor).unwrap_or(order.len());
        actors.sort_by(|one, other| place(one).cmp(&place(other)).then_with(|| one.actor.cmp(&other.actor)));
        actors
    }
}

#[cfg(test)]
mod tests;
