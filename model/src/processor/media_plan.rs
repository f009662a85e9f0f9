//! Plans of a request's pictures and videos. Pictures are planned first, and videos share
//! the patches that remain.

use bursar_budgets::Bytes;

use super::error::{MediaError, VideoError};
use super::header::DecodeCost;
use super::image_processor::{EncoderInput, ImageProcessor, ResizePlan};
use super::smart_resize::Size;
use super::video_processor::{VideoPlan, VideoProcessor};
use crate::Envelope;
use crate::flow::{EncodedImage, ImageLimits, Media, MediaGrid, PictureHash, Video};

#[derive(Clone, Debug)]
pub struct MediaProcessors {
    /// The picture processor, limited to the envelope.
    pub pictures: ImageProcessor,
    /// The video processor. Each plan limits it to the patches that the pictures leave. `None` if
    /// the checkpoint takes no videos.
    pub videos: Option<VideoProcessor>,
    /// Maximum number of text tokens that a prompt has for each step of a video of usual length, in
    /// addition to the tokens of the step.
    pub step_text_tokens: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct MediaLimits<'a> {
    /// The envelope, which limits the number of pictures and videos, and their patches.
    pub envelope: &'a Envelope,
    /// The limits that a picture or a frame is checked against before it is decoded.
    pub image: &'a ImageLimits,
}

#[derive(Clone, Debug)]
pub enum MediaPlan {
    Image {
        picture: EncodedImage,
        /// Sizes of the picture after processing.
        plan: ResizePlan,
        /// Host bytes that decoding takes.
        cost: DecodeCost,
        /// The cache key, equal for equal bytes, grids and salts.
        key: MediaKey,
    },
    Video {
        video: Video,
        /// Sizes of the video after processing.
        plan: VideoPlan,
        /// The cache key, equal for equal frames, grids and salts.
        key: MediaKey,
    },
}

/// BLAKE3 hash over the user's files or pixels, the kind of media, and the grid after resizing.
/// With the same processors, equal keys mean equal encoder inputs. So equal inputs are detected
/// before anything is decoded. (A [`PictureHash`] also finds equal pictures in different files.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MediaKey {
    file: [u8; 32],
    /// Hash of the cache salt. `None` if the request has no salt.
    salt: Option<[u8; 32]>,
}

impl MediaKey {
    fn of(frames: &[EncodedImage], grid: MediaGrid) -> Self {
        // A video of one frame differs from the same picture, because videos have their own
        // processor.
        let kind = match grid {
            MediaGrid::Image(_) => [0; 3],
            MediaGrid::Video { .. } => [1, 0, 0],
            MediaGrid::Tiles { tiles, .. } => [2, tiles.columns, tiles.rows],
        };
        let step = grid.each();
        let mut hasher = blake3::Hasher::new();
        let sizes = [step.t, step.h, step.w, grid.pictures() as u32, frames.len() as u32];
        for size in kind.into_iter().chain(sizes) {
            hasher.update(&size.to_le_bytes());
        }
        for frame in frames {
            // The pixel size distinguishes a picture given as pixels from a file
            // with the same bytes.
            let size = frame.pixel_size().map_or([0; 2], |size| [size.width, size.height]);
            for side in size {
                hasher.update(&side.to_le_bytes());
            }
            hasher.update(&(frame.bytes().len() as u64).to_le_bytes());
            hasher.update(frame.bytes());
        }
        MediaKey { file: *hasher.finalize().as_bytes(), salt: None }
    }

    /// Cache key of one picture of this item: the picture's hash, keyed with the salt
    /// if there is one.
    fn name(&self, picture: PictureHash) -> PictureHash {
        match &self.salt {
            None => picture,
            Some(salt) => PictureHash(*blake3::keyed_hash(salt, &picture.0).as_bytes()),
        }
    }
}

impl MediaPlan {
    /// The grid that the placeholder expands to.
    pub fn grid(&self) -> MediaGrid {
        match self {
            MediaPlan::Image { plan, .. } => plan.visual(),
            MediaPlan::Video { plan, .. } => plan.grid(),
        }
    }

    pub fn key(&self) -> MediaKey {
        match self {
            MediaPlan::Image { key, .. } | MediaPlan::Video { key, .. } => *key,
        }
    }

    /// Restricts the sharing of cache entries to requests with the same salt, so that other
    /// requests cannot find out whether this picture is cached.
    pub fn salted(mut self, salt: &str) -> Self {
        let (MediaPlan::Image { key, .. } | MediaPlan::Video { key, .. }) = &mut self;
        key.salt = Some(*blake3::hash(salt.as_bytes()).as_bytes());
        self
    }

    /// Host bytes of the resized frames, which remain until they are encoded.
    pub fn patches_bytes(&self) -> Bytes {
        match self {
            MediaPlan::Image { plan, .. } => plan.patches_bytes(),
            MediaPlan::Video { plan, .. } => plan.patches_bytes(),
        }
    }

    /// Peak host bytes of processing. For a picture, these bytes include its resized pixels.
    pub fn decoding_bytes(&self) -> Bytes {
        match self {
            MediaPlan::Image { plan, cost, .. } => cost.peak_bytes().max(cost.rgb_bytes + plan.host_bytes),
            MediaPlan::Video { plan, .. } => plan.decoding_bytes,
        }
    }
}

impl MediaProcessors {
    /// Plans all pictures and videos of a request. Reads the headers of files and hashes their
    /// bytes. Pictures are resized to at most `picture_patches` each. The patches of pictures and
    /// the text between steps are subtracted from [`Envelope::video_patches`]. The steps of the
    /// videos share the rest evenly, and no step has more patches than a picture may have.
    /// Therefore the vision cache has enough rows, and an encoder batch has enough patches, for any
    /// request.
    ///
    /// # Errors
    /// The first picture or video outside the limits, with the limit and the value.
    pub fn plan(&self, visuals: &[Media], limits: MediaLimits<'_>) -> Result<Vec<MediaPlan>, MediaError> {
        self.check_counts(visuals, limits.envelope)?;
        let pictures = visuals.iter().filter_map(|visual| match visual {
            Media::Image(picture) => Some(picture),
            Media::Video(_) => None,
        });
        let pictures = pictures.enumerate().map(|(index, picture)| self.plan_picture(index, picture, limits));
        let pictures = pictures.collect::<Result<Vec<_>, _>>()?;
        let taken = pictures.iter().map(|plan| plan.grid().patches()).sum();
        let merge = self.pictures.config().merge();
        let limit = limits.envelope.visual_patches(merge);
        if taken > limit {
            return Err(MediaError::PicturesTooLarge { tokens: merge.tokens(taken), limit: merge.tokens(limit) });
        }
        let step_patches_max = self.step_patches_max(visuals, taken, limits.envelope);
        let (mut pictures, mut index) = (pictures.into_iter(), 0);
        let plan = |visual: &Media| match visual {
            Media::Image(_) => Ok(pictures.next().expect("each picture is planned")),
            Media::Video(video) => {
                let videos = self.of_videos();
                let plan = videos.and_then(|videos| videos.plan(video, limits.image, step_patches_max));
                let plan = plan.map_err(|source| MediaError::Video { index, source })?;
                index += 1;
                let key = MediaKey::of(video.frames(), plan.grid());
                Ok(MediaPlan::Video { video: video.clone(), plan, key })
            }
        };
        visuals.iter().map(plan).collect()
    }

    /// Maximum patches of each step of the videos if the pictures have `taken` patches.
    fn step_patches_max(&self, visuals: &[Media], taken: usize, envelope: &Envelope) -> usize {
        let Some(videos) = &self.videos else { return 0 };
        let steps: usize = frames_of_videos(visuals).map(|frames| videos.steps(frames)).sum();
        let text_tokens = steps.saturating_mul(self.step_text_tokens);
        let left = envelope.video_patches(self.pictures.config().merge(), text_tokens).saturating_sub(taken);
        (left / steps.max(1)).min(envelope.picture_patches)
    }

    fn check_counts(&self, visuals: &[Media], envelope: &Envelope) -> Result<(), MediaError> {
        let pictures = visuals.iter().filter(|visual| matches!(visual, Media::Image(_))).count();
        if pictures > envelope.pictures {
            return Err(MediaError::TooManyPictures { pictures, limit: envelope.pictures });
        }
        let limit = envelope.video_frames;
        let frames: usize = frames_of_videos(visuals).sum();
        let mut so_far = 0;
        for (index, of_video) in frames_of_videos(visuals).enumerate() {
            so_far += of_video;
            let source = match of_video {
                _ if self.videos.is_none() => VideoError::NoProcessor,
                0 => VideoError::NoFrames,
                _ if so_far > limit => VideoError::TooManyFrames { frames, limit },
                _ => continue,
            };
            return Err(MediaError::Video { index, source });
        }
        Ok(())
    }

    fn of_videos(&self) -> Result<&VideoProcessor, VideoError> {
        self.videos.as_ref().ok_or(VideoError::NoProcessor)
    }

    fn plan_picture(
        &self,
        index: usize,
        picture: &EncodedImage,
        limits: MediaLimits<'_>,
    ) -> Result<MediaPlan, MediaError> {
        let error = |source| MediaError::Picture { index, file: picture.file_name(), source };
        let header = picture.probe(limits.image).map_err(error)?;
        let (source, limit) = (Size { width: header.width, height: header.height }, limits.envelope.picture_patches);
        let plan = self.pictures.plan_own(source, picture.own_limits(), limit).map_err(error)?;
        // Resizing can leave a very thin picture larger than the limit.
        let patches = plan.patches;
        if patches > limit {
            return Err(MediaError::PictureTooLarge { index, file: picture.file_name(), patches, limit });
        }
        let key = MediaKey::of(std::slice::from_ref(picture), plan.visual());
        Ok(MediaPlan::Image { picture: picture.clone(), plan, cost: header.cost, key })
    }

    /// Decodes, resizes and hashes the planned items for which `is_wanted` returns `true` for
    /// their index. Returns one result per picture, per tile, and per time step of a video, in the
    /// order of the request.
    ///
    /// # Errors
    /// If a file is damaged after its header, or the size of a frame differs from the plan.
    pub fn process(
        &self,
        plans: &[MediaPlan],
        limits: &ImageLimits,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Result<Vec<EncoderInput>, MediaError> {
        let (mut pictures, mut videos) = (0, 0);
        let mut processed: Vec<EncoderInput> = Vec::new();
        for (number, plan) in plans.iter().enumerate() {
            let first = processed.len();
            match plan {
                MediaPlan::Image { picture, plan, .. } => {
                    if is_wanted(number) {
                        let whole = picture.decode(limits).map(|decoded| self.pictures.process_planned(&decoded, plan));
                        let (index, file) = (pictures, picture.file_name());
                        processed.extend(whole.map_err(|source| MediaError::Picture { index, file, source })?);
                    }
                    pictures += 1;
                }
                MediaPlan::Video { video, plan, .. } => {
                    if is_wanted(number) {
                        let steps = self.of_videos().and_then(|videos| videos.process(video, plan, limits));
                        processed.extend(steps.map_err(|source| MediaError::Video { index: videos, source })?);
                    }
                    videos += 1;
                }
            }
            for picture in &mut processed[first..] {
                picture.hash = plan.key().name(picture.hash);
            }
        }
        Ok(processed)
    }
}

impl MediaError {
    /// Converts an error about the files after `before` to an error about the whole request. The
    /// index in the error is increased by the number of pictures or videos in `before`.
    #[must_use]
    pub fn after(mut self, before: &[MediaPlan]) -> Self {
        let videos = before.iter().filter(|plan| matches!(plan, MediaPlan::Video { .. })).count();
        match &mut self {
            MediaError::Picture { index, .. } | MediaError::PictureTooLarge { index, .. } => {
                *index += before.len() - videos;
            }
            MediaError::Video { index, .. } => *index += videos,
            MediaError::TooManyPictures { .. } | MediaError::PicturesTooLarge { .. } => {}
        }
        self
    }
}

fn frames_of_videos(visuals: &[Media]) -> impl Iterator<Item = usize> {
    visuals.iter().filter_map(|visual| match visual {
        Media::Video(video) => Some(video.frames().len()),
        Media::Image(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::{Grid, Tiles};

    #[test]
    fn a_media_key_depends_on_bytes_grid_and_kind() {
        let grid = Grid { t: 1, h: 4, w: 8 };
        let (file, other) = ([EncodedImage::new(&b"one"[..])], [EncodedImage::new(&b"other"[..])]);
        let key = MediaKey::of(&file, MediaGrid::Image(grid));
        assert_eq!(key, MediaKey::of(&file, MediaGrid::Image(grid)));
        assert_ne!(key, MediaKey::of(&other, MediaGrid::Image(grid)));
        assert_ne!(key, MediaKey::of(&file, MediaGrid::Image(Grid { h: 8, w: 4, ..grid })));
        let pixels = |width, height| [EncodedImage::from_rgb(width, height, &b"one two"[..6]).expect("two pixels")];
        let (wide, tall) = (pixels(2, 1), pixels(1, 2));
        let key = MediaKey::of(&wide, MediaGrid::Image(grid));
        assert_ne!(
            key,
            MediaKey::of(&tall, MediaGrid::Image(grid)),
            "the same bytes in rows of another length have another key"
        );
        assert_ne!(
            key,
            MediaKey::of(&[EncodedImage::new(&b"one tw"[..])], MediaGrid::Image(grid)),
            "the same bytes in a file have another key"
        );
        let key = MediaKey::of(&file, MediaGrid::Image(grid));
        let tiled = |columns, rows, has_thumbnail| {
            let tiles = Tiles { columns, rows, has_thumbnail };
            MediaKey::of(&file, MediaGrid::Tiles { tile: grid, tiles })
        };
        let keys = [key, tiled(1, 1, false), tiled(2, 1, false), tiled(1, 2, false), tiled(2, 1, true)];
        let distinct: std::collections::BTreeSet<_> = keys.into_iter().collect();
        assert_eq!(distinct.len(), keys.len(), "the same file in other tiles has another key");
        let video = MediaGrid::Video { step: grid, steps: 1, frames: 1, frames_per_second: 2.0 };
        assert_ne!(key, MediaKey::of(&file, video));
    }
}
