//! Times of the operations that determine the speed of the CPU backend, at the sizes
//! of a small model.
//!
//! `cargo run --release -p bursar-kernels --example op_times [threads]`

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use bursar_budgets::*;
use bursar_kernels::{
    ops::{
        attention_packed::PackedSequences,
        attention_paged::PagedSequences,
        patchify::{PatchSize, Pixels},
        rms_norm::RmsNorm,
    },
    *,
};

struct Nobody;

impl ReleaseNotes for Nobody {
    fn post(&self, _: ReleaseNote) {}
}

/// A workspace of host memory.
fn workspace(bytes: Bytes) -> Workspace {
    let mut ledger = Ledger::new(LedgerConfig::new(bytes));
    let request = Request::new(Owner::new("op_times", 0), Class::StepWorkspace, "none", bytes);
    let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
    let Effect::Granted(grant) = &effects[0] else { panic!("{effects:?}") };
    let device = HostDevice::new(HostConfig::new(bytes)).expect("the host has this much memory");
    let segment = Segment::reserve(Arc::new(device), bytes, Lease::issue(grant, Arc::new(Nobody))).expect("addresses");
    segment.back_to(bytes).expect("memory");
    Workspace::over(segment)
}

/// The shortest time of `run`, which is repeated for 0.3 seconds.
fn shortest(mut run: impl FnMut()) -> Duration {
    let (begin, mut shortest) = (Instant::now(), Duration::MAX);
    while begin.elapsed() < Duration::from_millis(300) {
        let start = Instant::now();
        run();
        shortest = shortest.min(start.elapsed());
    }
    shortest
}

fn report(what: &str, cpu: &Cpu, memory: &Workspace, run: impl Fn(&Scope<'_, Cpu>)) {
    let counter = WorkCounter::default();
    run(&Scope::new(cpu, memory, &counter));
    let flops = counter.total().flops as f64;
    let time = shortest(|| run(&Scope::new(cpu, memory, &WorkCounter::default())));
    println!("{what:<44} {:>9.1} us {:>7.1} GFLOP/s", time.as_secs_f64() * 1e6, flops / time.as_secs_f64() / 1e9);
}

fn main() {
    let threads = std::env::args().nth(1).map_or(2, |count| count.parse().expect("a number of threads"));
    let cpu = Cpu::new(threads);
    println!("{threads} threads");
    linears(&cpu);
    attentions(&cpu);
    small(&cpu);
}

/// Deterministic numbers from -0.5 to 0.5, which repeat after 1,013 elements.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|index| ((index * 7919) % 1013) as f32 / 1013.0 - 0.5).collect()
}

fn linears(cpu: &Cpu) {
    let memory = workspace(Bytes::mib(64));
    let weights = WorkCounter::default();
    let outer = Scope::new(cpu, &memory, &weights);
    let floats = numbers(1024 * 1024);
    let halves: Vec<half::bf16> = floats.iter().map(|number| half::bf16::from_f32(*number)).collect();
    for (out_features, in_features) in [(320, 192), (192, 512), (1024, 192), (480, 160), (640, 1024)] {
        let count = out_features * in_features;
        let shape = [out_features, in_features];
        let other = workspace(Bytes::mib(32));
        let narrow = outer.scope();
        let bf16 = narrow.upload(shape, &halves[..count]).expect("the workspace suffices");
        let wide = narrow.scope();
        let f32 = wide.upload(shape, &floats[..count]).expect("the workspace suffices");
        for rows in [1, 4, 16, 256, 1024] {
            for weight in [&bf16, &f32] {
                let what = format!("linear {rows} x {in_features} -> {out_features} {}", weight.dtype());
                let x = wide.scope();
                let x = x.upload([rows, in_features], &floats[..rows * in_features]).expect("the workspace suffices");
                report(&what, cpu, &other, |scope| {
                    black_box(scope.linear(&x, weight, None).expect("the workspace suffices"));
                });
            }
        }
    }
}

fn attentions(cpu: &Cpu) {
    let memory = workspace(Bytes::mib(64));
    let counter = WorkCounter::default();
    let outer = Scope::new(cpu, &memory, &counter);
    let other = workspace(Bytes::mib(32));
    for (rows, step) in [(1024, 1024), (1024, 64)] {
        let inner = outer.scope();
        let qkv = inner.upload([rows, 3 * 5 * 32], &numbers(rows * 3 * 5 * 32)).expect("the workspace suffices");
        let bounds: Vec<u32> = (0..=rows / step).map(|index| (index * step) as u32).collect();
        let starts = inner.upload([bounds.len()], &bounds).expect("the workspace suffices");
        let sequences = PackedSequences { starts, longest: step, query_key_pairs: (rows * step) as u64 };
        report(&format!("attention_packed {rows} x 5 x 32 in {step}s"), cpu, &other, |scope| {
            black_box(scope.attention_packed(&qkv, 5, &sequences).expect("the workspace suffices"));
        });
    }
    let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 32, dtype: DType::F32 };
    let blocks = 512;
    let cache =
        outer.upload([blocks, 16 * 2 * 2 * 32], &numbers(blocks * 16 * 2 * 2 * 32)).expect("the workspace suffices");
    // SAFETY: the cache outlives the layer, and nothing else uses it.
    let layer = unsafe { KvLayer::new(cache.address(), blocks, shape) };
    for (sequences, rows, context) in [(1, 1, 2048), (4, 1, 2048), (4, 1, 128), (1, 512, 512), (1, 256, 2048)] {
        let inner = outer.scope();
        let tokens = sequences * rows;
        let queries = inner.upload([tokens, 6 * 32], &numbers(tokens * 6 * 32)).expect("the workspace suffices");
        let starts: Vec<u32> = (0..=sequences).map(|index| (index * rows) as u32).collect();
        let table: Vec<u32> = (0..sequences * context / 16).map(|index| index as u32).collect();
        let pairs = sequences * (rows * context - rows * (rows - 1) / 2);
        let sequences = PagedSequences {
            has_linked_rows: false,
            query_starts: inner.upload([sequences + 1], &starts).expect("the workspace suffices"),
            context_lengths: inner
                .upload([sequences], &vec![context as u32; sequences])
                .expect("the workspace suffices"),
            block_tables: inner.upload([sequences, context / 16], &table).expect("the workspace suffices"),
            single_rows: 0,
            query_key_pairs: pairs as u64,
        };
        let what = format!("attention_paged {tokens} rows of {context} (6:2 x 32)");
        report(&what, cpu, &other, |scope| {
            black_box(scope.attention_paged(&queries, &layer, &sequences, 0.1, None).expect("the workspace suffices"));
        });
    }
}

fn small(cpu: &Cpu) {
    let memory = workspace(Bytes::mib(64));
    let counter = WorkCounter::default();
    let outer = Scope::new(cpu, &memory, &counter);
    let other = workspace(Bytes::mib(32));
    let weight = outer.upload([160], &numbers(160)).expect("the workspace suffices");
    patches(cpu, &other);
    for rows in [1, 1024] {
        let inner = outer.scope();
        let x = inner.upload([rows, 160], &numbers(rows * 160)).expect("the workspace suffices");
        let gate_up = inner.upload([rows, 1280], &numbers(rows * 1280)).expect("the workspace suffices");
        report(&format!("rms_norm {rows} x 160"), cpu, &other, |scope| {
            black_box(scope.rms_norm(&x, RmsNorm::new(&weight, 1e-6)).expect("the workspace suffices"));
        });
        report(&format!("silu_mul {rows} x 1280"), cpu, &other, |scope| {
            black_box(scope.silu_mul(&gate_up).expect("the workspace suffices"));
        });
    }
}

/// A still picture of 448 x 448 pixels, as Qwen2.5-VL reads it.
fn patches(cpu: &Cpu, memory: &Workspace) {
    let (side, size) = (32, PatchSize { side: 14, frames: 2 });
    let bytes: Vec<u8> = (0..side * side * 588).map(|index| (index * 7919 % 251) as u8).collect();
    let places: Vec<u32> = (0..3).flat_map(|axis| (0..1024).map(move |at| [0, at / 32, at % 32][axis])).collect();
    report("patchify 1024 x 1176", cpu, memory, |scope| {
        let pixels = Pixels {
            bytes: scope.upload([bytes.len()], &bytes).expect("the workspace suffices"),
            layout: scope.upload([1, 4], &[0, side as u32, side as u32, 1]).expect("the workspace suffices"),
            levels: scope
                .upload([1, 7], &[1.0f32, 122.8, 116.7, 104.1, 68.5, 66.6, 70.3])
                .expect("the workspace suffices"),
            places: scope.upload([3, 1024], &places).expect("the workspace suffices"),
        };
        let mut out = scope.empty([1024, size.values()]).expect("the workspace suffices");
        scope.patchify(&pixels, size, &mut out).expect("the workspace suffices");
        black_box(out);
    });
}
