//! Host memory of the simulated world, and copies that run as late as the seed says.

use bursar_actors::{kv::Copies, pace::CopyCosts};
use bursar_kernels::ops::copy_blocks::BlockCopy;

use super::*;

/// Slots of host memory: none in every fourth seed.
pub fn slots(seed: u64) -> usize {
    match seed % 4 {
        0 => 0,
        some => (some * 5 + seed % 23) as usize,
    }
}

/// What copies cost is known or not.
pub fn costs(seed: u64) -> CopyCosts {
    CopyCosts::beside(pace(seed).map(|pace| pace.costs).filter(|_| seed.is_multiple_of(3)))
}

/// What host memory holds, and the copies that the lane has.
pub struct HostMemory {
    /// As the world's slots, for the tokens of each block.
    slots: Vec<Option<u64>>,
    /// Copies that have not run yet, in order.
    queued: VecDeque<(bool, BlockCopy)>,
    /// How many copies each job has that is not answered.
    pub under_way: VecDeque<usize>,
    /// How many of those have run.
    run: usize,
    /// Jobs begun and answered, and how many were begun up to the last that each step under way waits for.
    begun: usize,
    ended: usize,
    waited_for: usize,
    before_steps: VecDeque<usize>,
    /// Blocks that came back.
    pub fetched: usize,
    /// Blocks that left.
    pub left: usize,
}

impl HostMemory {
    pub fn new(seed: u64) -> Self {
        let slots = vec![None; slots(seed) * BLOCK_TOKENS];
        HostMemory {
            slots,
            queued: VecDeque::new(),
            under_way: VecDeque::new(),
            run: 0,
            begun: 0,
            ended: 0,
            waited_for: 0,
            before_steps: VecDeque::new(),
            fetched: 0,
            left: 0,
        }
    }
}

impl World {
    /// The lane gets copies.
    pub(super) fn copy(&mut self, copies: Copies) {
        assert!(self.host.under_way.len() < 6, "the lane's queue has room for six");
        self.note(format_args!("copies of {} and {} blocks", copies.to_host.len(), copies.to_device.len()));
        self.host.under_way.push_back(copies.len());
        self.host.begun += 1;
        if !copies.to_host.is_empty() {
            self.host.waited_for = self.host.begun;
        }
        self.host.left += copies.to_host.len();
        self.host.fetched += copies.to_device.len();
        self.host.queued.extend(copies.to_host.into_iter().map(|copy| (true, copy)));
        self.host.queued.extend(copies.to_device.into_iter().map(|copy| (false, copy)));
        // Some are quick.
        let at_once = self.chance.below(4) * 2;
        self.run_copies(at_once);
    }

    fn run_copies(&mut self, count: usize) {
        let count = count.min(self.host.queued.len());
        self.host.run += count;
        for (is_to_host, BlockCopy { block, slot }) in self.host.queued.drain(..count) {
            let [block, slot] = [block, slot].map(|place| place as usize * BLOCK_TOKENS);
            let device = &mut self.slots[block..block + BLOCK_TOKENS];
            let host = &mut self.host.slots[slot..slot + BLOCK_TOKENS];
            match is_to_host {
                true => host.copy_from_slice(device),
                false => device.copy_from_slice(host),
            }
        }
    }

    /// A step comes after all copies to the host that the lane got before it.
    pub(super) fn copies_before_a_step(&mut self) {
        let last = self.host.queued.iter().rposition(|(is_to_host, _)| *is_to_host);
        self.run_copies(last.map_or(0, |last| last + 1));
        self.host.before_steps.push_back(self.host.waited_for);
    }

    /// The lane answers copies that a step waited for before the step.
    pub(super) fn copies_end_before_a_step(&mut self) {
        let before = self.host.before_steps.pop_front().expect("each step notes what it waits for");
        while self.host.ended < before {
            self.copies_end();
        }
    }

    pub(super) fn copies_end(&mut self) {
        let Some(copies) = self.host.under_way.pop_front() else { return };
        self.run_copies(copies.saturating_sub(self.host.run));
        self.host.run -= copies;
        self.host.ended += 1;
        let micros = self.seed % 50 * copies as u64;
        self.scheduler_step(Input::Copied(micros));
    }

    /// The scheduler has died. What is on the lane ends before its successor starts, which knows of nothing there.
    pub(super) fn forget_host(&mut self) {
        self.run_copies(usize::MAX);
        let slots = std::mem::take(&mut self.host.slots);
        let (fetched, left) = (self.host.fetched, self.host.left);
        self.host = HostMemory { slots, fetched, left, ..HostMemory::new(self.seed) };
    }
}
