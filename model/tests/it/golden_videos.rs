//! Videos with Qwen2.5-VL compared with results of transformers: frames, positions, embeddings,
//! logits and answers, with whole prompts, in chunks, and batched with others.

use bursar_model::{
    flow::{ImageLimits, MediaGrid, ResizedImage},
    processor::{ImageProcessorConfig, VideoProcessor},
};

use crate::bench::{
    self, Bench, Case, alone, assert_recorded, assert_same_run, cut, encode, relative_error, together, video,
};

const FOLDER: &str = "tests/golden/qwen2_5_vl";
const CASES: [&str; 5] = ["video_even", "video_odd_slow", "video_fraction", "video_and_picture", "two_videos"];

/// Cases with the recorded embeddings and pixels of a video, and the name of the video.
const FIRST_SHOWN: [(&str, &str); 3] = [("video_even", "even"), ("video_odd_slow", "odd"), ("video_fraction", "long")];

/// Largest error relative to the largest recorded number, as for pictures.
const REFERENCE_TOLERANCE: f32 = 1e-4;

/// Largest error between two ways to compute the same logits with this code, as for pictures.
const NOISE_TOLERANCE: f32 = 1e-5;

fn bench() -> Bench {
    Bench::load(FOLDER, 2)
}

fn cases(bench: &Bench) -> Vec<Case> {
    CASES.iter().map(|name| Case::read(FOLDER, &bench.checkpoint, name)).collect()
}

#[test]
fn prompts_grids_and_positions_match_the_recording() {
    let checkpoint = bench::open(FOLDER);
    for name in CASES {
        let case = Case::read(FOLDER, &checkpoint, name);
        let (mut pictures, mut videos) = (Vec::new(), Vec::new());
        for visual in &case.visuals {
            match visual {
                MediaGrid::Image(grid) => pictures.extend([grid.t, grid.h, grid.w].map(i64::from)),
                MediaGrid::Tiles { .. } => panic!("this family cuts no tiles"),
                MediaGrid::Video { step, steps, .. } => {
                    assert_eq!(step.t, 1, "{name}");
                    videos.extend([*steps as i64, i64::from(step.h), i64::from(step.w)]);
                }
            }
        }
        assert_eq!(pictures, case.integers("image_grid_thw").unwrap_or_default(), "{name}");
        assert_eq!(Some(videos), case.integers("video_grid_thw"), "{name}");
        case.assert_prompt_and_positions(&checkpoint);
    }
}

#[test]
fn resized_frames_match_the_recorded_bits_and_order() {
    let checkpoint = bench::open(FOLDER);
    let settings = checkpoint.video_processor.as_ref().expect("a video processor").config().clone();
    let bare = ImageProcessorConfig { do_rescale: false, do_normalize: false, ..settings };
    let processor = VideoProcessor::new(bare).expect("valid settings");
    let (video, limits) = (video("odd", 1.0), ImageLimits::default());
    let plan = processor.plan(&video, &limits, usize::MAX).expect("the video is planned");
    let steps = processor.process(&video, &plan, &limits).expect("the video is processed");
    assert_eq!((video.frames().len(), steps.len()), (3, 2), "the last frame is shown twice");
    let levels: Vec<f32> = steps.iter().flat_map(|step| cut(&step.image, processor.config())).collect();
    let recorded = Case::read(FOLDER, &checkpoint, "video_odd_slow").bytes("levels.odd").expect("levels");
    assert_eq!(levels, recorded.into_iter().map(f32::from).collect::<Vec<_>>());
}

#[test]
fn pixel_values_match_the_recording() {
    let checkpoint = bench::open(FOLDER);
    let settings = checkpoint.video_processor.as_ref().expect("a video processor").config();
    for (name, shown) in FIRST_SHOWN {
        let case = Case::read(FOLDER, &checkpoint, name);
        let pixels = case.images.iter().flat_map(|patches| cut(patches, settings));
        let probes: Vec<f32> = pixels.step_by(997).collect();
        assert_eq!(Some(probes), case.floats(&format!("pixel_probes.{shown}")), "{shown}");
    }
}

#[test]
fn video_step_embeddings_match_the_recording() {
    let bench = bench();
    for (name, shown) in FIRST_SHOWN {
        let case = Case::read(FOLDER, &bench.checkpoint, name);
        let recorded = case.floats(&format!("vision_embeddings.{shown}")).expect("embeddings");
        let rows = encode(&bench, &case);
        let found: Vec<f32> = rows.iter().flat_map(|rows| bench.embeddings(rows)).collect();
        let worst = relative_error(&found, &recorded);
        println!("embeddings of {shown}: {worst:.1e}");
        assert!(worst <= REFERENCE_TOLERANCE, "{shown}: {worst:e}");
        bench.forget(rows);
        // The reference runs all steps at once. A batch of only one step must give the same result.
        let first: Vec<&ResizedImage> = case.images.iter().take(1).collect();
        let rows = bench.encode(&first);
        let worst = relative_error(&bench.embeddings(&rows[0]), &found[..found.len() / case.images.len()]);
        assert!(worst <= NOISE_TOLERANCE, "the first step of {shown} encoded separately: {worst:e}");
        bench.forget(rows);
    }
}

#[test]
fn every_case_gets_the_recorded_logits_and_answer() {
    let bench = bench();
    for case in cases(&bench) {
        let rows = encode(&bench, &case);
        assert_recorded(&bench, &case, &rows, REFERENCE_TOLERANCE);
        bench.forget(rows);
    }
}

#[test]
fn chunking_and_batching_do_not_change_answers_about_videos() {
    let bench = bench();
    let cases = cases(&bench);
    let rows: Vec<_> = cases.iter().map(|case| encode(&bench, case)).collect();
    let whole: Vec<_> = cases.iter().zip(&rows).map(|(case, rows)| alone(&bench, case, rows, &[usize::MAX])).collect();
    for ((case, rows), whole) in cases.iter().zip(&rows).zip(&whole) {
        // Chunks that end inside a step, end with a step, and span several steps.
        for sizes in [&[1][..], &[17, 1, 29, 5]] {
            let chunked = alone(&bench, case, rows, sizes);
            assert_same_run(&format!("{} in chunks of {sizes:?}", case.name), &chunked, whole, NOISE_TOLERANCE);
        }
    }
    let company: Vec<_> = cases.iter().zip(rows).collect();
    for ((case, run), whole) in cases.iter().zip(together(&bench, &company, 5, 3)).zip(&whole) {
        assert_same_run(&format!("{} among all", case.name), &run, whole, NOISE_TOLERANCE);
    }
}
