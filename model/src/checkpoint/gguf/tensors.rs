//! The tensors of a GGUF file under the names of a Hugging Face checkpoint, and their
//! locations in the file.

use std::collections::BTreeMap;
use std::ops::Range;

use super::config::Config;
use super::header::{Header, TensorEntry};
use super::hybrid::DeltaHeads;
use super::rope_factors;
use super::settings::{GgufLayers, Settings};
use super::storage::{bytes, matrices_type, stored, type_name};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::shard::{Reading, StoredTensor, UnsupportedStorage};
use crate::checkpoint::stored::{Stored, TensorType};
use crate::checkpoint::tensor_info::{Change, ElementOrder, Tiling};

/// Names of tensors outside the layers, in GGUF and in Hugging Face checkpoints. The names of the
/// embedding and of the last norm start with the prefix of the decoder.
const OUTSIDE: [(&str, &str); 3] = [("token_embd", "embed_tokens"), (LAST_NORM, "norm"), ("output", "lm_head")];

/// Names of tensors within a layer, in GGUF and in Hugging Face checkpoints.
const INSIDE: [(&str, &str); 24] = [
    ("attn_norm", "input_layernorm"),
    (QUERIES, "self_attn.q_proj"),
    (KEYS, "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    (SHARED_GATE, "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];
/// Names of tensors outside the layers of Gemma, which take precedence over the other names.
const OUTSIDE_GEMMA: [(&str, &str); 3] = [
    ("per_layer_token_embd", "embed_tokens_per_layer"),
    ("per_layer_model_proj", "per_layer_model_projection"),
    ("per_layer_proj_norm", "per_layer_projection_norm"),
];

/// Names of tensors within a layer of Gemma, which take precedence over the other names.
const INSIDE_GEMMA: [(&str, &str); 9] = [
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    ("post_norm", "post_per_layer_input_norm"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("ffn_gate_inp", "router.proj"),
];

/// Tensors within a layer of Gemma whose names in Hugging Face checkpoints have no suffix: the name and
/// the suffix in GGUF, and the other name.
const WITHOUT_SUFFIX: [(&str, &str, &str); 3] = [
    ("layer_output_scale", "weight", "layer_scalar"),
    ("ffn_gate_inp", "scale", "router.scale"),
    ("ffn_down_exps", "scale", "router.per_expert_scale"),
];
const QUERIES: &str = "attn_q";
const KEYS: &str = "attn_k";
const SHARED_GATE: &str = "ffn_gate_inp_shexp";
/// The only tensor whose name has no suffix.
const DECAY: &str = "ssm_a";
const LAST_NORM: &str = "output_norm";

/// Tensors with the matrices of all experts of a layer, and the projections of each expert in them.
const EXPERTS: [(&str, &[&str]); 4] = [
    ("ffn_gate_exps", &["gate_proj"]),
    ("ffn_up_exps", &["up_proj"]),
    ("ffn_down_exps", &["down_proj"]),
    ("ffn_gate_up_exps", &["gate_proj", "up_proj"]),
];

/// Maximum number of experts of a layer, more than any real file has.
const EXPERTS_MAX: usize = 1 << 12;

/// All tensors of `file`, whose bytes are `content`. The rotary divisors are left out, because they
/// become part of the configuration. The layers that draft tokens are also left out. `decoder` is
/// the prefix of the decoder's names.
pub(super) fn stored_tensors(
    file: &str,
    header: &Header<'_>,
    content: &[u8],
    config: &Config,
    decoder: &str,
) -> Result<BTreeMap<String, StoredTensor>, CheckpointError> {
    let damaged = |reason| CheckpointError::Header { file: file.to_owned(), reason };
    let mut table = TensorTable::new(header, content.len());
    for tensor in header.tensors.iter().filter(|tensor| tensor.name != rope_factors::TENSOR) {
        let mut stored_tensor = table.plain(tensor).map_err(damaged)?;
        let name = Name::of(tensor.name);
        if name.layer.is_some_and(|layer| layer >= config.layers) {
            continue;
        }
        let is_matrix = name.suffix == Some("weight");
        if let Some((_, projections)) = EXPERTS.iter().find(|(part, _)| is_matrix && *part == name.part) {
            let layer = name.layer.unwrap_or(0);
            let place = if is_gemma(config) { "experts" } else { "mlp.experts" };
            for (name, stored_tensor) in of_each_expert(&stored_tensor, projections).map_err(damaged)? {
                table.insert(format!("{decoder}.layers.{layer}.{place}.{name}"), stored_tensor).map_err(damaged)?;
            }
            continue;
        }
        stored_tensor.reading = reading(tensor, name.part, config).map_err(damaged)?;
        if stored_tensor.reading.change == Change::LogOfNegative {
            check_rates(&Settings { file, values: &header.settings }, tensor, &content[stored_tensor.bytes.clone()])?;
        }
        if stored_tensor.reading.change != Change::Unchanged {
            // Changes are computed in f32.
            stored_tensor.stored = stored_tensor.stored.map(|(stored, _)| (stored, TensorType::F32));
        }
        if name.part == SHARED_GATE && tensor.shape.len() == 1 {
            stored_tensor.shape.insert(0, 1);
        }
        table
            .insert(name.translated(decoder, is_gemma(config)).unwrap_or_else(|| tensor.name.to_owned()), stored_tensor)
            .map_err(damaged)?;
    }
    table.finish().map_err(damaged)
}

fn is_gemma(config: &Config) -> bool {
    matches!(config.architecture.layers, GgufLayers::Gemma3 | GgufLayers::Gemma4)
}

/// The locations of a file's tensors. No two tensors may overlap.
pub(super) struct TensorTable<'h> {
    header: &'h Header<'h>,
    file_bytes: usize,
    matrices: TensorType,
    tensors: BTreeMap<String, StoredTensor>,
    ranges: Vec<(Range<usize>, &'h str)>,
}

impl<'h> TensorTable<'h> {
    pub fn new(header: &'h Header<'h>, file_bytes: usize) -> Self {
        let matrices = matrices_type(header);
        TensorTable { header, file_bytes, matrices, tensors: BTreeMap::new(), ranges: Vec::new() }
    }

    /// The location of a tensor whose elements are read unchanged.
    pub fn plain(&mut self, tensor: &TensorEntry<'h>) -> Result<StoredTensor, String> {
        let bytes = bytes(tensor, self.header, self.file_bytes)?;
        self.ranges.push((bytes.clone(), tensor.name));
        let stored = stored(tensor.kind).map(|stored| (stored, dtype(stored, tensor, self.matrices)));
        let stored = stored.ok_or_else(|| UnsupportedStorage::Blocks(type_name(tensor.kind)));
        Ok(StoredTensor { stored, shape: tensor.shape.clone(), bytes, reading: Reading::default() })
    }

    pub fn insert(&mut self, name: String, stored_tensor: StoredTensor) -> Result<(), String> {
        match self.tensors.entry(name) {
            std::collections::btree_map::Entry::Occupied(entry) => {
                Err(format!("it has the tensor {} twice", entry.key()))
            }
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(stored_tensor);
                Ok(())
            }
        }
    }

    pub fn finish(mut self) -> Result<BTreeMap<String, StoredTensor>, String> {
        self.ranges.sort_unstable_by_key(|(range, name)| (range.start, range.end, *name));
        match self.ranges.windows(2).find(|pair| pair[0].0.end > pair[1].0.start) {
            Some(pair) => Err(format!("the tensors {} and {} overlap", pair[0].1, pair[1].1)),
            None => Ok(self.tensors),
        }
    }
}

/// The type that a tensor is read as. Vectors keep their type, because they are never fused with
/// vectors of another type.
fn dtype(stored: Stored, tensor: &TensorEntry<'_>, matrices: TensorType) -> TensorType {
    match stored {
        Stored::Plain(own) if tensor.shape.len() == 1 => own,
        _ => matrices,
    }
}

/// The conversion of a tensor from the file's form to the model's form.
fn reading(tensor: &TensorEntry<'_>, part: &str, config: &Config) -> Result<Reading, String> {
    let mut reading = Reading::default();
    if config.architecture.layers == GgufLayers::PairedAttention {
        let heads = match part {
            QUERIES => config.heads,
            KEYS => config.kv_heads,
            _ => return Ok(reading),
        };
        if heads == 0 || !tensor.shape[0].is_multiple_of(2 * heads) {
            return Err(format!("the {} rows of {} do not form pairs in {heads} heads", tensor.shape[0], tensor.name));
        }
        reading.order = ElementOrder::PairedRows(tensor.shape[0] / heads);
    }
    let is_centered = config.delta.is_some() || config.architecture.layers == GgufLayers::Gemma3;
    reading.change = match part {
        DECAY => Change::LogOfNegative,
        "attn_norm"
        | "post_attention_norm"
        | "ffn_norm"
        | "post_ffw_norm"
        | "attn_q_norm"
        | "attn_k_norm"
        | LAST_NORM
            if is_centered =>
        {
            Change::MinusOne
        }
        _ => Change::Unchanged,
    };
    let Some(heads) = config.delta else { return Ok(reading) };
    reading.order = order(part, heads);
    let (axis, tiling) = match reading.order {
        ElementOrder::TiledRows(tiling) => (tensor.shape.first(), tiling),
        ElementOrder::TiledColumns(tiling) => (tensor.shape.get(1), tiling),
        _ => return Ok(reading),
    };
    match axis.filter(|extent| **extent == tiling.end()) {
        Some(_) => Ok(reading),
        None => {
            let (name, heads, end) = (tensor.name, heads.keys * heads.values, tiling.end());
            Err(format!("the tensor {name} has the shape {:?}, but {heads} value heads need {end}", tensor.shape))
        }
    }
}

/// Refuses rates of decay for which [`Change::LogOfNegative`] is not finite. Types other than F32
/// are also refused, because llama.cpp stores vectors as F32.
fn check_rates(settings: &Settings<'_>, tensor: &TensorEntry<'_>, bytes: &[u8]) -> Result<(), CheckpointError> {
    if stored(tensor.kind) != Some(Stored::Plain(TensorType::F32)) {
        return Err(settings.refused(tensor.name, type_name(tensor.kind), "F32"));
    }
    let mut rates = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    match rates.find(|rate| !(rate.is_finite() && *rate < 0.0)) {
        Some(rate) => Err(settings.refused(tensor.name, rate, "finite numbers below 0")),
        None => Ok(()),
    }
}

/// The order of the value heads in the tensors of a gated delta net.
fn order(part: &str, heads: DeltaHeads) -> ElementOrder {
    let DeltaHeads { keys, values, key_dim, value_dim } = heads;
    let tiling = |before, width| Tiling { before, key_heads: keys, values, width };
    match part {
        DECAY | "ssm_dt" | "ssm_alpha" | "ssm_beta" => ElementOrder::TiledRows(tiling(0, 1)),
        "attn_gate" => ElementOrder::TiledRows(tiling(0, value_dim)),
        "attn_qkv" | "ssm_conv1d" => ElementOrder::TiledRows(tiling(2 * keys * key_dim, value_dim)),
        "ssm_out" => ElementOrder::TiledColumns(tiling(0, value_dim)),
        _ => ElementOrder::Model,
    }
}

/// The projections of each expert in a tensor `[experts, rows of all projections, columns]`, by
/// their names in Hugging Face checkpoints.
fn of_each_expert(whole: &StoredTensor, projections: &[&str]) -> Result<Vec<(String, StoredTensor)>, String> {
    let count = projections.len();
    let &[experts, rows, columns] = whole.shape.as_slice() else {
        return Err(format!("experts have the shape {:?}; expected three axes", whole.shape));
    };
    if experts > EXPERTS_MAX {
        return Err(format!("a layer has {experts} experts; the limit is {EXPERTS_MAX}"));
    }
    if !rows.is_multiple_of(count) {
        return Err(format!("the {rows} rows of an expert cannot be divided into {count} projections"));
    }
    let bytes = whole.bytes.len() / (experts * count);
    let part = |at: usize| {
        let start = whole.bytes.start + at * bytes;
        let shape = vec![rows / count, columns];
        let name = format!("{}.{}.weight", at / count, projections[at % count]);
        (name, StoredTensor { shape, bytes: start..start + bytes, ..whole.clone() })
    };
    Ok((0..experts * count).map(part).collect())
}

/// The parts of a tensor's name.
struct Name<'n> {
    layer: Option<u64>,
    part: &'n str,
    /// `weight` or `bias`; `None` if the name has no suffix.
    suffix: Option<&'n str>,
}

impl<'n> Name<'n> {
    fn of(name: &'n str) -> Self {
        let within = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let within = within.and_then(|(layer, rest)| Some((Some(layer.parse().ok()?), rest)));
        let (layer, rest) = within.unwrap_or((None, name));
        let (part, suffix) = rest.rsplit_once('.').map_or((rest, None), |(part, suffix)| (part, Some(suffix)));
        Name { layer, part, suffix }
    }

    /// The tensor's name in a Hugging Face checkpoint; `None` if it is unknown. No layer claims an
    /// unknown name.
    fn translated(&self, decoder: &str, is_gemma: bool) -> Option<String> {
        let own = |(theirs, suffix, _): &&(&str, &str, &str)| *theirs == self.part && Some(*suffix) == self.suffix;
        if let Some((_, _, ours)) = WITHOUT_SUFFIX.iter().find(own).filter(|_| is_gemma) {
            return Some(format!("{decoder}.layers.{}.{ours}", self.layer?));
        }
        let find = |of_gemma: &[(&str, &'static str)], others: &[(&str, &'static str)]| {
            let of_gemma = if is_gemma { of_gemma } else { &[] };
            Some(of_gemma.iter().chain(others).find(|(theirs, _)| *theirs == self.part)?.1)
        };
        match (self.layer, self.suffix) {
            (Some(layer), None) if self.part == DECAY => Some(format!("{decoder}.layers.{layer}.linear_attn.A_log")),
            (Some(layer), Some("bias")) if self.part == "ssm_dt" => {
                Some(format!("{decoder}.layers.{layer}.linear_attn.dt_bias"))
            }
            (Some(layer), Some(suffix)) => {
                Some(format!("{decoder}.layers.{layer}.{}.{suffix}", find(&INSIDE_GEMMA, &INSIDE)?))
            }
            (None, Some(suffix)) => match find(&OUTSIDE_GEMMA, &OUTSIDE)? {
                head @ "lm_head" => Some(format!("{head}.{suffix}")),
                ours => Some(format!("{decoder}.{ours}.{suffix}")),
            },
            (_, None) => None,
        }
    }
}
