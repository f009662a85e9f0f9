//! What serving asks of a device, kind by kind; each kind has a worst case that covers it, or this does
//! not compile.

/// A kind of work that takes memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Pictures become embeddings.
    Encode,
    /// Embeddings take the place of a prompt's placeholders.
    Merge,
    /// Prompts are read, in chunks.
    Prefill,
    /// Every sequence has its next token, at the full context.
    Decode,
    /// Prompts have log-probabilities.
    Score,
    /// Tokens are chosen with every feature of sampling.
    Choose,
}

impl Workload {
    /// All of them.
    pub const ALL: &[Workload] =
        &[Workload::Encode, Workload::Merge, Workload::Prefill, Workload::Decode, Workload::Score, Workload::Choose];

    /// Whether `list` has it: for constants, which have no `contains`.
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

/// A worst case: what it is called, and what it stresses.
#[derive(Debug, PartialEq, Eq)]
pub struct WorstCaseKind {
    /// As people read it.
    pub name: &'static str,
    /// What runs in it at its largest.
    pub workloads: &'static [Workload],
}

impl WorstCaseKind {
    /// One launch of the largest pictures.
    pub const LARGEST_PICTURES: WorstCaseKind = WorstCaseKind {
        name: "vision: as many of the largest pictures as a launch takes",
        workloads: &[Workload::Encode],
    };
    /// One launch of the smallest.
    pub const SMALLEST_PICTURES: WorstCaseKind =
        WorstCaseKind { name: "vision: a launch of the smallest pictures", workloads: &[Workload::Encode] };
    /// One step of prompts.
    pub const PROMPTS: WorstCaseKind = WorstCaseKind {
        name: "step: prompts in every sequence, all of it pictures, every token scored",
        workloads: &[Workload::Merge, Workload::Prefill, Workload::Score, Workload::Choose],
    };
    /// One step of decoding.
    pub const DECODES: WorstCaseKind = WorstCaseKind {
        name: "step: every sequence decodes at the full context",
        workloads: &[Workload::Decode, Workload::Choose],
    };
    /// All of them: [`worst_cases`](crate::worst_cases::worst_cases) makes those that a model can reach.
    pub const ALL: &[WorstCaseKind] = &[
        WorstCaseKind::LARGEST_PICTURES,
        WorstCaseKind::SMALLEST_PICTURES,
        WorstCaseKind::PROMPTS,
        WorstCaseKind::DECODES,
    ];
}

/// The workloads of a family, if each has a worst case; otherwise whoever names them in a constant does not compile.
///
/// ```
/// use bursar_model::workload::{Workload, WorstCaseKind, covered_by};
/// const HEARS: &[Workload] = &[Workload::Encode];
/// const _: &[Workload] = covered_by(HEARS, &[WorstCaseKind::DECODES, WorstCaseKind::SMALLEST_PICTURES]);
/// ```
///
/// ```compile_fail
/// use bursar_model::workload::{Workload, WorstCaseKind, covered_by};
/// const HEARS: &[Workload] = &[Workload::Encode];
/// const _: &[Workload] = covered_by(HEARS, &[WorstCaseKind::DECODES]); // no worst case encodes
/// ```
pub const fn covered_by(workloads: &'static [Workload], kinds: &[WorstCaseKind]) -> &'static [Workload] {
    let mut at = 0;
    while at < workloads.len() {
        let (mut kind, mut is_covered) = (0, false);
        while kind < kinds.len() {
            is_covered |= workloads[at].is_in(kinds[kind].workloads);
            kind += 1;
        }
        assert!(is_covered, "a family brings a workload that no worst case covers");
        at += 1;
    }
    workloads
}

/// The same against all worst cases that there are.
pub const fn covered(workloads: &'static [Workload]) -> &'static [Workload] {
    covered_by(workloads, WorstCaseKind::ALL)
}

/// A workload that somebody adds has to have a worst case before any family brings it.
const _: &[Workload] = covered(Workload::ALL);
