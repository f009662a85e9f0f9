//! Rotary frequencies of the layers of a decoder or a draft head.

use bursar_kernels::ops::rotary::{PairAxes, Rope};

use super::{decoder_config::DecoderConfig, rope_scaling::RopeScaling};
use crate::weights::WeightMap;

pub struct Ropes {
    usual: Rope<'static>,
    /// The frequencies of the layers in [`DecoderConfig::local_rope`].
    local: Option<Rope<'static>>,
}

impl Ropes {
    /// Claims the frequencies of all layers of `config`.
    pub fn claim(config: &DecoderConfig, map: &mut WeightMap<'_>) -> Self {
        let mut rope = |(theta, scaling): (f64, &RopeScaling), rotary_dim: usize, axes: PairAxes| Rope {
            frequencies: map.constant(&scaling.frequencies(theta, rotary_dim)),
            axes,
        };
        let usual = (config.rotary_dim, config.rope_axes.clone());
        let full = config.full_attention.map(|full| (full.head_dim, PairAxes::Sections(vec![full.head_dim / 2])));
        let (full_dim, full_axes) = full.unwrap_or_else(|| usual.clone());
        let local = config.local_rope.as_ref().map(|local| rope((local.theta, &local.scaling), usual.0, usual.1));
        Ropes { usual: rope((config.rope_theta, &config.rope_scaling), full_dim, full_axes), local }
    }

    /// The frequencies of a layer of `config`.
    pub fn of(&self, config: &DecoderConfig, layer: usize) -> &Rope<'static> {
        self.local.as_ref().filter(|_| config.has_local_rope(layer)).unwrap_or(&self.usual)
    }
}
