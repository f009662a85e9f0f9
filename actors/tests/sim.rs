//! A seeded simulation of the pure cores together, without a device, on lanes whose speed depends
//! on the seed. Pictures go through the vision core. Sequences and their blocks go through the
//! scheduler. Callers arrive and cancel, and actors die. The same seed gives the same trace. To
//! repeat a failure, put its printed seed into `one_seed`.

mod cast;
mod checks;
mod fates;
mod tiers;
mod worlds;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt::Write,
    sync::Arc,
    time::Duration,
};

use bursar_actors::{
    compute::LAUNCHES,
    deadline::Deadline,
    kv::SequenceId,
    scheduler::{ChosenRows, Effect, Finish, Input, Limits, NewSequence, SchedulerCore, StepPlan},
    vision::{self, Ticket, VisionCore},
};
use bursar_kernels::{BLOCK_TOKENS, InputToken};
use bursar_model::flow::{CacheGroup, CacheGroups, DraftPositions, PictureHash, PrefixKeys};

use cast::{
    Chance, PATCHES_A_ROW, Request, STOP, chosen, content, draft_head, drafter, drafts, sampler, token_interval,
    weights, whole_picture_tokens,
};
use tiers::{HostMemory, HostRows};
use worlds::{for_each_world, run_and_say, scheduler, vision};

struct World {
    seed: u64,
    looks_ahead: bool,
    chance: Chance,
    limits: Limits,
    groups: CacheGroups,
    /// The maximum number of tokens of a request. Without windows, the pool always has blocks for
    /// this many. With windows, a context may be longer than the pool.
    context: usize,
    launch_patches: usize,
    cache_rows: usize,
    scheduler: SchedulerCore,
    vision: VisionCore,
    requests: BTreeMap<u64, Request>,
    /// The steps on the lane, the oldest first.
    under_way: VecDeque<Box<StepPlan>>,
    /// Tokens that the newest step in `under_way` chooses. The next step reads them on the device.
    previous: Vec<u32>,
    /// The encoder batches on the lane, the oldest first.
    launches: VecDeque<Vec<(PictureHash, Arc<[u32]>)>>,
    /// The content of the encoder cache, by row. Only encoder batches and copies from host memory
    /// write it.
    rows: Vec<Option<PictureHash>>,
    /// Pictures whose pixels the vision actor keeps.
    pixels: BTreeSet<PictureHash>,
    /// Pictures that each live sequence holds, and the rows that it reads.
    pins: BTreeMap<SequenceId, Pins>,
    /// Pictures that only a step on the lane still pins, the oldest step first.
    pins_of_steps: VecDeque<Vec<Pins>>,
    /// Requests that the scheduler sent back (`Readmit`) and that have not been started again
    /// yet, with their sequence ids.
    returning: VecDeque<(u64, SequenceId)>,
    next_request: u64,
    next_sequence: u64,
    next_ticket: u64,
    /// The content of each slot of the KV cache: a hash of everything from which it was computed.
    slots: Vec<Option<u64>>,
    host: HostMemory,
    host_rows: HostRows,
    trace: String,
    steps: usize,
    planned_ahead: usize,
    preemptions: usize,
    returned: usize,
    launched_ahead: usize,
    found_tokens: usize,
    resizes: usize,
    preempted_by_shrinks: usize,
    made_way: usize,
    late: BTreeMap<Deadline, usize>,
    /// Prompt tokens that were scored.
    scored: usize,
    /// The number of drafted tokens that were accepted. `rejected` counts the rejected ones.
    accepted: usize,
    rejected: usize,
    /// The number of orders to shrink the pool.
    shrinks: usize,
    /// The number of times that each sequence lost its blocks.
    losses: BTreeMap<SequenceId, usize>,
    /// Sequences that have begun.
    found: BTreeSet<SequenceId>,
    /// The number of pictures whose tokens were all in the prefix cache, so that no encoder cache
    /// rows were needed.
    found_computed: usize,
    /// The number of sequences that relied on such cached pictures, but whose cached blocks were
    /// evicted before the sequences started.
    missed: usize,
    /// The simulated time: the sum of the times of all steps.
    clock: Duration,
    /// Whether the scheduler is waiting for more requests of a burst.
    gathers: bool,
    /// The number of blocks that the pool should have. A new scheduler starts with this number.
    blocks: usize,
}

/// Pictures, and the rows that they are in.
type Pins = (Vec<PictureHash>, Vec<u32>);

impl World {
    fn new(seed: u64, groups: CacheGroups, looks_ahead: bool) -> World {
        let mut chance = Chance(seed);
        let sequences = chance.between(1, 8);
        let blocks = chance.between(4, 40);
        let context = chance.between(blocks.div_ceil(2), blocks) * BLOCK_TOKENS;
        let kv_tokens = blocks * BLOCK_TOKENS;
        let step_tokens = sequences + whole_picture_tokens(seed) + chance.below(60);
        let limits = Limits { sequences, step_tokens, draft_tokens: drafts(seed), kv_tokens };
        // With windows, a context may be longer than the pool.
        let context = if groups.full() == groups.count() {
            context
        } else {
            groups.tokens_in(blocks, limits.step_tokens).min(2 * context)
        };
        let cache_rows = chance.between(8, 30);
        let launch_patches = PATCHES_A_ROW * chance.between(8, 20);
        World {
            seed,
            looks_ahead,
            limits,
            context,
            launch_patches,
            cache_rows,
            scheduler: scheduler(limits, &groups, looks_ahead, seed),
            groups,
            vision: vision(cache_rows, launch_patches, seed),
            requests: BTreeMap::new(),
            under_way: VecDeque::new(),
            previous: Vec::new(),
            launches: VecDeque::new(),
            rows: vec![None; cache_rows],
            slots: vec![None; blocks * BLOCK_TOKENS],
            host: HostMemory::new(seed),
            host_rows: HostRows::new(seed),
            pixels: BTreeSet::new(),
            pins: BTreeMap::new(),
            pins_of_steps: VecDeque::new(),
            returning: VecDeque::new(),
            next_request: 0,
            next_sequence: 0,
            next_ticket: 0,
            trace: String::new(),
            steps: 0,
            planned_ahead: 0,
            preemptions: 0,
            returned: 0,
            launched_ahead: 0,
            found_tokens: 0,
            resizes: 0,
            preempted_by_shrinks: 0,
            made_way: 0,
            late: BTreeMap::new(),
            scored: 0,
            accepted: 0,
            rejected: 0,
            shrinks: 0,
            losses: BTreeMap::new(),
            found: BTreeSet::new(),
            found_computed: 0,
            missed: 0,
            clock: Duration::ZERO,
            gathers: false,
            blocks,
            chance,
        }
    }

    fn note(&mut self, what: impl std::fmt::Display) {
        writeln!(self.trace, "{what}").expect("writing to a String cannot fail");
    }

    /// Adds a request that preparation would accept, because it fits the pool if
    /// no other request runs.
    fn arrive(&mut self) {
        self.next_request += 1;
        let Some(request) = Request::drawn(self.seed, self.next_request, self.context) else { return };
        let number = request.number;
        self.note(format_args!("request {number} arrives"));
        self.requests.insert(number, request);
        self.live(number);
    }

    /// Starts a request for the first time or again, as its driver does.
    fn live(&mut self, number: u64) {
        let request = self.requests.get_mut(&number).expect("the request is running");
        if request.produced.len() == request.tokens_max {
            // The actors died after the request's last token, before the finish was delivered.
            request.end = Some(Finish::Length);
            return;
        }
        request.computed = 0;
        let computed = if request.missed || request.scores().is_some() { 0 } else { self.computed(number) };
        let request = self.requests.get_mut(&number).expect("the request is running");
        request.computed = computed;
        let wanted = request.pictures[computed..].to_vec();
        if wanted.is_empty() {
            return self.admit(number, &[], Vec::new());
        }
        self.want(number, wanted, false);
    }

    /// The number of leading pictures whose tokens are all in KV blocks, as the driver would look
    /// it up.
    fn computed(&self, number: u64) -> usize {
        let request = &self.requests[&number];
        let rows: Vec<_> = request.pictures.iter().map(|_| [].into()).collect();
        let places = request.places(&rows);
        let (tokens, contents): (_, Vec<_>) =
            (request.tokens(), places.into_iter().map(|place| place.content).collect());
        let positions: Vec<_> = (0..tokens.len() as u32).map(|position| [position; 3]).collect();
        let mut prefix = PrefixKeys::default();
        prefix.extend(&tokens, &positions, &contents);
        let found = self.scheduler.kv().known_prefix(prefix.as_slice()) * BLOCK_TOKENS;
        contents.iter().take_while(|picture| picture.tokens.end <= found).count()
    }

    fn admit(&mut self, number: u64, rows: &[Arc<[u32]>], keys: Vec<PictureHash>) {
        let request = self.requests.get_mut(&number).expect("the request is running");
        if request.is_past_due(self.clock) {
            request.is_late = true;
            return self.vision_step(vision::Input::Unpin(keys));
        }
        let id = request.returns_as.take().unwrap_or_else(|| {
            self.next_sequence += 1;
            SequenceId(self.next_sequence)
        });
        request.sequence = Some(id);
        if request.due.is_none() {
            request.due = Some(request.deadlines().map(|_, left| Some(self.clock + left)));
        }
        request.scored = 0;
        let scheduling_params = request.scheduling_params(self.clock);
        let (tokens, pictures) = (request.tokens(), request.places(rows));
        let sequence = NewSequence {
            id,
            positions: (0..tokens.len() as u32).map(|position| [position; 3]).collect(),
            next_position: tokens.len() as u32,
            tokens,
            produced: request.produced.len(),
            tokens_max: request.tokens_max,
            pictures,
            stop_tokens: [STOP].into(),
            // For some requests, the host must see each token first, so that no
            // step is planned ahead.
            sampler: sampler(number),
            prompt_read: [].into(),
            drafter: drafter(number, draft_head(self.seed).is_some()),
            prefix: PrefixKeys::default(),
            scheduling_params,
            group: None,
            score_prompt: request.scores(),
        };
        self.pins.insert(id, (keys, rows.iter().flat_map(|rows| rows.iter().copied()).collect()));
        self.scheduler_step(Input::Admit(Box::new(sequence)));
    }

    fn of_sequence(&mut self, id: SequenceId) -> Option<&mut Request> {
        self.requests.values_mut().find(|request| request.sequence == Some(id))
    }

    fn vision_step(&mut self, input: vision::Input) {
        let effects = self.vision.step(input);
        let (mut answers, mut lost) = (Vec::new(), Vec::new());
        for effect in effects {
            match effect {
                vision::Effect::Encode(pictures) => {
                    assert!(self.launches.len() < LAUNCHES, "at most {LAUNCHES} launches run at once");
                    self.launched_ahead += self.launches.len();
                    let patches: usize = pictures.iter().map(|(_, rows)| rows.len() * PATCHES_A_ROW).sum();
                    assert!(patches <= self.launch_patches, "{patches} patches exceed {} permits", self.launch_patches);
                    for (key, rows) in &pictures {
                        assert!(self.pixels.contains(key), "the pixels of a launch still exist");
                        let held = |row: &u32| self.all_pins().any(|(_, rows)| rows.contains(row));
                        assert!(!rows.iter().any(held), "a row that a request reads is overwritten");
                    }
                    self.launches.push_back(pictures);
                }
                vision::Effect::Copy { to_host, to_device } => self.copy_rows(&to_host, &to_device),
                vision::Effect::Lost(ticket) => lost.push(ticket),
                vision::Effect::Ready(ticket, rows) => answers.push((ticket, Some(rows))),
                vision::Effect::Refused(ticket, reason) => {
                    let (vision::PicturesTooLarge::Request { rows: most, limit }
                    | vision::PicturesTooLarge::Picture { patches: most, limit }) = reason;
                    assert!(most > limit, "a refused request exceeds the limit");
                    answers.push((ticket, None));
                }
            }
        }
        let vision = &self.vision;
        let needed = vision.need_pixels();
        self.pixels.retain(|key| needed.contains(key));
        for (ticket, rows) in answers {
            self.answered(ticket, rows);
        }
        lost.into_iter().for_each(|ticket| self.is_lost(ticket));
    }

    fn answered(&mut self, ticket: Ticket, rows: Option<Vec<Arc<[u32]>>>) {
        let request = self.requests.values_mut().find(|request| request.ticket == Some(ticket));
        let request = request.expect("each ticket of a request is answered once");
        request.ticket = None;
        let (number, is_over) = (request.number, request.is_over());
        let wanted = &request.pictures[request.computed..];
        let keys: Vec<_> = wanted.iter().map(|picture| picture.key).collect();
        let Some(rows) = rows else {
            // Preparation refuses such a request.
            request.cancelled = true;
            return;
        };
        for (picture, rows) in wanted.iter().zip(&rows) {
            assert_eq!(picture.rows, rows.len());
            for row in rows.iter() {
                assert_eq!(self.rows[*row as usize], Some(picture.key), "the rows hold the requested picture");
            }
        }
        if is_over {
            return self.vision_step(vision::Input::Unpin(keys));
        }
        self.admit(number, &rows, keys);
    }

    fn scheduler_step(&mut self, input: Input) {
        let before = self.scheduler.preemptions();
        let mut effects: VecDeque<Effect> = self.scheduler.step(input).into();
        let preemptions = self.scheduler.preemptions();
        self.preempted_by_shrinks += preemptions.by_shrinks - before.by_shrinks;
        self.made_way += preemptions.for_priority - before.for_priority;
        self.resize_slots();
        while let Some(effect) = effects.pop_front() {
            effects.extend(self.act(effect));
        }
    }

    /// Resizes the cache with the pool. Slots that are no longer backed lose their content.
    fn resize_slots(&mut self) {
        let slots = self.scheduler.kv().blocks() * BLOCK_TOKENS;
        let is_idle = self.under_way.is_empty() && self.host.under_way.is_empty();
        assert!(slots >= self.slots.len() || is_idle, "a running step or copy may still use a removed block");
        self.slots.resize(slots, None);
    }

    fn act(&mut self, effect: Effect) -> Vec<Effect> {
        match effect {
            Effect::Run(plan) => self.check_plan(plan),
            Effect::Copy(copies) => self.copy(*copies),
            Effect::LacksBlocks(..) => {}
            Effect::Begun(id, tokens) => {
                self.found_tokens += tokens;
                self.found.insert(id);
                let clock = self.clock;
                let request = self.of_sequence(id).expect("a request asked for the sequence");
                let due = request.due.and_then(|due| due.queue);
                let is_late = !std::mem::replace(&mut request.has_begun, true) && due.is_some_and(|due| due < clock);
                assert!(!is_late, "{id} should have begun before its deadline");
                let computed = request.computed;
                self.found_computed += computed;
            }
            Effect::Token(id, token) => {
                let Some(request) = self.of_sequence(id).filter(|request| !request.cancelled) else {
                    return self.scheduler.step(Input::Cancel(id));
                };
                assert!(request.end.is_none(), "no token comes after the end");
                let is_scored = request.scores().is_none() || request.scored == request.prompt_tokens() - 1;
                assert!(is_scored, "the prompt is scored before the reply begins");
                request.produced.push(token);
            }
            Effect::Finished(id, finish) => {
                if let Some(request) = self.of_sequence(id).filter(|request| !request.cancelled) {
                    assert!(request.end.replace(finish).is_none(), "a request ends once");
                }
            }
            Effect::Readmit(id) => {
                assert!(!self.scheduler.is_known(id), "an ended sequence is forgotten");
                let had_begun = self.found.remove(&id);
                let Some(request) = self.of_sequence(id) else { return Vec::new() };
                request.sequence = None;
                request.missed = !had_begun;
                let number = request.number;
                self.missed += usize::from(!had_begun);
                self.note(format_args!("request {number} must be admitted again"));
                self.returning.push_back((number, id));
            }
            Effect::Late(id, deadline) => self.is_late(id, deadline),
            Effect::Gather => self.gathers = true,
            Effect::Resized => self.resizes += 1,
            Effect::Released(sequences) => {
                for id in sequences {
                    let is_used = self.under_way.iter().any(|step| step.parts.contains(&id));
                    assert!(!is_used, "blocks of {id} are released while a step uses them");
                    let returns = self.returning.iter().any(|(_, returning)| *returning == id);
                    self.preemptions += usize::from(returns || self.scheduler.is_known(id));
                    let sent_for_pictures = returns && self.of_sequence(id).is_none_or(|request| request.missed);
                    if (returns && !sent_for_pictures) || self.scheduler.is_known(id) {
                        self.loses_blocks(id);
                    }
                    if !self.scheduler.is_known(id)
                        && let Some((keys, _)) = self.pins.remove(&id)
                    {
                        self.vision_step(vision::Input::Unpin(keys));
                    }
                }
            }
        }
        Vec::new()
    }

    fn step_ends(&mut self) {
        if self.under_way.is_empty() {
            return;
        }
        self.copies_end_before_a_step();
        let plan = self.under_way.pop_front().expect("a step is running");
        for row in &plan.rows {
            // A sequence that ended during the step is unknown, and its part of the step was
            // wasted.
            let sequence = self.scheduler.sequence(row.sequence);
            assert!(sequence.is_none_or(|sequence| sequence.produced == row.position), "the step continues the reply");
        }
        let tokens = self.accepted(&plan);
        // The device has executed this step, so the step's pictures are unpinned.
        for (keys, _) in self.pins_of_steps.pop_front().expect("each step has an entry, even if empty") {
            self.vision_step(vision::Input::Unpin(keys));
        }
        self.scheduler_step(Input::Encodes(!self.launches.is_empty()));
        let took = self.seed % 700 + 300 * plan.batch.token_count() as u64;
        self.clock += Duration::from_micros(took);
        self.scheduler_step(Input::Now(self.clock));
        self.scheduler_step(Input::Took(took));
        if draft_head(self.seed).is_some() {
            let drafted = self.proposed(&plan, &tokens);
            self.scheduler_step(Input::Drafted(drafted));
        }
        self.scheduler_step(Input::Stepped(tokens));
    }

    fn all_pins(&self) -> impl Iterator<Item = &Pins> {
        self.pins.values().chain(self.pins_of_steps.iter().flatten())
    }

    fn launch_ends(&mut self) {
        let Some(pictures) = self.launches.pop_front() else { return };
        for (key, rows) in pictures {
            rows.iter().for_each(|row| self.rows[*row as usize] = Some(key));
        }
        self.note("launch ends");
        self.vision_step(vision::Input::Encoded);
    }

    /// The wait for a burst ends, possibly late.
    fn moment_passes(&mut self) {
        if std::mem::take(&mut self.gathers) {
            self.scheduler_step(Input::Gathered);
        }
    }

    fn something_happens(&mut self) {
        match self.chance.below(20) {
            0..5 => self.arrive(),
            5..6 => self.cancel_somebody(),
            6..7 if self.chance.one_in(8) => {
                let all = self.chance.one_in(2);
                self.die(all);
            }
            7..14 => self.step_ends(),
            14..15 => self.return_all(),
            15..16 if self.chance.one_in(2) => self.resize(),
            16..17 => self.moment_passes(),
            17..18 => {
                self.copies_end();
                self.rows_end();
            }
            _ => self.launch_ends(),
        }
    }
}

#[test]
fn rule_4_thousands_of_seeds_respect_permits_and_answer_every_request() {
    let (mut preemptions, mut found_tokens, mut steps, mut planned_ahead, mut returned) = (0, 0, 0, 0, 0);
    let (mut launched_ahead, mut resizes, mut preempted_by_shrinks, mut made_way, mut late) = (0, 0, 0, 0, [0; 3]);
    let (mut brought, mut lost, mut scored, mut left, mut fetched) = (0, 0, 0, 0, 0);
    let (mut accepted, mut rejected, mut found_computed, mut missed) = (0, 0, 0, 0);
    for_each_world(
        1000,
        |_| CacheGroups::default(),
        |world| {
            preemptions += world.preemptions;
            returned += world.returned;
            launched_ahead += world.launched_ahead;
            resizes += world.resizes;
            preempted_by_shrinks += world.preempted_by_shrinks;
            made_way += world.made_way;
            late = Deadline::ALL.map(|deadline| late[deadline as usize] + world.late.get(&deadline).unwrap_or(&0));
            scored += world.scored;
            (accepted, rejected) = (accepted + world.accepted, rejected + world.rejected);
            found_tokens += world.found_tokens;
            (found_computed, missed) = (found_computed + world.found_computed, missed + world.missed);
            (left, fetched) = (left + world.host.left, fetched + world.host.fetched);
            (brought, lost) = (brought + world.host_rows.brought, lost + world.host_rows.lost);
            (steps, planned_ahead) = (steps + world.steps, planned_ahead + world.planned_ahead);
        },
    );
    assert!(preemptions > 100, "the small pools caused {preemptions} preemptions");
    assert!(returned > 100, "{returned} sequences were admitted again after releasing their pictures");
    assert!(launched_ahead > 100, "{launched_ahead} launches began before an earlier launch had ended");
    assert!(resizes > 1000, "the pool was resized {resizes} times");
    assert!(preempted_by_shrinks > 100, "{preempted_by_shrinks} sequences lost their blocks to shrinks");
    assert!(made_way > 100, "{made_way} sequences were preempted for urgent ones");
    assert!(late[0] > 100 && late[1] > 20 && late[2] > 20, "{late:?} requests missed a deadline, by kind of deadline");
    assert!(scored > 10_000, "{scored} prompt tokens were scored");
    assert!(left > 1000 && fetched > 1000, "{left} blocks were copied to host memory, {fetched} were copied back");
    assert!(brought > 1000 && lost > 10, "{brought} pictures came from the host, {lost} requests lost their pictures");
    assert!(
        found_computed > 1000 && missed > 100,
        "{found_computed} pictures needed no rows, {missed} requests relied on evicted blocks"
    );
    assert!(accepted > 5000 && rejected > 5000, "{accepted} drafts were accepted, {rejected} were rejected");
    assert!(found_tokens > 10_000, "prompts shared prefixes: {found_tokens} tokens found");
    assert!(planned_ahead * 2 > steps, "{planned_ahead} of {steps} steps were planned while another step ran");
}

#[test]
fn a_request_gets_the_same_tokens_with_and_without_look_ahead() {
    let mut compared = 0;
    for seed in 0..100 {
        let run = |looks_ahead| run_and_say(seed, CacheGroups::default(), looks_ahead);
        let (with, without) = (run(true), run(false));
        assert_eq!(without.planned_ahead, 0);
        for (request, other) in with.requests.values().filter_map(|r| Some((r, without.requests.get(&r.number)?))) {
            if [request, other].iter().all(|request| !request.cancelled && !request.is_late) {
                assert_eq!(
                    (&request.produced, request.end),
                    (&other.produced, other.end),
                    "request {}",
                    request.number
                );
                compared += request.produced.len();
            }
        }
    }
    assert!(compared > 10_000, "{compared} tokens were compared");
}

#[test]
fn rule_12_the_same_seed_gives_the_same_trace() {
    for seed in 0..50 {
        let run = || run_and_say(seed, CacheGroups::default(), true).trace;
        let trace = run();
        assert_eq!(trace, run(), "seed {seed}");
        assert!(!trace.is_empty());
    }
}

/// The cache groups of a model with windows: only windows, or also full attention.
fn windows(seed: u64) -> CacheGroups {
    let window = Some(1 + (seed * 7 % 90) as usize);
    let layers: &[Option<usize>] = match seed % 3 {
        0 => &[window],
        1 => &[None, window],
        _ => &[None, window, Some(17), None, window],
    };
    CacheGroups::new(layers.iter().copied().enumerate())
}

#[test]
fn models_with_windows_respect_permits_and_answer_every_request() {
    let (mut steps, mut preemptions, mut found_tokens, mut fetched, mut by_shrinks) = (0, 0, 0, 0, 0);
    for_each_world(400, windows, |world| {
        steps += world.steps;
        preemptions += world.preemptions;
        found_tokens += world.found_tokens;
        fetched += world.host.fetched;
        by_shrinks += world.preempted_by_shrinks;
    });
    assert!(steps > 10_000 && preemptions > 50 && by_shrinks > 20, "{steps}, {preemptions}, {by_shrinks}");
    assert!(found_tokens > 2000 && fetched > 200, "{found_tokens} tokens were found, {fetched} blocks fetched");
}

#[test]
fn one_seed() {
    run_and_say(0, CacheGroups::default(), true);
}
