//! Events for the router: which KV blocks exist, and how many are free.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use bursar::{BlockEvent, KvUse, ModelHandle, StoredBlock, Usage};
use dynamo_backend_common::{ComponentSnapshot, KvEventPublisher, SnapshotPublisher};
use dynamo_kv_router::protocols::{
    BlockExtraInfo, BlockHashOptions, BlockMmObjectInfo, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData,
    KvCacheRemoveData, KvCacheStoreData, KvCacheStoredBlockData, compute_block_hash_for_seq,
};

/// Prompt tokens of all replies so far, and the number of them that were cached.
#[derive(Default)]
pub(crate) struct HitCount {
    sought: AtomicU64,
    found: AtomicU64,
}

impl HitCount {
    pub(crate) fn count(&self, usage: &Usage) {
        self.sought.fetch_add(usage.prompt_tokens as u64, Relaxed);
        self.found.fetch_add(usage.cached_tokens as u64, Relaxed);
    }

    fn rate(&self) -> Option<f32> {
        let sought = self.sought.load(Relaxed);
        (sought > 0).then(|| (self.found.load(Relaxed) as f64 / sought as f64) as f32)
    }
}

/// Converts a stored block to an event with the two names that the router uses. One is
/// Bursar's key for the chain of blocks. The other is the router's hash of the block's tokens,
/// which the frontend also computes from a prompt. For a picture's blocks the hash includes
/// the picture's content. A frontend cannot know that content, so it finds only the blocks
/// before the first picture.
pub fn stored_event(block: &StoredBlock) -> KvCacheEventData {
    let name = |key: bursar::PrefixKey| ExternalSequenceBlockHash(key.number());
    let object = |picture: &bursar::ContentSpan| {
        let (start, end) = (block.first_token, block.first_token + block.tokens.len());
        let [a, b, c, d, e, f, g, h, ..] = picture.hash.0;
        BlockMmObjectInfo {
            mm_hash: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            offsets: vec![(picture.tokens.start.max(start) - start, picture.tokens.end.min(end) - start)],
        }
    };
    let objects: Vec<_> = block.pictures.iter().map(object).collect();
    let pictures = (!objects.is_empty()).then_some(BlockExtraInfo { mm_objects: objects });
    let options = BlockHashOptions {
        block_mm_infos: Some(std::slice::from_ref(&pictures)),
        cache_namespace: block.salt.as_deref(),
        ..BlockHashOptions::default()
    };
    let hashes = compute_block_hash_for_seq(&block.tokens, block.tokens.len() as u32, options);
    let stored =
        KvCacheStoredBlockData { block_hash: name(block.key), tokens_hash: hashes[0], mm_extra_info: pictures };
    KvCacheEventData::Stored(KvCacheStoreData {
        parent_hash: block.parent.map(name),
        start_position: None,
        blocks: vec![stored],
    })
}

/// Reports blocks to the router until the model ends.
pub(crate) async fn blocks(model: ModelHandle, publisher: Arc<KvEventPublisher>) {
    let (mut events, mut missed) = (model.block_events(), 0);
    while let Some(changes) = events.next().await {
        if events.missed() > missed {
            missed = events.missed();
            tracing::warn!(missed, "the block event queue overflowed; all blocks are reported to the router again");
        }
        let events = changes.iter().map(|change| KvCacheEvent {
            event_id: publisher.next_event_id(),
            data: match change {
                BlockEvent::Stored(block) => stored_event(block),
                BlockEvent::Removed(key) => KvCacheEventData::Removed(KvCacheRemoveData {
                    block_hashes: vec![ExternalSequenceBlockHash(key.number())],
                }),
                BlockEvent::Cleared => KvCacheEventData::Cleared,
            },
            dp_rank: 0,
        });
        if publisher.publish_batch(events.collect()).is_err() {
            return;
        }
    }
}

/// Reports the worker's load to the router until the model ends.
pub(crate) async fn load(model: ModelHandle, registered: u64, hits: Arc<HitCount>, publisher: Arc<SnapshotPublisher>) {
    let mut usage = model.kv_use();
    while let Some(usage) = usage.changed().await {
        publisher.publish(0, snapshot(usage, registered, hits.rate()));
    }
}

/// The router subtracts the used blocks from the number registered at the start. Blocks that the
/// model has released since then, for another process or for sleep, are therefore reported as used,
/// so that the difference is the number of free blocks. If the pool has grown, the difference is at
/// most the registered number.
fn snapshot(usage: KvUse, registered: u64, hit_rate: Option<f32>) -> ComponentSnapshot {
    let (total, held) = (usage.blocks as u64, usage.held as u64);
    ComponentSnapshot {
        kv_used_blocks: registered.saturating_sub(total - held),
        kv_total_blocks: total,
        gpu_cache_usage: if total == 0 { 1.0 } else { held as f32 / total as f32 },
        kv_cache_hit_rate: hit_rate,
        dp_rank: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_given_up_to_other_processes_count_as_used() {
        let used = |blocks, held| {
            let found = snapshot(KvUse { blocks, held, cached: 0 }, 100, None);
            (found.kv_used_blocks, found.kv_total_blocks)
        };
        assert_eq!(used(100, 30), (30, 100));
        assert_eq!(used(60, 30), (70, 60), "30 free blocks are left");
        assert_eq!(used(0, 0), (100, 0), "a sleeping model has no blocks");
        assert_eq!(used(140, 20), (0, 140), "the pool has more blocks than were registered");
    }
}
