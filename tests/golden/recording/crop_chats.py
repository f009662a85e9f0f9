"""Records the chats of Gemma 3 with pictures, some of them with crops (pan and scan)."""

import torch
from PIL import Image
from transformers import AutoProcessor

from .files import write_case, write_png
from .messages import content_parts, parts, picture, text
from .reference import ERROR_MAX, greedy, relative, rounded_checks
from .scenes import draw_scene, write_model_pictures
from .tile_chats import SMALL, SMALL_SCENE

CROPS = {  # settings of the cases with crops. The minimum size in transformers' code is 256 pixels
    "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32, "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2}  # fmt: skip
INFLUENCE_MIN = 1e-2  # of masks and pictures on the logits, relative to the largest |logit|


def chats():
    """Messages and settings of the processor, by case name."""
    names = ("scene_101x157.png", "wide_333x97.png", "square_225x225.png", "tiny_41x30.png", "large_640x427.png", SMALL)
    scene, wide, square, tiny, large, small = map(picture, names)
    return {
        "one_image": ([parts("user", scene, "What is in this picture?")], {}),
        "several_images": ([parts("user", "First ", large, " then ", tiny, " and last ", small, " Which is larger?")], {}),
        "two_turns": ([
            text("system", "Be brief."),
            parts("user", square, "Describe the picture."),
            text("assistant", "A red circle."),
            parts("user", "And this? ", scene),
        ], {}),
        "pan_and_scan": ([parts("user", wide, square, "Compare the two.")], CROPS),
        # The crops of `scene` have unequal heights. Those of `tiny` would be smaller than 32 pixels, so it has none.
        "pan_and_scan_tall": ([parts("user", "Is ", scene, " larger than ", tiny, "?")], CROPS),
    }  # fmt: skip


def written(prompt, num_crops):
    """The prompt with the text that the processor writes at each picture, and one placeholder for the tokens of a picture."""
    visual = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    pieces = prompt.split("<start_of_image>")
    for place, crops in enumerate(num_crops, start=1):
        views = f"Here is the original image {visual} and here are some crops to help you see better {' '.join([visual] * crops)}"
        pieces[place] = (views if crops else visual) + pieces[place]
    return "".join(pieces)


def encode(model, pixels):
    """Rows of the vision encoder and projector: [views, tokens, width]."""
    return model.model.get_image_features(pixels).pooler_output


def check_influence(reference, inputs, greedy_tokens):
    """Asserts that the mask of pictures, the window and the pictures change the logits, and that other pictures change the
    answer."""
    model, types, settings = reference.model, inputs["token_type_ids"], reference.model.config.text_config
    logits = lambda inputs: model(**inputs, use_cache=False).logits  # noqa: E731
    recorded, mirrored = logits(inputs), inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}
    found = {"causal": relative(logits(inputs | {"token_type_ids": torch.zeros_like(types)}), recorded),
             "mirrored": relative(logits(mirrored), recorded)}  # fmt: skip
    window, settings.sliding_window = settings.sliding_window, types.shape[1]
    found["unlimited window"] = relative(logits(inputs), recorded)
    settings.sliding_window = window
    print(f"  {'':18} changes:", ", ".join(f"{key} {value:.1e}" for key, value in found.items()))
    assert min(found.values()) > INFLUENCE_MIN, found
    assert not torch.equal(greedy(model, mirrored)[1], greedy_tokens), "the answer does not depend on the pictures"


class Views:
    """The views of the pictures of a chat: each picture resized, then its crops resized."""

    def __init__(self, processor, files, images, settings):
        self.files = files
        self.found = [processor.image_processor(images=[image], return_tensors="pt", **settings) for image in images]
        self.levels = [processor.image_processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="pt",
                                                 **settings)["pixel_values"] for image in images]  # fmt: skip
        self.pixels = torch.cat([views["pixel_values"] for views in self.found])
        self.num_crops = torch.cat([views["num_crops"] for views in self.found])

    def tensors(self, reference, stored, checks):
        """Tensors of each picture in the first case that shows as many views of it. `stored` has those of earlier cases."""
        tensors = {"num_crops": self.num_crops}
        for file, found, levels in zip(self.files, self.found, self.levels):
            pixels = found["pixel_values"]
            rows = encode(reference.model, pixels)
            difference = relative(rows, encode(reference.exact, pixels.double()))
            checks["vision_f32_vs_f64"] = max(difference, checks.get("vision_f32_vs_f64", 0.0))
            assert difference < ERROR_MAX, checks
            if (file, len(pixels)) in stored:
                continue
            stored.add((file, len(pixels)))
            tensors[f"vision_embeddings.{file}"] = rows.flatten(0, 1)  # [views * tokens of a view, width]
            tensors[f"pixel_probes.{file}"] = pixels.flatten()[::997]  # f32, every 997th value of [views, 3, height, width]
            if len(pixels) > 1:  # the views before normalization
                assert levels.dtype == torch.uint8
                tensors[f"levels.{file}"] = levels  # [views, 3, height, width]
            if file == SMALL:
                tensors[f"pixel_values.{file}"] = pixels  # f32 [views, 3, height, width]
        return tensors


@torch.no_grad()
def record(root, folder, reference):
    """Records the cases of the checkpoint in `folder`."""
    write_png(root / "pictures" / SMALL, draw_scene(*SMALL_SCENE))
    write_model_pictures(root)
    processor = AutoProcessor.from_pretrained(folder)
    assert processor.image_processor.backend == "torchvision"
    image_token, stored = reference.model.config.image_token_id, set()
    for name, (messages, settings) in chats().items():
        files = [part["image"] for part in content_parts(messages) if "image" in part]
        images = [Image.open(root / "pictures" / file).convert("RGB") for file in files]
        prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template has written `<bos>`.
        inputs = dict(processor(text=[prompt], images=[images], add_special_tokens=False, return_tensors="pt", **settings))
        views = Views(processor, files, images, settings)
        assert torch.equal(views.pixels, inputs["pixel_values"]), "the processor differs for pictures on their own"
        assert torch.equal(inputs["token_type_ids"] == 1, inputs["input_ids"] == image_token)
        facts = {"messages": messages, "prompt": prompt, "written": written(prompt, views.num_crops.tolist()), "images": files}
        if settings:
            facts["processor"] = settings
        tensors, checks = reference.record(name, inputs, facts["written"], {image_token})
        check_influence(reference, inputs, tensors["greedy_tokens"])
        tokens = inputs["input_ids"].shape[1]
        tensors |= {"position_ids": torch.arange(tokens).expand(3, -1), "rope_delta": torch.zeros(1, dtype=torch.long)}
        tensors |= views.tensors(reference, stored, checks)
        facts["greedy_text"] = processor.tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(folder / "cases", name, tensors, facts | {"checks": rounded_checks(checks)})
