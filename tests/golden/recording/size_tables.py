"""Tables of resized sizes and of tile grids."""

import math

import numpy as np
from PIL import Image
from transformers import GotOcr2ImageProcessor, GotOcr2ImageProcessorPil
from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_resize

from .files import write_json, write_png
from .internvl import IMAGENET, TILE
from .picture_chats import MAX_PIXELS, MIN_PIXELS
from .resize import resize

COLUMNS = ["height", "width", "factor", "min_pixels", "max_pixels"]
RELEASED, TIGHT = (56 * 56, 28 * 28 * 1280), (MIN_PIXELS, MAX_PIXELS)


def picture_rows():
    """Arguments of `smart_resize`."""
    sizes = [(1080, 1920), (3024, 4032), (4320, 7680), (480, 640), (427, 640), (157, 101), (97, 333), (225, 225), (56, 56),
             (28, 28), (27, 29), (30, 41), (1, 1), (1, 2), (14, 14), (13, 13), (1, 200), (200, 1), (3, 600), (10000, 50),
             (100, 10000), (65535, 65535)]  # fmt: skip
    rows = [(h, w, 28, *RELEASED) for h, w in sizes]
    rows += [(h, w, 28, *TIGHT) for h, w in sizes[:15]]
    # Ties of h / 28. Python rounds half to even (42 / 28 = 1.5 -> 2, 70 / 28 = 2.5 -> 2, 98 / 28 = 3.5 -> 4).
    rows += [(h, w, 28, *RELEASED) for h, w in [(42, 70), (70, 42), (98, 126), (126, 154), (154, 182), (14, 210), (238, 14), (70, 70)]]
    rows += [(h, w, 32, 56 * 56, 16384 * 28 * 28) for h, w in [(48, 80), (80, 112), (1081, 1919)]]
    rows += [(100, 100, 28, 0, 28 * 28), (100, 100, 28, 10_000_000, 10_000_000), (50, 5000, 28, 0, 28 * 28), (500, 3, 28, 0, 3000)]
    rows += [(112, 112, 28, 112 * 112, 112 * 112), (113, 111, 28, 112 * 112, 112 * 112), (111, 111, 28, 112 * 112 + 1, 28**2 * 100)]
    rows += [(2, 300, 28, 3136, 12845056), (1000, 1001, 28, 1003520, 1003521), (560, 561, 28, 3136, 313600), (560, 588, 28, 3136, 313600)]
    return rows


def video_rows():
    """Arguments of Qwen3-VL's `smart_resize`: odd frame counts, halves of a temporal patch, frames thinner than the factor,
    and both pixel limits."""
    return [(f, h, w, 32, low, high)
            for f in (2, 3, 4, 5, 7, 9, 768)
            for h, w in [(480, 640), (20, 300), (300, 20), (65, 97), (1080, 1920)]
            for low, high in [(4096, 25165824), (128 * 1024, 768 * 1024)]]  # fmt: skip


def enlarged_rows():
    """Arguments of Gemma 4's resize: the picture sizes of `picture_rows`, with each number of tokens."""
    sizes = dict.fromkeys((h, w) for h, w, *_ in picture_rows() if h > 0 and w > 0)
    return [(h, w, 16, 9 * tokens, 3) for h, w in sizes for tokens in (70, 280, 1120)]


def record_smart_resize(root, _):
    """Writes `smart_resize.json`."""
    table = [{"in": list(row), "out": list(smart_resize(*row))} for row in picture_rows()]
    refused = []
    for row in [(1, 201, 28, *RELEASED), (201, 1, 28, *RELEASED), (5, 1001, 28, *TIGHT), (10000, 49, 28, *RELEASED), (0, 5, 28, *RELEASED)]:
        try:
            refused.append({"in": list(row), "out": list(smart_resize(*row))})
        except (ValueError, ZeroDivisionError) as error:
            refused.append({"in": list(row), "error": type(error).__name__, "message": str(error)})
    videos = []
    for row in video_rows():
        f, h, w, factor, low, high = row
        videos.append({"in": list(row), "out": list(video_resize(f, h, w, factor=factor, min_pixels=low, max_pixels=high))})
    enlarged = [{"in": list(row), "out": list(get_aspect_ratio_preserving_size(*row))} for row in enlarged_rows()]
    write_json(root / "smart_resize.json", {"columns": COLUMNS, "rows": table, "refused": refused,
                                            "enlarged_columns": ["height", "width", "patch_size", "max_patches", "pooling_kernel_size"],
                                            "enlarged": enlarged,
                                            "video_columns": ["frames", *COLUMNS], "videos": videos})  # fmt: skip


TILE_LIMITS = [(1, 12), (1, 6), (2, 4), (1, 1)]  # fewest and most tiles


def closest_grid(width, height, tile, least, most):
    """The choice of InternVL's authors (`find_closest_aspect_ratio` on their model cards), which tries grids with the same
    number of tiles in the iteration order of a set."""
    grids = {(i, j) for n in range(least, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if least <= i * j <= most}
    best, apart = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - columns / rows)
        if difference < apart or (difference == apart and width * height > 0.5 * tile * tile * columns * rows):
            best, apart = (columns, rows), difference
    return best


def tile_rows():
    """The grids of many sizes for each of the limits. Asserts that the authors choose the same grids."""
    random = np.random.default_rng(31)
    # Sizes by shape: ties between two grids, and sizes on both sides of half the grid's area.
    sizes = [(1, 1), (1, 2000), (2000, 1), (448, 448), (449, 448), (447, 448), (1000, 600), (4000, 3000), (3000, 4000), (500, 400),
             (800, 600), (600, 800), (1024, 1024), (633, 633), (634, 634), (896, 448), (448, 896), (895, 448), (897, 448),
             (1344, 448), (448, 1344), (1920, 1080), (1080, 1920), (640, 480), (480, 640), (300, 200), (776, 517), (777, 518),
             (1552, 1034), (1554, 1036), (2480, 3508), (100, 400), (1583, 396), (1600, 400), (950, 950), (951, 951), (1268, 1268),
             (1250, 1000), (1750, 1000), (700, 400), (1000, 1250), (65535, 65535), (10000, 50)]  # fmt: skip
    sizes += [tuple(map(int, 2 ** random.uniform(4, 12, 2))) for _ in range(20)]
    rows = []
    for width, height in sizes:
        grids = [get_optimal_tiled_canvas((height, width), (448, 448), *limits) for limits in TILE_LIMITS]
        assert grids == [closest_grid(width, height, 448, *limits) for limits in TILE_LIMITS], (width, height)
        rows.append({"size": [width, height], "grids": grids})
    return rows


def record_tiles(root, _):
    """Writes `tiles.json` for tiles of 448, and the tiles of one picture before normalization."""
    file, options = "scene_101x157.png", dict(
        size={"height": TILE, "width": TILE}, crop_to_patches=True, do_rescale=False, do_normalize=False, return_tensors="np")
    image = Image.open(root / "pictures" / file)
    fast, slow = (kind(**IMAGENET)(image, **options)["pixel_values"].astype(np.uint8)
                  for kind in (GotOcr2ImageProcessor, GotOcr2ImageProcessorPil))  # fmt: skip
    columns, lines = get_optimal_tiled_canvas((image.height, image.width), (TILE, TILE), 1, 12)
    canvas = resize(np.asarray(image), TILE * lines, TILE * columns)
    cut = canvas.reshape(lines, TILE, columns, TILE, 3).transpose(0, 2, 1, 3, 4).reshape(-1, TILE, TILE, 3)
    tiles = np.concatenate([cut, resize(np.asarray(image), TILE, TILE)[None]])  # the thumbnail is last
    assert np.array_equal(fast.transpose(0, 2, 3, 1), tiles)
    apart = np.abs(fast.astype(int) - slow.astype(int))
    write_png(root / "image_processor/tiles_scene.png", np.concatenate(list(tiles), 1))  # side by side
    write_json(root / "tiles.json", {
        "tile": 448, "limits": TILE_LIMITS, "size_is": ["width", "height"], "grid_is": ["columns", "rows"], "rows": tile_rows(),
        "picture": {"file": f"pictures/{file}", "tile": TILE, "grid": [columns, lines], "tiles": "image_processor/tiles_scene.png",
                    "torchvision_vs_pil": {"worst": int(apart.max()), "share_equal": round(float((apart == 0).mean()), 6)}}})
