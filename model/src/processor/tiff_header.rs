//! Checks of a TIFF's first directory, before a decoder reserves memory for it.

/// Limits on a directory's entries and on strips or tiles. Real files have a few dozen entries, and at most one strip
/// per row.
const ENTRIES_MAX: usize = 4096;
const PIECES_MAX: u32 = 1 << 16;

/// Limits on the pixels of all tiles with their margins, which are unpacked too: this factor of the picture's pixels,
/// plus this many.
const MARGIN_FACTOR: u64 = 4;
const MARGIN_PIXELS: u64 = 1 << 20;

/// Tag numbers (TIFF 6.0, sections 8 and 15).
const WIDTH: u16 = 256;
const HEIGHT: u16 = 257;
const STRIP_OFFSETS: u16 = 273;
const STRIP_BYTES: u16 = 279;
const TILE_WIDTH: u16 = 322;
const TILE_HEIGHT: u16 = 323;
const TILE_OFFSETS: u16 = 324;
const TILE_BYTES: u16 = 325;

/// Whether the first directory announces no more than a picture of its size needs. A few bytes can announce a million
/// strips or a tile of gigapixels, and the decoder would trust them.
pub(super) fn is_plausible(encoded: &[u8]) -> bool {
    find_implausible(encoded) == Some(false)
}

/// `None` if the directory is cut off.
fn find_implausible(encoded: &[u8]) -> Option<bool> {
    let is_little = encoded.first()? == &b'I';
    let short = |at: usize| {
        let bytes = encoded.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let long = |at: usize| {
        let bytes = encoded.get(at..at.checked_add(4)?)?.try_into().ok()?;
        Some(if is_little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) })
    };
    let directory = long(4)? as usize;
    let entries = usize::from(short(directory)?);
    if entries > ENTRIES_MAX {
        return Some(true);
    }
    let (mut size, mut tile) = ([0; 2], [0; 2]);
    for at in (0..entries).map(|entry| directory + 2 + 12 * entry) {
        let (tag, kind, count) = (short(at)?, short(at + 2)?, long(at + 4)?);
        // A SHORT is in the first two of the four bytes.
        let value = || if kind == 3 { short(at + 8).map(u32::from) } else { long(at + 8) };
        match tag {
            WIDTH => size[0] = value()?,
            HEIGHT => size[1] = value()?,
            TILE_WIDTH => tile[0] = value()?,
            TILE_HEIGHT => tile[1] = value()?,
            STRIP_OFFSETS | STRIP_BYTES | TILE_OFFSETS | TILE_BYTES if count > PIECES_MAX => return Some(true),
            _ => {}
        }
    }
    let [width, height] = size.map(u64::from);
    let padded = |side: u64, tile: u32| if tile == 0 { side } else { side.next_multiple_of(tile.into()) };
    let unpacked = padded(width, tile[0]).saturating_mul(padded(height, tile[1]));
    Some(unpacked > MARGIN_FACTOR * width * height + MARGIN_PIXELS)
}
