//! Checkpoints of random weights: the shape of a released model, equal for equal seeds, and computed with like any other.

use std::sync::Arc;

use bursar_kernels::Target;
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource, RandomTensor},
    registry::{self, FamilyConfig},
    text::{Message, Part, Role, TemplateInputs},
};

use crate::bench::{Bench, Sequence, repository};

const CPU: Target = Target::Cpu { threads: 1 };

fn open(shape: &str, seed: u64) -> Checkpoint {
    let random = registry::random_checkpoint(shape, seed).expect("a known shape");
    Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("its files are in order")
}

/// Parameters of Qwen2.5-VL-7B-Instruct, as its model card's index adds them up (`total_size` over two bytes).
const PARAMETERS_7B: u64 = 16_584_333_312 / 2;

#[test]
fn the_shape_of_7b_has_the_released_models_size_vocabulary_and_cache() {
    let checkpoint = open("qwen2.5-vl-7b", 0);
    let model = Model::plan(&checkpoint, &CPU).expect("it is planned without a weight being drawn");
    let bytes = model.weight_bytes().0;
    assert!((2 * PARAMETERS_7B..2 * PARAMETERS_7B + (1 << 20)).contains(&bytes), "{bytes} bytes of weights");
    let kv = model.kv_shape(&CPU);
    assert_eq!((kv.layers, kv.kv_heads, kv.head_dim), (28, 4, 128));
    let tokenizer = checkpoint.tokenizer();
    let ids = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"];
    let ids = [&ids[..], &["<|video_pad|>"]].concat().into_iter().map(|token| tokenizer.id_of(token).unwrap_or(0));
    assert!(ids.eq([151_643, 151_644, 151_645, 151_652, 151_653, 151_655, 151_656]));
    assert_eq!(checkpoint.generation.eos_ids, [151_645, 151_643]);
    assert!(matches!(model.config(), FamilyConfig::Qwen2_5Vl(_)));
}

#[test]
fn a_chat_with_a_picture_and_a_video_is_rendered_as_the_family_renders_it() {
    let checkpoint = open("qwen2.5-vl-tiny", 0);
    let content = vec![Part::Image, Part::Video, Part::Text("Hi".to_owned())];
    let messages = [Message { role: Role::User, content }];
    let ids = checkpoint.prompts.encode(&messages, &TemplateInputs::default()).expect("it is rendered");
    let text = checkpoint.tokenizer().decode(&ids, false).expect("it is text");
    assert_eq!(
        text,
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>Hi\
         <|im_end|>\n<|im_start|>assistant\n"
    );
}

/// The logits after some text.
fn logits(bench: &Bench) -> Vec<f32> {
    let ids = bench.checkpoint.tokenizer().encode_plain("Random, and yet the same.").expect("it encodes");
    let layout = bench.model.config().lay_out(ids, &[]).expect("it is laid out");
    let blocks = (0..Sequence::blocks_for(layout.tokens.len()) as u32).collect();
    let count = layout.tokens.len();
    bench.prefill(&mut Sequence::new(layout, Vec::new(), blocks), &[count]).pop().expect("a prompt has an end")
}

#[test]
fn equal_seeds_give_equal_logits_on_any_number_of_threads_and_others_give_others() {
    let first = logits(&Bench::of(open("qwen2.5-vl-tiny", 5), 1));
    assert_eq!(first, logits(&Bench::of(open("qwen2.5-vl-tiny", 5), 2)));
    let other = logits(&Bench::of(open("qwen2.5-vl-tiny", 6), 1));
    assert_ne!(first, other);
    let spread = |row: &[f32]| row.iter().map(|logit| logit * logit).sum::<f32>() / row.len() as f32;
    // A normed row of 128 numbers of deviation 1 times weights of deviation 0.02.
    let expected = 128.0 * 0.02f32.powi(2);
    for row in [first, other] {
        assert!((spread(&row) / expected - 1.0).abs() < 0.5, "{} where {expected} is expected", spread(&row));
    }
}

#[test]
fn norms_are_ones_and_no_two_tensors_are_alike() {
    let checkpoint = open("qwen2.5-vl-tiny", 0);
    let drawn = |name: &str, axes| match checkpoint.tensors.random(name, axes) {
        Some(RandomTensor::Drawn { seed }) => Some(seed),
        Some(RandomTensor::Ones) => None,
        None => panic!("{name} is not random"),
    };
    assert_eq!(drawn("model.norm.weight", 1), None);
    assert_eq!(drawn("visual.blocks.0.norm1.weight", 1), None);
    let [one, two] = ["q", "k"].map(|part| drawn(&format!("model.layers.0.self_attn.{part}_proj.weight"), 2));
    assert!(one.is_some() && two.is_some() && one != two);
    assert!(drawn("model.layers.0.self_attn.q_proj.bias", 1).is_some(), "a bias is drawn");
    let files = Checkpoint::open(CheckpointSource::Folder(repository("tests/golden/qwen2"))).expect("it is there");
    assert_eq!(files.tensors.random("model.norm.weight", 1), None, "what has files is read from them");
}

#[test]
fn a_shape_that_nobody_wrote_down_is_refused_with_those_there_are() {
    let refused = registry::random_checkpoint("qwen9", 0).expect_err("nobody wrote it down");
    assert!(refused.to_string().contains("qwen9") && refused.hint().contains("qwen2.5-vl-7b"), "{refused}");
    for shape in registry::shapes() {
        Model::plan(&open(shape, 1), &CPU).unwrap_or_else(|error| panic!("{shape}: {error}"));
    }
}
