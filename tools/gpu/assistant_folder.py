#!/usr/bin/env python3
"""Writes the `config.json` of a Gemma 4 assistant to a folder, for benches with random weights:

    tools/gpu/assistant_folder.py gemma-4-e4b FOLDER
    bursar --device cuda:0 bench --random --shape gemma-4-e4b --only decode --draft-model FOLDER --draft-acceptance 0

The sizes of E4B's assistant were reported by users of the released model. The other sizes are guesses that match the published
numbers of parameters.
"""

import json
import sys
from pathlib import Path

# Hidden size of the decoder and of the assistant, width of its MLP, query heads, KV heads of sliding and of full attention, window in
# tokens, and whether it has clusters of tokens.
SIZES = {
    "gemma-4-e2b": (1536, 256, 2048, 4, 1, 1, 512, True),
    "gemma-4-e4b": (2560, 256, 2048, 4, 2, 2, 512, True),
    "gemma-4-12b": (3840, 1024, 8192, 16, 8, 1, 1024, False),
    "gemma-4-26b-a4b": (2816, 1024, 8192, 16, 8, 2, 1024, False),
    "gemma-4-31b": (5376, 1024, 8192, 32, 16, 4, 1024, False),
}


def config(name):
    decoder, hidden, mlp, heads, kv_heads, full_kv_heads, window, is_ordered = SIZES[name]
    text = {
        "attention_k_eq_v": full_kv_heads != kv_heads, "global_head_dim": 512, "head_dim": 256, "hidden_size": hidden,
        "hidden_size_per_layer_input": 0, "intermediate_size": mlp, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "max_position_embeddings": 131_072, "model_type": "gemma4_text", "num_attention_heads": heads,
        "num_global_key_value_heads": full_kv_heads, "num_hidden_layers": 4, "num_key_value_heads": kv_heads,
        "num_kv_shared_layers": 4, "rms_norm_eps": 1e-06, "sliding_window": window, "vocab_size": 262_144,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}  # fmt: skip
    return {"architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": decoder, "model_type": "gemma4_assistant",
            "text_config": text, "tie_word_embeddings": True, "use_ordered_embeddings": is_ordered}  # fmt: skip


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in SIZES:
        sys.exit(f"usage: assistant_folder.py SHAPE FOLDER, with a SHAPE of {', '.join(SIZES)}")
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(sys.argv[1]), indent=1) + "\n")


if __name__ == "__main__":
    main()
