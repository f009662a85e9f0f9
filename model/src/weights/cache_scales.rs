//! Claims of the scales of cached keys and values.

use bursar_kernels::{RankShard, Tensor};

use super::{
    WeightError, WeightMap,
    quantized_numbers::{ScaleOf, check_scale},
    scaling::numbers,
};

impl WeightMap<'_> {
    /// Claims the scales of a layer's cached keys and values, `[2, kv_heads.count]` f32, if the
    /// cache is quantized. The scales are from the checkpoint, which has one scale for all heads or
    /// one scale for each head. For a layer without scales, the result is 1, as in vLLM.
    pub fn cache_scales(
        &mut self,
        attention: &str,
        kv_heads: RankShard,
    ) -> Result<Option<Tensor<'static>>, WeightError> {
        let cache = self.checkpoint.cache();
        if !cache.is_quantized() {
            return Ok(None);
        }
        self.refuse_unsupported(cache.unsupported(&self.target))?;
        let names = ["k", "v"].map(|part| {
            [
                format!("{attention}.{part}_scale"),             // of compressed-tensors
                format!("{attention}.{part}_proj.{part}_scale"), // of ModelOpt
                format!("{attention}.{part}_proj.output_scale"), // of both, in early releases
                format!("{attention}.qkv_proj.{part}_scale"),    // of llm-compressor (vLLM's issue 25047)
                format!("{attention}.attn.{part}_scale"),        // the name in vLLM
            ]
        });
        let both = format!("{attention}.kv_scale"); // of AutoFP8 and Quark
        let scales = if names.iter().flatten().any(|name| self.has(name)) {
            let [keys, values] = names;
            self.names.mark_read(both);
            [self.stored_cache_scales(keys, kv_heads)?, self.stored_cache_scales(values, kv_heads)?].concat()
        } else if self.has(&both) {
            vec![self.input_scale(vec![both])?; 2 * kv_heads.count]
        } else {
            vec![1.0; 2 * kv_heads.count]
        };
        Ok(Some(self.constant(&scales).into_shape([2, kv_heads.count])))
    }

    /// Reads the checkpoint's scale of each head of this rank. The scales may have any of `names`.
    fn stored_cache_scales(&mut self, names: [String; 5], kv_heads: RankShard) -> Result<Vec<f32>, WeightError> {
        let [_, of_modelopt, ..] = &names;
        let name = names.iter().find(|name| self.has(name)).unwrap_or(of_modelopt).clone();
        let found = self.checkpoint.tensor(&name)?;
        let scales = numbers(&found);
        if scales.len() != 1 && scales.len() != kv_heads.whole {
            return Err(WeightError::Shape { name, expected: vec![kv_heads.whole], found: found.shape.to_vec() });
        }
        scales.iter().try_for_each(|scale| check_scale(&name, *scale, ScaleOf::Activations))?;
        self.names.mark_read(name);
        Ok(kv_heads.range().map(|head| scales[head % scales.len()]).collect())
    }
}
