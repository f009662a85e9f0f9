//! The vision encoder of a model, which llama.cpp writes to a second file: `mmproj-*.gguf` in the
//! folder of the model (`conversion/qwen3vl.py`, `Qwen3VLVisionModel`).

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::config::Config;
use super::header::{Header, List, Setting};
use super::settings::{GgufVision, Settings};
use super::tensors::TensorTable;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::shard::{Content, Shard, StoredTensor};
use crate::checkpoint::tensor_info::ElementOrder;

/// The part of a file's name that marks a vision encoder.
const MARK: &str = "mmproj";

const PROJECTOR: &str = "clip.projector_type";
const WIDTH: &str = "clip.vision.projection_dim";
const EPSILON: &str = "clip.vision.attention.layer_norm_epsilon";
const PARTS: &str = "clip.vision.is_deepstack_layers";
const PATCH: &str = "clip.vision.patch_size";

/// The epsilon of the encoder's norms in all released models.
const EPSILON_SUPPORTED: f32 = 1e-6;

/// Settings that have an equivalent key in `vision_config`.
const NAMED: [(&str, &str); 7] = [
    ("clip.vision.block_count", "depth"),
    ("clip.vision.embedding_length", "hidden_size"),
    ("clip.vision.feed_forward_length", "intermediate_size"),
    ("clip.vision.attention.head_count", "num_heads"),
    (PATCH, "patch_size"),
    ("clip.vision.spatial_merge_size", "spatial_merge_size"),
    (WIDTH, "out_hidden_size"),
];

/// Settings that have an equivalent key in the settings of both processors.
const OF_PIXELS: [(&str, &str); 2] = [("clip.vision.image_mean", "image_mean"), ("clip.vision.image_std", "image_std")];

/// Limits of a picture's pixels, with their keys in `size`.
const LIMITS: [(&str, &str); 2] =
    [("clip.vision.image_min_pixels", "shortest_edge"), ("clip.vision.image_max_pixels", "longest_edge")];

/// Names of tensors outside the layers, in GGUF and in Hugging Face checkpoints.
const OUTSIDE: [(&str, &str); 5] = [
    (PATCHES, "patch_embed.proj"),
    (POSITIONS, "pos_embed"),
    ("v.post_ln", "merger.norm"),
    ("mm.0", "merger.linear_fc1"),
    ("mm.2", "merger.linear_fc2"),
];
const PATCHES: &str = "v.patch_embd";
/// The kernel for the second frame of a patch. Hugging Face checkpoints have one kernel for both
/// frames.
const SECOND_FRAME: &str = "v.patch_embd.weight.1";
const POSITIONS: &str = "v.position_embd";

/// Names of tensors within a layer, in GGUF and in Hugging Face checkpoints.
const INSIDE: [(&str, &str); 6] = [
    ("ln1", "norm1"),
    ("ln2", "norm2"),
    ("attn_qkv", "attn.qkv"),
    ("attn_out", "attn.proj"),
    ("ffn_up", "mlp.linear_fc1"),
    ("ffn_down", "mlp.linear_fc2"),
];

/// The settings and tensors of a vision encoder.
pub(super) struct Encoder {
    /// The name of its file.
    pub file: String,
    /// The object `vision_config` of a `config.json`.
    pub config: Value,
    /// Settings that replace the same settings of the released processors.
    pub pixels: Value,
    /// The limits of a picture's pixels, by their keys in `size`.
    pub limits: Value,
    pub shard: Shard,
}

/// The vision encoder in the folder of a model.
#[derive(Default)]
pub(super) struct FoundEncoder {
    /// `None` if no file has a vision encoder that fits the model.
    pub encoder: Option<Encoder>,
    /// The reason why each file was skipped. Empty if an encoder was found, because other files do
    /// not matter then.
    pub skipped_encoders: Vec<CheckpointError>,
}

impl FoundEncoder {
    /// Looks for the vision encoder of the model whose file is `path`: the file in the same folder
    /// whose name contains `mmproj` and whose encoder fits the model. Other files are skipped
    /// without an error, because the user did not name them. Names of the encoder's tensors start
    /// with `prefix`.
    ///
    /// # Errors
    /// [`CheckpointError::Encoders`] if several files fit; [`CheckpointError::Unreadable`] if the
    /// folder cannot be read.
    pub fn find(path: &Path, vision: &GgufVision, config: &Config, prefix: &str) -> Result<Self, CheckpointError> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let unreadable = |error| CheckpointError::unreadable(&folder.display().to_string(), &error);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
            let lower = name.to_lowercase();
            if lower.contains(MARK) && lower.ends_with(".gguf") && path.file_name() != Some(name.as_ref()) {
                names.push(name);
            }
        }
        names.sort_unstable();
        let (mut fitting, mut skipped_encoders) = (Vec::new(), Vec::new());
        for file in names {
            match Encoder::open(folder, &file, (vision, config), prefix) {
                Ok(encoder) => fitting.extend(encoder),
                Err(reason) => skipped_encoders.push(reason),
            }
        }
        if fitting.len() > 1 {
            let files = fitting.into_iter().map(|encoder| encoder.file).collect();
            return Err(CheckpointError::Encoders { files });
        }
        Ok(match fitting.pop() {
            None => FoundEncoder { encoder: None, skipped_encoders },
            encoder => FoundEncoder { encoder, skipped_encoders: Vec::new() },
        })
    }
}

impl Encoder {
    /// Reads the settings of the encoder in `file`, and locates its tensors. `None` if the file no
    /// longer exists.
    ///
    /// # Errors
    /// [`CheckpointError::Encoder`] if the encoder belongs to another model;
    /// [`CheckpointError::Setting`] for a missing or unsupported setting;
    /// [`CheckpointError::Header`] or [`CheckpointError::Unreadable`].
    fn open(
        folder: &Path,
        file: &str,
        (vision, model): (&GgufVision, &Config),
        prefix: &str,
    ) -> Result<Option<Self>, CheckpointError> {
        let Some(content) = Content::map(&folder.join(file), file)? else { return Ok(None) };
        let damaged = |reason| CheckpointError::Header { file: file.to_owned(), reason };
        let header = Header::read(content.bytes()).map_err(damaged)?;
        let settings = Settings { file, values: &header.settings };
        settings.check("mmproj")?;
        if let Some(reason) = misfit_of(&settings, vision, model)? {
            return Err(CheckpointError::Encoder { file: file.to_owned(), reason });
        }
        let tensors = tensors(&header, content.bytes().len(), prefix).map_err(damaged)?;
        let mut pixels = json!({});
        for (theirs, ours) in OF_PIXELS {
            pixels[ours] = settings.required(theirs, settings.floats(theirs)?)?.into();
        }
        let mut limits = json!({});
        for (theirs, ours) in LIMITS {
            if let Some(number) = settings.number(theirs)? {
                limits[ours] = number.into();
            }
        }
        let config = vision_config(&settings, &header)?;
        let shard = Shard::new(file, content.clone(), header.listing.clone(), tensors);
        Ok(Some(Encoder { file: file.to_owned(), config, pixels, limits, shard }))
    }
}

/// The reason why an encoder does not fit the model; `None` if it fits.
fn misfit_of(settings: &Settings<'_>, vision: &GgufVision, config: &Config) -> Result<Option<String>, CheckpointError> {
    let projector = settings.required(PROJECTOR, settings.text(PROJECTOR)?)?;
    if projector != vision.projector {
        return Ok(Some(format!("{PROJECTOR} is {projector}; the model needs {}", vision.projector)));
    }
    let width = settings.required(WIDTH, settings.number(WIDTH)?)?;
    let hidden = config.hidden;
    Ok((width != hidden).then(|| format!("{WIDTH} is {width}; the model's embedding_length is {hidden}")))
}

fn vision_config(settings: &Settings<'_>, header: &Header<'_>) -> Result<Value, CheckpointError> {
    let mut config = json!({
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [],
    });
    for (theirs, ours) in NAMED {
        config[ours] = settings.required(theirs, settings.number(theirs)?)?.into();
    }
    let epsilon = settings.required(EPSILON, settings.float(EPSILON)?)?;
    if epsilon as f32 != EPSILON_SUPPORTED {
        return Err(settings.refused(EPSILON, epsilon, "1e-6"));
    }
    if let Some(Setting::List(parts)) = settings.get(PARTS)
        && has_true(parts)
    {
        return Err(settings.refused(PARTS, "true for some layers", "false for all layers"));
    }
    let positions = format!("{POSITIONS}.weight");
    let table = header.tensors.iter().find(|tensor| tensor.name == positions);
    config["num_position_embeddings"] = settings.required(&positions, table.map(|table| table.shape[0]))?.into();
    Ok(config)
}

fn has_true(parts: List<'_>) -> bool {
    parts.iter().any(|part| part == Setting::Bool(true))
}

fn tensors(header: &Header<'_>, file_bytes: usize, prefix: &str) -> Result<BTreeMap<String, StoredTensor>, String> {
    let mut table = TensorTable::new(header, file_bytes);
    let second = header.tensors.iter().find(|tensor| tensor.name == SECOND_FRAME);
    let second = second.map(|tensor| table.plain(tensor)).transpose()?;
    for tensor in header.tensors.iter().filter(|tensor| tensor.name != SECOND_FRAME) {
        let mut stored_tensor = table.plain(tensor)?;
        if tensor.name == "v.patch_embd.weight" {
            let second = second.as_ref().ok_or_else(|| format!("it lacks the tensor {SECOND_FRAME}"))?;
            interleave(&mut stored_tensor, second)?;
        }
        table.insert(translated(tensor.name, prefix).unwrap_or_else(|| tensor.name.to_owned()), stored_tensor)?;
    }
    table.finish()
}

/// Combines the kernels `[hidden, channels, rows, columns]` of two frames into
/// `[hidden, channels, 2, rows, columns]`.
fn interleave(first: &mut StoredTensor, second: &StoredTensor) -> Result<(), String> {
    let &[hidden, channels, rows, columns] = first.shape.as_slice() else {
        return Err(format!("{PATCHES} has the shape {:?}; expected four axes", first.shape));
    };
    let elements = rows.saturating_mul(columns);
    match (&first.stored, &second.stored) {
        (Ok((one, _)), Ok((other, _))) if one == other && first.shape == second.shape => {
            // A block of quantized elements must not extend over two channels.
            if !elements.is_multiple_of(one.elements()) {
                return Err(format!("blocks of {PATCHES} have elements of several channels"));
            }
        }
        (Ok(_), Ok(_)) => {
            return Err(format!("{SECOND_FRAME} has another type or shape than the first frame's kernel"));
        }
        _ => return Ok(()),
    }
    first.shape = vec![hidden, channels, 2, rows, columns];
    first.reading.order = ElementOrder::Interleaved(elements);
    first.reading.second = second.bytes.clone();
    Ok(())
}

/// The tensor's name in a Hugging Face checkpoint; `None` if it is unknown.
fn translated(name: &str, prefix: &str) -> Option<String> {
    let find = |names: &[(&str, &'static str)], part: &str| Some(names.iter().find(|(theirs, _)| *theirs == part)?.1);
    let (part, suffix) = name.rsplit_once('.')?;
    Some(match part.strip_prefix("v.blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => format!("{prefix}.blocks.{layer}.{}.{suffix}", find(&INSIDE, part)?),
        None => format!("{prefix}.{}.{suffix}", find(&OUTSIDE, part)?),
    })
}
