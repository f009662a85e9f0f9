//! The supervision tree, and the table of all questions that roles may ask each other.
//!
//! ```text
//! runtime
//! ├── budget              one per device; asks no other actor
//! └── engine              one per model
//!     ├── profile         until READY
//!     ├── vision          its death restarts the scheduler, whose sequences point at cache rows
//!     └── scheduler       also manages the KV blocks
//! lane                    threads of an engine, for steps and for pictures; they never ask
//! chat                    one task per request, outside the tree, so it survives the actors
//! ```
//!
//! One message is not a question: the budget sends orders to the owners of elastic leases
//! (`Budget::accept_resize_orders`), such as an engine. The budget repeats each order until the
//! owner resizes the lease. The owner sends no other reply.

use std::time::Duration;

/// A party that asks or answers questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A task of the user's program.
    User,
    /// The driver of one request.
    Chat,
    Runtime,
    /// The supervisor of one model.
    Engine,
    /// One attempt at sizing a model.
    Profile,
    /// The actor that decodes pictures and owns the vision cache.
    Vision,
    /// The actor that plans steps and allocates KV blocks.
    Scheduler,
    Lane,
    /// The actor that keeps the ledger.
    Budget,
}

impl Role {
    /// The actors of each model. A model without pictures has no vision actor.
    pub const OF_A_MODEL: [Role; 4] = [Role::Engine, Role::Profile, Role::Vision, Role::Scheduler];

    /// The role's name in metrics and events.
    pub const fn name(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Chat => "chat",
            Role::Runtime => "runtime",
            Role::Engine => "engine",
            Role::Profile => "profile",
            Role::Vision => "vision",
            Role::Scheduler => "scheduler",
            Role::Lane => "lane",
            Role::Budget => "budget",
        }
    }
}

/// A permitted question. It is answered exactly once within its deadline, including
/// on error and shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    pub from: Role,
    pub to: Role,
    /// The question, as error messages word it.
    pub what: &'static str,
    pub deadline: Duration,
}

impl Question {
    /// The same question with `duration` added to its deadline, for an answer that
    /// itself takes that long.
    pub fn after(self, duration: Duration) -> Question {
        Question { deadline: self.deadline.saturating_add(duration), ..self }
    }
}

macro_rules! questions {
    ($($(#[$doc:meta])* $name:ident: $from:ident -> $to:ident, $what:literal, $seconds:literal;)*) => {
        $($(#[$doc])* pub const $name: Question = Question {
            from: Role::$from, to: Role::$to, what: $what, deadline: Duration::from_secs($seconds),
        };)*
        pub const QUESTIONS: &[Question] = &[$($name),*];
    };
}

questions! {
    /// A user loads a model. The deadline is a day, because the files may have
    /// to be downloaded first.
    LOAD_MODEL: User -> Runtime, "load a model", 86_400;
    /// A user unloads a model or ends the runtime. The time limit that the user sets for running
    /// requests is added.
    SHUT_DOWN: User -> Runtime, "shut down", 60;
    /// A user puts a model to sleep. The time limit that the user sets for running requests is
    /// added.
    PUT_TO_SLEEP: User -> Runtime, "put a model to sleep", 600;
    /// A user asks for handles to the supervised actors.
    SUPERVISED: User -> Runtime, "supervised actors", 5;
    /// A user or an outside monitor asks whether the runtime is alive.
    HEALTH: User -> Runtime, "health", 1;
    /// A user requests a lease, which may wait until other owners return memory.
    LEASE_FOR_USER: User -> Budget, "lease", 3600;
    /// A user reads the ledger.
    SNAPSHOT_FOR_USER: User -> Budget, "snapshot", 5;
    /// A user requests a new measurement of the memory that other processes hold.
    MEASURE_FOR_USER: User -> Budget, "measure", 5;
    /// The engine requests the lease for a model's weights.
    LEASE_FOR_ENGINE: Engine -> Budget, "lease", 60;
    /// The engine waits until other models have given up memory for a start. A model that has just
    /// reclaimed lent memory gives up memory again only after ten seconds.
    MEMORY_FOR_ENGINE: Engine -> Budget, "memory for a start", 30;
    /// The runtime leases host memory for the weights of a model that is put to sleep, and resizes
    /// the lease of the model's weights.
    LEASE_FOR_SLEEP: Runtime -> Budget, "lease memory for weights", 60;
    /// The engine waits until a dead actor's bytes have been returned, before
    /// it starts the successor.
    CLEAR_OWNER: Engine -> Budget, "clear a dead owner", 60;
    /// The engine reads the canary, on which a profile depends.
    LEDGER_FOR_ENGINE: Engine -> Budget, "snapshot", 5;
    /// The engine opens, freezes or tears down a model's gate.
    MOVE_GATE: Engine -> Budget, "move the gate", 5;
    /// The profile reads the memory that this process already holds, to limit the process to a
    /// fraction of the whole device.
    SNAPSHOT_FOR_PROFILE: Profile -> Budget, "snapshot", 5;
    /// The profile requests leases for workspaces, the probe and the final cache.
    LEASE_FOR_PROFILE: Profile -> Budget, "lease or resize", 60;
    /// The profile reads the remaining memory, which determines the size of the cache.
    AVAILABLE_FOR_PROFILE: Profile -> Budget, "available memory", 5;
    /// The profile reads the bytes of every owner after a refusal.
    MEASURE_FOR_PROFILE: Profile -> Budget, "evidence", 5;
    /// The profile runs a worst case.
    STRESS: Profile -> Lane, "run a worst case", 600;
    /// The profile captures the decode step of one size as a graph.
    CAPTURE: Profile -> Lane, "capture a graph", 600;
    /// The engine captures graphs again, on a lane that replaces a dead lane.
    RECAPTURE: Engine -> Lane, "capture a graph again", 600;
    /// Vision leases host memory in which to decode a picture.
    LEASE_FOR_VISION: Vision -> Budget, "lease host memory", 600;
    /// A driver asks for pictures to be decoded, and for their embeddings to be written
    /// to the vision cache.
    EMBED_PICTURES: Chat -> Vision, "embed pictures", 600;
    /// A driver asks for the hashes of pictures that were decoded before.
    HASH_PICTURES: Chat -> Vision, "hash pictures", 600;
    /// A driver asks how many tokens of a prompt are in the prefix cache.
    LOOK_UP_PREFIX: Chat -> Scheduler, "look up a prefix", 600;
    /// The engine changes the number of blocks after READY. The scheduler answers when no running
    /// step uses a block that is removed.
    RESIZE_POOL: Engine -> Scheduler, "use another number of blocks", 600;
    /// The engine resizes the lease of the KV cache after READY.
    RESIZE_FOR_ENGINE: Engine -> Budget, "resize keys and values", 60;
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn the_graph_of_questions_has_no_cycle() {
        let mut asks: BTreeMap<Role, BTreeSet<Role>> = BTreeMap::new();
        for question in QUESTIONS {
            asks.entry(question.from).or_default().insert(question.to);
        }
        // Remove every role whose questions all go to roles already removed. Only a cycle remains.
        while let Some(done) = asks.iter().find(|(_, to)| to.iter().all(|to| !asks.contains_key(to))).map(|(r, _)| *r) {
            asks.remove(&done);
        }
        assert!(asks.is_empty(), "the questions of these roles form a cycle: {asks:?}");
    }

    #[test]
    fn lanes_and_the_budget_ask_no_other_actor() {
        for question in QUESTIONS {
            assert!(!matches!(question.from, Role::Lane | Role::Budget), "{question:?}");
            assert!(!question.deadline.is_zero(), "{question:?}");
        }
    }
}
