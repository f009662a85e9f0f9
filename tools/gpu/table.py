"""The table that `kernels.py` prints: the checks, their times, and the failures."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from device import microseconds, sets_beyond_l2


@dataclass
class Case:
    """One launch with separate inputs and outputs."""

    run: Callable[[], None]
    error: Callable[[], float]  # of the first run, against a reference
    limit: float
    bytes: int  # bytes that must be moved
    operations: int | None = None  # arithmetic operations, if they are the limit
    baselines: dict[str, Callable[[], None]] = field(default_factory=dict)  # other implementations of the same operation


class Table:
    def __init__(self):
        self.checked, self.failed, self.worst = 0, [], {}

    def open(self):
        print("| kernel | work | us | rate | other implementations | error |\n|---|---|---|---|---|---|", flush=True)

    def check(self, kernel, work, case):
        case.run()
        torch.cuda.synchronize()
        found = case.error()
        self.checked += 1
        self.worst[kernel, case.limit] = max(self.worst.get((kernel, case.limit), 0.0), found)
        if not found <= case.limit:  # also true for NaN
            self.failed.append(f"{kernel}, {work}: error {found:.1e}, at most {case.limit:.1e}")
        return found

    def row(self, kernel, work, make):
        """Checks the first case that `make` makes, and times this and further cases."""
        first = make()
        found = self.check(kernel, work, first)
        cases = [first] + [make() for _ in range(sets_beyond_l2(first.bytes) - 1)]
        rate = lambda time: (f"{first.operations / time / 1e6:.0f} TFLOP/s" if first.operations  # noqa: E731
                             else f"{first.bytes / time / 1e6:.2f} TB/s")  # fmt: skip
        time = microseconds([case.run for case in cases])
        others = []
        for name in first.baselines:
            other = microseconds([case.baselines[name] for case in cases])
            others.append(f"{name} {other:.1f} us, {rate(other)}")
        print(f"| {kernel} | {work} | {time:.1f} | {rate(time)} | {'; '.join(others)} | {found:.1e} |", flush=True)

    def close(self):
        """Prints the largest errors and the failures, and returns whether all checks passed."""
        worst = (f"{kernel} {found:.1e} of {limit:.0e}" for (kernel, limit), found in self.worst.items() if limit > 0)
        print("\nlargest errors and their limits, including odd sizes: " + ", ".join(worst))
        print(f"{self.checked} checks, {len(self.failed)} failed", *self.failed, sep="\n")
        return not self.failed
