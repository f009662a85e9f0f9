//! Metrics of one request: the times at which it was received, queued, started and answered token
//! by token, and how it ended.

use std::sync::Arc;

use bursar_budgets::Label;
use tokio::time::Instant;

use super::{ChatError, ErrorKind, timeout::DeadlineTracker};
use crate::{
    credit::Credit,
    metric::{self, Recording, RequestEnd},
    sleep::Inside,
};

/// One accepted request, from the moment it was received. This value owns the request's credit, so
/// the request counts as running as long as the value exists. Dropping the value without recording
/// an end means that the caller has disconnected, a deadline has passed, or the task has panicked.
pub(crate) struct Stopwatch {
    model: Label,
    /// `None` once the request has ended.
    credit: Option<Credit>,
    deadlines: DeadlineTracker,
    /// Keeps the model awake. All samples of a chat share this value.
    inside: Option<Arc<Inside>>,
    asked: Instant,
    /// When the request was submitted to the scheduler.
    queued: Option<Instant>,
    /// When the first step that contains this request was planned.
    begun: Option<Instant>,
    /// Tokens of the prompt. `None` until the prompt has been computed.
    prompt_tokens: Option<usize>,
    /// Tokens of the reply so far.
    generated_tokens: usize,
    /// When the first token was ready.
    first: Option<Instant>,
    /// When the latest token was ready.
    last: Option<Instant>,
    /// The histogram of token intervals, looked up once because a step may produce tokens
    /// for hundreds of requests.
    intervals: Recording,
}

impl Stopwatch {
    pub(crate) fn begin(model: Label, credit: Credit, deadlines: DeadlineTracker, asked: Instant) -> Self {
        let intervals = metric::TOKEN_INTERVAL_SECONDS.recording(&model);
        let credit = Some(credit);
        Stopwatch {
            model,
            credit,
            deadlines,
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

    pub(crate) fn deadlines(&self) -> &DeadlineTracker {
        &self.deadlines
    }

    /// Counts a missed deadline, if `error` reports one.
    pub(crate) fn missed(&self, error: &ChatError) {
        count_missed(&self.model, error, 1);
    }

    /// Keeps the model awake for this request.
    pub(crate) fn let_in(&mut self, inside: Arc<Inside>) {
        self.inside = Some(inside);
    }

    /// Records that the request is submitted to the scheduler. Only the first submission is
    /// recorded; a request submitted again after a death has already waited once.
    pub(crate) fn queue(&mut self) {
        self.queued.get_or_insert_with(Instant::now);
    }

    /// Records that the request's first step has been planned.
    pub(crate) fn start(&mut self) {
        if let (Some(queued), None) = (self.queued, self.begun) {
            self.begun = Some(Instant::now());
            self.deadlines.begin();
            metric::QUEUE_SECONDS.record(&self.model, queued.elapsed());
        }
    }

    /// Records that the prompt is computed, and that `cached` of its tokens were found in the
    /// prefix cache. Only the first call counts.
    pub(crate) fn prompt(&mut self, tokens: usize, cached: usize) {
        if self.prompt_tokens.replace(tokens).is_none() {
            metric::PROMPT_TOKENS_TOTAL.add(&self.model, tokens);
            metric::CACHED_PROMPT_TOKENS_TOTAL.add(&self.model, cached);
        }
    }

    /// Counts pictures that need not be encoded, because their tokens are in the prefix cache.
    pub(crate) fn found_computed(&self, pictures: usize) {
        metric::PICTURES_FOUND_COMPUTED_TOTAL.add(&self.model, pictures);
    }

    /// Records that a token of the reply was ready at `at`.
    pub(crate) fn token(&mut self, at: Instant) {
        self.generated_tokens += 1;
        self.first.get_or_insert(at);
        self.deadlines.token();
        match self.last.replace(at) {
            // The interval saturates at 0. If the request was submitted again after a death, the
            // time of a step may be earlier than the time of the latest token.
            Some(last) => self.intervals.record(at.saturating_duration_since(last)),
            None => metric::TIME_TO_FIRST_TOKEN_SECONDS.record(&self.model, at.saturating_duration_since(self.asked)),
        }
    }

    /// Returns the time at which the latest token was ready.
    pub(crate) fn last_token(&self) -> Option<Instant> {
        self.last
    }

    /// Records that the actors that served the request died, and that the request starts again.
    pub(crate) fn redo(&self) {
        metric::REQUESTS_REDONE_TOTAL.add(&self.model, 1);
    }

    /// Records the end of the request and returns its credit.
    pub(crate) fn end(mut self, how: RequestEnd) {
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
    /// Records the times and lengths of a completed request.
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
        self.close(match (std::thread::panicking(), self.deadlines.is_over()) {
            (true, _) => RequestEnd::Error,
            (false, true) => RequestEnd::TooLate,
            (false, false) => RequestEnd::Cancelled,
        });
    }
}

/// Counts a missed deadline of `requests` requests, if `error` reports one.
pub(crate) fn count_missed(model: &Label, error: &ChatError, requests: usize) {
    if let ChatError::TooLate { deadline, .. } = error {
        metric::DEADLINES_MISSED_TOTAL.add(&(model.clone(), *deadline), requests);
    }
}

/// Returns the end that is recorded for a request that was answered with this error.
pub(crate) fn end_of(error: &ChatError) -> RequestEnd {
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
