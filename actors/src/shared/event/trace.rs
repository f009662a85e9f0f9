//! Events as `tracing` spans. A lease has a span from its grant to its end. A restart has a span
//! from the death until the successors serve. Spans cost nothing without a subscriber.

use std::collections::BTreeMap;

use bursar_budgets::{Label, LeaseId};
use tracing::{Span, info, info_span, warn};

use super::{Event, Leased};
use crate::metric::DeviceLabel;

/// The `tracing` target of all events except lease events. Log filters use this name, so the name
/// must not change when this module moves.
const EVENTS: &str = "bursar_actors::event";
/// The `tracing` target of lease events, so that a log filter can leave them out.
const LEASES: &str = "bursar_actors::event::lease";

#[derive(Default)]
pub(super) struct Spans {
    leases: BTreeMap<LeaseId, Span>,
    /// Spans of deaths from which a model, or the runtime's own actors (`None`), have not recovered
    /// yet.
    restarts: BTreeMap<Option<Label>, Vec<Span>>,
}

impl Spans {
    pub(super) fn on_event(&mut self, event: &Event) {
        match event {
            Event::LeaseGranted(leased) => {
                let Leased { lease, model, class, bytes } = leased;
                let span = info_span!(target: LEASES, "lease", lease = lease.0, %model, class = class.label(), granted_bytes = bytes.0);
                span.in_scope(|| info!(target: LEASES, "granted"));
                self.leases.insert(*lease, span);
            }
            Event::LeaseResized { lease, from, to, .. } => {
                self.in_lease(*lease, || info!(target: LEASES, from = from.0, to = to.0, "resized"));
            }
            Event::LeaseRevoked(leased) => self.in_lease(leased.lease, || info!(target: LEASES, "revoked")),
            Event::LeaseFreed(leased) => {
                self.in_lease(leased.lease, || info!(target: LEASES, "freed"));
                self.leases.remove(&leased.lease);
            }
            Event::LeaseRefused { model, class, bytes, reason } => {
                warn!(target: EVENTS, %model, class = class.label(), bytes = bytes.0, %reason, "lease refused");
            }
            Event::CanaryGiven { bytes, card } => {
                warn!(target: EVENTS, bytes = bytes.0, card = card.as_ref().map(DeviceLabel::as_str), "canary given up");
            }
            Event::CanaryTaken { bytes } => info!(target: LEASES, bytes = bytes.0, "canary taken"),
            Event::Shrink { model, from_blocks, to_blocks, card } => {
                info!(target: EVENTS, %model, from_blocks, to_blocks, card = card.as_ref().map(DeviceLabel::as_str), "shrink");
            }
            Event::Growth { model, from_blocks, to_blocks } => {
                info!(target: EVENTS, %model, from_blocks, to_blocks, "growth")
            }
            Event::Oom { model, phase } => warn!(target: EVENTS, %model, phase, "memory refused by the device"),
            Event::Restart { model, actor, reason } => {
                let name = model.as_ref().map_or("", Label::as_str);
                let span = info_span!(target: EVENTS, "restart", model = name, actor);
                span.in_scope(|| warn!(target: EVENTS, %reason, "died"));
                self.restarts.entry(model.clone()).or_default().push(span);
            }
            Event::RanksChosen { model, ranks, reason } => {
                info!(target: EVENTS, %model, ranks, %reason, "ranks chosen")
            }
            Event::Ready { model, kv_tokens } => {
                self.over(Some(model), || info!(target: EVENTS, "ready again"));
                info!(target: EVENTS, %model, kv_tokens, "ready");
            }
            Event::Failed { model, reason } => {
                self.over(Some(model), || {});
                warn!(target: EVENTS, %model, %reason, "start failed");
            }
            Event::Stopped { model, reason } => {
                self.over(Some(model), || {});
                info!(target: EVENTS, %model, %reason, "stopped");
            }
            Event::Asleep { model, level } => {
                self.over(Some(model), || {});
                info!(target: EVENTS, %model, level, "asleep");
            }
            Event::Awake { model } => info!(target: EVENTS, %model, "awake"),
            Event::NotWoken { model, reason } => {
                self.over(Some(model), || {});
                warn!(target: EVENTS, %model, %reason, "wake failed");
            }
            Event::DeviceLost { reason } => warn!(target: EVENTS, %reason, "device lost"),
        }
    }

    /// Ends the restart spans of the runtime's own actors, because all of them run again.
    pub(super) fn runtime_recovered(&mut self) {
        self.over(None, || info!(target: EVENTS, "running again"));
    }

    fn in_lease(&self, lease: LeaseId, tell: impl FnOnce()) {
        self.leases.get(&lease).unwrap_or(&Span::none()).in_scope(tell);
    }

    fn over(&mut self, model: Option<&Label>, tell: impl Fn()) {
        let spans = self.restarts.remove(&model.cloned()).unwrap_or_default();
        spans.iter().for_each(|span| span.in_scope(&tell));
    }
}
