//! Events of a runtime: a listener can rebuild the ledger from them.

use bursar_budgets::testing::HostControl;
use std::collections::BTreeMap;

use bursar::{
    Bytes, Class, Event, Events, FaultInjection, LeaseId,
    messages::{BudgetMessage, SchedulerMessage},
};

use super::{FilledDevice, filling, watchful};
use crate::stage::{answer, demo, eventually, story, text};

/// The state of the leases according to the events.
#[derive(Default)]
struct Books {
    leases: BTreeMap<LeaseId, Bytes>,
    events: Vec<Event>,
    numbers: u64,
}

impl Books {
    fn record(&mut self, number: u64, event: Event) {
        assert!(self.numbers == 0 || number == self.numbers + 1, "event numbers are consecutive");
        self.numbers = number;
        match &event {
            Event::LeaseGranted(leased) => drop(self.leases.insert(leased.lease, leased.bytes)),
            Event::LeaseResized { lease, from, to, .. } => {
                assert_eq!(self.leases.insert(*lease, *to), Some(*from), "{event:?}");
            }
            Event::LeaseFreed(leased) => {
                assert_eq!(self.leases.remove(&leased.lease), Some(leased.bytes), "{event:?}");
            }
            _ => {}
        }
        self.events.push(event);
    }

    /// Reads events until `wanted` has happened.
    async fn until(&mut self, events: &mut Events, wanted: impl Fn(&Event) -> bool) {
        loop {
            let recorded = events.next().await.expect("the runtime goes on").expect("no event is missed");
            let is_wanted = wanted(&recorded.event);
            self.record(recorded.number, recorded.event);
            if is_wanted {
                return;
            }
        }
    }

    fn granted(&self) -> Bytes {
        self.leases.values().copied().sum()
    }
}

#[test]
fn a_listener_from_the_start_rebuilds_the_ledger_from_events() {
    story(async {
        let (device, runtime) = FilledDevice::empty(watchful()).await;
        let (mut events, mut books) = (runtime.events(), Books::default());
        let model = demo(&runtime, filling()).await;
        books.until(&mut events, |event| matches!(event, Event::Ready { .. })).await;
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!(books.granted(), ledger.granted, "{ledger}");
        let kv_tokens = model.serving().await.expect("the model serves").kv_tokens;
        assert_eq!(books.events.last(), Some(&Event::Ready { model: "demo".into(), kv_tokens }));

        // Another process takes memory and frees it.
        let filled = FilledDevice { device, runtime, model, before: ledger };
        filled.other_process_takes(Bytes::mib(4)).await;
        books.until(&mut events, |event| matches!(event, Event::CanaryGiven { .. })).await;
        books.until(&mut events, |event| matches!(event, Event::Shrink { .. })).await;
        filled.quiet().await;
        filled.device.foreign_gives_back(Bytes::mib(4));
        filled.regained().await;
        let is_whole = |event: &Event| matches!(event, Event::Growth { to_blocks, .. } if to_blocks * 16 == kv_tokens);
        books.until(&mut events, is_whole).await;
        assert_eq!(books.granted(), filled.before.granted);
        assert!(books.events.iter().any(|event| matches!(event, Event::CanaryTaken { .. })), "the canary fills first");

        // An actor dies.
        let serving = filled.model.serving().await.expect("the model serves");
        serving.scheduler.send_message(SchedulerMessage::InjectFault(FaultInjection::Panic)).expect("an actor");
        let is_its = |event: &Event| matches!(event, Event::Restart { actor: "scheduler", model: Some(_), .. });
        books.until(&mut events, is_its).await;
        books.until(&mut events, |event| matches!(event, Event::Ready { .. })).await;
        answer(&filled.model, text("Are you there?")).await;

        // The budget dies. Its successor keeps the same number of bytes free.
        let mut canary = filled.before.canary;
        for event in &books.events {
            match event {
                Event::CanaryTaken { bytes } => canary += *bytes,
                Event::CanaryGiven { bytes, .. } => canary -= *bytes,
                _ => {}
            }
        }
        assert_eq!(canary, filled.before.canary, "events add up to the size of the canary");
        let before = books.events.len();
        let supervised = filled.runtime.supervised().await.expect("the runtime answers");
        supervised.budget.send_message(BudgetMessage::InjectFault(FaultInjection::Panic)).expect("the budget lives");
        books.until(&mut events, |event| matches!(event, Event::Restart { actor: "budget", model: None, .. })).await;
        assert_eq!(filled.ledger().await, filled.before);

        // A lease asks for more bytes than exist.
        let refused = filled.runtime.budget().try_lease(Class::external("index"), Bytes::mib(24)).await;
        refused.expect_err("the device has less memory");
        books.until(&mut events, |event| matches!(event, Event::LeaseRefused { .. })).await;
        let names = books.events[before..].iter().map(Event::name).collect::<Vec<_>>();
        assert_eq!(names, ["restart", "lease_refused"]);

        // Everything ends.
        let FilledDevice { runtime, model, .. } = filled;
        runtime.unload("demo").await.expect("the model is unloaded");
        books.until(&mut events, |event| matches!(event, Event::Stopped { .. })).await;
        eventually("every lease ends", async || runtime.budget().leased_bytes().is_zero()).await;
        let recent = runtime.recent_events();
        assert_eq!(recent.last().map(|last| last.event.name()), Some("lease_freed"), "events stay after the unload");
        runtime.shutdown().await;
        drop(model);
        while let Some(recorded) = events.next().await {
            let recorded = recorded.expect("no event is missed");
            books.record(recorded.number, recorded.event);
        }
        assert!(books.leases.is_empty(), "{:?}", books.leases);
    });
}
