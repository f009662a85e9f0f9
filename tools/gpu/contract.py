"""The constants that host and device share, read from `kernels/cuda/include/contract.cuh`, which is generated from Rust."""

import functools
import re
import types
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "kernels/cuda/include/contract.cuh"


def sizes(macro):
    """The sizes in a list of kernels: `sizes("FOR_EACH_SMALL_M_ROWS")`."""
    listed = HEADER.read_text().split(f"#define {macro}(")[1].split("\n\n")[0]
    return [int(size) for size in re.findall(r"KERNEL\(__VA_ARGS__, (\d+)\)", listed)]


@functools.cache
def contract(family):
    """The constants of a namespace: `contract("argmax").THREADS`, or by size `contract("attention_decode").RING_BYTES[128]`."""
    body = HEADER.read_text().split(f"\nnamespace {family} {{\n")[1].split("\n}")[0]
    number = lambda text: int(text.rstrip("u"), 0)  # noqa: E731
    numbers = {name: number(value) for name, value in re.findall(r"constexpr uint32_t (\w+) = (\w+);", body)}
    for name, cases in re.findall(r"constexpr uint32_t (\w+) =\n(.+);", body):
        numbers[name] = {int(size): number(value) for size, value in re.findall(r"== (\d+) \? (\w+)", cases)}
    return types.SimpleNamespace(**numbers)
