//! The operations of the CUDA backend.

use super::{
    attention, collectives, download_staging, elementwise, experts, gemm, graph, lane::Cuda, quantize,
    rank_link::RankLink, rotary, sample, states,
};
use crate::{
    Backend, Graph, KernelError, Rank, Target,
    calls::{self, Arrival},
};

impl Backend for Cuda {
    const COMPUTES: bool = true;

    fn target(&self) -> &Target {
        &self.target
    }

    fn rank(&self) -> Rank {
        self.link.as_ref().map_or(Rank::ALONE, RankLink::rank)
    }

    fn abort_collectives(&self) {
        collectives::abort_collectives(self);
    }

    fn wait_for_all(&self) -> Result<(), KernelError> {
        self.wait()
    }

    fn upload(&self, call: calls::Upload<'_>) -> Result<(), KernelError> {
        self.enter_to_copy()?;
        Ok(self.stage.borrow_mut().upload(&self.stream, call.source, call.out.address())?)
    }

    fn download(&self, call: calls::Download<'_>) -> Result<(), KernelError> {
        self.enter_to_copy()?;
        self.stage.borrow_mut().download(&self.stream, call.source.address(), call.out)?;
        self.check_link()
    }

    fn download_later(&self, call: calls::DownloadLater<'_>) -> Result<Box<dyn Arrival>, KernelError> {
        self.enter_to_copy()?;
        let device = &self.kernels.device;
        let witness = self.link.as_ref().and_then(RankLink::witness);
        Ok(Box::new(download_staging::Download::begin(&self.arrivals, device, &self.stream, &call.source, witness)?))
    }

    fn copy_blocks(&self, call: calls::CopyBlocks<'_>) -> Result<Box<dyn calls::Copying>, KernelError> {
        self.enter_to_copy()?;
        let copies = self.copies.as_ref().expect("only a lane with a stream for copies copies blocks");
        Ok(copies.start(&self.stream, &self.kernels.device, call)?)
    }

    fn autotune(&self, on: bool) {
        self.gemm.autotune(on);
    }

    fn measure(&self, call: calls::Measure<'_>) -> Result<(), KernelError> {
        gemm::measure(self, call)
    }

    fn capture(&self, run: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Option<Box<dyn Graph>>, KernelError> {
        Ok(Some(Box::new(graph::Captured::of(self, run)?)))
    }

    fn fill_random(&self, call: calls::FillRandom<'_>) -> Result<(), KernelError> {
        elementwise::fill_random(self, call)
    }

    fn patchify(&self, call: calls::Patchify<'_>) -> Result<(), KernelError> {
        elementwise::patchify(self, call)
    }

    fn position_grid(&self, call: calls::PositionGrid<'_>) -> Result<(), KernelError> {
        elementwise::position_grid(self, call)
    }

    fn all_reduce(&self, call: calls::AllReduce<'_>) -> Result<(), KernelError> {
        collectives::all_reduce(self, call)
    }

    fn all_reduce_rms_norm(&self, call: calls::AllReduceRmsNorm<'_>) -> Result<(), KernelError> {
        collectives::all_reduce_rms_norm(self, call)
    }

    fn all_gather(&self, call: calls::AllGather<'_>) -> Result<(), KernelError> {
        collectives::all_gather(self, call)
    }

    fn best_of_ranks(&self, call: calls::BestOfRanks<'_>) -> Result<(), KernelError> {
        collectives::best_of_ranks(self, call)
    }

    fn chooses_among_ranks(&self) -> bool {
        matches!(self.link, None | Some(RankLink::Kernels(_)))
    }

    fn embed(&self, call: calls::Embed<'_>) -> Result<(), KernelError> {
        elementwise::embed(self, call)
    }

    fn route(&self, call: calls::Route<'_>) -> Result<(), KernelError> {
        experts::route(self, call)
    }

    fn rms_norm_route(&self, call: calls::RmsNormRoute<'_>) -> Result<(), KernelError> {
        experts::rms_norm_route(self, call)
    }

    fn gated_experts(&self, call: calls::GatedExperts<'_>) -> Result<(), KernelError> {
        experts::gated_experts(self, call)
    }

    fn add_experts(&self, call: calls::AddExperts<'_>) -> Result<(), KernelError> {
        experts::add_experts(self, call)
    }

    fn add_experts_rms_norm(&self, call: calls::AddExpertsRmsNorm<'_>) -> Result<(), KernelError> {
        experts::add_experts_rms_norm(self, call)
    }

    fn rms_norm(&self, call: calls::RmsNorm<'_>) -> Result<(), KernelError> {
        elementwise::rms_norm(self, call)
    }

    fn rms_norm_add(&self, call: calls::RmsNormAdd<'_>) -> Result<(), KernelError> {
        elementwise::rms_norm_add(self, call)
    }

    fn layer_norm(&self, call: calls::LayerNorm<'_>) -> Result<(), KernelError> {
        elementwise::layer_norm(self, call)
    }

    fn linear(&self, call: calls::Linear<'_>) -> Result<(), KernelError> {
        gemm::linear(self, call)
    }

    fn gated_linear(&self, call: calls::GatedLinear<'_>) -> Result<(), KernelError> {
        gemm::gated_linear(self, call)
    }

    fn rotary(&self, call: calls::Rotary<'_>) -> Result<(), KernelError> {
        rotary::rotary(self, call)
    }

    fn rotary_kv_write(&self, call: calls::RotaryKvWrite<'_>) -> Result<(), KernelError> {
        rotary::rotary_kv_write(self, call)
    }

    fn attention_paged(&self, call: calls::AttentionPaged<'_>) -> Result<(), KernelError> {
        attention::paged(self, call)
    }

    fn attention_packed(&self, call: calls::AttentionPacked<'_>) -> Result<(), KernelError> {
        attention::packed(self, call)
    }

    fn causal_conv(&self, call: calls::CausalConv<'_>) -> Result<(), KernelError> {
        states::causal_conv(self, call)
    }

    fn gated_delta(&self, call: calls::GatedDelta<'_>) -> Result<(), KernelError> {
        states::gated_delta(self, call)
    }

    fn gated_rms_norm(&self, call: calls::GatedRmsNorm<'_>) -> Result<(), KernelError> {
        states::gated_rms_norm(self, call)
    }

    fn sigmoid_mul(&self, call: calls::SigmoidMul<'_>) -> Result<(), KernelError> {
        states::sigmoid_mul(self, call)
    }

    fn gate_mul(&self, call: calls::GateMul<'_>) -> Result<(), KernelError> {
        elementwise::gate_mul(self, call)
    }

    fn mean_rows(&self, call: calls::MeanRows<'_>) -> Result<(), KernelError> {
        elementwise::mean_rows(self, call)
    }

    fn quantize(&self, call: calls::Quantize<'_>) -> Result<(), KernelError> {
        quantize::quantize(self, call)
    }

    fn clamp(&self, call: calls::Clamp<'_>) -> Result<(), KernelError> {
        elementwise::clamp(self, call)
    }

    fn standardize(&self, call: calls::Standardize<'_>) -> Result<(), KernelError> {
        elementwise::standardize(self, call)
    }

    fn soft_cap(&self, call: calls::SoftCap<'_>) -> Result<(), KernelError> {
        elementwise::soft_cap(self, call)
    }

    fn gelu(&self, call: calls::ApplyGelu<'_>) -> Result<(), KernelError> {
        elementwise::gelu(self, call)
    }

    fn gather_rows(&self, call: calls::GatherRows<'_>) -> Result<(), KernelError> {
        elementwise::gather_rows(self, call)
    }

    fn scatter_rows(&self, call: calls::ScatterRows<'_>) -> Result<(), KernelError> {
        elementwise::scatter_rows(self, call)
    }

    fn add_rows(&self, call: calls::AddRows<'_>) -> Result<(), KernelError> {
        elementwise::add_rows(self, call)
    }

    fn argmax(&self, call: calls::Argmax<'_>) -> Result<(), KernelError> {
        elementwise::argmax(self, call)
    }

    fn clustered_argmax(&self, call: calls::ClusteredArgmax<'_>) -> Result<(), KernelError> {
        elementwise::clustered_argmax(self, call)
    }

    fn sample(&self, call: calls::Sample<'_>) -> Result<(), KernelError> {
        sample::sample(self, call)
    }
}
