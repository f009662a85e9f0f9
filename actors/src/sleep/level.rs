//! The sleep level: the parts of a model that are kept during sleep.

use std::fmt;

use serde::Serialize;

/// The parts of a model that are kept during sleep, by vLLM's level numbers. Both levels
/// release the KV cache, workspaces, CUDA graphs and threads, and keep the measurements
/// of the model's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "u8")]
pub enum SleepLevel {
    /// Level 1: weights are copied to leased host memory. Waking reads no file.
    Level1,
    /// Level 2: weights are dropped. Waking loads them from their files again.
    Level2,
}

impl From<SleepLevel> for u8 {
    fn from(level: SleepLevel) -> u8 {
        match level {
            SleepLevel::Level1 => 1,
            SleepLevel::Level2 => 2,
        }
    }
}

impl TryFrom<u8> for SleepLevel {
    type Error = u8;

    fn try_from(number: u8) -> Result<Self, u8> {
        match number {
            1 => Ok(SleepLevel::Level1),
            2 => Ok(SleepLevel::Level2),
            other => Err(other),
        }
    }
}

impl fmt::Display for SleepLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        u8::from(*self).fmt(f)
    }
}
