//! A file of weights: its bytes, mapped or embedded, and the location of each tensor in them.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

use super::error::CheckpointError;
use super::stored::{Stored, TensorType};
use super::tensor_info::{Change, ElementOrder, TensorInfo};

/// Bytes before the header of a safetensors file: the header's length as a little-endian u64.
const LENGTH_BYTES: usize = 8;

/// The start of a Git LFS pointer, which replaces a file that was not downloaded.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A shard of a checkpoint's weights. Cloning shares its bytes.
#[derive(Clone, Debug)]
pub struct Shard {
    file: String,
    content: Content,
    header: Range<usize>,
    tensors: BTreeMap<String, StoredTensor>,
}

/// The location and the storage of a tensor in its file.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    /// The format in the file and the type that the elements are read as, or the name of an
    /// unsupported format.
    pub stored: Result<(Stored, TensorType), UnsupportedStorage>,
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub bytes: Range<usize>,
    pub reading: Reading,
}

/// How a tensor is converted when it is read. By default, the tensor is already in the model's
/// format and is read unchanged.
#[derive(Clone, Debug, Default)]
pub(super) struct Reading {
    pub order: ElementOrder,
    pub change: Change,
    /// Byte range of a second tensor, for [`ElementOrder::Interleaved`].
    pub second: Range<usize>,
}

/// A tensor of any type as it is in its file.
pub(super) struct RawTensor<'a> {
    /// The type's name in safetensors files, such as `I32`.
    pub kind: String,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

/// An element type or block format that is not supported.
#[derive(Clone, Debug)]
pub(super) enum UnsupportedStorage {
    /// The name of an element type.
    Type(String),
    /// The name of a ggml type.
    Blocks(String),
}

#[derive(Clone, Debug)]
pub(super) enum Content {
    Mapped(Arc<Mmap>),
    Embedded(&'static [u8]),
}

impl Shard {
    /// Creates a shard from parts that the caller has checked. `header` is the range that the
    /// fingerprint hashes, and all ranges refer to `content`.
    pub(super) fn new(
        file: &str,
        content: Content,
        header: Range<usize>,
        tensors: BTreeMap<String, StoredTensor>,
    ) -> Self {
        Shard { file: file.to_owned(), content, header, tensors }
    }

    /// Finds the tensors of a safetensors file and checks its header: it must parse, tensors must
    /// not overlap, leave gaps or reach beyond the file, and sizes must match shapes.
    ///
    /// # Errors
    /// [`CheckpointError::Header`].
    pub(super) fn of_safetensors(file: &str, content: Content) -> Result<Self, CheckpointError> {
        let (header_bytes, metadata) = SafeTensors::read_metadata(content.bytes())
            .map_err(|error| CheckpointError::Header { file: file.into(), reason: error.to_string() })?;
        let header = LENGTH_BYTES..LENGTH_BYTES + header_bytes;
        let tensors = places(&metadata, header.end);
        Ok(Shard::new(file, content, header, tensors))
    }

    pub fn file(&self) -> &str {
        &self.file
    }

    /// The bytes with the names, types, shapes and offsets of all tensors.
    pub fn header(&self) -> &[u8] {
        &self.content.bytes()[self.header.clone()]
    }

    /// The file's size in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.content.bytes().len() as u64
    }

    /// The sorted names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor with this name, if the shard has it.
    ///
    /// # Errors
    /// [`CheckpointError::TensorType`] or [`CheckpointError::BlockType`] if its
    /// storage is not supported.
    pub fn tensor(&self, name: &str) -> Option<Result<TensorInfo<'_>, CheckpointError>> {
        let place = self.tensors.get(name)?;
        let tensor = name.to_owned();
        Some(match &place.stored {
            &Ok((stored, dtype)) => {
                let StoredTensor { shape, bytes, reading, .. } = place;
                let [bytes, second] = [bytes, &reading.second].map(|range| &self.content.bytes()[range.clone()]);
                let pitch = bytes.len() / shape.first().copied().unwrap_or(1).max(1);
                let (order, change) = (reading.order, reading.change);
                let (first, packed) = ([0; 2], None);
                Ok(TensorInfo { dtype, stored, shape, bytes, second, order, change, pitch, first, packed })
            }
            Err(UnsupportedStorage::Type(found)) => Err(CheckpointError::TensorType { tensor, found: found.clone() }),
            Err(UnsupportedStorage::Blocks(found)) => Err(CheckpointError::BlockType { tensor, found: found.clone() }),
        })
    }

    /// The tensor with this name as it is in the file, of any type.
    pub(super) fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        let StoredTensor { stored, shape, bytes, .. } = self.tensors.get(name)?;
        let kind = match stored {
            Ok((Stored::Plain(dtype), _)) => dtype.name().to_owned(),
            Ok((stored, _)) => format!("{stored:?}"),
            Err(UnsupportedStorage::Type(name) | UnsupportedStorage::Blocks(name)) => name.clone(),
        };
        Some(RawTensor { kind, shape, bytes: &self.content.bytes()[bytes.clone()] })
    }
}

/// The tensors of a safetensors file whose data starts at byte `data`.
fn places(metadata: &Metadata, data: usize) -> BTreeMap<String, StoredTensor> {
    let place = |name: String| {
        let info = metadata.info(&name)?;
        let dtype = TensorType::of(info.dtype).ok_or_else(|| UnsupportedStorage::Type(format!("{:?}", info.dtype)));
        let stored = dtype.map(|dtype| (Stored::Plain(dtype), dtype));
        let (start, end) = info.data_offsets;
        let bytes = data + start..data + end;
        Some((name, StoredTensor { stored, shape: info.shape.clone(), bytes, reading: Reading::default() }))
    };
    metadata.offset_keys().into_iter().filter_map(place).collect()
}

impl Content {
    /// Maps the file at `path`. Error messages name it `file`. Returns `None` if the file does not
    /// exist.
    pub(super) fn map(path: &Path, file: &str) -> Result<Option<Self>, CheckpointError> {
        match File::open(path) {
            Ok(opened) => {
                let mapped = map(&opened).map_err(|error| CheckpointError::unreadable(file, &error))?;
                Ok(Some(Content::Mapped(Arc::new(mapped))))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CheckpointError::unreadable(file, &error)),
        }
    }

    /// Whether this is only a Git LFS pointer.
    pub(super) fn is_pointer(&self) -> bool {
        self.bytes().starts_with(POINTER)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Content::Mapped(map) => map,
            Content::Embedded(content) => content,
        }
    }
}

fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: checkpoint files are written once and not changed while they are mapped, which every
    // safetensors reader relies on. If a file were truncated, the process would get SIGBUS. Copying
    // 15 GB into memory first is not an alternative.
    unsafe { Mmap::map(file) }
}
