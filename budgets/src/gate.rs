//! When a model may claim memory: open, frozen, teardown.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use crate::{Bytes, Class, Hint, Label, Owner};

/// A model's gate, after the static allocator of TigerBeetle: a server takes its memory while it starts, then never asks
/// again, then gives all of it back.
///
/// | | new claimants | grow | shrink, release |
/// |---|---|---|---|
/// | open | yes | yes | yes |
/// | frozen | tenants and host memory; a known claimant up to its seat | elastic classes (kv, vision cache), tenants, host | yes |
/// | teardown | no | no | yes |
///
/// A claimant is an owner's name and a class. Its *seat* is what it held when the gate froze: a restarted actor (the same
/// name, the next generation) may claim that again, and no more unless its class is elastic.
///
/// Moves: open -> frozen, frozen -> open (profiled anew, with the weights still held), either -> teardown, and
/// teardown -> open once the model holds nothing. Tenants and host memory are not kept out by a frozen gate; only teardown
/// stops them, for requests under that model's label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Starting: the device may be asked.
    #[default]
    Open,
    /// After READY: only the elastic tails of segments move.
    Frozen,
    /// Stopping: memory only comes back.
    Teardown,
}

impl Gate {
    /// Whether a gate may move so.
    ///
    /// # Errors
    /// [`GateError`] says what is in the way.
    ///
    /// ```
    /// use bursar_budgets::{Bytes, Gate};
    /// assert!(Gate::Open.check_move("demo", Gate::Frozen, Bytes(9)).is_ok());
    /// assert!(Gate::Teardown.check_move("demo", Gate::Open, Bytes(9)).is_err());
    /// ```
    pub fn check_move(self, model: impl Into<Label>, to: Gate, held: Bytes) -> Result<(), GateError> {
        match (self, to) {
            (Gate::Open, Gate::Frozen | Gate::Teardown) | (Gate::Frozen, Gate::Open | Gate::Teardown) => Ok(()),
            (Gate::Teardown, Gate::Open) if held.is_zero() => Ok(()),
            (Gate::Teardown, Gate::Open) => Err(GateError::StillHeld { model: model.into(), held }),
            (from, to) => Err(GateError::NoSuchMove { model: model.into(), from, to }),
        }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Gate::Open => "open",
            Gate::Frozen => "frozen",
            Gate::Teardown => "teardown",
        })
    }
}

/// Why a gate did not move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum GateError {
    /// A gate does not move so.
    #[error("the gate of {model} is {from} and cannot become {to}")]
    NoSuchMove {
        /// Whose gate.
        model: Label,
        /// What it is.
        from: Gate,
        /// What it should have become.
        to: Gate,
    },
    /// A model that is torn down has to be gone before it can start again.
    #[error("the gate of {model} cannot open again: {} are still held", held.exact())]
    StillHeld {
        /// Whose gate.
        model: Label,
        /// How much of its memory is still out.
        held: Bytes,
    },
}

impl Hint for GateError {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        match self {
            GateError::NoSuchMove { .. } => None,
            GateError::StillHeld { .. } => Some("wait until its owners are cleared".into()),
        }
    }
}

/// Who held what when a gate froze.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seats(BTreeMap<(Label, Class), Bytes>);

impl Seats {
    /// Adds to what this claimant held.
    pub fn add(&mut self, owner: &Owner, class: &Class, bytes: Bytes) {
        *self.0.entry((owner.name.clone(), class.clone())).or_default() += bytes;
    }

    /// What this claimant held; nothing for one that was not there.
    pub fn seat(&self, owner: &Owner, class: &Class) -> Option<Bytes> {
        self.0.get(&(owner.name.clone(), class.clone())).copied()
    }
}
