//! A checkpoint with the shape of a released model, by default Qwen2.5-VL-7B's, on a GPU, compared
//! with results of transformers in bf16 and in f32. `tools/gpu/released_shape.py FOLDER` writes the
//! checkpoint and the results. The first test computes in bf16, the type of the checkpoint, and in
//! f16, to which the weights are converted on loading. Without a GPU, or without a folder in
//! `BURSAR_RELEASED_SHAPE`, each test prints a line and passes.

mod bench;

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use bench::{Bench, BenchMemory, Memory, gpu, greatest};
use bursar_budgets::{Bytes, Class, CudaDevice};
use bursar_kernels::{Backend, Cuda, DType, Target};
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource, WeightFormats, WeightQuantization},
    flow::{EncodedImage, ImageLimits, MediaGrid, PromptLayout, ResizedImage},
};
use safetensors::SafeTensors;
use serde_json::Value;

const PROMPTS: [&str; 4] = ["text", "one_picture", "four_pictures", "long_text"];

/// Number of tokens at a prompt's end that have recorded logits.
const ROWS: usize = 32;

/// Tokens at a prompt's end that run one by one, like the tokens of an answer.
const DECODED: usize = 16;

/// Tokens per chunk, which is not a whole number of blocks.
const CHUNK: usize = 1000;

/// Memory for the weights, 8,192 tokens, four pictures, and passes over all of them at once.
const BENCH_MEMORY: BenchMemory = BenchMemory {
    capacity: Bytes::gib(32),
    blocks: 600,
    cache_rows: 3000,
    workspace: Bytes::gib(4),
    at_once: Bytes::kib(320),
};

/// Largest allowed error ratio (as in [`worse`]) with the weights and activations of each GEMM in
/// E4M3, which has 3 mantissa bits instead of bf16's 7. Ratios of 9 to 11 were measured on an H200.
/// The errors then reach half of the logits' norm. With random weights, such errors often make
/// another token the likeliest, so the number of agreeing tokens is printed but not asserted.
const WORSE_IN_FP8: f64 = 14.0;

/// Largest allowed ratio between a type's error and the error of transformers in bf16, both
/// measured against f32. In bf16 both round, but in different places. f16 has three more bits, so
/// an eighth of the error is expected. A quarter is allowed, because numbers below f16's smallest
/// normal number, as some bf16 weights are, have fewer bits. With experts, half is allowed, because
/// a token may be routed to another expert than in f32 if two experts are nearly tied.
fn worse(activation: DType, has_experts: bool) -> f64 {
    match activation {
        DType::BF16 => 1.25,
        DType::F16 if has_experts => 0.5,
        DType::F16 => 0.25,
        other => panic!("a GPU does not compute in {other:?}"),
    }
}

/// The checkpoint's folder, if there is one.
fn folder() -> Option<PathBuf> {
    let folder = std::env::var_os("BURSAR_RELEASED_SHAPE");
    if folder.is_none() {
        println!("skipped, BURSAR_RELEASED_SHAPE names no folder; tools/gpu/released_shape.py makes one");
    }
    folder.map(PathBuf::from)
}

/// Rows of numbers, stored one after the other.
struct Rows {
    numbers: Vec<f32>,
    columns: usize,
}

impl Rows {
    fn last(&self, rows: usize) -> &[f32] {
        &self.numbers[self.numbers.len() - rows * self.columns..]
    }

    fn each<'a>(numbers: &'a [f32], columns: usize) -> impl Iterator<Item = u32> + 'a {
        numbers.chunks_exact(columns).map(greatest)
    }
}

/// A prompt with the results that transformers computed for it.
struct Prompt {
    name: &'static str,
    layout: PromptLayout,
    images: Vec<ResizedImage>,
    recorded: Vec<u8>,
    /// Largest allowed error ratio; see [`worse`].
    worse: f64,
    /// Number of ranks that share the model.
    ranks: usize,
}

impl Prompt {
    fn read(folder: &Path, name: &'static str, bench: &Bench<impl Backend>) -> Self {
        let file = |ending: &str| {
            std::fs::read(folder.join(format!("prompts/{name}.{ending}"))).expect("the recorded prompt file exists")
        };
        let json: Value = serde_json::from_slice(&file("json")).expect("JSON");
        let list = |key: &str| json[key].as_array().expect("a list").clone();
        let ids = list("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect();
        let (limits, processor) =
            (ImageLimits::default(), bench.checkpoint.image_processor.as_ref().expect("the checkpoint takes pictures"));
        let resized = |file: &Value| {
            let path = folder.join("prompts").join(file.as_str().expect("a name"));
            let picture = EncodedImage::open(path, &limits)
                .expect("the picture opens")
                .decode(&limits)
                .expect("the picture decodes");
            processor.process(&picture).expect("the picture is processed").image
        };
        let images: Vec<ResizedImage> = list("pictures").iter().map(resized).collect();
        let grids: Vec<MediaGrid> = images.iter().map(|image| MediaGrid::Image(image.grid)).collect();
        let layout = bench.model.config().lay_out(ids, &grids).expect("the prompt is laid out");
        let worse = match bench.checkpoint.weight_formats().expect("the checkpoint has weight formats") {
            WeightFormats::Unquantized => {
                worse(bench.backend.target().activation(), bench.model.expert_loads().is_some())
            }
            _ => WORSE_IN_FP8,
        };
        Prompt { name, layout, images, recorded: file("safetensors"), worse, ranks: bench.backend.rank().of() }
    }

    /// A recorded tensor with two axes.
    fn rows(&self, name: &str) -> Rows {
        let tensors = SafeTensors::deserialize(&self.recorded).expect("safetensors");
        let tensor = tensors.tensor(name).expect("the tensor was recorded");
        let (numbers, rest) = tensor.data().as_chunks::<4>();
        assert!(rest.is_empty());
        Rows { numbers: numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(), columns: tensor.shape()[1] }
    }
}

/// `||found - expected|| / ||expected||`
fn error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len(), "both lists have the same length");
    let square = |number: f32| f64::from(number) * f64::from(number);
    let off: f64 = found.iter().zip(expected).map(|(found, expected)| square(found - expected)).sum();
    (off / expected.iter().map(|number| square(*number)).sum::<f64>()).sqrt()
}

/// Prints the distance between numbers and transformers' numbers. Fails if they are too far from
/// f32, relative to the error of transformers' own bf16.
fn judge(prompt: &Prompt, activation: DType, what: &str, found: &[f32], tensor: &str) {
    let [narrow, wide] = ["bf16", "f32"].map(|kind| prompt.rows(&format!("{tensor}.{kind}")));
    let (columns, rows) = (wide.columns, found.len() / wide.columns);
    let (narrow, wide) = (narrow.last(rows), wide.last(rows));
    let last = rows * columns - columns..;
    let [ours, theirs, between] = [error(found, wide), error(narrow, wide), error(found, narrow)];
    let [our_last, their_last] = [found, narrow].map(|numbers| error(&numbers[last.clone()], &wide[last.clone()]));
    let agreed =
        |a: &[f32], b: &[f32]| Rows::each(a, columns).zip(Rows::each(b, columns)).filter(|(a, b)| a == b).count();
    let [our_top, their_top, top_between] = [agreed(found, wide), agreed(narrow, wide), agreed(found, narrow)];
    println!(
        "{} in {activation:?}, {what}, {rows} rows: ours {ours:.2e} off f32, transformers' bf16 {theirs:.2e} (last row {our_last:.2e} and \
         {their_last:.2e}), ours against theirs {between:.2e}; top tokens as in f32: ours {our_top}, theirs {their_top}; \
         top tokens equal in both: {top_between}",
        prompt.name
    );
    let &Prompt { name, worse, .. } = prompt;
    assert!(ours <= worse * theirs, "{name}, {what}: error {ours:e} against f32; transformers has {theirs:e}");
    assert!(
        our_last <= 1.2 * worse * their_last,
        "{name}, {what}: the last row's error is {our_last:e}; transformers has {their_last:e}"
    );
    if tensor == "logits" && worse < WORSE_IN_FP8 {
        // Random logits are nearly tied. If about 28 of 32 rows agree, the difference of two such
        // counts has a standard deviation of 3, and one pair in twenty differs by more than 5. On
        // four GPUs, such a pair was seen.
        let fewer = if prompt.ranks > 2 { rows / 4 } else { rows / 8 };
        assert!(
            our_top + fewer >= their_top,
            "{name}, {what}: {our_top} of {rows} top tokens agree; transformers has {their_top}"
        );
    }
}

fn run<B: Backend>(bench: &Bench<B>, prompt: &Prompt) {
    let activation = bench.backend.target().activation();
    let started = Instant::now();
    let mut rows = Vec::new();
    if !prompt.images.is_empty() {
        rows = bench.encode(&prompt.images.iter().collect::<Vec<_>>());
        let embeddings: Vec<f32> = rows.iter().flat_map(|rows| bench.embeddings(rows)).collect();
        judge(prompt, activation, "embeddings", &embeddings, "embeddings");
    }
    let mut whole = bench.start(prompt.layout.clone(), &rows);
    let tokens = whole.prompt_left();
    let scores = bench.step_and_score(&mut [whole.next_chunk(tokens).scored_last(ROWS)]).1;
    judge(prompt, activation, "in one step", &scores.concat(), "logits");
    bench.end(whole);
    let mut chunked = bench.start(prompt.layout.clone(), &rows);
    while chunked.prompt_left() > DECODED {
        let count = CHUNK.min(chunked.prompt_left() - DECODED);
        bench.step(&mut [chunked.next_chunk(count).without_logits()]);
    }
    let logits: Vec<f32> = (0..DECODED).flat_map(|_| bench.step(&mut [chunked.next_chunk(1)]).concat()).collect();
    judge(prompt, activation, "in chunks, the last tokens one by one", &logits, "logits");
    bench.end(chunked);
    bench.forget(rows);
    println!("{}: {tokens} tokens, {:.1} s in all", prompt.name, started.elapsed().as_secs_f64());
}

#[test]
fn a_7b_checkpoint_matches_transformers() {
    let Some(folder) = folder() else { return };
    let Some((_turn, gpu)) = gpu() else { return };
    let targets: Vec<_> = gpu.kernels.iter().map(|kernels| kernels.target().activation()).collect();
    assert_eq!(targets, [DType::BF16, DType::F16], "a GPU with bf16 computes in both types");
    for kernels in &gpu.kernels {
        run_all(&folder, None, Cuda::new(kernels).expect("a stream"), gpu.memory(BENCH_MEMORY));
    }
}

fn open(folder: &Path) -> Checkpoint {
    Checkpoint::open(CheckpointSource::Folder(folder.to_owned())).expect("the checkpoint opens")
}

#[test]
fn a_7b_checkpoint_on_several_gpus_matches_transformers() {
    let Some(folder) = folder() else { return };
    let Some((_turn, gpu)) = gpu() else { return };
    let Target::Cuda(target) = gpu.kernels[0].target() else { unreachable!("the target is a GPU") };
    for of in [2, 4] {
        if let Err(error) = CudaDevice::open(of - 1) {
            println!("skipped, the test needs {of} GPUs: {error}");
            continue;
        }
        let each = |bench: &Bench<Cuda>| {
            PROMPTS.into_iter().for_each(|name| run(bench, &Prompt::read(&folder, name, bench)));
        };
        println!("on {of} GPUs");
        gpu.on_ranks(of, target, BENCH_MEMORY, || open(&folder), each);
    }
}

#[test]
fn fp8_rounded_weights_stay_close_to_transformers() {
    let Some(folder) = folder() else { return };
    let Some((_turn, gpu)) = gpu() else { return };
    for quantization in [WeightQuantization::Fp8PerChannel, WeightQuantization::Fp8PerBlock] {
        println!("{}", quantization.name());
        run_all(&folder, Some(quantization), Cuda::new(&gpu.kernels[0]).expect("a stream"), gpu.memory(BENCH_MEMORY));
    }
}

fn run_all(folder: &Path, quantization: Option<WeightQuantization>, cuda: Cuda, memory: Memory) {
    let started = Instant::now();
    let checkpoint = open(folder).with_quantization(quantization);
    let planned = Model::plan(&checkpoint, cuda.target()).expect("the model is planned").weight_bytes();
    println!("opened and planned in {:.2} s", started.elapsed().as_secs_f64());
    // Loading writes every byte of this segment.
    let weights = memory.leased(Class::Weights, planned);
    let started = Instant::now();
    let model =
        Model::load(&checkpoint, &cuda, weights, |_, _| std::ops::ControlFlow::Continue(())).expect("the model loads");
    let (seconds, activation) = (started.elapsed().as_secs_f64(), cuda.target().activation());
    println!("loaded {planned} as {activation:?} in {seconds:.2} s, {:.1} GB/s", planned.0 as f64 / seconds / 1e9);
    let bench = Bench::around(checkpoint, model, cuda, memory, BENCH_MEMORY);
    PROMPTS.into_iter().for_each(|name| run(&bench, &Prompt::read(folder, name, &bench)));
}
