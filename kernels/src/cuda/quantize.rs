//! Launches of the kernels that quantize activations, which are unchanged rows or the results of
//! norms and gates (`kernels/cuda/quantize.cu`, `quantize_large_m.cu`).

use bursar_budgets::Address;

use super::{
    arguments::{Arguments, Extent, arguments, count},
    contract::{
        HopperEntryPoints,
        quantize::{
            BY_GROUPS, BY_ROWS, FIXED, GATE_BLOCKS, LONG_HELD, LONG_THREADS_MAX, LONGER_THREADS_MAX, THREADS_MAX,
            VECTOR,
        },
    },
    functions::Function,
    lane::Cuda,
};
use crate::{
    Activations, KernelError, Quantization, QuantizedRows, Tensor,
    calls::{self, GateActivation},
};

/// Returns `true` if rows of `columns` columns can be quantized.
pub(super) fn serves(columns: usize) -> bool {
    columns > 0 && columns.is_multiple_of(VECTOR)
}

pub(super) fn quantize(cuda: &Cuda, call: calls::Quantize<'_>) -> Result<(), KernelError> {
    let (x, before) = (&call.x, input(&call.x));
    let kernels = cuda.entry_points();
    let (kernel, before) = match (large_m(cuda, x, x.columns()), long(cuda, x, &call.out), &kernels.hopper) {
        (Some((hopper, held)), ..) => {
            (Kernel::large_m(cuda, hopper.quantize_large_m, held, x), before.with(count(x.rows())))
        }
        (None, Some(threads), Some(hopper)) => (Kernel::long(hopper.quantize_long, x.rows(), threads), before),
        _ => (Kernel::row_each(kernels.quantize, x.rows(), x.columns()), before),
    };
    launch(cuda, "quantize", kernel, before, None, &call.out)
}

/// Computes the norm of rows and quantizes it. If `call.out.plain` is requested, the unquantized
/// norm is written too.
pub(super) fn rms_norm(cuda: &Cuda, call: &calls::RmsNorm<'_>, out: &QuantizedRows<'_>) -> Result<(), KernelError> {
    let (x, before) = (&call.x, input(&call.x).with(call.weight.address()).with(call.epsilon).with(call.weight_offset));
    let (kernel, before) = match large_m(cuda, x, x.columns()).filter(|_| starts_whole(&call.weight)) {
        Some((hopper, held)) => {
            (Kernel::large_m(cuda, hopper.rms_norm_rounded_large_m, held, x), before.with(count(x.rows())))
        }
        None => (Kernel::row_each(cuda.entry_points().rms_norm_rounded, x.rows(), x.columns()), before),
    };
    launch(cuda, "rms_norm", kernel, before, call.out.plain.as_ref(), out)
}

/// On Hopper, adds the results of a mixture of experts to rows, then computes the norm of these
/// rows and quantizes it. `before` are the kernel's arguments for the sum and the norm.
pub(super) fn add_experts_rms_norm(cuda: &Cuda, before: Arguments, out: &Activations<'_>) -> Result<(), KernelError> {
    const OP: &str = "add_experts_rms_norm";
    let quantized = out.quantized.as_ref().expect("the quantized output was requested");
    let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
    let kernel = Kernel::row_each(hopper.add_experts_rms_norm_rounded, quantized.data.rows(), quantized.data.columns());
    launch(cuda, OP, kernel, before, out.plain.as_ref(), quantized)
}

/// Multiplies the activation of the gates by the up values and quantizes the result. If
/// `call.out.plain` is requested, the unquantized result is written too.
pub(super) fn gate_mul(cuda: &Cuda, call: &calls::GateMul<'_>) -> Result<(), KernelError> {
    let calls::GateMul { gate, up, activation, out } = call;
    let follows = gate.address().offset(gate.dtype().bytes(gate.columns()));
    assert!(up.address() == follows && up.pitch() == gate.pitch(), "the kernels read `up` after `gate`");
    let quantized = out.quantized.as_ref().expect("the quantized output was requested");
    let (rows, columns, before) = (out.rows(), out.columns(), input(gate));
    let is_few = rows * GATE_BLOCKS <= 4 * cuda.kernels.target.sms;
    let kernels = cuda.entry_points();
    let kernel = match (&kernels.hopper, long(cuda, gate, quantized)) {
        _ if *activation == GateActivation::GeluTanh => Kernel::row_each(kernels.gelu_mul_rounded, rows, columns),
        (Some(hopper), _) if is_few => Kernel::cluster_each(hopper.silu_mul_rounded_small_m, rows, columns),
        (Some(hopper), Some(threads)) => Kernel::long(hopper.silu_mul_rounded_long, rows, threads),
        _ => Kernel::row_each(kernels.silu_mul_rounded, rows, columns),
    };
    launch(cuda, "gate_mul", kernel, before, out.plain.as_ref(), quantized)
}

/// A kernel and its launch.
struct Kernel {
    function: Function,
    blocks: usize,
    threads: usize,
}

impl Kernel {
    /// Creates a launch with one thread block per row.
    fn row_each(function: Function, rows: usize, columns: usize) -> Self {
        Kernel { function, blocks: rows, threads: threads(columns / VECTOR) }
    }

    /// Creates a launch with one cluster per row.
    fn cluster_each(function: Function, rows: usize, columns: usize) -> Self {
        Kernel { function, blocks: rows * GATE_BLOCKS, threads: threads((columns / VECTOR).div_ceil(GATE_BLOCKS)) }
    }

    /// Creates a launch with one thread block of `threads` threads per row, for long rows.
    fn long(by_threads: [Function; 2], rows: usize, threads: usize) -> Self {
        let function = by_threads[usize::from(threads > LONG_THREADS_MAX)];
        Kernel { function, blocks: rows, threads }
    }

    /// Creates a launch with as many thread blocks as the device runs at once, but at most one per
    /// row. Each thread block processes one or more rows of `x`. See `quantize_large_m.cu`.
    fn large_m(cuda: &Cuda, by_held: [Function; 2], held: usize, x: &Tensor<'_>) -> Self {
        let threads = threads(x.columns() / VECTOR);
        let at_once = (THREADS_MAX * (4 - held) / threads).min(16);
        let blocks = x.rows().min(at_once * cuda.kernels.target.sms);
        Kernel { function: by_held[held - 1], blocks, threads }
    }
}

fn threads(vectors: usize) -> usize {
    vectors.next_multiple_of(32).clamp(32, THREADS_MAX)
}

/// Returns Hopper's kernels for many rows, and the number of vectors of a row that a thread keeps.
/// Returns `None` on other GPUs, if `x` has at most one row per SM, or if the kernels do not
/// support the length or the alignment of the rows.
fn large_m<'a>(cuda: &'a Cuda, x: &Tensor<'_>, columns: usize) -> Option<(&'a HopperEntryPoints<Function>, usize)> {
    let hopper = cuda.entry_points().hopper.as_ref()?;
    let held = (columns / VECTOR).div_ceil(THREADS_MAX);
    ((1..=2).contains(&held) && x.rows() > cuda.kernels.target.sms && is_whole(x)).then_some((hopper, held))
}

/// Returns the threads per thread block for the kernels that keep a long row of `x` in registers
/// until its scale is known. Returns `None` if there are at most four rows per SM, if the other
/// kernels can keep a whole row, if a row is too long for the registers or not aligned to 16 bytes,
/// or if the scales are not by rows. Other scales are known earlier, so keeping the row would save
/// no time.
fn long(cuda: &Cuda, x: &Tensor<'_>, out: &QuantizedRows<'_>) -> Option<usize> {
    let vectors = out.data.columns() / VECTOR;
    let is_long = (2 * THREADS_MAX + 1..=LONG_HELD * LONGER_THREADS_MAX).contains(&vectors);
    let is_many = x.rows() > 4 * cuda.kernels.target.sms;
    let is_kept = out.quantization == Quantization::Rows && is_long && is_many && is_whole(x);
    is_kept.then(|| vectors.div_ceil(LONG_HELD).next_multiple_of(32))
}

/// Returns `true` if all rows are aligned for 16-byte reads.
fn is_whole(x: &Tensor<'_>) -> bool {
    starts_whole(x) && x.pitch().is_multiple_of(VECTOR)
}

fn starts_whole(x: &Tensor<'_>) -> bool {
    x.address().0.is_multiple_of(16)
}

/// Appends to `before` the arguments for the quantized output, and for the unquantized output if it
/// is also requested.
pub(super) fn with_target(before: Arguments, plain: Option<&Tensor<'_>>, out: &QuantizedRows<'_>) -> Arguments {
    let (kind, fixed) = match out.quantization {
        Quantization::Groups => (BY_GROUPS, 1.0),
        Quantization::Rows => (BY_ROWS, 1.0),
        Quantization::Fixed(scale) => (FIXED, scale),
    };
    before
        .with(plain.map_or(Address(0), Tensor::address))
        .with(kind)
        .with(fixed)
        .with(out.data.address())
        .with(out.scales.address())
}

fn input(x: &Tensor<'_>) -> Arguments {
    arguments![x.address(), count(x.pitch())]
}

fn launch(
    cuda: &Cuda,
    op: &'static str,
    kernel: Kernel,
    before: Arguments,
    plain: Option<&Tensor<'_>>,
    out: &QuantizedRows<'_>,
) -> Result<(), KernelError> {
    cuda.enter()?;
    let (rows, columns) = (out.data.rows(), out.data.columns());
    if !serves(columns) {
        return Err(KernelError::NoKernel { op });
    }
    if rows == 0 {
        return Ok(());
    }
    let arguments = with_target(before.with(count(columns)), plain, out);
    // SAFETY: the arguments match the kernels' parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel.function, Extent::line(kernel.blocks, kernel.threads), arguments) }
}
