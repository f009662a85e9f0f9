"""Video positions and prompts as the Qwen-VL models were released, which transformers 5.17 changes."""

import torch

from .picture_chats import MERGE


def use_released_positions(model, config):
    """Replaces the model's `get_rope_index` with the positions of its release.

    The released positions are from transformers' pull request 35569, by the model's authors, and vLLM uses them too.
    Temporal patch `step` is at `floor(step * tokens_per_second * seconds)`, or at `step` in Qwen2-VL, which has no
    `tokens_per_second`. Text after a video starts after the largest position on any axis.

    transformers 5.17 differs in two ways. It truncates the seconds of a temporal patch to an integer first (fixed by its
    pull request 48669), and it starts the text after the largest row and column only, so the text shares positions
    with later temporal patches."""
    shipped = model.get_rope_index

    def get_rope_index(input_ids, mm_token_type_ids, image_grid_thw=None, video_grid_thw=None, second_per_grid_ts=None,
                       **more):  # fmt: skip
        rate = getattr(config.vision_config, "tokens_per_second", None)
        seconds = {} if rate is None else {"second_per_grid_ts": second_per_grid_ts}
        shipped_positions, delta = shipped(input_ids, mm_token_type_ids=mm_token_type_ids, image_grid_thw=image_grid_thw,
                                           video_grid_thw=video_grid_thw, **seconds, **more)  # fmt: skip
        if video_grid_thw is None:
            return shipped_positions, delta
        kinds = mm_token_type_ids[0].tolist()
        images = [] if image_grid_thw is None else image_grid_thw.tolist()
        durations = [1.0] * len(video_grid_thw) if rate is None else second_per_grid_ts.tolist()
        videos = list(zip(video_grid_thw.tolist(), durations, strict=True))
        positions = released_positions(kinds, images, videos, rate or 1, shipped_positions[:, 0])[:, None]
        return positions, (positions.max() + 1 - len(kinds)).reshape(1, 1)

    model.get_rope_index = get_rope_index


def released_positions(kinds, images, videos, rate, shipped):
    """Positions [3, tokens]. `kinds` is 0 for text, 1 for a picture's token and 2 for a video's.

    Asserts that `shipped`, the positions of transformers 5.17, are the same up to the end of the first video if its
    temporal patches last whole seconds."""
    images, videos = iter(images), iter(videos)
    pieces, place, start, videos_seen, seconds = [], 0, 0, 0, 0.0
    while place < len(kinds):
        kind = kinds[place]
        if kind == 0:
            piece = torch.full((3, 1), start)
        else:
            (t, h, w), seconds = (next(images), 0.0) if kind == 1 else next(videos)
            times = (torch.arange(t) * (rate * seconds)).long()
            axes = torch.meshgrid(times, torch.arange(h // MERGE), torch.arange(w // MERGE), indexing="ij")
            piece = start + torch.stack(axes).reshape(3, -1)
            videos_seen += kind == 2
        pieces.append(piece)
        place += piece.shape[1]
        start = int(piece.max()) + 1
        if videos_seen == 0 or (videos_seen == 1 and kind == 2 and float(seconds).is_integer()):
            assert torch.equal(torch.cat(pieces, 1), shipped[:, :place]), "positions differ before the first fraction of a second"
    return torch.cat(pieces, 1)


def with_timestamps(prompt, videos):
    """Replaces each video's placeholder, with the two tokens around it, by one timed placeholder per temporal patch.

    Qwen3-VL was released with this prompt (transformers 4.57, `processing_qwen3_vl.py`, by the model's authors). vLLM
    writes the same prompt. transformers 5.17 keeps the two tokens around the whole video, in addition to the tokens
    around each temporal patch.

    `videos` are pairs of frame count and rate."""
    for count, frames_per_second in videos:
        times = [i / frames_per_second for i in range(count)]
        pairs = [times[i : i + 2] for i in range(0, count, 2)]
        steps = [f"<{(pair[0] + pair[-1]) / 2:.1f} seconds><|vision_start|><|video|><|vision_end|>" for pair in pairs]
        prompt = prompt.replace("<|vision_start|><|video_pad|><|vision_end|>", "".join(steps), 1)
    return prompt.replace("<|video|>", "<|video_pad|>")


def drop_outer_tokens(processor):
    """Makes the processor write the prompt that `with_timestamps` writes."""
    shipped = processor.get_text_with_replacements
    bare = lambda text: text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")  # noqa: E731
    processor.get_text_with_replacements = lambda text, *more, **named: shipped(list(map(bare, text)), *more, **named)
