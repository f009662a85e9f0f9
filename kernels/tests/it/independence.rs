//! The number of threads does not change results. The chunks of a prompt and the other rows of a
//! batch change results only by rounding.

use bursar_kernels::{
    ops::{
        attention_paged::PagedSequences,
        rms_norm::RmsNorm,
        rotary::{PairAxes, Rope},
        route::RoutingRule,
    },
    *,
};

use crate::ground::{self, Random, assert_close, compute, passes, widened};

#[test]
fn every_operation_gives_the_same_bits_on_any_thread_count() {
    for pass in passes() {
        let bits =
            |threads| -> Vec<u32> { compute(threads, |scope| pass.run(scope)).into_iter().map(f32::to_bits).collect() };
        let one = bits(1);
        assert!(one == bits(2) && one == bits(3), "{pass:?}");
    }
}

const HEADS: usize = 14;
const SHAPE: KvShape = KvShape { layers: 1, kv_heads: 2, head_dim: 32, dtype: DType::F32 };

const CACHES: [DType; 2] = [DType::F32, DType::F8E4M3];

/// Runs one step: writes the keys and values of each sequence's new rows to the cache, and returns
/// the rows' attention. A sequence is given by a seed and by its rows. The seed determines its
/// prompt.
fn step(
    scope: &Scope<'_, Cpu>,
    cache: ScaledLayer<'_>,
    sequences: &[(u64, std::ops::Range<usize>)],
) -> Result<Vec<Vec<f32>>, KernelError> {
    windowed_step(scope, cache, sequences, None)
}

/// Like [`step`], with a sliding window.
fn windowed_step(
    scope: &Scope<'_, Cpu>,
    cache: ScaledLayer<'_>,
    sequences: &[(u64, std::ops::Range<usize>)],
    window: Option<usize>,
) -> Result<Vec<Vec<f32>>, KernelError> {
    let (heads, half) = (HEADS * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim);
    let (mut qkv, mut slots, mut starts) = (Vec::new(), Vec::new(), vec![0u32]);
    for (seed, rows) in sequences {
        let prompt = Random::new(*seed).floats(400 * (heads + 2 * half));
        qkv.extend_from_slice(&prompt[rows.start * (heads + 2 * half)..rows.end * (heads + 2 * half)]);
        slots.extend(rows.clone().map(|token| (*seed as usize * 400 + token) as u32));
        starts.push(slots.len() as u32);
    }
    let pass = scope.scope();
    let mut qkv = pass.upload([slots.len(), heads + 2 * half], &qkv)?;
    let positions = pass.upload([1, slots.len()], &vec![0u32; slots.len()])?;
    let slots = pass.upload([slots.len()], &slots)?;
    let pairs = SHAPE.head_dim / 2;
    let rope = Rope { frequencies: pass.upload([pairs], &vec![0.0f32; pairs])?, axes: PairAxes::Sections(vec![pairs]) };
    pass.rotary_kv_write(&mut qkv, heads / SHAPE.head_dim, None, &positions, &rope, &slots, cache)?;
    let contexts: Vec<u32> = sequences.iter().map(|(_, rows)| rows.end as u32).collect();
    let tables: Vec<u32> = sequences.iter().flat_map(|(seed, _)| *seed as u32 * 25..(*seed as u32 + 1) * 25).collect();
    let paged = PagedSequences {
        has_linked_rows: false,
        query_starts: pass.upload([starts.len()], &starts)?,
        context_lengths: pass.upload([contexts.len()], &contexts)?,
        block_tables: pass.upload([contexts.len(), 25], &tables)?,
        single_rows: 0,
        query_key_pairs: 1,
    };
    let queries = qkv.column_range(0..heads);
    let out: Vec<f32> = pass.download(&pass.attention_paged(&queries, cache, &paged, 0.2, window)?)?;
    Ok(starts.windows(2).map(|at| out[at[0] as usize * heads..at[1] as usize * heads].to_vec()).collect())
}

/// Runs `steps` over a fresh cache of `dtype`.
fn over_a_cache<T>(dtype: DType, steps: impl FnOnce(&Scope<'_, Cpu>, ScaledLayer<'_>) -> Result<T, KernelError>) -> T {
    compute(2, |scope| {
        let (blocks, shape) = (75, KvShape { dtype, ..SHAPE });
        let cache = scope.empty([blocks, shape.block_bytes().as_usize() / 4])?;
        // SAFETY: the cache outlives the layer, and nothing else uses it.
        let layer = unsafe { KvLayer::new(cache.address(), blocks, shape) };
        let scales = scope.upload([2, SHAPE.kv_heads], &[0.01f32, 0.003, 0.02, 0.7])?;
        steps(scope, layer.scaled((dtype == DType::F8E4M3).then_some(&scales)))
    })
}

#[test]
fn a_chunked_prefill_matches_the_whole_prefill() {
    for (dtype, window) in CACHES.into_iter().flat_map(|dtype| [None, Some(1), Some(90)].map(|window| (dtype, window)))
    {
        let step = |scope: &Scope<'_, Cpu>, cache: ScaledLayer<'_>, sequences: &[(u64, std::ops::Range<usize>)]| {
            windowed_step(scope, cache, sequences, window)
        };
        let whole = over_a_cache(dtype, |scope, cache| step(scope, cache, &[(1, 0..391)])).remove(0);
        let cuts = [0, 1, 17, 64, 65, 200, 390, 391];
        let chunked = over_a_cache(dtype, |scope, cache| {
            let mut rows = Vec::new();
            for cut in cuts.windows(2) {
                rows.extend(step(scope, cache, &[(1, cut[0]..cut[1])])?.remove(0));
            }
            Ok(rows)
        });
        assert_close(&format!("chunked prefill over {dtype}"), &chunked, &widened(&whole), 1e-6);
    }
}

#[test]
fn other_sequences_in_the_batch_do_not_change_attention() {
    for dtype in CACHES {
        let alone = over_a_cache(dtype, |scope, cache| {
            step(scope, cache, &[(1, 0..123)])?;
            step(scope, cache, &[(1, 123..124)])
        });
        let beside = over_a_cache(dtype, |scope, cache| {
            step(scope, cache, &[(0, 0..30), (1, 0..123), (2, 0..399)])?;
            step(scope, cache, &[(2, 399..400), (1, 123..124), (0, 30..95)])
        });
        assert_eq!(alone[0], beside[1], "one work item is one sequence, so the bits agree over {dtype}");
    }
}

#[test]
fn other_rows_change_a_rows_product_only_by_rounding() {
    let mut random = Random::new(5);
    let (in_features, out_features) = (391, 203);
    let (x, weight) = (random.floats(300 * in_features), random.floats(out_features * in_features));
    let product = |rows: usize| -> Vec<f32> {
        compute(2, |scope| {
            let x = scope.upload([rows, in_features], &x[..rows * in_features])?;
            let weight = ground::narrowed(scope, [out_features, in_features], DType::BF16, &weight)?;
            scope.download(&scope.linear(&x, &weight, None)?)
        })
    };
    let alone = product(1);
    for rows in [2, 4, 5, 33, 300] {
        assert_close("a row among others", &product(rows)[..out_features], &widened(&alone), 2e-5);
    }
}

#[test]
fn other_rows_do_not_change_a_rows_experts() {
    let (experts, top, hidden) = (16, 4, 72);
    let mut random = Random::new(8);
    let (logits, x) = (random.floats(300 * experts), random.floats(300 * hidden));
    let (gate_up, down) = (random.floats(experts * 2 * 40 * hidden), random.floats(experts * hidden * 40));
    // The result of the last of `rows` rows: its weights and its sum.
    let last = |rows: usize| -> (Vec<u32>, Vec<f32>) {
        compute(2, |scope| {
            let logits = scope.upload([rows, experts], &logits[(300 - rows) * experts..])?;
            let x = scope.upload([rows, hidden], &x[(300 - rows) * hidden..])?;
            let gate_up = ground::narrowed(scope, [experts * 80, hidden], DType::BF16, &gate_up)?;
            let down = ground::narrowed(scope, [experts * hidden, 40], DType::BF16, &down)?;
            let routing = scope.route(
                &logits,
                RoutingRule::renormalized(top),
                &scope.upload([experts], &vec![0u32; experts])?,
            )?;
            let mut sum = scope.upload([rows, hidden], &vec![0.0f32; rows * hidden])?;
            let gated = scope.gated_experts(&x, &gate_up, &routing)?;
            scope.add_experts(&gated, &down, &routing, &mut sum)?;
            let weights: Vec<f32> = scope.download(&routing.weights)?;
            let weights = weights[(rows - 1) * top..].iter().map(|weight| weight.to_bits()).collect();
            Ok((weights, scope.download::<f32>(&sum)?[(rows - 1) * hidden..].to_vec()))
        })
    };
    let alone = last(1);
    for rows in [2, 5, 33, 300] {
        let (weights, sum) = last(rows);
        assert_eq!(weights, alone.0, "{rows} rows");
        assert_close("a row among others", &sum, &widened(&alone.1), 1e-5);
    }
}

#[test]
fn a_nan_row_affects_no_other_row() {
    let (rows, hidden) = (9, 67);
    let mut x = Random::new(6).floats(rows * hidden);
    x[4 * hidden..5 * hidden].fill(f32::NAN);
    let weight = Random::new(7).floats(131 * hidden);
    let found: Vec<f32> = compute(2, |scope| {
        let x = scope.upload([rows, hidden], &x)?;
        let normed = scope.rms_norm(&x, RmsNorm::new(&scope.upload([hidden], &[1.0f32; 67])?, 1e-6))?;
        let product = scope.linear(&normed, &scope.upload([131, hidden], &weight)?, None)?;
        scope.download(&product)
    });
    for (row, elements) in found.chunks(131).enumerate() {
        assert!(elements.iter().all(|element| element.is_nan() == (row == 4)), "row {row}");
    }
}
