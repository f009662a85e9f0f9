//! The kv actor: a thin shell around its core.

use bursar_budgets::Label;
use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::{KvCore, KvMessage, KvUse};

/// Keeps block tables and reference counts.
pub struct KvActor;

/// What it starts with.
pub struct KvArguments {
    /// Blocks that are backed and stay so for now.
    pub blocks: usize,
    /// For metrics.
    pub model: Label,
}

/// Its state.
pub struct KvState {
    core: KvCore,
    model: Label,
}

impl Actor for KvActor {
    type Msg = KvMessage;
    type State = KvState;
    type Arguments = KvArguments;

    async fn pre_start(&self, _: ActorRef<KvMessage>, arguments: KvArguments) -> Result<KvState, ActorProcessingErr> {
        Ok(KvState { core: KvCore::new(arguments.blocks), model: arguments.model })
    }

    async fn handle(
        &self,
        _: ActorRef<KvMessage>,
        message: KvMessage,
        state: &mut KvState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            KvMessage::Allot { demands, reply } => reply.answer(state.core.allot(&demands)),
            KvMessage::Name(filled) => filled.iter().for_each(|filled| state.core.name(filled)),
            KvMessage::Release(sequences) => sequences.into_iter().for_each(|id| state.core.release(id)),
            KvMessage::Shrink { to, reply } => reply.answer(state.core.shrink(to)),
            KvMessage::Grow(to) => state.core.grow(to),
            KvMessage::Usage(reply) => reply.answer(state.core.usage()),
            KvMessage::Drill(drill) => return Err(drill.strike().into()),
        }
        let (KvUse { blocks, held, cached }, model) = (state.core.usage(), state.model.to_string());
        metrics::gauge!("bursar_kv_blocks_free", "model" => model.clone()).set((blocks - held) as f64);
        metrics::gauge!("bursar_kv_blocks_cached", "model" => model).set(cached as f64);
        Ok(())
    }
}
