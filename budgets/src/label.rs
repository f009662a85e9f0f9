//! The name of an owner or a model, cheap to clone.

use std::{borrow::Borrow, fmt, sync::Arc};

use serde::{Serialize, Serializer};

/// The name of an owner or a model, cheap to clone. It must contain no prompt text, because
/// labels appear in metrics.
///
/// ```
/// use bursar_budgets::Label;
/// assert_eq!(Label::from("demo").as_str(), "demo");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Label(Arc<str>);

impl Label {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Label {
    fn from(text: &str) -> Self {
        Label(Arc::from(text))
    }
}

impl From<String> for Label {
    fn from(text: String) -> Self {
        Label(Arc::from(text))
    }
}

impl From<&Label> for Label {
    fn from(label: &Label) -> Self {
        label.clone()
    }
}

impl From<&Label> for Arc<str> {
    /// Shares the text instead of copying it.
    fn from(label: &Label) -> Self {
        label.0.clone()
    }
}

impl Borrow<str> for Label {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Serialize for Label {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}
