"""Drawn pictures and videos."""

import numpy as np
from PIL import Image, ImageDraw

from .files import write_png

MODEL_PICTURES = {  # file: (width, height, seed). The comments give Qwen2.5-VL's grids and windows
    "scene_101x157.png": (101, 157, 1),  # grid 12 x 8: windows of 4x4, 2x4
    "wide_333x97.png": (333, 97, 2),  # grid 6 x 24: every window is 3x4
    "square_225x225.png": (225, 225, 3),  # above max_pixels, grid 12 x 12: windows 4x4, 4x2, 2x4, 2x2
    "tiny_41x30.png": (41, 30, 4),  # below min_pixels, grid 6 x 6: one window of 3x3
    "large_640x427.png": (640, 427, 5),  # above max_pixels, grid 10 x 14: windows 4x4, 4x3, 1x4, 1x3
}
VIDEOS = {  # name: (frames, width, height, seed)
    "even": (4, 84, 56, 21),
    "odd": (3, 70, 61, 22),  # its last frame fills up the second temporal patch
    "long": (7, 52, 75, 23),
}


def draw_scene(width, height, seed):
    """A picture with smooth gradients, hard edges and thin lines, which shows mistakes of resizing and of patch order."""
    random = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    slopes = random.uniform(-1, 1, (3, 2))
    base = np.stack([127 + 110 * (a * (x - 0.5) + b * (y - 0.5)) for a, b in slopes], -1)
    scene = Image.fromarray(np.clip(base, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(scene)
    for _ in range(7):
        left, top = random.integers(0, width), random.integers(0, height)
        right, bottom = left + random.integers(2, max(3, width // 2)), top + random.integers(2, max(3, height // 2))
        color = tuple(int(c) for c in random.integers(0, 256, 3))
        [draw.ellipse, draw.rectangle, draw.line][random.integers(0, 3)]((left, top, right, bottom), fill=color)
    return scene


def draw_video(frames, width, height, seed):
    """Yields the frames of a scene that a square crosses. No two frames are equal."""
    scene = draw_scene(width, height, seed)
    for index in range(frames):
        frame = scene.copy()
        left, top = index * (width - 20) // max(1, frames - 1), 6 + 5 * index
        ImageDraw.Draw(frame).rectangle((left, top, left + 18, top + 18), fill=(250, 240 - 30 * index, 20 * index))
        yield frame


def video_arrays():
    """u8 [frames, height, width, 3] by the name of the video."""
    return {name: np.stack([np.asarray(frame) for frame in draw_video(*sizes)]) for name, sizes in VIDEOS.items()}


def write_model_pictures(root):
    for file, sizes in MODEL_PICTURES.items():
        write_png(root / "pictures" / file, draw_scene(*sizes))


def write_videos(root):
    """Writes each frame as `videos/<video>_<index>.png`."""
    for name, sizes in VIDEOS.items():
        for index, frame in enumerate(draw_video(*sizes)):
            write_png(root / f"videos/{name}_{index}.png", frame)
