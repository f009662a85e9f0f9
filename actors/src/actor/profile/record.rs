//! Storage of recorded profiles: one file per model and device, with the latest profile of each of
//! up to four profile keys.

use std::path::{Path, PathBuf};

use bursar_model::cache_file::{CacheFile, CacheFileError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Difference, ProfileKey, RecordedProfile};

/// The version of the file format. Files of other versions are rejected.
const FORMAT: u32 = 5;

/// Number of profiles that a file keeps, latest first. Four are enough for the configurations
/// between which a user alternates, such as chat and benchmark.
const KEPT: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPath {
    file: CacheFile,
}

/// Result of the search for a profile with a given key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordLookup {
    Nothing,
    /// A profile with an equal key.
    Applies(RecordedProfile),
    /// Only profiles with other keys are recorded. Contains the differences from the profile whose
    /// key has the fewest differences.
    Differs(Vec<Difference>),
}

/// Reasons why a file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] CacheFileError),
    /// The file is incomplete, or Bursar did not write it.
    #[error("it is not valid at line {line}, column {column}")]
    Broken {
        /// The line of the error, from 1.
        line: usize,
        /// The column of the error, from 1. It is 0 if the previous line ended too soon.
        column: usize,
    },
    /// Another version of Bursar wrote the file, so its fields may have another meaning.
    #[error("{0}")]
    Format(FormatDiffers),
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("format was {was}, is {FORMAT}")]
pub struct FormatDiffers {
    /// The version in the file.
    pub was: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RecordFile {
    format: u32,
    profiles: Vec<RecordedProfile>,
}

/// The format version of a file, which is read before any other field.
#[derive(Deserialize)]
struct FormatVersion {
    format: u64,
}

impl RecordPath {
    /// Returns the file in `folder` for the model of this name from `origin`, on devices of this
    /// name.
    pub fn new(folder: &Path, model: &str, origin: &str, device: &str) -> Self {
        RecordPath { file: CacheFile::named(folder, &[model, device], &[model, origin, device]) }
    }

    pub fn path(&self) -> PathBuf {
        self.file.path()
    }

    /// Looks for a profile with this key. Blocks.
    ///
    /// # Errors
    /// Returns a [`RecordError`] if the file exists and cannot be used.
    pub fn find(&self, profile_key: &ProfileKey) -> Result<RecordLookup, RecordError> {
        let Some(content) = self.file.read()? else { return Ok(RecordLookup::Nothing) };
        Ok(RecordFile::parse(&content)?.find(profile_key))
    }

    /// Records a profile, in place of any recorded profile with an equal key. If the file exists
    /// and cannot be used, a new file replaces it. If two processes write at the same time, one
    /// profile may be lost and is measured again at a later start. Blocks.
    ///
    /// # Errors
    /// [`CacheFileError::Unwritable`], as [`RecordError::File`].
    pub fn keep(&self, profile: RecordedProfile) -> Result<(), RecordError> {
        let there = self.file.read().ok().flatten();
        let mut file = there.and_then(|content| RecordFile::parse(&content).ok()).unwrap_or_else(RecordFile::empty);
        file.keep(profile);
        Ok(self.file.replace(&file.print())?)
    }
}

impl RecordFile {
    fn empty() -> Self {
        RecordFile { format: FORMAT, profiles: Vec::new() }
    }

    fn parse(content: &[u8]) -> Result<Self, RecordError> {
        let broken = |error: serde_json::Error| RecordError::Broken { line: error.line(), column: error.column() };
        let FormatVersion { format } = serde_json::from_slice(content).map_err(broken)?;
        if format != u64::from(FORMAT) {
            return Err(RecordError::Format(FormatDiffers { was: format }));
        }
        serde_json::from_slice(content).map_err(broken)
    }

    /// Returns indented JSON, so that people can read the file.
    fn print(&self) -> Vec<u8> {
        let mut content = serde_json::to_vec_pretty(self).expect("the record holds only text and numbers");
        content.push(b'\n');
        content
    }

    fn find(self, profile_key: &ProfileKey) -> RecordLookup {
        let with_differences = self.profiles.into_iter().map(|profile| {
            let differences = ProfileKey::differences(&profile.profile_key, profile_key);
            (profile, differences)
        });
        // If several profiles have equally few differences, the latest is chosen, because the file
        // lists the latest first.
        match with_differences.min_by_key(|(_, differences)| differences.len()) {
            None => RecordLookup::Nothing,
            Some((profile, differences)) if differences.is_empty() => RecordLookup::Applies(profile),
            Some((_, differences)) => RecordLookup::Differs(differences),
        }
    }

    fn keep(&mut self, profile: RecordedProfile) {
        self.profiles.retain(|other| other.profile_key != profile.profile_key);
        self.profiles.insert(0, profile);
        self.profiles.truncate(KEPT);
    }
}
