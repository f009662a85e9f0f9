//! What serving asks of a device, kind by kind; each kind has a worst case that covers it, or this does
//! not compile.

/// A kind of work that takes memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strain {
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

impl Strain {
    /// All of them.
    pub const ALL: &[Strain] =
        &[Strain::Encode, Strain::Merge, Strain::Prefill, Strain::Decode, Strain::Score, Strain::Choose];

    /// Whether `list` has it: for constants, which have no `contains`.
    const fn is_in(self, list: &[Strain]) -> bool {
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
pub struct Stress {
    /// As people read it.
    pub name: &'static str,
    /// What runs in it at its largest.
    pub strains: &'static [Strain],
}

impl Stress {
    /// One launch of the largest pictures.
    pub const LARGEST_PICTURES: Stress =
        Stress { name: "vision: as many of the largest pictures as a launch takes", strains: &[Strain::Encode] };
    /// One launch of the smallest.
    pub const SMALLEST_PICTURES: Stress =
        Stress { name: "vision: a launch of the smallest pictures", strains: &[Strain::Encode] };
    /// One step of prompts.
    pub const PROMPTS: Stress = Stress {
        name: "step: prompts in every sequence, all of it pictures, every token scored",
        strains: &[Strain::Merge, Strain::Prefill, Strain::Score, Strain::Choose],
    };
    /// One step of decoding.
    pub const DECODES: Stress =
        Stress { name: "step: every sequence decodes at the full context", strains: &[Strain::Decode, Strain::Choose] };
    /// All of them: [`worst_cases`](crate::worst_cases::worst_cases) makes those that a model can reach.
    pub const ALL: &[Stress] = &[Stress::LARGEST_PICTURES, Stress::SMALLEST_PICTURES, Stress::PROMPTS, Stress::DECODES];
}

/// The strains of a family, if each has a stress; otherwise whoever names them in a constant does not compile.
///
/// ```
/// use bursar_model::strain::{Strain, Stress, stressed_by};
/// const HEARS: &[Strain] = &[Strain::Encode];
/// const _: &[Strain] = stressed_by(HEARS, &[Stress::DECODES, Stress::SMALLEST_PICTURES]);
/// ```
///
/// ```compile_fail
/// use bursar_model::strain::{Strain, Stress, stressed_by};
/// const HEARS: &[Strain] = &[Strain::Encode];
/// const _: &[Strain] = stressed_by(HEARS, &[Stress::DECODES]); // no stress encodes
/// ```
pub const fn stressed_by(strains: &'static [Strain], stresses: &[Stress]) -> &'static [Strain] {
    let mut at = 0;
    while at < strains.len() {
        let (mut stress, mut is_stressed) = (0, false);
        while stress < stresses.len() {
            is_stressed |= strains[at].is_in(stresses[stress].strains);
            stress += 1;
        }
        assert!(is_stressed, "a family brings a strain that no worst case covers");
        at += 1;
    }
    strains
}

/// The same against all stresses that there are.
pub const fn stressed(strains: &'static [Strain]) -> &'static [Strain] {
    stressed_by(strains, Stress::ALL)
}

/// A strain that somebody adds has to have a stress before any family brings it.
const _: &[Strain] = stressed(Strain::ALL);
