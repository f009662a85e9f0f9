//! All tensors of a checkpoint by name, across its shards.

use std::collections::BTreeMap;

use bursar_kernels::{DType, RankShard};
use serde::Deserialize;

use super::checkpoint_files::CheckpointSource;
use super::error::CheckpointError;
use super::pytorch;
use super::random_checkpoint::{RandomCheckpoint, RandomTensor};
use super::shard::Shard;
use super::stored::Stored;
use crate::nearest_names;

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const EXTENSION: &str = ".safetensors";
/// Limit for the number of shards, more than any checkpoint has.
const SHARDS_MAX: usize = 10_000;
// torch's single file of weights, and torch's index of shards.
const PYTORCH: &str = "pytorch_model.bin";
const PYTORCH_INDEX: &str = "pytorch_model.bin.index.json";
/// Number of names that an error about a missing tensor lists.
const NEAREST_MAX: usize = 3;

/// The element types of weights that are supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    BF16,
    F16,
    F32,
    /// FP8 (E4M3), which needs separate scales.
    F8E4M3,
}

impl TensorType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            TensorType::BF16 | TensorType::F16 => 2,
            TensorType::F32 => 4,
            TensorType::F8E4M3 => 1,
        }
    }
}

/// A tensor in its file. Nothing is copied, and the disk is read only when the bytes are accessed.
#[derive(Clone, Copy)]
pub struct TensorInfo<'a> {
    /// The type of the elements after they are read. For files with blocks of quantized elements,
    /// this is the widest type.
    pub dtype: TensorType,
    /// The storage of the elements in the file.
    pub stored: Stored,
    /// The shape, slowest axis first.
    pub shape: &'a [usize],
    /// The stored elements, little-endian, row-major. Not aligned.
    pub bytes: &'a [u8],
    /// Number of heads whose rotary pairs are in adjacent rows; 0 if rows have the
    /// order of the model.
    pub(super) paired_heads: usize,
    /// Bytes between the end of a row and the start of the next row: columns that other ranks read.
    pub(super) gap: usize,
}

impl<'a> TensorInfo<'a> {
    /// Whether `bytes` are the elements in the type and order of the model.
    pub fn is_in_place(&self) -> bool {
        self.stored == Stored::Plain(self.dtype) && self.paired_heads == 0 && self.gap == 0
    }

    /// The given rows and columns of the tensor, as a tensor of `shape`. Rotary heads and quantized
    /// blocks must not be split.
    pub fn part<'b>(&self, rows: RankShard, columns: RankShard, shape: &'b [usize]) -> TensorInfo<'b>
    where
        'a: 'b,
    {
        let pitch = self.bytes.len() / rows.whole;
        let bytes_of = |columns: usize| self.stored.bytes(columns).expect("fewer than the file has");
        let own = bytes_of(columns.count);
        let bytes = match rows.count {
            0 => &[],
            count => &self.bytes[rows.first * pitch + bytes_of(columns.first)..][..(count - 1) * pitch + own],
        };
        let paired_heads = self.paired_heads * rows.count / rows.whole;
        TensorInfo { shape, bytes, paired_heads, gap: pitch - own, ..*self }
    }

    /// The stored bytes of the model's row `row`. [`rows`](Self::rows) defines the rows.
    pub fn row_bytes(&self, row: usize) -> &'a [u8] {
        let pitch = (self.bytes.len() + self.gap) / self.rows().0;
        &self.bytes[self.stored_row(row) * pitch..][..pitch - self.gap]
    }

    /// The number of rows, and the number of elements of each row. A vector is one row, unless its
    /// elements are reordered (`paired_heads`).
    pub fn rows(&self) -> (usize, usize) {
        let rows = self.shape[0];
        match self.shape.len() {
            1 if self.paired_heads == 0 => (1, rows),
            _ => (rows, self.shape[1..].iter().product()),
        }
    }

    /// The index in the file of the model's row `row`. ggml rotates adjacent
    /// elements, so its files have the rows `i` and `i + half` of a head at `2 i` and
    /// `2 i + 1` (transformers 5.17, `modeling_gguf_pytorch_utils.py`).
    pub fn stored_row(&self, row: usize) -> usize {
        if self.paired_heads == 0 {
            return row;
        }
        let of_head = self.shape[0] / self.paired_heads;
        let (head, at) = (row / of_head, row % of_head);
        head * of_head + at % (of_head / 2) * 2 + at / (of_head / 2)
    }
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
    /// Settings for drawing tensors; `None` if there are shards.
    drawn: Option<Drawn>,
}

/// Settings for drawing the tensors of a random checkpoint.
#[derive(Debug)]
struct Drawn {
    seed: u64,
    dtype: DType,
    routing_skew: Option<f32>,
}

/// `model.safetensors.index.json`, or `pytorch_model.bin.index.json`.
#[derive(Deserialize)]
pub(super) struct IndexFile {
    weight_map: BTreeMap<String, String>,
}

impl IndexFile {
    /// # Errors
    /// [`CheckpointError::Malformed`].
    pub fn parse(file: &str, json: &[u8]) -> Result<Self, CheckpointError> {
        serde_json::from_slice(json)
            .map_err(|error| CheckpointError::Malformed { file: file.into(), reason: error.to_string() })
    }

    /// The shards' file names, sorted, without duplicates.
    ///
    /// # Errors
    /// [`CheckpointError::ShardName`]. The index is not trusted: a shard's name must not point to
    /// another folder on this machine or, as part of a URL, on the hub.
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

/// The names of all shards, derived from the name of one shard, such as
/// `model-00001-of-00002.safetensors`. `None` if the name does not have this form.
fn every_shard(file: &str) -> Option<Vec<String>> {
    let (before, count) = file.strip_suffix(EXTENSION)?.rsplit_once("-of-")?;
    let (name, number) = before.rsplit_once('-')?;
    let (width, shards) = (number.len(), count.parse().ok().filter(|shards| (1..=SHARDS_MAX).contains(shards))?);
    Some((1..=shards).map(|shard| format!("{name}-{shard:0width$}-of-{count}{EXTENSION}")).collect())
}

/// Opens a file of one kind; `None` if it does not exist.
type Opener = fn(&CheckpointSource, &str) -> Result<Option<Shard>, CheckpointError>;

impl TensorIndex {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names, or
    /// otherwise the corresponding files of torch. A random checkpoint has no files and provides
    /// any tensor that is requested.
    ///
    /// # Errors
    /// Files are missing or damaged, a shard's name points outside the folder, or the index and the
    /// shards disagree about a tensor.
    pub fn open(source: &CheckpointSource) -> Result<Self, CheckpointError> {
        if let CheckpointSource::Random(random) = source {
            let dtype = source.stored_type()?.unwrap_or(DType::BF16);
            let drawn = Drawn { seed: random.seed(), dtype, routing_skew: random.routing_skew() };
            return Ok(TensorIndex { shards: Vec::new(), places: BTreeMap::new(), drawn: Some(drawn) });
        }
        if let CheckpointSource::Gguf(file) = source {
            return Ok(TensorIndex::of_one(file.shard()));
        }
        // The single file comes first, as in transformers: an index next to it is stale.
        if let Some(shard) = Shard::open(source, SINGLE)? {
            return Ok(TensorIndex::of_one(shard));
        }
        if let Some(json) = source.read(INDEX)? {
            return TensorIndex::open_shards(source, &IndexFile::parse(INDEX, &json)?, Shard::open);
        }
        if let Some(index) = TensorIndex::open_unlisted(source)? {
            return Ok(index);
        }
        if let Some(json) = source.read(PYTORCH_INDEX)? {
            return TensorIndex::open_shards(source, &IndexFile::parse(PYTORCH_INDEX, &json)?, pytorch::open);
        }
        match pytorch::open(source, PYTORCH)? {
            Some(shard) => Ok(TensorIndex::of_one(shard)),
            None => Err(CheckpointError::MissingFile { place: source.place(), file: SINGLE.into() }),
        }
    }

    /// Opens the only tensor file in a folder, with any name, or shards without an index whose
    /// names contain the number of shards. `None` if the folder has neither.
    fn open_unlisted(source: &CheckpointSource) -> Result<Option<Self>, CheckpointError> {
        let files = source.tensor_files()?;
        match (files.iter().find_map(|file| every_shard(file)), files.as_slice()) {
            (Some(shards), _) => TensorIndex::of_shards(source, &shards, Shard::open, |_, _| true).map(Some),
            (None, [file]) => Ok(Shard::open(source, file)?.map(TensorIndex::of_one)),
            (None, _) => Ok(None),
        }
    }

    fn of_one(shard: Shard) -> Self {
        let places = shard.names().map(|name| (name.to_owned(), 0)).collect();
        TensorIndex { shards: vec![shard], places, drawn: None }
    }

    fn open_shards(source: &CheckpointSource, index: &IndexFile, open: Opener) -> Result<Self, CheckpointError> {
        let is_listed = |tensor: &str, file: &str| index.weight_map.get(tensor).is_some_and(|listed| listed == file);
        let whole = TensorIndex::of_shards(source, &index.shards()?, open, is_listed)?;
        match index.weight_map.iter().find(|(tensor, _)| !whole.contains(tensor)) {
            Some((tensor, file)) => Err(CheckpointError::Inconsistent { tensor: tensor.clone(), file: file.clone() }),
            None => Ok(whole),
        }
    }

    /// Opens these files. Each tensor must belong to its file according to `belongs`, and must not
    /// be in any other file.
    fn of_shards(
        source: &CheckpointSource,
        files: &[String],
        open: Opener,
        belongs: impl Fn(&str, &str) -> bool,
    ) -> Result<Self, CheckpointError> {
        let (mut shards, mut places) = (Vec::new(), BTreeMap::new());
        for file in files {
            let shard = open(source, file)?.ok_or_else(|| CheckpointError::MissingShard {
                place: source.place(),
                shard: file.clone(),
                shards: files.len(),
            })?;
            for tensor in shard.names().map(str::to_owned) {
                if !belongs(&tensor, file) || places.contains_key(&tensor) {
                    return Err(CheckpointError::Inconsistent { tensor, file: file.clone() });
                }
                places.insert(tensor, shards.len());
            }
            shards.push(shard);
        }
        Ok(TensorIndex { shards, places, drawn: None })
    }

    /// A tensor by its name.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`] with the nearest names; [`CheckpointError::TensorType`];
    /// [`CheckpointError::BlockType`].
    pub fn tensor(&self, name: &str) -> Result<TensorInfo<'_>, CheckpointError> {
        let missing = || CheckpointError::MissingTensor { tensor: name.to_owned(), nearest: self.nearest(name) };
        let shard = &self.shards[*self.places.get(name).ok_or_else(missing)?];
        shard.tensor(name).ok_or_else(missing)?
    }

    /// The type and the content of the tensor `name` with `axes` axes, if tensors
    /// are drawn at random.
    pub fn random(&self, name: &str, axes: usize) -> Option<(DType, RandomTensor)> {
        let drawn = self.drawn.as_ref()?;
        Some((drawn.dtype, RandomCheckpoint::tensor(drawn.seed, name, axes)))
    }

    /// The exponent of Zipf's law by which experts are chosen; `None` if tensors are not random or
    /// experts are chosen evenly.
    pub fn routing_skew(&self) -> Option<f32> {
        self.drawn.as_ref()?.routing_skew
    }

    /// Whether a shard has a tensor with this name.
    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// The sorted names of all tensors.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// The files, sorted by name.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    fn nearest(&self, name: &str) -> Vec<String> {
        nearest_names(name, self.names(), NEAREST_MAX).into_iter().map(str::to_owned).collect()
    }
}
