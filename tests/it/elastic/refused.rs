//! A step is refused memory while the KV cache is smaller than before, or while
//! it is being resized.

use bursar_actors::{engine::EngineMessage, engine::WhichLane};
use bursar_budgets::testing::HostControl;

use super::*;
use crate::stage::listen;

impl Card {
    /// Makes the next step fail as if it had been refused memory.
    async fn refuses_a_step(&self) {
        let engine = self.runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        assert!(engine.send_message(EngineMessage::RefuseMemory(WhichLane::Step)).is_ok(), "the engine lives");
    }
}

#[test]
fn a_refused_size_is_not_retried_after_another_process_leaves() {
    story(async {
        let card = Card::filled(watchful()).await;
        let expected = answer(&card.model, about(1)).await;
        let blocks = card.model.serving().await.expect("the model serves").record.kv_blocks;
        card.other_process_takes(Bytes::mib(6)).await;
        card.quiet().await;
        card.refuses_a_step().await;
        assert_eq!(answer(&card.model, about(1)).await, expected);
        let serving = card.model.serving().await.expect("the model serves");
        assert_eq!((serving.refusals, serving.record.kv_blocks), (1, blocks * 95 / 100));
        // The cap falls to 95 percent of the blocks at READY. The cache is already smaller than the
        // cap, so it gives up five percent of its size, and may regain these blocks a moment later.
        card.quiet().await;
        card.device.foreign_gives_back(Bytes::mib(6));
        let all = card.before.of_class(&Class::Kv);
        let most = Bytes(all.0 / blocks as u64 * (blocks * 95 / 100) as u64);
        eventually("the KV cache grows to the new cap", async || {
            let (kv, page) = (card.kv().await, Bytes::mib(1));
            kv >= most && kv <= most + page && kv < all
        })
        .await;
        assert_eq!(answer(&card.model, about(1)).await, expected);
        card.runtime.shutdown().await;
        assert_eq!(card.device.counts().backed, Bytes::ZERO);
    });
}

#[test]
fn a_refusal_during_a_resize_loses_no_request() {
    story(async {
        let card = Card::filled(watchful()).await;
        let expected = answer(&card.model, about(1)).await;
        let mut taken = Bytes::ZERO;
        for is_growing in [false, true] {
            card.quiet().await;
            card.device.hold_calls();
            match is_growing {
                // Take all free memory, including the canary.
                false => taken = card.device.foreign_takes(Bytes::mib(24)),
                true => taken = card.device.foreign_gives_back(taken),
            }
            eventually("a device call of the resize is held", async || card.device.counts().held_calls > 0).await;
            card.refuses_a_step().await;
            let mut listening = tokio::spawn(listen(card.model.chat(about(1)).await.expect("accepted")));
            // The reply cannot end before the change, and the change cannot end before the
            // held device call passes.
            let early = tokio::time::timeout(Duration::from_millis(50), &mut listening).await;
            card.device.let_calls_pass();
            assert!(early.is_err(), "the reply waits for the device call; growing: {is_growing}");
            assert_eq!(listening.await.expect("no panic").expect("the reply ends well").text, expected);
            let refusals = card.model.serving().await.expect("the model serves").refusals;
            assert_eq!(refusals, 1 + u32::from(is_growing));
        }
        card.runtime.shutdown().await;
        assert_eq!(card.device.counts().backed, Bytes::ZERO);
    });
}
