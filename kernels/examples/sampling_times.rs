//! Times of sampling on a GPU, in captured graphs, as in decode steps: one set of options at a
//! time, for several numbers of rows.
//!
//! `cargo run --release -p bursar-kernels --example sampling_times [folder of cuBLASLt]`

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bursar_budgets::*;
use bursar_kernels::{
    ops::transfer::{fill_elements, settle},
    sampling::{RowLists, SampleBatch, SampleLayout, SampleRow, philox},
    *,
};

/// The vocabulary of Qwen2.5.
const VOCABULARY: usize = 152_064;
const ROWS: [usize; 4] = [1, 16, 64, 256];

/// Replays of a graph per measurement.
const REPLAYS: u32 = 100;
/// Number of measurements. Only the shortest time is reported.
const MEASUREMENTS: usize = 5;

struct Nobody;

impl ReleaseNotes for Nobody {
    fn post(&self, _: ReleaseNote) {}
}

/// A backed segment of `bytes` on `device`.
fn leased(device: &Arc<CudaDevice>, bytes: Bytes) -> Segment {
    let bytes = bytes.round_up(device.page());
    let mut ledger = Ledger::new(LedgerConfig::new(bytes));
    let request = Request::new(Owner::new("sampling_times", 0), Class::StepWorkspace, "none", bytes);
    let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
    let Effect::Granted(grant) = &effects[0] else { panic!("{effects:?}") };
    let segment = Segment::reserve(device.clone(), bytes, Lease::issue(grant, Arc::new(Nobody))).expect("addresses");
    segment.back_to(bytes).expect("memory");
    segment
}

/// The shortest time per replay of the work that `launch` launches.
fn time(cuda: &Cuda, mut launch: impl FnMut() -> Result<(), KernelError>) -> Duration {
    // The first launch loads kernels, which cannot be captured.
    launch().expect("the launch runs");
    let graph = cuda.capture(&mut launch).expect("the graph is captured").expect("the GPU supports graphs");
    let measure = |_| {
        settle(cuda).expect("the work completes");
        let start = Instant::now();
        (0..REPLAYS).for_each(|_| graph.replay().expect("the graph runs"));
        settle(cuda).expect("the work completes");
        start.elapsed() / REPLAYS
    };
    (0..MEASUREMENTS).map(measure).min().expect("there is at least one measurement")
}

/// Named sampling options to time.
fn wanted() -> [(&'static str, SampleRow); 6] {
    let warm = SampleRow { temperature: 0.8, ..SampleRow::default() };
    [
        ("greedy", SampleRow::default()),
        ("greedy, five reported", SampleRow { top: 5, ..SampleRow::default() }),
        ("temperature", warm),
        ("temperature, top-p 0.9", SampleRow { top_p: 0.9, ..warm }),
        ("temperature, top-k 50, top-p 0.9", SampleRow { top_k: 50, top_p: 0.9, ..warm }),
        ("repetition over 8,000 tokens", SampleRow { temperature: 1e-6, repetition: 1.05, ..warm }),
    ]
}

fn main() {
    let device = Arc::new(CudaDevice::open(0).expect("a GPU"));
    let search = BlasSearch::usual().first_in(std::env::args().nth(1).as_slice());
    let target = CudaTarget::of(&device).expect("the device reports its target");
    let kernels = CudaKernels::load(&device, target, &search).expect("the kernels load");
    let cuda = Cuda::new(&kernels).expect("a stream");
    let rows_max = ROWS[ROWS.len() - 1];
    let past: Vec<u32> = (0..8000).map(|token| token * 19).collect();
    let most = SampleLayout { rows: rows_max, vocabulary: VOCABULARY };
    let [logits, asked, results] = [rows_max * VOCABULARY, most.words_max(past.len()), rows_max + most.report_words()]
        .map(|words| (leased(&device, DType::U32.bytes(words)), words));
    let workspace = Workspace::over(leased(&device, Bytes::mib(256)));
    // SAFETY: each segment is backed for this many words, and only this thread uses it.
    let [mut asked, mut results] =
        [&asked, &results].map(|(memory, words)| unsafe { Tensor::persistent(memory.address(), [*words], DType::U32) });
    // SAFETY: the segment is backed for this many words, and only this thread uses it.
    let mut all = unsafe { Tensor::persistent(logits.0.address(), [rows_max, VOCABULARY], DType::F32) };
    // Each logit is a sum of two uniform numbers. Few tokens are likely, but many more than with a
    // real model.
    let number = |at: u64| ((philox::uniform(1, at) + philox::uniform(2, at) - 1.0) * 12.0) as f32;
    fill_elements(&cuda, &(0..logits.1 as u64).map(number).collect::<Vec<_>>(), &mut all)
        .expect("the numbers are uploaded");
    println!("{:<40}{}", "us, by number of rows", ROWS.map(|rows| format!("{rows:>9}")).concat());
    let counter = WorkCounter::default();
    let show = |name: &str, times: [Duration; ROWS.len()]| {
        println!("{name:<40}{}", times.map(|time| format!("{:>9.1}", time.as_secs_f64() * 1e6)).concat());
    };
    show(
        "argmax",
        ROWS.map(|rows| {
            let scope = || Scope::new(&cuda, &workspace, &counter);
            let mut chosen = results.row_range_mut(0..rows);
            time(&cuda, || scope().argmax_into(&all.row_range(0..rows), &mut chosen))
        }),
    );
    for (name, row) in wanted() {
        let times = ROWS.map(|rows| {
            let (mut batch, mut words) = (SampleBatch::new(VOCABULARY), Vec::new());
            for seed in 0..rows as u64 {
                batch.push(&SampleRow { seed, ..row }, &RowLists { prompt: &past, ..RowLists::default() });
            }
            let layout = batch.pack(rows, &mut words);
            fill_elements(&cuda, &words, &mut asked.row_range_mut(0..words.len())).expect("the numbers are uploaded");
            let (mut chosen, mut report) = results.split_rows_mut(rows);
            time(&cuda, || {
                let scope = Scope::new(&cuda, &workspace, &counter);
                scope.sample_into(&all.row_range(0..rows), &asked, layout, &mut chosen, &mut report)
            })
        });
        show(name, times);
    }
}
