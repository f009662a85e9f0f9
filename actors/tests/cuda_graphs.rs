//! Decoding by captured graphs on a GPU gives what it gives launch by launch. Without a GPU each test says so and ends.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, sync_channel},
    },
};

use bursar_actors::{
    graph::GraphShape,
    lane::{Answer, Bench, CaptureJob, Choice, Job, Lane, LaneError, StepJob, Stepped},
    memory::{ChosenTokens, EngineMemory, EngineParts, GraphInputs, KvMemory},
};
use bursar_budgets::*;
use bursar_kernels::{BLOCK_TOKENS, BlasSearch, Cuda, CudaKernels, CudaTarget, ops::embed::PREVIOUS};
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource},
    flow::{SequencePart, StepBatch},
    sampling::{Sampler, SamplingParams},
};

/// A test's turn on the GPU, which all share.
type Turn = MutexGuard<'static, ()>;

struct Nobody;

impl ReleaseNotes for Nobody {
    fn post(&self, _: ReleaseNote) {}
}

/// A lane with the demo model on a GPU.
struct Stage {
    lane: Lane,
    device: Arc<CudaDevice>,
    memory: Arc<EngineMemory>,
    vocabulary: usize,
    _turn: Turn,
}

const SHAPE: GraphShape = GraphShape { sequences: 11, context_tokens: 150, axes: 3 };

/// Blocks that a sequence of that many tokens has.
const BLOCKS_EACH: usize = SHAPE.context_tokens.div_ceil(BLOCK_TOKENS);

const CAPACITY: Bytes = Bytes::gib(2);

impl Stage {
    /// With a cache of `blocks` blocks.
    fn set(blocks: usize) -> Option<Stage> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let cuda = match CudaDevice::open(0) {
            Ok(device) => Arc::new(device),
            Err(error @ DeviceError::NoDevice { .. }) => {
                println!("skipped, {error}; {}", error.hint().expect("there is something to do"));
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        // Where it is, the tests' machine says; this is the one place below `main` that asks.
        #[expect(clippy::disallowed_methods, reason = "a test is its own program")]
        let folder = std::env::var("BURSAR_CUDA_LIB");
        let usual = BlasSearch::usual();
        let search = folder.map_or(usual.clone(), |folder| usual.first_in(folder));
        let target = CudaTarget::of(&cuda).expect("it says what it is");
        let kernels = CudaKernels::load(&cuda, target, &search).expect("its kernels load");
        let device: Arc<dyn Device> = cuda.clone();
        let ledger = Mutex::new(Ledger::new(LedgerConfig::new(CAPACITY)));
        let asked = AtomicU64::new(0);
        let lease = |class, bytes: Bytes| {
            let id = RequestId(asked.fetch_add(1, Ordering::Relaxed));
            let request = Request::new(Owner::new("story", 0), class, "model", bytes);
            let effects = ledger.lock().expect("one thread").step(Input::Ask { id, request, wait: false });
            let [Effect::Granted(grant)] = &effects[..] else { panic!("{effects:?}") };
            Lease::issue(grant, Arc::new(Nobody))
        };
        let segment = |class, bytes: Bytes| {
            let bytes = bytes.round_up(device.page());
            let segment = Segment::reserve(device.clone(), bytes, lease(class, bytes)).expect("addresses");
            segment.back_to(bytes).expect("memory");
            segment
        };
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/demo/checkpoint");
        let checkpoint = Checkpoint::open(CheckpointSource::Folder(folder)).expect("it opens");
        let bytes = Model::plan(&checkpoint, &kernels.target()).expect("it can be planned").weight_bytes();
        let backend = Cuda::new(&kernels).expect("a stream");
        let model = Model::load(&checkpoint, &backend, segment(Class::Weights, bytes), |_, _| {}).expect("it loads");
        let kv_shape = model.kv_shape(&kernels.target());
        // Room for any growth.
        let reserved = 100 * SHAPE.sequences * BLOCKS_EACH;
        let kv_lease = lease(Class::Kv, KvMemory::bytes(kv_shape, reserved, device.page()));
        let kv = KvMemory::reserve(&device, kv_shape, reserved, Arc::new(kv_lease)).expect("addresses");
        kv.grow_to(blocks).expect("memory");
        let workspace = Arc::new(segment(Class::StepWorkspace, Bytes::mib(128)));
        let memory = Arc::new(EngineMemory::new(EngineParts {
            step_workspace: workspace.clone(),
            chosen: ChosenTokens::over(segment(Class::StepWorkspace, Bytes::kib(1)), SHAPE.sequences),
            vision_workspace: None,
            vision_cache: None,
            kv,
            graphs: Some(GraphInputs::over(segment(Class::Graphs, SHAPE.bytes(device.page())), SHAPE)),
        }));
        let vocabulary = model.config().decoder().vocabulary;
        assert_eq!(model.config().decoder().rope_sections.len(), SHAPE.axes);
        let bench = Bench::new(backend, workspace, Arc::new(model), memory.clone());
        let lane = Lane::start("gpu", bench, device.timeline());
        Some(Stage { lane, device: cuda, memory, vocabulary, _turn: turn })
    }

    /// Captures every bucket; gives what that took.
    fn capture(&self) -> Bytes {
        let captured = SHAPE.buckets().into_iter().map(|rows| {
            let (give, answer) = sync_channel(1);
            let answer_to = Answer::to(move |outcome| drop(give.send(outcome)));
            self.lane.submit(Job::Capture(CaptureJob { rows, answer: answer_to }));
            let outcome: Result<Option<Bytes>, LaneError> = answer.recv().expect("each job is answered");
            outcome.expect("it is captured").expect("a GPU has graphs")
        });
        captured.sum()
    }

    fn submit(&self, parts: &[SequencePart<'_>], by: By) -> Receiver<Result<Stepped, LaneError>> {
        let sampler = Sampler::new(SamplingParams::default(), self.vocabulary).expect("within its limits");
        let sampler = Arc::new(match by {
            By::Device => sampler,
            // Only the host tells how likely a token was.
            By::Host => sampler.with_log_probabilities(0).expect("within its limits"),
        });
        let choices = parts.iter().map(|_| Choice { sampler: sampler.clone(), position: 0, past: None }).collect();
        let (give, answer) = sync_channel(1);
        let answer = (Answer::to(move |outcome| drop(give.send(outcome))), answer);
        let batch = StepBatch::pack(parts);
        let job = StepJob { batch, choices, scores: Vec::new(), pins: Vec::new(), answer: answer.0 };
        self.lane.submit(Job::Step(Box::new(job)));
        answer.1
    }

    /// Replies of `steps` tokens to as many prompts of different lengths, whose first block is `first_block`; and how many
    /// steps were run by a graph.
    fn replies(&self, sequences: usize, steps: usize, first_block: usize, by: By) -> (Vec<Vec<u32>>, usize) {
        let prompt =
            |sequence: usize| (0..5 + 9 * sequence as u32).map(|at| (at * 7 + sequence as u32) % 300).collect();
        let prompts: Vec<Vec<u32>> = (0..sequences).map(prompt).collect();
        let blocks: Vec<Vec<u32>> = (0..sequences)
            .map(|sequence| (0..BLOCKS_EACH).map(|at| (first_block + at * sequences + sequence) as u32).collect())
            .collect();
        let positions: Vec<Vec<[u32; 3]>> =
            prompts.iter().map(|prompt| (0..prompt.len() as u32).map(|at| [at; 3]).collect()).collect();
        let parts: Vec<_> =
            prompts.iter().zip(&positions).enumerate().map(|(s, (t, p))| part(t, p, 0, &blocks[s])).collect();
        let (mut replies, mut replayed) = (vec![Vec::new(); sequences], 0);
        let mut read = |answer: Receiver<Result<Stepped, LaneError>>| {
            let stepped = answer.recv().expect("each job is answered").expect("the step runs");
            replayed += usize::from(stepped.is_by_graph);
            let ids: Vec<u32> = stepped.chosen.iter().map(|token| token.as_ref().expect("a number").id).collect();
            replies.iter_mut().zip(&ids).for_each(|(reply, id)| reply.push(*id));
            ids
        };
        let mut before = self.submit(&parts, by);
        for step in 0..steps {
            // The device chooses and the host looks a step late, or the host chooses and names what it chose.
            let (tokens, late): (Vec<u32>, _) = match by {
                By::Device => ((0..sequences as u32).map(|row| PREVIOUS | row).collect(), Some(before)),
                By::Host => (read(before), None),
            };
            let at: Vec<_> = prompts.iter().map(|prompt| [[(prompt.len() + step) as u32; 3]]).collect();
            let parts: Vec<_> =
                (0..sequences).map(|s| part(&tokens[s..=s], &at[s], prompts[s].len() + step, &blocks[s])).collect();
            let next = self.submit(&parts, by);
            late.map(&mut read);
            before = next;
        }
        read(before);
        (replies, replayed)
    }
}

/// A sequence's share of a step, whose last token chooses the next.
fn part<'a>(tokens: &'a [u32], positions: &'a [[u32; 3]], cached_tokens: usize, blocks: &'a [u32]) -> SequencePart<'a> {
    SequencePart { tokens, positions, cached_tokens, blocks, pictures: &[], wants_logits: true, scored: 0..0 }
}

/// Who chooses tokens.
#[derive(Clone, Copy)]
enum By {
    Device,
    Host,
}

#[test]
fn a_reply_by_graphs_is_the_reply_launch_by_launch_however_many_rows_are_padding() {
    let Some(stage) = Stage::set(SHAPE.sequences * BLOCKS_EACH) else { return };
    let taken = stage.capture();
    println!("{} graphs take {taken}", SHAPE.buckets().len());
    for sequences in 1..=SHAPE.sequences {
        let (graphs, replayed) = stage.replies(sequences, 40, 0, By::Device);
        assert_eq!(replayed, 40, "every step but for the prompts");
        let (eager, replayed) = stage.replies(sequences, 40, 0, By::Host);
        assert_eq!(replayed, 0, "the host has chosen");
        assert_eq!(graphs, eager, "{sequences} sequences");
        let distinct: BTreeSet<_> = graphs.iter().collect();
        assert!(distinct.len() > sequences / 2, "replies that are alike could not be told apart: {graphs:?}");
    }
}

#[test]
fn graphs_outlive_growing_and_shrinking_and_replays_ask_the_driver_for_nothing() {
    let least = SHAPE.sequences * BLOCKS_EACH;
    let Some(stage) = Stage::set(least) else { return };
    stage.capture();
    let (first, _) = stage.replies(5, 30, 0, By::Device);
    stage.memory.kv.grow_to(100 * least).expect("memory");
    let (free, counts) = (stage.device.memory().expect("it says").free, stage.device.counts());
    let (grown, replayed) = stage.replies(5, 30, 99 * least, By::Device);
    assert_eq!((&grown, replayed), (&first, 30), "in blocks that were not there when it was captured");
    assert_eq!(stage.device.counts(), counts);
    assert_eq!(stage.device.memory().expect("it says").free, free);
    stage.memory.kv.shrink_to(least, &stage.device.fence_here()).expect("nothing uses the tail");
    let (shrunk, replayed) = stage.replies(5, 30, 0, By::Device);
    assert_eq!((&shrunk, replayed), (&first, 30));
    assert!(stage.memory.kv.blocks() == least && stage.device.memory().expect("it says").free > free);
}

#[test]
fn decoding_may_be_captured_again_between_two_steps_of_a_reply() {
    let Some(stage) = Stage::set(SHAPE.sequences * BLOCKS_EACH) else { return };
    stage.capture();
    let undisturbed = stage.replies(4, 20, 0, By::Device);
    assert_eq!(undisturbed.1, 20);
    let again = std::thread::scope(|threads| {
        // The queue is short, so that this comes between steps and not behind them.
        let captures = threads.spawn(|| (0..3).map(|_| stage.capture()).collect::<Vec<_>>());
        let replies: Vec<_> = (0..20).map(|_| stage.replies(4, 20, 0, By::Device)).collect();
        captures.join().expect("they are captured");
        replies
    });
    for reply in again {
        assert_eq!(reply, undisturbed);
    }
}
