"""torchvision's bicubic resize, written out in NumPy."""

import numpy as np


def bicubic_weights(before, after):
    """Yields for each output position the first input position that it reads, and the weights from there on (sum 1)."""
    scale = before / after
    stretch = max(scale, 1.0)  # antialias: the kernel is wider when shrinking
    for i in range(after):
        center = (i + 0.5) * scale
        first, last = max(0, int(center - 2 * stretch + 0.5)), min(before, int(center + 2 * stretch + 0.5))
        x = np.abs((np.arange(first, last) - center + 0.5) / stretch)
        near, far = (1.5 * x - 2.5) * x * x + 1, ((x - 5) * x + 8) * x * -0.5 + 2  # Keys' cubic with a = -0.5
        weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
        yield first, weights / weights.sum()


def resize_rows(picture, height):
    """Resizes the height, u8 in and out. Weights are i16 with as many fraction bits as the largest weight allows."""
    if picture.shape[0] == height:
        return picture
    weights = list(bicubic_weights(picture.shape[0], height))
    largest, bits = max(w.max() for _, w in weights), 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    rows = []
    for first, w in weights:
        fixed = np.trunc(w * (1 << bits) + np.copysign(0.5, w)).astype(np.int64)
        seen = picture[first : first + len(w)].astype(np.int64)
        rows.append(np.clip(((1 << (bits - 1)) + np.tensordot(fixed, seen, 1)) >> bits, 0, 255).astype(np.uint8))
    return np.stack(rows)


def resize(picture, height, width):
    """Equals torchvision's u8 bicubic resize with antialias to the bit: the width first, then the height.

    This function spares an implementer from reading ATen, and every picture is checked against it. Pillow differs: it
    always uses 22 fraction bits, and it resizes the height first if the width grows and the height shrinks."""
    turned = resize_rows(picture.transpose(1, 0, 2), width)
    return resize_rows(turned.transpose(1, 0, 2), height)
