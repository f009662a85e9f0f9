//! The progress of a fetch.

use bursar_budgets::Bytes;

/// Follows the progress of a fetch, and can cancel it.
pub trait FetchWatch {
    /// Reports that `bytes` of the `bytes_total` bytes of `file` have arrived. Called every 4 MiB,
    /// and at the start and the end of a file.
    fn fetched(&self, file: &str, bytes: Bytes, bytes_total: Bytes);
    /// Returns `true` to stop the fetch. Called between pieces of 256 KiB.
    fn is_cancelled(&self) -> bool;
}

/// Ignores progress and never cancels.
impl FetchWatch for () {
    fn fetched(&self, _: &str, _: Bytes, _: Bytes) {}

    fn is_cancelled(&self) -> bool {
        false
    }
}
