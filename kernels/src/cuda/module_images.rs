//! The compiled device code: one archive per target, written by `kernels/cuda/compile.py`,
//! committed, and embedded here.

use std::{collections::BTreeMap, io::Read, sync::OnceLock};

use lzma_rust2::XzReader;

use super::contract::Generation;

/// One module of device code.
pub(super) struct ModuleImage {
    /// Name of the source file without its extension.
    pub name: String,
    /// A cubin, or PTX terminated by a zero byte.
    pub code: Vec<u8>,
}

/// All modules for one GPU generation, compressed until they are first needed.
pub(super) struct ModuleImages {
    /// Archives of modules. A module in a later archive replaces the module of the same name
    /// in an earlier archive.
    archives: &'static [&'static [u8]],
    /// True for cubins, false for PTX.
    pub is_machine_code: bool,
    unpacked: OnceLock<Vec<ModuleImage>>,
}

macro_rules! archive {
    ($target:literal) => {
        include_bytes!(concat!("../../cuda/compiled/", $target, ".tar.xz"))
    };
}

/// PTX of the f16 kernels, which the driver compiles.
const SM_75: &[u8] = archive!("sm_75");
/// PTX of the f16 and bf16 kernels, which the driver compiles.
const SM_80: &[u8] = archive!("sm_80");
/// PTX of the kernels that multiply quantized numbers on tensor cores.
const SM_89: &[u8] = archive!("sm_89");
/// Machine code, including the kernels that only Hopper has.
const SM_90A: &[u8] = archive!("sm_90a");

impl ModuleImages {
    fn new(archives: &'static [&'static [u8]], is_machine_code: bool) -> Self {
        ModuleImages { archives, is_machine_code, unpacked: OnceLock::new() }
    }

    /// Returns the groups of entry points that these images have.
    pub(super) fn generation(&self) -> Generation {
        let has_int4 = self.modules().iter().any(|image| image.name == "dequantize_int4");
        Generation { is_hopper: self.is_machine_code, has_int4 }
    }

    /// Returns the modules, sorted by name. The first call decompresses them.
    pub(super) fn modules(&self) -> &[ModuleImage] {
        self.unpacked.get_or_init(|| {
            let files: BTreeMap<String, Vec<u8>> = self.archives.iter().flat_map(|archive| files_of(archive)).collect();
            let image = |(name, mut code): (String, Vec<u8>)| {
                if !self.is_machine_code {
                    code.push(0);
                }
                ModuleImage { name, code }
            };
            files.into_iter().map(image).collect()
        })
    }
}

/// Returns the files of an archive: source file names without extensions, and contents.
pub(super) fn files_of(archive: &[u8]) -> Vec<(String, Vec<u8>)> {
    const INTACT: &str = "an embedded archive of device code is intact";
    let mut archive = tar::Archive::new(XzReader::new(archive, false));
    let files = archive.entries().expect(INTACT).map(|entry| {
        let mut entry = entry.expect(INTACT);
        let path = entry.path().expect(INTACT).to_string_lossy().into_owned();
        let name = path.split('.').next().expect(INTACT).to_owned();
        let mut code = Vec::with_capacity(entry.size() as usize + 1);
        entry.read_to_end(&mut code).expect(INTACT);
        (name, code)
    });
    files.collect()
}

/// Returns the images for a GPU with this compute capability, best first. A driver that is older
/// than the compiler may refuse machine code but accept PTX.
pub(super) fn images_for(capability: (u32, u32)) -> Vec<ModuleImages> {
    let sm_89: &[&[u8]] = &[SM_80, SM_89];
    match capability {
        (7, 5) => vec![ModuleImages::new(&[SM_75], false)],
        (9, 0) => vec![ModuleImages::new(&[SM_90A], true), ModuleImages::new(sm_89, false)],
        capability if capability >= (8, 9) => vec![ModuleImages::new(sm_89, false)],
        capability if capability >= (8, 0) => vec![ModuleImages::new(&[SM_80], false)],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(capability: (u32, u32), name: &str) -> Vec<u8> {
        let images = images_for(capability);
        let found = images[0].modules().iter().find(|image| image.name == name);
        found.unwrap_or_else(|| panic!("{capability:?} has no {name}")).code.clone()
    }

    #[test]
    fn each_gpu_generation_gets_matching_code() {
        assert!(images_for((7, 0)).is_empty(), "there are no images for GPUs older than Turing");
        assert!(images_for((9, 0))[0].is_machine_code && !images_for((9, 0))[1].is_machine_code);
        assert!(module((9, 0), "rms_norm").starts_with(b"\x7fELF"));
        for (capability, target) in [((7, 5), "sm_75"), ((8, 6), "sm_80"), ((8, 9), "sm_80"), ((12, 0), "sm_80")] {
            let text = String::from_utf8(module(capability, "rms_norm")).expect("PTX is text");
            assert!(text.contains(&format!(".target {target}")) && text.ends_with('\0'), "{capability:?}");
        }
    }

    #[test]
    fn a_later_archive_replaces_a_module_of_an_earlier_archive() {
        let products = String::from_utf8(module((8, 9), "gemm_tiled_e4m3")).expect("PTX is text");
        assert!(products.contains(".target sm_89"));
        assert_eq!(images_for((8, 9))[0].modules().len(), images_for((8, 0))[0].modules().len());
    }
}
