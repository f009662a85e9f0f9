//! Sampling: the choice of a token for each row of logits.

use std::{borrow::Cow, slice, sync::OnceLock};

use super::{
    memory::{Rows, Scratch, indices, start_of},
    threads::Threads,
};
use crate::{
    InputToken,
    calls::{NO_CHOICE, Sample},
    sampling::{
        Candidate, ChoiceScratch, Distribution, Fault, NO_MASK, NO_REPORT, ROW_WORDS, RowLists, SampleLayout,
        SampleList, SampleRow, TOP_MAX, choose, fault_of,
    },
    target::CPU_SAMPLE_WORDS,
};

/// Cost per logit in multiply-adds. Each logit is read several times.
const COST: usize = 8;

/// The result for one row of logits.
struct Answer {
    chosen: Result<u32, Fault>,
    log_probability: f32,
    top: Vec<(u32, f32)>,
}

pub(super) fn sample(threads: &Threads, call: Sample<'_>) {
    let SampleLayout { rows, vocabulary } = call.layout;
    // SAFETY: the op layer borrows both tensors exclusively for this call.
    let (chosen, report) = unsafe {
        let words = |tensor, count| slice::from_raw_parts_mut(start_of::<u32>(tensor), count);
        (words(&call.chosen, call.chosen.rows()), words(&call.report, call.report.rows()))
    };
    let asked = Asked { words: indices(&call.asked), layout: call.layout, previous: chosen };
    let (logits, scratch) = (Rows::<f32>::of(&call.logits), Scratch::of(&call.scratch, CPU_SAMPLE_WORDS * vocabulary));
    let answers: Vec<OnceLock<Answer>> = (0..rows).map(|_| OnceLock::new()).collect();
    threads.share(rows, rows * vocabulary * COST, |worker, row| {
        // SAFETY: a worker processes one row at a time, so nothing else uses this worker's scratch.
        let buffers = activation_scratch(unsafe { scratch.of_worker(worker) }, vocabulary);
        let answer = asked.answer(logits.row(row), row, buffers);
        assert!(answers[row].set(answer).is_ok(), "each row is sampled once");
    });
    let [faults, own, ids, logarithms] = call.layout.report_parts();
    for (row, answer) in answers.into_iter().enumerate() {
        let answer = answer.into_inner().expect("each row was sampled");
        chosen[row] = answer.chosen.unwrap_or(NO_CHOICE);
        report[faults + row] = answer.chosen.err().map_or(0, |fault| fault as u32);
        report[own + row] = answer.log_probability.to_bits();
        for place in 0..TOP_MAX {
            let (id, logarithm) = answer.top.get(place).copied().unwrap_or((NO_CHOICE, f32::NAN));
            report[ids + row * TOP_MAX + place] = id;
            report[logarithms + row * TOP_MAX + place] = logarithm.to_bits();
        }
    }
}

/// Divides a worker's scratch into the buffers that the choice of a token needs.
fn activation_scratch(share: &mut [f32], vocabulary: usize) -> ChoiceScratch<'_> {
    let (weights, share) = share.split_at_mut(2 * vocabulary);
    let (candidates, share) = share.split_at_mut(2 * vocabulary);
    let (changed, tally) = share.split_at_mut(vocabulary);
    assert!(weights.as_ptr().cast::<f64>().is_aligned(), "each worker's scratch is aligned to 8 bytes");
    // SAFETY: each slice has the size and alignment of its new type, for which all
    // bit patterns are valid.
    unsafe {
        ChoiceScratch {
            weights: slice::from_raw_parts_mut(weights.as_mut_ptr().cast::<f64>(), vocabulary),
            candidates: slice::from_raw_parts_mut(candidates.as_mut_ptr().cast::<Candidate>(), vocabulary),
            changed,
            tally: slice::from_raw_parts_mut(tally.as_mut_ptr().cast::<u32>(), vocabulary),
        }
    }
}

/// A packed batch, in the layout in which it was uploaded.
struct Asked<'a> {
    words: &'a [u32],
    layout: SampleLayout,
    previous: &'a [u32],
}

impl Asked<'_> {
    fn answer(&self, logits: &[f32], at: usize, buffers: ChoiceScratch<'_>) -> Answer {
        let words = self.words[at * ROW_WORDS..].first_chunk().expect("the number of rows was checked before");
        let (row, mask) = SampleRow::from_words(words);
        let nothing = |fault| Answer { chosen: Err(fault), log_probability: f32::NAN, top: Vec::new() };
        if row.ignored {
            return nothing(Fault::Ignored);
        }
        if let Some(fault) = fault_of(logits) {
            return nothing(fault);
        }
        let biases: Vec<f32> = self.listed(SampleList::Biases, at).iter().map(|bits| f32::from_bits(*bits)).collect();
        let produced = self.seen(self.listed(SampleList::Produced, at));
        let row_lists = RowLists {
            allowed: (mask != NO_MASK).then(|| &self.words[mask as usize..][..self.layout.mask_words()]),
            forbidden: self.listed(SampleList::Forbidden, at),
            biased: self.listed(SampleList::Biased, at),
            biases: &biases,
            prompt: self.listed(SampleList::Prompt, at),
            produced: &produced,
            unseen: None,
        };
        let chosen = match choose(logits, &row, &row_lists, buffers) {
            Ok(chosen) => chosen,
            Err(fault) => return nothing(fault),
        };
        if row.top == NO_REPORT {
            return Answer { chosen: Ok(chosen), log_probability: f32::NAN, top: Vec::new() };
        }
        let distribution = Distribution::of(logits);
        let top = Distribution::top(logits, row.top as usize).into_iter();
        Answer {
            chosen: Ok(chosen),
            log_probability: distribution.log_probability(logits[chosen as usize]),
            top: top.map(|(logit, id)| (id, distribution.log_probability(logit))).collect(),
        }
    }

    /// Returns row `at`'s list of kind `list`.
    fn listed(&self, list: SampleList, at: usize) -> &[u32] {
        let starts = &self.words[self.layout.starts(list)];
        &self.words[starts[at] as usize..starts[at + 1] as usize]
    }

    /// Returns the ids of `tokens`. When the host packs a batch, it may not know the choices of the
    /// previous step yet. For such a token, `tokens` has the code of a row of the previous step,
    /// and the result has the id that was chosen for that row.
    fn seen<'t>(&self, tokens: &'t [u32]) -> Cow<'t, [u32]> {
        let token = |code: &u32| InputToken::of_code(*code);
        if tokens.iter().all(|code| matches!(token(code), InputToken::Known(_))) {
            return Cow::Borrowed(tokens);
        }
        Cow::Owned(tokens.iter().map(|code| token(code).id(self.previous).unwrap_or(NO_CHOICE)).collect())
    }
}
