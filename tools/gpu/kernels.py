#!/usr/bin/env python3
"""Checks Bursar's kernels on a GPU against torch in f64, and times them: "Kernels" of `benches/h200.md`.

    tools/gpu/kernels.py [attention|decode|small|patchify|sampling|mixture|e4m3|int4|states ...] [--check]        # default: all

Needs a Hopper GPU and torch. It runs the committed machine code of `kernels/cuda/compiled/`. Each kernel is launched as the
Launch comment at the end of its source says, with sizes that no tile size divides and with the sizes of the timings, into
outputs whose every byte is poisoned. A time is the median of fifteen replays of a graph over sets of inputs that together
are five times as large as the L2 cache (at most 256 sets). Rates count the bytes that must be read and written once, or
the operations.
--check skips the timings, for example under compute-sanitizer (PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each tensor separate bounds).
"""

import argparse
import sys
import time

import torch

from device import driver
from operations import argmax, clusters, decode, e4m3, int4, mixture, packed, patchify, position_grid, prefill, sampling, small, states
from table import Table

PARTS = {"attention": [prefill, packed], "decode": [decode], "small": [small], "patchify": [patchify, position_grid],
         "sampling": [argmax, clusters, sampling], "mixture": [mixture], "e4m3": [e4m3], "int4": [int4], "states": [states]}  # fmt: skip


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments.add_argument("--check", action="store_true", help="check only, without timings")
    arguments.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="seed of the inputs (default: random)")
    arguments = arguments.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        sys.exit(f"unknown part {unknown[0]}; expected one of {', '.join(PARTS)}")
    driver()
    torch.manual_seed(arguments.seed)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {arguments.seed}\n")
    table = Table()
    table.open()
    for part in arguments.parts or PARTS:
        for operation in PARTS[part]:
            operation.check(table)
            if not arguments.check:
                operation.measure(table)
            torch.cuda.empty_cache()
    sys.exit(0 if table.close() else 1)


if __name__ == "__main__":
    main()
