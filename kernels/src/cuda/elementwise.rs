//! Launches of the operations that read each row once. The file of each kernel in `kernels/cuda/`
//! ends with a description of the launch that the kernel expects.

use bursar_budgets::Address;

use super::{
    arguments::{Arguments, Extent, address_or_null, arguments, count},
    contract::{
        argmax as argmax_numbers, copy_rows, gate, norm, patchify as patchify_numbers, position_grid as grid_numbers,
        random,
    },
    functions::Function,
    lane::Cuda,
    quantize,
};
use crate::{
    DType, KernelError, Tensor,
    calls::{self, GateActivation, Gelu},
};

fn pitch(tensor: &Tensor<'_>) -> u32 {
    count(tensor.pitch())
}

fn columns(tensor: &Tensor<'_>) -> u32 {
    count(tensor.columns())
}

pub(super) fn fill_random(cuda: &Cuda, call: calls::FillRandom<'_>) -> Result<(), KernelError> {
    cuda.enter()?;
    let elements = call.out.shape().elements();
    let extent = Extent::line(elements.div_ceil(random::THREADS).min(8192), random::THREADS);
    let arguments =
        arguments![call.out.address(), elements as u64, columns(&call.out), count(call.pitch), call.seed, call.factor,];
    let kernels = cuda.entry_points();
    let kernel = match call.out.dtype() {
        DType::F32 => kernels.fill_random_f32,
        dtype if dtype.needs_scales() => kernels.fill_random_quantized,
        _ => kernels.fill_random,
    };
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked that the
    // output has this many elements.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

pub(super) fn patchify(cuda: &Cuda, call: calls::Patchify<'_>) -> Result<(), KernelError> {
    let side = call.size.side;
    let units = side * side / if side.is_multiple_of(2) { patchify_numbers::PIXELS } else { 1 };
    let wide = units.min(patchify_numbers::THREADS_MAX);
    let tall = patchify_numbers::THREADS_MAX / wide;
    let extent = Extent { grid: [call.out.rows().div_ceil(tall), 1, 1], block: [wide, tall], shared: 0 };
    let arguments = arguments![
        call.bytes.address(),
        count(call.bytes.rows()),
        call.layout.address(),
        call.levels.address(),
        count(call.layout.rows()),
        call.places.address(),
        count(call.out.rows()),
        count(side),
        count(call.size.frames),
        call.out.address(),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().patchify, extent, arguments) }
}

/// Elements of a row that a thread processes at once.
const GRID_VECTOR: usize = 8;

pub(super) fn position_grid(cuda: &Cuda, call: calls::PositionGrid<'_>) -> Result<(), KernelError> {
    let wide = call.out.columns().div_ceil(GRID_VECTOR).clamp(1, grid_numbers::THREADS);
    let tall = grid_numbers::THREADS / wide;
    let extent = Extent { grid: [call.out.rows().div_ceil(tall), 1, 1], block: [wide, tall], shared: 0 };
    let arguments = arguments![
        call.table.address(),
        count(call.side),
        columns(&call.table),
        call.places.address(),
        count(call.out.rows()),
        call.layout.address(),
        count(call.layout.rows()),
        call.out.address(),
        pitch(&call.out),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().position_grid, extent, arguments) }
}

pub(super) fn embed(cuda: &Cuda, call: calls::Embed<'_>) -> Result<(), KernelError> {
    let extent = Extent::line(call.ids.rows(), copy_rows::THREADS);
    let table = &call.table.data;
    let arguments = arguments![
        table.address(),
        count(call.tokens.first),
        count(call.tokens.count),
        count(call.tokens.whole),
        columns(table),
        call.ids.address(),
        call.previous.address(),
        count(call.previous.rows()),
        call.out.address(),
    ];
    let kernels = cuda.entry_points();
    let (kernel, arguments) =
        if call.scale == 1.0 { (kernels.embed, arguments) } else { (kernels.embed_scaled, arguments.with(call.scale)) };
    // SAFETY: the arguments match the kernels' parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

/// Returns the threads per thread block for the norm of rows with `columns` columns.
pub(super) fn norm_threads(columns: usize) -> usize {
    columns.div_ceil(16).next_multiple_of(32).clamp(32, norm::THREADS_MAX)
}

/// Launches a norm of the rows of `x` `[rows, hidden]`. `weights` has the weight and, for
/// some norms, the bias. `terms` has the number added to the mean square and, for some norms, the
/// number added to the weights.
fn normalize(
    cuda: &Cuda,
    kernel: Function,
    x: &Tensor<'_>,
    weights: &[&Tensor<'_>],
    terms: &[f32],
    out: &Tensor<'_>,
) -> Result<(), KernelError> {
    // A thread block reuses its weights over many rows.
    let extent = Extent::line(out.rows().min(8 * cuda.kernels.target.sms), norm_threads(out.columns()));
    let arguments = Arguments::default().with(x.address()).with(pitch(x));
    let arguments = weights.iter().fold(arguments, |all, weight| all.with(weight.address()));
    let arguments = arguments.with(count(out.rows())).with(columns(out));
    let arguments = terms.iter().fold(arguments, |all, term| all.with(*term)).with(out.address());
    // SAFETY: the arguments match the kernels' parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

pub(super) fn rms_norm(cuda: &Cuda, call: calls::RmsNorm<'_>) -> Result<(), KernelError> {
    match &call.out.quantized {
        Some(quantized) => quantize::rms_norm(cuda, &call, quantized),
        None => {
            let kernel = cuda.entry_points().rms_norm;
            let terms = [call.epsilon, call.weight_offset];
            normalize(cuda, kernel, &call.x, &[&call.weight], &terms, call.out.plain())
        }
    }
}

pub(super) fn rms_norm_add(cuda: &Cuda, call: calls::RmsNormAdd<'_>) -> Result<(), KernelError> {
    let rows = call.sum.rows();
    let extent = Extent::line(rows.min(8 * cuda.kernels.target.sms), norm_threads(call.sum.columns()));
    let arguments = arguments![
        call.x.address(),
        pitch(&call.x),
        call.weight.address(),
        count(rows),
        columns(&call.sum),
        call.epsilon,
        call.weight_offset,
        address_or_null(&call.factor),
        call.sum.address(),
        pitch(&call.sum),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().rms_norm_add, extent, arguments) }
}

pub(super) fn layer_norm(cuda: &Cuda, call: calls::LayerNorm<'_>) -> Result<(), KernelError> {
    normalize(cuda, cuda.entry_points().layer_norm, &call.x, &[&call.weight, &call.bias], &[call.epsilon], &call.out)
}

/// Returns an extent with one thread block per row in x, and enough thread blocks in y to cover the
/// columns. With few rows, each thread block covers fewer columns.
pub(super) fn over_columns(rows: usize, columns: usize) -> Extent {
    let step = if rows < 128 { 2048 } else { 4096 };
    Extent { grid: [rows, columns.div_ceil(step), 1], block: [gate::THREADS, 1], shared: 0 }
}

pub(super) fn gate_mul(cuda: &Cuda, call: calls::GateMul<'_>) -> Result<(), KernelError> {
    if call.out.quantized.is_some() {
        return quantize::gate_mul(cuda, &call);
    }
    let out = call.out.plain();
    let extent = over_columns(out.rows(), out.columns());
    let arguments = arguments![
        call.gate.address(),
        pitch(&call.gate),
        call.up.address(),
        pitch(&call.up),
        columns(out),
        out.address(),
    ];
    let kernels = cuda.entry_points();
    let kernel = match call.activation {
        GateActivation::Silu => kernels.silu_mul,
        GateActivation::GeluTanh => kernels.gelu_mul,
    };
    // SAFETY: the arguments match the kernels' parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

pub(super) fn mean_rows(cuda: &Cuda, call: calls::MeanRows<'_>) -> Result<(), KernelError> {
    let extent = over_columns(call.out.rows(), call.out.columns());
    let arguments =
        arguments![call.out.address(), call.x.address(), pitch(&call.x), columns(&call.x), count(call.count)];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().mean_rows, extent, arguments) }
}

pub(super) fn clamp(cuda: &Cuda, call: calls::Clamp<'_>) -> Result<(), KernelError> {
    let (out, x) = (&call.out, call.x.as_ref().unwrap_or(&call.out));
    if out.rows() == 0 {
        return Ok(());
    }
    let arguments = arguments![x.address(), pitch(x), columns(out), call.bounds.address(), out.address(), pitch(out)];
    let extent = over_columns(out.rows(), out.columns());
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().clamp, extent, arguments) }
}

pub(super) fn standardize(cuda: &Cuda, call: calls::Standardize<'_>) -> Result<(), KernelError> {
    let x = &call.x;
    if x.rows() == 0 {
        return Ok(());
    }
    let arguments =
        arguments![x.address(), pitch(x), columns(x), call.factor, call.shift.address(), call.scale.address()];
    let extent = over_columns(x.rows(), x.columns());
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().standardize, extent, arguments) }
}

pub(super) fn soft_cap(cuda: &Cuda, call: calls::SoftCap<'_>) -> Result<(), KernelError> {
    let (rows, extent) = (call.x.rows(), over_columns(call.x.rows(), call.x.columns()));
    if rows == 0 {
        return Ok(());
    }
    let arguments = arguments![call.x.address(), pitch(&call.x), columns(&call.x), call.cap];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().soft_cap, extent, arguments) }
}

pub(super) fn gelu(cuda: &Cuda, call: calls::ApplyGelu<'_>) -> Result<(), KernelError> {
    let extent = over_columns(call.x.rows(), call.x.columns());
    let arguments = arguments![call.x.address(), pitch(&call.x), columns(&call.x)];
    let kernels = cuda.entry_points();
    let kernel = match call.kind {
        Gelu::Erf => kernels.gelu,
        Gelu::Tanh => kernels.gelu_tanh,
        Gelu::Quick => kernels.gelu_quick,
    };
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

pub(super) fn gather_rows(cuda: &Cuda, call: calls::GatherRows<'_>) -> Result<(), KernelError> {
    let arguments = arguments![
        call.x.address(),
        count(call.x.rows()),
        pitch(&call.x),
        call.rows.as_ref().map_or(Address(0), Tensor::address),
        columns(&call.x),
        count(call.x.dtype().size()),
        call.out.address(),
        pitch(&call.out),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe {
        cuda.launch(cuda.entry_points().gather_rows, Extent::line(call.out.rows(), copy_rows::THREADS), arguments)
    }
}

pub(super) fn scatter_rows(cuda: &Cuda, call: calls::ScatterRows<'_>) -> Result<(), KernelError> {
    let arguments = arguments![
        call.x.address(),
        pitch(&call.x),
        call.rows.address(),
        columns(&call.x),
        count(call.x.dtype().size()),
        call.out.address(),
        count(call.out.rows()),
        pitch(&call.out),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe {
        cuda.launch(cuda.entry_points().scatter_rows, Extent::line(call.rows.rows(), copy_rows::THREADS), arguments)
    }
}

pub(super) fn add_rows(cuda: &Cuda, call: calls::AddRows<'_>) -> Result<(), KernelError> {
    let arguments = arguments![
        call.x.address(),
        count(call.x.rows()),
        pitch(&call.x),
        call.from.address(),
        call.to.address(),
        columns(&call.x),
        call.out.address(),
        count(call.out.rows()),
        pitch(&call.out),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().add_rows, Extent::line(call.to.rows(), copy_rows::THREADS), arguments) }
}

pub(super) fn argmax(cuda: &Cuda, call: calls::Argmax<'_>) -> Result<(), KernelError> {
    let is_f32 = call.x.dtype() == DType::F32;
    let kernel = if is_f32 { cuda.entry_points().argmax_f32 } else { cuda.entry_points().argmax };
    let ids = call.ids.as_ref().map_or(Address(0), Tensor::address);
    let arguments = arguments![call.x.address(), columns(&call.x), pitch(&call.x), ids, call.out.address()];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(kernel, argmax_extent(cuda, call.x.rows()), arguments) }
}

pub(super) fn clustered_argmax(cuda: &Cuda, call: calls::ClusteredArgmax<'_>) -> Result<(), KernelError> {
    let (scores, tokens) = (&call.scores, &call.tokens);
    // The kernel has a u32 for each cluster that it selects in dynamic shared memory.
    let extent = Extent { shared: DType::U32.bytes(scores.columns()).as_usize(), ..argmax_extent(cuda, call.x.rows()) };
    let arguments = arguments![
        call.x.address(),
        pitch(&call.x),
        columns(&call.x),
        call.table.address(),
        count(call.table.rows()),
        scores.address(),
        pitch(scores),
        columns(scores),
        count(call.top),
        tokens.address(),
        count(tokens.rows() / scores.columns()),
        call.out.address(),
    ];
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes and
    // the number of clusters. The kernel skips tokens outside the table.
    unsafe { cuda.launch(cuda.entry_points().clustered_argmax, extent, arguments) }
}

/// The extent of a kernel that finds the largest value of each row. In Hopper's machine code, a cluster
/// of thread blocks shares a row.
fn argmax_extent(cuda: &Cuda, rows: usize) -> Extent {
    let blocks = if cuda.kernels.functions.is_machine_code() { argmax_numbers::CLUSTER } else { 1 };
    Extent::line(rows * blocks, argmax_numbers::THREADS)
}
