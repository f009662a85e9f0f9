#!/usr/bin/env python3
"""Compares decoded pictures with Pillow's, file by file, and prints a table per format.

    cargo build -p bursar-model --example decode_pictures
    python3 compare.py target/debug/examples/decode_pictures FOLDER...    # needs Pillow and NumPy
    python3 compare.py --list DECODER FOLDER...                           # also each file that differs

The expected picture is what vLLM 0.33 makes (`vllm/multimodal/image.py`): `exif_transpose`, transparency on white, RGB.
For 16-bit gray, whose values Pillow clips at 255, the high byte is expected. Good corpora are the folders `Tests/images`
of Pillow's source and `tests/images` of the crates image and tiff.
"""

import collections
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

ENDINGS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WebP", ".gif": "GIF", ".bmp": "BMP", ".dib": "BMP",
           ".tif": "TIFF", ".tiff": "TIFF", ".apng": "PNG"}  # fmt: skip


def expected(path):
    """`[height, width, 3]` as vLLM sees the file, or `None` if Pillow refuses it."""
    try:
        image = Image.open(path)
        if image.format not in ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF"):
            return None
        image.load()
        try:
            image = ImageOps.exif_transpose(image)
        except Exception:  # vLLM ignores the error too
            pass
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return np.asarray(image.convert("RGB"))
    except Exception:
        return None


def decoded(path):
    with open(path, "rb") as file:
        width, height = map(int, file.readline().split())
        return np.frombuffer(file.read(), np.uint8).reshape(height, width, 3)


def verdict(ours, pillow):
    if ours is None or pillow is None:
        return {(True, True): "both refuse", (True, False): "only Pillow reads"}.get((ours is None, pillow is None), "only we read")
    if ours.shape != pillow.shape:
        return "other size"
    worst = int(np.abs(ours.astype(int) - pillow).max())
    return "equal" if worst == 0 else f"within {next(n for n in (1, 4, 255) if worst <= n)}"


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--list"]
    warnings.simplefilter("ignore")
    files = sorted(path for folder in arguments[1:] for path in Path(folder).rglob("*")
                   if path.suffix.lower() in ENDINGS and path.is_file() and path.stat().st_size < 20 << 20)  # fmt: skip
    table = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(files), 50):
            batch = files[start : start + 50]
            listed = "".join(f"{path.resolve()}\n" for path in batch)
            run = subprocess.run([arguments[0], folder], input=listed, capture_output=True, text=True, check=True)
            errors = dict(line.split(" ", 1) for line in run.stdout.splitlines())
            for number, path in enumerate(batch):
                made = Path(folder) / f"{number}.rgb"
                ours = None if str(number) in errors else decoded(made)
                found = verdict(ours, expected(path))
                counts = table[ENDINGS[path.suffix.lower()]]
                counts.update(["files", found] + (["read"] if ours is not None else []))
                if "--list" in sys.argv and found not in ("equal", "both refuse"):
                    print(f"{found}: {path} {errors.get(str(number), '')}")
                made.unlink(missing_ok=True)
    columns = ["files", "read", "equal", "within 1", "within 4", "within 255", "other size", "only Pillow reads",
               "only we read", "both refuse"]  # fmt: skip
    print("| format | " + " | ".join(columns) + " |")
    for kind, counts in sorted(table.items()):
        print(f"| {kind} | " + " | ".join(str(counts[column]) for column in columns) + " |")


if __name__ == "__main__":
    main()
