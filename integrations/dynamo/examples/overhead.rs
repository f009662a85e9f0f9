//! The worker's overhead compared with its model in the same process: time to the first token, and
//! time for each later token. Prints one line of JSON with medians in ms. `ONLY=overhead ./try.sh`
//! runs this example and then the same measurement through HTTP.
//!
//!     cargo run --example overhead -- --model demo --device host

use std::time::Instant;

use bursar::{Chat, ChatEvent, ModelHandle};
use bursar_dynamo::{BursarWorker, Options};
use clap::Parser;
use dynamo_backend_common::{
    GenerateContext, LLMEngine, OutputOptions, PreprocessedRequest, SamplingOptions, StopConditions,
    testing::mock_context,
};
use futures::StreamExt;

const REPLIES: usize = 100;
/// Replies that are not counted, because the caches are empty and the code is cold.
const WARM_UP: usize = 10;
const TOKENS: u32 = 64;

/// The times of one reply: ms to its first token, and ms for each later token.
struct Latencies {
    first_ms: f64,
    each_ms: f64,
}

impl Latencies {
    fn of(begun: Instant, arrivals: &[Instant]) -> Latencies {
        assert_eq!(arrivals.len(), TOKENS as usize, "a reply has all its tokens");
        let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        let (first, last) = (arrivals[0], arrivals[arrivals.len() - 1]);
        Latencies { first_ms: ms(begun, first), each_ms: ms(first, last) / f64::from(TOKENS - 1) }
    }
}

async fn in_process(model: &ModelHandle, tokens: Vec<u32>) -> anyhow::Result<Latencies> {
    let (begun, mut arrivals) = (Instant::now(), Vec::new());
    let chat = Chat::from_tokens(tokens).token_ids().temperature(0.0).max_tokens(TOKENS as usize).ignore_end();
    let mut reply = model.chat(chat).await?;
    while let Some(event) = reply.next().await {
        match event? {
            ChatEvent::TokenId(_) => arrivals.push(Instant::now()),
            ChatEvent::Done { .. } => break,
            _ => {}
        }
    }
    Ok(Latencies::of(begun, &arrivals))
}

async fn by_the_worker(worker: &BursarWorker, tokens: Vec<u32>) -> anyhow::Result<Latencies> {
    let (begun, mut arrivals) = (Instant::now(), Vec::new());
    let most = StopConditions { max_tokens: Some(TOKENS), ignore_eos: Some(true), ..StopConditions::default() };
    let request = PreprocessedRequest::builder()
        .model("demo".to_owned())
        .token_ids(tokens)
        .stop_conditions(most)
        .sampling_options(SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() })
        .output_options(OutputOptions::default())
        .build()?;
    let mut chunks = worker.generate(request, GenerateContext::new(mock_context(), None)).await?;
    while let Some(chunk) = chunks.next().await {
        if !chunk?.token_ids.is_empty() {
            arrivals.push(Instant::now());
        }
    }
    Ok(Latencies::of(begun, &arrivals))
}

fn medians(name: &str, replies: &[Latencies]) -> String {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let first = median(replies.iter().map(|reply| reply.first_ms).collect());
    let each = median(replies.iter().map(|reply| reply.each_ms).collect());
    format!("\"{name}\":{{\"first_ms\":{first:.3},\"each_ms\":{each:.3}}}")
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let worker = BursarWorker::new(Options::parse());
    worker.start(1).await?;
    let model = worker.model().ok_or_else(|| anyhow::anyhow!("the started worker has no model"))?;
    let (mut near, mut far) = (Vec::new(), Vec::new());
    for reply in 0..WARM_UP + REPLIES {
        // No prompt is used twice, so neither measurement finds more of its prompt in the cache
        // than the other.
        let prompt = async |number: usize| {
            model.prompt_of(Chat::new().user(format!("Tell me about {number}."))).await.map(|prompt| prompt.token_ids)
        };
        let (one, other) = (prompt(1000 + 2 * reply).await?, prompt(1001 + 2 * reply).await?);
        let replies = (in_process(&model, one).await?, by_the_worker(&worker, other).await?);
        if reply >= WARM_UP {
            near.push(replies.0);
            far.push(replies.1);
        }
    }
    worker.cleanup().await?;
    println!("{{{},{}}}", medians("in_process", &near), medians("worker", &far));
    Ok(())
}
