//! One safetensors file: its bytes in place, mapped or embedded, and its checked header.

use std::fs::File;
use std::ops::Range;

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

use super::checkpoint_files::{CheckpointSource, embedded, unreadable};
use super::error::CheckpointError;

/// Bytes before the header: its length as a little-endian u64.
const LENGTH_BYTES: usize = 8;

/// The start of a Git LFS pointer, which stands in for a file that was not downloaded.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A shard of a checkpoint's weights.
#[derive(Debug)]
pub struct Shard {
    file: String,
    content: Content,
    header: Range<usize>,
    metadata: Metadata,
}

#[derive(Debug)]
enum Content {
    Mapped(Mmap),
    Embedded(&'static [u8]),
}

impl Shard {
    /// Maps a shard and checks its header: it parses, tensors neither overlap nor leave holes nor reach beyond the
    /// file, and sizes follow from shapes. `None` if there is no such file, or only a Git LFS pointer.
    ///
    /// # Errors
    /// [`CheckpointError::Unreadable`] or [`CheckpointError::Header`].
    pub fn open(source: &CheckpointSource, file: &str) -> Result<Option<Self>, CheckpointError> {
        let content = match source {
            CheckpointSource::Embedded(files) => match embedded(files, file) {
                Some(content) => Content::Embedded(content),
                None => return Ok(None),
            },
            CheckpointSource::Random(_) => return Ok(None),
            CheckpointSource::Folder(folder) => match File::open(folder.join(file)) {
                Ok(opened) => Content::Mapped(map(&opened).map_err(|error| unreadable(file, &error))?),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(unreadable(file, &error)),
            },
        };
        if content.bytes().starts_with(POINTER) {
            return Ok(None);
        }
        let (header_bytes, metadata) = SafeTensors::read_metadata(content.bytes())
            .map_err(|error| CheckpointError::Header { file: file.into(), reason: error.to_string() })?;
        let header = LENGTH_BYTES..LENGTH_BYTES + header_bytes;
        Ok(Some(Shard { file: file.into(), content, header, metadata }))
    }

    /// The file's name.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The header's JSON: names, types, shapes and offsets of all tensors.
    pub fn header(&self) -> &[u8] {
        &self.content.bytes()[self.header.clone()]
    }

    /// The file's size in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.content.bytes().len() as u64
    }

    /// The parsed header.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Bytes at offsets from the header's end. `open` has checked the offsets of the metadata.
    pub fn data(&self, offsets: Range<usize>) -> &[u8] {
        &self.content.bytes()[self.header.end..][offsets]
    }
}

impl Content {
    fn bytes(&self) -> &[u8] {
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
