//! The published crates: the dependencies that an embedder builds, and the Rust version.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use serde_json::Value;

/// The output of cargo for this workspace, with its lock file.
fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .arg("--locked")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The crates built for a dependent of `package` that enables only these features.
fn built(package: &str, features: &str) -> BTreeSet<String> {
    let tree = ["tree", "--no-default-features", "--edges=normal,build", "--prefix=none"];
    let lines = cargo(&[&tree[..], &["--package", package, "--features", features]].concat());
    lines.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn an_embedder_builds_no_command_line_dependency() {
    let of_the_command_line =
        ["clap", "clap_builder", "crossterm", "indicatif", "ratatui", "signal-hook", "tracing-subscriber"];
    let found = |package: &str, features: &str| -> Vec<&str> {
        let built = built(package, features);
        of_the_command_line.into_iter().filter(|name| built.contains(*name)).collect()
    };
    assert_eq!(found("bursar", "hub,prometheus"), Vec::<&str>::new());
    assert_eq!(found("bursar-serve", ""), Vec::<&str>::new());
    assert_eq!(found("bursar-cli", ""), of_the_command_line, "the listed crates make up the program");
}

#[test]
fn each_feature_alone_brings_its_dependencies() {
    let brings = |features: &str| {
        let built = built("bursar", features);
        [built.contains("ureq"), built.contains("axum")]
    };
    assert_eq!(brings(""), [false, false]);
    assert_eq!(brings("hub"), [true, false]);
    assert_eq!(brings("prometheus"), [false, true]);
}

#[test]
fn no_dependency_needs_a_newer_rust_than_promised() {
    let version = cargo(&["version", "--verbose"]);
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("cargo names its host");
    // Dependencies for other systems may be missing on this machine.
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--format-version=1", "--filter-platform", host])).expect("JSON");
    let rust = |package: &Value| -> Option<Vec<u32>> {
        let mut version: Vec<_> =
            package["rust_version"].as_str()?.split('.').map(|part| part.parse().expect("a number")).collect();
        version.resize(3, 0);
        Some(version)
    };
    let packages = metadata["packages"].as_array().expect("packages");
    let ours = packages.iter().find(|package| package["name"] == "bursar").expect("the package is listed");
    let promised = rust(ours).expect("the package names its Rust version");
    let newer: Vec<_> =
        packages.iter().filter(|package| rust(package).is_some_and(|wanted| wanted > promised)).collect();
    let names: Vec<_> =
        newer.iter().map(|package| format!("{} {}", package["name"], package["rust_version"])).collect();
    assert!(names.is_empty(), "packages that need a newer Rust than {promised:?}: {names:?}");

    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).expect("the README");
    let message = format!("Rust {} or later", ours["rust_version"].as_str().expect("the version was read above"));
    assert!(readme.contains(&message), "README.md does not say: {message}");
}
