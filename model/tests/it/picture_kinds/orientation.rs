//! Orientation from EXIF or XMP, which is applied wherever a file has it.

use image::metadata::Orientation;
use image::{DynamicImage, ImageFormat, RgbImage};

use super::{assert_pixels, chunk, encoded, extended_webp, riff, scene, zlib};

/// The smallest EXIF: a TIFF with one tag.
fn exif(orientation: u8, is_little: bool) -> Vec<u8> {
    let tag = [0x12, 0x01, 3, 0, 1, 0, 0, 0, orientation, 0, 0, 0];
    if is_little {
        [b"II*\0\x08\0\0\0\x01\0", &tag[..], &[0; 4]].concat()
    } else {
        [b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0", &[orientation][..], &[0; 6]].concat()
    }
}

fn prefixed(exif: &[u8]) -> Vec<u8> {
    [b"Exif\0\0", exif].concat()
}

fn xmp(orientation: u8) -> Vec<u8> {
    format!(r#"<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>"#).into_bytes()
}

/// ImageMagick's text: a name, the length, and hexadecimal digits.
fn raw_profile(exif: &[u8]) -> Vec<u8> {
    let digits: String = prefixed(exif).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("\nexif\n{:8}\n{digits}\n", 6 + exif.len()).into_bytes()
}

/// `picture` as displayed with this EXIF orientation number.
fn turned(picture: RgbImage, orientation: u8) -> RgbImage {
    let mut picture = DynamicImage::from(picture);
    picture.apply_orientation(Orientation::from_exif(orientation).expect("1 to 8"));
    picture.into_rgb8()
}

#[track_caller]
fn assert_turned(name: &str, made: impl Fn(u8) -> Vec<u8>) {
    for orientation in 1..=8 {
        assert_pixels(&format!("{name}, {orientation}"), made(orientation), &turned(scene(), orientation));
    }
}

#[test]
fn a_webp_is_rotated_by_exif_and_by_xmp() {
    let simple = encoded(scene(), ImageFormat::WebP);
    let with = |flags: u8, name: &[u8; 4], content: &[u8]| extended_webp(flags, &simple, &[riff(name, content)]);
    assert_turned("EXIF", |number| with(8, b"EXIF", &exif(number, true)));
    assert_turned("EXIF with a prefix", |number| with(8, b"EXIF", &prefixed(&exif(number, true))));
    assert_turned("EXIF with a prefix, big-endian", |number| with(8, b"EXIF", &prefixed(&exif(number, false))));
    assert_turned("XMP", |number| with(4, b"XMP ", &xmp(number)));
}

#[test]
fn a_png_is_rotated_by_exif_before_or_after_pixels() {
    let plain = encoded(scene(), ImageFormat::Png);
    let end = plain.len() - 12;
    for (name, at) in [("first", 33), ("last", end)] {
        let with = |content: &[u8]| [&plain[..at], &chunk(b"eXIf", content), &plain[at..]].concat();
        assert_turned(name, |number| with(&exif(number, true)));
        assert_turned(&format!("{name}, with a prefix"), |number| with(&prefixed(&exif(number, false))));
    }
}

#[test]
fn a_png_is_rotated_by_imagemagick_profiles_and_by_xmp() {
    let plain = encoded(scene(), ImageFormat::Png);
    let end = plain.len() - 12;
    let with = |at: usize, name: &[u8; 4], parts: &[&[u8]]| {
        [&plain[..at], &chunk(name, &parts.concat()), &plain[at..]].concat()
    };
    let exif = |number| exif(number, true);
    for at in [33, end] {
        let key = &b"Raw profile type exif\0"[..];
        assert_turned("tEXt", |number| with(at, b"tEXt", &[key, &raw_profile(&exif(number))]));
        assert_turned("zTXt", |number| with(at, b"zTXt", &[key, b"\0", &zlib(&raw_profile(&exif(number)))]));
        let key = &b"XML:com.adobe.xmp\0"[..];
        assert_turned("XMP", |number| with(at, b"iTXt", &[key, b"\0\0\0\0", &xmp(number)]));
        assert_turned("XMP, compressed", |number| with(at, b"iTXt", &[key, b"\x01\0\0\0", &zlib(&xmp(number))]));
    }
}

#[test]
fn a_jpeg_is_rotated_by_exif_or_otherwise_by_xmp() {
    let plain = super::super::common::golden_bytes("pictures/photo_444.jpg");
    let upright = super::decode("upright", plain.clone());
    let upright = RgbImage::from_raw(upright.width(), upright.height(), upright.data().to_vec()).expect("pixels");
    let segment = |content: &[u8]| {
        let length = (content.len() as u16 + 2).to_be_bytes();
        [&[0xff, 0xe1], &length[..], content].concat()
    };
    let with = |segments: &[Vec<u8>]| [&plain[..2], &segments.concat(), &plain[2..]].concat();
    let exif = |number| segment(&prefixed(&exif(number, true)));
    let xmp = |number| segment(&[b"http://ns.adobe.com/xap/1.0/\0", &xmp(number)[..]].concat());
    for number in 1..=8 {
        let expected = turned(upright.clone(), number);
        assert_pixels("EXIF", with(&[exif(number)]), &expected);
        assert_pixels("EXIF before XMP", with(&[exif(number), xmp(3)]), &expected);
        assert_pixels("XMP", with(&[xmp(number)]), &expected);
    }
}

#[test]
fn a_transparent_picture_is_rotated_by_exif() {
    let clear = image::RgbaImage::from_fn(super::WIDTH, super::HEIGHT, |x, y| {
        image::Rgba([0, (x * 6) as u8, 9, if x + y < 30 { 0 } else { 255 }])
    });
    let mut shown = DynamicImage::from(clear.clone()).into_rgb8();
    clear
        .pixels()
        .zip(shown.pixels_mut())
        .filter(|(clear, _)| clear.0[3] == 0)
        .for_each(|(_, shown)| shown.0 = [255; 3]);
    let simple = encoded(clear, ImageFormat::WebP);
    let webp = extended_webp(0x18, &simple, &[riff(b"EXIF", &prefixed(&exif(6, true)))]);
    assert_pixels("WebP", webp, &turned(shown, 6));
}
