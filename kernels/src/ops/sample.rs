//! A token for each row of logits, with everything that [`crate::sampling`] knows: chosen where the logits are.

use crate::{
    Backend, DType, KernelError, Scope, Tensor, Work,
    sampling::{Fault, SampleLayout, TOP_MAX},
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
    /// `[words]` u32, contiguous: a packed batch, aligned to 8 bytes. There may be more words than it has.
    pub asked: Tensor<'a>,
    /// What lies where in `asked`, and how many rows there are.
    pub layout: SampleLayout,
    /// What the target declared.
    pub scratch: Tensor<'a>,
    /// `[sequences]` u32, contiguous, at least as many as rows: read, for produced tokens that stand here, before any of
    /// the first `rows` is written.
    pub chosen: Tensor<'a>,
    /// `[words]` u32, contiguous, at least as many as the layout says: see [`outcomes`].
    pub report: Tensor<'a>,
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

/// Reads the first rows of `chosen` and the report of [`sample_into`](Scope::sample_into), one outcome a row; of a report
/// that ends before the likeliest, none of them. Another length is our own bug.
pub fn outcomes(chosen: &[u32], report: &[u32], layout: SampleLayout) -> Vec<Outcome> {
    let [faults, own, ids, logarithms] = layout.report_parts();
    let has_top = report.len() == layout.report_words();
    assert!(has_top || report.len() == layout.report_words_without_top(), "the report of another batch");
    assert!(chosen.len() >= layout.rows, "{} tokens of {} rows", chosen.len(), layout.rows);
    let row = |row: usize| {
        let known = |bits: u32| Some(f32::from_bits(bits)).filter(|number| !number.is_nan());
        let tops = if has_top { row * TOP_MAX..(row + 1) * TOP_MAX } else { 0..0 };
        let ids = report.get(ids..).unwrap_or_default()[tops.clone()].iter();
        let pairs = ids.zip(&report.get(logarithms..).unwrap_or_default()[tops]).filter(|(id, _)| **id != NO_CHOICE);
        Outcome {
            chosen: Fault::from_word(report[faults + row]).map_or(Ok(chosen[row]), Err),
            log_probability: known(report[own + row]),
            top: pairs.map(|(&id, &bits)| (id, f32::from_bits(bits))).collect(),
        }
    };
    (0..layout.rows).map(row).collect()
}

impl<B: Backend> Scope<'_, B> {
    /// Chooses a token from each row of `logits` `[rows, vocabulary]` f32 into the first rows of `chosen` `[sequences]`
    /// u32, memory that outlives the pass, for the pass behind it to [`embed`](Scope::embed) from, and writes the first
    /// words of `report` `[words]` u32, which [`outcomes`] reads. `asked` `[words]` u32 and `layout` are what
    /// [`SampleBatch::pack`] gives, uploaded; there may be more words in both, so that they lie still for a captured step.
    ///
    /// A row may be [given](crate::sampling::SampleRow::given) its token: it is there for the report, as a prompt's are.
    ///
    /// What the step before has chosen is still in `chosen`: produced tokens that the host has not seen are read there.
    ///
    /// [`SampleBatch::pack`]: crate::sampling::SampleBatch::pack
    pub fn sample_into(
        &self,
        logits: &Tensor<'_>,
        asked: &Tensor<'_>,
        layout: SampleLayout,
        chosen: &mut Tensor<'_>,
        report: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "sample";
        if logits.dtype() != DType::F32 {
            return Err(KernelError::Type { op: OP, what: "logits", expected: "f32", found: logits.dtype() });
        }
        let SampleLayout { rows, vocabulary } = layout;
        check::shape(OP, "logits", logits, [rows, vocabulary])?;
        let fits = (1..=VOCABULARY_MAX).contains(&vocabulary);
        check::holds(fits, OP, "logits", logits, "1 to 524,288 columns")?;
        check::index_list(OP, "asked", asked)?;
        check::holds(asked.rows() >= layout.lists(), OP, "asked", asked, "words for each row of logits")?;
        check::holds(asked.address().0.is_multiple_of(8), OP, "asked", asked, "an address of whole 8 bytes")?;
        check::index_list(OP, "chosen", chosen)?;
        check::holds(chosen.rows() >= rows, OP, "chosen", chosen, "a place for each row of logits")?;
        check::writable(OP, "chosen", chosen);
        check::index_list(OP, "report", report)?;
        check::holds(report.rows() >= layout.report_words(), OP, "report", report, "a report of each row of logits")?;
        check::writable(OP, "report", report);
        let inner = self.scope();
        let scratch = inner.take_scratch(self.target().sample_scratch(rows, chosen.rows(), vocabulary))?;
        self.count(Work::over(
            logits.shape().elements() as u64,
            &[logits, &report.row_range(0..layout.report_words())],
        ));
        self.backend.sample(Call {
            logits: logits.view(),
            asked: asked.view(),
            layout,
            scratch: scratch.view(),
            chosen: chosen.view(),
            report: report.view(),
        })
    }
}
