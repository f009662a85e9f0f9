//! Positions in a JSON schema, for error messages that must not quote names chosen by the caller.

use std::fmt;

use crate::text::error::PrivateText;

/// A position in a schema. Its `Display` form omits the names that the caller chose;
/// [`path`](Self::path) includes them.
#[derive(Clone, Debug, PartialEq)]
pub struct SchemaPlace {
    outline: String,
    path: PrivateText,
}

impl SchemaPlace {
    /// A JSON pointer to the place, such as `#/properties/age/minimum`. The pointer quotes the
    /// schema: show it to the caller, never log it.
    pub fn path(&self) -> &str {
        &self.path.0
    }

    /// The place that a JSON pointer refers to. Every step is treated as a name that the caller
    /// chose.
    pub(super) fn of(pointer: &str) -> Self {
        let root = SchemaPlace { outline: "#".to_owned(), path: PrivateText("#".to_owned()) };
        pointer.split('/').skip(1).fold(root, |place, step| place.named(step))
    }

    /// The place one step deeper, by a keyword or an index.
    pub(super) fn at(&self, step: impl fmt::Display) -> Self {
        SchemaPlace {
            outline: format!("{}/{step}", self.outline),
            path: PrivateText(format!("{}/{step}", self.path())),
        }
    }

    /// The place one step deeper, by a name that the caller chose.
    pub(super) fn named(&self, name: &str) -> Self {
        SchemaPlace { outline: format!("{}/*", self.outline), path: PrivateText(format!("{}/{name}", self.path())) }
    }
}

/// The pointer with `*` in place of each name that the caller chose.
impl fmt::Display for SchemaPlace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.outline)
    }
}
