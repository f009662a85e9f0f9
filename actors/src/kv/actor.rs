//! The kv actor: a thin shell around its core.

use bursar_budgets::{Bytes, Label};
use bursar_kernels::BLOCK_TOKENS;
use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::{KvCore, KvMessage, KvUse};
use crate::metric;

/// Keeps block tables and reference counts.
pub struct KvActor;

/// What it starts with.
pub struct KvArguments {
    /// Blocks that are backed and stay so for now.
    pub blocks: usize,
    /// For metrics.
    pub model: Label,
    /// A block over all layers, for metrics.
    pub block_bytes: Bytes,
}

/// Its state.
pub struct KvState {
    core: KvCore,
    model: Label,
    block_bytes: Bytes,
}

impl Actor for KvActor {
    type Msg = KvMessage;
    type State = KvState;
    type Arguments = KvArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<KvMessage>,
        arguments: KvArguments,
    ) -> Result<KvState, ActorProcessingErr> {
        let KvArguments { blocks, model, block_bytes } = arguments;
        myself.send_message(KvMessage::Show)?;
        Ok(KvState { core: KvCore::new(blocks), model, block_bytes })
    }

    async fn handle(
        &self,
        myself: ActorRef<KvMessage>,
        message: KvMessage,
        state: &mut KvState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            KvMessage::Allot { demands, reply } => reply.answer(state.core.allot(&demands)),
            KvMessage::Name(filled) => filled.iter().for_each(|filled| state.core.name(filled)),
            KvMessage::Release(sequences) => sequences.into_iter().for_each(|id| state.core.release(id)),
            KvMessage::Shrink { to, reply } => {
                let holders = state.core.shrink(to);
                state.show_pool();
                reply.answer(holders);
            }
            KvMessage::Grow(to) => {
                state.core.grow(to);
                state.show_pool();
            }
            KvMessage::Usage(reply) => reply.answer(state.core.usage()),
            KvMessage::Show => {
                state.show_pool();
                myself.send_after(metric::SHOWN_EVERY, || KvMessage::Show);
            }
            KvMessage::Drill(drill) => return Err(drill.strike().into()),
        }
        state.show_use();
        Ok(())
    }
}

impl KvState {
    /// What changes with every step.
    fn show_use(&self) {
        let (KvUse { held, cached, .. }, model) = (self.core.usage(), &self.model);
        metric::KV_BLOCKS_USED.set(model, held);
        metric::KV_BLOCKS_CACHED.set(model, cached);
        metric::PREFIX_CACHE_BYTES.set(model, self.block_bytes * cached as u64);
    }

    fn show_pool(&self) {
        metric::KV_BLOCKS.set(&self.model, self.core.blocks());
        metric::KV_BLOCKS_SWAPPED.set(&self.model, 0);
        metric::KV_BLOCK_TOKENS.set(&self.model, BLOCK_TOKENS);
    }
}
