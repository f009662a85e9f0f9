//! Pure: decompression of the strips and tiles of a TIFF. Each decompressor stops when the piece is
//! full, so a piece takes no more memory than its pixels and [`Compression::scratch_bytes`].

use std::borrow::Cow;
use std::io::Read;

use lzma_rust2::XzReader;
use weezl::{BitOrder, LzwStatus};

use super::fax_rows::{Coding, decode_fax};
use super::file_decoder::Refusal;
use super::tiff_directory::Directory;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Fax(Coding),
    Lzw,
    Jpeg,
    Deflate,
    PackBits,
    Lzma,
    Zstd,
}

const COMPRESSION: u16 = 259;
const FAX_OPTIONS: u16 = 292;

// Maximum dictionary bytes: for LZMA, the largest dictionary of the `xz` presets with its
// overhead; for Zstandard, the largest window that is accepted.
const LZMA_BYTES: u64 = 66 << 20;
const ZSTD_BYTES: u64 = 64 << 20;

impl Compression {
    pub fn read(directory: &Directory<'_>) -> Result<Self, Refusal> {
        let is_two_dimensional = directory.first(FAX_OPTIONS).is_some_and(|options| options & 1 == 1);
        Ok(match directory.first(COMPRESSION).unwrap_or(1) {
            1 => Compression::None,
            2 => Compression::Fax(Coding::Runs),
            3 => Compression::Fax(Coding::Group3 { is_two_dimensional }),
            4 => Compression::Fax(Coding::Group4),
            5 => Compression::Lzw,
            7 => Compression::Jpeg,
            8 | 32_946 => Compression::Deflate,
            32_771 => Compression::Fax(Coding::RunsByWord),
            32_773 => Compression::PackBits,
            34_925 => Compression::Lzma,
            50_000 => Compression::Zstd,
            6 => return Err(Refusal::Unsupported("old-style JPEG compression")),
            32_766 => return Err(Refusal::Unsupported("the compression of NeXT")),
            32_809 => return Err(Refusal::Unsupported("the compression of ThunderScan")),
            34_661 => return Err(Refusal::Unsupported("JBIG compression")),
            34_676 | 34_677 => return Err(Refusal::Unsupported("the compression of SGI LogLuv")),
            33_003 | 33_005 | 34_712 => return Err(Refusal::Unsupported("JPEG 2000 compression")),
            34_887 => return Err(Refusal::Unsupported("LERC compression")),
            50_001 => return Err(Refusal::Unsupported("WebP compression")),
            50_002 | 52_546 => return Err(Refusal::Unsupported("JPEG XL compression")),
            _ => return Err(Refusal::Unsupported("an unknown compression")),
        })
    }

    /// Whether libtiff reverses the bits before decompression if the fill order asks for it.
    pub fn is_reversible(self) -> bool {
        self != Compression::Jpeg
    }

    /// Whether this compression can be combined with a predictor.
    pub fn is_predicted(self) -> bool {
        matches!(self, Compression::Lzw | Compression::Deflate | Compression::Lzma | Compression::Zstd)
    }

    /// Bytes that decompressing a piece takes in addition to the piece.
    pub fn scratch_bytes(self, piece_bytes: u64) -> u64 {
        match self {
            Compression::Lzma => LZMA_BYTES,
            // The decoder's window, whose buffer grows by doubling, and a few blocks.
            Compression::Zstd => 2 * ZSTD_BYTES.min(piece_bytes) + (1 << 20),
            _ => 0,
        }
    }

    /// Fills a piece. `width` is the width of the piece in pixels, which only fax needs. `None` if
    /// the data is damaged or ends too early, and for JPEG.
    pub fn unpack(self, packed: &[u8], width: u32, piece: &mut [u8]) -> Option<()> {
        match self {
            Compression::None => piece.copy_from_slice(packed.get(..piece.len())?),
            Compression::Fax(coding) => decode_fax(packed, coding, width, piece)?,
            Compression::Lzw => unpack_lzw(packed, piece)?,
            Compression::Deflate => flate2::read::ZlibDecoder::new(packed).read_exact(piece).ok()?,
            Compression::PackBits => unpack_bits(packed, piece)?,
            Compression::Lzma => {
                XzReader::new_mem_limit(packed, false, (LZMA_BYTES >> 10) as u32).read_exact(piece).ok()?;
            }
            Compression::Zstd => {
                let mut decoder = ruzstd::decoding::FrameDecoder::new();
                decoder.set_max_window_size(ZSTD_BYTES);
                let mut decoder = ruzstd::decoding::StreamingDecoder::new_with_decoder(packed, decoder).ok()?;
                decoder.read_exact(piece).ok()?;
            }
            Compression::Jpeg => return None, // JPEG yields colors, not bytes
        }
        Some(())
    }
}

/// Decompresses LZW of TIFF 6.0, or of TIFF 5.0 if the bits of the first code are reversed
/// (libtiff, `tif_lzw.c`).
fn unpack_lzw(packed: &[u8], piece: &mut [u8]) -> Option<()> {
    let is_old = matches!(packed, [0, second, ..] if second & 1 == 1);
    let mut decoder = if is_old {
        weezl::decode::Decoder::new(BitOrder::Lsb, 8)
    } else {
        weezl::decode::Decoder::with_tiff_size_switch(BitOrder::Msb, 8)
    };
    let (mut packed, mut written) = (packed, 0);
    while written < piece.len() {
        let step = decoder.decode_bytes(packed, &mut piece[written..]);
        packed = &packed[step.consumed_in..];
        written += step.consumed_out;
        match step.status.ok()? {
            LzwStatus::Ok => {}
            LzwStatus::NoProgress | LzwStatus::Done => break,
        }
    }
    (written == piece.len()).then_some(())
}

/// Decompresses PackBits (TIFF 6.0, section 9).
fn unpack_bits(mut packed: &[u8], piece: &mut [u8]) -> Option<()> {
    let mut written = 0;
    while written < piece.len() {
        let (&head, rest) = packed.split_first()?;
        let left = piece.len() - written;
        match head as i8 {
            -128 => packed = rest,
            head @ 0.. => {
                let length = (head as usize + 1).min(left);
                piece[written..written + length].copy_from_slice(rest.get(..length)?);
                (packed, written) = (&rest[length..], written + length);
            }
            head => {
                let length = (1 - isize::from(head)) as usize;
                let length = length.min(left);
                piece[written..written + length].fill(*rest.first()?);
                (packed, written) = (&rest[1..], written + length);
            }
        }
    }
    Some(())
}

/// Returns the bytes, with the bits of each byte reversed if `is_reversed` is set.
pub(super) fn in_order(packed: &[u8], is_reversed: bool) -> Cow<'_, [u8]> {
    if is_reversed { packed.iter().map(|byte| byte.reverse_bits()).collect() } else { Cow::Borrowed(packed) }
}

/// Undoes horizontal differencing of rows with samples of 8, 16 or 32 bits (TIFF 6.0, section 14).
pub(super) fn undo_differences(row: &mut [u8], samples: usize, sample_bytes: usize, is_little: bool) {
    let step = samples * sample_bytes;
    match sample_bytes {
        1 => (step..row.len()).for_each(|at| row[at] = row[at].wrapping_add(row[at - step])),
        2 => add_before::<2>(row, step, |one, other| {
            if is_little {
                u16::from_le_bytes(one).wrapping_add(u16::from_le_bytes(other)).to_le_bytes()
            } else {
                u16::from_be_bytes(one).wrapping_add(u16::from_be_bytes(other)).to_be_bytes()
            }
        }),
        _ => add_before::<4>(row, step, |one, other| {
            if is_little {
                u32::from_le_bytes(one).wrapping_add(u32::from_le_bytes(other)).to_le_bytes()
            } else {
                u32::from_be_bytes(one).wrapping_add(u32::from_be_bytes(other)).to_be_bytes()
            }
        }),
    }
}

fn add_before<const BYTES: usize>(row: &mut [u8], step: usize, add: impl Fn([u8; BYTES], [u8; BYTES]) -> [u8; BYTES]) {
    for at in (step..row.len() / BYTES * BYTES).step_by(BYTES) {
        let sample = |at: usize, row: &[u8]| std::array::from_fn(|byte| row[at + byte]);
        let sum = add(sample(at, row), sample(at - step, row));
        row[at..at + BYTES].copy_from_slice(&sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packbits_data_is_unpacked_into_literals_and_runs() {
        // The example in TIFF 6.0, section 9.
        let packed = b"\xfe\xaa\x02\x80\x00\x2a\xfd\xaa\x03\x80\x00\x2a\x22\xf7\xaa";
        let mut piece = [0; 24];
        assert_eq!(unpack_bits(packed, &mut piece), Some(()));
        let expected =
            b"\xaa\xaa\xaa\x80\x00\x2a\xaa\xaa\xaa\xaa\x80\x00\x2a\x22\xaa\xaa\xaa\xaa\xaa\xaa\xaa\xaa\xaa\xaa";
        assert_eq!(&piece, expected);
        assert_eq!(unpack_bits(packed, &mut [0; 25]), None);
    }

    #[test]
    fn tiff_sample_differences_are_undone_in_the_files_byte_order() {
        let mut bytes = [1, 2, 3, 255, 255, 255];
        undo_differences(&mut bytes, 3, 1, true);
        assert_eq!(bytes, [1, 2, 3, 0, 1, 2]);
        let mut words = [0xff, 0, 1, 0, 1, 0];
        undo_differences(&mut words, 1, 2, true);
        assert_eq!(words, [0xff, 0, 0, 1, 1, 1]);
        let mut words = [0, 0xff, 0, 1, 0, 1];
        undo_differences(&mut words, 1, 2, false);
        assert_eq!(words, [0, 0xff, 1, 0, 1, 1]);
    }
}
