//! The gate of a model, which decides when the model may claim memory: open, frozen or teardown.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use crate::{Bytes, Class, Hint, Label, Owner};

/// A model's gate, modeled on TigerBeetle's static allocation: a server takes its memory while it
/// starts, asks for no more while it runs, and returns all of it when it stops.
///
/// | | new claimants | grow | shrink, release |
/// |---|---|---|---|
/// | open | yes | yes | yes |
/// | frozen | classes external and host, and known claimants up to their reservation | elastic classes (kv, vision cache), external, host, and other classes up to their reservation | yes |
/// | teardown | no | no | yes |
///
/// A claimant is an owner's name and a class. The claimant's *reservation* is the number of bytes
/// that it held when the gate froze. A restarted actor (same name, next generation) may claim its
/// reservation again. It may claim more only if its class is elastic.
///
/// Allowed transitions:
/// - open -> frozen
/// - frozen -> open, to profile again with the weights still held
/// - open or frozen -> teardown
/// - teardown -> open, once the model holds nothing
///
/// A frozen gate admits requests of the classes [`External`](Class::External) and
/// [`Host`](Class::Host). A gate in teardown refuses these requests too if they name this model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Starting: claimants may take memory.
    #[default]
    Open,
    /// After READY: the only new claimants have class external or host. Only these claimants and
    /// elastic classes grow beyond their reservation.
    Frozen,
    /// Stopping: memory is only returned.
    Teardown,
}

impl Gate {
    /// Checks whether this transition is allowed.
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum GateError {
    /// This transition does not exist.
    #[error("the gate of {model} is {from} and cannot become {to}")]
    NoSuchMove { model: Label, from: Gate, to: Gate },
    /// The model still holds memory. After teardown, a model must return all memory before it
    /// starts again.
    #[error("the gate of {model} cannot reopen: the model still holds {}", held.exact())]
    StillHeld { model: Label, held: Bytes },
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

/// The bytes that each claimant held when a gate froze.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservations(BTreeMap<(Label, Class), Bytes>);

impl Reservations {
    pub fn add(&mut self, owner: &Owner, class: &Class, bytes: Bytes) {
        *self.0.entry((owner.name.clone(), class.clone())).or_default() += bytes;
    }

    /// The bytes that this claimant held when the gate froze; `None` if it held nothing.
    pub fn reserved(&self, owner: &Owner, class: &Class) -> Option<Bytes> {
        self.0.get(&(owner.name.clone(), class.clone())).copied()
    }
}
