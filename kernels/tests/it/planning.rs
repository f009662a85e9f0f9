//! Plans: each plan equals the measurement to the byte, counts the cost of the pass, and refuses
//! unsupported shapes.

use bursar_budgets::{Bytes, Hint, Workspace};
use bursar_kernels::{ops::attention_packed::PackedSequences, ops::attention_paged::PagedSequences, *};

use crate::ground::{Pass, passes, plan, poisoned};

#[test]
fn every_operation_uses_exactly_its_planned_workspace_bytes() {
    for threads in [1, 2, 3] {
        let cpu = Cpu::new(threads);
        for pass in passes() {
            let (result, planned, planned_work) = plan(threads, |scope| pass.run(scope).map(|_| ()));
            result.unwrap();
            let (workspace, counter) = (poisoned(planned + Bytes(1)), WorkCounter::default());
            pass.run(&Scope::new(&cpu, &workspace, &counter)).unwrap();
            assert_eq!(workspace.high_water(), planned, "{pass:?} on {threads} threads");
            assert_eq!(counter.total(), planned_work, "{pass:?} on {threads} threads");
            assert_eq!(workspace.used(), Bytes(0));
        }
    }
}

#[test]
fn the_planned_workspace_is_the_smallest_that_suffices() {
    let cpu = Cpu::new(2);
    for pass in passes() {
        let (_, planned, _) = plan(2, |scope| pass.run(scope).map(|_| ()));
        let workspace = poisoned(planned.max(Bytes(1)));
        // Segments consist of whole pages, so another tensor takes the rest of the last page.
        let spare = workspace.capacity() - planned;
        {
            let others = workspace.frame();
            others.take(spare).unwrap();
            pass.run(&Scope::new(&cpu, &workspace, &WorkCounter::default())).unwrap();
            assert_eq!(workspace.high_water(), workspace.capacity(), "{pass:?}");
        }
        let others = workspace.frame();
        others.take(spare + Bytes(256)).unwrap();
        match pass.run(&Scope::new(&cpu, &workspace, &WorkCounter::default())) {
            Err(KernelError::Workspace(full)) => {
                assert_eq!(full.used + full.asked, full.capacity + Bytes(256), "{pass:?}");
                assert_eq!(full.hint(), "plan a workspace that is 256 B larger, or lower the envelope");
            }
            other => panic!("{pass:?} gave {other:?}"),
        }
    }
}

#[test]
fn consecutive_inner_scopes_reuse_the_same_bytes() {
    let ((), high_water, _) = plan(2, |scope| {
        let _hidden = scope.empty([3, 64]).unwrap(); // 768 bytes
        let first = scope.scope();
        first.empty([1000]).unwrap(); // 4,096 bytes
        drop(first);
        scope.scope().empty([500]).unwrap(); // 2,048 bytes
    });
    assert_eq!(high_water, Bytes(768 + 4096));
}

#[test]
fn a_product_plans_one_widened_weight_panel_for_each_thread() {
    let scratch = |threads, dtype| Target::Cpu { threads }.linear_scratch([300, 50], dtype, DType::F32);
    let panel = |threads: usize| scratch(threads, DType::BF16);
    assert_eq!(scratch(2, DType::F32), Bytes(0));
    assert_eq!(panel(2), panel(1) * 2);
    assert_eq!(panel(64), panel(1) * 300u64.div_ceil(panel(1).0 / 200), "no more panels than the weight has");
}

#[test]
fn the_work_of_a_product_is_counted_exactly() {
    let work = |how: usize| {
        plan(1, |scope| {
            let (x, weight) = (scope.empty([7, 5]).unwrap(), scope.upload([3, 5], &[half::bf16::ZERO; 15]).unwrap());
            let (bias, mut out) = (scope.empty([3]).unwrap(), scope.empty([7, 3]).unwrap());
            match how {
                0 => {}
                1 => scope.linear_into(&x, &weight, None, &mut out).unwrap(),
                _ => scope.linear_add(&x, &weight, Some(&bias), &mut out).unwrap(),
            }
        })
        .2
    };
    let upload = work(0);
    assert_eq!(upload, Work { flops: 0, bytes: Bytes(30), ..Work::default() });
    let written = 4 * 35 + 2 * 15 + 4 * 21;
    assert_eq!(work(1), Work { flops: 2 * 7 * 5 * 3, bytes: upload.bytes + Bytes(written), ..Work::default() });
    let added = written + 4 * 3 + 4 * 21;
    assert_eq!(work(2), Work { flops: 2 * 7 * 5 * 3, bytes: upload.bytes + Bytes(added), ..Work::default() });
}

#[test]
fn the_work_of_attention_is_counted_exactly() {
    // Four query heads of eight elements over two key heads. One sequence decodes at 100
    // tokens, another at 37.
    let ((), _, work) = plan(1, |scope| {
        let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 8, dtype: DType::F32 };
        let cache = scope.empty([9, shape.block_bytes().as_usize() / 4]).unwrap();
        // SAFETY: a plan touches no memory.
        let layer = unsafe { KvLayer::new(cache.address(), 9, shape) };
        let zeros = [0u32; 14];
        let sequences = PagedSequences {
            has_linked_rows: false,
            query_starts: scope.upload([3], &zeros[..3]).unwrap(),
            context_lengths: scope.upload([2], &zeros[..2]).unwrap(),
            block_tables: scope.upload([2, 7], &zeros).unwrap(),
            single_rows: 0,
            query_key_pairs: 137,
        };
        scope.attention_paged(&scope.empty([2, 32]).unwrap(), &layer, &sequences, 1.0, None).unwrap();
    });
    let (uploads, tables, queries_and_out, cache) = (4 * (3 + 2 + 14), 4 * 14, 2 * 4 * 64, 137 * 2 * 2 * 8 * 4);
    assert_eq!(
        work,
        Work { flops: 4 * 137 * 32, bytes: Bytes(uploads + tables + queries_and_out + cache), ..Work::default() }
    );

    // A window of 16 tokens over prompts and decoding steps. Each case is [rows, context,
    // sequences], the expected pairs and the expected keys.
    for ([rows, context, count], pairs, keys) in [
        ([5, 40, 1], 5 * 16, 20),
        ([20, 20, 1], (1..=16).sum::<u64>() + 4 * 16, 20),
        ([18, 20, 1], (3..=16).sum::<u64>() + 4 * 16, 20),
        ([1, 100, 2], 2 * 16, 2 * 16),
        ([3, 16, 2], 2 * (14 + 15 + 16), 2 * 16),
    ] {
        let work = |window: Option<usize>| {
            let (_, _, work) = plan(1, |scope| {
                let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 8, dtype: DType::F32 };
                // SAFETY: a plan touches no memory.
                let layer = unsafe { KvLayer::new(bursar_budgets::Address(0), 9, shape) };
                let zeros = [0u32; 14];
                let sequences = PagedSequences {
                    has_linked_rows: false,
                    query_starts: scope.upload([count + 1], &zeros[..count + 1]).unwrap(),
                    context_lengths: scope.upload([count], &zeros[..count]).unwrap(),
                    block_tables: scope.upload([count, 7], &zeros[..7 * count]).unwrap(),
                    single_rows: 0,
                    query_key_pairs: (count * (rows * context - rows * (rows - 1) / 2)) as u64,
                };
                let queries = scope.empty([count * rows, 32]).unwrap();
                scope.attention_paged(&queries, &layer, &sequences, 1.0, window).unwrap();
            });
            work
        };
        let (whole, windowed) = (work(None), work(Some(16)));
        assert_eq!(windowed.flops, 4 * pairs * 32, "{count} times {rows} rows of {context}");
        let unread = (count * context) as u64 - keys;
        assert_eq!(
            windowed.bytes + Bytes(unread * 2 * 2 * 8 * 4),
            whole.bytes,
            "{count} times {rows} rows of {context}"
        );
        assert_eq!(work(Some(context)), whole, "a window of the whole context changes nothing");
    }

    let ((), _, work) = plan(1, |scope| {
        let starts = scope.upload([3], &[0u32, 2, 5]).unwrap();
        let sequences = PackedSequences { starts, longest: 3, query_key_pairs: 4 + 9 };
        scope.attention_packed(&scope.empty([5, 3 * 12]).unwrap(), 3, &sequences).unwrap();
    });
    assert_eq!(work, Work { flops: 4 * 13 * 12, bytes: Bytes(4 * 3 + 4 * 5 * 36 + 4 * 5 * 12), ..Work::default() });
}

#[test]
fn unsupported_head_sizes_are_refused_with_the_supported_ones() {
    let refused_on = |capability, activation, pass: Pass| {
        let target = Target::Cuda(CudaTarget { capability, sms: 132, activation });
        let (plan, dry, counter) = (Plan::new(target), Workspace::dry(), WorkCounter::default());
        pass.run(&Scope::new(&plan, &dry, &counter)).unwrap_err().to_string()
    };
    let refused = |pass| refused_on((9, 0), DType::BF16, pass);
    assert_eq!(
        refused(Pass::Packed { heads: 2, head_dim: 34, lengths: vec![5] }),
        "attention_packed: qkv is [5, 204]; expected heads of 32, 64, 72, 80 or 128 elements on this target"
    );
    assert_eq!(
        refused(Pass::Paged { heads: 2, kv_heads: 1, head_dim: 72, sequences: vec![(3, 3)], window: None }),
        "attention_paged: queries is [3, 144]; expected heads of 32, 64, 80, 128, 256 or 512 elements on this target"
    );
    let wide = Pass::Paged { heads: 2, kv_heads: 1, head_dim: 512, sequences: vec![(3, 3)], window: None };
    assert_eq!(
        refused_on((7, 5), DType::F16, wide),
        "attention_paged: queries is [3, 1024]; expected heads of 32, 64, 80, 128 or 256 elements on this target"
    );
}
