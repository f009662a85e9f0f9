//! What one model does.

use bursar::Bytes;
use serde::Serialize;

use super::{Actor, Count, Look, counts};
use crate::top::{
    rate::Since,
    samples::{Labels, Samples},
};

/// How a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelState {
    /// All of its actors serve.
    Up,
    /// An attempt at sizing runs.
    Sizing,
    /// Its engine runs, and none of those that serve.
    Starting,
    /// Some of those that serve are being replaced.
    Mending,
    /// Its engine does not run.
    Down,
    /// Nobody says.
    Unknown,
}

/// Units of a semaphore.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Permit {
    /// What of: `sequences`, `patches`.
    pub permit: String,
    /// Taken.
    pub used: u64,
    /// In all.
    pub all: u64,
}

/// Blocks of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Kv {
    /// In all.
    pub blocks: u64,
    /// Used by sequences.
    pub used: u64,
    /// Free, but with content.
    pub cached: u64,
    /// In host memory.
    pub swapped: u64,
    /// Tokens of a block.
    pub block_tokens: Option<u64>,
    /// How often there came to be fewer.
    pub shrinks: u64,
    /// How often there came to be more.
    pub growths: u64,
}

/// What happens in a second; none where nobody counts, or counted once only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Speed {
    /// Tokens of prompts, also those that were cached.
    pub prompt_tokens: Option<f64>,
    /// Those of them that were cached.
    pub cached_tokens: Option<f64>,
    /// Tokens of replies.
    pub generated_tokens: Option<f64>,
    /// Requests that ended.
    pub requests: Option<f64>,
    /// Steps.
    pub steps: Option<f64>,
}

/// How often something was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cache {
    /// Found, of what was looked for: in the last minute, or in all if nothing was.
    pub found: f64,
    /// Looked for.
    pub asked: f64,
    /// Whether it is of the last minute.
    pub is_recent: bool,
    /// What it holds.
    pub bytes: Option<Bytes>,
}

/// Quantiles of some seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Of what.
    pub of: &'static str,
    /// How many were observed.
    pub count: u64,
    /// Whether in the last minute, or in all since then nothing was.
    pub is_recent: bool,
    /// Half of them took at most so long; seconds.
    pub p50: f64,
    /// Nine tenths.
    pub p90: f64,
    /// All but a hundredth.
    pub p99: f64,
}

/// One model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelView {
    /// Its label.
    pub name: String,
    /// How it is.
    pub state: ModelState,
    /// Its actors, from the top of the tree down.
    pub actors: Vec<Actor>,
    /// Sequences that run.
    pub running: Option<u64>,
    /// Sequences that wait.
    pub waiting: Option<u64>,
    /// Requests that were accepted and have not ended.
    pub active: Option<u64>,
    /// Steps under way.
    pub under_way: Option<u64>,
    /// Each semaphore.
    pub permits: Vec<Permit>,
    /// Its cache of keys and values.
    pub kv: Option<Kv>,
    /// What happens in a second.
    pub speed: Speed,
    /// Tokens of prompts found among those computed before.
    pub prefix: Cache,
    /// Pictures found among those encoded before.
    pub pictures: Cache,
    /// How long things take.
    pub latencies: Vec<Latency>,
    /// Requests that ended, by reason.
    pub ended: Vec<Count>,
    /// Requests that were done again behind a death.
    pub redone: u64,
    /// Sequences that were preempted, by reason.
    pub preempted: Vec<Count>,
    /// Refusals of memory, by phase.
    pub oom: Vec<Count>,
    /// Attempts at sizing, by how they ended.
    pub attempts: Vec<Count>,
    /// Of the last that got ready.
    pub profile_seconds: Option<f64>,
    /// Of the last that got ready.
    pub target_tokens: Option<u64>,
    /// Steps by graph.
    pub replays: u64,
    /// Steps without.
    pub eager_steps: u64,
    /// Graphs that there are.
    pub graphs: Option<u64>,
    /// Measured minus planned bytes of a workspace where they are not the same.
    pub plan_errors: Vec<(String, f64)>,
}

/// What is timed.
const TIMES: [(&str, &str); 8] = [
    ("first token", "bursar_time_to_first_token_seconds"),
    ("next token", "bursar_token_interval_seconds"),
    ("in the queue", "bursar_queue_seconds"),
    ("prefill", "bursar_prefill_seconds"),
    ("decode", "bursar_decode_seconds"),
    ("request", "bursar_request_seconds"),
    ("step", "bursar_step_seconds"),
    ("kv shrink", "bursar_kv_shrink_seconds"),
];

impl ModelView {
    /// All models, by name.
    pub(super) fn all(look: Look<'_>) -> Vec<Self> {
        // Not what was counted: that stays when a model is unloaded.
        const NAMES: [&str; 4] = ["bursar_actor_up", "bursar_kv_blocks", "bursar_permits", "bursar_requests_active"];
        look.now.values_of(&NAMES, "model").into_iter().map(|name| ModelView::of(look, name)).collect()
    }

    fn of(look: Look<'_>, name: String) -> Self {
        let now = look.now;
        let own: Labels<'_> = &[("model", &name)];
        let count = |metric: &str| now.count(metric, own);
        let counted = |metric: &str, by: &str| counts(now, metric, own, by);
        let mut actors = Actor::of(now, &name);
        let permits = permits(now, &name);
        // A model that takes no pictures has nobody who would see to them.
        let takes_none = permits.iter().any(|permit| permit.permit == "patches" && permit.all == 0);
        actors.retain(|actor| !(takes_none && actor.actor == "vision" && !actor.is_up));
        ModelView {
            state: ModelState::of(&actors),
            actors,
            running: count("bursar_sequences_running"),
            waiting: count("bursar_sequences_waiting"),
            active: count("bursar_requests_active"),
            under_way: count("bursar_steps_under_way"),
            permits,
            kv: kv(now, own),
            speed: look.last.map(|last| speed(now, last, own)).unwrap_or_default(),
            prefix: cache(look, "bursar_prefix_cache", own),
            pictures: cache(look, "bursar_encoder_cache", own),
            latencies: TIMES.iter().filter_map(|(of, metric)| latency(look, of, metric, own)).collect(),
            ended: counted("bursar_requests_total", "reason"),
            redone: count("bursar_requests_redone_total").unwrap_or(0),
            preempted: counted("bursar_preemptions_total", "reason"),
            oom: counted("bursar_oom_total", "phase"),
            attempts: counted("bursar_profile_attempts_total", "reason"),
            profile_seconds: now.value("bursar_profile_seconds", own),
            target_tokens: count("bursar_profile_target_tokens"),
            replays: count("bursar_graph_replays_total").unwrap_or(0),
            eager_steps: count("bursar_eager_steps_total").unwrap_or(0),
            graphs: count("bursar_graphs_captured"),
            plan_errors: now
                .of("bursar_plan_error_bytes", own)
                .map(|series| (series.label("class").to_owned(), series.value))
                .filter(|(_, error)| *error != 0.0 && !error.is_nan())
                .collect(),
            name,
        }
    }

    /// How often any of its actors was replaced.
    pub fn restarts(&self) -> u64 {
        self.actors.iter().fold(0, |sum, actor| sum.saturating_add(actor.restarts))
    }
}

impl ModelState {
    fn of(actors: &[Actor]) -> Self {
        let is_up = |name: &str| actors.iter().find(|actor| actor.actor == name).map(|actor| actor.is_up);
        let serving: Vec<_> = ["vision", "kv", "scheduler"].into_iter().filter_map(is_up).collect();
        let up = serving.iter().filter(|is_up| **is_up).count();
        match (is_up("engine"), is_up("profile")) {
            _ if actors.is_empty() => ModelState::Unknown,
            (Some(false), _) => ModelState::Down,
            _ if up > 0 && up == serving.len() => ModelState::Up,
            _ if up > 0 => ModelState::Mending,
            (_, Some(true)) => ModelState::Sizing,
            _ => ModelState::Starting,
        }
    }

    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            ModelState::Up => "up",
            ModelState::Sizing => "sizing",
            ModelState::Starting => "starting",
            ModelState::Mending => "mending",
            ModelState::Down => "down",
            ModelState::Unknown => "?",
        }
    }
}

impl Cache {
    /// Found of those looked for; none where nothing was.
    pub fn share(&self) -> Option<f64> {
        (self.asked > 0.0).then(|| (self.found / self.asked).clamp(0.0, 1.0))
    }
}

fn permits(now: &Samples, model: &str) -> Vec<Permit> {
    let own = [("model", model)];
    let permits = now.of("bursar_permits", &own).map(|series| {
        let permit = series.label("permit").to_owned();
        let used = now.count("bursar_permits_used", &[("model", model), ("permit", &permit)]);
        Permit { used: used.unwrap_or(0), all: series.value as u64, permit }
    });
    let mut permits: Vec<_> = permits.collect();
    // Sequences before patches.
    permits.sort_by(|one, other| other.permit.cmp(&one.permit));
    permits
}

fn kv(now: &Samples, own: Labels<'_>) -> Option<Kv> {
    let count = |metric: &str| now.count(metric, own);
    Some(Kv {
        blocks: count("bursar_kv_blocks")?,
        used: count("bursar_kv_blocks_used").unwrap_or(0),
        cached: count("bursar_kv_blocks_cached").unwrap_or(0),
        swapped: count("bursar_kv_blocks_swapped").unwrap_or(0),
        block_tokens: count("bursar_kv_block_tokens"),
        shrinks: count("bursar_kv_shrinks_total").unwrap_or(0),
        growths: count("bursar_kv_growths_total").unwrap_or(0),
    })
}

fn speed(now: &Samples, last: Since<'_>, own: Labels<'_>) -> Speed {
    let per_second = |metric: &str| last.per_second(now, metric, own);
    Speed {
        prompt_tokens: per_second("bursar_prompt_tokens_total"),
        cached_tokens: per_second("bursar_cached_prompt_tokens_total"),
        generated_tokens: per_second("bursar_generated_tokens_total"),
        requests: per_second("bursar_requests_total"),
        steps: per_second("bursar_step_seconds_count"),
    }
}

/// By the beginning of its metrics' names.
fn cache(look: Look<'_>, metric: &str, own: Labels<'_>) -> Cache {
    let (hits, queries) = (format!("{metric}_hits_total"), format!("{metric}_queries_total"));
    let bytes = look.now.bytes(&format!("{metric}_bytes"), own);
    let recent = look.minute.and_then(|minute| {
        let asked = minute.increase(look.now, &queries, own).filter(|asked| *asked > 0.0)?;
        Some(Cache { found: minute.increase(look.now, &hits, own).unwrap_or(0.0), asked, is_recent: true, bytes })
    });
    let in_all = |metric: &str| look.now.value(metric, own).unwrap_or(0.0);
    recent.unwrap_or_else(|| Cache { found: in_all(&hits), asked: in_all(&queries), is_recent: false, bytes })
}

fn latency(look: Look<'_>, of: &'static str, metric: &str, own: Labels<'_>) -> Option<Latency> {
    let in_all = look.now.histogram(metric, own);
    let recent = look.minute.map(|minute| in_all.since(&minute.before.histogram(metric, own)));
    let recent = recent.filter(|recent| recent.count() > 0.0);
    let (histogram, is_recent) = recent.map_or((in_all, false), |recent| (recent, true));
    let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|share| histogram.quantile(share));
    Some(Latency { of, count: histogram.count() as u64, is_recent, p50: p50?, p90: p90?, p99: p99? })
}
