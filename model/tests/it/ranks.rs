//! Models on several ranks: every family answers as recorded, a rank reads only its own bytes, and
//! models that cannot be divided are refused with an explanation.

use std::{ops::ControlFlow, sync::Arc};

use bursar_budgets::{Bytes, Class, Hint};
use bursar_kernels::{Cpu, Rank, Target};
use bursar_model::{
    LoadError, Model,
    blocks::vision::share_out,
    checkpoint::{Checkpoint, CheckpointSource, WeightQuantization},
    flow::Grid,
    registry,
    weights::WeightError,
    worst_cases::{self, Pass},
};
use serde_json::{Value, json};

use crate::{
    bench::{
        Bench, BenchMemory, Case, Memory, Random, alone, assert_recorded, assert_same_run, encode, on_ranks, open,
        relative_error, repository, together,
    },
    copy::{Copy, INTERNVL, INTERNVL_CHAT, QWEN2, QWEN2_5_VL, QWEN2_VL, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE},
};

const CPU: Target = Target::Cpu { threads: 1 };

/// The same tolerance as for one rank.
const REFERENCE_TOLERANCE: f32 = 1e-4;
/// Largest error between the sum of two halves and a single sum.
const NOISE_TOLERANCE: f32 = 1e-5;

/// Checkpoints with the maximum number of ranks that divides their heads.
const FOLDERS: [(&str, usize); 20] = [
    (QWEN2, 2),
    ("tests/golden/qwen3", 2),
    ("tests/golden/qwen3_yarn", 2),
    ("tests/golden/llama", 4),
    ("tests/golden/llama_biased", 4),
    ("tests/golden/mistral", 4),
    ("tests/golden/qwen2_windowed", 2),
    ("tests/golden/gemma3_text", 4),
    ("tests/golden/gemma3", 2),
    ("tests/golden/gemma4_text", 2),
    ("tests/golden/gemma4_sharing", 2),
    ("tests/golden/gemma4_moe", 2),
    (QWEN3_MOE, 2),
    ("tests/golden/qwen3_moe_sparse", 2),
    (QWEN2_5_VL, 2),
    (QWEN3_VL, 4),
    ("tests/golden/qwen3_vl_72", 4),
    (QWEN3_VL_MOE, 4),
    (INTERNVL, 2),
    (INTERNVL_CHAT, 4),
];

/// The names of all recorded cases of a checkpoint.
pub fn cases(folder: &str) -> Vec<String> {
    let files = std::fs::read_dir(repository(&format!("{folder}/cases"))).expect("cases are recorded");
    let names = files.map(|file| file.expect("the entry is readable").file_name().into_string().expect("UTF-8"));
    let mut names: Vec<_> = names.filter_map(|name| name.strip_suffix(".json").map(str::to_owned)).collect();
    names.sort();
    assert!(names.len() >= 2, "{folder}: {names:?}");
    names
}

fn loaded(checkpoint: Checkpoint, cpu: Cpu) -> Bench {
    Bench::on(checkpoint, cpu, Memory::new(BenchMemory::GOLDEN.capacity), BenchMemory::GOLDEN)
}

/// The numbers of ranks, from 2 to 4, that can divide a checkpoint.
fn possible(folder: &str) -> Vec<usize> {
    (2..=4).filter(|of| Model::plan_rank(&open(folder), &CPU, Rank::new(0, *of)).is_ok()).collect()
}

#[test]
fn every_family_gives_the_recorded_answers_on_several_ranks() {
    for (folder, most) in FOLDERS {
        let names = cases(folder);
        let numbers = if most == 4 { vec![2, 4] } else { vec![2] };
        assert_eq!(possible(folder), numbers, "{folder}");
        for of in numbers {
            on_ranks(of, |cpu| {
                let bench = loaded(open(folder), cpu);
                for name in &names {
                    let case = Case::read(folder, &bench.checkpoint, name);
                    assert_recorded(&bench, &case, &encode(&bench, &case), REFERENCE_TOLERANCE);
                }
            });
        }
    }
}

/// The bits of the embeddings of each picture.
fn bits(bench: &Bench, rows: &[Vec<u32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|rows| bench.embeddings(rows).into_iter().map(f32::to_bits).collect()).collect()
}

#[test]
fn all_ranks_have_exactly_the_picture_rows_of_one_rank() {
    for (folder, name) in [
        (QWEN2_5_VL, "several_images"),
        (QWEN3_VL, "several_images"),
        (QWEN3_VL, "video_even"),
        (INTERNVL, "two_turns"),
    ] {
        for of in possible(folder) {
            let on_all = on_ranks(of, |cpu| {
                let bench = loaded(open(folder), cpu);
                bits(&bench, &encode(&bench, &Case::read(folder, &bench.checkpoint, name)))
            });
            // The rounding of a GEMM depends on its number of rows. For equal bits, one rank
            // encodes the same shares one after the other.
            let bench = loaded(open(folder), Cpu::new(1));
            let case = Case::read(folder, &bench.checkpoint, name);
            let patches: Vec<_> = case.images.iter().map(|image| image.grid.patches()).collect();
            for share in share_out(&patches, of).iter().filter(|share| !share.is_empty()) {
                let images: Vec<_> = share.iter().map(|picture| &case.images[*picture]).collect();
                let alone = bits(&bench, &bench.encode(&images));
                for (picture, alone) in share.iter().zip(&alone) {
                    let is_alone = |rows: &Vec<Vec<u32>>| rows[*picture] == *alone;
                    assert!(
                        on_all.iter().all(is_alone),
                        "picture {picture} of {folder} {name} on {of} ranks differs from the result on one rank"
                    );
                }
            }
        }
    }
}

#[test]
fn each_rank_encodes_its_share_of_the_pictures() {
    let grid = Grid { t: 1, h: 8, w: 8 };
    for of in [2, 4] {
        let flops = |rank: Rank, count| {
            let model = Model::plan_rank(&open(QWEN3_VL), &CPU, rank).expect("the model is planned");
            let launch = Pass::Encode(worst_cases::blank_pictures(&model, count, grid));
            worst_cases::plan(&model, CPU, &launch).expect("the shapes agree").work.flops
        };
        for rank in Rank::all(of) {
            assert_eq!(
                flops(rank, of),
                flops(Rank::ALONE, 1),
                "one picture per rank on {of} ranks costs more or less than one picture on one rank"
            );
            let of_one = if rank.index() == 0 { flops(Rank::ALONE, 1) } else { 0 };
            assert_eq!(flops(rank, 1), of_one, "a single picture is not divided among ranks");
        }
    }
}

#[test]
fn heads_that_ranks_cannot_divide_are_refused_with_possible_numbers() {
    // The cases: a single query head; 14 query heads, seven for each KV head, on more ranks than KV
    // heads; and experts.
    for (folder, of, expected, hint) in [
        (QWEN2_VL, 2, "query heads cannot be divided among 2 ranks: there are 1", "1"),
        (QWEN2, 4, "query heads cannot be divided among 4 ranks: there are 14", "1, 2"),
        (QWEN3_VL_MOE, 3, "experts cannot be divided among 3 ranks: there are", "1, 2, 4"),
    ] {
        let error = Model::plan_rank(&open(folder), &CPU, Rank::new(0, of))
            .map(drop)
            .expect_err("the heads do not divide among the ranks");
        assert!(matches!(&error, LoadError::Weights(WeightError::Ranks(_))), "{error:?}");
        assert!(error.to_string().starts_with(expected), "{error}");
        assert_eq!(error.hint(), format!("use one of these numbers of ranks: {hint}"));
    }
}

#[test]
fn chunking_and_batching_do_not_change_results_on_ranks() {
    for folder in ["tests/golden/llama", QWEN3_MOE] {
        let runs = on_ranks(2, |cpu| {
            let bench = loaded(open(folder), cpu);
            let cases = ["short", "long"].map(|name| Case::read(folder, &bench.checkpoint, name));
            let whole = cases.each_ref().map(|case| alone(&bench, case, &[], &[usize::MAX]));
            for (case, whole) in cases.iter().zip(&whole) {
                assert_same_run(&case.name, &alone(&bench, case, &[], &[17, 1, 29, 5]), whole, NOISE_TOLERANCE);
            }
            let company: Vec<_> = cases.iter().map(|case| (case, Vec::new())).collect();
            for (run, alone) in together(&bench, &company, 3, 2).iter().zip(&whole) {
                assert_same_run(folder, run, alone, NOISE_TOLERANCE);
            }
            whole.map(|run| run.logits.concat())
        });
        let bits = |run: &[Vec<f32>; 2]| run.each_ref().map(|run| run.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        assert!(runs.iter().all(|run| bits(run) == bits(&runs[0])), "the ranks have different bits");
    }
}

/// The first logits of an answer on `of` ranks.
pub fn logits(checkpoint: impl Fn() -> Checkpoint + Sync, folder: &str, of: usize) -> Vec<f32> {
    let name = match folder {
        QWEN3_VL => "text_only",
        QWEN3_VL_MOE => "two_turns",
        _ => "short",
    };
    let run = |cpu| {
        let bench = loaded(checkpoint(), cpu);
        let case = Case::read(folder, &bench.checkpoint, name);
        let rows = encode(&bench, &case);
        alone(&bench, &case, &rows, &[usize::MAX]).logits.remove(0)
    };
    on_ranks(of, run).remove(0)
}

#[test]
fn random_weights_on_ranks_match_one_rank() {
    for (folder, of) in [("tests/golden/llama", 4), (QWEN3_MOE, 2), (QWEN3_VL, 4)] {
        let draw = || {
            let random = registry::without_weights(CheckpointSource::Folder(repository(folder)));
            let random = CheckpointSource::Random(Arc::new(random.expect("the folder has the settings")));
            Checkpoint::open(random).expect("the checkpoint opens")
        };
        let error = relative_error(&logits(draw, folder, of), &logits(draw, folder, 1));
        assert!(error <= NOISE_TOLERANCE, "{folder}: {error:e}");
    }
}

/// The file with the tensors of a golden checkpoint.
const FILE: &str = "model.safetensors";

/// The part of a Llama tensor that a rank reads: some rows, some columns, or all of it.
#[derive(Clone, Copy, PartialEq)]
enum ShardAxis {
    Rows,
    Columns,
    All,
}

fn shard_axis(name: &str) -> ShardAxis {
    let has = |ends: &[&str]| ends.iter().any(|end| name.contains(end));
    match () {
        () if has(&["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"]) => {
            ShardAxis::Rows
        }
        () if has(&["o_proj.weight", "down_proj.weight"]) => ShardAxis::Columns,
        () => ShardAxis::All,
    }
}

/// The bytes of a rank's weights in memory.
pub fn loaded_bytes(checkpoint: &Checkpoint, rank: Rank) -> Vec<u8> {
    let (memory, cpu) = (Memory::new(Bytes::mib(64)), Cpu::new(1));
    let bytes = Model::plan_rank(checkpoint, &CPU, rank).expect("the model is planned").weight_bytes();
    let segment = memory.poisoned(&cpu, Class::Weights, bytes);
    let at = segment.address().0 as *const u8;
    let model =
        Model::load_rank(checkpoint, rank, &cpu, segment, |_, _| ControlFlow::Continue(())).expect("the model loads");
    // SAFETY: the model keeps the segment, and `bytes` bytes of it are backed.
    let found = unsafe { std::slice::from_raw_parts(at, bytes.as_usize()) }.to_vec();
    drop(model);
    found
}

#[test]
fn a_rank_reads_no_weights_of_other_ranks() {
    const FOLDER: &str = "tests/golden/llama_biased";
    let of = |index| Rank::new(index, 2);
    for index in [0, 1] {
        // Every number that belongs only to the other rank becomes NaN.
        let spoilt = Copy::of(FOLDER).rewrite(FILE, |header, data| {
            for (name, entry) in
                header.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__")
            {
                let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).expect("a shape");
                let [start, end] = [0, 1].map(|side| entry["data_offsets"][side].as_u64().expect("an offset") as usize);
                let (rows, columns) = (shape[0], shape[1..].iter().product::<usize>());
                let size = (end - start) / (rows * columns);
                for (at, element) in data[start..end].chunks_exact_mut(size).enumerate() {
                    let is_others = match shard_axis(name) {
                        ShardAxis::Rows => (at / columns < rows / 2) == (index == 1),
                        ShardAxis::Columns => (at % columns < columns / 2) == (index == 1),
                        ShardAxis::All => false,
                    };
                    if is_others {
                        element.fill(0xff);
                    }
                }
            }
        });
        assert!(
            loaded_bytes(&spoilt.open(), of(index)) == loaded_bytes(&open(FOLDER), of(index)),
            "rank {index} reads the other rank's bytes"
        );
        assert!(
            loaded_bytes(&spoilt.open(), of(1 - index)) != loaded_bytes(&open(FOLDER), of(1 - index)),
            "the other rank does not read the changed bytes"
        );
    }
}

#[test]
fn ranks_split_the_weight_bytes_of_one_rank() {
    let bytes = |folder: &str, rank: Rank| {
        Model::plan_rank(&open(folder), &CPU, rank).expect("the model is planned").weight_bytes().0
    };
    for (folder, of) in [("tests/golden/llama", 4), (QWEN3_MOE, 2), (QWEN3_VL_MOE, 4)] {
        let whole = bytes(folder, Rank::ALONE);
        let most = Rank::all(of).map(|rank| bytes(folder, rank)).max().expect("there is at least one rank");
        println!("{folder}: {whole} bytes on one rank, at most {most} on each of {of}");
        assert!(most < whole && most * of as u64 >= whole, "{folder}: the largest rank loads {most} of {whole}");
    }
}

/// A checkpoint whose FP8 blocks divide among four ranks: like `qwen3_fp8`, with larger
/// projections and other numbers.
fn wide_fp8() -> Copy {
    const HIDDEN: usize = 256;
    let folder = Copy::of("tests/golden/qwen3_fp8").set("config.json", &["head_dim"], 128.into()).set(
        "config.json",
        &["intermediate_size"],
        512.into(),
    );
    folder.rewrite(FILE, |header, data| {
        let mut random = Random::new(3);
        let names: Vec<String> = header.as_object().expect("an object").keys().cloned().collect();
        for name in names {
            let shape = match () {
                () if name.contains("q_proj") || name.contains("gate_proj") || name.contains("up_proj") => {
                    [512, HIDDEN]
                }
                () if name.contains("k_proj") || name.contains("v_proj") => [256, HIDDEN],
                () if name.contains("o_proj") || name.contains("down_proj") => [HIDDEN, 512],
                () if name.contains("q_norm") || name.contains("k_norm") => [128, 1],
                () => continue,
            };
            let dtype = header[&name]["dtype"].as_str().expect("a type").to_owned();
            let shape = if name.ends_with("scale_inv") { shape.map(|extent| extent.div_ceil(128)) } else { shape };
            let start = data.len();
            for _ in 0..shape[0] * shape[1] {
                let number = 0.5 + random.below(1000) as f32 / 1000.0;
                match dtype.as_str() {
                    // None of these bit patterns is NaN.
                    "F8_E4M3" => data.push((random.below(0x70) + 0x80 * random.below(2)) as u8),
                    "F32" => data.extend((number * 2e-4).to_le_bytes()),
                    "BF16" => data.extend(half::bf16::from_f32(number).to_le_bytes()),
                    other => panic!("{name} holds {other}"),
                }
            }
            let shape: &[usize] = if shape[1] == 1 && name.contains("norm") { &shape[..1] } else { &shape };
            header[&name] = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] });
        }
        compact(header, data);
    })
}

/// Removes the bytes that no longer belong to any tensor.
fn compact(header: &mut Value, data: &mut Vec<u8>) {
    let mut kept = Vec::new();
    for (_, entry) in header.as_object_mut().expect("an object").iter_mut().filter(|(name, _)| *name != "__metadata__")
    {
        let [start, end] = [0, 1].map(|side| entry["data_offsets"][side].as_u64().expect("an offset") as usize);
        let first = kept.len();
        kept.extend_from_slice(&data[start..end]);
        entry["data_offsets"] = json!([first, kept.len()]);
    }
    *data = kept;
}

#[test]
fn ranks_split_fp8_weights_between_blocks() {
    let copy = wide_fp8();
    let of = |of| logits(|| copy.open(), "tests/golden/qwen3_fp8", of);
    let whole = of(1);
    for ranks in [2, 4] {
        let error = relative_error(&of(ranks), &whole);
        println!("{ranks} ranks: {error:e}");
        assert!(error <= NOISE_TOLERANCE, "{ranks} ranks: {error:e}");
    }
}

#[test]
fn splitting_an_fp8_block_among_ranks_is_refused() {
    let error = Model::plan_rank(&open("tests/golden/qwen3_fp8"), &CPU, Rank::new(0, 2)).map(drop);
    let error = error.expect_err("half of the heads fill half a block");
    assert!(matches!(&error, LoadError::Weights(WeightError::Cut { unit: 128, at: 64, .. })), "{error:?}");
    assert!(error.to_string().contains("q_proj.weight_scale_inv would be split at 64, but its blocks"), "{error}");
    assert!(error.hint().contains("fewer ranks"), "{}", error.hint());
}

#[test]
fn fp8_logits_on_two_ranks_stay_near_one_rank() {
    // With a fixed activation scale, all ranks round in the same way. With a scale per row, each
    // rank uses a scale for its part of the row.
    for (folder, tolerance) in
        [("tests/golden/qwen3_fp8_modelopt", NOISE_TOLERANCE), ("tests/golden/qwen3_fp8_dynamic", 0.1)]
    {
        let [whole, two] = [1, 2].map(|of| logits(|| open(folder), folder, of));
        let error = relative_error(&two, &whole);
        println!("{folder}: {error:e}");
        assert!(error <= tolerance, "{folder}: {error:e}");
    }
}

/// A mixture as ModelOpt writes it, with a scale for each matrix and with `largest` as the largest
/// activations of its four experts.
fn modelopt_mixture(largest: [f32; 4]) -> Copy {
    const SETTINGS: &str = "quantization_config";
    let settings = json!({ "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"] });
    let folder = Copy::of("tests/golden/qwen3_moe_fp8").set("config.json", &[SETTINGS], settings);
    folder.rewrite(FILE, |header, data| {
        let entries = header.as_object_mut().expect("an object");
        let names: Vec<String> = entries.keys().filter(|name| name.ends_with(".weight_scale_inv")).cloned().collect();
        for name in names {
            let of_blocks = entries.remove(&name).expect("scales");
            let start = of_blocks["data_offsets"][0].as_u64().expect("an offset") as usize;
            let scale = half::bf16::from_le_bytes([data[start], data[start + 1]]).to_f32();
            let expert = name.split(".experts.").nth(1).and_then(|rest| rest[..1].parse::<usize>().ok());
            let input = expert.map_or(4.0, |expert| largest[expert]) / 448.0;
            for (end, number) in [("weight_scale", scale), ("input_scale", input)] {
                let place = [data.len(), data.len() + 4];
                data.extend(number.to_le_bytes());
                let entry = json!({ "dtype": "F32", "shape": [], "data_offsets": place });
                entries.insert(name.replace("weight_scale_inv", end), entry);
            }
        }
        compact(header, data);
    })
}

#[test]
fn experts_round_by_the_largest_scale_of_all_ranks() {
    let of = |largest, of| {
        let copy = modelopt_mixture(largest);
        logits(|| copy.open(), "tests/golden/qwen3_moe_fp8", of)
    };
    // The last two experts belong to the second rank.
    let uneven = [0.5, 1.0, 7.0, 20.0];
    let whole = of(uneven, 1);
    let error = relative_error(&of(uneven, 2), &whole);
    println!("{error:e}");
    assert!(error <= NOISE_TOLERANCE, "{error:e}");
    assert_eq!(of([20.0; 4], 1), whole, "the largest scale is used");
    assert!(relative_error(&of([1.0; 4], 1), &whole) > 1e-3, "the scales of a rank's own experts change the result");
}

#[test]
fn fp8_rounding_on_load_changes_logits_little_on_ranks() {
    for folder in ["tests/golden/llama", QWEN3_VL_MOE] {
        let plain = logits(|| open(folder), folder, 2);
        for quantization in WeightQuantization::ROUNDING {
            let rounded = logits(|| open(folder).with_quantization(Some(quantization)), folder, 2);
            let error = relative_error(&rounded, &plain);
            println!("{folder} {quantization}: {error:.1e}");
            // As on one rank, weights and activations have three bits of mantissa.
            assert!((1e-4..0.35).contains(&error), "{folder} {quantization}: {error:e}");
        }
    }
}
