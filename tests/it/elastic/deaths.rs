//! Deaths during a change of the KV cache size: every byte is returned, and
//! no request waits forever.

use bursar::{Bytes, Class};
use bursar_actors::budget::BudgetMessage;
use bursar_budgets::testing::HostControl;

use super::{Crowd, FilledDevice, long, undisturbed, watchful};
use crate::stage::{answer, eventually, story};

const VICTIMS: [&str; 4] = ["scheduler", "vision", "budget", "engine"];

impl FilledDevice {
    async fn kill(&self, victim: &str) {
        let serving = self.model.serving().await.expect("the model serves");
        let supervised = self.runtime.supervised().await.expect("the runtime answers");
        let cell = match victim {
            "scheduler" => serving.scheduler.get_cell(),
            "vision" => serving.vision.expect("the demo model takes pictures").get_cell(),
            "budget" => supervised.budget,
            "engine" => supervised.engines["demo"].clone(),
            other => panic!("no actor is called {other}"),
        };
        assert!(cell.is_message_type_of::<BudgetMessage>() == Some(victim == "budget"));
        cell.kill_and_wait(None).await.expect("the actor ends");
    }

    async fn until_held(&self) {
        eventually("a device call is held", async || self.device.counts().held_calls > 0).await;
    }
}

#[test]
fn any_death_during_a_shrink_returns_every_byte_and_chats_continue() {
    story(async {
        for victim in VICTIMS {
            let filled = FilledDevice::filled(watchful()).await;
            let expected = undisturbed(&filled.model, 5, long).await;
            let crowd = Crowd::of(&filled.model, &expected, long);
            filled.device.hold_calls();
            // Take all free bytes and the canary, so that the other process has to wait for more.
            let taken = filled.device.foreign_takes(filled.before.free + filled.before.canary);
            filled.until_held().await;
            filled.kill(victim).await;
            filled.device.let_calls_pass();
            let now = filled.quiet().await;
            assert!(now.of_class(&Class::Kv) < filled.before.of_class(&Class::Kv), "{victim}: {now}");
            assert_eq!(answer(&filled.model, long(1)).await, expected[1], "{victim}");
            assert_eq!(filled.device.foreign_gives_back(taken), taken);
            if victim == "engine" {
                // The new engine was sized while another process held memory, and never exceeds the
                // size that was stressed.
                filled.quiet().await;
            } else {
                filled.regained().await;
            }
            crowd.finish().await;
            let FilledDevice { device, runtime, .. } = filled;
            runtime.shutdown().await;
            eventually("all memory is unbacked", async || device.counts().backed == Bytes::ZERO).await;
        }
    });
}

#[test]
fn any_death_during_a_growth_returns_every_byte_and_chats_continue() {
    story(async {
        for victim in VICTIMS {
            let filled = FilledDevice::filled(watchful()).await;
            let expected = undisturbed(&filled.model, 5, long).await;
            let crowd = Crowd::of(&filled.model, &expected, long);
            filled.other_process_takes(Bytes::mib(5)).await;
            filled.quiet().await;
            filled.device.hold_calls();
            filled.device.foreign_gives_back(Bytes::mib(5));
            filled.until_held().await;
            filled.kill(victim).await;
            filled.device.let_calls_pass();
            if victim == "engine" {
                filled.quiet().await;
            } else {
                filled.regained().await;
            }
            assert_eq!(answer(&filled.model, long(1)).await, expected[1], "{victim}");
            crowd.finish().await;
            let FilledDevice { device, runtime, .. } = filled;
            runtime.shutdown().await;
            eventually("all memory is unbacked", async || device.counts().backed == Bytes::ZERO).await;
        }
    });
}

#[test]
fn a_model_unloaded_during_a_change_leaves_nothing_allocated() {
    story(async {
        let filled = FilledDevice::filled(watchful()).await;
        filled.device.hold_calls();
        filled.device.foreign_takes(filled.before.free + filled.before.canary);
        filled.until_held().await;
        let unloading = tokio::spawn({
            let runtime = filled.runtime.clone();
            async move { runtime.unload("demo").await }
        });
        filled.device.let_calls_pass();
        unloading.await.expect("no panic").expect("the model unloads");
        let ledger = filled.ledger().await;
        assert_eq!((ledger.granted, filled.device.counts().backed), (Bytes::ZERO, Bytes::ZERO), "{ledger}");
    });
}

#[test]
fn replies_stay_the_same_under_random_foreign_memory_and_deaths() {
    story(async {
        let filled = FilledDevice::filled(watchful()).await;
        let expected = undisturbed(&filled.model, 7, long).await;
        let crowd = Crowd::of(&filled.model, &expected, long);
        // A fixed pseudo-random sequence.
        let mut chance = 7u64;
        for round in 0..40 {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let pick = (chance >> 33) as usize;
            match pick % 8 {
                0..3 => drop(filled.device.foreign_takes(Bytes::kib(64) * (pick / 8 % 64) as u64)),
                3..5 => drop(filled.device.foreign_gives_back(Bytes::kib(64) * (pick / 8 % 128) as u64)),
                5 => drop(filled.device.foreign_gives_back(Bytes::gib(1))),
                _ => filled.kill("budget").await,
            }
            // No request survives a third death of its serving actors. A dead engine is sized
            // again, which another test covers.
            match round {
                10 => filled.kill("scheduler").await,
                25 => filled.kill("vision").await,
                _ => {}
            }
            if round % 8 == 7 {
                crowd.goes_on().await;
            }
        }
        filled.device.foreign_gives_back(Bytes::gib(1));
        filled.regained().await;
        crowd.finish().await;
    });
}
