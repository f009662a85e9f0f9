//! Runs of the simulated world, from a seed to the end.

use std::sync::{
    atomic::{AtomicU64, Ordering::Relaxed},
    mpsc,
};

use super::*;

/// Builds the scheduler for a seed. Every other seed has a token interval target, which its steps
/// may miss.
pub fn scheduler(limits: Limits, groups: &CacheGroups, looks_ahead: bool, seed: u64) -> SchedulerCore {
    let scheduler = SchedulerCore::new(limits)
        .with_groups(groups.clone())
        .with_token_interval(token_interval(seed).filter(|_| seed.is_multiple_of(2)));
    let scheduler = scheduler.with_tenants(weights(seed)).with_host(tiers::slots(seed), tiers::costs(seed));
    let scheduler = scheduler.with_draft_head(draft_head(seed)).with_whole_pictures(whole_picture_tokens(seed));
    if looks_ahead { scheduler } else { scheduler.without_look_ahead() }
}

pub fn vision(cache_rows: usize, launch_patches: usize, seed: u64) -> VisionCore {
    VisionCore::new(cache_rows, launch_patches).with_tenants(weights(seed)).with_host(tiers::rows(seed))
}

impl World {
    /// The tokens that the model chooses in the rows of logits of a step, if each draft is right.
    pub fn choices(&mut self, plan: &StepPlan) -> Vec<u32> {
        let mut of_sequence = |rows: &ChosenRows| {
            let number = self.of_sequence(rows.sequence).expect("a request asked for the sequence").number;
            (rows.position..rows.position + rows.count()).map(move |position| chosen(number, position))
        };
        plan.rows.iter().flat_map(&mut of_sequence).collect()
    }

    /// The tokens that the lane returns for a step. For each sequence, these are the accepted
    /// drafts and the token that the model chooses after them.
    pub fn accepted(&mut self, plan: &StepPlan) -> Vec<Vec<Option<u32>>> {
        let mut choices = self.choices(plan).into_iter();
        let mut of_sequence = |rows: &ChosenRows| {
            let chosen: Vec<u32> = choices.by_ref().take(rows.count()).collect();
            let accepted = rows.drafts.iter().zip(&chosen).take_while(|(draft, token)| draft == token).count();
            self.rejected += rows.drafts.len() - accepted;
            self.accepted += accepted;
            chosen.into_iter().take(accepted + 1).map(Some).collect()
        };
        plan.rows.iter().map(&mut of_sequence).collect()
    }

    /// The drafts of a draft head after these tokens. Three of four drafts are the tokens that the
    /// model chooses. Checks that there are blocks for all cached drafts.
    pub fn proposed(&mut self, plan: &StepPlan, accepted: &[Vec<Option<u32>>]) -> Vec<Vec<u32>> {
        assert!(plan.batch.drafts.is_some(), "each step runs the draft head");
        let seed = self.seed;
        let mut of_sequence = |(rows, tokens): (&ChosenRows, &Vec<Option<u32>>)| {
            let number = self.of_sequence(rows.sequence).expect("a request asked for the sequence").number;
            let further = rows.further.as_ref().map_or(0, |further| {
                let slots = if draft_head(seed) == Some(DraftPositions::Advancing) { further.count } else { 0 };
                let last = further.index + rows.drafts.len() + slots;
                let blocks = further.tables.iter().map(|table| table.end()).min().expect("a cache group");
                assert!(blocks * BLOCK_TOKENS >= last, "{blocks} blocks for {last} tokens");
                further.count
            });
            let next = rows.position + tokens.len();
            let draft = |position: usize| {
                let is_wrong = Chance(number ^ (position as u64) << 20).one_in(4);
                chosen(number, position) + u32::from(is_wrong)
            };
            (next..next + 1 + further).map(draft).collect()
        };
        plan.rows.iter().zip(accepted).map(&mut of_sequence).collect()
    }
}

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

/// Runs this many seeds on all processors, with the cache groups that `groups` returns for a seed.
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
