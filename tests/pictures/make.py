#!/usr/bin/env python3
"""Writes the small TIFFs of `model/tests/picture_kinds.tar.xz` with Pillow 13 (libtiff 4.7), and their pictures as PNG.

    python3 tests/pictures/make.py    # from the root of the checkout; needs Pillow and NumPy
"""

import io
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from compare import expected
from PIL import Image

ARCHIVE = Path(__file__).parents[2] / "model/tests/picture_kinds.tar.xz"
WIDTH, HEIGHT = 45, 31


def pictures():
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    rgb = np.stack([x // 9 * 50, y // 7 * 60, (x + y) // 19 * 60], -1).astype(np.uint8)
    bilevel = ((x - 20) ** 2 + (y - 14) ** 2 < 90) ^ (x % 11 < 2)
    return {"rgb": Image.fromarray(rgb), "bilevel": Image.fromarray(bilevel)}


def save(folder, name, picture, compression, tags):
    path = folder / f"{name}.tif"
    picture.save(path, "TIFF", compression=compression, tiffinfo=tags)
    shown = folder / f"{name.split('-')[0]}.png"
    found = Image.fromarray(expected(path))
    if not shown.exists():
        found.save(shown, optimize=True)
    assert found == Image.open(shown).convert("RGB"), name


def write_all(folder):
    made = pictures()
    fax = {"group3": {}, "group3_2d": {292: 1}, "group3_aligned": {292: 4}, "group3_2d_aligned": {292: 5},
           "group4": {}, "runs": {}}  # fmt: skip
    names = {"runs": "tiff_ccitt", "group4": "group4"}
    for name, tags in fax.items():
        for order in (1, 2):
            for strip in (HEIGHT, 8)[: 3 - order]:
                save(folder, f"bilevel-{name}-{order}-{strip}", made["bilevel"], names.get(name, "group3"),
                     {**tags, 266: order, 278: strip})  # fmt: skip
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd", "lzma"):
        save(folder, f"bilevel-{compression}", made["bilevel"], compression, {})
        save(folder, f"rgb-{compression}", made["rgb"], compression, {})
        save(folder, f"rgb-{compression}-2", made["rgb"], compression, {266: 2, 278: 9})
        if compression in ("tiff_lzw", "tiff_adobe_deflate", "zstd"):
            save(folder, f"rgb-{compression}-differences", made["rgb"], compression, {317: 2})
    save(folder, "jpegycbcr-strips", made["rgb"], "jpeg", {278: 16})
    save(folder, "jpeggrey-strips", made["rgb"].convert("L"), "jpeg", {278: 16})
    save(folder, "jpegcmyk-whole", made["rgb"].convert("CMYK"), "jpeg", {})


def main():
    with TemporaryDirectory() as folder, tarfile.open(ARCHIVE, "w:xz", format=tarfile.USTAR_FORMAT) as archive:
        write_all(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            archive.addfile(entry, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    main()
