//! What a model needs on a device, by plan: one line a claimant, before a byte is taken.

use std::sync::Arc;

use bursar_budgets::{Bytes, Class, DoesNotFit, MemoryPlan};
use bursar_kernels::{BLOCK_TOKENS, KernelError, KvShape, Target};
use bursar_model::{
    Envelope, Model,
    corners::{self, Corner, Footprint, Pass, Room},
    sampling::DeskShape,
};

use super::knobs::knobs;
use crate::{
    graph::GraphShape,
    memory::{DeskMemory, KvMemory},
};

/// The sizes that the plan of an envelope's corners leads to. All are whole pages.
#[derive(Clone, Debug)]
pub struct Needs {
    /// The checkpoint's tensors.
    pub weights: Bytes,
    /// The largest step.
    pub step_workspace: Bytes,
    /// Where steps choose.
    pub desk: DeskShape,
    /// The largest launch; nothing for a model that takes no pictures.
    pub vision_workspace: Bytes,
    /// Embeddings of twice what one request may bring, so that the next request's pictures are encoded beside it.
    pub vision_cache: Bytes,
    /// Rows of that cache.
    pub cache_rows: usize,
    /// The first, small cache of keys and values.
    pub probe_blocks: usize,
    /// What captured steps are made of; none where there are no graphs.
    pub graphs: Option<GraphShape>,
    /// What a token takes there.
    pub kv_shape: KvShape,
    /// The corners with their planned footprints.
    pub corners: Vec<(Arc<Corner>, Footprint)>,
    page: Bytes,
}

/// Tokens of the probe at least (LightLLM's figure), where sequences can have as many.
const PROBE_TOKENS: usize = 8192;

impl Needs {
    /// Plans `model` for `envelope` on `target`.
    ///
    /// # Errors
    /// A shape that does not go together; a plan has no memory to run out of.
    pub fn plan(model: &Model, target: Target, envelope: &Envelope, page: Bytes) -> Result<Self, KernelError> {
        let merged = model.config().merged_patches();
        let picture_rows = merged.map_or(0, |merged| envelope.picture_patches / merged);
        // Whole pages are leased, and all of their rows are used.
        let row_bytes = model.embedding_bytes(&target);
        let vision_cache = (row_bytes * (2 * envelope.pictures * picture_rows) as u64).round_up(page);
        let cache_rows = (vision_cache.0 / row_bytes.0) as usize;
        let reach = envelope.sequences * envelope.context_tokens;
        let probe_tokens = (envelope.step_tokens + envelope.sequences).max(PROBE_TOKENS.min(reach));
        let probe_blocks = probe_tokens.max(envelope.context_tokens).div_ceil(BLOCK_TOKENS);
        let corners = corners::corners(model, envelope, Room { blocks: probe_blocks, cache_rows })
            .into_iter()
            .map(|corner| {
                let footprint = corners::plan(model, target, &corner.pass)?;
                Ok((Arc::new(corner), footprint))
            })
            .collect::<Result<Vec<_>, KernelError>>()?;
        let peak = |is_step: bool| {
            let of_lane = corners.iter().filter(|(corner, _)| matches!(corner.pass, Pass::Step(_)) == is_step);
            of_lane.map(|(_, footprint)| footprint.workspace.round_up(page)).max().unwrap_or(Bytes::ZERO)
        };
        let graphs = target.has_graphs().then(|| GraphShape {
            sequences: envelope.sequences,
            context_tokens: envelope.context_tokens,
            axes: model.config().decoder().rope_sections.len(),
        });
        Ok(Needs {
            weights: model.weight_bytes().round_up(page),
            step_workspace: peak(true),
            desk: DeskShape {
                sequences: envelope.sequences,
                context_tokens: envelope.context_tokens,
                vocabulary: model.config().decoder().vocabulary,
            },
            vision_workspace: peak(false),
            vision_cache,
            cache_rows,
            probe_blocks,
            graphs,
            kv_shape: model.kv_shape(&target),
            corners,
            page,
        })
    }

    /// Bytes of the probe's lease.
    pub fn probe(&self) -> Bytes {
        KvMemory::bytes(self.kv_shape, self.probe_blocks, self.page)
    }

    /// Bytes of the desk's lease.
    pub fn desk_bytes(&self) -> Bytes {
        DeskMemory::bytes(self.desk, self.page)
    }

    /// One line a claimant. The probe stands for the least that keys and values can do with.
    pub fn memory_plan(&self) -> MemoryPlan {
        let mut plan =
            MemoryPlan::new().claim(Class::Weights, "checkpoint", self.weights, "sum of tensors, 256-byte steps");
        plan.push(
            Class::StepWorkspace,
            "largest step",
            self.step_workspace,
            "peak of the dry run of both step corners",
        );
        let how = "each sequence's parameters, past and mask, its token for the next step, and a report";
        plan.push(Class::StepWorkspace, "choices", self.desk_bytes(), how);
        if let Some(shape) = self.graphs {
            let how = "the arrays of the largest captured step";
            plan.push(Class::Graphs, "inputs of captured steps", shape.bytes(self.page), how);
        }
        if self.cache_rows > 0 {
            let how = "peak of the dry run of both launch corners";
            plan.push(Class::VisionWorkspace, "largest launch", self.vision_workspace, how);
            let how = format!("{} rows: two requests' pictures", self.cache_rows);
            plan.push(Class::VisionCache, "picture embeddings", self.vision_cache, how);
        }
        let how = format!("{} blocks of {BLOCK_TOKENS} tokens in {} layers", self.probe_blocks, self.kv_shape.layers);
        plan.push(Class::Kv, "probe", self.probe(), how);
        plan
    }

    /// Refuses what cannot fit, with the knobs that would make it fit.
    ///
    /// # Errors
    /// By how much it does not fit.
    pub fn fits(&self, model: &Model, target: Target, envelope: &Envelope, available: Bytes) -> Result<(), DoesNotFit> {
        self.memory_plan().fits(available, || knobs(model, target, envelope, self.page, available))
    }
}

#[cfg(test)]
mod tests {
    use bursar_model::{checkpoint::Checkpoint, demo};

    use super::*;
    use crate::engine::{Kit, LoadOptions};

    #[test]
    fn what_is_expected_of_a_gpu_goes_together_and_can_be_planned() {
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("it is embedded");
        let target = Target::Cpu { threads: 1 };
        let model = Model::plan(&checkpoint, &target).expect("it is whole");
        let options = LoadOptions { envelope: Some(Envelope::gpu()), ..LoadOptions::default() };
        let kit = Kit::new("demo".to_owned(), &checkpoint, model.config().clone(), &options).expect("its limits agree");
        let limits = &kit.envelope;
        assert_eq!((limits.sequences, limits.step_tokens), (256, 8192));
        assert!(limits.context_tokens <= 8192 && limits.picture_patches <= 32_768, "the model's own lower it");
        let needs = Needs::plan(&model, target, limits, Bytes::mib(2)).expect("its corners go together");
        needs.fits(&model, target, limits, Bytes::gib(8)).expect("a small model fits a small card");
        assert!(needs.probe_blocks * BLOCK_TOKENS >= 8192, "the probe holds a whole step");
    }
}
