"""Cases of the image processor of the Qwen-VL families: decoding, resizing, and differences between its two backends."""

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import Qwen2VLImageProcessor, Qwen2VLImageProcessorPil
from transformers.image_utils import load_image, load_image_as_tensor

from .files import write_json, write_png
from .picture_chats import FACTOR, MAX_PIXELS, MERGE, MIN_PIXELS, PATCH
from .resize import resize
from .scenes import MODEL_PICTURES, draw_scene

ALL_PIXELS_STORED = "noise_down"  # the case whose pixel values are stored in full
PROBED_ELEMENTS = (0, 13, 195, 196, 391, 392, 588, 1175)


def pictures(photograph):
    """(case, file, picture and its save options, (min_pixels, max_pixels)) for every form in which a picture may arrive.

    A case without a picture uses a file that another case or a model writes."""
    scene = draw_scene(157, 113, 11)
    alpha = np.dstack([np.asarray(scene), np.linspace(0, 255, 157 * 113).reshape(113, 157).astype(np.uint8)])
    noise = np.random.default_rng(12).integers(0, 256, (31, 43, 3), dtype=np.uint8)
    grey16 = (np.arange(61 * 83).reshape(61, 83) * 12).astype(np.uint16)
    turned = Image.Exif()
    turned[0x0112] = 6  # to display it, rotate it by 90° clockwise
    tight, released = (MIN_PIXELS, MAX_PIXELS), (56 * 56, 28 * 28 * 1280)
    save = lambda image, **options: (image, options)  # noqa: E731
    return [
        ("photo_png", "photo_121x93.png", save(photograph, optimize=True), tight),
        ("scene_png_released_limits", "scene_101x157.png", None, released),
        ("photo_jpeg_444", "photo_444.jpg", save(photograph, quality=90, subsampling=0), tight),
        ("photo_jpeg_420", "photo_420.jpg", save(photograph, quality=80, subsampling=2), tight),
        ("photo_jpeg_progressive", "photo_progressive.jpg", save(photograph, quality=75, progressive=True), tight),
        ("photo_jpeg_grey", "photo_grey.jpg", save(photograph.convert("L"), quality=85), tight),
        ("scene_jpeg_turned", "scene_turned.jpg", save(scene, quality=80, exif=turned), tight),
        ("photo_webp_lossy", "photo_lossy.webp", save(photograph, quality=80), tight),
        ("scene_webp_lossless", "scene_lossless.webp", save(scene, lossless=True), tight),
        ("scene_rgba", "scene_rgba.png", save(Image.fromarray(alpha)), tight),
        ("scene_grey", "scene_grey.png", save(scene.convert("L")), tight),
        ("scene_grey_alpha", "scene_grey_alpha.png", save(Image.fromarray(alpha[..., 2:].copy(), "LA")), tight),
        ("scene_palette", "scene_palette.png", save(scene.quantize(16, dither=Image.Dither.NONE)), tight),
        ("scene_palette_transparent", "scene_palette_transparent.png",
         save(scene.quantize(16, dither=Image.Dither.NONE), transparency=3), tight),
        ("scene_two_colours", "scene_two_colours.png", save(scene.convert("1", dither=Image.Dither.NONE)), tight),
        ("grey_16_bit", "grey_16_bit.png", save(Image.fromarray(grey16)), tight),
        ("noise_up", "noise_43x31.png", save(Image.fromarray(noise)), (9 * FACTOR**2, MAX_PIXELS)),
        ("noise_down", "noise_43x31.png", None, (FACTOR**2, FACTOR**2 + 1)),
        ("already_right", "scene_84x56.png", save(draw_scene(84, 56, 13)), tight),
        ("thin", "scene_3x140.png", save(draw_scene(3, 140, 14)), tight),
        ("one_pixel", "scene_1x1.png", save(draw_scene(9, 9, 15).crop((4, 4, 5, 5))), tight),
        *((f"model_{file.split('_')[0]}", file, None, tight) for file in MODEL_PICTURES),
    ]  # fmt: skip


def unpatch(patches, grid):
    """[height, width, 3] from [patches, 3 * 2 * 14 * 14], the inverse of the processor's layout."""
    _, rows, columns = grid
    blocks = np.asarray(patches).reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, 2, PATCH, PATCH)[..., 0, :, :]
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * PATCH, columns * PATCH, 3)


def resized(kind, image, grid, limits):
    """The u8 picture [height, width, 3] that an image processor class resizes `image` to."""
    raw = kind(**limits)(image, do_rescale=False, do_normalize=False, return_tensors="np")
    return unpatch(raw["pixel_values"], grid).astype(np.uint8)


def decodes_the_same(path, rgb):
    """`True` if transformers reads the same pixels from a path as Pillow, and a text if their type is not u8."""
    by_path = load_image_as_tensor(str(path))
    if by_path.dtype != torch.uint8:
        return f"no: {by_path.dtype}"
    return by_path.shape[1:] == (rgb.height, rgb.width) and bool((by_path.permute(1, 2, 0).numpy() == rgb).all())


def record_case(folder, name, path, limits, differences):
    """Records one picture and returns its facts. Adds the differences of the Pillow backend to `differences`."""
    image = Image.open(path)
    rgb = image.convert("RGB")
    full = Qwen2VLImageProcessor(**limits)(image, return_tensors="pt")
    grid = full["image_grid_thw"][0].tolist()
    fast = resized(Qwen2VLImageProcessor, image, grid, limits)
    slow = resized(Qwen2VLImageProcessorPil, image, grid, limits)
    assert np.array_equal(fast, resize(np.asarray(rgb), *fast.shape[:2])), name
    apart = np.abs(fast.astype(int) - slow.astype(int))
    case = {
        "name": name,
        "file": f"pictures/{path.name}",
        "mode": image.mode,
        "height": image.height,
        "width": image.width,
        **limits,
        "image_grid_thw": grid,
        "resized": f"image_processor/{name}.png",
        "torchvision_vs_pil": {"worst": int(apart.max()), "share_equal": round(float((apart == 0).mean()), 6)},
    }
    write_png(folder / f"{name}.png", fast)
    # Flat indices in [height, width, 3] at which the Pillow backend differs, and the differences.
    where = np.flatnonzero(apart)
    differences[f"{name}.at"] = torch.from_numpy(where.astype(np.int32))
    differences[f"{name}.pil_minus_torchvision"] = torch.from_numpy((slow.astype(int) - fast).flat[where].astype(np.int8))
    if path.suffix in (".jpg", ".webp"):  # decoders may differ, so tests of resizing start from Pillow's decoded picture
        write_png(folder / f"{path.name}.decoded.png", rgb)
        case["decoded"] = f"image_processor/{path.name}.decoded.png"
    case["torchvision_decodes_the_same"] = decodes_the_same(path, rgb)
    case["load_image_size"] = [load_image(str(path)).height, load_image(str(path)).width]
    pixels = full["pixel_values"]
    spots = [(p, e) for p in (0, 1, 2, pixels.shape[0] // 2, pixels.shape[0] - 1) for e in PROBED_ELEMENTS]
    case["pixel_value_probes"] = [[p, e, float(pixels[p, e])] for p, e in spots]
    if name == ALL_PIXELS_STORED:
        save_file({"pixel_values": pixels.contiguous()}, folder / f"{name}.safetensors")
        case["pixel_values"] = f"image_processor/{name}.safetensors"
    print(f"  {name:26} {image.mode:5} {image.height}x{image.width} -> {grid} {case['torchvision_vs_pil']} "
          f"same by path: {case['torchvision_decodes_the_same']} load_image: {case['load_image_size']}")  # fmt: skip
    return case


def record(root, inputs):
    folder, cases, differences = root / "image_processor", [], {}
    for name, file, saved, (min_pixels, max_pixels) in pictures(inputs.photograph):
        path = root / "pictures" / file
        if saved:
            image, options = saved
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, **options)
        cases.append(record_case(folder, name, path, dict(min_pixels=min_pixels, max_pixels=max_pixels), differences))
    save_file(differences, folder / "pil_differences.safetensors")
    write_json(folder / "cases.json", {"default_backend": "torchvision", "cases": cases})
