#!/usr/bin/env python3
"""Measures vLLM in the same way as `bursar bench`, for comparison when both run on one GPU in one session.

    python3 tools/gpu/peer.py MODEL [--tensor-parallel-size N] [--quantization fp8] [--kv-cache-dtype fp8]
                              [--weights dummy|drawn|files] [--only decode,prefill,pictures,routing]
                              [--batches 1,16,64,256] [--decode-context 512] [--decode-steps 128]
                              [--replies 1,128] [--gdn-prefill-backend triton] [--attention-backend TRITON_ATTN]

MODEL is a folder with the configuration and tokenizer of a checkpoint. Pictures have the nearest
sizes that a Qwen vision tower takes without resizing, as in `bursar bench`. The method is the same
as in `bursar bench`: text is the faster of two runs, decoding is the difference between replies of
129 tokens (one more than --decode-steps) and of one token, and pictures are the median of three
runs after a warm-up. Decoding is greedy, without a prefix cache. A step has at most 256 sequences
and 8,192 tokens (Bursar: 8,448, see ADR 12). vLLM takes up to nine tenths of the GPU, its default.
Needs vLLM (0.26.0 and 0.33.0 were measured).

--weights: "dummy" are vLLM's own weights, drawn between -1/1000 and 1/1000. Do not use them for a mixture in FP8, nor
for a folder whose weights are in FP8: see `draw_weights`. "drawn" are weights like those of `bursar bench --random`.
"files" are the folder's weights, as `released_shape.py FOLDER --weights-only` writes them. The last figure of a mixture
shows how evenly it routes.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time

# Modules of this folder have the same names as modules of the standard library, so the folder is removed from the path.
sys.path.pop(0)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# vLLM's symmetric memory would use NVLink multicast, which Bursar keeps off too.
os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
STARTED = time.time()

from vllm import LLM, SamplingParams  # noqa: E402 (the settings above come first, and importing is part of the start)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

PARSER = argparse.ArgumentParser()
PARSER.add_argument("model")
PARSER.add_argument("--tensor-parallel-size", type=int, default=1)
PARSER.add_argument("--quantization")
PARSER.add_argument("--kv-cache-dtype", default="auto")
PARSER.add_argument("--attention-backend", help="for example TRITON_ATTN, if the package of the default one is not installed")
PARSER.add_argument("--gdn-prefill-backend", help="for hybrid models: triton, because FlashInfer is not installed")
PARSER.add_argument("--weights", choices=("dummy", "drawn", "files"), default="dummy")
PARSER.add_argument("--only", default="decode,prefill,pictures,routing")
PARSER.add_argument("--batches", default="1,16,64,256")
PARSER.add_argument("--decode-context", type=int, default=512)
PARSER.add_argument("--decode-steps", type=int, default=128)
PARSER.add_argument("--replies", default="1,128", help="tokens of replies about pictures")
ASKED = PARSER.parse_args()
PARTS = ASKED.only.split(",")
CONFIG = json.load(open(f"{ASKED.model}/config.json"))
PICTURE = {"internvl": "<IMG_CONTEXT>\n", "gemma3": "<start_of_image>", "gemma4": "<|image|>"}.get(
    CONFIG["model_type"], "<|vision_start|><|image_pad|><|vision_end|>")  # fmt: skip
PROMPT = f"<|im_start|>user\n{PICTURE}Describe.<|im_end|>\n<|im_start|>assistant\n"
PICTURES = ((64, 1036, 1036), (16, 1932, 1092))
STEPS = ASKED.decode_steps
# The standard deviation of E4M3 weights before scaling. The scales reduce the deviation to 0.02.
DEVIATION_OF_E4M3 = 100
EXPERTS = CONFIG.get("text_config", CONFIG).get("num_experts")


def draw_weights():
    """Replaces vLLM's dummy weights by weights like those of `bursar bench --random`: ones for
    norms, and numbers with mean 0 and standard deviation 0.02 for all other tensors.

    vLLM 0.26.0 draws every tensor below a module when it reaches the module. A mixture's router is below two modules,
    and is already quantized when vLLM draws it the second time. In E4M3 all but one in fifty numbers below 1/1000 are
    zero, and vLLM also draws the scale. All logits are therefore within 1e-7 of 0, so in f32 hardly any expert is more
    probable than another, and rows get the first eight experts. Weights that are in E4M3 from the start are also nearly
    all zero, and a GPU at its power limit multiplies zeros faster.
    """
    from vllm.model_executor.model_loader import dummy_loader

    seeds = itertools.count(7)  # in the order of modules, so that all ranks have the same router

    @torch.no_grad()
    def draw(weight, name=""):
        # vLLM 0.33 draws all tensors by this function and passes their names.
        if weight.dim() == 1 and "norm" in name:
            weight.data.fill_(1)
            return
        generator = torch.Generator(weight.device).manual_seed(next(seeds))
        if not weight.is_floating_point():
            return
        if weight.element_size() > 1:
            weight.data.normal_(0, 0.02, generator=generator)
        else:
            wide = torch.empty_like(weight, dtype=torch.bfloat16).normal_(0, DEVIATION_OF_E4M3, generator=generator)
            weight.data.copy_(wide.clamp_(-448, 448))

    def draw_layer(layer, _config):
        """Draws only the layer's own parameters. Buffers and the scales of the KV cache (scalars) are not changed."""
        for name, weight in layer.named_parameters(recurse=False):
            if weight.dim() == 1 and name.endswith("weight"):
                weight.data.fill_(1)
            elif weight.dim() > 0 and "weight_scale" in name:
                weight.data.fill_(0.02 / DEVIATION_OF_E4M3)
            elif weight.dim() > 0:
                draw(weight)

    # `initialize_single_dummy_weight` draws one tensor, a matrix or a bias, of a layer that is
    # quantized afterward.
    dummy_loader.initialize_single_dummy_weight = draw
    dummy_loader.initialize_dummy_weights = draw_layer


def timed(model, prompts, tokens):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    started = time.time()
    model.generate(prompts, params, use_tqdm=False)
    return time.time() - started


def text(model, count, length, tokens):
    ids = [[random.randrange(1000, 100_000) for _ in range(length)] for _ in range(count)]
    return timed(model, [{"prompt_token_ids": prompt} for prompt in ids], tokens)


def pictures(model, count, width, height, tokens):
    def picture():
        pixels = np.frombuffer(random.randbytes(3 * width * height), np.uint8).reshape(height, width, 3)
        return {"prompt": PROMPT, "multi_modal_data": {"image": Image.fromarray(pixels)}}

    return timed(model, [picture() for _ in range(count)], tokens)


def tell(what, figure):
    print(f"{what:60} {figure}", flush=True)


def free():
    return f"{torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB"


def routing(model):
    """The experts that rows choose in a step of 16 prompts of 512 tokens, which is too long for a CUDA graph."""
    chosen = {}

    def watch(network):
        for name, module in network.named_modules():
            if hasattr(getattr(module, "router", None), "set_capture_fn"):
                module.router.set_capture_fn(lambda ids, name=name: chosen.setdefault(name, []).append(ids.cpu()))

    model.apply_model(watch)
    text(model, 16, 512, 1)
    layers = [torch.cat(parts) for parts in chosen.values()]  # for each layer [rows, experts of a row]
    some = statistics.mean(len(ids[:: len(ids) // 64][:64].unique()) for ids in layers)
    most = statistics.mean(float(torch.bincount(ids.flatten()).max()) * EXPERTS / ids.numel() for ids in layers)
    even = EXPERTS * (1 - (1 - layers[0].shape[1] / EXPERTS) ** 64)
    tell(f"experts of {EXPERTS} that 64 rows choose ({even:.0f} if evenly)", f"{some:.1f}")
    tell("rows of the busiest expert", f"{most:.2f} times the mean")


def sizes():
    """Counts and sizes of pictures, in whole merged patches."""
    patch = CONFIG["vision_config"]["patch_size"]
    factor = 2 * (patch if isinstance(patch, int) else patch[0])
    return [(count, *((side + factor // 2) // factor * factor for side in sides)) for count, *sides in PICTURES]


def main():
    sees, context = "vision_config" in CONFIG, ASKED.decode_context
    model = LLM(
        model=ASKED.model,
        load_format="auto" if ASKED.weights == "files" else "dummy",
        dtype="bfloat16",
        tensor_parallel_size=ASKED.tensor_parallel_size,
        quantization=ASKED.quantization,
        kv_cache_dtype=ASKED.kv_cache_dtype,
        max_model_len=max(8192, context + STEPS + 1),
        **({"limit_mm_per_prompt": {"image": 1, "video": 0}} if sees else {}),
        **({"attention_backend": ASKED.attention_backend} if ASKED.attention_backend else {}),
        **({"gdn_prefill_backend": ASKED.gdn_prefill_backend} if ASKED.gdn_prefill_backend else {}),
        enable_prefix_caching=False,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        disable_log_stats=True,
    )
    tell("start of the script to ready", f"{time.time() - STARTED:.1f} s")
    cache = model.llm_engine.vllm_config.cache_config
    tell("tokens of keys and values", cache.num_gpu_blocks * cache.block_size)
    tell("free when ready", free())
    text(model, 8, 64, 8)
    for batch in map(int, ASKED.batches.split(",")) if "decode" in PARTS else ():
        short = min(text(model, batch, context, 1) for _ in range(2))
        long = min(text(model, batch, context, STEPS + 1) for _ in range(2))
        what = f"decode, a step of batch {batch} at {context} to {context + STEPS}"
        tell(what, f"{(long - short) / STEPS * 1e3:.2f} ms")
    for count, length in ((64, 512), (32, 2048), (8, 8000)) if "prefill" in PARTS else ():
        seconds = min(text(model, count, length, 1) for _ in range(2))
        tell(f"prefill, {count} prompts of {length} tokens", f"{count * length / seconds:,.0f} tokens/s")
    for count, width, height in sizes() if sees and "pictures" in PARTS else ():
        for tokens in map(int, ASKED.replies.split(",")):
            pictures(model, count, width, height, tokens)
            seconds = statistics.median(pictures(model, count, width, height, tokens) for _ in range(3))
            figure = f"{count / seconds:.2f} requests/s"
            tell(f"{count} requests with a picture of {width} x {height}, {tokens} out", figure)
    tell("free at the end", free())
    # Routing is measured last, because the hooks on the routers are not removed.
    if EXPERTS and "routing" in PARTS and ASKED.tensor_parallel_size == 1:
        routing(model)


# The worker processes of several ranks import this file again.
if ASKED.weights == "drawn":
    draw_weights()
if __name__ == "__main__":
    main()
