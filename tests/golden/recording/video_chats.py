"""Records the chats with videos of the Qwen-VL families."""

import torch
from PIL import Image
from transformers import AutoProcessor

from .files import write_case
from .messages import content_parts, video_chats, without_video_fields
from .picture_chats import MERGE, encode
from .reference import Reference, rounded_checks
from .scenes import video_arrays, write_videos
from .video_positions import drop_outer_tokens, use_released_positions, with_timestamps


class Chat:
    """A chat, its files, and its inputs from the processor, which neither samples nor caps the frames."""

    def __init__(self, root, processor, messages, frames):
        contents = content_parts(messages)
        self.messages, self.processor = messages, processor
        self.files = [part["image"] for part in contents if part["type"] == "image"]
        videos = [part for part in contents if part["type"] == "video"]
        self.names = [part["video"] for part in videos]
        self.rates = [part["frames_per_second"] for part in videos]
        self.arrays = [frames[name] for name in self.names]
        self.prompt = processor.apply_chat_template(without_video_fields(messages), tokenize=False, add_generation_prompt=True)
        images = [Image.open(root / "pictures" / file).convert("RGB") for file in self.files]
        metadata = [{"fps": rate, "total_num_frames": len(array), "frames_indices": list(range(len(array)))}
                    for rate, array in zip(self.rates, self.arrays)]  # fmt: skip
        self.options = dict(video_metadata=metadata, do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt")
        self.inputs = dict(processor(text=[self.prompt], images=images or None, videos=self.arrays, **self.options))

    def facts(self):
        videos = [{"name": name, "frames": len(array), "frames_per_second": rate}
                  for name, array, rate in zip(self.names, self.arrays, self.rates)]  # fmt: skip
        return {"messages": self.messages, "prompt": self.prompt, "images": self.files, "videos": videos}

    def position_tensors(self, model, is_timed):
        """Positions and grids. `is_timed` is true if seconds decide the positions."""
        inputs = self.inputs
        seconds = {"second_per_grid_ts": inputs["second_per_grid_ts"]} if is_timed else {}
        positions, delta = model.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], video_grid_thw=inputs["video_grid_thw"],
            image_grid_thw=inputs.get("image_grid_thw"), **seconds)  # fmt: skip
        print(f"  {'':18} grids {inputs['video_grid_thw'].tolist()}, {seconds}")
        grids = {key: inputs[key] for key in ("video_grid_thw", "image_grid_thw") if key in inputs}
        return {"position_ids": positions[:, 0], "rope_delta": delta[0], **grids, **seconds}

    def video_tensors(self, model, stored):
        """Embeddings and pixels of each video in the first case that shows it. `stored` has the videos of earlier cases."""
        tensors, inputs = {}, self.inputs
        raw = self.processor.video_processor(videos=self.arrays, do_rescale=False, do_normalize=False, **self.options)
        patches = raw["video_grid_thw"].prod(1).tolist()
        embeddings = encode(model, inputs["pixel_values_videos"], inputs["video_grid_thw"])
        split = zip(self.names, raw["pixel_values_videos"].split(patches), inputs["pixel_values_videos"].split(patches),
                    embeddings.split([count // MERGE**2 for count in patches]))  # fmt: skip
        for name, levels, values, rows in split:
            if name in stored:
                continue
            stored.add(name)
            assert levels.dtype == torch.uint8
            if name == "odd":  # the smallest video, in full
                tensors["levels.odd"] = levels  # u8 [patches, values]: pixel_values_videos before normalization
            tensors[f"pixel_probes.{name}"] = values.flatten()[::997]  # f32, every 997th value
            tensors[f"vision_embeddings.{name}"] = rows  # [patches / 4, width]
        return tensors


@torch.no_grad()
def record(root, checkpoint, kind, names=None):
    """Records the cases `names` of a checkpoint, or all of them. `kind` is its model class."""
    write_videos(root)
    frames = video_arrays()
    processor = AutoProcessor.from_pretrained(root / checkpoint)
    reference = Reference(kind, root / checkpoint)
    config = reference.model.config
    # Qwen2.5-VL has times in its positions, Qwen3-VL and Qwen3.5 have them in the prompt, and Qwen2-VL has none.
    is_timed, is_written = config.model_type == "qwen2_5_vl", config.model_type.startswith(("qwen3_vl", "qwen3_5"))
    if is_written:
        drop_outer_tokens(processor)
    else:
        for model in reference.models():
            use_released_positions(model.model, config)
    stored = set()
    for name, messages in video_chats().items():
        if names and name not in names:
            continue
        chat = Chat(root, processor, messages, frames)
        reference.forget_positions()
        counts = list(map(len, chat.arrays))
        written = with_timestamps(chat.prompt, zip(counts, chat.rates)) if is_written else chat.prompt
        tensors, checks = reference.record(name, chat.inputs, written, {config.image_token_id, config.video_token_id})
        tensors |= chat.position_tensors(reference.model, is_timed)
        tensors |= chat.video_tensors(reference.model, stored)
        facts = chat.facts()
        facts["greedy_text"] = processor.tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        facts |= {"written": written} if is_written else {}
        write_case(root / checkpoint / "cases", name, tensors, facts | {"checks": rounded_checks(checks)})
