//! The budget actor: the only actor that grants memory. It asks no other actor and never waits.

mod actor;
mod core;
mod demand;
mod elastic;
mod gpus;
mod handle;
mod lease_sums;
mod lending;
mod mailbox;
mod message;
mod pressure_backoff;

pub use actor::{BudgetActor, BudgetArguments, OnLoss};
pub use core::{Offer, Probe, Regrowth, Wanting};
pub(crate) use demand::{KvDemand, SharedKvDemand};
pub use elastic::WatchOptions;
pub(crate) use elastic::{Elastic, Lends, ResizeOrder};
pub(crate) use handle::NO_MODEL;
pub use handle::{Budget, LeaseError};
pub use lending::{Headroom, Lendable, Lending};
pub use mailbox::BudgetMailbox;
pub use message::BudgetMessage;
pub use pressure_backoff::{Pressure, PressureBackoff};
