"""Paints the bundled pictures of the demo, whose content is listed by hand in this file, and writes
their questions next to them.

    python3 bundle.py
"""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageFont, ImageDraw

import questions
from draw import Number, Scene, Shape, paint_shape

# (scene, background, inks of the shapes, position, size and ink of the number)
PICTURES = {
    "shapes.png": (
        Scene(
            336,
            252,
            "light",
            [
                Shape("circle", "red", 78, 92, 46, 0.0),
                Shape("star", "blue", 176, 176, 52, 0.2),
                Shape("triangle", "orange", 264, 88, 50, 0.0),
            ],
            None,
        ),
        ((250, 248, 242), (232, 236, 244)),
        [(214, 40, 40), (37, 89, 217), (255, 153, 20)],
        None,
    ),
    "number.png": (
        Scene(
            308,
            280,
            "dark",
            [Shape("square", "cyan", 84, 196, 46, 0.35), Shape("star", "yellow", 224, 194, 54, 0.0)],
            Number("427"),
        ),
        ((16, 18, 26), (34, 36, 48)),
        [(20, 200, 224), (250, 214, 30)],
        ((58, 26), 104, (236, 236, 240)),
    ),
    "year.png": (
        Scene(280, 168, "light", [], Number("2026")),
        ((255, 255, 255), (238, 240, 236)),
        [],
        ((36, 36), 92, (28, 30, 36)),
    ),
}

ASKED = (
    ("shapes.png", "Describe the picture.", lambda scene: questions.description(scene)),
    ("shapes.png", "How many shapes are there?", lambda scene: str(len(scene.shapes))),
    ("shapes.png", "What colour is the star?", lambda scene: scene.shapes[1].colour),
    ("number.png", "What number is written?", lambda scene: scene.number.text),
    ("number.png", "Describe the picture.", lambda scene: questions.description(scene)),
    ("number.png", "Which shape is leftmost?", lambda scene: f"the {questions.named(scene.shapes[0])}"),
    ("year.png", "What number is written?", lambda scene: scene.number.text),
)


def paint(scene: Scene, shades, inks, number) -> Image.Image:
    top, bottom = (np.array(shade, dtype=np.float64) for shade in shades)
    share = np.linspace(0, 1, scene.height)[:, None, None]
    pixels = np.broadcast_to(top + (bottom - top) * share, (scene.height, scene.width, 3))
    image = Image.fromarray(pixels.round().astype(np.uint8))
    for shape, ink in zip(scene.shapes, inks):
        paint_shape(image, shape, shape.radius, ink)
    if number is not None:
        corner, size, ink = number
        ImageDraw.Draw(image).text(corner, scene.number.text, fill=ink, font=ImageFont.load_default(size))
    return image


def main() -> None:
    folder = Path(__file__).parent / "pictures"
    folder.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        paint(*picture).save(folder / name, optimize=True)
    with open(folder / "questions.jsonl", "w") as lines:
        for name, question, answer in ASKED:
            line = {"image": name, "question": question, "answer": answer(PICTURES[name][0])}
            lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
