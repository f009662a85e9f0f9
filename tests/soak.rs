//! Many chats of all kinds, cancelled at random moments. In a second soak, actors also die, other
//! processes take memory, and models sleep. After all chats have ended, everything is as before and
//! the process has grown by no more than the soak allows.
//!
//! The short soaks run in every test run, with the demo model and with the hybrid demo. The long
//! soaks take minutes: `cargo test --release --test soak -- --ignored --nocapture`. With the demo
//! model they send ten thousand requests. With the hybrid demo and on a GPU they run for
//! `BURSAR_SOAK_SECONDS` seconds, by default 300.

#[path = "soak/faults.rs"]
mod faults;
#[path = "soak/load.rs"]
mod load;
#[allow(dead_code, reason = "stories use more of it")]
#[path = "../actors/tests/cuda/gpu/other_process.rs"]
mod other_process;
#[path = "soak/reading.rs"]
mod reading;
#[allow(dead_code, reason = "stories use more of it")]
#[path = "it/stage.rs"]
mod stage;

use std::{
    sync::Mutex,
    time::{Duration, Instant, SystemTime},
};

use bursar::{Envelope, LoadOptions, ModelSource};
use faults::FaultyRuntime;
use load::{Ends, Load};
use reading::{Counting, Reading};
use stage::{Stage, small, small_envelope};

#[global_allocator]
static HEAP: Counting = Counting;

/// Every soak measures the whole process, so soaks run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// The number of concurrent requests. Each asks for up to three samples, so that some requests are
/// refused for lack of credits.
const AT_ONCE: usize = 12;

/// The test that runs in a child process as the other process on a GPU.
const OTHER_PROCESS: &str = "another_process_takes_the_requested_bytes";

/// The parameters of a soak, and the growth that it allows.
struct Soak {
    requests: usize,
    /// Requests between two readings. Readings are taken when no request is in progress.
    between_readings: usize,
    /// Number of readings to ignore at the start, while caches fill and thread pools start.
    warm_up: usize,
    /// Bytes by which the heap may grow after the warm-up.
    heap_growth: u64,
    /// Bytes by which the whole process may grow after the warm-up.
    process_growth: u64,
    source: fn() -> ModelSource,
}

/// The trained hybrid model, whose sequences have recurrent states.
fn hybrid() -> ModelSource {
    ModelSource::folder(bursar_golden::hybrid_demo_checkpoint())
}

fn asked(name: &str) -> Option<u64> {
    #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

/// The time that a soak runs, from `BURSAR_SOAK_SECONDS`.
fn asked_time() -> Duration {
    Duration::from_secs(asked("BURSAR_SOAK_SECONDS").unwrap_or(300))
}

/// The long soak without faults.
const QUIET: Soak = Soak {
    requests: 10_000,
    between_readings: 500,
    warm_up: 4,
    heap_growth: 1 << 20,
    process_growth: 8 << 20,
    source: ModelSource::demo,
};

/// The caches of a restarted actor are empty, so readings differ by some megabytes.
const SHORT_WITH_FAULTS: Soak = Soak {
    requests: 320,
    between_readings: 20,
    warm_up: 4,
    heap_growth: 8 << 20,
    process_growth: 32 << 20,
    source: ModelSource::demo,
};

/// Threads start and end with lanes, and glibc keeps the memory of their arenas. With
/// MALLOC_ARENA_MAX=1 the growth is 2 MiB.
const LONG_WITH_FAULTS: Soak = Soak {
    requests: 10_000,
    between_readings: 100,
    warm_up: 10,
    heap_growth: 2 << 20,
    process_growth: 96 << 20,
    source: ModelSource::demo,
};

#[test]
fn hundreds_of_randomly_cancelled_chats_leak_nothing() {
    Soak { requests: 320, between_readings: 32, process_growth: 16 << 20, ..QUIET }.run();
}

#[test]
fn hundreds_of_randomly_cancelled_chats_with_states_leak_nothing() {
    Soak { requests: 320, between_readings: 32, process_growth: 16 << 20, source: hybrid, ..QUIET }.run();
}

#[test]
#[ignore = "takes minutes: cargo test --release --test soak -- --ignored --nocapture"]
fn ten_thousand_randomly_cancelled_chats_leak_nothing() {
    QUIET.run();
}

#[test]
fn hundreds_of_chats_through_deaths_other_processes_and_sleep_lose_nothing() {
    SHORT_WITH_FAULTS.run_with_faults(Duration::MAX);
}

#[test]
fn hybrid_chats_survive_deaths_other_processes_and_sleep() {
    Soak { source: hybrid, ..SHORT_WITH_FAULTS }.run_with_faults(Duration::MAX);
}

#[test]
#[ignore = "takes minutes: cargo test --release --test soak -- --ignored --nocapture"]
fn ten_thousand_chats_through_deaths_other_processes_and_sleep_lose_nothing() {
    LONG_WITH_FAULTS.run_with_faults(Duration::MAX);
}

#[test]
#[ignore = "takes minutes: BURSAR_SOAK_SECONDS=600 cargo test --release --test soak -- --ignored --nocapture minutes"]
fn minutes_of_hybrid_chats_survive_deaths_other_processes_and_sleep() {
    Soak { requests: usize::MAX, source: hybrid, ..LONG_WITH_FAULTS }.run_with_faults(asked_time());
}

#[test]
fn another_process_takes_the_requested_bytes() {
    other_process::live();
}

#[test]
#[ignore = "needs a GPU and minutes: BURSAR_SOAK_SECONDS=300 cargo test --release --test soak -- --ignored --nocapture gpu"]
fn chats_on_a_gpu_through_deaths_other_processes_and_sleep_lose_nothing() {
    let soak = Soak { requests: usize::MAX, between_readings: 60, process_growth: 96 << 20, ..SHORT_WITH_FAULTS };
    // Each run has a different seed, because an hour is divided among several runs and some of them
    // begin at the same time.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time after 1970");
    let seed = asked("BURSAR_SOAK_SEED").unwrap_or(now.as_secs() << 20 | u64::from(std::process::id()));
    println!("BURSAR_SOAK_SEED={seed}");
    let readings = async {
        let faulty = FaultyRuntime::begin_on_a_gpu(seed).await?;
        Some(soak.readings_with_faults(faulty, seed, asked_time()).await)
    };
    match soak.alone(readings) {
        // The other sequences in a step change the rounding, so a greedy reply may choose either of
        // two nearly tied tokens.
        Some(ends) => assert!(ends.compared > 0 && ends.differing * 2 < ends.compared, "{ends:?}"),
        None => println!("skipped, no GPU is here"),
    }
}

impl Soak {
    /// A soak with faults on a host device, for at most `within`.
    fn run_with_faults(&self, within: Duration) {
        let seed = 20261125;
        let readings = async {
            let faulty = FaultyRuntime::begin(self.source, seed).await;
            Some(self.readings_with_faults(faulty, seed, within).await)
        };
        let ends = self.alone(readings).expect("a host device is always there");
        assert!(ends.compared > ends.finished / 5, "{ends:?}");
        assert_eq!(ends.differing, 0, "replies are the same despite faults: {ends:?}");
    }

    /// Runs for at most `within`.
    async fn readings_with_faults(
        &self,
        mut faulty: FaultyRuntime,
        seed: u64,
        within: Duration,
    ) -> (Vec<Reading>, Ends) {
        let mut load = Load::new(faulty.models.clone(), seed).with_known_replies().await;
        let ledger = faulty.ledger().await;
        let (mut readings, mut base, began) = (Vec::new(), None, Instant::now());
        while load.asked() < self.requests && began.elapsed() < within {
            let count = self.between_readings.min(self.requests - load.asked());
            tokio::join!(load.run(count, AT_ONCE), faulty.inject(4));
            faulty.settled(&ledger).await;
            let reading = Reading::of_a_process_at_rest(base.as_ref()).await;
            println!("{:>6} requests, {:>4} s: {reading}", load.asked(), began.elapsed().as_secs());
            if readings.len() + 1 == self.warm_up {
                base = Some(reading.clone());
            }
            readings.push(reading);
        }
        let counts = faulty.counts();
        println!("{counts:?}");
        let rounds = readings.len();
        assert!(counts.deaths > rounds / 2 && counts.sleeps > 0, "{counts:?}");
        assert!(counts.other_processes > 0 && counts.tenants > 0, "{counts:?}");
        faulty.runtime.shutdown().await;
        (readings, load.ends())
    }

    fn run(&self) {
        let ends = self.alone(async { Some(self.readings().await) }).expect("a host device is always there");
        assert!(ends.cancelled > self.requests / 10, "cancelled requests end as cancelled: {ends:?}");
    }

    /// Runs a soak while no other soak runs, and compares its readings.
    fn alone(&self, soak: impl Future<Output = Option<(Vec<Reading>, Ends)>>) -> Option<Ends> {
        let _alone = ALONE.lock().unwrap_or_else(|failed| failed.into_inner());
        // Idle blocking threads end quickly, so that a reading does not have to wait long.
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_keep_alive(std::time::Duration::from_millis(20))
            .enable_all()
            .build()
            .expect("threads");
        let (readings, ends) = threads.block_on(soak)?;
        println!("{ends:?}");
        let requests = readings.len() * self.between_readings;
        assert!(ends.finished > requests / 4, "most chats that are not cancelled are completed: {ends:?}");
        self.compare(&readings[self.warm_up..]);
        Some(ends)
    }

    async fn readings(&self) -> (Vec<Reading>, Ends) {
        // The KV cache is too small for all chats: some wait, and some
        // are preempted and recomputed.
        let envelope = Some(Envelope { context_tokens: 320, ..small_envelope() });
        let options = LoadOptions { envelope, kv_tokens: Some(640), requests: Some(AT_ONCE * 3 / 2), ..small() };
        let stage = Stage::of((self.source)(), options).await;
        let ledger = stage.snapshot().await;
        let (mut load, mut readings, mut base) = (Load::new(vec![stage.model.clone()], 20261121), Vec::new(), None);
        let began = Instant::now();
        while load.asked() < self.requests {
            load.run(self.between_readings.min(self.requests - load.asked()), AT_ONCE).await;
            stage.settled(&ledger).await;
            let reading = Reading::of_a_process_at_rest(base.as_ref()).await;
            println!("{:>6} requests, {:>4} s: {reading}", load.asked(), began.elapsed().as_secs());
            if readings.len() + 1 == self.warm_up {
                base = Some(reading.clone());
            }
            readings.push(reading);
        }
        let ends = load.ends();
        stage.runtime.shutdown().await;
        (readings, ends)
    }

    /// Compares the smallest of the first readings after the warm-up with the smallest of the last
    /// readings. A leak is in every later reading, but a temporary peak of an allocator is not.
    fn compare(&self, readings: &[Reading]) {
        let few = readings.len() / 2;
        let (first, last) = (&readings[..few], &readings[readings.len() - few..]);
        let least = |readings: &[Reading], of: fn(&Reading) -> u64| readings.iter().map(of).min().unwrap_or(0);
        let grown = |of: fn(&Reading) -> u64| least(last, of).saturating_sub(least(first, of));
        let (heap, process) = (grown(|reading| reading.heap_bytes), grown(|reading| reading.resident_bytes));
        println!("grown by {heap} bytes of heap, {process} bytes of the process");
        assert!(heap <= self.heap_growth, "the heap grew by {heap} bytes: {readings:#?}");
        assert!(process <= self.process_growth, "the process grew by {process} bytes: {readings:#?}");
    }
}
