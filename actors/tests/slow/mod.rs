//! A device whose progress is controlled by the test.

use std::sync::{Arc, Condvar, Mutex};

use bursar_budgets::{Bytes, DeviceError};
use bursar_kernels::{
    Backend, Cpu, Graph, KernelError, Target,
    calls::{self, Arrival},
};

/// How far the device may progress, and a log of events.
#[derive(Default)]
pub struct Clock {
    pub state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub struct State {
    /// The number of downloads that have begun.
    launched: usize,
    /// The number of downloads that the device may complete.
    past: usize,
    /// `true` if the next download is refused, after all other work of its job was launched.
    refuses: bool,
    /// The number of waits for the completion of all work on the device.
    pub waits: usize,
    pub log: Vec<String>,
    /// The logits of each call of `sample`.
    pub logits: Vec<Vec<f32>>,
}

impl Clock {
    pub fn note(&self, what: String) {
        self.state.lock().expect("the lock is not poisoned").log.push(what);
        self.changed.notify_all();
    }

    pub fn let_past(&self, downloads: usize) {
        self.state.lock().expect("the lock is not poisoned").past = downloads;
        self.changed.notify_all();
    }

    pub fn refuse_next(&self) {
        self.state.lock().expect("the lock is not poisoned").refuses = true;
    }

    /// Waits until this many downloads have begun.
    pub fn launched(&self, downloads: usize) {
        self.until(|state| state.launched >= downloads);
    }

    pub fn until(&self, holds: impl Fn(&State) -> bool) {
        let state = self.state.lock().expect("the lock is not poisoned");
        drop(self.changed.wait_while(state, |state| !holds(state)).expect("the lock is not poisoned"));
    }

    pub fn log(&self) -> Vec<String> {
        self.state.lock().expect("the lock is not poisoned").log.clone()
    }
}

/// The CPU backend with delayed downloads. A download arrives when the clock allows the
/// device to complete it.
pub struct Slow {
    pub cpu: Cpu,
    pub clock: Arc<Clock>,
}

struct SlowArrival {
    number: usize,
    copied: Box<dyn Arrival>,
    clock: Arc<Clock>,
}

impl Arrival for SlowArrival {
    fn is_ready(&self) -> bool {
        self.number < self.clock.state.lock().expect("the lock is not poisoned").past
    }

    fn wait(self: Box<Self>, out: &mut [u8]) -> Result<(), KernelError> {
        let state = self.clock.state.lock().expect("the lock is not poisoned");
        drop(
            self.clock.changed.wait_while(state, |state| state.past <= self.number).expect("the lock is not poisoned"),
        );
        self.copied.wait(out)
    }
}

macro_rules! as_the_cpu {
    ($($op:ident: $call:ty,)*) => {
        $(fn $op(&self, call: $call) -> Result<(), KernelError> { self.cpu.$op(call) })*
    };
}

impl Backend for Slow {
    const COMPUTES: bool = true;

    fn target(&self) -> &Target {
        self.cpu.target()
    }

    fn download_later(&self, call: calls::DownloadLater<'_>) -> Result<Box<dyn Arrival>, KernelError> {
        let copied = self.cpu.download_later(call)?;
        let (number, refuses) = {
            let mut state = self.clock.state.lock().expect("the lock is not poisoned");
            state.launched += 1;
            (state.launched - 1, std::mem::take(&mut state.refuses))
        };
        self.clock.note(format!("launch {number}"));
        if refuses {
            let message = "there is no more".to_owned();
            return Err(DeviceError::HostRefused { asked: Bytes::kib(64), message }.into());
        }
        Ok(Box::new(SlowArrival { number, copied, clock: self.clock.clone() }))
    }

    fn copy_blocks(&self, call: calls::CopyBlocks<'_>) -> Result<Box<dyn calls::Copying>, KernelError> {
        self.cpu.copy_blocks(call)
    }

    fn wait_for_all(&self) -> Result<(), KernelError> {
        self.clock.state.lock().expect("the lock is not poisoned").waits += 1;
        self.clock.changed.notify_all();
        self.clock.until(|state| state.past >= state.launched);
        Ok(())
    }

    /// Capturing takes time, and returns no graph.
    fn capture(&self, _: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Option<Box<dyn Graph>>, KernelError> {
        self.clock.note("capture".to_owned());
        self.clock.until(|state| state.past > 0);
        Ok(None)
    }

    fn sample(&self, call: calls::Sample<'_>) -> Result<(), KernelError> {
        let (logits, count) = (call.logits.address().0 as *const f32, call.logits.shape().elements());
        // SAFETY: the op layer has checked that the tensor has `count` computed `f32` elements. The
        // CPU backend keeps them in host memory, and nothing writes to them during this call.
        let row = unsafe { std::slice::from_raw_parts(logits, count) }.to_vec();
        self.clock.state.lock().expect("the lock is not poisoned").logits.push(row);
        self.cpu.sample(call)
    }

    as_the_cpu! {
        upload: calls::Upload<'_>,
        download: calls::Download<'_>,
        embed: calls::Embed<'_>,
        rms_norm: calls::RmsNorm<'_>,
        rms_norm_add: calls::RmsNormAdd<'_>,
        layer_norm: calls::LayerNorm<'_>,
        linear: calls::Linear<'_>,
        route: calls::Route<'_>,
        gated_experts: calls::GatedExperts<'_>,
        add_experts: calls::AddExperts<'_>,
        all_reduce: calls::AllReduce<'_>,
        all_gather: calls::AllGather<'_>,
        best_of_ranks: calls::BestOfRanks<'_>,
        rotary: calls::Rotary<'_>,
        rotary_kv_write: calls::RotaryKvWrite<'_>,
        position_grid: calls::PositionGrid<'_>,
        patchify: calls::Patchify<'_>,
        fill_random: calls::FillRandom<'_>,
        attention_paged: calls::AttentionPaged<'_>,
        attention_packed: calls::AttentionPacked<'_>,
        causal_conv: calls::CausalConv<'_>,
        gated_delta: calls::GatedDelta<'_>,
        gated_rms_norm: calls::GatedRmsNorm<'_>,
        sigmoid_mul: calls::SigmoidMul<'_>,
        gate_mul: calls::GateMul<'_>,
        quantize: calls::Quantize<'_>,
        gelu: calls::ApplyGelu<'_>,
        soft_cap: calls::SoftCap<'_>,
        clamp: calls::Clamp<'_>,
        standardize: calls::Standardize<'_>,
        gather_rows: calls::GatherRows<'_>,
        scatter_rows: calls::ScatterRows<'_>,
        mean_rows: calls::MeanRows<'_>,
        add_rows: calls::AddRows<'_>,
        argmax: calls::Argmax<'_>,
        clustered_argmax: calls::ClusteredArgmax<'_>,
    }
}
