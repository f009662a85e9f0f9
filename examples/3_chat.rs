//! A chat about a picture, streamed, and a second turn about the same picture.
//!
//! `cargo run --release --example 3_chat`

use std::io::Write;

use bursar::{Chat, Image, ModelHandle, ModelSource, Runtime, RuntimeConfig, demo};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    let model = runtime.load(ModelSource::demo()).await?;

    let picture = &demo::pictures()[0];
    let first = Chat::new().user("Describe the picture.").image(Image::from_bytes(picture.bytes));
    let answer = stream(&model, first.clone()).await?;

    let second = first.assistant(answer).user("How many shapes are there?");
    stream(&model, second).await?;

    runtime.shutdown().await;
    Ok(())
}

async fn stream(model: &ModelHandle, chat: Chat) -> Result<String, Box<dyn std::error::Error>> {
    let mut reply = model.chat(chat).await?;
    let mut answer = String::new();
    while let Some(event) = reply.next().await {
        let event = event?;
        answer.push_str(event.text());
        print!("{}", event.text());
        std::io::stdout().flush()?;
    }
    println!();
    Ok(answer)
}
