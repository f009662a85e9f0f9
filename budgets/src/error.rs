//! What to change after an error: every error of this crate can be asked.

/// An error that may know what to change.
///
/// The message (`Display`) gives what happened, the limit and the value. The hint gives what to change.
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
