//! Options that a user can choose for one model.

use std::{num::NonZeroUsize, path::PathBuf, time::Duration};

use bursar_budgets::{Bytes, system_memory_left};
use bursar_kernels::{BlasSearch, Target};
use bursar_model::{
    Envelope,
    checkpoint::{Checkpoint, CheckpointOrigin, DraftProjection, WeightQuantization},
    flow::ImageLimits,
};

use super::{DraftQuantization, KvCacheType, KvCacheTypeError, Names, Precision, StateType};
use crate::{
    deadline::Deadlines,
    profile::{FaultPlan, KvChoice},
    scheduler::DraftSource,
    supervise::Intensity,
    tenant::TenantWeights,
    token_interval::TOKEN_INTERVAL,
};

/// Options to load a model with. The defaults fit a small model on a host device, or typical
/// use on a GPU.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The model's name in tables and metrics, and for unloading. Default: the name of its source.
    /// If the name is taken, a number is appended.
    pub name: Option<String>,
    /// The largest inputs that may reach the device, lowered to the model's own limits. Default:
    /// [`Envelope::default`] on a host device, which computes on the CPU. On a GPU the default is
    /// [`Envelope::gpu`], and encoder batches can hold the largest picture.
    pub envelope: Option<Envelope>,
    /// Individual limits that override the envelope.
    pub limits: Limits,
    /// The names by which limits were set, for errors and suggestions
    /// ([`Knobs::named_from`](crate::knobs::Knobs::named_from)).
    pub names: Names,
    /// A folder with a tokenizer and its chat templates, instead of the checkpoint's.
    pub tokenizer: Option<PathBuf>,
    /// A Jinja template, instead of the tokenizer's.
    pub chat_template: Option<String>,
    /// How `generation_config.json` determines the sampling of requests that set no parameters.
    pub sampling_defaults: SamplingDefaults,
    /// Limits on a picture before it is decoded.
    pub image_limits: ImageLimits,
    /// The fraction of the remaining memory that the KV cache takes, above 0 and up to 1. Default:
    /// 0.9 on a host device, and on a GPU everything except a small reserve
    /// ([`KvShare::expected_of`](crate::profile::KvShare::expected_of)). Set a fraction to lease
    /// GPU memory for other purposes, or to load a second model.
    pub memory_fraction: Option<f64>,
    /// The size of the KV cache in tokens (whole blocks of 16), instead of a fraction. The minimum
    /// is the size that the profile needs to run the largest inputs: enough for the largest request
    /// and the largest step, and at least 8,192 tokens if all sequences together can have that
    /// many.
    pub kv_tokens: Option<usize>,
    /// The fraction of the whole device that Bursar may use, including weights, workspaces and
    /// overhead; above 0 and up to 1, instead of `memory_fraction`. Memory of other processes does
    /// not count toward this fraction, so a busy device may have less memory available.
    pub device_fraction: Option<f64>,
    /// The size of the KV cache in bytes, instead of `kv_tokens`. The size is rounded down to whole
    /// pages for each layer.
    pub kv_bytes: Option<Bytes>,
    /// Host memory per device for evicted KV blocks, state snapshots and picture embeddings, which
    /// are copied back when they are needed again. Default: none.
    pub swap_space: Bytes,
    /// The type of weights and activations. A type that the device does not compute in is refused.
    pub dtype: Precision,
    /// Quantizes the decoder's projections while they load. Default: weights stay
    /// as in the checkpoint.
    pub quantization: Option<WeightQuantization>,
    /// The element type of the KV cache. Default: the type of activations.
    pub kv_cache_dtype: KvCacheType,
    /// The element type in which recurrent states are stored. Default: f32.
    pub state_dtype: StateType,
    /// How tokens are drafted, if [`draft_tokens`](Limits::draft_tokens) is set. Default: prompt
    /// lookup.
    pub draft_source: DraftSource,
    /// A separate checkpoint that [`DraftSource::DraftHead`] uses: an EAGLE-3 head or a Gemma 4 assistant.
    /// Default: `None`, for the draft head in the model's checkpoint.
    pub draft_model: Option<CheckpointOrigin>,
    /// Format of the output projection that a draft head in the model's checkpoint uses. Default: 4-bit integers on a GPU,
    /// and the model's own output projection on a host device.
    pub draft_quantization: Option<DraftQuantization>,
    /// Always drafts as many tokens as [`draft_tokens`](Limits::draft_tokens) allows, even if fewer
    /// would be faster. Default: `false`.
    pub has_fixed_drafts: bool,
    /// Accepts each draft with this probability, whatever the model chooses. With random weights,
    /// this shows the speed that a trained draft head would give. Replies are then wrong. Default:
    /// `None`.
    pub synthetic_acceptance: Option<f64>,
    /// The target time from one token of a reply to the next (p99). While replies run, prompts and
    /// pictures take only as much of a step as meets the target. `None`: no limit other than the
    /// largest step. Default: 33 ms.
    pub token_interval: Option<Duration>,
    /// The deadlines of requests that set no deadlines. Default: no deadlines.
    pub deadlines: Deadlines,
    /// The relative shares of tenants that wait at the same time. Default: equal shares.
    pub tenant_weights: TenantWeights,
    /// Maximum number of requests that run or wait. Further requests are refused
    /// with `Overloaded`. Default: [`requests_for`](LoadOptions::requests_for).
    pub requests: Option<usize>,
    /// Puts the model to sleep when it has had no request for this long: at level 1 if enough host
    /// memory is left for its weights, otherwise at level 2. The next request wakes it. Default:
    /// `None`, so that the model sleeps only after an explicit call.
    pub sleep_after: Option<Duration>,
    /// How long a request waits for a sleeping model to wake up before it
    /// fails. Default: two minutes.
    pub wake_within: Duration,
    /// Number of threads that compute on a host device, and of further threads that decode
    /// pictures. Default: one per CPU.
    pub threads: usize,
    /// A folder for profile records, one file per model and device. A later start with the same
    /// inputs runs its worst cases only at the recorded size. The first start on a GPU runs them
    /// twice. Default: `None`, so that every start measures again and nothing is written. The
    /// folder is created if needed, and several processes may share it.
    pub profiles: Option<PathBuf>,
    /// Measures again even if a recorded profile applies, and replaces that record.
    pub measures_anew: bool,
    /// Runs worst cases through all layers, both before sizing and at the final size. Without this
    /// option, a GPU runs some layers before sizing and all layers at the final size, and a host
    /// device runs the worst cases only at the final size, through as many layers as prove the
    /// planned peaks to the byte, which saves minutes.
    pub full_stress: bool,
    /// Where to find cuBLASLt for a GPU, and NCCL if several GPUs use it.
    pub blas: BlasSearch,
    /// Makes GPUs that share a model use NCCL for collectives. By default they use Bursar's own
    /// kernels, and NCCL only if they cannot map each other's memory or are not Hopper GPUs.
    pub disable_custom_all_reduce: bool,
    /// The number of devices over which the model is sharded.
    /// [`PlacementRequest`](crate::runtime::PlacementRequest) gives the model this many devices, or
    /// more if the model joins a larger group. A runtime with fewer devices refuses the model.
    /// Default: any number.
    pub ranks: Option<NonZeroUsize>,
    /// The number of restarts of vision and scheduler that are tolerated, and the time within which
    /// they count. More restarts count as a crash loop.
    pub intensity: Intensity,
    /// The number of engine restarts that are tolerated, and the time within which they count. Each
    /// engine restart runs the stress tests again.
    pub engine_intensity: Intensity,
    /// Memory requests to refuse on purpose, for tests of failure handling. Default: none.
    /// A host device can refuse memory in every phase, a GPU only in phases that ask a
    /// lane (capture, validate, serve).
    pub faults: FaultPlan,
}

/// Limits that a user sets. A limit that is `None` keeps the envelope's value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// See [`Envelope::context_tokens`](bursar_model::Envelope::context_tokens).
    pub context_tokens: Option<usize>,
    /// See [`Envelope::sequences`](bursar_model::Envelope::sequences). If `step_tokens` is `None`,
    /// a step has at least one token for each sequence.
    pub sequences: Option<usize>,
    /// See [`Envelope::step_tokens`](bursar_model::Envelope::step_tokens).
    pub step_tokens: Option<usize>,
    /// See [`Envelope::draft_tokens`](bursar_model::Envelope::draft_tokens).
    pub draft_tokens: Option<usize>,
    /// Maximum pixels of a picture after resizing, instead of its processor's limit.
    pub picture_pixels: Option<u64>,
    /// Minimum pixels of a picture after resizing, instead of its processor's limit.
    pub picture_pixels_min: Option<u64>,
    /// See [`Envelope::picture_patches`](bursar_model::Envelope::picture_patches). Used only
    /// if `picture_pixels` is `None`.
    pub picture_patches: Option<usize>,
    /// See [`Envelope::pictures`](bursar_model::Envelope::pictures).
    pub pictures: Option<usize>,
    /// See [`Envelope::video_frames`](bursar_model::Envelope::video_frames).
    pub video_frames: Option<usize>,
    /// See [`Envelope::launch_patches`](bursar_model::Envelope::launch_patches), which also limits
    /// the size of a picture. By default, an encoder batch can hold the largest picture.
    pub launch_patches: Option<usize>,
}

/// How a checkpoint's `generation_config.json` sets defaults for sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SamplingDefaults {
    /// As transformers reads it: greedy unless the file sets `do_sample`, and `top_k` is 50 unless
    /// the file sets it.
    #[default]
    Transformers,
    /// As vLLM reads it: the file's values apply, the temperature is 1 unless the file sets it,
    /// and `do_sample` is ignored.
    Vllm,
    /// The file is not read: the temperature is 1, and nothing else applies.
    Ignored,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            name: None,
            envelope: None,
            limits: Limits::default(),
            names: Names::default(),
            tokenizer: None,
            chat_template: None,
            sampling_defaults: SamplingDefaults::default(),
            image_limits: ImageLimits::default(),
            memory_fraction: None,
            kv_tokens: None,
            device_fraction: None,
            kv_bytes: None,
            swap_space: Bytes::ZERO,
            dtype: Precision::Auto,
            quantization: None,
            kv_cache_dtype: KvCacheType::Auto,
            state_dtype: StateType::Float32,
            draft_source: DraftSource::default(),
            draft_model: None,
            draft_quantization: None,
            has_fixed_drafts: false,
            synthetic_acceptance: None,
            token_interval: Some(Duration::from_millis(TOKEN_INTERVAL as u64)),
            deadlines: Deadlines::default(),
            tenant_weights: TenantWeights::default(),
            requests: None,
            sleep_after: None,
            wake_within: Duration::from_secs(120),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            profiles: None,
            measures_anew: false,
            full_stress: false,
            blas: BlasSearch::usual(),
            disable_custom_all_reduce: false,
            ranks: None,
            intensity: Intensity::SERVING,
            engine_intensity: Intensity::ENGINE,
            faults: FaultPlan::none(),
        }
    }
}

impl LoadOptions {
    /// Options with limits that are stress-tested quickly, for tests, examples and small programs:
    /// contexts of 512 tokens, 4 sequences at once, two pictures of 448 x 448 pixels per request,
    /// 16 requests that run or wait.
    pub fn small() -> Self {
        LoadOptions { envelope: Some(Envelope::small()), requests: Some(16), ..LoadOptions::default() }
    }

    /// Returns `checkpoint` with the storage types of keys, values and states, the context limit
    /// and the draft head that these options select for `target`. Every plan of the model needs
    /// these settings.
    ///
    /// # Errors
    /// [`KvCacheTypeError::Other`] if `kv_cache_dtype` is neither FP8 nor the type of activations.
    pub fn apply_on(&self, target: &Target, checkpoint: Checkpoint) -> Result<Checkpoint, KvCacheTypeError> {
        let context_tokens = self.context_tokens_for(matches!(target, Target::Cpu { .. }));
        let checkpoint = checkpoint.with_cache(self.kv_cache_dtype.on(target)?).with_context_limit(context_tokens);
        let draft_projection = match (self.draft_quantization, target) {
            (Some(DraftQuantization::None), _) | (None, Target::Cpu { .. }) => DraftProjection::Decoder,
            (None, Target::Cuda(_)) => DraftProjection::Int4IfSupported,
            (Some(DraftQuantization::Int4), _) => DraftProjection::Int4,
        };
        let checkpoint = checkpoint.with_draft_head(self.has_draft_head()).with_draft_projection(draft_projection);
        Ok(checkpoint.with_state_dtype(self.state_dtype.dtype()))
    }

    /// Returns the draft model to load, if drafts are enabled.
    pub fn draft_model(&self) -> Option<CheckpointOrigin> {
        self.draft_model.clone().filter(|_| self.has_draft_head()).map(CheckpointOrigin::as_draft_model)
    }

    fn has_draft_head(&self) -> bool {
        let draft_tokens = self.limits.draft_tokens.or(self.envelope.as_ref().map(|envelope| envelope.draft_tokens));
        self.draft_source == DraftSource::DraftHead && draft_tokens.is_some_and(|count| count > 0)
    }

    /// Returns the options that determine the size of the KV cache.
    pub fn kv(&self) -> KvChoice {
        let LoadOptions { memory_fraction, device_fraction, kv_tokens, kv_bytes, .. } = *self;
        KvChoice { memory_fraction, device_fraction, kv_tokens, kv_bytes }
    }

    /// Returns the same options, except that the KV cache takes all memory left on the device
    /// instead of a fraction. Used when the size of the cache is already decided.
    pub(crate) fn with_all_memory(self) -> Self {
        LoadOptions { memory_fraction: Some(1.0), device_fraction: None, ..self }
    }

    /// Returns the maximum number of tokens of a sequence, on a host device if `is_host`, otherwise
    /// on a GPU. The model may have a lower limit.
    pub fn context_tokens_for(&self, is_host: bool) -> usize {
        let usual = || self.envelope.clone().unwrap_or_else(|| Self::envelope_for(is_host)).context_tokens;
        self.limits.context_tokens.unwrap_or_else(usual)
    }

    /// Returns the maximum number of requests that run or wait, on a host device if `is_host`,
    /// otherwise on a GPU. The number is [`requests`](Self::requests) if the user set it. The
    /// default is the larger of 1,024 and four times the sequences of a step, so that a burst fills
    /// every step. If the prompts of this number of requests could take more than a quarter of the
    /// host memory that is left, the number is lower, but at least the number of sequences.
    pub fn requests_for(&self, is_host: bool) -> usize {
        /// Bytes of host memory per token of a waiting prompt: its id, positions,
        /// block keys and text.
        const TOKEN_BYTES: u64 = 64;
        const USUAL: usize = 1024;
        if let Some(requests) = self.requests {
            return requests;
        }
        let envelope = self.envelope.clone().unwrap_or_else(|| Self::envelope_for(is_host));
        let sequences = self.limits.sequences.unwrap_or(envelope.sequences);
        let context = self.context_tokens_for(is_host);
        let wanted = sequences.saturating_mul(4).max(USUAL);
        let bytes_each = (context as u64).saturating_mul(TOKEN_BYTES).max(1);
        let fit = system_memory_left().map_or(usize::MAX, |left| (left.0 / 4 / bytes_each) as usize);
        wanted.min(fit).max(sequences)
    }

    /// Returns the default envelope of a host device if `is_host`, otherwise of a GPU.
    pub fn envelope_for(is_host: bool) -> Envelope {
        if is_host { Envelope::default() } else { Envelope::gpu() }
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::{CudaTarget, DType};
    use bursar_model::demo;

    use super::*;

    #[test]
    fn applied_options_use_the_default_context_limit_of_the_target() {
        let gpu = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
        let limit = |options: &LoadOptions, target: &Target| {
            let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the demo checkpoint is embedded");
            options.apply_on(target, checkpoint).expect("the types fit the target").context_limit()
        };
        let usual = LoadOptions::default();
        assert_eq!(limit(&usual, &Target::Cpu { threads: 1 }), Envelope::default().context_tokens);
        assert_eq!(limit(&usual, &gpu), Envelope::gpu().context_tokens);
        assert_eq!(limit(&LoadOptions::small(), &gpu), Envelope::small().context_tokens);
    }
}
