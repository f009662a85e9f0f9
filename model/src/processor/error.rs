//! Why a picture or the settings of its processor are refused.

use thiserror::Error;

use crate::flow::FileName;

/// Why a picture was refused, before or while decoding it.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ImageError {
    /// The file could not be read.
    #[error("the picture {name} could not be read: {kind}")]
    Unreadable {
        /// The file's name.
        name: String,
        /// The kind of input error.
        kind: std::io::ErrorKind,
    },
    /// The encoded bytes exceed the limit.
    #[error("the encoded picture has {bytes} bytes, the limit is {bytes_max}")]
    TooManyBytes {
        /// Encoded bytes.
        bytes: u64,
        /// Their limit.
        bytes_max: u64,
    },
    /// The header announces more pixels than the limit; nothing was decoded.
    #[error("the picture is {width} x {height} = {pixels} pixels, the limit is {pixels_max}")]
    TooManyPixels {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Their product.
        pixels: u64,
        /// Its limit.
        pixels_max: u64,
    },
    /// Decoding would take more host memory than the limit; nothing was decoded.
    #[error("decoding the picture takes {bytes} bytes of host memory, the limit is {bytes_max}")]
    TooMuchDecodeMemory {
        /// Host bytes at the peak.
        bytes: u64,
        /// Their limit.
        bytes_max: u64,
    },
    /// Of none of the formats that are read.
    #[error("the picture is none of PNG, JPEG, WebP, GIF, BMP and TIFF")]
    UnknownFormat,
    /// A side is zero.
    #[error("the picture is {width} x {height} pixels: a side is empty")]
    Empty {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// Another number of bytes than the pixels take that they are said to be.
    #[error("{found} bytes are no {width} x {height} pixels of three bytes, which are {expected}")]
    PixelBytes {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Bytes that they take.
        expected: u64,
        /// Bytes that were given.
        found: u64,
    },
    /// The bytes do not follow their format.
    #[error("the {format} picture is damaged or uses what is not supported, found while {stage}")]
    Damaged {
        /// PNG, JPEG, WebP, GIF, BMP or TIFF.
        format: &'static str,
        /// Where it was found: reading the header, counting a JPEG's scans, looking for a GIF's first frame, or decoding the pixels.
        stage: &'static str,
    },
    /// Too long and thin for the model's processor.
    #[error("the picture's sides {width} x {height} have the ratio {ratio:.1}, the limit is {ratio_max}")]
    AspectRatio {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// The longer side over the shorter.
        ratio: f64,
        /// Its limit.
        ratio_max: f64,
    },
    /// The processor may not resize, and the picture does not divide into whole patches.
    #[error(
        "the picture is {width} x {height} pixels and must be a multiple of {multiple} a side, as `do_resize` is off"
    )]
    NotAMultiple {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Pixels of a merged patch's side.
        multiple: u32,
    },
    /// The processor's settings give this picture no pixel, or more than can be counted.
    #[error("the processor's pixel limits give the {width} x {height} picture no usable size")]
    NoSize {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
    },
}

impl ImageError {
    /// What the user could change.
    pub fn hint(&self) -> String {
        match self {
            ImageError::Unreadable { .. } => "check the path and that the file may be read".into(),
            ImageError::TooManyBytes { .. } => "compress the picture more, or raise `ImageLimits::bytes_max`".into(),
            ImageError::TooManyPixels { .. } => "scale the picture down, or raise `ImageLimits::pixels_max`".into(),
            ImageError::TooMuchDecodeMemory { .. } => "scale the picture down, or save it with 8 bits a channel".into(),
            ImageError::UnknownFormat => "convert the picture to PNG, JPEG, WebP, GIF, BMP or TIFF".into(),
            ImageError::PixelBytes { .. } => {
                "give red, green and blue of each pixel, row by row without gaps, and no alpha".into()
            }
            ImageError::Empty { .. } | ImageError::Damaged { .. } => "save the picture again from its source".into(),
            ImageError::AspectRatio { ratio_max, .. } => {
                format!("crop the picture or cut it into pieces: no side may be over {ratio_max} times the other")
            }
            ImageError::NotAMultiple { multiple, .. } => {
                format!("scale the picture to multiples of {multiple}, or set `do_resize` to true")
            }
            ImageError::NoSize { .. } => "raise `min_pixels` above zero in preprocessor_config.json".into(),
        }
    }
}

/// Why a video was refused, before or while decoding it.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum VideoError {
    /// It has no frame.
    #[error("the video has no frames")]
    NoFrames,
    /// Its rate is zero, negative, endless or not a number.
    #[error("the video has {frames_per_second} frames a second, which must be above 0 and finite")]
    FrameRate {
        /// The rate.
        frames_per_second: f64,
    },
    /// The request's videos have more frames together than the limit.
    #[error("the videos have {frames} frames together, the limit is {limit}")]
    TooManyFrames {
        /// Of all videos of the request.
        frames: usize,
        /// Of the envelope.
        limit: usize,
    },
    /// A frame is broken or outside the limits of pictures.
    #[error("frame {frame}{file}: {source}")]
    Frame {
        /// Which, from 0.
        frame: usize,
        /// Its file, if it has one.
        file: FileName,
        /// What is wrong with it.
        source: ImageError,
    },
    /// A frame has another size than the first.
    #[error("frame {frame} is {width} x {height} pixels, the first is {first_width} x {first_height}")]
    FrameSize {
        /// Which, from 0.
        frame: usize,
        /// Its pixels in a row.
        width: u32,
        /// Its rows.
        height: u32,
        /// The first frame's pixels in a row.
        first_width: u32,
        /// The first frame's rows.
        first_height: u32,
    },
    /// What a step of the video may take, after the request's pictures, is less than it takes at its smallest.
    #[error("a step of the video takes {patches} patches after resizing, of which {limit} are left for it")]
    TooLarge {
        /// Patches of a step at the smallest.
        patches: usize,
        /// Patches that are left, shared by all steps of the request's videos.
        limit: usize,
    },
}

impl VideoError {
    /// What the user could change.
    pub fn hint(&self) -> String {
        match self {
            VideoError::NoFrames => "give the video at least one frame".into(),
            VideoError::FrameRate { .. } => "say how many of these frames make a second, 2.0 for example".into(),
            VideoError::TooManyFrames { limit, .. } => {
                format!("pick at most {limit} frames, at a lower rate, or raise `video_frames`")
            }
            VideoError::Frame { source, .. } => source.hint(),
            VideoError::FrameSize { .. } => "cut the video where its size changes, or scale its frames alike".into(),
            VideoError::TooLarge { .. } => {
                "send fewer frames or pictures, crop thin frames, or raise `pictures` or `picture_patches`".into()
            }
        }
    }
}

/// Why what a request shows was refused.
#[derive(Debug, Error, PartialEq)]
pub enum VisualError {
    /// More pictures than a request may have.
    #[error("the chat has {pictures} pictures, at most {limit} are allowed")]
    TooManyPictures {
        /// Of the request.
        pictures: usize,
        /// Of the envelope.
        limit: usize,
    },
    /// A picture is broken or outside the limits.
    #[error("picture {index}{file}: {source}")]
    Picture {
        /// Which picture of the request, from 0.
        index: usize,
        /// Its file, if it has one.
        file: FileName,
        /// What is wrong with it.
        source: ImageError,
    },
    /// A picture is larger than the envelope even after resizing, because it is so thin.
    #[error("picture {index}{file} takes {patches} patches after resizing, at most {limit} are allowed")]
    PictureTooLarge {
        /// Which picture of the request, from 0.
        index: usize,
        /// Its file, if it has one.
        file: FileName,
        /// It would have.
        patches: usize,
        /// Of the envelope.
        limit: usize,
    },
    /// A video is broken or outside the limits.
    #[error("video {index}: {source}")]
    Video {
        /// Which video of the request, from 0.
        index: usize,
        /// What is wrong with it.
        source: VideoError,
    },
}

impl VisualError {
    /// What the user could change.
    pub fn hint(&self) -> String {
        match self {
            VisualError::TooManyPictures { limit, .. } => format!("send at most {limit} pictures, or raise `pictures`"),
            VisualError::Picture { source, .. } => source.hint(),
            VisualError::PictureTooLarge { .. } => {
                "cut the picture so that it is less thin, or raise `picture_patches`".into()
            }
            VisualError::Video { source, .. } => source.hint(),
        }
    }
}

/// Why the settings in `preprocessor_config.json` or `video_preprocessor_config.json` cannot be followed.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ProcessorError {
    /// Not the JSON that is expected.
    #[error("the processor's settings are not understood at line {line}, column {column}")]
    Malformed {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// Another model family's processor.
    #[error("the processor {found} is not known, known are {known}")]
    UnknownProcessor {
        /// The type in the file.
        found: String,
        /// The types that are implemented.
        known: String,
    },
    /// A way of resampling that is not implemented.
    #[error("`resample` is {resample}, known are 2 (bilinear) and 3 (bicubic)")]
    UnknownResample {
        /// PIL's number of the filter.
        resample: i64,
    },
    /// A setting outside its range.
    #[error("`{setting}` is {value}, which must be {range}")]
    OutOfRange {
        /// The setting's name in the file.
        setting: &'static str,
        /// What stands there.
        value: String,
        /// What may stand there.
        range: &'static str,
    },
}

impl ProcessorError {
    /// What the user could change.
    pub fn hint(&self) -> String {
        match self {
            ProcessorError::Malformed { .. } => {
                "download preprocessor_config.json (and video_preprocessor_config.json) again".into()
            }
            ProcessorError::UnknownProcessor { known, .. } => {
                format!("this checkpoint's family is not supported; load one whose processor is {known}")
            }
            ProcessorError::UnknownResample { .. } => {
                "set `resample` to 3 if the model was trained with bicubic".into()
            }
            ProcessorError::OutOfRange { setting, range, .. } => {
                format!("correct `{setting}` in preprocessor_config.json: {range}")
            }
        }
    }
}
