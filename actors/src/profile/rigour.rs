//! How deep worst cases run: pure (ADR 26).

use bursar_kernels::AUTOTUNED_LAYERS;
use bursar_model::Depth;

/// What a start asks of its worst cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rigour {
    /// Once, at the final size, through the layers that prove the planned peaks: host memory gives what it is asked for.
    Proof,
    /// Before the size is settled through a few layers, where a GPU's driver loads kernels and autotuning measures products;
    /// at the final size through all of them.
    Autotune,
    /// Both times through all layers.
    Full,
}

impl Rigour {
    /// What a start on this kind of memory asks, unless the user asks for all.
    pub fn of(full_stress: bool, is_host: bool) -> Self {
        match (full_stress, is_host) {
            (true, _) => Rigour::Full,
            (false, true) => Rigour::Proof,
            (false, false) => Rigour::Autotune,
        }
    }

    /// Whether worst cases run before the size is settled too.
    pub fn runs_before_sizing(self) -> bool {
        self != Rigour::Proof
    }

    /// How deep a worst case runs, before the size is settled or at it, whose planned peak is proven by `proof`.
    ///
    /// # Errors
    /// Those of `proof`, which is asked where it matters.
    pub fn depth<E>(self, is_final: bool, proof: impl FnOnce() -> Result<Depth, E>) -> Result<Depth, E> {
        Ok(match (self, is_final) {
            (Rigour::Full, _) | (Rigour::Autotune, true) => Depth::Whole,
            (Rigour::Proof, _) => proof()?,
            (Rigour::Autotune, false) => proof()?.max(Depth::First(AUTOTUNED_LAYERS)),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn depths(rigour: Rigour, proof: usize) -> [Depth; 2] {
        [false, true].map(|is_final| {
            let Ok(depth) = rigour.depth(is_final, || Ok::<_, Infallible>(Depth::First(proof)));
            depth
        })
    }

    #[test]
    fn a_gpu_autotunes_some_layers_and_is_proven_by_all() {
        let rigour = Rigour::of(false, false);
        assert!(rigour.runs_before_sizing());
        assert_eq!(depths(rigour, 1), [Depth::First(AUTOTUNED_LAYERS), Depth::Whole]);
        assert_eq!(depths(rigour, 20), [Depth::First(20), Depth::Whole], "its peak may need more of them");
    }

    #[test]
    fn a_host_proves_few_layers_and_full_stress_runs_all_twice() {
        assert!(!Rigour::of(false, true).runs_before_sizing());
        assert_eq!(depths(Rigour::of(false, true), 3)[1], Depth::First(3));
        for is_host in [false, true] {
            assert_eq!(depths(Rigour::of(true, is_host), 1), [Depth::Whole; 2]);
        }
    }
}
