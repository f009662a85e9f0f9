//! The budget actor: the only one that grants memory. It asks no other actor and never waits.

mod actor;
mod cards;
mod core;
mod demand;
mod elastic;
mod handle;
mod lease_sums;
mod lending;
mod mailbox;
mod message;
mod pressure_backoff;

pub use actor::{BudgetActor, BudgetArguments, OnLoss};
pub use core::{Look, Offer, Regrowth, Wanting};
pub(crate) use demand::{Demand, Need};
pub use elastic::WatchOptions;
pub(crate) use elastic::{Elastic, Lends, Order};
pub(crate) use handle::NO_MODEL;
pub use handle::{Budget, LeaseError};
pub use lending::{Lendable, Lending, Room};
pub use mailbox::BudgetMailbox;
pub use message::BudgetMessage;
pub use pressure_backoff::{Pressure, PressureBackoff};
