//! The envelope's corners: the largest passes that can ever reach the device. They are planned before anything is
//! loaded and run under stress before anything is served, from the same lines of code.

use bursar_budgets::Workspace;
use bursar_kernels::{BLOCK_TOKENS, Backend, DType, KernelError, KvLayer, Plan, Scope, Tally, Target, Tensor, Work};

use crate::{
    Envelope, Model,
    blocks::decoder::StepCaches,
    flow::{Grid, Patches, PictureRows, SequencePart, StepBatch},
    registry::PictureBatch,
};

/// One of the largest passes.
#[derive(Clone, Debug)]
pub struct Corner {
    /// What it stresses.
    pub name: &'static str,
    /// What is run.
    pub pass: Pass,
}

/// A pass over the vision encoder or the decoder.
#[derive(Clone, Debug)]
pub enum Pass {
    /// Pictures into the vision cache.
    Encode(PictureBatch),
    /// A step of the decoder and the choice of its tokens.
    Step(StepBatch),
}

/// What a pass takes, by plan or by measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// The workspace's peak.
    pub workspace: bursar_budgets::Bytes,
    /// Operations and bytes moved.
    pub work: Work,
}

/// How many blocks and rows a corner may name.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Blocks of keys and values. Sequences that need more name some of them several times, as a probe that is smaller
    /// than the final cache must.
    pub blocks: usize,
    /// Rows of the vision cache. A launch writes each row once, so a cache of fewer rows than the envelope's launch has
    /// embeddings makes the launch smaller; steps read rows as often as they like.
    pub cache_rows: usize,
}

/// The corners of `envelope` for `model`, within `room`.
pub fn corners(model: &Model, envelope: &Envelope, room: Room) -> Vec<Corner> {
    let mut corners = Vec::new();
    if let Some(merged) = model.config().merged_patches() {
        let launch = envelope.launch_patches.min(room.cache_rows * merged);
        let largest = envelope.picture_patches.min(launch);
        // Where not even the smallest picture fits nothing is ever launched.
        if largest >= merged {
            corners.push(Corner {
                name: "vision: as many of the largest pictures as a launch takes",
                pass: Pass::Encode(pictures(model, launch, largest_grid(largest, merged))),
            });
            corners.push(Corner {
                name: "vision: a launch of the smallest pictures",
                pass: Pass::Encode(pictures(model, launch, smallest_grid(merged))),
            });
        }
    }
    corners.push(Corner {
        name: "step: prompts in every sequence, all of it pictures, every token scored",
        pass: Pass::Step(step(model, envelope, room, envelope.step_tokens, true)),
    });
    corners.push(Corner {
        name: "step: every sequence decodes at the full context",
        pass: Pass::Step(step(model, envelope, room, envelope.sequences.min(envelope.step_tokens), false)),
    });
    corners
}

/// Runs a pass on shapes alone: the bytes it takes on `target`, and its work.
pub fn plan(model: &Model, target: Target, pass: &Pass) -> Result<Footprint, KernelError> {
    let (workspace, tally, backend) = (Workspace::dry(), Tally::default(), Plan::new(target));
    let kv = model.kv_shape(&target);
    let bytes = kv.block_bytes();
    // SAFETY: a plan touches neither; the addresses are never used.
    let layers: Vec<KvLayer> = (0..kv.layers)
        .map(|_| unsafe { KvLayer::new(workspace.address(), usize::MAX / bytes.as_usize().max(1), kv) })
        .collect();
    let cache_shape = [u32::MAX as usize, model.config().decoder().hidden];
    // SAFETY: as above.
    let mut cache = unsafe { Tensor::persistent(workspace.address(), cache_shape, target.activation()) };
    // SAFETY: as above.
    let mut previous = unsafe { Tensor::persistent(workspace.address(), [u32::MAX as usize], DType::U32) };
    let scope = Scope::new(&backend, &workspace, &tally);
    run(model, &scope, pass, &layers, &mut cache, &mut previous)?;
    Ok(Footprint { workspace: workspace.high_water(), work: tally.total() })
}

/// Runs a pass as serving runs it; for a step that is the decoder, its scores, the greedy choice into `previous` (u32, a
/// row for each sequence of the envelope), and what a choice on the host downloads.
pub fn run<B: Backend>(
    model: &Model,
    scope: &Scope<'_, B>,
    pass: &Pass,
    layers: &[KvLayer],
    cache: &mut Tensor<'_>,
    previous: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    match pass {
        Pass::Encode(batch) => {
            model.encode(scope, batch, cache)?;
            scope.moment()?.wait().map(drop)
        }
        Pass::Step(batch) => {
            let score = |scope: &Scope<'_, B>, logits: &Tensor<'_>| scope.download::<f32>(logits).map(drop);
            let logits = model.step(scope, batch, &StepCaches { layers, pictures: Some(cache), previous }, score)?;
            let mut chosen = previous.row_range_mut(0..logits.rows());
            scope.argmax_into(&logits, &mut chosen)?;
            let (ids, rows) = (scope.download_later::<u32>(&chosen)?, scope.download_later::<f32>(&logits)?);
            ids.wait()?;
            rows.wait().map(drop)
        }
    }
}

/// A still picture of so many patches.
fn still(rows: usize, columns: usize) -> Grid {
    Grid { t: 1, h: rows as u32, w: columns as u32 }
}

/// A picture that becomes one embedding.
fn smallest_grid(merged: usize) -> Grid {
    still(merged.isqrt(), merged.isqrt())
}

/// The grid, as square as can be, of the largest picture of at most so many patches.
fn largest_grid(patches: usize, merged: usize) -> Grid {
    let merge = merged.isqrt();
    let side = (patches / merged).isqrt();
    let width = patches / merged / side;
    still(side * merge, width * merge)
}

/// As many pictures of `grid` as a launch of so many patches takes, and its rest filled with the smallest ones. Each is a
/// full step of a video, which has more bytes than a still picture.
fn pictures(model: &Model, launch_patches: usize, grid: Grid) -> PictureBatch {
    let merged = model.config().merged_patches().expect("only a family with pictures has this corner");
    let patch = model.config().patch().expect("as above");
    let [large, small] = [grid, smallest_grid(merged)].map(|grid| Patches::blank(grid, patch));
    let whole = launch_patches / grid.patches();
    let rest = launch_patches % grid.patches() / small.grid.patches();
    let mut next_row = 0;
    let pictures: Vec<(&Patches, Vec<u32>)> = std::iter::repeat_n(&large, whole)
        .chain(std::iter::repeat_n(&small, rest))
        .map(|patches| {
            let rows = next_row..next_row + (patches.grid.patches() / merged) as u32;
            next_row = rows.end;
            (patches, rows.collect())
        })
        .collect();
    let views: Vec<_> = pictures.iter().map(|(patches, rows)| (*patches, rows.as_slice())).collect();
    model.pack(&views)
}

/// A step of `tokens` tokens shared by as many sequences as the envelope allows, each ending at the full context and
/// wanting logits, and every token of it a picture's where the model takes pictures. A context shorter than a
/// sequence's share of the step makes the step smaller.
fn step(model: &Model, envelope: &Envelope, room: Room, tokens: usize, are_scored: bool) -> StepBatch {
    assert!(tokens > 0 && envelope.context_tokens > 0, "an envelope lets a token through: {envelope:?}");
    let sequences = envelope.sequences.min(tokens);
    let tokens = tokens.min(sequences * envelope.context_tokens);
    let blocks: Vec<u32> =
        (0..envelope.context_tokens.div_ceil(BLOCK_TOKENS)).map(|block| (block % room.blocks.max(1)) as u32).collect();
    let shares: Vec<usize> = (0..sequences).map(|s| tokens / sequences + usize::from(s < tokens % sequences)).collect();
    let longest = shares[0];
    let ids = vec![0u32; longest];
    let positions = vec![[0u32; 3]; longest];
    let rows: Vec<u32> = (0..longest).map(|row| (row % room.cache_rows.max(1)) as u32).collect();
    let shows_pictures = model.config().image_token().is_some() && room.cache_rows > 0;
    let pictures: Vec<Vec<PictureRows<'_>>> = shares
        .iter()
        .map(|share| match shows_pictures {
            true => vec![PictureRows { tokens: 0..*share, cache_rows: &rows[..*share] }],
            false => Vec::new(),
        })
        .collect();
    let parts: Vec<SequencePart<'_>> = shares
        .iter()
        .zip(&pictures)
        .map(|(share, pictures)| SequencePart {
            tokens: &ids[..*share],
            positions: &positions[..*share],
            cached_tokens: envelope.context_tokens - share,
            blocks: &blocks,
            pictures,
            wants_logits: true,
            scored: 0..if are_scored { *share } else { 0 },
        })
        .collect();
    StepBatch::pack(&parts)
}
