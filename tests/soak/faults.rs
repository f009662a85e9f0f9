//! Faults of a device and its models while chats run: actors die, another process takes all free
//! memory and frees it, a tenant leases memory, a model sleeps. A seed decides the order.

use bursar_budgets::testing::HostControl;
use std::{sync::Arc, time::Duration};

use bursar::{
    Bytes, Class, DeviceChoice, Envelope, FaultInjection, HostDevice, Intensity, LoadOptions, ModelHandle, ModelSource,
    Runtime, RuntimeConfig, RuntimeError, SleepError, SleepLevel, Snapshot, WatchOptions,
    messages::{BudgetMessage, EngineMessage, Responder, SchedulerMessage, VisionMessage},
};
use bursar_budgets::{CudaDevice, DeviceError};

use crate::{
    OTHER_PROCESS,
    load::Random,
    other_process::OtherProcess,
    stage::{device_of, eventually, small, small_envelope},
};

/// A request is given up after three deaths, so there are at most two deaths while
/// the same requests run.
const DEATHS: usize = 2;

/// Number of polls after which both ledgers are printed, if the current ledger still differs from
/// the earlier ledger.
const POLLS: usize = 500;

/// An intensity that allows any number of deaths.
const ANY_DEATHS: Intensity =
    Intensity { restarts_max: 1_000_000, within: Duration::from_secs(60), back_off: Duration::ZERO };

/// The number of faults of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultCounts {
    pub deaths: usize,
    pub other_processes: usize,
    pub tenants: usize,
    pub sleeps: usize,
    /// Sleeps that failed because requests did not end in time.
    pub busy: usize,
}

/// Waits between two faults, independently of the chats.
#[expect(clippy::disallowed_methods, reason = "no actor sleeps here, and no story waits for it")]
async fn pass(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// The device, and the other process that takes its memory.
enum TestDevice {
    Host(Arc<HostDevice>),
    Gpu(Arc<CudaDevice>, OtherProcess),
}

/// Two models on a device, with a host tier for the KV cache and for states.
pub struct FaultyRuntime {
    device: TestDevice,
    pub runtime: Runtime,
    pub models: Vec<ModelHandle>,
    random: Random,
    counts: FaultCounts,
}

impl FaultyRuntime {
    pub async fn begin(source: fn() -> ModelSource, seed: u64) -> FaultyRuntime {
        let device = device_of(Bytes::mib(48));
        let runtime = Self::runtime(DeviceChoice::Custom(device.clone())).await.expect("a host device starts");
        Self::on(TestDevice::Host(device), runtime, source, seed).await
    }

    /// Starts two models on the first GPU. Returns `None` if there is no GPU.
    pub async fn begin_on_a_gpu(seed: u64) -> Option<FaultyRuntime> {
        let runtime = match Self::runtime(DeviceChoice::Cuda(0)).await {
            Err(RuntimeError::Device(DeviceError::NoDevice { .. })) => return None,
            started => started.expect("a GPU starts"),
        };
        let device = runtime.device().as_cuda().expect("a GPU was asked for");
        let device = TestDevice::Gpu(device, OtherProcess::moves_in(OTHER_PROCESS));
        Some(Self::on(device, runtime, ModelSource::demo, seed).await)
    }

    async fn runtime(device: DeviceChoice) -> Result<Runtime, RuntimeError> {
        let every = match device {
            DeviceChoice::Cuda(_) => Duration::from_millis(50),
            _ => Duration::from_millis(2),
        };
        let config = RuntimeConfig {
            device,
            watch: WatchOptions { every, patience: every * 10 },
            host_bytes: Bytes::mib(128),
            budget_intensity: ANY_DEATHS,
            ..RuntimeConfig::default()
        };
        Runtime::start(config).await
    }

    async fn on(device: TestDevice, runtime: Runtime, source: fn() -> ModelSource, seed: u64) -> FaultyRuntime {
        let mut models = Vec::new();
        for name in ["first", "second"] {
            // The KV cache is too small for all chats: some wait, some are preempted, and blocks
            // are copied to the host and back.
            let options = LoadOptions {
                name: Some(name.to_owned()),
                envelope: Some(Envelope { context_tokens: 320, ..small_envelope() }),
                kv_tokens: Some(640),
                swap_space: Bytes::mib(4),
                requests: Some(24),
                intensity: ANY_DEATHS,
                engine_intensity: ANY_DEATHS,
                ..small()
            };
            models.push(runtime.load_with(source(), options, |_| {}).await.expect("the model starts"));
        }
        FaultyRuntime { device, runtime, models, random: Random(seed), counts: FaultCounts::default() }
    }

    pub fn counts(&self) -> FaultCounts {
        self.counts
    }

    pub async fn ledger(&self) -> Snapshot {
        self.runtime.budget().measure().await.expect("the budget answers")
    }

    /// Causes this many faults, one after another.
    pub async fn inject(&mut self, faults: usize) {
        let before = self.counts.deaths;
        for _ in 0..faults {
            let model = self.models[self.random.below(self.models.len())].clone();
            match self.random.below(8) {
                kind @ 0..4 if self.counts.deaths < before + DEATHS => self.kill(kind, &model).await,
                0..4 => {}
                4 | 5 => self.sleep(&model).await,
                6 => self.other_process().await,
                _ => {
                    let tenant = self.runtime.budget().try_lease(Class::external("index"), Bytes::kib(256)).await;
                    pass(1).await;
                    self.counts.tenants += usize::from(tenant.is_ok());
                }
            }
            let pause = self.random.below(12) as u64;
            pass(pause).await;
        }
    }

    async fn kill(&mut self, kind: usize, model: &ModelHandle) {
        let fault = [FaultInjection::Panic, FaultInjection::Fail][self.random.below(2)];
        let Ok(supervised) = self.runtime.supervised().await else { return };
        let serving = model.serving().await.expect("the model serves or sleeps");
        let sent = match kind {
            0 => supervised.budget.send_message(BudgetMessage::InjectFault(fault)).is_ok(),
            1 => {
                let facts = model.facts().await.expect("the facts are known");
                let engine = supervised.engines.get(&*facts.name);
                let sent = engine.is_some_and(|engine| engine.send_message(EngineMessage::InjectFault(fault)).is_ok());
                if sent {
                    // If another process took memory now, the new engine might not
                    // have enough to start.
                    model.serving_after(serving.generation).await.expect("the model starts again");
                }
                sent
            }
            // A sleeping model has no vision actor and no scheduler.
            2 => serving.vision.is_some_and(|vision| vision.send_message(VisionMessage::InjectFault(fault)).is_ok()),
            _ => serving.scheduler.send_message(SchedulerMessage::InjectFault(fault)).is_ok(),
        };
        self.counts.deaths += usize::from(sent);
    }

    async fn sleep(&mut self, model: &ModelHandle) {
        let level = [SleepLevel::Level1, SleepLevel::Level2][self.random.below(2)];
        // A slow model needs more time to end its requests.
        let within = Duration::from_millis((self.random.below(200) * [1, 10][self.random.below(2)]) as u64);
        match model.sleep(level, within).await {
            Ok(()) => self.counts.sleeps += 1,
            Err(SleepError::Busy { .. }) => self.counts.busy += 1,
            Err(error) => panic!("unexpected result of a sleep: {error:?}"),
        }
    }

    /// Another process takes all free memory several times and then frees it. Requests of a
    /// sleeping model wait until then.
    async fn other_process(&mut self) {
        for _ in 0..5 {
            let _taken = match &mut self.device {
                TestDevice::Host(device) => device.foreign_takes(Bytes::gib(1)),
                TestDevice::Gpu(_, other) => tokio::task::block_in_place(|| other.hold(Bytes::MAX)),
            };
            pass(3).await;
        }
        let _left = match &mut self.device {
            TestDevice::Host(device) => device.foreign_gives_back(Bytes::gib(1)),
            TestDevice::Gpu(_, other) => tokio::task::block_in_place(|| other.hold(Bytes::ZERO)),
        };
        self.counts.other_processes += 1;
    }

    /// Waits until no request holds anything, and the ledger has the bytes of
    /// `before` in every class.
    pub async fn settled(&self, before: &Snapshot) {
        for model in &self.models {
            model.wake().await.expect("the model wakes up");
        }
        // On a GPU the driver's own memory use varies by a few MiB. The driver also allocates the
        // memory of CUDA graphs, and allocates less if it still has free memory from other
        // allocations.
        let slack = match self.device {
            TestDevice::Host(_) => Bytes::ZERO,
            TestDevice::Gpu(..) => Bytes::mib(64),
        };
        let sums = |ledger: &Snapshot| {
            let others = ledger.classes.iter().filter(|line| slack.is_zero() || line.class != Class::Graphs);
            let classes: Vec<_> = others.map(|line| (line.class.clone(), line.bytes)).collect();
            (ledger.host_granted, ledger.canary, ledger.deficit, classes)
        };
        let mut looks = 0;
        eventually("every class has its bytes again", async || {
            let ledger = self.ledger().await;
            let backed = match &self.device {
                TestDevice::Host(device) => device.counts().backed,
                TestDevice::Gpu(device, _) => device.counts().backed,
            };
            looks += 1;
            if looks == POLLS {
                println!("not settled, {backed} backed: {ledger}\nbefore: {before}");
            }
            let apart = |one: Bytes, other: Bytes| one.max(other) - one.min(other);
            sums(&ledger) == sums(before)
                && apart(ledger.granted, before.granted) <= slack
                && apart(ledger.granted, backed) <= slack
                && apart(ledger.foreign, before.foreign) <= slack
        })
        .await;
        for model in &self.models {
            eventually("all blocks are free", async || {
                let serving = model.serving().await.expect("the model serves");
                let (reply, usage) = Responder::new();
                drop(serving.scheduler.send_message(SchedulerMessage::KvUse(reply)));
                usage.await.is_ok_and(|usage| usage.held == 0 && usage.blocks == serving.record.kv_blocks)
            })
            .await;
            // A cancelled request ends shortly after its caller has disconnected.
            eventually("all credits are free", async || model.requests().0 == 0).await;
        }
    }
}
