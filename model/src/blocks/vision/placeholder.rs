//! Pictures and videos in a prompt: one placeholder token per merged patch, and
//! positions on three axes.

use std::cmp::Ordering;

use super::PlaceholderTokens;
use crate::MergeSize;
use crate::flow::{Grid, LayoutError, MediaGrid, PlaceholderSpan, PromptLayout};
use crate::text::PlaceholderTexts;

/// The texts of pictures and videos in the prompts of Qwen's families.
pub const QWEN_PLACEHOLDERS: PlaceholderTexts = PlaceholderTexts {
    image: "<|image_pad|>",
    video: Some("<|video_pad|>"),
    before: "<|vision_start|>",
    after: "<|vision_end|>",
};

/// The placeholder tokens, and the settings that determine their number and positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placeholders {
    pub tokens: PlaceholderTokens,
    /// How patches merge into tokens.
    pub merge: MergeSize,
    pub video: VideoPlace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VideoPlace {
    /// One placeholder represents all steps of the video. The tokens of the steps are adjacent, and
    /// their time positions follow the time in the video.
    Timed {
        /// Frames of one time step.
        frames: usize,
        /// Positions on the time axis per second.
        tokens_per_second: usize,
    },
    /// One placeholder represents all steps of the video. The tokens of the steps are adjacent, and
    /// the time position increases by one with each step.
    Counted,
    /// Each step has a separate placeholder and is laid out like a picture. The time of the step
    /// precedes the placeholder as text.
    Written,
}

/// The greatest position on the time axis. Rotary angles are computed in f32, which represents
/// every whole number up to this value.
const TIME_MAX: f64 = (1u32 << 24) as f64;

impl VideoPlace {
    /// A step's offset on the time axis from the video's first step. For [`Timed`](Self::Timed),
    /// there are `tokens_per_second` positions per second, rounded down (arXiv 2502.13923, section
    /// 2.1.2). transformers 5.17 first truncates the seconds of a step to a whole number, so that
    /// steps share positions in a video of more than `frames` frames per second. The original
    /// release did not truncate the seconds, and transformers' pull request 48669 removes the
    /// truncation. This function divides only once, and the dividend is a whole number. Therefore
    /// rounding errors never turn a whole position into the one before it.
    fn time(self, step: usize, frames_per_second: f64) -> u32 {
        let position = match self {
            VideoPlace::Timed { frames, tokens_per_second } => {
                (step * frames * tokens_per_second) as f64 / frames_per_second
            }
            VideoPlace::Counted => step as f64,
            VideoPlace::Written => 0.0,
        };
        position.clamp(0.0, TIME_MAX) as u32
    }
}

/// Expands each placeholder of `tokens` to one token per embedding of its picture or video, and
/// gives every token its position. Text advances on all axes at once, a picture spans rows and
/// columns, and a video also spans time. The n-th image token represents the n-th picture of
/// `visuals`, and the n-th video token represents the n-th video, or for
/// [`Written`](VideoPlace::Written) the n-th step of all videos.
///
/// Text continues after the largest preceding position on any axis. The model was trained that way
/// (`get_rope_index` in transformers' pull request 35569, by the model's authors), and vLLM does
/// the same. In transformers 5.17, text can begin at positions of a video's later steps.
pub fn lay_out(tokens: &[u32], visuals: &[MediaGrid], words: &Placeholders) -> Result<PromptLayout, LayoutError> {
    let (pictures, mut videos) = by_kind(visuals);
    if let (None, false) = (words.tokens.video, videos.is_empty()) {
        return Err(LayoutError::NoVideos { videos: videos.len() });
    }
    if words.video == VideoPlace::Written {
        videos = videos.into_iter().flat_map(steps_of).collect();
    }
    check_counts(tokens, words, pictures.len(), videos.len())?;
    let (mut pictures, mut videos) = (pictures.into_iter(), videos.into_iter());
    let mut layout = PromptLayout::default();
    for token in tokens {
        let next = layout.next_position;
        if *token == words.tokens.image
            && let Some((picture, grid)) = pictures.next()
        {
            layout.push_step(picture, *token, &grid, [next; 3], words.merge);
            layout.next_position = layout.behind();
        } else if Some(*token) == words.tokens.video
            && let Some(video) = videos.next()
        {
            layout.push_video(video, *token, words);
            layout.next_position = layout.behind();
        } else {
            layout.tokens.push(*token);
            layout.positions.push([next; 3]);
            layout.next_position += 1;
        }
    }
    Ok(layout)
}

/// Refuses a prompt in which the number of image placeholders is not `pictures`, or the number of
/// video placeholders is not `videos`.
fn check_counts(tokens: &[u32], words: &Placeholders, pictures: usize, videos: usize) -> Result<(), LayoutError> {
    let count = |word: Option<u32>| tokens.iter().filter(|token| Some(**token) == word).count();
    let (of_pictures, of_videos) = (count(Some(words.tokens.image)), count(words.tokens.video));
    let wrong_videos = match words.video {
        VideoPlace::Written => LayoutError::StepPlaceholders { placeholders: of_videos, steps: videos },
        VideoPlace::Timed { .. } | VideoPlace::Counted => {
            LayoutError::VideoPlaceholders { placeholders: of_videos, videos }
        }
    };
    match (of_pictures.cmp(&pictures), of_videos.cmp(&videos)) {
        (Ordering::Equal, Ordering::Equal) => Ok(()),
        (Ordering::Greater, _) => Err(LayoutError::MorePlaceholders { pictures }),
        (Ordering::Less, Ordering::Less | Ordering::Equal) => {
            Err(LayoutError::FewerPlaceholders { placeholders: of_pictures, pictures })
        }
        (_, Ordering::Greater | Ordering::Less) => Err(wrong_videos),
    }
}

/// Index of the first step, grid of a step, steps, frames per second.
type PlacedVideo = (usize, Grid, usize, f64);

/// Separates pictures and videos. Each entry has an index into the pictures that the encoder
/// processes. The index of a video is the index of its first step.
fn by_kind(visuals: &[MediaGrid]) -> (Vec<(usize, Grid)>, Vec<PlacedVideo>) {
    let (mut pictures, mut videos) = (Vec::new(), Vec::new());
    let mut first = 0;
    for visual in visuals {
        match *visual {
            MediaGrid::Image(grid) => pictures.push((first, grid)),
            MediaGrid::Tiles { .. } => unreachable!("a family with tiles has another layout"),
            MediaGrid::Video { step, steps, frames_per_second, .. } => {
                videos.push((first, step, steps, frames_per_second));
            }
        }
        first += visual.pictures();
    }
    (pictures, videos)
}

/// Each step of a video as a video of one step.
fn steps_of((first, step, steps, frames_per_second): PlacedVideo) -> impl Iterator<Item = PlacedVideo> {
    (0..steps).map(move |index| (first + index, step, 1, frames_per_second))
}

impl PromptLayout {
    /// The first position after the last picture or video. The last merged patch of a picture, or
    /// of a video's last step, has the largest position on each axis.
    fn behind(&self) -> u32 {
        self.positions.last().into_iter().flatten().max().map_or(0, |largest| largest + 1)
    }

    /// Appends the steps of a video that begins at the next position.
    fn push_video(&mut self, video: PlacedVideo, token: u32, words: &Placeholders) {
        let ((first, step, steps, frames_per_second), next) = (video, self.next_position);
        for index in 0..steps {
            let time = (next + words.video.time(index, frames_per_second)).min((TIME_MAX as u32).max(next));
            self.push_step(first + index, token, &step, [time, next, next], words.merge);
        }
    }

    /// Appends a picture, or a step of a video, whose first merged patch has the position `begin`.
    fn push_step(&mut self, picture: usize, token: u32, grid: &Grid, begin: [u32; 3], merge: MergeSize) {
        let (rows, columns) = grid.merged(merge);
        let first = self.tokens.len();
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            self.tokens.push(token);
            self.positions.push([begin[0], begin[1] + row as u32, begin[2] + column as u32]);
        }
        self.pictures.push(PlaceholderSpan { picture, tokens: first..self.tokens.len() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: u32 = 99;
    const VIDEO: u32 = 98;

    fn words() -> Placeholders {
        let tokens = PlaceholderTokens { image: IMAGE, video: Some(VIDEO) };
        Placeholders { tokens, merge: MergeSize::new(2), video: VideoPlace::Timed { frames: 2, tokens_per_second: 2 } }
    }

    fn still(h: u32, w: u32) -> Grid {
        Grid { t: 1, h, w }
    }

    fn video(steps: usize, frames_per_second: f64) -> MediaGrid {
        MediaGrid::Video { step: still(2, 4), steps, frames: 2 * steps, frames_per_second } // 1 x 2 embeddings a step
    }

    #[test]
    fn text_goes_on_after_the_largest_position_of_a_picture() {
        let grid = MediaGrid::Image(still(4, 6)); // 2 x 3 embeddings
        let layout = lay_out(&[1, IMAGE, 2], &[grid], &words()).unwrap();
        assert_eq!(layout.tokens, [1, 99, 99, 99, 99, 99, 99, 2]);
        assert_eq!(layout.pictures, [PlaceholderSpan { picture: 0, tokens: 1..7 }]);
        assert_eq!(layout.positions[1..7], [[1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3]]);
        assert_eq!((layout.positions[7], layout.next_position), ([4, 4, 4], 5));
    }

    #[test]
    fn a_video_stands_in_one_run_and_its_steps_follow_the_clock() {
        let layout = lay_out(&[7, VIDEO, 8], &[video(3, 1.0)], &words()).unwrap();
        assert_eq!(layout.tokens, [7, 98, 98, 98, 98, 98, 98, 8]);
        let spans = [1..3, 3..5, 5..7].into_iter().enumerate();
        let spans: Vec<_> = spans.map(|(picture, tokens)| PlaceholderSpan { picture, tokens }).collect();
        assert_eq!(layout.pictures, spans);
        // Two seconds per step, two positions per second.
        assert_eq!(layout.positions[1..7], [[1, 1, 1], [1, 1, 2], [5, 1, 1], [5, 1, 2], [9, 1, 1], [9, 1, 2]]);
        // Text continues after the last step's time.
        assert_eq!((layout.positions[7], layout.next_position), ([10, 10, 10], 11));
    }

    #[test]
    fn steps_of_a_counted_video_follow_each_other_whatever_the_clock_says() {
        let words = Placeholders { video: VideoPlace::Counted, ..words() };
        let layout = lay_out(&[VIDEO, 8], &[video(3, 0.1)], &words).unwrap();
        assert_eq!(layout.positions, [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1], [2, 0, 0], [2, 0, 1], [3, 3, 3]]);
    }

    #[test]
    fn fractions_of_a_position_add_up_before_they_are_cut() {
        let times = |frames_per_second| {
            let layout = lay_out(&[VIDEO], &[video(4, frames_per_second)], &words()).unwrap();
            [0, 2, 4, 6].map(|token| layout.positions[token][0])
        };
        assert_eq!(times(3.0), [0, 1, 2, 4]);
        assert_eq!(times(8.0), [0, 0, 1, 1]);
        assert_eq!(times(24.0), [0, 0, 0, 0]);
        // 0.6 has no exact f64 representation, but no whole position is rounded down
        // to the previous number.
        assert_eq!(times(0.6), [0, 6, 13, 20]);
        assert_eq!(times(f64::MIN_POSITIVE), [0, 1 << 24, 1 << 24, 1 << 24]);
    }

    #[test]
    fn many_videos_of_years_go_no_further_than_one() {
        let videos = vec![video(2, f64::MIN_POSITIVE); 300];
        let layout = lay_out(&[VIDEO; 300], &videos, &words()).expect("each video has its placeholder");
        let furthest = layout.positions.iter().flatten().max().copied();
        assert!((1 << 24..(1 << 24) + 1200).contains(&furthest.expect("positions")), "{furthest:?}");
    }

    #[test]
    fn pictures_and_videos_are_counted_apart_and_numbered_together() {
        let picture = MediaGrid::Image(still(2, 2));
        // The template shows the video first, but the request names the picture first.
        let layout = lay_out(&[VIDEO, IMAGE, VIDEO], &[picture, video(2, 2.0), video(1, 2.0)], &words()).unwrap();
        let numbers: Vec<usize> = layout.pictures.iter().map(|span| span.picture).collect();
        assert_eq!(numbers, [1, 2, 0, 3]);
        assert_eq!(layout.tokens, [98, 98, 98, 98, 99, 98, 98]);
    }

    #[test]
    fn steps_of_written_videos_stand_like_pictures_wherever_their_placeholders_are() {
        let words = Placeholders { video: VideoPlace::Written, ..words() };
        let picture = MediaGrid::Image(still(2, 4));
        let layout =
            lay_out(&[1, VIDEO, 2, VIDEO, IMAGE, VIDEO], &[video(2, 2.0), picture, video(1, 2.0)], &words).unwrap();
        assert_eq!(layout.tokens, [1, 98, 98, 2, 98, 98, 99, 99, 98, 98]);
        let numbers: Vec<usize> = layout.pictures.iter().map(|span| span.picture).collect();
        assert_eq!(numbers, [0, 1, 2, 3]);
        assert_eq!(layout.positions[1..6], [[1, 1, 1], [1, 1, 2], [3, 3, 3], [4, 4, 4], [4, 4, 5]]);
        assert_eq!(layout.next_position, 10);
        let refused = |tokens: &[u32]| lay_out(tokens, &[video(3, 2.0)], &words).unwrap_err();
        assert_eq!(refused(&[VIDEO]), LayoutError::StepPlaceholders { placeholders: 1, steps: 3 });
        assert_eq!(refused(&[VIDEO; 4]), LayoutError::StepPlaceholders { placeholders: 4, steps: 3 });
    }

    #[test]
    fn placeholders_pictures_and_videos_must_match() {
        let picture = MediaGrid::Image(still(2, 2));
        let refused = |tokens: &[u32], visuals: &[MediaGrid]| lay_out(tokens, visuals, &words()).unwrap_err();
        assert_eq!(refused(&[IMAGE, IMAGE], &[picture]), LayoutError::MorePlaceholders { pictures: 1 });
        assert_eq!(refused(&[1], &[picture]), LayoutError::FewerPlaceholders { placeholders: 0, pictures: 1 });
        assert_eq!(
            refused(&[VIDEO, VIDEO], &[video(1, 2.0)]),
            LayoutError::VideoPlaceholders { placeholders: 2, videos: 1 }
        );
        assert_eq!(refused(&[IMAGE], &[video(1, 2.0)]), LayoutError::MorePlaceholders { pictures: 0 });
        assert_eq!(
            refused(&[VIDEO], &[video(1, 2.0), video(1, 2.0)]),
            LayoutError::VideoPlaceholders { placeholders: 1, videos: 2 }
        );
        let mute = Placeholders { tokens: PlaceholderTokens { image: IMAGE, video: None }, ..words() };
        assert_eq!(lay_out(&[VIDEO], &[video(1, 2.0)], &mute), Err(LayoutError::NoVideos { videos: 1 }));
    }
}
