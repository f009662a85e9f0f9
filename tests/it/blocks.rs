//! KV block events as a router follows them, through replies, deaths of actors, sleep, and memory
//! pressure from other processes.

use bursar_budgets::testing::HostControl;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use bursar::{
    BlockEvent, BlockEvents, Bytes, Chat, FaultInjection, KvUse, LoadOptions, PrefixKey, SleepLevel, StoredBlock,
    messages::SchedulerMessage,
};

use crate::stage::{Stage, about, answer, ask, demo, device_of, runtime_on, small, story};

/// The state of a router that has applied all changes.
#[derive(Default)]
struct Router {
    known: BTreeMap<PrefixKey, Arc<StoredBlock>>,
    clearings: usize,
}

impl Router {
    fn apply(&mut self, changes: &[BlockEvent]) {
        for change in changes {
            match change {
                BlockEvent::Stored(block) => {
                    let before = self.known.insert(block.key, block.clone());
                    assert!(before.is_none(), "each block is stored once");
                    assert!(block.parent.is_none_or(|parent| self.known.contains_key(&parent)), "parents come first");
                }
                BlockEvent::Removed(key) => assert!(self.known.remove(key).is_some(), "a removed block was known"),
                BlockEvent::Cleared => {
                    self.known.clear();
                    self.clearings += 1;
                }
            }
        }
    }

    /// Applies changes until `holds`.
    async fn follow(&mut self, events: &mut BlockEvents, holds: impl Fn(&Router) -> bool) {
        while !holds(self) {
            let changes = events.next().await.expect("the model still runs");
            self.apply(&changes);
        }
    }

    /// The number of leading prompt tokens that are in known blocks. Blocks are compared
    /// by their tokens only.
    fn finds(&self, tokens: &[u32]) -> usize {
        let mut parent = None;
        let found = tokens.chunks_exact(16).take_while(|tokens| {
            let next = self.known.values().find(|block| block.parent == parent && *block.tokens == **tokens);
            parent = next.map(|block| block.key).or(parent);
            next.is_some()
        });
        found.count() * 16
    }
}

fn prompt(first: u32, length: u32) -> Vec<u32> {
    (first..first + length).collect()
}

fn chat(tokens: &[u32]) -> Chat {
    Chat::from_tokens(tokens).temperature(0.0).max_tokens(2).ignore_end()
}

#[test]
fn block_events_predict_the_cached_tokens_of_a_prompt() {
    story(async {
        let stage = Stage::set(small()).await;
        let (mut router, mut events) = (Router::default(), stage.model.block_events());
        router.follow(&mut events, |router| router.clearings == 1).await;
        for tokens in [prompt(40, 100), prompt(40, 60), prompt(300, 50)] {
            let known = router.finds(&tokens);
            let whole = ask(&stage.model, chat(&tokens)).await.expect("the model answers");
            // At least one token is always computed, so a prompt of whole blocks
            // reuses one block less.
            assert_eq!(whole.cached_tokens, known.min((tokens.len() - 1) / 16 * 16));
            router.follow(&mut events, |router| router.finds(&tokens) == tokens.len() / 16 * 16).await;
        }
        let salted = chat(&prompt(40, 100)).cache_salt("another");
        assert_eq!(ask(&stage.model, salted).await.expect("the model answers").cached_tokens, 0);
        let is_salted = |block: &Arc<StoredBlock>| block.salt.as_deref() == Some("another");
        router.follow(&mut events, |router| router.known.values().filter(|block| is_salted(block)).count() == 6).await;
    });
}

#[test]
fn block_events_name_the_picture_of_each_block() {
    story(async {
        let stage = Stage::set(small()).await;
        let (mut router, mut events) = (Router::default(), stage.model.block_events());
        for number in [1, 2, 1] {
            answer(&stage.model, about(number)).await;
        }
        let shown = |router: &Router| {
            let pictures = router.known.values().flat_map(|block| &block.pictures);
            pictures.map(|picture| picture.hash).collect::<BTreeSet<_>>().len()
        };
        router.follow(&mut events, |router| shown(router) == 2).await;
    });
}

#[test]
fn block_events_report_scheduler_deaths_and_sleeps() {
    story(async {
        let stage = Stage::set(small()).await;
        let (model, tokens) = (&stage.model, prompt(40, 100));
        let (mut router, mut events, mut usage) = (Router::default(), model.block_events(), model.kv_use());
        let blocks = usage.changed().await.expect("the model serves").blocks;
        assert!(blocks > 0);
        let first = answer(model, chat(&tokens)).await;
        router.follow(&mut events, |router| router.finds(&tokens) == 96).await;

        let scheduler = model.serving().await.expect("the model serves").scheduler;
        scheduler.send_message(SchedulerMessage::InjectFault(FaultInjection::Panic)).expect("the scheduler lives");
        router.follow(&mut events, |router| router.clearings == 2 && router.known.is_empty()).await;
        assert_eq!(answer(model, chat(&tokens)).await, first);
        router.follow(&mut events, |router| router.clearings == 3 && router.finds(&tokens) == 96).await;

        model.sleep(SleepLevel::Level1, Duration::from_secs(60)).await.expect("the model sleeps");
        router.follow(&mut events, |router| router.clearings == 4 && router.known.is_empty()).await;
        while usage.changed().await.expect("the model still runs") != KvUse::default() {}
        // The death of the scheduler may have caused the usage change above, so the model may not
        // be asleep yet.
        assert_eq!(answer(model, chat(&tokens)).await, first, "a request wakes the model");
        while usage.changed().await.expect("the model still runs").blocks != blocks {}
        router.follow(&mut events, |router| router.clearings == 5 && router.finds(&tokens) == 96).await;

        stage.runtime.shutdown().await;
        while events.next().await.is_some() {}
        while usage.changed().await.is_some() {}
    });
}

#[test]
fn block_events_report_blocks_lost_to_another_process() {
    story(async {
        let device = device_of(Bytes::mib(24));
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, LoadOptions { kv_tokens: None, ..small() }).await;
        let (mut router, mut events, mut usage) = (Router::default(), model.block_events(), model.kv_use());
        let before = usage.changed().await.expect("the model serves").blocks;
        // Fill nearly all blocks, so that some used blocks are in the region of the cache that is
        // released.
        for first in (40..750).step_by(2) {
            let tokens = prompt(first, 112);
            answer(&model, chat(&tokens)).await;
            router.follow(&mut events, |router| router.finds(&tokens) == 112).await;
            if router.known.len() + 8 > before {
                break;
            }
        }
        assert!(router.known.len() + 8 > before, "{} of {before} blocks are filled", router.known.len());
        let taken = device.foreign_takes(Bytes::gib(1));
        let mut left = before;
        while left == before {
            left = usage.changed().await.expect("the model serves").blocks;
        }
        router.follow(&mut events, |router| router.known.len() <= left).await;
        assert_eq!(router.clearings, 1, "each block is reported separately");
        device.foreign_gives_back(taken);
        while usage.changed().await.expect("the model serves").blocks < before {}
    });
}

#[test]
fn a_lagging_router_receives_all_current_blocks_again() {
    story(async {
        let stage = Stage::set(small()).await;
        let (mut router, mut events) = (Router::default(), stage.model.block_events());
        router.follow(&mut events, |router| router.clearings == 1).await;
        let mut number = 0;
        // Every reply causes at least one change.
        while number < 700 {
            let tokens = prompt(40 + number % 700, 17);
            let salted = chat(&tokens).cache_salt(number.to_string()).max_tokens(1);
            answer(&stage.model, salted).await;
            number += 1;
        }
        router.follow(&mut events, |router| router.clearings == 2).await;
        assert!(events.missed() > 0);
        let cached = stage.model.kv_use().changed().await.expect("the model serves").cached;
        assert!(router.known.len() <= cached.max(1), "{} blocks of {cached}", router.known.len());
    });
}
