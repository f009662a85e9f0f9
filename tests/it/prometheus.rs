//! The real Prometheus scrapes a demo model, and the files shipped for Prometheus and Grafana
//! name only existing metrics.
//!
//! A process has only one metrics recorder, and other tests of this program install the recorder
//! of `metrics_log.rs`. Tests that need Bursar's recorder run in a child process, which is this
//! program again.

mod dashboard;
mod process;

use bursar_budgets::testing::HostControl;
use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    future::Future,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use bursar::{
    Bytes, Class, Hint, ModelSource, Refusal, ServeMetricsError,
    metric::{Kind, RequestEnd, Row, TABLE},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use self::dashboard::{dashboard_queries, queries_of};
use crate::{
    metrics_log::MetricsLog,
    stage::{Folder, about, answer, demo, device, eventually, runtime_on, small, story},
};

/// The environment variable that names the test to run in a child process.
const ALONE: &str = "BURSAR_TEST_ALONE";

/// Runs this test in a separate process. `name` is the test's full name.
fn alone(name: &str, test: impl Future<Output = ()>) {
    if env::var_os(ALONE).is_some_and(|named| named == name) {
        return story(test);
    }
    let program = env::current_exe().expect("the path of this program");
    let mut command = Command::new(program);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(ALONE, name);
    let output = command.output().expect("the program starts");
    let stderr = [output.stdout, output.stderr].map(|expected| String::from_utf8_lossy(&expected).into_owned());
    assert!(output.status.success() && stderr[0].contains("1 passed"), "{}\n{}", stderr[0], stderr[1]);
}

/// Returns whether a program of Debian's package `prometheus` is installed. Prints a note if not.
fn is_here(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        // Write to standard error directly, because the test harness captures `println!`.
        drop(writeln!(std::io::stderr(), "skipped: there is no {program} here (apt-get install prometheus)"));
    }
    found
}

/// A file in the folder that is shipped with the dashboard.
fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/grafana").join(name)
}

fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The status line and body of a response.
async fn get(address: SocketAddr, path: &str) -> std::io::Result<(String, String)> {
    let mut stream = TcpStream::connect(address).await?;
    // A response to HTTP/1.0 is not chunked.
    stream.write_all(format!("GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n").as_bytes()).await?;
    let mut all = String::new();
    stream.read_to_string(&mut all).await?;
    let (head, body) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
    Ok((head.lines().next().unwrap_or_default().to_owned(), body.to_owned()))
}

/// Runs promtool in the shipped folder, with `input` on its standard input.
fn promtool(arguments: &[&str], input: &str) {
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(shipped(""));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the tool starts");
    child.stdin.take().expect("stdin is piped").write_all(input.as_bytes()).expect("the program reads");
    let output = child.wait_with_output().expect("the program ends");
    let stderr =
        [output.stdout, output.stderr].map(|expected| String::from_utf8_lossy(&expected).into_owned()).concat();
    assert!(output.status.success(), "promtool {arguments:?}:\n{stderr}");
}

/// A Prometheus server that scrapes one process.
struct Prometheus {
    child: Child,
    address: SocketAddr,
    _folder: Folder,
}

impl Prometheus {
    async fn of(scraped: SocketAddr) -> Prometheus {
        let folder = Folder::empty();
        let at = |name: &str| folder.path().join(name).display().to_string();
        // The shipped rules with waits of one second. Their own waits are 15 s to 10 min.
        let waits =
            |line: &str| if line.trim_start().starts_with("for:") { "        for: 1s" } else { line }.to_owned();
        let rules: Vec<String> = read(shipped("alerts.yml")).lines().map(waits).collect();
        fs::write(at("alerts.yml"), rules.join("\n")).expect("the file is written");
        let rules = at("alerts.yml");
        let config = format!(
            "global: {{ scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms }}\n\
             rule_files: [{rules:?}]\n\
             scrape_configs: [{{ job_name: bursar, static_configs: [{{ targets: [{:?}] }}] }}]\n",
            scraped.to_string()
        );
        fs::write(at("prometheus.yml"), config).expect("the file is written");
        // Prometheus does not report a port that it chose itself, so it gets a port that was
        // free a moment ago.
        let address = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port");
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", at("prometheus.yml")));
        command.arg(format!("--storage.tsdb.path={}", at("data")));
        command.arg(format!("--web.listen-address={address}")).arg("--log.level=error");
        let mut prometheus = Prometheus { child: command.spawn().expect("the tool starts"), address, _folder: folder };
        eventually("Prometheus is ready", async || {
            assert_eq!(prometheus.child.try_wait().expect("the state of Prometheus"), None, "Prometheus still runs");
            get(address, "/-/ready").await.is_ok_and(|(status, _)| status.contains("200"))
        })
        .await;
        prometheus
    }

    /// The result of a query: each series with its labels.
    async fn asked(&self, query: &str) -> Vec<(BTreeMap<String, String>, f64)> {
        let coded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let (_, body) = get(self.address, &format!("/api/v1/query?query={coded}")).await.expect("Prometheus answers");
        let answer: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("{query}: {body}"));
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        let series = answer["data"]["result"].as_array().expect("series");
        let labels = |labels: &Value| serde_json::from_value(labels.clone()).expect("labels are text");
        let value = |sample: &Value| sample[1].as_str().and_then(|value| value.parse().ok()).expect("a number");
        series.iter().map(|series| (labels(&series["metric"]), value(&series["value"]))).collect()
    }

    /// Waits until a query has this single value.
    async fn says(&self, query: &str, wanted: f64) {
        eventually(
            &format!("{query} is {wanted}"),
            async || matches!(self.asked(query).await[..], [(_, value)] if value == wanted),
        )
        .await;
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn the_real_prometheus_scrapes_bytes_that_sum_to_the_ledger() {
    if !is_here("prometheus") || !is_here("promtool") {
        return;
    }
    let name = "prometheus::the_real_prometheus_scrapes_bytes_that_sum_to_the_ledger";
    alone(name, async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let metrics = runtime.serve_metrics("0").await.expect("there is a free port");
        let prometheus = Prometheus::of(metrics.addr()).await;
        let model = demo(&runtime, small()).await;
        let record = model.serving().await.expect("the model serves").record;
        prometheus.says("bursar_kv_blocks{model=\"demo\"}", record.kv_blocks as f64).await;
        prometheus.says("bursar_kv_blocks * bursar_kv_block_tokens", record.kv_tokens() as f64).await;
        for number in [1, 2, 1] {
            answer(&model, about(number)).await;
        }
        eventually("tokens are generated", async || {
            let rate = prometheus.asked("rate(bursar_generated_tokens_total[1m])").await;
            matches!(rate[..], [(_, rate)] if rate > 0.0)
        })
        .await;
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        prometheus.says("sum(bursar_lease_bytes{class!=\"host\"})", ledger.granted.0 as f64).await;
        for line in ledger.classes {
            let query = format!("sum(bursar_lease_bytes{{class=\"{}\"}})", line.class.kind());
            prometheus.says(&query, line.bytes.0 as f64).await;
        }
        prometheus.says("bursar_device_total_bytes{device=\"host\"}", ledger.total.0 as f64).await;
        prometheus.says("sum by (reason) (bursar_requests_total{reason=\"stop\"})", 3.0).await;
        for query in dashboard_queries() {
            // `rate` has a value from the second scrape on.
            let is_shown = async || !prometheus.asked(&query).await.is_empty();
            eventually(&format!("the dashboard shows something for {query}"), is_shown).await;
        }
        assert_eq!(prometheus.asked("ALERTS").await, [], "no alert fires");
        let (status, scraped) = get(metrics.addr(), "/metrics").await.expect("the server answers");
        assert!(status.contains("200") && has_every_count(&scraped), "{status}: {scraped}");
        promtool(&["check", "metrics"], &scraped);
        let (_, events) = get(metrics.addr(), "/events").await.expect("the server answers");
        let events: Vec<Value> = serde_json::from_str(&events).expect("a list");
        assert_eq!(json!(events), json!(runtime.recent_events()));
        let of = |name: &str| events.iter().filter(|event| event["event"] == name).count();
        assert!(of("lease_granted") >= ledger.leases.len() && of("ready") == 1, "{events:?}");
        // Cause a drift and a refused lease, which should raise alerts.
        device.drifts(Bytes::kib(64));
        let refused = runtime.budget().try_lease(Class::external("too much"), ledger.total * 2).await;
        refused.map(drop).expect_err("the device has less memory");
        for alert in ["BursarDrift", "BursarLeasesRefused"] {
            prometheus.says(&format!("ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}}"), 1.0).await;
        }
        metrics.shutdown().await;
        runtime.shutdown().await;
    });
}

#[test]
fn shipped_alerts_pass_promtool_and_are_all_tested() {
    if !is_here("promtool") {
        return;
    }
    promtool(&["check", "config", "prometheus.yml"], "");
    promtool(&["test", "rules", "alerts_test.yml"], "");
    let (alerts, tests) = (read(shipped("alerts.yml")), read(shipped("alerts_test.yml")));
    for alert in alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(tests.contains(&format!("alertname=\"{alert}\", alertstate=\"firing\"")), "no test fires {alert}");
        assert!(tests.contains(&format!("alertname: {alert} }}")) || alert == "BursarGone", "no test quiets {alert}");
    }
}

/// Returns whether every counter and histogram of the table is in the scrape, with each
/// value of its labels.
fn has_every_count(scraped: &str) -> bool {
    let of = |start: &str| scraped.lines().filter(|line| line.starts_with(start)).count();
    // Metrics of an HTTP server appear with its first request.
    let counted = TABLE.iter().filter(|row| !row.name.starts_with("bursar_http_"));
    let all = counted.into_iter().all(|Row { name, kind, .. }| match kind {
        Kind::Gauge => true,
        Kind::Counter => of(name) > 0,
        Kind::Histogram => of(&format!("{name}_count{{")) > 0,
    });
    all && of("bursar_leases_refused_total{device=\"host\",") == Class::KINDS.len() * Refusal::NAMES.len()
        && of("bursar_requests_total{model=\"demo\",") == RequestEnd::ALL.len()
}

#[test]
fn every_counter_starts_at_zero_so_its_first_event_shows() {
    if !is_here("prometheus") {
        return;
    }
    let name = "prometheus::every_counter_starts_at_zero_so_its_first_event_shows";
    alone(name, async {
        let runtime = runtime_on(&device()).await;
        let metrics = runtime.serve_metrics("0").await.expect("there is a free port");
        // Scrape from the start, before the model is ready and before any refusal.
        let loading = runtime.load_with(ModelSource::demo(), small(), |_| {});
        let (model, first) = tokio::join!(loading, async {
            let mut first = String::new();
            // A scrape may arrive while the metrics are being registered one after the other.
            eventually("every counter and histogram is exported", async || {
                first = get(metrics.addr(), "/metrics").await.expect("the server answers").1;
                has_every_count(&first)
            })
            .await;
            first
        });
        for name in ["bursar_requests_total", "bursar_leases_refused_total", "bursar_step_seconds_count"] {
            let of = first.lines().filter(|line| line.starts_with(name)).map(|line| line.rsplit(' ').next());
            assert!(of.clone().count() > 0 && of.flatten().all(|value| value == "0"), "{name}: {first}");
        }
        let model = model.expect("the model starts");
        let prometheus = Prometheus::of(metrics.addr()).await;
        let (refused, ended) = (
            "bursar_leases_refused_total{class=\"tenant\",reason=\"too_large\"}",
            "bursar_requests_total{reason=\"refused\"}",
        );
        for series in [refused, ended] {
            prometheus.says(series, 0.0).await;
        }
        let tenant = runtime.budget().try_lease(Class::external("too much"), Bytes::gib(9)).await;
        tenant.map(drop).expect_err("the device has less memory");
        model.chat(about(1).max_tokens(0)).await.map(drop).expect_err("a reply has at least one token");
        for series in [refused, ended] {
            eventually("the first event of a kind is an increase", async || {
                let rise = prometheus.asked(&format!("increase({series}[1m])")).await;
                matches!(rise[..], [(_, rise)] if rise > 0.0)
            })
            .await;
        }
        metrics.shutdown().await;
        runtime.shutdown().await;
    });
}

#[test]
fn attempts_made_before_the_first_scrape_are_shown() {
    if !is_here("prometheus") {
        return;
    }
    let name = "prometheus::attempts_made_before_the_first_scrape_are_shown";
    alone(name, async {
        let runtime = runtime_on(&device()).await;
        let metrics = runtime.serve_metrics("0").await.expect("there is a free port");
        for _ in 0..3 {
            demo(&runtime, small()).await;
            runtime.unload("demo").await.expect("the model unloads");
        }
        let model = demo(&runtime, small()).await;
        let prometheus = Prometheus::of(metrics.addr()).await;
        let [query] = queries_of("Attempts").try_into().expect("one query");
        let ready = format!(
            "sum by (reason) ({query}) and on (reason) label_replace(vector(0), \"reason\", \"ready\", \"\", \"\")"
        );
        prometheus.says(&ready, 4.0).await;
        drop(model);
        metrics.shutdown().await;
        runtime.shutdown().await;
    });
}

#[test]
fn errors_of_serving_metrics_have_hints() {
    story(async {
        MetricsLog::open();
        let runtime = runtime_on(&device()).await;
        let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let taken_at = taken.local_addr().expect("an address");
        let elsewhere = "192.0.2.1:9464"; // Reserved for documentation (RFC 5737).
        for (address, expected, hint) in [
            ("nowhere".to_owned(), "\"nowhere\"", "a port"),
            (taken_at.to_string(), &*taken_at.to_string(), "port 0"),
            (elsewhere.to_owned(), elsewhere, "an address of this machine"),
            ("0".to_owned(), "recorder", "bursar::metric::buckets"),
        ] {
            let error = runtime.serve_metrics(&address).await.expect_err("metrics cannot be served there");
            assert!(error.to_string().contains(expected) && error.hint().contains(hint), "{address}: {error:?}");
            assert_eq!(matches!(error, ServeMetricsError::AnotherRecorder), address == "0");
        }
        runtime.shutdown().await;
    });
}

#[test]
fn a_command_serves_its_metrics_while_it_runs() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    command.args(["chat", "--json", "--device", "host", "--profile-cache", "none", "--context-tokens", "128"]);
    command.args(["--sequences", "2", "--step-tokens", "32", "--launch-patches", "64", "--temperature", "0"]);
    command.env("BURSAR_METRICS", "0").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary is there");
    let mut stderr = BufReader::new(child.stderr.take().expect("stderr is piped"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("the address is printed");
    let address = line.trim().strip_prefix("metrics: http://").and_then(|rest| rest.strip_suffix("/metrics"));
    let address: SocketAddr = address.and_then(|address| address.parse().ok()).unwrap_or_else(|| panic!("{line}"));
    assert!(address.ip().is_loopback(), "a port without an address is on the loopback: {address}");
    let mut asks = child.stdin.take().expect("stdin is piped");
    asks.write_all(b"Who are you?\n").expect("the program reads");
    story(async {
        eventually("the answer is counted", async || {
            let (_, metrics) = get(address, "/metrics").await.expect("the server answers");
            metrics.contains("bursar_requests_total{model=\"demo\",reason=\"stop\"} 1\n")
        })
        .await;
        let (_, metrics) = get(address, "/metrics").await.expect("the server answers");
        assert!(!metrics.contains("Who are you"), "metrics show no content of a request");
        let (_, events) = get(address, "/events").await.expect("the server answers");
        assert!(events.contains(r#""event":"ready","model":"demo""#), "{events}");
        assert!(get(address, "/").await.expect("the server answers").0.contains("404"));
    });
    asks.write_all(b"/quit\n").expect("the program reads");
    assert!(child.wait().expect("the program ends").success());
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("text");
    assert_eq!(rest, "", "only one line is printed");
    assert!(std::net::TcpStream::connect(address).is_err(), "the server has ended");
}

#[test]
fn a_command_unable_to_serve_metrics_says_why_with_a_hint() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken = taken.local_addr().map(|address| (taken, address.port().to_string())).expect("an address");
    let chat = |address: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        command.args(["chat", "--device", "host", "--metrics", address, "Who are you?"]);
        let output = command.output().expect("the binary is there");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, expected) = chat("localhost:9464");
    assert!(code == Some(2) && expected.contains("127.0.0.1:9464"), "{expected}");
    let (code, expected) = chat(&taken.1);
    assert!(
        code == Some(1)
            && expected.contains(&taken.1)
            && expected.contains("hint: stop the process that listens there"),
        "{expected}"
    );
}
