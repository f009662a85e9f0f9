//! Stories of a lane on a device whose progress the story controls: which work starts while the
//! device is busy, when each request is answered, and which work a dying lane waits for.

mod drafted;
mod leased;
mod slow;

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
    compute::memory::{EngineBuffers, EngineMemory, GraphInputs, KvMemory, SamplingMemory},
};
use bursar_budgets::*;
use bursar_kernels::{Backend, Cpu, KernelError, UnseenToken};
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource},
    flow::{BlockTable, SequencePart, StepBatch, Token},
    sampling::{Past, Sampler, SamplerScratch, SamplingParams, SamplingShape, Score, log_probabilities},
};
use leased::Leased;
use slow::{Clock, Slow};

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(CheckpointSource::Folder(bursar_golden::path(name))).expect("the checkpoint opens")
}

/// A lane with a small model on a slow device.
struct Stage {
    lane: Lane,
    clock: Arc<Clock>,
    device: Arc<dyn Device>,
    vocabulary: usize,
}

const PROMPT: usize = 20;

/// Tokens of a sampled reply.
const DRAWN: usize = 12;

impl Stage {
    fn set() -> Stage {
        Stage::of(open("qwen2"), 4)
    }

    /// A stage with a model and this number of KV blocks.
    fn of(checkpoint: Checkpoint, blocks: usize) -> Stage {
        let capacity = Bytes::mib(96);
        let device: Arc<dyn Device> = Arc::new(HostDevice::new(HostConfig::small(capacity)).expect("host memory"));
        let leased = Leased::of(device.clone(), capacity);
        let cpu = Cpu::new(1);
        let bytes = Model::plan(&checkpoint, cpu.target()).expect("the model can be planned").weight_bytes();
        let model = Model::load(&checkpoint, &cpu, leased.segment(Class::Weights, bytes), |_, _| {
            std::ops::ControlFlow::Continue(())
        })
        .expect("the model loads");
        let shape = model.kv_shape(cpu.target());
        let kv_bytes = KvMemory::bytes(shape, blocks, device.page());
        let lease = Arc::new(leased.lease(Class::Kv, kv_bytes));
        let kv = KvMemory::reserve(&device, shape, blocks, lease).expect("addresses");
        kv.grow_to(blocks).expect("memory");
        let workspace = Arc::new(leased.segment(Class::StepWorkspace, Bytes::mib(8)));
        let format = model.config().decoder().step_format();
        let graphs = GraphLimits::without_drafts(4, 64, format);
        let vocabulary = model.config().decoder().vocabulary;
        let sampling_shape = SamplingShape { rows: 4, context_tokens: 64, vocabulary };
        let sampling_bytes = SamplingMemory::bytes(sampling_shape, device.page());
        let memory = EngineMemory::new(EngineBuffers {
            states: None,
            step_workspace: workspace.clone(),
            sampling: SamplingMemory::over(leased.segment(Class::StepWorkspace, sampling_bytes), sampling_shape),
            vision_workspace: None,
            exchange: None,
            vision_cache: None,
            host_kv: None,
            host_states: None,
            host_pictures: None,
            kv,
            graphs: Some(GraphInputs::over(leased.segment(Class::Graphs, graphs.bytes(device.page())), graphs)),
        });
        let clock = Arc::new(Clock::default());
        let runner = ModelRunner::new(Slow { cpu, clock: clock.clone() }, workspace, Arc::new(model), Arc::new(memory));
        Stage { lane: Lane::start("slow", runner, device.timeline()), clock, device, vocabulary }
    }

    fn sampler(&self, params: SamplingParams) -> Arc<Sampler> {
        Arc::new(Sampler::new(params, self.vocabulary).expect("parameters within their limits"))
    }

    /// Runs the next tokens of a sequence on the lane and takes the likeliest token. Returns the
    /// channel for the answer.
    fn step(&self, name: &'static str, tokens: &[u32], cached: usize) -> Receiver<Outcome> {
        self.choose(name, tokens, cached, self.plain_choice(cached + tokens.len()))
    }

    /// Like `step`, but reads the token that the running step chooses.
    fn step_ahead(&self, name: &'static str, cached: usize) -> Receiver<Outcome> {
        self.choose(name, &[], cached, self.plain_choice(cached + 1))
    }

    /// A choice of the likeliest token after this many tokens.
    fn plain_choice(&self, tokens: usize) -> Choice {
        let sampler = self.sampler(SamplingParams::default());
        Choice {
            sampler,
            position: (tokens - PROMPT) as u64,
            past: None,
            drafts: Vec::new(),
            acceptance: Acceptance::Equal,
            further: None,
        }
    }

    /// Submits a step with a choice. If `tokens` is empty, the step reads the token that
    /// the running step chooses.
    fn choose(&self, name: &'static str, tokens: &[u32], cached: usize, choice: Choice) -> Receiver<Outcome> {
        self.score(name, tokens, cached, choice, Vec::new())
    }

    /// Like `choose`, and also scores the token that follows each of
    /// the first `scores.len()` tokens.
    fn score(
        &self,
        name: &'static str,
        tokens: &[u32],
        cached: usize,
        choice: Choice,
        scores: Vec<Score>,
    ) -> Receiver<Outcome> {
        let unseen = tokens.is_empty().then_some(UNSEEN);
        let count = tokens.len().max(1);
        let positions: Vec<_> = (cached..cached + count).map(|position| [position as u32; 3]).collect();
        let part = SequencePart {
            tokens,
            unseen,
            positions: &positions,
            cached_tokens: cached,
            tables: &[vec![2, 1, 3].into()],
            pictures: &[],
            logit_rows: 1,
            repeated: 0,
            scored: 0..scores.len(),
            state: None,
        };
        self.submit(name, StepBatch::pack(&[part]), vec![choice], scores)
    }

    fn submit(
        &self,
        name: &'static str,
        batch: StepBatch,
        choices: Vec<Choice>,
        scores: Vec<Score>,
    ) -> Receiver<Outcome> {
        let (give, answer) = sync_channel(1);
        let clock = self.clock.clone();
        let answer_to = Answer::to(move |outcome: Outcome| {
            clock.note(format!("answer {name}"));
            drop(give.send(outcome));
        });
        let job = StepJob { batch, choices, scores, pins: Vec::new(), spans: Vec::new(), answer: answer_to };
        self.lane.submit(Job::Step(Box::new(job)));
        answer
    }

    fn prompt(&self, name: &'static str) -> Receiver<Outcome> {
        self.step(name, &(5..5 + PROMPT as u32).collect::<Vec<_>>(), 0)
    }

    /// A reply sampled with `sampler`. Each step is submitted after the answer to the previous
    /// step, or one step ahead.
    fn drawn(&self, sampler: &Arc<Sampler>, is_ahead: bool) -> Vec<Token> {
        let prompt: Vec<u32> = (5..5 + PROMPT as u32).collect();
        let mut fed = prompt.clone();
        // The tokens of the reply that the host has seen, and the answers that it has not read.
        let (mut seen, mut answers) = (Vec::<Token>::new(), Vec::new());
        for position in 0..DRAWN {
            let unseen = (is_ahead && position > 0).then_some(UNSEEN);
            let produced = seen.iter().map(|token| token.id).collect();
            let past = sampler.reads_past().then(|| PastTokens { prompt: sampler.read_of(&prompt), produced, unseen });
            let choice = Choice {
                sampler: sampler.clone(),
                position: position as u64,
                past,
                drafts: Vec::new(),
                acceptance: Acceptance::Equal,
                further: None,
            };
            let cached = if position == 0 { 0 } else { PROMPT + position - 1 };
            answers.push(self.choose("drawn", &fed, cached, choice));
            if !is_ahead || position > 0 {
                seen.push(token(&answers.remove(0)));
            }
            fed = if is_ahead { Vec::new() } else { vec![seen[position].id] };
        }
        seen.extend(answers.iter().map(token));
        seen
    }

    /// A greedy reply. Each step is submitted after the answer to the previous step, or all steps
    /// are submitted at once.
    fn reply(&self, is_ahead: bool) -> Vec<u32> {
        let mut answers = vec![self.prompt("prompt")];
        let mut reply = Vec::new();
        for cached in PROMPT..PROMPT + 3 {
            let next = (!is_ahead).then(|| chosen(&answers.remove(0)));
            reply.extend(next);
            answers.push(self.step("step", next.as_slice(), cached));
        }
        reply.extend(answers.iter().map(chosen));
        reply
    }
}

/// The token that the running step chooses in its first row.
const UNSEEN: UnseenToken = UnseenToken { row: 0 };

type Outcome = Result<Stepped, LaneError>;

fn token(answer: &Receiver<Outcome>) -> Token {
    let mut stepped = answer.recv().expect("each job is answered").expect("the step runs");
    stepped.chosen.remove(0).remove(0).expect("a number")
}

fn chosen(answer: &Receiver<Outcome>) -> u32 {
    token(answer).id
}

const ALL: usize = usize::MAX;

#[test]
fn a_lane_begins_one_step_ahead_and_no_more() {
    let stage = Stage::set();
    let answers = [stage.prompt("A"), stage.step_ahead("B", PROMPT), stage.step_ahead("C", PROMPT + 1)];
    stage.clock.launched(2);
    let behind_both = stage.device.fence_here();
    assert_eq!(stage.clock.log(), ["launch 0", "launch 1"], "no job is answered, and no third launch begins");
    stage.clock.let_past(1);
    stage.clock.launched(3);
    assert_eq!(stage.clock.log(), ["launch 0", "launch 1", "answer A", "launch 2"]);
    assert!(!behind_both.is_passed(), "the second launch is still running");
    stage.clock.let_past(ALL);
    let tokens: Vec<_> = answers.iter().map(chosen).collect();
    assert!(behind_both.is_passed());
    assert_eq!(stage.clock.log()[4..], ["answer B", "answer C"]);
    assert_eq!(tokens, stage.reply(false)[..3], "the tokens are the same as if the host had seen each one");
}

#[test]
fn a_reply_does_not_depend_on_look_ahead() {
    let stage = Stage::set();
    stage.clock.let_past(ALL);
    let seen = stage.reply(false);
    assert_eq!(seen.len(), 4);
    assert_eq!(seen, stage.reply(true));
}

#[test]
fn a_device_done_at_launch_is_answered_at_once() {
    let stage = Stage::set();
    stage.clock.let_past(ALL);
    [stage.prompt("A"), stage.step_ahead("B", PROMPT)].iter().for_each(|answer| _ = chosen(answer));
    assert_eq!(
        stage.clock.log(),
        ["launch 0", "answer A", "launch 1", "answer B"],
        "each answer is sent before the next launch"
    );
}

#[test]
fn a_sampling_step_is_followed_like_any_other() {
    let stage = Stage::set();
    let sampler = stage.sampler(SamplingParams { temperature: 1.0, seed: 7, ..SamplingParams::default() });
    let prompt = (5..5 + PROMPT as u32).collect::<Vec<_>>();
    let drawn = stage.choose(
        "A",
        &prompt,
        0,
        Choice { sampler, position: 0, past: None, drafts: Vec::new(), acceptance: Acceptance::Equal, further: None },
    );
    let next = stage.step_ahead("B", PROMPT);
    stage.clock.launched(2);
    stage.clock.let_past(ALL);
    assert!([drawn, next].iter().all(|answer| (chosen(answer) as usize) < stage.vocabulary));
    assert_eq!(stage.clock.log(), ["launch 0", "launch 1", "answer A", "answer B"]);
}

#[test]
fn three_rows_padded_to_four_draw_what_each_draws_alone() {
    let stage = Stage::set();
    stage.clock.let_past(ALL);
    let drawn = |sequences: std::ops::Range<u32>| -> Vec<u32> {
        let tokens: Vec<_> = sequences.clone().map(|sequence| [5 + 7 * sequence]).collect();
        let tables: Vec<[BlockTable; 1]> = sequences.clone().map(|sequence| [vec![sequence].into()]).collect();
        let parts = tokens.iter().zip(&tables).map(|(tokens, tables)| SequencePart {
            tokens,
            unseen: None,
            positions: &[[0; 3]],
            cached_tokens: 0,
            tables,
            pictures: &[],
            logit_rows: 1,
            repeated: 0,
            scored: 0..0,
            state: None,
        });
        let choices = sequences.map(|seed| {
            let params = SamplingParams { temperature: 1.3, seed: seed.into(), ..SamplingParams::default() };
            Choice {
                sampler: stage.sampler(params),
                position: 0,
                past: None,
                drafts: Vec::new(),
                acceptance: Acceptance::Equal,
                further: None,
            }
        });
        let answer = stage.submit("drawn", StepBatch::pack(&parts.collect::<Vec<_>>()), choices.collect(), Vec::new());
        let stepped = answer.recv().expect("each job is answered").expect("the step runs");
        assert!(!stepped.is_by_graph, "the step ran without a graph");
        stepped.chosen.into_iter().flatten().map(|token| token.expect("a number").id).collect()
    };
    let alone: Vec<_> = (0..3).flat_map(|sequence| drawn(sequence..sequence + 1)).collect();
    assert_eq!(alone.iter().collect::<BTreeSet<_>>().len(), 3, "the rows differ, so swapped rows would be detected");
    assert_eq!(drawn(0..3), alone);
    let logits = &stage.clock.state.lock().expect("the lock is not poisoned").logits;
    let rows: Vec<_> = logits.iter().map(|logits| logits.len() / stage.vocabulary).collect();
    assert_eq!(rows, [1, 1, 1, 4]);
}

#[test]
fn prompt_scores_in_followed_steps_match_the_hosts() {
    let stage = Stage::set();
    let prompt: Vec<u32> = (5..5 + PROMPT as u32).collect();
    let unknown = stage.vocabulary as u32;
    let followed = prompt[1..].iter().chain([&unknown]).zip((0..=3).cycle());
    let wanted: Vec<Score> = followed.map(|(&token, top)| Score { token, top }).collect();
    let choice = Choice {
        sampler: stage.sampler(SamplingParams::default()),
        position: 0,
        past: None,
        drafts: Vec::new(),
        acceptance: Acceptance::Equal,
        further: None,
    };
    let scored = stage.score("A", &prompt, 0, choice, wanted.clone());
    let next = stage.step_ahead("B", PROMPT);
    // The first step downloads its scores and its token, and the second step its token.
    stage.clock.launched(3);
    assert_eq!(stage.clock.log(), ["launch 0", "launch 1", "launch 2"], "no launch waits for scores");
    let logits = stage.clock.state.lock().expect("the lock is not poisoned").logits.concat();
    stage.clock.let_past(ALL);
    let stepped = scored.recv().expect("each job is answered").expect("the step runs");
    let host = logits.chunks(stage.vocabulary).zip(&wanted).map(|(row, score)| {
        log_probabilities(row, score.token, score.top).ok() // `None` for an unknown token
    });
    assert_eq!(stepped.scores, host.collect::<Vec<_>>());
    assert_eq!(stepped.scores.iter().position(Option::is_none), Some(PROMPT - 1));
    assert!((chosen(&next) as usize) < stage.vocabulary);
}

/// Samplers with different settings.
fn samplers(stage: &Stage) -> Vec<Arc<Sampler>> {
    let warm = || SamplingParams { temperature: 1.3, seed: 11, ..SamplingParams::default() };
    let all = SamplingParams {
        top_k: 40,
        top_p: 0.95,
        min_p: 1e-4,
        repetition_penalty: 1.4,
        presence_penalty: 0.5,
        frequency_penalty: 0.5,
        logit_bias: [(3, 4.0), (7, -100.0)].into(),
        ..warm()
    };
    let reported = Sampler::new(all.clone(), stage.vocabulary).and_then(|sampler| sampler.with_log_probabilities(5));
    let long = Sampler::new(warm(), stage.vocabulary).and_then(|sampler| sampler.with_tokens_min(9, [1, 2].into()));
    vec![
        stage.sampler(warm()),
        // Greedy, with a penalty that counts the tokens of the reply.
        stage.sampler(SamplingParams { temperature: 0.0, frequency_penalty: 2.0, ..warm() }),
        stage.sampler(all),
        Arc::new(reported.expect("the number of log probabilities is within the limit")),
        Arc::new(long.expect("the end tokens are few enough")),
    ]
}

#[test]
fn the_device_draws_what_the_host_draws_from_the_same_logits() {
    let stage = Stage::set();
    stage.clock.let_past(ALL);
    let prompt: Vec<u32> = (5..5 + PROMPT as u32).collect();
    for sampler in samplers(&stage) {
        stage.clock.state.lock().expect("the lock is not poisoned").logits.clear();
        let drawn = stage.drawn(&sampler, true);
        let logits = stage.clock.state.lock().expect("the lock is not poisoned").logits.clone();
        assert_eq!((drawn.len(), logits.len()), (DRAWN, DRAWN));
        let (mut produced, mut scratch) = (Vec::new(), SamplerScratch::default());
        for (token, logits) in drawn.iter().zip(&logits) {
            let expected = sampler.sample(logits, Past::new(&prompt, &produced), &mut scratch).expect("a number");
            assert_eq!(*token, expected, "{:?}", sampler.params());
            produced.push(token.id);
        }
    }
}

#[test]
fn a_sampled_reply_does_not_depend_on_look_ahead() {
    let stage = Stage::set();
    stage.clock.let_past(ALL);
    let replies: Vec<_> =
        samplers(&stage).iter().map(|sampler| (stage.drawn(sampler, false), sampler.clone())).collect();
    for (seen, sampler) in &replies {
        assert_eq!(*seen, stage.drawn(sampler, true), "{:?}", sampler.params());
        let positions: Vec<u64> = seen.iter().map(|token| token.position).collect();
        assert_eq!(positions, (0..DRAWN as u64).collect::<Vec<_>>());
    }
    // If penalties saw no tokens, these replies would be equal.
    let ids = |reply: &[Token]| reply.iter().map(|token| token.id).collect::<Vec<_>>();
    let greedy = stage.drawn(&stage.sampler(SamplingParams::default()), true);
    assert_ne!(ids(&replies[1].0), ids(&greedy));
    assert_ne!(ids(&replies[0].0), ids(&replies[2].0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dying_lanes_device_work_ends_before_its_death_is_reported() {
    let stage = Stage::set();
    let begun = stage.prompt("A");
    stage.clock.launched(1);
    let behind = stage.device.fence_here();
    stage.lane.submit(Job::Die);
    // The dying lane asks the device whether all its work is done.
    stage.clock.until(|state| state.waits > 0);
    assert!(stage.lane.is_alive() && !behind.is_passed() && begun.try_recv().is_err());
    stage.clock.let_past(ALL);
    assert!(matches!(begun.recv().expect("the job is answered"), Err(LaneError::Gone)));
    stage.lane.ended().await;
    assert!(behind.is_passed(), "every fence passes when the lane ends");
    assert!(matches!(stage.prompt("B").recv().expect("the job is answered"), Err(LaneError::Gone)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_shutting_down_finishes_begun_jobs_and_fails_queued_ones() {
    let stage = Stage::set();
    let begun = [stage.prompt("A"), stage.step_ahead("B", PROMPT)];
    let behind = stage.step_ahead("C", PROMPT + 1);
    stage.clock.launched(2);
    let mut shut_down = Box::pin(stage.lane.shut_down());
    assert!(still_waits(&mut shut_down).await);
    stage.clock.let_past(ALL);
    shut_down.await;
    begun.iter().for_each(|answer| _ = chosen(answer));
    assert!(matches!(behind.recv().expect("the job is answered"), Err(LaneError::Gone)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_is_idle_after_its_last_begun_step_is_answered() {
    let stage = Stage::set();
    let answers = [stage.prompt("A"), stage.step_ahead("B", PROMPT)];
    stage.clock.launched(2);
    let mut idle = Box::pin(stage.lane.idle());
    stage.clock.let_past(1);
    chosen(&answers[0]);
    assert!(still_waits(&mut idle).await, "the second launch is running");
    stage.clock.let_past(ALL);
    idle.await;
    assert!(answers[1].try_recv().is_ok());
}

#[test]
fn a_failed_job_ends_after_the_device_finishes_its_launches() {
    let stage = Stage::set();
    stage.clock.refuse_next();
    let failed = stage.prompt("A");
    stage.clock.until(|state| state.waits > 0 || state.log.len() > 1);
    let behind = stage.device.fence_here();
    assert_eq!(stage.clock.log(), ["launch 0"], "the failed job is not answered, and its memory is kept");
    assert!(!behind.is_passed() && failed.try_recv().is_err());
    stage.clock.let_past(ALL);
    let error = failed.recv().expect("the job is answered").expect_err("the step failed");
    assert!(matches!(error, LaneError::Kernel(KernelError::Device(DeviceError::HostRefused { .. }))), "{error}");
    assert!(behind.is_passed());
    chosen(&stage.prompt("B"));
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_an_idle_lane_ignores_captures() {
    let stage = Stage::set();
    let (give, captured) = sync_channel(1);
    let answer = Answer::to(move |outcome: Result<Option<Bytes>, LaneError>| drop(give.send(outcome)));
    stage.lane.submit(Job::Capture(CaptureJob { size: GraphKey::decode(2), answer }));
    stage.clock.until(|state| !state.log.is_empty());
    let mut idle = Box::pin(stage.lane.idle());
    assert!(!still_waits(&mut idle).await, "the lane counts as idle during a capture");
    let step = stage.prompt("A");
    let mut idle = Box::pin(stage.lane.idle());
    assert!(still_waits(&mut idle).await, "the step has not ended");
    stage.clock.let_past(ALL);
    idle.await;
    assert_eq!(captured.try_recv().expect("the capture was answered first").expect("the capture does not fail"), None);
    assert!(step.try_recv().is_ok());
    assert_eq!(stage.clock.log(), ["capture", "launch 0", "answer A"]);
}

/// Whether the future is still pending.
async fn still_waits(future: &mut (impl Future<Output = ()> + Unpin)) -> bool {
    std::future::poll_fn(|context| std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(context).is_pending()))
        .await
}
