//! Shared parts of the tests: small devices, small envelopes, pictures, and
//! waiting for a condition.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    future::Future,
    io::Cursor,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{SyncSender, sync_channel},
    },
    time::Duration,
};

use bursar::{
    Budget, Bytes, Chat, ChatError, ChatEvent, Device, DeviceChoice, DeviceGroup, Envelope, FinishReason, HostConfig,
    HostDevice, Image, LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig, Snapshot, StopReason, TokenScore,
    Usage,
};
use image::{ImageFormat, Rgb, RgbImage};

/// Time limit of a test, longer than any test takes. A test that reaches the limit is considered to
/// hang.
const PATIENCE: Duration = Duration::from_secs(120);

thread_local! {
    /// The step that this thread's test has reached, and the budget that the test uses.
    static PLACE: RefCell<(String, Option<Budget>)> = RefCell::default();
}

/// Records the step that a test has reached, for the message if it hangs. Call this function in
/// the test itself, not in a spawned task.
pub fn at(place: String, budget: &Budget) {
    PLACE.set((place, Some(budget.clone())));
}

/// Runs a test on separate threads.
pub fn story(story: impl Future<Output = ()>) {
    story_with_blocking_threads(512, story);
}

/// Runs a test on separate threads, with `count` threads for blocking work.
pub fn story_with_blocking_threads(count: usize, story: impl Future<Output = ()>) {
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    let threads = threads.worker_threads(2).max_blocking_threads(count).enable_all().build().expect("threads");
    threads.block_on(async {
        // Keep the pinned future past the timeout, so that the reported ledger is the ledger of the
        // running test.
        let mut story = std::pin::pin!(story);
        if tokio::time::timeout(PATIENCE, story.as_mut()).await.is_err() {
            let (place, budget) = PLACE.with_borrow(Clone::clone);
            let ledger = match budget {
                Some(budget) => {
                    budget.snapshot().await.map_or_else(|error| error.to_string(), |ledger| ledger.to_string())
                }
                None => String::new(),
            };
            panic!("the test hangs: {place}\n{ledger}");
        }
    });
    threads.shutdown_background();
}

/// Keeps `count` threads for blocking work busy until the sender is dropped.
pub fn blocking_threads_kept(count: usize) -> SyncSender<()> {
    let (sender, dropped) = sync_channel(0);
    let dropped = Arc::new(Mutex::new(dropped));
    for _ in 0..count {
        let dropped = dropped.clone();
        tokio::task::spawn_blocking(move || {
            dropped.lock().expect("no holder panicked").recv().expect_err("the sender is dropped");
        });
    }
    sender
}

/// A host device with small pages.
pub fn device_of(capacity: Bytes) -> Arc<HostDevice> {
    Arc::new(HostDevice::new(HostConfig::small(capacity)).expect("small pages are powers of two"))
}

/// A device that holds the demo model, with free memory left.
pub fn device() -> Arc<HostDevice> {
    device_of(Bytes::mib(64))
}

/// The tensor-parallel size in tests.
pub fn ranks() -> usize {
    #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
    std::env::var("BURSAR_TEST_RANKS").map_or(1, |ranks| ranks.parse().expect("a number of ranks"))
}

/// The device that tests run models on: `device`, or a group of ranks with `device` as the last
/// rank if `BURSAR_TEST_RANKS` is 2 or more. A fault of `device` is then a fault of one rank only.
pub fn placed(device: &Arc<HostDevice>) -> Arc<dyn Device> {
    shared_out(device, ranks())
}

/// `device`, or a group of `ranks` equal devices with `device` as the last rank.
pub fn shared_out(device: &Arc<HostDevice>, ranks: usize) -> Arc<dyn Device> {
    if ranks == 1 {
        return device.clone();
    }
    let (capacity, page) = (device.memory().expect("the device answers").total, device.page());
    let same_size =
        |_| Arc::new(HostDevice::new(HostConfig { page, ..HostConfig::new(capacity) }).expect("the same sizes"));
    let others = (1..ranks).map(|rank| same_size(rank) as Arc<dyn Device>);
    Arc::new(DeviceGroup::of(others.chain([device.clone() as Arc<dyn Device>]).collect(), "host").expect("of one kind"))
}

pub async fn runtime_on(device: &Arc<HostDevice>) -> Runtime {
    let config = RuntimeConfig { device: DeviceChoice::Custom(placed(device)), ..RuntimeConfig::default() };
    Runtime::start(config).await.expect("a host device starts")
}

/// Limits with a short stress phase.
pub fn small_envelope() -> Envelope {
    Envelope {
        context_tokens: 256,
        sequences: 8,
        step_tokens: 48,
        draft_tokens: 0,
        picture_patches: 64,
        pictures: 2,
        largest_pictures: 2,
        video_frames: 8,
        launch_patches: 128,
    }
}

pub fn small() -> LoadOptions {
    LoadOptions { envelope: Some(small_envelope()), kv_tokens: Some(1024), threads: 1, ..LoadOptions::default() }
}

/// The demo model with these options.
pub async fn demo(runtime: &Runtime, options: LoadOptions) -> ModelHandle {
    runtime.load_with(ModelSource::demo(), options, |_| {}).await.expect("the demo model starts")
}

/// A runtime with the demo model, as most tests use it.
pub struct Stage {
    pub device: Arc<HostDevice>,
    pub runtime: Runtime,
    pub model: ModelHandle,
}

impl Stage {
    pub async fn set(options: LoadOptions) -> Stage {
        Stage::of(ModelSource::demo(), options).await
    }

    pub async fn of(source: ModelSource, options: LoadOptions) -> Stage {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = runtime.load_with(source, options, |_| {}).await.expect("the model starts");
        Stage { device, runtime, model }
    }

    pub async fn snapshot(&self) -> Snapshot {
        self.runtime.budget().snapshot().await.expect("the budget answers")
    }

    /// Waits until the ledger equals `before`.
    pub async fn settled(&self, before: &Snapshot) {
        eventually("the ledger is as before", async || self.snapshot().await == *before).await;
        let serving = self.model.serving().await.expect("the model serves");
        eventually("all blocks are free", async || {
            let (reply, count) = bursar_actors::responder::Responder::new();
            drop(serving.scheduler.send_message(bursar::messages::SchedulerMessage::KvUse(reply)));
            count.await.is_ok_and(|usage| usage.held == 0)
        })
        .await;
        assert_eq!(self.model.requests().0, 0, "all credits are free");
    }
}

/// Waits for a condition. The test fails if the condition does not hold within half of `PATIENCE`.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let mut looks = tokio::time::interval(Duration::from_millis(2));
    let deadline = tokio::time::Instant::now() + PATIENCE / 2;
    while !holds().await {
        assert!(looks.tick().await < deadline, "never became true: {what}");
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    pub pieces: Vec<String>,
    pub text: String,
    /// The reasoning before the reply.
    pub reasoning: String,
    pub finish_reason: FinishReason,
    pub stop_reason: Option<StopReason>,
    /// Usage without the cached tokens, which depend on other requests.
    pub usage: Usage,
    pub cached_tokens: usize,
    /// Prompt log-probabilities, if they were requested.
    pub prompt: Option<Vec<Option<TokenScore>>>,
    pub tokens: Vec<TokenScore>,
}

/// Reads a whole reply. Checks that it has exactly one end event and that this event is the last.
pub async fn listen(mut reply: bursar::Reply) -> Result<Whole, ChatError> {
    let (mut pieces, mut prompt, mut tokens, mut end) = (Vec::new(), None, Vec::new(), None);
    let mut thought = String::new();
    while let Some(event) = reply.next().await {
        assert!(end.is_none(), "no event follows the end");
        match event {
            Ok(ChatEvent::Prompt(scores)) => {
                assert!(pieces.is_empty() && tokens.is_empty(), "the prompt's scores come first");
                assert!(prompt.replace(scores).is_none(), "the prompt's scores come once");
            }
            Ok(ChatEvent::Token(score)) => tokens.push(score),
            Ok(ChatEvent::Text(text)) => pieces.push(text),
            Ok(ChatEvent::Reasoning(text)) => thought.push_str(&text),
            Ok(ChatEvent::Done { text, reasoning, tool_calls, finish_reason, stop_reason, usage, .. }) => {
                assert!(tool_calls.is_empty(), "no tools were given");
                assert_eq!(reasoning, thought, "the end has the complete reasoning");
                let (pieces, tokens) = (std::mem::take(&mut pieces), std::mem::take(&mut tokens));
                let cached_tokens = usage.cached_tokens;
                let mut usage = usage;
                usage.cached_tokens = 0;
                let prompt = prompt.take();
                end = Some(Ok(Whole {
                    pieces,
                    text,
                    reasoning,
                    finish_reason,
                    stop_reason,
                    usage,
                    cached_tokens,
                    prompt,
                    tokens,
                }));
            }
            Ok(event) => panic!("an event that this test does not expect: {event:?}"),
            Err(error) => end = Some(Err(error)),
        }
    }
    assert!(reply.next().await.is_none(), "a reply that has ended stays ended");
    end.expect("a reply has an end")
}

/// Sends a chat and reads the whole reply.
pub async fn ask(model: &ModelHandle, chat: Chat) -> Result<Whole, ChatError> {
    listen(model.chat(chat).await?).await
}

/// The text of the reply.
pub async fn answer(model: &ModelHandle, chat: Chat) -> String {
    ask(model, chat).await.expect("the model answers").text
}

/// A PNG with a colored square. Each number gives a different picture.
pub fn picture(number: u32) -> Image {
    static DRAWN: OnceLock<std::sync::Mutex<BTreeMap<u32, Arc<[u8]>>>> = OnceLock::new();
    let mut drawn = DRAWN.get_or_init(Default::default).lock().expect("no holder panicked");
    let bytes = drawn.entry(number).or_insert_with(|| {
        let colour = Rgb([(number * 83 % 256) as u8, (number * 47 % 256) as u8, 200]);
        let side = 56 + number % 60;
        png(&RgbImage::from_fn(side, 112, |x, y| {
            if (20..40).contains(&x) && (30..70).contains(&y) { colour } else { Rgb([(number % 30) as u8, 10, 30]) }
        }))
    });
    Image::from_bytes(bytes.clone())
}

pub fn png(picture: &RgbImage) -> Arc<[u8]> {
    let mut encoded = Cursor::new(Vec::new());
    picture.write_to(&mut encoded, ImageFormat::Png).expect("a PNG can be written to memory");
    encoded.into_inner().into()
}

/// A PNG with a valid header and damaged pixels.
pub fn damaged_png() -> Vec<u8> {
    let mut bytes = png(&RgbImage::from_fn(90, 70, |x, y| Rgb([x as u8, y as u8, 9]))).to_vec();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 40].fill(0xA5);
    bytes
}

/// A greedy question about a picture.
pub fn about(number: u32) -> Chat {
    text("Describe the picture.").image(picture(number))
}

/// A greedy question without a picture.
pub fn text(question: &str) -> Chat {
    Chat::new().user(question).temperature(0.0).max_tokens(24)
}

/// A test's folder, removed at the end.
pub struct Folder(PathBuf);

impl Folder {
    pub fn empty() -> Folder {
        static FOLDERS: AtomicUsize = AtomicUsize::new(0);
        let name = format!("it-{}-{}", std::process::id(), FOLDERS.fetch_add(1, Relaxed));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        Folder(folder)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
