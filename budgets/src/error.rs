//! What an error can be asked beside its message: what to change.

/// An error that may know what its reader should do next.
///
/// The message itself (`Display`) says what happened, the limit and the value; the hint says what to change.
///
/// ```
/// use bursar_budgets::{Bytes, Hint};
/// let error = "12 parsecs".parse::<Bytes>().unwrap_err();
/// assert!(error.hint().contains("512MiB"));
/// ```
pub trait Hint {
    /// `String` where every error of the type has a hint, `Option<String>` where some have none.
    type Text: Into<Option<String>>;

    /// What the user can change.
    fn hint(&self) -> Self::Text;
}
