//! A plan's result, as text and as JSON.

use std::{collections::BTreeMap, fmt};

use bursar::{Bytes, Class, Envelope, Forecast, Suggestion};
use bursar_actors::{engine::Change, engine::EffectiveLimits};
use bursar_budgets::{MemoryPlan, grouped};
use bursar_model::Model;
use serde::Serialize;

use super::{device_spec::Planned, unquantized::Unquantized};
use crate::knobs;

/// Common sequence lengths in tokens, prompt and reply together. The report
/// adds the context length.
const LENGTHS: [usize; 3] = [512, 2048, 8192];

#[derive(Serialize)]
pub struct Report {
    model: String,
    /// Number of GPUs that share the model. All other fields describe one of these GPUs.
    ranks: usize,
    device: DeviceReport,
    /// The method that quantizes weights at load, or that quantized the checkpoint. `None` if
    /// all weights are unquantized.
    quantization: Option<&'static str>,
    /// Data type of the KV cache.
    kv_cache_dtype: &'static str,
    /// The plan without quantization, for comparison. `None` if neither the KV cache nor weights
    /// are quantized at load.
    unquantized: Option<Unquantized>,
    /// Whether the model would become READY.
    pub fits: bool,
    /// Capacity of the KV cache in tokens, if the model fits.
    kv_tokens: usize,
    /// Bytes by class. If the plan fits, these bytes, `free`, the overhead and the foreign bytes
    /// add up to the device's memory.
    claims: BTreeMap<String, Bytes>,
    free: Bytes,
    /// The error that a start would report, if the model does not fit.
    error: Option<String>,
    short_by: Bytes,
    /// Attention layers with the same window, which share block tables.
    cache_groups: Vec<CacheGroup>,
    /// Maximum number of blocks that a sequence of the full context length holds, over all cache
    /// groups.
    context_blocks: usize,
    /// Number of concurrent sequences, by their length.
    concurrency: Vec<Concurrency>,
    /// The largest picture. `None` for a text model.
    picture: Option<PictureReport>,
    /// The largest inputs, after the model's own limits are applied.
    envelope: Envelope,
    /// Changes, each of which is enough to make the model fit.
    suggestions: Vec<SuggestionLine>,
    /// Knobs that cannot make the model fit without other changes, by the names under
    /// which they were set.
    not_enough_alone: Vec<String>,
    /// Settings without effect, missing files, and other findings of the plan.
    notes: Vec<String>,
    /// One line per claimant.
    plan: MemoryPlan,
}

/// A suggestion as the user would type it. If the flag has several names, this is the name that the
/// user already used.
#[derive(Serialize)]
struct SuggestionLine {
    knob: &'static str,
    from: Change,
    to: Change,
    flag: String,
    /// The value to type after the flag.
    value: String,
    frees: Bytes,
    #[serde(skip)]
    name: String,
    #[serde(skip)]
    is_object: bool,
}

#[derive(Serialize)]
struct DeviceReport {
    name: String,
    target: &'static str,
    /// Data type of activations and, on a GPU, of unquantized weights.
    dtype: String,
    /// Whether the device is in this machine. Otherwise, `overhead` is an estimate.
    is_here: bool,
    total: Bytes,
    overhead: Bytes,
    foreign: Bytes,
    available: Bytes,
}

#[derive(Serialize)]
struct Concurrency {
    /// Tokens of each sequence, prompt and reply together.
    tokens: usize,
    sequences: usize,
    /// Number of sequences whose tokens fit in the KV cache together. A step runs at most
    /// `sequences` of them.
    held: usize,
}

#[derive(Serialize)]
struct PictureReport {
    pixels: u64,
    patches: usize,
    tokens: usize,
    /// Side of a square picture, in pixels.
    side: u64,
    /// Tiles of the largest picture including the thumbnail, if pictures are cut into tiles.
    tiles: Option<u64>,
    /// Pixels of the model's own largest picture, if `pixels` is lower and no knob limits pictures.
    model_pixels: Option<u64>,
    /// Whether the picture and two more tokens fit in the context.
    fits_context: bool,
}

impl Report {
    pub fn of(
        name: &str,
        planned: &Planned,
        model: &Model,
        forecast: &Forecast,
        unquantized: Option<Unquantized>,
        notes: Vec<String>,
    ) -> Self {
        let envelope = forecast.inputs.envelope.clone();
        let place = planned.place_of(1);
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
        let all = forecast.unfit.iter().flat_map(|unfit| &unfit.suggestions);
        let hopeless = all.clone().filter(|suggestion| suggestion.to.is_none());
        Report {
            model: name.to_owned(),
            ranks: model.rank().of(),
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
            quantization: model.quantization(),
            kv_cache_dtype: model.cache().type_name(&planned.target),
            unquantized,
            fits: forecast.fits(),
            kv_tokens: forecast.kv_tokens,
            claims,
            free: forecast.free,
            error: forecast.unfit.as_ref().map(ToString::to_string),
            short_by: forecast.unfit.as_ref().map_or(Bytes::ZERO, |unfit| unfit.short_by()),
            cache_groups: forecast.cache_groups.as_slice().iter().map(CacheGroup::of).collect(),
            context_blocks: forecast.cache_groups.blocks_for(envelope.context_tokens, envelope.step_tokens),
            concurrency: lengths.into_iter().filter(|_| forecast.fits()).map(concurrency).collect(),
            picture: picture(&forecast.inputs, model),
            not_enough_alone: hopeless.map(|suggestion| suggestion.name.clone()).collect(),
            suggestions: all.filter_map(|suggestion| line_of(suggestion, planned.total_flag)).collect(),
            notes,
            plan: forecast.plan.clone(),
            envelope,
        }
    }
}

/// Describes the largest picture that the processor produces.
fn picture(inputs: &EffectiveLimits, model: &Model) -> Option<PictureReport> {
    let (merge, patch) = (model.config().merge()?, model.config().patch()?);
    let config = inputs.pictures.as_ref()?.config();
    let limit = config.pixel_bounds.max;
    let tiles = config.tiling.map(|tiling| limit / tiling.tile_pixels());
    let (patch_pixels, envelope) = ((patch.side * patch.side) as u64, &inputs.envelope);
    let tokens = merge.tokens(envelope.picture_patches.min((limit / patch_pixels) as usize));
    let patches = merge.patches(tokens);
    let pixels = patches as u64 * patch_pixels;
    let side = (tokens.isqrt() * merge.side() * patch.side) as u64;
    let fits_context = tokens + 2 <= envelope.context_tokens;
    Some(PictureReport { pixels, patches, tokens, side, tiles, model_pixels: inputs.own_pixels, fits_context })
}

/// Converts a suggestion to its flag. `total` is the flag that sets the device's memory.
fn line_of(suggestion: &Suggestion, total: &str) -> Option<SuggestionLine> {
    let Suggestion { knob, name, from, to, setting, frees } = suggestion.clone();
    let to = to?;
    let is_object = setting.as_ref().is_some_and(|setting| setting.value.is_object());
    let (flag, value) = match &setting {
        Some(setting) if is_object => knobs::flag(setting),
        Some(setting) => (knobs::flag(setting).0, to.to_string()),
        None => (total.to_owned(), to.to_string()),
    };
    Some(SuggestionLine { knob, from, to, flag, value, frees, name, is_object })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceReport { name, target, dtype, total, overhead, foreign, available, .. } = &self.device;
        let of_each = if self.ranks > 1 { format!(" on each of {}", self.ranks) } else { String::new() };
        writeln!(f, "{} on {name} ({target}, {dtype}), {total}{of_each}\n\n{}", self.model, self.plan)?;
        let canary = self.claims[&Class::Canary.label()];
        writeln!(
            f,
            "{available} of {total} can be leased. {overhead} are overhead (driver and kernels), {foreign} belong to other \
             processes, and {canary} are the canary (kept free until memory runs short)."
        )?;
        if self.fits {
            self.tell_what_it_serves(f)?
        } else {
            self.tell_what_would_fit(f)?
        }
        if let Some(picture) = &self.picture {
            picture.write(f, self.envelope.context_tokens)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "Note: {note}."))
    }
}

/// A cache group in a report.
#[derive(Serialize)]
struct CacheGroup {
    /// Number of latest tokens that the layers see. `None` if they see the whole context.
    window: Option<usize>,
    layers: usize,
}

impl CacheGroup {
    fn of(group: &bursar_model::flow::CacheGroup) -> Self {
        CacheGroup { window: group.window, layers: group.layers.len() }
    }
}

impl Report {
    fn tell_what_it_serves(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nIt fits: the KV cache holds {} tokens, and {} stay free.", count(self.kv_tokens), self.free)?;
        for Concurrency { tokens, sequences, held } in &self.concurrency {
            let plural = if *sequences == 1 { "sequence" } else { "sequences" };
            let (tokens, held) = (count(*tokens), count(*held));
            writeln!(f, "  {sequences} {plural} of {tokens} tokens at once (the KV cache can hold {held})")?;
        }
        if self.cache_groups.iter().all(|group| group.window.is_none()) {
            return Ok(());
        }
        writeln!(f, "Cache groups (each sequence has one block table per group):")?;
        for CacheGroup { window, layers } in &self.cache_groups {
            let sees =
                window.map_or("full attention".to_owned(), |tokens| format!("a window of {} tokens", count(tokens)));
            writeln!(f, "  {layers} layers with {sees}")?;
        }
        let (blocks, tokens) = (count(self.context_blocks), count(self.envelope.context_tokens));
        writeln!(f, "  a sequence of {tokens} tokens holds at most {blocks} blocks")
    }

    fn tell_what_would_fit(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = self.error.as_deref().unwrap_or_default();
        let (first, rest) = error.split_at(error.len().min(1));
        writeln!(f, "\n{}{rest}.", first.to_uppercase())?;
        if !self.suggestions.is_empty() {
            writeln!(f, "Each of these changes is enough to make it fit:")?;
        }
        for SuggestionLine { from, flag, value, frees, name, is_object, .. } in &self.suggestions {
            let quote = if *is_object { "'" } else { "" };
            let typed = format!("{flag} {quote}{value}{quote}");
            let instead = format!("instead of {name} {from}");
            if frees.is_zero() {
                writeln!(f, "  {typed:<34} {instead}")?
            } else {
                writeln!(f, "  {typed:<34} {instead:<36} {frees}")?
            }
        }
        if !self.not_enough_alone.is_empty() {
            writeln!(f, "No change to only one of these makes it fit: {}.", self.not_enough_alone.join(", "))?;
        }
        Ok(())
    }
}

fn count(number: usize) -> String {
    grouped(number as u64)
}

impl PictureReport {
    fn write(&self, f: &mut fmt::Formatter<'_>, context_tokens: usize) -> fmt::Result {
        let PictureReport { pixels, tokens, side, tiles, model_pixels, .. } = self;
        let plural = if *tokens == 1 { "token" } else { "tokens" };
        let (pixels, tokens, context_tokens) = (grouped(*pixels), count(*tokens), count(context_tokens));
        match tiles {
            None => writeln!(
                f,
                "The largest picture has {pixels} pixels ({side} x {side} if square) and takes {tokens} {plural}. \
                 Larger pictures are resized."
            )?,
            Some(1) => writeln!(f, "Each picture is resized to one tile and takes {tokens} {plural}.")?,
            Some(tiles) => {
                writeln!(f, "A picture has at most {tiles} tiles, with the thumbnail, and takes {tokens} {plural}.")?
            }
        }
        if let Some(model_pixels) = model_pixels.map(grouped) {
            writeln!(
                f,
                "The model's own limit is {model_pixels} pixels. It is lowered so that a question and an answer fit in \
                 a context of {context_tokens} tokens. Set --picture-pixels (--max-pixels) or --context-tokens \
                 (--max-model-len) to change it."
            )?;
        }
        if self.fits_context {
            Ok(())
        } else {
            writeln!(
                f,
                "But a context of {context_tokens} tokens is too short for this picture and a question: raise \
                 context_tokens or lower picture_pixels."
            )
        }
    }
}
