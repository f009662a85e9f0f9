//! Many chats of all kinds, cancelled at random moments. After all have ended, everything is as before and the process
//! is no larger.
//!
//! The short soak is part of every test run. The long one, ten thousand requests, takes minutes:
//! `cargo test --release --test soak -- --ignored --nocapture`

#[path = "soak/load.rs"]
mod load;
#[path = "soak/reading.rs"]
mod reading;
#[allow(dead_code, reason = "stories use more of it")]
#[path = "it/stage.rs"]
mod stage;

use std::{sync::Mutex, time::Instant};

use bursar::{Envelope, LoadOptions};
use load::{Ends, Load};
use reading::{Counting, Reading};
use stage::{Stage, small, small_envelope};

#[global_allocator]
static HEAP: Counting = Counting;

/// Both soaks measure the whole process, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Requests under way at once. Each asks for up to three samples, so that some are refused for lack of credits.
const AT_ONCE: usize = 12;

/// How a soak runs, and what growth it allows.
struct Soak {
    requests: usize,
    /// Requests between two readings, which are taken when none is under way.
    between_readings: usize,
    /// First readings to ignore: caches fill and thread pools start.
    warm_up: usize,
    /// Bytes by which the heap, and the whole process, may grow after the warm-up.
    heap_growth: u64,
    process_growth: u64,
}

#[test]
fn hundreds_of_randomly_cancelled_chats_leak_nothing() {
    Soak { requests: 320, between_readings: 32, warm_up: 4, heap_growth: 1 << 20, process_growth: 16 << 20 }.run();
}

#[test]
#[ignore = "takes minutes: cargo test --release --test soak -- --ignored --nocapture"]
fn ten_thousand_randomly_cancelled_chats_leak_nothing() {
    Soak { requests: 10_000, between_readings: 500, warm_up: 4, heap_growth: 1 << 20, process_growth: 8 << 20 }.run();
}

impl Soak {
    fn run(&self) {
        let _alone = ALONE.lock().unwrap_or_else(|failed| failed.into_inner());
        // Idle blocking threads end quickly, so that a reading need not wait long.
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_keep_alive(std::time::Duration::from_millis(20))
            .enable_all()
            .build()
            .expect("threads");
        let (readings, ends) = threads.block_on(self.readings());
        println!("{ends:?}");
        assert!(ends.finished > self.requests / 4, "most chats that are not cancelled end by themselves: {ends:?}");
        assert!(ends.cancelled > self.requests / 10, "cancels are met: {ends:?}");
        self.compare(&readings[self.warm_up..]);
    }

    async fn readings(&self) -> (Vec<Reading>, Ends) {
        // The pool is too small for all: some wait, and some are preempted and recomputed.
        let envelope = Some(Envelope { context_tokens: 320, ..small_envelope() });
        let stage =
            Stage::set(LoadOptions { envelope, kv_tokens: Some(640), requests: AT_ONCE * 3 / 2, ..small() }).await;
        let ledger = stage.snapshot().await;
        let (mut load, mut readings, mut base) = (Load::new(&stage.model, 20261121), Vec::new(), None);
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

    /// Compares the smallest of the first readings after the warm-up with the smallest of the last few. A real leak is
    /// in all of them; an allocator's passing peak is not.
    fn compare(&self, readings: &[Reading]) {
        let few = readings.len() / 2;
        let (first, last) = (&readings[..few], &readings[readings.len() - few..]);
        let least = |readings: &[Reading], of: fn(&Reading) -> u64| readings.iter().map(of).min().unwrap_or(0);
        let grown = |of: fn(&Reading) -> u64| least(last, of).saturating_sub(least(first, of));
        let (heap, process) = (grown(|reading| reading.heap_bytes), grown(|reading| reading.resident_bytes));
        println!("grown by {heap} bytes of heap, {process} bytes of the process");
        assert!(heap <= self.heap_growth, "the heap has {heap} bytes more: {readings:#?}");
        assert!(process <= self.process_growth, "the process has {process} bytes more: {readings:#?}");
    }
}
