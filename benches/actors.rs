//! The cost of budget calls through the budget's actor, as users and other actors make them:
//! messages, thread wake-ups, the mailbox.
//!
//! `cargo bench --bench actors`

use bursar::{Bytes, Class, DeviceChoice, Runtime, RuntimeConfig};
use divan::{Bencher, black_box, counter::ItemsCount};
use tokio::runtime::Builder;

fn main() {
    divan::main();
}

/// A runtime with the threads of its actors.
struct Stage {
    threads: tokio::runtime::Runtime,
    runtime: Runtime,
}

impl Stage {
    fn set() -> Self {
        let threads = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads");
        let runtime = threads.block_on(Runtime::start(on_the_host())).expect("a host device starts");
        Stage { threads, runtime }
    }
}

/// Uses a host device even on a machine with a GPU, because the figures are for the host.
fn on_the_host() -> RuntimeConfig {
    RuntimeConfig { device: DeviceChoice::Host(Bytes::mib(512)), ..RuntimeConfig::default() }
}

/// Grants a lease and drops it. The ledger reads the release before the next question.
async fn lease_and_drop(runtime: &Runtime) {
    let lease = runtime.budget().lease(Class::external("bench"), Bytes::mib(2)).await.expect("memory is free");
    drop(black_box(lease));
}

/// The smallest question, whose answer is one number.
async fn question(runtime: &Runtime) {
    black_box(runtime.budget().available().await.expect("the budget answers"));
}

/// A snapshot of every byte by class, owner and model.
async fn snapshot(runtime: &Runtime) {
    black_box(runtime.budget().snapshot().await.expect("the budget answers"));
}

/// Questions from a thread outside the actors' thread pool: each round wakes two threads.
mod from_a_thread_of_ones_own {
    use super::*;

    fn one<F: Future<Output = ()>>(bencher: Bencher, stage: &Stage, round: impl Fn() -> F) {
        bencher.bench_local(|| stage.threads.block_on(round()));
    }

    #[divan::bench]
    fn lease_and_drop(bencher: Bencher) {
        let stage = Stage::set();
        one(bencher, &stage, || super::lease_and_drop(&stage.runtime));
    }

    #[divan::bench]
    fn question(bencher: Bencher) {
        let stage = Stage::set();
        one(bencher, &stage, || super::question(&stage.runtime));
    }

    #[divan::bench]
    fn snapshot(bencher: Bencher) {
        let stage = Stage::set();
        one(bencher, &stage, || super::snapshot(&stage.runtime));
    }
}

/// Questions from a task in the actors' thread pool, as requests ask them. A sample is 64 rounds
/// one after the other.
mod from_a_task_64_rounds {
    use super::*;

    const ROUNDS: usize = 64;

    fn many<F: Future<Output = ()> + Send>(
        bencher: Bencher,
        round: impl Fn(Runtime) -> F + Send + Sync + Copy + 'static,
    ) {
        let stage = Stage::set();
        bencher.counter(ItemsCount::new(ROUNDS)).bench_local(|| {
            let runtime = stage.runtime.clone();
            let task = stage.threads.spawn(async move {
                for _ in 0..ROUNDS {
                    round(runtime.clone()).await;
                }
            });
            stage.threads.block_on(task).expect("no round fails");
        });
    }

    #[divan::bench]
    fn lease_and_drop(bencher: Bencher) {
        many(bencher, |runtime| async move { super::lease_and_drop(&runtime).await });
    }

    #[divan::bench]
    fn question(bencher: Bencher) {
        many(bencher, |runtime| async move { super::question(&runtime).await });
    }
}
