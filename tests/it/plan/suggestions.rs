//! Every suggestion of a plan fits when it is set separately, under the name that the user gave.
//! The plans sample all shapes, GPUs and names.

use std::sync::Arc;

use bursar::{Bytes, Forecast, LoadOptions, Suggestion, knobs::Knobs, knobs::TABLE};
use bursar_actors::{engine::Change, engine::Question, engine::TOTAL, profile::MemoryState};
use bursar_kernels::{CudaTarget, DType, Target};
use bursar_model::{Model, checkpoint::Checkpoint, checkpoint::CheckpointSource, registry, registry::shapes};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use serde_json::{Map, Value, json};

/// GPUs, each with its compute capability, number of SMs, and MiB of memory.
const CARDS: [((u32, u32), usize, u64); 5] =
    [((7, 5), 40, 14_900), ((8, 9), 58, 22_400), ((8, 0), 108, 40_300), ((9, 0), 132, 80_900), ((9, 0), 132, 143_155)];

/// Settings that change a model's memory requirements.
const KNOBS: [&str; 12] = [
    "context_tokens",
    "sequences",
    "step_tokens",
    "picture_pixels",
    "picture_pixels_min",
    "picture_patches",
    "pictures",
    "launch_patches",
    "memory_fraction",
    "device_fraction",
    "kv_bytes",
    "kv_tokens",
];

/// Every name of these settings, with the knob that it sets.
fn names() -> Vec<(&'static str, &'static str)> {
    let of_table = TABLE.iter().filter(|knob| KNOBS.contains(&knob.name)).flat_map(|knob| {
        let aliases = knob.aliases.iter().map(|alias| alias.name);
        std::iter::once(knob.name).chain(aliases).map(|name| (knob.name, name))
    });
    let nested = [
        ("picture_pixels", "mm_processor_kwargs.max_pixels"),
        ("picture_pixels", "mm_processor_kwargs.size.longest_edge"),
        ("picture_pixels_min", "mm_processor_kwargs.min_pixels"),
        ("pictures", "limit_mm_per_prompt.image"),
        ("pictures", "limit_mm_per_prompt.image.count"),
    ];
    of_table.chain(nested).collect()
}

/// A value for a knob. `size` is a fraction (0 to 1) of a large value, on a logarithmic scale.
fn value(knob: &str, size: f64) -> Value {
    let up_to = |most: f64| json!(most.powf(size).ceil() as u64);
    match knob {
        "memory_fraction" | "device_fraction" => json!((size * 1000.0).ceil().max(1.0) / 1000.0),
        "picture_pixels" | "picture_pixels_min" => json!(1000 + (2e7f64).powf(size) as u64),
        "picture_patches" | "launch_patches" => json!(64 + (2e5f64).powf(size) as u64),
        "kv_bytes" => up_to(4e11),
        "kv_tokens" => up_to(1e7),
        "context_tokens" => json!(64 + (2e5f64).powf(size) as u64),
        _ => up_to(2e4),
    }
}

/// Sets a value under a name. A dot in the name leads into a nested object.
fn set(settings: &mut Map<String, Value>, name: &str, value: Value) {
    let (outer, inner) = name.split_once('.').map_or((name, None), |(outer, inner)| (outer, Some(inner)));
    let value = inner.map_or(value.clone(), |inner| inner.rsplit('.').fold(value, |value, key| json!({ key: value })));
    match (settings.get_mut(outer), value) {
        (Some(Value::Object(object)), Value::Object(more)) => object.extend(more),
        (_, value) => drop(settings.insert(outer.to_owned(), value)),
    }
}

struct Subject {
    name: &'static str,
    checkpoint: Checkpoint,
    models: Vec<(Model, CudaTarget)>,
}

impl Subject {
    fn of(name: &'static str) -> Self {
        let random = registry::shape_settings(name).expect("a known shape");
        let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the checkpoint opens");
        let model = |(capability, processors, _)| {
            let activation = if capability >= (8, 0) { DType::BF16 } else { DType::F16 };
            let target = CudaTarget { capability, sms: processors, activation };
            (Model::plan(&checkpoint, &Target::Cuda(target)).expect("the checkpoint is complete"), target)
        };
        let models = CARDS.into_iter().map(model).collect();
        Subject { name, checkpoint, models }
    }

    /// Returns `None` if these settings are refused.
    fn forecast(
        &self,
        card: usize,
        settings: &Map<String, Value>,
        place: MemoryState,
    ) -> Option<(LoadOptions, Forecast)> {
        let (knobs, names) = Knobs::named_from(settings.clone()).ok()?;
        let options = LoadOptions { names, ..knobs.options().ok()? };
        let (model, target) = &self.models[card];
        let pictures = self.checkpoint.image_processor.as_ref();
        let place = MemoryState { canary: knobs.canary.or(place.canary), ..place };
        let question =
            Question { model, pictures, checkpoint: None, target: Target::Cuda(*target), options: &options, place };
        let forecast = Forecast::of(&question).ok()?;
        Some((options, forecast))
    }

    /// Returns the number of suggestions tried.
    fn check(&self, card: usize, settings: &Map<String, Value>) -> usize {
        let total = Bytes::mib(CARDS[card].2);
        let nothing = MemoryState::of_available(total, Bytes::mib(2));
        let place = MemoryState { overhead: Bytes::mib(548), canary: None, ..nothing };
        let Some((options, forecast)) = self.forecast(card, settings, place) else { return 0 };
        let Some(unfit) = forecast.unfit else { return 0 };
        let helpful = unfit.suggestions.iter().filter(|suggestion| suggestion.to.is_some());
        let tried = helpful.map(|suggestion| {
            let Suggestion { knob, to, setting, name, .. } = suggestion;
            let (mut changed, mut elsewhere) = (settings.clone(), place);
            match (setting, to) {
                (Some(setting), _) => drop(changed.insert(setting.name.clone(), setting.value.clone())),
                (None, Some(Change::Size(total))) if *knob == TOTAL => elsewhere.total = *total,
                wrong => panic!("{wrong:?} cannot be set"),
            }
            let context = || format!("{} on card {card} with {settings:?}: {name} {to:?}", self.name);
            let (_, fitting) = self
                .forecast(card, &changed, elsewhere)
                .unwrap_or_else(|| panic!("the plan is refused: {}", context()));
            assert!(fitting.fits(), "{}: {:?}", context(), fitting.unfit);
            if let Some(typed) = options.names.of(knob) {
                assert_eq!(typed, name, "the suggestion uses the typed name");
            }
        });
        tried.count()
    }
}

#[test]
fn every_suggestion_for_random_shapes_and_cards_fits_alone() {
    let (subjects, names) = (shapes().map(Subject::of).collect::<Vec<_>>(), names());
    let (mut runner, mut tried) = (TestRunner::deterministic(), 0);
    for (index, subject) in subjects.iter().enumerate() {
        // Try a quarter of the names with each shape, and the other quarters with the next shapes.
        for (knob, name) in names.iter().skip(index % 4).step_by(4) {
            // Plan on a random GPU, in some cases with a second knob that has a random value.
            let sizes = (0..CARDS.len(), 0.0..1.0f64, proptest::option::of((0..names.len(), 0.0..1.0f64)));
            let (card, size, second) = sizes.new_tree(&mut runner).expect("numbers").current();
            let mut settings = Map::new();
            if let Some((other, size)) = second.filter(|(other, _)| names[*other].0 != *knob) {
                set(&mut settings, names[other].1, value(names[other].0, size));
            }
            set(&mut settings, name, value(knob, size));
            tried += subject.check(card, &settings);
        }
    }
    assert!(tried > 100, "more than 100 suggestions are tried, not {tried}");
}
