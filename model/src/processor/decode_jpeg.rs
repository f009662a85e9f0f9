//! JPEG to pixels, with the arithmetic of libjpeg-turbo, which is what Pillow and torchvision decode with: its inverse
//! cosine transform, its upsampling of colours, its conversion to RGB. Other decoders are off by up to four levels.

use mozjpeg::{ColorSpace, Decompress};

/// Decodes into `pixels` `[height, width, 1, 3 or 4]`: grey, RGB, or the four printing colours as they are stored, as its
/// length says. Nothing, if the file is damaged or ends too early, or has other colours than that; `pixels` then holds
/// nothing of meaning.
pub(super) fn decode_jpeg(encoded: &[u8], width: u32, height: u32, pixels: &mut [u8]) -> Option<()> {
    if !ends_behind_its_scan(encoded) {
        return None;
    }
    let decoder = Decompress::new_mem(encoded).ok()?;
    let channels = pixels.len() / (width as usize * height as usize);
    let is_convertible = match decoder.color_space() {
        ColorSpace::JCS_GRAYSCALE | ColorSpace::JCS_YCbCr | ColorSpace::JCS_RGB => matches!(channels, 1 | 3),
        ColorSpace::JCS_CMYK | ColorSpace::JCS_YCCK => channels == 4,
        _ => false,
    };
    if !is_convertible || decoder.size() != (width as usize, height as usize) {
        return None;
    }
    let mut decoder = match channels {
        1 => decoder.grayscale(),
        4 => decoder.to_colorspace(ColorSpace::JCS_CMYK),
        _ => decoder.rgb(),
    }
    .ok()?;
    let read = decoder.read_scanlines_into::<u8>(pixels).ok()?.len();
    decoder.finish().ok()?;
    (read == pixels.len()).then_some(())
}

/// Whether an end-of-image marker stands behind the last start of a scan. libjpeg fills what is missing with grey and
/// only warns; Pillow refuses such a file, and so do we. Inside a scan the marker cannot occur (ITU T.81, B.1.1.5).
fn ends_behind_its_scan(encoded: &[u8]) -> bool {
    let is = |marker: [u8; 2]| move |pair: &[u8]| pair == marker;
    let scan = encoded.windows(2).rposition(is([0xff, 0xda]));
    scan.is_some_and(|scan| encoded[scan..].windows(2).any(is([0xff, 0xd9])))
}
