//! The table of knobs: names, meanings and units, and their names in vLLM, SGLang and LightLLM.

use bursar_budgets::Bytes;
use bursar_model::{checkpoint::WeightQuantization, nearest_names};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{KnobError, product::product};
use super::{KvCacheType, Precision, StateType};
use crate::tenant::TenantWeights;

/// The kind of value that a knob takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number of the named items, at least 1.
    Count(&'static str),
    /// A whole number of the named items, or 0 for none.
    CountOrNone(&'static str),
    /// A size of at least 1 byte: a number of bytes, or a text such as `2GiB`.
    Size,
    /// A size in the same form as `Size`, or 0 for none.
    SizeOrNone,
    /// A fraction, above 0 and at most 1.
    Fraction,
    /// A number of GiB, as in vLLM.
    Gibibytes,
    /// Text that is not empty.
    Name,
    /// The name of an element type.
    Type,
    /// The name of an element type of the KV cache.
    CacheType,
    /// The name of an element type of recurrent states.
    StateType,
    /// The name of a format to which weights are rounded.
    Format,
    /// The name of the format of a draft head's output projection.
    DraftFormat,
    /// The name of a method that drafts tokens.
    Method,
    /// Names, each with a weight.
    Weights,
    /// Yes or no. On the command line, the flag takes no value.
    Switch,
}

impl Kind {
    /// The unit in one word.
    pub fn unit(self) -> &'static str {
        match self {
            Kind::Count(unit) | Kind::CountOrNone(unit) => unit,
            Kind::Size | Kind::SizeOrNone => "bytes",
            Kind::Fraction => "share",
            Kind::Gibibytes => "GiB",
            Kind::Name => "name",
            Kind::Type | Kind::CacheType | Kind::StateType => "type",
            Kind::Format | Kind::DraftFormat => "format",
            Kind::Method => "method",
            Kind::Weights => "weights",
            Kind::Switch => "switch",
        }
    }

    /// A description of valid values, for error messages.
    pub fn expected(self) -> &'static str {
        match self {
            Kind::Count(_) => "a whole number of at least 1",
            Kind::CountOrNone(_) => "a whole number, 0 for none",
            Kind::Size => "a number of bytes above 0, or a size such as 512MiB",
            Kind::SizeOrNone => "a number of bytes, or a size such as 512MiB",
            Kind::Fraction => "a number above 0 and at most 1",
            Kind::Gibibytes => "a number of GiB",
            Kind::Name => "a text that is not empty",
            Kind::Type => "auto, bfloat16, float16 (or half) or float32",
            Kind::CacheType => "auto, fp8 (or fp8_e4m3), bfloat16, float16 (or half) or float32",
            Kind::StateType => "auto, float32 or bfloat16",
            Kind::Format => {
                "fp8, fp8_per_channel, fp8_per_block, fp8_per_tensor, int4, or the checkpoint's own: awq, gptq, compressed-tensors or modelopt"
            }
            Kind::DraftFormat => "int4 or none",
            Kind::Method => "ngram, mtp, eagle3 or none; other draft models are not supported yet",
            Kind::Weights => "at most 64 tenant names with whole weights from 1 to 1000, such as gold=4,free=1",
            Kind::Switch => "true or false",
        }
    }
}

/// The origin of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// <https://docs.vllm.ai>
    Vllm,
    /// <https://docs.sglang.ai>
    Sglang,
    /// <https://github.com/ModelTC/lightllm>
    LightLlm,
    /// An earlier version of Bursar. Such a name works for one release.
    Former,
}

/// A name that another server or an earlier version uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    pub name: &'static str,
    pub of: Peer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knob {
    /// Bursar's name: a field of [`Knobs`] and, with hyphens, a flag.
    pub name: &'static str,
    /// The effect of the knob, in sentences.
    pub meaning: &'static str,
    pub kind: Kind,
    /// The knob's names in other servers and in earlier versions.
    pub aliases: &'static [Alias],
}

impl Knob {
    pub fn sentence(&self) -> &'static str {
        self.meaning.trim()
    }

    /// Finds a knob by Bursar's name or another server's name.
    pub fn named(name: &str) -> Option<&'static Knob> {
        TABLE.iter().find(|knob| knob.name == name || knob.aliases.iter().any(|alias| alias.name == name))
    }
}

impl KnobError {
    /// Returns the error for a name that is in no table, with the most similar known name.
    pub(super) fn unknown(name: &str) -> Self {
        let known = TABLE.iter().flat_map(|knob| std::iter::once(knob.name).chain(names_of(knob)));
        let known = known.chain(NESTED.iter().map(|nested| nested.name));
        let typed = name.to_lowercase().replace('-', "_");
        if ["tensor_parallel_size", "tp_size", "tp", "device"].contains(&&*typed) {
            return KnobError::OfRuntime { name: name.to_owned() };
        }
        let nearest = nearest_names(&typed, known, 1);
        KnobError::Unknown { name: name.to_owned(), nearest: nearest[0] } // the table is not empty
    }
}

fn names_of(knob: &'static Knob) -> impl Iterator<Item = &'static str> {
    knob.aliases.iter().map(|alias| alias.name)
}

/// Reads a knob's value from JSON; `None` if the value has the wrong type.
trait Set: Sized {
    fn of(value: &Value) -> Option<Self>;
}

impl Set for usize {
    fn of(value: &Value) -> Option<Self> {
        u64::of(value).and_then(|number| number.try_into().ok())
    }
}

impl Set for u64 {
    fn of(value: &Value) -> Option<Self> {
        match value {
            Value::String(typed) => product(typed),
            // Accept whole numbers in floating-point notation too, such as 1e3 and 8192.0.
            value => value.as_u64().or_else(|| whole(value.as_f64()?)),
        }
    }
}

fn whole(number: f64) -> Option<u64> {
    (number.fract() == 0.0 && (0.0..=2f64.powi(53)).contains(&number)).then_some(number as u64)
}

impl Set for f64 {
    fn of(value: &Value) -> Option<Self> {
        let number = match value {
            Value::String(typed) => typed.trim().parse().ok(),
            value => value.as_f64(),
        };
        number.filter(|number: &f64| number.is_finite() && *number >= 0.0)
    }
}

impl Set for Bytes {
    fn of(value: &Value) -> Option<Self> {
        match value {
            Value::String(typed) => typed.parse().ok(),
            value => value.as_u64().or_else(|| whole(value.as_f64()?)).map(Bytes),
        }
    }
}

impl Set for String {
    fn of(value: &Value) -> Option<Self> {
        value.as_str().map(|text| text.trim().to_owned())
    }
}

impl Set for Precision {
    fn of(value: &Value) -> Option<Self> {
        value.as_str()?.trim().parse().ok()
    }
}

impl Set for KvCacheType {
    fn of(value: &Value) -> Option<Self> {
        value.as_str()?.trim().parse().ok()
    }
}

impl Set for StateType {
    fn of(value: &Value) -> Option<Self> {
        value.as_str()?.trim().parse().ok()
    }
}

impl Set for WeightQuantization {
    fn of(value: &Value) -> Option<Self> {
        value.as_str()?.parse().ok()
    }
}

impl Set for DraftMethod {
    fn of(value: &Value) -> Option<Self> {
        match value.as_str()?.trim().to_lowercase().as_str() {
            "ngram" => Some(DraftMethod::Ngram),
            // Includes names of earlier releases of vLLM, and the name that SGLang uses.
            "mtp" | "qwen3_5_mtp" | "qwen3_next_mtp" | "nextn" => Some(DraftMethod::Mtp),
            "eagle3" => Some(DraftMethod::Eagle3),
            "none" => Some(DraftMethod::None),
            _ => None,
        }
    }
}

impl Set for DraftQuantization {
    fn of(value: &Value) -> Option<Self> {
        match value.as_str()?.trim().to_lowercase().as_str() {
            "int4" => Some(DraftQuantization::Int4),
            // "unquant" is SGLang's value.
            "none" | "unquant" => Some(DraftQuantization::None),
            _ => None,
        }
    }
}

impl Set for TenantWeights {
    fn of(value: &Value) -> Option<Self> {
        TenantWeights::read(value)
    }
}

impl Set for bool {
    fn of(value: &Value) -> Option<Self> {
        match value {
            Value::String(typed) => typed.trim().parse().ok(),
            value => value.as_bool(),
        }
    }
}

macro_rules! knobs {
    ($($(#[doc = $meaning:literal])+ $name:ident: $type:ty, $kind:expr, [$($peer:ident $alias:ident),*];)*) => {
        /// Knobs that a user has set. Knobs that are not set take their defaults, some of which
        /// depend on the device.
        ///
        /// The JSON form is an object. Reading accepts Bursar's names and the names of other
        /// servers (see [`TABLE`]), and writing uses Bursar's names. Two names of one knob may both
        /// be given if their values are equal.
        ///
        /// ```
        /// use bursar_actors::knobs::Knobs;
        /// let knobs: Knobs = serde_json::from_str(r#"{ "max_model_len": 4096, "kv_cache_memory_bytes": "2GiB" }"#)?;
        /// assert_eq!((knobs.context_tokens, knobs.kv_bytes.map(|bytes| bytes.0)), (Some(4096), Some(2 << 30)));
        /// let error = serde_json::from_str::<Knobs>(r#"{ "max_num_seq": 4 }"#).unwrap_err();
        /// assert!(error.to_string().contains("max_num_seqs"), "{error}");
        /// # Ok::<(), serde_json::Error>(())
        /// ```
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(try_from = "Map<String, Value>")]
        pub struct Knobs {
            $($(#[doc = $meaning])+ #[serde(skip_serializing_if = "Option::is_none")] pub $name: Option<$type>,)*
        }

        pub const TABLE: &[Knob] = &[$(Knob {
            name: stringify!($name),
            meaning: concat!($($meaning),+),
            kind: $kind,
            aliases: &[$(Alias { name: stringify!($alias), of: Peer::$peer }),*],
        },)*];

        impl Knobs {
            /// Sets a knob by Bursar's name or another server's name. Returns whether the knob had
            /// a different value before.
            ///
            /// # Errors
            /// [`KnobError::Unknown`] and [`KnobError::Value`].
            pub(super) fn put(&mut self, name: &str, value: &Value) -> Result<bool, KnobError> {
                let knob = Knob::named(name).ok_or_else(|| KnobError::unknown(name))?;
                let wrong = || KnobError::value(name, value, knob.kind.expected());
                match knob.name {
                    $(stringify!($name) => {
                        let set = <$type as Set>::of(value).ok_or_else(wrong)?;
                        let is_in_range = match knob.kind {
                            Kind::Fraction => is_share(value),
                            Kind::Count(_) | Kind::Size | Kind::Name => set != <$type>::default(),
                            Kind::CountOrNone(_) | Kind::SizeOrNone | Kind::Gibibytes => true,
                            Kind::Type | Kind::CacheType | Kind::StateType | Kind::Format => true,
                            Kind::DraftFormat | Kind::Method | Kind::Weights | Kind::Switch => true,
                        };
                        if !is_in_range {
                            return Err(wrong());
                        }
                        let differs = self.$name.as_ref().is_some_and(|before| *before != set);
                        self.$name = Some(set);
                        Ok(differs)
                    })*
                    _ => unreachable!("every knob of the table is a field"),
                }
            }
        }
    };
}

fn is_share(value: &Value) -> bool {
    f64::of(value).is_some_and(|share| share > 0.0 && share <= 1.0)
}

knobs! {
    /// Maximum tokens of a sequence, prompt and reply together. The model's own limit applies if it is lower.
    context_tokens: usize, Kind::Count("tokens"), [Vllm max_model_len, Sglang context_length, LightLlm max_req_total_len];
    /// Maximum sequences in one step.
    sequences: usize, Kind::Count("sequences"), [Vllm max_num_seqs, Sglang max_running_requests, LightLlm running_max_req_size];
    /// Maximum tokens in one step, over all sequences, decoding ones included. A longer prompt takes several steps. Gemma 3 with pictures and Gemma 4 12B, 26B-A4B and 31B need at least the number of sequences plus the tokens of the largest picture; the default is raised accordingly.
    step_tokens: usize, Kind::Count("tokens"), [Vllm max_num_batched_tokens, Sglang chunked_prefill_size, LightLlm batch_max_tokens];
    /// Maximum number of draft tokens per sequence and step. A step verifies them together with the next token, and drafts do not change replies, except for rounding. All sequences share 64 draft tokens per step, so there are no drafts if more than 64 sequences decode. Bursar drafts fewer tokens if that is faster. 0 disables drafts. The default depends on draft_method: 4 for ngram, 3 with a draft_model, 1 for mtp without one, otherwise 0.
    draft_tokens: usize, Kind::CountOrNone("tokens"), [Vllm spec_tokens, Sglang speculative_num_draft_tokens, LightLlm mtp_step];
    /// How tokens are drafted: ngram (prompt lookup) finds an earlier occurrence of the sequence's last tokens and drafts the tokens that followed it. It helps replies that quote their prompt. mtp (multi-token prediction) uses the draft head of Qwen3.5 and later, or the Gemma 4 assistant that draft_model names. eagle3 uses the EAGLE-3 head that draft_model names. If draft_model is set, mtp and eagle3 mean the same, because the draft model's config.json names its kind. none disables drafts.
    draft_method: DraftMethod, Kind::Method, [Vllm spec_method, Sglang speculative_algorithm, LightLlm mtp_mode];
    /// EAGLE-3 head or Gemma 4 assistant (gemma-4-E4B-it-assistant, for example): a folder, or a model on the Hugging Face hub (org/name or org/name@revision). It must have been trained for the model that is served. If draft_method is not set, setting draft_model enables drafting.
    draft_model: String, Kind::Name, [Vllm spec_model, Sglang speculative_draft_model_path, LightLlm mtp_draft_model_dir];
    /// Format of the output projection that the draft head in the model's own checkpoint uses. int4 is a second copy, rounded to 4-bit integers: drafting is faster, a few more drafts are rejected, and the copy takes memory. none is the model's own output projection. Replies change only by rounding. Default int4 on a GPU that supports the shape, otherwise none.
    draft_quantization: DraftQuantization, Kind::DraftFormat, [Sglang speculative_draft_model_quantization];
    /// Always drafts as many tokens as the limits allow, for benchmarks. By default the number adapts: for each batch size, Bursar uses the number of drafts that has recently given the most tokens per second. Default false.
    draft_fixed: bool, Kind::Switch, [];
    /// Maximum number of the last tokens that are looked up. Default: draft_ngram_min, or 5.
    draft_ngram_max: usize, Kind::Count("tokens"), [Sglang speculative_ngram_max_match_window_size];
    /// Minimum number of the last tokens that are looked up. Default: draft_ngram_max, or 5.
    draft_ngram_min: usize, Kind::Count("tokens"), [Sglang speculative_ngram_min_match_window_size];
    /// Maximum pixels of a picture after resizing, instead of the model processor's limit. Larger pictures are scaled down.
    picture_pixels: u64, Kind::Count("pixels"), [Vllm max_pixels];
    /// Minimum pixels of a picture after resizing. Smaller pictures are scaled up.
    picture_pixels_min: u64, Kind::Count("pixels"), [Vllm min_pixels];
    /// The same limit as picture_pixels, in patches of the model: 14 x 14 pixels in Qwen2.5-VL.
    picture_patches: usize, Kind::Count("patches"), [];
    /// Maximum pictures in a request, over all turns. Together they may have as many tokens as this number of pictures of the largest size. Default: as many pictures as the context holds, up to 1024, with at most as many tokens together as eight pictures of the largest size.
    pictures: usize, Kind::Count("pictures"), [];
    /// Maximum video frames in a request, over all videos and turns; 0 for no videos.
    video_frames: usize, Kind::CountOrNone("frames"), [];
    /// Maximum patches in one batch of the vision encoder, over all pictures. By default, enough for the largest picture, and at least 4096 (1024 on a host device).
    launch_patches: usize, Kind::Count("patches"), [];
    /// Share that the KV cache takes of the memory left after everything else.
    memory_fraction: f64, Kind::Fraction, [];
    /// Share of the whole device that Bursar may use: weights, workspaces, KV cache and overhead.
    device_fraction: f64, Kind::Fraction, [Vllm gpu_memory_utilization, Sglang mem_fraction_static, LightLlm mem_fraction];
    /// Size of the KV cache, in whole pages per layer, instead of a measured size.
    kv_bytes: Bytes, Kind::Size, [Vllm kv_cache_memory_bytes];
    /// Size of the KV cache in tokens, in whole blocks of 16, instead of a measured size.
    kv_tokens: usize, Kind::Count("tokens"), [Sglang max_total_tokens, LightLlm max_total_token_num];
    /// Host memory per device that evicted KV blocks are copied to, and copied back from instead of being computed again. For a model that takes pictures, an eighth of it holds picture embeddings. For a model with recurrent states (Qwen3.5), a quarter of the rest holds snapshots of them. Default 0, off.
    swap_space: f64, Kind::Gibibytes, [];
    /// Device memory that is kept free, and given up first when another process takes memory.
    canary: Bytes, Kind::SizeOrNone, [];
    /// Maximum requests that run or wait. Further requests are refused at once. Default: the larger of 1024 and four times max_num_seqs, but fewer if their prompts could take more than a quarter of the free host memory.
    requests: usize, Kind::Count("requests"), [];
    /// Target time from one token of a reply to the next, for 99 of 100 tokens. While replies run, prompts and pictures take only as much of a step as meets the target. With 0, replies may pause for a whole step of prompts. Default 33.
    token_interval: usize, Kind::CountOrNone("ms"), [];
    /// Time from a request until its first step must be planned, unless the request sets its own deadline. A request that waits longer ends with an error before it takes any memory. Default 0, no deadline.
    queue_deadline: usize, Kind::CountOrNone("ms"), [];
    /// Time from a request until its first token must be ready, unless the request sets its own deadline. A request that can no longer meet it ends before it takes any memory. Default 0, no deadline.
    first_token_deadline: usize, Kind::CountOrNone("ms"), [];
    /// Time from a request until its reply must be complete, unless the request sets its own deadline. Default 0, no deadline.
    reply_deadline: usize, Kind::CountOrNone("ms"), [];
    /// Relative shares of tenants that wait at the same time, such as gold=4,free=1 or a JSON object. Other tenants have weight 1. A tenant that waits without others gets the whole model. Each tenant named here gets a token metric.
    tenant_weights: TenantWeights, Kind::Weights, [];
    /// Puts the model to sleep after this long without a request. The next request wakes it. Default 0, never.
    sleep_after: usize, Kind::CountOrNone("s"), [];
    /// How long a request waits for a sleeping model to wake up. Default 120.
    wake_within: usize, Kind::Count("s"), [];
    /// A load or wake-up that lacks memory puts other models to sleep: the least recently used one or, if all are busy, one that has been awake for this long. Default 0, never.
    sleep_for_memory: usize, Kind::CountOrNone("s"), [Former sleep_for_room];
    /// Host memory that may be leased, for decoded pictures and for the weights of sleeping models. Default 1 GiB.
    host_bytes: Bytes, Kind::Size, [];
    /// Threads that compute on a host device. The same number of further threads decode pictures. Default: one per CPU.
    threads: usize, Kind::Count("threads"), [];
    /// Type of weights, activations and, unless kv_cache_dtype is set, the KV cache: auto (the checkpoint's type, if the device computes in it), bfloat16, float16 (or half) or float32.
    dtype: Precision, Kind::Type, [LightLlm data_type];
    /// Rounds the decoder's projections while they load: to FP8 with fp8 (or fp8_per_channel), fp8_per_block or fp8_per_tensor, or to 4 bits with int4. Other weights, and experts with int4, are not rounded. For a quantized checkpoint, leave this unset or name the checkpoint's own format (fp8, int4, awq, gptq, compressed-tensors, modelopt).
    quantization: WeightQuantization, Kind::Format, [];
    /// Type of the KV cache: auto (the type of activations), fp8 or fp8_e4m3 (E4M3, with the checkpoint's scales or else 1), or the name of the activations' type. FP8 holds twice as many tokens.
    kv_cache_dtype: KvCacheType, Kind::CacheType, [];
    /// Type in which the states of gated delta nets are stored: auto or float32, or bfloat16, which takes half the memory and rounds a state at the end of each step. Other models ignore it.
    state_dtype: StateType, Kind::StateType, [Vllm mamba_ssm_cache_dtype, Sglang mamba_ssm_dtype];
    /// Name of the model in tables and metrics, instead of the checkpoint's name.
    model_name: String, Kind::Name, [Vllm served_model_name];
    /// `bursar serve` logs only requests that fail. Other commands ignore it. Logs never contain the text of a request.
    disable_log_requests: bool, Kind::Switch, [];
    /// GPUs that share a model communicate through NCCL (libnccl.so.2) instead of Bursar's kernels. Without this switch, they use NCCL only if they cannot map each other's memory or are not Hopper GPUs.
    disable_custom_all_reduce: bool, Kind::Switch, [];
    /// Runs the worst cases through all layers, before the KV cache is sized and again at its final size. Without it, a GPU runs eight layers before the sizing and all layers after it. A host device runs the worst cases once, through as many layers as reach the planned peak.
    full_stress: bool, Kind::Switch, [];
    /// Maximum bytes of a picture's file. Larger files are refused.
    picture_file_bytes: Bytes, Kind::Size, [];
    /// Maximum pixels of a picture as stored. Larger pictures are refused.
    picture_source_pixels: u64, Kind::Count("pixels"), [];
}

/// A method that drafts tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftMethod {
    /// Drafts are disabled, whatever `draft_tokens` is.
    #[default]
    None,
    /// Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens.
    Ngram,
    /// The draft head of the model (multi-token prediction), or the Gemma 4 assistant that
    /// `draft_model` names.
    Mtp,
    /// An EAGLE-3 head in a checkpoint of its own.
    Eagle3,
}

/// The format of the output projection that the draft head uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftQuantization {
    /// The model's own output projection.
    #[default]
    None,
    /// A second copy, rounded to 4-bit integers.
    Int4,
}

/// A name whose value is an object that sets several knobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nested {
    pub name: &'static str,
    /// The servers that use this name.
    pub of: &'static [Peer],
    /// The possible contents of the object.
    pub meaning: &'static str,
}

/// All names that set several knobs at once.
pub const NESTED: &[Nested] = &[
    Nested {
        name: "mm_processor_kwargs",
        of: &[Peer::Vllm],
        meaning: "An object with max_pixels and min_pixels, or with size, an object with longest_edge and \
                  shortest_edge. All values are in pixels.",
    },
    Nested {
        name: "limit_mm_per_prompt",
        of: &[Peer::Vllm],
        meaning: "An object with image, which sets pictures, and video, which is 0 or an object with count and \
                  num_frames. Their product sets video_frames.",
    },
    Nested {
        name: "speculative_config",
        of: &[Peer::Vllm],
        meaning: "An object in which method sets draft_method, model sets draft_model, num_speculative_tokens sets draft_tokens, \
                  prompt_lookup_max sets draft_ngram_max, prompt_lookup_min sets draft_ngram_min, and quantization sets \
                  draft_quantization.",
    },
];
