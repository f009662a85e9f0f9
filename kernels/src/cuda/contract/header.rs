//! Generator of `kernels/cuda/include/contract.cuh`, the header that the device code includes.
//! `BURSAR_WRITE_PAGES=1 cargo test -p bursar-kernels contract` writes the header. Without the
//! variable, the test checks that the header matches the contract.

use std::fmt::Write;

use super::{
    numbers, row_numbers,
    sizes::{GATED_WIDTHS, HeadDim, HopperHeadDim, PackedHeadDim, SmallMRows},
};

const HEAD: &str = "\
// Constants that the host and the kernels share. Generated from kernels/src/cuda/contract: change
// them there, write this file with `BURSAR_WRITE_PAGES=1 cargo test -p bursar-kernels contract`,
// then compile (kernels/cuda/compile.py).
#pragma once

#include <stdint.h>
";

/// The constants of one family of kernels.
pub(super) struct Family {
    pub name: &'static str,
    pub about: String,
    pub items: Vec<Item>,
}

/// A constant, or a function of a size, with its description.
pub(super) struct Item {
    name: String,
    about: String,
    value: Value,
}

enum Value {
    One(u64),
    /// The name of the size, and pairs of a size and its value.
    Each(&'static str, Vec<(usize, usize)>),
}

/// A template parameter for which a kernel is compiled with several values.
pub(super) trait Size: Copy + 'static {
    const NAME: &'static str;
    const ALL: &'static [Self];
    fn number(self) -> usize;
}

impl Size for HeadDim {
    const NAME: &'static str = "HEAD_DIM";
    const ALL: &'static [Self] = &HeadDim::ALL;

    fn number(self) -> usize {
        self.elements()
    }
}

impl Size for HopperHeadDim {
    const NAME: &'static str = "HEAD_DIM";
    const ALL: &'static [Self] = &HopperHeadDim::ALL;

    fn number(self) -> usize {
        self.elements()
    }
}

impl Size for PackedHeadDim {
    const NAME: &'static str = "HEAD_DIM";
    const ALL: &'static [Self] = &PackedHeadDim::ALL;

    fn number(self) -> usize {
        self.elements()
    }
}

impl Size for SmallMRows {
    const NAME: &'static str = "ROWS";
    const ALL: &'static [Self] = &SmallMRows::ALL;

    fn number(self) -> usize {
        self.rows()
    }
}

impl Item {
    pub(super) fn constant(name: &str, about: String, value: u64) -> Self {
        Item { name: name.to_owned(), about, value: Value::One(value) }
    }

    pub(super) fn of_sizes<S: Size>(name: &str, about: String, value: impl Fn(S) -> usize) -> Self {
        let values = S::ALL.iter().map(|size| (size.number(), value(*size))).collect();
        Item { name: name.to_uppercase(), about, value: Value::Each(S::NAME, values) }
    }
}

fn header() -> String {
    let mut out = HEAD.to_owned();
    for (macro_name, about, sizes) in [
        (
            "FOR_EACH_HEAD_DIM",
            "each head dimension that attention over the KV cache is compiled for",
            numbers(&HeadDim::ALL),
        ),
        (
            "FOR_EACH_HOPPER_HEAD_DIM",
            "each head dimension that attention over the KV cache of many rows on Hopper is compiled for",
            numbers(&HopperHeadDim::ALL),
        ),
        (
            "FOR_EACH_PACKED_HEAD_DIM",
            "each head dimension that attention within packed sequences is compiled for",
            numbers(&PackedHeadDim::ALL),
        ),
        (
            "FOR_EACH_HEAD_DIM_OF_WINDOWS",
            "each head dimension that attention within many short sequences (windows) is compiled for",
            numbers(&PackedHeadDim::OF_WINDOWS),
        ),
        (
            "FOR_EACH_SMALL_M_ROWS",
            "each maximum number of rows that the GEMMs of few rows are compiled for",
            numbers(&SmallMRows::UP_TO_64),
        ),
        (
            "FOR_EACH_INT4_ROWS",
            "each maximum number of rows that gemm_small_m_int4.cu is compiled for",
            numbers(&SmallMRows::ALL),
        ),
        ("FOR_EACH_GATED_WIDTH", "each number of features per tile of gemm_medium_m.cu", GATED_WIDTHS.to_vec()),
    ] {
        write!(out, "\n// `KERNEL(..., size)` for {about}.\n#define {macro_name}(KERNEL, ...)").expect("text");
        sizes.iter().for_each(|size| write!(out, " \\\n    KERNEL(__VA_ARGS__, {size})").expect("text"));
        out.push('\n');
    }
    out.push_str("\nnamespace contract {\n");
    let families = row_numbers::families().into_iter().chain(numbers::families());
    families.for_each(|family| out.push_str(&namespace(&family)));
    out.push_str("\n}  // namespace contract\n");
    out
}

fn numbers<S: Size>(sizes: &[S]) -> Vec<usize> {
    sizes.iter().map(|size| size.number()).collect()
}

fn namespace(family: &Family) -> String {
    let items: String = family.items.iter().map(item).collect();
    format!("\n{}namespace {} {{\n{items}}}  // namespace {}\n", comment(&family.about), family.name, family.name)
}

fn item(item: &Item) -> String {
    let (name, mut out) = (&item.name, comment(&item.about));
    match &item.value {
        Value::One(value) => writeln!(out, "constexpr uint32_t {name} = {};", literal(*value)).expect("text"),
        Value::Each(size, values) => {
            let cases: String = values.iter().map(|(of, value)| format!("{size} == {of} ? {value} : ")).collect();
            writeln!(out, "template <uint32_t {size}>\nconstexpr uint32_t {name} =\n    {cases}0;").expect("text");
        }
    }
    out
}

/// Formats a value; values above `i32::MAX` are bit patterns and are easier to read in hexadecimal.
fn literal(value: u64) -> String {
    let value = u32::try_from(value).expect("the device counts in 32 bits");
    if value > i32::MAX as u32 { format!("{value:#x}u") } else { value.to_string() }
}

/// Turns doc comments into C++ line comments of at most 120 characters per line.
fn comment(about: &str) -> String {
    let mut lines = vec![String::from("//")];
    for word in about.split_whitespace() {
        if lines.last().is_some_and(|line| line.len() + 1 + word.len() > 120) {
            lines.push(String::from("//"));
        }
        let line = lines.last_mut().expect("the list of lines is not empty");
        line.push(' ');
        line.push_str(word);
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/include/contract.cuh");

    #[test]
    fn the_header_of_the_device_code_matches_the_contract() {
        let expected = header();
        if std::env::var_os("BURSAR_WRITE_PAGES").is_some() {
            fs::write(HEADER, &expected).expect("the file is written");
        }
        let found = fs::read_to_string(HEADER).unwrap_or_default();
        assert!(
            found == expected,
            "contract.cuh does not match the contract; BURSAR_WRITE_PAGES=1 writes it\n{expected}"
        );
    }
}
