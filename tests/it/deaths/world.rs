//! A device, a runtime under a user's supervisor, a model that gets the faults, and a second model
//! that gets no faults.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    time::Duration,
};

use bursar::{
    Chat, Class, DeviceChoice, HostDevice, Intensity, LoadOptions, ModelHandle, ModelSource, Progress, Runtime,
    RuntimeConfig, RuntimeError, Snapshot,
    ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent},
};
use tokio::{sync::OnceCell, task::JoinHandle};

use super::faults::Moment;
use crate::stage::{Whole, about, ask, device, placed, small};

/// Name of the model that gets the faults.
pub const FAULTED: &str = "faulted";
/// Name of the other model.
pub const OTHER_MODEL: &str = "other_model";

pub struct World {
    pub device: Arc<HostDevice>,
    pub runtime: Runtime,
    pub other_model: ModelHandle,
    /// The model that gets the faults, once it is loaded.
    pub faulted: Option<ModelHandle>,
}

/// A supervisor that survives the death of its children.
struct Guard;

impl Actor for Guard {
    type Msg = ();
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<()>,
        _: SupervisionEvent,
        (): &mut (),
    ) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

/// An intensity without a crash loop limit and without waits.
fn patient() -> Intensity {
    Intensity { restarts_max: 10_000, back_off: Duration::ZERO, ..Intensity::default() }
}

pub fn options(name: &str) -> LoadOptions {
    LoadOptions { name: Some(name.to_owned()), intensity: patient(), engine_intensity: patient(), ..small() }
}

/// A long chat whose text repeats after a restart only if the random sequence is continued.
pub fn long(number: usize) -> Chat {
    let seed = number as u64;
    about(number as u32).max_tokens(60).temperature(9.0).top_k(0).top_p(1.0).seed(seed)
}

/// The reply to a long chat without faults. The reply does not depend on the world.
pub async fn expected(number: usize) -> &'static Whole {
    static EXPECTED: OnceCell<Vec<Whole>> = OnceCell::const_new();
    let ask_all = async || {
        let runtime = crate::stage::runtime_on(&device()).await;
        let model = crate::stage::demo(&runtime, small()).await;
        let mut replies = Vec::new();
        for number in 0..4 {
            replies.push(ask(&model, long(number)).await.expect("an undisturbed reply"));
        }
        replies
    };
    &EXPECTED.get_or_init(ask_all).await[number]
}

impl World {
    pub async fn on(device: Arc<HostDevice>) -> World {
        let (guard, _) = Guard::spawn(None, Guard, ()).await.expect("the actor starts");
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(placed(&device)),
            budget_intensity: patient(),
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start_linked(config, guard.get_cell()).await.expect("a host device starts");
        let other_model =
            runtime.load_with(ModelSource::demo(), options(OTHER_MODEL), |_| {}).await.expect("the model starts");
        World { device, runtime, other_model, faulted: None }
    }

    pub async fn engine(&self, name: &str) -> ActorCell {
        self.runtime.supervised().await.expect("the runtime answers").engines[name].clone()
    }

    pub async fn snapshot(&self) -> Snapshot {
        self.runtime.budget().snapshot().await.expect("the budget answers")
    }

    /// The model that gets the faults, loaded if needed.
    pub async fn faulted(&mut self) -> ModelHandle {
        if self.faulted.is_none() {
            let loaded = self.runtime.load_with(ModelSource::demo(), options(FAULTED), |_| {}).await;
            self.faulted = Some(loaded.expect("the model starts"));
        }
        self.faulted.clone().expect("the model was loaded above")
    }

    /// Begins to load the model that gets the faults, and pauses in the middle of `moment`.
    pub async fn load_until(&self, moment: Moment) -> HeldLoad {
        let (reached, mut at_moment) = tokio::sync::mpsc::channel::<()>(1);
        let (release, released) = sync_channel::<()>(1);
        let (begun, passes) = (Arc::new(AtomicUsize::new(0)), AtomicUsize::new(0));
        let released = std::sync::Mutex::new(released);
        let (loads, last) = (begun.clone(), AtomicU64::new(u64::MAX));
        let watch = move |progress: Progress| {
            let here = match progress {
                Progress::Loading { done, .. } => {
                    // Progress that does not increase belongs to a new attempt.
                    let begins = last.swap(done.0, Ordering::SeqCst) >= done.0;
                    loads.fetch_add(usize::from(begins), Ordering::SeqCst);
                    moment == Moment::Loading
                }
                // After the first worst case: workspaces are leased and a lane has worked.
                Progress::Profiling { done, .. } => moment == Moment::Profiling && done >= 1,
                _ => false,
            };
            if here && passes.fetch_add(1, Ordering::SeqCst) == 0 {
                reached.try_send(()).expect("the moment is reported once");
                // Waits until the fault has taken effect, or until the test has failed
                // and dropped the sender.
                let _ = tokio::task::block_in_place(|| released.lock().expect("no panic").recv());
            }
        };
        let runtime = self.runtime.clone();
        let load = async move { runtime.load_with(ModelSource::demo(), options(FAULTED), watch).await };
        let loading = tokio::spawn(load);
        at_moment.recv().await.expect("the moment comes");
        HeldLoad { loading, release, loads: begun }
    }
}

/// A load that is paused.
pub struct HeldLoad {
    loading: JoinHandle<Result<ModelHandle, RuntimeError>>,
    release: SyncSender<()>,
    /// The number of times that copying of weights began.
    pub loads: Arc<AtomicUsize>,
}

impl HeldLoad {
    /// Resumes the load and waits for its result.
    pub async fn go_on(self) -> Result<ModelHandle, RuntimeError> {
        self.release.send(()).expect("the paused load receives the signal");
        self.loading.await.expect("no panic")
    }
}

/// The lease of a model's weights.
pub fn weights_of(ledger: &Snapshot, model: &str) -> Option<bursar_budgets::LeaseId> {
    let mut lines = ledger.leases.iter();
    let of_model = lines.find(|line| line.class == Class::Weights && line.model.to_string() == model);
    of_model.map(|line| line.id)
}
