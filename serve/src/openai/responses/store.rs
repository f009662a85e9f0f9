//! Stored responses: in memory only, bounded by count and bytes. The oldest response of the key
//! that stores the most is evicted first.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
};

use serde::Deserialize;
use serde_json::Value;
use tokio::sync::Notify;

use super::items::Item;
use crate::{error::ApiError, id, models::shortened};

/// All stored responses of a server.
pub(crate) struct Responses {
    kept: Mutex<VecDeque<Arc<StoredResponse>>>,
    /// Bytes of all stored items. Items of a removed response still count while a later response
    /// continues it.
    bytes: Arc<AtomicUsize>,
    count_max: usize,
    bytes_max: usize,
}

pub(crate) struct StoredResponse {
    pub(super) id: String,
    /// Index of the client's key. Other keys cannot see the response.
    owner: Option<usize>,
    /// The conversation before the answer. The last entry is the input of this request.
    turns: Vec<Arc<HeldTurn>>,
    state: Mutex<State>,
    stopped: Notify,
}

struct State {
    response: Value,
    answer: Option<Arc<HeldTurn>>,
}

/// Items that several responses may share.
pub(crate) struct HeldTurn {
    pub(super) items: Vec<Item>,
    held: Held,
}

/// Size of a [`HeldTurn`] in bytes. The size counts toward the total from the time when a response
/// first stores the items until the items are dropped.
struct Held {
    bytes: usize,
    total: Arc<AtomicUsize>,
    counts: AtomicBool,
}

impl Held {
    fn count(&self) {
        if !self.counts.swap(true, Relaxed) {
            self.total.fetch_add(self.bytes, Relaxed);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if *self.counts.get_mut() {
            self.total.fetch_sub(self.bytes, Relaxed);
        }
    }
}

impl Responses {
    pub(crate) fn new(count_max: usize, bytes_max: usize) -> Self {
        Responses { kept: Mutex::default(), bytes: Arc::default(), count_max, bytes_max }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<StoredResponse>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wraps items of this many bytes. The bytes count toward the total once a response stores
    /// them.
    pub(super) fn hold(&self, items: Vec<Item>, bytes: usize) -> Arc<HeldTurn> {
        Arc::new(HeldTurn { items, held: Held { bytes, total: self.bytes.clone(), counts: AtomicBool::new(false) } })
    }

    /// Whether another background response may start. Running responses are never evicted.
    pub(super) fn has_capacity(&self) -> bool {
        let kept = self.lock();
        kept.len() < self.count_max && self.bytes.load(Relaxed) <= self.bytes_max
            || kept.iter().any(|kept| !kept.state().is_running())
    }

    /// Stores a response. If a limit is exceeded, older responses that have ended are evicted.
    pub(super) fn keep(&self, owner: Option<usize>, turns: Vec<Arc<HeldTurn>>, response: Value) -> Arc<StoredResponse> {
        let id = response["id"].as_str().unwrap_or_default().to_owned();
        turns.iter().for_each(|turn| turn.held.count());
        let state = Mutex::new(State { response, answer: None });
        let kept = Arc::new(StoredResponse { id, owner, turns, state, stopped: Notify::new() });
        self.lock().push_back(kept.clone());
        self.trim();
        kept
    }

    /// Records the end of a stored response. A response with the status `cancelled` is not changed.
    pub(super) fn ended(&self, kept: &StoredResponse, response: &Value) {
        let items = response["output"].as_array().into_iter().flatten().filter_map(|item| Item::deserialize(item).ok());
        let answer = self.hold(items.collect(), response.to_string().len());
        answer.held.count();
        let mut state = kept.state();
        if state.is_running() {
            *state = State { response: response.clone(), answer: Some(answer) };
        }
        drop(state);
        self.trim();
    }

    fn trim(&self) {
        let mut kept = self.lock();
        while kept.len() > self.count_max || self.bytes.load(Relaxed) > self.bytes_max {
            // The newest response is never evicted: its client is about to read it.
            let older = kept.len().saturating_sub(1);
            let ended = kept.iter().take(older).enumerate().filter(|(_, kept)| !kept.state().is_running());
            let mut counts = BTreeMap::<_, (usize, usize)>::new();
            for (at, kept) in ended {
                counts.entry(kept.owner).or_insert((0, at)).0 += 1;
            }
            // Evict from the key that stores the most, so that no key causes the eviction of
            // responses of a key that stores fewer.
            let most = counts.into_values().max_by_key(|&(count, at)| (count, Reverse(at)));
            let Some((_, oldest)) = most else { return };
            kept.remove(oldest);
        }
    }

    pub(super) fn find(&self, owner: Option<usize>, id: &str) -> Option<Arc<StoredResponse>> {
        self.lock().iter().find(|kept| kept.id == id && kept.owner == owner).cloned()
    }

    /// Finds the response with this id. The error is 404.
    pub(super) fn of(&self, owner: Option<usize>, id: &str) -> Result<Arc<StoredResponse>, ApiError> {
        let missing = || {
            let message = format!("the response `{}` does not exist", shortened(id));
            ApiError::not_found(message).hint("responses are kept in memory, and the oldest are dropped")
        };
        self.find(owner, id).ok_or_else(missing)
    }

    pub(super) fn remove(&self, kept: &StoredResponse) {
        kept.stop("cancelled");
        self.lock().retain(|other| other.id != kept.id);
    }
}

impl State {
    fn is_running(&self) -> bool {
        matches!(self.response["status"].as_str(), Some("in_progress" | "queued"))
    }
}

impl StoredResponse {
    /// Input items of the request, with ids.
    pub(super) fn input_items(&self) -> Vec<Value> {
        let items = self.turns.last().map(|turn| &turn.items[..]).unwrap_or_default();
        let id = |at: usize| format!("msg_{at}_{}", self.id.trim_start_matches("resp_"));
        items.iter().enumerate().map(|(at, item)| item.listed(&id(at))).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn response(&self) -> Value {
        self.state().response.clone()
    }

    /// Waits until the response is stopped. Only one task may wait.
    pub(super) async fn stopped(&self) {
        self.stopped.notified().await;
    }

    /// Stops the generation of the response if it is still running.
    pub(super) fn stop(&self, status: &str) {
        let mut state = self.state();
        if state.is_running() {
            state.response["status"] = status.into();
            state.response["completed_at"] = id::now().into();
            self.stopped.notify_one();
        }
    }

    /// The conversation with its answer. `None` if there is no answer, or the response failed.
    pub(super) fn conversation(&self) -> Option<Vec<Arc<HeldTurn>>> {
        let state = self.state();
        let answer = state.answer.clone().filter(|_| state.response["error"].is_null())?;
        Some(self.turns.iter().cloned().chain([answer]).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn asked(store: &Responses, owner: Option<usize>, id: &str, bytes: usize) -> Arc<StoredResponse> {
        let turns = store.hold(vec![Item::from("a".to_owned())], bytes);
        store.keep(owner, vec![turns], json!({"id": id, "status": "in_progress"}))
    }

    fn ids(store: &Responses) -> Vec<String> {
        store.lock().iter().map(|kept| kept.id.clone()).collect()
    }

    fn ended(store: &Responses, kept: &StoredResponse) {
        store.ended(kept, &json!({"id": kept.id, "status": "completed", "output": []}));
    }

    #[test]
    fn the_oldest_responses_are_evicted_by_count_and_bytes() {
        let store = Responses::new(2, 300);
        for id in ["a", "b", "c"] {
            ended(&store, &asked(&store, None, id, 10));
        }
        assert_eq!(ids(&store), ["b", "c"]);
        ended(&store, &asked(&store, None, "d", 200));
        assert_eq!(ids(&store), ["c", "d"]);
        ended(&store, &asked(&store, None, "e", 200));
        assert_eq!(ids(&store), ["e"]);
    }

    #[test]
    fn a_key_with_many_responses_evicts_its_own() {
        let store = Responses::new(3, 1000);
        for (owner, id) in [(0, "a"), (1, "b"), (1, "c"), (1, "d"), (1, "e")] {
            ended(&store, &asked(&store, Some(owner), id, 1));
        }
        assert_eq!(ids(&store), ["a", "d", "e"]);
    }

    #[test]
    fn running_responses_are_never_evicted() {
        let store = Responses::new(2, 100);
        let running = [asked(&store, None, "a", 10), asked(&store, None, "b", 10)];
        assert!(!store.has_capacity());
        let _large = store.hold(Vec::new(), 1000);
        drop(asked(&store, None, "c", 10));
        assert_eq!(ids(&store), ["a", "b", "c"]);
        assert!(running.iter().all(|kept| kept.response()["status"] == "in_progress"));
        ended(&store, &running[0]);
        assert_eq!(ids(&store), ["b", "c"]);
    }

    #[test]
    fn a_removed_responses_bytes_count_while_another_continues_it() {
        let store = Responses::new(9, 200);
        let first = asked(&store, None, "a", 60);
        ended(&store, &first);
        let turns = first.conversation().expect("the response has ended");
        store.remove(&first);
        drop(first);
        assert!(store.bytes.load(Relaxed) > 60);
        let second = store.keep(None, turns, json!({"id": "b", "status": "in_progress"}));
        ended(&store, &second);
        drop(second);
        drop(asked(&store, None, "c", 90));
        assert_eq!(ids(&store), ["c"], "response b was evicted for response c");
        assert_eq!(store.bytes.load(Relaxed), 90);
    }

    #[test]
    fn a_response_is_found_only_with_its_own_key() {
        let store = Responses::new(9, 100);
        drop(asked(&store, Some(0), "a", 1));
        assert!(store.find(Some(0), "a").is_some());
        assert!(store.find(Some(1), "a").is_none() && store.find(None, "a").is_none());
        assert_eq!(store.of(Some(1), "a").map(|_| ()).expect_err("the response belongs to another client").status, 404);
    }

    #[test]
    fn a_cancelled_response_stays_cancelled() {
        let store = Responses::new(9, 1000);
        let kept = asked(&store, None, "a", 1);
        kept.stop("cancelled");
        store.ended(&kept, &json!({"id": "a", "status": "completed", "output": []}));
        assert_eq!(kept.response()["status"], "cancelled");
        assert!(kept.conversation().is_none());
    }
}
