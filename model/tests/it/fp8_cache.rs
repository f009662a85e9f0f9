//! Keys and values in FP8: their memory, their scales, and the difference of the logits from the
//! logits with an unquantized cache.

use bursar_budgets::Hint;
use bursar_kernels::{CudaTarget, DType, Target};
use bursar_model::{
    LoadError, Model, checkpoint::Checkpoint, error::CheckpointError, flow::CacheFormat, weights::WeightError,
};
use serde_json::json;

use crate::{
    bench::{self, Bench, Case, alone, encode, relative_error, together},
    copy::Copy,
};

const CPU: Target = Target::Cpu { threads: 2 };
const FOLDER: &str = "tests/golden/qwen2_5_vl";
const CHANNEL: &str = "tests/golden/qwen3_fp8_dynamic";
const TENSOR: &str = "tests/golden/qwen3_fp8_modelopt";
const FILE: &str = "model.safetensors";
const KEYS: &str = "model.layers.0.self_attn.k_proj.k_scale";

fn open(folder: &str, cache: CacheFormat) -> Checkpoint {
    bench::open(folder).with_cache(cache)
}

fn refused(checkpoint: Checkpoint) -> LoadError {
    Model::plan(&checkpoint, &CPU).map(drop).expect_err("the value is refused as a scale")
}

#[test]
fn an_fp8_cache_takes_one_byte_per_element() {
    let gpu = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
    for (target, times) in [(CPU, 4), (gpu, 2)] {
        let [plain, rounded] = [CacheFormat::Plain, CacheFormat::Fp8].map(|cache| {
            Model::plan(&open(FOLDER, cache), &target).expect("the model is planned with or without kernels")
        });
        assert_eq!(plain.kv_shape(&target).token_bytes(), rounded.kv_shape(&target).token_bytes() * times);
        assert_eq!(plain.picture_row_bytes(&target), rounded.picture_row_bytes(&target));
        let (layers, scales) = (plain.kv_shape(&target).layers as u64, 256);
        assert!(
            (1..=layers * scales).contains(&(rounded.weight_bytes() - plain.weight_bytes()).0),
            "the plans differ only by the scales"
        );
    }
}

#[test]
fn fp8_cache_logits_stay_near_plain_logits_in_any_batch() {
    let [plain, rounded] = [CacheFormat::Plain, CacheFormat::Fp8].map(|cache| Bench::of(open(FOLDER, cache), 2));
    let cases: Vec<Case> = ["single_image", "two_turns", "text_only"]
        .iter()
        .map(|name| Case::read(FOLDER, &plain.checkpoint, name))
        .collect();
    let mut runs = Vec::new();
    for case in &cases {
        let (of_plain, of_rounded) = (encode(&plain, case), encode(&rounded, case));
        let expected = alone(&plain, case, &of_plain, &[usize::MAX]);
        let whole = alone(&rounded, case, &of_rounded, &[usize::MAX]);
        let worst = |found: &[Vec<f32>], expected: &[Vec<f32>]| {
            found.iter().zip(expected).map(|(found, expected)| relative_error(found, expected)).fold(0.0, f32::max)
        };
        let distance = worst(&whole.logits[..1], &expected.logits[..1]);
        println!("{}: logits after the prompt over FP8 differ by {distance:.1e}", case.name);
        assert!((1e-4..0.1).contains(&distance), "{}: {distance:e}", case.name);
        let chunked = alone(&rounded, case, &of_rounded, &[17, 40, 3]);
        // A different order of additions may move a key across the midpoint between two FP8
        // numbers.
        let noise = worst(&chunked.logits[..1], &whole.logits[..1]);
        println!("{}: in chunks by {noise:.1e}", case.name);
        assert!(noise < distance, "{}: noise is {noise:e} in chunks; rounding error is {distance:e}", case.name);
        runs.push((whole, of_rounded));
    }
    let asked: Vec<_> = cases.iter().zip(&runs).map(|(case, (_, rows))| (case, rows.clone())).collect();
    for ((found, (whole, _)), case) in together(&rounded, &asked, 2, 5).iter().zip(&runs).zip(&cases) {
        let noise = relative_error(&found.logits[0], &whole.logits[0]);
        println!("{}: in a batch with other sequences by {noise:.1e}", case.name);
        assert!(noise < 0.05, "{}: noise is {noise:e} in a batch with other sequences", case.name);
    }
}

/// Logits after a text, from a checkpoint with an FP8 cache.
fn logits(checkpoint: Checkpoint, folder: &str) -> Vec<f32> {
    let bench = Bench::of(checkpoint, 1);
    let case = Case::read(folder, &bench.checkpoint, "long");
    alone(&bench, &case, &[], &[usize::MAX]).logits.swap_remove(0)
}

#[test]
fn an_fp8_cache_uses_the_checkpoints_key_and_value_scales() {
    let stored = logits(open(TENSOR, CacheFormat::Fp8), TENSOR);
    let copy = Copy::of(TENSOR).rewrite(FILE, |header, data| {
        let start = header[KEYS]["data_offsets"][0].as_u64().expect("a place") as usize;
        data[start..start + 4].copy_from_slice(&64.0f32.to_le_bytes());
    });
    let coarse = logits(copy.open().with_cache(CacheFormat::Fp8), TENSOR);
    assert!(relative_error(&coarse, &stored) > 1e-3, "keys in steps of eight differ from the stored keys");
    let plain = logits(open(TENSOR, CacheFormat::Plain), TENSOR);
    let of_plain = logits(copy.open(), TENSOR);
    assert_eq!(of_plain, plain, "a plain cache ignores the scales");
}

#[test]
fn cache_scales_are_read_by_any_known_name() {
    let stored = logits(open(TENSOR, CacheFormat::Fp8), TENSOR);
    let plain = logits(open(TENSOR, CacheFormat::Plain), TENSOR);
    for end in [
        "self_attn.{}_scale",
        "self_attn.{}_proj.output_scale",
        "self_attn.qkv_proj.{}_scale",
        "self_attn.attn.{}_scale",
    ] {
        let other = |name: &str| {
            ["k", "v"].iter().fold(name.to_owned(), |name, part| {
                name.replace(&format!("self_attn.{part}_proj.{part}_scale"), &end.replace("{}", part))
            })
        };
        let copy = Copy::of(TENSOR).rename(FILE, other);
        assert_eq!(logits(copy.open().with_cache(CacheFormat::Fp8), TENSOR), stored, "{end}");
        assert_eq!(logits(copy.open(), TENSOR), plain, "{end}");
    }
    // One scale for both keys and values. `alike` first makes the two scales equal.
    let alike = |names: [&str; 2]| {
        let copy = Copy::of(TENSOR).rewrite(FILE, |header, data| {
            let entries = header.as_object_mut().expect("an object");
            let values = entries.remove(&KEYS.replace("k_", "v_")).expect("the scale");
            let [from, to] = [&entries[KEYS], &values].map(|entry| entry["data_offsets"][0].as_u64().expect("a place"));
            data.copy_within(from as usize..from as usize + 4, to as usize);
            let keys = entries.remove(KEYS).expect("the scale");
            entries.extend([(names[0].to_owned(), keys), (names[1].to_owned(), values)]);
        });
        logits(copy.open().with_cache(CacheFormat::Fp8), TENSOR)
    };
    // The second scale is renamed to a buffer that is never read.
    let one = alike(["model.layers.0.self_attn.kv_scale", "model.layers.0.self_attn.rotary_emb.inv_freq"]);
    assert_eq!(one, alike([KEYS, "model.layers.0.self_attn.v_proj.v_scale"]));
    // The quantization settings need not declare the scales.
    let silent = Copy::of(TENSOR).set("hf_quant_config.json", &["quantization", "kv_cache_quant_algo"], json!(null));
    assert_eq!(logits(silent.open().with_cache(CacheFormat::Fp8), TENSOR), stored);
    assert_eq!(logits(silent.open(), TENSOR), plain);
}

#[test]
fn plain_weights_may_come_with_cache_scales() {
    const PLAIN: &str = "tests/golden/qwen3";
    let with_scales = |scale: f32| {
        Copy::of(PLAIN).rewrite(FILE, |header, data| {
            for name in ["k_proj.k_scale", "v_proj.v_scale"] {
                let place = [data.len(), data.len() + 4];
                header[format!("model.layers.0.self_attn.{name}")] =
                    json!({ "dtype": "F32", "shape": [], "data_offsets": place });
                data.extend(scale.to_le_bytes());
            }
        })
    };
    let cached = |copy: &Copy| logits(copy.open().with_cache(CacheFormat::Fp8), PLAIN);
    let (plain, of_one) = (logits(bench::open(PLAIN), PLAIN), logits(open(PLAIN, CacheFormat::Fp8), PLAIN));
    assert_eq!(logits(with_scales(64.0).open(), PLAIN), plain, "a plain cache ignores the scales");
    assert_eq!(cached(&with_scales(1.0)), of_one);
    assert!(relative_error(&cached(&with_scales(64.0)), &of_one) > 1e-3);
    let (file, index) = ("model-00001-of-00002.safetensors", "model.safetensors.index.json");
    let stray = |name: &str| {
        let copy = Copy::of(FOLDER).add(file, name).set(index, &["weight_map", name], json!(file));
        Model::plan(&copy.open().with_cache(CacheFormat::Fp8), &CPU).map(drop)
    };
    stray("visual.blocks.0.attn.k_scale").expect("the tower has no cache, so its scale is ignored");
    // A layer's scale under a name that no known tool writes is refused, because the layer's keys
    // would be scaled by 1.
    for name in ["model.layers.0.attn.k_scale", "language_model.layers.0.self_attn.k_scale"] {
        let error = stray(name).expect_err("the scale names an unknown layer");
        assert!(matches!(&error, LoadError::Weights(WeightError::Extra { .. })), "{error:?}");
    }
    let error = refused(
        Copy::of(TENSOR).add(FILE, "model.layers.0.self_attn.o_proj.k_scale").open().with_cache(CacheFormat::Fp8),
    );
    assert!(matches!(&error, LoadError::Weights(WeightError::Extra { .. })), "{error:?}");
}

#[test]
fn scales_of_queries_and_probabilities_are_refused_with_a_hint() {
    for end in ["self_attn.q_scale", "self_attn.q_proj.q_scale", "self_attn.prob_scale"] {
        let name = format!("model.layers.0.{end}");
        for cache in [CacheFormat::Plain, CacheFormat::Fp8] {
            let error = refused(Copy::of(TENSOR).add(FILE, &name).open().with_cache(cache));
            assert!(matches!(&error, LoadError::Weights(WeightError::AttentionScale { .. })), "{error:?}");
            let words =
                "is a scale of quantized queries or probabilities, but attention computes these in a wider type";
            assert_eq!(error.to_string(), format!("{name} {words}"));
            assert!(error.hint().contains("remove the scales of queries and probabilities"), "{}", error.hint());
        }
    }
}

#[test]
fn a_missing_or_invalid_cache_scale_is_a_typed_error() {
    let rounded = |copy: Copy| refused(copy.open().with_cache(CacheFormat::Fp8));
    for bytes in [f32::NAN, 0.0, -1.0, f32::INFINITY, 1e38, 1e-39].map(f32::to_le_bytes) {
        let error = rounded(Copy::of(TENSOR).rewrite(FILE, |header, data| {
            let start = header[KEYS]["data_offsets"][0].as_u64().expect("a place") as usize;
            data[start..start + 4].copy_from_slice(&bytes);
        }));
        assert!(matches!(&error, LoadError::Weights(WeightError::Scale { name, .. }) if name == KEYS), "{error}");
    }
    let values = "model.layers.0.self_attn.v_proj.v_scale";
    let error = rounded(Copy::of(TENSOR).rename(FILE, |name| name.replace("v_proj.v_scale", "v_proj.old.v_scale")));
    let LoadError::Weights(WeightError::Checkpoint(CheckpointError::MissingTensor { tensor, .. })) = &error else {
        panic!("{error:?}");
    };
    assert_eq!(tensor, values, "one of two scales is missing");
    // The scheme announces a scale for all heads of a layer or for each head, but the
    // file has no scales.
    for strategy in ["tensor", "attn_head"] {
        let scheme =
            json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy, "dynamic": false });
        let copy = Copy::of(CHANNEL).set("config.json", &["quantization_config", "kv_cache_scheme"], scheme);
        Model::plan(&copy.open().with_cache(CacheFormat::Fp8), &CPU).expect("a layer without scales uses 1");
    }
}
