//! Qwen2.5-VL compared with results of transformers: positions, embeddings, logits and answers,
//! with whole prompts, in chunks, and batched with others.

use bursar_model::flow::{Grid, ResizedImage};

use crate::bench::{
    self, Bench, Case, alone, assert_recorded, assert_same_run, cut, encode, picture, relative_error, together,
    whatever_is_wanted,
};

const FOLDER: &str = "tests/golden/qwen2_5_vl";
const CASES: [&str; 6] = ["single_image", "several_images", "two_turns", "same_image_twice", "text_only", "long_text"];

/// Largest error relative to the largest recorded number (`tests/golden/README.md`). f32 differs
/// from f64 by up to 8e-6.
const REFERENCE_TOLERANCE: f32 = 1e-4;

/// Largest error between two ways to compute the same logits with this code, with
/// different tiles and sums.
const NOISE_TOLERANCE: f32 = 1e-5;

fn bench() -> Bench {
    Bench::load(FOLDER, 2)
}

fn cases(bench: &Bench) -> Vec<Case> {
    CASES.iter().map(|name| Case::read(FOLDER, &bench.checkpoint, name)).collect()
}

/// Each picture of all cases once: its name, its resized image, and the recorded embeddings.
fn recorded_embeddings(cases: &[Case]) -> Vec<(String, &ResizedImage, Vec<f32>)> {
    let of_case = |case: &'_ Case| {
        let tensor = |name: &String| case.floats(&format!("vision_embeddings.{name}"));
        case.pictures.iter().map(tensor).collect::<Vec<_>>()
    };
    let all = cases.iter().flat_map(|case| case.pictures.iter().zip(&case.images).zip(of_case(case)));
    all.filter_map(|((name, patches), recorded)| Some((name.clone(), patches, recorded?))).collect()
}

#[test]
fn prompts_grids_and_positions_match_the_recording() {
    let checkpoint = bench::open(FOLDER);
    for name in CASES {
        let case = Case::read(FOLDER, &checkpoint, name);
        let grids: Vec<Grid> = case.images.iter().map(|patches| patches.grid).collect();
        let flat: Vec<i64> = grids.iter().flat_map(|grid| [grid.t, grid.h, grid.w].map(i64::from)).collect();
        assert_eq!(flat, case.integers("image_grid_thw").unwrap_or_default(), "{name}");
        case.assert_prompt_and_positions(&checkpoint);
    }
}

#[test]
fn pixel_values_match_the_recording() {
    let checkpoint = bench::open(FOLDER);
    let case = Case::read(FOLDER, &checkpoint, "same_image_twice");
    let recorded = case.floats("pixel_values.tiny_41x30.png").expect("pixel values");
    let processor = checkpoint.image_processor.as_ref().expect("the checkpoint takes pictures");
    let worst = relative_error(&cut(&case.images[0], processor.config()), &recorded);
    println!("pixel values: {worst:.1e}");
    assert!(worst < 1e-6, "{worst:e}");
    assert_eq!(case.images[0], case.images[1]);
}

#[test]
fn picture_embeddings_match_the_recording() {
    let bench = bench();
    let cases = cases(&bench);
    let recorded = recorded_embeddings(&cases);
    assert_eq!(recorded.len(), 5, "the cases show five different pictures");
    for (name, patches, expected) in &recorded {
        let rows = bench.encode(&[patches]);
        let worst = relative_error(&bench.embeddings(&rows[0]), expected);
        println!("embeddings of {name}: {worst:.1e}");
        assert!(worst <= REFERENCE_TOLERANCE, "{name}: {worst:e}");
        bench.forget(rows);
    }
}

#[test]
fn picture_embeddings_do_not_depend_on_the_launch() {
    let bench = bench();
    let names = ["large_640x427.png", "tiny_41x30.png", "square_225x225.png", "tiny_41x30.png", "wide_333x97.png"];
    let pictures: Vec<ResizedImage> = names.iter().flat_map(|name| picture(&bench.checkpoint, name).1).collect();
    let alone: Vec<Vec<f32>> = pictures.iter().map(|patches| bench.embeddings(&bench.encode(&[patches])[0])).collect();
    let compare = |launch: &[usize]| {
        let rows = bench.encode(&launch.iter().map(|index| &pictures[*index]).collect::<Vec<_>>());
        let errors =
            launch.iter().zip(&rows).map(|(index, rows)| relative_error(&bench.embeddings(rows), &alone[*index]));
        let worst = errors.fold(0.0, f32::max);
        println!("launch of {launch:?}: {worst:.1e}");
        // The results are not bit-identical, because the tiles of a GEMM depend on
        // its number of rows.
        assert!(worst <= NOISE_TOLERANCE, "launch of {launch:?}: {worst:e}");
        bench.forget(rows);
    };
    [&[0, 1][..], &[1, 0], &[1, 3], &[2, 4], &[4, 3, 2, 1, 0]].into_iter().for_each(compare);
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
fn a_chunked_prompt_is_answered_like_the_whole_prompt() {
    let bench = bench();
    for case in cases(&bench) {
        let rows = encode(&bench, &case);
        let whole = alone(&bench, &case, &rows, &[usize::MAX]);
        // The last list of sizes has chunks that begin and end in the middle of pictures and cross
        // the border between two pictures.
        for sizes in [&[1][..], &[7], &[16], &[33], &[17, 1, 29, 5]] {
            let chunked = alone(&bench, &case, &rows, sizes);
            let what = format!("{} in chunks of {sizes:?}", case.name);
            println!("{what}: {:.1e}", assert_same_run(&what, &chunked, &whole, NOISE_TOLERANCE));
        }
        bench.forget(rows);
    }
}

#[test]
fn chunks_that_end_at_recorded_positions_give_the_recorded_logits() {
    let bench = bench();
    for case in cases(&bench) {
        let rows = encode(&bench, &case);
        let recorded = case.logits("logit_positions", "logits");
        let mut sequence = bench.sequence(&case, &rows);
        let mut worst = 0.0f32;
        let mut cached = 0;
        for (place, expected) in &recorded {
            let logits = bench.step(&mut [sequence.next_chunk(place + 1 - cached)]);
            worst = worst.max(relative_error(&logits[0], expected));
            cached = place + 1;
        }
        println!("{}: {worst:.1e}", case.name);
        assert!(worst <= REFERENCE_TOLERANCE, "{}: {worst:e}", case.name);
        bench.end(sequence);
        bench.forget(rows);
    }
}

#[test]
fn a_scored_prompt_has_the_recorded_logits_at_every_token() {
    let bench = bench();
    for case in cases(&bench) {
        let rows = encode(&bench, &case);
        for size in [usize::MAX, 41] {
            let mut sequence = bench.sequence(&case, &rows);
            let mut scores = Vec::new();
            while sequence.prompt_left() > 0 {
                let count = size.min(sequence.prompt_left());
                scores.extend(bench.step_and_score(&mut [sequence.next_chunk(count).scored()]).1);
            }
            let recorded = case.logits("logit_positions", "logits");
            let errors = recorded.iter().map(|(place, expected)| relative_error(&scores[*place], expected));
            let worst = errors.fold(0.0, f32::max);
            println!("{}: {} tokens scored, {worst:.1e}", case.name, scores.len());
            assert!(worst <= REFERENCE_TOLERANCE, "{}: {worst:e}", case.name);
            bench.end(sequence);
        }
        bench.forget(rows);
    }
}

#[test]
fn requesting_more_logits_does_not_change_a_tokens_logits() {
    let bench = bench();
    for case in cases(&bench) {
        let rows = encode(&bench, &case);
        let worst = whatever_is_wanted(&bench, &case, &rows);
        println!("{}: {worst:.1e}", case.name);
        assert!(worst <= NOISE_TOLERANCE, "{}: {worst:e}", case.name);
        bench.forget(rows);
    }
}

#[test]
fn other_sequences_in_the_batch_do_not_change_results() {
    let bench = bench();
    let cases = cases(&bench);
    let alone: Vec<_> = cases
        .iter()
        .map(|case| {
            let rows = encode(&bench, case);
            let run = alone(&bench, case, &rows, &[usize::MAX]);
            bench.forget(rows);
            run
        })
        .collect();
    // Each picture is encoded once, and all sequences that show it share its rows.
    let recorded = recorded_embeddings(&cases);
    let rows = bench.encode(&recorded.iter().map(|(_, patches, _)| *patches).collect::<Vec<_>>());
    let rows_of = |name: &String| {
        let index = recorded.iter().position(|(known, ..)| known == name).expect("a recorded picture");
        rows[index].clone()
    };
    let company: Vec<_> = cases.iter().map(|case| (case, case.pictures.iter().map(rows_of).collect())).collect();
    for (steps_between, seed) in [(0, 1), (1, 2), (5, 3), (11, 4)] {
        let runs = together(&bench, &company, steps_between, seed);
        for ((case, run), alone) in cases.iter().zip(&runs).zip(&alone) {
            let what = format!("{} among all, {steps_between} steps apart", case.name);
            println!("{what}: {:.1e}", assert_same_run(&what, run, alone, NOISE_TOLERANCE));
        }
    }
}
