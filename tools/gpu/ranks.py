#!/usr/bin/env python3
"""Checks `all_reduce.cu` on all GPUs of a machine, and times it next to NCCL.

    tools/gpu/ranks.py [--check] [--without-nccl] [--ranks N]

One process launches on every GPU and maps each GPU's memory on the other GPUs. If there are more ranks than GPUs, ranks
share GPUs, each with a separate stream. This setup checks everything except the links. Sums must equal torch's f32 sums
in rank order bit by bit. A time is the mean of many exchanges in a graph on each GPU, and the median of ten replays.
"""

import argparse
import ctypes
import os
import statistics
import sys
import time

os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # loading a kernel may wait for a running kernel that waits for the new one
os.environ.update(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo")

import torch

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, driver, expect_success, processors
from operations.e4m3 import KINDS, QuantizedRows

NUMBERS = contract("all_reduce")
RANKS_MAX, THREADS, CONTROL_BYTES = NUMBERS.RANKS_MAX, NUMBERS.THREADS, NUMBERS.DATA_AT
EPSILON = 1e-6
HALF_BYTES = 128 << 20
PATIENCE = 2_000_000_000
NORM = "all_reduce_rms_norm"
READ, PUSHED, PIECES, SHARES = NORMS = (NORM, f"{NORM}_pushed", f"{NORM}_pieces", f"{NORM}_shares")
TWO_SHOTS, SUM_OF_PIECES = "all_reduce_two_shot_", "all_reduce_pieces_"
GATHERED, SUMMED = {16: "all_gather", 2: "all_gather_odd"}, {16: "all_reduce_", 2: "all_reduce_odd_"}


class Exchange(ctypes.Structure):
    _fields_ = [("control", ctypes.c_void_p * RANKS_MAX), ("data", ctypes.c_void_p * RANKS_MAX), ("half", ctypes.c_uint64),
                ("patience", ctypes.c_uint64), ("rank", ctypes.c_uint32), ("ranks", ctypes.c_uint32),
                ("apart", ctypes.c_uint32)]  # fmt: skip


class Place(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("columns", ctypes.c_uint32), ("pitch", ctypes.c_uint32)]

    def __init__(self, tensor, unit):
        size = tensor.element_size()
        super().__init__(tensor.data_ptr(), tensor.shape[1] * size // unit, tensor.stride(0) * size // unit)


class Group:
    """All GPUs, with exchange memory on each."""

    def __init__(self, streams, patience=PATIENCE):
        self.ranks, self.streams = len(streams), streams
        self.devices = [stream.device for stream in streams]
        # All blocks of all ranks of a GPU run at the same time, one on each SM.
        self.blocks = min(NUMBERS.BLOCKS_MAX, processors() * len(set(self.devices)) // self.ranks)
        zeros = lambda device: torch.zeros(CONTROL_BYTES + 2 * HALF_BYTES, dtype=torch.uint8, device=device)  # noqa: E731
        self.memory = [zeros(device) for device in self.devices]
        pad = lambda addresses: (ctypes.c_void_p * RANKS_MAX)(*addresses)  # noqa: E731
        control = pad([memory.data_ptr() for memory in self.memory])
        data = pad([memory.data_ptr() + CONTROL_BYTES for memory in self.memory])
        apart = int(len(set(self.devices)) == self.ranks)
        self.exchanges = [Exchange(control, data, HALF_BYTES, patience, rank, self.ranks, apart) for rank in range(self.ranks)]

    def on(self, rank, make):
        """Calls `make` in the rank's stream."""
        with torch.cuda.stream(self.streams[rank]):
            return make()

    def each(self, make):
        """Calls `make` for each rank in its stream."""
        return [self.on(rank, lambda: make(rank)) for rank in range(self.ranks)]

    def failed(self):
        return [int(memory[:CONTROL_BYTES].view(torch.int32)[NUMBERS.FAILED_AT // 4]) for memory in self.memory]

    def launch(self, name, rank, part, out, *more, blocks=None, early=True):
        """Launches on one rank. `part` and `out` belong to that rank."""
        sizes = (part.data_ptr(), out.data_ptr(), *(tensor.stride(0) * tensor.element_size() for tensor in (part, out)),
                 part.shape[1] * part.element_size())  # fmt: skip
        unit = NUMBERS.UNIT if all(size % NUMBERS.UNIT == 0 for size in sizes) else NUMBERS.ODD_UNIT
        name = name[unit] if isinstance(name, dict) else name
        name += ENDINGS[part.dtype] if name.endswith("_") else ""
        units = part.numel() * part.element_size() // unit
        blocks = blocks or min(-(-units // THREADS), self.blocks)
        with torch.cuda.stream(self.streams[rank]):
            Kernel("all_reduce", name)((blocks,), (THREADS,), self.exchanges[rank], Place(part, unit), Place(out, unit),
                                       ctypes.c_uint64(units), *more, early=early)  # fmt: skip

    def launch_norm(self, name, rank, part, residual, weight, out, early=True):
        """Launches a sum with the norm, for whole units only. `out` is a tensor of activations or a `QuantizedRows`."""
        unit, (rows, columns) = NUMBERS.UNIT, part.shape
        threads = -(-columns * part.element_size() // unit // 32) * 32
        has_four = threads <= NUMBERS.NORM_THREADS_MAX // 2 and rows > 2 * self.blocks  # as in `collectives.rs`
        form = {PUSHED: "_2" if self.ranks <= 2 else "_8", PIECES: "_4" if has_four else "_2",
                SHARES: "_4" if self.ranks <= 4 else "_8"}  # fmt: skip
        rounded, target = ("_rounded", out.arguments()) if isinstance(out, QuantizedRows) else ("", (out,))
        name = f"{name}{form.get(name, '')}{rounded}_{ENDINGS[part.dtype]}"
        with torch.cuda.stream(self.streams[rank]):
            Kernel("all_reduce", name)((min(rows, self.blocks),), (threads,), self.exchanges[rank], Place(part, unit),
                                       Place(residual, unit), weight, ctypes.c_float(EPSILON), ctypes.c_float(0.0), *target, rows, early=early)  # fmt: skip

    def wait(self):
        for device in set(self.devices):
            torch.cuda.synchronize(device)


def map_on_all(count):
    """Lets each GPU access the memory of the other GPUs."""
    contexts = [ctypes.c_void_p() for _ in range(count)]
    for device, context in enumerate(contexts):
        torch.empty(1, device=f"cuda:{device}")
        expect_success(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "a context")
    for device, context in enumerate(contexts):
        with torch.cuda.device(device):
            for other in contexts:
                if other.value != context.value:
                    code = driver().cuCtxEnablePeerAccess(other, 0)
                    expect_success(0 if code == 704 else code, "access to a peer")  # access may be enabled already


def wide(rows, columns, gap, kind, seed):
    """Random values [rows, columns] on torch's current device: a view of rows that are `gap` columns longer."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, columns + gap, device="cuda", generator=generator).to(kind)[:, :columns]


def wrong(group, outs, wanted):
    """The number of wrong elements over all ranks. -1 if memory next to an output was written."""
    group.wait()
    found = sum(int((out.tensor.to(wanted.device) != wanted).sum()) for out in outs)
    return found if all(out.is_guarded() for out in outs) else -1


def sums(group, rows, columns, kind, gap, accumulate, seed, name=SUMMED):
    """The number of elements, over all ranks, that differ from the sum in rank order."""
    parts = group.each(lambda rank: wide(rows, columns, gap, kind, seed + rank))
    outs = group.each(lambda _: Output((rows, columns), kind, gap))
    group.wait()
    before = wide(rows, columns, 0, kind, seed + 99)
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.to(wanted.device).float()
    if accumulate:
        wanted = before.float() + wanted
        for out in outs:
            out.tensor.copy_(before)
    group.wait()
    for rank in range(group.ranks):
        group.launch(name, rank, parts[rank], outs[rank].tensor, int(accumulate))
    return wrong(group, outs, wanted.to(kind))


def rounds(group, name):
    """Whether the form `name` can also produce rounded rows."""
    return name != SHARES or group.ranks <= 4


def norms(group, rows, columns, kind, gap, seed, name):
    """The number of elements that are wrong or differ between ranks. The residual is compared with the sum in rank
    order, and the norm with f64 within one rounding. Then both are checked with the norm rounded to E4M3."""
    parts = group.each(lambda rank: wide(rows, columns, gap, kind, seed + rank))
    weights = group.each(lambda _: wide(1, columns, 0, kind, seed + 98)[0].contiguous())
    residuals = group.each(lambda _: Output((rows, columns), kind, gap))
    outs = group.each(lambda _: Output((rows, columns), kind, 0))
    group.wait()
    before = wide(rows, columns, 0, kind, seed + 99)
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.to(wanted.device).float()
    wanted = (before.float() + wanted).to(kind)
    for residual in residuals:
        residual.tensor.copy_(before)
    group.wait()
    for rank in range(group.ranks):
        group.launch_norm(name, rank, parts[rank], residuals[rank].tensor, weights[rank], outs[rank].tensor)
    found = wrong(group, residuals, wanted)
    exact = wanted.double()
    exact = exact * torch.rsqrt((exact * exact).mean(1, keepdim=True) + EPSILON) * weights[0].double()
    bound = exact.abs() * (2**-8 if kind is torch.bfloat16 else 2**-10) + 1e-5
    for out in outs:
        there = out.tensor.to(exact.device)
        found += int(((there.double() - exact).abs() > bound).sum()) + int((there != outs[0].tensor.to(exact.device)).sum())
        found += 0 if out.is_guarded() else 1 << 20
    for turn, how in enumerate(KINDS) if rounds(group, name) else ():
        for residual in residuals:
            residual.tensor.copy_(before)
        rounded = group.each(lambda _: QuantizedRows(rows, columns, how, kind if turn % 2 else None))
        group.wait()
        for rank in range(group.ranks):
            group.launch_norm(name, rank, parts[rank], residuals[rank].tensor, weights[rank], rounded[rank])
        found += wrong(group, residuals, wanted)
        for rank, one in enumerate(rounded):
            is_right = group.on(rank, lambda: one.error(exact.to(one.data.tensor.device)) <= 2 * LIMITS[kind])
            outs_of = lambda one: [out.tensor.to(exact.device) for out in (one.data, one.scales, one.plain) if out]  # noqa: E731
            same = all(map(torch.equal, outs_of(one), outs_of(rounded[0])))
            found += 0 if is_right and same else 1 << 20
    return found


def gathered(group, rows, columns, kind, gap, seed):
    parts = group.each(lambda rank: wide(rows, columns, gap, kind, seed + rank))
    outs = group.each(lambda _: Output((rows, columns * group.ranks), kind, gap))
    group.wait()
    wanted = torch.cat([part.to("cuda:0") for part in parts], 1)
    group.wait()
    for rank in range(group.ranks):
        group.launch(GATHERED, rank, parts[rank], outs[rank].tensor)
    return wrong(group, outs, wanted)


def best_launch(group, rank, own, first, out):
    """The argmax of each row over all ranks. `own` are this rank's columns, from column `first` on. `out` gets the argmax."""
    rows = own.shape[0]
    blocks = min(-(-rows // THREADS), group.blocks)
    with torch.cuda.stream(group.streams[rank]):
        Kernel("all_reduce", "best_of_ranks")((blocks,), (THREADS,), group.exchanges[rank], own, own.stride(0), first, out, rows,
                                              early=True)  # fmt: skip


def first_largest(x):
    """The argmax of each row as in `argmax.cu`: the first of equal values, or -1 (i32, no choice) if the row has no number."""
    largest = x.nan_to_num(nan=-float("inf"), posinf=float("inf"), neginf=-float("inf")).amax(1, keepdim=True)
    places = torch.arange(x.shape[1], device=x.device).expand_as(x)
    found = torch.where(x == largest, places, x.shape[1]).amin(1)
    return torch.where(found == x.shape[1], -1, found).to(torch.int32)


def best(group, rows, columns, gap, seed):
    """The number of rows whose argmax over all ranks is wrong. There are few distinct values, so the largest occurs repeatedly."""
    def part(rank):
        x = wide(rows, columns, gap, torch.float32, seed + rank).mul_(2).round_()
        if rows > 1:
            x[rows // 2] = float("nan")
            x[rows // 3, columns * rank // group.ranks :] = float("nan")
        return x

    parts = group.each(part)
    outs = group.each(lambda rank: Output((rows, 1), torch.int32))
    for rank, out in enumerate(outs):
        group.on(rank, lambda: out.tensor.copy_(first_largest(parts[rank])[:, None]))
    group.wait()
    wanted = first_largest(torch.cat([part.to("cuda:0") for part in parts], 1))[:, None]
    group.wait()
    for rank in range(group.ranks):
        best_launch(group, rank, parts[rank], rank * columns, outs[rank].tensor)
    return wrong(group, outs, wanted)


def check(group):
    failures, checks = [], 0

    def expect(what, wrong):
        nonlocal checks
        checks += 1
        if wrong != 0 or any(group.failed()):
            failures.append(f"{what}: {wrong} wrong, failed {group.failed()}")

    seed = 0
    odd = [(rows, columns, 8 * (rows % 2)) for columns in (64, 1000, 3584, 8192) for rows in (1, 3, 255, 257)]
    for kind in (torch.bfloat16, torch.float16):
        for rows, columns, gap in (*odd, (3, 37, 0), (5, 61, 3), (64, 3584, 0), (131, 8192, 8), (7, 24, 8), (2048, 8192, 0),
                                   (1021, 3584, 16)):  # fmt: skip
            size, is_whole = f"{rows} x {columns} + {gap} {kind}", columns % 8 == 0
            for accumulate in (False, True):
                seed += 10
                for name in sums_of(group) if is_whole else (SUMMED,):
                    found = sums(group, rows, columns, kind, gap, accumulate, seed, name)
                    expect(f"{'one shot' if name is SUMMED else name} {size}", found)
            for norm in norms_of(group, rows, columns) if is_whole else ():
                expect(f"{norm} {size}", norms(group, rows, columns, kind, gap, seed, norm))
    for kind, rows, columns, gap in ((torch.float32, 1, 76_032, 0), (torch.float32, 64, 76_032, 64), (torch.bfloat16, 5, 61, 3),
                                     (torch.float32, 3, 37, 1)):  # fmt: skip
        seed += 10
        expect(f"gather {rows} x {columns} {kind}", gathered(group, rows, columns, kind, gap, seed))
    for rows, columns, gap in ((1, 76_032, 0), (3, 37, 1), (257, 1000, 0), (700, 64, 3)):
        seed += 10
        expect(f"best of {rows} x {columns}", best(group, rows, columns, gap, seed))
    expect("a chain", chain(group))
    expect("a chain of norms", chain_of_norms(group))
    some_milliseconds_late(group, expect)
    absent(group.streams, failures)
    return checks + 1, failures


def sums_of(group):
    """The forms of a sum that work on whole units."""
    return (SUMMED, TWO_SHOTS) + ((SUM_OF_PIECES,) if group.ranks == 2 else ())


def norms_of(group, rows, columns):
    """The forms of a sum with the norm that support `rows` x `columns` activations."""
    return (READ,) + ((PUSHED,) if is_pushed(rows, columns) else ()) + ((PIECES,) if group.ranks == 2 else (SHARES,))


def is_pushed(rows, columns):
    """Whether `rows` x `columns` activations can be pushed at once."""
    return rows * columns * 2 <= NUMBERS.PUSHED_UNITS * NUMBERS.UNIT


def chain_of_norms(group):
    """Like `chain`, with the forms of the sum with the norm instead of the plain sum. Each exchange reads the output of the previous exchange."""
    columns, sizes = 3584, [1, 18, 3, 257, 64, 2, 16, 900, 19, 300]
    rows = max(sizes)
    residuals = group.each(lambda _: torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda"))
    weights = group.each(lambda _: wide(1, columns, 0, torch.bfloat16, 3)[0].contiguous())
    starts = group.each(lambda rank: wide(rows, columns, 0, torch.bfloat16, 5 + rank))
    outs = group.each(lambda rank: starts[rank].clone())
    group.wait()

    def round_on(rank):
        for step, count in enumerate(sizes):
            forms = norms_of(group, count, columns)
            group.launch_norm(forms[step % len(forms)], rank, outs[rank][:count], residuals[rank][:count], weights[rank], outs[rank][:count])

    group.each(round_on)
    group.wait()
    graphs = group.each(lambda rank: captured(group, rank, lambda: round_on(rank)))
    runs = []
    for _ in range(2):
        for residual, out, start in zip(residuals, outs, starts):
            residual.zero_()
            out.copy_(start)
        group.wait()
        for _ in range(70):
            group.each(lambda rank: graphs[rank].replay())
        group.wait()
        runs.append([torch.cat([residual, out]).to("cuda:0") for residual, out in zip(residuals, outs)])
    same_residuals = [run[:rows] for run in runs[0]]
    wrong_bits = sum(int((run != runs[0][rank]).sum()) for run in runs[1:] for rank, run in enumerate(run))
    return wrong_bits + sum(int((residual != same_residuals[0]).sum()) for residual in same_residuals)


def chain(group):
    """Seven exchanges of changing sizes one after the other, each adding to the previous output, in a graph that is
    replayed 70 times. Runs this twice from the start. Returns the number of elements that differ between ranks or runs."""
    rows, columns = 300, 3584
    sizes = [1, 300, 3, 17, 64, 257, 33]
    outs = group.each(lambda _: torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda"))
    parts = group.each(lambda rank: wide(rows, columns, 0, torch.bfloat16, 5 + rank) * 0.01)
    group.wait()

    def round_on(rank):
        for step, count in enumerate(sizes):
            forms = sums_of(group)
            group.launch(forms[step % len(forms)], rank, parts[rank][:count], outs[rank][:count], 1)

    group.each(round_on)
    group.wait()
    graphs = group.each(lambda rank: captured(group, rank, lambda: round_on(rank)))
    runs = []
    for _ in range(2):
        for out in outs:
            out.zero_()
        group.wait()
        for _ in range(70):
            group.each(lambda rank: graphs[rank].replay())
        group.wait()
        runs.append([out.to("cuda:0") for out in outs])
    return sum(int((out != runs[0][0]).sum()) for run in runs for out in run) + int(float(runs[0][0].abs().max()) == 0)


def captured(group, rank, work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.streams[rank]):
        work()
    return graph


def some_milliseconds_late(group, expect):
    """The last rank starts milliseconds after the other ranks, many times in a row. All ranks must wait for it."""
    shape = (300, 3584)
    parts = group.each(lambda rank: wide(*shape, 0, torch.bfloat16, 70 + rank))
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.to(wanted.device).float()
    for name in sums_of(group):
        outs = group.each(lambda _: Output(shape, torch.bfloat16, 0))
        group.wait()
        for rank in range(group.ranks):
            time.sleep(0.005 * (rank == group.ranks - 1))
            for _ in range(20):
                group.launch(name, rank, parts[rank], outs[rank].tensor, 0)
        expect(f"late ranks, {name}", wrong(group, outs, wanted.to(torch.bfloat16)))


def absent(streams, failures):
    """If a rank does not take part, the other ranks stop waiting after a time limit, and all of them report that
    rank."""
    for name in (SUMMED, SUM_OF_PIECES) if len(streams) == 2 else (SUMMED,):
        group = Group(streams, patience=50_000_000)
        parts = group.each(lambda rank: wide(300, 3584, 0, torch.bfloat16, rank))
        outs = group.each(lambda rank: parts[rank].clone())
        group.wait()
        began = time.monotonic()
        for rank in range(group.ranks - 1):
            group.launch(name, rank, parts[rank], outs[rank], 0)
        group.wait()
        took = time.monotonic() - began
        group.launch(name, group.ranks - 1, parts[-1], outs[-1], 0)
        group.wait()
        if group.failed() != [group.ranks] * group.ranks or not 0.05 <= took < 0.5:
            failures.append(f"an absent rank, {name}: {group.failed()} after {took:.3f} s")


def timed(group, name, rows, columns, blocks=None, calls=40, kind=torch.bfloat16):
    """Microseconds of one exchange."""
    parts = group.each(lambda _: wide(rows, columns, 0, kind, 1))
    more = () if name is GATHERED else (1,)
    wide_out = columns * (group.ranks if name is GATHERED else 1)
    outs = group.each(lambda _: torch.zeros(rows, wide_out, dtype=kind, device="cuda"))
    group.wait()

    def work(rank):
        for _ in range(calls):
            group.launch(name, rank, parts[rank], outs[rank], *more, blocks=blocks)

    return replayed(group, work, calls)


def replayed(group, work, calls):
    """Microseconds per call, where `work` launches `calls` calls on a rank in a graph."""
    group.each(work)
    group.wait()
    graphs = group.each(lambda rank: captured(group, rank, lambda: work(rank)))
    times = []
    for _ in range(12):
        events = group.each(lambda rank: between(graphs[rank].replay))
        group.wait()
        # A rank that was launched earlier waits for the other ranks. The last rank does not wait, so the minimum
        # counts.
        times.append(min(start.elapsed_time(end) for start, end in events) * 1000 / calls)
    return statistics.median(times[2:])


def timed_norm(group, name, rows, columns, how=None, calls=40, kind=torch.bfloat16):
    """Microseconds of one exchange with the norm. `how` is the kind of rounding to E4M3, or
    None."""
    parts = group.each(lambda _: wide(rows, columns, 0, kind, 1))
    weights = group.each(lambda _: wide(1, columns, 0, kind, 3)[0].contiguous())
    residuals = group.each(lambda _: torch.zeros(rows, columns, dtype=kind, device="cuda"))
    plain = lambda: torch.zeros(rows, columns, dtype=kind, device="cuda")  # noqa: E731
    outs = group.each(lambda _: QuantizedRows(rows, columns, how) if how else plain())
    group.wait()

    def work(rank):
        for _ in range(calls):
            group.launch_norm(name, rank, parts[rank], residuals[rank], weights[rank], outs[rank])

    return replayed(group, work, calls)


def between(work):
    """The events before and after `work`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    return start, end


SIZES = [(1, 3584), (1, 8192), (16, 3584), (64, 3584), (64, 8192), (256, 3584), (256, 8192), (2048, 3584), (8192, 3584)]


def nccl(rank, ranks, times):
    import torch.distributed as distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device(f"cuda:{rank}"))
    for at, (rows, columns) in enumerate(SIZES):
        x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
        distributed.all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(40):
                distributed.all_reduce(x)
        found = []
        for _ in range(12):
            start, end = between(graph.replay)
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) * 1000 / 40)
        if rank == 0:
            times[at] = statistics.median(found[2:])
    distributed.destroy_process_group()


def nccl_times(ranks):
    """NCCL's times, from separate processes. Zeros if the processes do not end."""
    import torch.multiprocessing as processes

    times = processes.get_context("spawn").Array("d", len(SIZES))
    context = processes.spawn(nccl, (ranks, times), nprocs=ranks, join=False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not context.join(timeout=1):
        pass
    for process in context.processes:
        process.kill()
    return times


def measure(group, nccl_too):
    normed = [[timed_norm(group, name, *size) if name in norms_of(group, *size) else 0.0 for name in NORMS] for size in SIZES]
    sums_named = (SUMMED, TWO_SHOTS, SUM_OF_PIECES)
    ours = [[timed(group, name, *size) if name in sums_of(group) else 0.0 for name in sums_named] for size in SIZES]
    nccl = nccl_times(group.ranks) if len(set(group.devices)) == group.ranks and nccl_too else [0.0] * len(SIZES)
    print("| sum of | with the norm, read | pushed | in pieces | in shares | adding, one shot | two shots | in pieces | NCCL, not adding |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (rows, columns), with_norm, adding, nccl_time in zip(SIZES, normed, ours, nccl):
        size = f"{rows} x {columns}, {rows * columns * 2 / 1024:.0f} KiB"
        print(f"| {size} | " + " | ".join(f"{found:.1f}" for found in (*with_norm, *adding, nccl_time)) + " |", flush=True)
    print("\n| with the norm, the fastest form | plain | rounded by rows | by groups |\n|---|---|---|---|")
    for size in SIZES:
        fastest = [min(timed_norm(group, name, *size, how) for name in norms_of(group, *size) if not how or rounds(group, name)) for how in (None, "rows", "groups")]
        print(f"| {size[0]} x {size[1]} | " + " | ".join(f"{found:.1f}" for found in fastest) + " |", flush=True)
    print("\n| by blocks | " + " | ".join(map(str, BLOCKS)) + " |\n|---|" + "---|" * len(BLOCKS))
    for rows, columns in ((1, 3584), (64, 3584), (256, 8192), (8192, 3584)):
        for name in (SUMMED, SUM_OF_PIECES) if group.ranks == 2 else (SUMMED,):
            by_blocks = [timed(group, name, rows, columns, blocks) for blocks in BLOCKS if blocks <= group.blocks]
            print(f"| {rows} x {columns} | " + " | ".join(f"{found:.1f}" for found in by_blocks) + " |", flush=True)
    for rows in (1, 64, 256):
        found = timed(group, GATHERED, rows, 76_032, calls=20, kind=torch.float32)
        parts = group.each(lambda _: wide(rows, 76_032, 0, torch.float32, 1))
        outs = group.each(lambda rank: torch.zeros(rows, dtype=torch.int32, device="cuda"))
        group.wait()
        work = lambda rank: [best_launch(group, rank, parts[rank], rank * 76_032, outs[rank]) for _ in range(20)]  # noqa: E731
        print(f"of {rows} x 76,032 f32: gather {found:.1f}, best {replayed(group, work, 20):.1f} us")


BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="check and do not time")
    arguments.add_argument("--without-nccl", action="store_true", help="time only Bursar's collectives")
    arguments.add_argument("--ranks", type=int, help="default: one for each GPU")
    arguments = arguments.parse_args()
    driver()
    count = torch.cuda.device_count()
    ranks = arguments.ranks or count
    if ranks < 2:
        sys.exit("the measurement needs at least two ranks")
    map_on_all(count)
    group = Group([torch.cuda.Stream(f"cuda:{rank % count}") for rank in range(ranks)])
    checks, failures = check(group)
    print(f"{ranks} ranks on {count} x {torch.cuda.get_device_name()}: {checks} checks, {len(failures)} failed", *failures, sep="\n", flush=True)
    if not arguments.check and not failures:
        measure(group, not arguments.without_nccl)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
