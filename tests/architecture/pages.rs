//! Rules about the pages: the beginning of the README, the length of pages,
//! links, numbers and language.

use std::{
    collections::BTreeSet,
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Files with this ending that git tracks, as paths from the root, except files in `archive`
/// folders. Untracked files in the checkout belong to the developer and are not checked. Without
/// git, the list is empty.
fn files(ending: &str) -> Vec<String> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    let Ok(listed) = listed else { return Vec::new() };
    let listed = String::from_utf8(listed.stdout).expect("paths are UTF-8");
    let files = listed.split_terminator('\0').filter(|file| file.ends_with(ending) && !file.contains("/archive/"));
    // Deleted files that are not committed yet are skipped.
    files.filter(|file| root().join(file).is_file()).map(str::to_owned).collect()
}

/// The lines of a page that are prose, with their numbers, without fenced blocks and inline code.
fn prose(text: &str) -> Vec<(usize, String)> {
    let (mut fenced, mut blank, mut in_list) = (false, true, false);
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let opens_item = ["- ", "* "].iter().any(|mark| line.trim_start().starts_with(mark))
            || line.trim_start().split_once(". ").is_some_and(|(number, _)| number.parse::<u32>().is_ok());
        in_list = opens_item || in_list && (line.starts_with(' ') || line.is_empty());
        // In Markdown an indented code block follows an empty line. In a list,
        // indentation continues an item.
        let is_code = line.starts_with("    ") && blank && !in_list;
        blank = line.is_empty() || is_code;
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced && !is_code {
            let outside_code: String = line.split('`').step_by(2).collect::<Vec<_>>().join("x");
            lines.push((number + 1, outside_code));
        }
    }
    lines
}

/// The commands in the first lines of the README, in blocks of `sh`.
fn first_commands(lines: usize) -> Vec<String> {
    let (mut inside, mut commands) = (false, Vec::new());
    for line in read("README.md").lines().take(lines) {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            line if inside => commands.push(line.to_owned()),
            _ => {}
        }
    }
    commands
}

#[test]
fn the_readme_opens_with_the_main_command_and_the_test_command() {
    let commands = first_commands(45);
    for wanted in
        ["cargo run --release -- serve", "curl -s http://127.0.0.1:8000/v1/chat/completions", "cargo test --workspace"]
    {
        assert!(commands.iter().any(|line| line.starts_with(wanted)), "README.md has `{wanted}` in its first 45 lines");
    }
    assert!(read(".ci/run").contains("README.md)\""), ".ci/run reads the test command from README.md");
}

#[test]
fn pages_stay_within_their_word_limits() {
    for (page, words_max) in [
        ("README.md", 1_000),
        ("ARCHITECTURE.md", 1_600),
        ("docs/limitations.md", 1_750),
        ("docs/glossary.md", 600),
        ("benches/h200.md", 3_500),
        ("benches/README.md", 1_500),
        ("benches/backlog.md", 1_500),
    ] {
        let words = read(page).split_whitespace().count();
        assert!(words <= words_max, "{page} has {words} words; at most {words_max}");
    }
    let changelog = read("CHANGELOG.md");
    let first = changelog.split("\n## ").find(|section| section.starts_with("0.1.0")).expect("the first release");
    assert!(first.lines().count() <= 40, "the first release takes at most 40 lines");
}

#[test]
fn decisions_are_short_numbered_and_indexed() {
    let index = read("docs/adr/README.md");
    let pages: Vec<String> = files(".md").into_iter().filter(|page| page.starts_with("docs/adr/0")).collect();
    assert!(pages.len() <= 32, "{} decisions are in force; at most 32: merge decisions about one topic", pages.len());
    for (at, page) in pages.iter().enumerate() {
        let (text, name) = (read(page), page.trim_start_matches("docs/adr/"));
        let words = text.split_whitespace().count();
        assert!(words <= 400, "{page} has {words} words; at most 400");
        assert!(name.starts_with(&format!("{:04}-", at + 1)), "{page} is decision {}", at + 1);
        assert!(text.starts_with(&format!("# {}. ", at + 1)), "{page} opens with its number and title");
        for section in ["\n## Context\n", "\n## Decision\n", "\n## Consequences\n"] {
            assert!(text.contains(section), "{page} has the section {}", section.trim());
        }
        assert!(index.contains(&format!("({name})")), "docs/adr/README.md lists {name}");
    }
}

/// The anchors that GitHub makes from a page's headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| -> String {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
        kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
    };
    headings.map(anchor).collect()
}

/// A relative path with `..` resolved.
fn resolved(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut done, component| {
        match component {
            Component::ParentDir => drop(done.pop()),
            component => done.push(component),
        }
        done
    })
}

#[test]
fn links_between_pages_have_targets() {
    let mut broken = Vec::new();
    for page in files(".md") {
        let text = read(&page);
        let (folder, outside_code) = (Path::new(&page).parent().expect("a folder"), prose(&text));
        for (number, line) in outside_code {
            for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (file, anchor) =
                    target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
                let path = if file.is_empty() { PathBuf::from(&page) } else { resolved(&folder.join(file)) };
                let is_there = root().join(&path).exists();
                let has_anchor = anchor
                    .is_none_or(|anchor| is_there && anchors(&read(&path.display().to_string())).contains(anchor));
                if !is_there || !has_anchor {
                    broken.push(format!("{page}:{number}: {target}"));
                }
            }
        }
    }
    assert!(broken.is_empty(), "links without a target:\n  {}", broken.join("\n  "));
}

/// A page, its statement, and the file and line of code that the statement follows from.
const NUMBERS: [(&str, &str, &str, &str); 22] = [
    ("ARCHITECTURE.md", "a queue of 10", "actors/src/compute/lane/mod.rs", "const QUEUE: usize = 10;"),
    (
        "ARCHITECTURE.md",
        "up to 5 s",
        "actors/src/shared/supervise/policy.rs",
        "BACK_OFF_MAX: Duration = Duration::from_secs(5)",
    ),
    ("ARCHITECTURE.md", "at most 4 attempts", "actors/src/actor/profile/core.rs", "ATTEMPTS_MAX: u32 = 4;"),
    ("ARCHITECTURE.md", "95 % of the KV blocks", "actors/src/actor/profile/core.rs", "SHRINK_PER_CENT: u64 = 95;"),
    ("ARCHITECTURE.md", "more than 2 deaths", "actors/src/client/chat/reply/driver.rs", "DEATHS_MAX: u32 = 2;"),
    ("ARCHITECTURE.md", "run 8 layers", "kernels/src/backend.rs", "AUTOTUNED_LAYERS: usize = 8;"),
    ("kernels/KERNELS.md", "kv_head, 16, head_dim", "kernels/src/kv_layer.rs", "BLOCK_TOKENS: usize = 16;"),
    ("kernels/KERNELS.md", "up to 512 experts", "kernels/src/calls/experts.rs", "EXPERTS_MAX: usize = 512;"),
    ("kernels/KERNELS.md", "and 32 per row", "kernels/src/calls/experts.rs", "TOP_MAX: usize = 32;"),
    ("kernels/KERNELS.md", "panels of 64 widened rows", "kernels/src/target.rs", "CPU_PANEL_ROWS: usize = 64;"),
    ("kernels/KERNELS.md", "up to 4 rows are dot products", "kernels/src/cpu/linear.rs", "SMALL_M_ROWS: usize = 4;"),
    ("kernels/KERNELS.md", "65,536 multiply-adds", "kernels/src/cpu/threads.rs", "COST_PER_THREAD: usize = 1 << 16;"),
    (
        "kernels/KERNELS.md",
        "heads of 32, 64, 80, 128, 256 and 512 elements",
        "kernels/src/cuda/contract/sizes.rs",
        "[32, 64, 80, 128, 256, 512]",
    ),
    ("kernels/KERNELS.md", "also supports 72", "kernels/src/cuda/contract/sizes.rs", "[32, 64, 72, 80, 128]"),
    ("kernels/KERNELS.md", "PTX 8.4", "kernels/cuda/compile.py", "PTX_VERSION = \"8.4\""),
    ("kernels/KERNELS.md", "65 to 256 rows", "kernels/src/cuda/gemm/problem.rs", "MEMORY_BOUND_ROWS: usize = 256;"),
    ("kernels/KERNELS.md", "up to 12 algorithms", "kernels/src/cuda/gemm/blas/lane.rs", "PROPOSALS: usize = 12;"),
    ("kernels/KERNELS.md", "1.15 times", "kernels/src/cuda/gemm/autotune.rs", "FAR_BEHIND: f32 = 1.15;"),
    ("kernels/KERNELS.md", "From 2,048 rows on", "kernels/src/cuda/gemm/plan.rs", "SPLIT_FROM: usize = 2048;"),
    ("kernels/KERNELS.md", "two shots from 1.5 MiB on", "kernels/src/cuda/collectives.rs", "Bytes::kib(1536)"),
    ("kernels/KERNELS.md", "read below 768 KiB", "kernels/src/cuda/collectives.rs", "Bytes::kib(768)"),
    ("kernels/KERNELS.md", "pushed up to 8 KiB", "kernels/src/cuda/collectives.rs", "Bytes::kib(8)"),
];

/// The text with every run of white space replaced by one space, as a reader sees it.
fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn numbers_in_pages_equal_those_in_the_code() {
    for (page, statement, file, code) in NUMBERS {
        assert!(in_one_line(&read(page)).contains(statement), "{page} no longer says \"{statement}\" ({file}: {code})");
        assert!(
            read(file).contains(code),
            "{file} no longer has `{code}`: correct \"{statement}\" in {page}, then this row"
        );
    }
    let page = in_one_line(&read("ARCHITECTURE.md"));
    let folders = fs::read_dir(root().join("actors/src/actor")).expect("the folder of actors");
    let actors =
        folders.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().join("actor.rs").exists())).count();
    assert!(page.contains(&format!("`actors/src/actor` has {actors} actors")), "the page must say {actors} actors");
}

#[test]
fn restart_limits_in_the_architecture_page_match_the_code() {
    let page = in_one_line(&read("ARCHITECTURE.md"));
    let (load, runtime) = (bursar::LoadOptions::default(), bursar::RuntimeConfig::default());
    for limit in [load.intensity, load.engine_intensity, runtime.budget_intensity, runtime.device_intensity] {
        let wait = match limit.back_off.as_millis() {
            0 => "no wait".to_owned(),
            milliseconds => format!("first wait {milliseconds} ms"),
        };
        let message = format!("{} within {} s, {wait}", limit.restarts_max, limit.within.as_secs());
        assert!(page.contains(&message), "ARCHITECTURE.md says \"{message}\"");
    }
}

/// Phrases that are typical of translated prose, with the usual replacement. CONTRIBUTING.md
/// has the whole list.
const REFUSED: [(&str, &str); 14] = [
    (" beside ", "next to, in addition to, compared with"),
    (" it is none", "there is no"),
    (" are none", "there are no"),
    (" those that ", "name the noun"),
    (" those who ", "name the noun"),
    ("whoever", "name who"),
    ("somebody", "name who"),
    (" so many ", "the number"),
    (" so much ", "the amount"),
    (" of its own", "separate, dedicated, its"),
    (" of their own", "separate, dedicated, their"),
    ("neighbour", "another process on the GPU"),
    ("as above.", "state the reason again"),
    (" stands there ", "is there, is listed there"),
];

#[test]
fn pages_are_written_in_plain_english() {
    let mut found = Vec::new();
    for page in files(".md").into_iter().filter(|page| page != "CONTRIBUTING.md") {
        for (number, line) in prose(&read(&page)) {
            let line = format!(" {} ", line.to_lowercase());
            for (phrase, repair) in REFUSED.iter().filter(|(phrase, _)| line.contains(phrase)) {
                found.push(format!("{page}:{number}: \"{}\": {repair}", phrase.trim()));
            }
        }
    }
    assert!(found.is_empty(), "phrases to rewrite (CONTRIBUTING.md has the style guide):\n  {}", found.join("\n  "));
}

#[test]
fn a_checkout_stays_under_46_megabytes() {
    let mut files: Vec<(u64, String)> = files("")
        .into_iter()
        .map(|file| (fs::symlink_metadata(root().join(&file)).expect("the file is there").len(), file))
        .collect();
    files.sort();
    let bytes: u64 = files.iter().map(|(bytes, _)| bytes).sum();
    let largest = &files[files.len().saturating_sub(5)..];
    assert!(bytes < 46_000_000, "a checkout has {bytes} bytes; the largest files are {largest:?}");
}
