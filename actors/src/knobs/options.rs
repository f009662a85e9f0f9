//! What a user can choose for one model.

use std::{num::NonZeroUsize, path::PathBuf, time::Duration};

use bursar_budgets::{Bytes, system_memory_left};
use bursar_kernels::BlasSearch;
use bursar_model::{Envelope, checkpoint::WeightQuantization, flow::ImageLimits};

use super::{KvCacheType, Limits, Names, Precision};
use crate::{
    deadline::Deadlines,
    pace::TOKEN_INTERVAL,
    profile::{FaultPlan, KvChoice},
    supervise::Intensity,
    tenant::TenantWeights,
};

/// How a model is loaded. The defaults fit a small model on a host device, or typical use on a GPU.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The model's name in tables, in metrics and for unloading. Default: the name of its source. If the name is taken,
    /// a number is appended.
    pub name: Option<String>,
    /// The largest inputs that may reach the device, lowered to the model's own limits. Default: [`Envelope::default`]
    /// on a host device, which computes on the CPU. On a GPU it is [`Envelope::gpu`], and launches follow the largest
    /// picture.
    pub envelope: Option<Envelope>,
    /// Single limits that override the envelope.
    pub limits: Limits,
    /// The names by which limits were set, for errors and suggestions
    /// ([`Knobs::named_from`](crate::knobs::Knobs::named_from)).
    pub names: Names,
    /// A folder with a tokenizer and its chat templates, instead of the checkpoint's.
    pub tokenizer: Option<PathBuf>,
    /// A Jinja template, instead of the tokenizer's.
    pub chat_template: Option<String>,
    /// How `generation_config.json` sets the sampling of requests that set none.
    pub sampling_defaults: SamplingDefaults,
    /// Limits on a picture before it is decoded.
    pub image_limits: ImageLimits,
    /// The share of the remaining memory that keys and values take, above 0 and up to 1. Default: 0.9 on a host device,
    /// and on a GPU all but a small reserve ([`Share::expected_of`](crate::profile::Share::expected_of)). To lease GPU
    /// memory beside a model, or to load a second model, set a fraction.
    pub memory_fraction: Option<f64>,
    /// The size of the cache in tokens (whole blocks of 16), instead of the share. The minimum is what the profile
    /// needs to run the largest inputs: as many tokens as all sequences can have, up to 8,192 and one block each.
    pub kv_tokens: Option<usize>,
    /// The share of the whole device for everything of ours, including weights, workspaces and overhead; above 0 and up
    /// to 1, instead of `memory_fraction`. Other processes are not counted, so a busy device may give less.
    pub device_fraction: Option<f64>,
    /// The size of the cache in bytes, instead of `kv_tokens`. Rounded down to whole pages for each layer.
    pub kv_bytes: Option<Bytes>,
    /// Host memory of each device that keys and values go to when they have to leave it, and come back from. Default:
    /// none.
    pub swap_space: Bytes,
    /// The type of weights and activations. A type that the device does not compute in is refused.
    pub dtype: Precision,
    /// Rounds the decoder's projections to FP8 while they load. Default: weights are as the checkpoint has them.
    pub quantization: Option<WeightQuantization>,
    /// The type of cached keys and values. Default: that of activations.
    pub kv_cache_dtype: KvCacheType,
    /// The promised time from one token of a reply to the next (p99): prompts and pictures take only as much of a step
    /// beside running replies as keeps it. None: whatever the largest step takes. Default: 33 ms.
    pub token_interval: Option<Duration>,
    /// The deadlines of requests that set none. Default: none.
    pub deadlines: Deadlines,
    /// The shares of tenants that wait at the same time. Default: equal ones.
    pub tenant_weights: TenantWeights,
    /// How many requests may run or wait. One more is refused with `Overloaded`. Default:
    /// [`requests_for`](LoadOptions::requests_for).
    pub requests: Option<usize>,
    /// Puts the model to sleep when it has had no request for this long: at level 1 if host memory is left for its
    /// weights, otherwise at level 2. The next request wakes it. Default: none, so that it sleeps only when asked to.
    pub sleep_after: Option<Duration>,
    /// How long a request waits for a model that sleeps to be awake, before it fails. Default: two minutes.
    pub wake_within: Duration,
    /// Threads that compute on a host device, and as many again that decode pictures. Default: one per CPU.
    pub threads: usize,
    /// A folder for profiles, one file per model and device. A later start on the same basis runs its worst cases once,
    /// at the recorded size, instead of twice. Default: none, so that every start measures anew and nothing is written.
    /// The folder is created if needed, and several processes may share it.
    pub profiles: Option<PathBuf>,
    /// Measures anew even if a recorded profile applies, and replaces that profile.
    pub measures_anew: bool,
    /// Runs worst cases through all layers, both before sizing and at the final size. By default a GPU runs some layers
    /// before sizing and all of them at the final size. A host device runs, at the final size only, as many layers as
    /// prove the planned peaks to the byte, which saves minutes.
    pub full_stress: bool,
    /// Where to find cuBLASLt for a GPU, and NCCL for several where it is wanted.
    pub blas: BlasSearch,
    /// Several GPUs that share the model out exchange through NCCL. By default they do so only where they cannot map each
    /// other's memory or are not Hopper's; otherwise kernels of ours exchange.
    pub disable_custom_all_reduce: bool,
    /// How many devices are to share the model out. [`Placing`](crate::runtime::Placing) gives it so many, or more where it
    /// joins a larger group; a runtime on fewer refuses it. Default: any number.
    pub ranks: Option<NonZeroUsize>,
    /// How many restarts of vision and scheduler are tolerated, and within what time. More are a crash loop.
    pub intensity: Intensity,
    /// How many restarts of the engine are tolerated, and within what time. Each of them stresses again.
    pub engine_intensity: Intensity,
    /// Memory to refuse on purpose, to see what happens. Default: none. A host device can refuse in every phase, a GPU
    /// where a lane is asked (capture, validate, serve).
    pub faults: FaultPlan,
}

/// What a checkpoint's `generation_config.json` says of sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SamplingDefaults {
    /// As transformers reads it: greedy unless the file sets `do_sample`, and `top_k` is 50 unless the file sets it.
    #[default]
    Transformers,
    /// As vLLM reads it: the file's values apply, the temperature is 1 unless the file sets it, `do_sample` is ignored.
    Vllm,
    /// It is not read: the temperature is 1, and nothing else applies.
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
    /// Limits that are stressed in a moment, for tests, examples and small programs: contexts of 512 tokens, 4
    /// sequences at once, two pictures of 448 x 448 pixels per request, 16 requests running or waiting.
    pub fn small() -> Self {
        LoadOptions { envelope: Some(Envelope::small()), requests: Some(16), ..LoadOptions::default() }
    }

    /// What the options say about the size of keys and values.
    pub fn kv(&self) -> KvChoice {
        let LoadOptions { memory_fraction, device_fraction, kv_tokens, kv_bytes, .. } = *self;
        KvChoice { memory_fraction, device_fraction, kv_tokens, kv_bytes }
    }

    /// The same with all that is left of the device, for a model that has had its share of it.
    pub(crate) fn with_all_memory(self) -> Self {
        LoadOptions { memory_fraction: Some(1.0), device_fraction: None, ..self }
    }

    /// How many requests may run or wait on a GPU, or where host memory stands in for one: [`requests`](Self::requests),
    /// or by default the larger of 1,024 and four times the sequences of a step, so that a burst fills every step. If
    /// prompts of this number could take more than a quarter of the host memory that is left, it is lower, but not below
    /// the sequences.
    pub fn requests_for(&self, is_host: bool) -> usize {
        /// Bytes of host memory per token of a prompt that waits: its id, positions, block names and text.
        const TOKEN_BYTES: u64 = 64;
        const USUAL: usize = 1024;
        if let Some(requests) = self.requests {
            return requests;
        }
        let envelope = self.envelope.clone().unwrap_or_else(|| Self::envelope_for(is_host));
        let sequences = self.limits.sequences.unwrap_or(envelope.sequences);
        let context = self.limits.context_tokens.unwrap_or(envelope.context_tokens);
        let wanted = sequences.saturating_mul(4).max(USUAL);
        let bytes_each = (context as u64).saturating_mul(TOKEN_BYTES).max(1);
        let fit = system_memory_left().map_or(usize::MAX, |left| (left.0 / 4 / bytes_each) as usize);
        wanted.min(fit).max(sequences)
    }

    /// The default envelope on a GPU, or where host memory stands in for one.
    pub fn envelope_for(is_host: bool) -> Envelope {
        if is_host { Envelope::default() } else { Envelope::gpu() }
    }
}
