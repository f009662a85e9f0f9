"""The parts of the recording, in the order in which a full run records them."""

import torch
import transformers

from . import config_defaults, eagle3, fp8, fp8_hybrids, gemma3, gemma4, gemma4_assistant, gguf_files, image_formats, image_processor, internvl, pytorch_files, qwen2_5_vl, qwen2_vl
from . import packed_weights, qwen3_5, qwen3_vl, size_tables, template_cases, text_families, tokenizer
from .packages import read_inputs

# Each function takes the folder to write to and the `Inputs`. Later parts read
# files of earlier parts.
PARTS = {
    "qwen2_5_vl": qwen2_5_vl.record,
    "qwen2": text_families.record_qwen2,
    "families": text_families.record,
    "windowed": text_families.record_windowed,
    "defaults": config_defaults.record,
    "bare": qwen2_5_vl.record_bare,
    "videos": qwen2_5_vl.record_videos,
    "qwen2_vl": qwen2_vl.record,
    "qwen3_vl": qwen3_vl.record,
    "qwen3_5": qwen3_5.record,
    "eagle3": eagle3.record,
    "internvl": internvl.record,
    "gemma3": gemma3.record,
    "gemma4": gemma4.record,
    "gemma4_assistant": gemma4_assistant.record,
    "processor": image_processor.record,
    "cmyk": image_formats.record_cmyk,
    "animations": image_formats.record_animations,
    "formats": image_formats.record,
    "smart_resize": size_tables.record_smart_resize,
    "tiles": size_tables.record_tiles,
    "templates": template_cases.record,
    "tokenizer": tokenizer.record,
    "gguf": gguf_files.record,
    "pytorch": pytorch_files.record,
    "packed": packed_weights.record,
    "fp8": fp8.record,
    "fp8_hybrids": fp8_hybrids.record,
}


def record(root, cache, names):
    """Records the parts `names` into `root`, on one thread."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    inputs = read_inputs(cache)
    for name in names:
        PARTS[name](root, inputs)
    files = [path for path in root.rglob("*") if path.is_file()]
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files):,} bytes")
