//! Long work beside an actor, which goes on hearing meanwhile: of its own end first of all.

use ractor::{ActorRef, Message};
use thiserror::Error;
use tokio::task::AbortHandle;

/// Work that an actor has under way. It ends with the actor: dropping this ends it at its next wait.
#[derive(Debug)]
pub struct Errand(AbortHandle);

/// The work panicked. Its actor dies of that, as if it had done the work itself.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ErrandDied(String);

impl Errand {
    /// Begins `work`; what comes of it is sent to the actor as `report` words it.
    pub fn begin<M: Message, T: Send + 'static>(
        actor: &ActorRef<M>,
        work: impl Future<Output = T> + Send + 'static,
        report: impl FnOnce(Result<T, ErrandDied>) -> M + Send + 'static,
    ) -> Errand {
        let work = tokio::spawn(work);
        let errand = Errand(work.abort_handle());
        let actor = actor.clone();
        tokio::spawn(async move {
            let outcome = work.await.map_err(|died| ErrandDied(died.to_string()));
            // An actor that is gone does not wait for it.
            drop(actor.send_message(report(outcome)));
        });
        errand
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        self.0.abort();
    }
}
