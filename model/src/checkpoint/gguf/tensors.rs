//! The tensors of a GGUF file under the names of a Hugging Face checkpoint, and their
//! locations in the file.

use std::collections::BTreeMap;
use std::ops::Range;

use super::config::Config;
use super::header::{Header, Listed};
use super::{Settings, rope_factors};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::shard::{StoredTensor, Unread};
use crate::checkpoint::stored::{BlockType, Stored};
use crate::checkpoint::tensors::TensorType;

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

/// The byte range of a tensor in the file. It is empty for an unknown type, whose
/// size is not known.
pub(super) fn bytes(tensor: &Listed<'_>, header: &Header<'_>, file_bytes: usize) -> Result<Range<usize>, String> {
    let Listed { name, shape, offset, .. } = tensor;
    let start = usize::try_from(*offset).ok().and_then(|offset| header.data.checked_add(offset));
    let beyond = || format!("the tensor {name} reaches beyond the {file_bytes} bytes of the file");
    let start = start.filter(|start| *start <= file_bytes).ok_or_else(beyond)?;
    if offset % header.alignment != 0 {
        return Err(format!("the tensor {name} is at {offset}, not a multiple of {}", header.alignment));
    }
    let Some(stored) = stored(tensor.kind) else { return Ok(start..start) };
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(stored.elements()) {
        let (kind, block) = (type_name(tensor.kind), stored.elements());
        return Err(format!("the tensor {name} has rows of {row} elements, and blocks of {kind} have {block}"));
    }
    if shape.len() == 1 && stored.elements() > 1 {
        return Err(format!("the tensor {name} is a vector in blocks of {}", type_name(tensor.kind)));
    }
    let elements = shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent));
    let end = elements.and_then(|elements| stored.bytes(elements)).and_then(|bytes| start.checked_add(bytes));
    Ok(start..end.filter(|end| *end <= file_bytes).ok_or_else(beyond)?)
}

/// The type that matrices are read as. It is the same for all matrices of a file, because matrices
/// that are fused later must have the same type.
pub(super) fn matrices_type(header: &Header<'_>) -> TensorType {
    let mut matrices = header.tensors.iter().filter(|tensor| tensor.shape.len() > 1).map(|tensor| stored(tensor.kind));
    match matrices.next() {
        Some(Some(Stored::Plain(first))) if matrices.all(|other| other == Some(Stored::Plain(first))) => first,
        _ => TensorType::F32,
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

/// The storage for ggml's number of a type; `None` if the type is not supported.
pub(super) fn stored(kind: u32) -> Option<Stored> {
    Some(match kind {
        0 => Stored::Plain(TensorType::F32),
        1 => Stored::Plain(TensorType::F16),
        30 => Stored::Plain(TensorType::BF16),
        2 => Stored::Blocks(BlockType::Q4_0),
        3 => Stored::Blocks(BlockType::Q4_1),
        6 => Stored::Blocks(BlockType::Q5_0),
        7 => Stored::Blocks(BlockType::Q5_1),
        8 => Stored::Blocks(BlockType::Q8_0),
        12 => Stored::Blocks(BlockType::Q4_K),
        13 => Stored::Blocks(BlockType::Q5_K),
        14 => Stored::Blocks(BlockType::Q6_K),
        _ => return None,
    })
}

/// ggml's names of the types that are not supported: ggml-org/ggml, `include/ggml.h`, `ggml_type`.
const UNREAD: [(u32, &str); 22] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

fn type_name(kind: u32) -> String {
    let unread = || UNREAD.iter().find(|(known, _)| *known == kind).map(|(_, name)| (*name).to_owned());
    match stored(kind) {
        Some(Stored::Plain(dtype)) => format!("{dtype:?}"),
        Some(Stored::Blocks(kind)) => format!("{kind:?}"),
        None => unread().unwrap_or_else(|| format!("{kind}, which is unknown")),
    }
}
