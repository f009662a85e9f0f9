//! The profile actor, which runs one attempt and then ends.

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::{Attempt, ProfileError, Profiled};
use crate::supervise::{BackgroundTask, BackgroundTaskDied, FaultInjection};

/// Reports the outcome of an attempt. Fails if the engine that waits for the outcome has ended.
pub type ReportAttempt = Box<dyn Fn(Result<Profiled, ProfileError>) -> Result<(), ActorProcessingErr> + Send + Sync>;

/// Messages that the actor sends to itself, apart from injected faults.
pub enum ProfileMessage {
    Begin,
    Ended(Result<Result<Box<Profiled>, ProfileError>, BackgroundTaskDied>),
    InjectFault(FaultInjection),
}

/// Runs one attempt and reports to the engine.
pub struct ProfileActor;

pub struct ProfileArguments {
    pub attempt: Attempt,
    pub report: ReportAttempt,
}

pub struct ProfileState {
    arguments: ProfileArguments,
    task: Option<BackgroundTask>,
}

impl Actor for ProfileActor {
    type Msg = ProfileMessage;
    type State = ProfileState;
    type Arguments = ProfileArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<ProfileMessage>,
        arguments: ProfileArguments,
    ) -> Result<ProfileState, ActorProcessingErr> {
        myself.send_message(ProfileMessage::Begin)?;
        Ok(ProfileState { arguments, task: None })
    }

    async fn handle(
        &self,
        myself: ActorRef<ProfileMessage>,
        message: ProfileMessage,
        state: &mut ProfileState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ProfileMessage::Begin => {
                let attempt = state.arguments.attempt.clone();
                let run = async move { attempt.run().await.map(Box::new) };
                state.task = Some(BackgroundTask::begin(&myself, run, ProfileMessage::Ended));
            }
            // An attempt that returns an error is reported as a reply. An attempt that panics kills
            // this actor. The engine stops this actor after it has read the reply. This actor must
            // not stop by itself: death notices overtake messages, so the engine would see a death
            // instead of the reply.
            ProfileMessage::Ended(outcome) => {
                (state.arguments.report)(outcome?.map(|profiled| *profiled))?;
            }
            ProfileMessage::InjectFault(fault) => return Err(fault.inject().into()),
        }
        Ok(())
    }
}
