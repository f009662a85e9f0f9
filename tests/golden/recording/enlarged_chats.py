"""Records the chats of Gemma 4 with pictures and videos."""

import re

import torch
from PIL import Image
import transformers
from transformers import AutoTokenizer
from transformers.models.gemma4.modeling_gemma4 import create_masks_for_vision_model
from transformers.models.gemma4_unified import modeling_gemma4_unified

from . import crop_chats
from .files import write_case, write_png
from .messages import content_parts, video_chats, without_video_fields
from .reference import ERROR_MAX, greedy, relative, rounded_checks
from .scenes import draw_scene, video_arrays, write_model_pictures, write_videos
from .tile_chats import SMALL, SMALL_SCENE

# The cases of each checkpoint. Fewer cases make smaller archives.
CASES = {
    "gemma4": ["one_image", "several_images", "two_turns", "video_odd_slow", "video_and_picture"],
    "gemma4_clipped": ["one_image", "several_images", "two_turns"],
    "gemma4_unified": ["one_image", "two_turns", "video_and_picture"]}  # fmt: skip
INFLUENCE_MIN = 1e-2  # of masks and pictures on the logits, relative to the largest |logit|


def use_released_masks():
    """Makes picture tokens attend to the whole picture only in sliding-window layers, as in the authors' implementation and in
    vLLM. transformers 5.17 does so in `Gemma4ForConditionalGeneration`, but `Gemma4UnifiedForConditionalGeneration` (12B)
    applies the mask in all layers (huggingface/transformers issue 46711)."""
    make_masks = modeling_gemma4_unified.create_masks_for_generate
    if make_masks is not with_released_masks:
        with_released_masks.original = make_masks
        modeling_gemma4_unified.create_masks_for_generate = with_released_masks


def with_released_masks(block_sequence_ids=None, **settings):
    if block_sequence_ids is None:
        return with_released_masks.original(**settings)
    return create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **settings)


def encode(model, pixels, positions):
    """Rows of the vision encoder and projection: [tokens of all pictures, width]."""
    return torch.cat(list(model.model.get_image_features(pixels, positions).pooler_output))


def check_influence(reference, inputs, greedy_tokens):
    """Asserts that the pictures and, if there is one, their mask change the logits."""
    model, types = reference.model, inputs["mm_token_type_ids"]
    logits = lambda inputs: model(**inputs, use_cache=False).logits  # noqa: E731
    pixels = {key: inputs[key].flip(-1) for key in ("pixel_values", "pixel_values_videos") if key in inputs}
    recorded, mirrored = logits(inputs), inputs | pixels
    found = {"mirrored": relative(logits(mirrored), recorded)}
    if model.config.text_config.use_bidirectional_attention == "vision":
        found["causal"] = relative(logits(inputs | {"mm_token_type_ids": torch.zeros_like(types)}), recorded)
    print(f"  {'':18} changes:", ", ".join(f"{key} {value:.1e}" for key, value in found.items()))
    assert min(found.values()) > INFLUENCE_MIN, found
    assert not torch.equal(greedy(model, mirrored)[1], greedy_tokens), "the answer does not depend on the pictures"


def video_tensors(reference, inputs, videos, stored, checks):
    """Returns the grids of all videos, and the embeddings of each video that is not in `stored`. Adds their names to `stored`."""
    tensors, grids = {}, []
    for index, video in enumerate(videos):
        pixels, positions = inputs["pixel_values_videos"][index], inputs["video_position_ids"][index]
        across, down = (positions[0].amax(0) + 1).tolist()
        grids.append([len(pixels), down, across])
        rows = encode(reference.model, pixels, positions)
        difference = relative(rows, encode(reference.exact, pixels.double(), positions))
        checks["vision_f32_vs_f64"] = max(difference, checks.get("vision_f32_vs_f64", 0.0))
        assert difference < ERROR_MAX, checks
        if video["video"] not in stored:
            stored.add(video["video"])
            tensors[f"vision_embeddings.{video['video']}"] = rows  # [tokens of all frames, width]
    return tensors | ({"video_grid_thw": torch.tensor(grids)} if grids else {})


def with_times(prompt, videos, frames):
    """The prompt with each video replaced by its frames, each preceded by its timestamp."""
    times = iter([int(index / video["frames_per_second"]) for index in range(len(frames[video["video"]]))] for video in videos)
    return re.sub(r"<\|video\|>", lambda _: " ".join(f"{t // 60:02d}:{t % 60:02d} <|video|>" for t in next(times)), prompt)


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
    return tensors | ({"image_grid_thw": torch.tensor(grids)} if grids else {})


@torch.no_grad()
def record(root, folder, reference):
    """Records the cases of the checkpoint in `folder`."""
    write_png(root / "pictures" / SMALL, draw_scene(*SMALL_SCENE))
    write_model_pictures(root)
    prefix = type(reference.model).__name__.removesuffix("ForConditionalGeneration")
    part = lambda name: getattr(transformers, f"{prefix}{name}")  # noqa: E731
    processor = part("Processor")(
        feature_extractor=part("AudioFeatureExtractor")(), image_processor=part("ImageProcessor").from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder), video_processor=part("VideoProcessor").from_pretrained(folder))  # fmt: skip
    assert processor.image_processor.backend == "torchvision"
    write_videos(root)
    use_released_masks()
    config, frames = reference.model.config, video_arrays()
    tokenizer, stored = processor.tokenizer, set()
    chats = {name: messages for name, (messages, _) in crop_chats.chats().items()} | video_chats()
    for name in CASES[folder.name]:
        messages = chats[name]
        contents = content_parts(messages)
        files = [part["image"] for part in contents if part["type"] == "image"]
        videos = [part for part in contents if part["type"] == "video"]
        images = [Image.open(root / "pictures" / file).convert("RGB") for file in files]
        prompt = tokenizer.apply_chat_template(without_video_fields(messages), tokenize=False, add_generation_prompt=True)
        arrays = [frames[video["video"]] for video in videos]
        metadata = [{"fps": video["frames_per_second"], "total_num_frames": len(array), "frames_indices": list(range(len(array)))}
                    for video, array in zip(videos, arrays)]  # fmt: skip
        shown = dict(images=[images] if images else None, videos=arrays or None, video_metadata=metadata, do_sample_frames=False)
        # The template has written `<bos>`.
        inputs = dict(processor(text=[prompt], **shown, add_special_tokens=False, return_tensors="pt"))
        timed = with_times(prompt, videos, frames)
        written = re.sub(r"(<\|image\|>|<\|video\|>)", r"<|image>\1<image|>", timed)
        tensors, checks = reference.record(name, inputs, written, {config.image_token_id, config.video_token_id})
        check_influence(reference, inputs, tensors["greedy_tokens"])
        tokens = inputs["input_ids"].shape[1]
        tensors |= {"position_ids": torch.arange(tokens).expand(3, -1), "rope_delta": torch.zeros(1, dtype=torch.long)}
        tensors |= picture_tensors(reference, processor, files, images, stored, checks)
        tensors |= video_tensors(reference, inputs, videos, stored, checks)
        facts = {"messages": messages, "prompt": prompt, "images": files, "checks": rounded_checks(checks)}
        if videos:
            facts["videos"] = [{"name": video["video"], "frames": len(array), "frames_per_second": video["frames_per_second"]}
                               for video, array in zip(videos, arrays)]  # fmt: skip
            facts["written"] = timed
        facts["greedy_text"] = tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(folder / "cases", name, tensors, facts)
