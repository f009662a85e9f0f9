//! The algorithms among which autotuning chooses.

use serde::{Deserialize, Serialize};

use super::{blas::Algorithm, tiles::Cut};

/// The fastest algorithm measured for a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum GemmAlgorithm {
    /// An algorithm of cuBLASLt.
    Library(Algorithm),
    SmallM(Cut),
    MediumM,
    LargeM,
    Int4,
    /// For gated GEMMs: an ungated GEMM followed by the gate.
    Unfused,
}
