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

#[cfg(test)]
mod tests {
    use ractor::{Actor, ActorProcessingErr};
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    struct Ear;

    impl Actor for Ear {
        type Msg = Result<u8, ErrandDied>;
        type State = mpsc::Sender<Self::Msg>;
        type Arguments = mpsc::Sender<Self::Msg>;

        async fn pre_start(
            &self,
            _: ActorRef<Self::Msg>,
            heard: Self::Arguments,
        ) -> Result<Self::State, ActorProcessingErr> {
            Ok(heard)
        }

        async fn handle(
            &self,
            _: ActorRef<Self::Msg>,
            message: Self::Msg,
            heard: &mut Self::State,
        ) -> Result<(), ActorProcessingErr> {
            Ok(heard.send(message).await?)
        }
    }

    async fn ear() -> (ActorRef<Result<u8, ErrandDied>>, mpsc::Receiver<Result<u8, ErrandDied>>) {
        let (heard, hears) = mpsc::channel(1);
        (Ear::spawn(None, Ear, heard).await.expect("it starts").0, hears)
    }

    #[tokio::test]
    async fn what_comes_of_an_errand_is_told_and_so_is_its_panic() {
        let (actor, mut hears) = ear().await;
        let _errand = Errand::begin(&actor, async { 7 }, |outcome| outcome);
        assert_eq!(hears.recv().await, Some(Ok(7)));
        let _errand = Errand::begin(&actor, async { panic!("on purpose") }, |outcome| outcome);
        let died = hears.recv().await.expect("it is told").expect_err("it panicked");
        assert!(died.to_string().contains("on purpose"), "{died}");
    }

    #[tokio::test]
    async fn an_errand_that_is_dropped_ends_at_its_next_wait() {
        let (actor, _hears) = ear().await;
        let (held, ended) = oneshot::channel::<()>();
        let work = async move {
            let _held = held;
            std::future::pending().await
        };
        let errand = Errand::begin(&actor, work, |outcome: Result<u8, ErrandDied>| outcome);
        tokio::task::yield_now().await;
        drop(errand);
        ended.await.expect_err("what it held is dropped");
    }
}
