//! A chat about a picture: streamed, with a second turn, a reply that follows a schema,
//! several samples, and token probabilities.
//!
//! `cargo run --release --example 3_chat`

use std::io::Write;

use bursar::{
    Chat, ChatEvent, Image, LoadOptions, ModelHandle, ModelSource, OutputFormat, Runtime, RuntimeConfig, demo,
};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    let model = runtime.load_with(ModelSource::demo(), LoadOptions::small(), |_| {}).await?;
    let picture = Image::from_bytes(demo::pictures()[0].bytes);
    let about = |question: &str| Chat::new().user(question).image(picture.clone());

    println!("? Describe the picture.");
    let first = about("Describe the picture.");
    let answer = stream(&model, first.clone()).await?;

    // The next turn reuses the cached prefix and computes only the new tokens.
    println!("? How many shapes are there?");
    let second = first.assistant(answer).user("How many shapes are there?");
    stream(&model, second).await?;

    println!("\nThe same question, with a JSON schema that the reply must match:");
    let schema = json!({
        "type": "object",
        "properties": { "shapes": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["shapes"],
        "additionalProperties": false,
    });
    let formed = about("How many shapes are there?").format(OutputFormat::json(schema)).temperature(0.0);
    let value: Value = serde_json::from_str(&model.chat(formed).await?.text().await?)?;
    println!("{value}");
    value["shapes"].as_u64().ok_or("`shapes` is not a whole number")?;

    println!("\nOne of three words, with the probability of each token:");
    let words = ["red", "green", "blue"].map(str::to_owned);
    let chosen = about("What colour is the star?").format(OutputFormat::Choice(words.to_vec())).temperature(0.0);
    let mut reply = model.chat(chosen.log_probabilities(2)).await?;
    let mut word = String::new();
    while let Some(event) = reply.next().await {
        match event? {
            ChatEvent::Token(score) => {
                let share = |log_probability: f32| 100.0 * log_probability.exp();
                let top = score.top.iter().map(|top| format!("{:?} {:.1} %", top.text, share(top.log_probability)));
                println!("{:?} (most likely: {})", score.token.text, top.collect::<Vec<_>>().join(", "));
            }
            event => word.push_str(event.text()),
        }
    }
    if !words.contains(&word) {
        return Err(format!("the reply is {word:?}; expected one of {words:?}").into());
    }

    println!("\nThree samples at a high temperature. Their prompt and picture are computed once:");
    let warm = about("Describe the picture.").temperature(3.0).top_k(0).top_p(1.0).seed(7).max_tokens(12);
    for mut reply in model.samples(warm, 3).await? {
        while let Some(event) = reply.next().await {
            if let ChatEvent::Done { text, usage, .. } = event? {
                let (cached, prompt) = (usage.cached_tokens, usage.prompt_tokens);
                println!("{text:?} ({cached} of {prompt} prompt tokens were in the cache)");
            }
        }
    }
    runtime.shutdown().await;
    Ok(())
}

/// Prints a reply as it arrives and returns its text.
async fn stream(model: &ModelHandle, chat: Chat) -> Result<String, Failure> {
    let mut reply = model.chat(chat).await?;
    let mut answer = String::new();
    print!("> ");
    while let Some(event) = reply.next().await {
        let event = event?;
        answer.push_str(event.text());
        print!("{}", event.text());
        std::io::stdout().flush()?;
    }
    println!();
    Ok(answer)
}
