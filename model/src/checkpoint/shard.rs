//! One file of weights: its bytes in place, mapped or embedded, and where each tensor lies in them.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};

use super::checkpoint_files::{CheckpointSource, embedded, unreadable};
use super::error::CheckpointError;
use super::stored::Stored;
use super::tensors::{TensorInfo, TensorType};

/// Bytes before the header: its length as a little-endian u64.
const LENGTH_BYTES: usize = 8;

/// The start of a Git LFS pointer, which stands in for a file that was not downloaded.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A shard of a checkpoint's weights. Cloning shares its bytes.
#[derive(Clone, Debug)]
pub struct Shard {
    file: String,
    content: Content,
    header: Range<usize>,
    tensors: BTreeMap<String, StoredTensor>,
}

/// Where a tensor lies in its file, and how.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    /// The storage, and the type that is read of it; or what else it is.
    pub stored: Result<(Stored, TensorType), Unread>,
    pub shape: Vec<usize>,
    /// As in [`TensorInfo`].
    pub paired_heads: usize,
    /// Bytes of the file.
    pub bytes: Range<usize>,
}

/// A storage that is not read.
#[derive(Clone, Debug)]
pub(super) enum Unread {
    /// An element type.
    Type(String),
    /// A type of ggml's.
    Blocks(String),
}

#[derive(Clone, Debug)]
pub(super) enum Content {
    Mapped(Arc<Mmap>),
    Embedded(&'static [u8]),
}

impl Shard {
    /// A shard of checked parts: `header` is what the fingerprint hashes, and all ranges are of `content`.
    pub(super) fn new(
        file: &str,
        content: Content,
        header: Range<usize>,
        tensors: BTreeMap<String, StoredTensor>,
    ) -> Self {
        Shard { file: file.to_owned(), content, header, tensors }
    }

    /// Maps a shard and checks its header: it parses, tensors neither overlap nor leave holes nor reach beyond the
    /// file, and sizes follow from shapes. `None` if there is no such file, or only a Git LFS pointer.
    ///
    /// # Errors
    /// [`CheckpointError::Unreadable`] or [`CheckpointError::Header`].
    pub fn open(source: &CheckpointSource, file: &str) -> Result<Option<Self>, CheckpointError> {
        let Some(content) = Content::open(source, file)? else { return Ok(None) };
        let (header_bytes, metadata) = SafeTensors::read_metadata(content.bytes())
            .map_err(|error| CheckpointError::Header { file: file.into(), reason: error.to_string() })?;
        let header = LENGTH_BYTES..LENGTH_BYTES + header_bytes;
        let tensors = places(&metadata, header.end);
        Ok(Some(Shard::new(file, content, header, tensors)))
    }

    /// The file's name.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The bytes that say names, types, shapes and places of all tensors.
    pub fn header(&self) -> &[u8] {
        &self.content.bytes()[self.header.clone()]
    }

    /// The file's size in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.content.bytes().len() as u64
    }

    /// The names of its tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor by its name, if it is here.
    ///
    /// # Errors
    /// [`CheckpointError::TensorType`] or [`CheckpointError::BlockType`] if its storage is not read.
    pub fn tensor(&self, name: &str) -> Option<Result<TensorInfo<'_>, CheckpointError>> {
        let place = self.tensors.get(name)?;
        let tensor = name.to_owned();
        Some(match &place.stored {
            &Ok((stored, dtype)) => {
                let bytes = &self.content.bytes()[place.bytes.clone()];
                Ok(TensorInfo { dtype, stored, shape: &place.shape, bytes, paired_heads: place.paired_heads, gap: 0 })
            }
            Err(Unread::Type(found)) => Err(CheckpointError::TensorType { tensor, found: found.clone() }),
            Err(Unread::Blocks(found)) => Err(CheckpointError::BlockType { tensor, found: found.clone() }),
        })
    }
}

/// The tensors of a safetensors file whose data starts at byte `data`.
fn places(metadata: &Metadata, data: usize) -> BTreeMap<String, StoredTensor> {
    let place = |name: String| {
        let info = metadata.info(&name)?;
        let dtype = match info.dtype {
            Dtype::BF16 => Ok(TensorType::BF16),
            Dtype::F16 => Ok(TensorType::F16),
            Dtype::F32 => Ok(TensorType::F32),
            Dtype::F8_E4M3 => Ok(TensorType::F8E4M3),
            other => Err(Unread::Type(format!("{other:?}"))),
        };
        let stored = dtype.map(|dtype| (Stored::Plain(dtype), dtype));
        let (start, end) = info.data_offsets;
        let bytes = data + start..data + end;
        Some((name, StoredTensor { stored, shape: info.shape.clone(), paired_heads: 0, bytes }))
    };
    metadata.offset_keys().into_iter().filter_map(place).collect()
}

impl Content {
    /// Maps a file of a checkpoint. `None` if there is none, or only a Git LFS pointer.
    pub(super) fn open(source: &CheckpointSource, file: &str) -> Result<Option<Self>, CheckpointError> {
        let content = match source {
            CheckpointSource::Embedded(files) => embedded(files, file).map(Content::Embedded),
            CheckpointSource::Random(_) | CheckpointSource::Gguf(_) => None,
            CheckpointSource::Folder(folder) => Content::map(&folder.join(file), file)?,
        };
        Ok(content.filter(|content| !content.bytes().starts_with(POINTER)))
    }

    /// Maps the file at `path`, which errors call `file`. `None` if there is none.
    pub(super) fn map(path: &Path, file: &str) -> Result<Option<Self>, CheckpointError> {
        match File::open(path) {
            Ok(opened) => {
                let mapped = map(&opened).map_err(|error| unreadable(file, &error))?;
                Ok(Some(Content::Mapped(Arc::new(mapped))))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unreadable(file, &error)),
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Content::Mapped(map) => map,
            Content::Embedded(content) => content,
        }
    }
}

fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: a mapped file must not be truncated while it is read, or the process gets SIGBUS. Checkpoints are written
    // once, which every safetensors reader relies on. Copying 15 GB into memory first is no alternative.
    unsafe { Mmap::map(file) }
}
