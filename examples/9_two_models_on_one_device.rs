//! Two models on one device, with separate limits and one ledger. A third model does not fit.
//! The refusal suggests settings that would make it fit, and the model starts after another
//! model is unloaded.
//!
//! `cargo run --release --example 9_two_models_on_one_device`

use bursar::{
    Bytes, Chat, DeviceChoice, Envelope, Hint, Image, LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig,
    demo,
};

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let config = RuntimeConfig { device: DeviceChoice::Host(Bytes::mib(96)), ..RuntimeConfig::default() };
    let runtime = Runtime::start(config).await?;

    // The first model has a fixed KV cache of 2,048 tokens. The second takes most
    // of the remaining memory.
    let thrifty = LoadOptions { name: Some("thrifty".into()), kv_tokens: Some(2048), ..LoadOptions::small() };
    let thrifty = runtime.load_with(ModelSource::demo(), thrifty, |_| {}).await?;
    let hungry = LoadOptions { name: Some("hungry".into()), memory_fraction: Some(0.95), ..LoadOptions::small() };
    let hungry = runtime.load_with(ModelSource::demo(), hungry, |_| {}).await?;
    println!("{}", runtime.budget().snapshot().await?);
    for (name, model) in [("thrifty", &thrifty), ("hungry", &hungry)] {
        let serving = model.serving().await?;
        println!("{name} holds {} tokens of keys and values", serving.record.kv_tokens());
    }

    // Both models answer concurrently. They share nothing except the device.
    let [shapes, number] = demo::pictures() else { return Err("there are two bundled pictures".into()) };
    let (first, second) = tokio::join!(ask(&thrifty, shapes), ask(&hungry, number));
    println!("\nthrifty on {}: {}\nhungry on {}: {}\n", shapes.name, first?, number.name, second?);

    let third = || LoadOptions {
        name: Some("third".into()),
        envelope: Some(Envelope { sequences: 2, ..Envelope::small() }),
        ..LoadOptions::small()
    };
    match runtime.load_with(ModelSource::demo(), third(), |_| {}).await {
        Ok(_) => return Err("the third model was loaded on a full device".into()),
        Err(error) => println!("third: {error}\n hint: {}\n", error.hint()),
    }
    runtime.unload("hungry").await?;
    println!("hungry is unloaded, and its memory is released. The third model fits now:");
    let third = runtime.load_with(ModelSource::demo(), third(), |_| {}).await?;
    println!("third on {}: {}", number.name, ask(&third, number).await?);
    println!("thrifty is not affected: {}", ask(&thrifty, shapes).await?);
    runtime.shutdown().await;
    Ok(())
}

async fn ask(model: &ModelHandle, picture: &demo::Picture) -> Result<String, Failure> {
    let chat = Chat::new().user(picture.question).image(Image::from_bytes(picture.bytes)).temperature(0.0);
    Ok(model.chat(chat).await?.text().await?)
}
