//! Tests of the resources that the scheduler actor holds for its sequences, and of how long it
//! holds them.

use std::sync::mpsc::Receiver;

use bursar_budgets::Bytes;
use bursar_kernels::{BLOCK_TOKENS, InputToken, UnseenToken};
use bursar_model::{
    flow::{CacheGroups, ContentSpan, Grid, PictureHash, PrefixKeys},
    sampling::{Sampler, SamplingParams},
};

use super::*;
use crate::{
    scheduler::{Drafter, NewSequence, Placeholder, SchedulingParams},
    vision::{PinnedRows, VisionMessage},
};

/// A vision actor that only reports which pictures are released.
struct Gallery;

impl Actor for Gallery {
    type Msg = VisionMessage;
    type State = mpsc::Sender<Vec<PictureHash>>;
    type Arguments = Self::State;

    async fn pre_start(
        &self,
        _: ActorRef<VisionMessage>,
        unpinned: Self::State,
    ) -> Result<Self::State, ActorProcessingErr> {
        Ok(unpinned)
    }

    async fn handle(
        &self,
        _: ActorRef<VisionMessage>,
        message: VisionMessage,
        unpinned: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            VisionMessage::Unpin(keys) => Ok(unpinned.send(keys).await?),
            _ => unreachable!("the test sends no other message"),
        }
    }
}

const PICTURE: PictureHash = PictureHash([7; 32]);

/// A prompt of four tokens, two of which belong to a picture.
fn sequence(id: u64) -> NewSequence {
    let content = ContentSpan { tokens: 1..3, hash: PICTURE };
    NewSequence {
        id: SequenceId(id),
        tokens: vec![5; 4],
        positions: vec![[0; 3]; 4],
        next_position: 4,
        produced: 0,
        tokens_max: 8,
        pictures: vec![Placeholder { content, cache_rows: [0, 1].into() }],
        prefix: PrefixKeys::default(),
        scheduling_params: SchedulingParams::default(),
        group: None,
        score_prompt: None,
        stop_tokens: [].into(),
        sampler: Arc::new(Sampler::new(SamplingParams::default(), 100).expect("greedy")),
        prompt_read: [].into(),
        drafter: Drafter::None,
    }
}

async fn next_step(jobs: &Receiver<Job>) -> Box<StepJob> {
    loop {
        match jobs.try_recv() {
            Ok(Job::Step(step)) => return step,
            Ok(_) => unreachable!("a scheduler submits only steps"),
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

/// A scheduler with a lane whose jobs the test runs, and a vision actor that reports released
/// pictures.
struct Bed {
    scheduler: ActorRef<SchedulerMessage>,
    jobs: Receiver<Job>,
    unpinned: mpsc::Receiver<Vec<PictureHash>>,
    vision: ActorRef<VisionMessage>,
}

impl Bed {
    async fn new(blocks: usize) -> Bed {
        let (lane, jobs) = Lane::by_hand();
        let (unpins, unpinned) = mpsc::channel(8);
        let (vision, _) = Gallery::spawn(None, Gallery, unpins).await.expect("the actor starts");
        let model = Label::from("demo");
        let limits = Limits { sequences: 2, step_tokens: 8, draft_tokens: 0, kv_tokens: blocks * BLOCK_TOKENS };
        let arguments = SchedulerArguments {
            limits,
            cache_groups: CacheGroups::default(),
            lane,
            model,
            block_bytes: Bytes::kib(4),
            refused: Arc::new(|_| {}),
            pacing: Pacing::default(),
            tenant_weights: TenantWeights::default(),
            host_slots: 0,
            synthetic_acceptance: None,
            has_fixed_drafts: false,
            draft_head: None,
            whole_picture_tokens: 0,
            state_slots: 0,
            host_states: 0,
            state_bytes: Bytes::ZERO,
            demand: None,
            kv_use: watch::Sender::default(),
            block_log: Arc::default(),
        };
        let (scheduler, _) = SchedulerActor::spawn(None, SchedulerActor, arguments).await.expect("the actor starts");
        Bed { scheduler, jobs, unpinned, vision }
    }

    /// Admits a sequence that holds the picture. Returns the receiver of its deliveries.
    fn admit(&self, sequence: NewSequence) -> mpsc::Receiver<Delivery> {
        let picture = PinnedRows { key: PICTURE, grid: Grid { t: 1, h: 2, w: 4 }, rows: [0, 1].into() };
        let pins = Some(Arc::new(PinnedSet { pictures: vec![picture], vision: self.vision.clone() }));
        let (deliveries, delivered) = mpsc::channel(64);
        let admission = Admission { sequence, pins, deliveries, span: tracing::Span::none(), last_token: None };
        self.scheduler.send_message(SchedulerMessage::Admit(Box::new(admission))).expect("the actor is running");
        delivered
    }

    async fn holds_the_picture(&mut self) -> bool {
        // All actors share this thread, so these yields let each of them run.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        self.unpinned.try_recv().is_err()
    }
}

/// Ends the step, as if the device had executed it.
fn end(step: Box<StepJob>) {
    let token = || Ok(Token { id: 9, position: 0, log_probabilities: None });
    let chosen = step.choices.iter().map(|_| vec![token()]).collect();
    let StepJob { answer, pins, .. } = *step;
    answer.give(Ok(Stepped { chosen, drafts: Vec::new(), scores: Vec::new(), is_by_graph: false, imbalance: None }));
    drop(pins);
}

#[tokio::test]
async fn a_picture_is_released_after_the_last_step_that_reads_it() {
    let mut bed = Bed::new(4).await;
    let delivered = bed.admit(sequence(1));
    let step = next_step(&bed.jobs).await;
    assert_eq!(step.batch.picture_cache_rows, [0, 1], "the step reads the picture");
    let next = next_step(&bed.jobs).await;
    assert_eq!(
        (&next.batch.tokens[..], next.pins.len()),
        (&[InputToken::Unseen(UnseenToken { row: 0 })][..], 0),
        "the next step is prepared while the first runs"
    );
    assert!(bed.holds_the_picture().await, "the step still reads the picture");
    end(step);
    assert_eq!(bed.unpinned.recv().await, Some(vec![PICTURE]), "the rows are released while the sequence decodes");
    end(next);
    end(next_step(&bed.jobs).await);
    assert!(!delivered.is_closed(), "the reply continues");
}

#[tokio::test]
async fn a_cancelled_sequences_picture_is_held_during_its_last_step() {
    let mut bed = Bed::new(4).await;
    let mut delivered = bed.admit(sequence(1));
    let step = next_step(&bed.jobs).await;
    let next = next_step(&bed.jobs).await;
    assert_eq!(next.choices[0].position, 1);
    bed.scheduler.send_message(SchedulerMessage::Cancel(SequenceId(1))).expect("the actor is running");
    assert_eq!(delivered.recv().await, Some(Delivery::Begun(0)));
    assert_eq!(delivered.recv().await, None, "the stream ends at once");
    assert!(bed.holds_the_picture().await, "the step still reads the picture");
    end(step);
    assert_eq!(bed.unpinned.recv().await, Some(vec![PICTURE]));
    end(next);
}

#[tokio::test]
async fn a_sequence_preempted_after_its_pictures_can_be_readmitted() {
    // There are four blocks, and each of the two sequences needs three in the end. The younger
    // sequence is therefore preempted before it ends. Both are admitted because the previous reply
    // was short.
    let bed = Bed::new(4).await;
    let mut short = bed.admit(NewSequence { tokens_max: 1, ..sequence(1) });
    end(next_step(&bed.jobs).await);
    while short.recv().await.is_some() {}
    let long = |id| NewSequence { tokens_max: 40, ..sequence(id) };
    let mut older = bed.admit(long(2));
    let mut younger = bed.admit(long(3));
    let readmit = async {
        let mut recorded = Vec::new();
        while let Some(delivery) = younger.recv().await {
            recorded.push(delivery);
        }
        recorded
    };
    tokio::pin!(readmit);
    let recorded = loop {
        tokio::select! {
            biased;
            recorded = &mut readmit => break recorded,
            step = next_step(&bed.jobs) => end(step),
        }
    };
    assert_eq!(
        recorded.last(),
        Some(&Delivery::Readmit),
        "the last delivery asks the driver to admit the sequence again"
    );
    let tokens = recorded.iter().filter(|delivery| matches!(delivery, Delivery::Token(..))).count();
    assert!(tokens > 0, "the sequence had released its picture");
    // The driver admits the sequence again once the picture is back in the cache.
    let mut again = long(3);
    again.tokens.extend(vec![9; tokens]);
    again.positions.extend(vec![[0; 3]; tokens]);
    again.next_position += tokens as u32;
    again.produced = tokens;
    let mut younger = bed.admit(again);
    let mut more = 0;
    loop {
        tokio::select! {
            biased;
            delivery = younger.recv() => match delivery.expect("the sequence gets a delivery") {
                Delivery::Token(..) => more += 1,
                Delivery::Finished(_) => break,
                delivery => assert!(matches!(delivery, Delivery::Begun(_)), "{delivery:?}"),
            },
            step = next_step(&bed.jobs) => end(step),
        }
    }
    assert_eq!(tokens + more, 40, "no token is lost or generated twice");
    let mut of_older = 0;
    while let Ok(delivery) = older.try_recv() {
        of_older += usize::from(matches!(delivery, Delivery::Token(..)));
    }
    assert_eq!(of_older, 40);
}

#[tokio::test]
async fn a_pool_shrink_is_answered_after_running_steps_end() {
    let bed = Bed::new(8).await;
    let mut delivered = bed.admit(NewSequence { tokens_max: 40, ..sequence(1) });
    let (step, next) = (next_step(&bed.jobs).await, next_step(&bed.jobs).await);
    let (reply, mut answer) = crate::responder::Responder::new();
    bed.scheduler.send_message(SchedulerMessage::Resize { blocks: 4, reply }).expect("the actor is running");
    end(step);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(answer.try_recv().is_err(), "the resize waits, because a running step may use any block");
    assert!(bed.jobs.try_recv().is_err(), "no step is planned during the resize");
    end(next);
    answer.await.expect("the resize is answered");
    let mut tokens = 0;
    loop {
        tokio::select! {
            biased;
            delivery = delivered.recv() => match delivery.expect("the sequence gets a delivery") {
                Delivery::Token(..) => tokens += 1,
                Delivery::Finished(_) => break,
                delivery => assert!(matches!(delivery, Delivery::Begun(_)), "{delivery:?}"),
            },
            step = next_step(&bed.jobs) => {
                assert!(step.batch.block_tables.iter().all(|block| *block < 4), "only the first four blocks are used");
                end(step);
            }
        }
    }
    assert_eq!(tokens, 40);
}

#[tokio::test]
async fn a_schedulers_death_fails_a_pending_pool_resize_at_once() {
    let bed = Bed::new(8).await;
    let _delivered = bed.admit(sequence(1));
    let _under_way = next_step(&bed.jobs).await;
    let asked = crate::tree::RESIZE_POOL.ask(&bed.scheduler, |reply| SchedulerMessage::Resize { blocks: 4, reply });
    let dies = async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        bed.scheduler.kill_and_wait(None).await.expect("the actor ends");
    };
    let (answer, ()) = tokio::join!(asked, dies);
    assert!(matches!(answer, Err(crate::responder::AskError::Gone { .. })), "{answer:?}");
}
