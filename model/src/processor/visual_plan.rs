//! What a request shows, planned together: pictures first, and videos within what they leave.

use super::error::{VideoError, VisualError};
use super::header::DecodeCost;
use super::image_processor::{ImageProcessor, PicturePlan, ProcessedPicture};
use super::video_processor::{VideoPlan, VideoProcessor};
use crate::Envelope;
use crate::flow::{ImageBytes, ImageLimits, Video, Visual, VisualGrid};

/// A model's processors.
#[derive(Clone, Debug)]
pub struct VisualProcessors {
    /// Of pictures, limited to the envelope.
    pub pictures: ImageProcessor,
    /// Of videos; each plan limits it to what is left.
    pub videos: VideoProcessor,
}

/// What a request's pictures and videos are held against.
#[derive(Clone, Copy, Debug)]
pub struct VisualLimits<'a> {
    /// How many, and how many patches.
    pub envelope: &'a Envelope,
    /// What a picture or a frame may be before it is decoded.
    pub image: &'a ImageLimits,
}

/// A picture or a video with what it becomes.
#[derive(Clone, Debug)]
pub enum VisualPlan {
    /// A still picture.
    Image {
        /// As it was handed over.
        picture: ImageBytes,
        /// What it becomes.
        plan: PicturePlan,
        /// What decoding it takes.
        cost: DecodeCost,
        /// The same for the same file and size.
        key: VisualKey,
    },
    /// A video.
    Video {
        /// As it was handed over.
        video: Video,
        /// What it becomes.
        plan: VideoPlan,
        /// The same for the same files and size.
        key: VisualKey,
    },
}

/// BLAKE3 over files or pixels as they were handed over, the grid they become, and whether they are a video: with one model's processors equal keys
/// mean equal pictures for the encoder, before anything is decoded. (A [`PictureHash`](crate::flow::PictureHash) finds
/// equal pictures in unequal files too.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VisualKey([u8; 32]);

impl VisualKey {
    fn of(frames: &[ImageBytes], grid: VisualGrid) -> Self {
        // A video of one frame is not the picture: it has a processor of its own.
        let (kind, step) = match grid {
            VisualGrid::Image(grid) => (0, grid),
            VisualGrid::Video { step, .. } => (1, step),
        };
        let mut hasher = blake3::Hasher::new();
        for size in [kind, step.t, step.h, step.w, grid.pictures() as u32, frames.len() as u32] {
            hasher.update(&size.to_le_bytes());
        }
        for frame in frames {
            // A file whose bytes are another picture's pixels is not that picture.
            let size = frame.pixel_size().map_or([0; 2], |size| [size.width, size.height]);
            for side in size {
                hasher.update(&side.to_le_bytes());
            }
            hasher.update(&(frame.bytes().len() as u64).to_le_bytes());
            hasher.update(frame.bytes());
        }
        VisualKey(*hasher.finalize().as_bytes())
    }
}

impl VisualPlan {
    /// What its placeholder grows to.
    pub fn grid(&self) -> VisualGrid {
        match self {
            VisualPlan::Image { plan, .. } => VisualGrid::Image(plan.grid),
            VisualPlan::Video { plan, .. } => plan.grid(),
        }
    }

    /// What it can be recognised by.
    pub fn key(&self) -> VisualKey {
        match self {
            VisualPlan::Image { key, .. } | VisualPlan::Video { key, .. } => *key,
        }
    }

    /// Host bytes of its patches, which stay until they are encoded: its resized frames.
    pub fn patches_bytes(&self) -> u64 {
        match self {
            VisualPlan::Image { plan, .. } => plan.patches_bytes(),
            VisualPlan::Video { plan, .. } => plan.patches_bytes(),
        }
    }

    /// Host bytes that processing takes at most at one time; of a picture its patches are among them.
    pub fn decoding_bytes(&self) -> u64 {
        match self {
            VisualPlan::Image { plan, cost, .. } => cost.peak_bytes().max(cost.rgb_bytes + plan.host_bytes),
            VisualPlan::Video { plan, .. } => plan.decoding_bytes,
        }
    }
}

impl VisualProcessors {
    /// Plans all that a request shows; of files headers are read, and all is hashed. Pictures are resized to
    /// `picture_patches` each. The steps of the videos share evenly what the pictures leave of [`Envelope::video_patches`], and none has more patches than a
    /// picture may: whatever a request shows, the vision cache has the rows and a launch the patches.
    ///
    /// # Errors
    /// Whatever is outside the limits, with the limit and the value.
    pub fn plan(&self, visuals: &[Visual], limits: VisualLimits<'_>) -> Result<Vec<VisualPlan>, VisualError> {
        self.check_counts(visuals, limits.envelope)?;
        let pictures = visuals.iter().filter_map(|visual| match visual {
            Visual::Image(picture) => Some(picture),
            Visual::Video(_) => None,
        });
        let pictures = pictures.enumerate().map(|(index, picture)| self.plan_picture(index, picture, limits));
        let pictures = pictures.collect::<Result<Vec<_>, _>>()?;
        let taken = pictures.iter().map(|plan| plan.grid().patches()).sum();
        let step_patches_max = self.step_patches_max(visuals, taken, limits.envelope);
        let (mut pictures, mut index) = (pictures.into_iter(), 0);
        let plan = |visual: &Visual| match visual {
            Visual::Image(_) => Ok(pictures.next().expect("each picture is planned")),
            Visual::Video(video) => {
                let plan = self.videos.plan(video, limits.image, step_patches_max);
                let plan = plan.map_err(|source| VisualError::Video { index, source })?;
                index += 1;
                let key = VisualKey::of(video.frames(), plan.grid());
                Ok(VisualPlan::Video { video: video.clone(), plan, key })
            }
        };
        visuals.iter().map(plan).collect()
    }

    /// What each step of the videos may take when the pictures have `taken` patches.
    fn step_patches_max(&self, visuals: &[Visual], taken: usize, envelope: &Envelope) -> usize {
        let merged = (self.pictures.config().merge_size as usize).pow(2);
        let left = envelope.video_patches(merged).saturating_sub(taken);
        let steps: usize = frames_of_videos(visuals).map(|frames| self.videos.steps(frames)).sum();
        (left / steps.max(1)).min(envelope.picture_patches)
    }

    fn check_counts(&self, visuals: &[Visual], envelope: &Envelope) -> Result<(), VisualError> {
        let pictures = visuals.iter().filter(|visual| matches!(visual, Visual::Image(_))).count();
        if pictures > envelope.pictures {
            return Err(VisualError::TooManyPictures { pictures, limit: envelope.pictures });
        }
        let limit = envelope.video_frames;
        let frames: usize = frames_of_videos(visuals).sum();
        let mut so_far = 0;
        for (index, of_video) in frames_of_videos(visuals).enumerate() {
            so_far += of_video;
            let source = match of_video {
                0 => VideoError::NoFrames,
                _ if so_far > limit => VideoError::TooManyFrames { frames, limit },
                _ => continue,
            };
            return Err(VisualError::Video { index, source });
        }
        Ok(())
    }

    fn plan_picture(
        &self,
        index: usize,
        picture: &ImageBytes,
        limits: VisualLimits<'_>,
    ) -> Result<VisualPlan, VisualError> {
        let error = |source| VisualError::Picture { index, file: picture.file_name(), source };
        let header = picture.probe(limits.image).map_err(error)?;
        let plan = self.pictures.plan(header.width, header.height).map_err(error)?;
        // A very thin picture comes out of the resizing larger than it was limited to.
        let (patches, limit) = (plan.patches, limits.envelope.picture_patches);
        if patches > limit {
            return Err(VisualError::PictureTooLarge { index, file: picture.file_name(), patches, limit });
        }
        let key = VisualKey::of(std::slice::from_ref(picture), VisualGrid::Image(plan.grid));
        Ok(VisualPlan::Image { picture: picture.clone(), plan, cost: header.cost, key })
    }

    /// Decodes, resizes and hashes what was planned: a picture for each picture and for each step of a video, in
    /// the order of the request.
    ///
    /// # Errors
    /// A file that is damaged behind its header.
    pub fn process(&self, plans: &[VisualPlan], limits: &ImageLimits) -> Result<Vec<ProcessedPicture>, VisualError> {
        let (mut pictures, mut videos) = (0, 0);
        let mut processed = Vec::new();
        for plan in plans {
            match plan {
                VisualPlan::Image { picture, .. } => {
                    let whole = picture.decode(limits).and_then(|decoded| self.pictures.process(&decoded));
                    let (index, file) = (pictures, picture.file_name());
                    processed.push(whole.map_err(|source| VisualError::Picture { index, file, source })?);
                    pictures += 1;
                }
                VisualPlan::Video { video, plan, .. } => {
                    let steps = self.videos.process(video, plan, limits);
                    processed.extend(steps.map_err(|source| VisualError::Video { index: videos, source })?);
                    videos += 1;
                }
            }
        }
        Ok(processed)
    }
}

fn frames_of_videos(visuals: &[Visual]) -> impl Iterator<Item = usize> {
    visuals.iter().filter_map(|visual| match visual {
        Visual::Video(video) => Some(video.frames().len()),
        Visual::Image(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Grid;

    #[test]
    fn a_file_is_known_by_its_bytes_its_size_and_whether_it_is_a_frame() {
        let grid = Grid { t: 1, h: 4, w: 8 };
        let (file, other) = ([ImageBytes::new(&b"one"[..])], [ImageBytes::new(&b"other"[..])]);
        let key = VisualKey::of(&file, VisualGrid::Image(grid));
        assert_eq!(key, VisualKey::of(&file, VisualGrid::Image(grid)));
        assert_ne!(key, VisualKey::of(&other, VisualGrid::Image(grid)));
        assert_ne!(key, VisualKey::of(&file, VisualGrid::Image(Grid { h: 8, w: 4, ..grid })));
        let pixels = |width, height| [ImageBytes::from_rgb(width, height, &b"one two"[..6]).expect("two pixels")];
        let (wide, tall) = (pixels(2, 1), pixels(1, 2));
        let key = VisualKey::of(&wide, VisualGrid::Image(grid));
        assert_ne!(key, VisualKey::of(&tall, VisualGrid::Image(grid)), "the same bytes in other rows");
        assert_ne!(key, VisualKey::of(&[ImageBytes::new(&b"one tw"[..])], VisualGrid::Image(grid)), "or in a file");
        let key = VisualKey::of(&file, VisualGrid::Image(grid));
        let video = VisualGrid::Video { step: grid, steps: 1, frames_per_second: 2.0 };
        assert_ne!(key, VisualKey::of(&file, video));
    }
}
