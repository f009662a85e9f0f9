//! The element of FP8 weights, activations and KV caches: one sign, four bits of exponent, three of
//! mantissa, no infinity (E4M3 of Micikevicius et al. 2022, arXiv 2209.05433; `float8_e4m3fn` in
//! torch).

/// An eight-bit floating-point number. The largest value is 448, and the smallest value
/// above zero is 2^-9.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(pub u8);

impl E4m3 {
    pub const MAX: f32 = 448.0;

    /// Rounds to the nearest number, with ties to even. A magnitude above [`MAX`](Self::MAX)
    /// becomes `MAX`, and NaN stays NaN.
    #[inline(always)]
    pub fn from_f32(number: f32) -> Self {
        /// The sum of this constant and a number below 2^-6 has a last bit that is worth 2^-9.
        const SMALL_UNIT: f32 = 16_384.0;
        /// The first normal number, 2^-6.
        const NORMAL: u32 = 0x3c80_0000;
        const INFINITY: u32 = 0x7f80_0000;
        let bits = number.to_bits();
        let (sign, size) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
        let small = (f32::from_bits(size) + SMALL_UNIT).to_bits() & 0xff;
        // Drop twenty bits, with rounding to even, and reduce the exponent's bias from 127 to 7.
        let normal = ((size.wrapping_add(0x7_ffff + (size >> 20 & 1))) >> 20).wrapping_sub(120 << 3);
        let finite = if size < NORMAL { small } else { normal };
        let finite = if size >= Self::MAX.to_bits() { 0x7e } else { finite };
        E4m3(sign | if size > INFINITY { 0x7f } else { finite as u8 })
    }

    /// Returns the exact value as `f32`.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        let (sign, size) = (u32::from(self.0 & 0x80) << 24, u32::from(self.0 & 0x7f));
        let normal = f32::from_bits((size << 20) + (120 << 23));
        let small = size as f32 * (1.0 / 512.0);
        let found = if size < 8 { small } else { normal };
        let found = if size == 0x7f { f32::NAN } else { found };
        f32::from_bits(found.to_bits() | sign)
    }
}

/// Returns the scale that maps `largest`, the largest magnitude of some numbers, to
/// [`E4m3::MAX`]. The scale is above zero even if all numbers are zero, so zeros divided by the
/// scale are still zeros.
#[inline(always)]
pub fn e4m3_scale(largest: f32) -> f32 {
    let scale = largest / E4m3::MAX;
    if scale < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { scale }
}

/// Returns the largest magnitude in `numbers`, ignoring NaN. Returns 0 if all numbers are NaN or
/// the slice is empty.
#[inline(always)]
pub fn largest_magnitude(numbers: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b.abs() > a { b.abs() } else { a };
    let (chunks, rest) = numbers.as_chunks::<16>();
    let mut lanes = [0.0f32; 16];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, number)| *lane = larger(*lane, *number));
    }
    lanes.iter().chain(rest).copied().fold(0.0, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code by the format's definition.
    fn value(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 0xf), f64::from(code & 7));
        let size = match exponent {
            0 => mantissa * 2f64.powi(-9),
            _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
        };
        if code & 0x80 == 0 { size } else { -size }
    }

    #[test]
    fn each_e4m3_code_round_trips_through_its_value() {
        for code in 0..=u8::MAX {
            let found = E4m3(code).to_f32();
            if code & 0x7f == 0x7f {
                assert!(found.is_nan() && E4m3::from_f32(found).0 & 0x7f == 0x7f);
                continue;
            }
            assert_eq!(f64::from(found), value(code), "{code:#x}");
            assert_eq!(E4m3::from_f32(found), E4m3(code));
        }
    }

    #[test]
    fn numbers_round_to_the_nearest_e4m3_code_ties_to_even() {
        for code in 0..0x7e {
            let (low, high) = (value(code), value(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            for (number, expected) in
                [(middle, even), (middle - (high - low) * 1e-3, code), (middle + (high - low) * 1e-3, code + 1)]
            {
                assert_eq!(E4m3::from_f32(number as f32), E4m3(expected), "{number}");
                assert_eq!(E4m3::from_f32(-number as f32), E4m3(expected | 0x80), "-{number}");
            }
        }
    }

    #[test]
    fn large_numbers_saturate_in_e4m3_and_nan_stays_nan() {
        for number in [448.1, 463.0, 465.0, 1e30, f32::INFINITY] {
            assert_eq!(E4m3::from_f32(number).to_f32(), 448.0);
            assert_eq!(E4m3::from_f32(-number).to_f32(), -448.0);
        }
        assert!(E4m3::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!(E4m3::from_f32(1e-30).to_f32(), 0.0);
    }

    #[test]
    fn the_e4m3_scale_of_zeros_keeps_them_zero() {
        assert!(e4m3_scale(0.0) > 0.0 && e4m3_scale(1e-44) > 0.0);
        assert_eq!(E4m3::from_f32(0.0 / e4m3_scale(0.0)).to_f32(), 0.0);
        assert_eq!(largest_magnitude(&[0.5, f32::NAN, -3.0]), 3.0);
    }
}
