#!/usr/bin/env python3
"""The distance of vLLM's logits from transformers' in f32, for comparison with the output of `model/tests/released_shape.rs`.

    python3 tools/gpu/peer_distance.py FOLDER [--quantization fp8,fp8_per_channel] [--only text,long_text]

FOLDER is the output of `released_shape.py`. vLLM loads FOLDER in bf16, and then once per quantization, applied while
loading. Each load has a separate process. Every prompt runs in a separate step, without graphs, torch.compile or prefix
cache, and the logits of its last 32 tokens are compared with the measures of the Rust test. Logits are bf16 numbers in
vLLM. Prints a line per prompt as the test does, then the table of `benches/h200.md`. Needs vLLM (0.26.0 was measured).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Modules of this folder have the same names as modules of the standard library, so the folder is removed from the
# path.
sys.path.pop(0)

import numpy as np  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

PROMPTS = ("text", "one_picture", "four_pictures", "long_text")
ROWS = 32
# The longest prompt has 8,192 tokens, and one token is generated.
TOKENS = 8448
PICTURES = 4
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # runs the model in this process
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def error(found, expected):
    """`||found - expected|| / ||expected||`"""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def agreed(one, other):
    """The number of rows in which the largest element has the same index. If several elements are equal, the first one counts."""
    return int((one.argmax(1) == other.argmax(1)).sum())


def measures(found, narrow, wide):
    """The Rust test's measures, from logits [32, vocabulary] of vLLM, transformers in bf16 and transformers in f32."""
    assert found.shape == narrow.shape == wide.shape, f"{found.shape}, {narrow.shape} and {wide.shape}"
    assert np.isfinite(found).all(), "not all logits are finite"
    last = slice(-1, None)
    return {
        "ours": error(found, wide), "theirs": error(narrow, wide), "between": error(found, narrow),
        "our_last": error(found[last], wide[last]), "their_last": error(narrow[last], wide[last]),
        "our_top": agreed(found, wide), "their_top": agreed(narrow, wide), "top_between": agreed(found, narrow)}  # fmt: skip


def describe(name, setting, found):
    return (
        f"{name} of {found['tokens']} tokens in {setting}, {ROWS} rows: vLLM {found['ours']:.2e} off f32, transformers' bf16 "
        f"{found['theirs']:.2e} (last row {found['our_last']:.2e} and {found['their_last']:.2e}), vLLM off theirs "
        f"{found['between']:.2e}; greatest as in f32: vLLM {found['our_top']}, theirs {found['their_top']}; vLLM as theirs "
        f"{found['top_between']}"
    )


def table(results):
    """A Markdown table of {setting: {prompt: measures}}. Settings and prompts that failed have dashes."""
    names = [name for name in PROMPTS if any(name in found for found in results.values())]
    head = ["prompt", "tokens", "transformers in bf16", *(f"vLLM in {setting}" for setting in results)]
    head.append(f"greatest as in f32, of {ROWS}: transformers / vLLM in {' / '.join(results)}")
    lines = [head, ["---"] * len(head)]
    for name in names:
        of_each = [found.get(name) for found in results.values()]
        some = next(found for found in of_each if found)
        tops = [some["their_top"], *(found["our_top"] if found else "-" for found in of_each)]
        errors = [some["theirs"], *(found and found["ours"] for found in of_each)]
        lines.append([
            name.replace("_", " "), f"{some['tokens']:,}",
            *(f"{error:.1e}".replace("e-0", "e-") if error else "-" for error in errors),
            " / ".join(map(str, tops))])  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def prompt(folder, name):
    """A prompt for vLLM, which expands each picture's placeholder itself."""
    from PIL import Image

    recorded = json.loads((folder / f"prompts/{name}.json").read_text())
    pictures = [Image.open(folder / "prompts" / picture).convert("RGB") for picture in recorded["pictures"]]
    return {"prompt_token_ids": recorded["ids"]} | ({"multi_modal_data": {"image": pictures}} if pictures else {})


def last_logits(model, prompt, seen):
    """Logits [32, vocabulary] of the last tokens, and the number of tokens. `seen` collects the model's output of each step."""
    import torch
    from vllm import SamplingParams

    seen.clear()
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    answer = model.generate(prompt, params, use_tqdm=False)[0]
    count = len(answer.prompt_token_ids)
    steps = [len(hidden) for hidden in seen]
    hidden = [hidden for hidden in seen if len(hidden) >= count]  # [tokens and padding, hidden], after the last norm
    assert len(hidden) == 1, f"{count} tokens should run in one step, not in steps of {steps} tokens"
    with torch.inference_mode():
        rows = hidden[0][count - ROWS : count]
        logits = model.apply_model(lambda network: network.compute_logits(rows))[0].float().cpu().numpy()
    token, greatest = answer.outputs[0].token_ids[0], logits[-1].argmax()
    if token != greatest:
        off = (logits[-1, greatest] - logits[-1, token]) / np.abs(logits[-1]).max()
        print(f"vLLM answered {token}, not the argmax {greatest}; logits differ by {off:.1e} of the largest", flush=True)
    return logits, count


def weights(network):
    """Parameter counts by type, which show what was quantized."""
    counts = {}
    for weight in network.parameters():
        kind = str(weight.dtype).removeprefix("torch.")
        counts[kind] = counts.get(kind, 0) + weight.numel()
    return ", ".join(f"{count / 1e9:.2f} billion in {kind}" for kind, count in sorted(counts.items()))


def compare(folder, setting, names, results):
    """Runs vLLM and writes the results to the file `results`, prompt by prompt."""
    started = time.monotonic()
    from vllm import LLM

    prompts = {name: prompt(folder, name) for name in names}
    has_pictures = lambda name: "multi_modal_data" in prompts[name]  # noqa: E731
    model = LLM(
        model=str(folder),
        dtype="bfloat16",
        quantization=None if setting == "bf16" else setting,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=TOKENS,
        max_num_batched_tokens=TOKENS,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": PICTURES if any(map(has_pictures, names)) else 0, "video": 0},
        disable_log_stats=True,
    )
    print(f"{setting}: {model.apply_model(weights)[0]}; ready after {time.monotonic() - started:.0f} s", flush=True)
    seen, found = [], {}

    def watch(network):
        network.register_forward_hook(lambda _module, _inputs, hidden: seen.append(hidden.clone()))

    model.apply_model(watch)
    for name in sorted(names, key=has_pictures):  # prompts that may fail come last
        logits, count = last_logits(model, prompts[name], seen)
        recorded = load_file(folder / f"prompts/{name}.safetensors")
        found[name] = measures(logits, recorded["logits.bf16"], recorded["logits.f32"]) | {"tokens": count}
        print(describe(name, setting, found[name]), flush=True)
        results.write_text(json.dumps(found))


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--quantization", default="fp8", help="comma-separated; bf16 always runs first")
    arguments.add_argument("--only", default=",".join(PROMPTS), help="prompts to run, comma-separated")
    arguments.add_argument("--one", nargs=2, metavar=("SETTING", "RESULTS"), help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    names = [name for name in asked.only.split(",") if name]
    if unknown := set(names) - set(PROMPTS):
        arguments.error(f"no such prompts: {', '.join(sorted(unknown))}; there are {', '.join(PROMPTS)}")
    for name in names:
        if not (asked.folder / f"prompts/{name}.safetensors").exists():
            arguments.error(f"{asked.folder} has no results of {name}: released_shape.py without --weights-only writes them")
    if asked.one:
        return compare(asked.folder, asked.one[0], names, Path(asked.one[1]))

    results, failed = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for setting in ["bf16", *(setting for setting in asked.quantization.split(",") if setting)]:
            file = Path(scratch) / f"{setting}.json"
            command = [sys.executable, __file__, str(asked.folder), "--only", asked.only, "--one", setting, str(file)]
            if subprocess.run(command, env=SETTINGS | os.environ).returncode:
                failed.append(setting)
            results[setting] = json.loads(file.read_text()) if file.exists() else {}
    if any(results.values()):
        print(f"\n||found - f32|| / ||f32||, logits of the last {ROWS} tokens\n\n{table(results)}")
    if failed:
        sys.exit(f"vLLM failed in {', '.join(failed)}")


if __name__ == "__main__":
    main()
