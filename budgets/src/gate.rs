//! When a model may claim memory: open, frozen, teardown.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use crate::{Bytes, Class, Hint, Label, Owner};

/// A model's gate, after TigerBeetle's static allocator: a server takes its memory while it starts, asks for no more
/// while it runs, and gives all of it back when it stops.
///
/// | | new claimants | grow | shrink, release |
/// |---|---|---|---|
/// | open | yes | yes | yes |
/// | frozen | tenants and host memory; a known claimant up to its seat | elastic classes (kv, vision cache), tenants, host | yes |
/// | teardown | no | no | yes |
///
/// A claimant is an owner's name and a class. Its *seat* is what it held when the gate froze. A restarted actor (same
/// name, next generation) may claim its seat again, and more only if its class is elastic.
///
/// Moves: open -> frozen; frozen -> open (to profile again with the weights still held); either -> teardown; teardown
/// -> open once the model holds nothing. Tenants and host memory pass a frozen gate. Only teardown stops them, for
/// requests under that model's label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Starting: claimants may take memory.
    #[default]
    Open,
    /// After READY: the only new claimants are tenants and host memory, and only these and elastic classes grow.
    Frozen,
    /// Stopping: memory is only given back.
    Teardown,
}

impl Gate {
    /// Checks whether a gate may make this move.
    ///
    /// # Errors
    /// [`GateError`], with the reason.
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
    /// No gate makes this move.
    #[error("the gate of {model} is {from} and cannot become {to}")]
    NoSuchMove {
        /// The model.
        model: Label,
        /// The gate's state.
        from: Gate,
        /// The state that was wanted.
        to: Gate,
    },
    /// A model that was torn down must give everything back before it starts again.
    #[error("the gate of {model} cannot reopen: the model still holds {}", held.exact())]
    StillHeld {
        /// The model.
        model: Label,
        /// How much it still holds.
        held: Bytes,
    },
}

impl Hint for GateError {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        match self {
            GateError::NoSuchMove { .. } => None,
            GateError::StillHeld { .. } => Some("wait until the model's owners are cleared".into()),
        }
    }
}

/// What each claimant held when a gate froze.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservations(BTreeMap<(Label, Class), Bytes>);

impl Reservations {
    /// Adds to what this claimant held.
    pub fn add(&mut self, owner: &Owner, class: &Class, bytes: Bytes) {
        *self.0.entry((owner.name.clone(), class.clone())).or_default() += bytes;
    }

    /// What this claimant held; `None` if it held nothing.
    pub fn seat(&self, owner: &Owner, class: &Class) -> Option<Bytes> {
        self.0.get(&(owner.name.clone(), class.clone())).copied()
    }
}
