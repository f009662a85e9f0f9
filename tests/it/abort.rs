//! Programs with `panic = "abort"`: supervision cannot catch such a panic, so the runtime refuses
//! to start in them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use bursar::{Hint, RuntimeError};

/// Makes a program of two crates with this panic strategy. The lower crate contains the same source
/// file that the runtime uses to detect the strategy.
fn program(panic: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("panic-{panic}"));
    let asked = Path::new(env!("CARGO_MANIFEST_DIR")).join("../actors/src/actor/runtime/unwinding.rs");
    for crate_folder in ["src", "lower/src"] {
        fs::create_dir_all(folder.join(crate_folder)).expect("a folder in the target folder");
    }
    let write = |name: &str, text: String| fs::write(folder.join(name), text).expect("a file in that folder");
    write(
        "Cargo.toml",
        format!(
            "[package]\nname = \"upper\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\nmembers = [\"lower\"]\n\
             [dependencies]\nlower = {{ path = \"lower\" }}\n[profile.dev]\npanic = \"{panic}\"\n"
        ),
    );
    write("lower/Cargo.toml", "[package]\nname = \"lower\"\nversion = \"0.0.0\"\nedition = \"2024\"\n".to_owned());
    let module = format!("#[path = {asked:?}]\nmod unwinding;\n");
    // `pub(super)` makes the function visible in the crate's root, and
    // `panics_abort` there calls it.
    write("lower/src/lib.rs", module + "pub fn panics_abort() -> bool { unwinding::panics_abort() }\n");
    write("src/main.rs", "fn main() { println!(\"{}\", lower::panics_abort()); }\n".to_owned());
    folder
}

#[test]
fn the_library_detects_a_program_built_with_panic_abort() {
    for (panic, seen) in [("abort", "true"), ("unwind", "false")] {
        let folder = program(panic);
        let built = Command::new(env!("CARGO"))
            .args(["run", "--quiet", "--offline"])
            .current_dir(&folder)
            .env("CARGO_TARGET_DIR", folder.join("target"))
            .output()
            .expect("cargo runs");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        assert_eq!(String::from_utf8_lossy(&built.stdout).trim(), seen, "panic = {panic:?}");
    }
}

#[test]
fn the_panic_abort_error_says_what_to_change() {
    let error = RuntimeError::PanicAborts;
    assert!(error.to_string().contains("panic = \"abort\"") && error.hint().contains("unwind"));
}
