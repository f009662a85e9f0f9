//! Unique ids of requests and replies.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};

/// Returns `prefix` followed by 32 hexadecimal digits. Clients may show their ids to each other, so
/// an id must not be guessable from other ids.
pub(super) fn fresh(prefix: &str) -> String {
    static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let next = NEXT.fetch_add(1, Relaxed);
    let [high, low] = [&KEYS[0], &KEYS[1]].map(|keys| keys.hash_one(next));
    format!("{prefix}{high:016x}{low:016x}")
}

/// Current time in seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_ids_differ_and_keep_their_prefix() {
        let names: std::collections::BTreeSet<_> = (0..1000).map(|_| fresh("chatcmpl-")).collect();
        assert_eq!(names.len(), 1000);
        assert!(names.iter().all(|name| name.starts_with("chatcmpl-") && name.len() == 41));
    }
}
