//! Code that the tests share: leased memory full of NaN, seeded numbers, and [`Pass`], which runs
//! each operation on any backend and computes its expected result in `f64`.
#![allow(dead_code, reason = "no story uses all of it")]

mod asked;
mod blocks;
mod clustered;
mod fp8;
mod gpu;
mod int4;
mod mixed;
mod paged;
mod pass;
mod pixels;
mod rotary_kv;
mod routed;
mod states;
mod variant;
mod wide;

use std::{cell::Cell, sync::Arc};

use bursar_budgets::*;
use bursar_kernels::*;
use half::{bf16, f16};

#[allow(unused_imports, reason = "no story uses all of it")]
pub use asked::Batch;
#[allow(unused_imports, reason = "no story uses all of it")]
pub use blocks::{Blocks, copy_to_host_and_back, rows_go_and_come_back, states_go_and_come_back};
pub use clustered::Clustered;
#[allow(unused_imports, reason = "no story uses all of it")]
pub use fp8::{Fp8, Product, Scaled};
#[allow(unused_imports, reason = "no story uses all of it")]
pub use gpu::{first_gpu, load, search};
#[allow(unused_imports, reason = "no story uses all of it")]
pub use int4::{Int4, Way};
#[allow(unused_imports, reason = "no story uses all of it")]
pub use mixed::{Drawn, Mixed, NORMED_SUMS, normed_sum};
#[allow(unused_imports, reason = "no story uses all of it")]
pub use paged::PagedData;
#[allow(unused_imports, reason = "no story uses all of it")]
pub use pass::{How, Pass, passes};
pub use rotary_kv::RotaryKv;
pub use routed::Routed;
#[allow(unused_imports, reason = "no story uses all of it")]
pub use states::{Of, Step, divided};
#[allow(unused_imports, reason = "no story uses all of it")]
pub use variant::Variant;

/// Whether the pass has a GEMM that cuBLASLt and this project's kernels compute.
pub fn is_product(pass: &Pass) -> bool {
    matches!(
        pass,
        Pass::Linear { .. }
            | Pass::GatedLinear { .. }
            | Pass::Fp8(_)
            | Pass::Routed(_)
            | Pass::Variant(Variant::GeluLinear { .. })
    )
}

struct Nobody;

impl ReleaseNotes for Nobody {
    fn post(&self, _: ReleaseNote) {}
}

/// A workspace of host memory in which every unwritten element is NaN as a float, and far out of
/// bounds as an index.
pub fn poisoned(bytes: Bytes) -> Workspace {
    let ground = Ground::of(bytes);
    ground.poison();
    ground.workspace
}

/// The memory of a workspace, which may be poisoned again.
struct Ground {
    workspace: Workspace,
    start: Address,
    bytes: Bytes,
}

impl Ground {
    fn of(bytes: Bytes) -> Ground {
        let bytes = bytes.round_up(Bytes::kib(64));
        let segment = leased(Arc::new(HostDevice::new(HostConfig::small(bytes)).unwrap()), bytes);
        Ground { start: segment.address(), bytes: segment.backed(), workspace: Workspace::over(segment) }
    }

    fn poison(&self) {
        assert_eq!(self.workspace.used(), Bytes(0));
        // SAFETY: the workspace has this many backed bytes, and nothing in it is in use.
        unsafe { std::ptr::write_bytes(self.start.0 as *mut u8, 0xff, self.bytes.as_usize()) };
    }
}

/// Calls `pass` with 16 MiB of memory, poisoned as by [`poisoned`]. The thread reuses the memory,
/// because new memory for each of several hundred passes would take far longer than the passes.
pub fn in_poison<T>(pass: impl FnOnce(&Workspace) -> T) -> T {
    thread_local!(static LAST: Cell<Option<Ground>> = const { Cell::new(None) });
    let ground = LAST.take().unwrap_or_else(|| Ground::of(Bytes::mib(16)));
    ground.poison();
    let result = pass(&ground.workspace);
    LAST.set(Some(ground));
    result
}

pub fn leased(device: Arc<dyn Device>, bytes: Bytes) -> Segment {
    let bytes = bytes.round_up(device.page());
    let mut ledger = Ledger::new(LedgerConfig::new(bytes));
    let request = Request::new(Owner::new("story", 0), Class::StepWorkspace, "none", bytes);
    let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
    let Effect::Granted(grant) = &effects[0] else { panic!("{effects:?}") };
    let segment = Segment::reserve(device, bytes, Lease::issue(grant, Arc::new(Nobody))).unwrap();
    segment.back_to(bytes).unwrap();
    segment
}

/// The first index of the largest number, like `argmax`. NaN is skipped.
pub fn first_largest(numbers: impl Iterator<Item = f32>) -> u32 {
    let numbers = numbers.enumerate().filter(|(_, number)| !number.is_nan());
    let best = numbers.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map_or(ops::argmax::NO_CHOICE, |(place, _)| place as u32)
}

/// Runs `pass` on the CPU in poisoned memory.
pub fn compute<T>(threads: usize, pass: impl FnOnce(&Scope<'_, Cpu>) -> Result<T, KernelError>) -> T {
    let (cpu, counter) = (Cpu::new(threads), WorkCounter::default());
    in_poison(|workspace| pass(&Scope::new(&cpu, workspace, &counter))).unwrap()
}

/// Runs `pass` on each of `ranks` host ranks, each in separate poisoned memory, and returns the
/// results of all ranks.
pub fn on_ranks<T: Send>(
    ranks: usize,
    threads: usize,
    pass: impl Fn(&Scope<'_, Cpu>) -> Result<T, KernelError> + Sync,
) -> Vec<Result<T, KernelError>> {
    let links = HostLink::between(ranks, PATIENCE);
    std::thread::scope(|scope| {
        let run = |link| {
            let pass = &pass;
            scope.spawn(move || {
                let (cpu, workspace) = (Cpu::linked(threads, link), poisoned(Bytes::mib(2)));
                pass(&Scope::new(&cpu, &workspace, &WorkCounter::default()))
            })
        };
        let running: Vec<_> = links.into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    })
}

/// Timeout of links between host ranks, long enough that no correct test reaches it.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(300);

/// Runs `pass` only on shapes. Returns its result, the workspace's peak and the work.
pub fn plan<T>(threads: usize, pass: impl FnOnce(&Scope<'_, Plan>) -> T) -> (T, Bytes, Work) {
    let (plan, workspace, counter) = (Plan::new(Target::Cpu { threads }), Workspace::dry(), WorkCounter::default());
    let result = pass(&Scope::new(&plan, &workspace, &counter));
    (result, workspace.high_water(), counter.total())
}

/// Seeded random numbers (xorshift, Marsaglia 2003).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % end as u64) as usize
    }

    /// Numbers between -1 and 1.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    pub fn indices(&mut self, count: usize, end: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(end) as u32).collect()
    }

    /// The numbers below `count` in random order.
    pub fn shuffled(&mut self, count: usize) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..count as u32).collect();
        (1..count).rev().for_each(|last| numbers.swap(last, self.below(last + 1)));
        numbers
    }
}

/// Uploads `numbers` as elements of `dtype`.
pub fn narrowed<'s, B: Backend>(
    scope: &'s Scope<'_, B>,
    shape: impl Into<Shape>,
    dtype: DType,
    numbers: &[f32],
) -> Result<Tensor<'s>, KernelError> {
    match dtype {
        DType::F16 => scope.upload(shape, &numbers.iter().map(|number| f16::from_f32(*number)).collect::<Vec<_>>()),
        DType::BF16 => scope.upload(shape, &numbers.iter().map(|number| bf16::from_f32(*number)).collect::<Vec<_>>()),
        _ => scope.upload(shape, numbers),
    }
}

/// The values of `numbers` once stored as `dtype`.
pub fn rounded(dtype: DType, numbers: &[f32]) -> Vec<f64> {
    let round = |number: f32| match dtype {
        DType::F16 => f16::from_f32(number).to_f64(),
        DType::BF16 => bf16::from_f32(number).to_f64(),
        _ => f64::from(number),
    };
    numbers.iter().map(|number| round(*number)).collect()
}

/// Scales of the keys of `heads` heads, then of their values, such that numbers below one become at
/// most 300 when they are divided by a scale.
pub fn cache_scales(heads: usize, random: &mut Random) -> Vec<f32> {
    random.floats(2 * heads).iter().map(|number| 2.0f32.powf(number * 3.0) / 32.0).collect()
}

/// Softmax attention of one query over keys and values, in `f64`.
pub fn attend(query: &[f32], keys: &[&[f32]], values: &[&[f32]]) -> Vec<f64> {
    let scale = (query.len() as f64).powf(-0.5);
    let product = |key: &&[f32]| query.iter().zip(*key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let scores: Vec<f64> = keys.iter().map(|key| scale * product(key)).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let element =
        |at: usize| weights.iter().zip(values).map(|(weight, value)| weight * f64::from(value[at])).sum::<f64>();
    (0..query.len()).map(|at| element(at) / total).collect()
}

/// Asserts that each number differs from the expected one by at most `tolerance * (1 +
/// |expected|)`. Infinities must be equal.
pub fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        let is_close = expected.is_finite() && error <= tolerance * (1.0 + expected.abs());
        assert!(is_close || f64::from(*found) == *expected, "{what}: {found} at {place}, expected {expected}");
    }
}

pub fn widened(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|number| f64::from(*number)).collect()
}
