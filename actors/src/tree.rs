//! The supervision tree, and the one table of who may ask whom.
//!
//! ```text
//! runtime
//! ├── budget              one a device; asks nobody
//! └── engine              one a model
//!     ├── profile         until READY
//!     ├── vision          its death restarts what follows, as their sequences may point at its pictures
//!     ├── kv              likewise: their sequences point at its blocks
//!     └── scheduler
//! lane                    threads of an engine, one for steps and one for pictures; they answer and never ask
//! chat                    a task a request, outside the tree, so that no death below can lose the request
//! ```
//!
//! Who speaks without asking: the budget orders owners of elastic leases (`Budget::obey`), of which an engine is one, by a
//! message that nobody answers and that it says again; a resized lease is the answer.

use std::time::Duration;

/// Who asks or is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A user's task.
    User,
    /// The driver of one request.
    Chat,
    /// The runtime supervisor.
    Runtime,
    /// The supervisor of one model.
    Engine,
    /// One attempt at sizing.
    Profile,
    /// Pictures.
    Vision,
    /// Blocks of keys and values.
    Kv,
    /// The step batch.
    Scheduler,
    /// A device thread.
    Lane,
    /// The ledger's actor.
    Budget,
}

impl Role {
    /// The actors of each model; one without pictures has no vision.
    pub const OF_A_MODEL: [Role; 5] = [Role::Engine, Role::Profile, Role::Vision, Role::Kv, Role::Scheduler];

    /// Its name in metrics and events.
    pub const fn name(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Chat => "chat",
            Role::Runtime => "runtime",
            Role::Engine => "engine",
            Role::Profile => "profile",
            Role::Vision => "vision",
            Role::Kv => "kv",
            Role::Scheduler => "scheduler",
            Role::Lane => "lane",
            Role::Budget => "budget",
        }
    }
}

/// A question that may be asked: it is answered once, also on error and shutdown, within its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Who asks.
    pub from: Role,
    /// Who answers.
    pub to: Role,
    /// What is asked.
    pub what: &'static str,
    /// How long the asker waits.
    pub deadline: Duration,
}

impl Question {
    /// The same, for an answer that itself takes as long as this.
    pub fn after(self, duration: Duration) -> Question {
        Question { deadline: self.deadline.saturating_add(duration), ..self }
    }
}

macro_rules! questions {
    ($($(#[$doc:meta])* $name:ident: $from:ident -> $to:ident, $what:literal, $seconds:literal;)*) => {
        $($(#[$doc])* pub const $name: Question = Question {
            from: Role::$from, to: Role::$to, what: $what, deadline: Duration::from_secs($seconds),
        };)*
        /// Every question there is.
        pub const QUESTIONS: &[Question] = &[$($name),*];
    };
}

questions! {
    /// A user loads a model. A day, because its files may have to be fetched first.
    LOAD_MODEL: User -> Runtime, "load a model", 86_400;
    /// A user unloads a model or ends the runtime. What the user allows the requests under way comes on top.
    SHUT_DOWN: User -> Runtime, "shut down", 60;
    /// A user looks at the tree.
    SUPERVISED: User -> Runtime, "supervised actors", 5;
    /// A user, or who watches from outside, wants to know whether it lives.
    HEALTH: User -> Runtime, "health", 1;
    /// A user's own lease. It may wait for others to give back.
    LEASE_FOR_USER: User -> Budget, "lease", 3600;
    /// A user looks at the ledger.
    SNAPSHOT_FOR_USER: User -> Budget, "snapshot", 5;
    /// A user wants to know what other processes hold now.
    MEASURE_FOR_USER: User -> Budget, "measure", 5;
    /// A model's weights.
    LEASE_FOR_ENGINE: Engine -> Budget, "lease", 60;
    /// A dead actor's bytes are home before its successor starts.
    CLEAR_OWNER: Engine -> Budget, "clear a dead owner", 60;
    /// What is kept free of use, which a profile depends on.
    LEDGER_FOR_ENGINE: Engine -> Budget, "snapshot", 5;
    /// How far startup may go.
    MOVE_GATE: Engine -> Budget, "move the gate", 5;
    /// What is ours already, where everything of ours is to stay within a share of the device.
    SNAPSHOT_FOR_PROFILE: Profile -> Budget, "snapshot", 5;
    /// Workspaces, probe and final cache.
    LEASE_FOR_PROFILE: Profile -> Budget, "lease or resize", 60;
    /// What is left to size the cache by.
    ROOM_FOR_PROFILE: Profile -> Budget, "room", 5;
    /// Who had what when memory was refused.
    EVIDENCE_FOR_PROFILE: Profile -> Budget, "evidence", 5;
    /// A worst case, run for real.
    STRESS: Profile -> Lane, "run a worst case", 600;
    /// Decoding of some rows, captured as a graph.
    CAPTURE: Profile -> Lane, "capture a graph", 600;
    /// The same on a lane that took over from one that died.
    RECAPTURE: Engine -> Lane, "capture a graph again", 600;
    /// Host memory for a picture.
    LEASE_FOR_VISION: Vision -> Budget, "lease host memory", 600;
    /// Pictures into the vision cache.
    EMBED_PICTURES: Chat -> Vision, "embed pictures", 600;
    /// Blocks for the next step.
    ALLOT_BLOCKS: Scheduler -> Kv, "allot blocks", 5;
    /// Blocks of the tail, when the cache becomes smaller.
    SHRINK_BLOCKS: Scheduler -> Kv, "give up blocks", 5;
    /// Another number of blocks, after READY. It is answered when no step under way names one of those that go.
    RESIZE_POOL: Engine -> Scheduler, "use another number of blocks", 600;
    /// What keys and values hold from now on, after READY.
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
        // Take away whoever asks nobody that is left; a cycle would leave somebody behind.
        while let Some(done) = asks.iter().find(|(_, to)| to.iter().all(|to| !asks.contains_key(to))).map(|(r, _)| *r) {
            asks.remove(&done);
        }
        assert!(asks.is_empty(), "these roles ask each other in a circle: {asks:?}");
    }

    #[test]
    fn lanes_and_the_budget_ask_no_other_actor() {
        for question in QUESTIONS {
            assert!(!matches!(question.from, Role::Lane | Role::Budget), "{question:?}");
            assert!(!question.deadline.is_zero(), "{question:?}");
        }
    }
}
