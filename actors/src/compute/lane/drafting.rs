//! The draft head's part of a step: a first draft after each row of logits, and further drafts one
//! by one.

use std::mem;

use bursar_kernels::{
    Backend, FaultyBackend, KernelError, Scope, Tensor,
    ops::{argmax::NO_CHOICE, transfer::Later},
};
use bursar_model::{
    blocks::{
        decoder::StepCaches,
        draft_head::{DraftMemory, DraftRows},
    },
    flow::{FurtherDrafts, LogitsOf, StepBatch},
};

use super::{
    ModelRunner,
    choosing::{Choosing, Chosen, ChosenTokens},
    job::{Choice, LaneError, StepJob},
};

/// The drafts of a step.
pub(super) enum Drafting {
    /// `[logit_rows]`: a draft after each row of logits. The download may still be running.
    First(Later<u32>),
    /// The drafts of each choice.
    Known(Vec<Vec<u32>>),
}

impl Drafting {
    /// Whether [`finish`](Drafting::finish) would return without waiting.
    pub(super) fn is_ready(&self) -> bool {
        match self {
            Drafting::First(drafted) => drafted.is_ready(),
            Drafting::Known(_) => true,
        }
    }

    /// Waits for the download. Returns the drafts after the last token of each choice.
    pub(super) fn finish(self, choices: &[Choice], chosen: &ChosenTokens) -> Result<Vec<Vec<u32>>, KernelError> {
        match self {
            Drafting::First(drafted) => {
                let drafted = drafted.wait()?;
                let first = |row: Option<usize>| row.map(|row| drafted[row]).filter(|token| *token != NO_CHOICE);
                Ok(last_rows(choices, chosen).map(|row| first(row).into_iter().collect()).collect())
            }
            Drafting::Known(drafts) => Ok(drafts),
        }
    }
}

/// For each choice, the row of logits in which its last token was chosen. `None` after an error.
fn last_rows(choices: &[Choice], chosen: &ChosenTokens) -> impl Iterator<Item = Option<usize>> {
    let mut next_row = 0;
    choices.iter().zip(chosen).map(move |(choice, tokens)| {
        let first_row = next_row;
        next_row += choice.rows();
        tokens.last().is_some_and(Result::is_ok).then(|| first_row + tokens.len() - 1)
    })
}

impl<B: Backend> ModelRunner<B> {
    /// Takes the memory of the draft head's pass in a step, if the step `has_drafts`.
    pub(super) fn draft_memory<'s>(
        &self,
        scope: &'s Scope<'_, FaultyBackend<B>>,
        has_drafts: bool,
        tokens: usize,
        logit_rows: usize,
    ) -> Result<Option<DraftMemory<'s>>, KernelError> {
        let decoder = self.model.config().decoder();
        has_drafts.then(|| DraftMemory::take(scope, decoder, tokens, logit_rows)).transpose()
    }

    /// Launches the draft head on the draft rows of a step, which the decoder has written to
    /// `memory.hidden`. Writes the first draft after each row of logits.
    pub(super) fn draft(
        &self,
        scope: &Scope<'_, FaultyBackend<B>>,
        batch: &StepBatch,
        cache: &Tensor<'_>,
        memory: &mut DraftMemory<'_>,
    ) -> Result<(), LaneError> {
        let buffers = self.memory.sampling.buffers(self.rank());
        let layers = self.memory.layer_caches(&self.model);
        let caches = StepCaches { layers: &layers, pictures: Some(cache), previous: &buffers.chosen() };
        let DraftMemory { hidden, output, drafted } = memory;
        self.run_head(scope, batch, &caches, DraftRows { hidden, output }, drafted)
    }

    /// Starts the download of the first drafts, which the draft head has written to `memory`. If
    /// further drafts are requested, this method waits for the chosen tokens, because the further
    /// drafts of a sequence depend on the last token chosen for it. Without `memory`, there are no
    /// drafts.
    pub(super) fn drafts(
        &self,
        scope: &Scope<'_, FaultyBackend<B>>,
        job: &StepJob,
        memory: Option<DraftMemory<'_>>,
        choosing: Choosing,
    ) -> Result<(Chosen, Option<Drafting>), LaneError> {
        let Some(DraftMemory { output, drafted, .. }) = memory else {
            return Ok((Chosen::Downloading(choosing), None));
        };
        let rows = job.batch.logit_rows.len();
        let first = Drafting::First(scope.download_later(&drafted.row_range(0..rows))?);
        if job.choices.iter().all(|choice| choice.further.is_none()) {
            return Ok((Chosen::Downloading(choosing), Some(first)));
        }
        let chosen = choosing.finish(&job.choices)?;
        let mut drafts = first.finish(&job.choices, &chosen)?;
        self.draft_further(scope, job, (&chosen, &output), &mut drafts)?;
        Ok((Chosen::Known(chosen), Some(Drafting::Known(drafts))))
    }

    /// Appends further drafts to `drafts`, which has the first draft of each choice. `output`
    /// `[logit_rows, width]` has the draft head's rows from which the first drafts were chosen.
    fn draft_further(
        &self,
        scope: &Scope<'_, FaultyBackend<B>>,
        job: &StepJob,
        (chosen, output): (&ChosenTokens, &Tensor<'_>),
        drafts: &mut [Vec<u32>],
    ) -> Result<(), LaneError> {
        let mut sequences: Vec<DraftingSequence<'_>> = Vec::new();
        for (index, (choice, row)) in job.choices.iter().zip(last_rows(&job.choices, chosen)).enumerate() {
            if let (Some(place), Some(row), [_]) = (&choice.further, row, &drafts[index][..]) {
                let accepted = chosen[index].len() - 1;
                sequences.push(DraftingSequence { index, place, accepted, row: row as u32 });
            }
        }
        let Some(passes) = sequences.iter().map(|sequence| sequence.place.count).max() else { return Ok(()) };
        let rows: Vec<u32> = sequences.iter().map(|sequence| sequence.row).collect();
        let last: Vec<u32> = sequences.iter().map(|sequence| drafts[sequence.index][0]).collect();
        let places: Vec<_> = sequences.iter().map(|sequence| (sequence.place, sequence.accepted)).collect();
        let (count, width) = (sequences.len(), output.columns());
        let positions = self.model.config().decoder().draft_positions();
        let layers = self.memory.layer_caches(&self.model);
        // Two tensors of rows are enough for any number of passes. They take less memory than the
        // logits of the drafts that the next step verifies. The worst cases of a step include those
        // logits.
        let (mut hidden, mut next) = (scope.empty([count, width])?, scope.empty([count, width])?);
        let mut drafted = scope.empty_u32([(1 + passes) * count])?; // the first drafts, and those of each pass
        scope.gather_rows_into(output, &scope.upload([count], &rows)?, &mut hidden)?;
        scope.upload_into(&last, &mut drafted.row_range_mut(0..count))?;
        for further in 1..=passes {
            let batch = FurtherDrafts::batch(&places, further, positions);
            let (before, mut drafted) = drafted.split_rows_mut(further * count);
            let tokens = before.row_range((further - 1) * count..further * count);
            let caches = StepCaches { layers: &layers, pictures: None, previous: &tokens };
            let rows = DraftRows { hidden: &hidden, output: &mut next };
            self.run_head(scope, &batch, &caches, rows, &mut drafted.row_range_mut(0..count))?;
            mem::swap(&mut hidden, &mut next);
        }
        let tokens = scope.download_later::<u32>(&drafted)?.wait()?;
        for (further, pass) in tokens[count..].chunks_exact(count).enumerate() {
            for (sequence, token) in sequences.iter().zip(pass) {
                let drafts = &mut drafts[sequence.index];
                if drafts.len() == further + 1 && further < sequence.place.count && *token != NO_CHOICE {
                    drafts.push(*token);
                }
            }
        }
        Ok(())
    }

    /// Runs the draft head on the rows of `batch` and writes a draft for each row of logits to
    /// `drafted` `[logit_rows]` u32. `caches.previous` has the tokens after the rows of logits.
    fn run_head(
        &self,
        scope: &Scope<'_, FaultyBackend<B>>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
        rows: DraftRows<'_, '_>,
        drafted: &mut Tensor<'_>,
    ) -> Result<(), LaneError> {
        let scope = scope.scope();
        let logits = self.model.draft(&scope, batch, caches, LogitsOf::OwnRank, rows)?;
        Ok(logits.choose(&scope, drafted)?)
    }
}

/// A sequence for which the head computes further drafts.
struct DraftingSequence<'a> {
    /// Index among the choices.
    index: usize,
    place: &'a FurtherDrafts,
    /// Drafts that the step accepted.
    accepted: usize,
    /// The row of logits in which the last token was chosen.
    row: u32,
}
