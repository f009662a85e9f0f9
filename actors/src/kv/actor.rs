//! The kv actor: a thin shell around its core.

use std::collections::BTreeMap;

use bursar_budgets::{Bytes, Label};
use bursar_kernels::BLOCK_TOKENS;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tracing::{Span, debug};

use super::{Allotment, Demand, KvCore, KvMessage, KvUse, SequenceId};
use crate::metric;

/// Keeps block tables and reference counts.
pub struct KvActor;

/// The arguments of a kv actor.
pub struct KvArguments {
    /// The number of blocks, all backed.
    pub blocks: usize,
    /// The model's label in metrics.
    pub model: Label,
    /// Bytes of a block over all layers, for metrics.
    pub block_bytes: Bytes,
}

/// The state of a kv actor.
pub struct KvState {
    core: KvCore,
    model: Label,
    block_bytes: Bytes,
    /// The request spans of sequences that hold blocks.
    spans: BTreeMap<SequenceId, Span>,
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
        Ok(KvState { core: KvCore::new(blocks), model, block_bytes, spans: BTreeMap::new() })
    }

    async fn handle(
        &self,
        myself: ActorRef<KvMessage>,
        message: KvMessage,
        state: &mut KvState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            KvMessage::Allot { demands, spans, reply } => reply.answer(state.allot(&demands, spans)),
            KvMessage::Name(filled) => filled.iter().for_each(|filled| state.core.name(filled)),
            KvMessage::Release(sequences) => {
                for id in sequences {
                    state.core.release(id);
                    state.end(id, "its blocks are free");
                }
            }
            KvMessage::Shrink { to, reply } => {
                let holders = state.core.shrink(to);
                holders.iter().for_each(|id| state.end(*id, "its blocks are given up"));
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
            KvMessage::InjectFault(fault) => return Err(fault.strike().into()),
        }
        state.show_use();
        Ok(())
    }
}

impl KvState {
    fn allot(&mut self, demands: &[Demand], spans: Vec<(SequenceId, Span)>) -> Allotment {
        let allotment = self.core.allot(demands);
        let met = |id: SequenceId| allotment.tables.iter().find(|table| table.sequence == id);
        for (id, span) in spans {
            match met(id) {
                Some(table) => {
                    span.in_scope(|| debug!(blocks = table.blocks.len(), cached_tokens = table.held, "has blocks"));
                    self.spans.insert(id, span);
                }
                None => span.in_scope(|| debug!(short_by = allotment.short_by, "waits: blocks are short")),
            }
        }
        allotment
    }

    /// A sequence no longer holds blocks. Records how in its span.
    fn end(&mut self, sequence: SequenceId, how: &'static str) {
        self.spans.remove(&sequence).into_iter().for_each(|span| span.in_scope(|| debug!("{how}")));
    }

    /// Sets the gauges that change with every step.
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
