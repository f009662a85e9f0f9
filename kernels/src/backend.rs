//! The interface of a backend: one method per operation. Arguments are already checked, and the
//! output is already taken from the workspace.

use bursar_budgets::Bytes;

use crate::{KernelError, Rank, Target, ops::*};

/// Layers that autotuning should run through, if the model has that many. In a real step, a
/// layer's weights from the step before are no longer in any cache. Autotuning over this many
/// layers reproduces that condition.
pub const AUTOTUNED_LAYERS: usize = 8;

/// The arithmetic of every operation, on one target.
///
/// Before a backend method is called, the operation's method in [`crate::ops`] has checked shapes
/// and types, taken the output and the target's declared scratch from the workspace, and counted
/// the work. A backend allocates no device memory, keeps no view after a call returns and never
/// reorders calls: there is one lane with one stream.
///
/// Host memory passed to [`upload`](Backend::upload) may be freed once the call returns;
/// [`download`](Backend::download) returns with the data copied. Apart from these and
/// [`wait_for_all`](Backend::wait_for_all), no method may wait for the device: the host prepares
/// the next pass while this one runs, and reads a pass's results with
/// [`download_later`](Backend::download_later), which does not delay the next pass.
pub trait Backend {
    /// `false` for a backend that touches no memory and may therefore run over a dry workspace.
    const COMPUTES: bool;

    /// Returns the machine that this backend computes on.
    fn target(&self) -> &Target;

    /// Returns this backend's rank among the devices that compute a model together.
    fn rank(&self) -> Rank {
        Rank::ALONE
    }

    /// Turns autotuning on or off. While it is on, results are discarded (the stress before READY),
    /// so the backend may time several algorithms. The weights of all products must keep their
    /// addresses until autotuning is turned off.
    fn autotune(&self, _on: bool) {}

    /// Times the algorithms for each product that ran since autotuning was turned on, also at other
    /// row counts. No product is measured twice.
    ///
    /// # Errors
    /// The device is lost.
    fn measure(&self, _: measure::Call<'_>) -> Result<(), KernelError> {
        Ok(())
    }

    /// Calls `run` once and keeps what it launches as a graph for later replays. Nothing is
    /// executed during the capture. `run` may only launch operations: it must not upload or
    /// download. All addresses, shapes and numbers are fixed in the graph. A backend without graphs
    /// returns `None` and does not call `run`.
    ///
    /// Each product in `run` should have been autotuned before, in the same shape.
    ///
    /// # Errors
    /// The error of `run`, or a device error if the device refuses the graph. The backend
    /// stays usable either way.
    fn capture(
        &self,
        _run: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> Result<Option<Box<dyn Graph>>, KernelError> {
        Ok(None)
    }

    /// Tells the other ranks that this rank will not take part in further collectives, so no rank
    /// waits for it. Ranks that exchange data through host memory detect this when this rank drops
    /// its end of the link.
    fn abort_collectives(&self) {}

    /// Waits until the device has finished all work of this lane, successfully or not. The
    /// call allocates no memory on the device or the host. A backend whose calls are
    /// synchronous returns at once.
    ///
    /// # Errors
    /// The device is lost. Even then, no work of the lane is still running.
    fn wait_for_all(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Copies host memory to the device.
    fn upload(&self, call: transfer::Upload<'_>) -> Result<(), KernelError>;
    /// Copies device memory to the host once all earlier work is done.
    fn download(&self, call: transfer::Download<'_>) -> Result<(), KernelError>;
    /// Draws random numbers in place.
    fn fill_random(&self, call: fill_random::Call<'_>) -> Result<(), KernelError>;
    /// Starts a copy of device memory to the host, ordered after all earlier work, and returns at
    /// once. Later launches may overwrite the source.
    fn download_later(&self, call: transfer::DownloadLater<'_>) -> Result<Box<dyn transfer::Arrival>, KernelError>;
    /// Starts copies of blocks between the device and host memory, and returns at once.
    /// [`copy_blocks::Call`] describes how the copies are ordered with other work.
    fn copy_blocks(&self, call: copy_blocks::Call<'_>) -> Result<Box<dyn copy_blocks::Copying>, KernelError>;
    /// Cuts pictures into normalized patches.
    fn patchify(&self, call: patchify::Call<'_>) -> Result<(), KernelError>;
    /// Interpolates learned position embeddings between the points of a grid.
    fn position_grid(&self, call: position_grid::Call<'_>) -> Result<(), KernelError>;
    /// Looks up rows of a table, by token id or by the choices of the previous pass.
    fn embed(&self, call: embed::Call<'_>) -> Result<(), KernelError>;
    /// Normalizes rows by their root mean square.
    fn rms_norm(&self, call: rms_norm::Call<'_>) -> Result<(), KernelError>;
    /// Normalizes rows by their mean and variance.
    fn layer_norm(&self, call: layer_norm::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies by a weight, with bias, and writes the output or adds to it.
    fn linear(&self, call: linear::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies by the gate and up weights, and applies the gate. The default is the
    /// product followed by [`silu_mul`](Backend::silu_mul).
    fn gated_linear(&self, call: gated_linear::Call<'_>) -> Result<(), KernelError> {
        let gated = silu_mul::Call { gate_up: call.gate_up.view(), out: call.out };
        self.linear(linear::Call {
            x: call.x,
            weight: call.weight,
            bias: call.bias,
            accumulate: false,
            scratch: call.scratch,
            out: call.gate_up.view(),
        })?;
        self.silu_mul(gated)
    }
    /// Chooses each row's experts, and sorts the choices by expert.
    fn route(&self, call: route::Call<'_>) -> Result<(), KernelError>;
    /// Normalizes rows, multiplies them by a router, and routes them. The default calls the
    /// three operations in turn.
    fn rms_norm_route(&self, call: rms_norm_route::Call<'_>) -> Result<(), KernelError> {
        self.rms_norm(call.norm)?;
        self.linear(call.product)?;
        self.route(call.routing)
    }
    /// Multiplies rows by the gate and up weights of their experts, and applies the gate.
    fn gated_experts(&self, call: gated_experts::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies by the experts' down weights, and adds each row's weighted sum to the output.
    fn add_experts(&self, call: add_experts::Call<'_>) -> Result<(), KernelError>;
    /// Does the same as [`add_experts`](Backend::add_experts), and normalizes the rows of the sum.
    /// The default calls the two operations in turn.
    fn add_experts_rms_norm(&self, call: add_experts_rms_norm::Call<'_>) -> Result<(), KernelError> {
        let add_experts_rms_norm::Call { experts, weight, epsilon, out } = call;
        let sum = experts.sum;
        self.add_experts(add_experts::Call { sum: sum.view(), ..experts })?;
        self.rms_norm(rms_norm::Call { x: sum, weight, epsilon, out })
    }
    /// Sums the tensors of all ranks. Unlike other operations, a collective may wait for other
    /// devices, for a bounded time.
    fn all_reduce(&self, call: all_reduce::Call<'_>) -> Result<(), KernelError>;
    /// Sums the tensors of all ranks onto a residual, and normalizes its rows by their root mean
    /// square. The default is [`all_reduce`](Backend::all_reduce) followed by
    /// [`rms_norm`](Backend::rms_norm).
    fn all_reduce_rms_norm(&self, call: all_reduce_rms_norm::Call<'_>) -> Result<(), KernelError> {
        all_reduce_rms_norm::in_two(self, call)
    }
    /// Concatenates the columns of all ranks. The call may wait, like
    /// [`all_reduce`](Backend::all_reduce).
    fn all_gather(&self, call: all_gather::Call<'_>) -> Result<(), KernelError>;
    /// Picks the largest of the values that the ranks found. The call
    /// may wait, like [`all_reduce`](Backend::all_reduce).
    fn best_of_ranks(&self, call: best_of_ranks::Call<'_>) -> Result<(), KernelError>;

    /// `true` if [`best_of_ranks`](Backend::best_of_ranks) is supported. Otherwise each rank
    /// chooses from the gathered logits.
    fn chooses_among_ranks(&self) -> bool {
        true
    }
    /// Applies rotary embeddings to heads in place.
    fn rotary(&self, call: rotary::Call<'_>) -> Result<(), KernelError>;
    /// Applies rotary embeddings to queries and keys, and writes keys and values into
    /// the KV cache's blocks.
    fn rotary_kv_write(&self, call: rotary_kv_write::Call<'_>) -> Result<(), KernelError>;
    /// Computes causal attention of new tokens over the KV cache's blocks.
    fn attention_paged(&self, call: attention_paged::Call<'_>) -> Result<(), KernelError>;
    /// Computes bidirectional attention within packed ranges of rows.
    fn attention_packed(&self, call: attention_packed::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies the SiLU of one half of the columns by the other half.
    fn silu_mul(&self, call: silu_mul::Call<'_>) -> Result<(), KernelError>;
    /// Quantizes rows to E4M3.
    fn quantize(&self, call: quantize::Call<'_>) -> Result<(), KernelError>;
    /// Applies the Gaussian error linear unit in place.
    fn gelu(&self, call: gelu::Call<'_>) -> Result<(), KernelError>;
    /// Copies rows from given indices.
    fn gather_rows(&self, call: gather_rows::Call<'_>) -> Result<(), KernelError>;
    /// Writes rows to given indices.
    fn scatter_rows(&self, call: scatter_rows::Call<'_>) -> Result<(), KernelError>;
    /// Adds rows from given indices to rows at given indices.
    fn add_rows(&self, call: add_rows::Call<'_>) -> Result<(), KernelError>;
    /// Finds the index of each row's largest element.
    fn argmax(&self, call: argmax::Call<'_>) -> Result<(), KernelError>;
    /// Chooses a token for each row of logits.
    fn sample(&self, call: sample::Call<'_>) -> Result<(), KernelError>;
}

/// Calls the macro `$then` with the name and the argument of every required operation
/// except copies and collectives.
macro_rules! each_operation {
    ($then:ident) => {
        $then! {
            fill_random: $crate::ops::fill_random::Call<'_>,
            patchify: $crate::ops::patchify::Call<'_>,
            position_grid: $crate::ops::position_grid::Call<'_>,
            embed: $crate::ops::embed::Call<'_>,
            rms_norm: $crate::ops::rms_norm::Call<'_>,
            layer_norm: $crate::ops::layer_norm::Call<'_>,
            linear: $crate::ops::linear::Call<'_>,
            route: $crate::ops::route::Call<'_>,
            gated_experts: $crate::ops::gated_experts::Call<'_>,
            add_experts: $crate::ops::add_experts::Call<'_>,
            rotary: $crate::ops::rotary::Call<'_>,
            rotary_kv_write: $crate::ops::rotary_kv_write::Call<'_>,
            attention_paged: $crate::ops::attention_paged::Call<'_>,
            attention_packed: $crate::ops::attention_packed::Call<'_>,
            silu_mul: $crate::ops::silu_mul::Call<'_>,
            quantize: $crate::ops::quantize::Call<'_>,
            gelu: $crate::ops::gelu::Call<'_>,
            gather_rows: $crate::ops::gather_rows::Call<'_>,
            scatter_rows: $crate::ops::scatter_rows::Call<'_>,
            add_rows: $crate::ops::add_rows::Call<'_>,
            argmax: $crate::ops::argmax::Call<'_>,
            sample: $crate::ops::sample::Call<'_>,
        }
    };
}
pub(crate) use each_operation;

/// The captured launches of one pass, replayed as a unit.
///
/// A graph may be replayed only on the lane that captured it, and only while all memory that its
/// launches access is backed.
pub trait Graph: Send {
    /// Queues the whole graph on the lane's stream. The driver allocates nothing for a replay.
    ///
    /// # Errors
    /// The device is lost.
    fn replay(&self) -> Result<(), KernelError>;

    /// Device memory that the graph uses outside any lease, measured when the graph was created.
    /// The driver allocates in large pieces, so a single graph may appear to use no memory or too
    /// much. The sum over many graphs is correct.
    fn bytes(&self) -> Bytes;
}
