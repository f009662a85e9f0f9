//! The place of a GIF's first frame on its screen, and the colour around it.

/// The first frame of a GIF, read from its blocks (CompuServe, GIF89a, sections 18 to 23).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FirstFrame {
    left: usize,
    top: usize,
    width: usize,
    height: usize,
    screen_width: usize,
    /// The colour that Pillow 13 shows around the frame: the transparent one, or the first (`GifImagePlugin.py`,
    /// `load_prepare`).
    ground: [u8; 3],
}

impl FirstFrame {
    /// Walks over the blocks up to the first frame. `None` if there is no frame, or it leaves the screen.
    pub fn find(encoded: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(usize::from(u16::from_le_bytes([*encoded.get(at)?, *encoded.get(at + 1)?])));
        let table_bytes = |flags: u8| if flags & 0x80 == 0 { 0 } else { 3 << ((flags & 7) + 1) };
        let (screen_width, screen_height, global) = (number(6)?, number(8)?, 13);
        let mut at = global + table_bytes(*encoded.get(10)?);
        let mut ground_index = 0;
        loop {
            match *encoded.get(at)? {
                0x21 => {
                    // A graphic control extension says which colour is transparent.
                    if let Some(&[0xf9, 4, flags, _, _, index]) = encoded.get(at + 1..at + 7) {
                        ground_index = if flags & 1 == 1 { usize::from(index) } else { 0 };
                    }
                    at += 2;
                    while *encoded.get(at)? != 0 {
                        at += 1 + usize::from(encoded[at]);
                    }
                    at += 1;
                }
                0x2c => break,
                _ => return None,
            }
        }
        let (left, top, width, height) = (number(at + 1)?, number(at + 3)?, number(at + 5)?, number(at + 7)?);
        let own = table_bytes(*encoded.get(at + 9)?);
        let table = if own > 0 { at + 10 } else { global } + 3 * ground_index;
        let ground = encoded.get(table..table + 3).and_then(|colour| colour.try_into().ok()).unwrap_or_default();
        let is_inside = left + width <= screen_width && top + height <= screen_height;
        is_inside.then_some(FirstFrame { left, top, width, height, screen_width, ground })
    }

    /// Pixels of the frame.
    pub fn pixels(&self) -> u64 {
        self.width as u64 * self.height as u64
    }

    /// Fills the screen around the frame. `pixels` are the screen's, `[height, width, 3]`.
    pub fn fill_around(&self, pixels: &mut [u8]) {
        for (y, row) in pixels.chunks_exact_mut(3 * self.screen_width).enumerate() {
            let is_beside = !(self.top..self.top + self.height).contains(&y);
            for (x, pixel) in row.chunks_exact_mut(3).enumerate() {
                if is_beside || !(self.left..self.left + self.width).contains(&x) {
                    pixel.copy_from_slice(&self.ground);
                }
            }
        }
    }
}
