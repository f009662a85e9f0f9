//! Decoding with captured graphs on a GPU gives the same results as launching each kernel
//! separately. Without a GPU, each test prints a note and passes.

mod drafts;

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
};

use bursar_actors::{
    compute::graph::{GraphKey, GraphLimits},
    compute::lane::{
        Acceptance, Answer, CaptureJob, Choice, Job, Lane, LaneError, ModelRunner, PastTokens, StepJob, Stepped,
    },
    compute::memory::{EngineBuffers, EngineMemory, GraphInputs, KvMemory, SamplingMemory, StateMemory},
};
use bursar_budgets::*;
use bursar_kernels::{BLOCK_TOKENS, BlasSearch, Cuda, CudaKernels, CudaTarget, Target, UnseenToken};
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource, DraftProjection},
    flow::{BlockTable, CacheFormat, CacheGroups, NextToken, SequencePart, StateSlots, StepBatch, StepFormat, Token},
    registry::{FamilyConfig, random_checkpoint},
    sampling::{Sampler, SamplingParams, SamplingShape},
};

use crate::{gpu::TURN, leased::Leased};

/// The arrays of a step that the demo model reads.
const FORMAT: StepFormat = StepFormat { axes: 3, ..StepFormat::TEXT };

/// Exclusive use of the GPU by one test.
type GpuLock = tokio::sync::MutexGuard<'static, ()>;

/// A lane with a model on a GPU.
struct Stage {
    lane: Lane,
    device: Arc<CudaDevice>,
    memory: Arc<EngineMemory>,
    vocabulary: usize,
    groups: CacheGroups,
    shape: GraphLimits,
    _gpu_lock: GpuLock,
}

/// GPU memory for everything except weights and the KV cache.
const CAPACITY: Bytes = Bytes::gib(2);

const WORKSPACE: Bytes = Bytes::gib(1);

/// The reserved addresses of the KV cache, as a multiple of its initial size.
const GROWTH: usize = 100;

/// Steps of a reply after the step that reads the prompt.
const STEPS: usize = 40;

/// Blocks of the longest sequence.
fn blocks_each(shape: GraphLimits) -> usize {
    shape.context_tokens.div_ceil(BLOCK_TOKENS)
}

fn open(source: CheckpointSource) -> Checkpoint {
    Checkpoint::open(source).expect("the checkpoint opens")
}

fn demo() -> CheckpointSource {
    CheckpointSource::Folder(bursar_golden::demo_checkpoint())
}

impl Drop for Stage {
    /// Waits for the lane's thread, which frees graphs through the driver. This must happen before
    /// the process exits, because the driver is unloaded then.
    fn drop(&mut self) {
        let threads = tokio::runtime::Builder::new_current_thread().build().expect("the runtime builds");
        threads.block_on(self.lane.shut_down());
    }
}

impl Stage {
    /// A stage with the demo model.
    fn set() -> Option<Stage> {
        Stage::cached(CacheFormat::Plain)
    }

    /// A stage with the demo model and a KV cache of this format.
    fn cached(cache: CacheFormat) -> Option<Stage> {
        let shape = GraphLimits::without_drafts(11, 180, FORMAT);
        Stage::of(demo(), cache, shape, GROWTH)
    }

    /// A stage whose KV cache holds `shape.decode_rows` sequences, with addresses for
    /// `growth` times as many.
    fn of(source: CheckpointSource, cache: CacheFormat, shape: GraphLimits, growth: usize) -> Option<Stage> {
        Stage::of_checkpoint(open(source).with_cache(cache), shape, growth)
    }

    /// Like [`of`](Stage::of), with an open checkpoint.
    fn of_checkpoint(checkpoint: Checkpoint, shape: GraphLimits, growth: usize) -> Option<Stage> {
        let cache = checkpoint.cache();
        let turn = TURN.blocking_lock();
        let cuda = match CudaDevice::open(0) {
            Ok(device) => Arc::new(device),
            Err(error @ DeviceError::NoDevice { .. }) => {
                println!("skipped, {error}; {}", error.hint().expect("the error has a hint"));
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        // The test machine names the folder of the library in an environment variable. No other
        // code of this program reads the environment.
        #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
        let folder = std::env::var("BURSAR_CUDA_LIB");
        let search = BlasSearch::usual().first_in(folder.ok().as_slice());
        let target = CudaTarget::of(&cuda).expect("the device reports its capability");
        if cache == CacheFormat::Fp8 && !Target::Cuda(target).has_quantized_cache() {
            assert_ne!(target.capability, (9, 0), "Hopper has these kernels");
            println!("skipped, there are no kernels for FP8 keys and values on {}", Target::Cuda(target).name());
            return None;
        }
        let kernels = CudaKernels::load(&cuda, target, &search).expect("the kernels load");
        let device: Arc<dyn Device> = cuda.clone();
        let checkpoint =
            checkpoint.with_draft_head(shape.has_draft_head).with_draft_projection(DraftProjection::Int4IfSupported);
        let plan = Model::plan(&checkpoint, &kernels.target()).expect("the model can be planned");
        let (bytes, kv_shape) = (plan.weight_bytes(), plan.kv_shape(&kernels.target()));
        let blocks = shape.decode_rows * blocks_each(shape) * shape.format.groups;
        let reserved = growth * blocks;
        let kv_bytes = KvMemory::bytes(kv_shape, reserved, device.page());
        let states = plan.state_shape(&kernels.target());
        let state_bytes =
            states.map_or(Bytes::ZERO, |states| StateMemory::bytes(states, shape.decode_rows, device.page()));
        let (wanted, free) =
            (CAPACITY + bytes + kv_bytes + state_bytes, cuda.memory().expect("the device reports its memory").free);
        if wanted > free {
            println!("skipped, the test needs {wanted}, but the GPU has only {free} of free memory");
            return None;
        }
        let leased = Leased::of(device.clone(), wanted);
        let backend = Cuda::new(&kernels).expect("a stream");
        let model = Model::load(&checkpoint, &backend, leased.segment(Class::Weights, bytes), |_, _| {
            std::ops::ControlFlow::Continue(())
        })
        .expect("the model loads");
        let kv_lease = leased.lease(Class::Kv, kv_bytes);
        let kv = KvMemory::reserve(&device, kv_shape, reserved, Arc::new(kv_lease)).expect("addresses");
        kv.grow_to(blocks).expect("memory");
        let workspace = Arc::new(leased.segment(Class::StepWorkspace, WORKSPACE));
        let vocabulary = model.config().decoder().vocabulary;
        let groups = model.config().decoder().cache_groups();
        let sampling = SamplingShape { rows: shape.logit_rows, context_tokens: shape.context_tokens, vocabulary };
        let sampling_bytes = SamplingMemory::bytes(sampling, device.page());
        let states = states.map(|states| {
            let lease = leased.lease(Class::States, state_bytes);
            StateMemory::back(&device, states, shape.decode_rows, Arc::new(lease)).expect("memory")
        });
        let memory = Arc::new(EngineMemory::new(EngineBuffers {
            states,
            step_workspace: workspace.clone(),
            sampling: SamplingMemory::over(leased.segment(Class::StepWorkspace, sampling_bytes), sampling),
            vision_workspace: None,
            exchange: None,
            vision_cache: None,
            host_kv: None,
            host_states: None,
            host_pictures: None,
            kv,
            graphs: Some(GraphInputs::over(leased.segment(Class::Graphs, shape.bytes(device.page())), shape)),
        }));
        assert_eq!(model.config().decoder().step_format(), shape.format);
        let runner = ModelRunner::new(backend, workspace, Arc::new(model), memory.clone());
        let lane = Lane::start("gpu", runner, device.timeline());
        Some(Stage { lane, device: cuda, memory, vocabulary, groups, shape, _gpu_lock: turn })
    }

    /// Captures every size. Returns the memory that the graphs took.
    fn capture(&self) -> Bytes {
        let captured = self.shape.sizes().into_iter().map(|size| {
            let (give, answer) = sync_channel(1);
            let answer_to = Answer::to(move |outcome| drop(give.send(outcome)));
            self.lane.submit(Job::Capture(CaptureJob { size, answer: answer_to }));
            let outcome: Result<Option<Bytes>, LaneError> = answer.recv().expect("each job is answered");
            outcome.expect("the graph is captured").expect("the GPU supports graphs")
        });
        captured.sum()
    }

    /// Drops graphs. Steps of these sizes are then launched kernel by kernel, with
    /// the algorithms measured before.
    fn forget(&self, sizes: &[GraphKey]) {
        for &size in sizes {
            let (give, answer) = sync_channel(1);
            let answer_to = Answer::to(move |outcome| drop(give.send(outcome)));
            self.lane.submit(Job::Forget { size, answer: answer_to });
            answer.recv().expect("each job is answered").expect("the graph is forgotten");
        }
    }

    fn submit(&self, parts: &[SequencePart<'_>], choices: Vec<Choice>) -> Receiver<Result<Stepped, LaneError>> {
        let (give, answer) = sync_channel(1);
        let answer_to = Answer::to(move |outcome| drop(give.send(outcome)));
        let batch = if self.shape.has_draft_head {
            StepBatch::pack_with_drafts(parts, &vec![NextToken::Chosen; parts.len()])
        } else {
            StepBatch::pack(parts)
        };
        let job =
            StepJob { batch, choices, scores: Vec::new(), pins: Vec::new(), spans: Vec::new(), answer: answer_to };
        self.lane.submit(Job::Step(Box::new(job)));
        answer
    }

    /// Decodes a reply for each sampler: a first token, and `steps` tokens after it. The prompts
    /// have different lengths, and the sequences use blocks from `first_block` on. Returns the
    /// replies, and the number of steps that ran as a graph.
    fn replies(
        &self,
        samplers: &[Arc<Sampler>],
        steps: usize,
        first_block: usize,
        named: Named,
    ) -> (Vec<Vec<Token>>, usize) {
        let (sequences, blocks_each) = (samplers.len(), blocks_each(self.shape));
        // The longest prompt leaves enough context for a reply.
        let longer = (self.shape.context_tokens - 2 * STEPS) / self.shape.decode_rows;
        let prompt =
            |sequence: usize| (0..5 + (longer * sequence) as u32).map(|at| (at * 7 + sequence as u32) % 300).collect();
        let prompts: Vec<Vec<u32>> = (0..sequences).map(prompt).collect();
        // The tables of a step after `cached` tokens, without the blocks before a window.
        let groups = self.groups.count();
        let tables_at = |sequence: usize, cached: usize| -> Vec<BlockTable> {
            let block = |at: usize, group: usize| (first_block + (at * groups + group) * sequences + sequence) as u32;
            let table = |group: usize| {
                let skipped = self.groups.first_read(group, cached);
                BlockTable { skipped, blocks: (skipped..blocks_each).map(|at| block(at, group)).collect() }
            };
            (0..groups).map(table).collect()
        };
        let tables: Vec<_> = (0..sequences).map(|sequence| tables_at(sequence, 0)).collect();
        let positions: Vec<Vec<[u32; 3]>> =
            prompts.iter().map(|prompt| (0..prompt.len() as u32).map(|at| [at; 3]).collect()).collect();
        let state = |s: usize| self.shape.format.has_states.then(|| StateSlots::in_place(s as u32));
        let parts: Vec<_> = prompts
            .iter()
            .enumerate()
            .map(|(s, prompt)| SequencePart { state: state(s), ..part(prompt, &positions[s], 0, &tables[s]) })
            .collect();
        let (mut replies, mut replayed) = (vec![Vec::new(); sequences], 0);
        let mut read = |replies: &mut Vec<Vec<Token>>, answer: Receiver<Result<Stepped, LaneError>>| {
            let stepped = answer.recv().expect("each job is answered").expect("the step runs");
            replayed += usize::from(stepped.is_by_graph);
            let tokens = stepped.chosen.into_iter().flatten().map(|token| token.expect("the logits are numbers"));
            replies.iter_mut().zip(tokens).for_each(|(reply, token)| reply.push(token));
        };
        // The choices of a step after `position` tokens of each reply. The host may not have seen
        // the last token of each reply yet.
        let choices = |replies: &[Vec<Token>], position: usize| -> Vec<Choice> {
            let choice = |row: usize| {
                let produced: Vec<u32> = replies[row].iter().map(|token| token.id).collect();
                let unseen = (produced.len() < position).then_some(UnseenToken { row: row as u32 });
                assert_eq!(produced.len() + usize::from(unseen.is_some()), position);
                let prompt = samplers[row].read_of(&prompts[row]);
                let past = PastTokens { prompt, produced, unseen };
                Choice {
                    sampler: samplers[row].clone(),
                    position: position as u64,
                    past: Some(past),
                    drafts: Vec::new(),
                    acceptance: Acceptance::Equal,
                    further: None,
                }
            };
            (0..sequences).map(choice).collect()
        };
        let mut before = self.submit(&parts, choices(&replies, 0));
        for step in 0..steps {
            // The host either reads the tokens of each step one step late, or passes the ids of the
            // tokens that it has seen.
            let (tokens, late): (Vec<u32>, _) = match named {
                Named::Unseen => (Vec::new(), Some(before)),
                Named::Seen => {
                    read(&mut replies, before);
                    (replies.iter().map(|reply| reply[step].id).collect(), None)
                }
            };
            let unseen = |row: usize| tokens.is_empty().then_some(UnseenToken { row: row as u32 });
            let at: Vec<_> = prompts.iter().map(|prompt| [[(prompt.len() + step) as u32; 3]]).collect();
            let tables: Vec<_> = (0..sequences).map(|s| tables_at(s, prompts[s].len() + step)).collect();
            let next_part = |s: usize| {
                let seen = tokens.get(s..=s).unwrap_or_default();
                let next = part(seen, &at[s], prompts[s].len() + step, &tables[s]);
                SequencePart { unseen: unseen(s), state: state(s), ..next }
            };
            let parts: Vec<_> = (0..sequences).map(next_part).collect();
            let next = self.submit(&parts, choices(&replies, step + 1));
            late.into_iter().for_each(|late| read(&mut replies, late));
            before = next;
        }
        read(&mut replies, before);
        (replies, replayed)
    }

    fn sampler(&self, params: SamplingParams) -> Arc<Sampler> {
        Arc::new(Sampler::new(params, self.vocabulary).expect("the parameters are valid"))
    }

    /// Samplers that always choose the most likely token.
    fn plain(&self, sequences: usize) -> Vec<Arc<Sampler>> {
        vec![self.sampler(SamplingParams::default()); sequences]
    }

    /// Samplers with different settings. One of them always chooses the most likely token.
    fn samplers(&self, sequences: usize) -> Vec<Arc<Sampler>> {
        let sampler = |sequence: usize| {
            let warm = || SamplingParams { temperature: 1.3, seed: 5 + sequence as u64, ..SamplingParams::default() };
            let limited = || SamplingParams { top_k: 50, top_p: 0.95, min_p: 1e-3, ..warm() };
            let tired = || SamplingParams {
                repetition_penalty: 1.3,
                presence_penalty: 0.5,
                frequency_penalty: 0.5,
                logit_bias: [(3, 4.0), (7, -100.0)].into(),
                ..limited()
            };
            let sampler = match sequence % 6 {
                0 => self.sampler(tired()),
                1 => self.sampler(warm()),
                2 => self.sampler(limited()),
                3 => self.sampler(SamplingParams::default()),
                4 => self.sampler(SamplingParams { temperature: 0.0, frequency_penalty: 2.0, ..warm() }),
                _ => return Sampler::new(tired(), self.vocabulary)?.with_tokens_min(20, [856, 858].into()),
            };
            Sampler::clone(&sampler).with_log_probabilities(sequence % 4)
        };
        (0..sequences).map(|sequence| Arc::new(sampler(sequence).expect("the parameters are valid"))).collect()
    }
}

/// The part of a step that belongs to one sequence. The next token is chosen from the logits of the
/// part's last token.
fn part<'a>(
    tokens: &'a [u32],
    positions: &'a [[u32; 3]],
    cached_tokens: usize,
    tables: &'a [BlockTable],
) -> SequencePart<'a> {
    SequencePart {
        tokens,
        unseen: None,
        positions,
        cached_tokens,
        tables,
        pictures: &[],
        logit_rows: 1,
        repeated: 0,
        scored: 0..0,
        state: None,
    }
}

/// How a step refers to the tokens of the previous step.
#[derive(Clone, Copy)]
enum Named {
    /// By value, since the host has seen them.
    Seen,
    /// By their rows on the device, because the host reads tokens one step late.
    Unseen,
}

#[test]
fn graph_replies_match_launched_ones_whatever_the_padding() {
    let Some(stage) = Stage::set() else { return };
    assert_graphs_change_no_reply(&stage);
}

#[test]
fn graph_replies_match_launched_ones_with_fp8_keys_and_values() {
    let Some(stage) = Stage::cached(CacheFormat::Fp8) else { return };
    assert_graphs_change_no_reply(&stage);
}

/// The number of rows and the length of contexts determine how attention splits its sums. Keys of
/// more than eight blocks are split in steps of 9 to 22 rows, but not in a step of 24 rows, which
/// has more warps.
#[test]
fn a_7b_shaped_reply_is_the_same_with_and_without_graphs() {
    let weights = random_checkpoint("qwen2.5-vl-7b", 7).expect("the shape is known");
    let shape = GraphLimits::without_drafts(24, 320, FORMAT);
    let source = CheckpointSource::Random(Arc::new(weights));
    let Some(stage) = Stage::of(source, CacheFormat::Plain, shape, 1) else { return };
    assert_graphs_change_no_reply(&stage);
}

/// The padding rows of a graph have no state.
#[test]
fn the_states_of_a_hybrid_are_the_same_with_and_without_graphs() {
    let weights = random_checkpoint("qwen3.5-0.8b", 7).expect("the shape is known");
    let format = StepFormat { has_states: true, ..FORMAT };
    let shape = GraphLimits::without_drafts(11, 180, format);
    let source = CheckpointSource::Random(Arc::new(weights));
    let Some(stage) = Stage::of(source, CacheFormat::Plain, shape, 1) else { return };
    assert_graphs_change_no_reply(&stage);
}

/// Two of four layers have a window of 23 tokens, which prompts and replies exceed.
#[test]
fn windowed_layers_reply_the_same_with_and_without_graphs() {
    let source = || CheckpointSource::Folder(bursar_golden::path("qwen2_windowed"));
    let format = StepFormat { groups: 2, ..StepFormat::TEXT };
    let shape = GraphLimits::without_drafts(11, 180, format);
    for cache in [CacheFormat::Plain, CacheFormat::Fp8] {
        let Some(stage) = Stage::of(source(), cache, shape, 1) else { return };
        assert_graphs_change_no_reply(&stage);
    }
}

/// Checks that replies with graphs equal replies without graphs, for every number of sequences.
fn assert_graphs_change_no_reply(stage: &Stage) {
    let taken = stage.capture();
    println!("{} sizes take {taken}", stage.shape.sizes().len());
    let all = 1..=stage.shape.decode_rows;
    let by_graphs: Vec<_> = all.clone().map(|n| stage.replies(&stage.plain(n), STEPS, 0, Named::Unseen)).collect();
    stage.forget(&stage.shape.sizes());
    let mut differ = Vec::new();
    for (sequences, (graphs, replayed)) in all.zip(by_graphs) {
        assert_eq!(replayed, STEPS, "every step except the prompt steps replays a graph");
        let (eager, replayed) = stage.replies(&stage.plain(sequences), STEPS, 0, Named::Seen);
        assert_eq!(replayed, 0, "no step replays a graph");
        differ.extend((graphs != eager).then_some(sequences));
        let ids = |reply: &Vec<Token>| reply.iter().map(|token| token.id).collect::<Vec<_>>();
        let distinct: BTreeSet<_> = graphs.iter().map(ids).collect();
        assert!(distinct.len() > sequences / 2, "the replies are too similar to compare: {graphs:?}");
    }
    assert!(differ.is_empty(), "with graphs these replies differ: {differ:?}");
}

#[test]
fn a_step_without_its_size_captured_never_takes_a_larger_graph() {
    let Some(stage) = Stage::set() else { return };
    stage.capture();
    let reply = |sequences| stage.replies(&stage.plain(sequences), STEPS, 0, Named::Unseen);
    let [(three, of_four), (five, of_eight)] = [3, 5].map(reply);
    assert_eq!((of_four, of_eight), (STEPS, STEPS), "graphs of four and eight rows replay every step");
    stage.forget(&[GraphKey::decode(4)]);
    assert_eq!([3, 5].map(reply), [(three, 0), (five, STEPS)]);
}

#[test]
fn graphs_and_single_launches_draw_alike_with_equal_seeds() {
    let Some(stage) = Stage::set() else { return };
    stage.capture();
    let all = 1..=stage.shape.decode_rows;
    let by_graphs: Vec<_> = all.clone().map(|n| stage.replies(&stage.samplers(n), STEPS, 0, Named::Unseen)).collect();
    for (sequences, (graphs, replayed)) in all.clone().zip(&by_graphs) {
        assert_eq!(*replayed, STEPS, "every step except the prompt steps replays a graph");
        let (seen, replayed) = stage.replies(&stage.samplers(sequences), STEPS, 0, Named::Seen);
        assert_eq!((&seen, replayed), (graphs, STEPS), "{sequences} sequences, each token seen before the next step");
    }
    stage.forget(&stage.shape.sizes());
    for (sequences, (graphs, _)) in all.zip(by_graphs) {
        let (eager, replayed) = stage.replies(&stage.samplers(sequences), STEPS, 0, Named::Unseen);
        assert_eq!(replayed, 0, "no step replays a graph");
        assert_eq!(graphs, eager, "{sequences} sequences: graphs and eager steps give the same replies");
        let (plain, _) = stage.replies(&stage.plain(sequences), STEPS, 0, Named::Unseen);
        assert_ne!(plain[0], graphs[0], "sampling must not always choose the most likely token");
    }
}

#[test]
fn graphs_draw_tokens_as_often_as_their_probabilities_say() {
    let Some(stage) = Stage::set() else { return };
    stage.capture();
    let (mut surplus, mut variance, mut drawn) = (0.0, 0.0, 0);
    for round in 0..20 {
        let sampler = |sequence: u64| {
            let params = SamplingParams { temperature: 1.0, seed: 100 * round + sequence, ..SamplingParams::default() };
            let sampler = Sampler::new(params, stage.vocabulary).and_then(|sampler| sampler.with_log_probabilities(1));
            Arc::new(sampler.expect("the parameters are valid"))
        };
        // Eleven sequences fill their graph. Nine sequences use the same graph, with
        // two rows of padding.
        let samplers: Vec<_> = (0..if round % 2 == 0 { 11 } else { 9 }).map(sampler).collect();
        let (replies, replayed) = stage.replies(&samplers, 60, 0, Named::Unseen);
        assert_eq!(replayed, 60);
        for token in replies.iter().flatten() {
            let reported = token.log_probabilities.as_ref().expect("the log probabilities were requested");
            let likeliest = reported.top[0];
            let probability = f64::from(likeliest.log_probability).exp();
            surplus += f64::from(u8::from(token.id == likeliest.id)) - probability;
            variance += probability * (1.0 - probability);
            drawn += 1;
        }
    }
    println!(
        "{drawn} draws, {surplus:.1} more of the likeliest token than expected, standard deviation {:.1}",
        variance.sqrt()
    );
    assert!(variance > 100.0, "the likeliest token is almost certain: variance {variance} of {drawn} draws");
    assert!(
        surplus.abs() < 5.0 * variance.sqrt(),
        "a surplus of {surplus} in {drawn} draws, with a variance of {variance}"
    );
}

#[test]
fn graphs_survive_resizing_and_replays_allocate_nothing() {
    for cache in [CacheFormat::Plain, CacheFormat::Fp8] {
        let Some(stage) = Stage::cached(cache) else { return };
        assert_graphs_survive_resizing(&stage);
    }
}

fn assert_graphs_survive_resizing(stage: &Stage) {
    let least = stage.memory.kv.blocks();
    stage.capture();
    for samplers in [stage.plain(5), stage.samplers(5)] {
        let (first, _) = stage.replies(&samplers, 30, 0, Named::Unseen);
        stage.memory.kv.grow_to(GROWTH * least).expect("memory");
        let (free, counts) =
            (stage.device.memory().expect("the device reports its memory").free, stage.device.counts());
        let (grown, replayed) = stage.replies(&samplers, 30, (GROWTH - 1) * least, Named::Unseen);
        assert_eq!((&grown, replayed), (&first, 30), "a graph works in blocks that were added after its capture");
        assert_eq!(stage.device.counts(), counts);
        assert_eq!(stage.device.memory().expect("the device reports its memory").free, free);
        stage.memory.kv.shrink_to(least, &stage.device.fence_here()).expect("the blocks of the tail are free");
        let (shrunk, replayed) = stage.replies(&samplers, 30, 0, Named::Unseen);
        assert_eq!((&shrunk, replayed), (&first, 30));
        assert!(
            stage.memory.kv.blocks() == least
                && stage.device.memory().expect("the device reports its memory").free > free
        );
    }
}

#[test]
fn decoding_can_be_captured_again_between_two_steps() {
    let Some(stage) = Stage::set() else { return };
    stage.capture();
    for samplers in [stage.plain(4), stage.samplers(4)] {
        let undisturbed = stage.replies(&samplers, 20, 0, Named::Unseen);
        assert_eq!(undisturbed.1, 20);
        let (free, counts) =
            (stage.device.memory().expect("the device reports its memory").free, stage.device.counts());
        let (again, captured) = std::thread::scope(|threads| {
            // The lane's queue is short, so captures run between steps and not after all steps.
            let captures = threads.spawn(|| (0..3).map(|_| stage.capture()).collect::<Vec<_>>());
            let replies: Vec<_> = (0..20).map(|_| stage.replies(&samplers, 20, 0, Named::Unseen)).collect();
            let captured: Bytes = captures.join().expect("the graphs are captured").into_iter().sum();
            (replies, captured)
        });
        for reply in again {
            assert_eq!(reply, undisturbed);
        }
        // Each size takes two graphs, and their memory is reported. Nothing is backed
        // or page-locked for graphs.
        let allocations = counts.allocations + 3 * 2 * stage.shape.sizes().len() as u64;
        assert_eq!(stage.device.counts(), CudaCounts { allocations, ..counts });
        let left = stage.device.memory().expect("the device reports its memory").free;
        assert!(left + captured >= free, "{left} are left of {free}, and only {captured} were reported");
    }
}
