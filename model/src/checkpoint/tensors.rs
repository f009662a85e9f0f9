//! All tensors of a checkpoint by name, across its shards.

use std::collections::BTreeMap;

use bursar_kernels::DType;
use safetensors::Dtype;
use serde::Deserialize;

use super::checkpoint_files::CheckpointSource;
use super::error::CheckpointError;
use super::random_checkpoint::{RandomCheckpoint, RandomTensor};
use super::shard::Shard;

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// How many names an error about a missing tensor shows.
const NEAREST_MAX: usize = 3;

/// The element types of weights that are supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// bfloat16.
    BF16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl TensorType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            TensorType::BF16 | TensorType::F16 => 2,
            TensorType::F32 => 4,
        }
    }
}

/// A tensor in place. Nothing is copied, and the disk is read only when the bytes are.
#[derive(Clone, Copy)]
pub struct TensorInfo<'a> {
    /// The type of the elements.
    pub dtype: TensorType,
    /// Its shape, slowest axis first.
    pub shape: &'a [usize],
    /// Its elements, little-endian, row-major, `product(shape) x dtype.bytes()` of them. Not aligned.
    pub bytes: &'a [u8],
}

impl std::fmt::Debug for TensorInfo<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:?}{:?}", self.dtype, self.shape)
    }
}

/// The index over all shards, or a seed from which any requested tensor is drawn.
#[derive(Debug)]
pub struct TensorIndex {
    shards: Vec<Shard>,
    places: BTreeMap<String, usize>, // indices in `shards`
    /// The seed and the element type of drawn tensors; `None` if there are shards.
    drawn: Option<(u64, DType)>,
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
pub(super) struct IndexFile {
    weight_map: BTreeMap<String, String>,
}

impl IndexFile {
    /// # Errors
    /// [`CheckpointError::Malformed`].
    pub fn parse(json: &[u8]) -> Result<Self, CheckpointError> {
        serde_json::from_slice(json)
            .map_err(|error| CheckpointError::Malformed { file: INDEX.into(), reason: error.to_string() })
    }

    /// The shards' file names, sorted, each once.
    ///
    /// # Errors
    /// [`CheckpointError::ShardName`]. The index is not trusted: a shard's name must not point elsewhere on this
    /// machine or, as part of an address, elsewhere on the hub.
    pub fn shards(&self) -> Result<Vec<String>, CheckpointError> {
        let is_plain = |file: &str| {
            !file.is_empty()
                && !file.starts_with('.')
                && file.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        let mut files: Vec<String> = self.weight_map.values().cloned().collect();
        files.sort_unstable();
        files.dedup();
        match files.iter().find(|file| !is_plain(file)) {
            Some(shard) => Err(CheckpointError::ShardName { shard: shard.clone() }),
            None => Ok(files),
        }
    }
}

impl TensorIndex {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names. A random checkpoint has
    /// neither, and has any tensor that is requested.
    ///
    /// # Errors
    /// Files are missing or damaged, a shard's name leaves the folder, or index and shards disagree about a tensor.
    pub fn open(source: &CheckpointSource) -> Result<Self, CheckpointError> {
        if let CheckpointSource::Random(random) = source {
            let drawn = Some((random.seed(), source.stored_type()?.unwrap_or(DType::BF16)));
            return Ok(TensorIndex { shards: Vec::new(), places: BTreeMap::new(), drawn });
        }
        if let Some(json) = source.read(INDEX)? {
            return TensorIndex::open_shards(source, &IndexFile::parse(&json)?);
        }
        let shard = Shard::open(source, SINGLE)?
            .ok_or_else(|| CheckpointError::MissingFile { place: source.place(), file: SINGLE.into() })?;
        let places = shard.metadata().offset_keys().into_iter().map(|name| (name, 0)).collect();
        Ok(TensorIndex { shards: vec![shard], places, drawn: None })
    }

    fn open_shards(source: &CheckpointSource, index: &IndexFile) -> Result<Self, CheckpointError> {
        let files = index.shards()?;
        let (mut shards, mut places) = (Vec::new(), BTreeMap::new());
        for file in &files {
            let shard = Shard::open(source, file)?.ok_or_else(|| CheckpointError::MissingShard {
                place: source.place(),
                shard: file.clone(),
                shards: files.len(),
            })?;
            for tensor in shard.metadata().offset_keys() {
                if index.weight_map.get(&tensor) != Some(file) {
                    return Err(CheckpointError::Inconsistent { tensor, file: file.clone() });
                }
                places.insert(tensor, shards.len());
            }
            shards.push(shard);
        }
        match index.weight_map.iter().find(|(tensor, _)| !places.contains_key(*tensor)) {
            Some((tensor, file)) => Err(CheckpointError::Inconsistent { tensor: tensor.clone(), file: file.clone() }),
            None => Ok(TensorIndex { shards, places, drawn: None }),
        }
    }

    /// A tensor by its name.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`] with the nearest names; [`CheckpointError::TensorType`].
    pub fn tensor(&self, name: &str) -> Result<TensorInfo<'_>, CheckpointError> {
        let missing = || CheckpointError::MissingTensor { tensor: name.to_owned(), nearest: self.nearest(name) };
        let shard = &self.shards[*self.places.get(name).ok_or_else(missing)?];
        let info = shard.metadata().info(name).ok_or_else(missing)?;
        let dtype = match info.dtype {
            Dtype::BF16 => TensorType::BF16,
            Dtype::F16 => TensorType::F16,
            Dtype::F32 => TensorType::F32,
            other => {
                return Err(CheckpointError::TensorType { tensor: name.to_owned(), found: format!("{other:?}") });
            }
        };
        let (start, end) = info.data_offsets;
        Ok(TensorInfo { dtype, shape: &info.shape, bytes: shard.data(start..end) })
    }

    /// The type and the content of the tensor `name` with `axes` axes, if tensors are drawn at random.
    pub fn random(&self, name: &str, axes: usize) -> Option<(DType, RandomTensor)> {
        self.drawn.map(|(seed, dtype)| (dtype, RandomCheckpoint::tensor(seed, name, axes)))
    }

    /// Whether a shard has a tensor with this name.
    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// All names, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// The files, sorted by name.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    fn nearest(&self, name: &str) -> Vec<String> {
        let mut distances: Vec<_> = self.names().map(|known| (edit_distance(name, known), known)).collect();
        distances.sort_unstable();
        distances.into_iter().take(NEAREST_MAX).map(|(_, known)| known.to_owned()).collect()
    }
}

/// Levenshtein's distance in bytes, one row at a time.
fn edit_distance(one: &str, other: &str) -> usize {
    let other = other.as_bytes();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, byte) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &known) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(byte != known);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}
