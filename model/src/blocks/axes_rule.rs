//! The axes of a position by which the pairs of a head are rotated.

use bursar_kernels::ops::rotary::PairAxes;

use super::{config_error::ConfigError, rope_config::RopeConfig};

/// How the pairs of a head are assigned to the axes of a position. The numbers in a variant are the
/// default sections, for a file that has no sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxesRule {
    /// Positions have one axis.
    One,
    /// Each axis has this number of consecutive pairs.
    Consecutive([usize; 3]),
    /// Pairs alternate between the axes as in [`PairAxes::Interleaved`], until each axis has
    /// its number of pairs.
    Interleaved([usize; 3]),
}

impl AxesRule {
    /// The RoPE config keys that only this rule reads.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            AxesRule::One | AxesRule::Consecutive(_) => &[],
            AxesRule::Interleaved(_) => &["mrope_interleaved"],
        }
    }

    /// The axis of each rotated pair of a head.
    pub fn of(self, place: &str, rope: &RopeConfig, rotary_dim: usize) -> Result<PairAxes, ConfigError> {
        let given = |default: [usize; 3]| sections(rope.sections.as_deref().unwrap_or(&default), rotary_dim);
        match self {
            // All axes of a text position are equal, so sections would change nothing.
            AxesRule::One => Ok(PairAxes::Sections(vec![rotary_dim / 2])),
            AxesRule::Consecutive(default) => Ok(PairAxes::Sections(given(default)?.to_vec())),
            AxesRule::Interleaved(default) => {
                if rope.interleaved == Some(false) {
                    let (field, value) = (format!("{place}mrope_interleaved"), "false".to_owned());
                    return Err(ConfigError::Unsupported { field, value, supported: "true" });
                }
                let [first, second, third] = given(default)?;
                // The last pair of each axis must be within the head. The second axis has the pairs
                // 1, 4, 7 and so on, the third axis has 2, 5, 8 and so on.
                if 3 * second <= rotary_dim / 2 + 1 && 3 * third <= rotary_dim / 2 {
                    Ok(PairAxes::Interleaved(second, third))
                } else {
                    Err(ConfigError::Contradiction(format!(
                        "{place}mrope_section {:?} cannot be interleaved over the {} rotated pairs of a head",
                        [first, second, third],
                        rotary_dim / 2
                    )))
                }
            }
        }
    }
}

fn sections(sections: &[usize], rotary_dim: usize) -> Result<[usize; 3], ConfigError> {
    let pairs = sections.iter().try_fold(0usize, |pairs, section| pairs.checked_add(*section));
    match <[usize; 3]>::try_from(sections) {
        Ok(sections) if pairs == Some(rotary_dim / 2) => Ok(sections),
        _ => Err(ConfigError::Contradiction(format!(
            "mrope_section {sections:?} does not divide the {} rotated pairs of a head among three axes",
            rotary_dim / 2
        ))),
    }
}
