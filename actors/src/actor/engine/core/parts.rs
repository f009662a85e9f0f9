//! Opaque data that phases own and the state machine only moves.

/// Types of the data that an engine owns. The state machine only moves this data, so tests use
/// strings in place of the data.
pub trait Parts {
    /// The plan without its worst cases.
    type Plan: Clone;
    /// The worst cases of a plan. They contain blank pictures, which are large, so they are kept
    /// only until READY.
    type MemoryRequirements: Clone;
    /// The loaded model, before sizing.
    type Loaded: Clone;
    /// A sized model: its record, memory and threads.
    type Profiled: Clone;
    /// The serving actors that currently run.
    type Children: Children + Default;
    /// The serving actors and the data that requests need.
    type Serving;
}

/// Serving actors in start order.
pub trait Children {
    type Child;

    /// Removes the children from `first` on, and any other children that cannot continue without
    /// them. Returns the removed children that may still be alive, last first.
    fn take_from(&mut self, first: usize) -> Vec<Self::Child>;
}

/// The child type of `P`.
pub type Child<P> = <<P as Parts>::Children as Children>::Child;
