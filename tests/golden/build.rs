//! Unpacking of the archives and the demo models' weights into cargo's output folder of this crate.
//! Cargo runs this script again whenever one of these files changes.

use std::{fs, io, path::Path};

use lzma_rust2::XzReader;

/// The demo models: the name of the unpacked folder, and the folder with compressed weights.
const DEMOS: [(&str, &str); 2] =
    [("demo", "../../model/demo/checkpoint"), ("hybrid_demo", "../../model/demo/hybrid_checkpoint")];

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=.");
    DEMOS.iter().for_each(|(_, folder)| println!("cargo:rerun-if-changed={folder}"));
    let into = std::env::var_os("OUT_DIR").expect("cargo sets it");
    let into = Path::new(&into).join("golden");
    // Remove files of an earlier build, which tests would take for recorded files.
    if into.exists() {
        fs::remove_dir_all(&into)?;
    }
    for entry in fs::read_dir(".")? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(".tar.xz") {
            tar::Archive::new(XzReader::new(fs::File::open(path)?, false)).unpack(&into)?;
        }
    }
    for (name, folder) in DEMOS {
        unpack_weights(Path::new(folder), &into.join(name))?;
    }
    Ok(())
}

/// Copies a checkpoint and decompresses its weights.
fn unpack_weights(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let name = path.file_name().expect("a file has a name").to_string_lossy().into_owned();
        match name.strip_suffix(".xz") {
            Some(name) => {
                io::copy(&mut XzReader::new(fs::File::open(&path)?, false), &mut fs::File::create(to.join(name))?)?;
            }
            // Skip a file that a developer decompressed for another tool, perhaps in an older
            // checkout.
            None if name.ends_with(".safetensors") => {}
            None => drop(fs::copy(&path, to.join(name))?),
        }
    }
    Ok(())
}
