"""Pictures' bytes as normalized patches: `patchify.cu`."""

import functools

import torch

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, divide_up, unsigned
from table import Case

MERGE, WINDOW = 2, 4  # patches per merged patch and merged patches per window, in each direction


@functools.cache
def reading_order(down, across):
    """Rows and columns of a picture's patches, window by window if they can be merged: [patches, 2]."""
    rows, columns = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
    keys = torch.zeros(down, across, dtype=torch.int64)
    if down % MERGE == 0 and across % MERGE == 0:
        for part in (rows // (MERGE * WINDOW), columns // (MERGE * WINDOW), rows // MERGE, columns // MERGE):
            keys = keys * (down + across) + part
    order = keys.flatten().sort(stable=True).indices
    return torch.stack((rows.flatten(), columns.flatten()), 1)[order]


class Pictures:
    """`sizes` has (patches down, patches across, frames) of each picture. `gap` is the number of bytes before
    the first picture. With `is_odd`, patches are in random order, and some of them are in no picture, or in
    pictures outside the bytes."""

    def __init__(self, sizes, side, frames, gap=0, is_odd=False):
        self.side, self.frames, end, layout, places = side, frames, gap, [], []
        for index, (down, across, given) in enumerate(sizes):
            layout.append([end, down, across, given])
            end += down * across * side * side * 3 * given
            inside = reading_order(down, across)
            places.append(torch.cat((torch.full((len(inside), 1), index), inside), 1))
        places = torch.cat(places)
        self.bytes = torch.randint(256, (end,), device="cuda", dtype=torch.uint8)
        if is_odd:
            # Invalid pictures: the first ends after the bytes, the second has no frame, the third
            # has one frame too many, the fourth is too large, and the fifth begins before the
            # bytes.
            layout += [[end - 3, 2, 2, 1], [0, 2, 2, 0], [0, 2, 2, frames + 1], [0, 70_000, 70_000, 1], [2**32 - 4, 1, 1, 1]]
            nowhere = [[len(sizes) + index, 0, 0] for index in range(5)]
            nowhere += [
                [len(layout), 0, 0],
                [0, sizes[0][0], 0],
                [0, 0, sizes[0][1]],
                [0, -1, 0],
                [-5, 0, 0],
                [0, 0, 70_000],
            ]
            places = torch.cat((places, torch.tensor(nowhere)))
            places = places[torch.randperm(len(places))]
        self.layout, self.places = layout, places  # [pictures, 4], [patches, 3]
        shifts, scales = torch.rand(len(layout), 3) * 50 + 90, torch.rand(len(layout), 3) * 20 + 60
        self.levels = torch.cat((torch.ones(len(layout), 1), shifts, scales), 1)
        self.levels[1::3] /= 255  # for levels from 0 to 1
        self.levels = self.levels.cuda()
        self.columns = 3 * frames * side * side

    def reference(self):
        """The expected patches [patches, 3 * frames * side * side] in f64. Before the kernel rounds
        its f32 value to the output type, the value may differ by one unit in the last place."""
        side, frames = self.side, self.frames
        out = torch.zeros(len(self.places), 3, frames, side, side, dtype=torch.float64, device="cuda")
        for index, (first, down, across, given) in enumerate(self.layout):
            picture, row, column = self.places.T
            inside = (picture == index) & (row >= 0) & (row < down) & (column >= 0) & (column < across)
            end = first + down * across * side * side * 3 * given
            if end > len(self.bytes) or not 1 <= given <= frames or not inside.any():
                continue
            pixels = self.bytes[first:end].view(given, down, side, across, side, 3).permute(1, 3, 5, 0, 2, 4).double()
            factor, shifts, scales = self.levels[index].double().split((1, 3, 3))
            values = (pixels * factor - shifts.view(3, 1, 1, 1)) / scales.view(3, 1, 1, 1)
            values = torch.cat([values] + [values[:, :, :, -1:]] * (frames - given), 3)
            out[inside.cuda()] = values[row[inside].cuda(), column[inside].cuda()]
        return out.flatten(1)


def case(pictures, kind):
    patches, side = len(pictures.places), pictures.side
    numbers = contract("patchify")
    units = side * side // (numbers.PIXELS if side % 2 == 0 else 1)
    wide = min(units, numbers.THREADS_MAX)
    tall = numbers.THREADS_MAX // wide
    layout, places = unsigned(pictures.layout), unsigned(pictures.places % (1 << 32)).T.contiguous()
    out, kernel = Output((patches, pictures.columns), kind), Kernel("patchify", f"patchify_{ENDINGS[kind]}")
    return Case(
        run=lambda: kernel((divide_up(patches, tall),), (wide, tall), pictures.bytes, pictures.bytes.numel(), layout,
                           pictures.levels, len(pictures.layout), places, patches, side, pictures.frames, out.tensor),
        error=lambda: out.error(pictures.reference()),
        limit=LIMITS[kind],
        bytes=pictures.bytes.numel() + places.numel() * 4 + out.tensor.numel() * kind.itemsize,
    )  # fmt: skip


ODD = [  # sizes, side, frames, gap
    ([(2, 2, 1)], 14, 2, 0),
    ([(6, 10, 1), (4, 8, 2), (2, 2, 1), (30, 22, 2)], 14, 2, 6),
    ([(3, 5, 2), (7, 1, 1)], 7, 2, 5),
    ([(3, 5, 1), (2, 3, 3)], 16, 3, 0),
    ([(5, 3, 2)], 14, 2, 3),
    ([(4, 4, 1)], 1, 1, 1),
    ([(2, 6, 1), (2, 2, 5)], 2, 5, 0),
    ([(3, 2, 1), (2, 2, 2)], 34, 2, 8),
    ([(1, 2, 1)], 37, 1, 0),
]


def check(table):
    for kind in (torch.bfloat16, torch.float16):
        for sizes, side, frames, gap in ODD:
            pictures = Pictures(sizes, side, frames, gap, is_odd=True)
            table.check("patchify", f"{sizes} of side {side}", case(pictures, kind))


def measure(table):
    for count in (1, 4):
        table.row(
            "patchify", f"{count} of 1036 x 1036", lambda: case(Pictures([(74, 74, 1)] * count, 14, 2), torch.bfloat16)
        )
