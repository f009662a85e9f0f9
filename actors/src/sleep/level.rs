//! How deeply a model sleeps.

use std::fmt;

use serde::Serialize;

/// What a sleeping model keeps, by vLLM's numbers. At both levels keys and values, workspaces, graphs and threads go;
/// what is known of the model's size stays.
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
