//! A sequence's standing among those that wait.

/// What decides when a sequence is served, besides its age.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Lower is served earlier, as in vLLM.
    pub priority: i32,
}
