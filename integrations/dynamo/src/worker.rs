//! The worker: one model, from start to shutdown.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use bursar::{BLOCK_TOKENS, Bytes, Hint, ModelHandle, Progress, Runtime, SleepLevel};
use bursar_serve::Service;
use dynamo_backend_common::{
    DynamoError, EngineConfig, GenerateContext, KvEventSource, LLMEngine, LLMEngineOutput, LlmRegistration,
    MetricsBindings, MetricsCtx, PreprocessedRequest,
};
use futures::stream::BoxStream;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::{
    Options, ask,
    fault::{away, invalid, of_chat, of_engine, of_picture},
    feed::{self, HitCount},
    reply_stream::{self, ReplyContext},
};

/// A Bursar model as a worker of Dynamo.
pub struct BursarWorker {
    options: Options,
    running: Mutex<Option<Arc<Running>>>,
}

/// The state of a started worker.
struct Running {
    runtime: Runtime,
    model: ModelHandle,
    /// The service that reads pictures. It does not listen on a port.
    pictures: Service,
    /// KV blocks at READY, the total from which the router subtracts used blocks.
    blocks: u64,
    hits: Arc<HitCount>,
    /// `true` if an operator has put the model to sleep. A late request must not
    /// wake the model then.
    sleeps: AtomicBool,
    /// The tasks that report to the router.
    feeds: Mutex<Vec<JoinHandle<()>>>,
}

impl Running {
    fn feed(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.feeds.lock().unwrap_or_else(PoisonError::into_inner).push(tokio::spawn(task));
    }
}

impl BursarWorker {
    /// Returns a worker that has not started.
    pub fn new(options: Options) -> Self {
        BursarWorker { options, running: Mutex::new(None) }
    }

    fn running(&self) -> Result<Arc<Running>, DynamoError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).clone();
        running.ok_or_else(|| away("the worker has not started, or has ended"))
    }

    /// Returns the model, for a program that embeds the worker. Returns `None` before the start and
    /// after the shutdown.
    pub fn model(&self) -> Option<ModelHandle> {
        self.running().ok().map(|running| running.model.clone())
    }

    async fn set_asleep(&self, body: &Value) -> Result<Value, DynamoError> {
        let running = self.running()?;
        let (level, within) = nap(body, self.options.drain())?;
        running.sleeps.store(true, Relaxed);
        match running.model.sleep(level, within).await {
            Ok(()) => Ok(json!({"status": "ok", "is_sleeping": true, "level": level})),
            Err(error) => {
                running.sleeps.store(false, Relaxed);
                Ok(json!({"status": "error", "message": format!("{error}; {}", error.hint())}))
            }
        }
    }

    async fn set_awake(&self) -> Result<Value, DynamoError> {
        let running = self.running()?;
        match running.model.wake().await {
            Ok(()) => {
                running.sleeps.store(false, Relaxed);
                Ok(json!({"status": "ok", "is_sleeping": false}))
            }
            Err(error) => {
                Ok(json!({"status": "error", "is_sleeping": true, "message": format!("{error}; {}", error.hint())}))
            }
        }
    }
}

impl BursarWorker {
    /// Fault injection for the host device: makes a simulated process hold `bytes` bytes, or as
    /// many as are available. With 0, the simulated process frees its memory.
    fn drill(&self, body: &Value) -> Result<Value, DynamoError> {
        let bytes = body.get("bytes").and_then(Value::as_u64);
        let bytes = Bytes(bytes.ok_or_else(|| invalid("`bytes` must be a whole number"))?);
        let Some(device) = self.running()?.runtime.device().as_host() else {
            return Ok(json!({"status": "error", "message": "other processes can be simulated only on host memory"}));
        };
        let held = device.counts().foreign;
        if bytes > held {
            device.foreign_takes(bytes - held);
        } else {
            device.foreign_gives_back(held - bytes);
        }
        Ok(json!({"status": "ok", "bytes": device.counts().foreign.0}))
    }
}

/// Parses a sleep request: the sleep level (vLLM's `level`), and the time that running replies may
/// take before the model sleeps (`within`, in seconds).
fn nap(body: &Value, drain: Duration) -> Result<(SleepLevel, Duration), DynamoError> {
    let number = |name: &str| match body.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| invalid(format!("`{name}` must be a whole number"))),
    };
    let level = u8::try_from(number("level")?.unwrap_or(1)).ok().and_then(|level| SleepLevel::try_from(level).ok());
    let level = level.ok_or_else(|| invalid("`level` must be 1 or 2; level 2 keeps no weights"))?;
    Ok((level, number("within")?.map_or(drain, Duration::from_secs)))
}

/// Logs the progress of a start, which otherwise logs nothing for minutes.
fn print(progress: &Progress) {
    match progress {
        Progress::Planning => tracing::info!("planning the worst cases"),
        Progress::Loading { done, total } if done == total => tracing::info!(bytes = total.0, "weights are loaded"),
        Progress::Profiling { what, done, total, .. } => tracing::info!(what = %what, done, total, "profiling"),
        _ => {}
    }
}

#[async_trait]
impl LLMEngine for BursarWorker {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let options = &self.options;
        let load = options.load().map_err(invalid)?;
        let runtime = Runtime::start(options.runtime()).await;
        let runtime = runtime.map_err(|error| of_engine(format!("{error}; {}", error.hint())))?;
        let model = runtime.load_with(options.source(), load, |progress| print(&progress)).await;
        let model = model.map_err(|error| of_engine(format!("{error}; {}", error.hint())))?;
        let facts = model.facts().await.map_err(|error| of_chat(&error))?;
        let record = model.serving().await.map_err(|error| of_chat(&error))?.record;
        let ledger = runtime.budget().snapshot().await.map_err(of_engine)?;
        let classes = ledger.classes.iter().map(|line| (line.class.to_string(), json!(line.bytes.0)));
        let classes: serde_json::Map<String, Value> = classes.collect();
        let parts = [("total", ledger.total), ("overhead", ledger.overhead), ("foreign", ledger.foreign)];
        let parts = parts.into_iter().chain([("canary", ledger.canary), ("free", ledger.free)]);
        let parts: serde_json::Map<String, Value> =
            parts.map(|(name, Bytes(bytes))| (name.to_owned(), json!(bytes))).collect();
        let ledger = json!({"device": runtime.device().name(), "bytes": parts, "bytes_by_class": classes});
        let blocks = model.kv_use().changed().await.map_or(record.kv_blocks, |usage| usage.blocks) as u64;
        let registration = LlmRegistration {
            context_length: u32::try_from(facts.context_tokens).ok(),
            kv_cache_block_size: Some(BLOCK_TOKENS as u32),
            total_kv_blocks: Some(blocks),
            max_num_seqs: Some(record.sequences as u64),
            max_num_batched_tokens: Some(record.step_tokens as u64),
            data_parallel_size: Some(1),
            ..LlmRegistration::default()
        };
        let running = Running {
            pictures: Service::new(&runtime, options.pictures()),
            runtime,
            model,
            blocks,
            hits: Arc::default(),
            sleeps: AtomicBool::new(false),
            feeds: Mutex::default(),
        };
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(running));
        Ok(EngineConfig {
            model: if options.model == "demo" { facts.name.clone() } else { options.model.clone() },
            served_model_name: Some(options.served_model_name.clone().unwrap_or(facts.name)),
            model_aliases: Vec::new(),
            runtime_data: HashMap::from([("bursar".to_owned(), ledger)]),
            llm: Some(registration),
        })
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let running = self.running()?;
        if running.sleeps.load(Relaxed) {
            return Err(away("the worker sleeps; wake it with the control `wake_up`"));
        }
        let context = ctx.inner_arc();
        let begun = async {
            let urls = ask::pictures(&request)?;
            let pictures = if urls.is_empty() {
                None
            } else {
                Some(running.pictures.read_pictures(&urls).await.map_err(|error| of_picture(&error))?)
            };
            let shown = pictures.as_ref().map_or(&[][..], |read| &read.pictures);
            let (chat, visible_ends) = ask::chat(&request, shown)?;
            let reply = running.model.chat(chat).await.map_err(|error| of_chat(&error))?;
            let is_scored = request.output_options.logprobs.is_some();
            let hits = running.hits.clone();
            let reply_context = ReplyContext { context: context.clone(), is_scored, visible_ends, hits, pictures };
            Ok(reply_stream::chunks(reply, reply_context))
        };
        tokio::select! {
            biased;
            () = context.stopped() => Ok(reply_stream::cancelled()),
            begun = begun => begun,
        }
    }

    async fn is_quiescent(&self) -> Result<Option<bool>, DynamoError> {
        Ok(Some(self.running().map_or(true, |running| running.model.requests().0 == 0)))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(running) = running {
            running.runtime.clone().shutdown_within(self.options.drain()).await;
            let feeds = std::mem::take(&mut *running.feeds.lock().unwrap_or_else(PoisonError::into_inner));
            // The reporting tasks end with the model.
            futures::future::join_all(feeds).await;
        }
        Ok(())
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        let running = self.running()?;
        let on_ready = move |publisher| {
            running.feed(feed::blocks(running.model.clone(), publisher));
            Ok(())
        };
        Ok(vec![KvEventSource::Push { on_ready: Box::new(on_ready), dp_rank: 0 }])
    }

    async fn setup_metrics(&self, ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let running = self.running()?;
        match bursar::MetricsText::install() {
            Ok(text) => ctx.metrics.add_expfmt_callback(Arc::new(move || Ok(text.render()))),
            Err(error) => tracing::warn!(%error, "Bursar's own metrics are not exported"),
        }
        let on_ready = move |publisher| {
            let (model, hits) = (running.model.clone(), running.hits.clone());
            running.feed(feed::load(model, running.blocks, hits, publisher));
            Ok(())
        };
        Ok(MetricsBindings { dp_ranks: vec![0], on_publisher_ready: Some(Box::new(on_ready)) })
    }

    /// A request for one token. There is no cache of replies, so the model has to compute the
    /// token, and the check fails if the model does not work.
    async fn health_check_payload(&self) -> Result<Option<Value>, DynamoError> {
        let tokens = self.running()?.model.tokenize("a", false).await.map_err(|error| of_chat(&error))?;
        let once = json!({"max_tokens": 1, "ignore_eos": true});
        Ok(Some(json!({"token_ids": tokens, "stop_conditions": once, "sampling_options": {"temperature": 0.0}})))
    }

    async fn supported_controls(&self) -> Result<Vec<String>, DynamoError> {
        Ok(["sleep", "wake_up", "other_process", "neighbour"].map(str::to_owned).to_vec())
    }

    fn validate_engine_control(&self, control: &str, body: &Value) -> Result<(), DynamoError> {
        if control == "sleep" { nap(body, self.options.drain()).map(drop) } else { Ok(()) }
    }

    async fn engine_control(&self, control: String, body: Value) -> Result<Value, DynamoError> {
        match control.as_str() {
            "sleep" => self.set_asleep(&body).await,
            "wake_up" => self.set_awake().await,
            // `neighbour` is the former name of this control. Remove it after the next release.
            "other_process" | "neighbour" => self.drill(&body),
            _ => Ok(json!({"status": "error", "message": format!("unsupported engine control: {control}")})),
        }
    }
}
