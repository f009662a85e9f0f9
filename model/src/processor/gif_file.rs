//! GIF: the first frame on its logical screen, as in Pillow 13 (`GifImagePlugin.py`).

use weezl::{BitOrder, LzwStatus, decode::Decoder};

use super::file_decoder::{FileDecoder, Held, Refusal};

/// A GIF with its first frame, read from its blocks (CompuServe, GIF89a, sections 18 to 23).
pub(super) struct GifFile<'a> {
    encoded: &'a [u8],
    left: usize,
    top: usize,
    width: usize,
    height: usize,
    // Size of the screen, enlarged if the frame extends beyond it.
    screen_width: usize,
    screen_height: usize,
    is_interlaced: bool,
    /// Index of the transparent color.
    transparent: Option<u8>,
    /// Red, green and blue of each index. May be empty.
    colors: &'a [u8],
    /// Offset of the byte that states the shortest LZW code size. The pixels follow this byte.
    pixels_at: usize,
}

impl<'a> GifFile<'a> {
    /// Reads the blocks up to the first frame.
    pub fn open(encoded: &'a [u8]) -> Result<Self, Refusal> {
        Self::find(encoded).ok_or(Refusal::Damaged("finding its first frame"))
    }

    fn find(encoded: &'a [u8]) -> Option<Self> {
        let number = |at: usize| Some(usize::from(u16::from_le_bytes([*encoded.get(at)?, *encoded.get(at + 1)?])));
        let table_bytes = |flags: u8| if flags & 0x80 == 0 { 0 } else { 3 << ((flags & 7) + 1) };
        let (screen_width, screen_height, global) = (number(6)?, number(8)?, 13);
        let global_bytes = table_bytes(*encoded.get(10)?);
        let mut at = global + global_bytes;
        let mut transparent = None;
        loop {
            match *encoded.get(at)? {
                0x21 => {
                    // A graphic control extension states the index of the transparent color.
                    if let Some(&[0xf9, 4, flags, _, _, index]) = encoded.get(at + 1..at + 7) {
                        transparent = (flags & 1 == 1).then_some(index);
                    }
                    at += 2;
                    while *encoded.get(at)? != 0 {
                        at += 1 + usize::from(encoded[at]);
                    }
                    at += 1;
                }
                0x2c => break,
                0x3b => return None,
                // Bytes between blocks are skipped.
                _ => at += 1,
            }
        }
        let (left, top, width, height) = (number(at + 1)?, number(at + 3)?, number(at + 5)?, number(at + 7)?);
        let flags = *encoded.get(at + 9)?;
        let own_bytes = table_bytes(flags);
        let (table, table_bytes) = if own_bytes > 0 { (at + 10, own_bytes) } else { (global, global_bytes) };
        Some(GifFile {
            encoded,
            left,
            top,
            width,
            height,
            screen_width: screen_width.max(left + width),
            screen_height: screen_height.max(top + height),
            is_interlaced: flags & 0x40 != 0,
            transparent,
            colors: encoded.get(table..table + table_bytes)?,
            pixels_at: at + 10 + own_bytes,
        })
    }

    /// Color of an index: white if the index is transparent. Without a palette, an index
    /// is a gray level.
    fn color(&self, index: u8) -> [u8; 3] {
        if self.transparent == Some(index) {
            return [255; 3];
        }
        if self.colors.is_empty() {
            return [index; 3];
        }
        self.colors.chunks_exact(3).nth(index.into()).map_or([0; 3], |color| [color[0], color[1], color[2]])
    }

    /// Indices of the frame, in the order of the file. `None` if the data is damaged or some
    /// indices are missing.
    fn indices(&self) -> Option<Vec<u8>> {
        let mut indices = vec![0; self.width * self.height];
        let code_bits = *self.encoded.get(self.pixels_at)?;
        if !(1..=11).contains(&code_bits) {
            return None;
        }
        let mut decoder = Decoder::new(BitOrder::Lsb, code_bits);
        let (mut at, mut written) = (self.pixels_at + 1, 0);
        while written < indices.len() {
            let length = usize::from(*self.encoded.get(at)?);
            let mut block = self.encoded.get(at + 1..at + 1 + length).filter(|block| !block.is_empty())?;
            at += 1 + length;
            loop {
                let step = decoder.decode_bytes(block, &mut indices[written..]);
                block = &block[step.consumed_in..];
                written += step.consumed_out;
                match step.status.ok()? {
                    LzwStatus::Done if written < indices.len() => return None,
                    // The decoder may still hold codes, so an empty block does not end this loop.
                    LzwStatus::Ok if written < indices.len() => {}
                    _ => break,
                }
            }
        }
        Some(indices)
    }

    /// The row of the frame for each row of the file (GIF89a, appendix E).
    fn rows(&self) -> Vec<usize> {
        if !self.is_interlaced {
            return (0..self.height).collect();
        }
        [(0, 8), (4, 8), (2, 4), (1, 2)]
            .into_iter()
            .flat_map(|(first, step)| (first..self.height).step_by(step))
            .collect()
    }
}

impl FileDecoder for GifFile<'_> {
    fn size(&self) -> (u32, u32) {
        (self.screen_width as u32, self.screen_height as u32)
    }

    fn held(&self) -> Held {
        Held::scratch((self.width * self.height) as u64 + (self.height as u64 + 4) * 16)
    }

    fn decode(&self) -> Option<Vec<u8>> {
        let indices = self.indices()?;
        let mut colors = [[0; 3]; 256];
        for (index, color) in (0..=255).zip(&mut colors) {
            *color = self.color(index);
        }
        // Around the frame, Pillow shows the transparent color, or the first color if there
        // is no transparent color.
        let ground = colors[usize::from(self.transparent.unwrap_or(0))];
        let mut pixels = vec![0; 3 * self.screen_width * self.screen_height];
        pixels.chunks_exact_mut(3).for_each(|pixel| pixel.copy_from_slice(&ground));
        for (row, y) in indices.chunks_exact(self.width.max(1)).zip(self.rows()) {
            let start = 3 * ((self.top + y) * self.screen_width + self.left);
            for (pixel, index) in pixels[start..].chunks_exact_mut(3).zip(row) {
                pixel.copy_from_slice(&colors[usize::from(*index)]);
            }
        }
        Some(pixels)
    }
}
