//! The start of the serving actors.

use std::sync::Arc;

use bursar_budgets::Bytes;
use bursar_kernels::BLOCK_TOKENS;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::watch;

use super::{ActorParts, EngineState};
use crate::{
    capture::recapture,
    compute::lane::{Job, RefusalSink},
    compute::memory::{HostTier, StateMemory, VisionCache},
    engine::{
        EngineMessage, LaneResources, Lanes, Serving, WhichLane,
        core::{Input, SizedBy, Start},
        start::Loaded,
    },
    kv::{BlockLog, KvUse},
    profile::{ProfileRecord, Profiled},
    scheduler::{Limits, SchedulerActor, SchedulerArguments},
    token_interval::Pacing,
    vision::{VisionActor, VisionArguments, VisionMessage},
};

impl EngineState {
    pub(super) async fn start_children(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        mut start: Start<ActorParts>,
    ) -> Result<Input<ActorParts>, ActorProcessingErr> {
        let lanes = self.revive_lanes(myself, &start).await?;
        let SizedBy { profiled: before, .. } = &start.sized;
        let record = ProfileRecord { kv_blocks: start.most, ..before.record.clone() };
        let (memory, card) = (before.memory.clone(), before.card.clone());
        let profiled = Arc::new(Profiled { record, memory, lanes, card });
        let mut children = std::mem::take(&mut start.kept);
        if start.first == 0 {
            children.vision = self.spawn_vision(myself, &start, &profiled).await?;
        }
        let model = self.arguments.label.clone();
        let blocks = start.blocks;
        let block_bytes = profiled.memory.kv.shape().token_bytes() * BLOCK_TOKENS as u64;
        let limits = Limits {
            sequences: profiled.record.sequences,
            step_tokens: profiled.record.step_tokens,
            draft_tokens: profiled.record.draft_tokens,
            kv_tokens: blocks * BLOCK_TOKENS,
        };
        let lane = profiled.lanes.step.clone();
        if start.refuses_a_step {
            lane.submit(Job::Refuse);
        }
        let refused = refusal_sink(myself, WhichLane::Step, start.generation);
        let pacing = self.pacing(&profiled);
        let tenant_weights = self.arguments.options.tenant_weights.clone();
        let host_slots = profiled.memory.host_kv.as_ref().map_or(0, HostTier::slot_count);
        let states = profiled.memory.states.as_ref();
        let state_slots = states.map_or(0, StateMemory::slots);
        let state_bytes = states.map_or(Bytes::ZERO, StateMemory::sequence_bytes);
        let host_states = profiled.memory.host_states.as_ref().map_or(0, HostTier::slot_count);
        let demand = self.demand.clone();
        let (kv_use, kv_used) = watch::channel(KvUse { blocks, ..KvUse::default() });
        let block_log = Arc::new(BlockLog::default());
        let family = &start.loaded.context.family;
        let decoder = family.decoder();
        let whole_picture_tokens = family.whole_picture_tokens(start.loaded.context.envelope.picture_patches);
        let arguments = SchedulerArguments {
            limits,
            cache_groups: decoder.cache_groups(),
            whole_picture_tokens,
            has_fixed_drafts: self.arguments.options.has_fixed_drafts,
            synthetic_acceptance: self.arguments.options.synthetic_acceptance,
            draft_head: decoder.draft_head.as_ref().map(|_| decoder.draft_positions()),
            lane,
            model,
            block_bytes,
            refused,
            pacing,
            tenant_weights,
            host_slots,
            state_slots,
            host_states,
            state_bytes,
            demand,
            kv_use,
            block_log: block_log.clone(),
        };
        let (scheduler, _) = SchedulerActor::spawn_linked(None, SchedulerActor, arguments, myself.get_cell()).await?;
        children.scheduler = Some(scheduler.clone());
        let Loaded { executor, context, .. } = start.loaded;
        let serving = Serving {
            generation: self.arguments.serving_generation(start.generation),
            refusals: start.refusals,
            vision: children.vision.clone(),
            scheduler,
            kv_tokens: limits.kv_tokens,
            context,
            is_warm: start.is_warm,
            record: Arc::new(profiled.record.clone()),
            target: executor.target(),
            kv_use: kv_used,
            block_log,
        };
        Ok(Input::Started { children, profiled, serving })
    }

    fn pacing(&self, profiled: &Profiled) -> Pacing {
        let promise = self.arguments.options.token_interval;
        Pacing { promise, measured: profiled.record.costs.clone(), card: profiled.card.clone() }
    }

    async fn spawn_vision(
        &self,
        myself: &ActorRef<EngineMessage>,
        start: &Start<ActorParts>,
        profiled: &Profiled,
    ) -> Result<Option<ActorRef<VisionMessage>>, ActorProcessingErr> {
        let Loaded { model, context, .. } = start.loaded.clone();
        let (Some(lane), Some(processors)) = (profiled.lanes.vision.clone(), context.processors.clone()) else {
            return Ok(None);
        };
        let arguments = VisionArguments {
            budget: self.arguments.budget.clone(),
            // Tasks of the vision actor lease host memory. Each lease is returned when its task
            // ends, even if the actor dies first.
            owner: self.arguments.vision_owner(),
            model_label: self.arguments.label.clone(),
            model: model.of_first_rank(),
            processors,
            limits: context.image_limits.clone(),
            lane,
            cache_rows: profiled.record.cache_rows,
            row_bytes: profiled.memory.vision_cache.as_ref().map_or(Bytes::ZERO, VisionCache::row_bytes),
            host_rows: profiled.memory.host_pictures.as_ref().map_or(0, HostTier::slot_count),
            launch_patches: profiled.record.launch_patches,
            pacing: self.pacing(profiled),
            tenant_weights: self.arguments.options.tenant_weights.clone(),
            decode_threads: self.arguments.options.threads,
            refused: refusal_sink(myself, WhichLane::Vision, start.generation),
        };
        Ok(Some(VisionActor::spawn_linked(None, VisionActor, arguments, myself.get_cell()).await?.0))
    }

    /// Waits for the jobs that dead actors left on the lanes, because these jobs still write to
    /// memory that the successors will use. A lane whose thread has died is started again on the
    /// same memory.
    async fn revive_lanes(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        start: &Start<ActorParts>,
    ) -> Result<Lanes, ActorProcessingErr> {
        let SizedBy { profiled, attempt } = &start.sized;
        profiled.lanes.idle().await;
        if profiled.lanes.are_alive() {
            return Ok(profiled.lanes.clone());
        }
        let Loaded { model, executor, .. } = start.loaded.clone();
        let (device, memory) = (self.arguments.device.clone(), profiled.memory.clone());
        let place = LaneResources { executor, device, models: model, memory };
        let (weight_store, generation) = (&self.arguments.weight_store, self.arguments.owner(*attempt).generation);
        let Some(lanes) = weight_store.start_lanes(Some(profiled.lanes.clone()), place, generation).await? else {
            return Ok(profiled.lanes.clone()); // This engine is being stopped.
        };
        if let (Some(inputs), false) = (&profiled.memory.graphs, profiled.lanes.step.is_alive()) {
            let captured = inputs.captured().clone();
            let work = recapture(lanes.step.clone(), inputs.shape(), inputs.paid(), captured);
            self.recapture.begin(myself, work, |task, outcome| EngineMessage::Recaptured { task, outcome });
        }
        Ok(lanes)
    }
}

/// Returns a sink for the serving actor of a lane. The sink reports to the engine that the device
/// refused memory to that lane.
fn refusal_sink(myself: &ActorRef<EngineMessage>, which: WhichLane, generation: u64) -> RefusalSink {
    let myself = myself.clone();
    Arc::new(move |error| {
        // If the engine has ended, its actors have ended too.
        drop(myself.send_message(EngineMessage::Input(Input::Refused { which, generation, error })));
    })
}
