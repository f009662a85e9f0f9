//! Links between GPU ranks that do not use this project's kernels: copies between ranks that
//! synchronize on the host, and NCCL. Copies are tested on two GPUs, or on one GPU that runs all
//! ranks. NCCL needs two GPUs and its library. A test whose requirements are missing prints that it
//! is skipped.

use std::{
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError, Hint, Segment, Workspace};
use bursar_kernels::{ops::rms_norm::RmsNorm, *};
use half::bf16;

use crate::{
    GpuLock, gpu_lock,
    ground::{Random, first_gpu, leased, load, search},
};

/// Bytes that ranks exchange at once. Some collectives in these tests are larger, so they are
/// split.
const AT_ONCE: Bytes = Bytes::kib(64);

/// Time that a rank waits for the other ranks: longer than a kernel takes to start, and short
/// enough that a hanging test fails soon.
const PATIENCE: Duration = Duration::from_secs(2);

/// GPUs, each with separately loaded kernels.
struct Ground {
    devices: Vec<Arc<CudaDevice>>,
    kernels: Vec<Arc<CudaKernels>>,
    _turn: GpuLock,
}

impl Ground {
    fn of(devices: Vec<Arc<CudaDevice>>, _turn: GpuLock) -> Self {
        let kernels = devices
            .iter()
            .map(|device| load(device, CudaTarget::of(device).expect("the device reports its target")))
            .collect();
        Ground { devices, kernels, _turn }
    }

    /// Kernels for `ranks` ranks, on two GPUs if there are two, and otherwise on one GPU.
    fn any(ranks: usize) -> Option<Ground> {
        let (turn, first) = (gpu_lock(), first_gpu()?);
        let second = CudaDevice::open(1).map_or_else(|_| first.clone(), Arc::new);
        Some(Ground::of([first, second].into_iter().cycle().take(ranks).collect(), turn))
    }

    fn pair() -> Option<Ground> {
        let (turn, first) = (gpu_lock(), first_gpu()?);
        match CudaDevice::open(1) {
            Ok(second) => Some(Ground::of(vec![first, Arc::new(second)], turn)),
            Err(error) => {
                println!("skipped, the test needs two GPUs: {error}");
                None
            }
        }
    }

    /// Runs `pass` on all ranks at the same time, in memory that every rank's device can access.
    fn run<T: Send>(
        &self,
        links: Vec<RankLink>,
        pass: impl Fn(&Scope<'_, Cuda>, &Cuda) -> Result<T, KernelError> + Sync,
    ) -> Vec<T> {
        let begun = Barrier::new(links.len());
        std::thread::scope(|scope| {
            let run = |(rank, link): (usize, RankLink)| {
                let (pass, begun, device, kernels) = (&pass, &begun, &self.devices[rank], &self.kernels[rank]);
                scope.spawn(move || {
                    let cuda = Cuda::new(kernels).expect("a stream").linked(link);
                    let segment = leased(device.clone(), Bytes::mib(64));
                    device
                        .open_to(self.devices.iter(), segment.address(), segment.backed())
                        .expect("the memory is opened to all devices");
                    let (workspace, counter) = (Workspace::over(segment), WorkCounter::default());
                    let scope = Scope::new(&cuda, &workspace, &counter);
                    scope.upload([1], &[0u32]).expect("memory is mapped");
                    cuda.wait().expect("the device reports no error");
                    begun.wait();
                    let outcome = pass(&scope, &cuda).expect("the pass runs");
                    // Memory from which another rank still copies must not be freed.
                    begun.wait();
                    outcome
                })
            };
            let running: Vec<_> = links.into_iter().enumerate().map(run).collect();
            running.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
        })
    }

    fn copies(&self) -> Vec<RankLink> {
        let links = CopyLink::between(&self.devices, PATIENCE).expect("the devices exist");
        links.into_iter().map(RankLink::from).collect()
    }

    /// The ends of a link over NCCL, and the memory that must live as long as the link.
    fn nccl(&self) -> Option<(Vec<RankLink>, Vec<Segment>)> {
        let nccl = match Nccl::open(&self.devices, &search(), "this is a test") {
            Ok(nccl) => nccl,
            Err(error) => {
                println!("skipped, {error}; {}", error.hint().unwrap_or_default());
                return None;
            }
        };
        let memory: Vec<_> =
            self.devices.iter().map(|device| leased(device.clone(), CudaLink::bytes(AT_ONCE))).collect();
        for (device, segment) in self.devices.iter().zip(&memory) {
            device
                .open_to(self.devices.iter(), segment.address(), segment.backed())
                .expect("the memory is opened to all devices");
        }
        let (kernels, addresses): (Vec<_>, Vec<_>) =
            (self.kernels.iter().collect(), memory.iter().map(Segment::address).collect());
        let began = Instant::now();
        // SAFETY: the memory is backed and open, and the caller holds it until
        // all ranks have ended.
        let links =
            unsafe { NcclLink::between(&nccl, &kernels, &addresses, AT_ONCE, PATIENCE) }.expect("the link is created");
        let took = self.devices[0].overhead_by_source();
        println!("NCCL {} after {:?}: {took:?}", nccl.version(), began.elapsed());
        Some((links.into_iter().map(RankLink::from).collect(), memory))
    }
}

/// Random numbers that bf16 can represent.
fn numbers(seed: u64, count: usize) -> Vec<bf16> {
    Random::new(seed).floats(count).into_iter().map(bf16::from_f32).collect()
}

fn bits(numbers: &[bf16]) -> Vec<u16> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// All parts `[rows, columns]` side by side, followed by the previous contents of the `gap` columns
/// of `[rows, columns * ranks + gap]`.
fn side_by_side(parts: &[Vec<f32>], before: &[f32], [rows, columns, gap]: [usize; 3]) -> Vec<f32> {
    let wide = columns * parts.len() + gap;
    let row = |row: usize| {
        let sent = parts.iter().flat_map(move |part| part[row * columns..][..columns].to_vec());
        sent.chain(before[row * wide + wide - gap..][..gap].to_vec())
    };
    (0..rows).flat_map(row).collect()
}

/// Runs an all-gather on each rank several times, with different numbers.
fn gathers(ground: &Ground, links: Vec<RankLink>, [rows, columns, gap]: [usize; 3]) {
    let of = links.len();
    let wide = columns * of + gap;
    let part = |turn: usize, rank: usize| Random::new((7 + 13 * turn + rank) as u64).floats(rows * columns);
    let before = Random::new(5).floats(rows * wide);
    let found = ground.run(links, |scope, _| {
        let turn = |turn: usize| {
            let scope = scope.scope();
            let own = scope.upload([rows, columns], &part(turn, scope.rank().index()))?;
            let mut all = scope.upload([rows, wide], &before)?;
            scope.all_gather_into(&own, &mut all.column_range_mut(0..columns * of))?;
            scope.download::<f32>(&all)
        };
        (0..5).map(turn).collect::<Result<Vec<_>, _>>()
    });
    for (rank, turns) in found.iter().enumerate() {
        for (turn, found) in turns.iter().enumerate() {
            let parts: Vec<_> = (0..of).map(|rank| part(turn, rank)).collect();
            let expected = side_by_side(&parts, &before, [rows, columns, gap]);
            assert!(*found == expected, "[{rows}, {columns}] + {gap}, rank {rank} of {of}, turn {turn}");
        }
    }
}

const GATHERED: [[usize; 3]; 6] =
    [[1, 29, 0], [9, 24, 3], [256, 3584, 0], [131, 1031, 5], [1, 76_032, 0], [3, 40_001, 1]];

#[test]
fn rows_that_ranks_have_made_are_copied_side_by_side() {
    for ranks in [2, 3] {
        let Some(ground) = Ground::any(ranks) else { return };
        GATHERED.into_iter().for_each(|shape| gathers(&ground, ground.copies(), shape));
    }
}

#[test]
fn rows_of_gpus_that_cannot_reach_each_other_go_through_the_driver() {
    let Some(ground) = Ground::any(2) else { return };
    for shape in GATHERED {
        let links = CopyLink::between(&ground.devices, PATIENCE).expect("the devices exist");
        let apart = |link: CopyLink| link.without_reach(&ground.devices).expect("the devices exist").into();
        gathers(&ground, links.into_iter().map(apart).collect(), shape);
    }
}

/// Checks that both ranks report a lost device: rank 0 after its timeout, and rank 1, which joins
/// only after rank 0 has given up, without waiting.
fn assert_parted<T: std::fmt::Debug>(found: Vec<(Result<T, KernelError>, Duration)>, why: &str) {
    for (rank, (result, took)) in found.into_iter().enumerate() {
        let Err(KernelError::Device(DeviceError::Lost { reason })) = result else { panic!("rank {rank}: {result:?}") };
        assert_eq!(reason, format!("a collective of the model's ranks failed: {why}"));
        let bound = if rank == 0 { PATIENCE..2 * PATIENCE } else { Duration::ZERO..PATIENCE };
        assert!(bound.contains(&took), "rank {rank}: {took:?}");
    }
}

#[test]
fn a_rank_that_does_not_come_to_copies_is_a_lost_device_after_a_bound() {
    let Some(ground) = Ground::any(2) else { return };
    let given_up = Barrier::new(2);
    let found = ground.run(ground.copies(), |scope, _| {
        let is_late = scope.rank().index() == 1;
        if is_late {
            given_up.wait();
        }
        let began = Instant::now();
        let own = scope.upload([4, 64], &[1.0f32; 256])?;
        let result = scope.all_gather_into(&own, &mut scope.empty_f32([4, 128])?);
        let took = began.elapsed();
        if !is_late {
            given_up.wait();
        }
        Ok((result, took))
    });
    assert_parted(found, "rank 1 did not join all_gather within 2 s");
}

#[test]
fn sums_through_nccl_are_close_to_f64_and_have_the_same_bits_on_all_ranks() {
    for (rows, columns, gap) in [(1, 3584, 0), (5, 37, 3), (3, 8, 8), (64, 3584, 0), (131, 1032, 8), (1021, 256, 0)] {
        let Some(ground) = Ground::pair() else { return };
        let (of, wide) = (ground.devices.len(), columns + gap);
        let brought: Vec<_> = (0..of).map(|rank| numbers(31 + rank as u64, rows * wide)).collect();
        let (before, weight) = (numbers(5, rows * wide), numbers(6, columns));
        let run = || {
            let (links, _memory) = ground.nccl()?;
            Some(ground.run(links, |scope, _| {
                let partial = scope.upload([rows, wide], &brought[scope.rank().index()])?;
                let partial = partial.column_range(0..columns);
                let mut sum = scope.upload([rows, wide], &before)?;
                scope.all_reduce_add(&partial, &mut sum.column_range_mut(0..columns))?;
                let mut alone = scope.upload([rows, wide], &before)?;
                scope.all_reduce_into(&partial, &mut alone.column_range_mut(0..columns))?;
                let mut residual = scope.upload([rows, wide], &before)?;
                let weight = scope.upload([columns], &weight)?;
                let mut normed = Activations::of_plain(scope.empty([rows, columns])?);
                let norm = RmsNorm::new(&weight, 1e-6);
                scope.all_reduce_rms_norm(&partial, &mut residual.column_range_mut(0..columns), norm, &mut normed)?;
                let all = [&sum, &alone, &residual, normed.plain()];
                all.into_iter().map(|tensor| scope.download::<bf16>(tensor)).collect::<Result<Vec<_>, _>>()
            }))
        };
        let (Some(found), Some(again)) = (run(), run()) else { return };
        let what = format!("[{rows}, {columns}] + {gap}");
        for (rank, found) in found.iter().enumerate() {
            for (place, tensor) in found.iter().enumerate() {
                assert!(bits(tensor) == bits(&again[0][place]), "{what}, rank {rank}, result {place}: bits differ");
            }
            let [sum, alone, residual, normed] = &found[..] else { unreachable!("the pass returns four tensors") };
            for at in 0..rows * wide {
                let (is_in, before) = (at % wide < columns, before[at].to_f64());
                let parts = brought.iter().map(|part| part[at].to_f64());
                let (exact, size) = (parts.clone().sum::<f64>(), parts.map(f64::abs).sum::<f64>());
                // One rounding for each rank after the first, and one for the addition
                // to the previous contents.
                let check = |found: bf16, exact: f64, size: f64| {
                    if is_in {
                        (found.to_f64() - exact).abs() <= of as f64 * size / 256.0
                    } else {
                        found.to_f64() == before
                    }
                };
                assert!(check(alone[at], exact, size), "{what} at {at}: {}, expected {exact}", alone[at]);
                assert!(check(sum[at], exact + before, size + before.abs()), "{what} at {at}: {}", sum[at]);
                assert!(sum[at].to_bits() == residual[at].to_bits(), "{what} at {at}: the residual");
            }
            for row in 0..rows {
                let sums: Vec<f64> = residual[row * wide..][..columns].iter().map(|sum| sum.to_f64()).collect();
                let mean = sums.iter().map(|sum| sum * sum).sum::<f64>() / columns as f64;
                for column in 0..columns {
                    let exact = sums[column] / (mean + 1e-6).sqrt() * weight[column].to_f64();
                    let found = normed[row * columns + column].to_f64();
                    assert!((found - exact).abs() <= exact.abs() / 256.0 + 1e-6, "{what}: {found}, {exact}");
                }
            }
        }
    }
}

#[test]
fn columns_of_all_ranks_come_together_through_nccl() {
    let Some(ground) = Ground::pair() else { return };
    for shape in GATHERED {
        let Some((links, _memory)) = ground.nccl() else { return };
        gathers(&ground, links, shape);
    }
}

#[test]
fn a_thousand_exchanges_through_nccl_in_graphs_give_the_same_bits_again() {
    let Some(ground) = Ground::pair() else { return };
    let run = || {
        let (links, _memory) = ground.nccl()?;
        Some(ground.run(links, |scope, cuda| {
            let rows = [1, 64, 3, 17];
            let mut sum = scope.upload([64, 3584], &vec![bf16::ZERO; 64 * 3584])?;
            let partial = scope.upload([64, 3584], &numbers(scope.rank().index() as u64, 64 * 3584))?;
            let (own, mut all) =
                (scope.upload([3, 41], &[1.0f32 + scope.rank().index() as f32; 123])?, scope.empty_f32([3, 82])?);
            let graph = cuda.capture(&mut || {
                rows.iter().try_for_each(|rows| {
                    scope.all_reduce_add(&partial.row_range(0..*rows), &mut sum.row_range_mut(0..*rows))
                })?;
                scope.all_gather_into(&own, &mut all)
            })?;
            let graph = graph.expect("the GPU supports graphs");
            // Run collectives outside a graph between collectives in the graph.
            (0..25).try_for_each(|_| {
                (0..10).try_for_each(|_| graph.replay())?;
                scope.all_reduce_add(&partial.row_range(0..5), &mut sum.row_range_mut(0..5))
            })?;
            let gathered = scope.download::<f32>(&all)?;
            assert!(gathered.chunks(82).all(|row| row[..41] == [1.0; 41] && row[41..] == [2.0; 41]), "{gathered:?}");
            Ok(bits(&scope.download::<bf16>(&sum)?))
        }))
    };
    let (Some(first), Some(second)) = (run(), run()) else { return };
    assert!(first == second && first[0] == first[1]);
    assert!(first[0].iter().any(|bits| bf16::from_bits(*bits).to_f32().abs() > 10.0), "the replays add to the result");
}

#[test]
fn a_rank_that_does_not_come_to_nccl_is_a_lost_device_after_a_bound_and_the_next_link_works() {
    let Some(ground) = Ground::pair() else { return };
    let overhead = || ground.devices.iter().map(|device| device.overhead()).collect::<Vec<_>>();
    let Some((links, memory)) = ground.nccl() else { return };
    let given_up = Barrier::new(2);
    let found = ground.run(links, |scope, cuda| {
        let partial = scope.upload([4, 64], &numbers(1, 256))?;
        let mut sum = scope.upload([4, 64], &numbers(2, 256))?;
        let graph = cuda.capture(&mut || scope.all_reduce_add(&partial, &mut sum))?.expect("the GPU supports graphs");
        graph.replay()?;
        cuda.wait()?;
        let is_late = scope.rank().index() == 1;
        if is_late {
            given_up.wait();
        }
        let began = Instant::now();
        let result = graph.replay().and_then(|()| cuda.wait());
        let took = began.elapsed();
        if !is_late {
            given_up.wait();
        }
        Ok((result, took))
    });
    assert_parted(found, "rank 1 did not join it in time");
    drop(memory);
    println!("overhead after the lost link: {:?}", overhead());
    let (links, _memory) = ground.nccl().expect("the link existed before");
    gathers(&ground, links, [9, 24, 3]);
    println!("overhead after the next link: {:?}", overhead());
}

#[test]
fn ranks_that_share_a_gpu_are_refused_by_name() {
    let Some(ground) = Ground::pair() else { return };
    let twice =
        Ground { devices: vec![ground.devices[0].clone(); 2], kernels: vec![ground.kernels[0].clone(); 2], ..ground };
    let Ok(nccl) = Nccl::open(&twice.devices, &search(), "this is a test") else { return println!("skipped, no NCCL") };
    let memory: Vec<_> = twice.devices.iter().map(|device| leased(device.clone(), CudaLink::bytes(AT_ONCE))).collect();
    let (kernels, addresses): (Vec<_>, Vec<_>) =
        (twice.kernels.iter().collect(), memory.iter().map(Segment::address).collect());
    // SAFETY: the memory is backed and outlives this call, and no collective runs.
    let refused = unsafe { NcclLink::between(&nccl, &kernels, &addresses, AT_ONCE, PATIENCE) }.map(drop);
    let found = refused.expect_err("the link is refused").to_string();
    assert!(found.contains("NCCL allows one rank per GPU, but cuda:0 was given to several ranks"), "{found}");
}
