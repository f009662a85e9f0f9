//! Notices of a start, in addition to its progress.

use std::{fmt, path::PathBuf};

/// A condition that does not end a start, but that the user should know about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Pictures are resized to fewer pixels than the model's own processor would use, because the
    /// user set no picture limit.
    PicturesLowered {
        /// Pixels of the largest picture that the model's own processor would produce.
        from: u64,
        /// Pixels of the largest picture that is served.
        to: u64,
        /// Tokens that a sequence can hold. A picture, a question and an answer must fit in them.
        context_tokens: usize,
    },
    /// A recorded profile does not apply or cannot be read. The worst cases run again.
    ProfileIgnored {
        file: PathBuf,
        /// The reasons, such as `driver was 580.1, is 580.2`.
        reasons: Vec<String>,
    },
    /// A recorded profile was used and did not match. The worst cases run again.
    ProfileDropped { file: PathBuf, reason: String },
    /// The profile of this start could not be recorded. The next start runs the worst cases again.
    ProfileNotWritten { file: PathBuf, reason: String },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::PicturesLowered { from, to, context_tokens } => write!(
                f,
                "pictures are resized to {to} pixels instead of the model's {from}, so that one picture, a question \
                 and an answer fit in a context of {context_tokens} tokens; set picture_pixels or \
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
