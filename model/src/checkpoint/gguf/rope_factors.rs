//! Divisors of rotary frequencies. GGUF files of Llama 3.1 and later have these divisors instead of
//! the settings that determine them. The settings are recovered from the divisors, because
//! `config.json` has keys for settings but not for one divisor per pair.

use std::f64::consts::TAU;

use serde_json::{Value, json};

use super::header::Header;
use super::settings::Settings;
use super::storage::{bytes, stored};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::stored::{Stored, TensorType};

/// The tensor with the divisors.
pub(super) const TENSOR: &str = "rope_freqs.weight";

/// Largest relative difference between a divisor in the file, which is an f32, and the divisor that
/// follows from the settings.
const TOLERANCE: f64 = 1e-5;

/// The `rope_scaling` of type `llama3` that gives the divisors of the file; `None` if the file has
/// no divisors, or if all of them are 1. `theta` is the base of the frequencies, and `pairs` is the
/// number of element pairs that RoPE rotates.
///
/// # Errors The tensor has another shape or type or lies outside the file, or the divisors do not
/// follow from settings of this type.
pub(super) fn scaling(
    settings: &Settings<'_>,
    header: &Header<'_>,
    file: &[u8],
    (theta, pairs): (f64, usize),
) -> Result<Option<Value>, CheckpointError> {
    let divisors = divisors(settings, header, file, pairs)?;
    let Some(divisors) = divisors.filter(|divisors| divisors.iter().any(|divisor| *divisor != 1.0)) else {
        return Ok(None);
    };
    let supported = "divisors of the type llama3";
    fitted(&divisors, theta).map(Some).ok_or_else(|| settings.refused(TENSOR, format!("{divisors:.3?}"), supported))
}

/// The part of the `pairs` that RoPE rotates, from 0 to 1. Gemma 4's files divide the frequencies of
/// the other pairs by such a large number that these pairs keep their direction.
///
/// # Errors
/// As for [`scaling`].
pub(super) fn rotated_part(
    settings: &Settings<'_>,
    header: &Header<'_>,
    file: &[u8],
    pairs: usize,
) -> Result<f64, CheckpointError> {
    const UNROTATED: f64 = 1e29;
    let divisors = settings.required(TENSOR, divisors(settings, header, file, pairs)?)?;
    let rotated = divisors.iter().take_while(|divisor| **divisor == 1.0).count();
    if divisors[rotated..].iter().all(|divisor| *divisor > UNROTATED) {
        return Ok(rotated as f64 / pairs as f64);
    }
    Err(settings.refused(TENSOR, format!("{divisors:.3?}"), "1 for the first pairs and 1e30 for the others"))
}

/// The divisors of the file, one for each of the `pairs`.
fn divisors(
    settings: &Settings<'_>,
    header: &Header<'_>,
    file: &[u8],
    pairs: usize,
) -> Result<Option<Vec<f64>>, CheckpointError> {
    let Some(tensor) = header.tensors.iter().find(|tensor| tensor.name == TENSOR) else { return Ok(None) };
    let damaged = |reason| CheckpointError::Header { file: settings.file.to_owned(), reason };
    let bytes = bytes(tensor, header, file.len()).map_err(damaged)?;
    if tensor.shape != [pairs] || stored(tensor.kind) != Some(Stored::Plain(TensorType::F32)) {
        let shape = format!("{:?}", tensor.shape);
        return Err(settings.refused(TENSOR, shape, &format!("F32[{pairs}]")));
    }
    Ok(Some(file[bytes].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect()))
}

/// Recovers the settings that determine these divisors. The largest divisor, which divides low
/// frequencies, is `factor`. A blended frequency is a weighted sum of the original frequency and
/// the divided frequency. The weight of the original frequency is a linear function of that
/// frequency, and two points determine the function. The function determines the settings only up
/// to a common factor, so `low_freq_factor` is set to 1, as in released models.
fn fitted(divisors: &[f64], theta: f64) -> Option<Value> {
    let factor = *divisors.last()?;
    let kept = |divisor: f64| (divisor.recip() - factor.recip()) / (1.0 - factor.recip());
    let frequency = |pair: usize| theta.powf(-(pair as f64) / divisors.len() as f64);
    let blended = |pair: &usize| (1e-4..1.0 - 1e-4).contains(&kept(divisors[*pair]));
    let (first, last) = ((0..divisors.len()).find(blended)?, (0..divisors.len()).rfind(blended)?);
    if first == last || !(factor > 1.0 && factor.is_finite()) {
        return None;
    }
    let slope = (kept(divisors[first]) - kept(divisors[last])) / (frequency(first) - frequency(last));
    let high = 1.0 + (slope * frequency(first) - kept(divisors[first])).recip();
    // The divisors in the file are f32, so the recovered value of a round number is inexact.
    let high = (high * 100.0).round() / 100.0;
    let context = (slope * TAU * (high - 1.0)).round();
    let follows = |(pair, divisor): (usize, &f64)| {
        let kept = ((context * frequency(pair) / TAU - 1.0) / (high - 1.0)).clamp(0.0, 1.0);
        let expected = (kept + (1.0 - kept) / factor).recip();
        (divisor / expected - 1.0).abs() <= TOLERANCE
    };
    let is_right = high > 1.0 && (1.0..1e9).contains(&context) && divisors.iter().enumerate().all(follows);
    is_right.then(|| {
        json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": context as u64,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Divisors as llama.cpp writes them (`convert_hf_to_gguf.py`).
    fn divisors([factor, low, high, context]: [f64; 4], theta: f64, pairs: usize) -> Vec<f64> {
        let divisor = |pair: usize| {
            let turns = context * theta.powf(-(pair as f64) / pairs as f64) / TAU;
            let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            f64::from((kept + (1.0 - kept) / factor).recip() as f32)
        };
        (0..pairs).map(divisor).collect()
    }

    #[test]
    fn rope_factors_give_back_the_released_llama3_settings() {
        for (factor, pairs) in [(8.0, 64), (32.0, 32), (32.0, 64)] {
            let found =
                fitted(&divisors([factor, 1.0, 4.0, 8192.0], 5e5, pairs), 5e5).expect("the factors have llama3's form");
            let expected = json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn other_divisors_do_not_count_as_llama3_scaling() {
        let released = divisors([8.0, 1.0, 4.0, 8192.0], 5e5, 64);
        let changed = |change: fn(&mut Vec<f64>)| {
            let mut changed = released.clone();
            change(&mut changed);
            fitted(&changed, 5e5)
        };
        assert!(changed(|divisors| divisors[30] *= 1.001).is_none(), "one divisor does not follow from the settings");
        assert!(changed(|divisors| divisors[63] = f64::NAN).is_none(), "one divisor is not a number");
        assert!(changed(|divisors| divisors.fill(0.5)).is_none(), "divisors below 1 would raise the frequencies");
        assert!(changed(|divisors| divisors.fill(8.0)).is_none(), "all frequencies are divided");
        assert!(changed(Vec::clear).is_none(), "the list of divisors is empty");
    }
}
