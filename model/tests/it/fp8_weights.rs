//! FP8 checkpoints that contradict themselves or need unsupported features, and unquantized
//! checkpoints that are quantized while they load.

use std::sync::Arc;

use bursar_budgets::{Address, Bytes, Hint};
use bursar_kernels::{CudaTarget, DType, E4m3, Target, WeightScales};
use bursar_model::{
    LoadError, Model,
    checkpoint::{Checkpoint, CheckpointSource, QuantizationError, WeightQuantization},
    error::CheckpointError,
    registry,
    weights::{WeightError, WeightMap, WeightSource},
};
use serde_json::{Value, json};

use crate::{
    bench::{Bench, Case, alone, encode, open, relative_error, repository},
    copy::{Copy, INTERNVL, QWEN2, QWEN2_5_VL, QWEN3_MOE, QWEN3_VL_MOE},
};

const FILE: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const BLOCK: &str = "tests/golden/qwen3_fp8";
const CHANNEL: &str = "tests/golden/qwen3_fp8_dynamic";
const TENSOR: &str = "tests/golden/qwen3_fp8_modelopt";
pub const EXPERTS: &str = "tests/golden/qwen3_moe_fp8";
const CPU: Target = Target::Cpu { threads: 2 };
const GPU: Target = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
const UP: &str = "model.layers.1.mlp.up_proj";

/// The error of a checkpoint whose configuration has another value at `field`.
fn refused(folder: &str, field: &[&str], value: Value) -> String {
    let error = Copy::of(folder).set(CONFIG, &[&["quantization_config"], field].concat(), value).error();
    assert!(matches!(error, LoadError::Quantization(_)), "{error:?}");
    error.to_string()
}

#[test]
fn unsupported_fp8_settings_are_refused_by_name() {
    let group = |rest: &[&'static str]| [&["config_groups", "group_0"], rest].concat();
    for (folder, field, value, words) in [
        (
            BLOCK,
            vec!["quant_method"],
            json!("bitsandbytes"),
            "quant_method is bitsandbytes; supported: fp8, compressed-tensors, modelopt, awq and gptq",
        ),
        (BLOCK, vec!["weight_block_size"], json!([64, 128]), "weight_block_size is [64,128]; supported: [128, 128]"),
        (BLOCK, vec!["weight_block_size"], json!(null), "weight_block_size is missing"),
        (
            CHANNEL,
            vec!["sparsity_config"],
            json!({ "format": "sparse-24-bitmask" }),
            "sparsity_config.format is sparse-24-bitmask; supported: dense",
        ),
        (BLOCK, vec!["activation_scheme"], json!("static"), "activation_scheme is static; supported: dynamic"),
        (BLOCK, vec!["fmt"], json!("e5m2"), "fmt is e5m2"),
        (BLOCK, vec!["scale_fmt"], json!("ue8m0"), "scale_fmt is ue8m0"),
        (
            BLOCK,
            vec!["modules_to_convert"],
            json!(["embed"]),
            "modules_to_convert is [\"embed\"]; this setting is unknown and may change",
        ),
        (
            BLOCK,
            vec!["modules_to_not_convert"],
            json!("lm_head"),
            "modules_to_not_convert is lm_head; supported: a list",
        ),
        (
            CHANNEL,
            vec!["format"],
            json!("int-quantized"),
            "format is int-quantized; supported: float-quantized and pack",
        ),
        (CHANNEL, vec!["kv_cache_scheme"], json!({ "num_bits": 4 }), "kv_cache_scheme.num_bits is 4"),
        (CHANNEL, vec!["ignore"], json!(["re:("]), "the module pattern \"re:(\" is not valid"),
        (CHANNEL, group(&["targets"]), json!(["Linear", "Conv2d"]), "group_0.targets is [\"Linear\",\"Conv2d\"]"),
        (CHANNEL, group(&["weights", "num_bits"]), json!(4), "group_0.weights.num_bits is 4"),
        (CHANNEL, group(&["weights", "actorder"]), json!("group"), "group_0.weights.actorder is group"),
        (CHANNEL, group(&["weights", "strategy"]), json!("group"), "group_0.weights.strategy is group"),
        (CHANNEL, group(&["input_activations"]), json!(null), "group_0.input_activations is missing"),
        (CHANNEL, group(&["input_activations", "strategy"]), json!("group"), "input_activations.strategy is group"),
        (CHANNEL, vec!["config_groups", "group_1"], json!({}), "config_groups is {"),
    ] {
        let error = refused(folder, &field, value);
        let place =
            if words.starts_with("the module pattern") { "config.json: " } else { "config.json: quantization_config." };
        assert!(error.starts_with(place) && error.contains(words), "'{error}' does not say '{words}'");
    }
    let whole = json!({ "num_bits": 8, "type": "float", "dynamic": false });
    let modelopt = json!({
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.1.self_attn*"],
        "kv_cache_scheme": whole,
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": whole, "input_activations": whole } },
    });
    let with = |field: &[&str], value| {
        let copy = Copy::of(TENSOR).set(CONFIG, &["quantization_config"], modelopt.clone());
        copy.set(CONFIG, &[&["quantization_config"], field].concat(), value)
    };
    Model::plan(&with(&["ignore"], modelopt["ignore"].clone()).open(), &CPU).expect("the checkpoint is served");
    for (field, value, words) in [
        (vec!["kv_cache_scheme", "num_bits"], json!(4), "kv_cache_scheme.num_bits is 4; supported: 8"),
        (vec!["kv_cache_scheme", "type"], json!("int"), "kv_cache_scheme.type is int; supported: float"),
        (vec!["kv_cache_scheme", "dynamic"], json!(true), "kv_cache_scheme.dynamic is true; supported: false"),
        (vec!["kv_cache_scheme", "strategy"], json!("attn_head"), "kv_cache_scheme.strategy is attn_head"),
        (group(&["weights", "num_bits"]), json!(4), "config_groups.group_0.weights.num_bits is 4; supported: 8"),
        (
            group(&["weights", "group_size"]),
            json!(16),
            "config_groups.group_0.weights.group_size is 16; this setting is unknown",
        ),
        (group(&["input_activations", "dynamic"]), json!(true), "group_0.input_activations.dynamic is true"),
        (group(&["input_activations"]), json!(null), "group_0.input_activations is missing; supported: an object"),
        (group(&["targets"]), json!(["Conv2d"]), "group_0.targets is [\"Conv2d\"]; supported: [\"Linear\"]"),
    ] {
        let error = with(&field, value).error();
        assert!(matches!(error, LoadError::Quantization(_)), "{error:?}");
        assert!(error.to_string().contains(words), "'{error}' does not say '{words}'");
    }
    let field = ["quantization", "quant_algo"];
    let error = Copy::of(TENSOR).set("hf_quant_config.json", &field, json!("W4A8_AWQ")).error();
    let words =
        "hf_quant_config.json: quantization.quant_algo is W4A8_AWQ; supported: FP8, FP8_PER_CHANNEL_PER_TOKEN, ";
    assert!(error.to_string().starts_with(words), "{error}");
    assert!(error.hint().contains("bf16"), "{}", error.hint());
    let error = Copy::of(TENSOR).write("hf_quant_config.json", "{\"quantization\": {").error();
    assert!(error.to_string().starts_with("hf_quant_config.json is not a JSON object: EOF"), "{error}");
    assert!(error.hint().contains("again"), "{}", error.hint());
    for folder in [QWEN2, QWEN2_5_VL] {
        let quantised = json!({ "quant_method": "hqq", "bits": 4, "modules_to_not_convert": ["visual"] });
        let error = Copy::of(folder).set(CONFIG, &["quantization_config"], quantised).error();
        assert!(error.to_string().contains("quant_method is hqq"), "{error}");
    }
}

/// The error of a copy whose tensor `name` has a changed header entry under the same name.
fn error_of(folder: &str, name: &str, change: impl FnOnce(&mut Value)) -> String {
    let error = Copy::of(folder).edit_header(FILE, name, name, change).error();
    assert!(!error.hint().is_empty());
    error.to_string()
}

#[test]
fn tensors_that_contradict_the_quantization_settings_are_named() {
    let weight = format!("{UP}.weight");
    let scale = format!("{UP}.weight_scale_inv");
    // Unquantized numbers have twice the bytes.
    let halve = |entry: &mut Value| {
        entry["dtype"] = json!("BF16");
        entry["shape"][1] = json!(128);
    };
    let plain =
        Copy::of(BLOCK).set(CONFIG, &["hidden_size"], json!(128)).edit_header(FILE, &weight, &weight, halve).error();
    assert!(plain.to_string().contains("model.embed_tokens.weight has shape"), "shapes are checked first: {plain}");
    let e5m2 = error_of(BLOCK, &weight, |entry| entry["dtype"] = json!("F8_E5M2"));
    assert_eq!(e5m2, format!("the tensor {weight} has the type F8_E5M2; supported: BF16, F16, F32 and F8_E4M3"));
    let unknown = Copy::of(BLOCK).set(CONFIG, &["quantization_config"], Value::Null).error();
    assert_eq!(
        unknown.to_string(),
        "tensor model.layers.0.self_attn.q_proj.weight holds f8e4m3, but quantization_config says that it is not \
         quantized"
    );
    assert!(matches!(unknown, LoadError::Weights(WeightError::Format { found: DType::F8E4M3, .. })), "{unknown:?}");
    // `down_proj` is unquantized in the file. This list no longer contains it, so it should be FP8.
    let list = ["quantization_config", "modules_to_not_convert"];
    let listed = Copy::of(BLOCK).set(CONFIG, &list, json!(["lm_head", "layers.1.self_attn"])).error();
    assert_eq!(
        listed.to_string(),
        "tensor model.layers.1.mlp.down_proj.weight holds bf16, but quantization_config says that it is quantized"
    );
    let partly = Copy::of(BLOCK).set(CONFIG, &list, json!(["model.layers.0.self_attn.k_proj"])).error();
    assert_eq!(
        partly.to_string(),
        "the checkpoint's quantization_config quantizes model.layers.0.self_attn.q_proj and not \
         model.layers.0.self_attn.k_proj, but they are computed as one"
    );
    let missing = Copy::of(BLOCK).edit_header(FILE, &scale, &format!("{UP}.weight_scale"), |_| {}).error();
    let LoadError::Weights(WeightError::Checkpoint(CheckpointError::MissingTensor { tensor, .. })) = &missing else {
        panic!("{missing:?}");
    };
    assert_eq!(tensor, &scale);
    assert!(missing.hint().contains("weight_scale"), "{}", missing.hint());
    let shape = error_of(BLOCK, &scale, |entry| entry["shape"] = json!([1, 4]));
    assert_eq!(shape, format!("the scales {scale} have shape [1, 4], but quantization_config asks for [2, 2]"));
    let rows = error_of(CHANNEL, &format!("{UP}.weight_scale"), |entry| entry["shape"] = json!([8, 17]));
    assert!(rows.contains("have shape [8, 17], but quantization_config asks for [136, 1]"), "{rows}");
    let shape = Copy::of(BLOCK).edit_header(FILE, &scale, &scale, |entry| entry["shape"] = json!([1, 4])).error();
    assert!(
        shape.hint().starts_with("check quantization_config, which says how many numbers share a scale"),
        "{}",
        shape.hint()
    );
}

#[test]
fn quantization_settings_are_found_in_every_known_place() {
    let weigh = |copy: &Copy| Model::plan(&copy.open(), &CPU).expect("the model is planned").weight_bytes();
    let early = Copy::of(CHANNEL);
    let mut settings = early.json(CONFIG)["quantization_config"].clone();
    settings.as_object_mut().expect("an object").remove("quant_method");
    settings["sparsity_config"] =
        json!({ "format": "dense", "global_sparsity": 0.15, "sparsity_structure": "unstructured" });
    let early = early.set(CONFIG, &["quantization_config"], Value::Null).set(CONFIG, &["compression_config"], settings);
    assert_eq!(weigh(&early), weigh(&Copy::of(CHANNEL)));
    let copy = by_channel(QWEN2_5_VL, json!(["lm_head"]), is_decoders);
    let weight = weigh(&copy);
    let mut text = copy.json(CONFIG);
    for key in ["vision_config", "architectures", "model_type"] {
        text.as_object_mut().expect("an object").remove(key);
    }
    let inner = copy.set(CONFIG, &["text_config"], text).set(CONFIG, &["quantization_config"], Value::Null);
    assert_eq!(weigh(&inner), weight, "settings in the text config are read");
}

#[test]
fn quantized_tensors_that_must_be_plain_are_refused() {
    let head = by_channel(QWEN2_5_VL, json!(["re:visual.*"]), |name| is_decoders(name) || name == "lm_head.weight");
    let head = head.error();
    let words = "tensor lm_head.weight holds f8e4m3, but embeddings, lm_head, norms and routers must not be quantized";
    assert_eq!(head.to_string(), words);
    assert!(head.hint().starts_with("load a release in which it is not quantized"), "{}", head.hint());
    // InternVL's tower has layer scales. Without the tensor file, the tower counts as unquantized.
    let plan = |ignored: Value| {
        let mut settings = Copy::of(CHANNEL).json(CONFIG)["quantization_config"].clone();
        settings["ignore"] = ignored;
        let copy = Copy::of(INTERNVL).set(CONFIG, &["quantization_config"], settings);
        let random = registry::without_weights(CheckpointSource::Folder(copy.0.clone())).expect("valid settings");
        let settings_alone = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("a valid checkpoint");
        (Model::plan(&settings_alone, &CPU).expect("the model is planned").weight_bytes(), copy)
    };
    let tower = json!(["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]);
    let ((of_listed, _), (silent, copy)) = (plan(tower), plan(json!(["lm_head"])));
    assert_eq!(silent, of_listed);
    // All tensors in the file are bf16. A weight scale means that a tower module should be FP8.
    let module = "vision_tower.encoder.layer.0.attention.projection_layer";
    let error = copy.add(FILE, &format!("{module}.weight_scale")).error();
    assert!(matches!(&error, LoadError::Weights(WeightError::ScaledOutputs { name, .. }) if name == module), "{error}");
}

#[test]
fn text_config_may_repeat_the_quantization_settings() {
    let copy = by_channel(QWEN2_5_VL, json!(["lm_head"]), is_decoders);
    let config = copy.json(CONFIG);
    let mut text: Value = config.clone();
    for key in ["vision_config", "architectures", "model_type"] {
        text.as_object_mut().expect("an object").remove(key);
    }
    let copy = copy.set(CONFIG, &["text_config"], text);
    Model::plan(&copy.open(), &CPU).expect("both places give the same settings");
    let error = copy.set(CONFIG, &["text_config", "quantization_config", "format"], json!("other")).error();
    assert!(error.to_string().contains("text_config.quantization_config"), "{error}");
}

/// The error of a checkpoint whose tensor `name` begins with these bytes.
fn with_bytes(folder: &str, name: &str, bytes: &[u8]) -> String {
    Copy::of(folder).rewrite(FILE, |header, data| overwrite(header, data, name, bytes)).error().to_string()
}

fn overwrite(header: &Value, data: &mut [u8], name: &str, bytes: &[u8]) {
    let start = header[name]["data_offsets"][0].as_u64().expect("a place") as usize;
    data[start..start + bytes.len()].copy_from_slice(bytes);
}

#[test]
fn invalid_scales_are_named_with_their_value() {
    let half = |number: f32| half::bf16::from_f32(number).to_le_bytes();
    let scale = format!("{UP}.weight_scale_inv");
    for (number, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-1.0, "-1")] {
        let error = with_bytes(BLOCK, &scale, &half(number));
        assert_eq!(error, format!("{scale} holds the scale {shown}; expected a number of at least 0"));
    }
    for part in ["weight_scale", "input_scale"] {
        let name = format!("model.layers.0.mlp.down_proj.{part}");
        for number in [0.0f32, f32::NAN, -2.0] {
            let error = with_bytes(TENSOR, &name, &number.to_le_bytes());
            assert!(error.starts_with(&format!("{name} holds the scale ")), "{error}");
            assert!(error.ends_with("; expected a number above 0"), "{error}");
        }
    }
}

#[test]
fn scales_beyond_the_range_of_f32_are_named() {
    // bf16 has the exponent range of f32.
    let block = format!("{UP}.weight_scale_inv");
    let huge = half::bf16::from_f32(1e36);
    let error = with_bytes(BLOCK, &block, &huge.to_le_bytes());
    let beyond = "expected a number that fits f32 when multiplied by 448";
    assert_eq!(error, format!("{block} holds the scale {}; {beyond}", huge.to_f32()));
    for part in ["weight_scale", "input_scale"] {
        let name = format!("model.layers.0.mlp.down_proj.{part}");
        let error = with_bytes(TENSOR, &name, &7.7e35f32.to_le_bytes());
        assert!(error.starts_with(&name) && error.ends_with(beyond), "{error}");
        let copy =
            Copy::of(TENSOR).rewrite(FILE, |header, data| overwrite(header, data, &name, &7.5e35f32.to_le_bytes()));
        Model::plan(&copy.open(), &CPU).expect("the scale times 448 fits f32");
    }
    let name = "model.layers.0.mlp.down_proj.input_scale";
    let error = with_bytes(TENSOR, name, &1e-39f32.to_le_bytes());
    assert!(error.ends_with("expected at least 1.18e-38, the smallest normal number"), "{error}");
}

#[test]
fn every_gpu_refuses_only_fp8_shapes_without_kernels() {
    let Target::Cuda(hopper) = GPU else { unreachable!("the target is a GPU") };
    for (capability, name) in [((9, 0), "sm_90"), ((8, 9), "sm_89"), ((8, 0), "sm_80"), ((7, 5), "sm_75")] {
        let gpu = Target::Cuda(CudaTarget { capability, ..hopper });
        for folder in [BLOCK, CHANNEL, TENSOR] {
            let checkpoint = open(folder);
            let [on_cpu, on_gpu] = [CPU, gpu].map(|target| Model::plan(&checkpoint, &target).expect("a model plan"));
            assert_eq!(on_cpu.parameters(), on_gpu.parameters(), "padding and scales do not count as parameters");
            let config = registry::FamilyConfig::of(&checkpoint).expect("a family serves it").decoder().clone();
            let is_served = config.intermediate.is_multiple_of(16) && config.hidden.is_multiple_of(8);
            match claimed(&checkpoint, gpu) {
                Ok(()) => assert!(is_served, "{folder}"),
                Err(error) => {
                    assert!(!is_served, "{folder}: {error}");
                    let expected = format!("FP8 weights of this shape are not supported on cuda {name} yet");
                    assert_eq!(error.to_string(), expected);
                }
            }
        }
        claimed(&open(QWEN2), gpu).expect("plain weights have kernels");
    }
}

#[test]
fn an_older_gpu_plans_fp8_experts_but_cannot_load_them() {
    let Target::Cuda(hopper) = GPU else { unreachable!("the target is a GPU") };
    let older = Target::Cuda(CudaTarget { capability: (8, 9), ..hopper });
    let checkpoint = open(EXPERTS);
    Model::plan(&checkpoint, &older).expect("the model is planned");
    let experts = |target| {
        let formats = checkpoint.weight_formats().expect("the checkpoint is served");
        // SAFETY: the claimed tensors are never accessed, so their address need not be backed.
        let mut map = unsafe { WeightMap::at(&checkpoint, target, formats, Address(4096)) };
        map.set_in_decoder(true);
        let (experts, hidden, intermediate) = (4, 144, 128);
        map.experts("model.layers.0.mlp.experts", experts.into(), (hidden, intermediate)).map(drop)
    };
    experts(GPU).expect("Hopper has kernels for them");
    let error = experts(older).expect_err("the GPU has no kernels for the format");
    assert_eq!(error.to_string(), "FP8 weights of experts are not supported on cuda sm_89 yet");
    let error = LoadError::from(error);
    assert_eq!(
        error.hint(),
        "leave quantization out if it is set, load another checkpoint of the model, or load it on a CPU"
    );
}

/// Claims a projection of the decoder at an address that is never accessed.
fn claimed(checkpoint: &Checkpoint, target: Target) -> Result<(), WeightError> {
    let formats = checkpoint.weight_formats().expect("the checkpoint is served");
    // SAFETY: the claimed tensors are never accessed, so their address need not be backed.
    let mut map = unsafe { WeightMap::at(checkpoint, target, formats, Address(4096)) };
    map.set_in_decoder(true);
    let config = registry::FamilyConfig::of(checkpoint).expect("a family serves it").decoder().clone();
    map.linear("model.layers.0.mlp.down_proj", config.hidden, config.intermediate, false).map(drop)
}

/// The logits of a case's prompt.
pub fn logits(bench: &Bench, folder: &str) -> Vec<f32> {
    let name = if folder == QWEN3_VL_MOE { "two_turns" } else { "short" };
    let case = Case::read(folder, &bench.checkpoint, name);
    let rows = encode(bench, &case);
    alone(bench, &case, &rows, &[usize::MAX]).logits.remove(0)
}

/// An unquantized checkpoint that is quantized while it loads.
fn rounded(folder: &str, quantization: WeightQuantization) -> Checkpoint {
    open(folder).with_quantization(Some(quantization))
}

#[test]
fn fp8_rounding_on_load_saves_memory_and_changes_logits_little() {
    // The last checkpoint has the experts of a layer in one tensor, whose matrices are transposed.
    for folder in [QWEN2, "tests/golden/qwen3", QWEN3_MOE, QWEN3_VL_MOE] {
        let plain = Bench::of(open(folder), 2);
        let expected = logits(&plain, folder);
        for quantization in WeightQuantization::ROUNDING {
            let bench = Bench::of(rounded(folder, quantization), 2);
            let error = relative_error(&logits(&bench, folder), &expected);
            println!("{folder} {quantization}: {error:.1e}");
            // Weights and activations have three bits of mantissa.
            assert!((1e-4..0.35).contains(&error), "{folder} {quantization}: {error}");
            assert_eq!(bench.model.parameters(), plain.model.parameters());
            assert!(bench.model.weight_bytes() < plain.model.weight_bytes());
        }
    }
}

#[test]
fn an_fp8_checkpoint_accepts_only_its_stored_format_by_name() {
    let shape = |folder: &str, quantization| {
        Model::plan(&open(folder).with_quantization(quantization), &CPU).expect("the model is planned").weight_bytes()
    };
    for (folder, quantization) in [
        (BLOCK, WeightQuantization::Fp8PerBlock),
        (CHANNEL, WeightQuantization::Fp8PerChannel),
        (CHANNEL, WeightQuantization::CompressedTensors),
        (TENSOR, WeightQuantization::ModelOpt),
    ] {
        let stored = shape(folder, None);
        assert_eq!(shape(folder, Some(WeightQuantization::Fp8)), stored);
        assert_eq!(shape(folder, Some(quantization)), stored);
    }
    for (folder, quantization) in [
        (BLOCK, WeightQuantization::Fp8PerTensor),
        (BLOCK, WeightQuantization::ModelOpt),
        (TENSOR, WeightQuantization::CompressedTensors),
    ] {
        let error = Model::plan(&rounded(folder, quantization), &CPU).err().expect("other stored formats fail");
        assert!(matches!(error, LoadError::Quantization(QuantizationError::AlreadyQuantized { .. })), "{error:?}");
        let words = "but the checkpoint is already quantized in another way";
        assert!(error.to_string().starts_with(&format!("quantization is {quantization}, {words} (")), "{error}");
    }
    for quantization in WeightQuantization::STORED {
        let error = Model::plan(&rounded(QWEN2, quantization), &CPU).err().expect("plain weights are refused");
        assert_eq!(
            error.to_string(),
            format!("quantization is {quantization}, but the checkpoint's weights are not quantized")
        );
        assert!(error.hint().contains("set it to fp8"), "{}", error.hint());
        assert_eq!(quantization.name().parse(), Ok(quantization));
    }
}

/// A tensor's name, type, shape and bytes.
pub type Stored = (String, String, Value, Vec<u8>);

/// All tensors of a file.
pub fn tensors(header: &Value, data: &[u8]) -> Vec<Stored> {
    let entries = header.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__");
    let stored = |(name, entry): (&String, &Value)| {
        let [start, end] = [0, 1].map(|side| entry["data_offsets"][side].as_u64().expect("a place") as usize);
        let dtype = entry["dtype"].as_str().expect("a type").to_owned();
        (name.clone(), dtype, entry["shape"].clone(), data[start..end].to_vec())
    };
    entries.map(stored).collect()
}

/// A file of these tensors without gaps, each aligned.
pub fn laid_out(mut whole: Vec<Stored>) -> (Value, Vec<u8>) {
    let size = |dtype: &str| if dtype == "F32" { 0 } else { 1 + usize::from(dtype == "F8_E4M3") };
    whole.sort_by_key(|(_, dtype, ..)| size(dtype));
    let (mut header, mut data) = (json!({}), Vec::new());
    for (name, dtype, shape, bytes) in whole {
        let place = [data.len(), data.len() + bytes.len()];
        header[&name] = json!({ "dtype": dtype, "shape": shape, "data_offsets": place });
        data.extend(bytes);
    }
    (header, data)
}

/// Rounds the bf16 matrices of `folder` that `is_rounded` names to FP8 by channel, and declares
/// this quantization in the configuration.
fn by_channel(folder: &str, ignored: Value, is_rounded: impl Fn(&str) -> bool) -> Copy {
    let mut copy = Copy::of(folder);
    let index = "model.safetensors.index.json";
    for file in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        let mut scales = Vec::new();
        copy = copy.rewrite(file, |header, data| {
            let mut whole = Vec::new();
            for (name, dtype, shape, bytes) in tensors(header, data) {
                let columns = shape[1].as_u64().filter(|_| shape[2].is_null() && is_rounded(&name));
                let Some(columns) = columns else {
                    whole.push((name, dtype, shape, bytes));
                    continue;
                };
                let number = |bytes: &[u8; 2]| half::bf16::from_le_bytes(*bytes).to_f32();
                let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(number).collect();
                let rows = numbers.chunks(columns as usize);
                let scale = |row: &[f32]| row.iter().fold(0.0f32, |largest, number| largest.max(number.abs())) / 448.0;
                let of_rows: Vec<f32> = rows.clone().map(scale).collect();
                let codes =
                    rows.zip(&of_rows).flat_map(|(row, scale)| row.iter().map(move |x| E4m3::from_f32(x / scale).0));
                scales.push(name.replace(".weight", ".weight_scale"));
                whole.push((name.clone(), "F8_E4M3".to_owned(), shape, codes.collect()));
                let bytes = of_rows.iter().flat_map(|scale| scale.to_le_bytes()).collect();
                whole.push((scales[scales.len() - 1].clone(), "F32".to_owned(), json!([of_rows.len(), 1]), bytes));
            }
            (*header, *data) = laid_out(whole);
        });
        for scale in scales {
            copy = copy.set(index, &["weight_map", &scale], json!(file));
        }
    }
    let settings = repository(CHANNEL).join(CONFIG);
    let settings: Value = serde_json::from_slice(&std::fs::read(settings).expect("the file exists")).expect("JSON");
    copy.set(CONFIG, &["quantization_config"], settings["quantization_config"].clone()).set(
        CONFIG,
        &["quantization_config", "ignore"],
        ignored,
    )
}

#[test]
fn a_vision_model_may_have_fp8_in_decoder_and_tower() {
    let plain = Bench::of(open(QWEN2_5_VL), 2);
    let case = Case::read(QWEN2_5_VL, &plain.checkpoint, "single_image");
    let answer = |bench: &Bench| {
        let rows = encode(bench, &case);
        alone(bench, &case, &rows, &[usize::MAX]).logits.remove(0)
    };
    let expected = answer(&plain);
    let in_tower = |name: &str| name.starts_with("visual.") && name.ends_with(".weight");
    let decoder = by_channel(QWEN2_5_VL, json!(["lm_head", "re:visual.*"]), is_decoders);
    let both = by_channel(QWEN2_5_VL, json!(["lm_head"]), |name| is_decoders(name) || in_tower(name));
    let [decoder, both] = [decoder, both].map(|copy| Bench::of(copy.open(), 2));
    let [one, two] = [&decoder, &both].map(answer);
    for (found, what) in [(&one, "decoder"), (&two, "decoder and tower")] {
        let error = relative_error(found, &expected);
        println!("FP8 in the {what}: {error:.1e}");
        assert!((1e-4..0.35).contains(&error), "{what}: {error}");
    }
    assert_ne!(one, two);
    assert!(both.model.weight_bytes() < decoder.model.weight_bytes());
    // The numbers are the same as when the unquantized checkpoint is quantized while it loads.
    let rounded = Bench::of(rounded(QWEN2_5_VL, WeightQuantization::Fp8PerChannel), 2);
    assert_eq!(answer(&rounded), one);
}

/// Whether a tensor is a matrix of the decoder's layers.
fn is_decoders(name: &str) -> bool {
    name.starts_with("model.layers.") && name.ends_with("_proj.weight")
}

#[test]
fn an_unlisted_plain_tower_is_recognized_from_the_file() {
    let [listed, silent] =
        [json!(["lm_head", "re:visual.*"]), json!(["lm_head"])].map(|list| by_channel(QWEN2_5_VL, list, is_decoders));
    let answers = [&listed, &silent].map(|copy| {
        let bench = Bench::of(copy.open(), 2);
        let case = Case::read(QWEN2_5_VL, &bench.checkpoint, "single_image");
        let rows = encode(&bench, &case);
        alone(&bench, &case, &rows, &[usize::MAX]).logits.remove(0)
    });
    assert_eq!(answers[0], answers[1]);
    // The list decides for decoder modules. A tower with a weight scale must have FP8 numbers.
    let down = "model.layers.1.mlp.down_proj.weight";
    let unlisted = by_channel(QWEN2_5_VL, json!(["lm_head"]), |name| is_decoders(name) && name != down).error();
    assert_eq!(
        unlisted.to_string(),
        format!("tensor {down} holds bf16, but quantization_config says that it is quantized")
    );
    let (file, index) = ("model-00001-of-00002.safetensors", "model.safetensors.index.json");
    let scale = "visual.merger.mlp.0.weight_scale";
    let scaled = silent.add(file, scale).set(index, &["weight_map", scale], json!(file)).error();
    let expected = "tensor visual.merger.mlp.0.weight holds bf16, but quantization_config says that it is quantized";
    assert_eq!(scaled.to_string(), expected);
}

#[test]
fn a_plan_without_weights_has_the_bytes_of_the_checkpoint() {
    let weigh = |checkpoint: &Checkpoint| Model::plan(checkpoint, &CPU).expect("the model is planned").weight_bytes();
    let settings = |copy: &Copy| {
        let random = registry::without_weights(CheckpointSource::Folder(copy.0.clone())).expect("valid settings");
        Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("a valid checkpoint")
    };
    // llm-compressor names only linear layers, so its list lacks the patch embedding.
    let layers = ["attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
    let of_blocks = (0..3).flat_map(|block| layers.map(|layer| format!("visual.blocks.{block}.{layer}")));
    let ends = ["lm_head", "visual.merger.mlp.0", "visual.merger.mlp.2"].map(str::to_owned);
    let list: Vec<String> = of_blocks.chain(ends).collect();
    let copy = by_channel(QWEN2_5_VL, json!(list), is_decoders);
    assert_eq!(weigh(&settings(&copy)), weigh(&copy.open()));
    // Early lists of ModelOpt do not name the tower. Later lists have `visual*` or `model.visual*`.
    let modelopt = |list| json!({ "quant_method": "modelopt", "quant_algo": "FP8", "ignore": list });
    let rounded = weigh(&open(QWEN2_5_VL).with_quantization(Some(WeightQuantization::Fp8PerTensor)));
    for list in [json!(["lm_head"]), json!(["lm_head", "visual*"]), json!(["lm_head", "model.visual*"])] {
        let copy = Copy::of(QWEN2_5_VL).set(CONFIG, &["quantization_config"], modelopt(list));
        assert_eq!(weigh(&settings(&copy)), rounded);
    }
}

#[test]
fn on_a_gpu_fp8_blocks_begin_at_each_padded_part() {
    let checkpoint = open(BLOCK);
    let mut map = WeightMap::dry(&checkpoint, GPU, checkpoint.weight_formats().expect("the checkpoint is served"));
    let name = |part: &str| format!("model.layers.0.mlp.{part}_proj");
    let [gate, up, down] = ["gate", "up", "down"].map(name);
    let [gate_up, down] = map.gated([&gate, &up, &down], (256, 136.into()), false).expect("the tensors exist");
    // 136 rows are padded to 192, so up begins at a multiple of 64.
    assert_eq!(gate_up.weight.data.shape(), [384, 256].into());
    let WeightScales { factors: scales, by, .. } = gate_up.weight.scales.as_ref().expect("it is quantized");
    assert_eq!((scales.shape(), by.block_rows()), ([6, 2].into(), Some(64)));
    assert_eq!(down.weight.data.shape(), [256, 192].into());
    let WeightScales { factors: of_down, by, .. } = down.weight.scales.as_ref().expect("it is quantized");
    assert_eq!((of_down.shape(), by.block_rows()), ([2, 2].into(), Some(128)));
    // The rows of the file's two blocks, 128 and 8 rows high, become three blocks of 64 rows.
    let copies: Vec<_> = map.copies().iter().filter(|copy| copy.kept == DType::F32).collect();
    let WeightSource::WeightScales(first, how) = &copies[0].source else { panic!("wrong scales: {:?}", copies[0]) };
    assert_eq!((first.as_str(), how.times, how.rows), ("model.layers.0.mlp.gate_proj.weight_scale_inv", 2, 3));
    assert_eq!((copies[0].to, copies[0].bytes.0), (scales.address(), 3 * 2 * 4));
    assert_eq!(copies[1].to, scales.address().offset(Bytes(3 * 2 * 4)));
}
