//! Types for bytes and pages, so that they do not mix with other numbers.

use std::{
    fmt,
    iter::Sum,
    ops::{Add, AddAssign, Div, Mul, Sub, SubAssign},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

use crate::Hint;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// A number of bytes.
///
/// `+`, `-` and `*` assert that the result is in range, because an overflow is a bug in Bursar. Use
/// `checked_*` or `saturating_sub` where an overflow can occur in operation.
///
/// ```
/// use bursar_budgets::Bytes;
/// let bytes: Bytes = "12 MiB".parse()?;
/// assert_eq!(bytes.to_string(), "12.0 MiB");
/// assert_eq!(bytes.exact(), "12,582,912 B");
/// # Ok::<(), bursar_budgets::ParseBytesError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A number of whole pages of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pages(pub u64);

impl Bytes {
    pub const ZERO: Bytes = Bytes(0);
    /// More bytes than any device has; the capacity of a planning workspace, which has no memory
    /// (`Workspace::dry`).
    pub const MAX: Bytes = Bytes(u64::MAX);

    pub const fn kib(n: u64) -> Bytes {
        Bytes(n * KIB)
    }

    pub const fn mib(n: u64) -> Bytes {
        Bytes(n * MIB)
    }

    pub const fn gib(n: u64) -> Bytes {
        Bytes(n * GIB)
    }

    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// All digits, in groups of three: `12,582,912 B`.
    pub fn exact(self) -> String {
        format!("{} B", grouped(self.0))
    }

    /// Rounds up to a multiple of `page`.
    ///
    /// # Panics
    /// If `page` is 0, or the result exceeds `u64`. Both are bugs in Bursar.
    pub fn round_up(self, page: Bytes) -> Bytes {
        self.checked_round_up(page).expect("the rounded size stays within u64")
    }

    /// Rounds up to a multiple of `page`. Returns `None` if the result exceeds `u64`.
    ///
    /// # Panics
    /// If `page` is 0, which is a bug in Bursar.
    pub fn checked_round_up(self, page: Bytes) -> Option<Bytes> {
        assert!(page.0 > 0, "a page has at least one byte");
        self.0.checked_next_multiple_of(page.0).map(Bytes)
    }

    /// Rounds down to a multiple of `page`.
    pub fn round_down(self, page: Bytes) -> Bytes {
        assert!(page.0 > 0, "a page has at least one byte");
        Bytes(self.0 - self.0 % page.0)
    }

    pub fn is_multiple_of(self, page: Bytes) -> bool {
        self.0.is_multiple_of(page.0)
    }

    /// The number of pages that hold this many bytes. The last page may be partly used.
    pub fn pages(self, page: Bytes) -> Pages {
        assert!(page.0 > 0, "a page has at least one byte");
        Pages(self.div_ceil(page))
    }

    /// The number of pieces of size `piece` that hold this many bytes. The last piece
    /// may be partly used.
    pub fn div_ceil(self, piece: Bytes) -> u64 {
        self.0.div_ceil(piece.0)
    }

    /// The product with `share`, rounded down; 0 if `share` is negative.
    pub fn share(self, share: f64) -> Bytes {
        Bytes((self.0 as f64 * share) as u64)
    }

    pub const fn of_slice(slice: &[u8]) -> Bytes {
        Bytes(slice.len() as u64)
    }

    /// The sum, or `None` if it exceeds `u64`.
    pub fn checked_add(self, other: Bytes) -> Option<Bytes> {
        self.0.checked_add(other.0).map(Bytes)
    }

    /// The difference, or `None` if it is negative.
    pub fn checked_sub(self, other: Bytes) -> Option<Bytes> {
        self.0.checked_sub(other.0).map(Bytes)
    }

    /// The product, or `None` if it exceeds `u64`.
    pub fn checked_mul(self, factor: u64) -> Option<Bytes> {
        self.0.checked_mul(factor).map(Bytes)
    }

    /// The difference, or 0 if it is negative.
    pub fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The sum, at most [`Bytes::MAX`].
    pub fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }

    /// Converts to `usize`, for slice lengths.
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).expect("the number of bytes fits in usize")
    }
}

impl Pages {
    pub fn bytes(self, page: Bytes) -> Bytes {
        page * self.0
    }
}

macro_rules! counted {
    ($unit:ident) => {
        impl Add for $unit {
            type Output = $unit;
            #[track_caller]
            fn add(self, other: $unit) -> $unit {
                $unit(self.0.checked_add(other.0).expect("a sum within u64"))
            }
        }
        impl Sub for $unit {
            type Output = $unit;
            #[track_caller]
            fn sub(self, other: $unit) -> $unit {
                match self.0.checked_sub(other.0) {
                    Some(difference) => $unit(difference),
                    None => panic!("{} - {} is below zero", self.0, other.0),
                }
            }
        }
        impl Mul<u64> for $unit {
            type Output = $unit;
            #[track_caller]
            fn mul(self, factor: u64) -> $unit {
                $unit(self.0.checked_mul(factor).expect("a product within u64"))
            }
        }
        impl AddAssign for $unit {
            #[track_caller]
            fn add_assign(&mut self, other: $unit) {
                *self = *self + other;
            }
        }
        impl SubAssign for $unit {
            #[track_caller]
            fn sub_assign(&mut self, other: $unit) {
                *self = *self - other;
            }
        }
        impl Sum for $unit {
            fn sum<I: Iterator<Item = $unit>>(all: I) -> $unit {
                all.fold($unit(0), Add::add)
            }
        }
        impl<'a> Sum<&'a $unit> for $unit {
            fn sum<I: Iterator<Item = &'a $unit>>(all: I) -> $unit {
                all.copied().sum()
            }
        }
    };
}
counted!(Bytes);
counted!(Pages);

impl Div<u64> for Bytes {
    type Output = Bytes;
    #[track_caller]
    fn div(self, parts: u64) -> Bytes {
        Bytes(self.0 / parts)
    }
}

impl Div for Bytes {
    type Output = u64;
    #[track_caller]
    fn div(self, piece: Bytes) -> u64 {
        self.0 / piece.0
    }
}

/// Formats a whole number with a comma between groups of three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One decimal is enough for readers. `exact` prints every digit.
        let text = match self.0 {
            n if n < KIB => format!("{n} B"),
            // 1023.95 KiB and more would print as "1024.0 KiB", so such values use the next unit.
            n if n < MIB - KIB / 20 => format!("{:.1} KiB", n as f64 / KIB as f64),
            n if n < GIB - MIB / 20 => format!("{:.1} MiB", n as f64 / MIB as f64),
            n => format!("{:.1} GiB", n as f64 / GIB as f64),
        };
        f.pad(&text)
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{} page{}", grouped(self.0), if self.0 == 1 { "" } else { "s" }))
    }
}

/// The reason why a text is not a size in bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseBytesError {
    /// The text does not begin with a number.
    #[error("{text:?} does not start with a number of bytes, such as 512MiB or 1048576")]
    NoNumber { text: String },
    #[error("{unit:?} in {text:?} is not a unit of bytes; expected B, KiB, MiB, GiB or TiB, which are powers of 1,024")]
    UnknownUnit {
        text: String,
        /// The part of the text after the number.
        unit: String,
    },
    /// The number has a fraction of a byte, or is 16 EiB or more. A number with a decimal point may
    /// be at most 8 PiB, because a float cannot represent every byte above that.
    #[error("{text:?} is not a whole number of bytes below 16 EiB")]
    OutOfRange { text: String },
}

impl Hint for ParseBytesError {
    type Text = String;

    fn hint(&self) -> String {
        "write a number and a unit, such as 512MiB, 2 GiB or 1.5GiB, or plain bytes, such as 1048576".into()
    }
}

impl From<u64> for Bytes {
    /// Allows `2 * GIB` as a size.
    fn from(bytes: u64) -> Self {
        Bytes(bytes)
    }
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    /// Parses `512MiB`, `2 GiB`, `1.5g` or `1048576`. Units are powers of 1,024. `MB` and `GB` are
    /// refused, because some users mean powers of 1,000 and others mean powers of 1,024.
    fn from_str(text: &str) -> Result<Bytes, ParseBytesError> {
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !c.is_ascii_digit() && !matches!(c, '.' | '_' | ',')).unwrap_or(trimmed.len());
        let (number, unit) = (trimmed[..split].replace(['_', ','], ""), trimmed[split..].trim());
        let factor = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => KIB,
            "m" | "mib" => MIB,
            "g" | "gib" => GIB,
            "t" | "tib" => GIB * 1024,
            _ if number.is_empty() => return Err(ParseBytesError::NoNumber { text: text.into() }),
            _ => return Err(ParseBytesError::UnknownUnit { text: text.into(), unit: unit.into() }),
        };
        let out_of_range = || ParseBytesError::OutOfRange { text: text.into() };
        if !number.contains('.') {
            if number.is_empty() {
                return Err(ParseBytesError::NoNumber { text: text.into() });
            }
            let whole: u64 = number.parse().map_err(|_| out_of_range())?;
            return whole.checked_mul(factor).map(Bytes).ok_or_else(out_of_range);
        }
        let value: f64 = number.parse().map_err(|_| ParseBytesError::NoNumber { text: text.into() })?;
        let bytes = value * factor as f64;
        // 2^53: above this, a float cannot represent every byte.
        if bytes.fract() != 0.0 || bytes > (1u64 << 53) as f64 {
            return Err(out_of_range());
        }
        Ok(Bytes(bytes as u64))
    }
}
