//! Threads that divide an operation: the calling thread and a pool.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pulp::Arch;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Minimum number of multiply-adds, or equivalent work, per thread. Waking a pool thread and
/// waiting for it costs about ten microseconds.
const COST_PER_THREAD: usize = 1 << 16;

/// Pieces of work per thread, so that a thread that starts late delays the operation less. With 4
/// pieces per thread, two threads would split the 14 panels of a small model's GEMM into 8 and 6.
const PIECES_PER_THREAD: usize = 16;

pub(super) struct Threads {
    /// The threads of the pool, which do not include the calling thread.
    others: Option<ThreadPool>,
    count: usize,
}

impl Threads {
    pub(super) fn new(count: usize) -> Self {
        let others = (count > 1).then(|| {
            ThreadPoolBuilder::new()
                .num_threads(count - 1)
                .thread_name(|index| format!("bursar-cpu-{}", index + 1))
                .build()
                .expect("the operating system starts the compute threads")
        });
        Threads { others, count }
    }

    /// Calls `work(worker, item)` once per item, on as many threads as `cost` justifies. `cost` is
    /// the work for all items, in multiply-adds.
    ///
    /// `worker` is below the number of threads, and no two calls with the same `worker` run at
    /// the same time. It is unspecified which worker gets an item, so an item's result must not
    /// depend on its worker.
    ///
    /// `work`, with everything inlined into it, is compiled for each set of vector
    /// instructions. All versions do the same operations in the same order, so they give the
    /// same bits at every register width.
    pub(super) fn share(&self, items: usize, cost: usize, work: impl Fn(usize, usize) + Sync) {
        let workers = self.count.min(items).min(cost / COST_PER_THREAD + 1).max(1);
        let piece = items.div_ceil(workers * PIECES_PER_THREAD);
        let next = AtomicUsize::new(0);
        let run = |worker: usize| {
            Arch::new().dispatch(|| {
                loop {
                    let first = next.fetch_add(piece, Relaxed);
                    if first >= items {
                        return;
                    }
                    (first..items.min(first + piece)).for_each(|item| work(worker, item));
                }
            });
        };
        let Some(others) = self.others.as_ref().filter(|_| workers > 1) else { return run(0) };
        others.in_place_scope(|scope| {
            let run = &run;
            for worker in 1..workers {
                scope.spawn(move |_| run(worker));
            }
            run(0);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn each_item_runs_once_on_any_number_of_threads() {
        for threads in [1, 2, 5] {
            for items in [0, 1, 2, 7, 1000] {
                let seen: Vec<AtomicU32> = (0..items).map(|_| AtomicU32::new(0)).collect();
                Threads::new(threads).share(items, usize::MAX, |worker, item| {
                    assert!(worker < threads);
                    seen[item].fetch_add(1, Relaxed);
                });
                assert!(
                    seen.iter().all(|count| count.load(Relaxed) == 1),
                    "one of {items} items did not run exactly once on {threads} threads"
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "item 3")]
    fn a_panic_in_an_item_reaches_the_caller() {
        Threads::new(2).share(4, usize::MAX, |_, item| assert!(item != 3, "item {item}"));
    }
}
