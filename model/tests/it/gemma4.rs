//! Gemma 4: its defaults, the settings that are refused, the division of the KV cache's blocks, and
//! the parts of its layers that other families lack. `golden_text_families.rs` and
//! `golden_vision_families.rs` compare its logits with logits of transformers.

use bursar_kernels::{DType, Rank, Target};
use bursar_model::{
    Model,
    blocks::{KvSizes, PictureMask},
    checkpoint::{Checkpoint, CheckpointSource},
    flow::{ResizeLimits, SegmentLayers},
    processor::{ImageProcessorConfig, Size, Sizing},
    registry::{self, FamilyConfig},
};
use serde_json::{Map, Value, json};

use crate::{
    bench::{Bench, Case, alone, encode, open_random, relative_error},
    common::golden_json,
    copy::{Copy, decoder, read_decoder},
};

const CPU: Target = Target::Cpu { threads: 2 };
const CONFIG: &str = "config.json";
const TEXT: &str = "tests/golden/gemma4_text";
const SHARING: &str = "tests/golden/gemma4_sharing";
const MOE: &str = "tests/golden/gemma4_moe";
const PICTURES: &str = "tests/golden/gemma4";
const CLIPPED: &str = "tests/golden/gemma4_clipped";
const UNIFIED: &str = "tests/golden/gemma4_unified";

#[test]
fn defaults_match_transformers() {
    for (model_type, recorded) in [("gemma4_text", "text"), ("gemma4_unified_text", "unified")] {
        let bare = decoder(&Copy::of(TEXT).write(CONFIG, json!({ "model_type": model_type }).to_string()));
        let recorded = &golden_json("config_defaults.json")["gemma4"][recorded];
        let kind = |layer| if bare.window(layer).is_some() { "sliding_attention" } else { "full_attention" };
        let found = json!({
            "vocab_size": bare.vocabulary,
            "hidden_size": bare.hidden,
            "intermediate_size": bare.intermediate,
            "num_hidden_layers": bare.layers,
            "num_attention_heads": bare.heads,
            "num_key_value_heads": bare.kv_heads,
            "head_dim": bare.head_dim,
            "max_position_embeddings": bare.context_tokens,
            "tie_word_embeddings": bare.tied_embeddings,
            "sliding_window": bare.window(0),
            "num_kv_shared_layers": bare.layers - bare.own_kv_layers,
            "use_double_wide_mlp": bare.double_wide_shared_mlp,
            "final_logit_softcapping": bare.logit_softcap,
            "layer_types": (0..bare.layers).map(kind).collect::<Vec<_>>(),
        });
        found.as_object().expect("an object").iter().for_each(|(field, value)| {
            assert_eq!(value, &recorded[field], "{model_type}: {field}");
        });
        let full = &recorded["per_layer_config"]["05"];
        assert_eq!(full["head_dim"], bare.attention(5).head_dim);
        assert_eq!(bare.attention(5).kv_heads, bare.kv_heads, "{full}");
        let width = recorded["hidden_size_per_layer_input"].as_u64().map(|width| width as usize);
        assert_eq!(bare.per_layer_embeddings.map(|of_layers| of_layers.width), width);
        let theta = |kind: &str| recorded["rope_parameters"][kind]["rope_theta"].as_f64();
        let found = [bare.rope_of(5).0, bare.rope_of(0).0].map(Some);
        assert_eq!(found, [theta("full_attention"), theta("sliding_attention")]);
    }
}

#[test]
fn sizes_of_full_attention_have_two_spellings() {
    let released = decoder(&Copy::of(TEXT));
    let sizes = KvSizes { kv_heads: 2, head_dim: 64, keys_are_values: true };
    assert_eq!((released.attention(2), released.attention(0).head_dim), (sizes, 32));
    let of_layer = json!({ "head_dim": 64, "num_key_value_heads": 2 });
    // transformers saves a list in place of the two numbers, with layer numbers of equal length.
    for keys in [["2", "6"], ["02", "06"]] {
        let listed: Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), of_layer.clone())).collect();
        let saved = json!({ "global_head_dim": null, "num_global_key_value_heads": null, "per_layer_config": listed });
        assert_eq!(decoder(&Copy::edited(TEXT, saved)), released);
    }
    let uneven = json!({ "per_layer_config": { "2": of_layer, "6": { "head_dim": 32 } } });
    let error = read_decoder(&Copy::edited(TEXT, uneven)).expect_err("the list is refused");
    let expected = "per_layer_config must have one entry per layer with full attention, and all entries must be equal";
    assert_eq!(error, expected);
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let refused =
        |folder: &str, edit: Value| read_decoder(&Copy::edited(folder, edit)).expect_err("the settings are refused");
    let changes =
        |key: &str, value: &str| format!("{key} is {value}; this changes what the model computes and is not supported");
    // A dense checkpoint may have null expert sizes.
    assert_eq!(
        refused(TEXT, json!({ "enable_moe_block": true })),
        "num_experts is missing; enable_moe_block requires it"
    );
    assert_eq!(refused(MOE, json!({ "top_k_experts": 9 })), "top_k_experts is 9; expected from 1 to 8");
    assert_eq!(
        refused(MOE, json!({ "moe_intermediate_size": null })),
        "moe_intermediate_size is missing; enable_moe_block requires it"
    );
    assert_eq!(refused(TEXT, json!({ "attn_logit_softcapping": 50.0 })), changes("attn_logit_softcapping", "50.0"));
    assert_eq!(
        refused(TEXT, json!({ "use_bidirectional_attention": "all" })),
        "use_bidirectional_attention is all; supported: null and vision"
    );
    assert_eq!(
        refused(TEXT, json!({ "final_logit_softcapping": 0.0 })),
        "final_logit_softcapping is 0; supported: null, and numbers greater than 0"
    );
    assert_eq!(
        refused(TEXT, json!({ "num_global_key_value_heads": 3 })),
        "8 query heads cannot be divided among 3 key heads of full attention"
    );
    assert_eq!(refused(TEXT, json!({ "global_head_dim": 63 })), "a head of 63 elements cannot be rotated in pairs");
    assert_eq!(
        refused(SHARING, json!({ "num_kv_shared_layers": 7 })),
        "num_kv_shared_layers is 7 of 8 layers; the other layers must include each attention type that these layers have"
    );
    assert_eq!(
        refused(SHARING, json!({ "vocab_size_per_layer_input": 300 })),
        "vocab_size_per_layer_input is 300; expected at least vocab_size (384), and more than pad_token_id (0)"
    );
    assert_eq!(
        refused(SHARING, json!({ "pad_token_id": 384 })),
        "vocab_size_per_layer_input is 384; expected at least vocab_size (384), and more than pad_token_id (384)"
    );
    let factor = json!({ "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 1.5 } });
    assert_eq!(
        refused(TEXT, json!({ "rope_parameters": factor })),
        "rope_parameters.full_attention.partial_rotary_factor must be from 0 to 1 where the type is proportional"
    );
    let vision = |key: &str, value: Value| {
        let copy = Copy::of(PICTURES).set(CONFIG, &["vision_config", key], value);
        read_decoder(&copy).expect_err("the settings are refused")
    };
    assert_eq!(
        vision("hidden_activation", json!("gelu")),
        "vision_config.hidden_activation is gelu; supported: gelu_pytorch_tanh"
    );
    assert_eq!(
        vision("num_key_value_heads", json!(1)),
        "vision_config.num_key_value_heads is 1; supported: the number of query heads"
    );
    assert_eq!(
        refused(PICTURES, json!({ "vision_config": null })),
        "vision_config is missing; the architecture of a checkpoint without a vision tower is Gemma4ForCausalLM"
    );
    assert_eq!(
        vision("pooling_kernel_size", json!(2)),
        "vision_config.pooling_kernel_size is 2, but the image processor's is 3"
    );
}

#[test]
fn settings_of_a_model_without_a_tower_are_read_or_refused() {
    let mask = |folder: &str, value: Option<Value>| {
        let copy = Copy::of(folder);
        let mut config = copy.json(CONFIG);
        let text = config["text_config"].as_object_mut().expect("an object");
        text.remove("use_bidirectional_attention");
        text.extend(value.map(|value| ("use_bidirectional_attention".to_owned(), value)));
        decoder(&copy.write(CONFIG, config.to_string())).picture_mask
    };
    // If `use_bidirectional_attention` is absent, only the 12B uses the picture mask.
    let whole = PictureMask::WholePictureInWindows;
    assert_eq!([mask(UNIFIED, None), mask(UNIFIED, Some(json!("vision")))], [whole; 2]);
    assert_eq!([mask(UNIFIED, Some(Value::Null)), mask(PICTURES, None)], [PictureMask::Causal; 2]);
    let vision = |key: &str, value: Value| {
        let copy = Copy::of(UNIFIED).set(CONFIG, &["vision_config", key], value);
        read_decoder(&copy).expect_err("the settings are refused")
    };
    assert_eq!(
        vision("mm_posemb_size", json!(69)),
        "vision_config.mm_posemb_size is 69, but the processors allow 70 patches along a side"
    );
    assert_eq!(vision("output_proj_dims", json!(65)), "vision_config.output_proj_dims is 65, but mm_embed_dim is 64");
    assert_eq!(
        vision("patch_size", json!(5)),
        "vision_config.patch_size * pooling_kernel_size is 15, but the image processor's is 12"
    );
    assert_eq!(
        read_decoder(&Copy::edited(UNIFIED, json!({ "vision_config": null }))).expect_err("the settings are refused"),
        "vision_config is missing; the architecture of a checkpoint without pictures is Gemma4UnifiedForCausalLM"
    );
}

#[test]
fn frames_of_videos_have_fewer_tokens_than_pictures() {
    let settings = |kind: &str, class: &str| {
        json!({ kind: class, "patch_size": 16, "pooling_kernel_size": 3 }).to_string().into_bytes()
    };
    let of_picture = ImageProcessorConfig::from_json(&settings("image_processor_type", "Gemma4ImageProcessor"));
    assert_eq!(of_picture.expect("valid settings").side_tokens_max(), Some(280));
    // If a checkpoint has no video settings, videos use the picture settings with the default token
    // limit of videos.
    for (kind, class) in [
        ("video_processor_type", "Gemma4VideoProcessor"),
        ("video_processor_type", "Gemma4UnifiedVideoProcessor"),
        ("image_processor_type", "Gemma4ImageProcessor"),
    ] {
        let of_video = ImageProcessorConfig::from_video_json(&settings(kind, class));
        assert_eq!(of_video.expect("valid settings").side_tokens_max(), Some(70), "{class}");
    }
}

/// The positions of the patches are learned, so a side cannot have any number of patches.
#[test]
fn a_picture_with_more_tokens_along_a_side_than_positions_is_refused() {
    let checkpoint = Copy::of(UNIFIED).open();
    let processor = checkpoint.image_processor.as_ref().expect("the checkpoint takes pictures");
    let row = processor.plan(900, 2).expect("a picture of one row");
    assert_eq!((row.grid.h, row.grid.w), (1, 70));
    let own = ResizeLimits { pixels_max: Some(100 * 12 * 12), ..ResizeLimits::default() };
    let error = processor.plan_own(Size { width: 900, height: 2 }, own, 1000).expect_err("100 tokens in a row");
    assert_eq!(error.to_string(), "a side of the 900 x 2 picture has 100 tokens after resizing; the limit is 70");
}

#[test]
fn settings_that_fit_the_same_weights_change_the_logits() {
    let logits = |copy: &Copy| {
        let bench = Bench::of(copy.open(), 2);
        let case = Case::read(TEXT, &bench.checkpoint, "long");
        alone(&bench, &case, &[], &[usize::MAX]).logits.swap_remove(0)
    };
    let [text, sharing] = [TEXT, SHARING].map(|folder| logits(&Copy::of(folder)));
    let partial = |factor: f64| {
        json!({ "rope_parameters": {
            "full_attention": { "rope_type": "proportional", "partial_rotary_factor": factor, "rope_theta": 1e6 },
        } })
    };
    for (folder, whole, edit) in [
        (TEXT, &text, json!({ "final_logit_softcapping": null })),
        (TEXT, &text, json!({ "sliding_window": 24 })),
        (TEXT, &text, partial(0.5)),
        (SHARING, &sharing, json!({ "final_logit_softcapping": 5.0 })),
    ] {
        let error = relative_error(&logits(&Copy::edited(folder, edit.clone())), whole);
        assert!(error > 1e-3, "{edit} changes the logits by only {error:e}");
    }
}

#[test]
fn sharing_layers_read_the_last_earlier_layer_of_their_kind() {
    let sources: Vec<_> = (0..8).map(|layer| decoder(&Copy::of(SHARING)).kv_source(layer)).collect();
    assert_eq!(sources, [0, 1, 2, 3, 4, 3, 3, 4].map(Some), "layers 2, 4 and 7 have full attention");
}

#[test]
fn blocks_of_the_released_sizes_are_divided_among_their_layers() {
    let gpu = |shape: &str| {
        let checkpoint = open_random(registry::shape_settings(shape).expect("a shape"));
        Model::plan(&checkpoint, &CPU).expect("the model is planned")
    };
    let large = gpu("gemma-4-31b");
    assert_eq!(large.cache_groups().segment_layers(), SegmentLayers { full: 2, windowed: 1 });
    let shape = large.kv_shape(&CPU);
    assert_eq!((shape.layers, shape.kv_heads, shape.head_dim, shape.dtype), (5, 16, 256, DType::F32));
    let small = gpu("gemma-4-e2b");
    assert_eq!(small.cache_groups().segment_layers(), SegmentLayers { full: 1, windowed: 2 });
    assert_eq!((small.kv_shape(&CPU).layers, small.kv_shape(&CPU).kv_heads), (3, 2));
    // Half of the blocks with full attention are padding: without padding, there would be 21 groups.
    let unified = gpu("gemma-4-12b");
    assert_eq!(unified.cache_groups().segment_layers(), SegmentLayers { full: 4, windowed: 1 });
    assert_eq!((unified.cache_groups().count(), unified.kv_shape(&CPU).layers), (11, 4));
}

#[test]
fn a_draft_model_for_two_sizes_of_heads_is_refused() {
    let checkpoint = Copy::of(TEXT).open();
    let draft = CheckpointSource::Folder(crate::bench::repository("tests/golden/eagle3"));
    let checkpoint = checkpoint.with_draft_model(&draft).expect("the head opens").with_draft_head(true);
    let error = FamilyConfig::of(&checkpoint).expect_err("the head is refused").to_string();
    assert!(error.contains("decoders whose layers all have heads of one size"), "{error}");
}

#[test]
fn more_ranks_than_key_heads_of_full_attention_are_refused() {
    let checkpoint = Copy::of(TEXT).open();
    let error = Model::plan_rank(&checkpoint, &CPU, Rank::new(0, 4)).err().expect("two key heads on four ranks");
    let text = error.to_string();
    assert!(text.contains("key heads of full attention cannot be divided among 4 ranks: there are 2"), "{text}");
}

#[test]
fn pictures_are_enlarged_to_the_number_of_tokens() {
    let checkpoint = Copy::of(PICTURES).open();
    let processor = checkpoint.image_processor.as_ref().expect("the checkpoint takes pictures");
    assert_eq!(processor.config().sizing, Sizing::Largest);
    let tiny = processor.plan(5, 4).expect("the picture is planned");
    assert_eq!((tiny.resized, tiny.tokens), (Size { width: 108, height: 84 }, 63));
    let [causal, whole] = [CLIPPED, PICTURES].map(|folder| decoder(&Copy::of(folder)).picture_mask);
    assert_eq!((causal, whole), (PictureMask::Causal, PictureMask::WholePictureInWindows));
    for (value, is_valid) in [(json!(280), true), (json!(71), false)] {
        let copy = Copy::of(PICTURES).set("preprocessor_config.json", &["max_soft_tokens"], value);
        match Checkpoint::open(CheckpointSource::Folder(copy.0.clone())) {
            Ok(_) => assert!(is_valid),
            Err(error) => assert!(error.to_string().contains("`max_soft_tokens` is 71; expected 70, 140"), "{error}"),
        }
    }
}

/// Released checkpoints have weights of keys and values that sharing layers do not use, and weights
/// of an encoder of sound.
#[test]
fn weights_that_are_not_used_are_left_unread() {
    let logits = |copy: &Copy| {
        let bench = Bench::of(copy.open(), 2);
        let case = Case::read(CLIPPED, &bench.checkpoint, "one_image");
        let rows = encode(&bench, &case);
        alone(&bench, &case, &rows, &[usize::MAX]).logits.swap_remove(0)
    };
    let whole = logits(&Copy::of(CLIPPED));
    let unused = ["audio_tower.output_proj.weight", "embed_audio.embedding_projection.weight"]
        .into_iter()
        .map(str::to_owned)
        .chain(["k_proj", "v_proj", "k_norm"].map(|part| format!("language_model.layers.3.self_attn.{part}.weight")));
    let more = unused.fold(Copy::of(CLIPPED), |copy, name| copy.add("model.safetensors", &format!("model.{name}")));
    assert_eq!(logits(&more), whole);
    let extra = Copy::of(CLIPPED).add("model.safetensors", "model.language_model.layers.0.self_attn.v_norm.weight");
    assert!(extra.error().to_string().contains("v_norm"), "values have no weight of a norm");
}
