//! Host memory of the simulated world, and copies that are delayed depending on the seed.

use bursar_actors::{kv::Copies, token_interval::CopyCosts, vision::EncodeRequest};
use bursar_kernels::ops::copy_blocks::BlockCopy;

use super::*;

/// The number of KV slots in host memory. Every fourth seed has no KV slots in host memory.
pub fn slots(seed: u64) -> usize {
    match seed % 4 {
        0 => 0,
        some => (some * 5 + seed % 23) as usize,
    }
}

/// The number of picture rows in host memory. Every third seed has no picture rows in host memory.
pub fn rows(seed: u64) -> usize {
    match seed % 3 {
        0 => 0,
        some => (some * 9 + seed % 17) as usize,
    }
}

/// Copy costs, to be compared with step costs that are known only in some seeds.
pub fn costs(seed: u64) -> CopyCosts {
    CopyCosts::with_steps(
        token_interval(seed).map(|token_interval| token_interval.costs).filter(|_| seed.is_multiple_of(3)),
    )
}

/// The content of host memory for KV blocks, and the copies on the lane.
pub struct HostMemory {
    /// The content of each token slot, hashed as in `World::slots`.
    slots: Vec<Option<u64>>,
    /// Copies that have not run yet, in order.
    queued: VecDeque<(bool, BlockCopy)>,
    /// The number of copies in each unanswered job.
    pub under_way: VecDeque<usize>,
    /// The number of copies in unanswered jobs that have run.
    run: usize,
    /// The number of jobs that were begun.
    begun: usize,
    /// The number of jobs that were answered.
    ended: usize,
    /// The next step waits until this many jobs were answered. Only jobs with copies to the host
    /// raise the number.
    waited_for: usize,
    /// The value of `waited_for` for each step on the lane, the oldest step first.
    before_steps: VecDeque<usize>,
    /// Blocks copied back to the device.
    pub fetched: usize,
    /// Blocks copied to host memory.
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

/// The content of host memory for pictures, and the copies on the vision lane.
pub struct HostRows {
    slots: Vec<Option<PictureHash>>,
    /// The content that rows will have when the copies end.
    pub under_way: VecDeque<Vec<(u32, PictureHash)>>,
    /// Pictures copied back to the device.
    pub brought: usize,
    /// Requests whose pictures were no longer in host memory.
    pub lost: usize,
}

impl HostRows {
    pub fn new(seed: u64) -> Self {
        HostRows { slots: vec![None; rows(seed)], under_way: VecDeque::new(), brought: 0, lost: 0 }
    }

    /// The vision actor has died. Its successor does not know the content of host memory.
    pub fn forget(&mut self) {
        self.slots.fill(None);
        self.under_way.clear();
    }
}

impl World {
    /// The driver requests pictures. With `decodes_all`, all of them are decoded. Otherwise, only
    /// the pictures that the vision core does not hold are decoded.
    pub(super) fn want(&mut self, number: u64, mut wanted: Vec<EncodeRequest>, decodes_all: bool) {
        self.next_ticket += 1;
        let ticket = Ticket(self.next_ticket);
        self.requests.get_mut(&number).expect("the request is running").ticket = Some(ticket);
        for picture in &mut wanted {
            picture.has_pixels = decodes_all || !self.vision.holds_all(&[picture.key]);
        }
        self.pixels.extend(wanted.iter().filter(|picture| picture.has_pixels).map(|picture| picture.key));
        let rank = self.requests[&number].rank();
        self.vision_step(vision::Input::Want(ticket, rank, wanted));
    }

    /// Pictures were lost from host memory, so the request's pictures must be decoded after all.
    pub(super) fn is_lost(&mut self, ticket: Ticket) {
        self.host_rows.lost += 1;
        let request = self.requests.values().find(|request| request.ticket == Some(ticket));
        let request = request.expect("only waiting requests get this effect");
        let (number, wanted) = (request.number, request.pictures[request.computed..].to_vec());
        self.want(number, wanted, true);
    }

    /// The vision lane gets copies. The copies to the host take effect before any later write.
    pub(super) fn copy_rows(&mut self, to_host: &[BlockCopy], to_device: &[BlockCopy]) {
        self.note(format_args!("copies of {} and {} rows", to_host.len(), to_device.len()));
        for BlockCopy { block, slot } in to_host.iter().copied() {
            let content = self.rows[block as usize];
            assert!(content.is_some(), "a row that was never written is copied out");
            self.host_rows.slots[slot as usize] = content;
        }
        let of_slot = |copy: &BlockCopy| {
            self.host_rows.slots[copy.slot as usize].expect("the slot was written before it is read")
        };
        let coming: Vec<_> = to_device.iter().map(|copy| (copy.block, of_slot(copy))).collect();
        for (row, _) in &coming {
            assert!(!self.all_pins().any(|(_, rows)| rows.contains(row)), "a row that a request reads is overwritten");
            self.rows[*row as usize] = None;
        }
        let names: BTreeSet<_> = coming.iter().map(|(_, key)| *key).collect();
        self.host_rows.brought += names.len();
        self.host_rows.under_way.push_back(coming);
    }

    pub(super) fn rows_end(&mut self) {
        let Some(came) = self.host_rows.under_way.pop_front() else { return };
        came.into_iter().for_each(|(row, key)| self.rows[row as usize] = Some(key));
        self.vision_step(vision::Input::Copied);
    }

    /// The step lane gets copies.
    pub(super) fn copy(&mut self, copies: Copies) {
        assert!(copies.states.is_empty(), "the model has no states");
        let copies = copies.blocks;
        assert!(self.host.under_way.len() < 6, "the queue of the lane can hold six copies");
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
        // Some copies complete at once.
        let at_once = self.chance.below(4) * 2;
        self.run_copies(at_once);
    }

    /// The blocks that the steps on the lane read or write.
    fn blocks_of_steps(&self) -> BTreeSet<u32> {
        let mut blocks = BTreeSet::new();
        for StepPlan { batch, .. } in self.under_way.iter().map(|plan| &**plan) {
            for (row, table) in batch.block_tables.chunks_exact(batch.blocks_max()).enumerate() {
                let (group, part) = (row / batch.sequence_count(), row % batch.sequence_count());
                let length = batch.context_lengths[part] as usize;
                let new = (batch.query_starts[part + 1] - batch.query_starts[part]) as usize;
                let first = self.groups.first_read(group, length - new);
                blocks.extend(&table[first..length.div_ceil(BLOCK_TOKENS)]);
            }
        }
        blocks
    }

    fn run_copies(&mut self, count: usize) {
        let count = count.min(self.host.queued.len());
        self.host.run += count;
        let read = self.blocks_of_steps();
        for (is_to_host, BlockCopy { block, slot }) in self.host.queued.drain(..count) {
            assert!(is_to_host || !read.contains(&block), "a copy fills a block that a running step reads");
            let [block, slot] = [block, slot].map(|place| place as usize * BLOCK_TOKENS);
            let device = &mut self.slots[block..block + BLOCK_TOKENS];
            let host = &mut self.host.slots[slot..slot + BLOCK_TOKENS];
            if is_to_host { host.copy_from_slice(device) } else { device.copy_from_slice(host) }
        }
    }

    /// A step runs after all copies to the host that were queued before it.
    pub(super) fn copies_before_a_step(&mut self) {
        let last = self.host.queued.iter().rposition(|(is_to_host, _)| *is_to_host);
        self.run_copies(last.map_or(0, |last| last + 1));
        self.host.before_steps.push_back(self.host.waited_for);
    }

    /// The lane answers the copies that a step waited for before it answers the step.
    pub(super) fn copies_end_before_a_step(&mut self) {
        let before = self.host.before_steps.pop_front().expect("each step notes the copies it waits for");
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

    /// The scheduler has died. Copies on the lane end before its successor starts. The successor
    /// knows of no copies and no blocks in host memory.
    pub(super) fn forget_host(&mut self) {
        self.run_copies(usize::MAX);
        let slots = std::mem::take(&mut self.host.slots);
        let (fetched, left) = (self.host.fetched, self.host.left);
        self.host = HostMemory { slots, fetched, left, ..HostMemory::new(self.seed) };
    }
}
