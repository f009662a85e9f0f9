//! BMP files of Windows and OS/2, with the colors of Pillow 13 (`BmpImagePlugin.py`,
//! `libImaging/Unpack.c`).

use super::file_decoder::{BROKEN_HEADER, FileDecoder, Held, Refusal};
use super::levels::rgb_on_white;

// Values of `biCompression` in Windows' BITMAPINFOHEADER.
const PLAIN: u32 = 0;
const RUNS_8: u32 = 1;
const RUNS_4: u32 = 2;
const MASKS: u32 = 3;
const MASKS_WITH_ALPHA: u32 = 6;
/// Run-length encoding of 24-bit pixels in OS/2 files. The numbers 3 and 4 have different meanings
/// in OS/2 and in Windows. In OS/2, 3 is fax compression.
const OS2_RUNS_24: u32 = 4;

/// A BMP whose header was read.
pub(super) struct BmpFile<'a> {
    width: usize,
    height: usize,
    is_upright: bool,
    bits: usize,
    compression: u32,
    /// Bit masks of red, green, blue and alpha. The mask of a missing channel is 0.
    masks: [u32; 4],
    /// Blue, green and red of each index, in entries of `palette_step` bytes.
    palette: &'a [u8],
    palette_step: usize,
    pixels: &'a [u8],
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?).into())
}

impl<'a> BmpFile<'a> {
    pub fn open(encoded: &'a [u8]) -> Result<Self, Refusal> {
        let found = Self::read(encoded).ok_or(BROKEN_HEADER)?;
        let is_supported = match (found.bits, found.compression) {
            (1 | 2 | 4 | 8 | 16 | 24 | 32, PLAIN) | (8, RUNS_8) | (4, RUNS_4) => true,
            (16 | 32, MASKS) => found.masks[..3].iter().all(|mask| *mask != 0),
            (24, MASKS) => found.masks[..3] == [0xff_0000, 0xff00, 0xff],
            (24, OS2_RUNS_24) => return Err(Refusal::Unsupported("OS/2 run-length encoding")),
            (_, 4 | 5) => return Err(Refusal::Unsupported("an embedded JPEG or PNG")),
            _ => false,
        };
        if is_supported { Ok(found) } else { Err(Refusal::Unsupported("an unknown pixel layout")) }
    }

    fn read(encoded: &'a [u8]) -> Option<Self> {
        let header = encoded.get(14..)?;
        let header_bytes = word(header, 0)? as usize;
        let is_core = header_bytes == 12;
        let (width, height, bits) = if is_core {
            (half(header, 4)? as i32, half(header, 6)? as i32, half(header, 10)?)
        } else {
            (word(header, 4)? as i32, word(header, 8)? as i32, half(header, 14)?)
        };
        let stated = |at: usize| if at + 4 <= header_bytes { word(header, at) } else { Some(0) };
        let (mut compression, colors) = if is_core { (PLAIN, 0) } else { (stated(16)?, stated(32)?) };
        let mut masks = [0; 4];
        if matches!(compression, MASKS | MASKS_WITH_ALPHA) {
            let channels = if header_bytes >= 56 || compression == MASKS_WITH_ALPHA { 4 } else { 3 };
            for (channel, mask) in masks.iter_mut().take(channels).enumerate() {
                *mask = word(header, 40 + 4 * channel)?;
            }
            compression = MASKS;
        }
        if compression == MASKS && bits == 32 && masks == [0; 4] {
            masks = [0xff_0000, 0xff00, 0xff, 0xff00_0000]; // the masks that Pillow assumes
        }
        let palette_step = if is_core { 3 } else { 4 };
        let colors = if bits > 8 { 0 } else { (colors as usize).min(256) };
        let colors = if colors == 0 && bits <= 8 { 1 << bits } else { colors };
        let masks_bytes = if header_bytes == 40 && compression == MASKS { 12 } else { 0 };
        let palette = header.get(header_bytes + masks_bytes..)?;
        let pixels_at = (word(encoded, 10)? as usize).max(14 + header_bytes);
        // Some programs state the end of the header as the position of the pixels,
        // although a palette follows.
        let pixels_at = if pixels_at == 14 + header_bytes { pixels_at + palette_step * colors } else { pixels_at };
        Some(BmpFile {
            width: usize::try_from(width).ok()?,
            height: height.unsigned_abs() as usize,
            is_upright: height < 0,
            bits: bits as usize,
            compression,
            masks,
            palette: &palette[..palette.len().min(palette_step * colors)],
            palette_step,
            pixels: encoded.get(pixels_at..)?,
        })
    }

    fn indexed(&self, index: u8) -> [u8; 3] {
        let entry = self.palette.chunks(self.palette_step).nth(index.into()).and_then(|entry| entry.get(..3));
        entry.map_or([0; 3], |entry| [entry[2], entry[1], entry[0]])
    }

    /// Color of a pixel of 16 or 32 bits. Channels of 5 bits are scaled by 255 / 31 and channels of
    /// 6 bits by 255 / 63, rounded down.
    fn masked(&self, pixel: u32) -> [u8; 3] {
        let level = |mask: u32| {
            let most = u64::from(mask >> mask.trailing_zeros().min(31));
            let value = u64::from((pixel & mask) >> mask.trailing_zeros().min(31));
            (value * 255 / most.max(1)) as u8
        };
        // Pillow 13 ignores an alpha channel of a single bit.
        let [red, green, blue, alpha] = self.masks;
        let alpha = if alpha.count_ones() > 1 { alpha } else { 0 };
        let color = [level(red), level(green), level(blue)];
        if alpha == 0 { color } else { rgb_on_white(color, level(alpha)) }
    }

    /// Decodes one row, which the file pads to a multiple of 4 bytes.
    fn plain_row(&self, row: &[u8], pixels: &mut [u8]) {
        let masks = match (self.compression, self.bits) {
            (PLAIN, 16) => BmpFile { masks: [0x7c00, 0x3e0, 0x1f, 0], palette: &[], pixels: &[], ..*self },
            _ => BmpFile { ..*self },
        };
        for (x, pixel) in pixels.chunks_exact_mut(3).enumerate() {
            let color = match self.bits {
                16 => masks.masked(u16::from_le_bytes([row[2 * x], row[2 * x + 1]]).into()),
                32 if self.compression == MASKS => {
                    masks.masked(u32::from_le_bytes([row[4 * x], row[4 * x + 1], row[4 * x + 2], row[4 * x + 3]]))
                }
                24 | 32 => {
                    let at = x * self.bits / 8;
                    [row[at + 2], row[at + 1], row[at]]
                }
                bits => {
                    let shift = 8 - bits - x * bits % 8;
                    self.indexed(row[x * bits / 8] >> shift & ((1u16 << bits) - 1) as u8)
                }
            };
            pixel.copy_from_slice(&color);
        }
    }

    /// Row of the picture for a row of the file.
    fn row(&self, stored: usize) -> usize {
        if self.is_upright { stored } else { self.height - 1 - stored }
    }

    fn decode_plain(&self, pixels: &mut [u8]) -> Option<()> {
        let row_bytes = (self.width * self.bits).div_ceil(32) * 4;
        for stored in 0..self.height {
            // The padding of the last row may be missing.
            let needed = (self.width * self.bits).div_ceil(8);
            let row = self.pixels.get(stored * row_bytes..stored * row_bytes + needed)?;
            self.plain_row(row, &mut pixels[3 * self.width * self.row(stored)..][..3 * self.width]);
        }
        Some(())
    }

    /// Decodes run-length encoded indices of 8 or 4 bits. Skipped pixels get the first color, as in
    /// Pillow.
    fn decode_runs(&self, pixels: &mut [u8]) -> Option<()> {
        let first = self.indexed(0);
        pixels.chunks_exact_mut(3).for_each(|pixel| pixel.copy_from_slice(&first));
        let (mut x, mut y, mut at) = (0, 0, 0);
        let mut put = |x: usize, y: usize, index: u8| {
            if x < self.width && y < self.height {
                pixels[3 * (self.width * self.row(y) + x)..][..3].copy_from_slice(&self.indexed(index));
            }
        };
        let nibble = |byte: u8, number: usize| if number.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
        while y < self.height {
            let &[count, value] = self.pixels.get(at..at + 2)? else { return None };
            at += 2;
            match (usize::from(count), value) {
                (0, 0) => (x, y) = (0, y + 1),
                (0, 1) => break,
                (0, 2) => {
                    let &[right, up] = self.pixels.get(at..at + 2)? else { return None };
                    (x, y, at) = (x + usize::from(right), y + usize::from(up), at + 2);
                }
                (0, literal) => {
                    let literal = usize::from(literal);
                    let bytes = if self.bits == 8 { literal } else { literal.div_ceil(2) };
                    let values = self.pixels.get(at..at + bytes)?;
                    for number in 0..literal {
                        let index = if self.bits == 8 { values[number] } else { nibble(values[number / 2], number) };
                        put(x + number, y, index);
                    }
                    (x, at) = (x + literal, at + bytes.next_multiple_of(2));
                }
                (run, value) => {
                    for number in 0..run {
                        put(x + number, y, if self.bits == 8 { value } else { nibble(value, number) });
                    }
                    x += run;
                }
            }
        }
        Some(())
    }
}

impl FileDecoder for BmpFile<'_> {
    fn size(&self) -> (u32, u32) {
        (self.width as u32, self.height as u32)
    }

    fn held(&self) -> Held {
        Held::scratch(0)
    }

    fn decode(&self) -> Option<Vec<u8>> {
        let mut pixels = vec![0; 3 * self.width * self.height];
        match self.compression {
            RUNS_8 | RUNS_4 => self.decode_runs(&mut pixels)?,
            _ => self.decode_plain(&mut pixels)?,
        }
        Some(pixels)
    }
}
