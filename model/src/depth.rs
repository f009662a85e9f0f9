//! How many layers of each stack a pass runs through.

/// Counted from the first layer; the deeper compares as the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// The first layers of each stack, then on as after the last one. Only for worst cases, whose results are thrown
    /// away.
    First(usize),
    /// All layers, as in serving.
    Whole,
}

impl Depth {
    /// How many layers run of a stack of `layers`.
    pub fn of(self, layers: usize) -> usize {
        match self {
            Depth::Whole => layers,
            Depth::First(count) => layers.min(count),
        }
    }
}
