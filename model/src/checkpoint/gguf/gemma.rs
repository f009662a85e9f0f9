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

/// Inserts the settings of Gemma 4 into the fields of a `config.json`.
pub(super) fn insert_gemma4(
    keys: &Keys<'_, '_>,
    header: &Header<'_>,
    file: &[u8],
    theta: f64,
    fields: &mut Map<String, Value>,
) -> Result<(), CheckpointError> {
    let name = keys.name(PATTERN);
    let is_windowed = keys.settings.required(&name, keys.settings.switches(&name)?)?;
    let layers = keys.required("block_count")?;
    if is_windowed.len() as u64 != layers {
        return Err(keys.refused(
            PATTERN,
            format!("{} values", is_windowed.len()),
            &format!("one for each of {layers} layers"),
        ));
    }
    let [head_dim, full_head_dim] = [WINDOW_KEY_LENGTH, KEY_LENGTH].map(|key| keys.required(key));
    let (head_dim, full_head_dim) = (head_dim?, full_head_dim?);
    let same = [
        (WINDOW_VALUE_LENGTH, head_dim),
        (WINDOW_ROTATED, head_dim),
        (VALUE_LENGTH, full_head_dim),
        (ROTATED, full_head_dim),
    ];
    for (key, expected) in same {
        if let Some(other) = keys.number(key)?.filter(|found| *found != expected) {
            return Err(keys.refused(key, other, &format!("{expected}, the elements of a head")));
        }
    }
    let sharing = keys.number(SHARING_LAYERS)?.unwrap_or(0);
    let is_sharing = |layer: usize| layer as u64 >= layers.saturating_sub(sharing);
    let kv_heads = keys.of_layers(KV_HEADS, is_windowed.len())?;
    let of_kind = |windowed: bool| {
        keys.one_number(
            KV_HEADS,
            kv_heads.iter().zip(&is_windowed).filter(|(_, is)| **is == windowed).map(|(heads, _)| *heads),
        )
    };
    let widths = keys.of_layers(MLP_WIDTH, is_windowed.len())?;
    let width = |sharing: bool| {
        keys.one_number(
            MLP_WIDTH,
            widths.iter().enumerate().filter(|(layer, _)| is_sharing(*layer) == sharing).map(|(_, width)| *width),
        )
    };
    let (width, wide) = (width(false)?, width(true)?);
    let has_wide_mlp = match (width, wide) {
        (Some(width), Some(wide)) if wide != width => {
            if width.checked_mul(2) != Some(wide) {
                return Err(keys.refused(MLP_WIDTH, wide, &format!("{width} or its double in the last layers")));
            }
            true
        }
        _ => false,
    };
    let names: BTreeSet<&str> = header.tensors.iter().map(|tensor| tensor.name).collect();
    let has_values = |layer: &usize| names.contains(format!("blk.{layer}.attn_v.weight").as_str());
    let own_full =
        (0..is_windowed.len()).filter(|layer| !is_windowed[*layer] && !is_sharing(*layer)).collect::<Vec<_>>();
    let (full_heads, heads) = (of_kind(false)?, of_kind(true)?);
    let rotated = rope_factors::rotated_part(keys.settings, header, file, full_head_dim as usize / 2)?;
    let theta_of_windows = keys.float(WINDOW_THETA)?.unwrap_or(WINDOW_THETA_DEFAULT);
    let mut set = |key: &str, value: Value| fields.insert(key.to_owned(), value);
    set("layer_types", layer_types(is_windowed.iter().copied()));
    set("sliding_window", keys.required(WINDOW)?.into());
    set("head_dim", head_dim.into());
    set("global_head_dim", full_head_dim.into());
    set("num_key_value_heads", heads.or(full_heads).into());
    set("num_global_key_value_heads", full_heads.into());
    set("attention_k_eq_v", (!own_full.is_empty() && !own_full.iter().any(has_values)).into());
    set("num_kv_shared_layers", sharing.into());
    set("intermediate_size", width.or(wide).into());
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
    let full = json!({ "rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": theta });
    let windows = json!({ "rope_type": "default", "rope_theta": theta_of_windows });
    set("rope_parameters", json!({ "full_attention": full, "sliding_attention": windows }));
    insert_softcap(keys, fields)
}

fn insert_softcap(keys: &Keys<'_, '_>, fields: &mut Map<String, Value>) -> Result<(), CheckpointError> {
    let cap = keys.float(SOFTCAP)?.filter(|cap| *cap != 0.0);
    fields.extend(cap.map(|cap| (SOFTCAP.to_owned(), cap.into())));
    Ok(())
}

fn layer_types(is_windowed: impl Iterator<Item = bool>) -> Value {
    is_windowed.map(|is_windowed| if is_windowed { "sliding_attention" } else { "full_attention" }).collect()
}
