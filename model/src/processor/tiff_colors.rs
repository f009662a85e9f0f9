//! Pure: interpretation of the samples of a TIFF, and their conversion to 8-bit levels and RGB as
//! in Pillow 13 and libtiff 4.7 (`TiffImagePlugin.py`, `tif_color.c`).

use super::file_decoder::{BROKEN_HEADER, Refusal};
use super::levels::{narrow, printed, rgb_on_white, to_rgb, unmultiplied};
use super::tiff_directory::Directory;

const BITS: u16 = 258;
const PHOTOMETRIC: u16 = 262;
const SAMPLES: u16 = 277;
const COLOR_MAP: u16 = 320;
const INK_SET: u16 = 332;
const EXTRA_SAMPLES: u16 = 338;
const SAMPLE_FORMAT: u16 = 339;
const LUMA: u16 = 529;
const REFERENCE_LEVELS: u16 = 532;

/// Maximum samples per pixel that are accepted. Samples after color and alpha are skipped.
const SAMPLES_MAX: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alpha {
    Plain,
    /// Colors were multiplied by alpha.
    Multiplied,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Gray { is_white_zero: bool },
    Rgb,
    Palette,
    Cmyk,
    YCbCr,
}

/// Format of the samples of a pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Samples {
    pub bits: usize,
    pub count: usize,
    is_signed: bool,
    pub space: Space,
    pub alpha: Option<Alpha>,
    is_little: bool,
}

impl Samples {
    pub fn read(directory: &Directory<'_>) -> Result<Self, Refusal> {
        let space = match directory.first(PHOTOMETRIC).unwrap_or(0) {
            0 => Space::Gray { is_white_zero: true },
            1 => Space::Gray { is_white_zero: false },
            2 => Space::Rgb,
            3 => Space::Palette,
            5 if directory.first(INK_SET).unwrap_or(1) == 1 => Space::Cmyk,
            6 => Space::YCbCr,
            5 => return Err(Refusal::Unsupported("inks other than cyan, magenta, yellow and black")),
            4 => return Err(Refusal::Unsupported("a transparency mask as picture")),
            8..=10 => return Err(Refusal::Unsupported("CIELab colors")),
            32_803 => return Err(Refusal::Unsupported("raw colors of a camera's sensor")),
            32_844 | 32_845 => return Err(Refusal::Unsupported("SGI LogLuv colors")),
            _ => return Err(Refusal::Unsupported("unknown colors")),
        };
        let colors = Samples::colors_of(space) as u64;
        let count = directory.first(SAMPLES).unwrap_or(if space == Space::YCbCr { 3 } else { 1 });
        if count < colors || count > SAMPLES_MAX {
            return Err(BROKEN_HEADER);
        }
        let bits = directory.first(BITS).unwrap_or(1);
        let all_bits = directory.entry(BITS);
        let stated = all_bits.map_or(1, |entry| entry.count.min(count));
        if (1..stated).any(|sample| all_bits.and_then(|entry| directory.number(&entry, sample)) != Some(bits)) {
            return Err(Refusal::Unsupported("samples of different depths"));
        }
        if !(1..=16).contains(&bits) && !matches!(bits, 24 | 32) || space == Space::Palette && bits > 8 {
            return Err(Refusal::Unsupported("an unusual number of bits per sample"));
        }
        if space == Space::YCbCr && bits != 8 {
            return Err(Refusal::Unsupported("YCbCr of more than 8 bits"));
        }
        let format = directory.first(SAMPLE_FORMAT).unwrap_or(1);
        if !matches!(format, 1 | 2 | 4) {
            return Err(Refusal::Unsupported("floating-point or complex levels"));
        }
        let extra = directory.first(EXTRA_SAMPLES);
        let alpha = match (extra, count - colors) {
            (_, 0) => None,
            (Some(1), _) => Some(Alpha::Multiplied),
            // A single extra sample without a stated meaning is alpha. Corel Draw
            // writes 999 for alpha.
            (Some(2 | 999), _) | (None, 1) => Some(Alpha::Plain),
            _ => None,
        };
        let alpha = alpha.filter(|_| !matches!(space, Space::Cmyk | Space::YCbCr));
        Ok(Samples {
            bits: bits as usize,
            count: count as usize,
            is_signed: format == 2,
            space,
            alpha,
            is_little: directory.is_little(),
        })
    }

    fn colors_of(space: Space) -> usize {
        match space {
            Space::Gray { .. } | Space::Palette => 1,
            Space::Rgb | Space::YCbCr => 3,
            Space::Cmyk => 4,
        }
    }

    /// Number of samples that are used: colors, then alpha.
    pub fn used(&self) -> usize {
        Samples::colors_of(self.space) + usize::from(self.alpha.is_some())
    }

    pub fn is_little(&self) -> bool {
        self.is_little
    }

    /// A sample of a row as an 8-bit level, or as an index into the palette.
    pub fn level(&self, row: &[u8], sample: usize) -> u8 {
        let bits = self.bits;
        match bits {
            8 => row[sample],
            16 | 24 | 32 => self.level_of_bytes(&row[sample * bits / 8..][..bits / 8]),
            _ => {
                let (first, last) = (sample * bits, sample * bits + bits - 1);
                let bytes = row[first / 8..=last / 8].iter().fold(0_u32, |bytes, &byte| bytes << 8 | u32::from(byte));
                let value = bytes >> (7 - last % 8) & ((1 << bits) - 1);
                match bits {
                    _ if self.space == Space::Palette => value as u8,
                    1..8 => (value * 255 / ((1 << bits) - 1)) as u8,
                    _ => (value >> (bits - 8)) as u8,
                }
            }
        }
    }

    /// Returns the 8 highest bits of a sample, without the sign bit. A negative sample is black. If
    /// gray is the only sample of a pixel, signed levels and levels of 32 bits are clipped at 0 and
    /// 255 instead, as in Pillow, because no better mapping is known for such levels.
    fn level_of_bytes(&self, sample: &[u8]) -> u8 {
        let join = |value: i64, byte: &u8| value << 8 | i64::from(*byte);
        let value = if self.is_little { sample.iter().rev().fold(0, join) } else { sample.iter().fold(0, join) };
        let unused = 64 - 8 * sample.len();
        let value = if self.is_signed { value << unused >> unused } else { value };
        let is_clipped = self.is_single_gray() && (self.is_signed || sample.len() == 4);
        let shift = if is_clipped { 0 } else { 8 * sample.len() - 8 - usize::from(self.is_signed) };
        (value >> shift).clamp(0, 255) as u8
    }

    fn is_single_gray(&self) -> bool {
        matches!(self.space, Space::Gray { .. }) && self.count == 1
    }

    /// Converts `[pixels, used]` to `[pixels, 3]`, with transparent pixels blended with white.
    pub fn to_rgb(self, mut levels: Vec<u8>, directory: &Directory<'_>) -> Option<Vec<u8>> {
        let used = self.used();
        if self.space == (Space::Gray { is_white_zero: true }) {
            levels.chunks_exact_mut(used).for_each(|pixel| pixel[0] = 255 - pixel[0]);
        }
        if self.alpha == Some(Alpha::Multiplied) && self.space != Space::Palette {
            for pixel in levels.chunks_exact_mut(used) {
                if let [colors @ .., alpha] = pixel {
                    colors.iter_mut().for_each(|level| *level = unmultiplied(*level, *alpha));
                }
            }
        }
        match self.space {
            Space::Gray { .. } | Space::Rgb | Space::YCbCr => to_rgb(levels, used),
            Space::Cmyk => Some(narrow(levels, |pixel| printed([pixel[0], pixel[1], pixel[2]], 255 - pixel[3]))),
            Space::Palette => {
                let palette = palette(directory, self.bits)?;
                let shown = |pixel: &[u8]| {
                    let color = palette[usize::from(pixel[0])];
                    if self.alpha.is_some() { rgb_on_white(color, pixel[1]) } else { color }
                };
                Some(levels.chunks_exact(used).flat_map(shown).collect())
            }
        }
    }
}

/// Colors of the palette. The file has all reds, then all greens, then all blues, of 16 bits.
/// `None` if some are missing.
fn palette(directory: &Directory<'_>, bits: usize) -> Option<[[u8; 3]; 256]> {
    let map = directory.entry(COLOR_MAP)?;
    let colors = 1 << bits;
    let mut palette = [[0; 3]; 256];
    for (index, color) in (0..colors).zip(&mut palette) {
        for (channel, level) in (0..).zip(color) {
            *level = (directory.number(&map, index + channel * colors)? >> 8) as u8;
        }
    }
    Some(palette)
}

/// Tables for the conversion of YCbCr to RGB, as in libtiff (`tif_color.c`, `TIFFYCbCrToRGBInit`).
pub(super) struct YCbCrTables {
    luma: [i32; 256],
    red_by_cr: [i32; 256],
    blue_by_cb: [i32; 256],
    green_by_cr: [i32; 256],
    green_by_cb: [i32; 256],
}

impl YCbCrTables {
    pub fn read(directory: &Directory<'_>) -> Self {
        let number =
            |tag, index, usual| directory.rational(tag, index).filter(|found| found.is_finite()).unwrap_or(usual);
        let [red, green, blue] = [(0, 0.299), (1, 0.587), (2, 0.114)].map(|(at, usual)| number(LUMA, at, usual));
        let reference = [0.0, 255.0, 128.0, 255.0, 128.0, 255.0];
        let reference: [f32; 6] = std::array::from_fn(|at| number(REFERENCE_LEVELS, at as u64, reference[at]));
        let fixed = |factor: f32| (f64::from(factor.clamp(0.0, 2.0)) * 65_536.0 + 0.5) as i32;
        let (by_red, by_blue) = (2.0 - 2.0 * red, 2.0 - 2.0 * blue);
        let (d1, d3) = (fixed(by_red), fixed(by_blue));
        let (d2, d4) = (-fixed(red * by_red / green), -fixed(blue * by_blue / green));
        let code = |code: i32, black: f32, white: f32, range: f32| {
            let span = if white - black == 0.0 { 1.0 } else { white - black };
            let value = code.saturating_sub(black as i32) as f32 * range / span;
            value.clamp(-4096.0, 4096.0) as i32
        };
        let mut tables = YCbCrTables {
            luma: [0; 256],
            red_by_cr: [0; 256],
            blue_by_cb: [0; 256],
            green_by_cr: [0; 256],
            green_by_cb: [0; 256],
        };
        for at in 0..256 {
            let x = at as i32 - 128;
            let cr = code(x, reference[4] - 128.0, reference[5] - 128.0, 127.0);
            let cb = code(x, reference[2] - 128.0, reference[3] - 128.0, 127.0);
            tables.red_by_cr[at] = (d1 * cr + 32_768) >> 16;
            tables.blue_by_cb[at] = (d3 * cb + 32_768) >> 16;
            tables.green_by_cr[at] = d2 * cr;
            tables.green_by_cb[at] = d4 * cb + 32_768;
            tables.luma[at] = code(at as i32, reference[0], reference[1], 255.0);
        }
        tables
    }

    pub fn rgb(&self, y: u8, cb: u8, cr: u8) -> [u8; 3] {
        let [y, cb, cr] = [y, cb, cr].map(usize::from);
        let luma = self.luma[y];
        let green = (self.green_by_cb[cb] + self.green_by_cr[cr]) >> 16;
        [luma + self.red_by_cr[cr], luma + green, luma + self.blue_by_cb[cb]].map(|level| level.clamp(0, 255) as u8)
    }
}
