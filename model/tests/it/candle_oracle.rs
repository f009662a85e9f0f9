//! candle-transformers as a second oracle: its Llama, Qwen2 and Qwen3 compute the same logits, at
//! sizes without recorded results.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, qwen2, qwen3};
use serde_json::{Value, json};

use crate::{
    bench::{Bench, Sequence, relative_error},
    copy::{Copy, QWEN2},
};

/// The same tolerance as for recorded results.
const TOLERANCE: f32 = 1e-4;

/// Lengths of prompts: one token, within a block, across a block boundary, and several blocks.
const PROMPTS: [usize; 4] = [1, 7, 17, 90];

const LAYERS: usize = 3;

/// Sizes: hidden, MLP, query heads, key and value heads, elements of a head, vocabulary.
type Sizes = [usize; 6];

/// The settings that all three families have.
fn config([hidden, intermediate, heads, kv_heads, head_dim, vocabulary]: Sizes, more: Value) -> Value {
    let mut config = json!({
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0, "tie_word_embeddings": false, "use_sliding_window": false, "max_window_layers": LAYERS,
        "sliding_window": 4096, "attention_bias": false,
    });
    let fields = config.as_object_mut().expect("an object");
    fields.extend(more.as_object().expect("an object").clone());
    config
}

/// Random weights by name. `extra` lists additional weights of each layer. Only some of the three
/// families have them.
fn weights(
    [hidden, intermediate, heads, kv_heads, head_dim, vocabulary]: Sizes,
    extra: &[&str],
) -> HashMap<String, Tensor> {
    let mut weights = HashMap::new();
    let mut put = |name: String, shape: &[usize]| {
        // Norms are near 1. A matrix preserves the magnitude of the numbers that it multiplies.
        let (mean, deviation) = match shape {
            [_] if name.ends_with("norm.weight") => (1.0f32, 0.2),
            [_] => (0.0, 0.2),
            [.., columns] => (0.0, (*columns as f32).powf(-0.5)),
            [] => unreachable!("every tensor has a shape"),
        };
        let tensor = Tensor::randn(mean, deviation, shape, &Device::Cpu).expect("a tensor");
        assert!(weights.insert(name, tensor).is_none());
    };
    put("model.embed_tokens.weight".to_owned(), &[vocabulary, hidden]);
    put("lm_head.weight".to_owned(), &[vocabulary, hidden]);
    put("model.norm.weight".to_owned(), &[hidden]);
    for layer in 0..LAYERS {
        let mut put = |name: &str, shape: &[usize]| put(format!("model.layers.{layer}.{name}"), shape);
        put("input_layernorm.weight", &[hidden]);
        put("post_attention_layernorm.weight", &[hidden]);
        put("self_attn.q_proj.weight", &[heads * head_dim, hidden]);
        put("self_attn.k_proj.weight", &[kv_heads * head_dim, hidden]);
        put("self_attn.v_proj.weight", &[kv_heads * head_dim, hidden]);
        put("self_attn.o_proj.weight", &[hidden, heads * head_dim]);
        put("mlp.gate_proj.weight", &[intermediate, hidden]);
        put("mlp.up_proj.weight", &[intermediate, hidden]);
        put("mlp.down_proj.weight", &[hidden, intermediate]);
        for name in extra {
            let rows = match *name {
                "self_attn.q_proj.bias" => heads * head_dim,
                "self_attn.k_proj.bias" | "self_attn.v_proj.bias" => kv_heads * head_dim,
                _ => head_dim,
            };
            put(name, &[rows]);
        }
    }
    weights
}

/// Compares our logits after prompts of several lengths, and after one more token each, with the
/// logits of `theirs`, which takes a prompt and the position of its first token.
fn compare(
    config: &Value,
    weights: &HashMap<String, Tensor>,
    mut theirs: impl FnMut(VarBuilder<'static>) -> Box<dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>>,
) {
    let copy = Copy::of(QWEN2).write("config.json", config.to_string());
    candle_core::safetensors::save(weights, copy.0.join("model.safetensors")).expect("the file is written");
    let bench = Bench::of(copy.open(), 2);
    let vocabulary = config["vocab_size"].as_u64().expect("a number") as u32;
    for length in PROMPTS {
        let ids: Vec<u32> = (0..=length as u32).map(|at| (at * 7919 + 13) % vocabulary).collect();
        let weights = VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu);
        let mut forward = theirs(weights);
        let mut run = |ids: &[u32], first: usize| -> Vec<f32> {
            let input = Tensor::new(ids, &Device::Cpu).expect("ids").unsqueeze(0).expect("one sequence");
            forward(&input, first).expect("the model runs").flatten_all().expect("a row").to_vec1().expect("numbers")
        };
        let layout = bench.model.config().lay_out(ids.clone(), &[]).expect("the prompt is laid out");
        let blocks: Vec<u32> = (0..Sequence::blocks_for(ids.len()) as u32).collect();
        let mut sequence = Sequence::new(layout, Vec::new(), bench.model.cache_groups(), &blocks, None);
        let ours = bench.prefill(&mut sequence, &[length, 1]);
        let expected = [run(&ids[..length], 0), run(&ids[length..], length)];
        let found = [ours.first(), ours.last()].map(|row| row.expect("a row of logits"));
        for (found, expected) in found.iter().zip(&expected) {
            let error = relative_error(found, expected);
            assert!(error < TOLERANCE, "error is {error:e} after {length} tokens of {config}");
        }
    }
}

#[test]
fn llama_agrees_with_candle() {
    let scaled = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64 });
    for (sizes, rope) in [([384, 173, 6, 3, 64, 1009], scaled), ([160, 99, 5, 5, 32, 512], Value::Null)] {
        let more = json!({ "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_scaling": rope });
        let config = config(sizes, more);
        compare(&config, &weights(sizes, &[]), |weights| {
            let settings: llama::LlamaConfig =
                serde_json::from_value(config.clone()).expect("candle parses the config");
            let settings = settings.into_config(false);
            let model = llama::Llama::load(weights, &settings).expect("candle loads the model");
            let mut cache = llama::Cache::new(true, DType::F32, &settings, &Device::Cpu).expect("a cache");
            Box::new(move |ids, first| model.forward(ids, first, &mut cache))
        });
    }
}

#[test]
fn qwen2_agrees_with_candle() {
    for sizes in [[448, 205, 7, 1, 64, 1009], [256, 130, 2, 2, 128, 600]] {
        let config = config(sizes, json!({ "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"] }));
        let biases = ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"];
        compare(&config, &weights(sizes, &biases), |weights| {
            let settings: qwen2::Config = serde_json::from_value(config.clone()).expect("candle parses the config");
            let mut model = qwen2::ModelForCausalLM::new(&settings, weights).expect("candle loads the model");
            Box::new(move |ids, first| model.forward(ids, first))
        });
    }
}

#[test]
fn qwen3_agrees_with_candle() {
    for sizes in [[320, 171, 5, 5, 128, 1009], [192, 77, 8, 2, 64, 700]] {
        let more = json!({ "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "sliding_window": null });
        let config = config(sizes, more);
        let norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
        compare(&config, &weights(sizes, &norms), |weights| {
            let settings: qwen3::Config = serde_json::from_value(config.clone()).expect("candle parses the config");
            let mut model = qwen3::ModelForCausalLM::new(&settings, weights).expect("candle loads the model");
            Box::new(move |ids, first| model.forward(ids, first))
        });
    }
}
