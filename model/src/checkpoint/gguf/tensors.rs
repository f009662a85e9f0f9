//! The tensors of a GGUF file under the names of a Hugging Face checkpoint, and their
//! locations in the file.

use std::collections::BTreeMap;

use super::config::Config;
use super::header::{Header, Listed};
use super::rope_factors;
use super::settings::Settings;
use super::storage::{bytes, matrices_type, stored, type_name};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::shard::{StoredTensor, Unread};
use crate::checkpoint::stored::{Stored, TensorType};

/// Names of tensors outside the layers, in GGUF and in Hugging Face checkpoints.
const OUTSIDE: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names of tensors within a layer, in GGUF and in Hugging Face checkpoints.
const INSIDE: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    (QUERIES, "self_attn.q_proj"),
    (KEYS, "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
const QUERIES: &str = "attn_q";
const KEYS: &str = "attn_k";

/// All tensors of a file of `file_bytes` bytes, except the rotary divisors, which become
/// part of the configuration.
pub(super) fn places(
    settings: &Settings<'_>,
    header: &Header<'_>,
    file_bytes: usize,
    config: &Config,
) -> Result<BTreeMap<String, StoredTensor>, CheckpointError> {
    let damaged = |reason| CheckpointError::Header { file: settings.file.to_owned(), reason };
    let read = matrices_type(header);
    let (mut places, mut ends) = (BTreeMap::new(), Vec::new());
    for tensor in header.tensors.iter().filter(|tensor| tensor.name != rope_factors::TENSOR) {
        let bytes = bytes(tensor, header, file_bytes).map_err(damaged)?;
        ends.push((bytes.start, bytes.end, tensor.name));
        let paired_heads = paired_heads(tensor, config).map_err(damaged)?;
        let stored = stored(tensor.kind).map(|stored| (stored, dtype(stored, tensor, read)));
        let stored = stored.ok_or_else(|| Unread::Blocks(type_name(tensor.kind)));
        let place = StoredTensor { stored, shape: tensor.shape.clone(), paired_heads, bytes };
        if places.insert(translated(tensor.name), place).is_some() {
            return Err(damaged(format!("it has the tensor {} twice", tensor.name)));
        }
    }
    ends.sort_unstable();
    match ends.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(damaged(format!("the tensors {} and {} overlap", pair[0].2, pair[1].2))),
        None => Ok(places),
    }
}

/// The type that a tensor is read as. Vectors keep their type, because they are never fused with
/// vectors of another type.
fn dtype(stored: Stored, tensor: &Listed<'_>, matrices: TensorType) -> TensorType {
    match stored {
        Stored::Plain(own) if tensor.shape.len() == 1 => own,
        _ => matrices,
    }
}

/// Number of heads of a query or key matrix, if the architecture has paired rows; 0
/// for every other tensor.
fn paired_heads(tensor: &Listed<'_>, config: &Config) -> Result<usize, String> {
    let heads = match part(tensor.name) {
        Some(QUERIES) => config.heads,
        Some(KEYS) => config.kv_heads,
        _ => return Ok(0),
    };
    match config.architecture.has_paired_rows {
        false => Ok(0),
        true if heads > 0 && tensor.shape[0].is_multiple_of(2 * heads) => Ok(heads),
        true => Err(format!("the {} rows of {} do not form pairs in {heads} heads", tensor.shape[0], tensor.name)),
    }
}

/// The part of a tensor name within a layer, without the layer and the suffix.
fn part(name: &str) -> Option<&str> {
    let (_, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some(part.rsplit_once('.')?.0)
}

/// The tensor's name in a Hugging Face checkpoint. An unknown name is not changed, and
/// no layer claims it.
fn translated(name: &str) -> String {
    let within = || {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (part, suffix) = rest.rsplit_once('.')?;
        let (_, ours) = INSIDE.iter().find(|(theirs, _)| *theirs == part)?;
        Some(format!("model.layers.{layer}.{ours}.{suffix}"))
    };
    let outside = || {
        let (part, suffix) = name.rsplit_once('.')?;
        let (_, ours) = OUTSIDE.iter().find(|(theirs, _)| *theirs == part)?;
        Some(format!("{ours}.{suffix}"))
    };
    within().or_else(outside).unwrap_or_else(|| name.to_owned())
}
