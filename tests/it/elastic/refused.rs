//! A step is refused memory while the KV cache is smaller than before, or while
//! it is being resized.

use bursar_actors::{engine::EngineMessage, engine::WhichLane};
use bursar_budgets::testing::HostControl;

use super::*;
use crate::stage::listen;

impl FilledDevice {
    /// Makes the next step fail as if it had been refused memory.
    async fn refuses_a_step(&self) {
        let engine = self.runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        assert!(engine.send_message(EngineMessage::RefuseMemory(WhichLane::Step)).is_ok(), "the engine lives");
    }
}

#[test]
fn a_refused_size_is_not_retried_after_another_process_leaves() {
    story(async {
        let filled = FilledDevice::filled(watchful()).await;
        let expected = answer(&filled.model, about(1)).await;
        let blocks = filled.model.serving().await.expect("the model serves").record.kv_blocks;
        filled.other_process_takes(Bytes::mib(6)).await;
        filled.quiet().await;
        filled.refuses_a_step().await;
        assert_eq!(answer(&filled.model, about(1)).await, expected);
        let serving = filled.model.serving().await.expect("the model serves");
        assert_eq!((serving.refusals, serving.record.kv_blocks), (1, blocks * 95 / 100));
        // The cap falls to 95 percent of the blocks at READY. The cache is already smaller than the
        // cap, so it gives up five percent of its size, and may regain these blocks a moment later.
        filled.quiet().await;
        filled.device.foreign_gives_back(Bytes::mib(6));
        let all = filled.before.of_class(&Class::Kv);
        let most = Bytes(all.0 / blocks as u64 * (blocks * 95 / 100) as u64);
        eventually("the KV cache grows to the new cap", async || {
            let (kv, page) = (filled.kv().await, Bytes::mib(1));
            kv >= most && kv <= most + page && kv < all
        })
        .await;
        assert_eq!(answer(&filled.model, about(1)).await, expected);
        filled.runtime.shutdown().await;
        assert_eq!(filled.device.counts().backed, Bytes::ZERO);
    });
}

#[test]
fn a_refusal_during_a_resize_loses_no_request() {
    story(async {
        let filled = FilledDevice::filled(watchful()).await;
        let expected = answer(&filled.model, about(1)).await;
        let mut taken = Bytes::ZERO;
        for is_growing in [false, true] {
            filled.quiet().await;
            filled.device.hold_calls();
            taken = if is_growing {
                filled.device.foreign_gives_back(taken)
            } else {
                // Take all free memory, including the canary.
                filled.device.foreign_takes(Bytes::mib(24))
            };
            eventually("a device call of the resize is held", async || filled.device.counts().held_calls > 0).await;
            filled.refuses_a_step().await;
            let mut listening = tokio::spawn(listen(filled.model.chat(about(1)).await.expect("accepted")));
            // The reply cannot end before the change, and the change cannot end before the
            // held device call passes.
            let early = tokio::time::timeout(Duration::from_millis(50), &mut listening).await;
            filled.device.let_calls_pass();
            assert!(early.is_err(), "the reply waits for the device call; growing: {is_growing}");
            assert_eq!(listening.await.expect("no panic").expect("the reply ends well").text, expected);
            let refusals = filled.model.serving().await.expect("the model serves").refusals;
            assert_eq!(refusals, 1 + u32::from(is_growing));
        }
        filled.runtime.shutdown().await;
        assert_eq!(filled.device.counts().backed, Bytes::ZERO);
    });
}
