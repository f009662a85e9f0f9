//! Generator and test of `docs/cli.md`, which is derived from clap's definitions.
//! `BURSAR_WRITE_PAGES=1 cargo test --bin bursar reference` writes the page.

use std::fs;

use clap::{Arg, Command, CommandFactory};

use crate::{Cli, knobs};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md");

const HEAD: &str = "# The command line

`bursar COMMAND --help` prints the same texts. Flags that configure a model (`--max-model-len`, `--kv-tokens` and
others) are listed in [knobs](knobs.md). Commands exit with status 1 after an error and with 2 after an invalid flag.
";

fn page() -> String {
    let mut cli = Cli::command();
    cli.build();
    let mut page = HEAD.to_owned();
    page.push_str("\n## Every command\n\n");
    page.push_str(&table(cli.get_arguments().filter(|arg| arg.is_global_set() && is_shown(arg))));
    page.push_str(&section(&cli, "bursar"));
    for command in cli.get_subcommands().filter(|command| command.get_name() != "help") {
        page.push_str(&section(command, &format!("bursar {}", command.get_name())));
    }
    page
}

fn section(command: &Command, name: &str) -> String {
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let usage: Vec<_> = command.get_positionals().map(|arg| arg.to_string()).collect();
    let own: Vec<_> = command.get_arguments().filter(|arg| !arg.is_global_set() && is_shown(arg)).collect();
    let takes_knobs = command.get_arguments().any(|arg| arg.get_help_heading() == Some(knobs::HEADING));
    let knobs = if takes_knobs { "\nThe command also accepts the [knobs](knobs.md).\n" } else { "" };
    let table = if own.is_empty() { String::new() } else { format!("\n{}", table(own.into_iter())) };
    format!(
        "\n## `{}`\n\n{}.\n{knobs}{table}",
        [&[name.to_owned()][..], &usage].concat().join(" "),
        about.trim_end_matches('.')
    )
}

fn is_shown(arg: &Arg) -> bool {
    let is_usual = matches!(arg.get_id().as_str(), "help" | "version");
    !arg.is_hide_set() && !is_usual && arg.get_help_heading() != Some(knobs::HEADING)
}

fn table<'a>(arguments: impl Iterator<Item = &'a Arg>) -> String {
    let rows: String = arguments.map(row).collect();
    format!("| flag | default | meaning |\n|---|---|---|\n{rows}")
}

fn row(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut meaning = vec![format!("{}.", help.split_whitespace().collect::<Vec<_>>().join(" ").trim_end_matches('.'))];
    let takes_values = arg.get_action().takes_values();
    let values: Vec<_> = arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if takes_values && !values.is_empty() {
        meaning.push(format!("One of {}.", values.join(", ")));
    }
    meaning.extend(arg.get_env().map(|name| format!("Also `{}`.", name.display())));
    let defaults = arg.get_default_values().iter().filter(|_| takes_values);
    let defaults: Vec<_> = defaults.map(|value| format!("`{}`", value.display())).collect();
    let cells = [format!("`{arg}`"), defaults.join(", "), meaning.join(" ")].map(|cell| cell.replace('|', "\\|"));
    format!("| {} |\n", cells.join(" | "))
}

#[test]
fn the_command_line_page_matches_clap() {
    let expected = page();
    if std::env::var_os("BURSAR_WRITE_PAGES").is_some() {
        fs::write(PAGE, &expected).expect("the file is written");
    }
    let found = fs::read_to_string(PAGE).unwrap_or_default();
    assert!(found == expected, "docs/cli.md matches clap's help; BURSAR_WRITE_PAGES=1 writes it\n{expected}");
}
