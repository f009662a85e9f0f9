"""Learned positions interpolated between the points of a square grid: `position_grid.cu`."""

import torch

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, divide_up, unsigned
from operations.patchify import reading_order
from table import Case

THREADS = contract("position_grid").THREADS
AROUND = ((0, 0), (0, 1), (1, 0), (1, 1))


class Grid:
    """A table [side * side, hidden], and the patches of pictures of (down, across). With `is_odd`,
    patches are in random order, and some of them are in no picture or outside their picture."""

    def __init__(self, sizes, side, hidden, kind, is_odd=False):
        self.side, self.hidden, self.kind = side, hidden, kind
        self.table = torch.randn(side * side, hidden, device="cuda", dtype=kind)
        self.layout = [[977 * index, down, across, 1] for index, (down, across) in enumerate(sizes)]
        places = torch.cat([torch.cat((torch.full((down * across, 1), index), reading_order(down, across)), 1)
                            for index, (down, across) in enumerate(sizes)])  # fmt: skip
        if is_odd:
            nowhere = [[len(sizes), 0, 0], [-1, 0, 0], [0, sizes[0][0], 0], [0, 0, sizes[0][1]], [0, -1, 0]]
            places = torch.cat((places, torch.tensor(nowhere)))
            places = places[torch.randperm(len(places))]
        self.places = places.cuda()  # [patches, 3]
        picture, row, column = self.places.T
        counts = torch.tensor(self.layout, device="cuda")[picture.clamp(0, len(sizes) - 1), 1:3]
        self.is_there = (picture >= 0) & (picture < len(sizes)) & (row >= 0) & (row < counts[:, 0]) & (column < counts[:, 1])
        self.points, self.weights = self.around(self.places[:, 1:].clamp_min(0), counts)

    def around(self, at, counts):
        """The four points around each patch, and their weights in f64: [patches, 4] each. Positions are rounded to f32."""
        place = (at.float() * (self.side - 1) / (counts - 1).clamp_min(1).float()).double()
        before = place.floor()
        far = place - before
        points = [before.long().clamp_max(self.side - 1), (before.long() + 1).clamp_max(self.side - 1)]
        weights = [1 - far, far]
        corner = lambda of, y, x, join: join(of[y][:, 0], of[x][:, 1])  # noqa: E731
        index = [corner(points, y, x, lambda row, column: row * self.side + column) for y, x in AROUND]
        weight = [corner(weights, y, x, torch.mul) for y, x in AROUND]
        return torch.stack(index, 1), torch.stack(weight, 1)

    def reference(self):
        """The expected rows [patches within pictures, hidden] in f64."""
        points, weights = self.points[self.is_there], self.weights[self.is_there]
        out = torch.zeros(len(points), self.hidden, dtype=torch.float64, device="cuda")
        for corner in range(len(AROUND)):
            out += self.table[points[:, corner]].double() * weights[:, corner, None]
        return out

    def by_torch(self):
        return (self.table[self.points] * self.weights[:, :, None].float()).sum(1).to(self.kind)


def case(grid, gap=0):
    patches, hidden, kind = len(grid.places), grid.hidden, grid.kind
    wide = min(divide_up(hidden, 8), THREADS)
    tall = THREADS // wide
    layout, places = unsigned(grid.layout), unsigned(grid.places % (1 << 32)).T.contiguous()
    out, kernel = Output((patches, hidden), kind, gap), Kernel("position_grid", f"position_grid_{ENDINGS[kind]}")

    def wrong():
        if not bool(out.tensor[~grid.is_there].isnan().all()):
            return float("inf")
        return out.error(grid.reference(), rows=grid.is_there)

    return Case(
        run=lambda: kernel((divide_up(patches, tall),), (wide, tall), grid.table, grid.side, hidden, places, patches, layout,
                           len(grid.layout), out.tensor, hidden + gap),
        error=wrong,
        limit=LIMITS[kind],
        bytes=(grid.table.numel() + out.tensor.numel()) * kind.itemsize + places.numel() * 4,
        baselines={"torch": grid.by_torch},
    )  # fmt: skip


ODD = [  # pictures of (down, across), side, hidden, gap
    ([(4, 6), (1, 1), (1, 9), (70, 1), (33, 50)], 48, 1152, 0),
    ([(64, 64), (30, 22)], 48, 1152, 8),
    ([(2, 2), (100, 3)], 7, 61, 0),
    ([(5, 5)], 7, 61, 3),
    ([(9, 4), (6, 6)], 1, 16, 4),
    ([(12, 13)], 27, 2060, 0),
    ([(16, 16)], 16, 4096, 0),
]


def check(table):
    for kind in (torch.bfloat16, torch.float16):
        for sizes, side, hidden, gap in ODD:
            grid = Grid(sizes, side, hidden, kind, is_odd=True)
            table.check("position_grid", f"{sizes} on {side} x {hidden} + {gap}", case(grid, gap))


def measure(table):
    for count in (1, 4):
        make = lambda: Grid([(64, 64)] * count, 48, 1152, torch.bfloat16)  # noqa: E731
        table.row("position_grid", f"{count} of 64 x 64 patches on 48, 1,152 columns", lambda: case(make()))
