//! Reports of failures: what happened and why, and what to change, in terms of flags.

use std::{collections::BTreeSet, error::Error, fmt, io, process::ExitCode, sync::LazyLock};

use bursar::{ChatError, FaultPlanError, Hint, ImageError, RuntimeError};
use clap::CommandFactory;

use crate::Cli;

use crate::logging;

#[derive(Debug)]
pub struct Failure {
    pub error: String,
    pub hint: String,
}

impl Failure {
    /// Returns the error and the hint in this program's terms: a setting in backticks becomes its
    /// flag.
    pub fn error_and_hint(&self) -> (String, String) {
        (with_flags(&self.error), with_flags(&self.hint))
    }

    /// Returns a failure with the text of an error and its hint.
    pub fn of<E: Error + Hint>(error: &E) -> Self {
        Failure { error: error.to_string(), hint: error.hint().into().unwrap_or_default() }
    }

    /// Returns a failure with the text of an error and of its chain of sources. Most errors already
    /// quote their source, so a source that the text contains is not repeated.
    fn with_reasons<E: Error + Hint>(error: &E) -> Self {
        let mut failure = Failure::of(error);
        let mut source = error.source();
        while let Some(reason) = source {
            add(&mut failure.error, &reason.to_string());
            source = reason.source();
        }
        failure
    }
}

/// Appends a reason unless the text already contains it.
fn add(message: &mut String, reason: &str) {
    if !message.contains(reason) {
        *message = format!("{message}: {reason}");
    }
}

/// Library fields whose flag or environment variable has another name.
const FIELDS: [(&str, &str); 5] = [
    ("ImageLimits::bytes_max", "--picture-file-bytes"),
    ("ImageLimits::pixels_max", "--picture-source-pixels"),
    ("DeviceChoice::Host", "--device host"),
    ("HubOptions::cache", "HF_HUB_CACHE"),
    ("HubOptions::endpoint", "HF_ENDPOINT"),
];

/// Every flag of every command, with underscores like the names of library fields.
static FLAGS: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
    fn flags(command: &clap::Command) -> Vec<String> {
        let own = command.get_arguments().filter_map(|argument| argument.get_long());
        let own = own.map(|long| long.replace('-', "_"));
        own.chain(command.get_subcommands().flat_map(flags)).collect()
    }
    flags(&Cli::command()).into_iter().collect()
});

/// Replaces settings in backticks with their flags.
fn with_flags(text: &str) -> String {
    let (mut message, mut rest) = (String::with_capacity(text.len()), text);
    while let Some((before, (name, after))) = rest.split_once('`').and_then(|(b, on)| Some((b, on.split_once('`')?))) {
        message += before;
        match FIELDS.iter().find(|(field, _)| *field == name) {
            Some((_, flag)) => message += flag,
            None if FLAGS.contains(name) => message += &format!("--{}", name.replace('_', "-")),
            None => message += &format!("`{name}`"),
        }
        rest = after;
    }
    message + rest
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (error, hint) = self.error_and_hint();
        write!(f, "error: {error}\n hint: {hint}")
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        Failure::with_reasons(&error)
    }
}

impl From<ChatError> for Failure {
    fn from(error: ChatError) -> Self {
        let mut failure = Failure::with_reasons(&error);
        failure.error = failure.error.replacen(&error.to_string(), &error.for_author(), 1);
        failure
    }
}

impl From<FaultPlanError> for Failure {
    fn from(error: FaultPlanError) -> Self {
        Failure::with_reasons(&error)
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Failure::with_reasons(&error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure { error: error.to_string(), hint: "check the source of the input".to_owned() }
    }
}

/// Prints a failure on standard error, in the format given by `--log`.
pub fn print(failure: &Failure) {
    let (error, hint) = failure.error_and_hint();
    logging::fail(&error, &hint);
}

/// Prints a failure, if any, and returns the exit code.
pub fn report(outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            print(&failure);
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_names_become_flags_and_other_words_stay() {
        let with_names = |text: &str| with_flags(text);
        assert_eq!(with_names("raise `max_tokens`, or `capacity`"), "raise --max-tokens, or --capacity");
        assert_eq!(with_names("raise `ImageLimits::bytes_max`"), "raise --picture-file-bytes");
        assert_eq!(with_names("`do_resize` and max_tokens"), "`do_resize` and max_tokens");
        assert_eq!(with_names("one ` alone `max_tokens"), "one ` alone `max_tokens");
    }
}
