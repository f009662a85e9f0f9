//! Several models in one server, each on separate devices.

use std::{
    num::NonZeroUsize,
    process::{Command, Stdio},
};

use bursar::{DeviceChoice, Hint, LoadOptions, ModelSource, Placement, PlacementRequest, Runtime, RuntimeConfig};
use bursar_serve::{ServeOptions, Server, Service};
use serde_json::{Value, json};

use super::{
    client::{Fixture, hello},
    lines::Program,
};
use crate::stage::{Stage, small, story};

fn named(name: &str) -> (ModelSource, LoadOptions) {
    (ModelSource::demo(), LoadOptions { name: Some(name.to_owned()), ..small() })
}

/// The models that have leases, according to the budget endpoint.
fn models_of(budget: &Value) -> Vec<String> {
    let leases = budget["budget"]["leases"].as_array().expect("a list");
    let mut models: Vec<String> =
        leases.iter().filter_map(|lease| lease["model"].as_str().map(str::to_owned)).collect();
    models.sort();
    models.dedup();
    models
}

#[test]
fn models_on_separate_devices_share_one_server() {
    story(async {
        let models = vec![named("first"), named("second"), named("third")];
        let of = DeviceChoice::HostRanks(2, bursar::Bytes::mib(192));
        let placed = PlacementRequest { of, ranks: Some(1), models: models.clone(), canary: None }.place().await;
        let placed = placed.expect("there are two devices");
        let served: Vec<_> = placed.iter().map(|placement| placement.models.clone()).collect();
        assert_eq!(served, [vec![0, 2], vec![1]]);
        let (mut runtimes, mut handles) = (Vec::new(), Vec::new());
        for Placement { device, models: own, .. } in placed {
            let runtime =
                Runtime::start(RuntimeConfig { device, ..RuntimeConfig::default() }).await.expect("the runtime starts");
            for model in own {
                let (source, options) = models[model].clone();
                handles.push(runtime.load_with(source, options, |_| {}).await.expect("the model fits"));
            }
            runtimes.push(runtime);
        }
        let service = Service::over(&runtimes, ServeOptions::default());
        handles.iter().for_each(|model| service.add([model.name()], model.clone()));
        let server = Server::start(service.clone(), "127.0.0.1:0", None).await.expect("a free port");
        let [first, second] = &runtimes[..] else { panic!("expected two runtimes") };
        let device = first.device().as_host().expect("host memory");
        let fixture =
            Fixture { stage: Stage { device, runtime: first.clone(), model: handles[0].clone() }, service, server };
        let ask = async |model: &str| fixture.chat(json!({"model": model, "max_tokens": 3})).await.status;
        for model in ["first", "second", "third"] {
            assert_eq!(ask(model).await, 200, "{model}");
        }
        let budgets = [fixture.get("/v1/budget").await.json(), fixture.get("/v1/budget?device=1").await.json()];
        assert_eq!(models_of(&budgets[0]), ["first", "third"]);
        assert_eq!(models_of(&budgets[1]), ["second"]);
        assert!(budgets.iter().all(|budget| budget["devices"] == json!(["host#0", "host#1"])));
        fixture.post("/sleep?model=second", &json!({})).await;
        let body = fixture.get("/v1/budget").await.json();
        assert_eq!(body["models"][2]["state"], "asleep", "{body}");
        for path in ["/v1/budget?device=2", "/v1/budget/events?device=-1", "/v1/budget/other_process?gpu=0"] {
            assert_eq!(fixture.get(path).await.status, 400, "{path}");
        }
        let taken = fixture.post("/v1/budget/other_process?device=1", &json!({"bytes": 1 << 20, "seconds": 30})).await;
        assert_eq!(taken.status, 200, "{}", taken.body);
        for (path, bytes) in [("/v1/budget/other_process", 0), ("/v1/budget/other_process?device=1", 1 << 20)] {
            assert_eq!(fixture.get(path).await.json()["bytes"], bytes, "{path}");
        }
        assert_eq!(fixture.get("/health").await.status, 200);
        second.clone().shutdown().await;
        assert_eq!(fixture.get("/health/live").await.status, 503, "one of the two runtimes has ended");
        assert_eq!((ask("second").await, ask("first").await), (503, 200));
        fixture.end().await;
    });
}

#[test]
fn models_that_fit_on_one_device_are_spread_over_devices() {
    for size in ["1", "auto"] {
        let flags = ["--tensor-parallel-size", size, "--model", "demo", "--model", "demo"];
        let program = Program::on("host:2", &[&flags[..], &["--name", "other", "--name", "demo"]].concat());
        // The two models load concurrently.
        let first = |is_it: &dyn Fn(&str) -> bool| {
            program.begun.iter().position(|line| line["message"].as_str().is_some_and(is_it)).unwrap_or(usize::MAX)
        };
        assert!(
            first(&|text| text.starts_with("demo: ")) < first(&|text| text == "ready: other"),
            "{:#?}",
            program.begun
        );
        program.has_said("ready: other");
        for (number, model) in ["other", "demo"].into_iter().enumerate() {
            let body = program.get(&format!("/v1/budget?device={number}"), "");
            let budget = serde_json::from_str(body.split_once("\r\n\r\n").expect("a head").1).expect("JSON");
            assert_eq!(models_of(&budget), [model], "with --tensor-parallel-size {size}");
            let (metrics, own) = (program.get("/metrics", ""), format!("total_bytes{{device=\"host#{number}\"}}"));
            assert!(metrics.contains(&own), "{own} is not in {metrics}");
            let asked = hello(json!({"model": model, "max_tokens": 2}));
            let answer = program.post("/v1/chat/completions", "", &asked);
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
    }
}

#[test]
fn a_model_that_cannot_be_planned_does_not_stop_others() {
    let flags = ["--tensor-parallel-size", "auto", "--model", "/no/such/folder", "--model", "demo"];
    let program = Program::on("host:2", &[&flags[..], &["--name", "broken", "--name", "demo"]].concat());
    program.has_said("broken failed to load");
    let health = program.get("/health", "");
    assert!(health.starts_with("HTTP/1.1 200") && health.contains("there is no folder /no/such/folder"), "{health}");
}

#[test]
fn two_groups_of_two_devices_serve_one_model_each() {
    let flags = ["--tensor-parallel-size", "2", "--swap-space", "0.001", "--model", "demo", "--model", "demo"];
    let program = Program::on("host:4", &[&flags[..], &["--name", "other", "--name", "demo"]].concat());
    program.has_said("ready: other");
    for (number, model) in ["other", "demo"].into_iter().enumerate() {
        let body = program.get(&format!("/v1/budget?device={number}"), "");
        let budget: Value = serde_json::from_str(body.split_once("\r\n\r\n").expect("a head").1).expect("JSON");
        assert_eq!(models_of(&budget), [model]);
        assert_eq!(budget["devices"], json!(["host#0,1", "host#2,3"]));
        let asked = hello(json!({"model": model, "max_tokens": 2}));
        let answer = program.post("/v1/chat/completions", "", &asked);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[test]
fn each_model_may_have_a_separate_number_of_devices() {
    let flags = ["--tensor-parallel-size", "1,2", "--swap-space", "0.001", "--model", "demo", "--model", "demo"];
    // `host` names the first device. The models use this device and the devices after it.
    let program = Program::on("host", &[&flags[..], &["--name", "other", "--name", "demo"]].concat());
    program.has_said("ready: other");
    for (number, model) in ["demo", "other"].into_iter().enumerate() {
        let body = program.get(&format!("/v1/budget?device={number}"), "");
        let budget: Value = serde_json::from_str(body.split_once("\r\n\r\n").expect("a head").1).expect("JSON");
        assert_eq!(models_of(&budget), [model]);
        assert_eq!(budget["devices"], json!(["host#0,1", "host#2"]));
        let answer = program.post("/v1/chat/completions", "", &hello(json!({"model": model, "max_tokens": 2})));
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[test]
fn a_model_that_needs_more_devices_than_available_is_refused() {
    story(async {
        let device = DeviceChoice::Host(bursar::Bytes::mib(96));
        let runtime = Runtime::start(RuntimeConfig { device, ..RuntimeConfig::default() }).await.expect("a runtime");
        let (source, options) = named("one");
        let asking = |ranks| LoadOptions { ranks: NonZeroUsize::new(ranks), ..options.clone() };
        let error = runtime.load_with(source.clone(), asking(2), |_| {}).await.err().expect("there is one device");
        let why = "`ranks` asks for 2 devices, but the runtime has 1";
        assert_eq!((error.to_string(), error.hint().contains("PlacementRequest")), (why.to_owned(), true));
        runtime.load_with(source, asking(1), |_| {}).await.expect("one device is enough");
        runtime.shutdown().await;
    });
}

#[test]
fn named_devices_that_would_stay_idle_are_refused() {
    let two = ["--model", "demo", "--model", "demo", "--name", "other", "--name", "demo"];
    for (device, size, models, why, hint) in [
        (
            "host:3",
            "2,2",
            &two[..],
            "names 3 devices, but the numbers of --tensor-parallel-size add up to 4",
            "give one number, so that models share devices",
        ),
        (
            "host:4",
            "2,1",
            &two[..],
            "names 4 devices, but the models use only 3; the other devices would be idle",
            "name fewer devices",
        ),
        ("host:4", "1,2", &[], "has 2 numbers for 1 model", "one number per `--model`"),
        ("host:4", "3", &[], "names 4 devices, but --tensor-parallel-size is 3", "for `serve`, a multiple is allowed"),
        ("host:3", "2", &[], "names 3 devices, but --tensor-parallel-size is 2", "for `serve`, a multiple is allowed"),
        (
            "host:4",
            "2",
            &[],
            "names 4 devices, but 1 model uses only 2; the other devices would be idle",
            "name fewer devices",
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        let flags = ["serve", "--device", device, "--tensor-parallel-size", size, "--port", "0"];
        let output = command.args(flags).args(models).stdin(Stdio::null()).output().expect("the program ends");
        let body = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{body}");
        assert!(body.contains(why) && body.contains(hint), "{body}");
    }
}

#[test]
fn too_few_devices_are_reported_before_anything_starts() {
    story(async {
        let of = DeviceChoice::HostRanks(2, bursar::Bytes::mib(96));
        for ranks in [0, 3] {
            let placing =
                PlacementRequest { of: of.clone(), ranks: Some(ranks), models: vec![named("one")], canary: None };
            let error = placing.place().await.expect_err("there are two devices");
            let why = format!("a model is to use {ranks} devices; expected 1 to 2");
            assert_eq!((error.to_string(), error.hint().is_empty()), (why, false));
        }
    });
}
