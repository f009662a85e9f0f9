//! The names of quantized weights for which a target has no kernels.

use bursar_kernels::{QuantizationScheme, SCALE_BLOCK, Target};

/// All schemes that checkpoints may have, for messages.
pub(super) const SUPPORTED: &str = "FP8 (per block of 128 x 128, per channel or per tensor), NVFP4, MXFP4 (compressed-tensors), AWQ (4 bits), or GPTQ or \
     pack-quantized (4 or 8 bits)";

/// The rows and columns of a weight shape that every target supports if it has kernels for FP8
/// weights.
const USUAL: [usize; 2] = [SCALE_BLOCK; 2];

/// Names the kind of quantized weight that `target` has no kernels for. Returns `None` if `target`
/// has kernels for a weight of `shape` `[out_features, in_features]` that is stored in memory in
/// `scheme`.
pub(crate) fn unsupported_weight(
    target: &Target,
    scheme: QuantizationScheme,
    shape: [usize; 2],
) -> Option<&'static str> {
    if target.has_quantized(scheme, shape) {
        return None;
    }
    if scheme.is_int4() {
        return Some("4-bit weights");
    }
    let has_any = target.has_quantized(QuantizationScheme::ROW, USUAL);
    Some(if has_any { "FP8 weights of this shape" } else { "FP8 weights" })
}

/// Like [`unsupported_weight`], for the weight of one of several experts.
pub(crate) fn unsupported_experts(
    target: &Target,
    scheme: QuantizationScheme,
    shape: [usize; 2],
) -> Option<&'static str> {
    if target.has_quantized_experts(scheme, shape) {
        return None;
    }
    let has_any = target.has_quantized_experts(QuantizationScheme::ROW, USUAL);
    Some(if has_any { "FP8 weights of experts of this shape" } else { "FP8 weights of experts" })
}
