//! The requests of the simulation, the tokens that their model generates, and a seeded random
//! number generator.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, OnceLock},
    time::Duration,
};

use bursar_actors::{
    deadline::{Deadline, Deadlines},
    kv::SequenceId,
    order::Priority,
    scheduler::{Drafter, Finish, NewSequence, NgramSizes, Placeholder, PromptLookup, SchedulingParams},
    tenant::{Tenant, TenantWeights},
    token_interval::{MeasuredCosts, MeasuredStep, StepWork, TokenInterval},
    vision::{EncodeRequest, Ticket},
};
use bursar_model::{
    demo,
    flow::{ContentSpan, DraftPositions, PictureHash},
    sampling::{GrammarCompiler, OutputFormat, Sampler, SamplingParams},
    text::Tokenizer,
};

/// A random number generator: SplitMix64 (Steele, Lea and Flood, OOPSLA'14).
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// Returns one of three samplers: a greedy sampler, a random sampler, or a random sampler with a
/// grammar, for which the host must see each token.
pub fn sampler(number: u64) -> Arc<Sampler> {
    static SAMPLERS: OnceLock<[Arc<Sampler>; 3]> = OnceLock::new();
    let samplers = SAMPLERS.get_or_init(|| {
        let sampler = |temperature| {
            let params = SamplingParams { temperature, ..SamplingParams::default() };
            Sampler::new(params, 864).expect("parameters within their limits")
        };
        let tokenizer = demo::checkpoint().require("tokenizer.json").expect("the demo tokenizer is embedded");
        let tokenizer = Tokenizer::from_bytes(&tokenizer).expect("a tokenizer");
        let compiler = GrammarCompiler::new(&tokenizer, 864, &[858]).expect("a byte-level vocabulary");
        let grammar = compiler.compile(&OutputFormat::Regex("a*".to_owned())).expect("the grammar is small enough");
        [sampler(0.0), sampler(1.0), sampler(1.0).with_grammar(grammar)].map(Arc::new)
    });
    samplers[if number.is_multiple_of(9) { 2 } else { number as usize % 2 }].clone()
}

/// The drafter of a request. It uses the draft head if the simulated model has one.
pub fn drafter(number: u64, has_draft_head: bool) -> Drafter {
    if has_draft_head {
        return Drafter::DraftHead;
    }
    let sizes = NgramSizes { min: 1 + number as usize % 2, max: 3 };
    Drafter::PromptLookup(PromptLookup::new(sizes, 256))
}

/// The positions of the draft head's drafts. Half of the seeds with drafts have a draft head.
pub fn draft_head(seed: u64) -> Option<DraftPositions> {
    let positions = if seed.is_multiple_of(4) { DraftPositions::Constant } else { DraftPositions::Advancing };
    (seed % 6 == 2).then_some(positions)
}

/// Maximum number of drafted tokens per sequence and step. Two of three seeds have no drafts.
pub fn drafts(seed: u64) -> usize {
    if seed % 3 == 2 { 1 + seed as usize % 7 } else { 0 }
}

/// Maximum rows of the vision cache, and so tokens, of a picture.
const PICTURE_ROWS_MAX: usize = 7;

/// Tokens of the largest picture in every third world, where no step may end within a picture; 0 in
/// the other worlds.
pub fn whole_picture_tokens(seed: u64) -> usize {
    if seed % 3 == 1 { PICTURE_ROWS_MAX } else { 0 }
}

pub const STOP: u32 = 0;
pub const PATCHES_A_ROW: usize = 4;

/// The token that the model chooses at this position. The choice depends only on the request, so
/// that a reply can be compared with a reply that was computed without other requests, preemption
/// or deaths.
pub fn chosen(request: u64, position: usize) -> u32 {
    // Every third reply repeats itself with few exceptions, so that drafts of it are mostly right.
    let repeats = request.is_multiple_of(3) && !Chance(request ^ position as u64).one_in(6);
    let position = if repeats { 1 + position % 5 } else { position };
    let mut chance = Chance(request.wrapping_mul(7919) ^ position as u64);
    // Most replies are short, but every fourth reply usually reaches its length limit. The average
    // length is therefore a bad prediction for any single reply.
    let ends = if request.is_multiple_of(4) { 1000 } else { 4 };
    if chance.one_in(ends) { STOP } else { 1 + chance.below(500) as u32 }
}

/// A caller's request, with the state that the caller and the request's driver keep.
pub struct Request {
    pub number: u64,
    /// The topic of the text. There are only a few topics, so that many prompts have a common
    /// prefix.
    pub topic: u32,
    pub text_tokens: usize,
    pub pictures: Vec<EncodeRequest>,
    pub tokens_max: usize,
    pub produced: Vec<u32>,
    pub end: Option<Finish>,
    pub cancelled: bool,
    /// `true` if the request was dropped because it missed a deadline.
    pub is_late: bool,
    /// Absolute deadlines, set at the first admission.
    pub due: Option<Deadlines>,
    pub has_begun: bool,
    pub sequence: Option<SequenceId>,
    /// The id that the request keeps when it returns to the scheduler.
    pub returns_as: Option<SequenceId>,
    /// The ticket under which this request waits at the vision core.
    pub ticket: Option<Ticket>,
    /// Tokens of the prompt that were scored since the last admission.
    pub scored: usize,
    /// The number of leading pictures that need no cache rows in this admission, because KV blocks
    /// hold their tokens. The number is 0 after an admission for which such blocks were missing.
    pub computed: usize,
    pub missed: bool,
}

impl Request {
    /// Generates request `number` of a seed; `None` if the request would not fit in a pool of
    /// `kv_tokens`. The result is the same in every run of the seed, regardless of earlier events.
    pub fn drawn(seed: u64, number: u64, kv_tokens: usize) -> Option<Request> {
        let mut chance = Chance(seed ^ number.wrapping_mul(0x2545_F491_4F6C_DD1D));
        let pictures = (0..chance.below(4))
            .map(|_| {
                // There are only seven keys, so that pictures repeat. The key determines the size.
                let name = chance.below(7) as u8;
                let rows = 1 + usize::from(name) % PICTURE_ROWS_MAX;
                EncodeRequest { key: PictureHash([name; 32]), rows, patches: rows * PATCHES_A_ROW, has_pixels: true }
            })
            .collect();
        let mut request = Request {
            number,
            topic: chance.below(3) as u32,
            text_tokens: chance.between(1, 60),
            pictures,
            tokens_max: 0,
            produced: Vec::new(),
            end: None,
            cancelled: false,
            is_late: false,
            due: None,
            has_begun: false,
            sequence: None,
            returns_as: None,
            ticket: None,
            scored: 0,
            computed: 0,
            missed: false,
        };
        let left = kv_tokens.checked_sub(request.prompt_tokens()).filter(|left| *left > 0)?;
        request.tokens_max = chance.between(1, left.min(150));
        Some(request)
    }

    pub fn prompt_tokens(&self) -> usize {
        self.text_tokens + self.pictures.iter().map(|picture| picture.rows).sum::<usize>()
    }

    /// The prompt and the tokens produced so far: pictures, then text, then the
    /// tokens of earlier admissions.
    pub fn tokens(&self) -> Vec<u32> {
        let shown: usize = self.pictures.iter().map(|picture| picture.rows).sum();
        let text = |token| if token < shown { 999 } else { 1000 + self.topic };
        (0..self.prompt_tokens()).map(text).chain(self.produced.iter().copied()).collect()
    }

    /// Placeholders for the pictures. The first `computed` pictures have no rows, and `rows` are
    /// the rows of the remaining pictures.
    pub fn places(&self, rows: &[Arc<[u32]>]) -> Vec<Placeholder> {
        let mut rows = rows.iter().cloned();
        let mut start = 0;
        let place = |(number, picture): (usize, &EncodeRequest)| {
            let content = ContentSpan { tokens: start..start + picture.rows, hash: picture.key };
            start += picture.rows;
            let cache_rows = if number < self.computed {
                [].into()
            } else {
                rows.next().expect("each picture that is not cached was encoded")
            };
            Placeholder { content, cache_rows }
        };
        self.pictures.iter().enumerate().map(place).collect()
    }

    pub fn is_over(&self) -> bool {
        self.cancelled || self.is_late || self.end.is_some()
    }

    /// Deadlines relative to the first admission. One request in eight has a queue deadline as long
    /// as a few steps. One request in sixteen has a deadline for its first token, and one in
    /// sixteen has a deadline for its whole reply.
    pub fn deadlines(&self) -> Deadlines {
        let waits = Duration::from_millis(20 * (1 + self.number % 5));
        let of = |kind| (self.number % 16 == kind).then_some(waits * 3);
        let queue = self.number.is_multiple_of(8).then_some(waits);
        Deadlines { queue, first_token: of(3), reply: of(11) }
    }

    /// The deadlines that have not been met yet.
    fn unmet_deadlines(&self) -> Deadlines {
        self.due.unwrap_or_default().map(|deadline, due| {
            let is_met = match deadline {
                Deadline::Queue => self.has_begun,
                Deadline::FirstToken => !self.produced.is_empty(),
                Deadline::Reply => false,
            };
            (!is_met).then_some(due)
        })
    }

    /// Whether the driver, which watches the clock, ends the request now.
    pub fn is_past_due(&self, now: Duration) -> bool {
        self.unmet_deadlines().map(|_, due| (due < now).then_some(due)) != Deadlines::default()
    }

    /// The scheduling parameters at time `now`. A third of the requests have a priority that
    /// is not 0. There are four tenants.
    pub fn scheduling_params(&self, now: Duration) -> SchedulingParams {
        let priority = [0, 0, 0, 0, 2, -1][self.number as usize % 6];
        let left = self.unmet_deadlines().map(|_, due| Some(due.saturating_sub(now)));
        let tenant = Tenant::new(["", "even", "odd", "rare"][self.number as usize * 7 % 11 % 4]);
        SchedulingParams { priority, tenant, left }
    }

    /// The number of likeliest tokens to report for each prompt token. One prompt in ten is scored,
    /// until its reply begins.
    pub fn scores(&self) -> Option<usize> {
        (self.number % 10 == 7 && self.produced.is_empty()).then_some(2)
    }

    /// The priority among the requests that wait for pictures.
    pub fn rank(&self) -> Priority {
        let SchedulingParams { priority, tenant, .. } = self.scheduling_params(Duration::ZERO);
        Priority { priority, tenant, had_turn: !self.produced.is_empty() }
    }

    /// The tokens and the finish reason with which the request must end.
    pub fn expected(&self) -> (Vec<u32>, Finish) {
        let mut tokens = Vec::new();
        loop {
            match chosen(self.number, tokens.len()) {
                STOP => return (tokens, Finish::Stop(STOP)),
                token => tokens.push(token),
            }
            if tokens.len() == self.tokens_max {
                return (tokens, Finish::Length);
            }
        }
    }
}

/// The content that each token of a sequence writes to the KV cache: a hash of all tokens,
/// positions and pictures up to that token.
pub fn content(sequence: &NewSequence, unseen: &[u32]) -> Vec<u64> {
    let mut hasher = DefaultHasher::new();
    let of_token = |(token, id): (usize, &u32)| {
        let picture = sequence.pictures.iter().find(|picture| picture.content.tokens.contains(&token));
        let behind = |known: usize| [sequence.next_position + (token - known) as u32; 3];
        let position = sequence.positions.get(token).copied().unwrap_or_else(|| behind(sequence.positions.len()));
        (id, position, picture.map(|p| (p.content.hash, token - p.content.tokens.start))).hash(&mut hasher);
        hasher.finish()
    };
    sequence.tokens.iter().chain(unseen).enumerate().map(of_token).collect()
}

/// The weights of tenants. Only every third seed sets them.
pub fn weights(seed: u64) -> TenantWeights {
    let weights = TenantWeights::of([("even", 5), ("rare", 2)]).filter(|_| seed % 3 == 1);
    weights.unwrap_or_default()
}

/// Returns a target for the token interval, and costs that match the steps of the simulation.
/// Depending on the seed, no step, some steps or all steps meet the target.
pub fn token_interval(seed: u64) -> Option<TokenInterval> {
    let step = |prompt: usize, decoding: usize, micros| {
        let mut work = StepWork::default();
        work.add_prompt(0, prompt);
        (0..decoding).for_each(|_| work.add_decoding(16));
        MeasuredStep { work, micros }
    };
    let steps = vec![step(0, 1, 300), step(0, 8, 2400), step(16, 1, 5400), step(64, 1, 20_000)];
    let promise = Duration::from_micros(500 + seed % 30 * 700);
    TokenInterval::new(Some(promise), &MeasuredCosts { steps, launches: Vec::new() })
}
