//! Tests of the worker with the demo model on host memory and without Dynamo's runtime. Requests
//! have the form in which the frontend sends them. `try.sh` has the tests with a real frontend.

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use bursar::{BlockEvent, Chat, Image, demo};
use bursar_dynamo::{BursarWorker, Options, stored_event};
use clap::Parser;
use dynamo_backend_common::{
    BackendError, CompletionUsage, DynamoError, EngineConfig, ErrorType, FinishReason, GenerateContext, LLMEngine,
    LLMEngineOutput, MultimodalData, OutputOptions, PreprocessedRequest, SamplingOptions, StopConditions,
    testing::{mock_context, run_conformance},
};
use dynamo_kv_router::protocols::{BlockHashOptions, KvCacheEventData, compute_block_hash_for_seq};
use futures::StreamExt;
use serde_json::json;

const BLOCK: usize = 16;

fn options(more: &[&str]) -> Options {
    let usual = ["bursar-dynamo", "--device", "host", "--knob", "kv_tokens=1024", "--knob", "context_tokens=512"];
    let model = if more.contains(&"--model") { &[][..] } else { &["--model", "demo"] };
    Options::parse_from(usual.iter().chain(model).chain(more))
}

/// A worker that is ready.
async fn started(more: &[&str]) -> (BursarWorker, EngineConfig) {
    let worker = BursarWorker::new(options(more));
    let config = worker.start(7).await.expect("the demo model starts");
    (worker, config)
}

fn request(tokens: &[u32], most: u32) -> PreprocessedRequest {
    PreprocessedRequest::builder()
        .model("demo".to_owned())
        .token_ids(tokens.to_vec())
        .stop_conditions(StopConditions { max_tokens: Some(most), ..StopConditions::default() })
        .sampling_options(SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() })
        .output_options(OutputOptions::default())
        .build()
        .expect("a request")
}

/// All chunks of a reply. The last chunk is its end.
async fn chunks(worker: &BursarWorker, request: PreprocessedRequest) -> Result<Vec<LLMEngineOutput>, DynamoError> {
    let stream = worker.generate(request, GenerateContext::new(mock_context(), None)).await?;
    let chunks: Result<Vec<_>, _> = stream.collect::<Vec<_>>().await.into_iter().collect();
    let chunks = chunks?;
    let ends = chunks.iter().filter(|chunk| chunk.finish_reason.is_some()).count();
    assert!(ends == 1 && chunks.last().is_some_and(|chunk| chunk.finish_reason.is_some()), "one end, the last chunk");
    Ok(chunks)
}

fn tokens(chunks: &[LLMEngineOutput]) -> Vec<u32> {
    chunks.iter().flat_map(|chunk| chunk.token_ids.clone()).collect()
}

fn usage(chunks: &[LLMEngineOutput]) -> CompletionUsage {
    chunks.last().and_then(|end| end.completion_usage.clone()).expect("the end has the usage")
}

fn cached(chunks: &[LLMEngineOutput]) -> u32 {
    usage(chunks).prompt_tokens_details.and_then(|details| details.cached_tokens).expect("a cached token count")
}

async fn refused(worker: &BursarWorker, request: PreprocessedRequest) -> (ErrorType, String) {
    let error = chunks(worker, request).await.expect_err("the worker refuses the request");
    (error.error_type(), error.to_string())
}

/// Tokens of a question about the demo's picture of a number. As in a prompt from the frontend, one
/// token is the placeholder of the picture.
async fn question(worker: &BursarWorker) -> Vec<u32> {
    let chat = Chat::new().user("What number is written?").image(Image::from_bytes(demo::pictures()[1].bytes));
    let prompt = worker.model().expect("the worker has a model").prompt_of(chat).await.expect("a prompt");
    let rows = prompt.picture_tokens[0];
    let first = prompt.token_ids.windows(rows).position(|run| run.iter().all(|token| *token == run[0]));
    let first = first.expect("a run of placeholders");
    [&prompt.token_ids[..=first], &prompt.token_ids[first + rows..]].concat()
}

/// A request with one change.
fn with(mut request: PreprocessedRequest, change: impl FnOnce(&mut PreprocessedRequest)) -> PreprocessedRequest {
    change(&mut request);
    request
}

fn shown(tokens: &[u32], url: &str) -> PreprocessedRequest {
    let media = [("image_url".to_owned(), vec![MultimodalData::RawUrl(url.to_owned())])].into();
    with(request(tokens, 8), |request| request.multi_modal_data = Some(media))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_worker_passes_dynamos_conformance_tests() {
    run_conformance(|| BursarWorker::new(options(&[]))).await.expect("the worker conforms");
}

#[tokio::test(flavor = "multi_thread")]
async fn registration_reports_sizes_permits_and_bytes_by_class() {
    let (worker, config) = started(&["--served-model-name", "eyes"]).await;
    let llm = config.llm.expect("the worker registers an LLM");
    let model = worker.model().expect("the worker has a model");
    let blocks = model.kv_use().changed().await.expect("the model serves").blocks;
    assert_eq!((llm.kv_cache_block_size, llm.total_kv_blocks), (Some(16), Some(blocks as u64)));
    let (facts, record) =
        (model.facts().await.expect("facts"), model.serving().await.expect("the model serves").record);
    assert_eq!(llm.context_length, u32::try_from(facts.context_tokens).ok());
    assert_eq!(llm.max_num_seqs, Some(record.sequences as u64));
    assert_eq!(llm.max_num_batched_tokens, Some(record.step_tokens as u64));
    assert_eq!(config.served_model_name.as_deref(), Some("eyes"));
    let ledger = &config.runtime_data["bursar"];
    let classes = ledger["bytes_by_class"].as_object().expect("classes");
    let granted: u64 = classes.values().filter_map(|bytes| bytes.as_u64()).sum();
    let of = |name: &str| ledger["bytes"][name].as_u64().expect("a number of bytes");
    assert_eq!(granted + of("overhead") + of("foreign") + of("canary") + of("free"), of("total"), "{ledger}");
    worker.cleanup().await.expect("the worker shuts down");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_picture_in_a_data_uri_is_answered_and_cached() {
    let (worker, _) = started(&[]).await;
    let tokens_in = question(&worker).await;
    let url = format!("data:image/png;base64,{}", STANDARD.encode(demo::pictures()[1].bytes));
    let first = chunks(&worker, shown(&tokens_in, &url)).await.expect("the worker answers");
    let model = worker.model().expect("the worker has a model");
    assert_eq!(model.detokenize(tokens(&first)).await.expect("text"), "427");
    assert!(matches!(first.last().expect("an end").finish_reason, Some(FinishReason::Stop)));
    let again = chunks(&worker, shown(&tokens_in, &url)).await.expect("the worker answers");
    assert_eq!(tokens(&again), tokens(&first));
    assert_eq!((cached(&first), cached(&again)), (0, (usage(&first).prompt_tokens - 1) / 16 * 16));
    worker.cleanup().await.expect("the worker shuts down");
}

#[tokio::test(flavor = "multi_thread")]
async fn pictures_follow_serves_rules_and_unsupported_inputs_are_refused() {
    let (worker, _) = started(&["--allow-url-host", "localhost"]).await;
    let tokens = question(&worker).await;
    let invalid = ErrorType::Backend(BackendError::InvalidArgument);
    for url in ["http://127.0.0.1:1/a.png", "http://localhost/a.png", "file:///etc/passwd", "data:image/png,no"] {
        let (kind, message) = refused(&worker, shown(&tokens, url)).await;
        assert_eq!(kind, invalid, "{url}: {message}");
    }
    let video = [("video_url".to_owned(), vec![MultimodalData::RawUrl("data:,".to_owned())])].into();
    let video = with(request(&tokens, 1), |request| request.multi_modal_data = Some(video));
    let two = with(request(&[11, 7], 1), |request| request.sampling_options.n = Some(2));
    for (what, request) in [("a video", video), ("two replies", two), ("an unknown token", request(&[3, 100_000], 1))] {
        assert_eq!(refused(&worker, request).await.0, invalid, "{what}");
    }
    worker.cleanup().await.expect("the worker shuts down");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_follows_the_requests_scores_stops_and_limits() {
    let (worker, _) = started(&[]).await;
    let asked = |request: PreprocessedRequest| chunks(&worker, request);
    let plain = asked(request(&[11, 7, 500], 6)).await.expect("the worker answers");
    let ids = tokens(&plain);

    let scored = with(request(&[11, 7, 500], 6), |request| request.output_options.logprobs = Some(2));
    let scored = asked(scored).await.expect("the worker answers");
    assert_eq!(tokens(&scored), ids, "scores change no token");
    for chunk in scored.iter().filter(|chunk| chunk.finish_reason.is_none()) {
        let (own, top) = (chunk.log_probs.as_ref().expect("scores"), chunk.top_logprobs.as_ref().expect("top scores"));
        assert!(
            own.len() == 1 && top[0].len() == 2 && top[0][0].token_id == chunk.token_ids[0],
            "the greedy token has the best score"
        );
        assert!(own[0] == top[0][0].logprob && own[0] >= top[0][1].logprob && own[0] <= 0.0);
    }

    let third = ids[2];
    let before = ids.iter().take_while(|id| **id != third).count();
    let ended = |stops| with(request(&[11, 7, 500], 6), |request| request.stop_conditions = stops);
    let most = StopConditions { max_tokens: Some(6), ..StopConditions::default() };
    let hidden = ended(StopConditions { stop_token_ids: Some(vec![third]), ..most.clone() });
    assert_eq!(tokens(&asked(hidden).await.expect("the worker answers")), ids[..before]);
    let visible = ended(StopConditions { stop_token_ids_visible: Some(vec![third]), ..most.clone() });
    let visible = asked(visible).await.expect("the worker answers");
    assert_eq!(tokens(&visible), ids[..=before], "a visible stop token is part of the reply");
    assert_eq!(usage(&visible).completion_tokens as usize, before + 1);
    let endless = ended(StopConditions { ignore_eos: Some(true), stop_token_ids: Some(vec![third]), ..most });
    let endless = asked(endless).await.expect("the worker answers");
    assert_eq!((tokens(&endless).len(), &endless[6].finish_reason), (6, &Some(FinishReason::Length)));
    worker.cleanup().await.expect("the worker shuts down");
}

#[tokio::test(flavor = "multi_thread")]
async fn block_hashes_equal_those_of_the_router() {
    let (worker, _) = started(&[]).await;
    let mut events = worker.model().expect("the worker has a model").block_events();
    let prompt: Vec<u32> = (40..140).collect();
    for namespace in [None, Some("a tenant")] {
        let hints = Some(serde_json::from_value(json!({"cache_salt": namespace})).expect("hints"));
        let asked = with(request(&prompt, 1), |request| request.routing = hints);
        chunks(&worker, asked).await.expect("the worker answers");
        let mut stored = Vec::new();
        while stored.len() < prompt.len() / BLOCK {
            for change in events.next().await.expect("the stream of block events continues").iter() {
                if let BlockEvent::Stored(block) = change
                    && let KvCacheEventData::Stored(event) = stored_event(block)
                {
                    stored.push(event);
                }
            }
        }
        let options = BlockHashOptions { cache_namespace: namespace, ..BlockHashOptions::default() };
        let wanted = compute_block_hash_for_seq(&prompt, BLOCK as u32, options);
        let named: Vec<_> = stored.iter().map(|event| event.blocks[0].tokens_hash).collect();
        assert_eq!(named, wanted, "{namespace:?}");
        let parents: Vec<_> = stored.iter().skip(1).map(|event| event.parent_hash).collect();
        let before: Vec<_> = stored.iter().map(|event| Some(event.blocks[0].block_hash)).take(parents.len()).collect();
        assert_eq!((stored[0].parent_hash, parents), (None, before), "the parent of each block is the block before it");
    }
    worker.cleanup().await.expect("the worker shuts down");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sleeping_worker_refuses_requests_until_it_is_woken() {
    let (worker, _) = started(&[]).await;
    let asked = || request(&[11, 7, 500], 4);
    let before = tokens(&chunks(&worker, asked()).await.expect("the worker answers"));
    assert!(worker.validate_engine_control("sleep", &json!({"level": 3})).is_err());
    let control = async |name: &str| {
        worker.engine_control(name.to_owned(), json!({"level": 2})).await.expect("the worker reports its state")
    };
    assert_eq!(control("sleep").await["is_sleeping"], true);
    assert!(worker.model().expect("the worker has a model").is_asleep().is_some());
    assert_eq!(refused(&worker, asked()).await.0, ErrorType::WorkerUnavailable, "the router may try another worker");
    assert!(
        worker.model().expect("the worker has a model").is_asleep().is_some(),
        "a late request does not wake the model"
    );
    assert_eq!(control("wake_up").await["is_sleeping"], false);
    assert_eq!(tokens(&chunks(&worker, asked()).await.expect("the worker answers")), before);
    assert_eq!(control("dance").await["status"], "error");
    worker.cleanup().await.expect("the worker shuts down");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_worker_refuses_requests_until_a_reply_is_dropped() {
    let (worker, _) = started(&["--knob", "requests=1"]).await;
    let long = || with(request(&[11, 7, 500], 200), |request| request.stop_conditions.ignore_eos = Some(true));
    // The stream of this reply fills up before the reply ends, so the request keeps running.
    let held = worker.generate(long(), GenerateContext::new(mock_context(), None)).await.expect("the reply begins");
    assert_eq!(worker.is_quiescent().await.expect("the worker reports its state"), Some(false));
    assert_eq!(refused(&worker, long()).await.0, ErrorType::WorkerOverloaded);
    drop(held);
    let mut looks = tokio::time::interval(Duration::from_millis(2));
    while worker.is_quiescent().await.expect("the worker reports its state") != Some(true) {
        looks.tick().await;
    }
    let after = chunks(&worker, long()).await.expect("the worker answers");
    assert_eq!(tokens(&after).len(), 200);
    worker.cleanup().await.expect("the worker shuts down");
    worker.cleanup().await.expect("a second cleanup succeeds");
    assert_eq!(refused(&worker, long()).await.0, ErrorType::WorkerUnavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_answers_the_health_check_request() {
    let (worker, _) = started(&[]).await;
    let payload =
        worker.health_check_payload().await.expect("the worker reports its state").expect("there is a payload");
    let asked: PreprocessedRequest = serde_json::from_value(payload).expect("a request");
    assert_eq!(tokens(&chunks(&worker, asked).await.expect("the worker answers")).len(), 1);
    worker.cleanup().await.expect("the worker shuts down");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_start_gives_a_reason_and_allows_cleanup() {
    for more in [&["--knob", "no_such_knob=1"][..], &["--capacity", "1MiB"], &["--model", "/no/such/folder"]] {
        let worker = BursarWorker::new(options(more));
        let error = worker.start(7).await.expect_err("the worker cannot start");
        assert!(error.to_string().len() > 20, "{error}");
        worker.cleanup().await.expect("there is nothing to clean up");
    }
    // Dynamo's runtime shares workers between threads, so the type must allow that.
    let _: Arc<dyn LLMEngine> = Arc::new(BursarWorker::new(options(&[])));
}
