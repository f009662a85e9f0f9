//! The phases of a model's start, and serving. Memory may be refused in any phase.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A phase of a model's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Weights are leased, backed and copied.
    Load,
    /// Workspaces and a small KV cache are backed, and every worst case is run. A start with a
    /// recorded profile runs no worst case here, and by default neither does a host device.
    Probe,
    /// Decode steps are captured as graphs, on devices that support graphs.
    Capture,
    /// The remaining memory is measured, and the KV cache is backed up to its target size.
    Back,
    /// The worst cases run at the final size, with both lanes at once.
    Validate,
    Serve,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Phase; 6] = [Phase::Load, Phase::Probe, Phase::Capture, Phase::Back, Phase::Validate, Phase::Serve];

    /// The phase's name in fault scripts, JSON and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Load => "load",
            Phase::Probe => "probe",
            Phase::Capture => "capture",
            Phase::Back => "back",
            Phase::Validate => "validate",
            Phase::Serve => "serve",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No phase has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no phase {name:?}")]
pub struct UnknownPhase {
    pub name: String,
}

impl FromStr for Phase {
    type Err = UnknownPhase;

    fn from_str(name: &str) -> Result<Self, UnknownPhase> {
        Phase::ALL.into_iter().find(|phase| phase.name() == name).ok_or_else(|| UnknownPhase { name: name.to_owned() })
    }
}
