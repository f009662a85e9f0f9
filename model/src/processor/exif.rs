//! Pure: orientation of a picture, determined as in Pillow 13 (`Image.getexif`,
//! `ImageOps.exif_transpose`).

use image::metadata::Orientation;

use super::tiff_directory::Directory;

// Tag of the orientation (TIFF 6.0, section 8), and the integer types that Pillow accepts for it.
const ORIENTATION: u16 = 274;
const WHOLE_NUMBERS: [u16; 4] = [3, 4, 8, 9];
const PREFIX: &[u8] = b"Exif\0\0";

/// Orientation in an EXIF block with up to two `Exif\0\0` prefixes, or in the first directory of a
/// TIFF. `None` if the tag is missing or the block is broken, in which case XMP is read. Values
/// other than 1 to 8 mean that the picture is upright.
pub(super) fn orientation_of_exif(mut exif: &[u8]) -> Option<Orientation> {
    for _ in 0..2 {
        exif = exif.strip_prefix(PREFIX).unwrap_or(exif);
    }
    orientation_of(&Directory::read(exif)?)
}

/// Orientation in a directory that was already read. `None` if the tag is missing.
pub(super) fn orientation_of(directory: &Directory<'_>) -> Option<Orientation> {
    let entry = directory.entry(ORIENTATION)?;
    let value = directory.number(&entry, 0).filter(|_| WHOLE_NUMBERS.contains(&entry.kind));
    Some(value.and_then(numbered).unwrap_or(Orientation::NoTransforms))
}

fn numbered(value: u64) -> Option<Orientation> {
    Orientation::from_exif(u8::try_from(value).ok()?)
}

/// Orientation in XMP, as an attribute or an element: the first match of
/// `tiff:Orientation(="|>)([0-9])`.
pub(super) fn orientation_of_xmp(xmp: &[u8]) -> Option<Orientation> {
    const NAME: &[u8] = b"tiff:Orientation";
    xmp.windows(NAME.len()).enumerate().filter(|(_, name)| *name == NAME).find_map(|(at, _)| {
        let value = &xmp[at + NAME.len()..];
        let value = value.strip_prefix(b"=\"").or(value.strip_prefix(b">"))?;
        let digit = value.first()?.checked_sub(b'0').filter(|digit| *digit <= 9)?;
        Some(numbered(digit.into()).unwrap_or(Orientation::NoTransforms))
    })
}

/// EXIF from ImageMagick's `Raw profile type exif`: three header lines, then hexadecimal digits.
/// `None` if a header line is missing, or if a character is neither a digit nor white space.
pub(super) fn unpack_raw_profile(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.splitn(4, |&byte| byte == b'\n').nth(3)?;
    let digit = |byte: &u8| (*byte as char).to_digit(16).map(|digit| digit as u8);
    let mut exif = Vec::with_capacity(digits.len() / 2);
    let mut first = None;
    for byte in digits.iter().filter(|byte| !byte.is_ascii_whitespace()) {
        match first.take() {
            None => first = Some(digit(byte)?),
            Some(high) => exif.push(high << 4 | digit(byte)?),
        }
    }
    Some(exif)
}

/// Orientation from EXIF, else from XMP, else upright.
pub(super) fn orientation_by(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> Orientation {
    let by_exif = exif.and_then(orientation_of_exif);
    by_exif.or_else(|| xmp.and_then(orientation_of_xmp)).unwrap_or(Orientation::NoTransforms)
}

/// Whether an orientation swaps width and height.
pub(super) fn turns(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exif(is_little: bool, kind: u16, value: u32) -> Vec<u8> {
        let short = |value: u16| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
        let long = |value: u32| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
        let value = if kind == 3 { [short(value as u16), [0; 2]].concat() } else { long(value).to_vec() };
        let mut exif = if is_little { b"II".to_vec() } else { b"MM".to_vec() };
        exif.extend([&short(42)[..], &long(8), &short(1), &short(274), &short(kind), &long(1), &value].concat());
        exif
    }

    #[test]
    fn exif_orientation_is_read_in_every_encoding() {
        for is_little in [true, false] {
            for kind in [3, 4] {
                let plain = exif(is_little, kind, 6);
                for prefixes in 0..=2 {
                    let block = [PREFIX.repeat(prefixes), plain.clone()].concat();
                    assert_eq!(
                        orientation_of_exif(&block),
                        Some(Orientation::Rotate90),
                        "{is_little} {kind} {prefixes}"
                    );
                }
                for value in [0, 9, 65_535] {
                    let found = orientation_of_exif(&exif(is_little, kind, value));
                    assert_eq!(found, Some(Orientation::NoTransforms), "{value}");
                }
            }
            assert_eq!(
                orientation_of_exif(&exif(is_little, 1, 6)),
                Some(Orientation::NoTransforms),
                "a BYTE is read as in Pillow"
            );
        }
        for broken in [&b""[..], b"II*\0", b"II*\0\xff\xff\xff\xff", b"XX*\0\x08\0\0\0\x01\0"] {
            assert_eq!(orientation_of_exif(broken), None);
        }
    }

    #[test]
    fn xmp_is_read_only_without_an_exif_orientation() {
        let xmp = br#"<x tiff:Orientation="no" tiff:Orientation="3"/>"#;
        assert_eq!(orientation_by(None, Some(xmp)), Orientation::Rotate180);
        assert_eq!(orientation_of_xmp(b"<tiff:Orientation>8</tiff:Orientation>"), Some(Orientation::Rotate270));
        assert_eq!(orientation_by(Some(&exif(true, 3, 1)), Some(xmp)), Orientation::NoTransforms);
        assert_eq!(orientation_by(Some(&exif(true, 3, 9)), Some(xmp)), Orientation::NoTransforms);
        assert_eq!(orientation_of_xmp(b"tiff:Orientation"), None);
    }

    #[test]
    fn a_raw_profile_is_hexadecimal_after_three_lines() {
        assert_eq!(unpack_raw_profile(b"\nexif\n       3\n45 78\n69\n"), Some(b"Exi".to_vec()));
        assert_eq!(unpack_raw_profile(b"\nexif\n3\n4x"), None);
        assert_eq!(unpack_raw_profile(b"exif"), None);
    }
}
