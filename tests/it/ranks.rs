//! Models with tensor parallelism over several host devices: their replies are the same as on one
//! device, and a change on one rank happens on all ranks or on none.

use bursar_budgets::testing::HostControl;
use std::{sync::Arc, time::Duration};

use bursar::{
    Bytes, Chat, Class, Device, DeviceChoice, DeviceGroup, Event, Hint, HostDevice, Intensity, LoadOptions,
    MinDevicesFor, ModelHandle, ModelSource, NoRanksFit, OutputFormat, RanksShortfall, Runtime, RuntimeConfig,
    RuntimeError, Shortfall, StartError, WatchOptions,
};
use bursar_actors::{engine::EngineMessage, engine::WhichLane, responder::Responder};
use bursar_budgets::testing::Script;
use futures_util::future::join_all;

use crate::stage::{about, ask, demo, device, device_of, eventually, runtime_on, small, story, text};

/// Host devices that are the ranks of one group.
struct Ranks {
    devices: Vec<Arc<HostDevice>>,
    runtime: Runtime,
}

impl Ranks {
    async fn of(ranks: usize, capacity: Bytes) -> Ranks {
        let devices: Vec<_> = (0..ranks).map(|_| device_of(capacity)).collect();
        let all = devices.iter().map(|device| device.clone() as Arc<dyn Device>).collect();
        let group = Arc::new(DeviceGroup::of(all, format!("host:{ranks}")).expect("devices of one kind"));
        let watch = WatchOptions { every: Duration::from_millis(2), patience: Duration::from_millis(60) };
        let config = RuntimeConfig { device: DeviceChoice::Custom(group), watch, ..RuntimeConfig::default() };
        Ranks { devices, runtime: Runtime::start(config).await.expect("host devices start") }
    }

    fn is_even(&self) -> bool {
        self.devices.iter().all(|device| device.counts().backed == self.devices[0].counts().backed)
    }

    /// The bytes that each rank has backed, which must be equal.
    fn backed(&self) -> Bytes {
        let backed: Vec<_> = self.devices.iter().map(|device| device.counts().backed).collect();
        assert!(backed.iter().all(|one| *one == backed[0]), "ranks have different amounts backed: {backed:?}");
        backed[0]
    }

    /// Loads the demo model. The demo model has two heads, so for more than two ranks this function
    /// loads a model with four heads.
    async fn load(&self, options: LoadOptions) -> ModelHandle {
        if self.devices.len() <= 2 {
            return demo(&self.runtime, options).await;
        }
        let source = ModelSource::folder(bursar_golden::path("qwen3_vl"));
        let options = LoadOptions { name: Some("demo".to_owned()), ..options };
        self.runtime.load_with(source, options, |_| {}).await.expect("the model starts")
    }

    async fn unload(&self) {
        self.runtime.unload("demo").await.expect("the model unloads");
        assert_eq!(self.backed(), Bytes::ZERO);
    }
}

/// Options with which the KV cache takes nine tenths of the memory that the devices have left.
fn sized() -> LoadOptions {
    LoadOptions { kv_tokens: None, ..small() }
}

fn chats() -> Vec<Chat> {
    let mut chats: Vec<_> = (0..4).map(about).collect();
    chats.push(text("Who are you?").log_probabilities(4));
    chats.push(text("Tell me about the sea.").temperature(1.0).seed(7).max_tokens(40));
    chats.push(text("Two colours.").format(OutputFormat::Regex("[a-z]+, [a-z]+".to_owned())).temperature(1.0).seed(3));
    chats
}

#[test]
fn replies_of_several_ranks_equal_those_of_one() {
    story(async {
        let alone = runtime_on(&device()).await;
        let one = demo(&alone, small()).await;
        let mut expected = Vec::new();
        for chat in chats() {
            expected.push(ask(&one, chat).await.expect("the model answers"));
        }
        let stage = Ranks::of(2, Bytes::mib(64)).await;
        let model = demo(&stage.runtime, small()).await;
        let asked = chats().into_iter().map(|chat| ask(&model, chat));
        for (reply, expected) in join_all(asked).await.into_iter().zip(&expected) {
            let reply = reply.expect("the model answers");
            assert_eq!((&reply.text, reply.finish_reason), (&expected.text, expected.finish_reason));
            for (found, expected) in reply.tokens.iter().zip(&expected.tokens) {
                let [found, expected] = [found, expected].map(|score| score.token.log_probability);
                assert!((found - expected).abs() < 1e-4, "{found}, but {expected} on one rank");
            }
        }
        let ledger = stage.runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!(ledger.granted, stage.backed(), "each rank backs all granted memory");
        stage.unload().await;
    });
}

#[test]
fn each_rank_holds_only_a_part_of_the_model() {
    story(async {
        let mut weights = Vec::new();
        for ranks in [1, 2] {
            let stage = Ranks::of(ranks, Bytes::mib(64)).await;
            demo(&stage.runtime, small()).await;
            let ledger = stage.runtime.budget().snapshot().await.expect("the budget answers");
            weights.push((ledger.of_class(&Class::Weights), ledger.of_class(&Class::Kv)));
        }
        let [(whole, kv), (half, half_kv)] = weights[..] else { unreachable!("two models were loaded") };
        assert!(half < whole && half_kv * 2 == kv, "{weights:?}");
    });
}

#[test]
fn a_rank_count_that_cannot_divide_the_model_is_refused() {
    story(async {
        let stage = Ranks::of(3, Bytes::mib(64)).await;
        let loaded = stage.runtime.load_with(ModelSource::demo(), small(), |_| {}).await.map(drop);
        let error = loaded.expect_err("two heads cannot be divided among three ranks");
        assert_eq!(error.to_string(), "key heads cannot be divided among 3 ranks: there are 2");
        assert!(error.hint().contains("1, 2"), "{}", error.hint());
        assert_eq!(stage.backed(), Bytes::ZERO);
    });
}

#[test]
fn a_runtime_uses_the_fewest_devices_that_fit_its_model() {
    story(async {
        let options = LoadOptions { kv_tokens: Some(16384), ..small() };
        let of_four = |capacity| {
            let models = vec![(ModelSource::demo(), options.clone())];
            let device =
                DeviceChoice::MinDevices(Box::new(MinDevicesFor { of: DeviceChoice::HostRanks(4, capacity), models }));
            Runtime::start(RuntimeConfig { device, ..RuntimeConfig::default() })
        };
        let error = of_four(Bytes::mib(8)).await.map(drop).expect_err("four devices of 8 MiB are too small");
        let RuntimeError::Start(start) = &error else { panic!("{error:?}") };
        let StartError::NoRanksFit(NoRanksFit { tried, .. }) = &**start else { panic!("{start:?}") };
        assert_eq!(tried.iter().map(|tried| tried.ranks).collect::<Vec<_>>(), [1, 2, 3, 4]);
        let RanksShortfall::OnEach(Shortfall::Memory { needed, .. }) = tried[0].shortfall else { panic!("{tried:?}") };
        assert!(
            matches!(&tried[2].shortfall, RanksShortfall::Indivisible(why) if why.contains("key heads")),
            "{tried:?}"
        );
        for (capacity, ranks) in [(needed, 2), (needed * 2, 1)] {
            let runtime = of_four(capacity).await.expect("the model fits");
            assert_eq!(runtime.device().ranks().len().max(1), ranks, "devices of {capacity} each");
            let model = demo(&runtime, options.clone()).await;
            assert_eq!(model.serving().await.expect("the model serves").kv_tokens, 16384);
            let events = runtime.recent_events();
            let Event::RanksChosen { ranks: events, reason, .. } = &events[0].event else { panic!("{events:?}") };
            assert_eq!(*events, ranks);
            assert_eq!(ranks == 2, reason.contains("(1: "), "the reason names the number that is too small: {reason}");
            runtime.shutdown().await;
        }
    });
}

#[test]
fn another_process_on_one_card_shrinks_and_regrows_all_ranks() {
    story(async {
        for (ranks, taken_on) in [(2, 0), (2, 1), (4, 2)] {
            let stage = Ranks::of(ranks, Bytes::mib(24)).await;
            let model = stage.load(sized()).await;
            let (ready, reply) = (stage.backed(), ask(&model, about(1)).await.expect("the model answers").text);
            let wanted = Bytes::mib(4);
            let mut left = wanted;
            eventually("the other process gets the memory that it asks for", async || {
                left -= stage.devices[taken_on].foreign_takes(left);
                left.is_zero()
            })
            .await;
            assert!(stage.backed() < ready, "all ranks shrank for the process on rank {taken_on}");
            eventually("the ledger shows which card has the other process", async || {
                let cards = stage.runtime.budget().snapshot().await.expect("the budget answers").cards;
                let foreign = |rank: usize| if rank == taken_on { wanted } else { Bytes::ZERO };
                cards.iter().enumerate().all(|(rank, card)| card.foreign == foreign(rank))
            })
            .await;
            let card = format!("host#{taken_on}");
            for name in ["canary_given", "shrink"] {
                let events = stage.runtime.recent_events();
                let recorded =
                    events.iter().rev().find(|events| events.event.name() == name).expect("the event was recorded");
                assert_eq!(serde_json::to_value(&recorded.event).expect("JSON")["card"], card, "{recorded:?}");
            }
            assert_eq!(ask(&model, about(1)).await.expect("the model answers").text, reply);
            stage.devices[taken_on].foreign_gives_back(wanted);
            eventually("all ranks have what they had", async || stage.is_even() && stage.backed() == ready).await;
            stage.unload().await;
        }
    });
}

#[test]
fn a_refused_call_on_one_rank_leaks_nothing_elsewhere() {
    story(async {
        let calls = {
            let stage = Ranks::of(2, Bytes::mib(64)).await;
            demo(&stage.runtime, sized()).await;
            stage.devices[0].counts().calls
        };
        let (mut ready, mut failed) = (0, 0);
        for (refusing, nth) in (0..2).flat_map(|rank| (1..=calls).map(move |nth| (rank, nth))) {
            let stage = Ranks::of(2, Bytes::mib(64)).await;
            stage.devices[refusing].play(Script::new().refuse_call(nth));
            match stage.runtime.load_with(ModelSource::demo(), sized(), |_| {}).await {
                Ok(model) => {
                    ready += 1;
                    assert!(ask(&model, text("Who are you?").max_tokens(4)).await.is_ok());
                    let ledger = stage.runtime.budget().snapshot().await.expect("the budget answers");
                    assert_eq!(ledger.granted, stage.backed(), "call {nth} of rank {refusing}");
                }
                Err(error) => {
                    failed += 1;
                    assert!(matches!(error, RuntimeError::Start(_)), "{error:?}");
                    assert!(error.to_string().contains(&format!("host#{refusing}: ")), "{error}");
                    assert_eq!(stage.backed(), Bytes::ZERO, "call {nth} of rank {refusing}");
                }
            }
            stage.unload().await;
            stage.runtime.shutdown().await;
        }
        assert!(ready > 0 && failed > 0, "refused backing is retried, refused reservations are not");
    });
}

#[test]
fn a_dead_rank_lane_is_replaced_without_losing_requests() {
    story(async {
        for ranks in [2, 4] {
            let stage = Ranks::of(ranks, Bytes::mib(64)).await;
            let intensity = Intensity { restarts_max: 100, back_off: Duration::ZERO, ..Intensity::default() };
            let model = stage.load(LoadOptions { intensity, ..small() }).await;
            let chat = || about(2).max_tokens(60).temperature(9.0).top_k(0).top_p(1.0).seed(5);
            let expected = ask(&model, chat()).await.expect("the model answers").text;
            let ready = stage.backed();
            let engine = stage.runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
            for which in [WhichLane::Step, WhichLane::Vision, WhichLane::Step] {
                let asked = tokio::spawn({
                    let (model, chat) = (model.clone(), chat());
                    async move { ask(&model, chat).await }
                });
                let (ended, end) = Responder::new();
                engine.send_message(EngineMessage::KillLane { which, ended }).expect("the engine lives");
                end.await.expect("all threads of the lane have ended");
                assert_eq!(asked.await.expect("no panic").expect("the request is answered").text, expected);
                assert_eq!(stage.backed(), ready);
            }
            stage.unload().await;
        }
    });
}
