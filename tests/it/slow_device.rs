//! A device that takes its time to back and unback, as a whole card does: nobody else waits for it.

use bursar::{Bytes, Class, HostDevice, LoadOptions, MIB, ModelSource};

use crate::stage::{about, answer, demo, device, eventually, runtime_on, small, story, text};

/// Waits until the device holds a call.
async fn until_held(device: &HostDevice) {
    eventually("a call is under way", async || device.counts().held_calls > 0).await;
}

#[test]
fn a_model_answers_and_leases_are_granted_while_another_model_takes_memory() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        let expected = answer(&model, about(1)).await;
        for loads in 1..=3 {
            device.hold_calls();
            let loading = tokio::spawn({
                let (runtime, options) = (runtime.clone(), LoadOptions { name: Some("slow".into()), ..small() });
                async move { runtime.load_with(ModelSource::demo(), options, |_| {}).await.map(drop) }
            });
            // The weights, then the workspaces, then keys and values: each time another call is held.
            for _ in 0..loads {
                until_held(&device).await;
                assert_eq!(answer(&model, about(1)).await, expected);
                drop(runtime.budget().lease(Class::tenant("mine"), MIB).await.expect("there is room"));
                let backs = device.counts().backs;
                device.let_calls_pass();
                eventually("it has backed", async || device.counts().backs > backs).await;
                device.hold_calls();
            }
            device.let_calls_pass();
            loading.await.expect("no panic").expect("it starts");
            runtime.unload("slow").await.expect("it unloads");
        }
    });
}

#[test]
fn others_go_on_while_the_memory_of_a_model_is_taken_back_and_its_end_is_told_when_all_is_home() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let beside = demo(&runtime, small()).await;
        let kept = runtime.budget().snapshot().await.expect("the budget answers").granted;
        let going = LoadOptions { name: Some("going".into()), ..small() };
        runtime.load_with(ModelSource::demo(), going, |_| {}).await.expect("it starts");
        let expected = answer(&beside, about(1)).await;
        device.hold_calls();
        let unloading = tokio::spawn({
            let runtime = runtime.clone();
            async move { runtime.unload("going").await }
        });
        until_held(&device).await;
        assert_eq!(answer(&beside, about(1)).await, expected);
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert!(ledger.granted > kept && ledger.deficit.is_zero(), "not before the device has it: {ledger}");
        assert!(!unloading.is_finished(), "its bytes are not home");
        device.let_calls_pass();
        unloading.await.expect("no panic").expect("it unloads");
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!((ledger.granted, device.counts().backed), (kept, kept), "{ledger}");
    });
}

#[test]
fn an_engine_that_is_killed_while_its_attempt_takes_memory_has_a_successor_only_when_that_is_home() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let (reached, mut sizing) = tokio::sync::mpsc::channel(1);
        let watched = device.clone();
        let loading = tokio::spawn({
            let runtime = runtime.clone();
            // What comes after the weights is the attempt's.
            let watch = move |progress| {
                if let bursar::Progress::Loading { done, total } = progress
                    && done == total
                {
                    watched.hold_calls();
                    let _ = reached.try_send(());
                }
            };
            async move { runtime.load_with(ModelSource::demo(), small(), watch).await }
        });
        sizing.recv().await.expect("the weights are loaded");
        until_held(&device).await;
        let backed = device.counts().backed;
        let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        engine.kill_and_wait(None).await.expect("it ends");
        // Its thread still waits in the device: nobody starts behind its back, and nobody is kept from asking.
        for _ in 0..20 {
            let engines = runtime.supervised().await.expect("the runtime answers").engines;
            assert_eq!(engines["demo"].get_id(), engine.get_id(), "its successor has to wait");
            assert_eq!(device.counts().held_calls, 1, "one attempt at a time");
            tokio::task::yield_now().await;
        }
        assert_eq!(device.counts().backed, backed);
        device.let_calls_pass();
        let model = loading.await.expect("no panic").expect("its successor starts");
        assert!(!answer(&model, text("Who are you?").max_tokens(2)).await.is_empty());
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!(ledger.granted, device.counts().backed, "{ledger}");
        runtime.shutdown().await;
        eventually("all is home", async || device.counts().backed == Bytes::ZERO).await;
    });
}
