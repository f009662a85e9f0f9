"""Records the chats of Gemma 4 with pictures."""

import torch
from PIL import Image
from transformers import AutoTokenizer, Gemma4AudioFeatureExtractor, Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor

from . import crop_chats
from .files import write_case, write_png
from .messages import content_parts
from .reference import ERROR_MAX, greedy, relative, rounded_checks
from .scenes import draw_scene, write_model_pictures
from .tile_chats import SMALL, SMALL_SCENE

CASES = ["one_image", "several_images", "two_turns"]
INFLUENCE_MIN = 1e-2  # of masks and pictures on the logits, relative to the largest |logit|


def encode(model, pixels, positions):
    """Rows of the vision encoder and projection: [tokens of all pictures, width]."""
    return torch.cat(list(model.model.get_image_features(pixels, positions).pooler_output))


def check_influence(reference, inputs, greedy_tokens):
    """Asserts that the pictures and, if there is one, their mask change the logits."""
    model, types = reference.model, inputs["mm_token_type_ids"]
    logits = lambda inputs: model(**inputs, use_cache=False).logits  # noqa: E731
    recorded, mirrored = logits(inputs), inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}
    found = {"mirrored": relative(logits(mirrored), recorded)}
    if model.config.text_config.use_bidirectional_attention == "vision":
        found["causal"] = relative(logits(inputs | {"mm_token_type_ids": torch.zeros_like(types)}), recorded)
    print(f"  {'':18} changes:", ", ".join(f"{key} {value:.1e}" for key, value in found.items()))
    assert min(found.values()) > INFLUENCE_MIN, found
    assert not torch.equal(greedy(model, mirrored)[1], greedy_tokens), "the answer does not depend on the pictures"


def picture_tensors(reference, processor, files, images, stored, checks):
    """Grids of all pictures, and rows of each picture in the first case that shows it. `stored` has those of earlier cases."""
    tensors, grids = {}, []
    for file, image in zip(files, images):
        found = processor.image_processor(images=[image], return_tensors="pt")
        pixels, positions = found["pixel_values"], found["image_position_ids"]
        across, down = (positions[0].amax(0) + 1).tolist()
        grids.append([1, down, across])
        rows = encode(reference.model, pixels, positions)
        difference = relative(rows, encode(reference.exact, pixels.double(), positions))
        checks["vision_f32_vs_f64"] = max(difference, checks.get("vision_f32_vs_f64", 0.0))
        assert difference < ERROR_MAX, checks
        if file not in stored:
            stored.add(file)
            tensors[f"vision_embeddings.{file}"] = rows  # [tokens, width], in reading order
    return tensors | {"image_grid_thw": torch.tensor(grids)}


@torch.no_grad()
def record(root, folder, reference):
    """Records the cases of the checkpoint in `folder`."""
    write_png(root / "pictures" / SMALL, draw_scene(*SMALL_SCENE))
    write_model_pictures(root)
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(), image_processor=Gemma4ImageProcessor.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder), video_processor=Gemma4VideoProcessor())  # fmt: skip
    assert processor.image_processor.backend == "torchvision"
    tokenizer, stored = processor.tokenizer, set()
    for name, (messages, _) in crop_chats.chats().items():
        if name not in CASES:
            continue
        files = [part["image"] for part in content_parts(messages) if "image" in part]
        images = [Image.open(root / "pictures" / file).convert("RGB") for file in files]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template has written `<bos>`.
        inputs = dict(processor(text=[prompt], images=[images], add_special_tokens=False, return_tensors="pt"))
        written = prompt.replace("<|image|>", "<|image><|image|><image|>")
        tensors, checks = reference.record(name, inputs, written, {reference.model.config.image_token_id})
        check_influence(reference, inputs, tensors["greedy_tokens"])
        tokens = inputs["input_ids"].shape[1]
        tensors |= {"position_ids": torch.arange(tokens).expand(3, -1), "rope_delta": torch.zeros(1, dtype=torch.long)}
        tensors |= picture_tensors(reference, processor, files, images, stored, checks)
        facts = {"messages": messages, "prompt": prompt, "images": files, "checks": rounded_checks(checks)}
        facts["greedy_text"] = tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(folder / "cases", name, tensors, facts)
