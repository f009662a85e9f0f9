//! TIFF and BigTIFF as written by cameras, scanners and fax archives. Reads the first picture.
//!
//! Most decompressors are external crates. `tiff_colors.rs` interprets the samples. Offsets are
//! read from the file when a piece is decoded, so a directory takes no memory.

use image::metadata::Orientation;
use mozjpeg::ColorSpace;

use super::exif::{orientation_of, orientation_of_xmp};
use super::file_decoder::{BROKEN_HEADER, FileDecoder, Held, Refusal};
use super::jpeg_file::{JpegFile, decode_jpeg};
use super::tiff_colors::{Samples, Space, YCbCrTables};
use super::tiff_directory::{Directory, Entry};
use super::tiff_pieces::{Compression, in_order, undo_differences};

// Tag numbers (TIFF 6.0, sections 8, 14, 15, 21; supplement 2).
const WIDTH: u16 = 256;
const HEIGHT: u16 = 257;
const COMPRESSION: u16 = 259;
const FILL_ORDER: u16 = 266;
const STRIP_OFFSETS: u16 = 273;
const STRIP_ROWS: u16 = 278;
const STRIP_BYTES: u16 = 279;
const PLANAR: u16 = 284;
const PREDICTOR: u16 = 317;
const TILE_WIDTH: u16 = 322;
const TILE_HEIGHT: u16 = 323;
const TILE_OFFSETS: u16 = 324;
const TILE_BYTES: u16 = 325;
const JPEG_TABLES: u16 = 347;
/// Maximum bytes of the shared JPEG tables, which are read with each piece. All tables of a
/// JPEG take 3 KiB.
const JPEG_TABLES_BYTES_MAX: usize = 16 << 10;
const OLD_JPEG: u16 = 513;
const SUBSAMPLING: u16 = 530;
const XMP: u16 = 700;

/// Longest accepted side in pixels, so that products of sides cannot overflow.
const SIDE_MAX: u64 = 1 << 24;
/// Maximum number of strips or tiles. Real files have at most one strip per row.
const PIECES_MAX: u64 = 1 << 16;
// Limit on the pixels of all tiles including their margins, which are decompressed too:
// `MARGIN_FACTOR` times the picture's pixels, plus `MARGIN_PIXELS`.
const MARGIN_FACTOR: u64 = 4;
const MARGIN_PIXELS: u64 = 1 << 20;

/// A TIFF that contains only a complete JPEG. Cameras and copiers wrote such files with TIFF's
/// first JPEG compression (number 6; TIFF 6.0, section 22), before TIFF got its second JPEG
/// compression (number 7).
pub(super) struct OldJpegTiff<'a> {
    directory: Directory<'a>,
    jpeg: JpegFile<'a>,
}

impl<'a> OldJpegTiff<'a> {
    /// Returns `None` for any other TIFF, including a TIFF that has only parts of a JPEG.
    pub fn find(encoded: &'a [u8]) -> Option<Self> {
        let directory = Directory::read(encoded).filter(|directory| directory.first(COMPRESSION) == Some(6))?;
        let offset = usize::try_from(directory.first(OLD_JPEG)?).ok()?;
        let jpeg = JpegFile::open(encoded.get(offset..).filter(|jpeg| jpeg.starts_with(b"\xff\xd8"))?).ok()?;
        let (width, height) = jpeg.size();
        let is_whole = [directory.first(WIDTH), directory.first(HEIGHT)] == [Some(width.into()), Some(height.into())];
        is_whole.then_some(OldJpegTiff { directory, jpeg })
    }
}

impl FileDecoder for OldJpegTiff<'_> {
    fn size(&self) -> (u32, u32) {
        self.jpeg.size()
    }

    fn orientation(&self) -> Orientation {
        orientation_of(&self.directory).unwrap_or(Orientation::NoTransforms)
    }

    fn held(&self) -> Held {
        self.jpeg.held()
    }

    fn decode(&self) -> Option<Vec<u8>> {
        self.jpeg.decode()
    }
}

/// A TIFF whose first directory was read.
pub(super) struct TiffFile<'a> {
    encoded: &'a [u8],
    directory: Directory<'a>,
    width: u32,
    height: u32,
    samples: Samples,
    compression: Compression,
    is_reversed: bool,
    has_differences: bool,
    is_planar: bool,
    /// Luma samples across and down per pair of chroma samples.
    subsampling: (usize, usize),
    /// Width and height of a strip or tile, in pixels.
    piece: (usize, usize),
    offsets: Entry,
    lengths: Option<Entry>,
}

/// A strip or tile: its plane, and its position in the picture.
#[derive(Clone, Copy)]
struct Piece {
    number: u64,
    plane: usize,
    left: usize,
    top: usize,
    /// Number of stored rows. The last strip can have fewer than the other strips.
    rows: usize,
}

impl<'a> TiffFile<'a> {
    pub fn open(encoded: &'a [u8]) -> Result<Self, Refusal> {
        let directory = Directory::read(encoded).ok_or(BROKEN_HEADER)?;
        let side = |tag| directory.first(tag).and_then(|side| u32::try_from(side).ok());
        let (width, height) = (side(WIDTH).ok_or(BROKEN_HEADER)?, side(HEIGHT).ok_or(BROKEN_HEADER)?);
        let is_tiled = directory.entry(TILE_WIDTH).is_some();
        let piece = if is_tiled {
            (side(TILE_WIDTH).unwrap_or(0), side(TILE_HEIGHT).unwrap_or(0))
        } else {
            (width, side(STRIP_ROWS).unwrap_or(height).min(height))
        };
        // Some programs store the offsets of tiles under the tags of strips.
        let either = |one, other| directory.entry(one).or_else(|| directory.entry(other));
        let (offsets, lengths) = (either(TILE_OFFSETS, STRIP_OFFSETS), either(TILE_BYTES, STRIP_BYTES));
        let samples = Samples::read(&directory)?;
        let compression = Compression::read(&directory)?;
        let subsampling = if samples.space == Space::YCbCr && compression != Compression::Jpeg {
            let factor = |index| directory.entry(SUBSAMPLING).and_then(|entry| directory.number(&entry, index));
            (factor(0).unwrap_or(2) as usize, factor(1).unwrap_or(2) as usize)
        } else {
            (1, 1)
        };
        let file = TiffFile {
            encoded,
            directory,
            width,
            height,
            samples,
            compression,
            is_reversed: directory.first(FILL_ORDER) == Some(2) && compression.is_reversible(),
            has_differences: compression.is_predicted() && directory.first(PREDICTOR) == Some(2),
            is_planar: directory.first(PLANAR) == Some(2) && samples.count > 1,
            subsampling,
            piece: (piece.0 as usize, piece.1 as usize),
            offsets: offsets.ok_or(BROKEN_HEADER)?,
            lengths,
        };
        file.check()?;
        Ok(file)
    }

    /// Checks that the directory announces no more data than a picture of its size needs, and no
    /// unsupported feature. A few bytes can announce a million strips, or a tile of gigapixels.
    fn check(&self) -> Result<(), Refusal> {
        let (width, height) = (u64::from(self.width), u64::from(self.height));
        if width == 0 || height == 0 {
            return Ok(()); // the caller refuses an empty size
        }
        let is_possible = |count: u64| (1..=PIECES_MAX).contains(&count);
        let (across, down) = (self.piece.0 as u64, self.piece.1 as u64);
        if width.max(height) > SIDE_MAX || across == 0 || down == 0 || !is_possible(self.offsets.count) {
            return Err(BROKEN_HEADER);
        }
        let padded = width.next_multiple_of(across).saturating_mul(if across == width {
            height
        } else {
            height.next_multiple_of(down)
        });
        if padded > MARGIN_FACTOR * width * height + MARGIN_PIXELS {
            return Err(BROKEN_HEADER);
        }
        if self.compression.is_predicted() && self.directory.first(PREDICTOR) == Some(3) {
            return Err(Refusal::Unsupported("differences of floating-point levels"));
        }
        if self.has_differences && !matches!(self.samples.bits, 8 | 16 | 32) {
            return Err(Refusal::Unsupported("differences of levels that are not whole bytes"));
        }
        if matches!(self.compression, Compression::Fax(_)) && (self.samples.bits, self.samples.count) != (1, 1) {
            return Err(BROKEN_HEADER);
        }
        if self.compression == Compression::Jpeg && self.samples.bits != 8 {
            return Err(Refusal::Unsupported("JPEG of more than 8 bits"));
        }
        if self.is_jpeg() && !matches!(self.samples_together(), 1 | 3 | 4) {
            return Err(Refusal::Unsupported("JPEG of two samples, or more than four"));
        }
        if self.samples.space == Space::YCbCr {
            let (across, down) = self.subsampling;
            if ![1, 2, 4].contains(&across) || ![1, 2, 4].contains(&down) {
                return Err(BROKEN_HEADER);
            }
            let is_simple = (across, down) == (1, 1);
            if (self.is_planar || self.has_differences) && !is_simple || self.is_planar && self.is_jpeg() {
                return Err(Refusal::Unsupported("separate planes of subsampled YCbCr"));
            }
            if self.samples.count != 3 {
                return Err(Refusal::Unsupported("YCbCr with more than three samples"));
            }
        }
        if self.jpeg_tables().is_some_and(|tables| tables.len() > JPEG_TABLES_BYTES_MAX) {
            return Err(BROKEN_HEADER);
        }
        // Pieces may share bytes of the file, but not so often that a small file
        // takes hours to decode.
        let packed: u64 = self.pieces().map(|piece| self.packed(piece).map_or(0, |packed| packed.len() as u64)).sum();
        if packed > 2 * self.encoded.len() as u64 + MARGIN_PIXELS {
            return Err(BROKEN_HEADER);
        }
        Ok(())
    }

    fn is_jpeg(&self) -> bool {
        self.compression == Compression::Jpeg
    }

    /// Strips or tiles of each plane, up to the number of offsets in the file.
    fn pieces(&self) -> impl Iterator<Item = Piece> {
        let (width, height) = (self.width as usize, self.height as usize);
        let planes = if self.is_planar { self.samples.used() } else { 1 };
        let (across, down) = (width.div_ceil(self.piece.0), height.div_ceil(self.piece.1));
        let is_tiled = self.piece.0 != width;
        let (piece, count) = (self.piece, self.offsets.count);
        let all = across * down * planes;
        (0..all).take_while(move |number| (*number as u64) < count).map(move |number| {
            let (plane, in_plane) = (number / (across * down), number % (across * down));
            let (left, top) = (in_plane % across * piece.0, in_plane / across * piece.1);
            let rows = if is_tiled { piece.1 } else { piece.1.min(height - top) };
            Piece { number: number as u64, plane, left, top, rows }
        })
    }

    /// Samples per pixel that are stored together: 1 if each sample has a separate plane.
    fn samples_together(&self) -> usize {
        if self.is_planar { 1 } else { self.samples.count }
    }

    fn row_bytes(&self) -> usize {
        (self.piece.0 * self.samples_together() * self.samples.bits).div_ceil(8)
    }

    /// Bytes of a piece with this many rows.
    fn piece_bytes(&self, rows: usize) -> usize {
        if self.samples.space == Space::YCbCr && !self.is_planar {
            let (across, down) = self.subsampling;
            return self.piece.0.div_ceil(across) * rows.div_ceil(down) * (across * down + 2);
        }
        self.row_bytes().saturating_mul(rows)
    }

    /// Bytes of a piece in the file. Old programs state no lengths, or wrong lengths for
    /// uncompressed pieces.
    fn packed(&self, piece: Piece) -> Option<&'a [u8]> {
        let offset = usize::try_from(self.directory.number(&self.offsets, piece.number)?).ok()?;
        let rest = self.encoded.get(offset..)?;
        let stated = self.lengths.and_then(|lengths| self.directory.number(&lengths, piece.number));
        let length = match (self.compression, stated) {
            (Compression::None, _) => self.piece_bytes(piece.rows),
            (_, None | Some(0)) => rest.len(),
            (_, Some(length)) => usize::try_from(length).ok()?,
        };
        Some(&rest[..length.min(rest.len())])
    }

    /// Converts a piece of YCbCr to RGB, `[rows, piece width, 3]`.
    fn rgb_of(&self, unpacked: &[u8], rows: usize, tables: &YCbCrTables) -> Vec<u8> {
        let (across, down) = self.subsampling;
        let (unit_bytes, units) = (across * down + 2, self.piece.0.div_ceil(across));
        let mut rgb = Vec::with_capacity(rows * self.piece.0 * 3);
        for y in 0..rows {
            for x in 0..self.piece.0 {
                let unit = &unpacked[(y / down * units + x / across) * unit_bytes..][..unit_bytes];
                let luma = unit[y % down * across + x % across];
                rgb.extend(tables.rgb(luma, unit[across * down], unit[across * down + 1]));
            }
        }
        rgb
    }

    fn jpeg_tables(&self) -> Option<&'a [u8]> {
        self.directory.entry(JPEG_TABLES).and_then(|entry| self.directory.bytes(&entry))
    }

    /// The JPEG stream of a piece, with the tables that all pieces share (TIFF technical note 2).
    fn jpeg_of(&self, packed: &[u8]) -> Vec<u8> {
        match self.jpeg_tables().and_then(|tables| tables.strip_suffix(b"\xff\xd9")) {
            Some(tables) => [tables, packed.strip_prefix(b"\xff\xd8").unwrap_or(packed)].concat(),
            None => packed.to_vec(),
        }
    }

    /// Levels of a JPEG piece, `[rows, piece width, samples]`.
    fn levels_of_jpeg(&self, packed: &[u8], rows: usize) -> Option<Vec<u8>> {
        let encoded = self.jpeg_of(packed);
        let jpeg = JpegFile::open(&encoded).ok()?;
        let (width, height) = jpeg.size();
        let samples = self.samples_together();
        let is_expected = width as usize == self.piece.0 && (rows..=self.piece.1).contains(&(height as usize));
        if !is_expected || jpeg.components() != samples as u64 {
            return None;
        }
        let space = if self.samples.space == Space::YCbCr { ColorSpace::JCS_RGB } else { ColorSpace::JCS_UNKNOWN };
        let mut levels = vec![0; width as usize * height as usize * samples];
        decode_jpeg(&encoded, (width, height), space, &mut levels)?;
        Some(levels)
    }

    /// Decodes a piece into the picture's levels, `[height, width, used]`.
    fn place(&self, piece: Piece, tables: &YCbCrTables, levels: &mut [u8]) -> Option<()> {
        let packed = self.packed(piece)?;
        let samples = self.samples_together();
        let (rows, is_levels) = if self.is_jpeg() {
            (self.levels_of_jpeg(packed, piece.rows)?, true)
        } else {
            let mut unpacked = vec![0; self.piece_bytes(piece.rows)];
            self.compression.unpack(&in_order(packed, self.is_reversed), self.piece.0 as u32, &mut unpacked)?;
            if self.has_differences {
                let bytes = self.samples.bits / 8;
                for row in unpacked.chunks_exact_mut(self.row_bytes()) {
                    undo_differences(row, samples, bytes, self.samples.is_little());
                }
            }
            match self.samples.space {
                Space::YCbCr if !self.is_planar => (self.rgb_of(&unpacked, piece.rows, tables), true),
                _ => (unpacked, false),
            }
        };
        let (width, used) = (self.width as usize, self.samples.used());
        let row_bytes = if is_levels { self.piece.0 * samples } else { self.row_bytes() };
        let shown = self.piece.0.min(width - piece.left);
        let height = piece.rows.min(self.height as usize - piece.top);
        let planes = if self.is_planar { piece.plane..piece.plane + 1 } else { 0..used };
        for (y, row) in rows.chunks_exact(row_bytes).take(height).enumerate() {
            let start = ((piece.top + y) * width + piece.left) * used;
            for (x, pixel) in levels[start..][..shown * used].chunks_exact_mut(used).enumerate() {
                for plane in planes.clone() {
                    let sample = if self.is_planar { x } else { x * samples + plane };
                    pixel[plane] = if is_levels { row[sample] } else { self.samples.level(row, sample) };
                }
            }
        }
        Some(())
    }
}

impl FileDecoder for TiffFile<'_> {
    fn size(&self) -> (u32, u32) {
        (self.width, self.height)
    }

    fn orientation(&self) -> Orientation {
        let xmp = || self.directory.entry(XMP).and_then(|entry| self.directory.bytes(&entry));
        let stated = orientation_of(&self.directory).or_else(|| orientation_of_xmp(xmp()?));
        stated.unwrap_or(Orientation::NoTransforms)
    }

    fn held(&self) -> Held {
        let piece_bytes = self.piece_bytes(self.piece.1) as u64;
        let packed_bytes =
            self.pieces().filter_map(|piece| self.packed(piece)).map(<[u8]>::len).max().unwrap_or(0) as u64;
        let piece_pixels = (self.piece.0 as u64).saturating_mul(self.piece.1 as u64);
        let decoding = if self.is_jpeg() {
            // Coefficients of all components, in whole MCUs, and the stream with its tables.
            let padded =
                (self.piece.0 as u64).next_multiple_of(32) * ((self.piece.1 as u64).next_multiple_of(32) + 128);
            padded.saturating_mul(8).saturating_add(piece_pixels * 4) + 2 * packed_bytes + (1 << 16)
        } else if self.samples.space == Space::YCbCr {
            piece_bytes.saturating_add(piece_pixels.saturating_mul(3))
        } else {
            piece_bytes
        };
        let fax = if matches!(self.compression, Compression::Fax(_)) { 32 * u64::from(self.width) } else { 0 };
        let reversed = if self.is_reversed { packed_bytes } else { 0 };
        let scratch = self.compression.scratch_bytes(piece_bytes) + fax + reversed;
        let used = self.samples.used() as u64;
        Held { raw_channels: used, is_copied: used < 3, scratch_bytes: decoding.saturating_add(scratch) }
    }

    fn decode(&self) -> Option<Vec<u8>> {
        let (width, height) = (self.width as usize, self.height as usize);
        let planes = if self.is_planar { self.samples.used() } else { 1 };
        let needed = width.div_ceil(self.piece.0) * height.div_ceil(self.piece.1) * planes;
        if (self.offsets.count as usize) < needed {
            return None;
        }
        let tables = YCbCrTables::read(&self.directory);
        let mut levels = vec![0; width * height * self.samples.used()];
        for piece in self.pieces() {
            self.place(piece, &tables, &mut levels)?;
        }
        if self.samples.space == Space::YCbCr && self.is_planar {
            for pixel in levels.chunks_exact_mut(3) {
                pixel.copy_from_slice(&tables.rgb(pixel[0], pixel[1], pixel[2]));
            }
        }
        self.samples.to_rgb(levels, &self.directory)
    }
}
