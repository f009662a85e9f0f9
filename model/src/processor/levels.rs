//! Pure: conversion of pixel colors to RGB, with the integer arithmetic of Pillow 13
//! (`src/libImaging`).

/// Blends one level with white by its `alpha`, which is how transformers 5.24
/// (`image_transforms.py`, `convert_to_rgb`), qwen-vl-utils 0.0.14 (`to_rgb`) and vLLM 0.33
/// (`multimodal/image.py`, `rgba_to_rgb`) show transparent pixels. These projects use
/// `Image.alpha_composite` or `Image.paste` with a mask. Both give equal results for all 65,536
/// pairs of level and alpha.
pub(super) fn blend_with_white(level: u8, alpha: u8) -> u8 {
    let (level, alpha) = (u32::from(level), u32::from(alpha));
    let sum = level * alpha + 255 * (255 - alpha) + 128;
    (((sum >> 8) + sum) >> 8) as u8
}

/// Blends a color with white by its `alpha`.
pub(super) fn rgb_on_white(color: [u8; 3], alpha: u8) -> [u8; 3] {
    color.map(|level| blend_with_white(level, alpha))
}

/// Undoes the multiplication of a level by its alpha (`Unpack.c`, `unpackRGBa`).
pub(super) fn unmultiplied(level: u8, alpha: u8) -> u8 {
    match alpha {
        0 => 0,
        _ => (u32::from(level) * 255 / u32::from(alpha)).min(255) as u8,
    }
}

/// CMYK to RGB (`Convert.c`, `cmyk2rgb`): each ink removes its share of the light that black
/// leaves. `light` is 255 minus black; `inks` are cyan, magenta, yellow.
pub(super) fn printed(inks: [u8; 3], light: u8) -> [u8; 3] {
    let light = u32::from(light);
    inks.map(|ink| {
        let share = u32::from(ink) * light + 128;
        light.saturating_sub(((share >> 8) + share) >> 8) as u8
    })
}

/// Converts `[pixels, channels]` of 8 bits to `[pixels, 3]`, for gray, gray with alpha, RGB, or RGB
/// with alpha. Transparent pixels are blended with white.
pub(super) fn to_rgb(raw: Vec<u8>, channels: usize) -> Option<Vec<u8>> {
    Some(match channels {
        1 => raw.iter().flat_map(|&gray| [gray; 3]).collect(),
        2 => raw.chunks_exact(2).flat_map(|pixel| [blend_with_white(pixel[0], pixel[1]); 3]).collect(),
        3 => raw,
        4 => narrow(raw, |pixel| rgb_on_white([pixel[0], pixel[1], pixel[2]], pixel[3])),
        _ => return None,
    })
}

/// Converts four bytes per pixel to three in place, so that no second picture is needed. The write
/// position never passes the read position.
pub(super) fn narrow(mut raw: Vec<u8>, rgb: impl Fn(&[u8]) -> [u8; 3]) -> Vec<u8> {
    let pixels = raw.len() / 4;
    for pixel in 0..pixels {
        let color = rgb(&raw[pixel * 4..][..4]);
        raw[pixel * 3..][..3].copy_from_slice(&color);
    }
    raw.truncate(pixels * 3);
    raw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alpha_is_blended_with_white_as_in_pillow() {
        for level in [0, 1, 127, 200, 255] {
            assert_eq!((blend_with_white(level, 255), blend_with_white(level, 0)), (level, 255));
        }
        // Results of Pillow 13's `Image.alpha_composite` of these pairs on white.
        assert_eq!(
            [blend_with_white(0, 128), blend_with_white(10, 1), blend_with_white(77, 200), blend_with_white(254, 127)],
            [127, 254, 115, 255]
        );
    }

    #[test]
    fn a_premultiplied_level_is_divided_and_clipped() {
        assert_eq!([unmultiplied(9, 0), unmultiplied(64, 128), unmultiplied(200, 100)], [0, 127, 255]);
    }
}
