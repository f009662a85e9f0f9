//! Pure: the named facts that a profile depends on, which are compared one by one.

use std::{collections::BTreeMap, fmt};

use bursar_budgets::Bytes;
use bursar_kernels::Target;
use bursar_model::{
    Envelope,
    cache_file::fingerprint,
    checkpoint::Checkpoint,
    processor::{ImageProcessor, ImageProcessorConfig, VideoProcessor},
};
use serde::{Deserialize, Serialize};

use super::KvChoice;

/// The facts that a profile depends on, each with a name and its value as text. Two profiles are
/// interchangeable if all facts are equal. Otherwise the facts that differ explain why a profile
/// does not apply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProfileKey(BTreeMap<String, String>);

#[derive(Clone, Debug)]
pub struct ProfileKeySources<'p> {
    /// Source of the weights' shapes, the configuration, and the processors' settings.
    pub checkpoint: &'p Checkpoint,
    /// The limits, lowered to the model's own limits.
    pub envelope: &'p Envelope,
    /// The target for which passes are planned and on which they run.
    pub target: Target,
    pub device: &'p str,
    /// The device's driver, with the version.
    pub driver: &'p str,
    /// The GEMM library, with its version. `None` if Bursar's own kernels are used.
    pub library: Option<&'p str>,
    pub total: Bytes,
    pub page: Bytes,
    /// Bytes to keep free on purpose.
    pub canary: Bytes,
    /// The user's choice of the KV cache size.
    pub kv: KvChoice,
}

impl ProfileKey {
    pub fn of(parts: &ProfileKeySources<'_>) -> Self {
        let ProfileKeySources { checkpoint, envelope, target, device, driver, library, total, page, canary, kv } =
            parts;
        let mut profile_key = ProfileKey::default();
        profile_key.add("bursar", env!("CARGO_PKG_VERSION"));
        profile_key.add("weights", short(checkpoint.weights_fingerprint().to_string()));
        profile_key.add("cache", checkpoint.cache().name());
        profile_key.add("states", checkpoint.state_dtype().dtype().name());
        profile_key.add("draft_head", checkpoint.loads_draft_head().to_string());
        let draft_projection = checkpoint.loads_draft_head().then(|| checkpoint.draft_projection());
        profile_key.add("draft_projection", format!("{draft_projection:?}"));
        profile_key.add("config", short(checkpoint.config_fingerprint().to_string()));
        let pictures = checkpoint.image_processor.as_ref().map(ImageProcessor::config);
        let videos = checkpoint.video_processor.as_ref().map(VideoProcessor::config);
        profile_key.add_settings("processor", pictures);
        profile_key.add_settings("video_processor", videos);
        profile_key.add_limits(envelope);
        profile_key.add("target", format!("{target:?}"));
        profile_key.add("kernels", fingerprint(&[target.code()]));
        profile_key.add("device", *device);
        profile_key.add("driver", *driver);
        profile_key.add("library", library.unwrap_or("none"));
        profile_key.add("total", total.exact().to_string());
        profile_key.add("page", page.exact().to_string());
        profile_key.add("canary", canary.exact().to_string());
        let KvChoice { memory_fraction, device_fraction, kv_tokens, kv_bytes } = kv;
        profile_key.add("memory_fraction", text_of(memory_fraction));
        profile_key.add("device_fraction", text_of(device_fraction));
        profile_key.add("kv_tokens", text_of(kv_tokens));
        profile_key.add("kv_bytes", text_of(&kv_bytes.map(Bytes::exact)));
        profile_key
    }

    /// Adds a fact, or replaces the fact of that name.
    pub fn add(&mut self, name: impl Into<String>, fact: impl Into<String>) {
        self.0.insert(name.into(), fact.into());
    }

    pub fn remove(&mut self, name: &str) -> Option<String> {
        self.0.remove(name)
    }

    pub fn facts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, fact)| (name.as_str(), fact.as_str()))
    }

    /// Returns the facts that differ. The list is empty if a profile that was measured under `was`
    /// is also valid under `is`.
    pub fn differences(was: &ProfileKey, is: &ProfileKey) -> Vec<Difference> {
        let names = was.0.keys().chain(is.0.keys().filter(|name| !was.0.contains_key(*name)));
        let both = names.map(|name| (name, was.0.get(name), is.0.get(name)));
        both.filter(|(_, was, is)| was != is).map(|(name, was, is)| Difference::of(name, was, is)).collect()
    }

    fn add_settings(&mut self, of: &str, processor: Option<&ImageProcessorConfig>) {
        for (name, setting) in processor.into_iter().flat_map(ImageProcessorConfig::settings) {
            self.add(format!("{of}.{name}"), setting);
        }
    }

    /// Adds every limit of the envelope, including limits that are added to `Envelope` later.
    fn add_limits(&mut self, envelope: &Envelope) {
        let limits = serde_json::to_value(envelope).expect("limits are numbers with names");
        for (name, limit) in limits.as_object().into_iter().flatten() {
            self.add(format!("envelope.{name}"), limit.to_string());
        }
    }
}

/// Keeps 64 of the 256 bits, which are enough to avoid accidental collisions and short enough to
/// show in a message.
fn short(digits: String) -> String {
    digits.chars().take(16).collect()
}

fn text_of<T: fmt::Display>(option: &Option<T>) -> String {
    option.as_ref().map_or_else(|| "not set".to_owned(), T::to_string)
}

/// A fact that has changed, shown as `driver was 580.1, is 580.2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub what: String,
    /// The old value. `None` if it was unknown.
    pub was: Option<String>,
    /// The new value. `None` if the fact no longer exists.
    pub is: Option<String>,
}

impl Difference {
    /// Returns the difference between two values, which are stored as text.
    pub fn of<T: ToString>(what: &str, was: Option<T>, is: Option<T>) -> Self {
        let (was, is) = (was.map(|was| was.to_string()), is.map(|is| is.to_string()));
        Difference { what: what.to_owned(), was, is }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |side: &Option<String>| match side.as_deref() {
            None | Some("") => "unknown".to_owned(),
            Some(shown) => shown.to_owned(),
        };
        write!(f, "{} was {}, is {}", self.what, shown(&self.was), shown(&self.is))
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::StateDtype;
    use bursar_model::{demo, flow::CacheFormat};

    use super::*;

    /// The sources of the facts of a start of the demo model.
    struct Start {
        checkpoint: Checkpoint,
        limits: Envelope,
        threads: usize,
        device: &'static str,
        driver: &'static str,
        library: Option<&'static str>,
        total: Bytes,
        page: Bytes,
        canary: Bytes,
        kv: KvChoice,
    }

    /// The profile key of a start after `change`.
    fn profile_key(change: impl FnOnce(&mut Start)) -> ProfileKey {
        let mut start = Start {
            checkpoint: Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded"),
            limits: Envelope::small(),
            threads: 2,
            device: "host",
            driver: "580.1",
            library: None,
            total: Bytes::mib(512),
            page: Bytes::mib(2),
            canary: Bytes::mib(32),
            kv: KvChoice::default(),
        };
        change(&mut start);
        ProfileKey::of(&ProfileKeySources {
            checkpoint: &start.checkpoint,
            envelope: &start.limits,
            target: Target::Cpu { threads: start.threads },
            device: start.device,
            driver: start.driver,
            library: start.library,
            total: start.total,
            page: start.page,
            canary: start.canary,
            kv: start.kv,
        })
    }

    fn changed(of: &ImageProcessor, change: impl FnOnce(&mut ImageProcessorConfig)) -> ImageProcessor {
        let mut config = of.config().clone();
        change(&mut config);
        ImageProcessor::new(config).expect("the settings are valid")
    }

    #[test]
    fn each_changed_fact_is_named_with_old_and_new_values() {
        type Change = fn(&mut Start);
        let changes: &[(&str, Change)] = &[
            ("envelope.context_tokens was 512, is 511", |start| start.limits.context_tokens -= 1),
            ("envelope.sequences was 4, is 5", |start| start.limits.sequences += 1),
            ("envelope.step_tokens was 128, is 129", |start| start.limits.step_tokens += 1),
            ("envelope.picture_patches was 1024, is 1020", |start| start.limits.picture_patches = 1020),
            ("envelope.largest_pictures was 2, is 3", |start| start.limits.largest_pictures += 1),
            ("envelope.video_frames was 8, is 9", |start| start.limits.video_frames += 1),
            ("envelope.launch_patches was 1024, is 2048", |start| start.limits.launch_patches *= 2),
            ("target was Cpu { threads: 2 }, is Cpu { threads: 3 }", |start| start.threads = 3),
            ("device was host, is other", |start| start.device = "other"),
            ("driver was 580.1, is 580.2", |start| start.driver = "580.2"),
            ("driver was 580.1, is unknown", |start| start.driver = ""),
            ("library was none, is cuBLASLt 130002", |start| start.library = Some("cuBLASLt 130002")),
            ("total was 536,870,912 B, is 536,870,913 B", |start| start.total.0 += 1),
            ("page was 2,097,152 B, is 65,536 B", |start| start.page = Bytes::kib(64)),
            ("canary was 33,554,432 B, is 0 B", |start| start.canary = Bytes::ZERO),
            ("memory_fraction was not set, is 0.5", |start| start.kv.memory_fraction = Some(0.5)),
            ("device_fraction was not set, is 0.5", |start| start.kv.device_fraction = Some(0.5)),
            ("kv_tokens was not set, is 1024", |start| start.kv.kv_tokens = Some(1024)),
            ("kv_bytes was not set, is 1,024 B", |start| start.kv.kv_bytes = Some(Bytes(1024))),
            ("cache was plain, is fp8", |start| {
                let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
                start.checkpoint = checkpoint.with_cache(CacheFormat::Fp8);
            }),
            ("states was f32, is bf16", |start| {
                let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
                start.checkpoint = checkpoint.with_state_dtype(StateDtype::Bf16);
            }),
            ("processor.max_pixels was 200704, is 100352", |Start { checkpoint, .. }| {
                let pictures = checkpoint.image_processor.as_ref().expect("the checkpoint takes pictures");
                checkpoint.image_processor = Some(changed(pictures, |config| config.pixel_bounds.max = 100_352));
            }),
            ("processor.do_resize was true, is false", |Start { checkpoint, .. }| {
                let pictures = checkpoint.image_processor.as_ref().expect("the checkpoint takes pictures");
                checkpoint.image_processor = Some(changed(pictures, |config| config.do_resize = false));
            }),
            ("video_processor.min_pixels was 50176, is 50177", |Start { checkpoint, .. }| {
                let mut config =
                    checkpoint.video_processor.as_ref().expect("the checkpoint takes pictures").config().clone();
                config.pixel_bounds.min += 1;
                checkpoint.video_processor = Some(VideoProcessor::new(config).expect("the settings are valid"));
            }),
        ];
        let was = profile_key(|_| {});
        for (expected, change) in changes {
            let differences = ProfileKey::differences(&was, &profile_key(*change));
            let reasons: Vec<_> = differences.iter().map(Difference::to_string).collect();
            assert_eq!(reasons, [*expected]);
        }
        assert_eq!(ProfileKey::differences(&was, &was), []);
    }

    #[test]
    fn every_fact_is_compared_even_if_one_side_lacks_it() {
        let was = profile_key(|_| {});
        assert!(was.facts().count() >= 40, "the key has facts about weights, two processors, limits, device and knobs");
        for (name, fact) in was.facts() {
            let mut changed = was.clone();
            changed.add(name, format!("{fact}!"));
            let [difference] = ProfileKey::differences(&was, &changed).try_into().expect("exactly one fact changed");
            assert_eq!((&*difference.what, difference.was.as_deref()), (name, Some(fact)));
            changed.remove(name);
            let [lost] = ProfileKey::differences(&was, &changed).try_into().expect("exactly one fact is missing");
            assert_eq!(lost.to_string(), format!("{name} was {fact}, is unknown"));
            let [new] = ProfileKey::differences(&changed, &was).try_into().expect("exactly one fact is new");
            assert_eq!(new.to_string(), format!("{name} was unknown, is {fact}"));
        }
    }

    #[test]
    fn profile_keys_name_processor_settings_except_for_text_models() {
        let was = profile_key(|_| {});
        let blind = profile_key(|Start { checkpoint, .. }| {
            (checkpoint.image_processor, checkpoint.video_processor) = (None, None)
        });
        let names: Vec<_> =
            ProfileKey::differences(&was, &blind).into_iter().map(|difference| difference.what).collect();
        let settings = ImageProcessorConfig::default().settings().into_iter().map(|(name, _)| name);
        let both = ["processor", "video_processor"].map(|of| settings.clone().map(move |name| format!("{of}.{name}")));
        let mut expected: Vec<_> = both.into_iter().flatten().collect();
        expected.sort();
        assert_eq!(names, expected);
    }

    #[test]
    fn a_profile_key_has_sixteen_digits_of_each_checkpoint_fingerprint() {
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
        let known = profile_key(|_| {});
        let fact = |name| known.facts().find(|(fact, _)| *fact == name).map(|(_, digits)| digits);
        assert_eq!(fact("weights"), Some(&checkpoint.weights_fingerprint().to_string()[..16]));
        assert_eq!(fact("config"), Some(&checkpoint.config_fingerprint().to_string()[..16]));
    }
}
