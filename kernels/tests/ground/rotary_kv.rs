//! Rotation of queries and keys, with or without a norm per head, and the write of keys and values
//! to the cache, in E4M3 or the activations' type.

use bursar_kernels::{
    ops::{
        rotary::{PairAxes, Rope},
        rotary_kv_write::{CachedValues, HeadNorms},
    },
    *,
};

use super::{
    Random, cache_scales, narrowed, rounded,
    wide::{Wide, floats, margins, wide},
};

const BLOCKS: usize = 3;
const TOKENS: usize = BLOCKS * BLOCK_TOKENS;
const EPSILON: f32 = 1e-6;

/// A step whose tokens fill all blocks, in random order of slots.
#[derive(Clone, Debug)]
pub struct RotaryKv {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Pairs of elements of a head that are rotated.
    pub pairs: usize,
    pub axes: PairAxes,
    pub has_norms: bool,
    /// Added to the weights of the norms.
    pub weight_offset: f32,
    pub values: CachedValues,
    /// `true` if the cache is in E4M3.
    pub is_fp8: bool,
}

/// Random inputs other than the rows. They are drawn after the rows, in this order.
struct Inputs {
    positions: Vec<u32>,
    frequencies: Vec<f32>,
    slots: Vec<u32>,
    norms: [Vec<f32>; 2],
    scales: Vec<f32>,
}

impl RotaryKv {
    /// Cases as in Qwen3.5: only the first elements of each head are rotated, and the weights of
    /// the norms are centered on zero.
    pub fn partial_cases() -> Vec<RotaryKv> {
        let case = |(heads, kv_heads, head_dim, pairs): (usize, usize, usize, usize), axes| RotaryKv {
            heads,
            kv_heads,
            head_dim,
            pairs,
            axes,
            has_norms: true,
            weight_offset: 1.0,
            values: CachedValues::Unchanged,
            is_fp8: false,
        };
        vec![case((4, 2, 256, 32), PairAxes::Interleaved(11, 10)), case((3, 1, 34, 5), PairAxes::Sections(vec![5]))]
    }

    /// All kinds of heads and axes, with norms and without.
    pub fn cases() -> Vec<RotaryKv> {
        let mut cases = Vec::new();
        for (heads, kv_heads, head_dim) in [(4, 2, 128), (7, 1, 64), (3, 3, 80), (5, 1, 32), (2, 1, 34), (32, 8, 128)] {
            let third = head_dim / 8;
            for axes in [PairAxes::Sections(vec![head_dim / 2]), PairAxes::Interleaved(third, third)] {
                let pairs = head_dim / 2;
                let case = RotaryKv {
                    heads,
                    kv_heads,
                    head_dim,
                    pairs,
                    axes,
                    has_norms: true,
                    weight_offset: 0.0,
                    values: CachedValues::Unchanged,
                    is_fp8: false,
                };
                let plain = [RotaryKv { has_norms: false, ..case.clone() }, case];
                cases.extend(plain.clone().map(|case| RotaryKv { is_fp8: true, ..case }));
                cases.extend(plain);
            }
        }
        cases.extend(RotaryKv::value_cases());
        cases
    }

    /// Normalized values, as in Gemma 4: heads whose items fill warps and heads whose items do not.
    fn value_cases() -> Vec<RotaryKv> {
        let mut cases = Vec::new();
        for (heads, kv_heads, head_dim) in [(8, 1, 512), (16, 4, 512), (8, 2, 256), (4, 4, 64), (3, 1, 80), (2, 2, 34)]
        {
            for (values, is_fp8) in [CachedValues::Normalized, CachedValues::NormalizedKeys]
                .into_iter()
                .flat_map(|values| [(values, false), (values, true)])
            {
                let pairs = head_dim / 2;
                cases.push(RotaryKv {
                    heads,
                    kv_heads,
                    head_dim,
                    pairs,
                    axes: PairAxes::Sections(vec![pairs]),
                    has_norms: true,
                    weight_offset: 0.0,
                    values,
                    is_fp8,
                });
            }
        }
        cases
    }

    fn columns(&self) -> usize {
        (self.heads + self.values.row_kv_heads(self.kv_heads)) * self.head_dim
    }

    fn inputs(&self, random: &mut Random) -> Inputs {
        Inputs {
            positions: random.indices(self.axes.count() * TOKENS, 5000),
            frequencies: random.floats(self.pairs),
            slots: random.shuffled(TOKENS),
            norms: [(); 2].map(|()| random.floats(self.head_dim)),
            scales: cache_scales(self.kv_heads, random),
        }
    }

    /// Returns the queries, then the cache's numbers, widened to `f32` as attention reads them.
    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>, random: &mut Random) -> Result<Vec<f32>, KernelError> {
        let activation = scope.target().activation();
        let dtype = if self.is_fp8 { DType::F8E4M3 } else { activation };
        let shape = KvShape { layers: 1, kv_heads: self.kv_heads, head_dim: self.head_dim, dtype };
        let mut row = wide(scope, TOKENS, self.columns(), random)?;
        let inputs = self.inputs(random);
        let memory = scope.empty_f32([shape.block_bytes().as_usize() * BLOCKS / DType::F32.size()])?;
        // SAFETY: the cache lives as long as the layer, and nothing else uses it.
        let layer = unsafe { KvLayer::new(memory.address(), BLOCKS, shape) };
        let scales = scope.upload([2, self.kv_heads], &inputs.scales)?;
        let positions = scope.upload([self.axes.count(), TOKENS], &inputs.positions)?;
        let frequencies = scope.upload([self.pairs], &inputs.frequencies)?;
        let slots = scope.upload([TOKENS], &inputs.slots)?;
        let [query, key] = &inputs.norms;
        let norms = HeadNorms {
            query: narrowed(scope, [self.head_dim], activation, query)?,
            key: narrowed(scope, [self.head_dim], activation, key)?,
            weight_offset: self.weight_offset,
            epsilon: EPSILON,
            values: self.values,
        };
        let before = margins(activation).0;
        let rope = Rope { frequencies, axes: self.axes.clone() };
        let mut qkv = row.column_range_mut(before..before + self.columns());
        scope.rotary_kv_write(
            &mut qkv,
            self.heads,
            self.has_norms.then_some(&norms),
            &positions,
            &rope,
            &slots,
            layer.scaled(self.is_fp8.then_some(&scales)),
        )?;
        let pitch = row.columns();
        let queries = |row: &[f32]| row[before..][..self.heads * self.head_dim].to_vec();
        let queries: Vec<f32> = floats(scope, &row)?.chunks_exact(pitch).flat_map(queries).collect();
        // SAFETY: the memory has space for this many elements, and nothing else uses it.
        let cache =
            unsafe { Tensor::persistent(memory.address(), [TOKENS * 2 * self.kv_heads * self.head_dim], dtype) };
        let cached = if self.is_fp8 {
            let codes: Vec<E4m3> = scope.download(&cache)?;
            let scale = |at: usize| inputs.scales[at / (BLOCK_TOKENS * self.head_dim) % inputs.scales.len()];
            codes.into_iter().enumerate().map(|(at, code)| code.to_f32() * scale(at)).collect()
        } else {
            floats(scope, &cache)?
        };
        Ok([queries, cached].concat())
    }

    pub fn expected(&self, activation: DType, random: &mut Random) -> Vec<f64> {
        let RotaryKv { heads, kv_heads, head_dim, .. } = *self;
        let rows = Wide::new(activation, TOKENS, self.columns(), random);
        let inputs = self.inputs(random);
        let norms = inputs.norms.each_ref().map(|norm| rounded(activation, norm));
        let rotated: Vec<Vec<f64>> = (0..TOKENS)
            .map(|token| {
                let row = rows.row(token);
                let source = |at: usize| {
                    let is_key = self.values == CachedValues::NormalizedKeys && at >= heads + kv_heads;
                    if is_key { at - kv_heads } else { at }
                };
                let head = |at: usize| self.turn(token, at, &row[source(at) * head_dim..][..head_dim], &inputs, &norms);
                (0..heads + 2 * kv_heads).flat_map(head).collect()
            })
            .collect();
        let mut cache = vec![f64::NAN; TOKENS * 2 * kv_heads * head_dim];
        for (token, slot) in inputs.slots.iter().enumerate() {
            let (block, place) = (*slot as usize / BLOCK_TOKENS, *slot as usize % BLOCK_TOKENS);
            for at in 0..2 * kv_heads {
                let vector = &rotated[token][(heads + at) * head_dim..][..head_dim];
                // Numbers beyond the largest E4M3 number become that number.
                let most =
                    if self.is_fp8 { f64::from(E4m3::MAX) * f64::from(inputs.scales[at]) } else { f64::INFINITY };
                cache[((block * 2 * kv_heads + at) * BLOCK_TOKENS + place) * head_dim..][..head_dim]
                    .iter_mut()
                    .zip(vector)
                    .for_each(|(cached, number)| *cached = number.clamp(-most, most));
            }
        }
        rotated.iter().flat_map(|row| row[..heads * head_dim].to_vec()).chain(cache).collect()
    }

    /// The expected head `at` of a token's row.
    fn turn(&self, token: usize, at: usize, x: &[f64], inputs: &Inputs, norms: &[Vec<f64>; 2]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = (mean + f64::from(EPSILON)).sqrt().recip();
        if at >= self.heads + self.kv_heads {
            let scale = if self.values == CachedValues::Unchanged { 1.0 } else { scale };
            return x.iter().map(|x| x * scale).collect();
        }
        let mut x = x.to_vec();
        if self.has_norms {
            let weights = &norms[usize::from(at >= self.heads)];
            let offset = f64::from(self.weight_offset);
            x.iter_mut().zip(weights).for_each(|(x, weight)| *x *= scale * (weight + offset));
        }
        let (half, axes) = (self.pairs, self.axes.of_pairs(self.pairs));
        let angle = |pair: usize| {
            let position = inputs.positions[axes[pair] * TOKENS + token];
            // The angle is rounded to f32, as it is in the models.
            f64::from(position as f32 * inputs.frequencies[pair])
        };
        let left = (0..half).map(|pair| x[pair] * angle(pair).cos() - x[pair + half] * angle(pair).sin());
        let right = (0..half).map(|pair| x[pair + half] * angle(pair).cos() + x[pair] * angle(pair).sin());
        left.chain(right).chain(x[2 * half..].iter().copied()).collect()
    }
}
