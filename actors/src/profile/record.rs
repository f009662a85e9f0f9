//! Where profiles are written down: one file a model and device, with the latest of each basis.

use std::path::{Path, PathBuf};

use bursar_model::cache_file::{CacheFile, CacheFileError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Basis, Difference, WrittenProfile};

/// What the file's fields mean. Another number is another format, of which nothing else is read.
const FORMAT: u32 = 2;

/// Profiles that a file keeps, the latest first: as many as there are ways in which somebody uses one model on one device
/// in turn, a chat beside a benchmark for instance.
const KEPT: usize = 4;

/// Where the profiles of one model on one device are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPlace {
    file: CacheFile,
}

/// What was found there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing is written down.
    Nothing,
    /// A profile of the same basis.
    Applies(WrittenProfile),
    /// Profiles of others; where the nearest of them differs.
    Differs(Vec<Difference>),
}

/// Why a file is of no use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// It was not read, or not written.
    #[error(transparent)]
    File(#[from] CacheFileError),
    /// It is half written, or not ours.
    #[error("it is broken in line {line}, column {column}")]
    Broken {
        /// Where that was seen, counted from 1.
        line: usize,
        /// Counted from 1; 0 where the line before ended too soon.
        column: usize,
    },
    /// It is of another version of Bursar, whose fields may mean something else.
    #[error("{0}")]
    Format(FormatDiffers),
}

/// The format's own difference.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("format was {was}, is {FORMAT}")]
pub struct FormatDiffers {
    /// What the file says.
    pub was: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Book {
    format: u32,
    profiles: Vec<WrittenProfile>,
}

/// All that is read of a file before its format is known.
#[derive(Deserialize)]
struct Cover {
    format: u64,
}

impl RecordPlace {
    /// For the model of this name that comes from `origin`, on devices of this name, in `folder`.
    pub fn new(folder: &Path, model: &str, origin: &str, device: &str) -> Self {
        RecordPlace { file: CacheFile::named(folder, &[model, device], &[model, origin, device]) }
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.file.path()
    }

    /// Looks for a profile of this basis. Blocks.
    ///
    /// # Errors
    /// [`RecordError`]: a file that is there and of no use.
    pub fn find(&self, basis: &Basis) -> Result<Found, RecordError> {
        let Some(content) = self.file.read()? else { return Ok(Found::Nothing) };
        Ok(Book::parse(&content)?.find(basis))
    }

    /// Writes a profile down, in the place of one of the same basis if there is one. What is there and of no use is
    /// replaced. Of two who do so at once one is the last; the other's may be lost, and is measured again some day. Blocks.
    ///
    /// # Errors
    /// [`CacheFileError::Unwritable`], as [`RecordError::File`].
    pub fn keep(&self, profile: WrittenProfile) -> Result<(), RecordError> {
        let there = self.file.read().ok().flatten();
        let mut book = there.and_then(|content| Book::parse(&content).ok()).unwrap_or_else(Book::empty);
        book.keep(profile);
        Ok(self.file.replace(&book.print())?)
    }
}

impl Book {
    fn empty() -> Self {
        Book { format: FORMAT, profiles: Vec::new() }
    }

    fn parse(content: &[u8]) -> Result<Self, RecordError> {
        let broken = |error: serde_json::Error| RecordError::Broken { line: error.line(), column: error.column() };
        let Cover { format } = serde_json::from_slice(content).map_err(broken)?;
        if format != u64::from(FORMAT) {
            return Err(RecordError::Format(FormatDiffers { was: format }));
        }
        serde_json::from_slice(content).map_err(broken)
    }

    /// For machines, and for people who wonder.
    fn print(&self) -> Vec<u8> {
        let mut content = serde_json::to_vec_pretty(self).expect("text and numbers");
        content.push(b'\n');
        content
    }

    fn find(self, basis: &Basis) -> Found {
        let with_differences = self.profiles.into_iter().map(|profile| {
            let differences = Basis::differences(&profile.basis, basis);
            (profile, differences)
        });
        // Of several that are equally near the latest, which stands before the others.
        match with_differences.min_by_key(|(_, differences)| differences.len()) {
            None => Found::Nothing,
            Some((profile, differences)) if differences.is_empty() => Found::Applies(profile),
            Some((_, differences)) => Found::Differs(differences),
        }
    }

    fn keep(&mut self, profile: WrittenProfile) {
        self.profiles.retain(|other| other.basis != profile.basis);
        self.profiles.insert(0, profile);
        self.profiles.truncate(KEPT);
    }
}
