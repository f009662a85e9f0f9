//! The operations of the CUDA backend.

use super::{
    attention, copy_blocks, download_staging, elementwise, experts, gemm, graph,
    lane::Cuda,
    quantize,
    rank_link::{self, RankLink},
    rotary, sample,
};
use crate::{Backend, Graph, KernelError, Rank, Target, ops, ops::transfer::Arrival};

impl Backend for Cuda {
    const COMPUTES: bool = true;

    fn target(&self) -> &Target {
        &self.target
    }

    fn rank(&self) -> Rank {
        self.link.as_ref().map_or(Rank::ALONE, RankLink::rank)
    }

    fn abort_collectives(&self) {
        rank_link::abort_collectives(self);
    }

    fn wait_for_all(&self) -> Result<(), KernelError> {
        self.wait()
    }

    fn upload(&self, call: ops::transfer::Upload<'_>) -> Result<(), KernelError> {
        self.enter_to_copy()?;
        Ok(self.stage.borrow_mut().upload(&self.stream, call.source, call.out.address())?)
    }

    fn download(&self, call: ops::transfer::Download<'_>) -> Result<(), KernelError> {
        self.enter_to_copy()?;
        self.stage.borrow_mut().download(&self.stream, call.source.address(), call.out)?;
        self.check_link()
    }

    fn download_later(&self, call: ops::transfer::DownloadLater<'_>) -> Result<Box<dyn Arrival>, KernelError> {
        self.enter_to_copy()?;
        let device = &self.kernels.device;
        let witness = self.link.as_ref().and_then(RankLink::witness);
        Ok(Box::new(download_staging::Download::begin(&self.arrivals, device, &self.stream, &call.source, witness)?))
    }

    fn copy_blocks(&self, call: ops::copy_blocks::Call<'_>) -> Result<Box<dyn ops::copy_blocks::Copying>, KernelError> {
        copy_blocks::copy_blocks(self, call)
    }

    fn autotune(&self, on: bool) {
        self.gemm.autotune(on);
    }

    fn measure(&self, call: ops::measure::Call<'_>) -> Result<(), KernelError> {
        gemm::measure(self, call)
    }

    fn capture(&self, run: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Option<Box<dyn Graph>>, KernelError> {
        Ok(Some(Box::new(graph::Captured::of(self, run)?)))
    }

    fn fill_random(&self, call: ops::fill_random::Call<'_>) -> Result<(), KernelError> {
        elementwise::fill_random(self, call)
    }

    fn patchify(&self, call: ops::patchify::Call<'_>) -> Result<(), KernelError> {
        elementwise::patchify(self, call)
    }

    fn position_grid(&self, call: ops::position_grid::Call<'_>) -> Result<(), KernelError> {
        elementwise::position_grid(self, call)
    }

    fn all_reduce(&self, call: ops::all_reduce::Call<'_>) -> Result<(), KernelError> {
        rank_link::all_reduce(self, call)
    }

    fn all_reduce_rms_norm(&self, call: ops::all_reduce_rms_norm::Call<'_>) -> Result<(), KernelError> {
        rank_link::all_reduce_rms_norm(self, call)
    }

    fn all_gather(&self, call: ops::all_gather::Call<'_>) -> Result<(), KernelError> {
        rank_link::all_gather(self, call)
    }

    fn best_of_ranks(&self, call: ops::best_of_ranks::Call<'_>) -> Result<(), KernelError> {
        rank_link::best_of_ranks(self, call)
    }

    fn chooses_among_ranks(&self) -> bool {
        matches!(self.link, None | Some(RankLink::Kernels(_)))
    }

    fn embed(&self, call: ops::embed::Call<'_>) -> Result<(), KernelError> {
        elementwise::embed(self, call)
    }

    fn route(&self, call: ops::route::Call<'_>) -> Result<(), KernelError> {
        experts::route(self, call)
    }

    fn rms_norm_route(&self, call: ops::rms_norm_route::Call<'_>) -> Result<(), KernelError> {
        experts::rms_norm_route(self, call)
    }

    fn gated_experts(&self, call: ops::gated_experts::Call<'_>) -> Result<(), KernelError> {
        experts::gated_experts(self, call)
    }

    fn add_experts(&self, call: ops::add_experts::Call<'_>) -> Result<(), KernelError> {
        experts::add_experts(self, call)
    }

    fn add_experts_rms_norm(&self, call: ops::add_experts_rms_norm::Call<'_>) -> Result<(), KernelError> {
        experts::add_experts_rms_norm(self, call)
    }

    fn rms_norm(&self, call: ops::rms_norm::Call<'_>) -> Result<(), KernelError> {
        elementwise::rms_norm(self, call)
    }

    fn layer_norm(&self, call: ops::layer_norm::Call<'_>) -> Result<(), KernelError> {
        elementwise::layer_norm(self, call)
    }

    fn linear(&self, call: ops::linear::Call<'_>) -> Result<(), KernelError> {
        gemm::linear(self, call)
    }

    fn gated_linear(&self, call: ops::gated_linear::Call<'_>) -> Result<(), KernelError> {
        gemm::gated_linear(self, call)
    }

    fn rotary(&self, call: ops::rotary::Call<'_>) -> Result<(), KernelError> {
        rotary::rotary(self, call)
    }

    fn rotary_kv_write(&self, call: ops::rotary_kv_write::Call<'_>) -> Result<(), KernelError> {
        rotary::rotary_kv_write(self, call)
    }

    fn attention_paged(&self, call: ops::attention_paged::Call<'_>) -> Result<(), KernelError> {
        attention::paged(self, call)
    }

    fn attention_packed(&self, call: ops::attention_packed::Call<'_>) -> Result<(), KernelError> {
        attention::packed(self, call)
    }

    fn silu_mul(&self, call: ops::silu_mul::Call<'_>) -> Result<(), KernelError> {
        elementwise::silu_mul(self, call)
    }

    fn quantize(&self, call: ops::quantize::Call<'_>) -> Result<(), KernelError> {
        quantize::quantize(self, call)
    }

    fn gelu(&self, call: ops::gelu::Call<'_>) -> Result<(), KernelError> {
        elementwise::gelu(self, call)
    }

    fn gather_rows(&self, call: ops::gather_rows::Call<'_>) -> Result<(), KernelError> {
        elementwise::gather_rows(self, call)
    }

    fn scatter_rows(&self, call: ops::scatter_rows::Call<'_>) -> Result<(), KernelError> {
        elementwise::scatter_rows(self, call)
    }

    fn add_rows(&self, call: ops::add_rows::Call<'_>) -> Result<(), KernelError> {
        elementwise::add_rows(self, call)
    }

    fn argmax(&self, call: ops::argmax::Call<'_>) -> Result<(), KernelError> {
        elementwise::argmax(self, call)
    }

    fn sample(&self, call: ops::sample::Call<'_>) -> Result<(), KernelError> {
        sample::sample(self, call)
    }
}
