//! The interface of a backend: one method per operation. Arguments are already checked, and the
//! output is already taken from the workspace.

use bursar_budgets::Bytes;

use crate::{KernelError, Rank, Target, calls};

/// Number of layers that autotuning should run, if the model has that many. In a real step, no
/// cache still contains a layer's weights from the preceding step. Autotuning over this many layers
/// reproduces that condition.
pub const AUTOTUNED_LAYERS: usize = 8;

/// The arithmetic of every operation, on one target.
///
/// Before a backend method is called, the operation's method in [`crate::ops`] has checked shapes
/// and types, taken the output and the target's declared scratch from the workspace, and counted
/// the work. A backend allocates no device memory, keeps no view after a call returns and never
/// reorders calls: there is one lane with one stream.
///
/// Host memory passed to [`upload`](Backend::upload) may be freed once the call returns;
/// [`download`](Backend::download) returns with the data copied. Apart from these methods,
/// [`wait_for_all`](Backend::wait_for_all), collectives and autotuning, no method may wait for the
/// device: the host prepares the next pass while the current pass runs, and reads a pass's results
/// with [`download_later`](Backend::download_later), which does not delay the next pass.
pub trait Backend {
    /// `false` for a backend that touches no memory and may therefore run over a dry workspace.
    const COMPUTES: bool;

    /// Returns the machine that this backend computes on.
    fn target(&self) -> &Target;

    /// Returns this backend's rank among the devices that compute a model together.
    fn rank(&self) -> Rank {
        Rank::ALONE
    }

    /// Turns autotuning on or off. While autotuning is on, the caller discards all results (as in
    /// the stress runs before READY), so the backend may time several algorithms. The weights of
    /// all GEMMs must keep their addresses until autotuning is turned off.
    fn autotune(&self, _on: bool) {}

    /// Times the algorithms for each GEMM that ran since autotuning was turned on, also at other
    /// row counts. No GEMM is measured twice.
    ///
    /// # Errors
    /// The device is lost.
    fn measure(&self, _: calls::Measure<'_>) -> Result<(), KernelError> {
        Ok(())
    }

    /// Calls `run` once and keeps the launches as a graph for later replays. Nothing is executed
    /// during the capture. `run` may only launch operations: it must not upload or download. All
    /// addresses, shapes and numbers are fixed in the graph. A backend without graphs returns
    /// `None` and does not call `run`.
    ///
    /// Each GEMM in `run` should have been autotuned before, in the same shape.
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

    /// Notifies the other ranks that this rank takes part in no further collectives, so that no
    /// rank waits for it. Ranks that exchange data through host memory need no notification,
    /// because they detect that this rank has dropped its end of the link.
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
    fn upload(&self, call: calls::Upload<'_>) -> Result<(), KernelError>;
    /// Copies device memory to the host once all earlier work is done.
    fn download(&self, call: calls::Download<'_>) -> Result<(), KernelError>;
    /// Draws random numbers in place.
    fn fill_random(&self, call: calls::FillRandom<'_>) -> Result<(), KernelError>;
    /// Starts a copy of device memory to the host, ordered after all earlier work, and returns at
    /// once. Later launches may overwrite the source.
    fn download_later(&self, call: calls::DownloadLater<'_>) -> Result<Box<dyn calls::Arrival>, KernelError>;
    /// Starts copies of blocks between the device and host memory, and returns at once.
    /// [`calls::CopyBlocks`] describes how the copies are ordered with other work.
    fn copy_blocks(&self, call: calls::CopyBlocks<'_>) -> Result<Box<dyn calls::Copying>, KernelError>;
    /// Cuts pictures into normalized patches.
    fn patchify(&self, call: calls::Patchify<'_>) -> Result<(), KernelError>;
    /// Interpolates learned position embeddings between the points of a grid.
    fn position_grid(&self, call: calls::PositionGrid<'_>) -> Result<(), KernelError>;
    /// Looks up rows of a table, by token id or by the choices of the previous pass.
    fn embed(&self, call: calls::Embed<'_>) -> Result<(), KernelError>;
    /// Normalizes rows by their root mean square.
    fn rms_norm(&self, call: calls::RmsNorm<'_>) -> Result<(), KernelError>;
    /// Normalizes rows by their root mean square, and adds them to other rows.
    fn rms_norm_add(&self, call: calls::RmsNormAdd<'_>) -> Result<(), KernelError>;
    /// Normalizes rows by their mean and variance.
    fn layer_norm(&self, call: calls::LayerNorm<'_>) -> Result<(), KernelError>;
    /// Multiplies rows by a weight, adds the bias if there is one, and writes the result or adds it
    /// to the output.
    fn linear(&self, call: calls::Linear<'_>) -> Result<(), KernelError>;
    /// Multiplies rows by the gate and up weights, and applies the gate. The default is the GEMM
    /// followed by [`gate_mul`](Backend::gate_mul).
    fn gated_linear(&self, call: calls::GatedLinear<'_>) -> Result<(), KernelError> {
        self.linear(calls::Linear {
            x: call.x,
            weight: call.weight,
            bias: call.bias,
            accumulate: false,
            scratch: call.scratch,
            out: call.gate_up.view(),
        })?;
        self.gate_mul(calls::GateMul::of(&call.gate_up, call.activation, call.out.view()))
    }
    /// Chooses each row's experts, and sorts the choices by expert.
    fn route(&self, call: calls::Route<'_>) -> Result<(), KernelError>;
    /// Normalizes rows, multiplies them by a router, and routes them. The default calls the
    /// three operations in turn.
    fn rms_norm_route(&self, call: calls::RmsNormRoute<'_>) -> Result<(), KernelError> {
        self.rms_norm(call.norm)?;
        self.linear(call.product)?;
        self.route(call.routing)
    }
    /// Multiplies rows by the gate and up weights of their experts, and applies the gate.
    fn gated_experts(&self, call: calls::GatedExperts<'_>) -> Result<(), KernelError>;
    /// Multiplies rows by their experts' down weights, and writes each row's weighted sum or adds
    /// it to the output.
    fn add_experts(&self, call: calls::AddExperts<'_>) -> Result<(), KernelError>;
    /// Does the same as [`add_experts`](Backend::add_experts), and normalizes the rows of the sum.
    /// The default calls the two operations in turn.
    fn add_experts_rms_norm(&self, call: calls::AddExpertsRmsNorm<'_>) -> Result<(), KernelError> {
        let calls::AddExpertsRmsNorm { experts, weight, weight_offset, epsilon, out } = call;
        let sum = experts.sum;
        self.add_experts(calls::AddExperts { sum: sum.view(), ..experts })?;
        self.rms_norm(calls::RmsNorm { x: sum, weight, weight_offset, epsilon, out })
    }
    /// Sums the tensors of all ranks. Unlike other operations, a collective may wait for other
    /// devices, for a bounded time.
    fn all_reduce(&self, call: calls::AllReduce<'_>) -> Result<(), KernelError>;
    /// Sums the tensors of all ranks onto a residual, and normalizes its rows by their root mean
    /// square. The default is [`all_reduce`](Backend::all_reduce) followed by
    /// [`rms_norm`](Backend::rms_norm).
    fn all_reduce_rms_norm(&self, call: calls::AllReduceRmsNorm<'_>) -> Result<(), KernelError> {
        all_reduce_then_rms_norm(self, call)
    }
    /// Concatenates the columns of all ranks. The call may wait, like
    /// [`all_reduce`](Backend::all_reduce).
    fn all_gather(&self, call: calls::AllGather<'_>) -> Result<(), KernelError>;
    /// Picks the largest of the values that the ranks found. The call
    /// may wait, like [`all_reduce`](Backend::all_reduce).
    fn best_of_ranks(&self, call: calls::BestOfRanks<'_>) -> Result<(), KernelError>;

    /// `true` if [`best_of_ranks`](Backend::best_of_ranks) is supported. Otherwise each rank
    /// chooses from the gathered logits.
    fn chooses_among_ranks(&self) -> bool {
        true
    }
    /// Applies rotary embeddings to heads in place.
    fn rotary(&self, call: calls::Rotary<'_>) -> Result<(), KernelError>;
    /// Applies rotary embeddings to queries and keys, and writes keys and values into
    /// the KV cache's blocks.
    fn rotary_kv_write(&self, call: calls::RotaryKvWrite<'_>) -> Result<(), KernelError>;
    /// Computes attention of new tokens over the KV cache's blocks.
    fn attention_paged(&self, call: calls::AttentionPaged<'_>) -> Result<(), KernelError>;
    /// Computes bidirectional attention within packed ranges of rows.
    fn attention_packed(&self, call: calls::AttentionPacked<'_>) -> Result<(), KernelError>;
    /// Convolves the rows of each sequence along its tokens.
    fn causal_conv(&self, call: calls::CausalConv<'_>) -> Result<(), KernelError>;
    /// Runs the gated delta rule over the rows of each sequence.
    fn gated_delta(&self, call: calls::GatedDelta<'_>) -> Result<(), KernelError>;
    /// Normalizes heads by their root mean square, and multiplies them by the SiLU of a gate.
    fn gated_rms_norm(&self, call: calls::GatedRmsNorm<'_>) -> Result<(), KernelError>;
    /// Multiplies rows by the sigmoid of a gate in place.
    fn sigmoid_mul(&self, call: calls::SigmoidMul<'_>) -> Result<(), KernelError>;
    /// Multiplies the activation of one half of the columns by the other half.
    fn gate_mul(&self, call: calls::GateMul<'_>) -> Result<(), KernelError>;
    /// Quantizes rows to [`Quantization::ELEMENTS`](crate::Quantization::ELEMENTS).
    fn quantize(&self, call: calls::Quantize<'_>) -> Result<(), KernelError>;
    /// Applies the Gaussian error linear unit in place.
    fn gelu(&self, call: calls::ApplyGelu<'_>) -> Result<(), KernelError>;
    /// Clamps elements to a range.
    fn clamp(&self, call: calls::Clamp<'_>) -> Result<(), KernelError>;
    /// Shifts and scales columns.
    fn standardize(&self, call: calls::Standardize<'_>) -> Result<(), KernelError>;
    /// Replaces each `x` by `cap * tanh(x / cap)`, in place.
    fn soft_cap(&self, call: calls::SoftCap<'_>) -> Result<(), KernelError>;
    /// Computes means of consecutive rows.
    fn mean_rows(&self, call: calls::MeanRows<'_>) -> Result<(), KernelError>;
    /// Copies rows from given indices.
    fn gather_rows(&self, call: calls::GatherRows<'_>) -> Result<(), KernelError>;
    /// Writes rows to given indices.
    fn scatter_rows(&self, call: calls::ScatterRows<'_>) -> Result<(), KernelError>;
    /// Adds rows from given indices to rows at given indices.
    fn add_rows(&self, call: calls::AddRows<'_>) -> Result<(), KernelError>;
    /// Finds the index of each row's largest element.
    fn argmax(&self, call: calls::Argmax<'_>) -> Result<(), KernelError>;
    /// Finds, for each row, the token with the largest logit among the tokens of the row's best clusters.
    fn clustered_argmax(&self, call: calls::ClusteredArgmax<'_>) -> Result<(), KernelError>;
    /// Chooses a token for each row of logits.
    fn sample(&self, call: calls::Sample<'_>) -> Result<(), KernelError>;
}

/// Calls the macro `$then` with the name and the argument of every required operation
/// except copies and collectives.
macro_rules! each_operation {
    ($then:ident) => {
        $then! {
            fill_random: $crate::calls::FillRandom<'_>,
            patchify: $crate::calls::Patchify<'_>,
            position_grid: $crate::calls::PositionGrid<'_>,
            embed: $crate::calls::Embed<'_>,
            rms_norm: $crate::calls::RmsNorm<'_>,
            rms_norm_add: $crate::calls::RmsNormAdd<'_>,
            layer_norm: $crate::calls::LayerNorm<'_>,
            linear: $crate::calls::Linear<'_>,
            route: $crate::calls::Route<'_>,
            gated_experts: $crate::calls::GatedExperts<'_>,
            add_experts: $crate::calls::AddExperts<'_>,
            rotary: $crate::calls::Rotary<'_>,
            rotary_kv_write: $crate::calls::RotaryKvWrite<'_>,
            attention_paged: $crate::calls::AttentionPaged<'_>,
            attention_packed: $crate::calls::AttentionPacked<'_>,
            causal_conv: $crate::calls::CausalConv<'_>,
            gated_delta: $crate::calls::GatedDelta<'_>,
            gated_rms_norm: $crate::calls::GatedRmsNorm<'_>,
            sigmoid_mul: $crate::calls::SigmoidMul<'_>,
            gate_mul: $crate::calls::GateMul<'_>,
            quantize: $crate::calls::Quantize<'_>,
            gelu: $crate::calls::ApplyGelu<'_>,
            soft_cap: $crate::calls::SoftCap<'_>,
            clamp: $crate::calls::Clamp<'_>,
            standardize: $crate::calls::Standardize<'_>,
            gather_rows: $crate::calls::GatherRows<'_>,
            scatter_rows: $crate::calls::ScatterRows<'_>,
            mean_rows: $crate::calls::MeanRows<'_>,
            add_rows: $crate::calls::AddRows<'_>,
            argmax: $crate::calls::Argmax<'_>,
            clustered_argmax: $crate::calls::ClusteredArgmax<'_>,
            sample: $crate::calls::Sample<'_>,
        }
    };
}
pub(crate) use each_operation;

/// Calls [`all_reduce`](Backend::all_reduce) and [`rms_norm`](Backend::rms_norm) in turn.
pub(crate) fn all_reduce_then_rms_norm<B: Backend + ?Sized>(
    backend: &B,
    call: calls::AllReduceRmsNorm<'_>,
) -> Result<(), KernelError> {
    let calls::AllReduceRmsNorm { partial, residual, weight, weight_offset, epsilon, out } = call;
    backend.all_reduce(calls::AllReduce { partial, accumulate: true, out: residual.view() })?;
    backend.rms_norm(calls::RmsNorm { x: residual, weight, weight_offset, epsilon, out })
}

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
