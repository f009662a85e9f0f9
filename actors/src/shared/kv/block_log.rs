//! A log of the blocks in the prefix cache. Routers read it to send a request to the process that
//! already holds the request's first blocks.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bursar_model::flow::{ContentSpan, PrefixKey};
use tokio::sync::broadcast;

/// Maximum number of messages that wait to be read by a listener. A listener that lags further
/// misses the oldest messages. One message contains all events of a step.
const WAITING_MAX: usize = 1024;

/// A whole block of keys and values in the prefix cache.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredBlock {
    /// The hash of the block, of everything before the block in its sequence, and of the salt.
    pub key: PrefixKey,
    /// The key of the block before this block. `None` for the first block of a sequence.
    pub parent: Option<PrefixKey>,
    /// The index of the block's first token in its sequence.
    pub first_token: usize,
    /// The block's tokens, with placeholder tokens at the positions of pictures.
    pub tokens: Arc<[u32]>,
    /// The pictures with tokens in this block, and the indices of all their tokens in the sequence.
    pub pictures: Vec<ContentSpan>,
    /// The salt of the chats that share the block; see
    /// [`Chat::cache_salt`](crate::chat::Chat::cache_salt).
    pub salt: Option<Arc<str>>,
}

/// Prints no tokens and no salt, because they belong to the user.
impl fmt::Debug for StoredBlock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("StoredBlock");
        shown.field("key", &self.key).field("first_token", &self.first_token).finish_non_exhaustive()
    }
}

/// A change of the prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// A block is in the cache now, on the device or in host memory.
    Stored(Arc<StoredBlock>),
    /// The block with this key is neither on the device nor in host memory any more.
    Removed(PrefixKey),
    /// The log is cleared. Events for all current blocks follow.
    Cleared,
}

/// A receiver of the events of each step.
pub(crate) type BlockReceiver = broadcast::Receiver<Arc<[BlockEvent]>>;

/// The blocks in the prefix cache of one scheduler. The scheduler writes without waiting for
/// readers.
#[derive(Default)]
pub struct BlockLog(Mutex<LogState>);

struct LogState {
    known: BTreeMap<PrefixKey, Arc<StoredBlock>>,
    /// `None` once the scheduler has ended.
    listeners: Option<broadcast::Sender<Arc<[BlockEvent]>>>,
}

impl Default for LogState {
    fn default() -> Self {
        LogState { known: BTreeMap::new(), listeners: Some(broadcast::channel(WAITING_MAX).0) }
    }
}

impl BlockLog {
    /// Publishes events, in order. A block that is already known is not stored again.
    pub(crate) fn record(&self, mut events: Vec<BlockEvent>) {
        if events.is_empty() {
            return;
        }
        let mut state = self.lock();
        events.retain(|event| match event {
            BlockEvent::Stored(block) => state.known.insert(block.key, block.clone()).is_none(),
            BlockEvent::Removed(key) => state.known.remove(key).is_some(),
            BlockEvent::Cleared => {
                state.known.clear();
                true
            }
        });
        if let Some(listeners) = state.listeners.as_ref().filter(|_| !events.is_empty()) {
            // The send fails if there is no listener, which is fine.
            drop(listeners.send(events.into()));
        }
    }

    /// Returns the events that lead from an empty log to the current state, parents
    /// before their children, and a receiver for all later events. The receiver is closed
    /// if the scheduler has ended.
    pub(crate) fn listen(&self) -> (Arc<[BlockEvent]>, BlockReceiver) {
        let state = self.lock();
        let over = || broadcast::channel(1).1;
        let receiver = state.listeners.as_ref().map_or_else(over, broadcast::Sender::subscribe);
        let mut known: Vec<_> = state.known.values().cloned().collect();
        drop(state);
        known.sort_by_key(|block| block.first_token);
        let stored = known.into_iter().map(BlockEvent::Stored);
        (std::iter::once(BlockEvent::Cleared).chain(stored).collect(), receiver)
    }

    /// Drops all blocks and closes the receivers, because the scheduler has ended.
    pub(crate) fn close(&self) {
        *self.lock() = LogState { known: BTreeMap::new(), listeners: None };
    }

    fn lock(&self) -> MutexGuard<'_, LogState> {
        // A poisoned lock may be used: each change is complete when the lock is released, even by a
        // panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::BLOCK_TOKENS;
    use bursar_model::flow::PrefixKeys;
    use tokio::sync::broadcast::error::TryRecvError;

    use super::*;

    /// The first blocks of a sequence.
    fn blocks(count: usize) -> Vec<Arc<StoredBlock>> {
        let tokens = count * BLOCK_TOKENS;
        let mut keys = PrefixKeys::default();
        keys.extend(&vec![7; tokens], &vec![[0; 3]; tokens], &[]);
        let keys = keys.as_slice();
        let block = |place: usize| StoredBlock {
            key: keys[place],
            parent: place.checked_sub(1).map(|before| keys[before]),
            first_token: place * BLOCK_TOKENS,
            tokens: [7; BLOCK_TOKENS].into(),
            pictures: Vec::new(),
            salt: Some("a secret".into()),
        };
        (0..count).map(|place| block(place).into()).collect()
    }

    fn stored(blocks: &[Arc<StoredBlock>]) -> Vec<BlockEvent> {
        blocks.iter().cloned().map(BlockEvent::Stored).collect()
    }

    #[test]
    fn a_late_listener_gets_all_blocks_parents_first_then_changes() {
        let (log, blocks) = (BlockLog::default(), blocks(3));
        log.record(stored(&[blocks[2].clone(), blocks[0].clone()]));
        log.record(stored(&blocks[1..2]));
        let (begun, mut later) = log.listen();
        assert_eq!(*begun, [vec![BlockEvent::Cleared], stored(&blocks)].concat());
        log.record(stored(&blocks));
        assert_eq!(later.try_recv(), Err(TryRecvError::Empty), "the keys were logged before");
        let removed = BlockEvent::Removed(blocks[2].key);
        log.record(vec![removed.clone(), removed.clone()]);
        assert_eq!(later.try_recv().as_deref(), Ok(&[removed][..]));
    }

    #[test]
    fn a_closed_block_log_ends_listeners_and_is_empty_afterwards() {
        let (log, blocks) = (BlockLog::default(), blocks(1));
        let (_, mut later) = log.listen();
        log.record(stored(&blocks));
        log.close();
        assert_eq!(later.try_recv().as_deref(), Ok(&stored(&blocks)[..]));
        assert_eq!(later.try_recv(), Err(TryRecvError::Closed));
        let (begun, mut closed) = log.listen();
        assert_eq!((&*begun, closed.try_recv()), (&[BlockEvent::Cleared][..], Err(TryRecvError::Closed)));
    }

    #[test]
    fn the_debug_output_of_a_block_hides_tokens_and_salt() {
        let printed = format!("{:?}", BlockEvent::Stored(blocks(1)[0].clone()));
        assert!(printed.contains("first_token: 0") && !printed.contains("secret") && !printed.contains("[7"));
    }
}
