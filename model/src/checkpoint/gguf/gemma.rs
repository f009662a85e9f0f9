//! Settings of Gemma 3 and Gemma 4 in GGUF files (llama.cpp, `conversion/gemma.py`).

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::header::Header;
use super::keys::{KEY_LENGTH, Keys, ROTATED, VALUE_LENGTH, WINDOW};
use super::rope_factors;
use super::settings::GgufLayers;
use crate::checkpoint::error::CheckpointError;

/// The layers with a sliding window: a list, or the distance between layers with full attention.
const PATTERN: &str = "attention.sliding_window_pattern";
const WINDOW_THETA: &str = "rope.freq_base_swa";
const WINDOW_ROTATED: &str = "rope.dimension_count_swa";
const WINDOW_KEY_LENGTH: &str = "attention.key_length_swa";
const WINDOW_VALUE_LENGTH: &str = "attention.value_length_swa";
const SOFTCAP: &str = "final_logit_softcapping";
const SHARING_LAYERS: &str = "attention.shared_kv_layers";
const LAYER_EMBEDDING: &str = "embedding_length_per_layer_input";
const EXPERTS: &str = "expert_count";
const EXPERTS_OF_TOKEN: &str = "expert_used_count";
const EXPERT_WIDTH: &str = "expert_feed_forward_length";

/// Settings that Gemma 4 may give for each layer.
pub(super) const OF_LAYERS: [&str; 2] = [MLP_WIDTH, KV_HEADS];
const MLP_WIDTH: &str = "feed_forward_length";
const KV_HEADS: &str = "attention.head_count_kv";

/// Base of the rotary frequencies of layers with a sliding window, if the file does not give it.
const WINDOW_THETA_DEFAULT: f64 = 10_000.0;
/// Gemma 3's distance between layers with full attention, which most files do not give.
const FULL_EVERY: u64 = 6;
/// Number of layers of Gemma 3 27B, which divides attention scores by another number than the others.
/// No setting of the file shows it, so llama.cpp also relies on the number of layers.
const LAYERS_OF_27B: u64 = 62;

/// The settings that are read only for models with layers of this kind.
pub(super) fn read_keys(layers: GgufLayers) -> &'static [&'static str] {
    match layers {
        GgufLayers::Gemma3 => &[PATTERN, WINDOW_THETA, SOFTCAP],
        GgufLayers::Gemma4 => &[
            PATTERN,
            WINDOW_THETA,
            SOFTCAP,
            WINDOW_ROTATED,
            WINDOW_KEY_LENGTH,
            WINDOW_VALUE_LENGTH,
            SHARING_LAYERS,
            LAYER_EMBEDDING,
            EXPERTS,
            EXPERTS_OF_TOKEN,
            EXPERT_WIDTH,
        ],
        _ => &[],
    }
}

/// Inserts the settings of Gemma 3 into the fields of a `config.json`. `scaling` scales the rotary
/// frequencies of layers with full attention.
pub(super) fn insert_gemma3(
    keys: &Keys<'_, '_>,
    header: &Header<'_>,
    (heads, head_dim): (u64, u64),
    scaling: Option<Value>,
    fields: &mut Map<String, Value>,
) -> Result<(), CheckpointError> {
    let layers = keys.required("block_count")?;
    let window = keys.number(WINDOW)?.filter(|window| *window > 0);
    let every = keys.number(PATTERN)?.unwrap_or(FULL_EVERY);
    if every == 0 {
        return Err(keys.refused(PATTERN, every, "a number above 0"));
    }
    // The number of layers is not trusted, but a file cannot have more layers than tensors.
    let is_windowed =
        (1..=layers.min(header.tensors.len() as u64)).map(|layer| window.is_some() && !layer.is_multiple_of(every));
    let divisor = if layers == LAYERS_OF_27B { keys.required("embedding_length")? / heads.max(1) } else { head_dim };
    fields.insert("layer_types".to_owned(), layer_types(is_windowed));
    fields.extend(window.map(|window| ("sliding_window".to_owned(), window.into())));
    fields.insert("query_pre_attn_scalar".to_owned(), divisor.into());
    fields.insert("rope_local_base_freq".to_owned(), keys.float(WINDOW_THETA)?.unwrap_or(WINDOW_THETA_DEFAULT).into());
    fields.extend(scaling.map(|scaling| ("rope_scaling".to_owned(), scaling)));
    insert_softcap(keys, fields)
}

/// Inserts the settings of Gemma 4 into the fields of a `config.json`. `theta` is the base of the rotary
/// frequencies in layers with full attention.
pub(super) fn insert_gemma4(
    keys: &Keys<'_, '_>,
    header: &Header<'_>,
    file: &[u8],
    theta: f64,
    fields: &mut Map<String, Value>,
) -> Result<(), CheckpointError> {
    let layers = Gemma4Layers::read(keys)?;
    let [head_dim, full_head_dim] = head_sizes(keys)?;
    let [kv_heads, full_kv_heads] = layers.kv_heads(keys)?;
    let (width, has_wide_mlp) = layers.mlp_width(keys)?;
    let rotated = rope_factors::rotated_part(keys.settings, header, file, full_head_dim as usize / 2)?;
    let full = json!({ "rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": theta });
    let window_theta = keys.float(WINDOW_THETA)?.unwrap_or(WINDOW_THETA_DEFAULT);
    let windows = json!({ "rope_type": "default", "rope_theta": window_theta });
    let mut set = |key: &str, value: Value| fields.insert(key.to_owned(), value);
    set("layer_types", layer_types(layers.is_windowed.iter().copied()));
    set("sliding_window", keys.required(WINDOW)?.into());
    set("head_dim", head_dim.into());
    set("global_head_dim", full_head_dim.into());
    set("num_key_value_heads", kv_heads.or(full_kv_heads).into());
    set("num_global_key_value_heads", full_kv_heads.into());
    set("attention_k_eq_v", layers.keys_are_values(header).into());
    set("num_kv_shared_layers", (layers.is_windowed.len() - layers.with_own_keys).into());
    set("intermediate_size", width.into());
    set("use_double_wide_mlp", has_wide_mlp.into());
    set("hidden_size_per_layer_input", keys.number(LAYER_EMBEDDING)?.unwrap_or(0).into());
    if let Some(table) = header.tensors.iter().find(|tensor| tensor.name == "per_layer_token_embd.weight") {
        set("vocab_size_per_layer_input", table.shape[0].into());
    }
    let experts = keys.number(EXPERTS)?.filter(|experts| *experts > 0);
    set("enable_moe_block", experts.is_some().into());
    if let Some(experts) = experts {
        set("num_experts", experts.into());
        set("top_k_experts", keys.required(EXPERTS_OF_TOKEN)?.into());
        set("moe_intermediate_size", keys.required(EXPERT_WIDTH)?.into());
    }
    set("rope_parameters", json!({ "full_attention": full, "sliding_attention": windows }));
    insert_softcap(keys, fields)
}

/// Elements of a head in layers with a sliding window and in layers with full attention.
fn head_sizes(keys: &Keys<'_, '_>) -> Result<[u64; 2], CheckpointError> {
    let (windowed, full) = (keys.required(WINDOW_KEY_LENGTH)?, keys.required(KEY_LENGTH)?);
    let same = [(WINDOW_VALUE_LENGTH, windowed), (WINDOW_ROTATED, windowed), (VALUE_LENGTH, full), (ROTATED, full)];
    for (key, expected) in same {
        if let Some(other) = keys.number(key)?.filter(|found| *found != expected) {
            return Err(keys.refused(key, other, &format!("{expected}, the elements of a head")));
        }
    }
    Ok([windowed, full])
}

/// The attention types of Gemma 4's layers.
struct Gemma4Layers {
    is_windowed: Vec<bool>,
    /// Number of leading layers that compute keys and values. The other layers share them.
    with_own_keys: usize,
}

impl Gemma4Layers {
    fn read(keys: &Keys<'_, '_>) -> Result<Self, CheckpointError> {
        let name = keys.name(PATTERN);
        let is_windowed = keys.settings.required(&name, keys.settings.switches(&name)?)?;
        let (listed, layers) = (is_windowed.len(), keys.required("block_count")?);
        if listed as u64 != layers {
            let expected = format!("one for each of {layers} layers");
            return Err(keys.refused(PATTERN, format!("{listed} values"), &expected));
        }
        let sharing = keys.number(SHARING_LAYERS)?.unwrap_or(0);
        match layers.checked_sub(sharing) {
            Some(own) => Ok(Gemma4Layers { is_windowed, with_own_keys: own as usize }),
            None => Err(keys.refused(SHARING_LAYERS, sharing, &format!("at most {layers}, the number of layers"))),
        }
    }

    /// Key heads in layers with a sliding window and in layers with full attention; `None` without
    /// such layers.
    fn kv_heads(&self, keys: &Keys<'_, '_>) -> Result<[Option<u64>; 2], CheckpointError> {
        let listed = keys.of_layers(KV_HEADS, self.is_windowed.len())?;
        let of = |is_windowed| {
            let of_kind = listed.iter().zip(&self.is_windowed).filter(|(_, other)| **other == is_windowed);
            keys.one_number(KV_HEADS, of_kind.map(|(heads, _)| *heads))
        };
        Ok([of(true)?, of(false)?])
    }

    /// The width of the MLP, and whether layers without own keys have twice the width.
    fn mlp_width(&self, keys: &Keys<'_, '_>) -> Result<(Option<u64>, bool), CheckpointError> {
        let listed = keys.of_layers(MLP_WIDTH, self.is_windowed.len())?;
        let (own, sharing) = listed.split_at(self.with_own_keys);
        let [own, sharing] = [own, sharing].map(|widths| keys.one_number(MLP_WIDTH, widths.iter().copied()));
        match (own?, sharing?) {
            (Some(own), Some(sharing)) if sharing == own => Ok((Some(own), false)),
            (Some(own), Some(sharing)) if own.checked_mul(2) == Some(sharing) => Ok((Some(own), true)),
            (Some(own), Some(sharing)) => {
                let expected = format!("{own} or its double in layers that share keys");
                Err(keys.refused(MLP_WIDTH, sharing, &expected))
            }
            (own, sharing) => Ok((own.or(sharing), false)),
        }
    }

    /// Whether layers with full attention use their keys as values, and therefore have no tensor of values.
    fn keys_are_values(&self, header: &Header<'_>) -> bool {
        let names: BTreeSet<&str> = header.tensors.iter().map(|tensor| tensor.name).collect();
        let has_values = |layer| names.contains(format!("blk.{layer}.attn_v.weight").as_str());
        let mut full = (0..self.with_own_keys).filter(|layer| !self.is_windowed[*layer]).peekable();
        full.peek().is_some() && !full.any(has_values)
    }
}

fn insert_softcap(keys: &Keys<'_, '_>, fields: &mut Map<String, Value>) -> Result<(), CheckpointError> {
    let cap = keys.float(SOFTCAP)?.filter(|cap| *cap != 0.0);
    fields.extend(cap.map(|cap| (SOFTCAP.to_owned(), cap.into())));
    Ok(())
}

fn layer_types(is_windowed: impl Iterator<Item = bool>) -> Value {
    is_windowed.map(|is_windowed| if is_windowed { "sliding_attention" } else { "full_attention" }).collect()
}
