//! Mistakes that are caught before memory is accessed. Shapes that disagree return a typed error.
//! Mistakes that only a bug in this project can cause fail an assertion.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bursar_kernels::{
    ops::{
        argmax::NO_CHOICE,
        attention_packed::PackedSequences,
        attention_paged::PagedSequences,
        clustered_argmax::TokenClusters,
        gelu::Gelu,
        patchify::{PatchSize, Pixels},
        rms_norm::RmsNorm,
        rotary::{PairAxes, Rope},
        route::RoutingRule,
        transfer,
    },
    sampling::SampleLayout,
    *,
};

use crate::ground::{compute, plan};

/// The text of the error that planning `pass` returns.
fn text<T>(pass: impl for<'s> FnOnce(&'s Scope<'_, Plan>) -> Result<T, KernelError>) -> String {
    plan(1, |scope| pass(scope).err().expect("shapes that disagree are refused").to_string()).0
}

const ONE_ROW: SampleLayout = SampleLayout { rows: 1, vocabulary: 7 };

/// Samples from `logits`. The other arguments are the lengths in words of the tensors `chosen`,
/// `asked` and `report`.
fn sample(
    scope: &Scope<'_, Plan>,
    logits: &Tensor<'_>,
    [asked, chosen, report]: [usize; 3],
) -> Result<(), KernelError> {
    let words = |count: usize| scope.upload([count], &vec![0u32; count]);
    scope.sample_into(logits, &words(asked)?, ONE_ROW, &mut words(chosen)?, &mut words(report)?)
}

/// Routes five rows to two of four experts each, then computes both halves of the mixture.
fn experts(scope: &Scope<'_, Plan>, x: [usize; 2], gate_up: [usize; 2], down: [usize; 2]) -> Result<(), KernelError> {
    let logits = scope.empty_f32([5, 4])?;
    let loads = scope.empty_u32([4])?;
    let routing = scope.route(&logits, RoutingRule::renormalized(2), &loads)?;
    let (x, gate_up, down) = (scope.empty(x)?, scope.empty(gate_up)?, scope.empty(down)?);
    let mut sum = scope.empty([5, 8])?;
    let gated = scope.gated_experts(&x, &gate_up, &routing)?;
    scope.add_experts(&gated, &down, &routing, &mut sum)
}

/// Adds the results of experts to five rows of eight numbers and normalizes the rows, with a norm
/// weight of `weight` numbers and an output of shape `out`.
fn normed_experts(scope: &Scope<'_, Plan>, weight: usize, out: [usize; 2]) -> Result<(), KernelError> {
    let routing = scope.route(&scope.empty_f32([5, 4])?, RoutingRule::renormalized(2), &scope.empty_u32([4])?)?;
    let (gated, down, mut sum) = (scope.empty([10, 4])?, scope.empty([32, 4])?, scope.empty([5, 8])?);
    let (weight, mut out) = (scope.empty([weight])?, Activations::of_plain(scope.empty(out)?));
    let norm = RmsNorm::new(&weight, 1e-6);
    scope.add_experts_rms_norm(&gated, &down, &routing, &mut sum, norm, &mut out)
}

const SIZE: PatchSize = PatchSize { side: 2, frames: 2 };

/// One picture of two by two patches.
fn pixels<'s, B: Backend>(
    scope: &'s Scope<'_, B>,
    bytes: Tensor<'s>,
    levels: usize,
    patches: usize,
) -> Result<Pixels<'s>, KernelError> {
    Ok(Pixels {
        bytes,
        layout: scope.upload([1, 4], &[0u32, 2, 2, 1])?,
        levels: scope.upload([1, levels], &[1.0f32; 7][..levels])?,
        places: scope.upload([3, patches], &[0u32; 12][..3 * patches])?,
    })
}

#[test]
fn mismatched_shapes_and_types_are_refused_with_an_explanation() {
    let indices = [0u32; 12];
    let layer = |dtype| {
        // SAFETY: a plan touches no memory.
        unsafe { KvLayer::new(bursar_budgets::Address(0), 4, KvShape { layers: 1, kv_heads: 2, head_dim: 8, dtype }) }
    };
    let texts = [
        text(|scope| {
            let bytes = scope.upload([8], &indices[..8])?;
            scope.patchify(&pixels(scope, bytes, 7, 4)?, SIZE, &mut scope.empty([4, 24])?)
        }),
        text(|scope| {
            let bytes = scope.upload([8], &[0u8; 8])?;
            scope.patchify(&pixels(scope, bytes, 6, 4)?, SIZE, &mut scope.empty([4, 24])?)
        }),
        text(|scope| {
            let bytes = scope.upload([8], &[0u8; 8])?;
            scope.patchify(&pixels(scope, bytes, 7, 3)?, SIZE, &mut scope.empty([4, 24])?)
        }),
        text(|scope| {
            let bytes = scope.upload([8], &[0u8; 8])?;
            scope.patchify(&pixels(scope, bytes, 7, 4)?, SIZE, &mut scope.empty([4, 23])?)
        }),
        text(|scope| {
            let (places, layout) = (scope.upload([3, 4], &indices)?, scope.upload([1, 4], &indices[..4])?);
            scope.position_grid(&scope.empty([8, 5])?, 3, &places, &layout, &mut scope.empty([4, 5])?)
        }),
        text(|scope| {
            let (places, layout) = (scope.upload([3, 4], &indices)?, scope.upload([1, 4], &indices[..4])?);
            scope.position_grid(
                &scope.empty([9, 6])?.column_range(0..5),
                3,
                &places,
                &layout,
                &mut scope.empty([4, 5])?,
            )
        }),
        text(|scope| {
            let (places, layout) = (scope.upload([3, 3], &indices[..9])?, scope.upload([1, 4], &indices[..4])?);
            scope.position_grid(&scope.empty([9, 5])?, 3, &places, &layout, &mut scope.empty([4, 5])?)
        }),
        text(|scope| {
            let (places, layout) = (scope.upload([3, 4], &indices)?, scope.upload([1, 3], &indices[..3])?);
            scope.position_grid(&scope.empty([9, 5])?, 3, &places, &layout, &mut scope.empty([4, 5])?)
        }),
        text(|scope| {
            let (places, layout) = (scope.upload([3, 4], &indices)?, scope.upload([1, 4], &indices[..4])?);
            scope.position_grid(&scope.empty([9, 5])?, 3, &places, &layout, &mut scope.empty([4, 6])?)
        }),
        text(|scope| {
            let ids = scope.upload([12], &indices)?;
            scope.embed(&scope.upload([3, 4], &indices)?, &ids, &ids).map(drop)
        }),
        text(|scope| {
            let previous = scope.upload([12], &indices)?;
            scope.embed(&scope.empty([3, 4])?, &scope.upload([3, 4], &indices)?, &previous).map(drop)
        }),
        text(|scope| {
            let ids = scope.upload([12], &indices)?;
            scope.embed(&scope.empty([3, 4])?, &ids, &scope.empty([12])?).map(drop)
        }),
        text(|scope| scope.rms_norm(&scope.empty([3, 4])?, RmsNorm::new(&scope.empty([5])?, 1e-6)).map(drop)),
        text(|scope| {
            let (x, weight) = (scope.empty([3, 4])?, scope.empty([4])?);
            let mut out = scope.quantize(&scope.empty([3, 5])?, Quantization::Rows)?;
            scope.rms_norm_into(&x, RmsNorm::new(&weight, 1e-6), &mut out)
        }),
        text(|scope| normed_experts(scope, 7, [5, 8])),
        text(|scope| normed_experts(scope, 8, [4, 8])),
        text(|scope| {
            let (x, weight) = (scope.empty([3, 4])?, scope.empty([4])?);
            scope.layer_norm(&x, &weight, &scope.empty([5])?, 1e-6).map(drop)
        }),
        text(|scope| scope.linear(&scope.empty([3, 4])?, &scope.empty([7, 5])?, None).map(drop)),
        text(|scope| scope.linear(&scope.empty([3, 5])?, &scope.empty([7, 5])?, Some(&scope.empty([8])?)).map(drop)),
        text(|scope| scope.linear(&scope.empty([3, 5])?, &scope.empty([7, 6])?.column_range(0..5), None).map(drop)),
        text(|scope| scope.linear_into(&scope.empty([3, 5])?, &scope.empty([7, 5])?, None, &mut scope.empty([3, 8])?)),
        text(|scope| scope.linear_add(&scope.empty([3, 5])?, &scope.empty([7, 5])?, None, &mut scope.empty([4, 7])?)),
        text(|scope| {
            let rope = Rope { frequencies: scope.empty([4])?, axes: PairAxes::Sections(vec![1, 2]) };
            scope.rotary(&mut scope.empty([6, 8])?, 1, None, &scope.upload([2, 6], &indices)?, &rope)
        }),
        text(|scope| {
            let rope = Rope { frequencies: scope.upload([4], &indices[..4])?, axes: PairAxes::Sections(vec![4]) };
            scope.rotary(&mut scope.empty([6, 8])?, 1, None, &scope.upload([1, 6], &indices[..6])?, &rope)
        }),
        text(|scope| {
            let (mut qkv, slots) = (scope.empty([3, 39])?, scope.upload([3], &indices[..3])?);
            let rope = Rope { frequencies: scope.empty([4])?, axes: PairAxes::Sections(vec![4]) };
            let positions = scope.upload([1, 3], &indices[..3])?;
            scope.rotary_kv_write(&mut qkv, 1, None, &positions, &rope, &slots, &layer(DType::F32))
        }),
        text(|scope| {
            let (mut qkv, slots) = (scope.empty([3, 40])?, scope.upload([3], &indices[..3])?);
            let rope = Rope { frequencies: scope.empty([4])?, axes: PairAxes::Sections(vec![4]) };
            let positions = scope.upload([1, 3], &indices[..3])?;
            scope.rotary_kv_write(&mut qkv, 1, None, &positions, &rope, &slots, &layer(DType::BF16))
        }),
        text(|scope| {
            let sequences = PagedSequences {
                has_linked_rows: false,
                query_starts: scope.upload([3], &indices[..3])?,
                context_lengths: scope.upload([2], &indices[..2])?,
                block_tables: scope.upload([3, 2], &indices[..6])?,
                single_rows: 0,
                query_key_pairs: 1,
            };
            scope.attention_paged(&scope.empty([5, 32])?, &layer(DType::F32), &sequences, 0.2, None).map(drop)
        }),
        text(|scope| {
            let sequences = PagedSequences {
                has_linked_rows: false,
                query_starts: scope.upload([3], &indices[..3])?,
                context_lengths: scope.upload([2], &indices[..2])?,
                block_tables: scope.upload([2, 3], &indices[..6])?,
                single_rows: 0,
                query_key_pairs: 1,
            };
            scope.attention_paged(&scope.empty([5, 32])?, &layer(DType::F32), &sequences, 0.2, Some(0)).map(drop)
        }),
        text(|scope| {
            let sequences =
                PackedSequences { starts: scope.upload([2], &indices[..2])?, longest: 1, query_key_pairs: 1 };
            scope.attention_packed(&scope.empty([5, 32])?, 2, &sequences).map(drop)
        }),
        text(|scope| scope.silu_mul(&scope.empty([5, 3])?).map(drop)),
        text(|scope| scope.gated_linear(&scope.empty([5, 4])?, &scope.empty([3, 4])?, None).map(drop)),
        text(|scope| {
            scope.route(&scope.empty_u32([5, 4])?, RoutingRule::renormalized(2), &scope.empty_u32([4])?).map(drop)
        }),
        text(|scope| {
            scope.route(&scope.empty_f32([5, 4])?, RoutingRule::renormalized(2), &scope.empty_u32([5])?).map(drop)
        }),
        text(|scope| {
            scope.route(&scope.empty_f32([5, 513])?, RoutingRule::renormalized(2), &scope.empty_u32([513])?).map(drop)
        }),
        text(|scope| {
            scope.route(&scope.empty_f32([5, 4])?, RoutingRule::renormalized(5), &scope.empty_u32([4])?).map(drop)
        }),
        text(|scope| {
            scope.route(&scope.empty_f32([5, 64])?, RoutingRule::renormalized(33), &scope.empty_u32([64])?).map(drop)
        }),
        text(|scope| experts(scope, [4, 8], [32, 8], [16, 4])),
        text(|scope| experts(scope, [5, 8], [33, 8], [16, 4])),
        text(|scope| experts(scope, [5, 8], [32, 8], [36, 4])),
        text(|scope| experts(scope, [5, 8], [32, 8], [32, 5])),
        text(|scope| scope.gelu(&mut scope.upload([12], &indices)?, Gelu::Erf)),
        text(|scope| scope.gather_rows(&scope.empty([5, 3])?, &scope.empty([2])?).map(drop)),
        text(|scope| {
            let rows = scope.upload([3], &indices[..3])?;
            scope.scatter_rows(&scope.empty([2, 4])?, &rows, &mut scope.empty([5, 4])?)
        }),
        text(|scope| {
            let (from, to) = (scope.upload([3], &indices[..3])?, scope.upload([2], &indices[..2])?);
            scope.add_rows(&scope.empty([2, 4])?, &from, &to, &mut scope.empty([5, 4])?)
        }),
        text(|scope| {
            let rows = scope.upload([2], &indices[..2])?;
            scope.add_rows(&scope.empty([2, 3])?, &rows, &rows, &mut scope.empty([5, 4])?)
        }),
        text(|scope| {
            let rows = scope.upload([2], &indices[..2])?;
            scope.add_rows(&scope.empty([2, 4])?, &scope.empty([2])?, &rows, &mut scope.empty([5, 4])?)
        }),
        text(|scope| scope.argmax(&scope.empty([2, 0])?).map(drop)),
        text(|scope| scope.argmax_into(&scope.empty([2, 3])?, &mut scope.upload([12], &indices)?)),
        text(|scope| scope.argmax_into(&scope.empty([2, 3])?, &mut scope.empty([2])?)),
        text(|scope| {
            scope.argmax_ids_into(&scope.empty([2, 3])?, &scope.upload([2], &indices[..2])?, &mut scope.empty_u32([2])?)
        }),
        text(|scope| clustered(scope, [2, 3], [8, 4], [2, 4], 1)),
        text(|scope| clustered(scope, [2, 3], [8, 3], [3, 4], 1)),
        text(|scope| clustered(scope, [2, 3], [8, 3], [2, 4097], 1)),
        text(|scope| clustered(scope, [2, 3], [8, 3], [2, 4], 5)),
        text(|scope| clustered(scope, [2, 3], [8, 3], [2, 3], 1)),
        text(|scope| scope.copy_rows_into(&scope.empty([2, 3])?, &mut scope.empty([3, 3])?)),
        text(|scope| sample(scope, &scope.upload([12], &indices)?, [30, 1, 42])),
        text(|scope| sample(scope, &scope.empty([1, 8])?, [30, 1, 42])),
        text(|scope| sample(scope, &scope.empty([1, 7])?, [29, 1, 42])),
        text(|scope| sample(scope, &scope.empty([1, 7])?, [30, 0, 42])),
        text(|scope| sample(scope, &scope.empty([1, 7])?, [30, 1, 41])),
        text(|scope| scope.download::<f32>(&scope.empty([2, 4])?.column_range(0..3)).map(drop)),
        text(|scope| transfer::fill(&Plan::new(*scope.target()), &[0; 31], &mut scope.empty([2, 4])?)),
        text(|scope| scope.download::<u32>(&scope.empty([2, 4])?).map(drop)),
        text(|scope| scope.download_later::<f32>(&scope.empty([2, 4])?.column_range(0..3)).map(drop)),
        text(|scope| scope.download_later::<u32>(&scope.empty([2, 4])?).map(drop)),
    ];
    assert_eq!(
        texts.join("\n"),
        "patchify: bytes holds u32; expected u8 levels
patchify: levels is [1, 6]; expected [1, 7]
patchify: places is [3, 3]; expected [3, 4]
patchify: out is [4, 23]; expected [4, 24]
position_grid: table is [8, 5]; expected side * side rows
position_grid: table is [9, 5]; expected contiguous rows
position_grid: places is [3, 3]; expected [3, 4]
position_grid: layout is [1, 3]; expected [1, 4]
position_grid: out is [4, 6]; expected [4, 5]
embed: table holds u32; expected floating-point numbers
embed: ids is [3, 4]; expected [3]
embed: previous holds f32; expected u32 indices
rms_norm: weight is [5]; expected [4]
rms_norm: out is [3, 5]; expected [3, 4]
add_experts_rms_norm: weight is [7]; expected [8]
add_experts_rms_norm: out is [4, 8]; expected [5, 8]
layer_norm: bias is [5]; expected [4]
linear: x is [3, 4]; expected [3, 5]
linear: bias is [8]; expected [7]
linear: weight is [7, 5]; expected contiguous rows
linear: out is [3, 8]; expected [3, 7]
linear: sum is [4, 7]; expected [3, 7]
rotary: frequencies is [4]; expected as many pairs as the axes define
rotary: frequencies holds u32; expected f32
rotary_kv_write: qkv is [3, 39]; expected [3, 40]
rotary_kv_write: layer holds bf16; expected the target's activations without scales, or quantized elements with scales
attention_paged: block_tables is [3, 2]; expected one row per sequence
attention_paged: queries is [5, 32]; expected a window of at least 1 token, not 0
attention_packed: qkv is [5, 32]; expected queries, keys and values with equally many whole heads
gate_mul: gate_up is [5, 3]; expected an even number of columns
gated_linear: weight is [3, 4]; expected an even number of rows
route: logits holds u32; expected f32
route: loads is [5]; expected [4]
route: logits is [5, 513]; expected 1 to 512 experts
route: logits is [5, 4]; expected a `top` of 1 to 32 that is at most the number of experts
route: logits is [5, 64]; expected a `top` of 1 to 32 that is at most the number of experts
gated_experts: x is [4, 8]; expected as many rows as were routed
gated_experts: weight is [33, 8]; expected equally many gate and up rows for each expert
add_experts: weight is [36, 4]; expected one row per expert and column of sum
add_experts: x is [10, 4]; expected [10, 5]
gelu: x holds u32; expected the target's activations
gather_rows: rows holds f32; expected u32 indices
scatter_rows: rows is [3]; expected [2]
add_rows: to is [2]; expected [3]
add_rows: x is [2, 3]; expected as many columns as the output
add_rows: from holds f32; expected u32 indices
argmax: x is [2, 0]; expected at least one column
argmax: out is [12]; expected [2]
argmax: out holds f32; expected u32 indices
argmax: ids is [2]; expected [3]
clustered_argmax: table is [8, 4]; expected as many columns as x
clustered_argmax: scores is [3, 4]; expected as many rows as x
clustered_argmax: scores is [2, 4097]; expected 1 to 4096 clusters
clustered_argmax: scores is [2, 4]; expected a `top` from 1 to the number of clusters
clustered_argmax: tokens is [8]; expected a positive multiple of the columns of scores
copy_rows: out is [3, 3]; expected [2, 3]
sample: logits holds u32; expected f32
sample: logits is [1, 8]; expected [1, 7]
sample: asked is [29]; expected words for each row of logits
sample: chosen is [0]; expected an element for each row of logits
sample: report is [41]; expected a report of each row of logits
download: source is [2, 3]; expected contiguous rows
fill: out is [2, 4]; expected as many bytes as the source
download: source holds f32; expected the host's type
download_later: source is [2, 3]; expected contiguous rows
download_later: source holds f32; expected the host's type"
    );
}

/// Runs `clustered_argmax_into` with tensors of these shapes.
fn clustered<B: Backend>(
    scope: &Scope<'_, B>,
    x: [usize; 2],
    table: [usize; 2],
    scores: [usize; 2],
    top: usize,
) -> Result<(), KernelError> {
    let (x, table, scores) = (scope.empty(x)?, scope.empty(table)?, scope.empty_f32(scores)?);
    let tokens = scope.upload([table.rows()], &(0..table.rows() as u32).collect::<Vec<_>>())?;
    let clusters = TokenClusters { scores: &scores, tokens: &tokens, top };
    scope.clustered_argmax_into(&x, &(&table).into(), clusters, &mut scope.empty_u32([x.rows()])?)
}

/// The message of the assertion that `pass` fails on the CPU.
fn panics(pass: impl for<'s> FnOnce(&'s Scope<'_, Cpu>) -> Result<(), KernelError>) -> String {
    let result = catch_unwind(AssertUnwindSafe(|| compute(2, pass)));
    let cause = result.expect_err("the kernel refuses the input");
    cause.downcast_ref::<String>().cloned().or(cause.downcast_ref::<&str>().map(|text| text.to_string())).unwrap()
}

/// Attention of the rows in `starts` over `contexts`, in a cache of four blocks.
fn paged(scope: &Scope<'_, Cpu>, starts: &[u32], contexts: &[u32], tables: &[u32]) -> Result<(), KernelError> {
    let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 8, dtype: DType::F32 };
    let cache = scope.upload([4, 512], &[0.0f32; 2048])?;
    // SAFETY: the cache outlives the layer, and nothing else uses it.
    let layer = unsafe { KvLayer::new(cache.address(), 4, shape) };
    let sequences = PagedSequences {
        has_linked_rows: false,
        query_starts: scope.upload([starts.len()], starts)?,
        context_lengths: scope.upload([contexts.len()], contexts)?,
        block_tables: scope.upload([contexts.len(), tables.len() / contexts.len()], tables)?,
        single_rows: 0,
        query_key_pairs: 1,
    };
    scope.attention_paged(&scope.upload([5, 32], &[0.0f32; 160])?, &layer, &sequences, 0.2, None).map(drop)
}

#[test]
fn an_index_outside_its_tensor_accesses_no_memory() {
    let table = [0.0f32; 12];
    let embed = |id: u32, previous: [u32; 2]| {
        panics(|scope| {
            let (ids, previous) = (scope.upload([1], &[id])?, scope.upload([2], &previous)?);
            scope.embed(&scope.upload([3, 4], &table)?, &ids, &previous).map(drop)
        })
    };
    assert_eq!(embed(3, [0, 0]), "row 3 of 3");
    assert_eq!(
        embed(UnseenToken { row: 1 }.code(), [0, 3]),
        "row 3 of 3",
        "a chosen token id is checked like a given id"
    );
    assert_eq!(embed(UnseenToken { row: 2 }.code(), [0, 0]), "row 2 of 2 choices of the previous step");
    assert_eq!(
        embed(NO_CHOICE, [0, 0]),
        "row 2147483647 of 2 choices of the previous step",
        "the code for no choice is not a token id"
    );
    let gather =
        panics(|scope| scope.gather_rows(&scope.upload([3, 4], &table)?, &scope.upload([1], &[u32::MAX])?).map(drop));
    assert_eq!(gather, "row 4294967295 of 3");
    let scatter = |rows: [u32; 3]| {
        panics(|scope| {
            let rows = scope.upload([3], &rows)?;
            scope.scatter_rows(&scope.upload([3, 4], &table)?, &rows, &mut scope.empty([3, 4])?)
        })
    };
    assert_eq!(scatter([0, 1, 3]), "row 3 of 3");
    assert_eq!(scatter([0, 2, 0]), "row 0 is named twice");
    let add = |from: [u32; 2], to: [u32; 2]| {
        panics(|scope| {
            let (from, to) = (scope.upload([2], &from)?, scope.upload([2], &to)?);
            scope.add_rows(&scope.upload([3, 4], &table)?, &from, &to, &mut scope.empty([5, 4])?)
        })
    };
    assert_eq!(add([0, 3], [4, 0]), "row 3 of 3");
    assert_eq!(add([1, 1], [0, 5]), "row 5 of 5");
    assert_eq!(add([0, 1], [2, 2]), "row 2 is named twice");
    let write = panics(|scope| {
        let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 8, dtype: DType::F32 };
        let cache = scope.empty([4, 512])?;
        // SAFETY: the cache outlives the layer, and nothing else uses it.
        let layer = unsafe { KvLayer::new(cache.address(), 4, shape) };
        let mut keys_values = scope.upload([3, 32], &[0.0f32; 96])?;
        let positions = scope.upload([1, 3], &[0u32; 3])?;
        let rope = Rope { frequencies: scope.upload([4], &[0.0f32; 4])?, axes: PairAxes::Sections(vec![4]) };
        let slots = scope.upload([3], &[0u32, 63, 64])?;
        scope.rotary_kv_write(&mut keys_values, 0, None, &positions, &rope, &slots, &layer)
    });
    assert_eq!(write, "block 4 of a layer of 4 blocks");
}

#[test]
fn a_patch_outside_its_picture_accesses_no_memory() {
    // Two by two patches of two by two pixels have 48 bytes.
    let patchify = |layout: [u32; 4], place: [u32; 3], bytes: usize| {
        panics(|scope| {
            let pixels = Pixels {
                bytes: scope.upload([bytes], &[0u8; 64][..bytes])?,
                layout: scope.upload([1, 4], &layout)?,
                levels: scope.upload([1, 7], &[1.0f32; 7])?,
                places: scope.upload([3, 1], &place)?,
            };
            scope.patchify(&pixels, SIZE, &mut scope.empty([1, 24])?)
        })
    };
    assert_eq!(patchify([0, 2, 2, 1], [1, 0, 0], 48), "row 1 of 1");
    assert_eq!(patchify([0, 2, 2, 1], [0, 2, 0], 48), "patch 2, 0 is outside a picture of 2 x 2");
    assert_eq!(patchify([0, 2, 2, 1], [0, 0, u32::MAX], 48), "patch 0, 4294967295 is outside a picture of 2 x 2");
    assert_eq!(patchify([0, 2, 2, 3], [0, 0, 0], 48), "a picture has 3 frames; expected 1 to 2");
    assert_eq!(patchify([0, 2, 2, 0], [0, 0, 0], 48), "a picture has 0 frames; expected 1 to 2");
    let outside = patchify([1, 2, 2, 1], [0, 1, 1], 48);
    assert!(outside.contains("out of range"), "{outside}");
    let outside = patchify([0, 2, 2, 2], [0, 0, 0], 48);
    assert!(outside.contains("out of range"), "{outside}");
}

#[test]
fn a_patch_outside_of_its_picture_has_no_position() {
    let position = |place: [u32; 3]| {
        panics(|scope| {
            let (places, layout) = (scope.upload([3, 1], &place)?, scope.upload([1, 4], &[0u32, 2, 3, 1])?);
            let table = scope.upload([4, 2], &[0.0f32; 8])?;
            scope.position_grid(&table, 2, &places, &layout, &mut scope.empty([1, 2])?)
        })
    };
    assert_eq!(position([1, 0, 0]), "row 1 of 1");
    assert_eq!(position([0, 2, 0]), "patch 2, 0 is outside a picture of 2 x 3");
    assert_eq!(position([0, 0, 3]), "patch 0, 3 is outside a picture of 2 x 3");
}

#[test]
fn inconsistent_sequences_access_no_memory() {
    let cases = [
        panics(|scope| paged(scope, &[0, 5], &[20], &[0, 4])),
        panics(|scope| paged(scope, &[0, 5], &[33], &[0, 1])),
        panics(|scope| paged(scope, &[0, 5], &[4], &[0, 1])),
        panics(|scope| paged(scope, &[0, 4], &[32], &[0, 1])),
        panics(|scope| paged(scope, &[0, 6], &[32], &[0, 1])),
        panics(|scope| paged(scope, &[0, 3, 2], &[32, 32], &[0, 1, 2, 3])),
        panics(|scope| paged(scope, &[0, u32::MAX], &[u32::MAX], &[0, 1])),
    ];
    let expected = "block 4 of a layer of 4 blocks
sequence 0 has a context of 33 in blocks for 32
sequence 0 has 5 rows in a context of 4
query_starts are [0, 4]; expected ascending values from 0 to 5
query_starts are [0, 6]; expected ascending values from 0 to 5
query_starts are [0, 3, 2]; expected ascending values from 0 to 5
query_starts are [0, 4294967295]; expected ascending values from 0 to 5";
    assert_eq!(cases.join("\n"), expected);
}

#[test]
fn packed_sequences_that_leave_out_rows_are_refused() {
    let packed = |starts: &[u32]| {
        panics(|scope| {
            let sequences =
                PackedSequences { starts: scope.upload([starts.len()], starts)?, longest: 1, query_key_pairs: 1 };
            scope.attention_packed(&scope.upload([5, 12], &[0.0f32; 60])?, 2, &sequences).map(drop)
        })
    };
    assert!(packed(&[0, 4]).contains("the sequences end with the last row"));
    assert!(packed(&[0, 6]).contains("the sequences end with the last row"));
    assert!(packed(&[1, 5]).contains("the sequences start with the first row"));
    assert!(packed(&[0, 7, 5]).contains("the sequences follow each other"));
}

#[test]
fn operations_refuse_to_write_to_a_shared_view() {
    let shared = "is a view that may be shared; create it with a `_mut` method";
    let add = panics(|scope| {
        let (sum, weight) = (scope.empty([4, 8])?, scope.empty([8, 8])?);
        let (x, mut same) = (sum.row_range(0..4), sum.row_range(0..4));
        scope.linear_add(&x, &weight, None, &mut same)
    });
    assert_eq!(add, format!("linear: sum {shared}"));
    let gelu = panics(|scope| scope.gelu(&mut scope.empty([4, 8])?.reshape([32]), Gelu::Tanh));
    assert_eq!(gelu, format!("gelu: x {shared}"));
    let argmax = panics(|scope| {
        let chosen = scope.upload([4], &[0u32; 4])?;
        scope.argmax_into(&scope.empty([4, 8])?, &mut chosen.row_range(0..4))
    });
    assert_eq!(argmax, format!("argmax: out {shared}"));
    let fill =
        panics(|scope| transfer::fill(&Cpu::new(1), &[0; 8], &mut scope.empty([4, 8])?.reshape([32]).row_range(0..2)));
    assert_eq!(fill, format!("fill: out {shared}"));
    let scatter = panics(|scope| {
        let rows = scope.upload([2], &[0u32, 1])?;
        scope.scatter_rows(&scope.empty([2, 4])?, &rows, &mut scope.empty([4, 8])?.column_range(0..4))
    });
    assert_eq!(scatter, format!("scatter_rows: out {shared}"));
    let add = panics(|scope| {
        let rows = scope.upload([2], &[0u32, 1])?;
        scope.add_rows(&scope.empty([2, 4])?, &rows, &rows, &mut scope.empty([4, 8])?.column_range(0..4))
    });
    assert_eq!(add, format!("add_rows: out {shared}"));
}

#[test]
fn a_planned_tensor_cannot_be_used_in_computation() {
    let text = plan(1, |dry| {
        let planned = dry.empty([3, 4]).unwrap();
        panics(|scope| scope.argmax(&planned).map(drop))
    });
    assert_eq!(text.0, "the view was made while planning and has no memory");
}
