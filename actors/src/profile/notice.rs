//! What a start tells beside how far it is.

use std::{fmt, path::PathBuf};

/// Something that is no error and that somebody may want to know: a start goes on, but not as it was hoped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Pictures are resized to less than the model's own processor would, as nothing was said of them.
    PicturesLowered {
        /// Pixels of the largest by the model's own processor.
        from: u64,
        /// And as it is served.
        to: u64,
        /// Tokens of a sequence, of which a picture leaves a question and an answer a part.
        context_tokens: usize,
    },
    /// A profile that was written down does not apply, or cannot be read: the worst cases are run anew.
    ProfileIgnored {
        /// Where it is.
        file: PathBuf,
        /// Each reason, such as `driver was 580.1, is 580.2`.
        reasons: Vec<String>,
    },
    /// A profile that was written down was tried and did not hold: the worst cases are run anew.
    ProfileDropped {
        /// Where it is.
        file: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// The profile of this start could not be written down: the next start runs the worst cases anew.
    ProfileNotWritten {
        /// Where it would be.
        file: PathBuf,
        /// Why not.
        reason: String,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::PicturesLowered { from, to, context_tokens } => write!(
                f,
                "pictures are resized to {to} pixels, not to the model's own {from}, so that one leaves a question and an \
                 answer room in a context of {context_tokens} tokens; picture_pixels and context_tokens say otherwise"
            ),
            Notice::ProfileIgnored { file, reasons } => {
                let reasons = reasons.join("; ");
                write!(f, "the profile in {} does not apply and is measured anew: {reasons}", file.display())
            }
            Notice::ProfileDropped { file, reason } => {
                write!(f, "the profile in {} did not hold and is measured anew: {reason}", file.display())
            }
            Notice::ProfileNotWritten { file, reason } => {
                write!(f, "the profile was not written to {}: {reason}", file.display())
            }
        }
    }
}
