//! The kinds of work that serving puts on a device. A kind of work without a worst case is a
//! compile error.

/// A kind of work with separate memory requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Encoding pictures to embeddings.
    Encode,
    /// Writing embeddings over a prompt's placeholders.
    Merge,
    /// Computing the keys and values of prompts, in chunks.
    Prefill,
    /// Generating a token for every sequence, at the full context length.
    Decode,
    /// Verifying drafted tokens of every sequence, at the full context length.
    Verify,
    /// Log-probabilities of prompt tokens.
    Score,
    /// Sampling tokens, with every sampling feature.
    Choose,
}

impl Workload {
    pub const ALL: &[Workload] = &[
        Workload::Encode,
        Workload::Merge,
        Workload::Prefill,
        Workload::Decode,
        Workload::Verify,
        Workload::Score,
        Workload::Choose,
    ];

    /// Whether `list` contains the workload. The function uses a loop because `contains` is not
    /// `const`.
    const fn is_in(self, list: &[Workload]) -> bool {
        let mut at = 0;
        while at < list.len() {
            if list[at] as u8 == self as u8 {
                return true;
            }
            at += 1;
        }
        false
    }
}

/// The name of a worst case and the workloads that it covers.
#[derive(Debug, PartialEq, Eq)]
pub struct WorstCaseKind {
    pub name: &'static str,
    /// The workloads that reach their largest size in this worst case.
    pub workloads: &'static [Workload],
}

impl WorstCaseKind {
    /// A launch of the largest pictures.
    pub const LARGEST_PICTURES: WorstCaseKind = WorstCaseKind {
        name: "vision: as many of the largest pictures as a launch takes",
        workloads: &[Workload::Encode],
    };
    /// A launch of the smallest pictures.
    pub const SMALLEST_PICTURES: WorstCaseKind =
        WorstCaseKind { name: "vision: a launch of the smallest pictures", workloads: &[Workload::Encode] };
    /// A step with prompts in every sequence, in which every token is scored.
    pub const PROMPTS: WorstCaseKind = WorstCaseKind {
        name: "step: prompts in every sequence, all of it pictures, every token scored",
        workloads: &[Workload::Merge, Workload::Prefill, Workload::Score, Workload::Choose],
    };
    /// A step in which every sequence decodes at the full context.
    pub const DECODES: WorstCaseKind = WorstCaseKind {
        name: "step: every sequence decodes at the full context",
        workloads: &[Workload::Decode, Workload::Choose],
    };
    /// A step in which the decoding sequences have as many drafted tokens as a step may have.
    pub const VERIFIES: WorstCaseKind = WorstCaseKind {
        name: "step: every sequence decodes at the full context, with drafted tokens",
        workloads: &[Workload::Verify, Workload::Choose],
    };
    /// All kinds. [`worst_cases`](crate::worst_cases::worst_cases) creates the worst cases that
    /// a model can reach.
    pub const ALL: &[WorstCaseKind] = &[
        WorstCaseKind::LARGEST_PICTURES,
        WorstCaseKind::SMALLEST_PICTURES,
        WorstCaseKind::PROMPTS,
        WorstCaseKind::DECODES,
        WorstCaseKind::VERIFIES,
    ];
}

/// Returns `workloads` if each has a worst case in `kinds`. Otherwise, a constant that is
/// initialized with this call does not compile.
///
/// ```
/// use bursar_model::workload::{Workload, WorstCaseKind, covered_by};
/// const NEEDED: &[Workload] = &[Workload::Encode];
/// const _: &[Workload] = covered_by(NEEDED, &[WorstCaseKind::DECODES, WorstCaseKind::SMALLEST_PICTURES]);
/// ```
///
/// ```compile_fail
/// use bursar_model::workload::{Workload, WorstCaseKind, covered_by};
/// const NEEDED: &[Workload] = &[Workload::Encode];
/// const _: &[Workload] = covered_by(NEEDED, &[WorstCaseKind::DECODES]); // no worst case encodes
/// ```
pub const fn covered_by(workloads: &'static [Workload], kinds: &[WorstCaseKind]) -> &'static [Workload] {
    let mut at = 0;
    while at < workloads.len() {
        let (mut kind, mut is_covered) = (0, false);
        while kind < kinds.len() {
            is_covered |= workloads[at].is_in(kinds[kind].workloads);
            kind += 1;
        }
        assert!(is_covered, "a family has a workload that no worst case covers");
        at += 1;
    }
    workloads
}

/// Like [`covered_by`], with every kind of worst case.
pub const fn covered(workloads: &'static [Workload]) -> &'static [Workload] {
    covered_by(workloads, WorstCaseKind::ALL)
}

/// A new workload needs a worst case before any family may use it.
const _: &[Workload] = covered(Workload::ALL);
