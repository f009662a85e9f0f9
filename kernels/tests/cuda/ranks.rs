//! Ranks on a GPU, each with a separate stream and kernels: sums and gathered columns have the bits
//! of the definition, and a rank that does not join is reported as a lost device. One GPU runs all
//! ranks, which tests everything except the links between GPUs. Without a Hopper GPU, each test
//! prints that it is skipped.

use std::{
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, CudaDevice, DeviceError, Segment, Workspace};
use bursar_kernels::{ops::rms_norm::RmsNorm, *};
use half::bf16;

use crate::{
    gpu_lock,
    ground::{Random, first_gpu, first_largest, leased, load},
};

/// Bytes that ranks exchange at once. Some collectives in these tests are larger, so they are
/// split.
const AT_ONCE: Bytes = Bytes::kib(320);

/// Like [`AT_ONCE`], for sums so large that each rank computes only a share of the rows.
const IN_SHARES_AT_ONCE: Bytes = Bytes::mib(7);

/// Time that a rank waits for the other ranks: longer than a kernel takes to start, and short
/// enough that a hanging test fails soon.
const PATIENCE: Duration = Duration::from_secs(2);

/// The number in an environment variable, if it is set.
fn number_from(variable: &str) -> Option<u64> {
    #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
    let number_from = std::env::var(variable).ok()?;
    Some(number_from.parse().expect("a whole number"))
}

/// Time that a rank waits for the other ranks. Kernels take longer to start under
/// compute-sanitizer, for which `BURSAR_RANKS_PATIENCE` sets the time in seconds.
fn patience() -> Duration {
    number_from("BURSAR_RANKS_PATIENCE").map_or(PATIENCE, Duration::from_secs)
}

/// The rank counts in `ranks` for which one GPU can run the kernels of all ranks at the same time.
/// Blocks take more registers under compute-sanitizer, for which `BURSAR_RANKS_MOST` sets the
/// largest count.
fn together(ranks: Vec<usize>) -> impl Iterator<Item = usize> {
    let most = number_from("BURSAR_RANKS_MOST").map_or(usize::MAX, |most| most as usize);
    ranks.into_iter().filter(move |of| *of <= most)
}

fn gpu() -> Option<(Arc<CudaDevice>, CudaTarget)> {
    let device = first_gpu()?;
    let target = CudaTarget::of(&device).expect("the device reports its target");
    let is_served = target.capability == (9, 0);
    (!is_served).then(|| println!("skipped, ranks are Hopper's"));
    is_served.then_some((device, target))
}

/// Cleared exchange memory of each rank.
fn memory(device: &Arc<CudaDevice>, kernels: &Arc<CudaKernels>, of: usize, at_once: Bytes) -> Vec<Segment> {
    let cleared = |_| {
        let segment = leased(device.clone(), CudaLink::bytes(at_once));
        // SAFETY: this many bytes are backed, and nothing else uses them yet.
        unsafe { CudaLink::clear(&Cuda::new(kernels).expect("a stream"), segment.address()) }
            .expect("the zeros are copied");
        segment
    };
    (0..of).map(cleared).collect()
}

/// Runs `pass` on `of` ranks on one GPU at the same time. The memory of all ranks is mapped before
/// the first rank begins, because mapping memory may wait for a kernel that itself waits for
/// another rank.
fn on_gpu_ranks<T: Send>(
    of: usize,
    pass: impl Fn(&Scope<'_, Cuda>, &Cuda) -> Result<T, KernelError> + Sync,
) -> Option<Vec<T>> {
    on_gpu_ranks_with(AT_ONCE, of, pass)
}

/// Like [`on_gpu_ranks`], with collectives of up to `at_once` bytes.
fn on_gpu_ranks_with<T: Send>(
    at_once: Bytes,
    of: usize,
    pass: impl Fn(&Scope<'_, Cuda>, &Cuda) -> Result<T, KernelError> + Sync,
) -> Option<Vec<T>> {
    let _turn = gpu_lock();
    let (device, target) = gpu()?;
    let kernels = load(&device, target);
    let memory = memory(&device, &kernels, of, at_once);
    let addresses: Vec<_> = memory.iter().map(Segment::address).collect();
    // SAFETY: the memory is cleared, and outlives the threads below.
    let links = unsafe { CudaLink::between(&addresses, at_once, patience(), target.sms, of) };
    let begun = Barrier::new(of);
    let results = std::thread::scope(|scope| {
        let run = |link| {
            let (pass, begun, kernels, device) = (&pass, &begun, &kernels, &device);
            scope.spawn(move || {
                let cuda = Cuda::new(kernels).expect("a stream").linked(link);
                let (workspace, counter) =
                    (Workspace::over(leased(device.clone(), Bytes::mib(64))), WorkCounter::default());
                let scope = Scope::new(&cuda, &workspace, &counter);
                scope.upload([1], &[0u32]).expect("memory is mapped");
                cuda.wait().expect("the device reports no error");
                begun.wait();
                pass(&scope, &cuda).expect("the pass runs")
            })
        };
        let running: Vec<_> = links.into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    });
    Some(results)
}

/// Random numbers that bf16 can represent.
fn numbers(seed: u64, count: usize) -> Vec<bf16> {
    Random::new(seed).floats(count).into_iter().map(bf16::from_f32).collect()
}

fn bits(numbers: &[bf16]) -> Vec<u16> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

#[test]
fn each_rank_gets_the_sum_in_the_order_of_ranks() {
    // Two ranks write pieces to each other. With more ranks, each rank sums a part of each large
    // collective, such as the last size.
    let odd = [(1, 8192, 8), (255, 1000, 0), (257, 64, 8), (257, 1000, 8), (1021, 1032, 0)];
    let sizes = [(1, 3584, 0), (5, 37, 3), (3, 8, 8), (64, 3584, 0), (131, 1032, 8), (1021, 256, 0)];
    for (rows, columns, gap) in sizes.into_iter().chain(odd) {
        for of in [2, 3, 4] {
            let wide = columns + gap;
            let brought: Vec<_> = (0..of).map(|rank| numbers(31 + rank as u64, rows * wide)).collect();
            let before = numbers(5, rows * wide);
            let expected: Vec<bf16> = (0..rows * wide)
                .map(|at| {
                    let sum = brought[1..].iter().fold(brought[0][at].to_f32(), |sum, other| sum + other[at].to_f32());
                    if at % wide < columns { bf16::from_f32(before[at].to_f32() + sum) } else { before[at] }
                })
                .collect();
            let found = on_gpu_ranks(of, |scope, _| {
                let partial = scope.upload([rows, wide], &brought[scope.rank().index()])?;
                let mut sum = scope.upload([rows, wide], &before)?;
                scope.all_reduce_add(&partial.column_range(0..columns), &mut sum.column_range_mut(0..columns))?;
                scope.download::<bf16>(&sum)
            });
            for found in found.into_iter().flatten() {
                assert!(bits(&found) == bits(&expected), "all elements of [{rows}, {columns}] of {of} ranks match");
            }
        }
    }
}

#[test]
fn a_sum_is_normalised_with_the_same_bits_on_all_ranks() {
    // A sum of a few rows is pushed to the other ranks. Some numbers of columns need two launches,
    // and some sizes need several collectives. Above 128 KiB, two ranks write pieces of two rows,
    // or of four shorter rows, to each other.
    let odd = [(3, 3584, 0), (37, 4104, 8), (255, 1000, 0), (257, 64, 8), (257, 1000, 8)];
    let sizes = [(1, 3584, 0), (5, 37, 3), (3, 8, 8), (15, 8192, 8), (131, 1032, 8), (1021, 256, 0)];
    let small = sizes.into_iter().chain(odd).map(|size| (size, AT_ONCE, vec![2, 3, 4]));
    // In these sizes, each rank computes a share of the rows of the sum. A thread block has one
    // piece, several pieces, or several pieces in each of two collectives.
    let shared = [(397, 2048, 8), (8200, 104, 8), (3300, 1032, 8)].map(|size| (size, IN_SHARES_AT_ONCE, vec![3, 4, 5]));
    for ((rows, columns, gap), at_once, ranks) in small.chain(shared) {
        for of in together(ranks) {
            let wide = columns + gap;
            let brought: Vec<_> = (0..of).map(|rank| numbers(31 + rank as u64, rows * wide)).collect();
            let (before, weight) = (numbers(5, rows * wide), numbers(6, columns));
            let sum = |at: usize| {
                let sum = brought[1..].iter().fold(brought[0][at].to_f32(), |sum, other| sum + other[at].to_f32());
                bf16::from_f32(before[at].to_f32() + sum)
            };
            let found = on_gpu_ranks_with(at_once, of, |scope, _| {
                let partial = scope.upload([rows, wide], &brought[scope.rank().index()])?;
                let mut residual = scope.upload([rows, wide], &before)?;
                let weight = scope.upload([columns], &weight)?;
                let norm = RmsNorm { weight_offset: 0.5, ..RmsNorm::new(&weight, 1e-6) };
                let mut normed = Activations::of_plain(scope.empty([rows, columns])?);
                let (partial, mut place) = (partial.column_range(0..columns), residual.column_range_mut(0..columns));
                scope.all_reduce_rms_norm(&partial, &mut place, norm, &mut normed)?;
                let normed = scope.download::<bf16>(normed.plain())?;
                Ok((scope.download::<bf16>(&residual)?, normed))
            });
            let Some(found) = found else { return };
            for (residual, normed) in &found {
                let what = format!("[{rows}, {columns}] of {of} ranks");
                assert!(bits(normed) == bits(&found[0].1), "{what}: ranks differ");
                for row in 0..rows {
                    let of_row = |column: usize| row * wide + column;
                    let sums: Vec<f64> = (0..columns).map(|column| f64::from(sum(of_row(column)).to_f32())).collect();
                    let mean = sums.iter().map(|sum| sum * sum).sum::<f64>() / columns as f64;
                    for column in 0..wide {
                        let is_in = column < columns;
                        let expected = if is_in { sum(of_row(column)) } else { before[of_row(column)] };
                        assert!(residual[of_row(column)].to_bits() == expected.to_bits(), "{what}: residual");
                    }
                    for column in 0..columns {
                        let expected = sums[column] / (mean + 1e-6).sqrt() * (0.5 + f64::from(weight[column].to_f32()));
                        let found = f64::from(normed[row * columns + column].to_f32());
                        assert!(
                            (found - expected).abs() <= expected.abs() / 256.0 + 1e-6,
                            "{what}: {found}, {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_sum_is_normalised_and_rounded_as_by_two_operations() {
    let formats = [Quantization::Rows, Quantization::Groups, Quantization::Fixed(0.01)];
    let formats = formats.map(|quantization| ActivationFormat::of(Some(quantization)));
    // The sizes cover rows that a rank pushes to other ranks, rows that it reads from them, pieces
    // of two and of four rows, and sums whose rows are divided among the ranks. Very wide rows take
    // two launches.
    let sizes = [(1, 3584, 0), (15, 8192, 8), (131, 1032, 8), (257, 1000, 8), (3, 8200, 0)];
    let small = sizes.map(|size| (size, AT_ONCE, vec![2, 3, 4, 5]));
    let shared = [(397, 2048, 8), (3300, 1032, 8)].map(|size| (size, IN_SHARES_AT_ONCE, vec![3, 4, 5]));
    for ((rows, columns, gap), at_once, ranks) in small.into_iter().chain(shared) {
        for (of, format) in together(ranks).flat_map(|of| formats.map(|format| (of, format))) {
            let format = if of % 2 == 0 { format } else { format.and_plain() };
            let (wide, weight) = (columns + gap, numbers(6, columns));
            let what = format!("[{rows}, {columns}] of {of} ranks in {format:?}");
            println!("{what}");
            let found = on_gpu_ranks_with(at_once, of, |scope, _| {
                let brought = scope.upload([rows, wide], &numbers(31 + scope.rank().index() as u64, rows * wide))?;
                let (partial, weight) = (brought.column_range(0..columns), scope.upload([columns], &weight)?);
                let norm = || RmsNorm { weight_offset: 0.5, ..RmsNorm::new(&weight, 1e-6) };
                let rows_of = |normed: &Activations<'_>| {
                    let quantized = normed.quantized.as_ref().expect("the quantized output was requested");
                    let codes: Vec<u8> =
                        scope.download::<E4m3>(&quantized.data)?.into_iter().map(|code| code.0).collect();
                    let scales: Vec<u32> =
                        scope.download::<f32>(&quantized.scales)?.into_iter().map(f32::to_bits).collect();
                    let plain = normed.plain.as_ref().map(|plain| scope.download::<bf16>(plain)).transpose()?;
                    Ok::<_, KernelError>((codes, scales, plain.map(|plain| bits(&plain))))
                };
                // Nothing is copied between the collectives: a copy that waits for a
                // collective delays the copies of other ranks on the same GPU, and therefore
                // delays their joining the collective.
                let before = numbers(5, rows * wide);
                let mut residuals = [scope.upload([rows, wide], &before)?, scope.upload([rows, wide], &before)?];
                let mut scratch = [
                    scope.activation_scratch([format], rows, columns)?,
                    scope.activation_scratch([format], rows, columns)?,
                ];
                let mut normed = scratch.each_mut().map(|scratch| scratch.place(format, rows));
                {
                    let [one, two] = residuals.each_mut();
                    let [mut one, mut two] = [one, two].map(|residual| residual.column_range_mut(0..columns));
                    scope.all_reduce_rms_norm(&partial, &mut one, norm(), &mut normed[0])?;
                    scope.all_reduce_add(&partial, &mut two)?;
                    scope.rms_norm_into(&two, norm(), &mut normed[1])?;
                }
                let outcome = |at: usize| {
                    Ok::<_, KernelError>((rows_of(&normed[at])?, bits(&scope.download::<bf16>(&residuals[at])?)))
                };
                Ok([outcome(0)?, outcome(1)?])
            });
            let Some(found) = found else { return };
            for outcomes in &found {
                assert!(outcomes[0] == found[0][0], "{what}: ranks differ");
                // With wider rows, the two separate operations add up the squares in a different
                // order.
                if columns <= 4096 {
                    assert!(outcomes[0] == outcomes[1], "{what}");
                    continue;
                }
                let [((codes, scales, _), residual), ((codes_of_two, scales_of_two, _), residual_of_two)] = outcomes;
                let others = codes.iter().zip(codes_of_two).filter(|(one, other)| one != other).count();
                assert!(residual == residual_of_two && others * 500 <= codes.len(), "{what}: {others} codes differ");
                for (one, other) in
                    scales.iter().zip(scales_of_two).map(|(one, other)| (f32::from_bits(*one), f32::from_bits(*other)))
                {
                    assert!((one - other).abs() <= 1e-6 * other, "{what}: {one} differs from {other}");
                }
            }
        }
    }
}

#[test]
fn shares_of_a_table_and_columns_of_all_come_together() {
    let (rows, vocabulary, hidden) = (9, 24, 40);
    let table = numbers(3, vocabulary * hidden);
    let ids: Vec<u32> = vec![0, 23, 12, 11, 5, 6, 17, 18, UnseenToken { row: 0 }.code()];
    let pass = |tokens: RankShard, scope: &Scope<'_, Cuda>| {
        let own = scope.upload([tokens.count, hidden], &table[tokens.times(hidden).range()])?;
        let (ids, previous) = (scope.upload([rows], &ids)?, scope.upload([1], &[13u32])?);
        let mut out = scope.empty([rows, hidden])?;
        let inner = scope.scope();
        inner.all_reduce_into(&inner.embed_share(&own, tokens, &ids, &previous, 1.0)?, &mut out)?;
        scope.download::<bf16>(&out)
    };
    let row = |id: usize| table[id * hidden..][..hidden].to_vec();
    let expected: Vec<bf16> = [0, 23, 12, 11, 5, 6, 17, 18, 13].into_iter().flat_map(row).collect();
    for of in [2, 4] {
        let found = on_gpu_ranks(of, |scope, _| {
            pass(scope.rank().share(vocabulary).expect("the vocabulary divides among the ranks"), scope)
        });
        found.into_iter().flatten().for_each(|found| assert!(bits(&found) == bits(&expected), "{of} ranks"));
        for columns in [29, 1024] {
            let part = |rank: usize| Random::new(7 + rank as u64).floats(rows * columns);
            let gathered = on_gpu_ranks(of, |scope, _| {
                let own = scope.upload([rows, columns], &part(scope.rank().index()))?;
                let mut all = scope.empty_f32([rows, of * columns])?;
                scope.all_gather_into(&own, &mut all)?;
                scope.download::<f32>(&all)
            });
            let parts: Vec<_> = (0..of).map(part).collect();
            let row = |row: usize| parts.iter().flat_map(move |part| part[row * columns..][..columns].to_vec());
            let expected: Vec<f32> = (0..rows).flat_map(row).collect();
            gathered
                .into_iter()
                .flatten()
                .for_each(|found| assert!(found == expected, "{of} ranks, {columns} columns"));
        }
    }
}

#[test]
fn the_largest_of_all_ranks_is_the_first_of_all_columns() {
    // The last rank has fewer columns. There are few different numbers, so that the
    // largest occurs several times.
    for (rows, vocabulary) in [(1, 1029), (9, 37), (700, 101), (256, 4096)] {
        for of in [2, 3, 4] {
            let of_first = Rank::new(0, of).share_rounded_up(vocabulary).count;
            let number = |row: usize, column: usize| match (row, column) {
                (3, _) => f32::NAN,
                (4, column) if column < of_first => f32::NAN,
                _ => ((row * 7 + column * 5) % 1013) as f32 - 900.0,
            };
            let best = |row: usize| first_largest((0..vocabulary).map(|column| number(row, column)));
            let expected: Vec<u32> = (0..rows).map(best).collect();
            let found = on_gpu_ranks(of, |scope, _| {
                let columns = scope.rank().share_rounded_up(vocabulary);
                let wide = columns.count + 3;
                let at = |at: usize| (at / wide, columns.first + at % wide);
                let own: Vec<f32> = (0..rows * wide).map(at).map(|(row, column)| number(row, column)).collect();
                let own = scope.upload([rows, wide], &own)?;
                let mut out = scope.upload([rows], &vec![7u32; rows])?;
                scope.argmax_of_ranks_into(&own.column_range(0..columns.count), columns, &mut out)?;
                scope.download::<u32>(&out)
            });
            found.into_iter().flatten().for_each(|found| assert!(found == expected, "[{rows}, {vocabulary}] of {of}"));
        }
    }
}

#[test]
fn a_thousand_exchanges_in_graphs_give_the_same_bits_again() {
    let run = || {
        on_gpu_ranks(2, |scope, cuda| {
            let shapes = [[1, 3584], [64, 3584], [3, 3584], [17, 3584]];
            let mut sum = scope.upload([64, 3584], &vec![bf16::ZERO; 64 * 3584])?;
            let partial = scope.upload([64, 3584], &numbers(scope.rank().index() as u64, 64 * 3584))?;
            let graph = cuda.capture(&mut || {
                shapes.iter().try_for_each(|[rows, _]| {
                    scope.all_reduce_add(&partial.row_range(0..*rows), &mut sum.row_range_mut(0..*rows))
                })
            })?;
            let graph = graph.expect("the GPU supports graphs");
            (0..250).try_for_each(|_| graph.replay())?;
            Ok(bits(&scope.download::<bf16>(&sum)?))
        })
    };
    let (Some(first), Some(second)) = (run(), run()) else { return };
    assert!(first == second && first[0] == first[1]);
    assert!(first[0].iter().any(|bits| bf16::from_bits(*bits).to_f32().abs() > 10.0), "the replays add to the result");
}

#[test]
fn a_rank_that_comes_milliseconds_late_is_waited_for() {
    let launched = Barrier::new(2);
    let (rows, columns) = (257, 3584);
    let brought = numbers(1, rows * columns);
    let expected: Vec<bf16> = brought.iter().map(|number| bf16::from_f32(2.0 * number.to_f32())).collect();
    let found = on_gpu_ranks(2, |scope, _| {
        let partial = scope.upload([rows, columns], &brought)?;
        let mut sum = scope.empty([rows, columns])?;
        let is_late = scope.rank().index() == 1;
        if is_late {
            launched.wait();
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(5) {
                std::hint::spin_loop();
            }
        }
        for _ in 0..20 {
            scope.all_reduce_into(&partial, &mut sum)?;
        }
        if !is_late {
            launched.wait();
        }
        scope.download::<bf16>(&sum)
    });
    for found in found.into_iter().flatten() {
        assert!(bits(&found) == bits(&expected));
    }
}

#[test]
fn a_rank_that_does_not_come_is_a_lost_device_after_a_bound() {
    for shape in [[4, 64], [64, 3584]] {
        a_missing_rank_is_a_lost_device(shape);
    }
}

#[test]
fn a_rank_that_parts_is_not_waited_for() {
    let (rows, columns) = (4, 64);
    let found = on_gpu_ranks(2, |scope, _| {
        let partial = scope.upload([rows, columns], &numbers(1, rows * columns))?;
        let mut sum = scope.upload([rows, columns], &numbers(2, rows * columns))?;
        // A collective that the rank joined before it left is complete.
        scope.all_reduce_add(&partial, &mut sum)?;
        let whole = scope.download::<bf16>(&sum).map(drop);
        let began = Instant::now();
        if scope.rank().index() == 1 {
            scope.abort_collectives();
            return Ok((whole, Ok(()), Duration::ZERO));
        }
        scope.all_reduce_add(&partial, &mut sum)?;
        let result = scope.download::<bf16>(&sum).map(drop);
        Ok((whole, result, began.elapsed()))
    });
    let Some(found) = found else { return };
    let [(first, result, took), (second, ..)] = found.try_into().expect("there are two ranks");
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    let Err(KernelError::Device(DeviceError::Lost { reason })) = result else { panic!("{result:?}") };
    assert!(reason.contains("rank 1 did not join") && took < patience() / 2, "{reason} after {took:?}");
}

fn a_missing_rank_is_a_lost_device([rows, columns]: [usize; 2]) {
    let given_up = Barrier::new(2);
    let found = on_gpu_ranks(2, |scope, _| {
        let partial = scope.upload([rows, columns], &numbers(1, rows * columns))?;
        let mut sum = scope.upload([rows, columns], &numbers(2, rows * columns))?;
        let is_late = scope.rank().index() == 1;
        if is_late {
            given_up.wait();
        }
        // The late rank gets the error too, and does not wait.
        let began = Instant::now();
        scope.all_reduce_add(&partial, &mut sum)?;
        let result = scope.download::<bf16>(&sum).map(drop);
        let took = began.elapsed();
        if !is_late {
            given_up.wait();
        }
        Ok((result, took))
    });
    for (rank, (result, took)) in found.into_iter().flatten().enumerate() {
        let Err(KernelError::Device(DeviceError::Lost { reason })) = result else { panic!("rank {rank}: {result:?}") };
        assert_eq!(reason, "a collective of the model's ranks failed: rank 1 did not join it in time");
        let bound = if rank == 0 { patience()..2 * patience() } else { Duration::ZERO..patience() };
        assert!(bound.contains(&took), "rank {rank}: {took:?}");
    }
}
