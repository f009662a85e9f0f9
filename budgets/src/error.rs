//! What to change after an error: every error of this crate can be asked.

/// An error that may know what to change.
///
/// The message (`Display`) gives what happened, the limit and the value. The hint gives what to change.
///
/// ```
/// use bursar_budgets::{Bytes, Hint};
/// let error = "12 parsecs".parse::<Bytes>().unwrap_err();
/// assert!(error.hint().unwrap().contains("512MiB"));
/// ```
pub trait Hint {
    /// What to change to avoid this error, if known.
    fn hint(&self) -> Option<String>;
}
