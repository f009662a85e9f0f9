//! Endpoints about the process: build and model information, liveness, and readiness.

use bursar_budgets::testing::HostControl;
use std::time::{SystemTime, UNIX_EPOCH};

use bursar::{
    DeviceChoice, FaultInjection, Health, Intensity, LoadOptions, Placement, PlacementRequest, Runtime, RuntimeConfig,
    messages::SchedulerMessage,
};

use super::*;

#[test]
fn process_and_model_facts_are_exported_with_the_metrics() {
    let name = "prometheus::process::process_and_model_facts_are_exported_with_the_metrics";
    alone(name, async {
        let runtime = runtime_on(&device()).await;
        let metrics = runtime.serve_metrics("0").await.expect("there is a free port");
        let model = demo(&runtime, small()).await;
        answer(&model, about(1)).await;
        let scraped = async || get(metrics.addr(), "/metrics").await.expect("the server answers").1;
        let value = async |series: &str| {
            let text = scraped().await;
            let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("{series} is not in\n{text}")).parse::<f64>().expect("a number")
        };
        let build = format!("bursar_build_info{{version=\"{}\",build=\"debug\"}}", env!("CARGO_PKG_VERSION"));
        assert_eq!(value(&build.replace("debug", if cfg!(debug_assertions) { "debug" } else { "release" })).await, 1.0);
        let info = "bursar_model_info{model=\"demo\",architecture=\"Qwen2_5_VLForConditionalGeneration\",dtype=\"f32\",\
                    quantization=\"none\",kv_cache_dtype=\"f32\"}";
        // The metric is updated once a second.
        eventually("the model is known", async || scraped().await.contains(info)).await;
        assert_eq!(value(info).await, 1.0);
        if cfg!(target_os = "linux") {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is after 1970").as_secs_f64();
            assert!(
                (now - 600.0..=now + 1.0).contains(&value("process_start_time_seconds").await),
                "the process started within the last ten minutes"
            );
            assert!(value("process_resident_memory_bytes").await > 1e6);
            assert!(value("process_virtual_memory_bytes").await > value("process_resident_memory_bytes").await);
            assert!(value("process_cpu_seconds_total").await < 600.0);
            assert!((3.0..value("process_max_fds").await).contains(&value("process_open_fds").await));
        }
        runtime.unload("demo").await.expect("the model unloads");
        assert_eq!(value(info).await, 0.0);
        metrics.shutdown().await;
        runtime.shutdown().await;
    });
}

#[test]
fn health_checks_distinguish_liveness_from_readiness() {
    let name = "prometheus::process::health_checks_distinguish_liveness_from_readiness";
    alone(name, async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let metrics = runtime.serve_metrics("0").await.expect("there is a free port");
        let status = async |path: &str| {
            let (status, body) = get(metrics.addr(), path).await.expect("the server answers");
            let body: Value = serde_json::from_str(&body).expect("JSON");
            (status.split(' ').nth(1).expect("a status").to_owned(), body["models"]["demo"].clone())
        };
        let all = async || [status("/health/live").await.0, status("/health/ready").await.0, status("/health").await.0];
        assert_eq!(all().await, ["200", "503", "503"], "no model is loaded");
        let model = demo(&runtime, small()).await;
        assert_eq!(all().await, ["200", "200", "200"]);
        assert_eq!(status("/health").await.1, "ready");
        // A reply that no task reads delays the unload.
        let held = model.chat(about(1).max_tokens(90).ignore_end()).await.expect("accepted");
        let leaving = tokio::spawn({
            let runtime = runtime.clone();
            async move { runtime.unload_within("demo", Duration::from_secs(60)).await }
        });
        eventually("the model admits no more requests", async || {
            status("/health/ready").await == ("503".to_owned(), json!("leaving"))
        })
        .await;
        drop(held);
        leaving.await.expect("no panic").expect("the model unloads");
        assert_eq!(status("/health/ready").await.1, Value::Null, "an unloaded model is not listed");
        // A model that stopped because of an error makes the process unhealthy until the model is
        // unloaded.
        let options = LoadOptions { intensity: Intensity { restarts_max: 0, ..Intensity::SERVING }, ..small() };
        let model = demo(&runtime, options).await;
        let scheduler = model.serving().await.expect("the model serves").scheduler.clone();
        drop(scheduler.send_message(SchedulerMessage::InjectFault(FaultInjection::Panic)));
        eventually("the stopped model makes the process unhealthy", async || {
            status("/health").await == ("503".to_owned(), json!("stopped"))
        })
        .await;
        assert_eq!(status("/health/live").await.0, "200", "a restart of the process would not help the model");
        runtime.unload("demo").await.expect("the model unloads");
        assert_eq!(status("/health").await.1, Value::Null);
        assert_eq!(runtime.health().await, Health { is_live: true, ..Health::default() });
        // Losing a device that cannot be replaced ends the runtime.
        device.lose("a script says so");
        eventually("only a restart of the process helps", async || status("/health/live").await.0 == "503").await;
        metrics.shutdown().await;
    });
}

#[test]
fn one_address_shows_the_runtimes_of_several_devices() {
    let name = "prometheus::process::one_address_shows_the_runtimes_of_several_devices";
    alone(name, async {
        let named = |name: &str| (ModelSource::demo(), LoadOptions { name: Some(name.to_owned()), ..small() });
        let (of, models) = (DeviceChoice::HostRanks(2, Bytes::mib(192)), vec![named("first"), named("second")]);
        let placed = PlacementRequest { of, ranks: Some(1), models: models.clone(), canary: None }.place().await;
        let (mut runtimes, mut handles) = (Vec::new(), Vec::new());
        for (Placement { device, .. }, (source, options)) in
            placed.expect("two devices are chosen").into_iter().zip(models)
        {
            let config = RuntimeConfig { device, ..RuntimeConfig::default() };
            let runtime = Runtime::start(config).await.expect("the runtime starts");
            handles.push(runtime.load_with(source, options, |_| {}).await.expect("the model fits"));
            runtimes.push(runtime);
        }
        let metrics = runtimes[0].serve_metrics("0").await.expect("there is a free port");
        let asked = async |path: &str| get(metrics.addr(), path).await.expect("the server answers");
        let events = async || -> Vec<Value> { serde_json::from_str(&asked("/events").await.1).expect("a list") };
        metrics.add(&runtimes[0]);
        assert!(events().await.iter().all(|event| event["device"].is_null()), "events of one device name no device");
        metrics.add(&runtimes[1]);
        let events = events().await;
        for device in ["host#0", "host#1"] {
            assert!(events.iter().any(|event| event["device"] == device && event["event"] == "ready"), "{events:?}");
        }
        assert!(events.is_sorted_by_key(|event| event["at"].as_f64()), "{events:?}");
        let (status, body) = asked("/health").await;
        let body: Value = serde_json::from_str(&body).expect("JSON");
        assert!(status.contains("200") && body["models"] == json!({"first": "ready", "second": "ready"}), "{body}");
        let are_up = async |second: u8| {
            let text = asked("/metrics").await.1;
            ["runtime", "budget"].iter().all(|actor| {
                let up = |device: u8, is_up| {
                    text.contains(&format!("bursar_{actor}_up{{device=\"host#{device}\"}} {is_up}\n"))
                };
                up(0, 1) && up(1, second)
            })
        };
        eventually("both are up", async || are_up(1).await).await;
        runtimes.remove(1).shutdown().await;
        assert!(are_up(0).await, "{}", asked("/metrics").await.1);
        assert!(asked("/health/live").await.0.contains("503"), "the ended runtime needs a restart of the process");
        metrics.shutdown().await;
        runtimes.remove(0).shutdown().await;
    });
}
