//! The profile actor: one attempt, then it is gone.

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::Attempt;
use crate::engine::EngineMessage;

/// Runs one attempt and tells the engine.
pub struct ProfileActor;

/// What it starts with.
pub struct ProfileArguments {
    /// The attempt.
    pub attempt: Attempt,
    /// Who wants to know.
    pub engine: ActorRef<EngineMessage>,
}

/// Nobody speaks to it but itself: go.
pub struct Begin;

impl Actor for ProfileActor {
    type Msg = Begin;
    type State = ProfileArguments;
    type Arguments = ProfileArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<Begin>,
        arguments: ProfileArguments,
    ) -> Result<ProfileArguments, ActorProcessingErr> {
        myself.send_message(Begin)?;
        Ok(arguments)
    }

    async fn handle(
        &self,
        _: ActorRef<Begin>,
        _: Begin,
        state: &mut ProfileArguments,
    ) -> Result<(), ActorProcessingErr> {
        // What can be expected to go wrong is an answer; a panic is heard of as a death. The engine stops this actor when it
        // has heard: news of a death overtakes messages, so one that stopped by itself would seem to have died.
        let outcome = state.attempt.run().await;
        let generation = state.attempt.owner.generation;
        state.engine.send_message(EngineMessage::Profiled { generation, outcome })?;
        Ok(())
    }
}
