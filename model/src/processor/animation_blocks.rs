//! Screen size and frame times of an animation, read from its blocks before anything is decoded.

use super::header::ImageFormat;

/// Shortest accepted time of a frame. A frame with a shorter time is shown for
/// [`USUAL_MS`], as in browsers.
const LEAST_MS: u64 = 20;
/// Time for which a frame is shown if its stated time is shorter than [`LEAST_MS`].
const USUAL_MS: u64 = 100;

/// An animation's screen in pixels, and how long each frame is shown, in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Animation {
    pub width: u32,
    pub height: u32,
    pub shown_ms: Vec<u64>,
}

impl Animation {
    /// Reads the blocks. Returns `None` if the blocks are truncated or malformed, or if a frame
    /// extends beyond the screen.
    pub fn read(encoded: &[u8], format: ImageFormat) -> Option<Self> {
        match format {
            ImageFormat::Gif => gif(encoded),
            ImageFormat::WebP => webp(encoded),
            _ => None,
        }
    }

    pub fn seconds(&self) -> f64 {
        self.shown_ms.iter().sum::<u64>() as f64 / 1000.0
    }

    /// Index of the frame that is shown at this time, or of the last frame.
    pub fn shown_at(&self, seconds: f64) -> usize {
        let mut ends = 0;
        let shown = |ms: &u64| {
            ends += ms;
            // The margin covers rounding, because `seconds` is computed from a frame rate.
            seconds * 1000.0 + 1e-3 < ends as f64
        };
        self.shown_ms.iter().position(shown).unwrap_or(self.shown_ms.len().saturating_sub(1))
    }
}

fn shown_ms(asked_ms: u64) -> u64 {
    if asked_ms < LEAST_MS { USUAL_MS } else { asked_ms }
}

/// A little-endian number of up to four bytes.
fn number(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

/// Reads the blocks of a GIF (CompuServe, GIF89a, sections 17 to 27).
fn gif(encoded: &[u8]) -> Option<Animation> {
    let table_bytes = |flags: u8| if flags & 0x80 == 0 { 0 } else { 3 << ((flags & 7) + 1) };
    let short = |at: usize| Some(number(encoded.get(at..at + 2)?));
    let (width, height) = (short(6)?, short(8)?);
    let mut at = 13 + table_bytes(*encoded.get(10)?);
    let (mut shown, mut delay_ms) = (Vec::new(), 0);
    let past_data = |mut at: usize| {
        while *encoded.get(at)? != 0 {
            at += 1 + usize::from(encoded[at]);
        }
        Some(at + 1)
    };
    loop {
        match encoded.get(at) {
            Some(0x21) => {
                if let Some(&[0xf9, 4, _, low, high]) = encoded.get(at + 1..at + 6) {
                    delay_ms = 10 * u64::from(u16::from_le_bytes([low, high]));
                }
                at = past_data(at + 2)?;
            }
            Some(0x2c) => {
                let (left, top, wide, high) = (short(at + 1)?, short(at + 3)?, short(at + 5)?, short(at + 7)?);
                if left + wide > width || top + high > height {
                    return None;
                }
                at = past_data(at + 11 + table_bytes(*encoded.get(at + 9)?))?;
                shown.push(shown_ms(std::mem::take(&mut delay_ms)));
            }
            // The trailer, which some programs omit.
            Some(0x3b) | None => return Some(Animation { width, height, shown_ms: shown }),
            Some(_) => return None,
        }
    }
}

/// Reads the chunks of a WebP (RFC 9649, section 2.7).
fn webp(encoded: &[u8]) -> Option<Animation> {
    let riff_bytes = 8 + number(encoded.get(4..8)?) as usize;
    let encoded = encoded.get(..riff_bytes)?;
    let extended = encoded.get(12..30).filter(|chunk| chunk.starts_with(b"VP8X"))?;
    let (width, height) = (1 + number(&extended[12..15]), 1 + number(&extended[15..18]));
    let mut shown = Vec::new();
    let mut at = 12;
    while let Some(head) = encoded.get(at..at + 8) {
        let content = encoded.get(at + 8..at + 8 + number(&head[4..]) as usize)?;
        if head.starts_with(b"ANMF") {
            let fields = content.get(..16)?;
            let field = |at: usize| number(&fields[at..at + 3]);
            let (left, top, wide, high) = (2 * field(0), 2 * field(3), 1 + field(6), 1 + field(9));
            let is_inside = left + wide <= width && top + high <= height;
            if !is_inside || !has_size(&content[16..], wide, high)? {
                return None;
            }
            shown.push(shown_ms(field(12).into()));
        }
        at += 8 + content.len().next_multiple_of(2);
    }
    Some(Animation { width, height, shown_ms: shown })
}

/// Returns `true` if the bitstream header of a frame states the size that the frame's `ANMF` chunk
/// states. Lossy frames need this check because the decoder trusts the bitstream header first (RFC
/// 6386, section 9.1). For a lossless frame, the decoder itself checks the size before it allocates
/// memory.
fn has_size(mut chunks: &[u8], width: u32, height: u32) -> Option<bool> {
    if chunks.starts_with(b"ALPH") {
        let bytes = number(chunks.get(4..8)?) as usize;
        chunks = chunks.get(8 + bytes.next_multiple_of(2)..)?;
    }
    if !chunks.starts_with(b"VP8 ") {
        return Some(true);
    }
    let sides = chunks.get(14..18)?;
    Some(number(&sides[..2]) & 0x3fff == width && number(&sides[2..]) & 0x3fff == height)
}
