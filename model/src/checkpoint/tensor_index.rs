//! All tensors of a checkpoint by name, across its shards.

use std::collections::BTreeMap;

use bursar_kernels::DType;

use super::checkpoint_source::CheckpointSource;
use super::error::CheckpointError;
use super::layout::{INDEX, IndexFile, PYTORCH, PYTORCH_INDEX, SINGLE, every_shard};
use super::packed::{PackedModule, PackedParts};
use super::pytorch;
use super::quantization::PackedQuantization;
use super::random_tensor::RandomTensor;
use super::shard::{Content, RawTensor, Shard};
use super::tensor_info::TensorInfo;
use crate::nearest_names;

/// The module under which a checkpoint has the tensors of its draft model.
pub const DRAFT_MODEL: &str = "draft_model";

/// Maximum number of similar names that an error about a missing tensor lists.
const NEAREST_MAX: usize = 3;

/// The index over all shards, or a seed from which any requested tensor is drawn.
#[derive(Debug)]
pub struct TensorIndex {
    shards: Vec<Shard>,
    locations: BTreeMap<String, TensorLocation>,
    /// The names of the tensors that packed weights consist of. Each value is the index in `shards`
    /// of the shard that has the tensor.
    parts: BTreeMap<String, usize>,
    /// Settings for drawing tensors; `None` if there are shards.
    drawn: Option<Drawn>,
    /// Settings for drawing only the tensors of the draft model.
    drawn_draft: Option<Drawn>,
}

/// The location of a tensor.
#[derive(Debug)]
enum TensorLocation {
    /// The index of the shard that has the tensor.
    Shard(usize),
    /// A packed weight, which consists of several tensors.
    Packed(Box<PackedParts>),
    /// A tensor of the draft model: the index of its shard, and its name there.
    DraftModel(usize, String),
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
    /// Opens the weights of a checkpoint: `model.safetensors`, or the shards that
    /// `model.safetensors.index.json` names, or safetensors files without an index, or otherwise
    /// the corresponding files of torch. A GGUF checkpoint has its own shards. A random checkpoint
    /// has no files and provides any tensor that is requested.
    ///
    /// # Errors
    /// Files are missing or damaged, a shard's name points outside the folder, or the index and the
    /// shards disagree about a tensor.
    pub fn open(source: &CheckpointSource) -> Result<Self, CheckpointError> {
        if let CheckpointSource::Random(random) = source {
            let dtype = source.stored_type()?.unwrap_or(DType::BF16);
            let drawn = Drawn { seed: random.seed(), dtype, routing_skew: random.routing_skew() };
            return Ok(TensorIndex { drawn: Some(drawn), ..TensorIndex::new(Vec::new(), BTreeMap::new()) });
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

    /// The index over `shards`. `locations` has the index of each tensor's shard.
    fn new(shards: Vec<Shard>, locations: BTreeMap<String, usize>) -> Self {
        let locations = locations.into_iter().map(|(name, shard)| (name, TensorLocation::Shard(shard))).collect();
        TensorIndex { shards, locations, parts: BTreeMap::new(), drawn: None, drawn_draft: None }
    }

    /// The same index, with each packed weight as one tensor `module.weight` in place of its parts.
    /// The tensor is named `module` if it has the matrices of all experts of a layer. A module is
    /// packed if the file has packed elements for it. All other tensors are unchanged, even if the
    /// settings do not exclude their modules.
    ///
    /// # Errors
    /// [`CheckpointError::PackedTensor`], [`CheckpointError::ExcludedPacked`],
    /// [`CheckpointError::PackedTwice`] or [`CheckpointError::MissingPart`] if a module's tensors
    /// do not match each other or the settings. [`CheckpointError::NoPackedWeights`] if the file
    /// has no packed weight.
    pub(super) fn with_packed(mut self, settings: &PackedQuantization) -> Result<Self, CheckpointError> {
        if self.drawn.is_some() {
            return Ok(self);
        }
        let format = settings.format();
        let words = format.words();
        let is_packed = |name: &str| PackedModule::of(name, &self.raw(name)?.kind, format);
        let modules: Vec<_> = self.names().filter_map(is_packed).collect();
        if modules.is_empty() {
            return Err(CheckpointError::NoPackedWeights { suffix: words, kind: format.word_type() });
        }
        for module in modules {
            let packed = module.tensor(words);
            let Some(scheme) = settings.scheme_of(&module.name) else {
                return Err(CheckpointError::ExcludedPacked { packed, module: module.name });
            };
            let parts = PackedParts::find(&module, scheme, |name| self.raw(name))?;
            for name in parts.names() {
                if let Some(TensorLocation::Shard(shard)) = self.locations.remove(name) {
                    self.parts.insert(name.to_owned(), shard);
                }
            }
            let weight = if parts.has_experts() { module.name.clone() } else { format!("{}.weight", module.name) };
            if self.contains(&weight) {
                return Err(CheckpointError::PackedTwice { packed, weight, module: module.name });
            }
            self.locations.insert(weight, TensorLocation::Packed(Box::new(parts)));
        }
        Ok(self)
    }

    /// The same index, with random tensors of a draft model as `draft_model.*`.
    pub(super) fn with_random_draft_model(self) -> Self {
        let drawn_draft = Some(Drawn { seed: 0, dtype: DType::BF16, routing_skew: None });
        TensorIndex { drawn_draft, ..self }
    }

    /// The same index, with the tensors of a draft model as `draft_model.*`. If the draft model has a
    /// copy of this model's embedding, the copy is left out.
    ///
    /// # Errors
    /// The storage of an embedding is not supported.
    pub(super) fn with_draft_model(mut self, draft: TensorIndex) -> Result<Self, CheckpointError> {
        const EMBEDDING: &str = "embed_tokens.weight";
        let mut has_copy = false;
        if draft.contains(EMBEDDING) {
            let copy = draft.tensor(EMBEDDING)?;
            let is_embedding = |name: &&str| name.ends_with(&format!(".{EMBEDDING}"));
            for name in self.names().filter(is_embedding) {
                has_copy |= self.tensor(name)?.is_same(&copy);
            }
        }
        let first = self.shards.len();
        for (name, location) in draft.locations {
            if let TensorLocation::Shard(shard) = location
                && !(has_copy && name == EMBEDDING)
            {
                let to = TensorLocation::DraftModel(first + shard, name.clone());
                self.locations.insert(format!("{DRAFT_MODEL}.{name}"), to);
            }
        }
        self.shards.extend(draft.shards);
        Ok(self)
    }

    /// A tensor as it is in its file, of any type.
    fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        let shard = match self.locations.get(name) {
            Some(TensorLocation::Shard(shard)) => shard,
            Some(TensorLocation::DraftModel(shard, name)) => return self.shards[*shard].raw(name),
            _ => self.parts.get(name)?,
        };
        self.shards[*shard].raw(name)
    }

    /// The elements of a tensor of i64 or i32.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`] with the nearest names; [`CheckpointError::TensorType`] for
    /// another type.
    pub fn integers(&self, name: &str) -> Result<Vec<i64>, CheckpointError> {
        let missing = || CheckpointError::MissingTensor { tensor: name.to_owned(), nearest: self.nearest(name) };
        let raw = self.raw(name).ok_or_else(missing)?;
        match raw.kind.as_str() {
            "I64" => Ok(raw.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()),
            "I32" => Ok(raw.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect()),
            _ => Err(CheckpointError::TensorType { tensor: name.to_owned(), found: raw.kind }),
        }
    }

    fn of_one(shard: Shard) -> Self {
        TensorIndex::of_distinct(vec![shard])
    }

    /// The index over shards that have no tensor in common.
    fn of_distinct(shards: Vec<Shard>) -> Self {
        let names = shards.iter().zip(0..).flat_map(|(shard, at)| shard.names().map(move |name| (name.to_owned(), at)));
        let locations = names.collect();
        TensorIndex::new(shards, locations)
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
        let (mut shards, mut locations) = (Vec::new(), BTreeMap::new());
        for file in files {
            let shard = open(source, file, format)?.ok_or_else(|| CheckpointError::MissingShard {
                place: source.place(),
                shard: file.clone(),
                shards: files.len(),
            })?;
            for tensor in shard.names().map(str::to_owned) {
                if !belongs(&tensor, file) || locations.contains_key(&tensor) {
                    return Err(CheckpointError::Inconsistent { tensor, file: file.clone() });
                }
                locations.insert(tensor, shards.len());
            }
            shards.push(shard);
        }
        Ok(TensorIndex::new(shards, locations))
    }

    /// A tensor by its name.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`] with the nearest names; [`CheckpointError::TensorType`];
    /// [`CheckpointError::BlockType`].
    pub fn tensor(&self, name: &str) -> Result<TensorInfo<'_>, CheckpointError> {
        let missing = || CheckpointError::MissingTensor { tensor: name.to_owned(), nearest: self.nearest(name) };
        match self.locations.get(name).ok_or_else(missing)? {
            TensorLocation::Shard(shard) => self.shards[*shard].tensor(name).ok_or_else(missing)?,
            TensorLocation::DraftModel(shard, name) => self.shards[*shard].tensor(name).ok_or_else(missing)?,
            TensorLocation::Packed(parts) => {
                let matrix = parts.matrix(|name| self.raw(name).expect("the parts were found"));
                Ok(TensorInfo::of_packed(matrix, &parts.shape))
            }
        }
    }

    /// The type and the content of the tensor `name` with `axes` axes, if tensors
    /// are drawn at random.
    pub fn random(&self, name: &str, axes: usize) -> Option<(DType, RandomTensor)> {
        let of_draft = || {
            let is_in = name.strip_prefix(DRAFT_MODEL).is_some_and(|rest| rest.starts_with('.'));
            self.drawn_draft.as_ref().filter(|_| is_in)
        };
        let drawn = self.drawn.as_ref().or_else(of_draft)?;
        Some((drawn.dtype, RandomTensor::of(drawn.seed, name, axes)))
    }

    /// The exponent of Zipf's law by which experts are chosen; `None` if tensors are not random or
    /// experts are chosen evenly.
    pub fn routing_skew(&self) -> Option<f32> {
        self.drawn.as_ref()?.routing_skew
    }

    /// Whether the index has a tensor with this name. The parts of a packed weight do not count.
    pub fn contains(&self, name: &str) -> bool {
        self.locations.contains_key(name)
    }

    /// The first scale of the packed weight `name` that is not valid: the name of its tensor, its
    /// value, and what is expected. `None` if all scales are valid, or the tensor is not packed.
    pub fn bad_scale(&self, name: &str) -> Option<(String, f32, &'static str)> {
        let TensorLocation::Packed(parts) = self.locations.get(name)? else { return None };
        parts.bad_scale(|name| self.raw(name).expect("the parts were found"))
    }

    /// Whether the tensor with this name is a packed weight.
    pub fn is_packed(&self, name: &str) -> bool {
        matches!(self.locations.get(name), Some(TensorLocation::Packed(_)))
    }

    /// The sorted names of all tensors.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.locations.keys().map(String::as_str)
    }

    /// The files, sorted by name. For GGUF, the model's file and then the encoder's file. The files of
    /// a draft model are last.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    fn nearest(&self, name: &str) -> Vec<String> {
        nearest_names(name, self.names(), NEAREST_MAX).into_iter().map(str::to_owned).collect()
    }
}

#[cfg(test)]
impl TensorIndex {
    /// The safetensors file with the values of the weights in a recorded folder.
    pub(crate) fn recorded_values(folder: &str) -> Vec<u8> {
        std::fs::read(bursar_golden::path(folder).join("values.safetensors")).expect("the values are recorded")
    }

    /// The index of a recorded folder with packed weights, according to its `config.json`.
    pub(crate) fn recorded(folder: &str) -> Self {
        use super::quantization::{SETTINGS, StoredFormat, stored_formats};

        let folder = bursar_golden::path(folder);
        let config = std::fs::read(folder.join("config.json")).expect("the settings are recorded");
        let config = serde_json::from_slice(&config).expect("JSON");
        match stored_formats((&config, SETTINGS), None).expect("the settings are supported") {
            Some(StoredFormat::Packed(settings)) => {
                let index = TensorIndex::open(&CheckpointSource::Folder(folder)).expect("the weights are recorded");
                index.with_packed(&settings).expect("the tensors match the settings")
            }
            other => panic!("{other:?} has no packed weights"),
        }
    }
}
