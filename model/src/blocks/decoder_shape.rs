//! The sizes of a decoder, and the checkpoint files that are generated from them.

use serde_json::{Value, json};

use crate::text::byte_level;

/// Number of text tokens in Qwen's released vocabularies before Qwen3.5.
const WORDS: usize = 151_643;

pub const CHATML: ShapeText =
    ShapeText { control: &CONTROL, template: TEMPLATE, ends: &["<|im_end|>", "<|endoftext|>"] };

const CONTROL: [&str; 14] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
];

/// Qwen's released chat template without the default system turn.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\
    {% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
    {% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
    {% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
    {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The control tokens of a vocabulary, and the chat template that uses them.
#[derive(Clone, Copy)]
pub struct ShapeText {
    /// Control tokens. Their ids follow the ids of the text tokens, in this order.
    pub control: &'static [&'static str],
    pub template: &'static str,
    /// The tokens that end a reply. The first token of the list ends a chat turn.
    pub ends: &'static [&'static str],
}

/// The sizes of a decoder.
#[derive(Clone, Copy)]
pub struct DecoderShape {
    pub text: ShapeText,
    /// Number of text tokens.
    pub words: usize,
    /// Rows of the embedding. Some rows are not used by any token.
    pub vocabulary: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Elements of a head; `None` means `hidden / heads`.
    pub head_dim: Option<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon that norms add to the mean square.
    pub norm_epsilon: f64,
    /// Maximum number of tokens of a sequence.
    pub context_tokens: usize,
    /// Whether the embedding is also the output projection.
    pub is_tied: bool,
    /// Experts that replace the MLP of each layer.
    pub mixture: Option<MixtureShape>,
    /// Gated delta nets that replace the attention of all layers except every fourth one.
    pub delta: Option<DeltaShape>,
}

/// The sizes of gated delta nets.
#[derive(Clone, Copy)]
pub struct DeltaShape {
    pub key_heads: usize,
    pub value_heads: usize,
    /// Elements of a query, key or value of one head.
    pub head_dim: usize,
}

/// The sizes of a mixture of experts.
#[derive(Clone, Copy)]
pub struct MixtureShape {
    pub experts: usize,
    /// Number of experts chosen for each token.
    pub top: usize,
    /// Width of an expert.
    pub intermediate: usize,
    /// Width of the expert that every token uses, if there is one.
    pub shared: Option<usize>,
}

impl DecoderShape {
    /// The shape of a released Qwen2.5 model of up to 3B: the embedding is also the output
    /// projection.
    pub const fn small([hidden, intermediate, layers, heads, kv_heads]: [usize; 5], context_tokens: usize) -> Self {
        DecoderShape {
            text: CHATML,
            words: WORDS,
            vocabulary: 151_936,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim: None,
            rope_theta: 1_000_000.0,
            norm_epsilon: 1e-6,
            context_tokens,
            is_tied: true,
            mixture: None,
            delta: None,
        }
    }

    /// The shape of a released Qwen2.5 model of 7B or more: the embedding has more rows, and the
    /// output projection is a separate matrix.
    pub const fn large(numbers: [usize; 5], context_tokens: usize) -> Self {
        DecoderShape { vocabulary: 152_064, is_tied: false, ..DecoderShape::small(numbers, context_tokens) }
    }

    /// The id of a control token.
    ///
    /// # Panics
    /// If `token` is not a control token of this shape.
    pub fn id(&self, token: &str) -> usize {
        self.words + self.text.control.iter().position(|control| *control == token).expect("a control token")
    }

    /// The decoder's keys of `config.json`.
    pub fn config(&self) -> Value {
        let mut config = json!({
            "eos_token_id": self.id(self.text.ends[0]),
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context_tokens,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            "use_sliding_window": false,
            "vocab_size": self.vocabulary,
        });
        if let Some(head_dim) = self.head_dim {
            config["head_dim"] = head_dim.into();
        }
        if let Some(mixture) = self.mixture {
            config["num_experts"] = mixture.experts.into();
            config["num_experts_per_tok"] = mixture.top.into();
            config["moe_intermediate_size"] = mixture.intermediate.into();
            config["norm_topk_prob"] = true.into();
            config["decoder_sparse_step"] = 1.into();
            config["mlp_only_layers"] = json!([]);
            if let Some(shared) = mixture.shared {
                config["shared_expert_intermediate_size"] = shared.into();
            }
        }
        if let Some(delta) = self.delta {
            config["linear_num_key_heads"] = delta.key_heads.into();
            config["linear_num_value_heads"] = delta.value_heads.into();
            config["linear_key_head_dim"] = delta.head_dim.into();
            config["linear_value_head_dim"] = delta.head_dim.into();
            config["linear_conv_kernel_dim"] = 4.into();
            config["full_attention_interval"] = 4.into();
            config["attn_output_gate"] = true.into();
            config["mtp_num_hidden_layers"] = 1.into();
            config["mtp_use_dedicated_embeddings"] = false.into();
        }
        config
    }

    /// The checkpoint's text files except `config.json` and the tokenizer.
    pub fn text_files(&self) -> [(&'static str, Vec<u8>); 2] {
        let ends: Vec<_> = self.text.ends.iter().map(|token| self.id(token)).collect();
        let settings = json!({ "chat_template": self.text.template, "bos_token": self.text.control[0] });
        [
            ("generation_config.json", json!({ "eos_token_id": ends, "do_sample": false }).to_string().into_bytes()),
            ("tokenizer_config.json", settings.to_string().into_bytes()),
        ]
    }

    /// A `tokenizer.json` with the same number of tokens as the release.
    pub fn tokenizer(&self) -> Vec<u8> {
        byte_level::tokenizer(self.words, self.text.control)
    }
}
