//! GGUF files of hybrid models: golden checkpoints written again as llama.cpp writes them, with and
//! without the file of their vision encoder.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use bursar_budgets::Hint;
use bursar_model::{
    checkpoint::{Checkpoint, WeightQuantization},
    error::CheckpointError,
    registry::{self, FamilyConfig},
};
use serde_json::{Value, json};

use crate::{
    bench::{Bench, BenchMemory, Case, Memory, alone, assert_recorded, encode, on_ranks, open, relative_error},
    common::golden_bytes,
};

const FOLDER: &str = "tests/golden/qwen3_5";
const MIXED: &str = "tests/golden/qwen3_5_moe";
const TOLERANCE: f32 = 1e-4;

/// A folder with a model and files of vision encoders, removed at the end.
struct Files(PathBuf);

impl Files {
    fn of(model: &[u8]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("bursar-hybrid-{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).expect("the folder can be made");
        Files(folder).with("model.gguf", model)
    }

    fn with(self, name: &str, bytes: &[u8]) -> Self {
        std::fs::write(self.0.join(name), bytes).expect("the file can be written");
        self
    }

    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(registry::open_gguf(&self.0.join("model.gguf"))?)
    }

    fn opened(&self) -> Checkpoint {
        self.open().expect("the checkpoint opens")
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn recorded(name: &str) -> Vec<u8> {
    golden_bytes(&format!("gguf/{name}.gguf"))
}

fn encoder() -> Vec<u8> {
    recorded("qwen3_5.mmproj")
}

/// Replaces every occurrence of `from` in a file by `to`, which must be as long.
pub fn replaced(mut bytes: Vec<u8>, from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let places: Vec<_> = (0..bytes.len() - from.len()).filter(|at| bytes[*at..].starts_with(from)).collect();
    assert!(!places.is_empty(), "the file has {}", String::from_utf8_lossy(from));
    places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
    bytes
}

/// Replaces the number of a setting.
pub fn set(mut bytes: Vec<u8>, name: &str, number: u32) -> Vec<u8> {
    let at = bytes.windows(name.len()).position(|at| at == name.as_bytes()).expect("the file has the setting");
    let value = at + name.len() + 4;
    bytes[value..value + 4].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Replaces a setting of 32 bits by a number of 64 bits. The tensors may then be elsewhere, so the
/// file must be refused before they are read.
fn set_long(mut bytes: Vec<u8>, name: &str, number: u64) -> Vec<u8> {
    const U64: u32 = 10;
    let at = bytes.windows(name.len()).position(|at| at == name.as_bytes()).expect("the file has the setting");
    let kind = at + name.len();
    bytes.splice(kind..kind + 8, [&U64.to_le_bytes()[..], &number.to_le_bytes()].concat());
    bytes
}

#[test]
fn a_gguf_file_with_a_vision_encoder_matches_its_source() {
    let bench = Bench::of(Files::of(&recorded("qwen3_5")).with("mmproj-BF16.gguf", &encoder()).opened(), 2);
    for name in ["tokens_65", "tokens_129", "single_image", "two_turns"] {
        let case = Case::read(FOLDER, &bench.checkpoint, name);
        case.assert_prompt_and_positions(&bench.checkpoint);
        assert_recorded(&bench, &case, &encode(&bench, &case), TOLERANCE);
    }
}

#[test]
fn a_gguf_file_without_a_vision_encoder_serves_text() {
    for (folder, name, cases) in
        [(FOLDER, "qwen3_5", ["tokens_63", "tokens_129"]), (MIXED, "qwen3_5_moe", ["short", "long"])]
    {
        let bench = Bench::of(Files::of(&recorded(name)).opened(), 2);
        let family = FamilyConfig::of(&bench.checkpoint).expect("the family serves it");
        assert!(family.merge().is_none() && family.placeholder_texts().is_none(), "{name} takes no pictures");
        for case in cases.map(|case| Case::read(folder, &bench.checkpoint, case)) {
            assert_recorded(&bench, &case, &[], TOLERANCE);
        }
    }
}

#[test]
fn a_rank_reads_its_heads_in_the_files_order() {
    for (folder, name, case) in [(FOLDER, "qwen3_5", "tokens_65"), (MIXED, "qwen3_5_moe", "short")] {
        let files = Files::of(&recorded(name));
        on_ranks(2, |cpu| {
            let bench = Bench::on(files.opened(), cpu, Memory::new(BenchMemory::GOLDEN.capacity), BenchMemory::GOLDEN);
            assert_recorded(&bench, &Case::read(folder, &bench.checkpoint, case), &[], TOLERANCE);
        });
    }
}

#[test]
fn a_gguf_file_is_rounded_to_fp8_like_its_source() {
    let files = Files::of(&recorded("qwen3_5"));
    let quantization = Some(WeightQuantization::ROUNDING[0]);
    let [one, other] =
        [open(FOLDER), files.opened()].map(|checkpoint| Bench::of(checkpoint.with_quantization(quantization), 2));
    let case = Case::read(FOLDER, &one.checkpoint, "tokens_65");
    let [ours, theirs] = [&other, &one].map(|bench| alone(bench, &case, &[], &[usize::MAX]).logits.swap_remove(0));
    // The decay rates are logarithms of numbers that were rounded to f32, so some activations are
    // rounded to another FP8 number.
    let error = relative_error(&ours, &theirs);
    println!("{error:.1e}");
    assert!(error < 0.2, "{error}");
}

#[test]
fn a_gguf_file_has_the_settings_of_its_source() {
    let (ours, theirs) = (Files::of(&recorded("qwen3_5")).with("Model.MMPROJ.GGUF", &encoder()).opened(), open(FOLDER));
    let family = |checkpoint: &Checkpoint| FamilyConfig::of(checkpoint).expect("the family serves it");
    assert_eq!(family(&ours), family(&theirs));
    let pixels = |checkpoint: &Checkpoint| checkpoint.image_processor.as_ref().expect("pictures").config().clone();
    assert_eq!(pixels(&ours), pixels(&theirs));
    let video = ours.video_processor.as_ref().expect("videos").config();
    assert_eq!((&video.image_mean, &video.image_std), (&pixels(&theirs).image_mean, &pixels(&theirs).image_std));
    assert!(!ours.tensors.names().any(|name| name.contains("layers.8")), "the draft layer is not read");
    let moe = Files::of(&recorded("qwen3_5_moe")).opened();
    assert_eq!(family(&moe).decoder(), family(&open(MIXED)).decoder());
    assert_eq!(moe.config["model_type"], json!("qwen3_5_moe_text"));
}

#[test]
fn a_mismatched_vision_encoder_is_skipped_and_reported() {
    let model = || Files::of(&recorded("qwen3_5"));
    let skipped = |files: &Files| {
        let checkpoint = files.opened();
        let family = FamilyConfig::of(&checkpoint).expect("the family serves it");
        assert!(family.merge().is_none() && checkpoint.image_processor.is_none(), "it serves only text");
        let [error] = checkpoint.source().skipped_encoders() else {
            panic!("{:?}", checkpoint.source().skipped_encoders())
        };
        (error.to_string(), error.hint())
    };
    let wide = set(encoder(), "clip.vision.projection_dim", 96);
    let (text, hint) = skipped(&model().with("mmproj-a.gguf", &wide));
    let message = "clip.vision.projection_dim is 96; the model's embedding_length is 64";
    assert_eq!(text, format!("the vision encoder in mmproj-a.gguf does not fit the model: {message}"));
    assert_eq!(hint, "to use pictures, replace mmproj-a.gguf with the model's own mmproj file");
    let other = replaced(encoder(), b"qwen3vl_merger", b"qwen9vl_merger");
    let (text, _) = skipped(&model().with("mmproj-a.gguf", &other));
    assert!(text.ends_with("clip.projector_type is qwen9vl_merger; the model needs qwen3vl_merger"), "{text}");
    let whole = encoder();
    let renamed = |from: &str, to: &str| replaced(encoder(), from.as_bytes(), to.as_bytes());
    for (bytes, expected) in [
        (&b"notes"[..], "the header of mmproj.gguf is not valid"),
        (&b""[..], "mmproj.gguf"),
        (&whole[..whole.len() / 2], "reaches beyond"),
        (&recorded("qwen3_5"), "general.type is model; supported: mmproj"),
        (&renamed("clip.vision.image_mean", "clip.vision.image_bean"), "clip.vision.image_mean is absent"),
        (&renamed("clip.vision.block_count", "clip.vision.clock_count"), "clip.vision.block_count is absent"),
        (&renamed("v.position_embd.weight", "v.position_emb_.weight"), "v.position_embd.weight is absent"),
        (&renamed("v.patch_embd.weight.1", "v.patch_embd.weight.2"), "it lacks the tensor v.patch_embd.weight.1"),
    ] {
        let (text, hint) = skipped(&model().with("mmproj.gguf", bytes));
        assert!(text.contains(expected) && text.contains("mmproj.gguf") && !hint.is_empty(), "{text}; {hint}");
    }
    let error = Files::of(&encoder()).open().expect_err("a file that the user names must be a model").to_string();
    assert!(error.ends_with("general.type is mmproj; supported: model"), "{error}");
}

#[test]
fn the_only_matching_vision_encoder_is_used() {
    let model = || Files::of(&recorded("qwen3_5"));
    let wide = set(encoder(), "clip.vision.projection_dim", 96);
    // Files of other models and damaged files next to the model's own file do not matter.
    let files = model().with("mmproj-a.gguf", &wide).with("mmproj-b.gguf", &encoder()).with("mmproj-c.gguf", b"notes");
    let checkpoint = files.opened();
    assert!(checkpoint.image_processor.is_some() && checkpoint.source().skipped_encoders().is_empty());
    assert!(model().with("mmproj-a.txt", b"notes").opened().source().skipped_encoders().is_empty());
    let error = model().with("mmproj-a.gguf", &encoder()).with("mmproj-b.gguf", &encoder()).open();
    let error = error.expect_err("it is not known which file is meant");
    assert_eq!(error.to_string(), "2 files next to the model have its vision encoder: mmproj-a.gguf, mmproj-b.gguf");
    assert_eq!(error.hint(), "keep only one of them in the folder");
}

#[test]
fn invalid_settings_of_a_hybrid_file_are_refused_by_name() {
    for (name, number, expected) in [
        ("qwen35.ssm.time_step_rank", 5, "qwen35.ssm.time_step_rank is 5; supported: a multiple of the 2 key heads"),
        ("qwen35.ssm.inner_size", 30, "qwen35.ssm.inner_size is 30; supported: a multiple of 4 value heads"),
        ("qwen35.ssm.inner_size", 64, "but 4 value heads need"),
        ("qwen35.ssm.group_count", 0, "qwen35.ssm.group_count is 0; supported: 1 to 1048576"),
        ("qwen35.ssm.group_count", u32::MAX, "qwen35.ssm.group_count is 4294967295; supported: 1 to 1048576"),
        ("qwen35.ssm.state_size", 1 << 21, "qwen35.ssm.state_size is 2097152; supported: 1 to 1048576"),
        ("qwen35.ssm.conv_kernel", 1 << 30, "qwen35.ssm.conv_kernel is 1073741824; supported: 1 to 1048576"),
        ("qwen35.nextn_predict_layers", 9, "supported: less than the 9 layers of the file"),
        ("qwen35.attention.value_length", 32, "qwen35.attention.value_length is 32; supported: 64"),
    ] {
        let error = Files::of(&set(recorded("qwen3_5"), name, number)).open().expect_err(expected).to_string();
        assert!(error.contains(expected), "{error} should say: {expected}");
    }
    let unknown = replaced(recorded("qwen3_5"), b"qwen35.ssm.state_size", b"qwen35.ssm.state_sign");
    let error = Files::of(&unknown).open().expect_err("a setting is unknown").to_string();
    assert!(error.contains("qwen35.ssm.state_sign is 32; supported: none"), "{error}");
    let absent = replaced(recorded("qwen3_5"), b"qwen35.rope.dimension_sections", b"qwen99.rope.dimension_sections");
    let error = Files::of(&absent).open().expect_err("a setting is absent").to_string();
    assert!(error.contains("qwen35.rope.dimension_sections is absent"), "{error}");
}

#[test]
fn hybrid_sizes_near_the_integer_limit_are_refused_by_name() {
    for (key, largest) in [("group_count", u64::MAX), ("time_step_rank", 1 << 63), ("inner_size", u64::MAX / 2)] {
        let name = format!("qwen35.ssm.{key}");
        let error = Files::of(&set_long(recorded("qwen3_5"), &name, largest)).open().expect_err(key).to_string();
        assert!(error.contains(&format!("{name} is {largest}; supported: 1 to 1048576")), "{error}");
    }
}

#[test]
fn invalid_decay_rates_are_refused_by_name() {
    let file = recorded("qwen3_5");
    let rates = Files::of(&file).opened();
    let rates = rates.tensor("model.layers.0.linear_attn.A_log").expect("the rates").bytes.to_vec();
    for rate in [0.5, 0.0, -0.0, f32::NAN, f32::NEG_INFINITY] {
        let bytes = [&rate.to_le_bytes(), &rates[4..]].concat();
        let error = Files::of(&replaced(file.clone(), &rates, &bytes)).open().expect_err("no logarithm").to_string();
        assert!(error.ends_with(&format!("ssm_a is {rate}; supported: finite numbers below 0")), "{error}");
    }
}

#[test]
fn a_vocabulary_without_placeholders_cannot_show_pictures() {
    let tokens = replaced(recorded("qwen3_5"), b"<|video_pad|>", b"<|audio_pad|>");
    let files = Files::of(&tokens).with("mmproj.gguf", &encoder());
    let checkpoint = files.opened();
    let [error] = checkpoint.source().skipped_encoders() else { panic!("the file has no placeholder of videos") };
    let text = error.to_string();
    assert!(text.contains("mmproj.gguf") && text.contains("a list without <|video_pad|>"), "{text}");
    let value: Value = Files::of(&tokens).opened().config["model_type"].clone();
    assert_eq!(value, json!("qwen3_5_text"), "text needs no placeholders");
}
