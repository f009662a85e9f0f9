"""Mixtures of experts: which experts compute which token, and matrix products with the experts' weights."""

import functools
import itertools
import random

import torch
from torch.nn import functional

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, divide_up, microseconds, processors, tensor_map, unsigned
from operations.e4m3 import E4M3, GROUP, KINDS, QuantizedRows, row_shape
from operations.small import EPSILON, norm_shape, normed
from table import Case

ROUTE, EXPERTS, SMALL_M, LARGE_M = contract("route"), contract("experts"), contract("experts_small_m"), contract("gemm_large_m")
NORMED, GATE = contract("route_normed"), contract("gate")
PLACES = [8, 16, 24, 32]
SWIZZLE = 3  # CU_TENSOR_MAP_SWIZZLE_128B
STATIC_BYTES, HALF_BYTES, ALL_BYTES = 4 << 10, 110 << 10, 227 << 10


def drawn_logits(rows, experts, skew):
    """Logits whose routing is even (`skew` 0) or follows Zipf's law with the exponent `skew`. With a large `skew`, all rows
    choose the same experts."""
    liking = torch.arange(1, experts + 1, device="cuda", dtype=torch.float32).log() * -min(skew, 1e4)
    gumbel = -torch.empty(rows, experts, device="cuda").exponential_().log()
    return liking[torch.randperm(experts, device="cuda")] + gumbel


def counted_logits(counts):
    """Logits of rows that choose one expert each. `counts` has the number of rows for each expert."""
    chosen = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    logits = torch.rand(len(chosen), len(counts), device="cuda")
    logits[torch.randperm(len(chosen), device="cuda"), chosen.cuda()] += 2
    return logits


class Routing:
    """The router's choices, in the layout that the kernels share. `scaled` scales the logits and the experts' routing weights,
    as in Gemma 4."""

    def __init__(self, logits, top, renormalized=True, scaled=False):
        rows, experts = logits.shape
        self.logit_scale = 0.375 if scaled else 1.0
        self.expert_scales = torch.rand(experts, device="cuda") + 0.5 if scaled else None
        self.logits, self.top, self.renormalized, self.rows, self.experts = logits, top, renormalized, rows, experts
        blocks = divide_up(rows, ROUTE.BLOCK_ROWS)
        new = lambda *shape, kind=torch.int32: Output(shape, kind)  # noqa: E731
        self.weights, self.places, self.choices = new(rows, top, kind=torch.float32), new(rows * top), new(rows * top)
        self.starts, self.counts, self.loads = new(experts + 1), new(blocks * experts), new(experts)
        self.loads.tensor.zero_()
        # Rows without a slot are not counted.
        self.slots = unsigned(torch.where(torch.rand(rows, device="cuda") < 0.2, contract("common").NO_SLOT, 5))

    def run(self, early=False):
        choices = self.rows * self.top
        logits = self.logits, self.logits.stride(0), self.rows, self.experts, self.top, *self.rule()
        out, sorted_ = (self.weights.tensor, self.places.tensor), (self.choices.tensor, self.starts.tensor, self.loads.tensor)
        if self.rows <= ROUTE.SMALL_M_ROWS:
            return Kernel("route", "route_small_m_f32")((1,), (ROUTE.THREADS,), *logits, *out, *sorted_, self.slots, early=early)
        by_one = choices <= ROUTE.SORTED_CHOICES
        rows = ROUTE.SORTED_BLOCK_ROWS if by_one else ROUTE.BLOCK_ROWS
        threads, counts = (32 * rows, None) if by_one else (ROUTE.THREADS, self.counts.tensor)
        blocks = divide_up(self.rows, rows)
        Kernel("route", "route_choose_f32")((blocks,), (threads,), *logits, rows, *out, counts, self.loads.tensor, self.slots, early=early)
        Kernel("route", "route_sort_u32")(
            (1 if by_one else blocks,), (ROUTE.THREADS,), self.places.tensor, choices, self.experts,
            choices if by_one else rows * self.top, counts, *sorted_, early=early)  # fmt: skip

    def rule(self):
        return int(self.renormalized), self.logit_scale, self.expert_scales

    def expected(self):
        values, order = (self.logits.double() * self.logit_scale).sort(dim=-1, descending=True, stable=True)
        total = (values[:, : self.top] if self.renormalized else values).logsumexp(-1, keepdim=True)
        weights = (values[:, : self.top] - total).exp()
        if self.expert_scales is not None:
            weights = weights * self.expert_scales.double()[order[:, : self.top]]
        chosen = order[:, : self.top].flatten()
        choices = chosen.sort(stable=True).indices
        places = torch.empty_like(choices)
        places[choices] = torch.arange(len(choices), device="cuda")
        return weights, choices, places, chosen.bincount(minlength=self.experts)

    def error(self):
        weights, choices, places, counts = self.expected()
        starts = functional.pad(counts.cumsum(0), (1, 0))
        is_counted = (self.slots == 5).repeat_interleave(self.top)
        experts = torch.repeat_interleave(torch.arange(self.experts, device="cuda"), counts)
        loads = experts[is_counted[choices]].bincount(minlength=self.experts)
        for found, wanted in [(self.choices, choices), (self.places, places), (self.starts, starts), (self.loads, loads)]:
            if not found.is_guarded() or not torch.equal(found.tensor.long(), wanted):
                return float("inf")
        return self.weights.error(weights)


def route(rows, experts, top, skew, renormalized=True, scaled=False):
    routing = Routing(drawn_logits(rows, experts, skew), top, renormalized, scaled)
    return Case(run=routing.run, error=routing.error, limit=1e-6, bytes=4 * rows * (experts + 6 * top))


class Product:
    """Rows of x times the weights of their experts, with one of the available kernels. A rank with a share of the experts
    has only the weights of these experts, and does not write the rows of the other experts. `activation` is the gate's activation in
    gated products."""

    def __init__(self, x, weight, routing, features, gated, share=None):
        self.x, self.weight, self.routing, self.features, self.gated = x, weight, routing, features, gated
        self.share = share or range(routing.experts)
        self.columns, self.size = weight.shape[1], x.element_size()
        self.choices, self.activation = routing.rows * routing.top, GATE.SILU
        self.kind, self.limit = x.dtype, LIMITS.get(x.dtype)
        self.wide_x, self.wide_weight = x, weight
        self.renew()
        self.tiles = min(len(self.share), self.choices)

    def renew(self):
        """Replaces the output by a new poisoned one."""
        self.out = Output((self.choices, self.features), self.kind)

    def operands(self):
        routing, x = self.routing, self.x
        pitch = [x.stride(0)] if self.gated else []
        return [x, *pitch, self.columns, self.features, routing.choices.tensor, routing.top,
                routing.starts.tensor[self.share.start :], len(self.share), self.activation if self.gated else routing.weights.tensor, self.out.tensor]  # fmt: skip

    def name(self, way):
        return f"{'gated_' if self.gated else ''}experts{way}_{ENDINGS[self.x.dtype]}"

    def plain(self, early=False):
        tile = EXPERTS.TILE_ROWS // (2 if self.gated else 1)
        grid = divide_up(self.features, tile), divide_up(self.choices, EXPERTS.TILE_PLACES) + self.tiles
        Kernel("experts", self.name(""))(grid, (EXPERTS.THREADS,), self.weight, *self.operands(), early=early)

    def small_m_map(self):
        pitch, rows = self.size * self.columns, SMALL_M.TILE_ROWS
        experts, features, chunk = len(self.share), self.features, SMALL_M.ROW_BYTES // self.size
        if self.gated:
            return tensor_map(self.weight, [self.columns, 8, 2, features // 8, experts],
                              [pitch, pitch * features, 8 * pitch, 2 * pitch * features], [chunk, 8, 2, rows // 16, 1], SWIZZLE)  # fmt: skip
        return tensor_map(self.weight, [self.columns, features, experts], [pitch, pitch * features], [chunk, rows, 1], SWIZZLE)

    def small_m_kernel(self, places):
        return "experts_small_m", f"{self.name('_small_m')}_r{places}"

    def scales(self):
        return []

    def small_m(self, places, early=False, grid=None, of_one=None):
        x_bytes = places * divide_up(self.size * self.columns, SMALL_M.STEP_BYTES) * SMALL_M.STEP_BYTES
        half, whole = (HALF_BYTES - x_bytes) // SMALL_M.STAGE_BYTES, (ALL_BYTES - STATIC_BYTES - x_bytes) // SMALL_M.STAGE_BYTES
        blocks, stages = (2, half) if half >= 4 and of_one != 1 else (1, whole)
        stages = min(stages, SMALL_M.STAGES_MAX)
        tile = SMALL_M.TILE_ROWS // (2 if self.gated else 1)
        items = (divide_up(self.choices, places) + self.tiles) * divide_up(self.features, tile)
        grid = grid or min(items, blocks * processors())
        Kernel(*self.small_m_kernel(places), ALL_BYTES - STATIC_BYTES)(
            (grid,), (SMALL_M.THREADS,), self.small_m_map(), *self.operands(), stages, *self.scales(),
            shared_bytes=x_bytes + stages * SMALL_M.STAGE_BYTES, early=early)  # fmt: skip

    def large_m(self, early=False, grid=None):
        weight = tensor_map(self.weight, list(reversed(self.weight.shape)), [2 * self.columns],
                            [LARGE_M.STEP_COLUMNS, LARGE_M.TILE_WEIGHTS // 4], SWIZZLE)  # fmt: skip
        tile = LARGE_M.TILE_WEIGHTS // (2 if self.gated else 1)
        places = divide_up(self.choices, LARGE_M.CLUSTER * LARGE_M.TILE_ROWS) + self.tiles
        clusters = min(places * divide_up(self.features, tile), processors() // LARGE_M.CLUSTER)
        Kernel("experts_large_m", self.name("_large_m"), LARGE_M.SHARED_BYTES)(
            (grid or LARGE_M.CLUSTER * clusters,), (LARGE_M.THREADS,), weight, *self.operands(), early=early)  # fmt: skip

    def ways(self):
        """All kernels that can compute this product."""
        ways = {"mma": self.plain}
        if self.columns % 8 == 0 and self.features % 8 == 0 and self.x.stride(0) % 8 == 0:
            for places in PLACES:
                left = ALL_BYTES - STATIC_BYTES - places * divide_up(2 * self.columns, SMALL_M.STEP_BYTES) * SMALL_M.STEP_BYTES
                if left >= 5 * SMALL_M.STAGE_BYTES:
                    ways[f"small_m {places}"] = functools.partial(self.small_m, places)
            ways["large_m"] = self.large_m
        return ways

    def expected(self):
        """The expected rows of the share's experts."""
        weights, choices, _, counts = self.routing.expected()
        routing, out = self.routing, torch.empty(self.choices, self.features, device="cuda", dtype=torch.float64)
        per = self.weight.shape[0] // len(self.share)
        starts = [0, *counts.cumsum(0).tolist()]
        for place, expert in enumerate(self.share):
            places = slice(starts[expert], starts[expert + 1])
            if places.start == places.stop:
                continue
            w = self.wide_weight[place * per : (place + 1) * per].double()
            chosen = choices[places]
            if self.gated:
                both = self.wide_x[chosen // routing.top].double() @ w.T
                activate = functional.silu if self.activation == GATE.SILU else functools.partial(functional.gelu, approximate="tanh")
                out[places] = activate(both[:, : self.features]) * both[:, self.features :]
            else:
                out[places] = weights.flatten()[chosen, None] * (self.wide_x[places].double() @ w.T)
        self.places = torch.arange(starts[self.share.start], starts[self.share.stop], device="cuda")
        return out[self.places]

    def error(self, wanted):
        elsewhere = torch.ones(self.choices, dtype=torch.bool, device="cuda")
        elsewhere[self.places] = False
        return self.out.error(wanted, self.places, elsewhere)


class QuantizedProduct(Product):
    """A product with x and weights in E4M3. `height` rows of the weights share a scale for each 128 columns; each
    row of x has a scale for each 128 columns. If `height` is None, each row of x and of the weights has one
    scale."""

    def __init__(self, routing, columns, features, kind, gated, height):
        routing.run()
        rows = routing.rows * (1 if gated else routing.top)
        weights = routing.experts * features * (2 if gated else 1)
        codes = lambda rows, width: (torch.randn(rows, width, device="cuda") * 8).to(E4M3)  # noqa: E731
        scale = lambda rows: torch.rand(rows, divide_up(columns, GROUP) if height else 1, device="cuda") + 0.5  # noqa: E731
        # Rows of x may have a gap between them if they are gathered.
        x, weight = codes(rows, columns + (16 if gated else 0))[:, :columns], codes(weights, columns)
        super().__init__(x, weight, routing, features, gated)
        self.kind, self.limit, self.height = kind, 1.2e-2 if gated else 6e-3, height
        self.x_scales, self.weight_scales = scale(rows) / 8, scale(divide_up(weights, height or 1)) / 8 * columns**-0.5
        spread = lambda scales: scales.repeat_interleave(GROUP, 1)[:, :columns] if height else scales  # noqa: E731
        self.wide_x = x.double() * spread(self.x_scales)
        self.wide_weight = weight.double() * spread(self.weight_scales.repeat_interleave(height or 1, 0)[:weights])
        self.renew()

    def small_m_kernel(self, places):
        gated, scales = "gated_" if self.gated else "", "blocks" if self.height else "rows"
        return "experts_small_m_e4m3", f"{gated}experts_small_m_e4m3_{scales}_{ENDINGS[self.kind]}_r{places}"

    def scales(self):
        return [self.weight_scales, self.x_scales, 0.0, self.x_scales.shape[1], self.height or 1]

    def ways(self):
        return {f"small_m {places}": functools.partial(self.small_m, places) for places in PLACES}


def product(rows, hidden, features, experts, top, skew, kind, gated, gap=0, share=None):
    return routed_product(Routing(drawn_logits(rows, experts, skew), top), hidden, features, kind, gated, gap, share)


def routed_product(routing, hidden, features, kind, gated, gap=0, share=None):
    routing.run()
    rows, experts, top = routing.rows, routing.experts, routing.top
    columns, out = (hidden, features) if gated else (features, hidden)
    count = rows if gated else rows * top
    x = torch.randn(count, columns + (gap if gated else 0), device="cuda", dtype=kind)[:, :columns]
    held = len(share or range(experts))
    weight = torch.randn(held * out * (2 if gated else 1), columns, device="cuda", dtype=kind) * columns**-0.5
    return Product(x, weight, routing, out, gated, share)


class Sum:
    """The sum of each row's products and the residual, and its norm: in one launch, or as two operations. `rounding` is how
    the norm is rounded to E4M3. None means that it is not rounded."""

    def __init__(self, rows, hidden, top, kind, gap=0, rounding=None, is_plain=True):
        self.rows, self.hidden, self.top, self.kind, self.rounding = rows, hidden, top, kind, rounding
        self.products = torch.randn(rows * top, hidden, device="cuda", dtype=kind)
        self.places = unsigned(torch.randperm(rows * top, device="cuda"))
        self.starts = unsigned([0, rows * top])
        self.before = torch.randn(rows, hidden, device="cuda", dtype=kind)
        self.weight = torch.randn(hidden, device="cuda", dtype=kind)
        self.gap, self.is_plain = gap, is_plain
        self.renew()

    def renew(self):
        """Makes new poisoned outputs, and restores the residual."""
        self.residual = Output((self.rows, self.hidden), self.kind, self.gap)
        self.residual.tensor.copy_(self.before)
        shape = self.rows, self.hidden
        self.out = QuantizedRows(*shape, self.rounding, self.kind if self.is_plain else None) if self.rounding else Output(shape, self.kind)

    def norm(self, operation, before, early, grid=None):
        """Launches the norm. The kernel's arguments begin with `before`, and the norm's operands
        follow."""
        if self.rounding:
            name = f"{operation}_rounded_{ENDINGS[self.kind]}"
            Kernel("quantize", name)(*row_shape(name, self.rows, self.hidden), *before, self.weight, EPSILON, 0.0, self.hidden, *self.out.arguments(), early=early)
            return
        shape, threads = norm_shape(self.rows, self.hidden)
        rows = [] if grid else [self.rows]
        Kernel("rms_norm", f"{operation}_{ENDINGS[self.kind]}")(grid or shape, threads, *before, self.weight, *rows, self.hidden, EPSILON, 0.0, self.out.tensor, early=early)

    def one(self, early=True):
        residual = self.residual.tensor
        before = self.products, self.places, self.top, residual, residual.stride(0)
        self.norm("add_experts_rms_norm", before, early, (self.rows,))

    def two(self, early=True):
        residual = self.residual.tensor
        Kernel("experts", f"add_experts_{ENDINGS[self.kind]}")(
            (self.rows,), (EXPERTS.ADD_THREADS,), self.products, self.places, self.top, self.starts, 1, 1, self.hidden,
            residual, residual.stride(0), early=early)  # fmt: skip
        self.norm("rms_norm", (residual, residual.stride(0)), early)

    def bits(self):
        out = self.out
        parts = [out.data, out.plain, None if self.rounding == "fixed" else out.scales] if self.rounding else [out]
        return [part.tensor.clone().view(torch.uint8) for part in [self.residual, *parts] if part]

    def error(self):
        """The error of the single launch against f64. Infinite if it gives other bits than the two separate operations."""
        self.one()
        torch.cuda.synchronize()
        places = self.places.long().view(self.rows, self.top)
        total = self.before.double() + self.products.double()[places].sum(1)
        # The norm is computed from the rounded sum.
        found = max(self.residual.error(total), self.out.error(normed(self.residual.tensor, self.weight)))
        bits = self.bits()
        self.renew()
        self.two()
        torch.cuda.synchronize()
        return found if all(map(torch.equal, bits, self.bits())) else float("inf")


class NormedRouting:
    """The operations from the residual stream to the experts: in one launch, or as a norm, the router's product and
    the routing."""

    def __init__(self, rows, hidden, experts, top, kind, gap=0, scaled=False):
        self.rows, self.hidden, self.experts, self.kind = rows, hidden, experts, kind
        self.x = torch.randn(rows, hidden + gap, device="cuda", dtype=kind)[:, :hidden]
        self.weight = torch.rand(hidden, device="cuda").add(0.5).to(kind)
        self.router = torch.randn(experts, hidden, device="cuda", dtype=kind) * hidden**-0.5
        self.logits = torch.zeros(rows, experts, device="cuda")
        self.routing, self.top = Routing(self.logits, top, scaled=scaled), top
        self.normed = Output((rows, hidden), kind)
        self.products = None

    def one(self, early=True):
        routing, x = self.routing, self.x
        shared = self.rows * (2 * self.hidden + NORMED.ROW_GAP_BYTES) + 2 * self.hidden + NORMED.SUM_BYTES
        kernel = Kernel("route_normed", f"route_normed_{ENDINGS[self.kind]}", ROUTE.SMALL_M_ROWS * (2 * NORMED.HIDDEN_MAX + NORMED.ROW_GAP_BYTES) + 2 * NORMED.HIDDEN_MAX + NORMED.SUM_BYTES)
        kernel((NORMED.CLUSTER,), (ROUTE.THREADS,), x, x.stride(0), self.weight, EPSILON, 0.0, self.hidden, self.router,
               self.normed.tensor, self.rows, self.experts, self.top, *routing.rule(), routing.weights.tensor, routing.places.tensor,
               routing.choices.tensor, routing.starts.tensor, routing.loads.tensor, routing.slots, shared_bytes=shared, early=early)  # fmt: skip

    def norm(self, early=True):
        x, shape = self.x, norm_shape(self.rows, self.hidden)
        Kernel("rms_norm", f"rms_norm_{ENDINGS[self.kind]}")(
            *shape, x, x.stride(0), self.weight, self.rows, self.hidden, EPSILON, 0.0, self.normed.tensor, early=early)

    def three(self):
        from products import Kernels  # `Kernels` allocates separate scratch memory

        NormedRouting.kernels = getattr(NormedRouting, "kernels", None) or Kernels()
        self.norm()
        NormedRouting.kernels.small_m(self.normed.tensor, self.router, self.logits)
        self.routing.run(early=True)

    def error(self):
        self.one()
        torch.cuda.synchronize()
        normed = self.normed.tensor.clone()
        guarded = self.normed.is_guarded()
        self.normed = Output((self.rows, self.hidden), self.kind)
        self.norm()
        torch.cuda.synchronize()
        if not guarded or not torch.equal(normed.view(torch.uint8), self.normed.tensor.view(torch.uint8)):
            return float("inf")
        self.routing.logits = normed.double() @ self.router.double().T
        return self.routing.error()


def check_normed_routing(table):
    sizes = [(1, 2048, 128, 8), (16, 2048, 128, 8), (16, 4096, 128, 8), (9, 4096, 64, 6), (3, 32, 5, 2), (7, 96, 60, 4), (15, 544, 16, 16), (2, 3584, 8, 1), (8, 1056, 127, 32)]  # fmt: skip
    for kind, (rows, hidden, experts, top), gap in itertools.product(LIMITS, sizes, [0, 8]):
        one = NormedRouting(rows, hidden, experts, top, kind, gap, scaled=gap > 0)
        case = Case(run=lambda: None, error=one.error, limit=1e-4, bytes=0)
        table.check("norm, router and routing", f"{rows} x {hidden}, {experts} experts, top {top}, gap {gap}, {kind}", case)


def measure_normed_routing(shape):
    """Times with the gated products that follow in a step, and without them."""
    hidden, features, experts, top, kind = shape
    for rows in [1, 4, 8, 16]:
        pairs = []
        for _ in range(4):
            head = NormedRouting(rows, hidden, experts, top, kind)
            gated = product(rows, hidden, features, experts, top, 0.0, kind, True)
            gated.routing, gated.x = head.routing, head.normed.tensor
            pairs.append((head, functools.partial(gated.small_m, PLACES[0], early=True)))
        times = {}
        for name in ("one", "three"):
            calls = [lambda head=head, gated=gated: (getattr(head, name)(), gated()) for head, gated in pairs]  # noqa: B023
            times[name] = microseconds(calls, replays=15)
            times[f"{name} alone"] = microseconds([getattr(head, name) for head, _ in pairs], replays=15)
        listed = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
        print(f"| norm, router, routing (and gate and up) | {rows} rows | {listed} |", flush=True)
        del pairs
        torch.cuda.empty_cache()


def check_sums(table):
    rows_and_tops = [(1, 8), (3, 1), (16, 2), (77, 10), (300, 32)]
    for kind, (rows, top), gap in itertools.product(LIMITS, rows_and_tops, [0, 8, 3]):
        for hidden in [2048, 64, 1030, 77, 9001, 8216]:
            one = Sum(rows, hidden, top, kind, gap)
            case = Case(run=lambda: None, error=one.error, limit=LIMITS[kind], bytes=0)
            table.check("the norm of a sum of experts", f"{rows} x {hidden} of {top}, gap {gap}, {kind}", case)
        for hidden, rounding, is_plain in itertools.product([2048, 136, 5000, 9000], KINDS, [True, False]):
            one = Sum(rows, hidden, top, kind, gap, rounding, is_plain)
            case = Case(run=lambda: None, error=one.error, limit=LIMITS[kind], bytes=0)
            table.check("the rounded norm of a sum of experts", f"{rows} x {hidden} of {top}, gap {gap}, {rounding}, {kind}", case)


def measure_sums(shape):
    """Times of each sum after the down products that it adds up, as in a step."""
    hidden, features, experts, top, kind = shape
    for rows in [1, 16, 64, 256, 1024, 8192]:
        pairs = []
        for _ in range(3 if rows < 1024 else 1):
            down = product(rows, hidden, features, experts, top, 0.0, kind, False)
            tail = Sum(rows, hidden, top, kind)
            tail.products, tail.places = down.out.tensor, down.routing.places.tensor
            way = down.large_m if rows > 384 else functools.partial(down.small_m, PLACES[sum(rows * top > experts * most for most in (4, 10, 17))])
            pairs.append((functools.partial(way, early=True), tail))
        times = {}
        for name in ("one", "two"):
            calls = [lambda down=down, tail=tail: (down(), getattr(tail, name)()) for down, tail in pairs]  # noqa: B023
            times[name] = microseconds(calls, replays=15)
        listed = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
        print(f"| down, sum and norm | {rows} rows | {listed} |", flush=True)
        del pairs
        torch.cuda.empty_cache()


def check(table):
    check_sums(table)
    check_normed_routing(table)
    endless = float("inf")
    for rows, experts, top in [(1, 8, 2), (7, 60, 4), (16, 512, 32), (17, 129, 8), (64, 128, 8), (250, 128, 8), (300, 512, 10), (1000, 5, 5), (4100, 128, 8)]:
        for skew, renormalized, scaled in itertools.product([0.0, 1.2, endless], [True, False], [True, False]):
            case = route(rows, experts, top, skew, renormalized, scaled)
            table.check("route", f"{rows} rows, {experts} experts, top {top}, skew {skew}, scaled {scaled}", case)
    shapes = [(128, 64, 8, 2), (200, 72, 60, 4), (136, 264, 5, 3), (2048, 768, 16, 8), (77, 34, 7, 2)]
    for kind, (hidden, features, experts, top), gated in itertools.product(LIMITS, shapes, [True, False]):
        rows_and_skews = [(1, 0.0), (9, 1.2), (33, 0.0), (70, endless), (300, 0.5), (700, 1.2)]
        shares = [range(experts), range(experts // 3), range(experts // 3, experts)]
        for (rows, skew), share in itertools.product(rows_and_skews, shares):
            one = product(rows, hidden, features, experts, top, skew, kind, gated, gap=8, share=share)
            # Each number of rows is computed with both activations.
            one.activation = GATE.GELU_TANH if share.start else GATE.SILU
            wanted = one.expected()
            for way, run in one.ways().items():
                one.out = Output((one.choices, one.features), kind)
                run()
                torch.cuda.synchronize()
                found = one.error(wanted)
                # With few numbers, a single number may dominate the error, and rounding moves it by up to 1/256 in
                # bf16.
                limit = LIMITS[kind] * (1.4 if wanted.numel() < 128 else 1)
                case = Case(run=lambda: None, error=lambda: found, limit=limit, bytes=0)  # noqa: B023
                table.check(f"{'gated ' if gated else ''}experts, {way}", f"{rows} x {hidden}, {features}, {experts} experts of which {share}, top {top}, skew {skew}, {kind}", case)
    small_m_grids(table)
    tile_edges(table)


# Rows per expert at the edges of tiles of 8, 16, 24 and 32.
EDGES = [7, 8, 9, 24, 25, 32, 33, 0, 1, 15, 16, 17, 23, 31, 48, 49, 64, 65]


def tile_edges(table):
    """Experts with one tile and with several tiles next to each other, in blocks that have few, many or no items. A
    product must have the same bits whichever block computes it."""
    draw = random.Random(torch.initial_seed())
    counts = {
        "edges": EDGES[:8],
        "edges of 60": draw.choices(EDGES, k=60),
        "edges of 128, most of them empty": draw.choices([*EDGES, *[0] * 60], k=128),
        "one of 60 has all": [300 if expert == 37 else 0 for expert in range(60)],
        "the last of 256 has all": [0] * 255 + [97],
        "one each of 256": [1] * 256,
        "all of 8 have several": [70, 40, 33, 100, 65, 34, 50, 41],
        "Zipf's law": [round(256 / (1 + expert)) for expert in range(128)],
    }
    for (name, of), (hidden, features), gated in itertools.product(counts.items(), [(264, 136), (328, 104), (64, 1000)], [True, False]):
        for kind in LIMITS:
            one = routed_product(Routing(counted_logits(of), 1, renormalized=False), hidden, features, kind, gated, gap=8)
            compare_ways(table, one, name, [None, 1, 5, 131, 1000])
    for (name, of), gated, height, kind in itertools.product(counts.items(), [True, False], [128, 32, None], LIMITS):
        for columns, features in [(272, 144), (64, 520)]:
            one = QuantizedProduct(Routing(counted_logits(of), 1, renormalized=False), columns, features, kind, gated, height)
            one.activation = GATE.GELU_TANH if columns == 64 else GATE.SILU
            compare_ways(table, one, f"E4M3, blocks of {height}, {name}", [None, 5, 131])
    for gated in [True, False]:
        one = routed_product(Routing(drawn_logits(256, 128, 1.0), 8), 2048, 768, torch.bfloat16, gated)
        compare_ways(table, one, "Zipf's law, a layer of 30B-A3B", [None, 131])


def compare_ways(table, one, name, grids):
    wanted = one.expected()
    for way, run in one.ways().items():
        bits = None
        for grid in grids if way.startswith("small_m") else grids[:1]:
            one.renew()
            run(grid=grid) if grid else run()
            torch.cuda.synchronize()
            found = one.error(wanted)
            if bits is not None and not torch.equal(bits, one.out.tensor.view(torch.int16)):
                found = float("inf")
            bits = one.out.tensor.view(torch.int16)
            case = Case(run=lambda: None, error=lambda: found, limit=one.limit, bytes=0)  # noqa: B023
            work = f"{name}: {one.choices} places, {one.columns} columns, {one.features} features, grid {grid}, {one.kind}"
            table.check(f"{'gated ' if one.gated else ''}experts, {way}, edges of tiles", work, case)


def small_m_grids(table):
    """Blocks whose ranges begin and end within a tile, and clusters that have several items."""
    for gated, grid in itertools.product([True, False], [2, 6, 14]):
        one = product(90, 264, 520, 6, 2, 0.5, torch.bfloat16, gated)
        wanted = one.expected()
        for way, run in one.ways().items():
            if way == "mma":
                continue
            one.out = Output((one.choices, one.features), torch.bfloat16)
            run(grid=grid)
            torch.cuda.synchronize()
            found = one.error(wanted)
            case = Case(run=lambda: None, error=lambda: found, limit=LIMITS[torch.bfloat16], bytes=0)  # noqa: B023
            table.check(f"{'gated ' if gated else ''}experts, {way}", f"grid {grid}", case)


def measure(table):
    """A layer of Qwen3-30B-A3B: 128 experts, 8 per token."""
    shape = hidden, features, experts, top, kind = 2048, 768, 128, 8, torch.bfloat16
    measure_sums(shape)
    measure_normed_routing(shape)
    for rows, skew in [*((rows, 0.0) for rows in (1, 16, 64, 256, 384, 512, 1024, 2048, 8192)), *((rows, 1.0) for rows in (16, 64, 256, 8192))]:
        one = route(rows, experts, top, skew)
        time = microseconds([one.run] * 8)
        print(f"| route | {rows} rows, skew {skew} | {time:.1f} |", flush=True)
        for gated in [True, False]:
            # Weights of three layers: 800 MB for the gate and up rows of each, which exceeds any L2 cache.
            sets = [product(rows, hidden, features, experts, top, skew, kind, gated) for _ in range(3)]
            read = sum(int((s.routing.expected()[3] > 0).sum()) for s in sets) / len(sets) * features * hidden * 2 * (2 if gated else 1)
            work = 2 * rows * top * features * hidden * (2 if gated else 1)
            ways = {}
            for way in sets[0].ways():
                if (way == "mma" and rows > 1024) or (way == "small_m 8" and rows > 256) or (way == "small_m 16" and rows > 1024):
                    continue
                ways[way] = microseconds([s.ways()[way] for s in sets], replays=7, least=3)
            listed = "; ".join(f"{way} {time:.1f}" for way, time in ways.items())
            best = min(ways.values())
            print(f"| {'gated ' if gated else ''}experts | {rows} rows, skew {skew} | {listed} | {read / best / 1e6:.2f} TB/s, {work / best / 1e6:.0f} TFLOP/s |", flush=True)
            del sets
            torch.cuda.empty_cache()
