//! Number of layers of each stack that a pass runs.

/// A number of layers, counted from the first layer. A greater depth compares as greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// Only the first layers of each stack, followed by the work that normally follows the last
    /// layer. Only worst cases use this depth, because their results are discarded.
    First(usize),
    /// All layers, as in serving.
    Whole,
}

impl Depth {
    /// Number of layers that run in a stack of `layers` layers.
    pub fn of(self, layers: usize) -> usize {
        match self {
            Depth::Whole => layers,
            Depth::First(count) => layers.min(count),
        }
    }
}
