//! A token for each row of logits, with everything that [`crate::sampling`] knows: chosen where the logits are.

use crate::{
    Backend, DType, KernelError, Scope, Tensor, Work,
    sampling::{Fault, ROW_WORDS, SamplePlaces},
};

use super::{argmax::NO_CHOICE, check};

/// Tokens that a row of logits may be of: sums of their weights are exact on every target up to here.
const VOCABULARY_MAX: usize = 1 << 19;

/// What a backend is asked to compute: for each row `chosen[i]`, by [`choose`](crate::sampling::choose), or
/// [`NO_CHOICE`], and the report.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, vocabulary]` f32.
    pub logits: Tensor<'a>,
    /// `[words]` u32, contiguous: a packed batch, aligned to 8 bytes.
    pub packed: Tensor<'a>,
    /// What lies where in `packed`.
    pub places: &'a SamplePlaces,
    /// What the target declared.
    pub scratch: Tensor<'a>,
    /// `[sequences]` u32, contiguous, at least as many as rows: read, for produced tokens that stand here, before any of
    /// the first `rows` is written.
    pub chosen: Tensor<'a>,
    /// `[words]` u32: see [`outcomes`].
    pub report: Tensor<'a>,
}

/// Where the parts of a report begin, in words: faults `[rows]`, log-probabilities of what was chosen `[rows]` f32, the
/// likeliest `[rows, top]` and their log-probabilities `[rows, top]` f32.
pub(crate) fn report_parts(places: &SamplePlaces) -> [usize; 4] {
    let (rows, tops) = (places.rows, places.rows * places.top);
    [0, rows, 2 * rows, 2 * rows + tops]
}

/// What became of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The token.
    pub chosen: Result<u32, Fault>,
    /// The natural logarithm of its probability, if it was asked for.
    pub log_probability: Option<f32>,
    /// The likeliest tokens, as many as were asked for and are possible, and the logarithms of their probabilities.
    pub top: Vec<(u32, f32)>,
}

/// Reads the first rows of `chosen` and the report of [`sample_into`](Scope::sample_into), one outcome a row. Another
/// length is our own bug.
pub fn outcomes(chosen: &[u32], report: &[u32], places: &SamplePlaces) -> Vec<Outcome> {
    let [faults, own, ids, logarithms] = report_parts(places);
    assert_eq!(report.len(), logarithms + places.rows * places.top, "the report of another batch");
    assert!(chosen.len() >= places.rows, "{} tokens of {} rows", chosen.len(), places.rows);
    let row = |row: usize| {
        let known = |bits: u32| Some(f32::from_bits(bits)).filter(|number| !number.is_nan());
        let tops = row * places.top..(row + 1) * places.top;
        let ids = &report[ids..][tops.clone()];
        let pairs = ids.iter().zip(&report[logarithms..][tops]).filter(|(id, _)| **id != NO_CHOICE);
        Outcome {
            chosen: Fault::from_word(report[faults + row]).map_or(Ok(chosen[row]), Err),
            log_probability: known(report[own + row]),
            top: pairs.map(|(&id, &bits)| (id, f32::from_bits(bits))).collect(),
        }
    };
    (0..places.rows).map(row).collect()
}

impl<B: Backend> Scope<'_, B> {
    /// Chooses a token from each row of `logits` `[rows, vocabulary]` f32 into the first rows of `chosen` `[sequences]`
    /// u32, memory that outlives the pass, for the pass behind it to [`embed`](Scope::embed) from; gives the report that
    /// [`outcomes`] reads. `packed` `[words]` u32 and `places` are what [`SampleBatch::pack`] gives, uploaded.
    ///
    /// What the step before has chosen is still in `chosen`: produced tokens that the host has not seen are read there.
    ///
    /// [`SampleBatch::pack`]: crate::sampling::SampleBatch::pack
    pub fn sample_into(
        &self,
        logits: &Tensor<'_>,
        packed: &Tensor<'_>,
        places: &SamplePlaces,
        chosen: &mut Tensor<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "sample";
        if logits.dtype() != DType::F32 {
            return Err(KernelError::Type { op: OP, what: "logits", expected: "f32", found: logits.dtype() });
        }
        let (rows, vocabulary) = (places.rows, places.vocabulary);
        check::shape(OP, "logits", logits, [rows, vocabulary])?;
        let fits = (1..=VOCABULARY_MAX).contains(&vocabulary);
        check::holds(fits, OP, "logits", logits, "1 to 524,288 columns")?;
        check::index_list(OP, "packed", packed)?;
        check::shape(OP, "packed", packed, [places.words])?;
        check::holds(packed.address().0.is_multiple_of(8), OP, "packed", packed, "an address of whole 8 bytes")?;
        check::index_list(OP, "chosen", chosen)?;
        check::holds(chosen.rows() >= rows, OP, "chosen", chosen, "a place for each row of logits")?;
        check::writable(OP, "chosen", chosen);
        assert!(places.words >= rows * ROW_WORDS, "places of another batch");
        let report = self.take([2 * rows * (1 + places.top)], DType::U32)?;
        let inner = self.scope();
        let scratch = inner.take_scratch(self.target().sample_scratch(rows, chosen.rows(), vocabulary))?;
        self.count(Work::over(logits.shape().elements() as u64, &[logits, packed, &report]));
        self.backend.sample(Call {
            logits: logits.view(),
            packed: packed.view(),
            places,
            scratch: scratch.view(),
            chosen: chosen.view(),
            report: report.view(),
        })?;
        Ok(report)
    }
}
