//! Claims of the experts of a mixture.

use bursar_kernels::{RankShard, Weight};

use super::{
    WeightCopy, WeightError, WeightMap, WeightSource, cut::Cut, map::WeightLayout, quantized_weight::Matrices,
};
use crate::checkpoint::quantization::unsupported_experts;

impl WeightMap<'_> {
    /// Claims the gated MLPs of a share of the experts: gate and up, expert by expert, as
    /// `[experts * 2 * intermediate, hidden]`, and down as `[experts * hidden, intermediate]`.
    ///
    /// A checkpoint may have each expert's projections under separate names:
    /// `name.{expert}.gate_proj.weight` and so on, or `name.gate_proj.{expert}.weight` (ModelOpt
    /// 0.43, for Qwen3-VL; vLLM's issue 40885). Or a checkpoint has all experts in
    /// `name.gate_up_proj` and `name.down_proj`, where the two axes of each matrix may be swapped:
    /// Qwen3-VL was released as `[experts, in, out]`, and transformers swaps the axes if the shape
    /// does not match (5.17, `conversion_mapping.py`).
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape.
    pub fn experts(
        &mut self,
        name: &str,
        experts: RankShard,
        (hidden, intermediate): (usize, usize),
    ) -> Result<[Weight<'static>; 2], WeightError> {
        let fused = [("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)];
        let fused = fused.map(|(part, rows, columns)| (format!("{name}.{part}"), rows, columns));
        if self.has(&fused[0].0) {
            // A tensor of square matrices is assumed to have the same orientation as the other
            // tensor.
            let mut is_swapped = false;
            for (name, rows, columns) in &fused {
                is_swapped |=
                    rows != columns && *self.checkpoint.tensor(name)?.shape == [experts.whole, *columns, *rows];
            }
            let [gate_up, down] = &fused;
            let both = [self.matrices(gate_up, experts, is_swapped)?, self.matrices(down, experts, is_swapped)?];
            return self.served_experts(experts.count, both);
        }
        const PARTS: [&str; 3] = ["gate", "up", "down"];
        let is_by_part = self.has(&format!("{name}.gate_proj.0.weight"));
        let module = |expert: usize, part: &str| {
            if is_by_part { format!("{name}.{part}_proj.{expert}") } else { format!("{name}.{expert}.{part}_proj") }
        };
        let others = (0..experts.whole).filter(|expert| !experts.range().contains(expert));
        self.names.leave_unread(others.flat_map(|expert| PARTS.map(|part| module(expert, part))));
        let of = |expert: usize, part: &str, rows: usize| (module(expert, part), rows.into());
        let gate_up = experts.range().flat_map(|expert| ["gate", "up"].map(|part| of(expert, part, intermediate)));
        let down = experts.range().map(|expert| of(expert, "down", hidden));
        let (gate_up, down): (Vec<_>, Vec<_>) = (gate_up.collect(), down.collect());
        // All experts, including the experts of other ranks, quantize their rows
        // with the same scale.
        let inputs = |parts: &[&str]| -> Vec<String> {
            (0..experts.whole).flat_map(|expert| parts.iter().map(move |part| module(expert, part))).collect()
        };
        let place = WeightLayout { is_widened: true, ..WeightLayout::default() };
        let gate_up = self.weight(&gate_up, &inputs(&["gate", "up"]), hidden.into(), place)?;
        let both = [gate_up, self.weight(&down, &inputs(&["down"]), intermediate.into(), place)?];
        self.served_experts(experts.count, both)
    }

    /// Claims a share of the matrices `[rows, columns]` of a tensor as one matrix, stacked
    /// row-wise. If `swapped` is set, the axes of these matrices are swapped in the file.
    fn matrices(
        &mut self,
        (name, rows, columns): &(String, usize, usize),
        count: RankShard,
        swapped: bool,
    ) -> Result<Weight<'static>, WeightError> {
        let quantized = self.formats.of([name.as_str()])?.filter(|quantized| !quantized.scheme.is_int4());
        let found = self.checkpoint.tensor(name)?;
        let expected = if swapped { [count.whole, *columns, *rows] } else { [count.whole, *rows, *columns] };
        if *found.shape != expected {
            let (name, expected, found) = (name.clone(), vec![count.whole, *rows, *columns], found.shape.to_vec());
            return Err(WeightError::Shape { name, expected, found });
        }
        let (dtype, cut) = (found.dtype.into(), Cut::of(count, (rows * columns).into(), found.shape));
        self.formats.check(name, dtype, quantized.is_some_and(|quantized| quantized.stored.is_some()))?;
        let kept = quantized.map_or_else(|| self.target.weight(dtype), |quantized| quantized.scheme.elements);
        self.segment.align();
        let (source, bytes) = (WeightSource::Tensor(name.clone()), kept.bytes(count.count * rows * columns));
        let copy = WeightCopy { cut, swapped, ..WeightCopy::of(source, kept, (*columns, 0), bytes) };
        let to = self.segment.place(copy);
        let data = self.segment.tensor(to, [count.count * rows, *columns], kept);
        let matrices = Matrices { count, rows: (*rows).into(), columns: (*columns).into(), swapped };
        self.scaled_matrices(name, data, quantized, matrices)
    }

    /// Returns the weights of experts. Refuses quantized weights for which the target has no
    /// kernels, unless [`refuse_unsupported`](Self::refuse_unsupported) allows them.
    fn served_experts(&self, experts: usize, both: [Weight<'static>; 2]) -> Result<[Weight<'static>; 2], WeightError> {
        for weight in &both {
            let Some(scheme) = weight.scheme() else { continue };
            let shape = [weight.rows() / experts, weight.columns()];
            self.refuse_unsupported(unsupported_experts(&self.target, scheme, shape))?;
        }
        Ok(both)
    }
}
