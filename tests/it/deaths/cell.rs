//! A case of the table of deaths: its world, its fault, and the checks afterward.

use bursar_budgets::testing::HostControl;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bursar::{ChatError, HostDevice, ModelHandle, Reply, RuntimeError, StartError};
use tokio::task::JoinHandle;

use super::{
    faults::{Moment, Victim, Way, inject_fault},
    table::Outcome,
    world::{FAULTED, HeldLoad, OTHER_MODEL, World, expected, long, weights_of},
};
use crate::stage::{ask, at, device, eventually, listen};

/// Number of requests to the faulted model.
const STRUCK_CHATS: usize = 3;
/// Index of the chat that the other model gets. The faulted model gets the chats before it.
const OTHER_CHAT: usize = 3;

/// Runs the cells of a victim. A world that survives is used again, and a dead world is replaced.
pub async fn run_all(victim: Victim, cells: Vec<(Way, Moment, Outcome)>) {
    let mut world = None;
    let mut in_progress_at_fault = 0;
    // Several faults of a serving model can happen in one world, so the cells with such faults come
    // first.
    let is_start = |moment: Moment| matches!(moment, Moment::Loading | Moment::Profiling);
    let (starting, serving): (Vec<_>, Vec<_>) = cells.into_iter().partition(|(_, moment, _)| is_start(*moment));
    for (way, moment, outcome) in serving.into_iter().chain(starting) {
        let mut here = match world.take() {
            Some(world) => world,
            None => World::on(device()).await,
        };
        let case = Case { name: format!("{victim:?} by {way:?} while {moment:?}"), victim, way, moment };
        case.at("its moment", &here);
        match outcome {
            Outcome::GoesOn => {
                if is_start(moment) {
                    case.unload(&mut here).await;
                }
                let watch = LedgerWatch::begin(&here);
                in_progress_at_fault += if is_start(moment) {
                    case.goes_on_starting(&mut here).await
                } else {
                    case.goes_on_serving(&mut here).await
                };
                watch.end(&case.name).await;
                world = Some(here);
            }
            Outcome::Over => {
                let (in_progress, again) = case.is_over(here).await;
                in_progress_at_fault += in_progress;
                world = Some(again);
            }
            Outcome::Cannot(reason) => panic!("{}: {reason}", case.name),
        }
    }
    if let Some(World { runtime, device, .. }) = world {
        runtime.shutdown().await;
        assert_free(&device, "at the end").await;
    }
    assert!(in_progress_at_fault > 0, "no request was in progress when {victim:?} died, so nothing was tested");
}

struct Case {
    name: String,
    victim: Victim,
    way: Way,
    moment: Moment,
}

/// Requests in progress: several to the faulted model, and one to the other model.
struct UnderWay {
    replies: Vec<Reply>,
    other_model: Reply,
    /// The text of the first event, if the cell waits for one.
    received: String,
}

impl Case {
    /// Returns whether this fault ends an engine. The model is then sized again.
    fn ends_the_engine(&self) -> bool {
        self.victim == Victim::Engine || (self.way == Way::Supervisor && self.victim != Victim::Budget)
    }

    /// Records the step that the test has reached. The record keeps a `Budget` handle, which must
    /// not keep memory of a dead runtime alive.
    fn at(&self, place: &str, world: &World) {
        at(format!("{}, {place}", self.name), world.runtime.budget());
    }

    async fn ask(&self, faulted: Option<&ModelHandle>, other_model: &ModelHandle) -> UnderWay {
        let mut replies = Vec::new();
        if let (Some(model), Moment::Prefilling | Moment::Decoding) = (faulted, self.moment) {
            for number in 0..STRUCK_CHATS {
                replies.push(model.chat(long(number)).await.expect("accepted"));
            }
        }
        let other_model = other_model.chat(long(OTHER_CHAT)).await.expect("accepted");
        let mut received = String::new();
        if self.moment == Moment::Decoding {
            received.push_str(replies[0].next().await.expect("an event").expect("text").text());
        }
        UnderWay { replies, other_model, received }
    }

    /// Checks that every reply is the same as without the fault, with nothing repeated or lost.
    async fn all_as_expected(&self, under_way: UnderWay) {
        let case = &self.name;
        for (number, reply) in under_way.replies.into_iter().enumerate() {
            let whole = listen(reply).await.unwrap_or_else(|error| panic!("{case}, chat {number}: {error}"));
            let expected = expected(number).await;
            let received =
                if number == 0 { under_way.received.clone() } else { String::new() } + &whole.pieces.concat();
            assert_eq!(received, expected.text, "{case}, chat {number}: the pieces");
            assert_eq!(
                (whole.text, whole.finish_reason, whole.usage),
                (expected.text.clone(), expected.finish_reason, expected.usage),
                "{case}, chat {number}"
            );
        }
        let other_model =
            listen(under_way.other_model).await.unwrap_or_else(|error| panic!("{case}, the other model: {error}"));
        assert_eq!(other_model.text, expected(OTHER_CHAT).await.text, "{case}: the other model");
    }

    /// Returns the number of requests to the faulted model that were in progress when
    /// the fault took effect.
    async fn goes_on_serving(&self, world: &mut World) -> usize {
        let case = &self.name;
        let model = world.faulted().await;
        let before = world.snapshot().await;
        let (backs, generation) = (world.device.counts().backs, model.serving().await.expect("a model").generation);
        let other_generation = world.other_model.serving().await.expect("the model serves").generation;
        let under_way = self.ask(Some(&model), &world.other_model).await;
        inject_fault(world, FAULTED, self.victim, self.way).await;
        let in_progress = model.requests().0;
        self.at("all replies", world);
        self.all_as_expected(under_way).await;

        self.at("the next reply", world);
        // The next caller sees no error. A picture that is in no cache makes both lanes work.
        let fresh = 1000 + self.way as usize * 10 + self.moment as usize;
        ask(&model, long(fresh).max_tokens(4)).await.unwrap_or_else(|error| panic!("{case}: next request: {error}"));

        self.at("all is as before", world);
        let serving = model.serving().await.expect("the model serves");
        if self.victim != Victim::Budget {
            eventually("there is a successor", async || {
                model.serving().await.expect("the model serves").generation > generation
            })
            .await;
        } else {
            assert_eq!(serving.generation, generation, "{case}: the model keeps its generation");
        }
        let other_model = world.other_model.serving().await.expect("the model serves").generation;
        assert_eq!(other_model, other_generation, "{case}: no actor of the other model died");
        let after = world.snapshot().await;
        assert_eq!(weights_of(&after, FAULTED), weights_of(&before, FAULTED), "{case}: rule 10, the lease is kept");
        assert!(weights_of(&after, FAULTED).is_some());
        if self.ends_the_engine() {
            eventually("the same number of bytes is leased as before", async || {
                world.snapshot().await.granted == before.granted
            })
            .await;
        } else {
            assert_eq!(world.device.counts().backs, backs, "{case}: no memory was backed again");
            eventually("the ledger is as before", async || world.snapshot().await == before).await;
        }
        assert_eq!(world.device.counts().backed, before.granted, "{case}: all leased memory is backed");
        in_progress
    }

    /// Returns 1: one start was in progress when the fault took effect.
    async fn goes_on_starting(&self, world: &mut World) -> usize {
        let case = &self.name;
        let held = world.load_until(self.moment).await;
        let before = world.snapshot().await;
        let under_way = self.ask(None, &world.other_model).await;
        inject_fault(world, FAULTED, self.victim, self.way).await;
        let loads = held.loads.clone();
        self.at("its start continues", world);
        let model = held.go_on().await.unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(loads.load(Ordering::SeqCst), 1, "{case}: rule 10, weights are copied once");
        self.at("all replies", world);
        self.all_as_expected(under_way).await;
        assert!(!ask(&model, long(0).max_tokens(4)).await.expect(case).text.is_empty(), "{case}: the model serves");
        let after = world.snapshot().await;
        assert_eq!(weights_of(&after, FAULTED), weights_of(&before, FAULTED), "{case}: the weights keep their lease");
        assert!(weights_of(&after, FAULTED).is_some());
        assert_eq!(world.device.counts().backed, after.granted, "{case}: no memory of the dead actor is left");
        self.unload(world).await;
        1
    }

    /// Unloads the faulted model. All its bytes must be returned, including memory
    /// backed before the fault.
    async fn unload(&self, world: &mut World) {
        self.at("it unloads", world);
        world.faulted = None;
        world.runtime.unload(FAULTED).await.expect("the model unloads");
        let ledger = world.snapshot().await;
        assert!(ledger.leases.iter().all(|line| line.model.to_string() == OTHER_MODEL), "{}: {ledger}", self.name);
        assert_eq!(world.device.counts().backed, ledger.granted, "{}", self.name);
    }

    /// Checks that everything ends: each request with one event, each start with one result.
    /// Another runtime can then use the whole device.
    async fn is_over(&self, mut world: World) -> (usize, World) {
        let case = &self.name;
        let (mut model, mut held): (Option<ModelHandle>, Option<HeldLoad>) = (None, None);
        match self.moment {
            Moment::Loading | Moment::Profiling => held = Some(world.load_until(self.moment).await),
            _ => model = Some(world.faulted().await),
        }
        let UnderWay { mut replies, other_model, .. } = self.ask(model.as_ref(), &world.other_model).await;
        replies.push(other_model);
        inject_fault(&world, FAULTED, self.victim, self.way).await;
        let in_progress = model.as_ref().unwrap_or(&world.other_model).requests().0;
        self.at("its start ends", &world);
        if let Some(held) = held {
            match held.go_on().await.err().unwrap_or_else(|| panic!("{case}: the start fails")) {
                RuntimeError::Unanswered(_) => {}
                RuntimeError::Start(error) => {
                    assert!(matches!(*error, StartError::Stopped { .. }), "{case}: {error:?}");
                }
                error => panic!("{case}: {error:?}"),
            }
        }
        self.at("its replies end", &world);
        for reply in replies {
            match listen(reply).await {
                Ok(_) | Err(ChatError::Stopped { .. }) => {}
                Err(error) => panic!("{case}: {error:?}"),
            }
        }
        for model in model.iter().chain([&world.other_model]) {
            let error = ask(model, long(0)).await.expect_err(case);
            assert!(matches!(error, ChatError::Stopped { .. }), "{case}: {error:?}");
        }
        self.at("all is given back", &world);
        let (device, error) = (world.device.clone(), world.runtime.budget().snapshot().await.expect_err(case));
        assert!(!error.to_string().is_empty());
        drop((world, model));
        assert_free(&device, case).await;
        let again = World::on(device.clone()).await;
        assert_eq!(
            ask(&again.other_model, long(0)).await.expect(case).text,
            expected(0).await.text,
            "{case}: restarted"
        );
        (in_progress, again)
    }
}

async fn assert_free(device: &HostDevice, case: &str) {
    let what = format!("{case}: all memory and all addresses are given back");
    eventually(&what, async || {
        let counts = device.counts();
        counts.backed.is_zero() && counts.reservations == 0
    })
    .await;
}

/// Reads the ledger and the device repeatedly while actors die.
struct LedgerWatch {
    over: Arc<AtomicBool>,
    watching: JoinHandle<usize>,
}

impl LedgerWatch {
    fn begin(world: &World) -> LedgerWatch {
        let over = Arc::new(AtomicBool::new(false));
        let (is_over, budget, device) = (over.clone(), world.runtime.budget().clone(), world.device.clone());
        let watching = tokio::spawn(async move {
            let mut looks = 0;
            let mut pause = tokio::time::interval(Duration::from_millis(1));
            while !is_over.load(Ordering::Relaxed) {
                let backed = device.counts();
                let ledger = budget.snapshot().await.expect("the budget answers");
                let held = ledger.granted + ledger.overhead + ledger.foreign + ledger.canary;
                assert!(held <= ledger.total && ledger.deficit.is_zero(), "rule 1 holds: {ledger}");
                // Rule 11: a successor leases nothing while its predecessor still holds leases.
                let mut generations: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
                for line in ledger.leases.iter().filter(|line| line.class != bursar::Class::Host) {
                    generations.entry(line.owner.name.to_string()).or_default().insert(line.owner.generation);
                }
                for (owner, generations) in generations {
                    assert_eq!(generations.len(), 1, "rule 11: {owner} has leases of {generations:?}: {ledger}");
                }
                // The device and the ledger were each read twice. If nothing changed between the
                // two readings, backed bytes cannot exceed granted bytes.
                if device.counts() == backed && budget.snapshot().await.is_ok_and(|now| now == ledger) {
                    assert!(backed.backed <= ledger.granted, "{} are backed: {ledger}", backed.backed);
                }
                looks += 1;
                pause.tick().await;
            }
            looks
        });
        LedgerWatch { over, watching }
    }

    async fn end(self, case: &str) {
        self.over.store(true, Ordering::Relaxed);
        let looks = self.watching.await.unwrap_or_else(|error| panic!("{case}: {error}"));
        assert!(looks > 0, "{case}: the ledger was read at least once");
    }
}
