//! Checkpoints that contradict themselves. Errors name the tensor or field, the expected value
//! and the value found.

use std::{fs, ops::ControlFlow, sync::Arc};

use bursar_budgets::{Bytes, Class, Hint};
use bursar_kernels::{Cpu, Target};
use bursar_model::{
    LoadError, Model,
    blocks::ConfigError,
    checkpoint::{Checkpoint, CheckpointSource},
    error::CheckpointError,
    processor::CountedPixels,
    registry::{self, FamilyConfig},
    weights::WeightError,
};
use serde_json::{Value, json};

use crate::{
    bench::Memory,
    copy::{Copy, INTERNVL, INTERNVL_CHAT, QWEN2, QWEN2_5_VL, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE},
};

const FILE: &str = "model.safetensors";

#[test]
fn unchanged_copies_of_the_checkpoints_can_be_planned() {
    for folder in [QWEN2, QWEN2_5_VL] {
        let copy = Copy::of(folder);
        let checkpoint = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect("the checkpoint opens");
        Model::plan(&checkpoint, &Target::Cpu { threads: 2 }).expect("the model can be planned");
    }
}

#[test]
fn a_missing_tensor_is_named_with_its_nearest_names() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let error = Copy::of(QWEN2).edit_header(FILE, name, "model.layers.1.mlp.upp_proj.weight", |_| {}).error();
    let LoadError::Weights(WeightError::Checkpoint(CheckpointError::MissingTensor { tensor, nearest })) = &error else {
        panic!("{error:?}");
    };
    assert_eq!(tensor, name);
    assert!(nearest.contains(&"model.layers.1.mlp.upp_proj.weight".to_owned()), "{nearest:?}");
    assert_eq!(error.to_string(), "there is no tensor model.layers.1.mlp.up_proj.weight");
    assert!(error.hint().contains("upp_proj"), "{}", error.hint());
}

#[test]
fn too_many_configured_layers_name_the_first_missing_tensor() {
    let error = Copy::of(QWEN2).set("config.json", &["num_hidden_layers"], json!(3)).error();
    assert_eq!(error.to_string(), "there is no tensor model.layers.2.input_layernorm.weight");
}

#[test]
fn extra_tensors_are_refused_by_name() {
    let fewer = Copy::of(QWEN2).set("config.json", &["num_hidden_layers"], json!(1)).error();
    assert!(matches!(fewer, LoadError::Weights(WeightError::Extra { count: 12, .. })), "{fewer:?}");
    assert_eq!(
        fewer.to_string(),
        "config.json names no layer for 12 tensors of the checkpoint: model.layers.1.input_layernorm.weight, \
         model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight"
    );
    assert!(fewer.hint().contains("config.json"), "{}", fewer.hint());
}

#[test]
fn known_buffers_of_released_checkpoints_are_not_extra_tensors() {
    let plans = |copy: Copy| {
        let checkpoint =
            Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect("the checkpoint is well formed");
        Model::plan(&checkpoint, &Target::Cpu { threads: 2 }).map(drop)
    };
    let with = |name| Copy::of(QWEN2).add(FILE, name);
    plans(with("model.layers.0.self_attn.rotary_emb.inv_freq")).expect("a known buffer is ignored");
    let error = plans(with("model.layers.0.self_attn.rotary_emb.inv_freq_of_another"))
        .expect_err("the name is not a known buffer");
    assert!(matches!(error, LoadError::Weights(WeightError::Extra { count: 1, .. })), "{error:?}");
}

#[test]
fn a_tied_checkpoint_may_repeat_only_its_embedding_as_head() {
    let (head, embedding) = ("lm_head.weight", "model.embed_tokens.weight");
    let with = |change: fn(&mut [u8])| Copy::of(QWEN2).double(FILE, embedding, head, change);
    let same = with(|_| {}).open();
    Model::plan(&same, &Target::Cpu { threads: 2 }).expect("the tied weights are equal");
    let error = with(|bytes| *bytes.last_mut().expect("a byte") ^= 1).error();
    assert!(matches!(&error, LoadError::Weights(WeightError::Untied { .. })), "{error:?}");
    assert_eq!(
        error.to_string(),
        "config.json ties lm_head.weight to model.embed_tokens.weight, but the checkpoint has both with different \
         values"
    );
    assert!(error.hint().contains("tie_word_embeddings"), "{}", error.hint());
    let error = Copy::of(QWEN2).add(FILE, head).error();
    assert!(
        matches!(&error, LoadError::Weights(WeightError::Untied { .. })),
        "a tensor of another shape is untied: {error:?}"
    );
}

#[test]
fn a_tensor_of_another_shape_is_named_with_both_shapes() {
    let name = "model.layers.0.self_attn.o_proj.weight"; // [48, 896]
    let transposed = |entry: &mut Value| entry["shape"].as_array_mut().expect("a shape").reverse();
    let error = Copy::of(QWEN2).edit_header(FILE, name, name, transposed).error();
    assert!(matches!(&error, LoadError::Weights(WeightError::Shape { name: found, .. }) if found == name), "{error:?}");
    assert_eq!(
        error.to_string(),
        "tensor model.layers.0.self_attn.o_proj.weight has shape [896, 48], but config.json asks for [48, 896]"
    );
}

#[test]
fn a_mismatched_part_of_a_fused_projection_is_named() {
    let error = Copy::of(QWEN2).set("config.json", &["num_key_value_heads"], json!(1)).error();
    assert_eq!(
        error.to_string(),
        "tensor model.layers.0.self_attn.k_proj.weight has shape [128, 48], but config.json asks for [64, 48]"
    );
}

#[test]
fn mixed_types_in_a_fused_projection_are_refused() {
    let name = "model.layers.0.self_attn.v_proj.weight";
    let error = Copy::of(QWEN2).edit_header(FILE, name, name, |entry| entry["dtype"] = json!("BF16")).error();
    assert!(matches!(&error, LoadError::Weights(WeightError::Mixed { name: found, .. }) if found == name), "{error:?}");
    let expected =
        "tensor model.layers.0.self_attn.v_proj.weight holds bf16, but the tensors computed with it hold f16";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn an_unsupported_tensor_type_is_named() {
    let name = "model.norm.weight";
    let error = Copy::of(QWEN2).edit_header(FILE, name, name, |entry| entry["dtype"] = json!("I16")).error();
    assert!(
        matches!(error, LoadError::Weights(WeightError::Checkpoint(CheckpointError::TensorType { .. }))),
        "{error:?}"
    );
    assert!(error.to_string().contains("model.norm.weight has the type I16"), "{error}");
}

#[test]
fn an_unknown_architecture_is_refused_with_the_supported_list() {
    let error = Copy::of(QWEN2).set("config.json", &["architectures"], json!(["FalconForCausalLM"])).error();
    assert!(matches!(error, LoadError::Architecture(_)), "{error:?}");
    assert_eq!(
        error.to_string(),
        "the architecture [\"FalconForCausalLM\"] is not supported; expected one of \
         {Qwen2_5_VL, Qwen2VL, Qwen3VL, Qwen3VLMoe, Qwen3_5, Qwen3_5Moe, InternVL, Gemma3, Gemma4, \
         Gemma4Unified}ForConditionalGeneration, {Qwen3_5, Qwen3_5Moe, Qwen2, Qwen3, Qwen3Moe, Llama, Mistral, \
         Gemma3, Gemma4, Gemma4Unified}ForCausalLM, InternVLChatModel"
    );
    let bare = Copy::of(QWEN2).set("config.json", &["architectures"], Value::Null);
    let error = bare.set("config.json", &["model_type"], json!("falcon")).error();
    assert!(error.to_string().starts_with("the architecture [\"falcon\"] is not supported"), "{error}");
    let error = Copy::of(QWEN2_5_VL).set("config.json", &["model_type"], json!("falcon")).error();
    let expected = "config.json: architectures names Qwen2_5_VLForConditionalGeneration, but model_type is falcon";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn inconsistent_configurations_are_refused_with_both_numbers() {
    let refused = |folder: &str, field: &[&str], value: Value| {
        let error = Copy::of(folder).set("config.json", field, value).error();
        assert!(matches!(error, LoadError::Config(_)), "{error:?}");
        error.to_string()
    };
    let text = |field: &str, value: Value| refused(QWEN2, &[field], value);
    assert_eq!(
        text("num_key_value_heads", json!(4)),
        "config.json: 14 query heads cannot be divided among 4 key heads"
    );
    assert_eq!(text("head_dim", json!(63)), "config.json: a head of 63 elements cannot be rotated in pairs");
    assert_eq!(
        text("hidden_act", json!("gelu")),
        "config.json: hidden_act is gelu; supported: silu and gelu_pytorch_tanh"
    );
    // Ids 372 to 375 are added tokens.
    let vocabulary = |rows: usize| {
        let few = Copy::of(QWEN2).set("config.json", &["vocab_size"], json!(rows));
        let family = FamilyConfig::of(&few.open()).expect("the family accepts the config");
        family.check_vocabulary(few.prompts().tokenizer())
    };
    vocabulary(375).expect("an added token needs no row");
    let few = Copy::of(QWEN2).set("config.json", &["vocab_size"], json!(300));
    let family = FamilyConfig::of(&few.open()).expect("the family accepts the config");
    let foreign =
        family.check_vocabulary(few.prompts().tokenizer()).expect_err("the tokenizer belongs to another model");
    assert_eq!(foreign.to_string(), "config.json: vocab_size is 300, but the tokenizer has 376 ids");
    assert_eq!(text("num_attention_heads", json!(0)), "config.json: num_attention_heads is 0; expected from 1 to 4096");
    let absurd = text("hidden_size", json!(u64::MAX));
    assert_eq!(absurd, format!("config.json: hidden_size is {}; expected from 1 to 1048576", u64::MAX));
    let longrope = text("rope_scaling", json!({ "type": "longrope", "factor": 4.0 }));
    let supported = "default, linear, dynamic, llama3, yarn, and mrope for positions of pictures";
    assert_eq!(longrope, format!("config.json: rope_scaling.type is longrope; supported: {supported}"));

    let vision = |field: &str, value: Value| refused(QWEN2_5_VL, &["vision_config", field], value);
    let sections = refused(QWEN2_5_VL, &["rope_scaling", "mrope_section"], json!([16, 24, 25]));
    assert!(sections.contains("[16, 24, 25] does not divide the 64 rotated pairs"), "{sections}");
    assert_eq!(
        refused(QWEN2_5_VL, &["image_token_id"], json!(384)),
        "config.json: image_token_id is 384, but vocab_size is 384"
    );
    assert_eq!(
        refused(QWEN2_5_VL, &["video_token_id"], json!(4000)),
        "config.json: video_token_id is 4000, but vocab_size is 384"
    );
    assert_eq!(
        refused(QWEN2_5_VL, &["video_token_id"], json!(366)),
        "config.json: image_token_id and video_token_id are both 366"
    );
    assert_eq!(
        vision("tokens_per_second", json!(0)),
        "config.json: vision_config.tokens_per_second is 0; expected from 1 to 1024"
    );
    assert_eq!(
        vision("out_hidden_size", json!(128)),
        "config.json: vision_config.out_hidden_size 128 is not hidden_size 256"
    );
    assert_eq!(
        vision("num_heads", json!(3)),
        "config.json: vision_config: 3 heads of 160 elements cannot be rotated along two axes"
    );
    assert_eq!(vision("window_size", json!(27)), "config.json: vision_config: a window is smaller than a merged patch");
    assert_eq!(
        vision("fullatt_block_indexes", json!([1, 3])),
        "config.json: vision_config.fullatt_block_indexes names layer 3, but its depth is 3"
    );
    assert_eq!(
        vision("patch_size", json!(16)),
        "config.json: vision_config.patch_size is 16, but the image processor's is 14"
    );
}

#[test]
fn unsupported_qwen3_vl_settings_are_refused_by_name() {
    let refused = |field: &[&str], value: Value| {
        let error = Copy::of(QWEN3_VL).set("config.json", field, value).error();
        assert!(matches!(error, LoadError::Config(_)), "{error:?}");
        error.to_string().replace("config.json: ", "")
    };
    let parts = |value: Value| refused(&["vision_config", "deepstack_visual_indexes"], value);
    let key = "vision_config.deepstack_visual_indexes";
    assert_eq!(parts(json!([0, 4])), format!("{key} names layer 4, but the tower's depth is 4"));
    assert_eq!(parts(json!([2, 0])), format!("{key} [2, 0] does not name layers in ascending order, each once"));
    let short = Copy::of(QWEN3_VL).set("config.json", &["text_config", "num_hidden_layers"], json!(2)).error();
    assert_eq!(short.to_string(), format!("config.json: {key} has 3 parts for 2 layers of the decoder"));
    let vision = |field: &str, value: Value| refused(&["vision_config", field], value);
    let rows = "vision_config.num_position_embeddings";
    assert_eq!(vision("num_position_embeddings", json!(145)), format!("{rows} 145 is not a square number"));
    assert_eq!(vision("hidden_act", json!("silu")), "vision_config.hidden_act is silu; supported: gelu_pytorch_tanh");
    assert_eq!(vision("out_hidden_size", json!(65)), "vision_config.out_hidden_size 65 is not hidden_size 64");
    assert_eq!(vision("patch_size", json!(14)), "vision_config.patch_size is 14, but the image processor's is 16");
    assert!(vision("rope_type", json!("axial")).starts_with("vision_config.rope_type is \"axial\""));
    let rope = |field: &str, value: Value| refused(&["text_config", "rope_scaling", field], value);
    let place = "text_config.mrope_interleaved";
    assert_eq!(rope("mrope_interleaved", json!(false)), format!("{place} is false; supported: true"));
    let turns = rope("mrope_section", json!([4, 30, 30]));
    assert!(turns.contains("[4, 30, 30] cannot be interleaved over the 64 rotated pairs"), "{turns}");
    let ties = refused(&["text_config", "tie_word_embeddings"], json!(false));
    assert_eq!(ties, "tie_word_embeddings is true, but false in text_config");
    // Other families refuse all of these settings.
    let foreign =
        |field: &[&str], value: Value| Copy::of(QWEN2_5_VL).set("config.json", field, value).error().to_string();
    assert!(foreign(&["rope_scaling", "mrope_interleaved"], json!(true)).contains("mrope_interleaved is true"));
    assert!(foreign(&["vision_config", "deepstack_visual_indexes"], json!([1])).contains("deepstack_visual_indexes"));
}

#[test]
fn experts_that_contradict_the_configuration_are_named() {
    let refused =
        |field: &str, value: Value| Copy::of(QWEN3_MOE).set("config.json", &[field], value).error().to_string();
    assert_eq!(refused("num_experts", json!(513)), "config.json: num_experts is 513; expected from 1 to 512");
    assert_eq!(refused("num_experts_per_tok", json!(9)), "config.json: num_experts_per_tok is 9; expected from 1 to 8");
    assert_eq!(refused("num_experts_per_tok", json!(0)), "config.json: num_experts_per_tok is 0; expected from 1 to 8");
    assert_eq!(
        refused("decoder_sparse_step", json!(0)),
        "config.json: decoder_sparse_step is 0; expected from 1 to 1048576"
    );
    assert!(refused("num_experts", json!("many")).contains("invalid type: string \"many\", expected usize"));
    // Contradictions with the tensor file: one expert too many, one expert too few, a layer without
    // experts, and matrices of another size.
    assert_eq!(
        refused("num_experts", json!(9)),
        "tensor model.layers.0.mlp.gate.weight has shape [8, 48], but config.json asks for [9, 48]"
    );
    assert_eq!(
        refused("moe_intermediate_size", json!(21)),
        "tensor model.layers.0.mlp.experts.0.gate_proj.weight has shape [20, 48], but config.json asks for [21, 48]"
    );
    let missing =
        Copy::of(QWEN3_MOE).edit_header(FILE, "model.layers.1.mlp.experts.7.down_proj.weight", "other", |_| {});
    assert_eq!(missing.error().to_string(), "there is no tensor model.layers.1.mlp.experts.7.down_proj.weight");
    let dense = refused("mlp_only_layers", json!([1]));
    assert_eq!(dense, "there is no tensor model.layers.1.mlp.gate_proj.weight");
    let fused = Copy::of(QWEN3_VL_MOE).set("config.json", &["text_config", "moe_intermediate_size"], json!(25));
    assert_eq!(
        fused.error().to_string(),
        "tensor model.language_model.layers.0.mlp.experts.gate_up_proj has shape [8, 64, 48], but config.json asks for \
         [8, 50, 64]"
    );
}

#[test]
fn unsupported_internvl_settings_are_refused_by_name() {
    let message_of = |copy: Copy| copy.error().to_string().replace("config.json: ", "");
    let converted = |field: &[&str], value: Value| message_of(Copy::of(INTERNVL).set("config.json", field, value));
    let released = |field: &[&str], value: Value| message_of(Copy::of(INTERNVL_CHAT).set("config.json", field, value));
    assert_eq!(converted(&["downsample_ratio"], json!(0.25)), "downsample_ratio is 0.25; supported: 0.5");
    assert_eq!(converted(&["vision_feature_layer"], json!(-2)), "vision_feature_layer is -2; supported: -1");
    assert_eq!(converted(&["image_seq_length"], json!(256)), "image_seq_length is 256, but vision_config gives 4");
    let vision = |field: &str, value: Value| converted(&["vision_config", field], value);
    assert_eq!(vision("use_mean_pooling", json!(false)), "vision_config.use_mean_pooling is false; supported: true");
    assert_eq!(vision("hidden_act", json!("quick_gelu")), "vision_config.hidden_act is quick_gelu; supported: gelu");
    assert_eq!(vision("image_size", json!([56, 84])), "vision_config.image_size is 56 x 84, not a square");
    assert_eq!(
        vision("image_size", json!(84)),
        "image_seq_length is 4, but vision_config gives 9",
        "both errors name the two keys that disagree"
    );
    assert_eq!(vision("num_attention_heads", json!(3)), "vision_config: 128 elements cannot be divided among 3 heads");
    assert_eq!(
        vision("patch_size", json!(28)),
        "image_seq_length is 4, but vision_config gives 1",
        "both errors name the two keys that disagree"
    );
    assert_eq!(converted(&["image_token_id"], json!(400)), "image_token_id is 400, but vocab_size is 400");
    let text = converted(&["text_config", "model_type"], json!("internlm3"));
    assert_eq!(text, "text_config.model_type is internlm3; supported: qwen2, qwen3 and qwen3_moe");
    assert_eq!(released(&["ps_version"], json!("v1")), "ps_version is \"v1\"; supported: v2");
    assert_eq!(released(&["ps_version"], Value::Null), "ps_version is \"v1\"; supported: v2");
    assert!(released(&["use_llm_lora"], json!(16)).starts_with("use_llm_lora is 16; supported: 0"));
    assert_eq!(released(&["force_image_size"], json!(448)), "force_image_size is 448, but vision_config gives 56");
    let side = |file: &str, value: Value| message_of(Copy::of(INTERNVL).set(file, &["size"], value));
    let size = json!({ "height": 84, "width": 84 });
    assert_eq!(
        side("preprocessor_config.json", size.clone()),
        "the model takes tiles of 56, but the image processor makes tiles of 84"
    );
    assert_eq!(
        side("video_preprocessor_config.json", size),
        "the model takes tiles of 56, but the video processor makes tiles of 84"
    );
}

#[test]
fn a_released_checkpoint_without_its_placeholder_token_is_refused() {
    let copy = Copy::of(INTERNVL_CHAT);
    let path = copy.0.join("tokenizer.json");
    let text = fs::read_to_string(&path).expect("a tokenizer").replace("<IMG_CONTEXT>", "<IMG_OTHER>");
    fs::write(&path, text).expect("the file is written");
    let settings = copy.0.join("tokenizer_config.json");
    let text = fs::read_to_string(&settings).expect("settings").replace("<IMG_CONTEXT>", "<IMG_OTHER>");
    fs::write(&settings, text).expect("the file is written");
    drop(fs::remove_file(copy.0.join("added_tokens.json")));
    assert_eq!(copy.error().to_string(), "config.json: the model takes pictures, but no added token is <IMG_CONTEXT>");
}

#[test]
fn unsupported_tile_settings_are_refused_by_name() {
    let settings = |field: &str, value: Value| {
        let copy = Copy::of(INTERNVL).set("preprocessor_config.json", &[field], value);
        Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect_err("the checkpoint is refused").to_string()
    };
    for (field, value, expected) in [
        ("size", json!({ "height": 56, "width": 84 }), "`size` is 0"),
        ("size", json!({ "height": 57, "width": 57 }), "`size` is 57; expected a multiple of merged patches"),
        ("max_patches", json!(0), "`max_patches` is 0"),
        ("min_patches", json!(13), "`min_patches` is 13; expected at least 1 and at most max_patches"),
        ("max_pixels", json!(1000), "`max_pixels` is 1000; expected null for tiles"),
        ("do_resize", json!(false), "`do_resize` is false"),
        ("pad2square", json!(true), "`pad2square` is true"),
    ] {
        let found = settings(field, value);
        assert!(found.contains(expected), "{field}: {found}");
    }
}

#[test]
fn qwen3_vl_without_video_settings_uses_the_picture_settings() {
    let copy = Copy::of(QWEN3_VL);
    let videos = |copy: &Copy| {
        let checkpoint = copy.open();
        let family = FamilyConfig::of(&checkpoint).expect("the family serves the checkpoint");
        family.video_processor(&checkpoint).map(|videos| (videos.config().counted, videos.config().pixel_bounds))
    };
    let counted = CountedPixels::Video { tokens_max: None };
    assert_eq!(videos(&copy).map(|(counted, _)| counted), Some(counted));
    let copy = copy.remove("video_preprocessor_config.json");
    Model::plan(&copy.open(), &Target::Cpu { threads: 2 }).expect("the model takes pictures and videos");
    let pictures = copy.open().image_processor.expect("the model takes pictures").config().pixel_bounds;
    assert_eq!(videos(&copy), Some((counted, pictures)));
    // A checkpoint without weights takes missing files from the release.
    let planned =
        registry::without_weights(CheckpointSource::Folder(copy.0.clone())).expect("the folder has a config.json");
    let planned = Checkpoint::open(CheckpointSource::Random(Arc::new(planned))).expect("the files are valid");
    assert!(FamilyConfig::of(&planned).expect("the family accepts the config").video_processor(&planned).is_some());
}

#[test]
fn a_video_processor_with_another_pixel_rule_is_refused() {
    let file = r#"{"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 16}"#;
    let error = Copy::of(QWEN3_VL).write("video_preprocessor_config.json", file).error().to_string();
    assert!(
        error.contains("limits apply to all frames together") && error.contains("video_preprocessor_config.json"),
        "{error}"
    );
}

#[test]
fn processor_config_json_without_video_settings_means_no_videos() {
    let copy = Copy::of(QWEN2_5_VL);
    let pictures = json!({ "image_processor": copy.json("preprocessor_config.json") });
    let copy = copy.remove("preprocessor_config.json").write("processor_config.json", pictures.to_string());
    let checkpoint = copy.open();
    let model = Model::plan(&checkpoint, &Target::Cpu { threads: 2 }).expect("the model takes pictures");
    assert!(checkpoint.image_processor.is_some() && model.config().video_processor(&checkpoint).is_none());
    // A checkpoint without weights takes each missing file from the release.
    let planned =
        registry::without_weights(CheckpointSource::Folder(copy.0.clone())).expect("the folder has a config.json");
    let planned = Checkpoint::open(CheckpointSource::Random(Arc::new(planned))).expect("the files are valid");
    let config = |checkpoint: &Checkpoint| checkpoint.image_processor.as_ref().map(|images| images.config().clone());
    assert_eq!(config(&planned), config(&checkpoint));
    assert!(model.config().video_processor(&planned).is_some());
}

#[test]
fn an_image_processor_of_another_model_is_refused() {
    let error = Copy::of(QWEN2_5_VL).set("preprocessor_config.json", &["merge_size"], json!(1)).error();
    assert!(matches!(error, LoadError::Config(ConfigError::Contradiction(_))), "{error:?}");
    let expected = "config.json: vision_config.spatial_merge_size is 2, but the image processor's is 1";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn only_a_video_processor_that_fits_the_model_is_accepted() {
    let file = |merge: u32| {
        format!(r#"{{"video_processor_type": "Qwen2VLVideoProcessor", "merge_size": {merge}, "max_pixels": 200704}}"#)
    };
    let copy = Copy::of(QWEN2_5_VL);
    let before = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect("the checkpoint is well formed");
    fs::write(copy.0.join("video_preprocessor_config.json"), file(2)).expect("the file can be written");
    let checkpoint = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect("the checkpoint is well formed");
    Model::plan(&checkpoint, &Target::Cpu { threads: 2 }).expect("the tower reads patches of this size");
    let pixels = |checkpoint: &Checkpoint| {
        checkpoint.video_processor.as_ref().expect("a video processor").config().pixel_bounds.max
    };
    assert_eq!((pixels(&before), pixels(&checkpoint)), (31360, 200_704));
    assert_ne!(before.fingerprint(), checkpoint.fingerprint(), "the fingerprint depends on the video settings");
    fs::write(copy.0.join("video_preprocessor_config.json"), file(1)).expect("the file can be written");
    let expected = "config.json: vision_config.spatial_merge_size is 2, but the video processor's is 1";
    assert_eq!(copy.error().to_string(), expected);
}

#[test]
fn a_vision_model_without_an_image_processor_is_refused() {
    let copy = Copy::of(QWEN2_5_VL);
    fs::remove_file(copy.0.join("preprocessor_config.json")).expect("the file existed");
    let expected = "config.json: the model takes pictures, but there is no preprocessor_config.json or \
                    processor_config.json";
    assert_eq!(copy.error().to_string(), expected);
}

#[test]
fn a_config_may_have_both_spellings_of_a_field() {
    let copy = Copy::of(QWEN2_5_VL)
        .set("config.json", &["rope_scaling", "rope_type"], json!("default"))
        .set("config.json", &["vision_config", "in_channels"], json!(3))
        .set("config.json", &["vision_config", "in_chans"], json!(3));
    let checkpoint = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect("the checkpoint is well formed");
    Model::plan(&checkpoint, &Target::Cpu { threads: 2 }).expect("both spellings are accepted");
    let error = copy.set("config.json", &["rope_scaling", "type"], json!("yarn")).error();
    let expected = "config.json: rope_scaling.rope_type and rope_scaling.type differ";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn loading_stops_when_the_callback_breaks() {
    let (checkpoint, cpu) = (Copy::of(QWEN2).open(), Cpu::new(1));
    let bytes = Model::plan(&checkpoint, &Target::Cpu { threads: 1 }).expect("the model can be planned").weight_bytes();
    let segment = Memory::new(Bytes::mib(16)).poisoned(&cpu, Class::Weights, bytes);
    let mut copied = 0;
    let stopped = Model::load(&checkpoint, &cpu, segment, |_, _| {
        copied += 1;
        if copied < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    assert!(matches!(stopped, Err(LoadError::Stopped)));
    assert_eq!(copied, 3);
}
