//! The cost of HTTP: the same requests to a model in this process, and through
//! `bursar serve` in another process.
//!
//! ```sh
//! cargo bench --bench serve                              # the demo, on this machine's cores
//! cargo bench --bench serve -- --help
//! ```
//!
//! The two runs follow one after the other, each in a separate process. In the first run, a child
//! loads the model and sends the requests itself. In the second run, a server gets the requests
//! from this process. The CPU time of the child and of the server is read from `/proc`, so this
//! benchmark needs Linux.

#[path = "serve/client.rs"]
mod client;
#[path = "serve/load.rs"]
mod load;
#[path = "serve/process.rs"]
mod process;

use std::{error::Error, time::Duration};

use bursar::{LoadOptions, ModelSource, Runtime, RuntimeConfig};
use clap::Parser;
use tokio::time::{Instant, sleep_until};

use client::{Client, Http, InProcess};
use load::{Load, Summary};
use process::{Process, Watched};

/// Sends the same requests to a model in process and through HTTP, and compares the times.
#[derive(Clone, Debug, Parser)]
pub struct Options {
    /// The model: a folder, or `demo`.
    #[arg(long, default_value = "demo")]
    model: String,
    /// The server program. The default is the `bursar` that cargo has built.
    #[arg(long, default_value = env!("CARGO_BIN_EXE_bursar"))]
    server: String,
    /// Numbers of concurrent streams, one run for each number. A stream sends its next request when
    /// its reply has ended.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    streams: Vec<usize>,
    /// The time in which each run sends requests, in seconds.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Words of a prompt.
    #[arg(long, default_value_t = 64)]
    words: usize,
    /// Tokens of a reply.
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// A JSON file of requests with arrival times, which replaces the streams:
    /// `{"runs": [{"name", "requests": [{"t", "kind", "prompt", "out", "file"}]}]}`.
    #[arg(long)]
    trace: Option<String>,
    /// The folder of the trace's pictures.
    #[arg(long, default_value = ".")]
    pictures: String,
    /// Number of clients that subscribe to the budget's events and wait.
    #[arg(long, default_value_t = 0)]
    idle: usize,
    /// Whether this process is the child that sends requests in process.
    #[arg(long, hide = true)]
    is_child: bool,
    /// Ignored. cargo passes this flag to each benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let options = Options::parse();
    let loads = Load::all(&options)?;
    if options.is_child {
        return ask_in_process(&options, &loads).await;
    }
    println!("{}", Summary::HEAD);
    let child = Process::itself()?;
    for load in &loads {
        print(load, "in process", &child.summary().await?);
    }
    child.end().await;
    let server = Process::serving(&options).await?;
    let client = Client::Http(Http::new(server.address(), &options));
    client.warm_up(&options).await?;
    for load in &loads {
        let before = server.watch()?;
        let mut summary = load.run(&client).await;
        summary.cpu = server.watch()?.cpu - before.cpu;
        print(load, "http", &summary);
    }
    if options.idle > 0 {
        idle(&server, options.idle).await?;
    }
    server.end().await;
    Ok(())
}

fn print(load: &Load, way: &str, summary: &Summary) {
    println!("{}", summary.line(&load.name(), way));
}

/// The child process: prints one line of JSON for each load.
async fn ask_in_process(options: &Options, loads: &[Load]) -> Result<(), Failure> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    let source = match options.model.as_str() {
        "demo" => ModelSource::demo(),
        folder => ModelSource::folder(folder),
    };
    let model = runtime.load_with(source, LoadOptions::default(), |_| {}).await?;
    let client = Client::InProcess(InProcess::new(model, options));
    client.warm_up(options).await?;
    for load in loads {
        let before = Watched::of("self")?;
        let mut summary = load.run(&client).await;
        summary.cpu = Watched::of("self")?.cpu - before.cpu;
        println!("{}", serde_json::to_string(&summary)?);
    }
    runtime.shutdown().await;
    Ok(())
}

/// Measures the CPU time and memory of clients that wait for events.
async fn idle(server: &Process, count: usize) -> Result<(), Failure> {
    let before = server.watch()?;
    let waiting = client::idle(server.address(), count).await?;
    sleep_until(Instant::now() + Duration::from_secs(5)).await;
    let first = server.watch()?;
    sleep_until(Instant::now() + Duration::from_secs(10)).await;
    let last = server.watch()?;
    let more = (last.resident - before.resident) as f64 / f64::from(1 << 20);
    let share = (last.cpu - first.cpu).as_secs_f64() / 10.0;
    println!("{count} clients watch the budget: {more:.0} MiB, {share:.2} of a core");
    drop(waiting);
    Ok(())
}
