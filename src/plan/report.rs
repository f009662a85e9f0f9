//! What a plan comes to, as text and as JSON.

use std::{collections::BTreeMap, fmt};

use bursar::{
    Bytes, Class, Envelope, Forecast,
    crates::{
        actors::{
            engine::Kit,
            profile::{Change, Suggestion},
        },
        budgets::MemoryPlan,
        model::Model,
    },
    knobs::Names,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::place::Planned;

/// Lengths of sequences that people ask about, prompt and reply together; the context is one more.
const LENGTHS: [usize; 3] = [512, 2048, 8192];

/// All that is told.
#[derive(Serialize)]
pub struct Report {
    /// The model.
    model: String,
    device: DeviceReport,
    /// Whether it would be READY.
    pub fits: bool,
    /// Tokens of keys and values then.
    kv_tokens: usize,
    /// Bytes by class; with `free` and the device's overhead and foreign bytes they are its memory, where it fits.
    claims: BTreeMap<String, Bytes>,
    /// What nobody has.
    free: Bytes,
    /// What is missing.
    short_by: Bytes,
    /// Sequences that run at once, by their length.
    concurrency: Vec<Concurrency>,
    /// The largest picture; none for a model that takes none.
    picture: Option<Picture>,
    /// The largest inputs, as the model lowers them.
    envelope: Envelope,
    /// What alone would make it fit.
    suggestions: Vec<Value>,
    /// Knobs that no value of alone would do.
    not_enough_alone: Vec<&'static str>,
    /// What was said and changes nothing, and what was not there to plan from.
    notes: Vec<String>,
    /// One line a claimant.
    plan: MemoryPlan,
    #[serde(skip)]
    told: Vec<Suggestion>,
    #[serde(skip)]
    names: Names,
}

#[derive(Serialize)]
struct DeviceReport {
    name: String,
    target: &'static str,
    /// The type of activations, and on a GPU of weights.
    dtype: String,
    /// Whether it is here; its overhead is an estimate otherwise.
    is_here: bool,
    total: Bytes,
    overhead: Bytes,
    foreign: Bytes,
    available: Bytes,
}

#[derive(Serialize)]
struct Concurrency {
    /// Of each, prompt and reply together.
    tokens: usize,
    sequences: usize,
    /// As many as keys and values hold; a step takes `sequences` of them.
    held: usize,
}

#[derive(Serialize)]
struct Picture {
    pixels: u64,
    patches: usize,
    tokens: usize,
    /// Of one that is square.
    side: u64,
    /// Whether a request has room for it beside a word.
    fits_context: bool,
}

impl Report {
    pub fn of(
        kit: &Kit,
        planned: &Planned,
        model: &Model,
        forecast: &Forecast,
        names: &Names,
        notes: Vec<String>,
    ) -> Self {
        let envelope = kit.envelope.clone();
        let place = &planned.place;
        let mut claims: BTreeMap<_, _> =
            forecast.plan.claims().iter().map(|claim| (claim.class.label(), forecast.of_class(&claim.class))).collect();
        claims.insert(Class::Canary.label(), place.canary());
        let mut lengths: Vec<_> = LENGTHS.into_iter().filter(|tokens| *tokens < envelope.context_tokens).collect();
        lengths.push(envelope.context_tokens);
        let concurrency = |tokens| Concurrency {
            tokens,
            sequences: forecast.concurrency(tokens, envelope.sequences),
            held: forecast.concurrency(tokens, usize::MAX),
        };
        let (told, hopeless): (Vec<_>, Vec<_>) =
            forecast.suggestions.iter().cloned().partition(|suggestion| suggestion.to.is_some());
        Report {
            model: kit.name.clone(),
            device: DeviceReport {
                name: planned.name.clone(),
                target: planned.target.name(),
                dtype: planned.target.activation().to_string(),
                is_here: planned.is_here,
                total: place.total,
                overhead: place.overhead,
                foreign: place.foreign,
                available: forecast.available,
            },
            fits: forecast.fits,
            kv_tokens: forecast.kv_tokens,
            claims,
            free: forecast.free,
            short_by: forecast.short_by,
            concurrency: lengths.into_iter().filter(|_| forecast.fits).map(concurrency).collect(),
            picture: picture(kit, model),
            suggestions: told.iter().map(|told| suggestion(told, names)).collect(),
            not_enough_alone: hopeless.iter().map(|suggestion| suggestion.knob).collect(),
            notes,
            plan: forecast.plan.clone(),
            told,
            names: names.clone(),
            envelope,
        }
    }
}

/// The largest that a processor makes of any.
fn picture(kit: &Kit, model: &Model) -> Option<Picture> {
    let (merged, patch) = (model.config().merged_patches()?, model.config().patch()?);
    let limit = kit.processors.as_ref()?.pictures.config().pixel_bounds.max;
    let patch_pixels = (patch.side * patch.side) as u64;
    let tokens = kit.envelope.picture_patches.min((limit / patch_pixels) as usize) / merged;
    let (patches, pixels) = (tokens * merged, (tokens * merged) as u64 * patch_pixels);
    let side = (tokens.isqrt() * merged.isqrt() * patch.side) as u64;
    Some(Picture { pixels, patches, tokens, side, fits_context: tokens + 2 <= kit.envelope.context_tokens })
}

fn suggestion(told: &Suggestion, names: &Names) -> Value {
    let mut object = json!({
        "knob": told.knob, "from": value(&told.from), "to": told.to.as_ref().map(value), "frees": told.frees,
    });
    // By another name beside the one that stands there already it would be refused.
    if let Some(name) = names.of(told.knob) {
        object["as"] = json!(name);
    }
    object
}

/// What is typed for a knob by this name; one inside an object is typed as an object.
fn flag(name: &str, to: &str) -> String {
    let hyphens = |name: &str| name.replace('_', "-");
    match name.split_once('.') {
        Some((outer, inner)) => {
            let object = inner.rsplit('.').fold(to.to_owned(), |value, key| format!("{{\"{key}\": {value}}}"));
            format!("--{} '{object}'", hyphens(outer))
        }
        None => format!("--{} {to}", hyphens(name)),
    }
}

fn value(change: &Change) -> Value {
    match change {
        Change::Count(count) => json!(count),
        Change::Size(bytes) => json!(bytes),
        Change::Share(share) => json!(share),
    }
}

/// As it is typed behind a flag, short where it can be.
fn typed(change: &Change) -> String {
    match change {
        Change::Size(bytes) if bytes.is_multiple_of(Bytes::mib(1)) => format!("{}MiB", bytes.0 / Bytes::mib(1).0),
        change => change.to_string(),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceReport { name, target, dtype, total, overhead, foreign, available, .. } = &self.device;
        writeln!(f, "{} on {name} ({target}, {dtype}), {total}\n\n{}", self.model, self.plan)?;
        let canary = self.claims[&Class::Canary.label()];
        writeln!(
            f,
            "Of {total} {available} can be leased: {overhead} of overhead, {foreign} of others and {canary} of canary are not."
        )?;
        match self.fits {
            true => self.tell_what_it_serves(f)?,
            false => self.tell_what_would_fit(f)?,
        }
        if let Some(picture) = &self.picture {
            picture.tell(f, self.envelope.context_tokens)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "Note: {note}."))
    }
}

impl Report {
    fn tell_what_it_serves(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nIt fits: keys and values hold {} tokens, and {} stay free.", self.kv_tokens, self.free)?;
        for Concurrency { tokens, sequences, held } in &self.concurrency {
            let plural = if *sequences == 1 { "sequence" } else { "sequences" };
            writeln!(f, "  {sequences} {plural} of {tokens} tokens at once (there is room for {held})")?;
        }
        Ok(())
    }

    fn tell_what_would_fit(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.short_by.is_zero() {
            true => writeln!(
                f,
                "\nIt does not fit: keys and values would hold less than one sequence may have ({} tokens).",
                self.envelope.context_tokens
            )?,
            false => writeln!(f, "\nIt does not fit: it is {} ({}) short.", self.short_by, self.short_by.exact())?,
        }
        if !self.told.is_empty() {
            writeln!(f, "Each of these alone makes it fit:")?;
        }
        for Suggestion { knob, from, to, frees } in &self.told {
            let to = to.as_ref().map(typed).unwrap_or_default();
            let said = self.names.of(knob);
            let flag = flag(said.unwrap_or(knob), &to);
            // What is said is replaced, and what is not said is lowered by it.
            let instead = match said {
                Some(name) => format!("instead of {name} {}", typed(from)),
                None => format!("instead of {}", typed(from)),
            };
            match frees.is_zero() {
                true => writeln!(f, "  {flag:<30} {instead}")?,
                false => writeln!(f, "  {flag:<30} {instead:<36} {frees}")?,
            }
        }
        if !self.not_enough_alone.is_empty() {
            writeln!(f, "No value of these alone makes it fit: {}.", self.not_enough_alone.join(", "))?;
        }
        Ok(())
    }
}

impl Picture {
    fn tell(&self, f: &mut fmt::Formatter<'_>, context_tokens: usize) -> fmt::Result {
        let Picture { pixels, tokens, side, .. } = self;
        let plural = if *tokens == 1 { "token" } else { "tokens" };
        writeln!(
            f,
            "The largest picture has {pixels} pixels, {side} x {side} where it is square, and takes {tokens} {plural}; larger \
             ones are resized."
        )?;
        match self.fits_context {
            true => Ok(()),
            false => writeln!(
                f,
                "But a context of {context_tokens} tokens has no room for one and a question: raise context_tokens or \
                 lower picture_pixels."
            ),
        }
    }
}
