//! The operations on a GPU give what their definitions give. Without a GPU each test says so and ends.

mod ground;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bursar_budgets::{Bytes, CudaDevice, DeviceError, Hint, HostConfig, HostDevice, Workspace};
use bursar_kernels::{ops::fill_random::fill_random, *};
use cudarc::driver::sys;
use half::{bf16, f16};

use ground::{Pass, assert_close, leased, passes};

/// A test's turn on the GPU, which all share.
type Turn = MutexGuard<'static, ()>;

struct Gpu {
    device: Arc<CudaDevice>,
    kernels: Vec<Arc<CudaKernels>>,
}

/// The first GPU with its kernels, for bf16 where it has it and for f16, if there is one.
fn gpu() -> Option<(Turn, &'static Gpu)> {
    static TURN: Mutex<()> = Mutex::new(());
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = GPU.get_or_init(|| {
        let device = match CudaDevice::open(0) {
            Ok(device) => Arc::new(device),
            Err(error @ DeviceError::NoDevice { .. }) => {
                println!("skipped, {error}; {}", error.hint().expect("there is something to do"));
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let best = CudaTarget::of(&device).expect("it says what it is");
        let mut targets = vec![best, CudaTarget { activation: DType::F16, ..best }];
        targets.dedup();
        let mut gpu = Gpu { device, kernels: Vec::new() };
        gpu.kernels = targets.into_iter().map(|target| gpu.load(target)).collect();
        Some(gpu)
    });
    Some((turn, gpu.as_ref()?))
}

impl Gpu {
    fn load(&self, target: CudaTarget) -> Arc<CudaKernels> {
        // Where it is, the tests' machine says; this is the one place below `main` that asks.
        #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
        let folder = std::env::var("BURSAR_CUDA_LIB");
        let usual = BlasSearch::usual().with_python("/opt/torch/.venv");
        let search = folder.map_or(usual.clone(), |folder| usual.first_in(folder));
        CudaKernels::load(&self.device, target, &search).expect("its kernels load")
    }

    /// Holds every operation against its definition, and what it takes against its plan.
    fn compare(&self, kernels: &Arc<CudaKernels>) {
        let target = kernels.target();
        let activation = target.activation();
        for pass in passes().into_iter().filter(|pass| is_served(pass, activation)) {
            let (plan, dry, tally) = (Plan::new(target), Workspace::dry(), Tally::default());
            pass.run(&Scope::new(&plan, &dry, &tally)).unwrap();
            let found = self.compute(kernels, dry.high_water(), |scope| pass.run(scope));
            let what = format!("{pass:?} in {activation} on {target:?}");
            assert_close(&what, &found, &pass.expected(activation), tolerance(&pass, activation));
        }
    }

    /// Runs `pass` in memory in which every element not yet written is not a number.
    fn compute<T>(
        &self,
        kernels: &Arc<CudaKernels>,
        bytes: Bytes,
        pass: impl FnOnce(&Scope<'_, Cuda>) -> Result<T, KernelError>,
    ) -> T {
        let segment = leased(self.device.clone(), bytes.max(Bytes(1)));
        self.device.enter().expect("it is there");
        // SAFETY: so much is backed, and nobody uses it.
        let poisoned = unsafe { sys::cuMemsetD8_v2(segment.address().0, 0xff, segment.backed().as_usize()) };
        assert_eq!(poisoned, sys::CUresult::CUDA_SUCCESS);
        let (cuda, tally) = (Cuda::new(kernels).expect("a stream"), Tally::default());
        let workspace = Workspace::over(segment);
        let outcome = pass(&Scope::new(&cuda, &workspace, &tally)).unwrap();
        assert!(workspace.high_water() <= bytes.max(Bytes(1)).round_up(Bytes(256)));
        outcome
    }
}

/// Whether a GPU serves it: weights are of the activations' type there, and heads of some sizes.
fn is_served(pass: &Pass, activation: DType) -> bool {
    let has_head = |head_dim: &usize| [32, 64, 80, 128].contains(head_dim);
    match pass {
        Pass::Embed { dtype, .. } | Pass::RmsNorm { dtype, .. } | Pass::Linear { dtype, .. } => *dtype == activation,
        Pass::Paged { head_dim, .. } | Pass::Packed { head_dim, .. } => has_head(head_dim),
        _ => true,
    }
}

/// What is only copied is not off at all; what is computed in f32 is off by the rounding of what is stored. Attention
/// rounds its weights too, before they meet the values, and some of cuBLASLt's kernels the product before its bias.
fn tolerance(pass: &Pass, activation: DType) -> f64 {
    // Half a unit in the last place, for numbers between 1 and 2.
    let rounding = if activation == DType::BF16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    match pass {
        Pass::Embed { .. } | Pass::GatherRows { .. } | Pass::ScatterRows { .. } => 0.0,
        Pass::Argmax { .. } | Pass::AllReduce { .. } => 0.0,
        Pass::Paged { .. } | Pass::Packed { .. } | Pass::Linear { .. } => 2.0 * rounding,
        _ => rounding,
    }
}

#[test]
fn every_operation_gives_what_its_definition_gives_takes_what_its_plan_says_and_touches_nothing_else() {
    let Some((_turn, gpu)) = gpu() else { return };
    for kernels in &gpu.kernels {
        gpu.compare(kernels);
    }
}

#[test]
fn what_is_compiled_for_older_generations_gives_it_too() {
    let Some((_turn, gpu)) = gpu() else { return };
    let best = CudaTarget::of(&gpu.device).expect("it says what it is");
    for (capability, activation) in [((8, 0), DType::BF16), ((8, 0), DType::F16), ((7, 5), DType::F16)] {
        if capability < best.capability {
            // The driver compiles the PTX of that generation for this one.
            gpu.compare(&gpu.load(CudaTarget { capability, activation, ..best }));
        }
    }
}

/// The elements that are drawn, as bits.
fn drawn<B: Backend>(backend: &B, workspace: &Workspace, dtype: DType, count: usize) -> Vec<u16> {
    // SAFETY: the workspace has backed as much, and nobody has taken from it.
    let mut out = unsafe { Tensor::persistent(workspace.address(), [count], dtype) };
    fill_random(backend, 7, 0.02, &mut out).expect("a type that weights are kept as");
    let tally = Tally::default();
    let scope = Scope::new(backend, workspace, &tally);
    match dtype {
        DType::BF16 => scope.download::<bf16>(&out).unwrap().into_iter().map(bf16::to_bits).collect(),
        _ => scope.download::<f16>(&out).unwrap().into_iter().map(f16::to_bits).collect(),
    }
}

#[test]
fn random_weights_have_the_bits_that_the_cpu_draws() {
    let Some((_turn, gpu)) = gpu() else { return };
    // More than the threads of one launch, so that some draw twice.
    let count = 256 * 8192 + 61;
    let bytes = Bytes(2 * count as u64);
    let host = Workspace::over(leased(Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(8))).unwrap()), bytes));
    for kernels in &gpu.kernels {
        let dtype = kernels.target().activation();
        let cuda = Cuda::new(kernels).expect("a stream");
        let found = drawn(&cuda, &Workspace::over(leased(gpu.device.clone(), bytes)), dtype, count);
        let expected = drawn(&Cpu::new(2), &host, dtype, count);
        let other = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
        assert_eq!(other, 0, "of {count} in {dtype}");
    }
}

#[test]
fn a_kernel_for_a_head_that_none_serves_is_refused_in_words() {
    let target = Target::Cuda(CudaTarget { capability: (9, 0), processors: 132, activation: DType::BF16 });
    let (plan, dry, tally) = (Plan::new(target), Workspace::dry(), Tally::default());
    let pass = Pass::Packed { heads: 2, head_dim: 34, lengths: vec![5] };
    let error = pass.run(&Scope::new(&plan, &dry, &tally)).unwrap_err();
    let expected = "attention_packed: qkv is [5, 204], expected heads of 32, 64, 80 or 128 elements on this target";
    assert_eq!(error.to_string(), expected);
}
