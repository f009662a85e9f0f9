//! Long work that runs next to an actor, so that the actor can still handle messages, in particular
//! an order to stop.

use ractor::{ActorRef, Message};
use thiserror::Error;
use tokio::task::AbortHandle;

/// An actor's work in progress. The work ends with the actor: dropping this value ends the work at
/// its next await.
#[derive(Debug)]
pub struct BackgroundTask(AbortHandle);

/// The error of work that panicked or was aborted. After a panic, the actor dies too, as if it had
/// done the work itself.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct BackgroundTaskDied(String);

impl BackgroundTask {
    /// Begins `work`. Its result is sent to the actor as the message that `report` returns.
    pub fn begin<M: Message, T: Send + 'static>(
        actor: &ActorRef<M>,
        work: impl Future<Output = T> + Send + 'static,
        report: impl FnOnce(Result<T, BackgroundTaskDied>) -> M + Send + 'static,
    ) -> BackgroundTask {
        let work = tokio::spawn(work);
        let task = BackgroundTask(work.abort_handle());
        let actor = actor.clone();
        tokio::spawn(async move {
            let outcome = work.await.map_err(|died| BackgroundTaskDied(died.to_string()));
            // An actor that has ended does not need the result.
            drop(actor.send_message(report(outcome)));
        });
        task
    }
}

impl Drop for BackgroundTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The latest task of a kind. A new task aborts and replaces the previous task. The previous task
/// may still report its result, or that it was aborted. The number in a report identifies the task.
#[derive(Debug, Default)]
pub struct Latest {
    begun: u64,
    under_way: Option<BackgroundTask>,
}

impl Latest {
    /// Like [`BackgroundTask::begin`], but `report` also receives the task's number.
    pub fn begin<M: Message, T: Send + 'static>(
        &mut self,
        actor: &ActorRef<M>,
        work: impl Future<Output = T> + Send + 'static,
        report: impl FnOnce(u64, Result<T, BackgroundTaskDied>) -> M + Send + 'static,
    ) {
        self.begun += 1;
        let number = self.begun;
        self.under_way = Some(BackgroundTask::begin(actor, work, move |outcome| report(number, outcome)));
    }

    /// Records that task `number` has reported. Returns `false` if the task was replaced. In that
    /// case the caller must ignore the report.
    #[must_use]
    pub fn reported(&mut self, number: u64) -> bool {
        let is_latest = number == self.begun;
        if is_latest {
            self.under_way = None;
        }
        is_latest
    }

    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use ractor::{Actor, ActorProcessingErr};
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    /// An actor that forwards the messages it receives to a channel.
    struct Forwarder<M>(PhantomData<fn() -> M>);

    impl<M: Message + Sync> Actor for Forwarder<M> {
        type Msg = M;
        type State = mpsc::Sender<Self::Msg>;
        type Arguments = mpsc::Sender<Self::Msg>;

        async fn pre_start(
            &self,
            _: ActorRef<Self::Msg>,
            sender: Self::Arguments,
        ) -> Result<Self::State, ActorProcessingErr> {
            Ok(sender)
        }

        async fn handle(
            &self,
            _: ActorRef<Self::Msg>,
            message: Self::Msg,
            sender: &mut Self::State,
        ) -> Result<(), ActorProcessingErr> {
            Ok(sender.send(message).await?)
        }
    }

    async fn forwarder<M: Message + Sync>() -> (ActorRef<M>, mpsc::Receiver<M>) {
        let (sender, messages) = mpsc::channel(1);
        (Forwarder::spawn(None, Forwarder(PhantomData), sender).await.expect("the actor starts").0, messages)
    }

    #[tokio::test]
    async fn a_background_tasks_result_or_panic_is_reported() {
        let (actor, mut messages) = forwarder().await;
        let _task = BackgroundTask::begin(&actor, async { 7 }, |outcome| outcome);
        assert_eq!(messages.recv().await, Some(Ok(7)));
        let _task = BackgroundTask::begin(&actor, async { panic!("a deliberate panic") }, |outcome| outcome);
        let died = messages.recv().await.expect("the message arrives").expect_err("the task panicked");
        assert!(died.to_string().contains("deliberate"), "{died}");
    }

    #[tokio::test]
    async fn a_dropped_background_task_ends_at_its_next_wait() {
        let (actor, _messages) = forwarder().await;
        let (held, ended) = oneshot::channel::<()>();
        let work = async move {
            let _held = held;
            std::future::pending().await
        };
        let task = BackgroundTask::begin(&actor, work, |outcome: Result<u8, BackgroundTaskDied>| outcome);
        tokio::task::yield_now().await;
        drop(task);
        ended.await.expect_err("the values of an aborted task are dropped");
    }

    #[tokio::test]
    async fn late_reports_of_replaced_background_tasks_are_not_current() {
        let (actor, mut messages) = forwarder().await;
        let mut latest = Latest::default();
        // The first task is done, and its report is on the way, when the second task replaces it.
        latest.begin(&actor, async { 1 }, |number, outcome| (number, outcome));
        let first = messages.recv().await.expect("the outcome is reported");
        latest.begin(&actor, std::future::pending(), |number, outcome: Result<u8, _>| (number, outcome));
        assert!(!latest.reported(first.0) && latest.is_under_way(), "the second task is still running");
        // The third task aborts the second task, which reports that it was aborted.
        let (go, started) = oneshot::channel();
        latest
            .begin(&actor, async { started.await.expect("the message arrives") }, |number, outcome| (number, outcome));
        let second = messages.recv().await.expect("the outcome is reported");
        assert!(second.1.is_err(), "the second task was aborted: {second:?}");
        assert!(!latest.reported(second.0) && latest.is_under_way(), "an aborted task is not the current task");
        go.send(3).expect("the task waits");
        let third = messages.recv().await.expect("the outcome is reported");
        assert_eq!(third.1, Ok(3));
        assert!(latest.reported(third.0) && !latest.is_under_way());
    }
}
