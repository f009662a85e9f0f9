//! What a start tells beside how far it is.

use std::{fmt, path::PathBuf};

/// Something that is no error and that somebody may want to know: a start goes on, but not as it was hoped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
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
