//! JPEG to pixels with the arithmetic of libjpeg-turbo, which Pillow and torchvision use: its inverse cosine transform,
//! its chroma upsampling, its conversion to RGB. Other decoders differ by up to four levels.

use mozjpeg::{ColorSpace, Decompress};

/// Decodes into `pixels` `[height, width, 1, 3 or 4]`. Its length decides the format: grey, RGB, or CMYK as stored.
/// Returns `None`, and leaves `pixels` unspecified, if the file is damaged, ends too early or has other colours.
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

/// Whether an end-of-image marker follows the last start of a scan. libjpeg fills missing data with grey and only
/// warns; Pillow refuses such a file, and so do we. The marker cannot occur inside a scan (ITU T.81, B.1.1.5).
fn ends_behind_its_scan(encoded: &[u8]) -> bool {
    let is = |marker: [u8; 2]| move |pair: &[u8]| pair == marker;
    let scan = encoded.windows(2).rposition(is([0xff, 0xda]));
    scan.is_some_and(|scan| encoded[scan..].windows(2).any(is([0xff, 0xd9])))
}
