//! Runs of the simulated world, from a seed to the end.

use std::sync::{
    atomic::{AtomicU64, Ordering::Relaxed},
    mpsc,
};

use super::*;

/// Runs a seed to its end.
fn run(seed: u64, groups: CacheGroups, looks_ahead: bool) -> World {
    let mut world = World::new(seed, groups, looks_ahead);
    for _ in 0..world.chance.between(20, 300) {
        world.something_happens();
    }
    world.drain();
    world.check_end();
    world
}

/// Like [`run`], and prints the seed of a world that fails.
pub fn run_and_say(seed: u64, groups: CacheGroups, looks_ahead: bool) -> World {
    struct Say(u64);
    impl Drop for Say {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("seed {}", self.0);
            }
        }
    }
    let _say = Say(seed);
    run(seed, groups, looks_ahead)
}

/// Runs this many seeds on all processors, with the cache groups that `groups` draws for a seed.
/// Passes each world to `take`, in any order.
pub fn for_each_world(seeds: u64, groups: impl Fn(u64) -> CacheGroups + Sync, mut take: impl FnMut(World)) {
    let next = AtomicU64::new(0);
    let one = || {
        let seed = Some(next.fetch_add(1, Relaxed)).filter(|seed| *seed < seeds)?;
        Some(run_and_say(seed, groups(seed), true))
    };
    std::thread::scope(|scope| {
        let (worlds, done) = mpsc::sync_channel(1);
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            let (worlds, one) = (worlds.clone(), &one);
            scope.spawn(move || while one().is_some_and(|world| worlds.send(world).is_ok()) {});
        }
        drop(worlds);
        done.iter().for_each(&mut take);
    });
}
