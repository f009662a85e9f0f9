//! What a start reports besides its progress.

use std::{fmt, path::PathBuf};

/// A notice that is no error: a start goes on, but not as hoped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Pictures are resized to less than the model's own processor would, because the user set no picture limit.
    PicturesLowered {
        /// Pixels of the largest picture by the model's own processor.
        from: u64,
        /// Pixels of the largest picture served.
        to: u64,
        /// Tokens of a sequence. A picture must leave room in it for a question and an answer.
        context_tokens: usize,
    },
    /// A recorded profile does not apply or cannot be read. The worst cases run anew.
    ProfileIgnored {
        /// The profile's file.
        file: PathBuf,
        /// The reasons, such as `driver was 580.1, is 580.2`.
        reasons: Vec<String>,
    },
    /// A recorded profile was tried and did not hold. The worst cases run anew.
    ProfileDropped {
        /// The profile's file.
        file: PathBuf,
        /// The error, in words.
        reason: String,
    },
    /// This start's profile could not be recorded. The next start runs the worst cases anew.
    ProfileNotWritten {
        /// The file that was not written.
        file: PathBuf,
        /// The error, in words.
        reason: String,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::PicturesLowered { from, to, context_tokens } => write!(
                f,
                "pictures are resized to {to} pixels instead of the model's {from}, so that one picture leaves room \
                 for a question and an answer in a context of {context_tokens} tokens; set picture_pixels or \
                 context_tokens to change this"
            ),
            Notice::ProfileIgnored { file, reasons } => {
                let reasons = reasons.join("; ");
                write!(f, "the profile in {} does not apply and is measured again: {reasons}", file.display())
            }
            Notice::ProfileDropped { file, reason } => {
                write!(f, "the profile in {} did not match and is measured again: {reason}", file.display())
            }
            Notice::ProfileNotWritten { file, reason } => {
                write!(f, "the profile was not written to {}: {reason}", file.display())
            }
        }
    }
}
