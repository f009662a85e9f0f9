//! Rotary positions of Qwen's vision towers: half of a head's pairs rotate with the row and half
//! with the column, at the same frequencies.

use bursar_kernels::ops::rotary::{PairAxes, Rope};
use serde_json::{Map, Value};

use crate::{
    blocks::{ConfigError, rope_config::RopeConfig, rope_scaling::RopeScaling},
    weights::WeightMap,
};

/// Base of the frequencies. All released towers use this value.
pub const THETA: f64 = 10_000.0;

/// Refuses a `vision_config` that scales its frequencies or has another base. `place` is the
/// prefix of its keys.
pub fn check(place: &str, fields: &Map<String, Value>) -> Result<(), ConfigError> {
    let rope = RopeConfig::read(place, fields, &["default", "axial"], &[])?;
    if rope != (RopeConfig { theta: THETA, ..RopeConfig::default() }) {
        let (field, value) = (format!("{place}rope_theta"), rope.theta.to_string());
        return Err(ConfigError::Unsupported { field, value, supported: "10000" });
    }
    Ok(())
}

/// Refuses heads that cannot be rotated along two axes. Returns the elements of a head.
pub fn head_dim(hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    if hidden.is_multiple_of(4 * heads) {
        Ok(hidden / heads)
    } else {
        Err(ConfigError::Contradiction(format!(
            "vision_config: {heads} heads of {hidden} elements cannot be rotated along two axes"
        )))
    }
}

/// The frequencies of heads of `head_dim` elements, for positions of row and column.
pub fn rope(map: &mut WeightMap<'_>, head_dim: usize) -> Rope<'static> {
    let per_axis = RopeScaling::Plain.frequencies(THETA, head_dim / 2);
    let axes = PairAxes::Sections(vec![per_axis.len(); 2]);
    Rope { frequencies: map.constant(&[per_axis.clone(), per_axis].concat()), axes }
}
