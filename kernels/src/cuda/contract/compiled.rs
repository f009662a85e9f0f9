//! Tests that compare the table of entry points with the device code: which entry points were
//! compiled, and which sources wait for the preceding kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fs,
    path::{Path, PathBuf},
};

use super::entry_points::{EntryPoint, EntryPoints, Generation};
use crate::{DType, cuda::module_images::files_of};

/// Names of entry points by source file.
type BySource = BTreeMap<String, BTreeSet<String>>;

/// File name ending of the target for which only some sources are compiled. A device of this target
/// uses the preceding target's code for all other files.
const PARTIAL: &str = ".sm_89.ptx";

const TURING: Generation = Generation { is_hopper: false, has_int4: false };
const AMPERE: Generation = Generation { is_hopper: false, has_int4: true };
const HOPPER: Generation = Generation { is_hopper: true, has_int4: true };

/// For each target: the file name ending of its compiled files, the activation types, and its
/// generation.
const TARGETS: [(&str, &[DType], Generation); 4] = [
    (".sm_75.ptx", &[DType::F16], TURING),
    (".sm_80.ptx", &[DType::F16, DType::BF16], AMPERE),
    (PARTIAL, &[DType::F16, DType::BF16], AMPERE),
    (".sm_90a.cubin", &[DType::F16, DType::BF16], HOPPER),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")
}

fn entry_points(activations: &[DType], generation: Generation) -> Vec<EntryPoint> {
    let mut all = Vec::new();
    for activation in activations {
        let found = EntryPoints::find(*activation, generation, |entry| {
            all.push(entry);
            Ok::<_, Infallible>(())
        });
        assert!(found.is_ok());
    }
    all
}

fn in_table(activations: &[DType], generation: Generation) -> BySource {
    let mut table = BySource::new();
    for EntryPoint { source, name, .. } in entry_points(activations, generation) {
        table.entry(source.to_owned()).or_default().insert(name);
    }
    table
}

fn in_compiled_files(ending: &str) -> BySource {
    let target = ending.split('.').nth(1).expect("the file ending names its target");
    let archive =
        fs::read(folder().join(format!("compiled/{target}.tar.xz"))).expect("the kernels were compiled for the target");
    let named = files_of(&archive).into_iter().map(|(source, code)| {
        let names = if ending.ends_with("ptx") { entries_of_ptx(&code) } else { entries_of_cubin(&code) };
        (source, names)
    });
    named.collect()
}

/// Returns the entry points of a PTX file: the names that follow `.entry`.
fn entries_of_ptx(code: &[u8]) -> BTreeSet<String> {
    let text = std::str::from_utf8(code).expect("PTX is text");
    let entries = text.lines().filter_map(|line| line.split_once(".entry ").map(|(_, name)| name));
    entries.map(|name| name.trim_end_matches('(').to_owned()).collect()
}

/// Returns the entry points of a cubin. Each entry point has a constant bank for its parameters, in
/// a section (ELF64, little-endian) that is named after the entry point.
fn entries_of_cubin(code: &[u8]) -> BTreeSet<String> {
    let number = |at: usize, bytes: usize| {
        code[at..at + bytes].iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    // Fields of the ELF header: e_shoff, e_shentsize, e_shnum and e_shstrndx. The fields of section
    // headers that are read below are sh_offset and sh_name.
    let (headers, size, count, names) = (number(0x28, 8), number(0x3a, 2), number(0x3c, 2), number(0x3e, 2));
    let names = number(headers + names * size + 0x18, 8);
    let name_of = |section: usize| {
        let name = &code[names + number(headers + section * size, 4)..];
        String::from_utf8_lossy(name.split(|byte| *byte == 0).next().expect("the name ends with a zero byte"))
            .into_owned()
    };
    (0..count).filter_map(|section| Some(name_of(section).strip_prefix(".nv.constant0.")?.to_owned())).collect()
}

/// Returns the code of a source and of all project files that it includes, without comments and
/// without `kernel_order.cuh`, which defines the wait.
fn code_of(source: &str) -> String {
    let (mut left, mut seen, mut code) = (vec![folder().join(format!("{source}.cu"))], BTreeSet::new(), String::new());
    while let Some(path) = left.pop() {
        if path.ends_with("kernel_order.cuh") || !seen.insert(path.clone()) {
            continue;
        }
        for line in fs::read_to_string(&path).expect("the included source exists").lines() {
            let line = line.split("//").next().unwrap_or_default();
            if let Some(name) = line.trim().strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
                let beside = path.with_file_name(name);
                left.push(if beside.exists() { beside } else { folder().join("include").join(name) });
            }
            code.push_str(line);
            code.push('\n');
        }
    }
    code
}

#[test]
fn the_table_has_every_compiled_entry_point_and_no_other() {
    for (ending, activations, generation) in TARGETS {
        let (mut table, compiled) = (in_table(activations, generation), in_compiled_files(ending));
        if ending == PARTIAL {
            table.retain(|source, _| compiled.contains_key(source));
            assert!(!table.is_empty());
        }
        assert_eq!(table, compiled, "{ending}");
    }
}

#[test]
fn kernel_sources_wait_exactly_where_the_table_says() {
    let all = [HOPPER, AMPERE].into_iter().flat_map(|generation| entry_points(&[DType::F16], generation));
    let waits: BTreeMap<_, _> = all.map(|entry| (entry.source, entry.waits)).collect();
    assert!(waits.values().any(|waits| *waits) && waits.values().any(|waits| !waits));
    for (source, waits) in waits {
        assert_eq!(code_of(source).contains("wait_for_previous_kernel()"), waits, "{source}.cu");
    }
}

#[test]
fn a_missing_entry_point_fails_the_search() {
    let found = EntryPoints::find(DType::F32, TURING, |entry| match entry.name.as_str() {
        "embed_f32" => Err(entry.name),
        _ => Ok(()),
    });
    assert_eq!(found.err().as_deref(), Some("embed_f32"));
}
