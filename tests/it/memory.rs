//! The ledger with models: grants never exceed the total (rule 1), tenants, and several models.

use bursar_budgets::testing::HostControl;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use bursar::{Bytes, Class, GIB, Hint, LeaseError, LoadOptions, MIB};

use crate::stage::{Stage, about, answer, demo, device, eventually, runtime_on, small, story};

#[test]
fn rule_1_the_ledgers_parts_never_exceed_the_total() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let ended = Arc::new(AtomicBool::new(false));
        let watcher = {
            let (budget, ended, device) = (runtime.budget().clone(), ended.clone(), device.clone());
            tokio::spawn(async move {
                let mut looks = 0;
                while !ended.load(Ordering::Relaxed) {
                    let now = budget.snapshot().await.expect("the budget answers");
                    assert!(now.granted + now.overhead + now.foreign + now.canary <= now.total, "{now}");
                    assert!(now.deficit.is_zero(), "{now}");
                    assert!(device.counts().backed <= Bytes::mib(64));
                    looks += 1;
                    tokio::task::yield_now().await;
                }
                looks
            })
        };
        for _ in 0..2 {
            let model = demo(&runtime, LoadOptions { kv_tokens: None, ..small() }).await;
            answer(&model, about(1)).await;
            runtime.unload("demo").await.expect("the model unloads");
        }
        ended.store(true, Ordering::Relaxed);
        assert!(watcher.await.expect("rule 1 holds") > 10, "the ledger was read more than ten times");
    });
}

#[test]
fn no_driver_memory_is_requested_after_ready() {
    story(async {
        let stage = Stage::set(small()).await;
        let (backs, reservations) = (stage.device.counts().backs, stage.device.counts().reservations);
        for number in 0..6 {
            answer(&stage.model, about(number)).await;
        }
        assert_eq!((stage.device.counts().backs, stage.device.counts().reservations), (backs, reservations));
        assert_eq!(stage.device.counts().backed, stage.snapshot().await.granted, "all granted memory is backed");
    });
}

#[test]
fn two_models_serve_on_one_device_under_one_ledger() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let (one, two) = tokio::join!(demo(&runtime, small()), demo(&runtime, small()));
        let names: Vec<_> = [&one, &two]
            .into_iter()
            .map(|model| async { model.serving().await.expect("the model serves").context.name.clone() })
            .collect();
        let mut seen = Vec::new();
        for name in names {
            seen.push(name.await);
        }
        seen.sort();
        assert_eq!(seen, ["demo", "demo 2"]);
        let (first, second) = tokio::join!(answer(&one, about(1)), answer(&two, about(1)));
        assert_eq!(first, second);
        let both = runtime.budget().snapshot().await.expect("the budget answers");
        runtime.unload("demo").await.expect("the model unloads");
        eventually("the other model keeps its half", async || {
            let now = runtime.budget().snapshot().await.expect("the budget answers");
            now.granted * 2 == both.granted
        })
        .await;
        assert_eq!(answer(&two, about(1)).await, first, "the other model gives the same reply");
    });
}

#[test]
fn a_tenant_waits_for_memory_and_may_cancel() {
    story(async {
        let stage = Stage::set(small()).await;
        let budget = stage.runtime.budget();
        let before = stage.snapshot().await;
        let free = before.free;
        let index = budget.lease(Class::external("index"), free).await.expect("memory is free");
        assert_eq!(stage.snapshot().await.of_class(&Class::external("index")), free);
        // No lease shrinks for this request. The request is aborted and leaves the queue.
        let waiting = tokio::spawn({
            let budget = budget.clone();
            async move { budget.lease(Class::external("other"), MIB).await.map(drop) }
        });
        eventually("the request waits", async || stage.snapshot().await.waiting.len() == 1).await;
        waiting.abort();
        eventually("the request was withdrawn", async || stage.snapshot().await.waiting.is_empty()).await;
        // Another request waits, and gets its lease when the first lease is dropped.
        let waiting = tokio::spawn({
            let budget = budget.clone();
            async move { budget.lease(Class::external("other"), MIB).await }
        });
        eventually("the request waits", async || stage.snapshot().await.waiting.len() == 1).await;
        answer(&stage.model, about(1)).await;
        drop(index);
        let other = waiting.await.expect("no panic").expect("the second request gets its lease when the first ends");
        assert_eq!(other.bytes(), Bytes::mib(1));
        drop(other);
        stage.settled(&before).await;
        let error = budget.lease(Class::external("giant"), 64 * GIB).await.expect_err("64 GiB never fit");
        assert!(matches!(error, LeaseError::Refused(_)) && !error.hint().is_empty(), "{error:?}");
    });
}

#[test]
fn a_tenants_lease_outlives_model_and_runtime() {
    story(async {
        let stage = Stage::set(small()).await;
        let lease = stage.runtime.budget().lease(Class::external("mine"), MIB).await.expect("memory is free");
        stage.runtime.unload("demo").await.expect("the model unloads");
        let after = stage.runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!(after.granted, Bytes::mib(1), "only the tenant's lease is left: {after}");
        let Stage { runtime, .. } = stage;
        let budget = runtime.budget().clone();
        runtime.shutdown().await;
        drop(lease);
        let error = budget.lease(Class::external("late"), MIB).await.expect_err("the runtime has ended");
        assert!(matches!(error, LeaseError::Unanswered(_)), "{error:?}");
    });
}
