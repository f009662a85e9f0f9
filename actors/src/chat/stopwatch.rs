//! What is recorded of one request: when it was asked, queued, begun and answered token by token, and how it ended.

use std::sync::Arc;

use bursar_budgets::Label;
use tokio::time::Instant;

use super::{ChatError, ErrorKind, timeout::Patience};
use crate::{
    credit::Credit,
    metric::{self, Recording, RequestEnd},
    sleep::Inside,
};

/// One accepted request, from the moment it was asked. It holds the request's credit, so the request counts as running
/// while this lives. If it is dropped before its end is recorded, the caller has gone or the deadline has passed.
pub(super) struct Stopwatch {
    model: Label,
    /// None once the request has ended.
    credit: Option<Credit>,
    patience: Patience,
    /// Keeps the model awake. Shared by the samples of a chat.
    inside: Option<Arc<Inside>>,
    asked: Instant,
    /// When the request was submitted to the scheduler.
    queued: Option<Instant>,
    /// When the first step with this request was planned.
    begun: Option<Instant>,
    /// Tokens of its prompt, once counted.
    prompt_tokens: Option<usize>,
    /// Tokens of its reply so far.
    generated_tokens: usize,
    /// When the first token arrived, and the latest.
    first: Option<Instant>,
    last: Option<Instant>,
    /// Looked up once, because a step has a token for each of hundreds of requests.
    intervals: Recording,
}

impl Stopwatch {
    pub(super) fn begin(model: Label, credit: Credit, patience: Patience, asked: Instant) -> Self {
        let intervals = metric::TOKEN_INTERVAL_SECONDS.recording(&model);
        let credit = Some(credit);
        Stopwatch {
            model,
            credit,
            patience,
            inside: None,
            asked,
            queued: None,
            begun: None,
            prompt_tokens: None,
            generated_tokens: 0,
            first: None,
            last: None,
            intervals,
        }
    }

    pub(super) fn patience(&self) -> &Patience {
        &self.patience
    }

    /// Counts the deadline that this error is about, if it is about one.
    pub(super) fn missed(&self, error: &ChatError) {
        count_missed(&self.model, error, 1);
    }

    /// The model is awake for it.
    pub(super) fn let_in(&mut self, inside: Arc<Inside>) {
        self.inside = Some(inside);
    }

    /// The request is submitted to the scheduler. Later lives are not counted, because it has waited before.
    pub(super) fn queue(&mut self) {
        self.queued.get_or_insert_with(Instant::now);
    }

    /// The request is part of the next step.
    pub(super) fn start(&mut self) {
        if let (Some(queued), None) = (self.queued, self.begun) {
            self.begun = Some(Instant::now());
            self.patience.begin();
            metric::QUEUE_SECONDS.record(&self.model, queued.elapsed());
        }
    }

    /// The prompt is computed, except for `cached` tokens computed earlier. Only the first call counts.
    pub(super) fn prompt(&mut self, tokens: usize, cached: usize) {
        if self.prompt_tokens.replace(tokens).is_none() {
            metric::PROMPT_TOKENS_TOTAL.add(&self.model, tokens);
            metric::CACHED_PROMPT_TOKENS_TOTAL.add(&self.model, cached);
        }
    }

    /// So many pictures need not be encoded, because blocks hold their tokens.
    pub(super) fn found_computed(&self, pictures: usize) {
        metric::PICTURES_FOUND_COMPUTED_TOTAL.add(&self.model, pictures);
    }

    /// A token of the reply was ready at `at`.
    pub(super) fn token(&mut self, at: Instant) {
        self.generated_tokens += 1;
        self.first.get_or_insert(at);
        self.patience.token();
        match self.last.replace(at) {
            // Its step may have ended before an earlier life's driver reported a token.
            Some(last) => self.intervals.record(at.saturating_duration_since(last)),
            None => metric::TIME_TO_FIRST_TOKEN_SECONDS.record(&self.model, at.saturating_duration_since(self.asked)),
        }
    }

    /// When the latest token was ready.
    pub(super) fn last_token(&self) -> Option<Instant> {
        self.last
    }

    /// Its actors died, and it begins again.
    pub(super) fn redo(&self) {
        metric::REQUESTS_REDONE_TOTAL.add(&self.model, 1);
    }

    /// The request has ended, and its credit is free.
    pub(super) fn end(mut self, how: RequestEnd) {
        self.close(how);
    }

    fn close(&mut self, how: RequestEnd) {
        let Some(credit) = self.credit.take() else { return };
        if matches!(how, RequestEnd::Stop | RequestEnd::Length) {
            self.measure();
        }
        metric::REQUESTS_TOTAL.add(&(self.model.clone(), how), 1);
        drop(credit);
        self.inside = None;
    }
}

impl Stopwatch {
    /// Records the times of a request that ended by itself.
    fn measure(&self) {
        let model = &self.model;
        metric::REQUEST_SECONDS.record(model, self.asked.elapsed());
        metric::REQUEST_PROMPT_TOKENS.record(model, self.prompt_tokens.unwrap_or(0));
        metric::REQUEST_GENERATED_TOKENS.record(model, self.generated_tokens);
        if let (Some(begun), Some(first), Some(last)) = (self.begun, self.first, self.last) {
            metric::PREFILL_SECONDS.record(model, first.saturating_duration_since(begun));
            metric::DECODE_SECONDS.record(model, last.saturating_duration_since(first));
        }
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        self.close(match (std::thread::panicking(), self.patience.is_over()) {
            (true, _) => RequestEnd::Error,
            (false, true) => RequestEnd::TooLate,
            (false, false) => RequestEnd::Cancelled,
        });
    }
}

/// Counts the deadline that this error of some requests is about, if it is about one.
pub(super) fn count_missed(model: &Label, error: &ChatError, requests: usize) {
    if let ChatError::TooLate { deadline, .. } = error {
        metric::DEADLINES_MISSED_TOTAL.add(&(model.clone(), *deadline), requests);
    }
}

/// How a request ended that was answered with this error.
pub(super) fn end_of(error: &ChatError) -> RequestEnd {
    match (error, error.kind()) {
        (ChatError::Overloaded { .. }, _) => RequestEnd::Overloaded,
        (ChatError::TooLate { .. }, _) => RequestEnd::TooLate,
        (ChatError::Asleep(_), _) => RequestEnd::Asleep,
        (ChatError::NotStarted(_) | ChatError::Stopped { .. } | ChatError::ShuttingDown, _) => RequestEnd::Stopped,
        (ChatError::DeviceLost { .. }, _) => RequestEnd::DeviceLost,
        (ChatError::GivenUp { .. }, _) => RequestEnd::GivenUp,
        (_, ErrorKind::Request) => RequestEnd::Refused,
        (_, ErrorKind::Busy | ErrorKind::Model) => RequestEnd::Error,
    }
}
