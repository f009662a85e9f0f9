//! The `config.json` that is generated for a GGUF file: the file's settings under the names that
//! transformers uses (5.17, `integrations/ggml.py`). A setting that changes results and has no such
//! name is refused.

use serde_json::{Map, Value, json};

use super::gemma;
use super::header::{Header, Setting};
use super::hybrid::{self, DeltaHeads};
use super::keys::{KEY_LENGTH, Keys, ROTATED, THETA, VALUE_LENGTH, WINDOW};
use super::rope_factors;
use super::settings::{GgufArchitecture, GgufLayers, Settings};
use super::storage::{matrices_type, stored};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::stored::{Stored, TensorType};

/// Settings that have an equivalent key in `config.json`.
const NAMED: [(&str, &str); 7] = [
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("vocab_size", "vocab_size"),
];
const EPSILON: &str = "attention.layer_norm_rms_epsilon";
const CAUSAL: &str = "attention.causal";
const SCALING: &str = "rope.scaling.type";
const FACTOR: &str = "rope.scaling.factor";
const ORIGINAL: &str = "rope.scaling.original_context_length";
const ATTENTION_FACTOR: &str = "rope.scaling.attn_factor";
const FAST: &str = "rope.scaling.yarn_beta_fast";
const SLOW: &str = "rope.scaling.yarn_beta_slow";

/// Other settings that are read, or that change nothing.
const READ: [&str; 15] = [
    EPSILON,
    THETA,
    KEY_LENGTH,
    VALUE_LENGTH,
    ROTATED,
    WINDOW,
    CAUSAL,
    SCALING,
    FACTOR,
    ORIGINAL,
    ATTENTION_FACTOR,
    FAST,
    SLOW,
    // Whether the model was trained with the scaling.
    "rope.scaling.finetuned",
    // Describes the order of the rows, which is the same for all files of an architecture.
    "tensor_data_layout",
];

/// Settings of a file that are known before its tensors are located.
pub(super) struct Config {
    pub architecture: GgufArchitecture,
    pub heads: usize,
    pub kv_heads: usize,
    /// Number of the model's layers. The file may have additional layers, which draft tokens.
    pub layers: u64,
    pub hidden: u64,
    /// The heads of gated delta nets, if the layers have them.
    pub delta: Option<DeltaHeads>,
    fields: Map<String, Value>,
}

impl Config {
    pub fn of(
        settings: &Settings<'_>,
        architecture: GgufArchitecture,
        header: &Header<'_>,
        file: &[u8],
    ) -> Result<Self, CheckpointError> {
        let keys = Keys { settings, architecture: architecture.name };
        keys.refuse_unknown(architecture.layers)?;
        let mut fields = Map::new();
        fields.insert("architectures".to_owned(), json!([architecture.class]));
        fields.insert("model_type".to_owned(), architecture.model_type.into());
        let is_of_layers = |key: &str| architecture.layers == GgufLayers::Gemma4 && gemma::OF_LAYERS.contains(&key);
        for (theirs, ours) in NAMED.into_iter().filter(|(theirs, _)| !is_of_layers(theirs)) {
            if let Some(number) = keys.number(theirs)? {
                fields.insert(ours.to_owned(), number.into());
            }
        }
        let heads = keys.required("attention.head_count")?;
        let theta = keys.float(THETA)?.unwrap_or(10_000.0);
        fields.insert("rms_norm_eps".to_owned(), keys.float_required(EPSILON)?.into());
        let mut layers = keys.required("block_count")?;
        let (mut kv_heads, mut delta) = (heads, None);
        if architecture.layers == GgufLayers::Gemma4 {
            if let Some(scaling) = keys.rope_scaling(None)? {
                return Err(keys.refused(SCALING, scaling, "none"));
            }
            gemma::insert_gemma4(&keys, header, file, theta, &mut fields)?;
        } else {
            kv_heads = keys.number("attention.head_count_kv")?.unwrap_or(heads);
            let is_hybrid = matches!(architecture.layers, GgufLayers::Hybrid { .. });
            let head_dim = if is_hybrid { keys.required(KEY_LENGTH)? } else { keys.head_dim(heads)? };
            fields.insert("rope_theta".to_owned(), theta.into());
            fields.insert("head_dim".to_owned(), head_dim.into());
            let by_divisors = rope_factors::scaling(settings, header, file, (theta, head_dim as usize / 2))?;
            let scaling = keys.rope_scaling(by_divisors)?;
            if architecture.layers == GgufLayers::Gemma3 {
                gemma::insert_gemma3(&keys, header, (heads, head_dim), scaling, &mut fields)?;
            } else {
                keys.refuse_window()?;
                if is_hybrid {
                    layers = hybrid::layers(&keys, layers)?;
                    hybrid::insert(&keys, header, (layers, head_dim, theta), scaling, &mut fields)?;
                    delta = Some(hybrid::heads(&keys)?);
                } else {
                    fields.extend(scaling.map(|scaling| ("rope_scaling".to_owned(), scaling)));
                }
            }
        }
        of_tensors(header, architecture.layers, &mut fields);
        let [heads, kv_heads] =
            [heads, kv_heads].map(|heads| usize::try_from(heads).unwrap_or(usize::MAX).min(usize::MAX / 2));
        let hidden = keys.required("embedding_length")?;
        Ok(Config { architecture, heads, kv_heads, layers, hidden, delta, fields })
    }

    pub fn json(&self) -> Value {
        Value::Object(self.fields.clone())
    }
}

/// Settings that follow from the tensors: the vocabulary size, biases, a tied head, and the
/// type of the matrices.
fn of_tensors(header: &Header<'_>, layers: GgufLayers, fields: &mut Map<String, Value>) {
    let has = |name: &str| header.tensors.iter().any(|tensor| tensor.name == name);
    if let Some(embedding) = header.tensors.iter().find(|tensor| tensor.name == "token_embd.weight") {
        fields.entry("vocab_size").or_insert_with(|| embedding.shape[0].into());
    }
    fields.insert("tie_word_embeddings".to_owned(), (!has("output.weight")).into());
    fields.insert("attention_bias".to_owned(), has("blk.0.attn_output.bias").into());
    fields.insert("mlp_bias".to_owned(), has("blk.0.ffn_down.bias").into());
    let is_whole = |tensor| matches!(stored(tensor), Some(Stored::Plain(_)));
    let dtype = match matrices_type(header) {
        // Gemma's activations exceed the largest number of float16.
        TensorType::F16 if !matches!(layers, GgufLayers::Gemma3 | GgufLayers::Gemma4) => "float16",
        TensorType::F32 if header.tensors.iter().all(|tensor| is_whole(tensor.kind)) => "float32",
        // Quantized blocks do not show the original type. These architectures
        // are trained in bfloat16.
        _ => "bfloat16",
    };
    fields.insert("dtype".to_owned(), dtype.into());
}

impl Keys<'_, '_> {
    /// Refuses unknown settings of the architecture. An architecture has few settings, and they
    /// determine the computation, so an unknown setting must not be ignored.
    fn refuse_unknown(&self, layers: GgufLayers) -> Result<(), CheckpointError> {
        let more = [hybrid::read_keys(layers).as_slice(), gemma::read_keys(layers)].concat();
        let is_read =
            |key: &str| READ.contains(&key) || more.contains(&key) || NAMED.iter().any(|(named, _)| *named == key);
        let is_neutral = |value: &Setting<'_>| {
            matches!(value, Setting::Unsigned(0) | Setting::Signed(0) | Setting::Bool(false) | Setting::Text(""))
                || *value == Setting::Float(0.0)
        };
        for (name, value) in self.settings.values {
            let own = name.strip_prefix(self.architecture).and_then(|rest| rest.strip_prefix('.'));
            if let Some(key) = own.filter(|key| !is_read(key) && !is_neutral(value)) {
                let of_encoder = ["vision.", "audio.", "mm."].iter().any(|part| key.starts_with(part));
                let expected = if of_encoder {
                    "none: encoders must be in a separate file, as llama.cpp writes them"
                } else {
                    "none: it changes what the model computes"
                };
                return Err(self.refused(key, value, expected));
            }
        }
        match self.settings.get(&self.name(CAUSAL)) {
            None | Some(Setting::Bool(true)) => Ok(()),
            Some(other) => Err(self.refused(CAUSAL, other, "true")),
        }
    }

    /// Number of elements of a head. Heads of keys and values must have the same number of
    /// elements, and RoPE must rotate all of them.
    fn head_dim(&self, heads: u64) -> Result<u64, CheckpointError> {
        let (keys, rotated) = (self.number(KEY_LENGTH)?, self.number(ROTATED)?);
        let even = || self.required("embedding_length").map(|hidden| hidden.checked_div(heads).unwrap_or(0));
        let head_dim = match keys.or(rotated) {
            Some(given) => given,
            None => even()?,
        };
        for (key, given) in [(VALUE_LENGTH, self.number(VALUE_LENGTH)?), (ROTATED, rotated)] {
            if let Some(other) = given.filter(|given| *given != head_dim) {
                return Err(self.refused(key, other, &format!("{head_dim}, the elements of a head")));
            }
        }
        Ok(head_dim)
    }

    /// Refuses a sliding window that is shorter than the context. llama.cpp ignores this setting
    /// for the supported architectures and uses full attention, but the original checkpoints use
    /// the window, so it is unclear which attention the file needs.
    fn refuse_window(&self) -> Result<(), CheckpointError> {
        let (window, context) = (self.number(WINDOW)?, self.required("context_length")?);
        match window.filter(|window| (1..context).contains(window)) {
            None => Ok(()),
            Some(window) => Err(self.refused(WINDOW, window, "0, or at least context_length")),
        }
    }

    /// `rope_scaling` from the settings, or from the divisors if the file has them.
    fn rope_scaling(&self, by_divisors: Option<Value>) -> Result<Option<Value>, CheckpointError> {
        let name = self.name(SCALING);
        let factor = self.float(FACTOR)?.filter(|factor| *factor != 0.0);
        // Without a type, a factor means linear scaling, as in llama.cpp.
        let kind = match self.settings.text(&name)? {
            Some(kind) => kind,
            None if factor.is_some_and(|factor| factor != 1.0) => "linear",
            None => "none",
        };
        if let Some(other) = self.float(ATTENTION_FACTOR)?.filter(|factor| *factor != 1.0) {
            return Err(self.refused(ATTENTION_FACTOR, other, "1"));
        }
        let original = self.number(ORIGINAL)?;
        match (kind, by_divisors) {
            ("none", by_divisors) => Ok(by_divisors),
            (_, Some(_)) => Err(self.refused(SCALING, kind, &format!("none together with {}", rope_factors::TENSOR))),
            ("linear", None) => Ok(Some(json!({ "rope_type": "linear", "factor": factor }))),
            ("yarn", None) => Ok(Some(json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": self.float(FAST)?,
                "beta_slow": self.float(SLOW)?,
            }))),
            (_, None) => Err(self.refused(SCALING, kind, "none, linear and yarn")),
        }
    }
}
