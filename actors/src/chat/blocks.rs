//! A model's blocks of keys and values, followed through deaths, sleep and changes of their number.

use std::sync::Arc;

use tokio::sync::{broadcast::error::RecvError, watch};

use super::ModelHandle;
use crate::kv::{BlockEvent, BlockLog, BlockReceiver, KvUse};

/// The blocks that a model's sequences may begin with, for routers: what there is, and each change. See
/// [`ModelHandle::block_events`].
pub struct BlockEvents {
    model: ModelHandle,
    generation: u64,
    /// None while no actors serve.
    following: Option<(Arc<BlockLog>, BlockReceiver)>,
    missed: u64,
}

impl BlockEvents {
    /// Waits for the next changes: what one step has brought, in order. A listener that applies all of them knows the blocks. The
    /// first one begins with [`BlockEvent::Cleared`] and has all blocks that there are. So does one after a death, a sleep,
    /// or a lag of more than 1,024 changes. None once the model is over. Cancelling the wait loses nothing.
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

    /// How many changes were missed because more than 1,024 waited to be read.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    fn follow(&mut self, log: Arc<BlockLog>) -> Arc<[BlockEvent]> {
        let (begun, receiver) = log.listen();
        self.following = Some((log, receiver));
        begun
    }
}

/// How a model's blocks are used, and how many there are. See [`ModelHandle::kv_use`].
pub struct KvWatch {
    model: ModelHandle,
    generation: u64,
    /// None while no actors serve.
    shown: Option<watch::Receiver<KvUse>>,
}

impl KvWatch {
    /// Waits until the use differs from what was last returned, and returns the latest. At first that is at once. While
    /// no actors serve, as after a death and during sleep, there are no blocks. None once the model is over. Cancelling the
    /// wait loses nothing.
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

/// For those who place requests on several models or machines.
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
/// let changes = blocks.next().await.expect("the model is there");
/// assert!(matches!(&changes[0], BlockEvent::Stored(block) if *block.tokens == [7; 16]));
///
/// let usage = model.kv_use().changed().await.expect("the model is there");
/// assert!(usage.cached <= 1 && usage.blocks > 1);
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
impl ModelHandle {
    /// Follows the blocks of keys and values that a sequence may begin with.
    pub fn block_events(&self) -> BlockEvents {
        BlockEvents { model: self.clone(), generation: 0, following: None, missed: 0 }
    }

    /// Follows how the blocks of keys and values are used. Their number changes when a neighbour takes or leaves memory.
    pub fn kv_use(&self) -> KvWatch {
        KvWatch { model: self.clone(), generation: 0, shown: None }
    }
}
