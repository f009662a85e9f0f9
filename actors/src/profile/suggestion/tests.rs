//! What is suggested fits, alone, and nothing nearer does.

use std::sync::Arc;

use bursar_kernels::{CudaTarget, DType};
use bursar_model::{
    checkpoint::{Checkpoint, CheckpointSource},
    demo,
    registry::random_checkpoint,
};

use super::*;
use crate::{
    engine::Limits,
    profile::{Forecast, default_canary},
};

const PAGE: Bytes = Bytes::mib(2);

fn planned(source: CheckpointSource, target: Target) -> Model {
    Model::plan(&Checkpoint::open(source).expect("it opens"), &target).expect("it is whole")
}

fn host() -> Target {
    Target::Cpu { threads: 2 }
}

fn h200() -> Target {
    Target::Cuda(CudaTarget { capability: (9, 0), processors: 132, activation: DType::BF16 })
}

fn host_of(total: Bytes) -> Place {
    let nothing = Bytes::ZERO;
    Place { total, overhead: nothing, foreign: nothing, canary: None, page: PAGE, is_host: true }
}

/// The same question with one knob set.
fn with<'q>(question: &Question<'q>, envelope: &'q mut Envelope, knob: &str, to: Change) -> Question<'q> {
    let mut changed = *question;
    match (knob, to) {
        ("total", Change::Size(bytes)) => changed.place.total = bytes,
        ("canary", Change::Size(bytes)) => changed.place.canary = Some(bytes),
        ("kv_tokens", Change::Count(tokens)) => changed.kv.kv_tokens = Some(tokens),
        ("kv_bytes", Change::Size(bytes)) => changed.kv.kv_bytes = Some(bytes),
        ("memory_fraction", Change::Share(share)) => changed.kv.memory_fraction = Some(share),
        ("device_fraction", Change::Share(share)) => changed.kv.device_fraction = Some(share),
        (knob, Change::Count(value)) => {
            let limit = LIMITS.iter().find(|limit| limit.name == knob).expect("a limit of the envelope");
            *envelope = limit.set(question.envelope, value, &question.unsaid);
            changed.envelope = envelope;
        }
        (knob, to) => panic!("{knob} {to}"),
    }
    changed
}

/// Whether all is as suggested; the knobs that have a value.
fn checked(question: &Question<'_>) -> Vec<&'static str> {
    let forecast = Forecast::of(question).expect("it can be planned");
    assert!(!forecast.fits && forecast.kv_tokens == 0, "{}", forecast.plan);
    let mut helpful = Vec::new();
    for Suggestion { knob, from, to, .. } in &forecast.suggestions {
        let Some(to) = *to else { continue };
        helpful.push(*knob);
        let fits = |to: Change| {
            let mut envelope = question.envelope.clone();
            Forecast::of(&with(question, &mut envelope, knob, to)).expect("it can be planned").fits
        };
        assert!(fits(to), "{knob} {to} instead of {from} was said to fit");
        // One nearer to what it is now does not.
        let nearer = match (to, *from) {
            (Change::Count(to), Change::Count(from)) if to < from => Change::Count(to + 1),
            (Change::Count(to), _) => Change::Count(to - 16),
            (Change::Share(to), _) => Change::Share(((to * 1000.0).round() - 1.0) / 1000.0),
            (Change::Size(to), Change::Size(from)) if to < from && *knob == "canary" => {
                Change::Size(to + Bytes::mib(1))
            }
            (Change::Size(to), Change::Size(from)) if to < from => Change::Size(to + Bytes::mib(8)),
            (Change::Size(to), _) => Change::Size(to.saturating_sub(Bytes::mib(8))),
        };
        assert!(nearer == *from || !fits(nearer), "{knob} {nearer} would have done, {to} was said");
    }
    helpful
}

#[test]
fn whatever_is_suggested_fits_alone_and_nothing_nearer_does() {
    let model = planned(demo::checkpoint(), host());
    let envelope = Envelope::default();
    let question = |total: Bytes, kv: KvChoice| Question {
        model: &model,
        target: host(),
        envelope: &envelope,
        kv,
        place: host_of(total),
        unsaid: Unsaid::default(),
    };
    let least = Needs::plan(&model, host(), &envelope, PAGE).expect("it can be planned").memory_plan().total();
    for short in [1, 8, 16] {
        let total = least.saturating_sub(Bytes::mib(short));
        let helpful = checked(&question(total, KvChoice::default()));
        assert!(helpful.contains(&"total"), "{helpful:?}");
        assert!(helpful.len() >= 2, "{short} MiB are found in several places: {helpful:?}");
    }
    let roomy = least + default_canary(Bytes::gib(4)) + Bytes::mib(64);
    let none = KvChoice::default();
    let context = envelope.context_tokens;
    for (knob, kv) in [
        ("memory_fraction", KvChoice { memory_fraction: Some(0.004), ..none }),
        ("device_fraction", KvChoice { device_fraction: Some(0.004), ..none }),
        ("kv_tokens", KvChoice { kv_tokens: Some(context / 2), ..none }),
        ("kv_tokens", KvChoice { kv_tokens: Some(1 << 24), ..none }),
        ("kv_bytes", KvChoice { kv_bytes: Some(Bytes::mib(1)), ..none }),
        ("kv_bytes", KvChoice { kv_bytes: Some(Bytes::gib(9)), ..none }),
    ] {
        let helpful = checked(&question(roomy, kv));
        assert!(helpful.contains(&knob), "{knob} is at fault in {kv:?}, found was {helpful:?}");
    }
}

#[test]
fn a_smaller_canary_is_suggested_where_it_is_what_stands_in_the_way() {
    let model = planned(demo::checkpoint(), host());
    let envelope = Envelope::small();
    let least = Needs::plan(&model, host(), &envelope, PAGE).expect("it can be planned").memory_plan().total();
    let place = Place { canary: Some(Bytes::mib(100)), ..host_of(least + Bytes::mib(60)) };
    let unsaid = Unsaid::default();
    let question =
        Question { model: &model, target: host(), envelope: &envelope, kv: KvChoice::default(), place, unsaid };
    let forecast = Forecast::of(&question).expect("it can be planned");
    let canary = forecast.suggestions.iter().find(|suggestion| suggestion.knob == "canary").expect("there is one");
    let Some(Change::Size(to)) = canary.to else { panic!("{canary:?}") };
    assert!(to <= Bytes::mib(60) && canary.frees == Bytes::mib(100).saturating_sub(to), "{canary:?}");
    assert!(checked(&question).contains(&"canary"));
}

#[test]
fn what_no_value_of_a_knob_can_mend_is_said_to_be_so() {
    let model = planned(demo::checkpoint(), host());
    let envelope = Envelope::small();
    let place = host_of(Bytes::mib(4));
    let unsaid = Unsaid::default();
    let question =
        Question { model: &model, target: host(), envelope: &envelope, kv: KvChoice::default(), place, unsaid };
    let forecast = Forecast::of(&question).expect("it can be planned");
    let helpful: Vec<_> = forecast.suggestions.iter().filter(|suggestion| suggestion.to.is_some()).collect();
    assert!(helpful.len() == 1 && helpful[0].knob == "total", "the weights alone are 7.4 MB: {helpful:?}");
    let knobs = suggestions(&model, host(), &envelope, PAGE, Bytes::mib(4));
    assert_eq!(knobs[0].name, "free device memory");
    assert!(knobs[1..].iter().all(|knob| knob.would_fit.is_none()), "{knobs:?}");
}

#[test]
fn an_error_names_the_capacity_and_what_the_model_was_loaded_with() {
    let model = planned(demo::checkpoint(), host());
    let envelope = Envelope::small();
    let needs = Needs::plan(&model, host(), &envelope, PAGE).expect("it can be planned");
    let least = needs.memory_plan().total();
    assert_eq!(suggestions(&model, host(), &envelope, PAGE, least), [], "it fits");
    let place = Place::of_available(least, PAGE);
    let kv = KvChoice { kv_tokens: Some(1 << 20), ..KvChoice::default() };
    let unsaid = Unsaid::default();
    let pinned = Question { model: &model, target: host(), envelope: &envelope, kv, place, unsaid };
    let knobs = pinned.knobs();
    let of = |name: &str| knobs.iter().find(|knob| knob.name == name).unwrap_or_else(|| panic!("no {name}"));
    // As many as the probe's pages hold.
    let tokens = KvMemory::blocks_in(needs.kv_shape, needs.probe(), PAGE) * BLOCK_TOKENS;
    assert_eq!(of("kv_tokens").would_fit.as_deref(), Some(tokens.to_string().as_str()));
    assert_eq!(
        (of("step_tokens").would_fit.as_deref(), of("free device memory").now.as_str()),
        (None, &*least.to_string())
    );
    let wanted = KvMemory::bytes(needs.kv_shape, (1 << 20) / BLOCK_TOKENS, PAGE) + least;
    let room = wanted.saturating_sub(needs.probe()).to_string();
    assert_eq!(of("free device memory").would_fit.as_deref(), Some(room.as_str()));
}

#[test]
fn seven_billion_parameters_on_a_card_that_is_too_small_are_told_what_would_fit() {
    let random = random_checkpoint("qwen2.5-vl-7b", 0).expect("a known shape");
    let model = planned(CheckpointSource::Random(Arc::new(random)), h200());
    let envelope = Envelope::gpu();
    let nothing = host_of(Bytes::ZERO);
    let place = Place { total: Bytes::gib(19), overhead: Bytes::mib(550), is_host: false, ..nothing };
    let unsaid = Unsaid::default();
    let question =
        Question { model: &model, target: h200(), envelope: &envelope, kv: KvChoice::default(), place, unsaid };
    let helpful = checked(&question);
    for knob in ["total", "step_tokens", "launch_patches"] {
        assert!(helpful.contains(&knob), "{knob} is not among {helpful:?}");
    }
}

#[test]
fn as_many_sequences_as_fit_are_suggested_with_the_step_that_was_raised_for_them() {
    let model = planned(demo::checkpoint(), host());
    let (expected, said) = (Envelope::small(), Limits { sequences: Some(20_000), ..Limits::default() });
    let (envelope, kv) = (said.over(&expected, None), KvChoice::default());
    let question = |unsaid| Question {
        model: &model,
        target: host(),
        envelope: &envelope,
        kv,
        place: host_of(Bytes::mib(512)),
        unsaid,
    };
    let most = |unsaid| {
        let question = question(unsaid);
        assert!(checked(&question).contains(&"sequences"));
        let forecast = Forecast::of(&question).expect("it can be planned");
        let sequences = forecast.suggestions.iter().find(|suggestion| suggestion.knob == "sequences");
        match sequences.and_then(|suggestion| suggestion.to) {
            Some(Change::Count(sequences)) => sequences,
            other => panic!("{other:?}"),
        }
    };
    let raised = most(said.unsaid(&expected));
    assert!(raised > most(Unsaid::default()), "{raised}: the step stays, or comes down with them");
    assert!(raised > 1000, "{raised}");
}
