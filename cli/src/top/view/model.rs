//! The state and figures of one model.

use bursar::Bytes;
use serde::Serialize;

use super::window::{Actor, Count, ScrapeWindow, counts};
use crate::top::{
    rate::Since,
    samples::{Labels, Samples},
};

/// The state of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelState {
    /// All serving actors run.
    Up,
    /// A sizing attempt runs.
    Sizing,
    /// The engine runs, but no serving actor does yet.
    Starting,
    /// Some serving actors are being replaced.
    Recovering,
    /// The model holds no device memory until a request wakes it.
    Asleep,
    /// The engine does not run.
    Down,
    Unknown,
}

/// Permits of one kind: how many there are, and how many are in use.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Permit {
    /// The kind of permit: `sequences` or `patches`.
    pub permit: String,
    pub used: u64,
    pub all: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Kv {
    pub blocks: u64,
    pub used: u64,
    /// Unused blocks with content that can be reused.
    pub cached: u64,
    /// Blocks in host memory.
    pub swapped: u64,
    /// Tokens in a block.
    pub block_tokens: Option<u64>,
    /// Number of times that the pool shrank.
    pub shrinks: u64,
    /// Number of times that the pool grew.
    pub growths: u64,
}

/// Rates per second since the previous scrape. A counter that was absent then counts from 0. `None`
/// without a previous scrape, or if the counter is absent now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Speed {
    /// Prompt tokens, including cached tokens.
    pub prompt_tokens: Option<f64>,
    pub cached_tokens: Option<f64>,
    pub generated_tokens: Option<f64>,
    /// Requests that ended, for any reason.
    pub requests: Option<f64>,
    pub steps: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cache {
    /// Number of lookups that hit, among the `asked` lookups.
    pub found: f64,
    pub asked: f64,
    /// `true` if the counts cover the last minute. `false` if they cover all time, because the last
    /// minute has no lookups or the session has just begun.
    pub is_recent: bool,
    /// Bytes in the cache.
    pub bytes: Option<Bytes>,
}

/// Quantiles of a duration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    pub of: &'static str,
    pub count: u64,
    /// `true` if the observations are from the last minute. `false` if they are from all time,
    /// because the last minute has no observations or the session has just begun.
    pub is_recent: bool,
    /// Median, in seconds.
    pub p50: f64,
    /// 90th percentile, in seconds.
    pub p90: f64,
    /// 99th percentile, in seconds.
    pub p99: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelView {
    pub name: String,
    pub state: ModelState,
    /// Actors from the top of the supervision tree down.
    pub actors: Vec<Actor>,
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    /// Accepted requests that have not ended.
    pub active: Option<u64>,
    /// Steps submitted to the step lane and not complete.
    pub under_way: Option<u64>,
    pub permits: Vec<Permit>,
    pub kv: Option<Kv>,
    pub speed: Speed,
    /// Prompt tokens found in the prefix cache.
    pub prefix: Cache,
    /// Pictures found in the vision cache.
    pub pictures: Cache,
    pub latencies: Vec<Latency>,
    /// Ended requests, by reason.
    pub ended: Vec<Count>,
    /// Number of requests that were redone after an actor died.
    pub redone: u64,
    /// Preempted sequences, by reason.
    pub preempted: Vec<Count>,
    /// Refusals of memory, by phase.
    pub oom: Vec<Count>,
    /// Sizing attempts, by outcome.
    pub attempts: Vec<Count>,
    /// Duration of the last successful sizing attempt, in seconds.
    pub profile_seconds: Option<f64>,
    /// Size of the KV cache that the last successful sizing attempt chose, in tokens.
    pub target_tokens: Option<u64>,
    /// Steps replayed as graphs.
    pub replays: u64,
    /// Steps launched without a graph.
    pub eager_steps: u64,
    pub graphs: Option<u64>,
    /// Measured minus planned workspace bytes by class, if they differ.
    pub plan_errors: Vec<(String, f64)>,
}

/// Label and metric of each timed phase.
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
    /// Returns all models, sorted by name.
    pub(super) fn all(look: ScrapeWindow<'_>) -> Vec<Self> {
        // Use only gauges: counters stay after a model is unloaded.
        const NAMES: [&str; 4] = ["bursar_actor_up", "bursar_kv_blocks", "bursar_permits", "bursar_requests_active"];
        look.now.values_of(&NAMES, "model").into_iter().map(|name| ModelView::of(look, name)).collect()
    }

    fn of(look: ScrapeWindow<'_>, name: String) -> Self {
        let now = look.now;
        let own: Labels<'_> = &[("model", &name)];
        let count = |metric: &str| now.count(metric, own);
        let counted = |metric: &str, by: &str| counts(now, metric, own, by);
        let mut actors = Actor::of(now, &name);
        let permits = permits(now, &name);
        // A text model has no vision actor, so do not list it as stopped.
        let takes_none = permits.iter().any(|permit| permit.permit == "patches" && permit.all == 0);
        actors.retain(|actor| !(takes_none && actor.actor == "vision" && !actor.is_up));
        ModelView {
            state: match count("bursar_asleep") {
                Some(1) => ModelState::Asleep,
                _ => ModelState::of(&actors),
            },
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

    /// Returns how often the model's actors were restarted.
    pub fn restarts(&self) -> u64 {
        self.actors.iter().fold(0, |sum, actor| sum.saturating_add(actor.restarts))
    }
}

impl ModelState {
    fn of(actors: &[Actor]) -> Self {
        let is_up = |name: &str| actors.iter().find(|actor| actor.actor == name).map(|actor| actor.is_up);
        let serving: Vec<_> = Actor::SERVING.into_iter().filter_map(is_up).collect();
        let up = serving.iter().filter(|is_up| **is_up).count();
        match (is_up("engine"), is_up("profile")) {
            _ if actors.is_empty() => ModelState::Unknown,
            (Some(false), _) => ModelState::Down,
            _ if up > 0 && up == serving.len() => ModelState::Up,
            _ if up > 0 => ModelState::Recovering,
            (_, Some(true)) => ModelState::Sizing,
            _ => ModelState::Starting,
        }
    }

    /// Returns the state in one word.
    pub fn word(self) -> &'static str {
        match self {
            ModelState::Up => "up",
            ModelState::Sizing => "sizing",
            ModelState::Starting => "starting",
            ModelState::Recovering => "recovery",
            ModelState::Asleep => "asleep",
            ModelState::Down => "down",
            ModelState::Unknown => "?",
        }
    }
}

impl Cache {
    /// Returns the share of lookups that hit. `None` without lookups.
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
    // Reverse order, so that sequences come before patches.
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

/// Returns the figures of the cache whose metrics begin with `metric`.
fn cache(look: ScrapeWindow<'_>, metric: &str, own: Labels<'_>) -> Cache {
    let (hits, queries) = (format!("{metric}_hits_total"), format!("{metric}_queries_total"));
    let bytes = look.now.bytes(&format!("{metric}_bytes"), own);
    let recent = look.minute.and_then(|minute| {
        let asked = minute.increase(look.now, &queries, own).filter(|asked| *asked > 0.0)?;
        Some(Cache { found: minute.increase(look.now, &hits, own).unwrap_or(0.0), asked, is_recent: true, bytes })
    });
    let in_all = |metric: &str| look.now.value(metric, own).unwrap_or(0.0);
    recent.unwrap_or_else(|| Cache { found: in_all(&hits), asked: in_all(&queries), is_recent: false, bytes })
}

fn latency(look: ScrapeWindow<'_>, of: &'static str, metric: &str, own: Labels<'_>) -> Option<Latency> {
    let in_all = look.now.histogram(metric, own);
    let recent = look.minute.map(|minute| in_all.since(&minute.before.histogram(metric, own)));
    let recent = recent.filter(|recent| recent.count() > 0.0);
    let (histogram, is_recent) = recent.map_or((in_all, false), |recent| (recent, true));
    let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|share| histogram.quantile(share));
    Some(Latency { of, count: histogram.count() as u64, is_recent, p50: p50?, p90: p90?, p99: p99? })
}
