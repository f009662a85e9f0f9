//! HTTP endpoint for metrics, the latest events and health, used by Prometheus, `bursar top`,
//! process supervisors and load balancers.

use std::{
    fmt,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, PoisonError, RwLock},
};

use axum::{
    Router,
    extract::State,
    http::{
        StatusCode,
        header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE},
    },
    middleware::map_response,
    response::{IntoResponse, Response},
    routing::get,
};
use metrics_exporter_prometheus::PrometheusHandle;
use ractor::ActorId;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

use super::{Health, Runtime, ServeMetricsError, recorder, scrape_limit::ScrapeLimit};
use crate::{
    event::{Recorded, latest_of},
    metric::{MetricsAddress, process},
};

/// A running endpoint. `/metrics` serves Prometheus' text format, `/events` the latest events as
/// JSON, and `/health` whether the process is alive and takes requests. Dropping this value stops
/// the endpoint.
#[derive(Debug)]
#[must_use = "the endpoint ends when this is dropped"]
pub struct MetricsServer {
    address: SocketAddr,
    /// Dropping this sender ends the server.
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
    runtimes: Arc<RwLock<Vec<ShownRuntime>>>,
}

impl MetricsServer {
    fn open(address: SocketAddr, listener: TcpListener, shown: Shown) -> Self {
        let runtimes = shown.runtimes.clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = axum::serve(ScrapeLimit::new(listener), routes(shown))
            .with_graceful_shutdown(async { drop(stopped.await) });
        // The server ends only when it is stopped: a failed connection is dropped, and the server
        // accepts the next connection.
        let serving = tokio::spawn(async { drop(serving.await) });
        MetricsServer { address, stop, serving, runtimes }
    }

    /// The address on which the endpoint listens, with the real port if port 0 was requested.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// Adds the events and the health of another runtime to the endpoint. Each event then has the
    /// `device` of its runtime, and the health checks succeed only if all runtimes are healthy. A
    /// runtime that was added before is not added again.
    pub fn add(&self, runtime: &Runtime) {
        let mut shown = self.runtimes.write().unwrap_or_else(PoisonError::into_inner);
        if shown.iter().all(|other| other.actor != runtime.actor().get_id()) {
            shown.push(ShownRuntime::of(runtime));
        }
    }

    /// Ends the endpoint and waits until the port is free. Clients that are being answered may
    /// finish within their time limit of a few seconds.
    pub async fn shutdown(self) {
        drop(self.stop);
        drop(self.serving.await);
    }

    /// Keeps the endpoint running without this handle, until the tokio runtime ends.
    pub fn detach(self) {
        let mut stop = self.stop;
        tokio::spawn(async move { stop.closed().await });
    }
}

impl Runtime {
    /// Serves the metrics of this process on `address` (`"9464"`, `"127.0.0.1:9464"`, or a
    /// [`SocketAddr`]). `GET /metrics` returns Prometheus' text format, and `GET /events` a JSON
    /// array of the latest events of this runtime. A port without an address means the loopback
    /// interface, and port 0 means any free port.
    ///
    /// `GET /health/live` answers 200 while this runtime is alive, and 503 when only a new runtime
    /// would help. `/health/ready` answers 200 while there is at least one model and all models
    /// take requests. `/health` answers 200 when both conditions are met. The body of each answer
    /// contains [`health`](Runtime::health) as JSON.
    ///
    /// The first call in a process installs a recorder with the buckets of
    /// [`buckets`](crate::metric::buckets). Later calls share this recorder, even on other
    /// runtimes, so every endpoint has the metrics of all runtimes. Call this function before you
    /// load models: counts from before the recorder was installed are missing.
    ///
    /// The endpoint has no access control. It does not show any prompt, picture or reply, but it
    /// shows the names of models and leases, and how busy they are. If you serve it on an
    /// interface other than loopback, protect it with your usual access control.
    ///
    /// The endpoint serves 64 clients at a time and gives each one answer within five seconds. If
    /// more clients connect, clients that have not sent a request are dropped first. The end of the
    /// runtime neither waits for the endpoint nor stops it: the endpoint runs until the server is
    /// dropped.
    ///
    /// ```
    /// # use bursar_actors::runtime::{DeviceChoice, Runtime, RuntimeConfig};
    /// # use bursar_budgets::Bytes;
    /// # #[tokio::main(flavor = "multi_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let config = RuntimeConfig { device: DeviceChoice::Host(Bytes::mib(128)), ..RuntimeConfig::default() };
    /// let runtime = Runtime::start(config).await?;
    /// let metrics = runtime.serve_metrics("0").await?;
    /// println!("http://{}/metrics", metrics.addr());
    /// # metrics.shutdown().await;
    /// # runtime.shutdown().await;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `address` is not an address or is taken, another recorder is installed, or the recorder's
    /// thread cannot be spawned. The error's hint says what to do.
    ///
    /// # Panics
    /// Outside a tokio runtime, or in one without `enable_io` and `enable_time`.
    pub async fn serve_metrics(&self, address: impl ToString) -> Result<MetricsServer, ServeMetricsError> {
        let address: MetricsAddress = address.to_string().parse()?;
        let refused = |source| ServeMetricsError::Refused { address, source };
        let listener = TcpListener::bind(address.0).await.map_err(refused)?;
        let bound = listener.local_addr().map_err(refused)?;
        let recorder = recorder::install()?;
        // Measures the device once, so that the first scrape shows it even if nothing was recorded
        // yet.
        drop(self.budget().measure().await);
        let runtimes = Arc::new(RwLock::new(vec![ShownRuntime::of(self)]));
        Ok(MetricsServer::open(bound, listener, Shown { recorder, runtimes }))
    }
}

/// State of the endpoint's routes.
#[derive(Clone)]
struct Shown {
    recorder: PrometheusHandle,
    runtimes: Arc<RwLock<Vec<ShownRuntime>>>,
}

/// The parts of a runtime that the endpoint shows. They must not contain a clone of the runtime,
/// because the runtime ends when its last clone is dropped.
#[derive(Clone)]
struct ShownRuntime {
    actor: ActorId,
    device: Arc<str>,
    events: Arc<dyn Fn() -> Vec<Recorded> + Send + Sync>,
    health: Arc<dyn Fn() -> Asked<Health> + Send + Sync>,
}

type Asked<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl fmt::Debug for ShownRuntime {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.device)
    }
}

impl ShownRuntime {
    fn of(runtime: &Runtime) -> Self {
        let (budget, actor) = (runtime.budget().clone(), runtime.actor());
        ShownRuntime {
            actor: actor.get_id(),
            device: runtime.device().label().into(),
            events: Arc::new(move || budget.events().recent()),
            health: Arc::new(move || {
                let actor = actor.clone();
                Box::pin(async move { Runtime::health_of(&actor).await })
            }),
        }
    }
}

impl Shown {
    fn runtimes(&self) -> Vec<ShownRuntime> {
        self.runtimes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the latest events of all runtimes, oldest first.
    fn events(&self) -> Vec<Value> {
        latest_of(self.runtimes().iter().map(|runtime| (&*runtime.device, (runtime.events)())))
    }

    /// Returns the combined health of all runtimes.
    async fn health(&self) -> Health {
        let mut all = Vec::new();
        for runtime in self.runtimes() {
            // Each runtime answers within a second.
            all.push((runtime.health)().await);
        }
        all.into_iter().collect()
    }
}

fn routes(shown: Shown) -> Router {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/events", get(events))
        .route("/health", get(async |State(shown): State<Shown>| health(shown, Health::is_ready).await))
        .route("/health/ready", get(async |State(shown): State<Shown>| health(shown, Health::is_ready).await))
        .route("/health/live", get(async |State(shown): State<Shown>| health(shown, |health| health.is_live).await));
    // Every answer closes its connection, so no client keeps its connection slot for another
    // request.
    routes.layer(map_response(async |answer: Response| ([(CONNECTION, "close")], answer))).with_state(shown)
}

async fn metrics(State(shown): State<Shown>) -> impl IntoResponse {
    process::show();
    answer("text/plain; version=0.0.4; charset=utf-8", shown.recorder.render())
}

async fn events(State(shown): State<Shown>) -> impl IntoResponse {
    answer("application/json", Value::Array(shown.events()).to_string())
}

/// Returns the health as a status code, for load balancers and process supervisors, and as a JSON
/// body with the details.
async fn health(shown: Shown, is_well: impl Fn(&Health) -> bool) -> impl IntoResponse {
    let health = shown.health().await;
    let status = if is_well(&health) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({ "live": health.is_live, "ready": health.is_ready(), "models": health.models });
    (status, answer("application/json", body.to_string()))
}

fn answer(content: &'static str, body: String) -> impl IntoResponse {
    ([(CONTENT_TYPE, content), (CACHE_CONTROL, "no-store")], body)
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        time::{Duration, SystemTime},
    };

    use metrics_exporter_prometheus::PrometheusBuilder;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
        time::Instant,
    };

    use super::{super::scrape_limit::CONNECTIONS_MAX, *};
    use crate::{event::Event, runtime::ModelHealth};

    /// More bytes than any operating system buffers for a client that does not read.
    const LARGE: usize = 12 << 20;

    async fn server() -> MetricsServer {
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || metrics::gauge!("bursar_here").set(7.0));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("the listener has an address");
        // A few long events, because a debug build takes seconds to write many short ones.
        let event = Event::DeviceLost { reason: "x".repeat(LARGE / 32) };
        let recorded = Recorded { number: 1, at: SystemTime::UNIX_EPOCH, event };
        let events = Arc::new(move || vec![recorded.clone(); 32]);
        let models = BTreeMap::from([("a".to_owned(), ModelHealth::Ready), ("b".to_owned(), ModelHealth::Starting)]);
        let health = Health { is_live: true, models };
        let health = Arc::new(move || -> Asked<Health> { Box::pin(std::future::ready(health.clone())) });
        let runtimes = Arc::new(RwLock::new(vec![ShownRuntime {
            actor: ActorId::Local(0),
            device: "host".into(),
            events,
            health,
        }]));
        MetricsServer::open(address, listener, Shown { recorder: recorder.handle(), runtimes })
    }

    /// Returns a client that has sent `says`.
    async fn client(server: &MetricsServer, says: &str) -> TcpStream {
        let mut stream = TcpStream::connect(server.addr()).await.expect("the server listens");
        stream.write_all(says.as_bytes()).await.expect("the server reads the request");
        stream
    }

    async fn rest(mut stream: TcpStream) -> String {
        let mut response = String::new();
        stream.read_to_string(&mut response).await.expect("the connection ends");
        response
    }

    #[tokio::test(start_paused = true)]
    async fn silent_and_slow_clients_delay_scrapes_by_at_most_a_second() {
        let (server, mut slow) = (server().await, Vec::new());
        // Several times as many connections as there are slots.
        for _ in 0..CONNECTIONS_MAX {
            slow.push(client(&server, "").await);
            slow.push(client(&server, "GET /metrics HTT").await);
            slow.push(client(&server, "GET /events HTTP/1.1\r\nhost: here\r\n\r\n").await);
        }
        let begun = Instant::now();
        let response = rest(client(&server, "GET /metrics HTTP/1.1\r\nhost: here\r\n\r\n").await).await;
        assert!(response.starts_with("HTTP/1.1 200 OK") && response.contains("bursar_here 7"), "{response}");
        assert!(begun.elapsed() <= Duration::from_secs(1), "{:?}", begun.elapsed());
        drop(slow);
        server.shutdown().await;
    }

    #[tokio::test]
    async fn the_metrics_server_answers_one_request_per_connection() {
        let server = server().await;
        for (asks, status) in [
            ("GET /metrics", "200"),
            ("HEAD /metrics", "200"),
            ("GET /health", "503"),
            ("GET /health/live", "200"),
            ("GET /health/ready", "503"),
            ("GET /health/dead", "404"),
            ("GET /", "404"),
            ("GET /metrics/", "404"),
            ("POST /events", "405"),
            ("GET metrics", "404"),
        ] {
            let request = format!("{asks} HTTP/1.1\r\nhost: here\r\ncontent-length: 0\r\n\r\n");
            // The connection is closed although the client did not request `connection: close`.
            let response = rest(client(&server, &request).await).await;
            assert!(response.starts_with(&format!("HTTP/1.1 {status}")), "{asks}: {response}");
            if asks.contains("health") && status != "404" {
                let (_, body) = response.split_once("\r\n\r\n").expect("a head and a body");
                let value: Value = serde_json::from_str(body).expect("JSON");
                let models = json!({ "a": "ready", "b": "starting" });
                assert_eq!(value, json!({ "live": true, "ready": false, "models": models }));
            }
        }
        server.shutdown().await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_port_is_free_after_shutdown_or_drop_despite_connections() {
        for is_dropped in [false, true] {
            let server = server().await;
            let address = server.addr();
            let silent = client(&server, "GET").await;
            // After this scrape, the silent client has a connection slot and is no longer in the
            // operating system's accept queue.
            rest(client(&server, "GET /metrics HTTP/1.1\r\nhost: here\r\n\r\n").await).await;
            if is_dropped {
                drop(server)
            } else {
                server.shutdown().await
            }
            let mut looks = tokio::time::interval(Duration::from_millis(1));
            while TcpStream::connect(address).await.is_ok() {
                looks.tick().await;
            }
            drop(silent);
        }
    }

    #[tokio::test]
    async fn a_detached_server_keeps_serving() {
        let server = server().await;
        let address = server.addr();
        server.detach();
        for _ in 0..3 {
            let mut stream = TcpStream::connect(address).await.expect("the server listens");
            stream
                .write_all(b"GET /metrics HTTP/1.1\r\nhost: here\r\n\r\n")
                .await
                .expect("the server reads the request");
            assert!(rest(stream).await.contains("bursar_here 7"));
        }
    }
}
