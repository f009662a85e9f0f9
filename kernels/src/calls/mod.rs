//! The operations of a backend: one struct per operation, with the contract and the operands.
//!
//! The structs are `#[non_exhaustive]`, so other crates cannot build one without the checks of the
//! methods in [`ops`](crate::ops).

mod attention;
mod copies;
mod experts;
mod products;
mod ranks;
mod rows;
mod states;
mod tokens;
mod vision;

pub(crate) use copies::Copied;
pub(crate) use rows::STEP;
pub use {
    attention::{
        AttentionMask, AttentionPacked, AttentionPaged, CachedValues, HeadNorm, HeadNorms, NO_SLOT, PagedSequences,
        PairAxes, Rotary, RotaryKvWrite,
    },
    copies::{Arrival, BlockRange, CopyBlocks, Copying, Download, DownloadLater, Pieces, Upload},
    experts::{
        AddExperts, AddExpertsRmsNorm, EXPERTS_MAX, GatedExperts, RmsNormRoute, Route, Routing, RoutingRule, TOP_MAX,
    },
    products::{
        ApplyGelu, Clamp, GateActivation, GateMul, GatedLinear, Gelu, LayerNorm, Linear, Measure, Quantize, RmsNorm,
        RmsNormAdd, SoftCap, Standardize,
    },
    ranks::{AllGather, AllReduce, AllReduceRmsNorm, BestOfRanks},
    rows::{AddRows, Embed, FillRandom, GatherRows, MeanRows, ScatterRows},
    states::{CausalConv, GatedDelta, GatedRmsNorm, NO_STATE, SNAPSHOTS, SigmoidMul, StateSequences},
    tokens::{Argmax, CLUSTERS_MAX, ClusteredArgmax, NO_CHOICE, Sample},
    vision::{CHANNELS, LAYOUT_NUMBERS, LEVEL_NUMBERS, PatchSize, Patchify, PositionGrid},
};
