"""Bursar's machine code on a GPU: loading and launching it, outputs that reveal unwritten elements, and times.

Kernels come from the archives in `kernels/cuda/compiled/`, so this needs a Hopper GPU, its driver and torch. The
scripts of this folder share this module, which prints nothing.
"""

import ctypes
import functools
import statistics
import tarfile
from pathlib import Path

import torch

COMPILED = Path(__file__).resolve().parents[2] / "kernels/cuda/compiled"
ENDINGS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}  # suffixes of kernel names
# Largest relative errors. One rounding to bf16 causes 1.7e-3, and one rounding to f16 causes
# 2.1e-4. Attention also rounds its weights.
LIMITS = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
L2_BYTES = 50 << 20

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_TENSOR_MAP_TYPES = {torch.float8_e4m3fn: 0, torch.int32: 2, torch.float16: 6, torch.bfloat16: 9}


@functools.cache
def driver():
    torch.cuda.init()
    torch.empty(1, device="cuda")  # creates torch's context, which the driver calls of this module use too
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def processors():
    return torch.cuda.get_device_properties(0).multi_processor_count


def expect_success(code, what):
    if code != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {code}, {text.value}")


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
                ("attribute_count", ctypes.c_uint)]  # fmt: skip


class TensorMap(ctypes.Structure):
    """A tensor map (TMA descriptor), passed by value."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class Sections(ctypes.Structure):
    """The number of rotary pairs of each axis, one axis after the other or interleaved. Passed by value."""

    _fields_ = [("pairs", ctypes.c_uint32 * 4), ("is_interleaved", ctypes.c_uint32)]

    def __init__(self, *pairs, is_interleaved=False):
        super().__init__((ctypes.c_uint32 * 4)(*pairs), int(is_interleaved))


def tensor_map(tensor, dimensions, strides, box, swizzle):
    """Makes a tensor map. `strides` has the strides, in bytes, of all dimensions except the first.
    `swizzle` is 1 for 32 bytes and 3 for 128."""
    aligned = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(aligned) + 63) // 64 * 64
    array = lambda kind, values: (kind * len(values))(*values)  # noqa: E731
    expect_success(driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), _TENSOR_MAP_TYPES[tensor.dtype], len(dimensions), ctypes.c_void_p(tensor.data_ptr()),
        array(ctypes.c_uint64, dimensions), array(ctypes.c_uint64, strides), array(ctypes.c_uint32, box),
        array(ctypes.c_uint32, [1] * len(dimensions)), 0, swizzle, 2, 0), "a tensor map")  # fmt: skip
    return TensorMap.from_buffer_copy(ctypes.string_at(at, 128))


def load_from(folder):
    """Makes kernels load from `folder`, which has archives, or files as `compile.py --unpack` writes them.

    Must be called before the first kernel is loaded."""
    global COMPILED
    COMPILED = folder


@functools.cache
def _code(name):
    """A compiled file, such as `rms_norm.sm_90a.cubin`, from the folder or from the archive of its target."""
    if (COMPILED / name).exists():
        return (COMPILED / name).read_bytes()
    with tarfile.open(COMPILED / f"{name.split('.')[1]}.tar.xz") as archive:
        return archive.extractfile(name).read()


@functools.cache
def _module(file, device):
    found = ctypes.c_void_p()
    name = file if file.endswith((".cubin", ".ptx")) else f"{file}.sm_90a.cubin"
    driver()
    # The driver expects a zero byte at the end of PTX.
    expect_success(driver().cuModuleLoadData(ctypes.byref(found), _code(name) + b"\0"), name)
    return found


def module(file):
    """The module on torch's current device. `file` is the name of a source, a .cubin, or a .ptx that the driver compiles."""
    return _module(file, torch.cuda.current_device())


def argument(value):
    """A kernel argument: a tensor is its address, None a null pointer, int a u32 and float an f32. ctypes values are unchanged."""
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    kinds = {type(None): ctypes.c_void_p, int: ctypes.c_uint32, float: ctypes.c_float}
    return kinds[type(value)](value) if type(value) in kinds else value


@functools.cache
class Kernel:
    """A kernel of the machine code: `Kernel("embed", "embed_bf16")(grid, block, *arguments)`. `shared_bytes` is the maximum of
    dynamic shared memory per block, and also the default of a launch."""

    def __init__(self, file, name, shared_bytes=0):
        self.file, self.name, self.shared_bytes, self.functions = file, name, shared_bytes, {}
        self.function()

    def function(self):
        """The function on torch's current device."""
        device = torch.cuda.current_device()
        if device not in self.functions:
            found = ctypes.c_void_p()
            expect_success(driver().cuModuleGetFunction(ctypes.byref(found), module(self.file), self.name.encode()), self.name)
            if self.shared_bytes > 48 << 10:
                expect_success(driver().cuFuncSetAttribute(found, _MAX_DYNAMIC_SHARED_SIZE_BYTES, self.shared_bytes), self.name)
            self.functions[device] = found
        return self.functions[device]

    @functools.cached_property
    def sizes(self):
        """The size in bytes of each parameter."""
        sizes, at, size = [], ctypes.c_size_t(), ctypes.c_size_t()
        while driver().cuFuncGetParamInfo(self.function(), ctypes.c_size_t(len(sizes)), ctypes.byref(at), ctypes.byref(size)) == 0:
            sizes.append(size.value)
        return sizes

    def __call__(self, grid, block, *arguments, shared_bytes=None, early=False):
        """Launches on torch's current stream. `grid` and `block` have up to three sizes. With `early` the kernel may start
        before the preceding kernel has ended."""
        shared_bytes = self.shared_bytes if shared_bytes is None else shared_bytes
        three = lambda sizes: (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))  # noqa: E731
        held = [argument(value) for value in arguments]
        sizes = [ctypes.sizeof(value) for value in held]
        if sizes != self.sizes:
            raise TypeError(f"{self.name} has parameters of {self.sizes} bytes, but the arguments have {sizes}")
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(value) for value in held])
        attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        launch = _Launch(three(grid), three(block), shared_bytes, torch.cuda.current_stream().cuda_stream,
                         ctypes.pointer(attribute), int(early))  # fmt: skip
        expect_success(driver().cuLaunchKernelEx(ctypes.byref(launch), self.function(), pointers, None), self.name)


def divide_up(count, size):
    return -(-count // size)


def unsigned(numbers):
    """Whole numbers below 2^32 as torch's i32 with the same bits."""
    numbers = torch.as_tensor(numbers, dtype=torch.int64, device="cuda")
    return torch.where(numbers < 1 << 31, numbers, numbers - (1 << 32)).to(torch.int32)


def error(found, wanted):
    """||found - wanted|| / ||wanted|| in f64. The result is never small if there is a NaN."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


class Output:
    """A tensor for a kernel to write, filled with bytes 0x7f: a huge number in bf16, f32 and u32, and NaN in f16. Around it,
    and in the `gap` after each row, are guard bytes that no kernel may write."""

    POISON, GUARD_BYTES = 0x7F, 1024

    def __init__(self, shape, kind, gap=0):
        pitch = shape[-1] + gap
        size = functools.reduce(int.__mul__, shape[:-1], 1) * pitch * kind.itemsize
        guard = self.GUARD_BYTES
        self.all = torch.full((2 * guard + divide_up(size, 16) * 16,), self.POISON, dtype=torch.uint8, device="cuda")
        rows = self.all[guard : guard + size].view(kind).view(*shape[:-1], pitch)
        self.tensor, self.gap = rows[..., : shape[-1]], rows[..., shape[-1] :]
        self.before, self.behind = self.all[:guard], self.all[guard + size :]

    @classmethod
    def is_untouched(cls, tensor):
        return bool((tensor.contiguous().view(-1).view(torch.uint8) == cls.POISON).all())

    def is_guarded(self):
        return all(self.is_untouched(tensor) for tensor in (self.before, self.behind, self.gap))

    def error(self, wanted, rows=slice(None), untouched=None):
        """The relative error of `rows` against the wanted values. Infinite if a guard or an
        `untouched` row was written."""
        if not self.is_guarded() or (untouched is not None and not self.is_untouched(self.tensor[untouched])):
            return float("inf")
        return error(self.tensor[rows], wanted)


def sets_beyond_l2(set_bytes):
    """The number of input sets such that no set is still in the L2 cache when it is used again, at most 256."""
    return min(max(divide_up(5 * L2_BYTES, set_bytes), 1), 256)


def microseconds(calls, replays=15, least=8):
    """Microseconds of one call, as the median of a graph's replays. The graph launches `calls` one
    after the other, and repeats them until there are at least `least` launches."""
    calls = calls * max(1, least // len(calls))
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])
