//! What every error of this crate can be asked: what to change.

/// An error that may know what its reader should do next.
///
/// The message itself (`Display`) says what happened, the limit and the value; the hint says what to change.
///
/// ```
/// use bursar_budgets::{Bytes, Hint};
/// let error = "12 parsecs".parse::<Bytes>().unwrap_err();
/// assert!(error.hint().unwrap().contains("512MiB"));
/// ```
pub trait Hint {
    /// What to change so that this does not happen again, if we know.
    fn hint(&self) -> Option<String>;
}
