//! How many layers of each stack a pass runs through.

/// From the first layer on; the deeper is the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// Through so many of each stack, and then on as after the last one: for worst cases alone, whose numbers are thrown
    /// away.
    First(usize),
    /// Through all of them, as whatever is served does.
    Whole,
}

impl Depth {
    /// Layers of a stack of so many.
    pub fn of(self, layers: usize) -> usize {
        match self {
            Depth::Whole => layers,
            Depth::First(count) => layers.min(count),
        }
    }
}
