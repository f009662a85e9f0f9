//! A serving model takes no memory from the driver of its GPU. Without a GPU, each story prints a
//! note and passes.

use crate::gpu::{answer, demo, options, picture, question, story};
use bursar_actors::{
    chat::ChatEvent,
    engine::{KvCacheType, LoadOptions, Precision},
    runtime::ModelSource,
};
use bursar_budgets::{Bytes, Class, Device};
use bursar_kernels::DType;
use bursar_model::Envelope;

/// Tokens of a reply. Each token after the first is a step.
const TOKENS: usize = 220;

#[test]
fn rule_2_a_thousand_steps_and_pictures_allocate_nothing_after_ready() {
    nothing_is_allocated_after_ready(KvCacheType::Auto);
}

#[test]
fn rule_2_holds_with_an_fp8_kv_cache() {
    nothing_is_allocated_after_ready(KvCacheType::Fp8);
}

fn nothing_is_allocated_after_ready(kv_cache_dtype: KvCacheType) {
    story(async |stage| {
        let envelope = Envelope { sequences: 8, ..Envelope::small() };
        let options = LoadOptions { envelope: Some(envelope), kv_tokens: Some(8192), kv_cache_dtype, ..options() };
        let Some(model) = demo(&stage, options).await else { return };
        let (ready, counts) = (stage.snapshot().await, stage.device.counts());
        println!("at READY: {counts:?}");
        let free = stage.device.memory().expect("the device reports its memory").free;
        // Run these chats one after another, so that each token is a step.
        let mut steps = 0;
        let mut replies = Vec::new();
        for number in 0..5 {
            let chat = question("Describe the picture.", TOKENS).image(picture(number)).cache_salt("first");
            replies.push(answer(&model, chat).await.expect("the chat is answered"));
            steps += TOKENS - 1;
        }
        assert!(steps >= 1000, "the model ran {steps} steps");
        // Run these chats at once, to cause larger steps, several pictures in an encoder batch,
        // sampling, penalties, log-probabilities, and prompts that end within chunks.
        let beside = (0..8u32).map(|number| {
            let (model, text) = (model.clone(), "Describe the picture. ".repeat(1 + number as usize));
            let mut chat = question(&text, 30 + 7 * number as usize).image(picture(number)).image(picture(number + 9));
            if number % 2 == 1 {
                chat = chat.temperature(0.8).top_p(0.9).seed(7).repetition_penalty(1.1).log_probabilities(3);
            }
            tokio::spawn(async move { answer(&model, chat).await })
        });
        for reply in beside.collect::<Vec<_>>() {
            reply.await.expect("the task does not panic").expect("the chat is answered");
        }
        assert_eq!(stage.device.counts(), counts, "serving made no call that allocates device or page-locked memory");
        let now = stage.snapshot().await;
        assert_eq!((now.granted, now.overhead), (ready.granted, ready.overhead));
        let unbacked = now.granted - counts.backed;
        assert!(unbacked <= now.of_class(&Class::Graphs), "{unbacked} are leased but not backed");
        // Our own count is not sufficient, because it misses a library that takes memory
        // at its first use.
        let after = stage.device.memory().expect("the device reports its memory").free;
        println!("{steps} steps; {free} free at READY, {after} free after the steps");
        assert_eq!(after, free, "the driver reports the same free memory");
        // The model still gives the same answer as before.
        let chat = question("Describe the picture.", TOKENS).image(picture(0)).cache_salt("second");
        assert_eq!(answer(&model, chat).await.expect("the chat is answered"), replies[0]);
        stage.runtime.unload("demo").await.expect("the model unloads");
        assert_eq!(stage.snapshot().await.granted, Bytes::ZERO);
    });
}

#[test]
fn a_repeated_prompt_is_read_from_an_fp8_kv_cache() {
    story(async |stage| {
        let Some(model) = demo(&stage, LoadOptions { kv_cache_dtype: KvCacheType::Fp8, ..options() }).await else {
            return;
        };
        let prompt = "Describe the picture. ".repeat(30);
        let mut replies = Vec::new();
        for _ in 0..3 {
            let chat = question(&prompt, 40).image(picture(1));
            let mut reply = model.chat(chat).await.expect("the chat is accepted");
            while let Some(event) = reply.next().await {
                if let ChatEvent::Done { text, usage, .. } = event.expect("the chat is answered") {
                    replies.push((text, usage));
                }
            }
        }
        let [(first, cold), (second, warm), (third, again)] = replies.try_into().expect("there are three replies");
        assert_eq!((cold.cached_tokens, warm.cached_tokens), (0, again.cached_tokens));
        assert!(2 * warm.cached_tokens > warm.prompt_tokens, "{warm:?}");
        assert_eq!(second, third);
        // The uncached rest of the prompt is computed by kernels for fewer rows, so a near-tie in
        // the reply may resolve differently.
        let begin = |reply: &str| reply.chars().take(8).collect::<String>();
        assert_eq!(begin(&first), begin(&second));
        stage.runtime.unload("demo").await.expect("the model unloads");
    });
}

#[test]
fn a_model_is_served_in_the_requested_dtype() {
    story(async |stage| {
        let half = LoadOptions { dtype: Precision::Float16, ..options() };
        let loaded = stage.runtime.load_with(ModelSource::demo(), half, |_| {}).await;
        let model = loaded.expect("the demo model starts on a GPU");
        assert_eq!(model.serving().await.expect("the model serves").target.activation(), DType::F16);
        assert!(!answer(&model, question("Who are you?", 4)).await.expect("the chat is answered").is_empty());
        stage.runtime.unload("demo").await.expect("the model unloads");
        let single = LoadOptions { dtype: Precision::Float32, ..options() };
        let refused = stage.runtime.load_with(ModelSource::demo(), single, |_| {}).await;
        let refused = refused.err().expect("the GPU has no kernels for the setting").to_string();
        assert!(refused.contains("dtype is float32") && refused.ends_with("float16"), "{refused}");
        assert_eq!(stage.snapshot().await.granted, Bytes::ZERO);
    });
}
