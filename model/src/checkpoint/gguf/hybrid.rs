//! Settings of hybrid models in GGUF files: gated delta nets, experts, and rotary positions with
//! several axes (llama.cpp, `conversion/qwen.py`, `Qwen3NextModel` and `Qwen3_5TextModel`).

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::header::Header;
use super::keys::{Keys, ROTATED, VALUE_LENGTH};
use super::settings::GgufLayers;
use crate::checkpoint::error::CheckpointError;

const GROUPS: &str = "ssm.group_count";
const STATE: &str = "ssm.state_size";
const CONVOLUTION: &str = "ssm.conv_kernel";
const RANK: &str = "ssm.time_step_rank";
const INNER: &str = "ssm.inner_size";
const SECTIONS: &str = "rope.dimension_sections";
const DRAFT_LAYERS: &str = "nextn_predict_layers";

/// Limit of the sizes of gated delta nets, larger than in any known model.
const SIZE_MAX: u64 = 1 << 20;

/// Settings of gated delta nets and of positions.
const OF_DELTA_NETS: [&str; 8] = [
    GROUPS,
    STATE,
    CONVOLUTION,
    RANK,
    INNER,
    SECTIONS,
    DRAFT_LAYERS,
    // This setting is not used, because the tensors of a layer show the kind of the layer.
    "full_attention_interval",
];

/// Settings of experts that have an equivalent key in `config.json`.
const OF_EXPERTS: [(&str, &str); 4] = [
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
];

/// The heads of gated delta nets.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaHeads {
    pub keys: usize,
    /// Value heads of each key head.
    pub values: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

/// The settings that are read only for models with layers of this kind.
pub(super) fn read_keys(layers: GgufLayers) -> Vec<&'static str> {
    match layers {
        GgufLayers::Hybrid { has_experts: false } => OF_DELTA_NETS.to_vec(),
        GgufLayers::Hybrid { has_experts: true } => {
            OF_DELTA_NETS.into_iter().chain(OF_EXPERTS.map(|(theirs, _)| theirs)).collect()
        }
        _ => Vec::new(),
    }
}

/// Number of layers of the model, not counting the layers that draft tokens. `all` is the number in
/// the file, which includes these layers.
pub(super) fn layers(keys: &Keys<'_, '_>, all: u64) -> Result<u64, CheckpointError> {
    match keys.number(DRAFT_LAYERS)? {
        None => Ok(all),
        Some(drafts) if drafts < all => Ok(all - drafts),
        Some(drafts) => Err(keys.refused(DRAFT_LAYERS, drafts, &format!("less than the {all} layers of the file"))),
    }
}

/// Reads a size of the gated delta nets, from 1 to `SIZE_MAX`. A tensor's size is the product of at
/// most three such sizes, so it stays below 2^63.
fn size(keys: &Keys<'_, '_>, key: &str) -> Result<usize, CheckpointError> {
    let size = keys.required(key)?;
    let is_within = (1..=SIZE_MAX).contains(&size);
    if is_within { Ok(size as usize) } else { Err(keys.refused(key, size, &format!("1 to {SIZE_MAX}"))) }
}

pub(super) fn heads(keys: &Keys<'_, '_>) -> Result<DeltaHeads, CheckpointError> {
    let [key_heads, key_dim, heads, inner] =
        [size(keys, GROUPS)?, size(keys, STATE)?, size(keys, RANK)?, size(keys, INNER)?];
    let ratio = |all: usize, of: usize| all.is_multiple_of(of).then(|| all / of);
    let values = ratio(heads, key_heads)
        .ok_or_else(|| keys.refused(RANK, heads, &format!("a multiple of the {key_heads} key heads")))?;
    let value_dim =
        ratio(inner, heads).ok_or_else(|| keys.refused(INNER, inner, &format!("a multiple of {heads} value heads")))?;
    Ok(DeltaHeads { keys: key_heads, values, key_dim, value_dim })
}

/// Inserts the settings of `layers` layers into the fields of a `config.json`. Attention has heads
/// of `head_dim` elements, and `scaling` is the scaling of rotary frequencies with the base
/// `theta`.
pub(super) fn insert(
    keys: &Keys<'_, '_>,
    header: &Header<'_>,
    (layers, head_dim, theta): (u64, u64, f64),
    scaling: Option<Value>,
    fields: &mut Map<String, Value>,
) -> Result<(), CheckpointError> {
    let DeltaHeads { keys: key_heads, values, key_dim, value_dim } = heads(keys)?;
    if let Some(other) = keys.number(VALUE_LENGTH)?.filter(|length| *length != head_dim) {
        return Err(keys.refused(VALUE_LENGTH, other, &format!("{head_dim}, the elements of a key")));
    }
    let mut set = |key: &str, value: Value| fields.insert(key.to_owned(), value);
    set("num_hidden_layers", layers.into());
    set("linear_num_key_heads", key_heads.into());
    set("linear_num_value_heads", (key_heads * values).into());
    set("linear_key_head_dim", key_dim.into());
    set("linear_value_head_dim", value_dim.into());
    set("linear_conv_kernel_dim", size(keys, CONVOLUTION)?.into());
    let names: BTreeSet<&str> = header.tensors.iter().map(|tensor| tensor.name).collect();
    let is_linear = |layer: u64| names.contains(format!("blk.{layer}.ssm_out.weight").as_str());
    // The number of layers is not trusted, but a file cannot have more layers than tensors.
    let kinds = (0..layers.min(header.tensors.len() as u64))
        .map(|layer| if is_linear(layer) { "linear_attention" } else { "full_attention" });
    set("layer_types", kinds.collect());
    for (theirs, ours) in OF_EXPERTS {
        if let Some(number) = keys.number(theirs)? {
            set(ours, number.into());
        }
    }
    let mut rope = match scaling {
        Some(Value::Object(scaling)) => scaling,
        _ => json!({ "rope_type": "default" }).as_object().cloned().unwrap_or_default(),
    };
    let rotated = keys.required(ROTATED)?;
    rope.insert("rope_theta".to_owned(), theta.into());
    rope.insert("partial_rotary_factor".to_owned(), (rotated as f64 / head_dim as f64).into());
    rope.insert("mrope_interleaved".to_owned(), true.into());
    rope.insert("mrope_section".to_owned(), sections(keys)?.into());
    set("rope_parameters", rope.into());
    Ok(())
}

/// Rotated pairs of each axis of a position. llama.cpp has a fourth axis, which these models do not
/// use.
fn sections(keys: &Keys<'_, '_>) -> Result<Vec<i64>, CheckpointError> {
    let name = keys.name(SECTIONS);
    match keys.settings.required(&name, keys.settings.numbers(&name)?)?[..] {
        [time, height, width] | [time, height, width, 0] => Ok(vec![time, height, width]),
        ref other => Err(keys.refused(SECTIONS, format!("{other:?}"), "three axes")),
    }
}
