//! Settings with which a runtime starts and restarts its budget.

use std::sync::Arc;

use bursar_budgets::{Bytes, Device, LedgerConfig};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};

use crate::{
    budget::{BudgetActor, BudgetArguments, BudgetMailbox, OnLoss, WatchOptions},
    runtime::RuntimeMessage,
};

/// Settings with which the budget is started and restarted.
pub(super) struct BudgetSettings {
    pub(super) ledger: LedgerConfig,
    pub(super) canary: Bytes,
    pub(super) mailbox: ClosingMailbox,
    pub(super) watch: WatchOptions,
}

/// A mailbox that is closed on drop, however the runtime ends. Callers that wait for a budget then
/// learn that no budget will start.
pub(super) struct ClosingMailbox(pub(super) Arc<BudgetMailbox>);

impl Drop for ClosingMailbox {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl BudgetSettings {
    pub(super) fn mailbox(&self) -> &Arc<BudgetMailbox> {
        &self.mailbox.0
    }

    /// Starts a budget for `device`.
    pub(super) async fn spawn(
        &self,
        myself: &ActorRef<RuntimeMessage>,
        device: &Arc<dyn Device>,
    ) -> Result<ActorCell, ActorProcessingErr> {
        let runtime = myself.clone();
        let on_loss: OnLoss = Box::new(move || drop(runtime.send_message(RuntimeMessage::DeviceLost)));
        let arguments = BudgetArguments {
            device: device.clone(),
            mailbox: self.mailbox().clone(),
            config: self.ledger.clone(),
            canary: self.canary,
            on_loss: Some(on_loss),
            watch: self.watch,
        };
        let (budget, _) = BudgetActor::spawn_linked(None, BudgetActor, arguments, myself.get_cell()).await?;
        Ok(budget.get_cell())
    }
}
