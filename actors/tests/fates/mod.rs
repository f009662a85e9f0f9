//! Events in the simulated world: callers cancel, return, or miss deadlines; actors die; and the
//! pool shrinks and grows.

use super::*;

impl World {
    pub(super) fn cancel_somebody(&mut self) {
        let live: Vec<u64> = self.requests.values().filter(|request| !request.is_over()).map(|r| r.number).collect();
        if live.is_empty() {
            return;
        }
        let number = live[self.chance.below(live.len())];
        self.note(format_args!("request {number} is cancelled"));
        let request = self.requests.get_mut(&number).expect("the request is running");
        request.cancelled = true;
        // Requests with even numbers withdraw their ticket before the answer arrives. For the other
        // requests, the cancellation is noticed when the answer arrives.
        if let Some(ticket) = request.ticket.take_if(|_| number.is_multiple_of(2)) {
            return self.vision_step(vision::Input::Withdraw(ticket));
        }
        if let Some(id) = request.sequence {
            self.scheduler_step(Input::Cancel(id));
            // As in the actor, a cancelled sequence keeps its pictures until its step has ended.
            // Another request may use the same embeddings.
            if !self.scheduler.is_known(id)
                && let Some((keys, _)) = self.pins.remove(&id)
            {
                self.vision_step(vision::Input::Unpin(keys));
            }
        }
    }

    /// Restarts each request that must return. Such a request asks for its pictures again, as its
    /// driver would.
    pub(super) fn return_all(&mut self) {
        while let Some((number, id)) = self.returning.pop_front() {
            let request = self.requests.get_mut(&number).expect("the request is in the list");
            if !request.is_over() {
                request.returns_as = Some(id);
                self.returned += 1;
                self.live(number);
            }
        }
    }

    /// The scheduler has dropped a sequence that missed a deadline.
    pub(super) fn is_late(&mut self, id: SequenceId, deadline: Deadline) {
        let request = self.of_sequence(id).expect("a request asked for the sequence");
        assert!(!request.is_over(), "a request ends once");
        let had_to_be_met = match deadline {
            Deadline::Queue => request.deadlines().queue.is_some() && !request.has_begun,
            Deadline::FirstToken => request.deadlines().first_token.is_some() && request.produced.is_empty(),
            Deadline::Reply => request.deadlines().reply.is_some(),
        };
        assert!(had_to_be_met, "deadline {deadline:?} of {id} does not apply");
        request.is_late = true;
        let number = request.number;
        self.note(format_args!("request {number} is late"));
        let (keys, _) = self.pins.remove(&id).expect("the late request held pins on its pictures");
        self.vision_step(vision::Input::Unpin(keys));
        *self.late.entry(deadline).or_default() += 1;
    }

    /// Another process takes or frees memory. The pool never has fewer blocks than the largest
    /// request needs, or more blocks than the stressed size.
    pub(super) fn resize(&mut self) {
        let floor = self.groups.blocks_for(self.context, self.limits.step_tokens);
        let most = self.limits.kv_tokens / BLOCK_TOKENS;
        let blocks = self.chance.between(floor, most);
        self.blocks = blocks;
        self.shrinks += usize::from(blocks < self.scheduler.kv().blocks());
        self.note(format_args!("{blocks} blocks of {most}"));
        self.scheduler_step(Input::Resize(blocks));
    }

    /// The scheduler dies. With `all`, the vision actor dies first. Work on the lanes ends before
    /// either death.
    pub(super) fn die(&mut self, all: bool) {
        self.note(if all { "all die" } else { "the scheduler dies" });
        self.under_way.clear();
        self.forget_host();
        let limits = Limits { kv_tokens: self.blocks * BLOCK_TOKENS, ..self.limits };
        self.scheduler = scheduler(limits, &self.groups, self.looks_ahead, self.seed);
        self.scheduler.step(Input::Now(self.clock));
        self.slots = vec![None; self.blocks * BLOCK_TOKENS];
        let returning: Vec<u64> = self.returning.drain(..).map(|(number, _)| number).collect();
        let lost: Vec<u64> = self
            .requests
            .values_mut()
            .filter(|request| {
                let is_asking = all && request.ticket.is_some();
                !request.is_over() && (request.sequence.is_some() || returning.contains(&request.number) || is_asking)
            })
            .map(|request| {
                (request.sequence, request.returns_as, request.ticket) = (None, None, None);
                request.number
            })
            .collect();
        if all {
            self.requests.values_mut().for_each(|request| request.ticket = None);
        }
        let pins = std::mem::take(&mut self.pins).into_values();
        let pins: Vec<Pins> = pins.chain(std::mem::take(&mut self.pins_of_steps).into_iter().flatten()).collect();
        // The code below must run after the list of lost requests is complete. When pictures are
        // unpinned, the vision core may admit another request, which belongs to the new actors.
        if all {
            self.launches.clear();
            self.vision = vision(self.cache_rows, self.launch_patches, self.seed);
            self.host_rows.forget();
            self.rows = vec![None; self.cache_rows];
            self.pixels.clear();
        } else {
            pins.into_iter().for_each(|(keys, _)| self.vision_step(vision::Input::Unpin(keys)));
        }
        lost.into_iter().for_each(|number| self.live(number));
    }

    /// No more requests arrive. All existing requests must end within a bounded number of steps.
    pub(super) fn drain(&mut self) {
        let tokens: usize = self.requests.values().map(|r| r.prompt_tokens() + r.tokens_max + 2).sum();
        // Each sequence may be computed again after the end of every other sequence.
        let bound = self.steps + 4 * tokens * (1 + self.requests.len());
        while !(self.under_way.is_empty()
            && self.host.under_way.is_empty()
            && self.host_rows.under_way.is_empty()
            && self.launches.is_empty()
            && self.returning.is_empty())
        {
            self.return_all();
            self.copies_end();
            self.rows_end();
            self.launch_ends();
            self.step_ends();
            assert!(self.steps < bound, "the simulation ends within its steps");
        }
    }
}
