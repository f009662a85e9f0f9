//! BMP files of Windows and OS/2, with Pillow's levels.

use image::{Rgb, RgbImage};

use super::{HEIGHT, WIDTH, assert_pixels, try_decode};

/// A BMP with a header of this many bytes. Words after the first forty bytes are `masks`.
fn bmp(header_bytes: u32, bits: u16, compression: u32, masks: &[u32], palette: &[u8], pixels: &[u8]) -> Vec<u8> {
    let mut header = [header_bytes, WIDTH, HEIGHT].map(u32::to_le_bytes).concat();
    header.extend([1_u16.to_le_bytes(), bits.to_le_bytes()].concat());
    header.extend([compression, pixels.len() as u32, 0, 0, palette.len() as u32 / 4, 0].map(u32::to_le_bytes).concat());
    header.extend(masks.iter().flat_map(|mask| mask.to_le_bytes()));
    header.resize(header.len().max(header_bytes as usize), 0);
    file(&[header, palette.to_vec()].concat(), pixels)
}

/// A BMP of OS/2 version 1: sides of 16 bits, and three bytes per color.
fn bmp_of_os2(bits: u16, palette: &[u8], pixels: &[u8]) -> Vec<u8> {
    let header = [WIDTH as u16, HEIGHT as u16, 1, bits].map(u16::to_le_bytes).concat();
    file(&[&12_u32.to_le_bytes(), &header[..], palette].concat(), pixels)
}

fn file(head: &[u8], pixels: &[u8]) -> Vec<u8> {
    let pixels_at = 14 + head.len() as u32;
    let words = [pixels_at + pixels.len() as u32, 0, pixels_at].map(u32::to_le_bytes).concat();
    [b"BM", &words[..], head, pixels].concat()
}

/// Rows from the bottom, each padded to whole words.
fn rows(bits: usize, row: impl Fn(u32) -> Vec<u8>) -> Vec<u8> {
    let row_bytes = (WIDTH as usize * bits).div_ceil(32) * 4;
    let padded = |y: u32| {
        let mut row = row(y);
        row.resize(row_bytes, 0xee);
        row
    };
    (0..HEIGHT).rev().flat_map(padded).collect()
}

fn shown(of: impl Fn(u32, u32) -> [u8; 3]) -> RgbImage {
    RgbImage::from_fn(WIDTH, HEIGHT, |x, y| Rgb(of(x, y)))
}

/// 5 bits become 8 as `level * 255 / 31`, rounded down, and 6 bits as `level * 255 / 63`.
#[test]
fn sixteen_bit_bmps_have_the_levels_of_pillow() {
    let value = |x: u32, y: u32| (x * 1777 + y * 3331) as u16;
    let pixels = rows(16, |y| (0..WIDTH).flat_map(|x| value(x, y).to_le_bytes()).collect());
    let five = |value: u16| (u32::from(value & 31) * 255 / 31) as u8;
    let six = |value: u16| (u32::from(value & 63) * 255 / 63) as u8;
    let of_565 = shown(|x, y| [five(value(x, y) >> 11), six(value(x, y) >> 5), five(value(x, y))]);
    let of_555 = shown(|x, y| [five(value(x, y) >> 10), five(value(x, y) >> 5), five(value(x, y))]);
    assert_pixels("plain", bmp(40, 16, 0, &[], &[], &pixels), &of_555);
    for header_bytes in [40, 52, 56, 108, 124] {
        let masks = [0xf800, 0x7e0, 0x1f];
        assert_pixels(&format!("565, {header_bytes}"), bmp(header_bytes, 16, 3, &masks, &[], &pixels), &of_565);
        let masks = [0x7c00, 0x3e0, 0x1f];
        assert_pixels(&format!("555, {header_bytes}"), bmp(header_bytes, 16, 3, &masks, &[], &pixels), &of_555);
    }
}

#[test]
fn thirty_two_bit_bmps_follow_their_masks_and_alpha() {
    let bytes = |x: u32, y: u32| [(x * 6) as u8, (y * 11) as u8, (x * y) as u8, (x * 7 + y * 3) as u8];
    let pixels = rows(32, |y| (0..WIDTH).flat_map(|x| bytes(x, y)).collect());
    let opaque = shown(|x, y| [2, 1, 0].map(|channel| bytes(x, y)[channel]));
    assert_pixels("plain", bmp(40, 32, 0, &[], &[], &pixels), &opaque);
    assert_pixels("masks", bmp(52, 32, 3, &[0xff_0000, 0xff00, 0xff], &[], &pixels), &opaque);
    let blend_with_white = |level: u8, alpha: u8| {
        let share = f64::from(alpha) / 255.0;
        (f64::from(level) * share + 255.0 * (1.0 - share)).round() as u8
    };
    let clear = shown(|x, y| [2, 1, 0].map(|channel| blend_with_white(bytes(x, y)[channel], bytes(x, y)[3])));
    for header_bytes in [56, 108, 124] {
        let masks = [0xff_0000, 0xff00, 0xff, 0xff00_0000];
        assert_pixels(&format!("alpha, {header_bytes}"), bmp(header_bytes, 32, 3, &masks, &[], &pixels), &clear);
    }
}

#[test]
fn palette_and_os2_bmps_are_read_in_every_depth() {
    for bits in [1_usize, 4, 8] {
        let index = |x: u32, y: u32| (x as usize * 3 + y as usize) % (1 << bits);
        let pixels = rows(bits, |y| {
            let mut row = vec![0; (WIDTH as usize * bits).div_ceil(8)];
            (0..WIDTH as usize)
                .for_each(|x| row[x * bits / 8] |= (index(x as u32, y) << (8 - bits - x * bits % 8)) as u8);
            row
        });
        let color = |index: usize| [(index * 3) as u8, 255 - index as u8, index as u8 ^ 0x55];
        let expected = shown(|x, y| color(index(x, y)));
        let blue_first = |index: usize| color(index).into_iter().rev();
        let palette: Vec<u8> = (0..1 << bits).flat_map(blue_first).collect();
        assert_pixels(&format!("OS/2 1, {bits}"), bmp_of_os2(bits as u16, &palette, &pixels), &expected);
        let palette: Vec<u8> = (0..1 << bits).flat_map(|index| blue_first(index).chain([0])).collect();
        for header_bytes in [40, 64, 124] {
            let file = bmp(header_bytes, bits as u16, 0, &[], &palette, &pixels);
            assert_pixels(&format!("{header_bytes}, {bits}"), file, &expected);
        }
    }
    let pixels = rows(24, |y| (0..WIDTH).flat_map(|x| [x as u8, y as u8, 9]).collect());
    assert_pixels("OS/2 1, 24", bmp_of_os2(24, &[], &pixels), &shown(|x, y| [9, y as u8, x as u8]));
}

#[test]
fn unsupported_bmp_compressions_are_named() {
    for (bits, compression, words) in [(24, 4, "OS/2 run-length encoding"), (0, 5, "embedded JPEG or PNG")] {
        let error = try_decode(bmp(40, bits, compression, &[], &[], &[0; 99])).expect_err(words);
        assert!(error.to_string().contains(words), "{error}");
    }
}
