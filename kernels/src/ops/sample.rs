//! Sampling: a token for each row of logits, chosen on the device with
//! every option of [`crate::sampling`].

use bursar_budgets::Bytes;

use crate::{
    Backend, DType, KernelError, Scope, Tensor, Work, calls,
    sampling::{Fault, SampleLayout, TOP_MAX},
};

use super::{argmax::NO_CHOICE, check};

/// Largest supported vocabulary. Up to this size, sums of weights are exact on every target.
const VOCABULARY_MAX: usize = 1 << 19;

/// The result for one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The chosen token, or the fault of the row.
    pub chosen: Result<u32, Fault>,
    /// The natural logarithm of the chosen token's probability, if the row requested it.
    pub log_probability: Option<f32>,
    /// The likeliest tokens, at most as many as requested, with the natural
    /// logarithms of their probabilities.
    pub top: Vec<(u32, f32)>,
}

/// Reads the first rows of `chosen` and the report of [`sample_into`](Scope::sample_into),
/// and returns one outcome per row. If `report` ends before the likeliest tokens, their
/// lists are empty. Panics if `report` has any other length, or if `chosen` has fewer
/// entries than there are rows.
pub fn outcomes(chosen: &[u32], report: &[u32], layout: SampleLayout) -> Vec<Outcome> {
    let [faults, own, ids, logarithms] = layout.report_parts();
    let has_top = report.len() == layout.report_words();
    assert!(has_top || report.len() == layout.report_words_without_top(), "the report has the size of another batch");
    assert!(chosen.len() >= layout.rows, "space for {} tokens, but the batch has {} rows", chosen.len(), layout.rows);
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
    /// Chooses a token from each row of `logits` `[rows, vocabulary]` f32. The tokens are written
    /// to the first rows of `chosen` `[sequences]` u32, which outlives the pass, so that the next
    /// pass can [`embed`](Scope::embed) them. The report that [`outcomes`] reads is written to the
    /// first words of `report` `[words]` u32. `layout` is the result of [`SampleBatch::pack`], and
    /// `asked` `[words]` u32 contains the words that it packed. `asked` and `report` may be longer
    /// than needed, so that a captured step can keep them at fixed addresses.
    ///
    /// A row may have a [given](crate::sampling::SampleRow::given) token, such as the next token of
    /// a prompt. In that case no token is chosen, and only the row's report is computed.
    ///
    /// Before the call, `chosen` must still contain the previous step's tokens. Produced tokens
    /// that the host does not know yet are read from `chosen`.
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
        check::holds(asked.address().is_multiple_of(Bytes(8)), OP, "asked", asked, "an address aligned to 8 bytes")?;
        check::index_list(OP, "chosen", chosen)?;
        check::holds(chosen.rows() >= rows, OP, "chosen", chosen, "an element for each row of logits")?;
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
        self.backend.sample(calls::Sample {
            logits: logits.view(),
            asked: asked.view(),
            layout,
            scratch: scratch.view(),
            chosen: chosen.view(),
            report: report.view(),
        })
    }
}
