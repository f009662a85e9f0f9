//! All tensors of a checkpoint by name, across its shards.

use std::collections::BTreeMap;

use bursar_kernels::DType;

use super::checkpoint_source::CheckpointSource;
use super::error::CheckpointError;
use super::layout::{INDEX, IndexFile, PYTORCH, PYTORCH_INDEX, SINGLE, every_shard};
use super::pytorch;
use super::random_tensor::RandomTensor;
use super::shard::{Content, Shard};
use super::tensor_info::TensorInfo;
use crate::nearest_names;

/// Maximum number of similar names that an error about a missing tensor lists.
const NEAREST_MAX: usize = 3;

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

/// Finds the tensors of a file of one format.
type Format = fn(&str, Content) -> Result<Shard, CheckpointError>;

/// Opens a file of weights. `None` if there is no such file, or only a Git LFS pointer.
fn open(source: &CheckpointSource, file: &str, format: Format) -> Result<Option<Shard>, CheckpointError> {
    source.map(file)?.map(|content| format(file, content)).transpose()
}

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
            return Ok(TensorIndex::of_distinct(file.shards().to_vec()));
        }
        // The single file comes first, as in transformers: an index next to it is stale.
        if let Some(shard) = open(source, SINGLE, Shard::of_safetensors)? {
            return Ok(TensorIndex::of_one(shard));
        }
        if let Some(json) = source.read(INDEX)? {
            return TensorIndex::open_shards(source, &IndexFile::parse(INDEX, &json)?, Shard::of_safetensors);
        }
        if let Some(index) = TensorIndex::open_unlisted(source)? {
            return Ok(index);
        }
        if let Some(json) = source.read(PYTORCH_INDEX)? {
            return TensorIndex::open_shards(source, &IndexFile::parse(PYTORCH_INDEX, &json)?, pytorch::shard);
        }
        match open(source, PYTORCH, pytorch::shard)? {
            Some(shard) => Ok(TensorIndex::of_one(shard)),
            None => Err(CheckpointError::MissingFile { place: source.place(), file: SINGLE.into() }),
        }
    }

    /// Opens a folder without an index: the shards whose names contain the number of shards, or the
    /// only tensor file, which may have any name. `None` if the folder has neither.
    fn open_unlisted(source: &CheckpointSource) -> Result<Option<Self>, CheckpointError> {
        let files = source.tensor_files()?;
        match (files.iter().find_map(|file| every_shard(file)), files.as_slice()) {
            (Some(shards), _) => TensorIndex::of_shards(source, &shards, Shard::of_safetensors, |_, _| true).map(Some),
            (None, [file]) => Ok(open(source, file, Shard::of_safetensors)?.map(TensorIndex::of_one)),
            (None, _) => Ok(None),
        }
    }

    fn of_one(shard: Shard) -> Self {
        TensorIndex::of_distinct(vec![shard])
    }

    /// The index over shards that have no tensor in common.
    fn of_distinct(shards: Vec<Shard>) -> Self {
        let names = shards.iter().zip(0..).flat_map(|(shard, at)| shard.names().map(move |name| (name.to_owned(), at)));
        TensorIndex { places: names.collect(), drawn: None, shards }
    }

    fn open_shards(source: &CheckpointSource, index: &IndexFile, format: Format) -> Result<Self, CheckpointError> {
        let is_listed = |tensor: &str, file: &str| index.weight_map.get(tensor).is_some_and(|listed| listed == file);
        let whole = TensorIndex::of_shards(source, &index.shards()?, format, is_listed)?;
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
        format: Format,
        belongs: impl Fn(&str, &str) -> bool,
    ) -> Result<Self, CheckpointError> {
        let (mut shards, mut places) = (Vec::new(), BTreeMap::new());
        for file in files {
            let shard = open(source, file, format)?.ok_or_else(|| CheckpointError::MissingShard {
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
        Some((drawn.dtype, RandomTensor::of(drawn.seed, name, axes)))
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
