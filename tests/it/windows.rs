//! Chats with models whose layers have a sliding window, in a KV cache that would not hold the same
//! chats with full attention. The models are random. Each reply is compared with the reply to the
//! same chat alone, without cached tokens.

use bursar::{
    Bytes, Chat, ChatEvent, Envelope, LoadOptions, ModelHandle, ModelSource, Reply, messages::SchedulerMessage,
};
use bursar_actors::{kv::KvUse, responder::Responder};
use futures_util::future::join_all;
use serde_json::json;

use crate::{
    checkpoints::Copy,
    metrics_log::MetricsLog,
    stage::{Folder, Whole, ask, device_of, eventually, listen, runtime_on, small, story},
};

/// Tokens that a layer with a window sees.
const WINDOW: usize = 32;
/// Tokens of a prompt, and of its reply.
const LENGTHS: [usize; 2] = [200, 120];
/// Chats at once.
const CHATS: usize = 8;
/// Tokens of the longest sequence.
const CONTEXT: usize = 512;

/// A random model of two layers. The first `full` layers have full attention, and the other layers
/// have a window.
struct Windowed {
    name: String,
    model: ModelHandle,
    _runtime: bursar::Runtime,
    _checkpoint: Copy,
}

impl Windowed {
    async fn set(full: usize, kv_tokens: usize, swap_space: Bytes) -> Windowed {
        let checkpoint = Copy::of("qwen2");
        checkpoint.set("config.json", &["use_sliding_window"], json!(true));
        checkpoint.set("config.json", &["sliding_window"], json!(WINDOW));
        checkpoint.set("config.json", &["max_window_layers"], json!(full));
        let envelope = Envelope {
            context_tokens: CONTEXT,
            sequences: CHATS,
            step_tokens: 48,
            ..small().envelope.expect("limits")
        };
        let name = format!("{full} of two layers have full attention, {kv_tokens} tokens");
        let options = LoadOptions {
            name: Some(name.clone()),
            envelope: Some(envelope),
            kv_tokens: Some(kv_tokens),
            swap_space,
            ..small()
        };
        let runtime = runtime_on(&device_of(Bytes::mib(96))).await;
        let source = ModelSource::folder(folder(&checkpoint.0));
        let model = runtime.load_with(source, options, |_| {}).await.expect("the model starts");
        Windowed { name, model, _runtime: runtime, _checkpoint: checkpoint }
    }

    async fn kv_use(&self) -> KvUse {
        let (reply, usage) = Responder::new();
        let scheduler = self.model.serving().await.expect("the model serves").scheduler.clone();
        scheduler.send_message(SchedulerMessage::KvUse(reply)).expect("the scheduler lives");
        usage.await.expect("the scheduler answers")
    }

    /// The most blocks that are held at once while all chats run.
    async fn most_held(&self) -> usize {
        let mut most = 0;
        while self.model.requests().0 == CHATS {
            most = most.max(self.kv_use().await.held);
        }
        most
    }

    /// Changes the number of blocks that sequences may use.
    async fn resize(&self, blocks: usize) {
        let (reply, resized) = Responder::new();
        let scheduler = self.model.serving().await.expect("the model serves").scheduler.clone();
        scheduler.send_message(SchedulerMessage::Resize { blocks, reply }).expect("the scheduler lives");
        resized.await.expect("the scheduler answers");
    }

    /// The replies to all chats, one at a time and without cached tokens.
    async fn alone(&self) -> Vec<Whole> {
        let mut replies = Vec::new();
        for number in 0..CHATS {
            let alone = chat(number).cache_salt(format!("alone {number}"));
            replies.push(ask(&self.model, alone).await.expect("the model answers"));
        }
        replies
    }

    /// Begins all chats, and returns when each has a token and none has ended.
    async fn all_begun(&self) -> Vec<(Reply, Vec<ChatEvent>)> {
        let mut begun = Vec::new();
        for number in 0..CHATS {
            begun.push((self.model.chat(chat(number)).await.expect("the chat is accepted"), Vec::new()));
        }
        for (reply, events) in &mut begun {
            events.push(reply.next().await.expect("an event").expect("no error"));
        }
        assert_eq!(self.model.requests().0, CHATS, "no reply has ended");
        begun
    }
}

fn folder(folder: &Folder) -> std::path::PathBuf {
    folder.path().to_owned()
}

fn chat(number: usize) -> Chat {
    let tokens = (0..LENGTHS[0]).map(|at| (40 + (at * 7 + number * 31 + at / 16 * number) % 200) as u32);
    Chat::from_tokens(tokens.collect::<Vec<_>>()).temperature(0.0).max_tokens(LENGTHS[1]).ignore_end()
}

/// The rest of a reply whose first events were read.
async fn rest(reply: Reply, events: Vec<ChatEvent>) -> String {
    let first: String =
        events.into_iter().map(|event| if let ChatEvent::Text(text) = event { text } else { String::new() }).collect();
    let whole = listen(reply).await.expect("the model answers");
    assert!(whole.text.starts_with(&first), "the text begins with what was read");
    whole.text
}

#[test]
fn more_long_chats_run_at_once_than_full_attention_would_admit() {
    story(async {
        // Eight windows of three blocks, and six blocks for the chunks of two steps. With full
        // attention, not even one sequence of the context would fit.
        let windowed = Windowed::set(0, 30 * 16, Bytes::ZERO).await;
        assert!(30 * 16 < CONTEXT && windowed.kv_use().await.blocks == 30);
        let expected = windowed.alone().await;
        let begun = windowed.all_begun().await;
        for ((reply, events), expected) in begun.into_iter().zip(&expected) {
            assert_eq!(rest(reply, events).await, expected.text);
        }
        eventually("all blocks are free", async || windowed.kv_use().await.held == 0).await;
    });
}

#[test]
fn windows_leave_more_blocks_to_layers_with_full_attention() {
    let metrics_log = MetricsLog::open();
    story(async {
        // A sequence of 320 tokens holds 20 blocks with full attention and 3 in the window. With
        // full attention in both groups it would hold 40. The smaller pool has no blocks to spare:
        // six blocks are for the chunks of two steps. The larger pool would hold all sequences even
        // without windows.
        let needed = CHATS * (20 + 3);
        for blocks in [needed + 6, CHATS * 40] {
            let windowed = Windowed::set(1, blocks * 16, Bytes::ZERO).await;
            let expected = windowed.alone().await;
            let begun = windowed.all_begun().await;
            let rests = join_all(begun.into_iter().map(|(reply, events)| rest(reply, events)));
            let (texts, most) = tokio::join!(rests, windowed.most_held());
            assert!(texts.iter().eq(expected.iter().map(|expected| &expected.text)));
            assert!((CHATS * 13..=needed).contains(&most), "{most} of {blocks} blocks were held");
            let name = &windowed.name;
            assert_eq!(metrics_log.most(&format!("bursar_sequences_running{{model={name}}}")), Some(CHATS as f64));
            let preempted = metrics_log.now(&format!("bursar_preemptions_total{{model={name},reason=blocks}}"));
            assert_eq!(preempted, 0.0, "{blocks} blocks");
            let in_tables = [0, 1].map(|group| {
                let metric = format!("bursar_kv_group_blocks{{model={name},cache_group={group}}}");
                (metrics_log.most(&metric).expect("the metric is there") as usize, metrics_log.now(&metric))
            });
            let [(full, 0.0), (window, 0.0)] = in_tables else { panic!("no sequence is left: {in_tables:?}") };
            assert!((CHATS * 13..=CHATS * 20).contains(&full), "{full} blocks with full attention");
            assert!(window <= CHATS * 3 + 6, "{window} blocks in the window");
        }
    });
}

#[test]
fn a_windowed_chat_survives_shrinks_and_resumes_its_prefix() {
    story(async {
        for (full, blocks, least) in [(0, 30, 9), (1, 200, 41)] {
            let windowed = Windowed::set(full, blocks * 16, Bytes::ZERO).await;
            let expected = windowed.alone().await;
            let begun = windowed.all_begun().await;
            // One sequence of the whole context fits. The others wait.
            windowed.resize(least).await;
            assert_eq!(windowed.kv_use().await.blocks, least);
            for ((reply, events), expected) in begun.into_iter().zip(&expected) {
                assert_eq!(rest(reply, events).await, expected.text, "{full} layers with full attention");
            }
            windowed.resize(blocks).await;
            ask(&windowed.model, chat(0)).await.expect("the model answers");
            let again = ask(&windowed.model, chat(0)).await.expect("the model answers");
            assert_eq!(again.cached_tokens, (LENGTHS[0] - 1) / 16 * 16, "the prompt is resumed in its last block");
            assert_eq!(again.text, expected[0].text);
        }
    });
}

#[test]
fn a_windowed_prefix_is_copied_back_from_host_memory() {
    story(async {
        let windowed = Windowed::set(1, 64 * 16, Bytes::mib(8)).await;
        let first = ask(&windowed.model, chat(0)).await.expect("the model answers");
        // Other prompts take over all blocks.
        for number in 1..2 * CHATS {
            ask(&windowed.model, chat(100 + number)).await.expect("the model answers");
        }
        let again = ask(&windowed.model, chat(0)).await.expect("the model answers");
        assert_eq!((again.cached_tokens, &again.text), ((LENGTHS[0] - 1) / 16 * 16, &first.text));
    });
}
