//! Keys and values in E4M3: the contents that are written, the layers that are refused, and the
//! distance of attention from attention over an unquantized cache.

use bursar_kernels::{
    ops::{
        attention_paged::PagedSequences,
        rotary::{PairAxes, Rope},
    },
    *,
};

use crate::ground::{Random, compute, plan};

const HEADS: usize = 6;
const SHAPE: KvShape = KvShape { layers: 1, kv_heads: 2, head_dim: 32, dtype: DType::F8E4M3 };
const COLUMNS: usize = (HEADS + 2 * SHAPE.kv_heads) * SHAPE.head_dim;

/// Writes the keys and values of `qkv` `[tokens, COLUMNS]`, without rotation, to the first blocks
/// of a fresh cache, and then calls `then`.
fn written<T>(
    qkv: &[f32],
    dtype: DType,
    scales: [f32; 4],
    then: impl FnOnce(&Scope<'_, Cpu>, ScaledLayer<'_>, &Tensor<'_>) -> Result<T, KernelError>,
) -> T {
    compute(2, |scope| {
        let tokens = qkv.len() / COLUMNS;
        let (blocks, shape) = (tokens.div_ceil(BLOCK_TOKENS), KvShape { dtype, ..SHAPE });
        let memory = scope.empty([blocks, shape.block_bytes().as_usize() / 4])?;
        // SAFETY: the memory outlives the layer, and nothing else uses it.
        let layer = unsafe { KvLayer::new(memory.address(), blocks, shape) };
        let scales = scope.upload([2, SHAPE.kv_heads], &scales)?;
        let cache = layer.scaled((dtype == DType::F8E4M3).then_some(&scales));
        let pairs = SHAPE.head_dim / 2;
        let rope =
            Rope { frequencies: scope.upload([pairs], &vec![1.0; pairs])?, axes: PairAxes::Sections(vec![pairs]) };
        let positions = scope.upload([1, tokens], &vec![0u32; tokens])?;
        let slots = scope.upload([tokens], &(0..tokens as u32).collect::<Vec<_>>())?;
        let mut qkv = scope.upload([tokens, COLUMNS], qkv)?;
        scope.rotary_kv_write(&mut qkv, HEADS, None, &positions, &rope, &slots, cache)?;
        then(scope, cache, &qkv)
    })
}

#[test]
fn keys_and_values_are_rounded_with_their_heads_scale() {
    let (tokens, scales) = (19, [0.013f32, 3.0, 0.002, 1.0]);
    let mut qkv = Random::new(3).floats(tokens * COLUMNS);
    // The values of the second head, which are not rotated, contain numbers that are too large,
    // NaN, and a number that is too small.
    let values = (HEADS + 3) * SHAPE.head_dim;
    qkv[values..][..6].copy_from_slice(&[449.0, -1e9, f32::INFINITY, f32::NAN, 1e-9, -460.0]);
    let codes: Vec<E4m3> = written(&qkv, DType::F8E4M3, scales, |scope, cache, _| {
        let elements = 2 * 2 * SHAPE.kv_heads * BLOCK_TOKENS * SHAPE.head_dim;
        let address = cache.layer.address();
        // SAFETY: these are the cache's two blocks, which nothing writes any more.
        scope.download(&unsafe { Tensor::persistent(address, [elements], DType::F8E4M3) })
    });
    for (token, row) in qkv.chunks_exact(COLUMNS).enumerate() {
        for (at, number) in row[HEADS * SHAPE.head_dim..].iter().enumerate() {
            let (head, element) = (at / SHAPE.head_dim, at % SHAPE.head_dim);
            let vector = (token / BLOCK_TOKENS * 4 + head) * BLOCK_TOKENS + token % BLOCK_TOKENS;
            let found = codes[vector * SHAPE.head_dim + element];
            let expected = E4m3::from_f32(number / scales[head]);
            assert_eq!(found, expected, "{number} of token {token}, head {head}");
        }
    }
    let first: Vec<f32> = (0..6).map(|element| codes[3 * BLOCK_TOKENS * SHAPE.head_dim + element].to_f32()).collect();
    assert!(first[3].is_nan(), "NaN stays NaN");
    assert_eq!((&first[..3], &first[4..]), (&[448.0, -448.0, 448.0][..], &[0.0, -448.0][..]));
}

/// Attention of the last four tokens over all tokens.
fn attended(qkv: &[f32], dtype: DType) -> Vec<f32> {
    let tokens = qkv.len() / COLUMNS;
    written(qkv, dtype, [1.0; 4], |scope, cache, qkv| {
        let blocks: Vec<u32> = (0..cache.layer.blocks() as u32).collect();
        let sequences = PagedSequences {
            has_linked_rows: false,
            query_starts: scope.upload([2], &[0, 4u32])?,
            context_lengths: scope.upload([1], &[tokens as u32])?,
            block_tables: scope.upload([1, blocks.len()], &blocks)?,
            single_rows: 0,
            query_key_pairs: 4 * tokens as u64,
        };
        let queries = qkv.column_range(0..HEADS * SHAPE.head_dim);
        let last = queries.row_range(tokens - 4..tokens);
        scope.download(&scope.attention_paged(&last, cache, &sequences, 0.2, None)?)
    })
}

#[test]
fn attention_over_an_fp8_cache_is_close_to_f32() {
    // Scores average 3 and reach 10, so a few keys have most of the weight, and an error in the
    // score of such a key changes its weight.
    let qkv: Vec<f32> = Random::new(4).floats(333 * COLUMNS).into_iter().map(|number| number * 3.0).collect();
    let (rounded, plain) = (attended(&qkv, DType::F8E4M3), attended(&qkv, DType::F32));
    let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let distance = norm(&mut rounded.iter().zip(&plain).map(|(a, b)| a - b)) / norm(&mut plain.iter().copied());
    println!("attention over E4M3 differs from attention over f32 by {distance:.4} of the norm");
    assert!((1e-3..0.1).contains(&distance), "{distance}");
}

#[test]
fn unsuitable_cache_scales_are_refused_with_an_explanation() {
    let refused = |dtype, scales: Option<[usize; 2]>| {
        let (found, ..) = plan(1, |scope| {
            // SAFETY: a plan touches no memory.
            let layer = unsafe { KvLayer::new(bursar_budgets::Address(0), 4, KvShape { dtype, ..SHAPE }) };
            let scales = scales.map(|shape| scope.empty(shape).unwrap());
            let sequences = PagedSequences {
                has_linked_rows: false,
                query_starts: scope.upload([2], &[0, 1u32]).unwrap(),
                context_lengths: scope.upload([1], &[1u32]).unwrap(),
                block_tables: scope.upload([1, 1], &[0u32]).unwrap(),
                single_rows: 1,
                query_key_pairs: 1,
            };
            let queries = scope.empty([1, HEADS * SHAPE.head_dim]).unwrap();
            let cache = layer.scaled(scales.as_ref());
            scope.attention_paged(&queries, cache, &sequences, 1.0, None).map(drop).unwrap_err().to_string()
        });
        found
    };
    let found = [
        refused(DType::F8E4M3, None),
        refused(DType::F32, Some([2, 2])),
        refused(DType::F16, None),
        refused(DType::F8E4M3, Some([2, 6])),
    ];
    let layer = |found| {
        format!(
            "attention_paged: layer holds {found}; expected the target's activations without scales, or quantized \
             elements with scales"
        )
    };
    let expected =
        [layer("f8e4m3"), layer("f32"), layer("f16"), "attention_paged: scales is [2, 6]; expected [2, 2]".to_owned()];
    assert_eq!(found, expected);
}
