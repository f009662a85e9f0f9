//! Folders and files in which cuBLASLt and NCCL are searched for.

use std::path::{Path, PathBuf};

/// File names of cuBLASLt, newest version first. The few functions that this project uses are the
/// same in all versions.
pub(super) const BLAS_NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

/// Folders in which cuBLASLt, and NCCL if it is needed, are searched for, in addition
/// to the system's folders.
///
/// This type does not read the environment. `bursar` fills it from `BURSAR_CUDA_LIB`, `CUDA_HOME`,
/// `VIRTUAL_ENV`, `CONDA_PREFIX` and `HOME`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlasSearch {
    folders: Vec<PathBuf>,
}

impl BlasSearch {
    /// Returns the CUDA toolkit's usual folders and the folders of the system's Python packages.
    pub fn usual() -> Self {
        BlasSearch::default().with_toolkits(&["/usr/local/cuda", "/opt/cuda"]).with_pythons(&["/usr/local", "/usr"])
    }

    /// Adds folders that are searched before all other folders, in this order.
    pub fn first_in(mut self, folders: &[impl AsRef<Path>]) -> Self {
        self.folders.splice(0..0, folders.iter().map(|folder| folder.as_ref().to_owned()));
        self
    }

    /// Adds the library folders of CUDA toolkits.
    pub fn with_toolkits(mut self, toolkits: &[impl AsRef<Path>]) -> Self {
        let folders = |toolkit: &Path| ["lib64", "targets/x86_64-linux/lib"].map(|folder| toolkit.join(folder));
        self.folders.extend(toolkits.iter().flat_map(|toolkit| folders(toolkit.as_ref())));
        self
    }

    /// Adds the Python packages under each prefix (for example a virtual environment), because
    /// NVIDIA's wheels contain the libraries.
    pub fn with_pythons(mut self, prefixes: &[impl AsRef<Path>]) -> Self {
        let libraries = prefixes.iter().map(|prefix| prefix.as_ref().join("lib"));
        let versions = libraries.flat_map(std::fs::read_dir).flatten().flatten();
        let pythons = versions.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
        for python in pythons {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = python.path().join(packages).join("nvidia");
                self.folders.extend(
                    ["cu13/lib", "cublas/lib", "nccl/lib"]
                        .map(|folder| nvidia.join(folder))
                        .into_iter()
                        .filter(|folder| folder.is_dir()),
                );
            }
        }
        self
    }

    /// Returns the folders in search order.
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// Returns the files to try for cuBLASLt, in order.
    pub(super) fn candidates(&self) -> Vec<PathBuf> {
        self.files(&BLAS_NAMES)
    }

    /// Returns the files to try, in order: first the files with these names in the folders, then
    /// the bare names, which the operating system looks up in its own folders.
    pub(super) fn files(&self, names: &[&'static str]) -> Vec<PathBuf> {
        let in_folders = self.folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
        let in_folders = in_folders.filter(|file| file.is_file());
        in_folders.chain(names.iter().map(PathBuf::from)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blas_search_tries_named_folders_before_python_wheels() {
        let place = std::env::temp_dir().join(format!("bursar-blas-search-{}", std::process::id()));
        let (wheel, named) = (place.join("lib/python3.12/site-packages/nvidia/cu13/lib"), place.join("named"));
        for folder in [&wheel, &named] {
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(folder.join("libcublasLt.so.13"), "not a library").unwrap();
        }
        let search = BlasSearch::default().with_pythons(&[&place]).first_in(&[&named]);
        assert_eq!(search.folders(), [named.clone(), wheel.clone()]);
        let found = search.candidates();
        assert_eq!(found[..2], [named.join("libcublasLt.so.13"), wheel.join("libcublasLt.so.13")]);
        assert_eq!(found[2..], BLAS_NAMES.map(PathBuf::from), "the system's search comes last");
        std::fs::remove_dir_all(place).unwrap();
    }
}
