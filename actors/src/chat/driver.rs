//! The driver of one request: pictures, sequence, text, end. It outlives the actors it works with.

use std::sync::Arc;

use bursar_model::{
    flow::POSITION_AXES,
    text::{Detokenizer, StopFilter},
};
use tokio::sync::mpsc;

use super::{ChatError, ChatEvent, FinishReason, ModelHandle, Usage, preparation::Preparation};
use crate::{
    credit::Credit,
    engine::{Kit, Serving},
    kv::SequenceId,
    scheduler::{Admission, Delivery, Finish, NewSequence, PicturePlace, SchedulerMessage},
    tree,
    vision::{PinnedPictures, VisionMessage},
};

/// Deaths under one request after which it is given up: it may well be what kills them, and the model's own patience
/// (`Intensity`, five restarts a minute) is for all requests together.
const DEATHS_MAX: u32 = 2;

/// One request under way.
pub(super) struct Driver {
    model: ModelHandle,
    preparation: Preparation,
    events: mpsc::Sender<Result<ChatEvent, ChatError>>,
    /// Tokens so far. They survive every actor.
    produced: Vec<u32>,
    detokenizer: Detokenizer,
    filter: StopFilter,
    text: String,
}

/// How one life of the request ended.
enum Life {
    /// By itself.
    Finished(FinishReason),
    /// The caller has gone.
    Cancelled,
    /// Actors died under it.
    Lost,
}

impl Driver {
    pub(super) fn new(
        model: ModelHandle,
        kit: Arc<Kit>,
        preparation: Preparation,
        events: mpsc::Sender<Result<ChatEvent, ChatError>>,
    ) -> Self {
        Driver {
            model,
            detokenizer: Detokenizer::new(kit.prompts.tokenizer().clone(), true),
            filter: preparation.stop.filter(),
            preparation,
            events,
            produced: Vec::new(),
            text: String::new(),
        }
    }

    /// Runs the request to its one end. The credit is free again before the caller can hear of that end: whoever asks
    /// one question after the other never finds the door shut.
    pub(super) async fn run(mut self, credit: Credit) {
        let outcome = self.lives().await;
        let end = match outcome {
            Ok(None) => return,
            Ok(Some(finish_reason)) => self.finish(finish_reason).await,
            Err(error) => Err(error),
        };
        // A caller that has gone does not wait for the end.
        if let Ok(place) = self.events.reserve().await {
            drop(credit);
            place.send(end);
        }
    }

    /// Lives until it ends by itself; none if the caller has gone.
    async fn lives(&mut self) -> Result<Option<FinishReason>, ChatError> {
        let mut generation = 0;
        for _ in 0..=DEATHS_MAX {
            let events = self.events.clone();
            let serving = tokio::select! {
                serving = self.model.serving_after(generation) => serving?,
                () = events.closed() => return Ok(None),
            };
            generation = serving.generation;
            if self.produced.len() >= self.preparation.tokens_max {
                // Its actors died between its last token and the word that it was the last.
                return Ok(Some(FinishReason::Length));
            }
            match self.live(&serving).await? {
                Life::Finished(reason) => return Ok(Some(reason)),
                Life::Cancelled => return Ok(None),
                Life::Lost => metrics::counter!("bursar_requests_redone").increment(1),
            }
        }
        Err(ChatError::GivenUp { deaths: DEATHS_MAX + 1 })
    }

    /// One life, with the actors of one generation.
    async fn live(&mut self, serving: &Serving) -> Result<Life, ChatError> {
        let events = self.events.clone();
        let pins = tokio::select! {
            biased;
            // What the actors say while they are being replaced is about themselves and not about this request.
            () = self.model.superseded(serving.generation) => return Ok(Life::Lost),
            () = events.closed() => return Ok(Life::Cancelled),
            pins = self.embed(serving) => pins?,
        };
        let Some(pins) = pins else { return Ok(Life::Lost) };
        let id = self.model.next_sequence();
        let sequence = self.sequence(id, pins.as_ref());
        // Room for every token and the end: the scheduler never waits for a caller.
        let (deliveries, mut delivered) = mpsc::channel(self.preparation.tokens_max - self.produced.len() + 1);
        let admission = Admission { sequence, pins, deliveries };
        if serving.scheduler.send_message(SchedulerMessage::Admit(admission)).is_err() {
            return Ok(Life::Lost);
        }
        let life = self.listen(&mut delivered).await;
        if !matches!(life, Ok(Life::Lost)) {
            // It has ended already, or nobody wants the rest.
            drop(serving.scheduler.send_message(SchedulerMessage::Cancel(id)));
        }
        life
    }

    /// The pictures' places in the cache; nothing if the vision actor died. The inner nothing is a request without
    /// pictures.
    async fn embed(&self, serving: &Serving) -> Result<Option<Option<PinnedPictures>>, ChatError> {
        let Some(vision) = serving.vision.as_ref().filter(|_| !self.preparation.pictures.is_empty()) else {
            return Ok(Some(None));
        };
        let pictures = self.preparation.pictures.clone();
        match tree::EMBED_PICTURES.ask(vision, |reply| VisionMessage::Embed { pictures, reply }).await {
            Ok(Ok(pins)) => Ok(Some(Some(pins))),
            Ok(Err(error)) => Err(ChatError::Vision(Arc::new(error))),
            Err(crate::reply::AskError::Gone { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn sequence(&self, id: SequenceId, pins: Option<&PinnedPictures>) -> NewSequence {
        let prompt = &self.preparation.prompt;
        let produced = self.produced.len() as u32;
        let positions = (0..produced).map(|token| [prompt.next_position + token; POSITION_AXES]);
        let pinned = pins.map_or(&[][..], |pins| &pins.pictures);
        NewSequence {
            id,
            tokens: [&prompt.tokens[..], &self.produced].concat(),
            positions: prompt.positions.iter().copied().chain(positions).collect(),
            next_position: prompt.next_position + produced,
            produced: self.produced.len(),
            tokens_max: self.preparation.tokens_max,
            pictures: prompt
                .pictures
                .iter()
                .map(|span| PicturePlace { tokens: span.tokens.clone(), cache_rows: pinned[span.picture].rows.clone() })
                .collect(),
            stop_tokens: self.preparation.stop_tokens.clone(),
            sampler: self.preparation.sampler.clone(),
        }
    }

    async fn listen(&mut self, delivered: &mut mpsc::Receiver<Delivery>) -> Result<Life, ChatError> {
        let events = self.events.clone();
        loop {
            let delivery = tokio::select! {
                delivery = delivered.recv() => delivery,
                () = events.closed() => return Ok(Life::Cancelled),
            };
            match delivery {
                None => return Ok(Life::Lost),
                Some(Delivery::Finished(Finish::Stop)) => return Ok(Life::Finished(FinishReason::Stop)),
                Some(Delivery::Finished(Finish::Length)) => return Ok(Life::Finished(FinishReason::Length)),
                Some(Delivery::Finished(Finish::Broken)) => return Err(ChatError::NotNumbers),
                Some(Delivery::Token(token)) => {
                    self.produced.push(token);
                    let piece = self.detokenizer.feed(token)?;
                    let (text, stopped) = self.filter.feed(&piece);
                    if !self.say(text).await {
                        return Ok(Life::Cancelled);
                    }
                    if stopped.is_some() {
                        return Ok(Life::Finished(FinishReason::Stop));
                    }
                }
            }
        }
    }

    /// Whether the caller is still there.
    async fn say(&mut self, text: String) -> bool {
        if text.is_empty() {
            return true;
        }
        self.text.push_str(&text);
        self.events.send(Ok(ChatEvent::Text(text))).await.is_ok()
    }

    async fn finish(&mut self, finish_reason: FinishReason) -> Result<ChatEvent, ChatError> {
        let (mut rest, stopped) = self.filter.feed(&self.detokenizer.flush()?);
        if stopped.is_none() {
            rest.push_str(&self.filter.flush());
        }
        self.say(rest).await;
        let prompt = &self.preparation.prompt;
        let usage = Usage {
            prompt_tokens: prompt.tokens.len(),
            picture_tokens: prompt.pictures.iter().map(|span| span.tokens.len()).sum(),
            completion_tokens: self.produced.len(),
        };
        Ok(ChatEvent::Done { text: std::mem::take(&mut self.text), finish_reason, usage })
    }
}
