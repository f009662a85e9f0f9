//! Launches for mixtures of experts. The kernels' sources (`route.cu`, `experts.cu` and others) end
//! with a description of the launches that they expect.

use bursar_budgets::{Address, DeviceError};

use super::{
    arguments::{Arguments, Extent, arguments, count, gate_number},
    contract::{
        Experts, PLACES, experts as scheme, experts_small_m, gemm_large_m, route as routing, route_normed as normed,
    },
    elementwise,
    functions::Function,
    gemm::{self, GemmBackend, Operands},
    lane::Cuda,
    quantize,
    tensor_map::{Layout, Rows, Swizzle, TensorMap},
};
use crate::{
    DType, KernelError, Tensor,
    calls::{self, Routing},
};

pub(super) fn route(cuda: &Cuda, call: calls::Route<'_>) -> Result<(), KernelError> {
    let (rows, experts, top) = (call.logits.rows(), call.logits.columns(), call.out.top);
    let kernels = cuda.entry_points();
    let logits = arguments![call.logits.address(), count(call.logits.pitch()), count(rows), count(experts), count(top)]
        .followed_by(rule_of(&call));
    let out = &call.out;
    let slots = slots_of(&call);
    let sorted = arguments![out.choices.address(), out.starts.address(), call.loads.address()];
    if rows <= routing::SMALL_M_ROWS {
        let all = logits.with(out.weights.address()).with(out.places.address()).followed_by(sorted).with(slots);
        // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the
        // shapes and allocated the scratch.
        return unsafe { cuda.launch(kernels.route_small_m, Extent::line(1, routing::THREADS), all) };
    }
    let is_sorted_by_one = rows * top <= routing::SORTED_CHOICES;
    let (block_rows, threads, counts) = if is_sorted_by_one {
        (routing::SORTED_BLOCK_ROWS, 32 * routing::SORTED_BLOCK_ROWS, Address(0))
    } else {
        (routing::BLOCK_ROWS, routing::THREADS, call.scratch.address())
    };
    let choose = logits.with(count(block_rows)).with(out.weights.address()).with(out.places.address()).with(counts);
    let choose = choose.with(call.loads.address()).with(slots);
    let (sorters, block_choices) =
        if is_sorted_by_one { (1, rows * top) } else { (rows.div_ceil(block_rows), block_rows * top) };
    let sort = arguments![out.places.address(), count(rows * top), count(experts), count(block_choices), counts]
        .followed_by(sorted);
    // SAFETY: the arguments match the kernels' parameters, and the op layer has checked the shapes
    // and allocated the scratch.
    unsafe {
        cuda.launch(kernels.route_choose, Extent::line(rows.div_ceil(block_rows), threads), choose)?;
        cuda.launch(kernels.route_sort, Extent::line(sorters, routing::THREADS), sort)
    }
}

/// Returns the kernels' arguments for the routing rule, except the number of choices.
fn rule_of(call: &calls::Route<'_>) -> Arguments {
    let calls::RoutingRule { renormalized, logit_scale, expert_scales, .. } = call.rule;
    arguments![u32::from(renormalized), logit_scale, expert_scales.map_or(Address(0), Tensor::address)]
}

/// Returns the address of the rows' cache slots, or 0 if the call has no slots.
fn slots_of(call: &calls::Route<'_>) -> Address {
    call.slots.as_ref().map_or(Address(0), Tensor::address)
}

pub(super) fn rms_norm_route(cuda: &Cuda, call: calls::RmsNormRoute<'_>) -> Result<(), KernelError> {
    let calls::RmsNormRoute { norm, product, routing } = call;
    let hopper = cuda.entry_points().hopper.as_ref();
    let Some(hopper) = hopper.filter(|_| cuda.gemm.backend != GemmBackend::Library && is_small_m(&norm, &product))
    else {
        elementwise::rms_norm(cuda, norm)?;
        gemm::linear(cuda, product)?;
        return route(cuda, routing);
    };
    let (rows, hidden, out) = (norm.x.rows(), norm.x.columns(), &routing.out);
    let arguments = arguments![
        norm.x.address(),
        count(norm.x.pitch()),
        norm.weight.address(),
        norm.epsilon,
        norm.weight_offset,
        count(hidden),
        product.weight.data.address(),
        norm.out.plain().address(),
        count(rows),
        count(product.weight.rows()),
        count(out.top),
    ]
    .followed_by(rule_of(&routing));
    let arguments = arguments.followed_by(arguments![
        out.weights.address(),
        out.places.address(),
        out.choices.address(),
        out.starts.address(),
        routing.loads.address(),
        slots_of(&routing),
    ]);
    let shared = rows * (2 * hidden + normed::ROW_GAP_BYTES) + 2 * hidden + normed::SUM_BYTES;
    let extent = Extent { grid: [normed::CLUSTER, 1, 1], block: [routing::THREADS, 1], shared };
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(hopper.route_normed, extent, arguments) }
}

/// Returns `true` if the norm's output is unquantized, the kernel's single cluster can process all
/// rows, and the operands are aligned as its 16-byte accesses require.
fn is_small_m(norm: &calls::RmsNorm<'_>, product: &calls::Linear<'_>) -> bool {
    let (rows, hidden) = (norm.x.rows(), norm.x.columns());
    let starts = [&norm.x, &norm.weight, norm.out.plain(), &product.weight.data].map(|operand| operand.address().0);
    norm.out.quantized.is_none()
        && (1..=routing::SMALL_M_ROWS).contains(&rows)
        && product.weight.rows() <= normed::EXPERTS_MAX
        && hidden <= normed::HIDDEN_MAX
        && hidden.is_multiple_of(normed::COLUMNS)
        && norm.x.pitch().is_multiple_of(8)
        && starts.into_iter().all(|start| start.is_multiple_of(16))
}

pub(super) fn gated_experts(cuda: &Cuda, call: calls::GatedExperts<'_>) -> Result<(), KernelError> {
    let (rows, features) = (call.out.rows(), call.out.columns());
    // The expert kernels do not quantize their outputs, because the scale of a row needs the whole
    // row. If only quantized outputs are requested, the gated outputs are first written to this
    // scratch in the activation type.
    let scratch = Tensor::over(call.gated.address(), [rows, features].into(), cuda.kernels.target.activation);
    let out = call.out.plain.as_ref().unwrap_or(&scratch);
    let op = "gated_experts";
    let of = Operands::of(&call.x, &call.weight).ok_or(KernelError::NoKernel { op })?;
    let operands = arguments![
        of.x.address(),
        count(of.x.pitch()),
        count(call.weight.columns()),
        count(features),
        call.routing.choices.address(),
        count(call.routing.top),
        starts_of(&call.routing),
        count(call.routing.held.count),
        gate_number(call.activation),
        out.address(),
    ];
    ExpertGemm { op, of, routing: &call.routing, features, is_gated: true }.launch(cuda, operands)?;
    match call.out.quantized {
        Some(quantized) => quantize::quantize(cuda, calls::Quantize { x: out.view(), out: quantized }),
        None => Ok(()),
    }
}

pub(super) fn add_experts(cuda: &Cuda, call: calls::AddExperts<'_>) -> Result<(), KernelError> {
    products(cuda, &call)?;
    add(cuda, &call)
}

/// Adds up the GEMM results of each row's choices.
fn add(cuda: &Cuda, call: &calls::AddExperts<'_>) -> Result<(), KernelError> {
    let sum = arguments![
        call.products.address(),
        call.routing.places.address(),
        count(call.routing.top),
        starts_of(&call.routing),
        count(call.routing.held.count),
        u32::from(call.accumulate),
        count(call.sum.columns()),
        call.sum.address(),
        count(call.sum.pitch()),
    ];
    let rows = Extent::line(call.sum.rows(), scheme::ADD_THREADS);
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().add_experts, rows, sum) }
}

pub(super) fn add_experts_rms_norm(cuda: &Cuda, call: calls::AddExpertsRmsNorm<'_>) -> Result<(), KernelError> {
    let experts = &call.experts;
    products(cuda, experts)?;
    if let Some(quantized) = call.out.quantized.as_ref().filter(|_| cuda.entry_points().hopper.is_none()) {
        add(cuda, experts)?;
        let out = call.out.view();
        let norm = calls::RmsNorm {
            x: experts.sum.view(),
            weight: call.weight.view(),
            weight_offset: call.weight_offset,
            epsilon: call.epsilon,
            out,
        };
        return quantize::rms_norm(cuda, &norm, quantized);
    }
    let (rows, columns) = (experts.sum.rows(), experts.sum.columns());
    let sum = arguments![
        experts.products.address(),
        experts.routing.places.address(),
        count(experts.routing.top),
        experts.sum.address(),
        count(experts.sum.pitch()),
        call.weight.address(),
    ];
    if call.out.quantized.is_some() {
        return quantize::add_experts_rms_norm(cuda, sum.with(call.epsilon).with(call.weight_offset), &call.out);
    }
    let norm = sum.with(count(columns)).with(call.epsilon).with(call.weight_offset);
    let norm = norm.with(call.out.plain().address());
    let extent = Extent::line(rows, elementwise::norm_threads(columns));
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(cuda.entry_points().add_experts_rms_norm, extent, norm) }
}

/// Launches the GEMM that computes the result of each choice, multiplied by the choice's weight.
fn products(cuda: &Cuda, call: &calls::AddExperts<'_>) -> Result<(), KernelError> {
    let features = call.sum.columns();
    let op = "add_experts";
    let of = Operands::of(&call.x, &call.weight).ok_or(KernelError::NoKernel { op })?;
    let operands = arguments![
        of.x.address(),
        count(call.weight.columns()),
        count(features),
        call.routing.choices.address(),
        count(call.routing.top),
        starts_of(&call.routing),
        count(call.routing.held.count),
        call.routing.weights.address(),
        call.products.address(),
    ];
    ExpertGemm { op, of, routing: &call.routing, features, is_gated: false }.launch(cuda, operands)
}

/// Returns the address of the first entry of `starts` for the experts on this rank.
fn starts_of(routing: &Routing<'_>) -> Address {
    routing.starts.address().offset(DType::U32.bytes(routing.held.first))
}

/// A GEMM with experts' weights.
struct ExpertGemm<'a> {
    op: &'static str,
    of: Operands<'a>,
    routing: &'a Routing<'a>,
    features: usize,
    is_gated: bool,
}

impl ExpertGemm<'_> {
    /// Launches a kernel that supports the GEMM. `operands` are the kernel's
    /// arguments after the weight.
    fn launch(&self, cuda: &Cuda, operands: Arguments) -> Result<(), KernelError> {
        let kernels = cuda.entry_points();
        if self.choices() == 0 {
            return Ok(());
        }
        if let (Some(hopper), Some(small_m)) = (self.hopper(cuda), SmallM::of(cuda, self)?) {
            let of_sizes = if self.is_gated { &hopper.gated_small_m } else { &hopper.small_m };
            let operands =
                arguments![small_m.weight].followed_by(operands).with(small_m.stages).followed_by(self.scales());
            // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the
            // shapes.
            return unsafe { cuda.launch(of_sizes[small_m.size], small_m.extent, operands) };
        }
        if let (Some(hopper), Some((weight, extent))) = (self.hopper(cuda), self.large_m(cuda)?) {
            let kernel = if self.is_gated { hopper.gated_large_m } else { hopper.large_m };
            // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the
            // shapes.
            let operands = arguments![weight].followed_by(operands).followed_by(self.scales());
            return unsafe { cuda.launch(kernel, extent, operands) };
        }
        if self.of.scheme.is_some() {
            return Err(KernelError::NoKernel { op: self.op });
        }
        let (kernel, tile) = if self.is_gated {
            (kernels.gated_experts, scheme::TILE_ROWS / 2)
        } else {
            (kernels.experts, scheme::TILE_ROWS)
        };
        let (choices, experts) = (self.choices(), self.routing.held.count);
        // The maximum number of tiles of places (sorted positions): each chosen expert may have one
        // tile that is not full.
        let places = choices.div_ceil(scheme::TILE_PLACES) + experts.min(choices);
        let extent = Extent { grid: [self.features.div_ceil(tile), places, 1], block: [scheme::THREADS, 1], shared: 0 };
        let operands = arguments![self.of.weight.address()].followed_by(operands);
        // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the
        // shapes.
        unsafe { cuda.launch(kernel, extent, operands) }
    }

    fn hopper<'c>(&self, cuda: &'c Cuda) -> Option<&'c Experts<Function>> {
        let hopper = cuda.entry_points().hopper.as_ref()?;
        Some(self.of.scheme.map_or(&hopper.experts, |scheme| hopper.experts_quantized.of(scheme)))
    }

    /// Returns the last arguments of Hopper's kernels: the scales of quantized operands.
    fn scales(&self) -> Arguments {
        let Some(scheme) = self.of.scheme else { return arguments![] };
        let groups = scheme.weights.scales_of_row(self.of.weight.columns());
        let height = scheme.weights.block_rows().unwrap_or(1);
        arguments![self.of.weight_scales, self.of.x_scales, self.of.x_scale, count(groups), count(height)]
    }

    fn choices(&self) -> usize {
        self.routing.rows() * self.routing.top
    }

    /// Returns the average number of choices per expert, rounded up, if the choices are spread over
    /// as many experts as possible.
    fn of_expert(&self) -> usize {
        self.choices().div_ceil(self.routing.experts().min(self.choices()).max(1))
    }

    /// Returns `true` if the operands are aligned as TMA and 16-byte accesses require.
    fn is_aligned(&self) -> bool {
        let starts = [self.of.weight.address().0 as usize, self.of.x.address().0 as usize];
        let size = self.of.weight.dtype().size();
        let rows = [size * self.of.weight.columns(), size * self.of.x.pitch(), 2 * self.features];
        starts.into_iter().chain(rows).all(|bytes| bytes.is_multiple_of(16))
    }

    /// Returns the weight's tensor map and the extent of a launch of Hopper's kernel for many rows.
    /// Returns `None` if the kernel does not support the GEMM.
    fn large_m(&self, cuda: &Cuda) -> Result<Option<(TensorMap, Extent)>, DeviceError> {
        if self.choices() == 0 || !self.is_aligned() {
            return Ok(None);
        }
        let (columns, rows) = (self.of.weight.columns(), self.of.weight.rows());
        let of = Rows { rows, columns, pitch: columns };
        let dtype = self.of.weight.dtype();
        let cube = [gemm_large_m::TILE_WEIGHTS / 4, 2 * gemm_large_m::STEP_COLUMNS / dtype.size()];
        let weight = TensorMap::of_rows(self.of.weight.address().0, dtype, of, cube)?;
        let tile = if self.is_gated { gemm_large_m::TILE_WEIGHTS / 2 } else { gemm_large_m::TILE_WEIGHTS };
        let places = self.choices().div_ceil(gemm_large_m::CLUSTER * gemm_large_m::TILE_ROWS)
            + self.routing.held.count.min(self.choices());
        let clusters = (places * self.features.div_ceil(tile)).min(cuda.kernels.target.sms / gemm_large_m::CLUSTER);
        let extent = Extent {
            grid: [gemm_large_m::CLUSTER * clusters, 1, 1],
            block: [gemm_large_m::THREADS, 1],
            shared: gemm_large_m::SHARED_BYTES,
        };
        Ok(Some((weight, extent)))
    }
}

/// A launch of Hopper's kernel for few rows.
struct SmallM {
    /// Index of the tile's number of places in [`PLACES`].
    size: usize,
    stages: u32,
    weight: TensorMap,
    extent: Extent,
}

/// For each tile size in [`PLACES`], the maximum average number of choices per expert for which
/// this tile size is used. Tiles that are not full cost less than an additional tile.
const PLACES_FOR: [usize; 4] = [4, 10, 17, 24];

/// Bytes of static shared memory per thread block: lists and barriers.
const STATIC_BYTES: usize = 4 * 1024;

/// Bytes of dynamic shared memory per thread block if two thread blocks share an SM.
const HALF_BYTES: usize = 110 * 1024;

/// Minimum number of stages of a thread block that shares its SM.
const STAGES_OF_HALF: usize = 4;
/// Minimum number of stages of a thread block that has an SM to itself.
const STAGES_OF_ALL: usize = 5;

impl SmallM {
    /// Returns the launch, or `None` if the kernel does not support the GEMM.
    fn of(cuda: &Cuda, product: &ExpertGemm<'_>) -> Result<Option<SmallM>, DeviceError> {
        let &ExpertGemm { of: Operands { weight, .. }, routing, features, is_gated, .. } = product;
        let (in_features, experts) = (weight.columns(), routing.held.count);
        let choices = product.choices();
        let is_served = choices > 0 && product.is_aligned();
        // The smallest tile size that suffices for the average number of choices per expert.
        let size = PLACES_FOR.iter().position(|most| product.of_expert() <= *most);
        let Some(size) = size.filter(|_| is_served) else { return Ok(None) };
        let row_bytes = weight.dtype().bytes(in_features).as_usize();
        let x_bytes = PLACES[size] * row_bytes.next_multiple_of(experts_small_m::STEP_BYTES);
        let scratch = |bytes: usize| bytes.saturating_sub(x_bytes) / experts_small_m::STAGE_BYTES;
        let all = cuda.kernels.functions.shared_most() - STATIC_BYTES;
        let (stages, of_one) = match (scratch(HALF_BYTES), scratch(all)) {
            (stages @ STAGES_OF_HALF.., _) => (stages, 2),
            (_, stages @ STAGES_OF_ALL..) => (stages, 1),
            _ => return Ok(None),
        };
        let stages = stages.min(experts_small_m::STAGES_MAX);
        let tile = if is_gated { experts_small_m::TILE_ROWS / 2 } else { experts_small_m::TILE_ROWS };
        let items = (choices.div_ceil(PLACES[size]) + experts.min(choices)) * features.div_ceil(tile);
        let extent = Extent {
            grid: [items.min(of_one * cuda.kernels.target.sms), 1, 1],
            block: [experts_small_m::THREADS, 1],
            shared: x_bytes + stages * experts_small_m::STAGE_BYTES,
        };
        let weight = weight_map(product)?;
        Ok(Some(SmallM { size, stages: count(stages), weight, extent }))
    }
}

/// Returns the tensor map of the experts' weights. In a gated GEMM, groups of eight gate rows
/// alternate with the corresponding eight up rows.
fn weight_map(product: &ExpertGemm<'_>) -> Result<TensorMap, DeviceError> {
    let (columns, features) = (product.of.weight.columns() as u64, product.features as u64);
    let dtype = product.of.weight.dtype();
    let (experts, pitch) = (product.routing.held.count as u64, dtype.size() as u64 * columns);
    let (chunk, rows) = (count(experts_small_m::ROW_BYTES / dtype.size()), experts_small_m::TILE_ROWS);
    let swizzle = Swizzle::Bytes128;
    let layout = if product.is_gated {
        Layout {
            dimensions: &[columns, 8, 2, features / 8, experts],
            strides: &[pitch, pitch * features, pitch * 8, 2 * pitch * features],
            cube: &[chunk, 8, 2, count(rows / 16), 1],
            swizzle,
        }
    } else {
        Layout {
            dimensions: &[columns, features, experts],
            strides: &[pitch, pitch * features],
            cube: &[chunk, count(rows), 1],
            swizzle,
        }
    };
    TensorMap::new(product.of.weight.address(), dtype, &layout)
}
