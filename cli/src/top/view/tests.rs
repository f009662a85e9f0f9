//! Tests of the view that a scrape yields.

use bursar::Bytes;
use bursar_actors::tree::Role;

use super::{super::exposition, *};

fn scrape(text: &str) -> Scrape {
    Scrape { samples: exposition::read(text, "bursar_").expect("the text is well-formed"), events: Events::Unavailable }
}

fn view(text: &str) -> View {
    View::of(&scrape(text), None, None)
}

fn between(before: &str, now: &str, seconds: f64) -> View {
    let before = scrape(before);
    let since = Since { before: &before.samples, seconds };
    View::of(&scrape(now), Some(since), Some(since))
}

#[test]
fn the_bar_of_a_device_covers_every_byte() {
    let view = view(
        "bursar_device_total_bytes{device=\"host\"} 1000\nbursar_overhead_bytes{device=\"host\"} 10\n\
         bursar_foreign_bytes{device=\"host\"} 20\nbursar_canary_bytes{device=\"host\"} 30\n\
         bursar_lease_bytes{device=\"host\",model=\"a\",class=\"weights\"} 100\n\
         bursar_lease_bytes{device=\"host\",model=\"b\",class=\"weights\"} 50\n\
         bursar_lease_bytes{device=\"host\",model=\"a\",class=\"kv\"} 200\n\
         bursar_lease_bytes{device=\"host\",model=\"\",class=\"tenant\"} 40\n\
         bursar_lease_bytes{device=\"host\",model=\"a\",class=\"of_tomorrow\"} 5\n\
         bursar_lease_bytes{device=\"host\",model=\"a\",class=\"host\"} 7000\n\
         bursar_lease_bytes{device=\"cuda:0\",model=\"a\",class=\"weights\"} 3\n\
         bursar_kv_blocks{model=\"a\"} 20\nbursar_kv_blocks_used{model=\"a\"} 5\nbursar_kv_blocks_cached{model=\"a\"} 2\n",
    );
    let [gpu, host] = &view.devices[..] else { panic!("expected two devices: {:?}", view.devices) };
    assert_eq!((gpu.name.as_str(), gpu.total, gpu.pieces.len()), ("cuda:0", Bytes::ZERO, 1));
    let expected = [
        (MemoryPart::Overhead, 10),
        (MemoryPart::Foreign, 20),
        (MemoryPart::Weights, 150),
        (MemoryPart::KvUsed, 50),
        (MemoryPart::KvCached, 20),
        (MemoryPart::KvFree, 130),
        (MemoryPart::Tenants, 40),
        (MemoryPart::Other, 5),
        (MemoryPart::Canary, 30),
        (MemoryPart::Free, 545),
    ];
    assert_eq!(host.pieces, expected.map(|(part, bytes)| Piece { part, bytes: Bytes(bytes) }));
    assert_eq!(host.pieces.iter().map(|piece| piece.bytes).sum::<Bytes>(), host.total);
    assert_eq!(host.leases[0].bytes, Bytes(7000), "a lease of host memory is listed, but is not in the bar");
}

#[test]
fn each_card_of_a_group_shows_its_foreign_memory() {
    let of_card = |card: &str, foreign: u64| {
        let gauge = |what: &str, bytes: u64| {
            format!("bursar_card_{what}_bytes{{group=\"host:2\",device=\"{card}\"}} {bytes}\n")
        };
        [gauge("total", 1000), gauge("overhead", 10), gauge("foreign", foreign), gauge("drift", 0)].concat()
    };
    let group = "bursar_device_total_bytes{device=\"host:2\"} 1000\nbursar_foreign_bytes{device=\"host:2\"} 300\n\
                 bursar_overhead_bytes{device=\"host:2\"} 10\n\
                 bursar_lease_bytes{device=\"host:2\",model=\"a\",class=\"weights\"} 600\n";
    let view = view(&[group, &of_card("host#0", 0), &of_card("host#1", 300)].concat());
    let [device] = &view.devices[..] else { panic!("expected one device for a group: {:?}", view.devices) };
    let found: Vec<_> = device.cards.iter().map(|card| (card.name.as_str(), card.free())).collect();
    assert_eq!(found, [("host#0", Bytes(390)), ("host#1", Bytes(90))]);
    assert_eq!(device.free(), Bytes(90), "a group has as much free memory as its fullest card");
    assert_eq!(device.cards[0].pieces.iter().map(|piece| piece.bytes).sum::<Bytes>(), device.total);
    let alone = super::View::of(&scrape(&of_card("host#0", 0)), None, None);
    assert!(alone.devices.iter().all(|device| device.cards.is_empty()), "a single card is not listed below its device");
}

#[test]
fn a_device_with_a_deficit_shows_no_free_memory() {
    let view = view(
        "bursar_device_total_bytes{device=\"host\"} 100\nbursar_foreign_bytes{device=\"host\"} 80\n\
         bursar_deficit_bytes{device=\"host\"} 10\nbursar_lease_bytes{device=\"host\",class=\"kv\",model=\"a\"} 30\n",
    );
    let device = &view.devices[0];
    assert_eq!((device.free(), device.deficit), (Bytes::ZERO, Bytes(10)));
    assert_eq!(device.pieces.iter().map(|piece| piece.bytes).sum::<Bytes>(), Bytes(110));
}

#[test]
fn a_text_model_shows_no_missing_vision_actor() {
    let up = |actor: &str| format!("bursar_actor_up{{model=\"a\",actor=\"{actor}\"}} 1\n");
    let actors =
        ["engine", "profile", "scheduler"].map(up).concat() + "bursar_actor_up{model=\"a\",actor=\"vision\"} 0\n";
    let patches = |all| format!("{actors}bursar_permits{{model=\"a\",permit=\"patches\"}} {all}\n");
    assert_eq!(view(&patches(0)).models[0].state, ModelState::Up);
    assert_eq!(view(&patches(0)).models[0].actors.len(), 3);
    assert_eq!(view(&patches(4096)).models[0].state, ModelState::Recovering);
}

#[test]
fn the_listed_actors_are_those_that_a_runtime_reports() {
    assert_eq!(Actor::OF_A_MODEL, Role::OF_A_MODEL.map(Role::name));
    assert!(Actor::SERVING.iter().all(|actor| Actor::OF_A_MODEL.contains(actor)));
}

#[test]
fn a_models_state_follows_its_actors() {
    let state = |actors: &[(&str, u8)]| {
        let line = |(actor, is_up): &(&str, u8)| format!("bursar_actor_up{{model=\"a\",actor=\"{actor}\"}} {is_up}\n");
        let lines: String = actors.iter().map(line).collect();
        view(&format!("{lines}bursar_kv_blocks{{model=\"a\"}} 0\n")).models[0].state
    };
    assert_eq!(state(&[]), ModelState::Unknown);
    assert_eq!(state(&[("engine", 1), ("profile", 0), ("vision", 1), ("scheduler", 1)]), ModelState::Up);
    assert_eq!(state(&[("engine", 1), ("vision", 0), ("scheduler", 1)]), ModelState::Recovering);
    assert_eq!(state(&[("engine", 1), ("profile", 1), ("vision", 0), ("scheduler", 0)]), ModelState::Sizing);
    assert_eq!(state(&[("engine", 1)]), ModelState::Starting);
    assert_eq!(state(&[("engine", 0), ("vision", 1), ("scheduler", 1)]), ModelState::Down);
}

#[test]
fn actors_are_listed_top_down_with_their_restarts() {
    let view = view(
        "bursar_actor_up{model=\"a\",actor=\"scheduler\"} 1\nbursar_actor_up{model=\"a\",actor=\"engine\"} 1\n\
         bursar_budget_up{device=\"cuda:0\"} 0\nbursar_budget_restarts_total{device=\"cuda:0\"} 2\n\
         bursar_restarts_total{model=\"a\",actor=\"scheduler\"} 3\n\
         bursar_runtime_up{device=\"cuda:0\"} 1\nbursar_runtime_up{device=\"cuda:1\"} 1\n",
    );
    let actor = |actor: &str, is_up, restarts| Actor { actor: actor.to_owned(), is_up, restarts };
    assert_eq!(view.models[0].actors, [actor("engine", true, 0), actor("scheduler", true, 3)]);
    let runtimes = [actor("runtime cuda:0", true, 0), actor("runtime cuda:1", true, 0), actor("budget", false, 2)];
    assert_eq!(view.actors, runtimes);
    assert_eq!(view.models[0].restarts(), 3);
}

#[test]
fn rates_shares_and_quantiles_cover_only_the_last_interval() {
    let metrics = |generated: u64, hits: u64, queries: u64, quick: u64, all: u64| {
        format!(
            "bursar_kv_blocks{{model=\"a\"}} 8\nbursar_generated_tokens_total{{model=\"a\"}} {generated}\n\
             bursar_prefix_cache_hits_total{{model=\"a\"}} {hits}\nbursar_prefix_cache_queries_total{{model=\"a\"}} {queries}\n\
             bursar_step_seconds_bucket{{model=\"a\",le=\"0.1\"}} {quick}\n\
             bursar_step_seconds_bucket{{model=\"a\",le=\"1\"}} {all}\n\
             bursar_step_seconds_bucket{{model=\"a\",le=\"+Inf\"}} {all}\nbursar_step_seconds_count{{model=\"a\"}} {all}\n"
        )
    };
    let now = between(&metrics(100, 50, 100, 10, 10), &metrics(300, 51, 104, 10, 14), 2.0);
    let model = &now.models[0];
    assert_eq!((model.speed.generated_tokens, model.speed.steps), (Some(100.0), Some(2.0)));
    assert_eq!((model.prefix.share(), model.prefix.is_recent), (Some(0.25), true));
    let step = model.latencies.iter().find(|latency| latency.of == "step").expect("steps were timed");
    assert_eq!((step.count, step.is_recent), (4, true));
    assert!((step.p50 - 0.55).abs() < 1e-9, "{step:?}");

    let idle = between(&metrics(300, 51, 104, 10, 14), &metrics(300, 51, 104, 10, 14), 2.0);
    let model = &idle.models[0];
    assert_eq!(model.speed.generated_tokens, Some(0.0));
    assert_eq!((model.prefix.found, model.prefix.is_recent), (51.0, false), "no new requests: the total is shown");
    assert_eq!(
        model.latencies.iter().map(|latency| (latency.count, latency.is_recent)).collect::<Vec<_>>(),
        [(14, false)]
    );
}

#[test]
fn a_view_without_events_gives_the_reason() {
    assert!(view("bursar_kv_blocks{model=\"a\"} 1\n").no_events.is_some());
    let scrape_now = Scrape { events: Events::Listed(Vec::new()), ..scrape("bursar_kv_blocks{model=\"a\"} 1\n") };
    assert_eq!(View::of(&scrape_now, None, None).no_events, None);
}
