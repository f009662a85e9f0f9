//! Host ranks that compute one model together, each on its thread.

use std::time::Duration;

use bursar_kernels::{Cpu, HostLink};

/// A timeout that is longer than the delay of any thread on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs `story` on the backend of each of `of` ranks, and returns the results in rank order.
///
/// # Panics
/// If `story` panics on a rank. The other ranks, which wait for that rank, then lose their device.
pub fn on_ranks<T: Send>(of: usize, story: impl Fn(Cpu) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = |link| {
            let story = &story;
            scope.spawn(move || story(Cpu::linked(1, link)))
        };
        let running: Vec<_> = HostLink::between(of, PATIENCE).into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    })
}
