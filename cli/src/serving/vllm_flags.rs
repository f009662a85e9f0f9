//! The flags of `vllm serve` that Bursar does not have. Flags that make no difference here are
//! accepted with a notice. All other flags are refused with a hint.

use std::sync::LazyLock;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::{failure::Failure, logging};

/// How Bursar treats a flag of vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// Bursar has this flag too.
    Served,
    /// A switch without effect, also with `no-` before its name. The text is the reason.
    Switch(&'static str),
    /// A flag with a value and without effect. The text is the reason.
    Value(&'static str),
    /// A refused flag. The text says what to do instead.
    Refused(&'static str),
}

/// Flags without effect that accept several values. Any other flag without effect takes at most one
/// value, so the model may follow it.
const LISTS: [&str; 2] = ["cudagraph-capture-sizes", "custom-histogram-buckets"];

#[derive(Debug)]
struct Flag {
    name: &'static str,
    /// The name with `no-` before it.
    negated: String,
    meaning: Meaning,
}

/// All flags of the table `vllm_flags.txt`.
static FLAGS: LazyLock<Vec<Flag>> = LazyLock::new(|| {
    let lines = include_str!("vllm_flags.txt").lines().filter(|line| !line.starts_with('#'));
    let flags = lines.map(|line| {
        let mut words = line.splitn(3, ' ');
        let (name, kind, why) = (words.next(), words.next(), words.next());
        let meaning = match (kind, why) {
            (Some("served"), None) => Meaning::Served,
            (Some("switch"), Some(why)) => Meaning::Switch(why),
            (Some("value"), Some(why)) => Meaning::Value(why),
            (Some("refused"), Some(why)) => Meaning::Refused(why),
            _ => panic!("vllm_flags.txt has a line of unknown form: {line}"),
        };
        let name = name.expect("a line has a word");
        Flag { name, negated: format!("no-{name}"), meaning }
    });
    flags.collect()
});

/// The flags that the user typed and that only vLLM has.
#[derive(Clone, Debug, Default)]
pub struct VllmFlags(Vec<(&'static str, Meaning)>);

impl VllmFlags {
    /// Reports the flags that have no effect.
    ///
    /// # Errors
    /// A flag would change what is served.
    pub fn check(&self) -> Result<(), Failure> {
        for (flag, meaning) in &self.0 {
            match meaning {
                Meaning::Switch(why) | Meaning::Value(why) => {
                    logging::note(format_args!("note: --{flag} has no effect: {why}"));
                }
                Meaning::Refused(instead) => {
                    return Err(Failure {
                        error: format!("--{flag} of vLLM is not supported"),
                        hint: (*instead).to_owned(),
                    });
                }
                Meaning::Served => {}
            }
        }
        Ok(())
    }
}

impl Args for VllmFlags {
    fn augment_args(command: Command) -> Command {
        FLAGS.iter().fold(command, |command, flag| {
            let arg = |name: &'static str| Arg::new(name).long(name).hide(true);
            match flag.meaning {
                Meaning::Served => command,
                Meaning::Switch(_) => command
                    .arg(arg(flag.name).action(ArgAction::SetTrue))
                    .arg(arg(flag.negated.as_str()).action(ArgAction::SetTrue)),
                Meaning::Value(_) => {
                    let arg = arg(flag.name).action(ArgAction::Append);
                    command.arg(if LISTS.contains(&flag.name) { arg.num_args(1..) } else { arg.num_args(1) })
                }
                Meaning::Refused(_) => command
                    .arg(arg(flag.name).num_args(0..).action(ArgAction::Append))
                    .arg(arg(flag.negated.as_str()).num_args(0..).action(ArgAction::Append)),
            }
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for VllmFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_typed = |name: &str| matches.value_source(name) == Some(clap::parser::ValueSource::CommandLine);
        let typed = FLAGS.iter().flat_map(|flag| {
            let names: &[&'static str] = match flag.meaning {
                Meaning::Served => &[],
                Meaning::Value(_) => &[flag.name],
                Meaning::Switch(_) | Meaning::Refused(_) => &[flag.name, flag.negated.as_str()],
            };
            names.iter().copied().filter(|name| is_typed(name)).map(|name| (name, flag.meaning)).collect::<Vec<_>>()
        });
        Ok(VllmFlags(typed.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::Options;

    fn command() -> Command {
        Options::augment_args(Command::new("serve").no_binary_name(true))
    }

    fn typed(line: &str) -> VllmFlags {
        let matches = command().try_get_matches_from(line.split_whitespace());
        VllmFlags::from_arg_matches(&matches.unwrap_or_else(|error| panic!("{error}"))).expect("all flags are accepted")
    }

    #[test]
    fn every_vllm_flag_is_served_accepted_or_refused_with_hint() {
        let command = command();
        command.clone().debug_assert();
        assert!(FLAGS.len() > 300, "{}", FLAGS.len());
        for flag in &*FLAGS {
            let known = |name: &str| {
                command.get_arguments().any(|arg| {
                    let aliases = arg.get_all_aliases().unwrap_or_default();
                    arg.get_long() == Some(name) || aliases.contains(&name)
                })
            };
            // Global flags of the program are not among the subcommand's arguments.
            let is_global = ["log-level", "tensor-parallel-size"].contains(&flag.name);
            assert!(known(flag.name) || is_global, "--{}", flag.name);
        }
    }

    #[test]
    fn flags_without_effect_are_accepted_and_unsupported_flags_refused() {
        let first = command().try_get_matches_from(["--seed", "7", "--tool-call-parser", "hermes", "org/name"]);
        let first = first.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(first.get_one::<String>("sole").map(String::as_str), Some("org/name"), "the model may be last");
        let taken = typed("a/b --enforce-eager --no-enable-prefix-caching --seed 7 --block-size 32 --max-model-len 99");
        let names: Vec<_> = taken.0.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["block-size", "no-enable-prefix-caching", "enforce-eager", "seed"]);
        assert!(taken.check().is_ok());
        for line in ["--enable-lora a/b", "--data-parallel-size 4"] {
            let failure = typed(line).check().expect_err("this flag would change what is served");
            let (error, hint) = failure.error_and_hint();
            let name = line.split(' ').next().expect("a flag");
            assert!(error.starts_with(name) && !hint.is_empty(), "{error}: {hint}");
        }
    }
}
