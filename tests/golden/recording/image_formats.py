"""Picture files of many formats, and the picture that Pillow's `convert("RGB")` makes of each."""

import io
import struct

import numpy as np
from PIL import Image

from .files import write_png
from .scenes import draw_scene


def write_decoded(root, name):
    """Writes `<name>.decoded.png`, and returns the opened picture."""
    image = Image.open(root / "pictures" / name)
    write_png(root / f"image_processor/{name}.decoded.png", image.convert("RGB"))
    return image


def record_cmyk(root, _):
    """JPEGs in CMYK and YCCK."""
    pictures = root / "pictures"
    y, x = np.mgrid[0:43, 0:61]
    inks = np.stack([x * 4, y * 5, (x + y) * 2, (x * y) // 11], axis=-1).astype(np.uint8)
    pictures.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(inks, "CMYK")
    for name, options in [("cmyk", {"quality": 90}), ("cmyk_progressive", {"quality": 75, "progressive": True})]:
        image.save(pictures / f"{name}.jpg", **options)
    encoded = (pictures / "cmyk.jpg").read_bytes()
    at = encoded.index(b"\xff\xee\x00\x0eAdobe")
    # The same numbers declared as YCCK, and without the Adobe marker.
    (pictures / "ycck.jpg").write_bytes(encoded[: at + 15] + b"\x02" + encoded[at + 16 :])
    (pictures / "cmyk_unmarked.jpg").write_bytes(encoded[:at] + encoded[at + 16 :])
    for name in ["cmyk", "cmyk_progressive", "ycck", "cmyk_unmarked"]:
        assert write_decoded(root, f"{name}.jpg").mode == "CMYK", name


def record_animations(root, _):
    """Animated WebP and PNG. Pillow shows the first frame."""
    y, x = np.mgrid[0:43, 0:61]
    frames = [Image.fromarray(np.stack([x * 4, y * 5, 0 * x + 90 * i], axis=-1).astype(np.uint8)) for i in range(3)]
    for name, options in [("animated.webp", {"lossless": True}), ("animated.png", {})]:
        frames[0].save(root / "pictures" / name, save_all=True, append_images=frames[1:], duration=40, **options)
        assert write_decoded(root, name).n_frames == 3, name


def interlaced_gif(picture):
    """A GIF with its rows in four passes."""
    encoded = io.BytesIO()
    picture.quantize(32, dither=Image.Dither.NONE).save(encoded, "GIF", interlace=1)
    return encoded.getvalue()


def gif_on_larger_canvas(picture, transparent):
    """A GIF with its frame at 7, 5 of a larger canvas. Pillow fills the rest with the transparent or first color."""
    encoded = io.BytesIO()
    more = {"transparency": 3} if transparent else {}
    picture.quantize(16, dither=Image.Dither.NONE).save(encoded, "GIF", interlace=0, **more)
    gif = bytearray(encoded.getvalue())
    frame = gif.index(b"," + bytes(4) + struct.pack("<HH", *picture.size))
    gif[6:10] = struct.pack("<HH", picture.width + 20, picture.height + 11)
    gif[frame + 1 : frame + 5] = struct.pack("<HH", 7, 5)
    return bytes(gif)


def bmp(width, height, bits, compression, palette, rows, masks=b""):
    """The bytes of a BMP, for variants that Pillow reads but does not write."""
    offset = 14 + 40 + len(masks) + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(rows), 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(rows), 0, 0, offset) + head + masks + palette + rows


def run_lengths(picture):
    """RLE8 data of a palette picture, from the last row to the first, with runs and with literals of three pixels."""
    rows = b""
    for row in np.asarray(picture)[::-1]:
        x = 0
        while x < len(row):
            run = 1
            while x + run < len(row) and row[x + run] == row[x] and run < 255:
                run += 1
            if run >= 3 or x + 3 > len(row):
                rows += bytes([run, row[x]])
                x += run
            else:
                rows += bytes([0, 3, *row[x : x + 3], 0])
                x += 3
        rows += b"\0\0"
    return rows + b"\0\1"


def format_files(photograph, scene):
    """Maps each file name to a picture, to a picture and its save options, or to the bytes of the file."""
    few, half = scene.quantize(16, dither=Image.Dither.NONE), scene.convert("1", dither=Image.Dither.NONE)
    alpha = np.dstack([np.asarray(scene), np.linspace(0, 255, 61 * 43).reshape(43, 61).astype(np.uint8)])
    quads = bytes(b for i in range(16) for b in (*few.getpalette()[3 * i : 3 * i + 3][::-1], 0))
    levels = np.asarray(scene).astype(np.uint32)
    pixels = (levels[..., 0] << 16 | levels[..., 1] << 8 | levels[..., 2]).astype("<u4")[::-1].tobytes()
    masks = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)
    upright = bmp(61, -43, 24, 0, b"", b"".join(row[:, ::-1].tobytes() + b"\0" for row in np.asarray(scene)))
    tag = lambda value: {"tiffinfo": {274: value}}  # noqa: E731
    return {
        "scene.gif": few, "scene_interlaced.gif": interlaced_gif(scene), "scene_grey.gif": scene.convert("L"),
        "scene_on_a_screen.gif": gif_on_larger_canvas(scene, False), "scene_transparent.gif": gif_on_larger_canvas(scene, True),
        "scene_24.bmp": scene, "scene_8.bmp": few, "scene_grey.bmp": scene.convert("L"), "scene_1.bmp": half,
        "scene_32.bmp": Image.fromarray(alpha), "scene_upright.bmp": upright,
        "scene_runs.bmp": bmp(61, 43, 8, 1, quads, run_lengths(few)),
        "scene_masks.bmp": bmp(61, 43, 32, 3, b"", pixels, masks),
        "photo.tif": (photograph, {}), "photo_lzw.tif": (photograph, {"compression": "tiff_lzw"}),
        "photo_deflate.tif": (photograph, {"compression": "tiff_adobe_deflate", "tiffinfo": {317: 2}}),
        "scene_packbits.tif": (scene, {"compression": "packbits"}), "scene_alpha.tif": (Image.fromarray(alpha), {}),
        "scene_grey.tif": (scene.convert("L"), {"compression": "tiff_lzw"}), "scene_1.tif": (half, {}),
        "scene_fax.tif": (half, {"compression": "group4"}), "scene_turned.tif": (scene, tag(6)),
    }  # fmt: skip


def record(root, inputs):
    """GIF, BMP and TIFF in common variants."""
    pictures, scene = root / "pictures", draw_scene(61, 43, 31)
    files = format_files(inputs.photograph, scene)
    for name, content in files.items():
        if isinstance(content, bytes):
            (pictures / name).write_bytes(content)
        else:
            image, options = content if isinstance(content, tuple) else (content, {})
            image.save(pictures / name, **options)
    frames = [Image.fromarray(np.roll(np.asarray(scene), 9 * i, 0)).quantize(16) for i in range(3)]
    frames[0].save(pictures / "animated.gif", save_all=True, append_images=frames[1:], duration=40)
    frames[0].convert("RGB").save(pictures / "pages.tif", save_all=True, append_images=[scene])
    for name in [*files, "animated.gif", "pages.tif"]:
        image = write_decoded(root, name)
        print(f"  {name:24} {image.mode:5} {image.size} {(pictures / name).stat().st_size} bytes")
