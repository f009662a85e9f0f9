//! The trait of this crate's errors: a hint on how to resolve the error.

/// An error that may have a hint.
///
/// The message (`Display`) states what happened, the limit and the value. The hint states what to
/// change.
///
/// ```
/// use bursar_budgets::{Bytes, Hint};
/// let error = "12 parsecs".parse::<Bytes>().unwrap_err();
/// assert!(error.hint().contains("512MiB"));
/// ```
pub trait Hint {
    /// `String` if every error of the type has a hint, `Option<String>` if some have none.
    type Text: Into<Option<String>>;

    fn hint(&self) -> Self::Text;
}
