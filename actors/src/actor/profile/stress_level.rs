//! Pure: the number of layers that worst cases run through (ADR 7).

use bursar_kernels::AUTOTUNED_LAYERS;
use bursar_model::Depth;

/// How thoroughly a start runs its worst cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StressLevel {
    /// Worst cases run once, at the final size, through as few layers as are enough to prove the
    /// planned peaks. This level is used on a host, where memory is never refused.
    Proof,
    /// Before sizing, worst cases run through a few layers, so that the driver loads kernels and
    /// autotuning measures GEMMs. At the final size they run through all layers.
    Autotune,
    /// Worst cases run through all layers, both before sizing and at the final size.
    Full,
}

impl StressLevel {
    /// Returns the level for host memory or for a GPU. If the user asks for full stress, returns
    /// [`Full`](StressLevel::Full).
    pub fn of(full_stress: bool, is_host: bool) -> Self {
        match (full_stress, is_host) {
            (true, _) => StressLevel::Full,
            (false, true) => StressLevel::Proof,
            (false, false) => StressLevel::Autotune,
        }
    }

    /// Whether worst cases also run before the size is settled.
    pub fn runs_before_sizing(self) -> bool {
        self != StressLevel::Proof
    }

    /// Returns the number of layers that a worst case runs through, either before sizing or at the
    /// final size. `proof` returns how many layers are enough to prove the planned peak.
    ///
    /// # Errors
    /// Returns the error of `proof`, which is called only if its result is needed.
    pub fn depth<E>(self, is_final: bool, proof: impl FnOnce() -> Result<Depth, E>) -> Result<Depth, E> {
        Ok(match (self, is_final) {
            (StressLevel::Full, _) | (StressLevel::Autotune, true) => Depth::Whole,
            (StressLevel::Proof, _) => proof()?,
            (StressLevel::Autotune, false) => proof()?.max(Depth::First(AUTOTUNED_LAYERS)),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn depths(stress_level: StressLevel, proof: usize) -> [Depth; 2] {
        [false, true].map(|is_final| {
            let Ok(depth) = stress_level.depth(is_final, || Ok::<_, Infallible>(Depth::First(proof)));
            depth
        })
    }

    #[test]
    fn a_gpu_autotunes_some_layers_and_validates_all_layers() {
        let stress_level = StressLevel::of(false, false);
        assert!(stress_level.runs_before_sizing());
        assert_eq!(depths(stress_level, 1), [Depth::First(AUTOTUNED_LAYERS), Depth::Whole]);
        assert_eq!(depths(stress_level, 20), [Depth::First(20), Depth::Whole], "proving the peak may need more layers");
    }

    #[test]
    fn a_host_validates_few_layers_unless_full_stress_is_set() {
        assert!(!StressLevel::of(false, true).runs_before_sizing());
        assert_eq!(depths(StressLevel::of(false, true), 3)[1], Depth::First(3));
        for is_host in [false, true] {
            assert_eq!(depths(StressLevel::of(true, is_host), 1), [Depth::Whole; 2]);
        }
    }
}
