//! What a backend computes: one method an operation, called with everything checked and the output taken.

use bursar_budgets::Bytes;

use crate::{KernelError, Target, ops::*};

/// Layers that autotuning should run through, where there are as many: autotuning goes over the weights of so many, since
/// no cache holds the last layer's when the next step comes.
pub const AUTOTUNED_LAYERS: usize = 8;

/// The arithmetic of every operation, on one target.
///
/// The shared front of an op has checked shapes and types, taken the output and the target's declared scratch from the
/// workspace and counted the work before a method here is called. A backend takes no device memory, keeps none of the
/// views it is given, and leaves the order of calls as it is: one lane, one stream.
///
/// Host memory handed to [`upload`](Backend::upload) may go once the call returns; [`download`](Backend::download)
/// returns with the data there. No other method but [`wait_for_all`](Backend::wait_for_all) may wait for the device: the
/// host prepares the next pass while this one runs, and [`download_later`](Backend::download_later) is how it reads what a pass has given without stopping the next.
pub trait Backend {
    /// False for a backend that touches no memory, and so may run over a dry workspace.
    const COMPUTES: bool;

    /// What this backend computes on.
    fn target(&self) -> &Target;

    /// Whether what is computed from now on is thrown away (the stress before READY): the backend may then measure
    /// which of several algorithms is the fastest. Until it is switched off the weights of products stay where they
    /// are.
    fn autotune(&self, _on: bool) {}

    /// Measures how the products that were met since autotuning began are computed fastest, also for other numbers of
    /// rows than were met. Nothing is measured twice.
    ///
    /// # Errors
    /// The device is lost.
    fn measure(&self, _: measure::Call<'_>) -> Result<(), KernelError> {
        Ok(())
    }

    /// Calls `run` once and keeps what it launches as a graph, to be run as often as wanted; nothing of it runs now. `run`
    /// may launch and nothing else: no upload, no download. All addresses, shapes and numbers are kept as they are. None
    /// from a backend that has no graphs, which then does not call `run`.
    ///
    /// Each product of `run` should have been autotuned before, in the same shape.
    ///
    /// # Errors
    /// What `run` says, or that the device does not take it as a graph; the backend goes on as if nothing had been asked.
    fn capture(
        &self,
        _run: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> Result<Option<Box<dyn Graph>>, KernelError> {
        Ok(None)
    }

    /// Returns when the device is past all that was put into this lane, whatever became of it: nothing is asked of the
    /// device's or the host's memory for it. For a backend whose calls return when they are done there is nothing to wait
    /// for.
    ///
    /// # Errors
    /// The device is lost: it is past everything then.
    fn wait_for_all(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// A drill: of the launches from now on, `after` go well, and then `count` are refused by the device as what it has
    /// no room for. That breaks nothing but their passes. Backends that launch nothing do nothing.
    fn fail_launches(&self, _after: usize, _count: usize) {}

    /// Copies host memory to the device.
    fn upload(&self, call: transfer::Upload<'_>) -> Result<(), KernelError>;
    /// Copies device memory to the host, after everything launched before.
    fn download(&self, call: transfer::Download<'_>) -> Result<(), KernelError>;
    /// Draws random numbers in place.
    fn fill_random(&self, call: fill_random::Call<'_>) -> Result<(), KernelError>;
    /// Begins to copy device memory to the host, after everything launched before, and returns at once. What is launched
    /// later may overwrite the source.
    fn download_later(&self, call: transfer::DownloadLater<'_>) -> Result<Box<dyn transfer::Arrival>, KernelError>;
    /// Cuts pictures into normalised patches.
    fn patchify(&self, call: patchify::Call<'_>) -> Result<(), KernelError>;
    /// Looks rows of a table up, of ids or of what the pass before has chosen.
    fn embed(&self, call: embed::Call<'_>) -> Result<(), KernelError>;
    /// Normalises rows by their root mean square.
    fn rms_norm(&self, call: rms_norm::Call<'_>) -> Result<(), KernelError>;
    /// Adds to a residual, and normalises its rows by their root mean square.
    fn add_rms_norm(&self, call: add_rms_norm::Call<'_>) -> Result<(), KernelError>;
    /// Normalises rows by their mean and variance.
    fn layer_norm(&self, call: layer_norm::Call<'_>) -> Result<(), KernelError>;
    /// Adds to a residual, and normalises its rows by their mean and variance.
    fn add_layer_norm(&self, call: add_layer_norm::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies by a weight, with bias, onto or into the output.
    fn linear(&self, call: linear::Call<'_>) -> Result<(), KernelError>;
    /// Multiplies by gate and up, and gates. What does not know better multiplies first.
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
    /// Rotates heads in place.
    fn rotary(&self, call: rotary::Call<'_>) -> Result<(), KernelError>;
    /// Rotates queries and keys, and writes keys and values into the cache's blocks.
    fn rotary_kv_write(&self, call: rotary_kv_write::Call<'_>) -> Result<(), KernelError>;
    /// Causal attention of new tokens over the cache's blocks.
    fn attention_paged(&self, call: attention_paged::Call<'_>) -> Result<(), KernelError>;
    /// Attention in both directions within packed stretches of rows.
    fn attention_packed(&self, call: attention_packed::Call<'_>) -> Result<(), KernelError>;
    /// SiLU of one half times the other.
    fn silu_mul(&self, call: silu_mul::Call<'_>) -> Result<(), KernelError>;
    /// The Gaussian error linear unit in place.
    fn gelu(&self, call: gelu::Call<'_>) -> Result<(), KernelError>;
    /// Copies chosen rows.
    fn gather_rows(&self, call: gather_rows::Call<'_>) -> Result<(), KernelError>;
    /// Writes rows to chosen places.
    fn scatter_rows(&self, call: scatter_rows::Call<'_>) -> Result<(), KernelError>;
    /// The place of each row's largest element.
    fn argmax(&self, call: argmax::Call<'_>) -> Result<(), KernelError>;
    /// A token for each row of logits.
    fn sample(&self, call: sample::Call<'_>) -> Result<(), KernelError>;
}

/// What a backend has captured: the launches of a pass, run again in one go.
///
/// It may be replayed as long as all memory that its launches name is there, on the lane that captured it alone.
pub trait Graph: Send {
    /// Puts all of it behind what the lane's stream was given. The device's memory stays as it is: nothing is asked of
    /// the driver.
    ///
    /// # Errors
    /// The device is lost.
    fn replay(&self) -> Result<(), KernelError>;

    /// What it takes of the device's memory, beside any lease: as measured when it was made, in the driver's own pieces,
    /// so that some graphs seem to take nothing and some too much. Sums over many are right.
    fn bytes(&self) -> Bytes;
}
