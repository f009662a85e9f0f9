//! What stories of an engine on a GPU share: the turn, a runtime, questions with pictures, and waiting for a condition.

#![allow(dead_code, reason = "each program of stories uses a part of it")]

pub mod neighbour;

use std::{future::Future, sync::Arc, time::Duration};

use bursar_actors::{
    chat::{Chat, ChatError, Image, ModelHandle},
    engine::{LoadOptions, StartError},
    runtime::{DeviceChoice, Runtime, RuntimeConfig, RuntimeError},
};
use bursar_budgets::{CudaDevice, DeviceError, Hint, Snapshot};
use bursar_kernels::BlasSearch;

/// No story takes as long; one that does hangs.
const PATIENCE: Duration = Duration::from_secs(180);

/// Nothing that is waited for takes as long.
const A_WHILE: Duration = Duration::from_secs(30);

/// A runtime on the first GPU, for one story.
pub struct Stage {
    pub runtime: Runtime,
    pub device: Arc<CudaDevice>,
}

/// Runs a story on the first GPU, if there is one; else says so in one line.
pub fn story<F: Future<Output = ()>>(story: impl FnOnce(Stage) -> F) {
    // Tests of one program take turns, each to its runtime's end.
    static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads");
    threads.block_on(async {
        let _turn = TURN.lock().await;
        let config = RuntimeConfig { device: DeviceChoice::Cuda(0), ..RuntimeConfig::default() };
        let runtime = match Runtime::start(config).await {
            Ok(runtime) => runtime,
            Err(RuntimeError::Device(error @ DeviceError::NoDevice { .. })) => {
                return println!("skipped, {error}; {}", error.hint().expect("there is something to do"));
            }
            Err(error) => panic!("{error}"),
        };
        let device = runtime.device().as_cuda().expect("a GPU was asked for");
        let stage = Stage { runtime: runtime.clone(), device };
        tokio::time::timeout(PATIENCE, story(stage)).await.expect("the story hangs");
        runtime.shutdown().await;
    });
    // What is still being let go of needs the driver, which goes with the process.
    threads.shutdown_timeout(A_WHILE);
}

impl Stage {
    pub async fn snapshot(&self) -> Snapshot {
        self.runtime.budget().snapshot().await.expect("the budget answers")
    }

    /// Whether all that others have taken was made room for, and the canary is whole.
    pub async fn is_quiet(&self) -> bool {
        let now = self.measured().await;
        now.canary == now.canary_wanted && now.deficit.is_zero()
    }

    /// What the ledger says when it has looked at what others hold.
    pub async fn measured(&self) -> Snapshot {
        self.runtime.budget().measure().await.expect("the budget answers")
    }
}

/// As the defaults, with cuBLASLt where the tests' machine says that it is.
pub fn options() -> LoadOptions {
    #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
    let folder = std::env::var("BURSAR_CUDA_LIB");
    let usual = BlasSearch::usual();
    LoadOptions { blas: folder.map_or(usual.clone(), |folder| usual.first_in(folder)), ..LoadOptions::small() }
}

/// A picture of its own for each number, as bytes of a PNG's like would be decoded to.
pub fn picture(number: u32) -> Image {
    let (wide, high) = (140 + 28 * (number % 5), 112);
    let pixels: Vec<u8> = (0..wide * high)
        .flat_map(|at| {
            let (x, y) = (at % wide, at / wide);
            match (30..70).contains(&x) && (30..70).contains(&y) {
                true => [(number * 83 % 256) as u8, (number * 47 % 256) as u8, 200],
                false => [(number % 30) as u8, 10, 30],
            }
        })
        .collect();
    Image::from_rgb(wide, high, pixels).expect("as many bytes as pixels")
}

/// A greedy question whose answer has exactly so many tokens.
pub fn question(text: &str, tokens: usize) -> Chat {
    Chat::new().user(text).temperature(0.0).max_tokens(tokens).ignore_end()
}

pub async fn answer(model: &ModelHandle, chat: Chat) -> Result<String, ChatError> {
    model.chat(chat).await?.text().await
}

/// What comes of `work`. If that takes a while it hangs, which is the story's end.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(A_WHILE, work).await.unwrap_or_else(|_| panic!("it hangs: {what}"))
}

/// Waits for a condition. The story's patience is its end.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let mut looks = tokio::time::interval(Duration::from_millis(2));
    let deadline = tokio::time::Instant::now() + A_WHILE;
    while !holds().await {
        assert!(looks.tick().await < deadline, "never true: {what}");
    }
}

/// Nothing is leased or backed, and what the process holds beside is what it held before.
pub async fn all_is_home(stage: &Stage, before: &Snapshot) {
    eventually("all is home", async || {
        let now = stage.measured().await;
        now.granted.is_zero() && now.leases.is_empty() && stage.device.counts().backed.is_zero()
    })
    .await;
    let now = stage.measured().await;
    println!("overhead {} before, {} now", before.overhead, now.overhead);
    assert!(now.deficit.is_zero(), "{now}");
}

/// A model that was loaded, or the start's own error. Any other is the story's end.
pub fn started(outcome: Result<ModelHandle, RuntimeError>) -> Result<ModelHandle, Arc<StartError>> {
    match outcome {
        Ok(model) => Ok(model),
        Err(RuntimeError::Start(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}
