//! What phases hold and decisions pass on without a look inside.

/// The kinds of things that an engine holds. Decisions only move them, so tests can use names in their place.
pub trait Parts {
    /// What planning found, without the worst cases.
    type Plan: Clone;
    /// The worst cases of a plan. They hold blank pictures, which are large, so they are kept until READY only.
    type MemoryRequirements: Clone;
    /// What is loaded before sizing.
    type Loaded: Clone;
    /// A sized model: its record, memory and threads.
    type Profiled: Clone;
    /// The serving actors, or those of them that run.
    type Children: Children + Default;
    /// The serving actors, as requests see them.
    type Serving;
}

/// Serving actors in start order.
pub trait Children {
    /// One of them.
    type Child;

    /// Forgets the children from `first` on, and any others that cannot go on without them. Returns those that may
    /// still be alive, last first.
    fn take_from(&mut self, first: usize) -> Vec<Self::Child>;
}

/// A child of these parts.
pub type Child<P> = <<P as Parts>::Children as Children>::Child;
