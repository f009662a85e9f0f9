//! What the scheduler's shell holds for its sequences, and for how long.

use std::sync::mpsc::Receiver;

use bursar_kernels::ops::embed::PREVIOUS;
use bursar_model::{
    flow::{Grid, PictureContent, PictureHash, PrefixKeys},
    sampling::{Sampler, SamplingParams},
};

use super::*;
use crate::{
    kv::{KvActor, KvArguments},
    scheduler::{NewSequence, PicturePlace},
    vision::{PinnedPicture, VisionMessage},
};

/// A vision actor that only passes on which pictures are let go.
struct Gallery;

impl Actor for Gallery {
    type Msg = VisionMessage;
    type State = mpsc::Sender<Vec<[u8; 32]>>;
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
            _ => unreachable!("nothing else is sent here"),
        }
    }
}

const PICTURE: [u8; 32] = [7; 32];

/// A prompt of four tokens, two of which are a picture.
fn sequence(id: u64) -> NewSequence {
    let content = PictureContent { tokens: 1..3, hash: PictureHash(PICTURE) };
    NewSequence {
        id: SequenceId(id),
        tokens: vec![5; 4],
        positions: vec![[0; 3]; 4],
        next_position: 4,
        produced: 0,
        tokens_max: 8,
        pictures: vec![PicturePlace { content, cache_rows: [0, 1].into() }],
        prefix: PrefixKeys::default(),
        group: None,
        score_prompt: None,
        stop_tokens: [].into(),
        sampler: Arc::new(Sampler::new(SamplingParams::default(), 100).expect("greedy")),
        prompt_read: [].into(),
    }
}

async fn next_step(jobs: &Receiver<Job>) -> Box<StepJob> {
    loop {
        match jobs.try_recv() {
            Ok(Job::Step(step)) => return step,
            Ok(_) => unreachable!("a scheduler only steps"),
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

#[tokio::test]
async fn the_pictures_of_a_cancelled_sequence_stay_until_the_steps_that_it_is_in_have_ended() {
    let (lane, jobs) = Lane::by_hand();
    let (unpinned, mut unpins) = mpsc::channel(4);
    let (vision, _) = Gallery::spawn(None, Gallery, unpinned).await.expect("it starts");
    let model = Label::from("demo");
    let (kv, _) =
        KvActor::spawn(None, KvActor, KvArguments { blocks: 4, model: model.clone() }).await.expect("it starts");
    let limits = Limits { sequences: 2, step_tokens: 8, kv_tokens: 64 };
    let arguments = SchedulerArguments { limits, kv, lane, model };
    let (scheduler, _) = SchedulerActor::spawn(None, SchedulerActor, arguments).await.expect("it starts");

    let picture = PinnedPicture { key: PICTURE, grid: Grid { t: 1, h: 2, w: 4 }, rows: [0, 1].into() };
    let pins = Some(Arc::new(PinnedPictures { pictures: vec![picture], vision }));
    let (deliveries, mut delivered) = mpsc::channel(10);
    let admission = Admission { sequence: sequence(1), pins, deliveries };
    scheduler.send_message(SchedulerMessage::Admit(admission)).expect("it lives");
    let step = next_step(&jobs).await;
    assert_eq!(step.batch.picture_cache_rows, [0, 1], "the step reads the picture");
    let next = next_step(&jobs).await;
    assert_eq!(next.batch.tokens, [PREVIOUS], "the next is prepared while it runs");
    assert_eq!(next.choices[0].position, 1);

    scheduler.send_message(SchedulerMessage::Cancel(SequenceId(1))).expect("it lives");
    assert_eq!(delivered.recv().await, Some(Delivery::Found(0)));
    assert_eq!(delivered.recv().await, None, "the caller is let go at once");
    // All actors share this thread: each has had its turns.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(unpins.try_recv().is_err(), "the step reads the picture still");
    let end = |step: Box<StepJob>| {
        let token = Token { id: 9, position: 0, log_probabilities: None };
        let StepJob { answer, pins, .. } = *step;
        answer.give(Ok(Stepped { chosen: vec![Ok(token)], scores: Vec::new(), is_by_graph: false }));
        drop(pins);
    };
    end(step);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(unpins.try_recv().is_err(), "and the one behind it that was planned with it");
    end(next);
    assert_eq!(unpins.recv().await, Some(vec![PICTURE]), "and now the picture");
    scheduler.stop(None);
}
