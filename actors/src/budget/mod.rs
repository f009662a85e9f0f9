//! The budget actor: the only one that says who may have memory. It asks nobody and waits for nobody.

mod actor;
mod desk;
mod handle;
mod message;

pub use actor::{BudgetActor, BudgetArguments};
pub use desk::Desk;
pub(crate) use handle::NO_MODEL;
pub use handle::{Budget, LeaseError};
pub use message::BudgetMessage;
