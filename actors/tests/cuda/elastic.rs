//! Another process on a GPU that a model fills. The process gets the memory that it asks for, no
//! request fails, and the model regains all memory when the process ends. Without a GPU, the story
//! prints a note and passes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

use crate::gpu::{
    Stage, answer, demo, eventually, options,
    other_process::{self, OtherProcess},
    picture, question, story,
};
use bursar_actors::engine::{KvCacheType, LoadOptions};
use bursar_budgets::{Bytes, Class};
use bursar_model::Envelope;

/// The name of the test that runs as the other process.
const OTHER_PROCESS: &str = "elastic::another_process_takes_the_requested_bytes";

#[test]
fn another_process_takes_the_requested_bytes() {
    other_process::live();
}

/// The size of the KV cache.
async fn kv(stage: &Stage) -> Bytes {
    stage.snapshot().await.of_class(&Class::Kv)
}

#[test]
fn another_process_gets_1_8_and_40_gb_and_returns_all() {
    another_process_gets_what_it_takes(KvCacheType::Auto);
}

#[test]
fn another_process_gets_memory_from_an_fp8_kv_cache() {
    another_process_gets_what_it_takes(KvCacheType::Fp8);
}

fn another_process_gets_what_it_takes(kv_cache_dtype: KvCacheType) {
    story(async |stage| {
        let envelope = Envelope { step_tokens: 8192, sequences: 256, context_tokens: 512, ..Envelope::small() };
        let options = LoadOptions { envelope: Some(envelope), requests: Some(256), kv_cache_dtype, ..options() };
        let Some(model) = demo(&stage, options).await else { return };
        let before = stage.measured().await;
        let chat = |number: u32| question("Describe the picture.", 60).image(picture(number % 8));
        let mut expected = Vec::new();
        for number in 0..8 {
            expected.push(answer(&model, chat(number)).await.expect("the chat is answered"));
        }
        let (expected, enough) = (Arc::new(expected), Arc::<AtomicBool>::default());
        let asked = Arc::<AtomicUsize>::default();
        let talk = |first: u32| {
            let (model, expected) = (model.clone(), expected.clone());
            let (enough, asked) = (enough.clone(), asked.clone());
            tokio::spawn(async move {
                let mut differ = 0;
                for number in (0..8).cycle().skip(first as usize % 8) {
                    if enough.load(Relaxed) {
                        break;
                    }
                    let reply = answer(&model, chat(number)).await.expect("no request fails");
                    // On a GPU, other sequences in the batch change the rounding, so a
                    // greedy choice may differ.
                    differ += usize::from(reply != expected[number as usize]);
                    asked.fetch_add(1, Relaxed);
                }
                differ
            })
        };
        let chats: Vec<_> = (0..64).map(talk).collect();
        let mut other_process = OtherProcess::moves_in(OTHER_PROCESS);
        for gibibytes in [1, 8, 40] {
            let (wanted, began) = (Bytes::gib(gibibytes), Instant::now());
            eventually("the other process has the memory that it asked for", async || {
                // The other process takes all free memory except a few MiB, and tries again.
                tokio::task::block_in_place(|| other_process.leave(Bytes::mib(16)));
                stage.measured().await.foreign >= wanted
            })
            .await;
            eventually("the canary has its full size", async || {
                let now = stage.snapshot().await;
                now.canary == now.canary_wanted
            })
            .await;
            let (now, backed) = (stage.measured().await, stage.device.counts().backed);
            println!("{wanted} in {:?}: {now}\n{backed} backed, {} answers", began.elapsed(), asked.load(Relaxed));
            assert!(now.of_class(&Class::Kv) < before.of_class(&Class::Kv) || gibibytes == 1, "{now}");
        }
        drop(other_process);
        let went = Instant::now();
        eventually("the cache has its old size", async || kv(&stage).await == before.of_class(&Class::Kv)).await;
        println!("regained after {:?}", went.elapsed());
        enough.store(true, Relaxed);
        let mut differ = 0;
        for chat in chats {
            differ += chat.await.expect("no request fails");
        }
        let asked = asked.load(Relaxed);
        println!("{asked} answers, {differ} of which differ from the answers without other requests");
        assert!(asked >= 64);
        stage.runtime.unload("demo").await.expect("the model unloads");
    });
}
