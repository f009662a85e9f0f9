"""Records the chats with pictures of the Qwen-VL families."""

import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.vision_utils import get_vision_window_index

from .files import write_case
from .messages import content_parts, picture_chats
from .reference import ERROR_MAX, Reference, relative, rounded_checks
from .scenes import write_model_pictures

PATCH, MERGE, FACTOR = 14, 2, 28
MIN_PIXELS, MAX_PIXELS = 6 * FACTOR**2, 40 * FACTOR**2  # 6 to 40 image tokens per picture keep the files small


def encode(model, pixels, grids):
    """Rows of the vision encoder, one per merged patch: the embedding, then Qwen3-VL's deepstack features."""
    found = model.model.visual(pixels, grids)
    return torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or [])], -1)


def checked_embeddings(reference, pixels, grids, checks):
    """Rows of the vision encoder in f32. Adds their difference from f64 to `checks`."""
    embeddings = encode(reference.model, pixels, grids)
    checks["vision_f32_vs_f64"] = relative(embeddings, encode(reference.exact, pixels.double(), grids))
    assert checks["vision_f32_vs_f64"] < ERROR_MAX, checks
    return embeddings


def windows(grids):
    """Facts and tensors of Qwen2.5-VL's windows for pictures with the grids `grids`."""
    window_index, window_ends = get_vision_window_index(grids, MERGE, 112, PATCH)
    sizes = window_ends.diff().tolist()
    print(f"  {'':18} windows of {sorted(set(sizes))} patches (64 is a full one)")
    return {"window_patches": sizes}, {"window_index": window_index, "window_ends": window_ends.long()}


def picture_tensors(name, files, inputs, embeddings, stored):
    """Embeddings of each picture in the first case that shows it. `stored` has the pictures of earlier cases."""
    grids, tensors = inputs["image_grid_thw"], {"image_grid_thw": inputs["image_grid_thw"]}
    rows = grids.prod(1).div(MERGE**2, rounding_mode="floor").tolist()
    for file, chunk in zip(files, embeddings.split(rows)):
        if file not in stored:
            tensors[f"vision_embeddings.{file}"] = chunk  # [patches / 4, width], in reading order
            stored.add(file)
    if name == "same_image_twice":  # the smallest picture; image_processor/ has the resized bytes of the others
        tensors[f"pixel_values.{files[0]}"] = inputs["pixel_values"][: grids[0].prod()]  # [patches, values]
    return tensors


@torch.no_grad()
def record(root, checkpoint, kind, names=None, more_chats=None):
    """Records the cases `names` of a checkpoint, or all of them. `kind` is its model class.

    `more_chats` are chats without pictures, by case name, which come first."""
    write_model_pictures(root)
    processor = AutoProcessor.from_pretrained(root / checkpoint)
    assert processor.image_processor.backend == "torchvision"
    reference = Reference(kind, root / checkpoint)
    stored = set()
    chosen = {name: messages for name, messages in picture_chats().items() if not names or name in names}
    for name, messages in ((more_chats or {}) | chosen).items():
        files = [part["image"] for part in content_parts(messages) if "image" in part]
        prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [Image.open(root / "pictures" / file).convert("RGB") for file in files]
        inputs = dict(processor(text=[prompt], images=images or None, return_tensors="pt"))
        reference.forget_positions()
        tensors, checks = reference.record(name, inputs, prompt, {reference.model.config.image_token_id})
        positions, delta = torch.arange(inputs["input_ids"].shape[1]).expand(3, 1, -1), torch.zeros(1, 1, dtype=torch.long)
        facts = {"messages": messages, "prompt": prompt, "images": files}
        if images:
            grids = inputs["image_grid_thw"]
            print(f"  {'':18} grids {grids.tolist()}")
            positions, delta = reference.model.model.get_rope_index(
                inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=grids)  # fmt: skip
            embeddings = checked_embeddings(reference, inputs["pixel_values"], grids, checks)
            tensors |= picture_tensors(name, files, inputs, embeddings, stored)
            if reference.model.config.model_type == "qwen2_5_vl":
                window_facts, window_tensors = windows(grids)
                facts |= window_facts
                tensors |= window_tensors
        tensors |= {"position_ids": positions[:, 0], "rope_delta": delta[0]}  # [3, tokens], [1]
        facts["greedy_text"] = processor.tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(root / checkpoint / "cases", name, tensors, facts | {"checks": rounded_checks(checks)})
