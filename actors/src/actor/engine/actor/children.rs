//! The serving actors, and the types that a production engine uses for [`Parts`].

use std::sync::Arc;

use ractor::{ActorCell, ActorRef};

use crate::{
    engine::{
        Serving, core,
        core::{Input, Parts},
        start::{Loaded, StartPlan},
    },
    profile::{MemoryRequirements, Profiled},
    scheduler::SchedulerMessage,
    tree::Role,
    vision::VisionMessage,
};

/// The [`Parts`] of a production engine. Tests of the state machine use strings instead.
pub struct ActorParts;

impl Parts for ActorParts {
    type Plan = StartPlan;
    type MemoryRequirements = Arc<MemoryRequirements>;
    type Loaded = Loaded;
    type Profiled = Arc<Profiled>;
    type Children = Children;
    type Serving = Serving;
}

/// The serving actors, in start order. The scheduler's sequences may refer to vision cache rows
/// that the vision actor assigned, so the death of the vision actor also ends the scheduler.
#[derive(Default)]
pub struct Children {
    pub(super) vision: Option<ActorRef<VisionMessage>>,
    pub(super) scheduler: Option<ActorRef<SchedulerMessage>>,
}

/// The roles of the children, in start order.
pub(super) const CHILDREN: [Role; 2] = [Role::Vision, Role::Scheduler];

impl Children {
    pub(super) fn cells(&self) -> [Option<ActorCell>; CHILDREN.len()] {
        [self.vision.as_ref().map(ActorRef::get_cell), self.scheduler.as_ref().map(ActorRef::get_cell)]
    }

    fn index_of(&self, cell: &ActorCell) -> Option<usize> {
        self.cells().iter().position(|child| child.as_ref().is_some_and(|child| child.get_id() == cell.get_id()))
    }

    /// Returns the input that reports the death of one of these children. Returns `None` if the
    /// dead actor is no longer a child, because it was stopped for the restart of another child.
    pub(super) fn death(&self, cell: &ActorCell, reason: String) -> Option<Input<ActorParts>> {
        let index = self.index_of(cell)?;
        Some(Input::ChildDied { actor: CHILDREN[index], first: index, reason })
    }
}

impl core::Children for Children {
    type Child = ActorCell;

    /// Removes the children from `first` on. Returns the removed children that may still be alive,
    /// last first.
    fn take_from(&mut self, first: usize) -> Vec<ActorCell> {
        let cells = self.cells();
        if first == 0 {
            self.vision = None;
        }
        self.scheduler = None;
        cells.into_iter().skip(first).flatten().rev().collect()
    }
}
