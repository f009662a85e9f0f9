//! Flags for knobs: one flag for each name and alias in the knob table.

use std::{fmt, fs, path::PathBuf, sync::LazyLock, time::Duration};

use bursar::{
    BlasSearch, Bytes, LoadOptions, RuntimeConfig,
    knobs::{Kind, Knob, KnobError, Knobs, NESTED, Names, Setting, TABLE},
};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use serde::{
    Deserialize,
    de::{Deserializer, MapAccess, Visitor},
};
use serde_json::Value;

use crate::{failure::Failure, hub, logging};

/// The knobs that the user set by flags or in a file.
#[derive(Clone, Debug, Default)]
pub struct KnobOptions {
    file: Option<PathBuf>,
    /// The name in the table and the text of the value, for each flag that was set. In the table's
    /// order.
    typed: Vec<(&'static str, String)>,
}

impl KnobOptions {
    /// Returns the options to load a model with.
    ///
    /// # Errors
    /// A knob is refused. The failure says what to set instead.
    pub fn options(&self, blas: BlasSearch) -> Result<LoadOptions, Failure> {
        self.over(LoadOptions { blas, ..LoadOptions::default() })
    }

    /// Like [`options`](Self::options), but applies the knobs on top of a command's own options.
    ///
    /// # Errors
    /// See [`options`](Self::options).
    pub fn over(&self, base: LoadOptions) -> Result<LoadOptions, Failure> {
        let (knobs, names) = self.named()?;
        Ok(LoadOptions { names, ..hub::used_by(knobs.over(base)?) })
    }

    /// Returns the settings of a runtime that serves `models` models on `devices` devices. The
    /// caller sets the device itself. The runtime may lease `host` bytes of host memory, or the
    /// number of bytes that a knob sets, plus the host tiers: `swap_space` for each model on each
    /// device.
    ///
    /// # Errors
    /// See [`options`](Self::options).
    pub fn runtime(&self, host: Bytes, models: usize, devices: usize) -> Result<RuntimeConfig, Failure> {
        let knobs = self.knobs()?;
        let swap = knobs.swap_bytes().unwrap_or(Bytes::ZERO).0.saturating_mul((models * devices) as u64);
        let turn = knobs.sleep_for_memory.filter(|seconds| *seconds > 0);
        Ok(RuntimeConfig {
            canary: knobs.canary,
            host_bytes: knobs.host_bytes.unwrap_or(host).saturating_add(Bytes(swap)),
            sleep_for_memory: turn.map(|seconds| Duration::from_secs(seconds as u64)),
            ..RuntimeConfig::default()
        })
    }

    /// Returns the device bytes that the runtime must keep unused, if the knob is set.
    ///
    /// # Errors
    /// See [`options`](Self::options).
    pub fn canary(&self) -> Result<Option<Bytes>, Failure> {
        Ok(self.knobs()?.canary)
    }

    /// Returns all knobs from the file and from flags.
    ///
    /// # Errors
    /// See [`options`](Self::options). Also fails if the file does not contain a JSON object of
    /// knobs.
    pub fn knobs(&self) -> Result<Knobs, Failure> {
        Ok(self.named()?.0)
    }

    /// Reports settings that have no effect and former names, as log events, and on a terminal also
    /// as notices.
    ///
    /// # Errors
    /// See [`knobs`](Self::knobs).
    pub fn report_notes(&self) -> Result<(), Failure> {
        for note in self.notes()? {
            tracing::info!(note, "understood");
            if logging::is_watched() {
                logging::note(format_args!("note: {note}"));
            }
        }
        Ok(())
    }

    fn notes(&self) -> Result<Vec<String>, Failure> {
        let (knobs, names) = self.named()?;
        let former = names
            .former()
            .map(|(former, now)| format!("{former} is the former name of {now} and works for one release; use {now}"));
        Ok(knobs.notes().into_iter().map(str::to_owned).chain(former).collect())
    }

    fn named(&self) -> Result<(Knobs, Names), Failure> {
        let of_file = self.file.as_ref().map(read).transpose()?.unwrap_or_default().0;
        // `auto` is the same as no value: the model's own limit applies, as far as memory allows.
        let is_auto = |name: &str, value: &str| name == "max_model_len" && matches!(value, "auto" | "-1");
        let typed = self
            .typed
            .iter()
            .filter(|(name, value)| !is_auto(name, value))
            .map(|(name, value)| ((*name).to_owned(), Value::String(value.clone())));
        Ok(Knobs::named_from(of_file.into_iter().chain(typed))?)
    }
}

/// The settings of a file, in the file's order. Duplicates are kept, so that contradictions are
/// found.
#[derive(Default)]
struct Settings(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Settings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Pairs)
    }
}

struct Pairs;

impl<'de> Visitor<'de> for Pairs {
    type Value = Settings;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object of knobs")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Settings, A::Error> {
        let mut settings = Vec::new();
        while let Some(setting) = map.next_entry()? {
            settings.push(setting);
        }
        Ok(Settings(settings))
    }
}

fn read(path: &PathBuf) -> Result<Settings, Failure> {
    let failure = |error: String| Failure {
        error: format!("{}: {error}", path.display()),
        hint: "name a file that contains a JSON object of knobs".to_owned(),
    };
    let text = fs::read_to_string(path).map_err(|error| failure(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| failure(error.to_string()))
}

impl From<KnobError> for Failure {
    fn from(error: KnobError) -> Self {
        Failure::of(&error)
    }
}

/// A flag that sets a knob by one of its names.
struct Flag {
    /// The name in the table: the knob's name or an alias.
    name: &'static str,
    /// The flag's own name, with hyphens.
    long: String,
    help: String,
    value: String,
    is_alias: bool,
}

/// All flags, in the table's order. Each alias follows its knob.
static FLAGS: LazyLock<Vec<Flag>> = LazyLock::new(|| {
    let of_knob = |knob: &'static Knob| {
        let aliases = knob.aliases.iter().map(|alias| format!("--{}", hyphens(alias.name))).collect::<Vec<_>>();
        let also = if aliases.is_empty() { String::new() } else { format!(" [aliases: {}]", aliases.join(", ")) };
        let flag = |name: &'static str, is_alias| Flag {
            name,
            long: hyphens(name),
            help: format!("{}{also}", knob.sentence().trim_end_matches('.')),
            value: knob.kind.unit().to_uppercase(),
            is_alias,
        };
        std::iter::once(flag(knob.name, false))
            .chain(knob.aliases.iter().map(move |a| flag(a.name, true)))
            .collect::<Vec<_>>()
    };
    let nested = NESTED.iter().map(|nested| Flag {
        name: nested.name,
        long: hyphens(nested.name),
        help: nested.meaning.trim_end_matches('.').to_owned(),
        value: "JSON".to_owned(),
        is_alias: false,
    });
    TABLE.iter().flat_map(of_knob).chain(nested).collect()
});

fn hyphens(name: &str) -> String {
    name.replace('_', "-")
}

/// Returns the flag of a setting, and the value to type after it.
pub fn flag(Setting { name, value }: &Setting) -> (String, String) {
    (format!("--{}", hyphens(name)), value.to_string())
}

const FILE: &str = "knobs";

pub const HEADING: &str = "Knobs of the model (docs/knobs.md)";

impl Args for KnobOptions {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new(FILE)
            .long(FILE)
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .help("File with a JSON object of the knobs below, by any of their names")
            .help_heading(HEADING);
        // Define one flag for each name, so that an error can quote the name that was typed.
        FLAGS.iter().fold(command.arg(file), |command, flag| {
            let kind = Knob::named(flag.name).map(|knob| knob.kind);
            let is_number =
                matches!(kind, Some(Kind::Count(_) | Kind::CountOrNone(_) | Kind::Fraction | Kind::Gibibytes));
            let arg = Arg::new(flag.name)
                .long(flag.long.as_str())
                .value_name(flag.value.as_str())
                .help(flag.help.as_str())
                .help_heading(HEADING)
                .hide(flag.is_alias)
                .allow_negative_numbers(is_number)
                .action(ArgAction::Append);
            // A switch takes a value only after an equals sign. The next word is not its value.
            command.arg(match kind {
                Some(Kind::Switch) => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
                _ => arg,
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KnobOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let typed = FLAGS.iter().flat_map(|flag| {
            let values = matches.get_many::<String>(flag.name).into_iter().flatten();
            values.map(|value| (flag.name, value.clone()))
        });
        Ok(KnobOptions { file: matches.get_one(FILE).cloned(), typed: typed.collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(arguments: &[&str]) -> KnobOptions {
        let command = KnobOptions::augment_args(Command::new("bursar").no_binary_name(true));
        command.clone().debug_assert();
        let arguments = crate::flag_spelling::as_ours(arguments.iter().map(Into::into));
        let matches = command.try_get_matches_from(arguments).unwrap_or_else(|error| panic!("{error}"));
        KnobOptions::from_arg_matches(&matches).expect("all knobs are accepted")
    }

    #[test]
    fn every_knob_name_is_a_flag_with_hyphens_or_underscores() {
        for flag in FLAGS.iter().filter(|flag| flag.value != "JSON") {
            let value = match Knob::named(flag.name).map(|knob| knob.kind) {
                Some(Kind::Type) => "half",
                Some(Kind::Format | Kind::CacheType) => "fp8",
                Some(Kind::StateType) => "bf16",
                Some(Kind::DraftFormat) => "int4",
                Some(Kind::Method) => "ngram",
                Some(Kind::Switch) => "true",
                Some(Kind::Weights) => "gold=4",
                _ => "1",
            };
            let by_hyphens = typed(&[&format!("--{}={value}", flag.long)]).knobs();
            let by_underscores = typed(&[&format!("--{}={value}", flag.name)]).knobs();
            let knobs = by_hyphens.unwrap_or_else(|failure| panic!("{}: {failure}", flag.long));
            assert_ne!(knobs, Knobs::default(), "{}", flag.long);
            assert_eq!(by_underscores.expect("both spellings are the same"), knobs, "{}", flag.name);
        }
    }

    #[test]
    fn a_former_name_sets_its_knob_and_says_which_name_replaces_it() {
        let former = typed(&["--sleep-for-room", "10"]);
        assert_eq!(former.knobs().expect("the former name is accepted").sleep_for_memory, Some(10));
        let expected =
            "sleep_for_room is the former name of sleep_for_memory and works for one release; use sleep_for_memory";
        assert_eq!(former.notes().expect("the former name is accepted"), [expected]);
        let now = typed(&["--sleep-for-memory", "10"]);
        assert_eq!(now.knobs().expect("the name is accepted"), former.knobs().expect("the former name is accepted"));
        assert!(now.notes().expect("the name is accepted").is_empty());
    }

    #[test]
    fn contradicting_aliases_of_a_knob_are_refused_by_name() {
        let failure = typed(&["--max-num-seqs", "4", "--sequences", "8"]).knobs().expect_err("the two values differ");
        let (error, hint) = failure.error_and_hint();
        assert!(error.contains("--max-num-seqs is 4") && error.contains("--sequences is 8"), "{failure}");
        assert!(hint.contains("--max-num-seqs") && hint.contains("--sequences"), "{failure}");
        let same = typed(&["--max-num-seqs", "4", "--sequences", "4", "--sequences=4"])
            .knobs()
            .expect("equal values are accepted");
        assert_eq!(same.sequences, Some(4));
    }
}
