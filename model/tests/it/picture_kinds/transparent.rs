//! Transparent pixels, which are shown on white.

use image::{ImageFormat, Luma, LumaA, Rgb, RgbImage, Rgba, RgbaImage};

use super::{HEIGHT, WIDTH, assert_pixels, chunk, decode, encoded, extended_webp, png, scene};

fn alpha(x: u32, y: u32) -> u8 {
    (x * 7 + y * 3) as u8
}

/// The level on a white background, computed in f64 and rounded to the nearest level.
fn blend_with_white(level: u8, alpha: u8) -> u8 {
    let share = f64::from(alpha) / 255.0;
    (f64::from(level) * share + 255.0 * (1.0 - share)).round() as u8
}

fn clear() -> RgbaImage {
    let scene = scene();
    RgbaImage::from_fn(WIDTH, HEIGHT, |x, y| {
        let Rgb([red, green, blue]) = *scene.get_pixel(x, y);
        Rgba([red, green, blue, alpha(x, y)])
    })
}

fn shown(clear: &RgbaImage) -> RgbImage {
    RgbImage::from_fn(WIDTH, HEIGHT, |x, y| {
        let Rgba([red, green, blue, alpha]) = *clear.get_pixel(x, y);
        Rgb([red, green, blue].map(|level| blend_with_white(level, alpha)))
    })
}

#[test]
fn rgb_with_alpha_is_shown_on_white_in_every_format() {
    let expected = shown(&clear());
    assert_pixels("PNG", encoded(clear(), ImageFormat::Png), &expected);
    assert_pixels("WebP", encoded(clear(), ImageFormat::WebP), &expected);
    assert_pixels("TIFF", encoded(clear(), ImageFormat::Tiff), &expected);
    let lossless = encoded(clear(), ImageFormat::WebP);
    assert_pixels("WebP whose header hides its alpha", extended_webp(0, &lossless, &[]), &expected);
    let deep = image::DynamicImage::from(clear()).into_rgba16();
    assert_pixels("PNG of 16 bits", encoded(deep, ImageFormat::Png), &expected);
}

#[test]
fn grey_with_alpha_is_shown_on_white() {
    let grey = image::GrayAlphaImage::from_fn(WIDTH, HEIGHT, |x, y| LumaA([(x * 5 + y) as u8, alpha(x, y)]));
    let expected = RgbImage::from_fn(WIDTH, HEIGHT, |x, y| Rgb([blend_with_white((x * 5 + y) as u8, alpha(x, y)); 3]));
    assert_pixels("PNG", encoded(grey, ImageFormat::Png), &expected);
}

#[test]
fn a_palette_with_alpha_is_shown_on_white() {
    let colors: Vec<[u8; 3]> = (0..200u8).map(|index| [index, 255 - index, index / 2]).collect();
    let alphas: Vec<u8> = (0..150u8).map(|index| index.wrapping_mul(5)).collect();
    let index = |x: u32, y: u32| ((x * 3 + y * 7) % 200) as usize;
    let rows: Vec<Vec<u8>> = (0..HEIGHT).map(|y| (0..WIDTH).map(|x| index(x, y) as u8).collect()).collect();
    let chunks = [chunk(b"PLTE", colors.as_flattened()), chunk(b"tRNS", &alphas)];
    let expected = RgbImage::from_fn(WIDTH, HEIGHT, |x, y| {
        let alpha = alphas.get(index(x, y)).copied().unwrap_or(255); // colors without alpha are opaque
        Rgb(colors[index(x, y)].map(|level| blend_with_white(level, alpha)))
    });
    assert_pixels("PNG", png(8, 3, &chunks, &rows), &expected);
}

#[test]
fn a_transparent_png_color_is_shown_as_white() {
    let scene = scene();
    let Rgb(hidden) = *scene.get_pixel(9, 4);
    let rows: Vec<Vec<u8>> = scene.rows().map(|row| row.flat_map(|pixel| pixel.0).collect()).collect();
    let expected = |hidden: [u8; 3]| {
        let mut shown = scene.clone();
        shown.pixels_mut().filter(|pixel| pixel.0 == hidden).for_each(|pixel| pixel.0 = [255; 3]);
        shown
    };
    let content: Vec<u8> = hidden.iter().flat_map(|level| [0, *level]).collect();
    assert_pixels("PNG in RGB", png(8, 2, &[chunk(b"tRNS", &content)], &rows), &expected(hidden));
    let grey = image::GrayImage::from_fn(WIDTH, HEIGHT, |x, y| Luma([(x + y) as u8]));
    let rows: Vec<Vec<u8>> = grey.rows().map(|row| row.map(|pixel| pixel.0[0]).collect()).collect();
    let shown = RgbImage::from_fn(WIDTH, HEIGHT, |x, y| Rgb([if x + y == 30 { 255 } else { (x + y) as u8 }; 3]));
    assert_pixels("PNG in gray", png(8, 0, &[chunk(b"tRNS", &[0, 30])], &rows), &shown);
}

#[test]
fn a_transparent_gif_color_is_shown_as_white() {
    let of_gif = |alpha: u8| if alpha > 127 { 255 } else { 0 };
    let few = RgbaImage::from_fn(WIDTH, HEIGHT, |x, y| {
        Rgba([if x < 20 { 0 } else { 255 }, 0, if y < 9 { 0 } else { 255 }, of_gif(alpha(x, y))])
    });
    assert_pixels("GIF", encoded(few.clone(), ImageFormat::Gif), &shown(&few));
}

/// A black logo on a transparent background. When alpha was dropped, the whole picture was black.
#[test]
fn black_on_a_transparent_background_becomes_black_on_white() {
    let logo =
        RgbaImage::from_fn(WIDTH, HEIGHT, |x, y| Rgba([0, 0, 0, if (x / 6 + y / 6) % 2 == 0 { 255 } else { 0 }]));
    for format in [ImageFormat::Png, ImageFormat::WebP, ImageFormat::Gif, ImageFormat::Tiff] {
        let picture = decode(&format!("{format:?}"), encoded(logo.clone(), format));
        let white = picture.data().chunks(3).filter(|pixel| **pixel == [255; 3]).count();
        let black = picture.data().chunks(3).filter(|pixel| **pixel == [0; 3]).count();
        assert_eq!((white + black, white > 300, black > 300), (851, true, true), "{format:?}");
    }
}
