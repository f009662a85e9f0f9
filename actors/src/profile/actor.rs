//! The profile actor: runs one attempt, then ends.

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::{Attempt, ProfileError, ProfileMessage, Profiled};
use crate::supervise::BackgroundTask;

/// Tells what came of an attempt; fails if the engine that waits for it has ended.
pub type ReportAttempt = Box<dyn Fn(Result<Profiled, ProfileError>) -> Result<(), ActorProcessingErr> + Send + Sync>;

/// Runs one attempt and reports to the engine.
pub struct ProfileActor;

/// The arguments of a profile actor.
pub struct ProfileArguments {
    /// The attempt.
    pub attempt: Attempt,
    /// What hears of its end.
    pub report: ReportAttempt,
}

/// The state of a profile actor.
pub struct ProfileState {
    arguments: ProfileArguments,
    /// The attempt in progress.
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
            // An expected failure is an answer, and a panic arrives as a death. The engine stops this actor after it
            // has read the answer. News of a death overtakes messages, so an actor that stopped by itself would seem to
            // have died.
            ProfileMessage::Ended(outcome) => {
                (state.arguments.report)(outcome?.map(|profiled| *profiled))?;
            }
            ProfileMessage::InjectFault(fault) => return Err(fault.strike().into()),
        }
        Ok(())
    }
}
