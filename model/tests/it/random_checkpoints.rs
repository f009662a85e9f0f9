//! Checkpoints of random weights: they have the shape of a released model, are equal for equal
//! seeds, and run like any other checkpoint.

use std::sync::Arc;

use bursar_budgets::Hint;
use bursar_kernels::Target;
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource, RandomCheckpoint, RandomTensor, WeightQuantization},
    registry::{self, FamilyConfig},
    text::{ContentPart, Message, Role, TemplateInputs},
};

use crate::{
    bench::{Bench, Random, Sequence, repository},
    copy::{Copy, QWEN3_MOE},
};

const CPU: Target = Target::Cpu { threads: 1 };

fn open(shape: &str, seed: u64) -> Checkpoint {
    opened(registry::random_checkpoint(shape, seed).expect("a known shape"))
}

/// A checkpoint with only the settings of `shape` and a tokenizer of bytes.
fn settings(shape: &str) -> Checkpoint {
    opened(registry::shape_settings(shape).expect("a known shape"))
}

fn opened(random: RandomCheckpoint) -> Checkpoint {
    Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the files are valid")
}

/// Bytes of the released weights, followed by layers, heads and elements per head of keys and
/// values. The bytes are `total_size` in each `model.safetensors.index.json`, or twice the
/// published number of parameters if a tied head is stored too. The rows after `qwq-32b` are
/// published counts quoted from memory, without a second check.
const RELEASED: [(&str, u64, [usize; 3]); 44] = [
    ("qwen2.5-vl-3b", 7_509_245_952, [36, 2, 128]),
    ("qwen2.5-vl-7b", 16_584_333_312, [28, 4, 128]),
    ("qwen2.5-vl-32b", 66_905_436_672, [64, 8, 128]),
    ("qwen2.5-vl-72b", 146_821_554_688, [80, 8, 128]),
    ("qwen2-vl-2b", 2 * 2_208_985_600, [28, 2, 128]),
    ("qwen2-vl-7b", 16_582_751_232, [28, 4, 128]),
    ("qwen2-vl-72b", 2 * 73_405_560_320, [80, 8, 128]),
    ("qwen3-vl-2b", 2 * 2_127_532_032, [28, 8, 128]),
    ("qwen3-vl-4b", 2 * 4_437_815_808, [36, 8, 128]),
    ("qwen3-vl-8b", 17_534_247_392, [36, 8, 128]),
    ("qwen3-vl-32b", 2 * 33_357_390_064, [64, 8, 128]),
    ("qwen3-vl-30b-a3b", 2 * 31_070_754_032, [48, 4, 128]),
    ("qwen2.5-0.5b", 988_065_536, [24, 2, 64]),
    ("qwen2.5-1.5b", 3_087_428_608, [28, 2, 128]),
    ("qwen2.5-3b", 6_171_877_376, [36, 2, 128]),
    ("qwen2.5-7b", 15_231_233_024, [28, 4, 128]),
    ("qwen2.5-14b", 29_540_067_328, [48, 8, 128]),
    ("qwen2.5-32b", 65_527_752_704, [64, 8, 128]),
    ("qwen2.5-72b", 145_412_407_296, [80, 8, 128]),
    ("qwq-32b", 65_527_752_704, [64, 8, 128]),
    ("qwen3-0.6b", 2 * 596_049_920, [28, 8, 128]),
    ("qwen3-1.7b", 2 * 1_720_574_976, [28, 8, 128]),
    ("qwen3-4b", 2 * 4_022_468_096, [36, 8, 128]),
    ("qwen3-8b", 16_381_470_720, [36, 8, 128]),
    ("qwen3-14b", 29_536_614_400, [40, 8, 128]),
    ("qwen3-32b", 65_524_246_528, [64, 8, 128]),
    ("qwen3-30b-a3b", 61_064_245_248, [48, 4, 128]),
    ("qwen3-235b-a22b", 470_187_269_120, [94, 4, 128]),
    ("llama-3-8b", 16_060_522_496, [32, 8, 128]),
    ("llama-3-70b", 141_107_412_992, [80, 8, 128]),
    ("llama-3.1-8b", 16_060_522_496, [32, 8, 128]),
    ("llama-3.1-70b", 141_107_412_992, [80, 8, 128]),
    ("llama-3.2-1b", 2 * 1_235_814_400, [16, 8, 64]),
    ("llama-3.2-3b", 6_425_499_648, [28, 8, 128]),
    ("llama-3.3-70b", 141_107_412_992, [80, 8, 128]),
    ("smollm2-135m", 2 * 134_515_008, [30, 3, 64]),
    ("smollm2-360m", 2 * 361_821_120, [32, 5, 64]),
    ("smollm2-1.7b", 2 * 1_711_376_384, [24, 32, 64]),
    ("mistral-7b-v0.3", 14_496_047_104, [32, 8, 128]),
    ("gemma-3-270m", 2 * 268_098_176, [3, 1, 256]),
    ("gemma-3-1b", 2 * 999_885_952, [4, 1, 256]),
    ("gemma-3-4b", 2 * 4_300_079_472, [6, 4, 256]),
    ("gemma-3-12b", 2 * 12_187_325_040, [10, 8, 256]),
    ("gemma-3-27b", 2 * 27_432_406_640, [13, 16, 128]),
];

/// Parameters in billions as given in the papers (arXiv 2504.10479 and 2508.18265, table 1 of each,
/// rounded), followed by layers, heads and elements per head of keys and values.
const INTERNVL: [(&str, f64, [usize; 3]); 12] = [
    ("internvl3-1b", 0.9, [24, 2, 64]),
    ("internvl3-2b", 2.1, [28, 2, 128]),
    ("internvl3-8b", 7.9, [28, 4, 128]),
    ("internvl3-14b", 15.1, [48, 8, 128]),
    ("internvl3-38b", 38.4, [64, 8, 128]),
    ("internvl3-78b", 78.4, [80, 8, 128]),
    ("internvl3.5-1b", 1.1, [28, 8, 128]),
    ("internvl3.5-2b", 2.3, [28, 8, 128]),
    ("internvl3.5-4b", 4.7, [36, 8, 128]),
    ("internvl3.5-8b", 8.5, [36, 8, 128]),
    ("internvl3.5-14b", 15.1, [40, 8, 128]),
    ("internvl3.5-38b", 38.4, [64, 8, 128]),
];

#[test]
fn internvl_shapes_have_the_published_parameters() {
    for (shape, published, cached) in INTERNVL {
        let model = Model::plan(&settings(shape), &CPU).unwrap_or_else(|error| panic!("{shape}: {error}"));
        let found = model.parameters() as f64 / 1e9;
        assert!((found - published).abs() <= 0.051, "{shape}: {found}");
        let kv = model.kv_shape(&CPU);
        assert_eq!([kv.layers, kv.kv_heads, kv.head_dim], cached, "{shape}");
    }
}

#[test]
fn shapes_have_the_weight_bytes_of_the_released_checkpoints() {
    for (shape, bytes, cached) in RELEASED {
        let model = Model::plan(&settings(shape), &CPU).unwrap_or_else(|error| panic!("{shape}: {error}"));
        // Alignment adds a little, because tensors begin at multiples of 256 bytes.
        assert!((bytes..bytes + (1 << 20)).contains(&model.weight_bytes().0), "{shape}: {}", model.weight_bytes().0);
        let kv = model.kv_shape(&CPU);
        assert_eq!([kv.layers, kv.kv_heads, kv.head_dim], cached, "{shape}");
    }
}

#[test]
fn a_shape_has_the_control_tokens_of_the_released_model() {
    let checkpoint = open("qwen2.5-vl-7b", 0);
    let model = Model::plan(&checkpoint, &CPU).expect("the model is planned without drawing a weight");
    let prompts = checkpoint.prompts().expect("the checkpoint has a tokenizer");
    let tokenizer = prompts.tokenizer();
    let ids = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"];
    let ids = [&ids[..], &["<|video_pad|>"]].concat().into_iter().map(|token| tokenizer.id_of(token).unwrap_or(0));
    assert!(ids.eq([151_643, 151_644, 151_645, 151_652, 151_653, 151_655, 151_656]));
    assert_eq!(checkpoint.generation.eos_ids, [151_645, 151_643]);
    assert!(matches!(model.config(), FamilyConfig::Qwen2_5Vl(_)));
}

#[test]
fn a_random_checkpoint_renders_chats_like_its_family() {
    let checkpoint = open("qwen2.5-vl-tiny", 0);
    let content = vec![ContentPart::Image, ContentPart::Video, ContentPart::Text("Hi".to_owned())];
    let messages = [Message { role: Role::User, content }];
    let prompts = checkpoint.prompts().expect("the checkpoint has a tokenizer");
    let ids = prompts.encode(&messages, &TemplateInputs::default()).expect("the prompt is rendered");
    let text = prompts.tokenizer().decode(&ids, false).expect("the tokens decode to text");
    assert_eq!(
        text,
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>Hi\
         <|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn fp8_projections_take_one_byte_per_number_plus_scales() {
    let planned = |shape: &str, quantization| {
        let model = Model::plan(&settings(shape).with_quantization(quantization), &CPU).expect("the model is planned");
        (model.weight_bytes().0, model.parameters())
    };
    // Columns: hidden width, MLP width, query rows, key rows, layers, and the number
    // of experts with projections.
    for (shape, hidden, intermediate, query, kv, layers, experts) in
        [("qwen2.5-vl-7b", 3584, 18_944, 3584, 512, 28, 1), ("qwen3-30b-a3b", 2048, 768, 4096, 512, 48, 128)]
    {
        let ((plain, parameters), layers) = (planned(shape, None), layers as u64);
        let attention = 2 * hidden * (query + kv);
        let numbers = layers * (attention + experts * 3 * hidden * intermediate);
        let outputs = query + 2 * kv + hidden + experts * (2 * intermediate + hidden);
        for (quantization, scales) in [
            (WeightQuantization::Fp8PerChannel, layers * outputs * 4),
            (WeightQuantization::Fp8PerBlock, numbers / (128 * 128) * 4),
        ] {
            let (rounded, same) = planned(shape, Some(quantization));
            assert_eq!(same, parameters, "scales do not count as parameters");
            let expected = plain - numbers + scales;
            assert!(
                (expected..expected + (1 << 20)).contains(&rounded),
                "{shape} {quantization}: {rounded} {expected}"
            );
        }
    }
}

#[test]
fn a_random_fp8_checkpoint_has_the_plain_checkpoints_logit_variance() {
    let spread = |row: &[f32]| row.iter().map(|logit| logit * logit).sum::<f32>() / row.len() as f32;
    let plain = spread(&logits(&Bench::of(open("qwen2.5-vl-tiny", 5), 2)));
    for quantization in WeightQuantization::ROUNDING {
        let row = logits(&Bench::of(open("qwen2.5-vl-tiny", 5).with_quantization(Some(quantization)), 2));
        assert!(
            (spread(&row) / plain - 1.0).abs() < 0.3,
            "{quantization}: spread {} compared with {plain}",
            spread(&row)
        );
    }
}

/// The logits after some text.
fn logits(bench: &Bench) -> Vec<f32> {
    let prompts = bench.checkpoint.prompts().expect("the checkpoint has a tokenizer");
    let ids = prompts.tokenizer().encode_plain("Random, and yet the same.").expect("the text encodes");
    after(bench, ids)
}

/// The logits after these tokens.
fn after(bench: &Bench, ids: Vec<u32>) -> Vec<f32> {
    let layout = bench.model.config().lay_out(ids, &[]).expect("the prompt is laid out");
    let blocks: Vec<u32> = (0..Sequence::blocks_for(layout.tokens.len()) as u32).collect();
    let count = layout.tokens.len();
    bench
        .prefill(&mut Sequence::new(layout, Vec::new(), bench.model.cache_groups(), &blocks, None), &[count])
        .pop()
        .expect("a prompt has an end")
}

#[test]
fn random_logits_depend_only_on_the_seed() {
    let first = logits(&Bench::of(open("qwen2.5-vl-tiny", 5), 1));
    assert_eq!(first, logits(&Bench::of(open("qwen2.5-vl-tiny", 5), 2)));
    let other = logits(&Bench::of(open("qwen2.5-vl-tiny", 6), 1));
    assert_ne!(first, other);
    let spread = |row: &[f32]| row.iter().map(|logit| logit * logit).sum::<f32>() / row.len() as f32;
    // The variance of the product of a normalized row (128 numbers with standard deviation 1) and
    // weights with standard deviation 0.02.
    let expected = 128.0 * 0.02f32.powi(2);
    for row in [first, other] {
        assert!((spread(&row) / expected - 1.0).abs() < 0.5, "the spread is {}; expected {expected}", spread(&row));
    }
}

#[test]
fn routing_skew_gives_rare_experts_fewer_tokens() {
    let (experts, tokens) = (64, 300);
    // The fraction of the first layer's choices that go to the rarer half of the experts.
    let of_rare = |exponent: Option<f32>| -> (f64, u64) {
        let set = |copy: Copy, key, value: usize| copy.set("config.json", &[key], value.into());
        let copy = set(set(Copy::of(QWEN3_MOE), "num_experts", experts), "num_experts_per_tok", 8);
        let random = RandomCheckpoint::over(CheckpointSource::Folder(copy.0.clone()), []);
        let random = exponent.map_or(random.clone(), |exponent| random.with_routing_skew(exponent));
        let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("the files are valid");
        let (bench, mut numbers) = (Bench::of(checkpoint, 2), Random::new(3));
        after(&bench, (0..tokens).map(|_| numbers.below(256) as u32).collect());
        let loads = bench.model.expert_loads().expect("the model has experts");
        let loads = bench.pass(|scope| scope.download::<u32>(loads)).expect("the expert loads are counted");
        // The last layer runs only for the last token.
        let mut first = loads[..experts].to_vec();
        assert_eq!(first.iter().sum::<u32>(), 8 * tokens);
        first.sort_unstable();
        let of_rare = f64::from(first[..experts / 2].iter().sum::<u32>()) / f64::from(8 * tokens);
        (of_rare, bench.model.parameters())
    };
    // The rows of such a small model are similar, so routing is uneven even without a skew.
    let [(even, parameters), (skewed, parameters_skewed)] = [None, Some(1.0)].map(of_rare);
    assert_eq!(parameters, parameters_skewed, "the parameters of routers count");
    assert!(even > 0.2, "{even}");
    assert!(skewed < 0.8 * even, "the rare experts get {skewed} of the choices with a skew and {even} without");
}

#[test]
fn random_norms_are_ones_and_matrices_have_different_seeds() {
    let checkpoint = open("qwen2.5-vl-tiny", 0);
    let drawn = |name: &str, axes| match checkpoint.tensors.random(name, axes) {
        Some((_, RandomTensor::Drawn { seed })) => Some(seed),
        Some((_, RandomTensor::Ones | RandomTensor::Bound { .. })) => None,
        None => panic!("{name} is not random"),
    };
    assert_eq!(drawn("model.norm.weight", 1), None);
    assert_eq!(drawn("visual.blocks.0.norm1.weight", 1), None);
    let [one, two] = ["q", "k"].map(|part| drawn(&format!("model.layers.0.self_attn.{part}_proj.weight"), 2));
    assert!(one.is_some() && two.is_some() && one != two);
    assert!(drawn("model.layers.0.self_attn.q_proj.bias", 1).is_some(), "a random bias exists");
    let files =
        Checkpoint::open(CheckpointSource::Folder(repository("tests/golden/qwen2"))).expect("the checkpoint opens");
    assert_eq!(files.tensors.random("model.norm.weight", 1), None, "a checkpoint with files has no random tensors");
}

#[test]
fn an_unknown_shape_is_refused_with_its_nearest_name() {
    let refused = registry::random_checkpoint("qwen3-9b", 0).expect_err("the name is not a known shape");
    assert!(refused.to_string().contains("qwen3-9b") && refused.to_string().contains("qwen3-8b"), "{refused}");
    assert!(refused.hint().contains("plan --shapes"), "{}", refused.hint());
    for shape in registry::shapes() {
        Model::plan(&settings(shape), &CPU).unwrap_or_else(|error| panic!("{shape}: {error}"));
    }
}
