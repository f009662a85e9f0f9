//! A decoded picture: rows of red, green and blue bytes.

use std::fmt;

/// Pixels after decoding or resizing, 8 bits per channel, rows from the top.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    width: u32,
    height: u32,
    data: Vec<u8>, // [height, width, 3]
}

impl RgbImage {
    /// Returns `None` if a side is 0 or `data` does not have `height x width x 3` bytes.
    pub fn new(width: u32, height: u32, data: Vec<u8>) -> Option<Self> {
        let bytes = u64::from(width) * u64::from(height) * 3;
        (bytes > 0 && bytes == data.len() as u64).then_some(RgbImage { width, height, data })
    }

    pub fn width(&self) -> u32 {
        self.width
    }

    pub fn height(&self) -> u32 {
        self.height
    }

    /// `[height, width, 3]` u8.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Returns the bytes: `[height, width, 3]` u8.
    pub fn into_data(self) -> Vec<u8> {
        self.data
    }
}

/// Omits the pixels, which are the user's data.
impl fmt::Debug for RgbImage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RgbImage({} x {})", self.width, self.height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_three_bytes_a_pixel_and_prints_none() {
        let bytes: Vec<u8> = (0..18).collect();
        let image = RgbImage::new(2, 3, bytes.clone()).expect("2 x 3 pixels");
        assert_eq!((image.width(), image.height(), image.data()), (2, 3, &bytes[..]));
        assert_eq!(format!("{image:?}"), "RgbImage(2 x 3)");
        assert_eq!(image.into_data(), bytes);
        for (width, height, length) in [(2, 3, 17), (2, 3, 15), (0, 3, 0), (2, 0, 0)] {
            assert_eq!(RgbImage::new(width, height, vec![0; length]), None);
        }
    }
}
