//! Qwen3-VL, Qwen2-VL, Qwen3.5, InternVL, Gemma 3 and Gemma 4 compared with results of transformers: prompts
//! including the text around pictures and videos, positions, vision cache rows, logits and answers,
//! with whole prompts, in chunks, and batched with others. `qwen3_vl` has tower heads of 64, a tied
//! head, and one decoder layer more than DeepStack features. `qwen3_vl_72` has tower heads of 72,
//! and a DeepStack feature that is added after its last decoder layer. `qwen3_vl_moe` has experts.
//! `qwen2_vl` has tower heads of 80. `internvl` has InternViT-300M's layers and transformers'
//! names. `internvl_chat` has the layers of InternViT-6B and the released names, settings and
//! template.

use bursar_model::{
    flow::{ImageLimits, MediaGrid, ResizedImage},
    processor::{ImageProcessorConfig, VideoProcessor},
    registry::FamilyConfig,
};

use crate::bench::{
    self, Bench, Case, alone, assert_recorded, assert_same_run, cut, encode, relative_error, together, video,
    whatever_is_wanted,
};

const FOLDER: &str = "tests/golden/qwen3_vl";
/// Checkpoints with gated delta nets. The second has experts and a shared expert.
const HYBRIDS: [&str; 2] = ["tests/golden/qwen3_5", "tests/golden/qwen3_5_moe"];
const GEMMA: &str = "tests/golden/gemma3";
const FOLDERS: [(&str, &[&str]); 12] = [
    (
        FOLDER,
        &[
            "single_image",
            "several_images",
            "two_turns",
            "same_image_twice",
            "text_only",
            "long_text",
            "video_even",
            "video_odd_slow",
            "video_fraction",
            "video_and_picture",
            "two_videos",
        ],
    ),
    ("tests/golden/qwen3_vl_72", &["several_images", "two_turns", "video_even"]),
    // The experts of this checkpoint are released as one tensor per layer, with swapped axes.
    ("tests/golden/qwen3_vl_moe", &["several_images", "two_turns", "video_even"]),
    (
        "tests/golden/qwen2_vl",
        &["several_images", "two_turns", "text_only", "video_odd_slow", "video_fraction", "two_videos"],
    ),
    (
        "tests/golden/internvl",
        &[
            "single_image",
            "several_images",
            "two_turns",
            "same_image_twice",
            "text_only",
            "long_text",
            "video_even",
            "video_odd_slow",
            "video_and_picture",
            "two_videos",
        ],
    ),
    ("tests/golden/internvl_chat", &["several_images", "two_turns", "text_only", "video_even"]),
    (
        HYBRIDS[0],
        &[
            "tokens_63",
            "tokens_64",
            "tokens_65",
            "tokens_127",
            "tokens_129",
            "tokens_200",
            "single_image",
            "two_turns",
            "video_fraction",
        ],
    ),
    (HYBRIDS[1], &["short", "long", "single_image"]),
    // Tokens of a picture attend to its later tokens. A picture has more tokens than the window.
    (GEMMA, &["one_image", "several_images", "two_turns", "pan_and_scan", "pan_and_scan_tall"]),
    // Picture tokens attend to the whole picture only in sliding-window layers. The window is
    // shorter than a picture.
    ("tests/golden/gemma4", &["one_image", "several_images", "two_turns", "video_odd_slow", "video_and_picture"]),
    // A tower with clipped projections, and per-layer embeddings.
    ("tests/golden/gemma4_clipped", &["one_image", "several_images", "two_turns"]),
    // Pixels are projected without a vision tower.
    ("tests/golden/gemma4_unified", &["one_image", "two_turns", "video_and_picture"]),
];

/// Videos, each with the case that has its recorded rows and pixels.
const FIRST_SHOWN: [(&str, &str); 3] = [("video_even", "even"), ("video_odd_slow", "odd"), ("video_fraction", "long")];

// The same tolerances as for Qwen2.5-VL.
const REFERENCE_TOLERANCE: f32 = 1e-4;
const NOISE_TOLERANCE: f32 = 1e-5;
// The rounding of every token stays in the states of gated delta nets. transformers' two
// implementations of these nets differ by up to 5e-6 on these prompts.
const HYBRID_NOISE_TOLERANCE: f32 = 3e-5;

/// The checkpoints with their cases, and the tolerance for the same sums in another order.
fn stories() -> impl Iterator<Item = (Bench, Vec<Case>, f32)> {
    FOLDERS.into_iter().map(|(folder, names)| {
        let bench = Bench::load(folder, 2);
        let cases = names.iter().map(|name| Case::read(folder, &bench.checkpoint, name)).collect();
        let noise = if HYBRIDS.contains(&folder) { HYBRID_NOISE_TOLERANCE } else { NOISE_TOLERANCE };
        (bench, cases, noise)
    })
}

#[test]
fn prompts_grids_and_positions_match_the_recording() {
    for (folder, names) in FOLDERS {
        let checkpoint = bench::open(folder);
        let family = FamilyConfig::of(&checkpoint).expect("the family serves it");
        for name in names {
            let case = Case::read(folder, &checkpoint, name);
            let (mut pictures, mut tiled, mut crops, mut videos) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for visual in &case.visuals {
                match visual {
                    MediaGrid::Image(grid) => pictures.extend([grid.t, grid.h, grid.w].map(i64::from)),
                    MediaGrid::Tiles { tiles, .. } => {
                        tiled.extend([tiles.columns, tiles.rows, tiles.has_thumbnail.into()].map(i64::from));
                        crops.push(tiles.count() as i64 - 1);
                    }
                    MediaGrid::Video { step, steps, .. } => {
                        videos.extend([*steps as i64, i64::from(step.h), i64::from(step.w)]);
                    }
                }
            }
            assert_eq!(pictures, case.integers("image_grid_thw").unwrap_or_default(), "{name}");
            match case.integers("num_crops") {
                Some(recorded) => assert_eq!(crops, recorded, "{name}"),
                None => assert_eq!(tiled, case.integers("tiles").unwrap_or_default(), "{name}"),
            }
            if family.tile().is_none() {
                assert_eq!(videos, case.integers("video_grid_thw").unwrap_or_default(), "{name}");
            }
            // A template that joins strings cannot render content parts, so only the tokens are
            // compared, which contain the written text.
            if family.placeholder_texts().is_some_and(|texts| !checkpoint.template.knows_pictures(texts.image)) {
                case.assert_tokens_and_positions(&checkpoint);
                continue;
            }
            let written = family.write_visuals(case.prompt.clone(), &case.visuals);
            assert_eq!(written, *case.written.as_ref().unwrap_or(&case.prompt), "{name}");
            case.assert_prompt_and_positions(&checkpoint);
        }
    }
}

#[test]
fn pixel_values_of_pictures_and_videos_match_the_recording() {
    let checkpoint = bench::open(FOLDER);
    let case = Case::read(FOLDER, &checkpoint, "same_image_twice");
    let recorded = case.floats("pixel_values.tiny_41x30.png").expect("pixel values");
    let processor = checkpoint.image_processor.as_ref().expect("the checkpoint takes pictures");
    let worst = relative_error(&cut(&case.images[0], processor.config()), &recorded);
    assert!(worst < 1e-6, "{worst:e}");
    let settings = checkpoint.video_processor.as_ref().expect("the checkpoint takes videos").config();
    for (name, shown) in FIRST_SHOWN {
        let case = Case::read(FOLDER, &checkpoint, name);
        let probes: Vec<f32> = case.images.iter().flat_map(|patches| cut(patches, settings)).step_by(997).collect();
        assert_eq!(Some(probes), case.floats(&format!("pixel_probes.{shown}")), "{shown}");
    }
    let bare = ImageProcessorConfig { do_rescale: false, do_normalize: false, ..settings.clone() };
    let processor = VideoProcessor::new(bare).expect("valid settings");
    let (video, limits) = (video("odd", 1.0), ImageLimits::default());
    let plan = processor.plan(&video, &limits, usize::MAX).expect("the video is planned");
    let steps = processor.process(&video, &plan, &limits).expect("the video is processed");
    let levels: Vec<f32> = steps.iter().flat_map(|step| cut(&step.image, processor.config())).collect();
    let recorded = Case::read(FOLDER, &checkpoint, "video_odd_slow").bytes("levels.odd").expect("levels");
    assert_eq!(levels, recorded.into_iter().map(f32::from).collect::<Vec<_>>());
}

#[test]
fn picture_and_video_embeddings_match_the_recording_in_every_launch() {
    for (bench, cases, _) in stories() {
        for case in &cases {
            let rows_of = |images: &[&ResizedImage]| {
                let rows = bench.encode(images);
                let found: Vec<Vec<f32>> = rows.iter().map(|rows| bench.embeddings(rows)).collect();
                bench.forget(rows);
                found
            };
            for (name, places) in &case.shown {
                let Some(expected) = case.floats(&format!("vision_embeddings.{name}")) else { continue };
                let alone = rows_of(&case.images[places.clone()].iter().collect::<Vec<_>>()).concat();
                let worst = relative_error(&alone, &expected);
                println!("{name}: {worst:.1e}");
                assert!(worst <= REFERENCE_TOLERANCE, "{name}: {worst:e}");
                let together = rows_of(&case.images.iter().collect::<Vec<_>>());
                let among: Vec<f32> = together[places.clone()].concat();
                let worst = relative_error(&among, &alone);
                assert!(worst <= NOISE_TOLERANCE, "{name} in a batch with other pictures: {worst:e}");
            }
        }
    }
}

#[test]
fn every_case_gets_the_recorded_logits_and_answer() {
    for (bench, cases, _) in stories() {
        for case in &cases {
            let rows = encode(&bench, case);
            assert_recorded(&bench, case, &rows, REFERENCE_TOLERANCE);
            bench.forget(rows);
        }
    }
}

#[test]
fn chunking_and_batching_do_not_change_results() {
    for (bench, cases, noise) in stories() {
        let rows: Vec<_> = cases.iter().map(|case| encode(&bench, case)).collect();
        let whole: Vec<_> =
            cases.iter().zip(&rows).map(|(case, rows)| alone(&bench, case, rows, &[usize::MAX])).collect();
        for ((case, rows), whole) in cases.iter().zip(&rows).zip(&whole) {
            // The last list of sizes has chunks that begin and end in the middle of pictures and
            // time steps, and cross the border between two of these.
            for sizes in [&[1][..], &[16], &[17, 1, 29, 5]] {
                let chunked = alone(&bench, case, rows, sizes);
                assert_same_run(&format!("{} in chunks of {sizes:?}", case.name), &chunked, whole, noise);
            }
        }
        let company: Vec<_> = cases.iter().zip(rows).collect();
        for (steps_between, seed) in [(0, 1), (5, 3)] {
            for ((case, run), whole) in cases.iter().zip(together(&bench, &company, steps_between, seed)).zip(&whole) {
                assert_same_run(&format!("{} among all", case.name), &run, whole, noise);
            }
        }
    }
}

#[test]
fn requesting_more_logits_does_not_change_a_tokens_logits() {
    for (bench, cases, noise) in stories() {
        for case in &cases {
            let rows = encode(&bench, case);
            let worst = whatever_is_wanted(&bench, case, &rows);
            assert!(worst <= noise, "{}: {worst:e}", case.name);
            bench.forget(rows);
        }
    }
}
