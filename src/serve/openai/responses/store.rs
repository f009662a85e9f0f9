//! Responses that are kept: in memory alone, so many and so many bytes at most, the oldest first out.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use serde::Deserialize;
use serde_json::Value;
use tokio::task::AbortHandle;

use super::items::Item;
use crate::serve::{error::ApiError, id, models::shortened};

/// All kept responses of a server.
pub(in crate::serve) struct Responses {
    kept: Mutex<VecDeque<Arc<Kept>>>,
    /// Of all that is kept, also of parts that only later responses still go on from.
    bytes: Arc<AtomicUsize>,
    count_max: usize,
    bytes_max: usize,
}

/// One kept response.
pub(in crate::serve) struct Kept {
    pub(super) id: String,
    /// The key it was asked with; no other sees it.
    owner: Option<usize>,
    /// The conversation until the answer, the request's own items last.
    said: Vec<Arc<Said>>,
    state: Mutex<State>,
}

struct State {
    told: Value,
    answer: Option<Arc<Said>>,
    /// What makes the answer, while it runs in the background.
    run: Option<AbortHandle>,
}

/// Items that several responses may share.
pub(in crate::serve) struct Said {
    pub(super) items: Vec<Item>,
    _held: Held,
}

/// Bytes that count as long as this lives.
struct Held {
    bytes: usize,
    total: Arc<AtomicUsize>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Relaxed);
    }
}

impl Responses {
    pub(in crate::serve) fn new(count_max: usize, bytes_max: usize) -> Self {
        Responses { kept: Mutex::default(), bytes: Arc::default(), count_max, bytes_max }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Kept>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Items of this many bytes, which count from now on.
    pub(super) fn said(&self, items: Vec<Item>, bytes: usize) -> Arc<Said> {
        self.bytes.fetch_add(bytes, Relaxed);
        Arc::new(Said { items, _held: Held { bytes, total: self.bytes.clone() } })
    }

    /// Keeps a response. Older ones go, if there are too many. Returns it also when it alone is too large to stay.
    pub(super) fn keep(&self, owner: Option<usize>, said: Vec<Arc<Said>>, told: Value) -> Arc<Kept> {
        let id = told["id"].as_str().unwrap_or_default().to_owned();
        let state = Mutex::new(State { told, answer: None, run: None });
        let kept = Arc::new(Kept { id, owner, said, state });
        self.lock().push_back(kept.clone());
        self.trim();
        kept
    }

    /// A kept response has ended. One that was cancelled before stays so.
    pub(super) fn ended(&self, kept: &Kept, told: &Value) {
        let items = told["output"].as_array().into_iter().flatten().filter_map(|item| Item::deserialize(item).ok());
        let answer = self.said(items.collect(), told.to_string().len());
        let mut state = kept.state();
        if state.is_running() {
            *state = State { told: told.clone(), answer: Some(answer), run: None };
        }
        drop(state);
        self.trim();
    }

    fn trim(&self) {
        let mut kept = self.lock();
        while kept.len() > self.count_max || self.bytes.load(Relaxed) > self.bytes_max {
            let Some(oldest) = kept.pop_front() else { return };
            oldest.stop("cancelled");
        }
    }

    pub(super) fn find(&self, owner: Option<usize>, id: &str) -> Option<Arc<Kept>> {
        self.lock().iter().find(|kept| kept.id == id && kept.owner == owner).cloned()
    }

    /// The response of this id, or that there is none.
    pub(super) fn of(&self, owner: Option<usize>, id: &str) -> Result<Arc<Kept>, ApiError> {
        let missing = || {
            let told = format!("there is no response `{}`", shortened(id));
            ApiError::not_found(told).hint("responses are kept in memory, and the oldest go first")
        };
        self.find(owner, id).ok_or_else(missing)
    }

    pub(super) fn remove(&self, kept: &Kept) {
        kept.stop("cancelled");
        self.lock().retain(|other| other.id != kept.id);
    }
}

impl State {
    fn is_running(&self) -> bool {
        matches!(self.told["status"].as_str(), Some("in_progress" | "queued"))
    }
}

impl Kept {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn told(&self) -> Value {
        self.state().told.clone()
    }

    /// Names what makes its answer.
    pub(super) fn runs(&self, run: AbortHandle) {
        let mut state = self.state();
        match state.is_running() {
            true => state.run = Some(run),
            false => run.abort(),
        }
    }

    /// Ends what makes its answer, if it still runs.
    pub(super) fn stop(&self, status: &str) {
        let mut state = self.state();
        if state.is_running() {
            state.told["status"] = status.into();
            state.told["completed_at"] = id::now().into();
        }
        if let Some(run) = state.run.take() {
            run.abort();
        }
    }

    /// The conversation with its answer, if it has one.
    pub(super) fn conversation(&self) -> Option<Vec<Arc<Said>>> {
        let state = self.state();
        let answer = state.answer.clone().filter(|_| state.told["error"].is_null())?;
        Some(self.said.iter().cloned().chain([answer]).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn asked(store: &Responses, owner: Option<usize>, id: &str, bytes: usize) -> Arc<Kept> {
        let said = store.said(vec![Item::from("a".to_owned())], bytes);
        store.keep(owner, vec![said], json!({"id": id, "status": "in_progress"}))
    }

    fn ids(store: &Responses) -> Vec<String> {
        store.lock().iter().map(|kept| kept.id.clone()).collect()
    }

    #[test]
    fn the_oldest_go_first_by_number_and_by_bytes() {
        let store = Responses::new(2, 100);
        for id in ["a", "b", "c"] {
            drop(asked(&store, None, id, 10));
        }
        assert_eq!(ids(&store), ["b", "c"]);
        drop(asked(&store, None, "d", 85));
        assert_eq!(ids(&store), ["c", "d"]);
        drop(asked(&store, None, "e", 50));
        assert_eq!((ids(&store), store.bytes.load(Relaxed)), (vec!["e".to_owned()], 50));
    }

    #[test]
    fn what_a_later_response_goes_on_from_still_counts() {
        let store = Responses::new(9, 100);
        let first = asked(&store, None, "a", 60);
        store.ended(&first, &json!({"id": "a", "status": "completed", "output": []}));
        let said = first.conversation().expect("it has ended");
        store.remove(&first);
        drop(first);
        assert!(store.bytes.load(Relaxed) > 60);
        drop(store.keep(None, said, json!({"id": "b", "status": "in_progress"})));
        drop(asked(&store, None, "c", 30));
        assert_eq!(ids(&store), ["c"], "b held the bytes of a");
        assert_eq!(store.bytes.load(Relaxed), 30);
    }

    #[test]
    fn another_key_finds_nothing() {
        let store = Responses::new(9, 100);
        drop(asked(&store, Some(0), "a", 1));
        assert!(store.find(Some(0), "a").is_some());
        assert!(store.find(Some(1), "a").is_none() && store.find(None, "a").is_none());
        assert_eq!(store.of(Some(1), "a").map(|_| ()).expect_err("it is another's").status, 404);
    }

    #[test]
    fn a_cancelled_response_stays_so() {
        let store = Responses::new(9, 1000);
        let kept = asked(&store, None, "a", 1);
        kept.stop("cancelled");
        store.ended(&kept, &json!({"id": "a", "status": "completed", "output": []}));
        assert_eq!(kept.told()["status"], "cancelled");
        assert!(kept.conversation().is_none());
    }
}
