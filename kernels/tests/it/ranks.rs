//! Ranks that compute together: sums and gathered columns have the same bits on each rank. Ranks
//! that do not join are reported.

use std::time::Duration;

use bursar_budgets::{Bytes, DeviceError, Workspace};
use bursar_kernels::{
    ops::{argmax::NO_CHOICE, gate_mul::GateActivation, rms_norm::RmsNorm, route::RoutingRule},
    *,
};

use crate::ground::{PATIENCE, Random, first_largest, on_ranks, poisoned};

/// The numbers that rank `rank` contributes.
fn numbers(rank: Rank, count: usize) -> Vec<f32> {
    Random::new(31 + rank.index() as u64).floats(count)
}

/// Columns before and after a view with gaps.
const GAP: usize = 3;

/// Sums the numbers of all ranks twice: overwrites a tensor with gaps, and adds to another tensor
/// with gaps. Returns both tensors with the columns around the views.
fn sums(scope: &Scope<'_, Cpu>, rows: usize, columns: usize) -> Result<Vec<f32>, KernelError> {
    let wide = columns + 2 * GAP;
    let partial = scope.upload([rows, wide], &numbers(scope.rank(), rows * wide))?;
    let partial = partial.column_range(GAP..GAP + columns);
    let before = Random::new(5).floats(rows * wide);
    let (mut new, mut sum) = (scope.upload([rows, wide], &before)?, scope.upload([rows, wide], &before)?);
    scope.all_reduce_into(&partial, &mut new.column_range_mut(GAP..GAP + columns))?;
    scope.all_reduce_add(&partial, &mut sum.column_range_mut(GAP..GAP + columns))?;
    Ok([scope.download::<f32>(&new)?, scope.download::<f32>(&sum)?].concat())
}

#[test]
fn each_rank_gets_the_sum_in_the_order_of_ranks() {
    for (rows, columns) in [(1, 1), (5, 37), (0, 8), (3, 1031), (131, 256)] {
        for of in [1, 2, 3, 4] {
            let wide = columns + 2 * GAP;
            let brought: Vec<_> = Rank::all(of).map(|rank| numbers(rank, rows * wide)).collect();
            let before = Random::new(5).floats(rows * wide);
            let is_inside = |at: usize| (GAP..GAP + columns).contains(&(at % wide));
            let total = |at: usize| brought[1..].iter().fold(brought[0][at], |total, other| total + other[at]);
            let new = (0..rows * wide).map(|at| if is_inside(at) { total(at) } else { before[at] });
            let sum = (0..rows * wide).map(|at| if is_inside(at) { before[at] + total(at) } else { before[at] });
            let expected: Vec<u32> = new.chain(sum).map(f32::to_bits).collect();
            for threads in [1, 2] {
                for found in on_ranks(of, threads, |scope| sums(scope, rows, columns)) {
                    let found: Vec<u32> = found.expect("all ranks join").into_iter().map(f32::to_bits).collect();
                    assert!(found == expected, "[{rows}, {columns}] of {of} ranks");
                }
            }
        }
    }
}

#[test]
fn a_fused_all_reduce_and_norm_matches_two_operations() {
    for (rows, columns, of) in [(5, 37, 1), (3, 256, 2), (7, 64, 3)] {
        let found = on_ranks(of, 2, |scope| {
            let partial = scope.upload([rows, columns], &numbers(scope.rank(), rows * columns))?;
            let before = Random::new(5).floats(rows * columns);
            let (mut one, mut other) =
                (scope.upload([rows, columns], &before)?, scope.upload([rows, columns], &before)?);
            let weight = scope.upload([columns], &Random::new(6).floats(columns))?;
            let norm = RmsNorm::new(&weight, 1e-5);
            let mut normed = Activations::of_plain(scope.empty([rows, columns])?);
            scope.all_reduce_rms_norm(&partial, &mut one, norm, &mut normed)?;
            scope.all_reduce_add(&partial, &mut other)?;
            let expected = scope.rms_norm(&other, RmsNorm::new(&weight, 1e-5))?;
            let [one, other, expected] = [&one, &other, &expected].map(|tensor| scope.download::<f32>(tensor));
            Ok(((one?, scope.download::<f32>(normed.plain())?), (other?, expected?)))
        });
        for found in found {
            let (found, expected) = found.expect("all ranks join");
            assert!(found == expected, "[{rows}, {columns}] of {of} ranks");
        }
    }
}

#[test]
fn all_gather_concatenates_the_columns_of_all_ranks() {
    let (rows, columns) = (7, 29);
    for of in [1, 2, 4] {
        let brought: Vec<_> = Rank::all(of).map(|rank| numbers(rank, rows * (columns + 1))).collect();
        let row = |row: usize| brought.iter().flat_map(move |part| part[row * (columns + 1)..][..columns].to_vec());
        let expected: Vec<f32> = (0..rows).flat_map(row).collect();
        let gathered = on_ranks(of, 2, |scope| {
            let part = scope.upload([rows, columns + 1], &numbers(scope.rank(), rows * (columns + 1)))?;
            let mut out = scope.empty_f32([rows, of * columns])?;
            scope.all_gather_into(&part.column_range(0..columns), &mut out)?;
            scope.download::<f32>(&out)
        });
        gathered.into_iter().for_each(|found| assert_eq!(found.expect("all ranks join"), expected, "{of} ranks"));
    }
}

/// Few different numbers, so that the largest occurs several times. NaN fills row 0, rank 0's part
/// of row 1, and one element of row 2. Minus infinity fills row 3.
fn few_numbers(row: usize, column: usize, columns_of_first: usize) -> f32 {
    match (row, column) {
        (0, _) | (2, 1) => f32::NAN,
        (1, column) if column < columns_of_first => f32::NAN,
        (3, _) => f32::NEG_INFINITY,
        _ => ((row * 7 + column * 5) % 11) as f32 - 9.0,
    }
}

#[test]
fn argmax_over_ranks_chooses_the_first_largest_column() {
    // The last ranks have fewer columns or no columns.
    for (vocabulary, rows) in [(37, 6), (5, 4), (64, 1), (3, 0)] {
        for of in [1, 2, 3, 4] {
            let of_first = Rank::new(0, of).share_rounded_up(vocabulary).count;
            let number = |row: usize, column: usize| few_numbers(row, column, of_first);
            let best = |row: usize| first_largest((0..vocabulary).map(|column| number(row, column)));
            let expected: Vec<u32> = (0..rows).map(best).collect();
            let found = on_ranks(of, 1, |scope| {
                let columns = scope.rank().share_rounded_up(vocabulary);
                let wide = columns.count + GAP;
                let at = |at: usize| (at / wide, columns.first + at % wide);
                let own: Vec<f32> = (0..rows * wide).map(at).map(|(row, column)| number(row, column)).collect();
                let own = scope.upload([rows, wide], &own)?;
                let mut out = scope.upload([rows], &vec![7u32; rows])?;
                scope.argmax_of_ranks_into(&own.column_range(0..columns.count), columns, &mut out)?;
                scope.download::<u32>(&out)
            });
            found
                .into_iter()
                .for_each(|found| assert_eq!(found.expect("all ranks join"), expected, "{vocabulary}, {of}"));
        }
    }
}

#[test]
fn a_thousand_collectives_give_the_same_bits_again() {
    let run = || {
        on_ranks(3, 1, |scope| {
            let mut sum = scope.upload([2, 33], &numbers(scope.rank(), 66))?;
            for _ in 0..1000 {
                let inner = scope.scope();
                let mut partial = inner.empty([2, 33])?;
                inner.all_reduce_into(&sum, &mut partial)?;
                // Scale the sum down so that numbers stay finite. The next collective reuses the
                // memory of the last collective.
                let third = inner.upload([33, 33], &third())?;
                inner.linear_into(&partial, &third, None, &mut sum)?;
            }
            scope.download::<f32>(&sum)
        })
    };
    let bits = |runs: Vec<Result<Vec<f32>, _>>| -> Vec<Vec<u32>> {
        runs.into_iter().map(|run| run.expect("all ranks join").into_iter().map(f32::to_bits).collect()).collect()
    };
    let (first, second) = (bits(run()), bits(run()));
    assert!(first == second && first.iter().all(|rank| *rank == first[0]));
    assert!(first[0].iter().any(|bits| f32::from_bits(*bits) != 0.0));
}

/// `[33, 33]` with thirds on the diagonal.
fn third() -> Vec<f32> {
    (0..33 * 33).map(|at| if at / 33 == at % 33 { 1.0 / 3.0 } else { 0.0 }).collect()
}

fn reason<T>(found: Result<T, KernelError>) -> String {
    match found.map(drop) {
        Err(KernelError::Device(DeviceError::Lost { reason })) => reason,
        other => panic!("{other:?}"),
    }
}

/// Computes `times` sums on one rank, in the calling thread.
fn one_sum(link: HostLink, times: usize) -> Result<StillLinked, KernelError> {
    let (cpu, workspace) = (Cpu::linked(1, link), poisoned(Bytes::mib(1)));
    for _ in 0..times {
        let counter = WorkCounter::default();
        let scope = Scope::new(&cpu, &workspace, &counter);
        let partial = scope.upload([2, 5], &[1.0f32; 10])?;
        scope.all_reduce_into(&partial, &mut scope.empty([2, 5])?)?;
    }
    Ok(StillLinked(cpu))
}

/// Keeps a rank's link open until the test is over.
struct StillLinked(#[expect(dead_code, reason = "it is only held")] Cpu);

#[test]
fn a_missing_rank_fails_the_collective_after_a_timeout() {
    let mut links = HostLink::between(3, Duration::from_millis(50)).into_iter();
    let [first, absent, third] = [(); 3].map(|()| links.next().expect("there are three links"));
    let (one, other) = std::thread::scope(|scope| {
        let running = [first, third].map(|link| scope.spawn(move || reason(one_sum(link, 1))));
        running.map(|rank| rank.join().expect("the rank does not panic")).into()
    });
    let expected = "a collective of the model's ranks failed: rank 1 did not join all_reduce within 0.05 s";
    assert!(one == expected || other == expected, "{one}; {other}");
    // The late rank gets the reason at once, and no rank waits for it.
    let late = reason(one_sum(absent, 1));
    assert!(late.contains("rank 1 did not join") || late.contains("is gone"), "{late}");
}

#[test]
fn a_collective_does_not_wait_for_a_dead_rank() {
    for times in [0, 3] {
        let mut links = HostLink::between(2, PATIENCE).into_iter();
        let [first, second] = [(); 2].map(|()| links.next().expect("there are two links"));
        let found = std::thread::scope(|scope| {
            let dying = scope.spawn(move || one_sum(second, times).map(drop));
            let living = scope.spawn(move || reason(one_sum(first, times + 1)));
            dying.join().expect("the rank does not panic").expect("all ranks joined the earlier exchanges");
            living.join().expect("the rank does not panic")
        });
        assert_eq!(found, "a collective of the model's ranks failed: rank 1 of 2 is gone");
    }
}

#[test]
fn all_ranks_fail_when_they_call_different_collectives() {
    let different = on_ranks(3, 1, |scope| {
        let rows = if scope.rank().index() == 2 { 3 } else { 2 };
        let partial = scope.upload([rows, 4], &vec![1.0f32; rows * 4])?;
        scope.all_reduce_into(&partial, &mut scope.empty([rows, 4])?)
    });
    for found in different {
        let found = reason(found);
        assert!(found.ends_with("one rank called all_reduce of [2, 4], another all_reduce of [3, 4]"), "{found}");
    }
}

#[test]
fn embeddings_of_table_shares_add_up_to_the_whole() {
    let (vocabulary, hidden) = (24, 19);
    let table = Random::new(3).floats(vocabulary * hidden);
    let ids: Vec<u32> = (0..vocabulary as u32).chain([1, 2, 0].map(|row| UnseenToken { row }.code())).collect();
    let previous = [23, NO_CHOICE, 7];
    let whole = on_ranks(1, 1, |scope| {
        let table = scope.upload([vocabulary, hidden], &table)?;
        let (ids, previous) = (scope.upload([ids.len()], &ids)?, scope.upload([3], &previous)?);
        scope.download::<f32>(&scope.embed(&table, &ids, &previous)?)
    });
    let whole = whole.into_iter().next().expect("there is one rank").expect("the single rank has a result");
    for of in [2, 4] {
        let shared = on_ranks(of, 2, |scope| {
            let tokens = scope.rank().share(vocabulary).expect("the vocabulary divides among the ranks");
            let own = &table[tokens.first * hidden..][..tokens.count * hidden];
            let table = scope.upload([tokens.count, hidden], own)?;
            let (ids, previous) = (scope.upload([ids.len()], &ids)?, scope.upload([3], &previous)?);
            let mut out = scope.empty([ids.rows(), hidden])?;
            let inner = scope.scope();
            inner.all_reduce_into(&inner.embed_share(&table, tokens, &ids, &previous, 1.0)?, &mut out)?;
            scope.download::<f32>(&out)
        });
        shared.into_iter().for_each(|found| assert_eq!(found.expect("all ranks join"), whole, "{of} ranks"));
    }
}

/// A weight of f32, or of E4M3 with a scale for each row.
fn weight<'s>(
    scope: &'s Scope<'_, Cpu>,
    shape: [usize; 2],
    numbers: &[f32],
    is_fp8: bool,
) -> Result<Weight<'s>, KernelError> {
    if !is_fp8 {
        return Ok(Weight::plain(scope.upload(shape, numbers)?));
    }
    let codes: Vec<E4m3> = numbers.iter().map(|number| E4m3::from_f32(*number)).collect();
    let scales = scope.upload([shape[0]], &vec![0.5f32; shape[0]])?;
    Ok(Weight { scales: Some(WeightScales::rows(scales, None)), ..Weight::plain(scope.upload(shape, &codes)?) })
}

#[test]
fn experts_on_several_ranks_add_up_to_one_ranks_result() {
    let (rows, experts, top, hidden, features) = (70, 8, 3, 40, 24);
    let mut random = Random::new(9);
    let (logits, x) = (random.floats(rows * experts), random.floats(rows * hidden));
    let (gate_up, down) = (random.floats(experts * 2 * features * hidden), random.floats(experts * hidden * features));
    let run = |of: usize, is_fp8: bool| {
        on_ranks(of, 2, |scope| {
            let held = scope.rank().share(experts).expect("the experts divide among the ranks");
            let part = |numbers: &[f32], size: usize| numbers[held.times(size).range()].to_vec();
            let logits = scope.upload([rows, experts], &logits)?;
            let routing = scope
                .route(&logits, RoutingRule::renormalized(top), &scope.upload([experts], &vec![0u32; experts])?)?
                .held(held);
            let x = scope.upload([rows, hidden], &x)?;
            let gate_up = part(&gate_up, 2 * features * hidden);
            let gate_up = weight(scope, [held.count * 2 * features, hidden], &gate_up, is_fp8)?;
            let down = weight(scope, [held.count * hidden, features], &part(&down, hidden * features), is_fp8)?;
            let mut partial = scope.empty([rows, hidden])?;
            // Rows of other ranks' experts contain NaN, and are also quantized.
            let gated = scope.gated_experts_as(
                &x,
                &gate_up,
                &routing,
                GateActivation::GeluTanh,
                ActivationFormat::of(down.wants()),
            )?;
            scope.experts_into(&gated, &down, &routing, &mut partial)?;
            let mut sum = scope.empty([rows, hidden])?;
            scope.all_reduce_into(&partial, &mut sum)?;
            scope.download::<f32>(&sum)
        })
    };
    for is_fp8 in [false, true] {
        let whole = run(1, is_fp8).remove(0).expect("the single rank has a result");
        let largest = whole.iter().copied().map(f32::abs).fold(0.0, f32::max);
        for of in [2, 4, 8] {
            for found in run(of, is_fp8) {
                let found = found.expect("all ranks join");
                let worst = found.iter().zip(&whole).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
                assert!(found.iter().all(|number| number.is_finite()), "{of} ranks");
                assert!(worst < 1e-6 * largest, "{of} ranks, FP8 {is_fp8}: {worst:e} of {largest}");
            }
        }
    }
}

#[test]
fn a_ranks_plan_equals_its_measured_memory_and_work() {
    fn pass<B: Backend>(scope: &Scope<'_, B>) -> Result<(), KernelError> {
        let mut sum = scope.upload([7, 40], &[0.5f32; 280])?;
        let inner = scope.scope();
        let partial = inner.upload([7, 40], &[0.5f32; 280])?;
        inner.all_reduce_add(&partial, &mut sum)?;
        let mut gathered = inner.empty_f32([7, 160])?;
        inner.all_gather_into(&partial, &mut gathered)?;
        let mut chosen = inner.empty_u32([7])?;
        inner.argmax_of_ranks_into(&partial, inner.rank().share_rounded_up(160), &mut chosen)
    }
    let planned = Rank::all(4).map(|rank| {
        let (plan, workspace) = (Plan::of_rank(Target::Cpu { threads: 1 }, rank), Workspace::dry());
        let counter = WorkCounter::default();
        pass(&Scope::new(&plan, &workspace, &counter)).expect("the shapes agree");
        (workspace.high_water(), counter.total())
    });
    let links = HostLink::between(4, PATIENCE);
    let measured: Vec<_> = std::thread::scope(|scope| {
        let run = |link| {
            scope.spawn(move || {
                let (cpu, workspace, counter) = (Cpu::linked(1, link), poisoned(Bytes::mib(1)), WorkCounter::default());
                pass(&Scope::new(&cpu, &workspace, &counter)).expect("the pass runs");
                (workspace.high_water(), counter.total())
            })
        };
        let running: Vec<_> = links.into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("the rank does not panic")).collect()
    });
    assert_eq!(planned.collect::<Vec<_>>(), measured);
}

#[test]
fn collectives_refuse_shapes_that_disagree() {
    let text = |pass: &dyn Fn(&Scope<'_, Plan>) -> Result<(), KernelError>| {
        let (plan, workspace) = (Plan::of_rank(Target::Cpu { threads: 1 }, Rank::new(1, 2)), Workspace::dry());
        let counter = WorkCounter::default();
        pass(&Scope::new(&plan, &workspace, &counter)).expect_err("the shapes disagree").to_string()
    };
    let sum = text(&|scope| scope.all_reduce_add(&scope.empty([3, 4])?, &mut scope.empty([3, 5])?));
    assert_eq!(sum, "all_reduce: out is [3, 5]; expected [3, 4]");
    let gathered = text(&|scope| scope.all_gather_into(&scope.empty([3, 4])?, &mut scope.empty([3, 4])?));
    assert_eq!(gathered, "all_gather: out is [3, 4]; expected [3, 8]");
    let own = Rank::new(1, 2).share_rounded_up(8);
    let best = text(&|scope| scope.argmax_of_ranks_into(&scope.empty_f32([3, 5])?, own, &mut scope.empty_u32([3])?));
    assert_eq!(best, "argmax_of_ranks: x is [3, 5]; expected [3, 4]");
    let table = text(&|scope| {
        let (ids, share) = (scope.empty_u32([2])?, Rank::new(1, 2).share(8).expect("8 divides among the ranks"));
        scope.embed_share(&scope.empty([3, 4])?, share, &ids, &scope.empty_u32([0])?, 1.0).map(drop)
    });
    assert_eq!(table, "embed: table is [3, 4]; expected a row for each token");
    let numbers = text(&|scope| scope.all_reduce_add(&scope.empty_u32([3, 4])?, &mut scope.empty([3, 4])?));
    assert_eq!(numbers, "all_reduce: partial holds u32; expected the target's activations");
}
