//! Comparison of `docs/knobs.md` with the table of knobs.

use std::{fs, path::Path};

use bursar_actors::knobs::{Knob, NESTED, Peer, TABLE};

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/knobs.md");
    fs::read_to_string(path).expect("the page exists")
}

fn row(knob: &Knob) -> String {
    let names = |peer: Peer| {
        let names = knob.aliases.iter().filter(|alias| alias.of == peer).map(|alias| format!("`{}`", alias.name));
        names.collect::<Vec<_>>().join(", ")
    };
    let cells = [
        format!("`{}`", knob.name),
        knob.kind.unit().to_owned(),
        names(Peer::Vllm),
        names(Peer::Sglang),
        names(Peer::LightLlm),
        knob.sentence().to_owned(),
    ];
    format!("| {} |", cells.join(" | "))
}

/// The rows of the table with this header.
fn rows<'p>(page: &'p str, head: &str) -> Vec<&'p str> {
    let lines = page.lines().skip_while(|line| *line != head).skip(2);
    lines.take_while(|line| line.starts_with('|')).collect()
}

#[test]
fn the_knobs_page_lists_exactly_the_knobs_of_the_table() {
    let page = page();
    // An empty cell is one space in the page.
    let squeezed = |row: &str| row.replace("|  |", "| |").replace("|  |", "| |");
    let expected: Vec<_> = TABLE.iter().map(|knob| squeezed(&row(knob))).collect();
    let found: Vec<_> =
        rows(&page, "| Bursar | unit | vLLM | SGLang | LightLLM | meaning |").into_iter().map(squeezed).collect();
    assert_eq!(found, expected, "docs/knobs.md should be\n{}", expected.join("\n"));
}

#[test]
fn the_knobs_page_lists_names_that_set_several_knobs() {
    let page = page();
    let expected: Vec<_> =
        NESTED.iter().map(|nested| format!("| `{}` | vLLM | {} |", nested.name, nested.meaning)).collect();
    assert!(NESTED.iter().all(|nested| nested.of == [Peer::Vllm]));
    assert_eq!(rows(&page, "| name | of | meaning |"), expected);
}

#[test]
fn common_knob_names_of_other_engines_are_known() {
    let page = page();
    for name in [
        "max_pixels",
        "mm_processor_kwargs",
        "max_num_seqs",
        "running_max_req_size",
        "max_model_len",
        "max_req_total_len",
        "max_num_batched_tokens",
        "batch_max_tokens",
        "gpu_memory_utilization",
        "mem_fraction",
        "kv_cache_memory_bytes",
        "max_total_token_num",
        "swap_space",
        "limit_mm_per_prompt",
    ] {
        let is_known = Knob::named(name).is_some() || NESTED.iter().any(|nested| nested.name == name);
        assert!(is_known && page.contains(&format!("`{name}`")), "{name}");
    }
}
