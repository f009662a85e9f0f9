//! What a backend computes: one method per operation. Arguments are already checked and the output already taken.

use bursar_budgets::Bytes;

use crate::{KernelError, Rank, Target, ops::*};

/// Layers that autotuning should run through, if the model has that many. In a real step no cache still holds a layer's
/// weights from the step before; autotuning over this many layers sees the same.
pub const AUTOTUNED_LAYERS: usize = 8;

/// The arithmetic of every operation, on one target.
///
/// Before a method is called, the front of the operation in [`crate::ops`] has checked shapes and types, taken the
/// output and the target's declared scratch from the workspace, and counted the work. A backend takes no device memory,
/// keeps none of the views it is given and never reorders calls: one lane, one stream.
///
/// Host memory passed to [`upload`](Backend::upload) may be freed once the call returns;
/// [`download`](Backend::download) returns with the data copied. Apart from these and
/// [`wait_for_all`](Backend::wait_for_all), no method may wait for the device: the host prepares the next pass while
/// this one runs, and reads a pass's results with [`download_later`](Backend::download_later), which does not hold up
/// the next pass.
pub trait Backend {
    /// False for a backend that touches no memory and may therefore run over a dry workspace.
    const COMPUTES: bool;

    /// The machine this backend computes on.
    fn target(&self) -> &Target;

    /// Its place among the devices that compute a model together.
    fn rank(&self) -> Rank {
        Rank::ALONE
    }

    /// Turns autotuning on or off. While it is on, results are thrown away (the stress before READY), so the backend
    /// may time several algorithms. The weights of products must stay where they are until it is turned off.
    fn autotune(&self, _on: bool) {}

    /// Times the algorithms for each product met since autotuning began, at other row counts as well. Nothing is
    /// measured twice.
    ///
    /// # Errors
    /// The device is lost.
    fn measure(&self, _: measure::Call<'_>) -> Result<(), KernelError> {
        Ok(())
    }

    /// Calls `run` once and keeps what it launches as a graph for later replays; nothing is executed now. `run` may
    /// only launch: no upload, no download. All addresses, shapes and numbers are kept as they are. A backend without
    /// graphs returns `None` and does not call `run`.
    ///
    /// Each product in `run` should have been autotuned before, in the same shape.
    ///
    /// # Errors
    /// What `run` returns, or that the device refuses the graph. The backend stays usable either way.
    fn capture(
        &self,
        _run: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> Result<Option<Box<dyn Graph>>, KernelError> {
        Ok(None)
    }

    /// Tells the other ranks that this one comes to no more exchanges, so that none waits for it. Those of a link that meets on
    /// the host miss it when its end of the link is gone.
    fn part(&self) {}

    /// Waits until the device has finished all work of this lane, successfully or not. It allocates nothing on the
    /// device or the host. A backend whose calls are synchronous returns at once.
    ///
    /// # Errors
    /// The device is lost; none of the work is running any more.
    fn wait_for_all(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Copies host memory to the device.
    fn upload(&self, call: transfer::Upload<'_>) -> Result<(), KernelError>;
    /// Copies device memory to the host once all earlier work is done.
    fn download(&self, call: transfer::Download<'_>) -> Result<(), KernelError>;
    /// Draws random numbers in place.
    fn fill_random(&self, call: fill_random::Call<'_>) -> Result<(), KernelError>;
    /// Starts a copy of device memory to the host, ordered after all earlier work, and returns at once. Later launches
    /// may overwrite the source.
    fn download_later(&self, call: transfer::DownloadLater<'_>) -> Result<Box<dyn transfer::Arrival>, KernelError>;
    /// Begins copies of blocks between the device and host memory, and returns at once; see
    /// [`copy_blocks::Call`] for what runs before and after them.
    fn copy_blocks(&self, call: copy_blocks::Call<'_>) -> Result<Box<dyn copy_blocks::Copying>, KernelError>;
    /// Cuts pictures into normalised patches.
    fn patchify(&self, call: patchify::Call<'_>) -> Result<(), KernelError>;
    /// Reads learned positions between the points of a grid.
    fn position_grid(&self, call: position_grid::Call<'_>) -> Result<(), KernelError>;
    /// Looks up rows of a table, by ids or by what the previous pass has chosen.
    fn embed(&self, call: embed::Call<'_>) -> Result<(), KernelError>;
    /// Normalises rows by their root mean square.
    fn rms_norm(&self, call: rms_norm::Call<'_>) -> Result<(), KernelError>;
    /// Normalises rows by their mean and variance.
    fn layer_norm(&self, call: layer_norm::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies by a weight, with bias, onto or into the output.
    fn linear(&self, call: linear::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies by gate and up, and applies the gate. The default is the product followed by
    /// [`silu_mul`](Backend::silu_mul).
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
    /// Normalises rows, multiplies them by a router, and routes them. The default is one after the other.
    fn rms_norm_route(&self, call: rms_norm_route::Call<'_>) -> Result<(), KernelError> {
        self.rms_norm(call.norm)?;
        self.linear(call.product)?;
        self.route(call.routing)
    }
    /// Multiplies rows by their experts' gate and up, and applies the gate.
    fn gated_experts(&self, call: gated_experts::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies by the experts' down weights, and adds each row's weighted sum.
    fn add_experts(&self, call: add_experts::Call<'_>) -> Result<(), KernelError>;
    /// Does the same, and normalises the rows of the sum. The default is one after the other.
    fn add_experts_rms_norm(&self, call: add_experts_rms_norm::Call<'_>) -> Result<(), KernelError> {
        let add_experts_rms_norm::Call { experts, weight, epsilon, out } = call;
        let sum = experts.sum;
        self.add_experts(add_experts::Call { sum: sum.view(), ..experts })?;
        self.rms_norm(rms_norm::Call { x: sum, weight, epsilon, out })
    }
    /// Adds up what the ranks have. Unlike other operations it may wait for other devices, for a bounded time.
    fn all_reduce(&self, call: all_reduce::Call<'_>) -> Result<(), KernelError>;
    /// Adds up what the ranks have onto a residual, and normalises its rows by their root mean square. The default is
    /// [`all_reduce`](Backend::all_reduce) followed by [`rms_norm`](Backend::rms_norm).
    fn all_reduce_rms_norm(&self, call: all_reduce_rms_norm::Call<'_>) -> Result<(), KernelError> {
        all_reduce_rms_norm::in_two(self, call)
    }
    /// Puts what the ranks have side by side. It may wait like [`all_reduce`](Backend::all_reduce).
    fn all_gather(&self, call: all_gather::Call<'_>) -> Result<(), KernelError>;
    /// Picks the largest of what the ranks have found. It may wait like [`all_reduce`](Backend::all_reduce).
    fn best_of_ranks(&self, call: best_of_ranks::Call<'_>) -> Result<(), KernelError>;

    /// Whether it can; otherwise each rank chooses among the columns of all.
    fn chooses_among_ranks(&self) -> bool {
        true
    }
    /// Rotates heads in place.
    fn rotary(&self, call: rotary::Call<'_>) -> Result<(), KernelError>;
    /// Rotates queries and keys, and writes keys and values into the cache's blocks.
    fn rotary_kv_write(&self, call: rotary_kv_write::Call<'_>) -> Result<(), KernelError>;
    /// Causal attention of new tokens over the cache's blocks.
    fn attention_paged(&self, call: attention_paged::Call<'_>) -> Result<(), KernelError>;
    /// Bidirectional attention within packed stretches of rows.
    fn attention_packed(&self, call: attention_packed::Call<'_>) -> Result<(), KernelError>;
    /// SiLU of one half times the other.
    fn silu_mul(&self, call: silu_mul::Call<'_>) -> Result<(), KernelError>;
    /// Rounds rows to E4M3.
    fn quantize(&self, call: quantize::Call<'_>) -> Result<(), KernelError>;
    /// A Gaussian error linear unit in place.
    fn gelu(&self, call: gelu::Call<'_>) -> Result<(), KernelError>;
    /// Copies chosen rows.
    fn gather_rows(&self, call: gather_rows::Call<'_>) -> Result<(), KernelError>;
    /// Writes rows to chosen places.
    fn scatter_rows(&self, call: scatter_rows::Call<'_>) -> Result<(), KernelError>;
    /// Adds chosen rows to chosen places.
    fn add_rows(&self, call: add_rows::Call<'_>) -> Result<(), KernelError>;
    /// The index of each row's largest element.
    fn argmax(&self, call: argmax::Call<'_>) -> Result<(), KernelError>;
    /// Chooses a token for each row of logits.
    fn sample(&self, call: sample::Call<'_>) -> Result<(), KernelError>;
}

/// Calls the macro `$then` with the name and the argument of every required operation but copies.
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
/// It may be replayed only on the lane that captured it, and only while all memory that its launches name is backed.
pub trait Graph: Send {
    /// Queues all of it on the lane's stream. The driver allocates nothing for it.
    ///
    /// # Errors
    /// The device is lost.
    fn replay(&self) -> Result<(), KernelError>;

    /// Device memory it takes outside any lease, as measured when it was made. The driver allocates in large pieces, so
    /// one graph may appear to take nothing and another too much; the sum over many is right.
    fn bytes(&self) -> Bytes;
}
