//! Files written by careless programs: a missing end, wrong checksums, markers without content.

use bursar_model::error::ImageError;
use image::{ImageFormat, RgbImage};

use super::super::common::golden_bytes;
use super::{assert_pixels, chunk, decode, encoded, png, scene, try_decode, zlib};

fn shown(name: &str, bytes: &[u8]) -> RgbImage {
    let picture = decode(name, bytes);
    RgbImage::from_raw(picture.width(), picture.height(), picture.data().to_vec()).expect("pixels")
}

#[track_caller]
fn assert_damaged(name: &str, bytes: &[u8]) {
    let found = try_decode(bytes);
    assert!(matches!(found, Err(ImageError::Damaged { .. })), "{name}: {found:?}");
}

#[test]
fn a_jpeg_may_lack_its_end_marker() {
    for file in ["photo_420.jpg", "photo_grey.jpg", "cmyk.jpg"] {
        let whole = golden_bytes(&format!("pictures/{file}"));
        let expected = shown(file, &whole);
        let open = whole.strip_suffix(b"\xff\xd9").expect("an end marker");
        for rest in [&[0; 100][..], b"some text", b"\xff\xd3 and more", b"\xff\xd9\xff\xd9"] {
            assert_pixels(&format!("{file} and {rest:?}"), [open, rest].concat(), &expected);
        }
        // A file without half of its pixels is refused. The pixels are not filled with gray.
        assert_damaged(file, &whole[..whole.len() / 2]);
    }
    // Only the end marker of a progressive picture shows whether the picture is complete.
    let whole = golden_bytes("pictures/photo_progressive.jpg");
    assert_damaged("progressive", &[&whole[..whole.len() - 2], &[0; 100]].concat());
}

#[test]
fn a_jpeg_may_have_an_odd_adobe_marker() {
    let whole = golden_bytes("pictures/photo_444.jpg");
    let expected = shown("whole", &whole);
    let with = |content: &[u8]| {
        let length = (content.len() as u16 + 2).to_be_bytes();
        [&whole[..2], &[0xff, 0xee], &length, content, &whole[2..]].concat()
    };
    for transform in [1, 2, 5, 255] {
        let marker = [b"Adobe\0\x64\0\0\0\0", &[transform][..]].concat();
        assert_pixels(&format!("transform {transform}"), with(&marker), &expected);
    }
    for marker in [&b"Adobe\0\x64\0\0\0\0"[..], b"Adobe", b"", b"Adobe\0\x64\0\0\0\0\x01 and more"] {
        assert_pixels(&format!("{} bytes", marker.len()), with(marker), &expected);
    }
    let fill = [&whole[..2], &[0xff; 3], &whole[2..]].concat();
    assert_pixels("bytes between markers", fill, &expected);
}

#[test]
fn a_png_decodes_without_its_end_or_valid_ancillary_checksums() {
    let scene = scene();
    let whole = encoded(scene.clone(), ImageFormat::Png);
    let end = whole.len() - 12;
    assert_pixels("without IEND", &whole[..end], &scene);
    assert_pixels("without IEND's checksum", &whole[..whole.len() - 4], &scene);
    assert_pixels("and bytes after it", [&whole[..], b"some more"].concat(), &scene);
    for name in [b"tEXt", b"gAMA", b"pHYs", b"iCCP", b"eXIf", b"acTL", b"tRNS", b"abCd"] {
        let mut bad = chunk(name, b"\0\x01\0\x02\0\x03");
        *bad.last_mut().expect("a checksum") ^= 1;
        let file = [&whole[..33], &bad, &whole[33..]].concat();
        assert_pixels(&format!("a bad {}", String::from_utf8_lossy(name)), file, &scene);
    }
    let pixels = whole.windows(4).position(|name| name == b"IDAT").expect("pixels");
    assert_damaged("half its pixels", &whole[..(pixels + end) / 2]);
    let mut header = whole.clone();
    header[32] ^= 1; // the checksum of IHDR
    assert_damaged("a bad IHDR", &header);
}

#[test]
fn png_pixels_may_be_split_by_other_chunks() {
    let scene = scene();
    let rows: Vec<Vec<u8>> = scene.rows().map(|row| row.flat_map(|pixel| pixel.0).collect()).collect();
    let whole = png(8, 2, &[], &rows);
    let packed = zlib(&rows.iter().flat_map(|row| [&[0], &row[..]].concat()).collect::<Vec<u8>>());
    let pieces: Vec<u8> = packed.chunks(7).flat_map(|piece| chunk(b"IDAT", piece)).collect();
    assert_pixels("many", [&whole[..33], &pieces, &whole[whole.len() - 12..]].concat(), &scene);
    let (one, other) = packed.split_at(50);
    let between = [chunk(b"IDAT", one), chunk(b"tEXt", b"a\0b"), chunk(b"IDAT", b""), chunk(b"IDAT", other)].concat();
    assert_pixels("a text between", [&whole[..33], &between].concat(), &scene);
}

/// Without a palette, an index is a gray level. With a palette, an index beyond
/// its colors is black.
#[test]
fn a_gif_without_a_palette_is_gray() {
    // 2 x 1 pixels of 8 bits: a clear code, the indices 5 and 200, and an end code. Each has nine
    // bits.
    let codes: u64 = 256 | 5 << 9 | 200 << 18 | 257 << 27;
    let pixels = [&[8, 5][..], &codes.to_le_bytes()[..5], &[0]].concat();
    let frame = b"\x2c\0\0\0\0\x02\0\x01\0\0";
    let gif =
        |flags: u8, more: &[u8]| [b"GIF89a\x02\0\x01\0", &[flags, 0, 0][..], more, frame, &pixels, b"\x3b"].concat();
    let grey = RgbImage::from_raw(2, 1, vec![5, 5, 5, 200, 200, 200]).expect("two pixels");
    assert_pixels("no palette", gif(0, b""), &grey);
    assert_pixels("bytes before the frame", gif(0, &[0; 7]), &grey);
    let white = RgbImage::from_raw(2, 1, vec![255, 255, 255, 200, 200, 200]).expect("two pixels");
    assert_pixels("a clear index", gif(0, b"\x21\xf9\x04\x01\0\0\x05\0"), &white);
    // Two colors, and indices beyond them.
    let few = RgbImage::from_raw(2, 1, vec![0; 6]).expect("two pixels");
    assert_pixels("a short palette", gif(0x80, b"\x01\x02\x03\x04\x05\x06"), &few);
    let mut open = gif(0, b"");
    open.pop();
    assert_pixels("no trailer", open, &grey);
    // A screen of zero pixels grows to the frame.
    let mut screen = gif(0, b"");
    screen[6..10].fill(0);
    assert_pixels("no screen", screen, &grey);
    assert_damaged("half its pixels", &gif(0, b"")[..26]);
}
