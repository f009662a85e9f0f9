"""Records the chats of the InternVL checkpoints, with pictures in tiles and videos in frames."""

import re

import torch
from PIL import Image
from transformers import AutoProcessor, InternVLForConditionalGeneration
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from .chat_templates import internvl_chat_template
from .files import write_case, write_png
from .messages import content_parts, parts, picture, picture_chats, video_chats, without_video_fields
from .reference import ERROR_MAX, Reference, relative, rounded_checks
from .scenes import draw_scene, video_arrays, write_model_pictures

SMALL, SMALL_SCENE = "small_58x54.png", (58, 54, 6)  # a picture of one tile


def chats():
    """Chats with pictures of one tile, and with wide, tall and square grids of tiles."""
    scene, wide = picture("scene_101x157.png"), picture("wide_333x97.png")
    small, videos = picture(SMALL), video_chats()
    return picture_chats() | {
        "several_images": [parts("user", "First ", wide, " then ", small, " and last ", scene, " Which is larger?")],
        "same_image_twice": [parts("user", small, small, "Are the two the same?")],
    } | {name: videos[name] for name in ("video_even", "video_odd_slow", "video_and_picture", "two_videos")}  # fmt: skip


def tile_grid(processor, image):
    """Columns and rows of a picture's tiles, and 1 if a thumbnail follows them."""
    settings = processor.image_processor
    columns, rows = get_optimal_tiled_canvas(
        (image.height, image.width), (settings.size.height, settings.size.width), settings.min_patches, settings.max_patches)
    return columns, rows, int(columns * rows > 1)


def with_visuals(prompt, runs):
    """The prompt with the tokens around each picture, and with each video replaced by its numbered frames.

    `runs` has the number of tiles of each picture as `[tiles]`, and `[1, 1, …]` for the frames of each video, in order."""
    pieces = re.split("(<IMG_CONTEXT>|<video>)", prompt)
    visual = "<img><IMG_CONTEXT></img>"
    for place, run in zip(range(1, len(pieces), 2), runs, strict=True):
        frames = (f"Frame{index + 1}: {visual}" for index in range(len(run)))
        pieces[place] = visual if pieces[place] == "<IMG_CONTEXT>" else "\n".join(frames)
    return "".join(pieces)


def with_string_contents(messages):
    """The messages with contents as strings, as the template of the authors' layout requires."""
    as_text = {"image": lambda _: "<IMG_CONTEXT>\n", "video": lambda _: "<video>\n", "text": lambda part: part["text"]}
    return [m if isinstance(m["content"], str) else m | {
        "content": "".join(as_text[p["type"]](p) for p in m["content"])} for m in messages]  # fmt: skip


def encode(model, tiles):
    """Rows of the vision encoder and projector: [tiles * tokens of a tile, width]."""
    return model.model.get_image_features(tiles).pooler_output.flatten(0, 1)


class Chat:
    """A chat, its files and the pixels of its pictures and videos."""

    def __init__(self, root, processor, messages, frames):
        self.processor, self.messages, self.frames = processor, messages, frames
        self.shown = [part for part in content_parts(messages) if part["type"] != "text"]
        self.keys = [part[part["type"]] for part in self.shown]  # file names of pictures, names of videos
        self.stills = [part["image"] for part in self.shown if part["type"] == "image"]
        self.videos = [part for part in self.shown if part["type"] == "video"]
        self.images = {file: Image.open(root / "pictures" / file).convert("RGB") for file in self.stills}
        self.visuals = [self.tiles(self.images[key]) if key in self.images else self.frame_pixels(key) for key in self.keys]
        self.prompt = processor.apply_chat_template(without_video_fields(messages), tokenize=False, add_generation_prompt=True)
        self.check_templates()
        runs = [[len(tiles)] if key in self.images else [1] * len(tiles) for key, tiles in zip(self.keys, self.visuals)]
        self.tile_counts = [count for run in runs for count in run]  # of each <IMG_CONTEXT> in `written`
        self.written = with_visuals(self.prompt, runs)

    def tiles(self, image):
        """f32 [tiles, 3, height, width]"""
        return self.processor.image_processor(images=[image], crop_to_patches=True, return_tensors="pt")["pixel_values"]

    def frame_pixels(self, name, **options):
        """f32 [frames, 3, height, width]"""
        return self.processor.video_processor(
            videos=[self.frames[name]], return_tensors="pt", **options)["pixel_values_videos"][0]  # fmt: skip

    def check_templates(self):
        authors = self.processor.tokenizer.apply_chat_template(
            with_string_contents(self.messages), chat_template=internvl_chat_template(), tokenize=False, add_generation_prompt=True)
        assert authors == self.prompt, "both templates render the same text"

    def inputs(self, tokenizer, config):
        """The model's inputs, checked against the processor where it accepts the prompt.

        transformers 5.17 stacks videos, so it refuses videos of different lengths in one prompt."""
        pad, counts, ids = config.image_token_id, iter(self.tile_counts), []
        for token in tokenizer.encode(self.written, add_special_tokens=False).ids:
            ids += [token] * (next(counts) * config.image_seq_length if token == pad else 1)
        inputs = {"input_ids": torch.tensor([ids])} | ({"pixel_values": torch.cat(self.visuals)} if self.visuals else {})
        videos = [self.frames[part["video"]] for part in self.videos]
        if len({len(frames) for frames in videos}) < 2:
            whole = self.processor(text=[self.prompt], images=[self.images[file] for file in self.stills] or None,
                                   videos=videos or None, return_tensors="pt")  # fmt: skip
            assert all(torch.equal(inputs[key], whole[key]) for key in inputs), "the processor differs"
        return inputs

    def tile_tensors(self):
        if not self.stills:
            return {}
        grids = torch.tensor([tile_grid(self.processor, self.images[file]) for file in self.stills])  # [pictures, 3]
        counts = torch.tensor([len(tiles) for key, tiles in zip(self.keys, self.visuals) if key in self.images])
        assert torch.equal(counts, grids[:, 0] * grids[:, 1] + grids[:, 2])
        print(f"  {'':18} tiles {grids.tolist()}")
        return {"tiles": grids, "num_tiles": counts}

    def visual_tensors(self, reference, stored, checks):
        """Embeddings of pictures and videos in the first case that shows them. `stored` has the names of earlier cases."""
        tensors = {}
        for key, tiles in zip(self.keys, self.visuals):
            rows = encode(reference.model, tiles)
            difference = relative(rows, encode(reference.exact, tiles.double()))
            checks["vision_f32_vs_f64"] = max(difference, checks.get("vision_f32_vs_f64", 0.0))
            assert difference < ERROR_MAX, checks
            if key in stored:
                continue
            stored.add(key)
            tensors[f"vision_embeddings.{key}"] = rows  # [tiles * tokens of a tile, width]
            if key in self.frames:
                tensors[f"pixel_probes.{key}"] = tiles.flatten()[::997]  # f32, every 997th value of [frames, 3, height, width]
            if key == "odd":  # the smallest video in full, before normalization
                tensors["levels.odd"] = self.frame_pixels(key, do_rescale=False, do_normalize=False)
                assert tensors["levels.odd"].dtype == torch.uint8
            if key == SMALL:
                tensors[f"pixel_values.{key}"] = tiles  # f32 [tiles, 3, height, width]
        return tensors

    def facts(self):
        facts = {"messages": self.messages, "prompt": self.prompt, "written": self.written, "images": self.stills}
        if self.videos:
            facts["videos"] = [{"name": part["video"], "frames": len(self.frames[part["video"]]),
                                "frames_per_second": part["frames_per_second"]} for part in self.videos]  # fmt: skip
        return facts


@torch.no_grad()
def record(root, checkpoint, hf_folder, names=None):
    """Records the cases `names` of a checkpoint, or all of them. `hf_folder` has it in the layout of transformers."""
    write_png(root / "pictures" / SMALL, draw_scene(*SMALL_SCENE))
    write_model_pictures(root)
    frames = video_arrays()
    processor = AutoProcessor.from_pretrained(hf_folder)
    assert processor.image_processor.backend == "torchvision"
    reference = Reference(InternVLForConditionalGeneration, hf_folder)
    reference.tokenizer = reference.tokenizer.from_file(str(root / checkpoint / "tokenizer.json"))
    config, stored = reference.model.config, set()
    for name, messages in chats().items():
        if names and name not in names:
            continue
        chat = Chat(root, processor, messages, frames)
        inputs = chat.inputs(reference.tokenizer, config)
        tensors, checks = reference.record(name, inputs, chat.written, {config.image_token_id})
        tokens = inputs["input_ids"].shape[1]
        tensors |= {"position_ids": torch.arange(tokens).expand(3, -1), "rope_delta": torch.zeros(1, dtype=torch.long)}
        tensors |= chat.tile_tensors()
        tensors |= chat.visual_tensors(reference, stored, checks)
        facts = chat.facts()
        facts["greedy_text"] = processor.tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(root / checkpoint / "cases", name, tensors, facts | {"checks": rounded_checks(checks)})
