//! The recorded reference cases, unpacked: tests ask for a path, and its archive is unpacked into the target folder.
//!
//! A copy is named after the archive's contents, so a checkout of another commit never reads stale files.

#![deny(missing_docs)]

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    env, fs,
    hash::{Hash, Hasher},
    io,
    path::{Path, PathBuf},
    process,
    sync::{LazyLock, Mutex, PoisonError},
};

use lzma_rust2::XzReader;

/// Folder of the archives.
const ARCHIVES: &str = env!("CARGO_MANIFEST_DIR");

/// Where each archive was unpacked, by name.
static UNPACKED: LazyLock<Mutex<HashMap<String, PathBuf>>> = LazyLock::new(Mutex::default);

/// The file or folder `path` of `tests/golden`, such as `qwen2/cases/short.json`. Its first component names the
/// archive, `qwen2.tar.xz`; a file that is in no archive, such as `tiles.json`, is returned as it is.
///
/// # Panics
/// There is no such archive, or it cannot be unpacked.
pub fn path(path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    let name = path.iter().next().expect("a path below tests/golden").to_string_lossy().into_owned();
    let plain = Path::new(ARCHIVES).join(path);
    if plain.is_file() {
        return plain;
    }
    let mut unpacked = UNPACKED.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = unpacked.entry(name).or_insert_with_key(|name| unpack(name));
    folder.join(path)
}

/// The demo model's checkpoint as a folder with decompressed weights, named `demo`.
///
/// # Panics
/// A file cannot be read or written.
pub fn demo_checkpoint() -> PathBuf {
    let from = Path::new(ARCHIVES).join("../../model/demo/checkpoint");
    let mut unpacked = UNPACKED.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = unpacked.entry("demo checkpoint".to_owned()).or_insert_with(|| {
        let files = fs::read_dir(&from).expect("the demo's checkpoint").map(|file| file.expect("an entry").path());
        let mut files: Vec<(PathBuf, Vec<u8>)> = files
            .filter(|path| path.extension().is_some_and(|ending| ending != "safetensors"))
            .map(|path| (path.clone(), fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))))
            .collect();
        files.sort();
        unpack_once(&files, |copy| {
            let folder = copy.join("demo");
            fs::create_dir_all(&folder)?;
            files.iter().try_for_each(|(path, content)| {
                let name = path.file_name().expect("a file has a name").to_string_lossy();
                match name.strip_suffix(".xz") {
                    Some(name) => {
                        let mut file = fs::File::create(folder.join(name))?;
                        io::copy(&mut XzReader::new(&content[..], false), &mut file).map(drop)
                    }
                    None => fs::write(folder.join(&*name), content),
                }
            })
        })
    });
    folder.join("demo")
}

/// The folder into which `NAME.tar.xz` was unpacked, by this process or an earlier one.
fn unpack(name: &str) -> PathBuf {
    let archive = Path::new(ARCHIVES).join(format!("{name}.tar.xz"));
    let packed = fs::read(&archive).unwrap_or_else(|error| panic!("{}: {error}", archive.display()));
    unpack_once(&packed, |copy| tar::Archive::new(XzReader::new(&packed[..], false)).unpack(copy))
}

/// The folder in the target folder that `write` fills, unless an earlier call with the same `contents` has.
fn unpack_once(contents: &impl Hash, write: impl FnOnce(&Path) -> io::Result<()>) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    contents.hash(&mut hasher);
    let target =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| Path::new(ARCHIVES).join("../../target"), PathBuf::from);
    let folder = target.join("golden").join(format!("{:016x}", hasher.finish()));
    if !folder.exists() {
        // Other processes may unpack the same contents now: the first to rename its copy wins.
        let copy = folder.with_extension(process::id().to_string());
        write(&copy).unwrap_or_else(|error| panic!("{}: {error}", copy.display()));
        let renamed = fs::rename(&copy, &folder);
        if !folder.exists() {
            panic!("{} was not renamed to {}: {renamed:?}", copy.display(), folder.display());
        }
        discard(&copy).unwrap_or_else(|error| panic!("{}: {error}", copy.display()));
    }
    folder
}

/// Removes a copy that another process's copy has made superfluous.
fn discard(copy: &Path) -> io::Result<()> {
    match fs::remove_dir_all(copy) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_unpacked_once_and_found_again() {
        let config = path("qwen2/config.json");
        assert!(fs::read_to_string(&config).expect("it was unpacked").contains("Qwen2ForCausalLM"));
        assert_eq!(path("qwen2/config.json"), config);
    }

    #[test]
    fn a_file_in_no_archive_is_returned_as_it_is() {
        assert!(path("README.md").starts_with(ARCHIVES));
    }

    #[test]
    #[should_panic(expected = "absent.tar.xz")]
    fn an_unknown_archive_is_named() {
        path("absent/config.json");
    }

    #[test]
    fn every_archive_unpacks_into_a_folder_of_its_name() {
        let mut archives = 0;
        for file in fs::read_dir(ARCHIVES).expect("tests/golden") {
            let file = file.expect("an entry").file_name().to_string_lossy().into_owned();
            if let Some(name) = file.strip_suffix(".tar.xz") {
                assert!(path(name).is_dir(), "{file} holds the folder {name}");
                archives += 1;
            }
        }
        assert!(archives > 20, "{archives} archives");
    }
}
