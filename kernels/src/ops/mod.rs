//! Operations, one file each. An operation checks its arguments, takes its output from the
//! workspace unless it writes to a tensor of the caller, counts its cost, and calls the backend.
//! The contract between an operation and the backends is a struct of [`calls`](crate::calls).

pub mod add_experts;
pub mod add_experts_rms_norm;
pub mod add_rows;
pub mod all_gather;
pub mod all_reduce;
pub mod all_reduce_rms_norm;
pub mod argmax;
pub mod attention_packed;
pub mod attention_paged;
pub mod best_of_ranks;
pub mod causal_conv;
mod check;
pub mod clamp;
pub mod clustered_argmax;
pub mod copy_blocks;
pub mod embed;
pub mod fill_random;
pub mod gate_mul;
pub mod gated_delta;
pub mod gated_experts;
pub mod gated_linear;
pub mod gated_rms_norm;
pub mod gather_rows;
pub mod gelu;
pub mod layer_norm;
pub mod linear;
pub mod mean_rows;
pub mod measure;
pub mod patchify;
pub mod position_grid;
mod product;
pub mod quantize;
pub mod rms_norm;
pub mod rms_norm_add;
pub mod rms_norm_route;
pub mod rotary;
pub mod rotary_kv_write;
pub mod route;
pub mod sample;
pub mod scatter_rows;
pub mod sigmoid_mul;
pub mod soft_cap;
pub mod standardize;
pub mod transfer;
