//! The algorithms that autotuning measured on a device.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{algorithm::GemmAlgorithm, problem::GemmProblem};

/// The algorithms measured so far, for all lanes of a device, including lanes that replace a failed
/// lane.
#[derive(Default)]
pub(in super::super) struct Tuned {
    fastest: Mutex<BTreeMap<GemmProblem, GemmAlgorithm>>,
    /// Ungated GEMMs of many rows for which the large-m kernel is faster than cuBLASLt.
    large_m: Mutex<BTreeSet<GemmProblem>>,
    agreement: Arc<Agreement>,
}

impl Tuned {
    pub(in super::super) fn new(agreement: &Arc<Agreement>) -> Self {
        Tuned { agreement: agreement.clone(), ..Tuned::default() }
    }

    /// Returns all algorithms measured so far.
    pub(super) fn measured(&self) -> MutexGuard<'_, BTreeMap<GemmProblem, GemmAlgorithm>> {
        unpoisoned(&self.fastest)
    }

    /// Returns the algorithm measured for this GEMM, or for the next larger measured number of
    /// rows.
    pub(super) fn fastest(&self, problem: GemmProblem) -> Option<GemmAlgorithm> {
        let most = GemmProblem { rows: usize::MAX, ..problem };
        self.measured().range(problem..=most).next().map(|(_, algorithm)| *algorithm)
    }

    /// Records the algorithm that the ranks agree on for `problem`, and returns it. `fastest` is
    /// the algorithm that this rank measured to be fastest.
    pub(super) fn found(&self, problem: GemmProblem, fastest: GemmAlgorithm) -> GemmAlgorithm {
        let agreed = first(&self.agreement.algorithms, problem, fastest);
        self.measured().insert(problem, agreed);
        agreed
    }

    /// Returns the ungated GEMMs of many rows for which the large-m kernel is faster than cuBLASLt.
    pub(super) fn large_m(&self) -> MutexGuard<'_, BTreeSet<GemmProblem>> {
        unpoisoned(&self.large_m)
    }

    /// Discards the results that the ranks agreed on.
    pub(super) fn forget_agreement(&self) {
        unpoisoned(&self.agreement.algorithms).clear();
        unpoisoned(&self.agreement.large_m).clear();
    }

    /// Returns `true` if the large-m kernel was measured to be faster than the library for this
    /// ungated GEMM, or for the same GEMM with up to a third more rows.
    pub(super) fn is_large_m_faster(&self, problem: GemmProblem) -> bool {
        let close = GemmProblem { rows: problem.rows / 3 * 4, ..problem };
        unpoisoned(&self.large_m).range(problem..=close).next().is_some()
    }

    /// Records whether the large-m kernel computes an ungated GEMM of many rows. `is_faster` is the
    /// result of this rank.
    pub(super) fn compared_large_m(&self, problem: GemmProblem, is_faster: bool) {
        if first(&self.agreement.large_m, problem, is_faster) {
            unpoisoned(&self.large_m).insert(problem);
        }
    }
}

/// The results that all ranks of a model use: for each GEMM, the result of the first rank that
/// measured it. If each rank chose separately, ranks would round the same GEMM differently, and the
/// ranks of a mixture of experts would then choose different experts for a row.
#[derive(Default)]
pub(in super::super) struct Agreement {
    algorithms: Mutex<BTreeMap<GemmProblem, GemmAlgorithm>>,
    /// `true` if the large-m kernel computes the GEMM.
    large_m: Mutex<BTreeMap<GemmProblem, bool>>,
}

/// Locks `lock`, even if it is poisoned. A poisoned lock is safe to use here, because each entry is
/// written in one assignment.
fn unpoisoned<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the value that was found first for `problem` by any rank.
fn first<F: Copy>(found: &Mutex<BTreeMap<GemmProblem, F>>, problem: GemmProblem, by_this_rank: F) -> F {
    *unpoisoned(found).entry(problem).or_insert(by_this_rank)
}

#[cfg(test)]
mod tests {
    use super::{super::problem::testing::problem, *};

    #[test]
    fn all_ranks_use_the_algorithm_that_the_first_rank_found() {
        let agreement = Arc::default();
        let [first, second] = [Tuned::new(&agreement), Tuned::new(&agreement)];
        let sized = |rows| problem(rows, 128, 2048);
        assert_eq!(first.found(sized(64), GemmAlgorithm::LargeM), GemmAlgorithm::LargeM);
        assert_eq!(
            second.found(sized(64), GemmAlgorithm::MediumM),
            GemmAlgorithm::LargeM,
            "the second rank uses the algorithm that the first rank found"
        );
        assert_eq!(
            second.found(sized(65), GemmAlgorithm::MediumM),
            GemmAlgorithm::MediumM,
            "a result for another size is not used"
        );
        first.compared_large_m(sized(300), false);
        second.compared_large_m(sized(300), true);
        assert!(!second.is_large_m_faster(sized(300)), "the first rank found that the large-m kernel is not faster");
        first.forget_agreement();
        assert_eq!(second.found(sized(64), GemmAlgorithm::MediumM), GemmAlgorithm::MediumM);
        second.compared_large_m(sized(300), true);
        assert!(second.is_large_m_faster(sized(300)));
    }

    #[test]
    fn a_measurement_applies_to_smaller_sizes_and_the_large_m_kernel_only_to_close_ones() {
        let tuned = Tuned::default();
        let sized = |rows| problem(rows, 128, 2048);
        tuned.found(sized(64), GemmAlgorithm::LargeM);
        assert_eq!([1, 64, 65].map(|rows| tuned.fastest(sized(rows)).is_some()), [true, true, false]);
        assert_eq!(tuned.fastest(problem(64, 129, 2048)), None, "a result for another GEMM is not used");
        tuned.compared_large_m(sized(400), true);
        assert_eq!([299, 300, 400, 401].map(|rows| tuned.is_large_m_faster(sized(rows))), [false, true, true, false]);
    }
}
