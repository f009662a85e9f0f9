//! Common code for tests of an engine on a GPU: exclusive use of the GPU, a runtime, questions with
//! pictures, and waiting for a condition. Each test runs one story: an async function that gets a
//! runtime on the first GPU.

#![allow(dead_code, reason = "each test program uses only a part of this module")]

pub mod other_process;

use std::{future::Future, sync::Arc, time::Duration};

use bursar_actors::{
    chat::{Chat, ChatError, Image, ModelHandle},
    engine::{KvCacheType, KvCacheTypeError, LoadOptions, StartError},
    runtime::{DeviceChoice, ModelSource, Runtime, RuntimeConfig, RuntimeError},
};
use bursar_budgets::{CudaDevice, DeviceError, Hint, Snapshot};
use bursar_kernels::{BlasSearch, CudaTarget};
use bursar_model::flow::CacheFormat;

/// A story that takes longer than this is considered hung.
const PATIENCE: Duration = Duration::from_secs(180);

/// A story fails if a condition that it waits for is not true after this time.
const A_WHILE: Duration = Duration::from_secs(30);

/// Lock for exclusive use of the GPU. A test holds the lock until its runtime has ended.
pub static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// A runtime on the first GPU, for one story.
pub struct Stage {
    pub runtime: Runtime,
    pub device: Arc<CudaDevice>,
}

/// Runs a story on the first GPU. Without a GPU, prints one line and returns.
pub fn story<F: Future<Output = ()>>(story: impl FnOnce(Stage) -> F) {
    let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads");
    threads.block_on(async {
        let _turn = TURN.lock().await;
        let config = RuntimeConfig { device: DeviceChoice::Cuda(0), ..RuntimeConfig::default() };
        let runtime = match Runtime::start(config).await {
            Ok(runtime) => runtime,
            Err(RuntimeError::Device(error @ DeviceError::NoDevice { .. })) => {
                return println!("skipped, {error}; {}", error.hint().expect("the error has a hint"));
            }
            Err(error) => panic!("{error}"),
        };
        let device = runtime.device().as_cuda().expect("the runtime uses a GPU");
        let stage = Stage { runtime: runtime.clone(), device };
        tokio::time::timeout(PATIENCE, story(stage)).await.expect("the story ends in time");
        runtime.shutdown().await;
    });
    // Memory that is still being freed needs the driver, which is gone when the process exits.
    threads.shutdown_timeout(A_WHILE);
}

impl Stage {
    pub async fn snapshot(&self) -> Snapshot {
        self.runtime.budget().snapshot().await.expect("the budget answers")
    }

    /// Whether the model has given up the memory that other processes took, so that the canary is
    /// complete.
    pub async fn is_quiet(&self) -> bool {
        let now = self.measured().await;
        now.canary == now.canary_wanted && now.deficit.is_zero()
    }

    /// The ledger, after it has measured the memory of other processes.
    pub async fn measured(&self) -> Snapshot {
        self.runtime.budget().measure().await.expect("the budget answers")
    }
}

/// The default options, with the library folders of the test machine.
pub fn options() -> LoadOptions {
    #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
    let folder = std::env::var("BURSAR_CUDA_LIB");
    let usual = BlasSearch::usual().with_pythons(&["/opt/torch/.venv"]);
    let folders: Vec<_> = folder.iter().flat_map(std::env::split_paths).collect();
    let blas = usual.first_in(&folders);
    LoadOptions { blas, ..LoadOptions::small() }
}

/// A different picture for each number, as pixels.
pub fn picture(number: u32) -> Image {
    let (wide, high) = (140 + 28 * (number % 5), 112);
    let pixels: Vec<u8> = (0..wide * high)
        .flat_map(|at| {
            let (x, y) = (at % wide, at / wide);
            if (30..70).contains(&x) && (30..70).contains(&y) {
                [(number * 83 % 256) as u8, (number * 47 % 256) as u8, 200]
            } else {
                [(number % 30) as u8, 10, 30]
            }
        })
        .collect();
    Image::from_rgb(wide, high, pixels).expect("the byte count matches the size")
}

/// A greedy question whose reply has exactly this many tokens.
pub fn question(text: &str, tokens: usize) -> Chat {
    Chat::new().user(text).temperature(0.0).max_tokens(tokens).ignore_end()
}

pub async fn answer(model: &ModelHandle, chat: Chat) -> Result<String, ChatError> {
    model.chat(chat).await?.text().await
}

/// The result of `work`. Fails the story if `work` takes too long.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(A_WHILE, work).await.unwrap_or_else(|_| panic!("{what} did not end in time"))
}

/// Waits for a condition. Fails the story if it takes too long.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let mut looks = tokio::time::interval(Duration::from_millis(2));
    let deadline = tokio::time::Instant::now() + A_WHILE;
    while !holds().await {
        assert!(looks.tick().await < deadline, "this never became true: {what}");
    }
}

/// Waits until nothing is leased or backed. Prints the overhead, and checks that
/// there is no deficit.
pub async fn all_memory_returned(stage: &Stage, before: &Snapshot) {
    eventually("all memory is returned", async || {
        let now = stage.measured().await;
        now.granted.is_zero() && now.leases.is_empty() && stage.device.counts().backed.is_zero()
    })
    .await;
    let now = stage.measured().await;
    println!("overhead {} before, {} now", before.overhead, now.overhead);
    assert!(now.deficit.is_zero(), "{now}");
}

/// The demo model. If this GPU has no kernels for the requested KV cache type, prints one line and
/// returns `None`.
pub async fn demo(stage: &Stage, options: LoadOptions) -> Option<ModelHandle> {
    let is_fp8 = options.kv_cache_dtype == KvCacheType::Fp8;
    match started(stage.runtime.load_with(ModelSource::demo(), options, |_| {}).await) {
        Ok(model) => {
            let cache = model.serving().await.expect("the model serves").context.cache;
            assert_eq!(cache == CacheFormat::Fp8, is_fp8, "{cache:?}");
            Some(model)
        }
        Err(error) if matches!(*error, StartError::KvCacheType(KvCacheTypeError::Unserved { .. })) => {
            let target = CudaTarget::of(&stage.device).expect("the device reports its target");
            assert_ne!(target.capability, (9, 0), "a Hopper GPU has FP8 kernels");
            println!("skipped, {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A model that was loaded, or the error of its start. Any other error fails the story.
pub fn started(outcome: Result<ModelHandle, RuntimeError>) -> Result<ModelHandle, Arc<StartError>> {
    match outcome {
        Ok(model) => Ok(model),
        Err(RuntimeError::Start(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}
