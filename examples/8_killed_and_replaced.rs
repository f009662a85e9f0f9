//! Deaths of actors in the middle of a reply. Each actor is replaced, and the reply continues with
//! the same text as without the death. The reply pauses, except when the budget actor dies.
//!
//! `cargo run --release --example 8_killed_and_replaced`

use std::{
    io::Write,
    time::{Duration, Instant},
};

use bursar::{Chat, LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig, Snapshot, ractor::ActorCell};

type Failure = Box<dyn std::error::Error>;

/// Pieces of text to read before the kill.
const HEARD: usize = 12;
/// Tokens of the reply, many more than the model generates ahead of its reader.
const TOKENS: usize = 450;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    let model = runtime.load_with(ModelSource::demo(), LoadOptions::small(), |_| {}).await?;
    // At this temperature the reply is nonsense, and generating the same nonsense again needs every
    // earlier token and the exact position in the random sequence.
    let chat = Chat::new().user("Tell me something.").temperature(4.0).top_k(0).top_p(1.0).seed(5);
    let chat = chat.ignore_end().max_tokens(TOKENS);
    let expected = model.chat(chat.clone()).await?.text().await?;
    let before = runtime.budget().snapshot().await?;
    let beginning: String = expected.chars().take(160).collect();
    println!("Without a kill:\n{} ...\n\nLeases:", beginning.escape_debug());
    show(&before);

    for victim in ["scheduler", "vision", "budget", "engine"] {
        let cell = find(&runtime, &model, victim).await?;
        let (dead, generation) = (cell.get_id(), model.serving().await?.generation);
        println!("\nThe {victim} (actor {dead}) is killed:");
        let (received, pause) = interrupted(&model, chat.clone(), cell).await?;
        if received != expected {
            return Err(format!("the death of the {victim} changed the reply").into());
        }
        // Chats do not need the budget. After the death of any other victim, an unfinished reply
        // pauses for at least the restart's back-off.
        if victim != "budget" && pause < LoadOptions::default().intensity.back_off {
            return Err(format!("the {victim} was killed too late to delay the reply").into());
        }
        let successor = find(&runtime, &model, victim).await?.get_id();
        let now = model.serving().await?.generation;
        println!("its successor is actor {successor}; serving generation {generation:#x} -> {now:#x}");
        if successor == dead {
            return Err(format!("the {victim} was not replaced").into());
        }
    }

    println!("\nLeases now. The weights were not loaded again. The new engine holds the other leases:");
    let after = runtime.budget().snapshot().await?;
    show(&after);
    if after.granted != before.granted {
        return Err("the granted bytes have changed".into());
    }
    runtime.shutdown().await;
    Ok(())
}

/// The running actor with this name.
async fn find(runtime: &Runtime, model: &ModelHandle, victim: &str) -> Result<ActorCell, Failure> {
    let serving = model.serving().await?;
    let supervised = runtime.supervised().await?;
    Ok(match victim {
        "scheduler" => serving.scheduler.get_cell(),
        "vision" => serving.vision.ok_or("the demo model takes pictures")?.get_cell(),
        "budget" => supervised.budget,
        _ => supervised.engines["demo"].clone(),
    })
}

/// Reads a reply and kills `victim` in the middle of it. Returns the reply and the longest
/// pause after the kill.
async fn interrupted(model: &ModelHandle, chat: Chat, victim: ActorCell) -> Result<(String, Duration), Failure> {
    let mut reply = model.chat(chat).await?;
    let (mut whole, mut pieces, mut pause, mut last) = (String::new(), 0, Duration::ZERO, Instant::now());
    while let Some(event) = reply.next().await {
        let event = event?;
        if pieces >= HEARD && last.elapsed() > pause {
            pause = last.elapsed();
        }
        last = Instant::now();
        whole.push_str(event.text());
        pieces += 1;
        match pieces {
            ..HEARD => print!("{}", event.text().escape_debug()),
            HEARD => {
                victim.kill();
                print!("{} [killed] ", event.text().escape_debug());
            }
            _ if pieces < 2 * HEARD => print!("{}", event.text().escape_debug()),
            _ => {}
        }
        std::io::stdout().flush()?;
    }
    println!(" ... and so on, {pieces} pieces in all; the longest pause was {} ms", pause.as_millis());
    Ok((whole, pause))
}

fn show(ledger: &Snapshot) {
    for lease in &ledger.leases {
        println!("  {:<17} {:<18} {:>10}", lease.class.label(), lease.owner.to_string(), lease.bytes.to_string());
    }
}
