//! The CPU backend, which computes on leased host memory with `f32` activations. It is the
//! reference for the other backends: simple loops, mostly one file per operation, checked against
//! candle.

mod add_rows;
mod argmax;
mod arithmetic;
mod attention;
mod attention_packed;
mod attention_paged;
#[cfg(target_arch = "x86_64")]
mod block_avx2;
mod block_dot;
mod block_products;
mod clamp;
mod clustered_argmax;
mod copy_blocks;
mod embed;
mod experts;
mod fill_random;
mod gate_mul;
mod gather_rows;
mod gelu;
mod int4;
mod layer_norm;
mod linear;
mod mean_rows;
mod memory;
mod patchify;
mod position_grid;
mod quantize;
mod quantized;
mod ranks;
mod rms_norm;
mod rotary;
mod rotary_kv_write;
mod route;
mod sample;
mod scatter_rows;
mod soft_cap;
mod standardize;
mod states;
mod threads;
mod transfer;

use threads::Threads;

use crate::{Backend, HostLink, KernelError, Rank, Target, calls};

/// Computes on host memory with the calling thread and a separate thread pool.
///
/// Every view passed to this backend must be in *host* memory: either allocated by a
/// [`Scope`](crate::Scope) from a workspace over a host segment, or persistent memory whose
/// validity its creator guarantees.
pub struct Cpu {
    target: Target,
    threads: Threads,
    link: Option<HostLink>,
}

impl Cpu {
    /// Creates a backend that divides each operation among `threads` threads (at least one),
    /// including the calling thread.
    ///
    /// # Panics
    /// If the operating system refuses to start the threads.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        Cpu { target: Target::Cpu { threads }, threads: Threads::new(threads), link: None }
    }

    /// Like [`new`](Cpu::new), as one of several ranks that compute a model together.
    ///
    /// # Panics
    /// If the operating system refuses to start the threads.
    pub fn linked(threads: usize, link: HostLink) -> Self {
        Cpu { link: Some(link), ..Cpu::new(threads) }
    }
}

macro_rules! compute {
    ($($op:ident: $call:ty => $function:path,)*) => {
        $(fn $op(&self, call: $call) -> Result<(), KernelError> { $function(&self.threads, call); Ok(()) })*
    };
}

impl Backend for Cpu {
    const COMPUTES: bool = true;

    fn target(&self) -> &Target {
        &self.target
    }

    fn rank(&self) -> Rank {
        self.link.as_ref().map_or(Rank::ALONE, HostLink::rank)
    }

    fn all_reduce(&self, call: calls::AllReduce<'_>) -> Result<(), KernelError> {
        ranks::all_reduce(&self.threads, self.link.as_ref(), call)
    }

    fn all_gather(&self, call: calls::AllGather<'_>) -> Result<(), KernelError> {
        ranks::all_gather(&self.threads, self.link.as_ref(), call)
    }

    fn best_of_ranks(&self, call: calls::BestOfRanks<'_>) -> Result<(), KernelError> {
        ranks::best_of_ranks(self.link.as_ref(), call)
    }

    fn download_later(&self, call: calls::DownloadLater<'_>) -> Result<Box<dyn calls::Arrival>, KernelError> {
        Ok(transfer::download_later(&self.threads, call))
    }

    fn copy_blocks(&self, call: calls::CopyBlocks<'_>) -> Result<Box<dyn calls::Copying>, KernelError> {
        copy_blocks::copy_blocks(call)
    }

    compute! {
        upload: calls::Upload<'_> => transfer::upload,
        download: calls::Download<'_> => transfer::download,
        fill_random: calls::FillRandom<'_> => fill_random::fill_random,
        patchify: calls::Patchify<'_> => patchify::patchify,
        position_grid: calls::PositionGrid<'_> => position_grid::position_grid,
        embed: calls::Embed<'_> => embed::embed,
        rms_norm: calls::RmsNorm<'_> => rms_norm::rms_norm,
        rms_norm_add: calls::RmsNormAdd<'_> => rms_norm::rms_norm_add,
        layer_norm: calls::LayerNorm<'_> => layer_norm::layer_norm,
        linear: calls::Linear<'_> => linear::linear,
        route: calls::Route<'_> => route::route,
        gated_experts: calls::GatedExperts<'_> => experts::gated_experts,
        add_experts: calls::AddExperts<'_> => experts::add_experts,
        rotary: calls::Rotary<'_> => rotary::rotary,
        rotary_kv_write: calls::RotaryKvWrite<'_> => rotary_kv_write::rotary_kv_write,
        attention_paged: calls::AttentionPaged<'_> => attention_paged::attention_paged,
        attention_packed: calls::AttentionPacked<'_> => attention_packed::attention_packed,
        causal_conv: calls::CausalConv<'_> => states::causal_conv,
        gated_delta: calls::GatedDelta<'_> => states::gated_delta,
        gated_rms_norm: calls::GatedRmsNorm<'_> => states::gated_rms_norm,
        sigmoid_mul: calls::SigmoidMul<'_> => states::sigmoid_mul,
        gate_mul: calls::GateMul<'_> => gate_mul::gate_mul,
        quantize: calls::Quantize<'_> => quantize::quantize,
        gelu: calls::ApplyGelu<'_> => gelu::gelu,
        soft_cap: calls::SoftCap<'_> => soft_cap::soft_cap,
        clamp: calls::Clamp<'_> => clamp::clamp,
        standardize: calls::Standardize<'_> => standardize::standardize,
        gather_rows: calls::GatherRows<'_> => gather_rows::gather_rows,
        scatter_rows: calls::ScatterRows<'_> => scatter_rows::scatter_rows,
        mean_rows: calls::MeanRows<'_> => mean_rows::mean_rows,
        add_rows: calls::AddRows<'_> => add_rows::add_rows,
        argmax: calls::Argmax<'_> => argmax::argmax,
        clustered_argmax: calls::ClusteredArgmax<'_> => clustered_argmax::clustered_argmax,
        sample: calls::Sample<'_> => sample::sample,
    }
}
