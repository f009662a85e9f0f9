//! The GPU that stories run on, if there is one.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bursar_budgets::{Bytes, CudaDevice, DeviceError, Hint};
use bursar_kernels::{BlasSearch, Cuda, CudaKernels, CudaTarget, DType};
use bursar_model::checkpoint::Checkpoint;

use super::{Bench, GoesOn, Memory, Room};

/// A test's turn on the GPU, which all tests share.
pub type Turn = MutexGuard<'static, ()>;

/// The first GPU with its kernels, for f16, and for bf16 if it supports that.
pub struct Gpu {
    pub device: Arc<CudaDevice>,
    pub kernels: Vec<Arc<CudaKernels>>,
}

/// Waits for the turn. Without a GPU it prints one line and returns `None`.
pub fn gpu() -> Option<(Turn, &'static Gpu)> {
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
        // The test machine sets the folder of cuBLASLt.
        #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
        let folder = std::env::var("BURSAR_CUDA_LIB");
        let usual = BlasSearch::usual().with_python("/opt/torch/.venv");
        let search = folder.map_or(usual.clone(), |folder| usual.first_in(folder));
        let load = |target| CudaKernels::load(&device, target, &search).expect("its kernels load");
        Some(Gpu { kernels: targets.into_iter().map(load).collect(), device })
    });
    Some((turn, gpu.as_ref()?))
}

impl Gpu {
    /// `room.capacity` bytes of its memory.
    pub fn memory(&self, room: Room) -> Memory {
        Memory::of(self.device.clone(), room.capacity)
    }

    /// Loads a recorded checkpoint. Its answers continue with the recorded tokens.
    pub fn bench(&self, checkpoint: Checkpoint, kernels: &Arc<CudaKernels>) -> Bench<Cuda> {
        // The library's scratch comes on top of the CPU's memory.
        let room = Room { capacity: Bytes::mib(512), workspace: Bytes::mib(96), ..Room::GOLDEN };
        let bench = Bench::on(checkpoint, Cuda::new(kernels).expect("a stream"), self.memory(room), room);
        Bench { goes_on: GoesOn::Recorded, ..bench }
    }
}
