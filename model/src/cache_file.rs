//! A small cache file that persists across processes. The file is always read and replaced as a
//! whole, and callers also work without the file.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use thiserror::Error;

/// Size limit in bytes for reading and writing. A larger file was therefore written by another
/// program.
pub const BYTES_MAX: u64 = 1 << 20;

/// A temporary file older than this was left by a process that died while writing.
const WRITING_MAX: Duration = Duration::from_secs(3600);

/// Maximum number of characters of each readable part of a file name.
const PART_CHARACTERS: usize = 48;

/// A cache file could not be read or written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CacheFileError {
    /// The operating system reports an error on reading.
    #[error("it cannot be read: {kind}")]
    Unreadable { kind: io::ErrorKind },
    /// The path is a folder, a pipe or something else that is not a regular file.
    #[error("it is not a regular file")]
    NotAFile,
    /// The file or the new content is larger than [`BYTES_MAX`].
    #[error("it has {bytes} bytes; the limit is {BYTES_MAX}")]
    TooLarge { bytes: u64 },
    /// The operating system reports an error on writing.
    #[error("it cannot be written: {kind}")]
    Unwritable { kind: io::ErrorKind },
}

/// A file in one of the user's folders, for example `~/.cache/bursar/profiles`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFile {
    folder: PathBuf,
    name: String,
}

impl CacheFile {
    /// The file in `folder` that is identified by `parts`. Different lists of parts identify
    /// different files. For readability, the file name begins with up to 48 characters of each
    /// entry of `shown`.
    ///
    /// ```
    /// use bursar_model::cache_file::CacheFile;
    /// let file = CacheFile::named("/tmp/cache", &["demo", "NVIDIA H200"], &["demo", "/models/demo", "NVIDIA H200"]);
    /// let name = file.path().file_name().unwrap().to_string_lossy().into_owned();
    /// assert!(name.starts_with("demo-NVIDIA-H200-") && name.ends_with(".json"), "{name}");
    /// ```
    pub fn named(folder: impl Into<PathBuf>, shown: &[&str], parts: &[&str]) -> Self {
        let readable: Vec<String> = shown.iter().map(|part| readable(part)).collect();
        let name = format!("{}-{}.json", readable.join("-"), fingerprint(parts));
        CacheFile { folder: folder.into(), name }
    }

    /// The file's path, whether or not the file exists.
    pub fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    /// Returns the content, or `None` if the file does not exist. The read never waits for a
    /// process that is replacing the file: the result is either the complete old content or the
    /// complete new content.
    ///
    /// # Errors
    /// Every variant except [`CacheFileError::Unwritable`].
    pub fn read(&self) -> Result<Option<Vec<u8>>, CacheFileError> {
        let unreadable = |error: io::Error| CacheFileError::Unreadable { kind: error.kind() };
        let path = self.path();
        // The type is checked before opening, because opening a pipe would wait for a writer.
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(error)),
        };
        if !metadata.is_file() {
            return Err(CacheFileError::NotAFile);
        }
        let mut content = Vec::new();
        let file = File::open(&path).map_err(unreadable)?;
        file.take(BYTES_MAX + 1).read_to_end(&mut content).map_err(unreadable)?;
        if content.len() as u64 > BYTES_MAX {
            return Err(CacheFileError::TooLarge { bytes: metadata.len() });
        }
        Ok(Some(content))
    }

    /// Replaces the content, and creates the folder if needed. A reader finds either the
    /// complete old content or the complete new content, even after a crash. If two
    /// processes write at the same time, the last one wins. The file gets the permissions of
    /// the user's other files (`umask`).
    ///
    /// # Errors
    /// [`CacheFileError::Unwritable`] or [`CacheFileError::TooLarge`]; the old content is then
    /// unchanged.
    pub fn replace(&self, content: &[u8]) -> Result<(), CacheFileError> {
        let bytes = content.len() as u64;
        if bytes > BYTES_MAX {
            return Err(CacheFileError::TooLarge { bytes });
        }
        self.write_aside(content).map_err(|error| CacheFileError::Unwritable { kind: error.kind() })
    }

    fn write_aside(&self, content: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        self.remove_stale_temporaries();
        let (path, mut file) = self.create_temporary()?;
        let written = file.write_all(content).and_then(|()| file.sync_all());
        drop(file);
        written.and_then(|()| fs::rename(&path, self.path())).inspect_err(|_| drop(fs::remove_file(&path)))
    }

    /// Creates a temporary file with a unique name in the same folder. No other thread or process
    /// writes to the temporary file, not even a process with the same PID in a container that
    /// shares the folder.
    fn create_temporary(&self) -> io::Result<(PathBuf, File)> {
        static WRITES: AtomicU64 = AtomicU64::new(0);
        loop {
            let (process, write) = (std::process::id(), WRITES.fetch_add(1, Relaxed));
            let path = self.folder.join(format!("{}{process}-{write}{TEMPORARY_SUFFIX}", self.aside_start()));
            match File::create_new(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => return Ok((path, created?)),
            }
        }
    }

    fn aside_start(&self) -> String {
        format!(".{}.", self.name)
    }

    /// Removes temporary files that processes left when they died while writing. Files that cannot
    /// be examined or removed stay.
    fn remove_stale_temporaries(&self) {
        let start = self.aside_start();
        let is_left = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let age = fs::metadata(path).and_then(|metadata| metadata.modified()).map(|written| written.elapsed());
            name.starts_with(&start)
                && name.ends_with(TEMPORARY_SUFFIX)
                && matches!(age, Ok(Ok(age)) if age > WRITING_MAX)
        };
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| is_left(path)).for_each(|path| drop(fs::remove_file(path)));
    }
}

/// The suffix of a temporary file's name.
const TEMPORARY_SUFFIX: &str = ".new";

/// Returns 16 hexadecimal digits that change if a part or a boundary between parts changes. The
/// digits are a BLAKE3 hash truncated to 64 bits, which prevents accidental collisions but does not
/// stop an attacker.
pub fn fingerprint(parts: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("bursar 2026 cache file v1");
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// `part` as a part of a file name: dots at the start are removed, characters that some operating
/// system does not allow become dashes, and the result is truncated to `PART_CHARACTERS`.
fn readable(part: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "._".contains(character);
    let dashed: String = part.chars().map(|character| if plain(character) { character } else { '-' }).collect();
    dashed.trim_start_matches('.').chars().take(PART_CHARACTERS).collect()
}
