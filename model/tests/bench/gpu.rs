//! The GPU that tests run on, if there is one.

use std::{
    sync::{Arc, Barrier, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use bursar_budgets::{Bytes, Class, CudaDevice, Device, DeviceError, Hint};
use bursar_kernels::{BlasSearch, Cuda, CudaKernels, CudaLink, CudaTarget, DType, GemmBackend};
use bursar_model::checkpoint::Checkpoint;

use super::{Bench, BenchMemory, GoesOn, Memory};

/// Exclusive access of one test to the GPU, which all tests share.
pub type GpuLock = MutexGuard<'static, ()>;

/// The first GPU with its kernels for f16, and for bf16 if the GPU supports that type.
pub struct Gpu {
    pub device: Arc<CudaDevice>,
    pub kernels: Vec<Arc<CudaKernels>>,
}

/// Waits for exclusive access. Without a GPU, prints one line and returns `None`.
pub fn gpu() -> Option<(GpuLock, &'static Gpu)> {
    static TURN: Mutex<()> = Mutex::new(());
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = GPU.get_or_init(|| {
        let device = match CudaDevice::open(0) {
            Ok(device) => Arc::new(device),
            Err(error @ DeviceError::NoDevice { .. }) => {
                println!("skipped, {error}; {}", error.hint().expect("the error has a hint"));
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let best = CudaTarget::of(&device).expect("the device reports its target");
        let mut targets = vec![best, CudaTarget { activation: DType::F16, ..best }];
        targets.dedup();
        let kernels = targets.into_iter().map(|target| load(&device, target)).collect();
        Some(Gpu { kernels, device })
    });
    Some((turn, gpu.as_ref()?))
}

fn load(device: &Arc<CudaDevice>, target: CudaTarget) -> Arc<CudaKernels> {
    // On the test machine, this variable names the folder of cuBLASLt.
    #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
    let folder = std::env::var("BURSAR_CUDA_LIB");
    let search = BlasSearch::usual().with_pythons(&["/opt/torch/.venv"]).first_in(folder.ok().as_slice());
    CudaKernels::load(device, target, &search).expect("the kernels load")
}

/// Time that a rank waits for the other ranks.
const PATIENCE: Duration = Duration::from_secs(5);

impl Gpu {
    /// A separate GPU for each of `of` ranks, or this GPU for all ranks if there are fewer GPUs.
    fn for_ranks(&self, of: usize) -> Vec<Arc<CudaDevice>> {
        let others: Result<Vec<_>, _> = (1..of).map(|ordinal| CudaDevice::open(ordinal).map(Arc::new)).collect();
        match others {
            Ok(others) => [vec![self.device.clone()], others].concat(),
            Err(_) => vec![self.device.clone(); of],
        }
    }

    /// Runs `story` on each of `of` ranks of a checkpoint, on separate GPUs if there are enough,
    /// and returns the results in rank order. All ranks finish loading before any rank starts
    /// `story`, because mapping memory on a device may wait for a running kernel that itself
    /// waits for another rank.
    pub fn on_ranks<T: Send>(
        &self,
        of: usize,
        target: CudaTarget,
        sizes: BenchMemory,
        checkpoint: impl Fn() -> Checkpoint + Sync,
        story: impl Fn(&Bench<Cuda>) -> T + Sync,
    ) -> Vec<T> {
        let devices = self.for_ranks(of);
        let sharing = devices.iter().filter(|device| device.label() == self.device.label()).count();
        // Each rank loads its own kernels, because kernels have counters that only one lane may
        // use at a time.
        let kernels: Vec<_> = devices.iter().map(|device| load(device, target)).collect();
        let exchange: Vec<_> = devices
            .iter()
            .zip(&kernels)
            .map(|(device, kernels)| {
                let bytes = CudaLink::bytes(sizes.at_once).round_up(device.page());
                let segment = Memory::of(device.clone(), Bytes::mib(64)).leased(Class::StepWorkspace, bytes);
                device
                    .open_to(devices.iter(), segment.address(), bytes)
                    .expect("the devices can access each other's memory");
                // SAFETY: the segment backs this many bytes, and nothing else uses it yet.
                unsafe { CudaLink::clear(&Cuda::new(kernels).expect("a stream"), segment.address()) }
                    .expect("the zeros are copied");
                segment
            })
            .collect();
        let addresses: Vec<_> = exchange.iter().map(|segment| segment.address()).collect();
        // SAFETY: the memory is cleared, open to all ranks, and outlives the threads below.
        let links = unsafe { CudaLink::between(&addresses, sizes.at_once, PATIENCE, target.sms, sharing) };
        let begun = Barrier::new(of);
        std::thread::scope(|scope| {
            let run = |((link, kernels), device): ((_, _), &Arc<CudaDevice>)| {
                let (story, begun, checkpoint) = (&story, &begun, &checkpoint);
                let memory = Memory::of(device.clone(), sizes.capacity);
                scope.spawn(move || {
                    let mut cuda = Cuda::new(kernels).expect("a stream").linked(link);
                    if sharing > 1 {
                        // cuBLASLt loads a kernel at its first use. Loading waits for all running
                        // kernels, and a running kernel may wait for this rank.
                        cuda = cuda.with_gemm_backend(GemmBackend::Ours);
                    }
                    let bench = Bench::on(checkpoint(), cuda, memory, sizes);
                    let bench = Bench { goes_on: GoesOn::Recorded, ..bench };
                    bench.backend.wait().expect("the weights are loaded");
                    begun.wait();
                    story(&bench)
                })
            };
            let running: Vec<_> = links.into_iter().zip(&kernels).zip(&devices).map(run).collect();
            running.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
        })
    }

    /// `sizes.capacity` bytes of this GPU's memory.
    pub fn memory(&self, sizes: BenchMemory) -> Memory {
        Memory::of(self.device.clone(), sizes.capacity)
    }

    /// Loads a recorded checkpoint. After each step, an answer continues with the recorded token
    /// and not with the token that the GPU chooses.
    pub fn bench(&self, checkpoint: Checkpoint, kernels: &Arc<CudaKernels>) -> Bench<Cuda> {
        let (cuda, sizes) = (Cuda::new(kernels).expect("a stream"), BenchMemory::GOLDEN_ON_GPU);
        let bench = Bench::on(checkpoint, cuda, self.memory(sizes), sizes);
        Bench { goes_on: GoesOn::Recorded, ..bench }
    }
}
