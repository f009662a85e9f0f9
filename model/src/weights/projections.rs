//! Claims of projections, with or without biases.

use bursar_kernels::RankShard;

use super::{Linear, WeightError, WeightMap, WeightSource, map::WeightLayout};

impl WeightMap<'_> {
    /// Claims a projection `name.weight` `[out_features, in_features]`, and `name.bias`
    /// `[out_features]` if `bias`. Either number may be a [share](RankShard). A share
    /// of `in_features` gives a partial result, and only the first rank's partial
    /// result includes the bias.
    pub fn linear(
        &mut self,
        name: &str,
        out_features: impl Into<RankShard>,
        in_features: impl Into<RankShard>,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        self.fused_linear(&[(name, out_features.into())], in_features, bias)
    }

    /// Whether the weight of the projection `name` will be quantized, or stay in the packed
    /// integers or the quantized blocks of its file.
    ///
    /// # Errors
    /// The checkpoint's formats contradict each other, or the tensor is missing.
    pub fn is_quantized(&self, name: &str) -> Result<bool, WeightError> {
        let stays_in_blocks = || self.block_type(&format!("{name}.weight"), 0.into());
        Ok(self.formats.of([name])?.is_some() || self.is_int4(name)? || stays_in_blocks()?.is_some())
    }

    /// Like [`fused_linear`](Self::fused_linear) without biases, for projections that are never
    /// quantized.
    pub fn unquantized_linear(
        &mut self,
        parts: &[(&str, RankShard)],
        in_features: impl Into<RankShard>,
    ) -> Result<Linear, WeightError> {
        let place = WeightLayout { is_always_plain: true, ..WeightLayout::default() };
        self.padded_linear(parts, in_features.into(), false, place)
    }

    /// Like [`linear`](Self::linear), for the convolution that embeds patches. The kernel becomes a
    /// matrix. This matrix is never quantized: tools quantize only linear layers, and their lists
    /// need not name other layers.
    pub fn patch_embedding(
        &mut self,
        name: &str,
        out_features: usize,
        in_features: usize,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        let place = WeightLayout { is_always_plain: true, ..WeightLayout::default() };
        self.padded_linear(&[(name, out_features.into())], in_features.into(), bias, place)
    }

    /// Like [`linear`](Self::linear) with a bias, where output `i` is multiplied by element `i` of
    /// the tensor `scale` `[out_features]`. Weight and bias are multiplied by `scale` while
    /// they load, in f32, and the result is rounded once to the type of activations.
    pub fn scaled_linear(
        &mut self,
        name: &str,
        scale: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Linear, WeightError> {
        let (_, source, _) = self.tensor_source(scale, out_features.into(), 1.into(), [out_features].into())?;
        self.names.fold(scale, out_features);
        let first = self.copies().len();
        if self.formats.of([name])?.is_some() {
            return Err(WeightError::ScaledOutputs { name: name.to_owned(), scale: scale.to_owned() });
        }
        let place = WeightLayout { kept: Some(self.target.activation()), ..WeightLayout::default() };
        let linear = self.padded_linear(&[(name, out_features.into())], in_features.into(), true, place)?;
        // Random weights need no scale.
        if let WeightSource::Tensor(scale) = source {
            self.segment.scale_rows_from(first, &scale);
        }
        Ok(linear)
    }

    /// Claims projections of the same input as one projection with concatenated rows.
    pub fn fused_linear<S: Into<RankShard> + Copy>(
        &mut self,
        parts: &[(&str, S)],
        in_features: impl Into<RankShard>,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        let parts: Vec<_> = parts.iter().map(|(name, rows)| (*name, (*rows).into())).collect();
        self.padded_linear(&parts, in_features.into(), bias, WeightLayout::default())
    }

    /// Claims the projections `gate` and `up` `[intermediate, hidden]` as one layer, and
    /// `down` `[hidden, intermediate]`. The target may pad `intermediate`; the added rows
    /// and columns are zeros.
    pub fn gated(
        &mut self,
        [gate, up, down]: [&str; 3],
        (hidden, intermediate): (usize, RankShard),
        bias: bool,
    ) -> Result<[Linear; 2], WeightError> {
        let more = self.target.padded_features(intermediate.count) - intermediate.count;
        let (of_gate, of_down) = (
            WeightLayout { rows: more, ..WeightLayout::default() },
            WeightLayout { columns: more, ..WeightLayout::default() },
        );
        Ok([
            self.padded_linear(&[(gate, intermediate), (up, intermediate)], hidden.into(), bias, of_gate)?,
            self.padded_linear(&[(down, hidden.into())], intermediate, bias, of_down)?,
        ])
    }

    fn padded_linear(
        &mut self,
        parts: &[(&str, RankShard)],
        in_features: RankShard,
        bias: bool,
        place: WeightLayout,
    ) -> Result<Linear, WeightError> {
        let rows: usize = parts.iter().map(|(_, rows)| rows.count).sum();
        let modules: Vec<_> = parts.iter().map(|(name, rows)| ((*name).to_owned(), *rows)).collect();
        let inputs: Vec<_> = parts.iter().map(|(name, _)| (*name).to_owned()).collect();
        let weight = self.weight(&modules, &inputs, in_features, place)?;
        let biases: Vec<_> = parts.iter().map(|(name, rows)| (format!("{name}.bias"), *rows)).collect();
        let bias = if !bias {
            None
        } else if in_features.first > 0 {
            self.names.leave_unread(biases.into_iter().map(|(name, _)| name));
            None
        } else {
            Some(self.stacked(&biases, [rows].into(), 1.into(), WeightLayout { columns: 0, ..place })?)
        };
        Ok(Linear { weight, bias, is_partial: !in_features.is_whole() })
    }
}
