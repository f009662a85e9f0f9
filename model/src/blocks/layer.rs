//! A decoder layer: a token mixer (attention or a gated delta net) and an MLP, each with a norm and
//! a residual connection.

use bursar_kernels::{
    ActivationFormat, ActivationScratch, Activations, Backend, KernelError, RankShard, Scope, Tensor,
    ops::{rms_norm::RmsNorm, rotary::Rope},
};

use super::{
    decoder_config::DecoderConfig, decoder_share::DecoderShare, gated_delta_net::GatedDeltaNet, gated_mlp::GatedMlp,
    layer_cache::LayerCache, mixed::Mixed, mixer::Mixer, mixture::Mixture, mlp_with_experts::MlpWithExperts,
    paged_attention::PagedAttention, per_layer_embeddings::PerLayerInput, step_inputs::StepInputs,
};
use crate::weights::{WeightError, WeightMap};

pub struct Layer {
    input_norm: Tensor<'static>, // [hidden]
    mixer: Mixer,
    mixed_norm: Option<Tensor<'static>>, // [hidden], of the mixer's result
    mlp_norm: Tensor<'static>,           // [hidden]
    mlp: Mlp,
    result_norm: Option<Tensor<'static>>, // [hidden], of the MLP's result
    embedding: Option<PerLayerInput>,
    scalar: Option<Tensor<'static>>, // [1] f32, factor of the layer's result
    index: usize,
}

#[expect(clippy::large_enum_variant, reason = "there is one value per layer, so the size does not matter")]
enum Mlp {
    Gated(GatedMlp),
    Mixture(Mixture),
    WithExperts(MlpWithExperts),
}

/// Values that one layer passes to the next.
pub struct Stream<'s> {
    pub hidden: Tensor<'s>,             // [tokens, hidden]
    pub scratch: ActivationScratch<'s>, // space for one normalized copy of `hidden`
    pub is_normed: bool,                // `scratch` already has the normalized input of the next layer
}

/// Arguments that are the same for all layers of a step.
pub struct LayerPass<'a> {
    pub config: &'a DecoderConfig,
    pub rope: &'a Rope<'static>,
    pub inputs: &'a StepInputs<'a>,
    pub embeddings: Option<&'a Tensor<'a>>, // [tokens, layers * width], rows of `PerLayerEmbeddings`
}

impl Layer {
    pub fn claim(
        config: &DecoderConfig,
        share: &DecoderShare,
        index: usize,
        prefix: &str,
        map: &mut WeightMap<'_>,
        loads: &mut impl Iterator<Item = Tensor<'static>>,
    ) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (hidden, biases) = (config.hidden, config.biases);
        let input_norm = map.tensor(&name("input_layernorm.weight"), [hidden])?;
        let scalar = config.layer_scalars.then(|| map.tensor_f32(&name("layer_scalar"), 1)).transpose()?;
        let embedding =
            config.per_layer_embeddings.map(|of_layers| PerLayerInput::claim(map, prefix, config, of_layers.width));
        let embedding = embedding.transpose()?;
        let mixer = match &config.gated_delta {
            Some(delta) if !config.has_attention(index) => {
                let heads = share.delta.expect("the share has the heads of gated delta nets");
                let (name, epsilon) = (name("linear_attn"), config.norm_epsilon);
                Mixer::GatedDelta(GatedDeltaNet::claim(map, &name, hidden, delta, heads, epsilon)?)
            }
            _ => Mixer::Attention(PagedAttention::claim(map, &name("self_attn"), config, share, index)?),
        };
        let mut norm = |part: &str| map.tensor(&name(&format!("{part}_layernorm.weight")), [hidden]);
        let (mixed_norm, mlp_norm, result_norm) = if config.output_norms {
            // In a layer without output norms, the norm before the MLP is named
            // `post_attention_layernorm`.
            (Some(norm("post_attention")?), norm("pre_feedforward")?, Some(norm("post_feedforward")?))
        } else {
            (None, norm("post_attention")?, None)
        };
        let mixture = config.mixture.as_ref().filter(|mixture| mixture.is_in(index));
        let mixture = mixture.map(|mixture| (mixture, share.mixture.expect("the share has experts")));
        let mut loads = || loads.next().expect("each layer with experts has its counters");
        let mlp = if let Some((mixture, held)) = mixture.filter(|(mixture, _)| !mixture.has_dense_mlp) {
            let sizes = (hidden, config.activation);
            Mlp::Mixture(Mixture::claim(map, prefix, sizes, mixture, held, loads())?)
        } else {
            let mlp = GatedMlp::claim(
                map,
                ["gate", "up", "down"].map(|part| name(&format!("mlp.{part}_proj"))).each_ref().map(String::as_str),
                (hidden, share.mlp_columns(config, index)),
                biases.mlp,
                config.activation,
            )?;
            match mixture {
                Some(mixture) => Mlp::WithExperts(MlpWithExperts::claim(map, prefix, config, mixture, mlp, loads())?),
                None => Mlp::Gated(mlp),
            }
        };
        Ok(Layer { input_norm, mixer, mixed_norm, mlp_norm, result_norm, embedding, scalar, index, mlp })
    }

    /// Claims the scales of the cache of the attention module `source`, whose keys and values this
    /// layer reads.
    pub fn claim_cache_scales(
        &mut self,
        map: &mut WeightMap<'_>,
        source: &str,
        kv_heads: RankShard,
    ) -> Result<(), WeightError> {
        match &mut self.mixer {
            Mixer::Attention(attention) => attention.claim_cache_scales(map, source, kv_heads),
            Mixer::GatedDelta(_) => Ok(()),
        }
    }

    /// Formats of the normalized inputs of the mixer, of the MLP, and of the experts. May contain
    /// duplicates.
    pub fn norm_formats(&self) -> impl Iterator<Item = ActivationFormat> {
        let of_mlp = match &self.mlp {
            Mlp::WithExperts(mlp) => mlp.reads(),
            _ => [self.mlp_reads(); 2],
        };
        [self.mixer.reads()].into_iter().chain(of_mlp)
    }

    /// Format of the normalized input of the MLP.
    fn mlp_reads(&self) -> ActivationFormat {
        match &self.mlp {
            Mlp::Gated(mlp) => mlp.reads(),
            Mlp::Mixture(mixture) => mixture.reads(),
            Mlp::WithExperts(mlp) => mlp.reads()[0],
        }
    }

    /// Runs the layer on all rows of `stream`, in place. `next` is the following layer, or `None`
    /// if there is no such layer or if a DeepStack part is added to the rows first. If `next` is
    /// given, this function may also compute the normalized input of `next`.
    pub fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        cache: &LayerCache,
        stream: &mut Stream<'_>,
        next: Option<&Layer>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = stream.normed(&scope, pass, self)?;
            let mixed = self.mixer.mix(&scope, &normed, pass.rope, pass.inputs, cache)?;
            self.add_mixed(&scope, pass, &mixed.rows, (&mut stream.hidden, &mut stream.scratch))?;
        }
        stream.is_normed = self.add_mlp(scope, pass, (&mut stream.hidden, &mut stream.scratch), next)?;
        self.add_embedding(scope, pass, None, &mut stream.hidden)
    }

    /// Like [`forward`](Layer::forward), but runs the output projection and the MLP only on the
    /// rows `rows` of `stream`, and writes the result to `chosen` `[rows, hidden]`. The cache is
    /// still written for all rows.
    pub fn forward_chosen<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        cache: &LayerCache,
        stream: &mut Stream<'_>,
        rows: &Tensor<'_>, // [rows] u32
        chosen: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = stream.normed(&scope, pass, self)?;
            if rows.rows() == 0 {
                return self.mixer.write(&scope, &normed, pass.rope, pass.inputs, cache);
            }
            let Mixed { rows: mixed, spare } = self.mixer.mix(&scope, &normed, pass.rope, pass.inputs, cache)?;
            // The chosen rows reuse memory that the mixer no longer needs, which saves an
            // allocation.
            let (all, wanted) = (spare.shape().elements(), [rows.rows(), mixed.columns()]);
            let mut spare = spare.into_shape([1, all]);
            let mut few = spare.column_range_mut(0..wanted[0] * wanted[1]).into_shape(wanted);
            scope.gather_rows_into(&mixed, rows, &mut few)?;
            scope.gather_rows_into(&stream.hidden, rows, chosen)?;
            self.add_mixed(&scope, pass, &few, (chosen, &mut stream.scratch))?;
        }
        self.add_mlp(scope, pass, (chosen, &mut stream.scratch), None)?;
        self.add_embedding(scope, pass, Some(rows), chosen)
    }

    /// Adds the layer's per-layer input to `hidden`, if the model has such inputs, and multiplies the
    /// sum by the layer's scalar. `rows` `[rows]` u32 are the step's rows that `hidden` has; `None`
    /// means all.
    fn add_embedding<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        rows: Option<&Tensor<'_>>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let Some((embedding, all)) = self.embedding.as_ref().zip(pass.embeddings) else { return Ok(()) };
        let (scope, own) = (scope.scope(), all.column_range(embedding.columns(self.index)));
        let own = match rows {
            Some(rows) => scope.gather_rows(&own, rows)?,
            None => own,
        };
        embedding.add(&scope, pass.config, &own, self.scalar.as_ref(), hidden)
    }

    /// Projects `mixed` `[rows, width]`, the result of the mixer, and adds the result to `hidden`
    /// `[rows, hidden]`. For a gated MLP, the normalized input of the MLP is left in `scratch`. If
    /// the ranks' partial results are summed, the sum operation also computes the norm, because
    /// that operation has complete rows. A mixture computes its own norm together with its routing.
    fn add_mixed<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        mixed: &Tensor<'_>,
        (hidden, scratch): (&mut Tensor<'_>, &mut ActivationScratch<'_>),
    ) -> Result<(), KernelError> {
        let (format, norm, out) = (self.mlp_reads(), pass.norm(&self.mlp_norm), self.mixer.out());
        if let Mlp::Mixture(_) = &self.mlp {
            return out.forward_add(scope, mixed, hidden);
        }
        // Nothing reads the previous norm in `scratch` any more, so it is overwritten.
        let mut normed = scratch.place(format, hidden.rows());
        match &self.mixed_norm {
            Some(mixed_norm) => out.forward_norm_add(scope, mixed, pass.norm(mixed_norm), None, hidden)?,
            None if out.is_partial => return out.forward_add_normed(scope, mixed, hidden, norm, &mut normed),
            None => out.forward_add(scope, mixed, hidden)?,
        }
        scope.rms_norm_into(hidden, norm, &mut normed)
    }

    /// Runs the MLP and adds its result to `hidden` `[rows, hidden]`. `scratch` must contain what
    /// [`add_mixed`](Layer::add_mixed) wrote. Returns `true` if `scratch` contains the normalized
    /// input of `next` afterward. The operations that sum the experts or the ranks' partial
    /// results also compute that input.
    fn add_mlp<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        (hidden, scratch): (&mut Tensor<'_>, &mut ActivationScratch<'_>),
        next: Option<&Layer>,
    ) -> Result<bool, KernelError> {
        let scope = scope.scope();
        let rows = hidden.rows();
        // A step that runs its last layer on chosen rows is never captured in a CUDA graph. Such a
        // layer has no padding rows, so the router does not need the slots to recognize them.
        let slots = Some(&pass.inputs.groups[0].slots).filter(|slots| slots.rows() == rows);
        match &self.mlp {
            Mlp::Gated(mlp) => {
                let gated = mlp.gate(&scope, scratch.place(mlp.reads(), rows))?;
                if let Some(norm) = &self.result_norm {
                    let (norm, scalar) = (pass.norm(norm), self.mlp_scalar());
                    return mlp.down.forward_norm_add(&scope, &gated, norm, scalar, hidden).map(|()| false);
                }
                let Some(next) = next.filter(|_| mlp.down.is_partial) else {
                    return mlp.down.forward_add(&scope, &gated, hidden).map(|()| false);
                };
                let mut normed = scratch.place(next.mixer.reads(), rows);
                let norm = pass.norm(&next.input_norm);
                mlp.down.forward_add_normed(&scope, &gated, hidden, norm, &mut normed)?;
                Ok(true)
            }
            Mlp::Mixture(mixture) => {
                let mut normed = scratch.place(mixture.reads(), rows);
                let gated = mixture.gate(&scope, hidden, pass.norm(&self.mlp_norm), &mut normed, slots)?;
                let Some(next) = next else {
                    return mixture.add(&scope, &gated, hidden, None).map(|()| false);
                };
                // Nothing reads `scratch` after the experts' gate and up projections, so its
                // content is overwritten.
                let mut normed = scratch.place(next.mixer.reads(), rows);
                let norm = pass.norm(&next.input_norm);
                mixture.add(&scope, &gated, hidden, Some((norm, &mut normed)))?;
                Ok(true)
            }
            Mlp::WithExperts(mlp) => {
                let norm = self.result_norm.as_ref().expect("a layer with a dense MLP and experts has an output norm");
                let sum = mlp.forward(&scope, pass.config, hidden, scratch, slots)?;
                scope.rms_norm_add(&sum, pass.norm(norm), self.mlp_scalar(), hidden).map(|()| false)
            }
        }
    }

    /// The layer's scalar, if it is applied with the MLP's result. A layer with per-layer embeddings
    /// applies it later.
    fn mlp_scalar(&self) -> Option<&Tensor<'static>> {
        self.scalar.as_ref().filter(|_| self.embedding.is_none())
    }
}

impl LayerPass<'_> {
    fn norm<'n>(&self, weight: &'n Tensor<'static>) -> RmsNorm<'n> {
        self.config.norm(weight)
    }
}

impl Stream<'_> {
    /// Returns the normalized input of `layer`. The input is computed here unless the previous
    /// layer has already left it in `scratch`.
    fn normed<B: Backend>(
        &mut self,
        scope: &Scope<'_, B>,
        pass: &LayerPass<'_>,
        layer: &Layer,
    ) -> Result<Activations<'_>, KernelError> {
        let mut normed = self.scratch.place(layer.mixer.reads(), self.hidden.rows());
        if !std::mem::take(&mut self.is_normed) {
            scope.rms_norm_into(&self.hidden, pass.norm(&layer.input_norm), &mut normed)?;
        }
        Ok(normed)
    }
}
