"""Draws the demo model's pictures: one to four shapes, one number, or both. Training also draws empty
pictures and patterns.

A picture depends only on (stream, seed, index): equal values give the same picture on every machine
with the same Pillow. Training uses the stream "train" and this file's command line uses "evaluate",
so no seed can make training and evaluation share a picture.

    python3 draw.py --seed 7 --count 1000 --out DIR

writes DIR/00000.png (or .jpg, .webp) ... and DIR/questions.jsonl with {"image", "question",
"answer", "kind"} lines.
"""

import argparse
import colorsys
import functools
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

KINDS = ("circle", "square", "triangle", "star")

# Hue in degrees, saturation and value. The ranges include the usual web colors of these names and
# have gaps between them.
COLOURS = {
    "red": ((-7, 5), (0.78, 1.0), (0.72, 1.0)),
    "orange": ((24, 39), (0.85, 1.0), (0.9, 1.0)),
    "yellow": ((50, 61), (0.75, 1.0), (0.88, 1.0)),
    "green": ((105, 145), (0.6, 1.0), (0.5, 0.95)),
    "cyan": ((178, 191), (0.7, 1.0), (0.78, 1.0)),
    "blue": ((214, 242), (0.72, 1.0), (0.65, 1.0)),
    "purple": ((270, 300), (0.6, 1.0), (0.48, 0.75)),
    "pink": ((322, 350), (0.25, 0.6), (0.94, 1.0)),
}

STREAMS = {"train": 1, "evaluate": 2, "bundled": 3, "vocabulary": 4}

SIDE_MIN, SIDE_MAX = 112, 448


@dataclass
class Shape:
    kind: str
    colour: str
    x: float
    y: float
    radius: float  # of the surrounding circle, in pixels
    rotation: float  # radians
    star_depth: float = 0.45  # inner over outer radius, used only by stars
    squeeze: tuple[float, float] = (1.0, 1.0)  # width and height relative to the regular shape; only triangles differ

    @property
    def size(self) -> float:
        """The square root of the area, by which people compare the sizes of different kinds of
        shape."""
        area = {
            "circle": math.pi,
            "square": 2.0,
            "triangle": 1.299 * self.squeeze[0] * self.squeeze[1],
            "star": 2.939 * self.star_depth,
        }[self.kind]
        return self.radius * math.sqrt(area)


@dataclass
class Number:
    text: str
    # Center x, center y, half width, half height of each digit as drawn.
    digits: list[tuple[float, float, float, float]] = field(default_factory=list)


@dataclass
class Scene:
    """The content of a picture, which determines every answer. Shapes are ordered from left to
    right."""

    width: int
    height: int
    background: str  # "light" or "dark"; "patterned" if the picture has nothing else
    shapes: list[Shape]
    number: Number | None


def random_of(stream: str, seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((STREAMS[stream], seed, index))))


def between(rng, low: float, high: float) -> float:
    return low + (high - low) * rng.random()


def pick(rng, options):
    return options[int(rng.random() * len(options))]


# ---- digits ----------------------------------------------------------------------------------------------------------


def arc(x, y, half_width, half_height, start, end):
    """Points of an ellipse's arc in the unit box (y down), angles in degrees clockwise from the
    right."""
    steps = max(4, int(abs(end - start) / 12))
    angles = np.radians(np.linspace(start, end, steps + 1))
    return [(x + half_width * math.cos(a), y + half_height * math.sin(a)) for a in angles]


@functools.lru_cache(maxsize=None)
def strokes_of(digit: str, variant: int):
    """Pen strokes of a digit in a box one high and 0.6 wide. The variants occur
    in handwriting and fonts."""
    odd = variant % 2 == 1
    return {
        "0": [arc(0.3, 0.5, 0.28, 0.48, 0, 360)],
        "1": [[(0.12, 0.22), (0.34, 0.02), (0.34, 0.98)]] + ([[(0.1, 0.98), (0.56, 0.98)]] if odd else []),
        "2": [arc(0.3, 0.28, 0.26, 0.26, 190, 370) + [(0.5, 0.5), (0.05, 0.98), (0.57, 0.98)]],
        "3": [arc(0.28, 0.26, 0.25, 0.24, 200, 450) + arc(0.28, 0.73, 0.28, 0.25, 270, 520)]
        if not odd
        else [[(0.05, 0.02), (0.52, 0.02), (0.26, 0.4)] + arc(0.27, 0.7, 0.28, 0.28, 280, 510)],
        "4": [[(0.44, 0.98), (0.44, 0.02), (0.03, 0.68), (0.59, 0.68)]]
        if not odd
        else [[(0.1, 0.02), (0.06, 0.55), (0.58, 0.55)], [(0.44, 0.3), (0.44, 0.98)]],
        "5": [[(0.53, 0.02), (0.12, 0.02), (0.08, 0.44)] + arc(0.28, 0.67, 0.28, 0.3, 235, 500)],
        "6": [arc(0.5, 0.62, 0.46, 0.6, 255, 180) + arc(0.3, 0.7, 0.26, 0.27, 180, 540)],
        "7": [[(0.04, 0.02), (0.56, 0.02), (0.22, 0.98)]] + ([[(0.16, 0.5), (0.5, 0.5)]] if odd else []),
        "8": [arc(0.3, 0.26, 0.23, 0.24, 90, 450), arc(0.3, 0.74, 0.27, 0.24, -90, 270)],
        "9": [arc(0.3, 0.3, 0.26, 0.27, 0, 360) + (arc(0.1, 0.38, 0.46, 0.6, 0, 75) if not odd else [(0.54, 0.98)])],
    }[digit]


SEGMENTS = {  # the seven segments of a digital clock
    "a": ((0.06, 0.02), (0.54, 0.02)),
    "b": ((0.56, 0.04), (0.56, 0.48)),
    "c": ((0.56, 0.52), (0.56, 0.96)),
    "d": ((0.06, 0.98), (0.54, 0.98)),
    "e": ((0.04, 0.52), (0.04, 0.96)),
    "f": ((0.04, 0.04), (0.04, 0.48)),
    "g": ((0.06, 0.5), (0.54, 0.5)),
}
LIT = dict(zip("0123456789", "abcdef bc abged abgcd fgbc afgcd afgedc abc abcdefg abcfgd".split()))


def mask_of_strokes(rng, text: str, height: int):
    """A number drawn with a pen (or as a clock's segments). Returns the mask and each digit's left
    and right edge."""
    fine = 3
    segments = rng.random() < 0.15
    variant = int(rng.integers(4))
    pen = between(rng, 0.06, 0.2 if not segments else 0.14)
    squeeze = between(rng, 0.8, 1.2)
    slant = between(rng, -0.08, 0.22) if rng.random() < 0.5 else 0.0
    wobble = between(rng, 0.0, 0.035) if not segments else 0.0
    tall = height * fine
    body = tall * (1 - pen)
    pen_pixels = max(2, round(tall * pen))
    advance = tall * (0.62 * squeeze + pen + between(rng, 0.03, 0.2))
    margin = pen_pixels + tall * 0.25
    mask = Image.new("L", (int(advance * len(text) + 2 * margin), tall + 4), 0)
    draw = ImageDraw.Draw(mask)
    edges = []
    for place, digit in enumerate(text):
        left = margin + place * advance
        strokes = [SEGMENTS[s] for s in LIT[digit]] if segments else strokes_of(digit, variant)
        for stroke in strokes:
            points = np.asarray(stroke, dtype=np.float64)
            if wobble:
                points = points + rng.normal(0, wobble, 2) * [1, 0.5]
            x = left + (points[:, 0] * squeeze + (0.5 - points[:, 1]) * slant) * body
            y = pen_pixels / 2 + 2 + points[:, 1].clip(0, 1) * body
            line = list(zip(x.tolist(), y.tolist()))
            draw.line(line, fill=255, width=pen_pixels, joint="curve")
            for cap_x, cap_y in (line[0], line[-1]):
                half = pen_pixels / 2 - 0.5
                draw.ellipse((cap_x - half, cap_y - half, cap_x + half, cap_y + half), fill=255)
        edges.append((left / fine, (left + 0.6 * squeeze * body) / fine))
    return mask.reduce(fine), edges


@functools.lru_cache(maxsize=4096)
def font_of(path: str | None, size: int):
    return ImageFont.load_default(size) if path is None else ImageFont.truetype(path, size)


def mask_of_font(rng, text: str, height: int, path: str | None):
    """A number set in a font whose digits are about `height` pixels high."""
    font = font_of(path, max(8, round(height / 0.72)))
    bold = round(height * between(rng, 0.0, 0.06)) if rng.random() < 0.3 else 0
    spacing = height * between(rng, 0.0, 0.18) + bold
    left = 4.0 + bold
    edges = []
    for digit in text:
        right = left + font.getlength(digit)
        edges.append((left, right))
        left = right + spacing
    mask = Image.new("L", (int(left) + 6 + bold, int(height * 1.9) + 8), 0)
    draw = ImageDraw.Draw(mask)
    for digit, (start, _) in zip(text, edges):
        draw.text((start, 4 + bold), digit, fill=255, font=font, stroke_width=bold)
    return mask, edges


# Digits on a grid five dots wide and seven high, as on signs and in simple drawing programs. A row
# is five bits.
DOTS = {
    "0": (14, 17, 19, 21, 25, 17, 14),
    "1": (4, 12, 4, 4, 4, 4, 14),
    "2": (14, 17, 1, 6, 8, 16, 31),
    "3": (30, 1, 1, 14, 1, 1, 30),
    "4": (2, 6, 10, 18, 31, 2, 2),
    "5": (31, 16, 30, 1, 1, 17, 14),
    "6": (6, 8, 16, 30, 17, 17, 14),
    "7": (31, 1, 2, 4, 8, 8, 8),
    "8": (14, 17, 17, 14, 17, 17, 14),
    "9": (14, 17, 17, 15, 1, 2, 12),
}


def mask_of_dots(rng, text: str, height: int):
    """A number in five by seven dots: square dots that touch, or smaller dots with gaps."""
    dot = max(2, height // 7)
    gap = 1 if dot > 4 and rng.random() < 0.4 else 0
    advance = 6 * dot if rng.random() < 0.5 else 7 * dot
    mask = Image.new("L", (advance * len(text) + 8, 7 * dot + 8), 0)
    draw = ImageDraw.Draw(mask)
    for place, digit in enumerate(text):
        for row, bits in enumerate(DOTS[digit]):
            for column in range(5):
                if bits >> (4 - column) & 1:
                    x, y = 4 + place * advance + column * dot, 4 + row * dot
                    draw.rectangle((x, y, x + dot - 1 - gap, y + dot - 1 - gap), fill=255)
    edges = [(4 + place * advance, 4 + place * advance + 5 * dot) for place in range(len(text))]
    return mask, edges


def mask_of_blocks(rng, text: str, height: int, path: str | None):
    """A number set very small and enlarged without smoothing, which looks like a bitmap font."""
    small = int(rng.integers(9, 15))
    block = max(1, round(height / small))
    mask, edges = mask_of_font(rng, text, small, path)
    if rng.random() < 0.6:
        mask = mask.point(lambda value: 255 if value > 110 else 0)
    mask = mask.resize((mask.width * block, mask.height * block), Image.Resampling.NEAREST)
    return mask, [(left * block, right * block) for left, right in edges]


def mask_of_number(rng, text: str, height: int, fonts: tuple[str, ...]):
    """The number's mask, cut to its ink, and each digit's box in it."""
    choice = rng.random()
    path = pick(rng, fonts) if fonts and rng.random() < 0.75 else None
    if choice < 0.33:
        mask, edges = mask_of_strokes(rng, text, height)
    elif choice < 0.39:
        mask, edges = mask_of_dots(rng, text, height)
    elif choice < 0.43:
        mask, edges = mask_of_blocks(rng, text, height, path)
    else:
        mask, edges = mask_of_font(rng, text, height, path)
    angle = between(rng, -12, 12) if rng.random() < 0.4 else 0.0
    left, top, right, bottom = mask.getbbox()
    middle = ((mask.width - 1) / 2, (mask.height - 1) / 2)
    boxes = [((a + b) / 2, (top + bottom) / 2, (b - a) / 2, (bottom - top) / 2) for a, b in edges]
    if angle:
        before = middle
        mask = mask.rotate(angle, resample=Image.Resampling.BICUBIC, expand=True)
        middle = ((mask.width - 1) / 2, (mask.height - 1) / 2)
        cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        boxes = [
            (
                middle[0] + (x - before[0]) * cosine + (y - before[1]) * sine,
                middle[1] - (x - before[0]) * sine + (y - before[1]) * cosine,
                half_width,
                half_height,
            )
            for x, y, half_width, half_height in boxes
        ]
        left, top, right, bottom = mask.getbbox()
    mask = mask.crop((left, top, right, bottom))
    return mask, [(x - left, y - top, half_width, half_height) for x, y, half_width, half_height in boxes]


# ---- laying a scene out ----------------------------------------------------------------------------------------------


def place_number(rng, width: int, height: int, alone: bool, fonts):
    """A number with its mask and the position of its top left corner, inside the picture."""
    text = str(int(rng.integers(1, 10)))
    for _ in range(int(rng.integers(0, 4))):
        text += str(int(rng.integers(0, 10)))
    if len(text) == 1 and rng.random() < 0.1:
        text = "0"
    scale = math.sqrt(width * height)
    tall = scale * between(rng, 0.115, 0.5 if alone else 0.3)
    tall = min(tall, 0.8 * height, 0.88 * width / (0.72 * len(text)))
    mask, boxes = mask_of_number(rng, text, max(14, round(tall)), fonts)
    max_x, max_y = width * 0.96, height * 0.96
    if mask.width > max_x or mask.height > max_y:
        shrink = min(max_x / mask.width, max_y / mask.height)
        mask = mask.resize((max(1, int(mask.width * shrink)), max(1, int(mask.height * shrink))))
        boxes = [tuple(value * shrink for value in box) for box in boxes]
    left = int(between(rng, 0.01 * width, width * 0.99 - mask.width))
    top = int(between(rng, 0.01 * height, height * 0.99 - mask.height))
    digits = [(x + left, y + top, a, b) for x, y, a, b in boxes]
    return Number(text, digits), mask, (left, top)


def is_clear(shape: Shape, others, taken, width, height) -> bool:
    """Whether a shape keeps its distance from the other shapes and from the number, and is clearly
    left or right of every other shape."""
    scale = math.sqrt(width * height)
    apart = max(0.07 * width, 0.055 * scale)
    for other in others:
        if abs(other.x - shape.x) < apart:
            return False
        if math.hypot(other.x - shape.x, other.y - shape.y) < other.radius + shape.radius + 0.02 * scale:
            return False
    if taken is not None:
        left, top, right, bottom = taken
        near_x = min(max(shape.x, left), right)
        near_y = min(max(shape.y, top), bottom)
        if math.hypot(near_x - shape.x, near_y - shape.y) < shape.radius + 0.02 * scale:
            return False
    return True


def place_shapes(rng, width, height, count, taken) -> list[Shape]:
    """Up to `count` shapes (fewer if there is no space), from left to right. If nothing is `taken`,
    there is at least one shape, because the first one always fits."""
    scale = math.sqrt(width * height)
    largest = {0: 0.36, 1: 0.36, 2: 0.26, 3: 0.22, 4: 0.19}[count]
    few_colours = [pick(rng, list(COLOURS)) for _ in range(2)] if rng.random() < 0.3 else None
    shapes: list[Shape] = []
    for _ in range(count):
        kind = pick(rng, KINDS)
        colour = pick(rng, few_colours or list(COLOURS))
        depth = between(rng, 0.38, 0.52)
        squeeze = (1.0, 1.0)
        if kind == "triangle" and rng.random() < 0.5:
            squeeze = pick(rng, ((between(rng, 0.6, 1.0), 1.0), (1.0, between(rng, 0.65, 1.0))))
        for attempt in range(25):
            radius = scale * between(rng, 0.065, largest * (1 - 0.02 * attempt))
            radius = max(8.0, min(radius, 0.46 * min(width, height)))
            rotation = between(rng, 0, 2 * math.pi) if rng.random() < 0.5 else 0.0
            shape = Shape(
                kind,
                colour,
                between(rng, radius + 2, max(radius + 2, width - radius - 2)),
                between(rng, radius + 2, max(radius + 2, height - radius - 2)),
                radius,
                rotation,
                depth,
                squeeze,
            )
            if is_clear(shape, shapes, taken, width, height):
                shapes.append(shape)
                break
    return sorted(shapes, key=lambda shape: shape.x)


def side_lengths(rng, wide: bool) -> tuple[int, int]:
    """Width and height. `wide` also allows sides above `SIDE_MAX`, and pictures that the processor
    has to shrink."""
    if wide and rng.random() < 0.08:
        area = between(rng, 300, 560) ** 2
        aspect = math.exp(between(rng, -1.3, 1.3))
        return max(112, int(math.sqrt(area * aspect))), max(112, int(math.sqrt(area / aspect)))
    if rng.random() < 0.15:
        side = int(rng.integers(SIDE_MIN, SIDE_MAX + 1))
        return side, side
    return int(rng.integers(SIDE_MIN, SIDE_MAX + 1)), int(rng.integers(SIDE_MIN, SIDE_MAX + 1))


# ---- painting --------------------------------------------------------------------------------------------------------


def ink_of(rng, colour: str) -> tuple[int, int, int]:
    hue, saturation, value = (between(rng, *limits) for limits in COLOURS[colour])
    return tuple(round(255 * channel) for channel in colorsys.hsv_to_rgb((hue / 360) % 1.0, saturation, value))


def outline(shape: Shape, radius: float) -> list[tuple[float, float]]:
    if shape.kind == "star":
        corners = 10
        radii = [radius if i % 2 == 0 else radius * shape.star_depth for i in range(10)]
        start = -math.pi / 2
    else:
        corners = 4 if shape.kind == "square" else 3
        radii = [radius] * corners
        start = -math.pi / 4 if shape.kind == "square" else -math.pi / 2
    angles = [start + 2 * math.pi * i / corners for i in range(corners)]
    # Squeezed along the shape's own axes, then rotated.
    cosine, sine = math.cos(shape.rotation), math.sin(shape.rotation)
    own = [(r * math.cos(a) * shape.squeeze[0], r * math.sin(a) * shape.squeeze[1]) for r, a in zip(radii, angles)]
    return [(x * cosine - y * sine, x * sine + y * cosine) for x, y in own]


def paint_shape(image: Image.Image, shape: Shape, radius: float, ink) -> None:
    """Paints with soft edges: the shape is drawn larger on a separate mask, which is then
    reduced."""
    fine = 4 if radius < 60 else 2
    reach = math.ceil(radius) + 2
    left, top = math.floor(shape.x) - reach, math.floor(shape.y) - reach
    side = 2 * reach + 1
    mask = Image.new("L", (side * fine, side * fine), 0)
    draw = ImageDraw.Draw(mask)
    shift_x, shift_y = (shape.x - left) * fine, (shape.y - top) * fine
    if shape.kind == "circle":
        reach_fine = radius * fine
        draw.ellipse(
            (shift_x - reach_fine, shift_y - reach_fine, shift_x + reach_fine, shift_y + reach_fine), fill=255
        )
    else:
        points = outline(shape, radius * fine)
        draw.polygon([(x + shift_x, y + shift_y) for x, y in points], fill=255)
    image.paste(ink, (left, top), mask.reduce(fine))


def paint_background(rng, scene: Scene) -> Image.Image:
    light = scene.background == "light"
    base = between(rng, 205, 255) if light else between(rng, 0, 55)
    chance = rng.random()
    if chance < 0.25:
        base = 255.0 if light else 0.0
    elif chance < 0.4:
        base = between(rng, 165, 210) if light else between(rng, 50, 95)
    tint = rng.normal(0, 5 if rng.random() < 0.75 else 14, 3) if rng.random() < 0.6 else np.zeros(3)
    shade = np.clip(base + tint, 155 if light else 0, 255 if light else 105)
    if rng.random() < 0.6:
        return Image.new("RGB", (scene.width, scene.height), tuple(int(c) for c in shade))
    corners = shade + rng.normal(0, 7, (2, 2, 1))
    corners = np.clip(corners, 150 if light else 0, 255 if light else 110).astype(np.uint8)
    return Image.fromarray(corners).resize((scene.width, scene.height), Image.Resampling.BILINEAR)


def paint_pattern(rng, width: int, height: int) -> Image.Image:
    """Clouds, sometimes with noise or scribbles, without a shape or number. They represent all other
    pictures."""
    coarse = int(rng.integers(2, 24))
    spread = between(rng, 20, 80)
    clouds = np.clip(between(rng, 60, 195) + rng.normal(0, spread, (coarse, coarse, 3)), 0, 255).astype(np.uint8)
    image = Image.fromarray(clouds).resize((width, height), Image.Resampling.BICUBIC)
    if rng.random() < 0.4:
        noise = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image = Image.blend(image, noise, between(rng, 0.2, 1.0))
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(0, 30)) if rng.random() < 0.6 else 0):
        points = [(between(rng, -20, width), between(rng, -20, height)) for _ in range(int(rng.integers(2, 5)))]
        draw.line(points, fill=tuple(rng.integers(0, 256, 3).tolist()), width=int(rng.integers(1, 6)))
    return image


def number_ink(rng, background: str):
    """In most cases black, white or a gray near them. The ink always contrasts with its background."""
    if rng.random() < 0.25:
        return ink_of(rng, pick(rng, ("red", "green", "blue", "purple") if background == "light" else
                                ("red", "orange", "yellow", "cyan", "pink")))
    shade = between(rng, 0, 70) if background == "light" else between(rng, 180, 255)
    shade = shade if rng.random() < 0.6 else (0 if background == "light" else 255)
    return (int(shade),) * 3


@functools.lru_cache(maxsize=1)
def grain() -> np.ndarray:
    """Noise to cut pieces from, because drawing new noise for every picture would take longer than
    the picture."""
    return np.random.Generator(np.random.PCG64(1)).normal(0, 1, (1024, 1024, 3)).astype(np.float32)


def degrade(rng, image: Image.Image) -> Image.Image:
    """Degrades a picture as cameras and other programs do: blur, noise, JPEG."""
    if rng.random() < 0.08:
        image = image.filter(ImageFilter.BoxBlur(between(rng, 0.2, 0.9)))
    if rng.random() < 0.35:
        sigma = between(rng, 1, 7)
        pixels = np.asarray(image).astype(np.float32)
        y, x = int(rng.integers(0, 300)), int(rng.integers(0, 300))
        pixels += sigma * np.resize(grain()[y : y + pixels.shape[0], x : x + pixels.shape[1]], pixels.shape)
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if rng.random() < 0.2:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=int(rng.integers(45, 96)))
        image = Image.open(buffer).convert("RGB")
    return image


def draw_nothing(rng, width: int, height: int):
    """An empty picture or a pattern. Training uses some of these, so that the model does not expect
    a shape in every picture."""
    scene = Scene(width, height, pick(rng, ("light", "dark", "patterned", "patterned")), [], None)
    patterned = scene.background == "patterned"
    return scene, paint_pattern(rng, width, height) if patterned else degrade(rng, paint_background(rng, scene))


def draw_scene(rng, fonts: tuple[str, ...] = (), wide: bool = False, tidy: bool = False):
    """A scene and its picture.

    `fonts` adds font files to Pillow's built-in font. `wide` (training) adds sizes and contents
    that evaluation does not use. `tidy` leaves out blur, noise and JPEG compression.
    """
    width, height = side_lengths(rng, wide)
    if wide and rng.random() < 0.04:
        return draw_nothing(rng, width, height)
    choice = rng.random()
    wants_number = choice < 0.62
    shape_count = 0 if choice < 0.24 else int(rng.integers(1, 5))
    number, taken, mask, corner = None, None, None, None
    if wants_number:
        number, mask, corner = place_number(rng, width, height, shape_count == 0, fonts)
        taken = (corner[0], corner[1], corner[0] + mask.width, corner[1] + mask.height)
    shapes = place_shapes(rng, width, height, shape_count, taken)
    scene = Scene(width, height, pick(rng, ("light", "dark")), shapes, number)
    image = paint_background(rng, scene)
    for shape in shapes:
        ink = ink_of(rng, shape.colour)
        if rng.random() < 0.12:  # with an outline, darker or lighter than the shape
            edge = pick(rng, (tuple(int(c * 0.5) for c in ink), (15, 15, 15), (245, 245, 245)))
            paint_shape(image, shape, shape.radius, edge)
            paint_shape(image, shape, shape.radius * 0.88, ink)
        else:
            paint_shape(image, shape, shape.radius, ink)
    if number is not None:
        image.paste(number_ink(rng, scene.background), corner, mask)
    return scene, image if tidy else degrade(rng, image)


# ---- the command line ------------------------------------------------------------------------------------------------


def write_pictures(stream: str, seed: int, count: int, folder: Path) -> None:
    import questions

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "questions.jsonl", "w") as lines:
        for index in range(count):
            rng = random_of(stream, seed, index)
            scene, image = draw_scene(rng)
            kind, question, answer = questions.one_question(rng, scene)
            ending, options = pick(
                rng,
                [("png", {}), ("jpg", {"quality": 90}), ("webp", {"quality": 90}), ("webp", {"lossless": True})],
            )
            name = f"{index:05}.{ending}"
            image.save(folder / name, **options)
            line = {"image": name, "question": question, "answer": answer, "kind": kind}
            lines.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_pictures("evaluate", arguments.seed, arguments.count, arguments.out)


if __name__ == "__main__":
    main()
