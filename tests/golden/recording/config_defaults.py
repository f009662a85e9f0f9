"""Settings that transformers' configuration classes assume for an empty config.json."""

from transformers import Gemma3TextConfig, Gemma4TextConfig, Gemma4UnifiedTextConfig, Gemma4VisionConfig, InternVLConfig, LlamaConfig, MistralConfig
from transformers import Qwen2_5_VLConfig, Qwen2Config, Qwen2VLConfig
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3VLConfig, Qwen3VLMoeConfig

from .files import write_json

SETTINGS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "depth", "num_heads", "in_channels",
    "patch_size", "spatial_merge_size", "temporal_patch_size", "tokens_per_second", "window_size", "out_hidden_size",
    "fullatt_block_indexes", "head_dim", "num_position_embeddings", "deepstack_visual_indexes", "embed_dim",
    "mlp_ratio", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
]  # fmt: skip
INTERNVL_SETTINGS = [
    "downsample_ratio", "image_seq_length", "image_token_id", "projector_hidden_act", "vision_feature_layer",
    "vision_feature_select_strategy", "attention_bias", "hidden_act", "image_size", "layer_norm_eps", "layer_scale_init_value",
    "norm_type", "num_channels", "use_absolute_position_embeddings", "use_mean_pooling", "use_qk_norm",
]  # fmt: skip

GEMMA_SETTINGS = [
    "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types", "hidden_size_per_layer_input",
    "vocab_size_per_layer_input", "num_kv_shared_layers", "attention_k_eq_v", "use_double_wide_mlp", "final_logit_softcapping",
    "per_layer_config", "use_bidirectional_attention", "pooling_kernel_size", "position_embedding_size", "use_clipped_linears",
    "standardize",
]  # fmt: skip


def record(root, _):
    fields = lambda config, names=SETTINGS: {key: value for key, value in config.to_dict().items() if key in names}  # noqa: E731
    both = lambda config: {"text": fields(config.text_config), "vision": fields(config.vision_config)}  # noqa: E731
    internvl, names = InternVLConfig(), [*SETTINGS, *INTERNVL_SETTINGS]
    gemma = [*SETTINGS, *GEMMA_SETTINGS]
    write_json(root / "config_defaults.json", {
        "qwen2": fields(Qwen2Config()), "qwen3": fields(Qwen3Config()), "llama": fields(LlamaConfig()),
        "mistral": fields(MistralConfig()), "gemma3": fields(Gemma3TextConfig(), gemma),
        "gemma4": {"text": fields(Gemma4TextConfig(), gemma), "unified": fields(Gemma4UnifiedTextConfig(), gemma),
                   "vision": fields(Gemma4VisionConfig(), gemma)}, "qwen2_5_vl": both(Qwen2_5_VLConfig()), "qwen2_vl": both(Qwen2VLConfig()),
        "qwen3_vl": both(Qwen3VLConfig()), "qwen3_moe": fields(Qwen3MoeConfig()), "qwen3_vl_moe": both(Qwen3VLMoeConfig()),
        "internvl": {"own": fields(internvl, names), "text": fields(internvl.text_config, names),
                     "vision": fields(internvl.vision_config, names)}})  # fmt: skip
