//! Pictures as the user supplies them (encoded bytes or pixels), and the limits checked before
//! decoding.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use bursar_budgets::Bytes;

use super::{ImageError, ResizeLimits};

/// A picture as file content (PNG, JPEG, WebP, the first frame of a GIF, BMP or TIFF) or as pixels.
/// Cloning shares the bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct EncodedImage {
    bytes: Arc<[u8]>,
    /// `Some` if the bytes are decoded pixels.
    size: Option<PixelSize>,
    name: Option<Arc<str>>,
    own: ResizeLimits,
}

/// Width and height of decoded pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelSize {
    pub width: u32,
    pub height: u32,
}

/// The name of the file that a picture was read from, if any. Its `Display` form is ` (cat.jpg)`,
/// which error messages put after the picture's number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileName(pub Option<Arc<str>>);

impl fmt::Display for FileName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(name) => write!(formatter, " ({name})"),
            None => Ok(()),
        }
    }
}

impl EncodedImage {
    /// Takes encoded bytes. The bytes are not checked before [`probe`](Self::probe) or
    /// [`decode`](Self::decode).
    pub fn new(encoded: impl Into<Arc<[u8]>>) -> Self {
        EncodedImage { bytes: encoded.into(), size: None, name: None, own: ResizeLimits::default() }
    }

    /// Takes decoded pixels, `[height, width, 3]` bytes of red, green and blue, rows from the top.
    ///
    /// # Errors
    /// [`ImageError::Empty`] if a side is 0; [`ImageError::PixelBytes`] if there
    /// are not `width * height * 3` bytes.
    pub fn from_rgb(width: u32, height: u32, pixels: impl Into<Arc<[u8]>>) -> Result<Self, ImageError> {
        let bytes = pixels.into();
        let expected = u64::from(width) * u64::from(height) * 3;
        match bytes.len() as u64 {
            _ if expected == 0 => Err(ImageError::Empty { width, height }),
            found if found != expected => Err(ImageError::PixelBytes { width, height, expected, found }),
            _ => Ok(EncodedImage { size: Some(PixelSize { width, height }), ..EncodedImage::new(bytes) }),
        }
    }

    /// Like [`new`](Self::new), with a name that errors and progress lines may show.
    pub fn named(encoded: impl Into<Arc<[u8]>>, name: impl Into<Arc<str>>) -> Self {
        EncodedImage { name: Some(name.into()), ..EncodedImage::new(encoded) }
    }

    /// The same picture with resize limits for this picture only.
    pub fn within(self, own: ResizeLimits) -> Self {
        EncodedImage { own, ..self }
    }

    /// The resize limits of this picture.
    pub fn own_limits(&self) -> ResizeLimits {
        self.own
    }

    /// Reads a file of at most `limits.bytes_max` bytes.
    ///
    /// # Errors
    /// [`ImageError::Unreadable`] or [`ImageError::TooManyBytes`].
    pub fn open(path: impl AsRef<Path>, limits: &ImageLimits) -> Result<Self, ImageError> {
        let path = path.as_ref();
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        match std::fs::File::open(path) {
            Ok(file) => EncodedImage::read(&file, name, limits),
            Err(error) => Err(ImageError::Unreadable { name, kind: error.kind() }),
        }
    }

    /// Reads an open file of at most `limits.bytes_max` bytes. Errors refer to the file as `name`.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn read(file: &std::fs::File, name: String, limits: &ImageLimits) -> Result<Self, ImageError> {
        let unreadable = |error: std::io::Error| ImageError::Unreadable { name: name.clone(), kind: error.kind() };
        let announced = file.metadata().map_err(unreadable)?.len();
        limits.check_bytes(Bytes(announced))?;
        // A pipe or a growing file can yield more bytes than its metadata reports. Reading one byte
        // beyond the limit is enough to detect that.
        let mut encoded = Vec::new();
        file.take(limits.bytes_max.0.saturating_add(1)).read_to_end(&mut encoded).map_err(unreadable)?;
        limits.check_bytes(Bytes::of_slice(&encoded))?;
        Ok(EncodedImage::named(encoded, name))
    }

    /// The encoded bytes or the decoded pixels, unchanged.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Width and height, if the bytes are pixels.
    pub fn pixel_size(&self) -> Option<PixelSize> {
        self.size
    }

    /// The file's name, if there is one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The file's name in the form that errors show.
    pub fn file_name(&self) -> FileName {
        FileName(self.name.clone())
    }
}

/// Omits the bytes, which are the user's data.
impl fmt::Debug for EncodedImage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("EncodedImage").field("name", &self.name).field("bytes", &self.bytes.len()).finish()
    }
}

/// Limits for one picture, checked before it is decoded. The envelope limits how many pictures
/// a request may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// Largest number of encoded bytes.
    pub bytes_max: Bytes,
    /// Largest number of pixels in the stored picture, before any resizing.
    pub pixels_max: u64,
    /// Largest number of host bytes that decoding may use at its peak.
    pub decode_bytes_max: Bytes,
}

/// 20 MiB encoded and 64 megapixels are enough for a phone's photograph. 768 MiB are enough to
/// decode 64 megapixels of 16-bit RGBA.
impl Default for ImageLimits {
    fn default() -> Self {
        ImageLimits { bytes_max: Bytes::mib(20), pixels_max: 64_000_000, decode_bytes_max: Bytes::mib(768) }
    }
}

impl ImageLimits {
    /// # Errors
    /// [`ImageError::TooManyBytes`].
    pub fn check_bytes(&self, bytes: Bytes) -> Result<(), ImageError> {
        if bytes > self.bytes_max {
            return Err(ImageError::TooManyBytes { bytes, bytes_max: self.bytes_max });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_are_taken_only_if_there_are_three_bytes_for_each() {
        let image = EncodedImage::from_rgb(2, 3, vec![9; 18]).expect("2 x 3 pixels");
        assert_eq!((image.bytes(), image.pixel_size()), (&[9; 18][..], Some(PixelSize { width: 2, height: 3 })));
        for found in [15, 17, 19] {
            let error =
                EncodedImage::from_rgb(2, 3, vec![9; found]).expect_err("the byte count does not match 2 x 3 pixels");
            assert_eq!(error, ImageError::PixelBytes { width: 2, height: 3, expected: 18, found: found as u64 });
        }
        for (width, height) in [(0, 3), (2, 0)] {
            let error = EncodedImage::from_rgb(width, height, vec![]).expect_err("a side of the image is 0");
            assert_eq!(error, ImageError::Empty { width, height });
        }
    }

    #[test]
    fn a_files_name_is_kept_for_errors_and_its_bytes_are_never_printed() {
        let named = EncodedImage::named(b"my secret".to_vec(), "cat.jpg");
        assert_eq!((named.name(), named.file_name().to_string()), (Some("cat.jpg"), " (cat.jpg)".to_owned()));
        assert_eq!(named.pixel_size(), None, "an encoded picture has no pixel size");
        assert_eq!(format!("{named:?}"), r#"EncodedImage { name: Some("cat.jpg"), bytes: 9 }"#);
        let unnamed = EncodedImage::new(b"my secret".to_vec());
        assert_eq!((unnamed.name(), unnamed.file_name().to_string()), (None, String::new()));
    }

    #[test]
    fn a_picture_may_have_as_many_bytes_as_the_limit_says() {
        let limits = ImageLimits { bytes_max: Bytes(20), ..ImageLimits::default() };
        assert_eq!((limits.check_bytes(Bytes(19)), limits.check_bytes(Bytes(20))), (Ok(()), Ok(())));
        let too_many = ImageError::TooManyBytes { bytes: Bytes(21), bytes_max: Bytes(20) };
        assert_eq!(limits.check_bytes(Bytes(21)), Err(too_many));
    }
}
