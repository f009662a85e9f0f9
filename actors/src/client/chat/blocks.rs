//! Subscriptions to changes of a model's KV blocks. A subscription survives deaths of actors,
//! sleep, and changes of the number of blocks.

use std::sync::Arc;

use tokio::sync::{broadcast::error::RecvError, watch};

use super::ModelHandle;
use crate::kv::{BlockEvent, BlockLog, BlockReceiver, KvUse};

/// A subscription, meant for routers, to the blocks in a model's prefix cache and to each change of
/// these blocks. A model in which every layer has a sliding window reports no blocks. See
/// [`ModelHandle::block_events`].
pub struct BlockEvents {
    model: ModelHandle,
    generation: u64,
    following: Option<(Arc<BlockLog>, BlockReceiver)>,
    missed: u64,
}

impl BlockEvents {
    /// Waits for the next changes and returns them in order. Each result contains all changes of a
    /// step. A listener that applies every change knows all blocks in the prefix cache.
    ///
    /// The first result begins with [`BlockEvent::Cleared`] and contains all current blocks. The
    /// first result after a death, a sleep, or a lag of more than 1,024 results begins in the same
    /// way. Returns `None` once the model is unloaded or has stopped. Canceling the wait loses
    /// nothing.
    pub async fn next(&mut self) -> Option<Arc<[BlockEvent]>> {
        let Some((log, receiver)) = &mut self.following else {
            let serving = self.model.serving_after(self.generation).await.ok()?;
            self.generation = serving.generation;
            return Some(self.follow(serving.block_log));
        };
        match receiver.recv().await {
            Ok(changes) => Some(changes),
            Err(RecvError::Lagged(missed)) => {
                self.missed += missed;
                let log = log.clone();
                Some(self.follow(log))
            }
            Err(RecvError::Closed) => {
                self.following = None;
                Some([BlockEvent::Cleared].into())
            }
        }
    }

    /// Number of results that were missed because more than 1,024 waited to be read. Each result
    /// contains all changes of a step.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    fn follow(&mut self, log: Arc<BlockLog>) -> Arc<[BlockEvent]> {
        let (begun, receiver) = log.listen();
        self.following = Some((log, receiver));
        begun
    }
}

/// A subscription to the numbers of a model's KV blocks: how many exist, and how many are in use or
/// cached. See [`ModelHandle::kv_use`].
pub struct KvWatch {
    model: ModelHandle,
    generation: u64,
    shown: Option<watch::Receiver<KvUse>>,
}

impl KvWatch {
    /// Waits until the numbers have changed since the last call, and returns the latest numbers.
    /// The first call returns at once, or during a restart as soon as the new actors serve. When
    /// the actors end, such as after a death or for sleep, the next call returns zeros. Returns
    /// `None` once the model is unloaded or has stopped. Canceling the wait loses nothing.
    pub async fn changed(&mut self) -> Option<KvUse> {
        let Some(shown) = &mut self.shown else {
            let serving = self.model.serving_after(self.generation).await.ok()?;
            self.generation = serving.generation;
            let shown = self.shown.insert(serving.kv_use);
            return Some(*shown.borrow_and_update());
        };
        match shown.changed().await {
            Ok(()) => Some(*shown.borrow_and_update()),
            Err(_) => {
                self.shown = None;
                Some(KvUse::default())
            }
        }
    }
}

/// Subscriptions for routers that distribute requests over several models or machines.
///
/// ```
/// # use bursar_actors::{chat::Chat, engine::LoadOptions, kv::BlockEvent};
/// # use bursar_actors::runtime::{ModelSource, Runtime, RuntimeConfig};
/// # #[tokio::main(flavor = "multi_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let runtime = Runtime::start(RuntimeConfig::default()).await?;
/// # let model = runtime.load_with(ModelSource::demo(), LoadOptions::small(), |_| {}).await?;
/// let mut blocks = model.block_events();
/// assert_eq!(blocks.next().await.as_deref(), Some(&[BlockEvent::Cleared][..]));
/// model.chat(Chat::from_tokens([7; 20]).max_tokens(1)).await?.text().await?;
/// let changes = blocks.next().await.expect("the model is loaded");
/// assert!(matches!(&changes[0], BlockEvent::Stored(block) if *block.tokens == [7; 16]));
///
/// let usage = model.kv_use().changed().await.expect("the model is loaded");
/// assert!(usage.cached <= 1 && usage.blocks > 1);
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
impl ModelHandle {
    /// Subscribes to the blocks in the prefix cache.
    pub fn block_events(&self) -> BlockEvents {
        BlockEvents { model: self.clone(), generation: 0, following: None, missed: 0 }
    }

    /// Subscribes to the numbers of KV blocks. The total changes, for example, when another process
    /// takes or frees GPU memory.
    pub fn kv_use(&self) -> KvWatch {
        KvWatch { model: self.clone(), generation: 0, shown: None }
    }
}
