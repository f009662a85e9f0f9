//! How many layers of each stack a pass runs through.

/// From the first layer on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Through all of them, as whatever is served does.
    Whole,
    /// Through so many of each stack, and then on as after the last one: for worst cases alone, whose numbers are thrown
    /// away.
    First(usize),
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
