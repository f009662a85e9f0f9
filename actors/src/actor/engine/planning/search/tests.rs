//! Tests of suggestions: a model fits if one knob gets its suggested value and no other knob
//! changes. No value closer to the knob's current value makes it fit.

use std::sync::Arc;

use bursar_budgets::Hint;
use bursar_kernels::{CudaTarget, DType, Target};
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource},
    demo,
    registry::shape_settings,
};

use super::*;
use crate::{
    engine::{Forecast, Limits, LoadOptions, Shortfall},
    profile::default_canary,
};

const PAGE: Bytes = Bytes::mib(2);

struct Subject {
    checkpoint: Checkpoint,
    model: Model,
    target: Target,
}

impl Subject {
    fn of(source: CheckpointSource, target: Target) -> Self {
        let checkpoint = Checkpoint::open(source).expect("the checkpoint opens");
        Subject { model: Model::plan(&checkpoint, &target).expect("the model can be planned"), checkpoint, target }
    }

    fn demo() -> Self {
        Subject::of(demo::checkpoint(), Target::Cpu { threads: 2 })
    }

    fn released_shape() -> Self {
        Subject::released_shape_on(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 })
    }

    fn released_shape_on(gpu: CudaTarget) -> Self {
        Subject::shape_on("qwen2.5-vl-7b", gpu)
    }

    fn shape_on(name: &str, gpu: CudaTarget) -> Self {
        let random = shape_settings(name).expect("a known shape");
        Subject::of(CheckpointSource::Random(Arc::new(random)), Target::Cuda(gpu))
    }

    fn question<'q>(&'q self, options: &'q LoadOptions, place: MemoryState) -> Question<'q> {
        let pictures = self.checkpoint.image_processor.as_ref();
        let checkpoint = Some(&self.checkpoint);
        Question { model: &self.model, pictures, checkpoint, target: self.target, options, place }
    }

    fn least(&self, options: &LoadOptions) -> Bytes {
        let (_, needs) = self.question(options, host_of(Bytes::ZERO)).needs().expect("the requirements can be planned");
        needs.memory_plan().total()
    }
}

fn host_of(total: Bytes) -> MemoryState {
    let nothing = Bytes::ZERO;
    MemoryState { total, overhead: nothing, foreign: nothing, canary: None, page: PAGE, is_host: true }
}

fn card_of(total: Bytes) -> MemoryState {
    MemoryState { overhead: Bytes::mib(550), is_host: false, ..host_of(total) }
}

fn fits_with(question: &Question<'_>, suggestion: &Suggestion, to: Change) -> bool {
    let (mut place, mut options) = (question.place, question.options.clone());
    let mut quantized = None;
    match (suggestion.knob, to) {
        (QUANTIZATION, Change::Format(Some(format))) => {
            let checkpoint = question.checkpoint.expect("a format was suggested");
            let model = Model::plan_quantized(checkpoint, format, &question.target, 1).expect("the format is served");
            (quantized, options.quantization) = (model, Some(format));
        }
        (TOTAL, Change::Size(bytes)) => place.total = bytes,
        ("canary", Change::Size(bytes)) => place.canary = Some(bytes),
        _ => {
            let changed = Suggestion { to: Some(to), ..suggestion.clone() };
            options = changed.over(&options).expect("the suggested value is valid for the model");
        }
    }
    let model = quantized.as_ref().unwrap_or(question.model);
    Forecast::of(&Question { model, options: &options, place, ..*question }).is_ok_and(|forecast| forecast.fits())
}

/// Checks every suggestion. Returns the knobs for which a value was suggested.
fn checked(question: &Question<'_>) -> Vec<&'static str> {
    let forecast = Forecast::of(question).expect("the requirements can be planned");
    let unfit = forecast.unfit.unwrap_or_else(|| panic!("the question should not fit: {}", forecast.plan));
    let mut helpful = Vec::new();
    for suggestion in &unfit.suggestions {
        let Suggestion { knob, from, to: Some(to), .. } = suggestion else { continue };
        helpful.push(*knob);
        assert!(fits_with(question, suggestion, *to), "{knob} {to} was suggested instead of {from} but does not fit");
        // A value nearer to the current value does not fit.
        let step = if *knob == "picture_pixels" { 28 * 28 } else { 1 };
        let nearer = match (*to, *from) {
            (Change::Count(to), Change::Count(from)) if to < from => Change::Count(to + step),
            (Change::Count(to), _) => Change::Count(to - 16),
            (Change::KvShare(to), _) => Change::KvShare(((to * 1000.0).round() - 1.0) / 1000.0),
            (Change::Size(to), Change::Size(from)) if to < from && *knob == "canary" => {
                Change::Size(to + Bytes::mib(1))
            }
            (Change::Size(to), Change::Size(from)) if to < from => Change::Size(to + Bytes::mib(8)),
            (Change::Size(to), _) => Change::Size(to.saturating_sub(Bytes::mib(8))),
            (Change::Format(Some(WeightQuantization::Int4)), _) => Change::Format(Some(WeightQuantization::Fp8)),
            (Change::Format(_), from) => from,
        };
        let is_now = match (nearer, *from) {
            (Change::Count(nearer), Change::Count(from)) => nearer.abs_diff(from) < step,
            (nearer, from) => nearer == from,
        };
        assert!(is_now || !fits_with(question, suggestion, nearer), "{knob} {to} was suggested, but {nearer} fits too");
    }
    helpful
}

#[test]
fn each_suggestion_fits_alone_and_is_the_smallest_change() {
    let subject = Subject::demo();
    let none = LoadOptions::default();
    let least = subject.least(&none);
    for short in [1, 8, 16] {
        let total = least.saturating_sub(Bytes::mib(short));
        let helpful = checked(&subject.question(&none, host_of(total)));
        assert!(helpful.contains(&TOTAL), "{helpful:?}");
        assert!(helpful.len() >= 2, "several knobs can free {short} MiB: {helpful:?}");
    }
    let ample = host_of(least + default_canary(Bytes::gib(4)) + Bytes::mib(64));
    let given = LoadOptions { envelope: Some(Envelope::default()), ..none };
    let context = Envelope::default().context_tokens;
    for (knob, options) in [
        ("memory_fraction", LoadOptions { memory_fraction: Some(0.004), ..given.clone() }),
        ("device_fraction", LoadOptions { device_fraction: Some(0.004), ..given.clone() }),
        ("kv_tokens", LoadOptions { kv_tokens: Some(context / 2), ..given.clone() }),
        ("kv_tokens", LoadOptions { kv_tokens: Some(1 << 24), ..given.clone() }),
        ("kv_bytes", LoadOptions { kv_bytes: Some(Bytes::mib(1)), ..given.clone() }),
        ("kv_bytes", LoadOptions { kv_bytes: Some(Bytes::gib(9)), ..given.clone() }),
    ] {
        let helpful = checked(&subject.question(&options, ample));
        assert!(helpful.contains(&knob), "{knob} should be among the suggestions {helpful:?}");
    }
}

#[test]
fn a_fixed_size_lacks_memory_if_large_and_tokens_if_small() {
    let subject = Subject::demo();
    let shortfall = |kv_tokens| {
        let options = LoadOptions { kv_tokens: Some(kv_tokens), ..LoadOptions::small() };
        let forecast = Forecast::of(&subject.question(&options, host_of(Bytes::mib(64))))
            .expect("the requirements can be planned");
        (forecast.unfit.expect("the model does not fit").shortfall, forecast.plan.total())
    };
    let (Shortfall::Memory { needed, available, short_by }, planned) = shortfall(1 << 20) else {
        panic!("the shortfall is not memory")
    };
    assert_eq!((needed, short_by), (planned, needed - available), "the plan includes the fixed part");
    let (few, _) = shortfall(100);
    assert_eq!(few, Shortfall::Tokens { tokens: 112, context_tokens: 512 });
}

#[test]
fn a_smaller_canary_is_suggested_when_the_canary_blocks() {
    let (subject, options) = (Subject::demo(), LoadOptions::small());
    let place = MemoryState { canary: Some(Bytes::mib(100)), ..host_of(subject.least(&options) + Bytes::mib(60)) };
    let question = subject.question(&options, place);
    let unfit =
        Forecast::of(&question).expect("the requirements can be planned").unfit.expect("the canary is too large");
    let canary = unfit
        .suggestions
        .iter()
        .find(|suggestion| suggestion.knob == "canary")
        .expect("the canary is among the suggestions");
    let Some(Change::Size(to)) = canary.to else { panic!("{canary:?}") };
    assert!(to <= Bytes::mib(60) && canary.frees == Bytes::mib(100).saturating_sub(to), "{canary:?}");
    assert!(checked(&question).contains(&"canary"));
}

#[test]
fn a_shortage_beyond_all_knobs_suggests_only_more_capacity() {
    let (subject, options) = (Subject::demo(), LoadOptions::small());
    let question = subject.question(&options, host_of(Bytes::mib(4)));
    let unfit =
        Forecast::of(&question).expect("the requirements can be planned").unfit.expect("the weights alone are 7.4 MB");
    let helpful: Vec<_> = unfit.suggestions.iter().filter(|suggestion| suggestion.to.is_some()).collect();
    assert!(helpful.len() == 1 && helpful[0].knob == TOTAL, "{helpful:?}");
    let hint = unfit.hint();
    assert!(hint.contains("`capacity` ") && hint.contains("only one of these"), "{hint}");
    let card = subject.question(&options, MemoryState { is_host: false, ..question.place });
    let unfit = Forecast::of(&card).expect("the requirements can be planned").unfit.expect("the model does not fit");
    assert!(
        unfit.hint().contains("more of the device's memory"),
        "the memory of a GPU cannot be raised: {}",
        unfit.hint()
    );
}

#[test]
fn a_7b_model_on_a_small_card_gets_working_suggestions() {
    let (subject, options) = (Subject::released_shape(), LoadOptions::default());
    let helpful = checked(&subject.question(&options, card_of(Bytes::mib(19_200))));
    for knob in [TOTAL, "step_tokens", "picture_pixels", "launch_patches"] {
        assert!(helpful.contains(&knob), "{knob} should be among the suggestions {helpful:?}");
    }
    let limits = Limits { picture_patches: Some(20_000), ..Limits::default() };
    let in_patches = LoadOptions { limits, ..options };
    let helpful = checked(&subject.question(&in_patches, card_of(Bytes::mib(19_200))));
    assert!(helpful.contains(&"picture_patches") && !helpful.contains(&"picture_pixels"), "{helpful:?}");
}

#[test]
fn a_suggested_step_has_space_for_a_whole_picture() {
    let gpu = CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 };
    let (subject, options) = (Subject::shape_on("gemma-3-4b", gpu), LoadOptions::default());
    let helpful = checked(&subject.question(&options, card_of(Bytes::mib(10_240))));
    assert!(helpful.contains(&"step_tokens"), "{helpful:?}");
}

#[test]
fn fewer_suggested_sequences_also_lower_the_automatically_raised_step() {
    let subject = Subject::demo();
    let most = |step_tokens| {
        let limits = Limits { sequences: Some(20_000), step_tokens, ..Limits::default() };
        let options = LoadOptions { envelope: Some(Envelope::small()), limits, ..LoadOptions::default() };
        let question = subject.question(&options, host_of(Bytes::mib(512)));
        assert!(checked(&question).contains(&"sequences"));
        let unfit = Forecast::of(&question)
            .expect("the requirements can be planned")
            .unfit
            .expect("the sequences are too many");
        let sequences = unfit.suggestions.iter().find(|suggestion| suggestion.knob == "sequences");
        match sequences.and_then(|suggestion| suggestion.to) {
            Some(Change::Count(sequences)) => sequences,
            other => panic!("{other:?}"),
        }
    };
    let raised = most(None);
    assert!(raised > most(Some(20_000)), "{raised} sequences fit, because the raised step shrinks with them");
    assert!(raised > 1000, "{raised}");
}

/// The format that is suggested for a GPU with this much memory. The outer `Option` is `None` if
/// the model fits.
fn suggested_format(subject: &Subject, options: &LoadOptions, gib: u64) -> Option<Option<Change>> {
    let question = subject.question(options, card_of(Bytes::gib(gib)));
    let unfit = Forecast::of(&question).expect("the requirements can be planned").unfit?;
    let found = unfit.suggestions.iter().find(|suggestion| suggestion.knob == QUANTIZATION);
    Some(found.expect("the weights are not quantized").to)
}

#[test]
fn weights_are_quantized_in_the_largest_format_that_fits() {
    let (subject, options) = (Subject::released_shape(), LoadOptions::default());
    let found: Vec<_> = (4..32).map_while(|gib| suggested_format(&subject, &options, gib)).collect();
    let mut distinct = found.clone();
    distinct.dedup();
    let [fp8, int4] =
        [WeightQuantization::Fp8, WeightQuantization::Int4].map(|format| Some(Change::Format(Some(format))));
    assert_eq!(distinct, [None, int4, fp8], "with more memory, first no format fits, then 4 bits, then FP8: {found:?}");
    let fitting = 4 + found.iter().position(|to| *to == int4).expect("int4 was suggested") as u64;
    checked(&subject.question(&options, card_of(Bytes::gib(fitting))));
}

#[test]
fn a_format_is_suggested_only_if_it_changes_the_weights_and_the_target_has_kernels() {
    let (subject, card) = (Subject::released_shape(), card_of(Bytes::gib(8)));
    let knobs = |subject: &Subject, options: &LoadOptions| {
        let forecast = Forecast::of(&subject.question(options, card)).expect("the requirements can be planned");
        forecast
            .unfit
            .expect("8 GiB are too few")
            .suggestions
            .into_iter()
            .map(|suggestion| suggestion.knob)
            .collect::<Vec<_>>()
    };
    assert!(knobs(&subject, &LoadOptions::default()).contains(&QUANTIZATION));
    let options = LoadOptions { quantization: Some(WeightQuantization::Int4), ..LoadOptions::default() };
    assert!(!knobs(&subject, &options).contains(&QUANTIZATION), "the user has chosen a format");
    let subject = Subject::released_shape_on(CudaTarget { capability: (7, 0), sms: 80, activation: DType::F16 });
    assert!(!knobs(&subject, &LoadOptions::default()).contains(&QUANTIZATION), "no kernels for quantized weights");
    // There are kernels for FP8 experts on Hopper only, and experts are never packed in 4 bits.
    let ada = CudaTarget { capability: (8, 9), sms: 142, activation: DType::BF16 };
    let mixture = Subject::shape_on("qwen3-30b-a3b", ada);
    let options = LoadOptions::default();
    assert_eq!(suggested_format(&mixture, &options, 40), Some(None), "the experts alone need more");
    let forecast = |format| Model::plan_quantized(&mixture.checkpoint, format, &mixture.target, 1);
    assert!(forecast(WeightQuantization::Fp8).is_err_and(|error| error.to_string().contains("experts")));
}
