//! TIFF files as scanners, fax archives and copiers write them.
//!
//! libtiff wrote the files of `picture_kinds.tar.xz`, through `tests/pictures/make.py`. The first
//! word of a file's name is the name of the PNG with the same picture. The tests build all other
//! files.

use std::collections::BTreeMap;
use std::io::Read;

use bursar_model::error::ImageError;
use image::{Rgb, RgbImage};

use super::{HEIGHT, WIDTH, assert_pixels, scene, try_decode, zlib};

#[derive(Clone, Copy)]
pub struct Layout {
    is_little: bool,
    is_big: bool,
}

pub const PLAIN: Layout = Layout { is_little: true, is_big: false };

impl Layout {
    fn short(self, value: u16) -> Vec<u8> {
        if self.is_little { value.to_le_bytes().to_vec() } else { value.to_be_bytes().to_vec() }
    }

    fn long(self, value: u32) -> Vec<u8> {
        if self.is_little { value.to_le_bytes().to_vec() } else { value.to_be_bytes().to_vec() }
    }

    /// An offset or a count.
    fn word(self, value: u64) -> Vec<u8> {
        match (self.is_big, self.is_little) {
            (false, _) => self.long(value as u32),
            (true, true) => value.to_le_bytes().to_vec(),
            (true, false) => value.to_be_bytes().to_vec(),
        }
    }
}

/// A TIFF of `scene`'s size with these SHORT tags, and pieces after its directory.
pub fn tiff(layout: Layout, tags: &[(u16, &[u16])], pieces: &[Vec<u8>]) -> Vec<u8> {
    let mut tags: BTreeMap<u16, Vec<u16>> = tags.iter().map(|(tag, values)| (*tag, values.to_vec())).collect();
    for (tag, usual) in [(256, WIDTH as u16), (257, HEIGHT as u16), (259, 1), (278, HEIGHT as u16)] {
        tags.entry(tag).or_insert(vec![usual]);
    }
    let (head_bytes, entry_bytes, inline_bytes) = if layout.is_big { (16, 20, 8) } else { (8, 12, 4) };
    let count = tags.len() + 2;
    let directory_bytes = if layout.is_big { 8 } else { 2 } + count * entry_bytes + inline_bytes;
    let mut outside = Vec::new(); // values, then pieces
    let outside_at = head_bytes + directory_bytes;
    let values_bytes: usize = tags.values().map(|values| values.len() * 2).filter(|bytes| *bytes > inline_bytes).sum();
    let lists_bytes = 2 * 4 * pieces.len();
    let starts = pieces.iter().scan(outside_at + values_bytes + lists_bytes, |at, piece| {
        *at += piece.len();
        Some((*at - piece.len()) as u32)
    });
    let starts: Vec<u8> = starts.flat_map(|start| layout.long(start)).collect();
    let lengths: Vec<u8> = pieces.iter().flat_map(|piece| layout.long(piece.len() as u32)).collect();
    let shorts = |values: &Vec<u16>| values.iter().flat_map(|value| layout.short(*value)).collect::<Vec<u8>>();
    let is_tiled = tags.contains_key(&322);
    let (starts_tag, lengths_tag) = if is_tiled { (324, 325) } else { (273, 279) };
    let mut entries: BTreeMap<u16, (u16, usize, Vec<u8>)> =
        tags.iter().map(|(tag, values)| (*tag, (3, values.len(), shorts(values)))).collect();
    entries.insert(starts_tag, (4, pieces.len(), starts));
    entries.insert(lengths_tag, (4, pieces.len(), lengths));
    let mut directory = if layout.is_big { layout.word(count as u64) } else { layout.short(count as u16) };
    for (tag, (kind, count, bytes)) in entries {
        directory.extend([layout.short(tag), layout.short(kind), layout.word(count as u64)].concat());
        if bytes.len() > inline_bytes {
            directory.extend(layout.word((outside_at + outside.len()) as u64));
            outside.extend(bytes);
        } else {
            directory.extend([&bytes[..], &vec![0; inline_bytes - bytes.len()]].concat());
        }
    }
    directory.extend(vec![0; inline_bytes]);
    // The lists of a single piece fit in their directory entries, which leaves a
    // gap before the piece.
    outside.resize(values_bytes + lists_bytes, 0);
    let mark = if layout.is_little { b"II" } else { b"MM" };
    let head = if layout.is_big {
        [&mark[..], &layout.short(43), &layout.short(8), &layout.short(0), &layout.word(16)].concat()
    } else {
        [&mark[..], &layout.short(42), &layout.long(8)].concat()
    };
    [head, directory, outside, pieces.concat()].concat()
}

fn shown(of: impl Fn(u32, u32) -> [u8; 3]) -> RgbImage {
    RgbImage::from_fn(WIDTH, HEIGHT, |x, y| Rgb(of(x, y)))
}

fn grey(of: impl Fn(u32, u32) -> u8) -> RgbImage {
    shown(|x, y| [of(x, y); 3])
}

/// Samples of all pixels.
fn samples(of: impl Fn(u32, u32) -> Vec<u8>) -> Vec<u8> {
    (0..HEIGHT).flat_map(|y| (0..WIDTH).map(move |x| (x, y))).flat_map(|(x, y)| of(x, y)).collect()
}

/// The files of the archive by name.
pub fn files() -> BTreeMap<String, Vec<u8>> {
    let packed = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/picture_kinds.tar.xz")).expect("a file");
    let mut archive = tar::Archive::new(lzma_rust2::XzReader::new(&packed[..], false));
    let mut files = BTreeMap::new();
    for entry in archive.entries().expect("an archive") {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("a name").display().to_string();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).expect("the bytes of the entry are read");
        files.insert(name, bytes);
    }
    files
}

#[test]
fn tiff_files_of_libtiff_decode_to_their_pictures() {
    let files = files();
    let mut count = 0;
    for (name, bytes) in files.iter().filter(|(name, _)| name.ends_with(".tif")) {
        let picture = name.split('-').next().expect("a first word");
        let expected = image::load_from_memory(&files[&format!("{picture}.png")]).expect("a PNG").into_rgb8();
        assert_pixels(name, &bytes[..], &expected);
        count += 1;
    }
    assert!(count > 30, "{count}");
}

/// 1, 2, 4 and 8 bits, with black or white at zero, and bits from the left or from the right.
#[test]
fn tiffs_of_few_bits_are_scaled_to_all_levels() {
    for bits in [1_u32, 2, 4, 8] {
        let most = (1 << bits) - 1;
        let value = |x: u32, y: u32| (x * 3 + y * 5) % (most + 1);
        let row = |y: u32| -> Vec<u8> {
            let mut row = vec![0; (WIDTH * bits).div_ceil(8) as usize];
            (0..WIDTH).for_each(|x| row[(x * bits / 8) as usize] |= (value(x, y) << (8 - bits - x * bits % 8)) as u8);
            row
        };
        let rows: Vec<u8> = (0..HEIGHT).flat_map(row).collect();
        let reversed: Vec<u8> = rows.iter().map(|byte| byte.reverse_bits()).collect();
        for (zero, fill) in [(0, 1), (0, 2), (1, 1), (1, 2)] {
            let expected = grey(|x, y| {
                let level = (value(x, y) * 255 / most) as u8;
                if zero == 0 { 255 - level } else { level }
            });
            let pixels = if fill == 1 { rows.clone() } else { reversed.clone() };
            for (is_little, is_big) in [(true, false), (false, false), (true, true), (false, true)] {
                let tags: [(u16, &[u16]); 3] = [(258, &[bits as u16]), (262, &[zero]), (266, &[fill])];
                let file = tiff(Layout { is_little, is_big }, &tags, std::slice::from_ref(&pixels));
                assert_pixels(&format!("{bits} bits, {zero}, {fill}, {is_little}, {is_big}"), file, &expected);
            }
        }
    }
}

#[test]
fn tiff_palettes_of_every_depth_are_read() {
    for bits in [1_u32, 2, 4, 8] {
        let colors = 1_u16 << bits;
        let level = |index: u16, channel: u16| index.wrapping_mul(40_503).wrapping_add(channel * 20_011);
        let map: Vec<u16> = (0..3).flat_map(|channel| (0..colors).map(move |index| level(index, channel))).collect();
        let index = |x: u32, y: u32| ((x + y * 7) % u32::from(colors)) as u16;
        let row = |y: u32| -> Vec<u8> {
            let mut row = vec![0; (WIDTH * bits).div_ceil(8) as usize];
            let shift = |x: u32| 8 - bits - x * bits % 8;
            (0..WIDTH).for_each(|x| row[(x * bits / 8) as usize] |= (index(x, y) << shift(x)) as u8);
            row
        };
        let file =
            tiff(PLAIN, &[(258, &[bits as u16]), (262, &[3]), (320, &map)], &[(0..HEIGHT).flat_map(row).collect()]);
        let expected = shown(|x, y| [0, 1, 2].map(|channel| (level(index(x, y), channel) >> 8) as u8));
        assert_pixels(&format!("{bits} bits"), file, &expected);
    }
}

fn alpha(x: u32, y: u32) -> u8 {
    (x * 7 + y * 3) as u8
}

fn blend_with_white(level: u8, alpha: u8) -> u8 {
    let share = f64::from(alpha) / 255.0;
    (f64::from(level) * share + 255.0 * (1.0 - share)).round() as u8
}

#[test]
fn tiff_alpha_of_gray_and_palettes_is_shown_on_white() {
    let level = |x: u32, y: u32| (x * 5 + y) as u8;
    let grey_alpha = samples(|x, y| vec![level(x, y), alpha(x, y)]);
    let expected = grey(|x, y| blend_with_white(level(x, y), alpha(x, y)));
    let tags: [(u16, &[u16]); 4] = [(258, &[8, 8]), (262, &[1]), (277, &[2]), (338, &[2])];
    assert_pixels("gray", tiff(PLAIN, &tags, std::slice::from_ref(&grey_alpha)), &expected);
    let planes = [samples(|x, y| vec![level(x, y)]), samples(|x, y| vec![alpha(x, y)])];
    assert_pixels("planes", tiff(PLAIN, &[&tags[..], &[(284, &[2])]].concat(), &planes), &expected);
    let dropped: [(u16, &[u16]); 4] = [(258, &[8, 8]), (262, &[1]), (277, &[2]), (338, &[0])];
    assert_pixels("no alpha", tiff(PLAIN, &dropped, &[grey_alpha]), &grey(level));
    let map: Vec<u16> = (0..768).map(|entry| (entry % 256) << 8 | 7).collect();
    let tags: [(u16, &[u16]); 5] = [(258, &[8, 8]), (262, &[3]), (277, &[2]), (320, &map), (338, &[2])];
    assert_pixels("palette", tiff(PLAIN, &tags, &[samples(|x, y| vec![level(x, y), alpha(x, y)])]), &expected);
}

/// Division as in Pillow: rounded down, and clipped where the color is brighter than its alpha.
#[test]
fn premultiplied_tiff_alpha_is_divided_before_compositing_on_white() {
    let scene = scene();
    let multiplied = |x: u32, y: u32| {
        let alpha = u32::from(alpha(x, y));
        scene.get_pixel(x, y).0.map(|level| (u32::from(level) * alpha / 255) as u8)
    };
    let divided = |level: u8, alpha: u8| (u32::from(level) * 255).checked_div(alpha.into()).unwrap_or(0).min(255) as u8;
    let expected = shown(|x, y| {
        let alpha = alpha(x, y);
        multiplied(x, y).map(|level| blend_with_white(divided(level, alpha), alpha))
    });
    let pixels = samples(|x, y| [&multiplied(x, y)[..], &[alpha(x, y)]].concat());
    let tags: [(u16, &[u16]); 4] = [(258, &[8; 4]), (262, &[2]), (277, &[4]), (338, &[1])];
    assert_pixels("8 bits", tiff(PLAIN, &tags, std::slice::from_ref(&pixels)), &expected);
    let deep: Vec<u8> = pixels.iter().flat_map(|&level| [level ^ 0x5a, level]).collect();
    let tags: [(u16, &[u16]); 4] = [(258, &[16; 4]), (262, &[2]), (277, &[4]), (338, &[1])];
    assert_pixels("16 bits", tiff(PLAIN, &tags, &[deep]), &expected);
}

#[test]
fn signed_and_deep_tiff_levels_are_read_as_in_pillow() {
    let value = |x: u32, y: u32| (x as i32 - 9) * 20 + y as i32;
    let clipped = grey(|x, y| value(x, y).clamp(0, 255) as u8);
    let signed: [(u16, &[u16]); 3] = [(258, &[16]), (262, &[1]), (339, &[2])];
    let pixels = samples(|x, y| (value(x, y) as i16).to_le_bytes().to_vec());
    assert_pixels("signed, 16 bits", tiff(PLAIN, &signed, &[pixels]), &clipped);
    let signed: [(u16, &[u16]); 3] = [(258, &[32]), (262, &[1]), (339, &[2])];
    let big = Layout { is_little: false, ..PLAIN };
    assert_pixels(
        "signed, 32 bits",
        tiff(big, &signed, &[samples(|x, y| value(x, y).to_be_bytes().to_vec())]),
        &clipped,
    );
    let signed: [(u16, &[u16]); 3] = [(258, &[8]), (262, &[1]), (339, &[2])];
    let bytes = |x: u32, y: u32| value(x, y) as u8;
    assert_pixels("signed, 8 bits", tiff(PLAIN, &signed, &[samples(|x, y| vec![bytes(x, y)])]), &grey(bytes));
    let deep: [(u16, &[u16]); 2] = [(258, &[16]), (262, &[0])];
    let pixels = samples(|x, y| vec![77, bytes(x, y)]);
    assert_pixels("16 bits, white at zero", tiff(PLAIN, &deep, &[pixels]), &grey(|x, y| 255 - bytes(x, y)));
}

/// The expected levels are the results of Pillow's `cmyk2rgb`.
#[test]
fn cmyk_tiffs_become_rgb() {
    let inks = |x: u32, y: u32| [(x * 6) as u8, (y * 11) as u8, (x * y) as u8, (x + y * 2) as u8];
    let expected = shown(|x, y| {
        let [cyan, magenta, yellow, black] = inks(x, y);
        [cyan, magenta, yellow].map(|ink| {
            let light = 255 - i32::from(black);
            let share = (f64::from(ink) * f64::from(light) / 255.0).round() as i32;
            (light - share).clamp(0, 255) as u8
        })
    });
    let tags: [(u16, &[u16]); 3] = [(258, &[8; 4]), (262, &[5]), (277, &[4])];
    assert_pixels("CMYK", tiff(PLAIN, &tags, &[samples(|x, y| inks(x, y).to_vec())]), &expected);
    let deep = samples(|x, y| inks(x, y).iter().flat_map(|&ink| [3, ink]).collect());
    let tags: [(u16, &[u16]); 3] = [(258, &[16; 4]), (262, &[5]), (277, &[4])];
    assert_pixels("CMYK of 16 bits", tiff(PLAIN, &tags, &[deep]), &expected);
}

/// Blocks of luma with one pair of chroma. Where chroma is neutral, luma is the level.
#[test]
fn subsampled_ycbcr_tiffs_are_read() {
    for (across, down) in [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (1, 2)] {
        let luma = |x: u32, y: u32| (x * 6 + y) as u8;
        let mut blocks = Vec::new();
        for (top, left) in (0..HEIGHT.div_ceil(down)).flat_map(|y| (0..WIDTH.div_ceil(across)).map(move |x| (y, x))) {
            let inside = (0..down).flat_map(|y| (0..across).map(move |x| (x, y)));
            blocks.extend(inside.map(|(x, y)| luma(left * across + x, top * down + y)));
            blocks.extend(if left < 4 { [128, 128] } else { [128, 255] });
        }
        let red = |level: u8| (i32::from(level) + 178).clamp(0, 255) as u8; // 1.402 * 127
        let green = |level: u8| (i32::from(level) - 91).clamp(0, 255) as u8; // 0.714 * 127
        let expected = shown(|x, y| {
            let level = luma(x, y);
            if x < 4 * across { [level; 3] } else { [red(level), green(level), level] }
        });
        let tags: [(u16, &[u16]); 5] =
            [(258, &[8; 3]), (259, &[8]), (262, &[6]), (277, &[3]), (530, &[across as u16, down as u16])];
        assert_pixels(&format!("{across} x {down}"), tiff(PLAIN, &tags, &[zlib(&blocks)]), &expected);
    }
}

/// Tiles of 16 x 16 pixels that extend beyond the right and lower edges, in one plane
/// and in separate planes.
#[test]
fn tiff_tiles_are_joined_into_one_picture() {
    let scene = scene();
    let level = |x: u32, y: u32, channel: usize| {
        if x < WIDTH && y < HEIGHT { scene.get_pixel(x, y).0[channel] } else { 99 }
    };
    let corners: Vec<(u32, u32)> = (0..2).flat_map(|y| (0..3).map(move |x| (16 * x, 16 * y))).collect();
    let pixels = |(left, top): (u32, u32)| (0..256).map(move |at| (left + at % 16, top + at / 16));
    let together: Vec<Vec<u8>> = corners
        .iter()
        .map(|corner| pixels(*corner).flat_map(|(x, y)| [0, 1, 2].map(|channel| level(x, y, channel))).collect())
        .collect();
    let tags: [(u16, &[u16]); 5] = [(258, &[8; 3]), (262, &[2]), (277, &[3]), (322, &[16]), (323, &[16])];
    assert_pixels("tiles", tiff(PLAIN, &tags, &together), &scene);
    let packed: Vec<Vec<u8>> = together.iter().map(|tile| zlib(tile)).collect();
    assert_pixels("packed tiles", tiff(PLAIN, &[&tags[..], &[(259, &[8])]].concat(), &packed), &scene);
    let planes: Vec<Vec<u8>> = [0, 1, 2]
        .iter()
        .flat_map(|&channel| corners.iter().map(move |corner| (channel, *corner)))
        .map(|(channel, corner)| pixels(corner).map(|(x, y)| level(x, y, channel)).collect())
        .collect();
    assert_pixels("planes of tiles", tiff(PLAIN, &[&tags[..], &[(284, &[2])]].concat(), &planes), &scene);
}

#[test]
fn unsupported_tiff_features_are_named() {
    let byte = || vec![vec![0; 5000]];
    type Tags = &'static [(u16, &'static [u16])];
    let unsupported: [(Tags, &str); 6] = [
        (&[(258, &[32]), (262, &[1]), (339, &[3])], "floating-point"),
        (&[(258, &[8, 8, 8]), (262, &[8]), (277, &[3])], "CIELab"),
        (&[(258, &[5, 6, 5]), (262, &[2]), (277, &[3])], "different depths"),
        (&[(258, &[8]), (259, &[34_712]), (262, &[1])], "JPEG 2000"),
        (&[(258, &[8]), (259, &[32_809]), (262, &[1])], "ThunderScan"),
        (&[(258, &[8]), (259, &[50_001]), (262, &[1])], "WebP compression"),
    ];
    for (tags, word) in unsupported {
        let error = try_decode(tiff(PLAIN, tags, &byte())).expect_err(word);
        assert!(matches!(error, ImageError::Unsupported { format: "TIFF", .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

/// Strips and tiles whose cost is out of proportion to the file are refused
/// before anything is decompressed.
#[test]
fn hostile_tiff_directories_are_refused() {
    let grey: [(u16, &[u16]); 2] = [(258, &[8]), (262, &[1])];
    // Every row is decompressed from the same 1.5 MB, which is the whole file.
    let mut file = tiff(PLAIN, &[&grey[..], &[(259, &[5]), (278, &[1])]].concat(), &vec![vec![0; 1 << 16]; 23]);
    let starts = file.len() - 23 * (1 << 16) - 2 * 4 * 23;
    (0..23).for_each(|strip| file[starts + 4 * strip..][..4].copy_from_slice(&[0; 4]));
    (0..23).for_each(|strip| file[starts + 4 * (23 + strip)..][..4].copy_from_slice(&[0, 0, 0x17, 0]));
    assert!(matches!(try_decode(file), Err(ImageError::Damaged { .. })));
    let deep: [(u16, &[u16]); 3] = [(258, &[32]), (262, &[2]), (277, &[65])];
    assert!(matches!(try_decode(tiff(PLAIN, &deep, &[vec![0; 9]])), Err(ImageError::Damaged { .. })));
    // Sides of 2 to the power of 32, whose product overflows.
    let mut huge = tiff(PLAIN, &grey, &[vec![9; 851]]);
    for entry in [10, 22] {
        huge[entry + 2] = 4; // LONG
        huge[entry + 8..entry + 12].fill(0xff);
    }
    assert!(matches!(try_decode(huge), Err(ImageError::Damaged { .. })));
    let missing = tiff(PLAIN, &[&grey[..], &[(278, &[10])]].concat(), &[vec![9; 370]]);
    assert!(
        matches!(try_decode(missing), Err(ImageError::Damaged { .. })),
        "a file without two of its three strips is refused"
    );
}
