//! Reasons to refuse a picture.

use bursar_budgets::{Bytes, Hint};
use thiserror::Error;

/// A picture that was refused, before or while decoding it.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ImageError {
    /// The file could not be read.
    #[error("the picture {name} could not be read: {kind}")]
    Unreadable { name: String, kind: std::io::ErrorKind },
    /// The encoded bytes exceed the limit.
    #[error("the encoded picture has {} bytes; the limit is {}", .bytes.0, .bytes_max.0)]
    TooManyBytes { bytes: Bytes, bytes_max: Bytes },
    /// The header announces more pixels than the limit; nothing was decoded.
    #[error("the picture is {width} x {height} = {pixels} pixels; the limit is {pixels_max}")]
    TooManyPixels { width: u32, height: u32, pixels: u64, pixels_max: u64 },
    /// Decoding would take more host memory than the limit; nothing was decoded.
    #[error("decoding the picture takes {} bytes of host memory; the limit is {}", .bytes.0, .bytes_max.0)]
    TooMuchDecodeMemory {
        /// Host bytes at the peak.
        bytes: Bytes,
        bytes_max: Bytes,
    },
    /// The bytes are not in a supported format.
    #[error("the picture is not PNG, JPEG, WebP, GIF, BMP or TIFF")]
    UnknownFormat,
    /// A side is zero.
    #[error("the picture is {width} x {height} pixels; each side must have at least 1")]
    Empty { width: u32, height: u32 },
    /// The number of bytes does not match the width and height that were given.
    #[error("{width} x {height} pixels of three bytes are {expected} bytes, but {found} were given")]
    PixelBytes {
        width: u32,
        height: u32,
        /// `width * height * 3`.
        expected: u64,
        found: u64,
    },
    /// The bytes do not follow their format.
    #[error("the {format} picture is damaged or incomplete: {stage} failed")]
    Damaged {
        /// PNG, JPEG, WebP, GIF, BMP or TIFF.
        format: &'static str,
        /// The stage that failed: reading the header, counting a JPEG's scans, finding a GIF's
        /// first frame, or decoding the pixels.
        stage: &'static str,
    },
    /// The picture is intact, but uses a feature of its format that is not supported.
    #[error("the {format} picture uses {feature}, which is not supported")]
    Unsupported {
        /// PNG, JPEG, WebP, GIF, BMP, TIFF, HEIC or AVIF.
        format: &'static str,
        /// The feature, with an article if it needs one.
        feature: &'static str,
    },
    /// The picture's aspect ratio is too large for the model's image processor.
    #[error("the picture's sides {width} x {height} have the ratio {ratio:.1}; the limit is {ratio_max}")]
    AspectRatio {
        width: u32,
        height: u32,
        /// The longer side divided by the shorter side.
        ratio: f64,
        ratio_max: f64,
    },
    /// The resized picture would have more tokens along a side than the model has positions.
    #[error("a side of the {width} x {height} picture has {tokens} tokens after resizing; the limit is {limit}")]
    SideTokens { width: u32, height: u32, tokens: u64, limit: u64 },
    /// The image processor must not resize (`do_resize` is off), and the picture does not
    /// divide into whole patches.
    #[error(
        "the picture is {width} x {height} pixels, but each side must be a multiple of {multiple}, because `do_resize` \
         is off"
    )]
    NotAMultiple {
        width: u32,
        height: u32,
        /// Side of a merged patch, in pixels.
        multiple: u32,
    },
    /// A limit set for this picture is below the least value that a picture can meet.
    #[error("the picture's own `{limit}` is {value}; expected at least {least}")]
    OwnLimitTooLow {
        /// `min_pixels`, `max_pixels` or `tiles`.
        limit: &'static str,
        value: u64,
        least: u64,
    },
    /// A limit set for this picture exceeds what the envelope, or another limit of the picture,
    /// allows.
    #[error("the picture's own `{limit}` is {value}; expected at most {most}")]
    OwnLimitTooHigh {
        /// `min_pixels`, `max_pixels` or `tiles`.
        limit: &'static str,
        value: u64,
        most: u64,
    },
    /// A limit set for this picture would have no effect.
    #[error("the picture's own `{limit}` cannot be applied: {reason}")]
    OwnLimitIdle {
        /// `min_pixels`, `max_pixels` or `tiles`.
        limit: &'static str,
        reason: &'static str,
    },
    /// The image processor's settings resize a side of this picture to zero pixels, or to more
    /// pixels than a u32 can count.
    #[error("the processor's pixel limits give the {width} x {height} picture no usable size")]
    NoSize { width: u32, height: u32 },
}

impl Hint for ImageError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            ImageError::Unreadable { .. } => "check the path, and that the file is readable".into(),
            ImageError::TooManyBytes { .. } => "compress the picture more, or raise `ImageLimits::bytes_max`".into(),
            ImageError::TooManyPixels { .. } => "scale the picture down, or raise `ImageLimits::pixels_max`".into(),
            ImageError::TooMuchDecodeMemory { .. } => "scale the picture down, or save it with 8 bits a channel".into(),
            ImageError::UnknownFormat => "convert the picture to PNG, JPEG, WebP, GIF, BMP or TIFF".into(),
            ImageError::PixelBytes { .. } => {
                "give three bytes (red, green, blue) for each pixel, row by row without gaps, without alpha".into()
            }
            ImageError::Empty { .. } | ImageError::Damaged { .. } => "save the picture again from its source".into(),
            ImageError::Unsupported { format, .. } => {
                format!("convert the picture, for example with `magick picture.{} picture.png`", format.to_lowercase())
            }
            ImageError::AspectRatio { ratio_max, .. } => {
                format!("crop the picture or cut it into pieces: no side may be over {ratio_max} times the other")
            }
            ImageError::SideTokens { .. } => {
                "crop the picture or cut it into pieces, or leave out its `max_pixels`".into()
            }
            ImageError::NotAMultiple { multiple, .. } => {
                format!("scale the picture to multiples of {multiple}, or set `do_resize` to true")
            }
            ImageError::OwnLimitTooLow { limit, least, .. } => {
                format!("set the picture's `{limit}` to {least} or more")
            }
            ImageError::OwnLimitTooHigh { limit: limit @ "min_pixels", most, .. } => {
                format!("set the picture's `{limit}` to {most} or less, or raise `max_pixels`")
            }
            ImageError::OwnLimitTooHigh { limit, most, .. } => {
                format!("set the picture's `{limit}` to {most} or less, or raise `picture_patches`")
            }
            ImageError::OwnLimitIdle { limit, .. } => format!("leave the picture's `{limit}` out"),
            ImageError::NoSize { .. } => "raise `min_pixels` above zero in preprocessor_config.json".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_names_what_to_change() {
        let (width, height) = (30, 10);
        let refusals = [
            (ImageError::Unreadable { name: "a.png".into(), kind: std::io::ErrorKind::NotFound }, "check the path"),
            (ImageError::TooManyBytes { bytes: Bytes(3), bytes_max: Bytes(2) }, "`ImageLimits::bytes_max`"),
            (ImageError::TooManyPixels { width, height, pixels: 300, pixels_max: 2 }, "`ImageLimits::pixels_max`"),
            (ImageError::TooMuchDecodeMemory { bytes: Bytes(3), bytes_max: Bytes(2) }, "8 bits a channel"),
            (ImageError::UnknownFormat, "convert the picture to PNG"),
            (ImageError::Empty { width, height: 0 }, "save the picture again"),
            (ImageError::PixelBytes { width, height, expected: 900, found: 1200 }, "without alpha"),
            (ImageError::Damaged { format: "PNG", stage: "reading its header" }, "save the picture again"),
            (ImageError::Unsupported { format: "TIFF", feature: "SGI LogLuv" }, "`magick picture.tiff picture.png`"),
            (ImageError::AspectRatio { width, height, ratio: 3.0, ratio_max: 2.0 }, "over 2 times the other"),
            (ImageError::SideTokens { width, height, tokens: 3, limit: 2 }, "cut it into pieces"),
            (ImageError::NotAMultiple { width, height, multiple: 28 }, "multiples of 28"),
            (ImageError::NoSize { width, height }, "raise `min_pixels`"),
            (ImageError::OwnLimitTooLow { limit: "tiles", value: 0, least: 1 }, "`tiles` to 1 or more"),
            (ImageError::OwnLimitTooHigh { limit: "min_pixels", value: 3, most: 2 }, "raise `max_pixels`"),
            (ImageError::OwnLimitTooHigh { limit: "max_pixels", value: 3, most: 2 }, "raise `picture_patches`"),
            (ImageError::OwnLimitIdle { limit: "tiles", reason: "none" }, "leave the picture's `tiles` out"),
        ];
        for (error, change) in refusals {
            assert!(error.hint().contains(change), "{error:?}: {}", error.hint());
        }
    }
}
