//! The table of knobs: name, meaning, unit, and the names that vLLM, SGLang and LightLLM have for the same.

use bursar_budgets::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Precision;
use super::{KnobError, product::product};

/// What a knob's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number of so-named things, at least one.
    Count(&'static str),
    /// A whole number of so-named things, 0 for none.
    CountOrNone(&'static str),
    /// A size: a number of bytes, or a text such as `2GiB`; at least a byte.
    Size,
    /// A size, 0 for none.
    SizeOrNone,
    /// A share, above 0 and up to 1.
    Share,
    /// A number of GiB, as vLLM has it.
    Gibibytes,
    /// A text that is not empty.
    Name,
    /// The name of an element type.
    Type,
    /// Yes or no; as a flag it is said by its name alone.
    Switch,
}

impl Kind {
    /// What is counted, in a word.
    pub fn unit(self) -> &'static str {
        match self {
            Kind::Count(unit) | Kind::CountOrNone(unit) => unit,
            Kind::Size | Kind::SizeOrNone => "bytes",
            Kind::Share => "share",
            Kind::Gibibytes => "GiB",
            Kind::Name => "name",
            Kind::Type => "type",
            Kind::Switch => "switch",
        }
    }

    /// What a value has to be.
    pub fn expected(self) -> &'static str {
        match self {
            Kind::Count(_) => "a whole number of at least 1",
            Kind::CountOrNone(_) => "a whole number, 0 for none",
            Kind::Size => "a number of bytes above 0, or a size such as 512MiB",
            Kind::SizeOrNone => "a number of bytes, or a size such as 512MiB",
            Kind::Share => "above 0 and at most 1",
            Kind::Gibibytes => "a number of GiB",
            Kind::Name => "a text that is not empty",
            Kind::Type => "auto, bfloat16, float16 (or half) or float32",
            Kind::Switch => "true or false",
        }
    }
}

/// Whose name it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// <https://docs.vllm.ai>
    Vllm,
    /// <https://docs.sglang.ai>
    Sglang,
    /// <https://github.com/ModelTC/lightllm>
    LightLlm,
}

/// Another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// The name.
    pub name: &'static str,
    /// Whose.
    pub of: Peer,
}

/// One line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knob {
    /// Our name: a field of [`Knobs`], and with hyphens a flag.
    pub name: &'static str,
    /// What it does, in sentences.
    pub meaning: &'static str,
    /// What its value is.
    pub kind: Kind,
    /// What others call it.
    pub aliases: &'static [Alias],
}

impl Knob {
    /// The meaning as one line.
    pub fn sentence(&self) -> &'static str {
        self.meaning.trim()
    }

    /// The knob that has this name, ours or another's.
    pub fn named(name: &str) -> Option<&'static Knob> {
        TABLE.iter().find(|knob| knob.name == name || knob.aliases.iter().any(|alias| alias.name == name))
    }
}

/// A value that a knob's type takes out of JSON, or not.
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
            // 1e3 and 8192.0 are whole numbers too.
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
        /// What a user has set; what is not set is as expected of the device.
        ///
        /// Its JSON form is an object of names, ours or another's (see [`TABLE`]); it is written with ours. Two names of
        /// one knob may both be there if they say the same.
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

        /// Every knob.
        pub const TABLE: &[Knob] = &[$(Knob {
            name: stringify!($name),
            meaning: concat!($($meaning),+),
            kind: $kind,
            aliases: &[$(Alias { name: stringify!($alias), of: Peer::$peer }),*],
        },)*];

        impl Knobs {
            /// Sets the knob that has this name, ours or another's; whether it was another value before.
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
                            Kind::Share => is_share(value),
                            Kind::Count(_) | Kind::Size | Kind::Name => set != <$type>::default(),
                            Kind::CountOrNone(_) | Kind::SizeOrNone | Kind::Gibibytes | Kind::Type | Kind::Switch => true,
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
    /// Tokens of a sequence at most, prompt and reply together; the model's own length if that is less.
    context_tokens: usize, Kind::Count("tokens"), [Vllm max_model_len, Sglang context_length, LightLlm max_req_total_len];
    /// Sequences in one step at most.
    sequences: usize, Kind::Count("sequences"), [Vllm max_num_seqs, Sglang max_running_requests, LightLlm running_max_req_size];
    /// Tokens in one step at most, over all sequences, those that decode among them. A longer prompt takes several steps.
    step_tokens: usize, Kind::Count("tokens"), [Vllm max_num_batched_tokens, Sglang chunked_prefill_size, LightLlm batch_max_tokens];
    /// Pixels of a picture behind resizing, at most, instead of what the model's processor says; larger pictures are resized.
    picture_pixels: u64, Kind::Count("pixels"), [Vllm max_pixels];
    /// Pixels of a picture behind resizing, at least; smaller pictures are enlarged.
    picture_pixels_min: u64, Kind::Count("pixels"), [Vllm min_pixels];
    /// The same limit as picture_pixels in patches of the model, 14 x 14 pixels in Qwen2.5-VL.
    picture_patches: usize, Kind::Count("patches"), [];
    /// Pictures of a request at most, over all turns.
    pictures: usize, Kind::Count("pictures"), [];
    /// Frames of all videos of a request at most, over all turns; 0 for no videos.
    video_frames: usize, Kind::CountOrNone("frames"), [];
    /// Patches in one launch of the vision encoder at most, over all pictures; by default the largest picture's.
    launch_patches: usize, Kind::Count("patches"), [];
    /// The share that keys and values take of what is left after everything else.
    memory_fraction: f64, Kind::Share, [];
    /// The share of the whole device that everything of ours stays within: weights, workspaces, keys and values, overhead.
    device_fraction: f64, Kind::Share, [Vllm gpu_memory_utilization, Sglang mem_fraction_static, LightLlm mem_fraction];
    /// Keys and values take so many bytes, in whole pages a layer; nothing is sized.
    kv_bytes: Bytes, Kind::Size, [Vllm kv_cache_memory_bytes];
    /// Keys and values are of so many tokens, in whole blocks of 16; nothing is sized.
    kv_tokens: usize, Kind::Count("tokens"), [Sglang max_total_tokens, LightLlm max_total_token_num];
    /// Host memory for keys and values of preempted sequences: none is taken, as they are computed again instead.
    swap_space: f64, Kind::Gibibytes, [];
    /// Bytes of the device that are kept free of use, and given up first when another process takes memory.
    canary: Bytes, Kind::SizeOrNone, [];
    /// Requests that may be under way or wait; one more is refused at once.
    requests: usize, Kind::Count("requests"), [];
    /// Threads that compute where the host stands in for a GPU, and as many again that decode pictures.
    threads: usize, Kind::Count("threads"), [];
    /// The type of weights, activations, keys and values: auto (the checkpoint's own, where the device computes in it), bfloat16, float16 or half, float32.
    dtype: Precision, Kind::Type, [LightLlm data_type];
    /// The name that the model goes by in tables and metrics, instead of its checkpoint's.
    model_name: String, Kind::Name, [Vllm served_model_name];
    /// Requests are not logged with their text: they never are.
    disable_log_requests: bool, Kind::Switch, [];
    /// A start runs its worst cases through all layers, before the cache is sized and again at its size. Otherwise a GPU runs eight layers before and all of them at that size; a host runs, once, as many layers as reach the planned peak.
    full_stress: bool, Kind::Switch, [];
    /// Bytes of a picture's file at most; larger ones are refused.
    picture_file_bytes: Bytes, Kind::Size, [];
    /// Pixels of a picture as it is stored, at most; larger ones are refused.
    picture_source_pixels: u64, Kind::Count("pixels"), [];
}

/// A name whose value is an object of other names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nested {
    /// Its name.
    pub name: &'static str,
    /// Whose.
    pub of: &'static [Peer],
    /// What may be in it.
    pub meaning: &'static str,
}

/// Names that set several knobs at once.
pub const NESTED: &[Nested] = &[
    Nested {
        name: "mm_processor_kwargs",
        of: &[Peer::Vllm],
        meaning: "An object of max_pixels and min_pixels, or of size with longest_edge and shortest_edge, as numbers of \
                  pixels.",
    },
    Nested {
        name: "limit_mm_per_prompt",
        of: &[Peer::Vllm],
        meaning: "An object of image, which sets pictures, and video with count and num_frames, whose product sets \
                  video_frames, or video 0.",
    },
];
