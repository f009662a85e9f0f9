//! The recorded reference cases as files, unpacked into the target folder by the build script.

use std::{
    env,
    path::{Path, PathBuf},
};

const ARCHIVES: &str = env!("CARGO_MANIFEST_DIR");
const UNPACKED: &str = concat!(env!("OUT_DIR"), "/golden");

/// The file or folder `path` of `tests/golden`, such as `qwen2/cases/short.json`. The first
/// component is the name of the archive (`qwen2.tar.xz`). A file that is in no archive, such as
/// `tiles.json`, is returned directly.
///
/// If the tests run on another machine than the build, `BURSAR_GOLDEN` names a folder
/// filled by `make.py --unpack`.
///
/// # Panics
/// Panics if there is no such file or folder.
pub fn path(path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    let plain = Path::new(ARCHIVES).join(path);
    if plain.is_file() {
        return plain;
    }
    let unpacked = env::var_os("BURSAR_GOLDEN").map_or_else(|| UNPACKED.into(), PathBuf::from);
    let name = unpacked.join(path.iter().next().expect("a path below tests/golden"));
    assert!(name.is_dir(), "{} does not exist: is there such an archive in tests/golden?", name.display());
    unpacked.join(path)
}

/// The demo model's checkpoint as a folder with decompressed weights, named `demo`.
///
/// # Panics
/// See [`path`].
pub fn demo_checkpoint() -> PathBuf {
    path("demo")
}

/// The checkpoint of the hybrid demo model as a folder with decompressed weights.
///
/// # Panics
/// See [`path`].
pub fn hybrid_demo_checkpoint() -> PathBuf {
    path("hybrid_demo")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn path_returns_the_unpacked_file() {
        let config = path("qwen2/config.json");
        assert!(fs::read_to_string(&config).expect("the archive was unpacked").contains("Qwen2ForCausalLM"));
    }

    #[test]
    fn a_file_outside_archives_keeps_its_path() {
        assert!(path("README.md").starts_with(ARCHIVES));
    }

    #[test]
    #[should_panic(expected = "absent does not exist")]
    fn an_unknown_archive_panics_with_its_name() {
        path("absent/config.json");
    }

    #[test]
    fn the_demo_checkpoint_has_decompressed_weights() {
        let weights = fs::read(demo_checkpoint().join("model.safetensors")).expect("the weights were decompressed");
        assert!(weights.len() > 7_000_000, "the weights have {} bytes", weights.len());
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
        assert!(archives > 20, "expected more than 20 archives, found {archives}");
    }
}
