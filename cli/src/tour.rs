//! The tour: a runtime, the demo model, the budget, two answers, and the budget again.

use std::time::{Duration, Instant};

use bursar::{Chat, Image, LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig, Snapshot, demo};

use crate::{DeviceOptions, failure::Failure, model};

/// How long the ledger may take to return to its earlier state after the last answer. The delay
/// exists because a dropped lease is returned to the budget by a message.
const SETTLING_MAX: Duration = Duration::from_secs(5);

pub async fn run(device: &DeviceOptions) -> Result<(), Failure> {
    let runtime =
        model::start(device, RuntimeConfig::default(), vec![(ModelSource::demo(), LoadOptions::default())]).await?;
    println!("{} Loading the embedded demo model.\n", device.describe(&runtime));
    let started = Instant::now();
    let demo = model::load(&runtime, device, "demo", true).await?;
    let seconds = started.elapsed().as_secs_f64();
    let how = if demo.serving().await?.is_warm {
        "planned, loaded, sized from the profile of an earlier start, stressed"
    } else {
        "planned, loaded, stressed, sized"
    };
    println!("READY after {seconds:.1} s: {how}.\n");
    let before = snapshot(&runtime).await?;
    println!("{before}");
    for picture in demo::pictures() {
        answer(&demo, picture).await?;
    }
    let after = settled(&runtime, &before).await?;
    println!("{after}");
    let verdict = if after == before { "The ledger is back to its earlier state." } else { "The ledger has changed!" };
    println!("{verdict}");
    runtime.shutdown().await;
    if after != before {
        return Err(Failure {
            error: "memory that was leased for the answers was not returned".to_owned(),
            hint: "this is a bug in Bursar; please report it with the tables above".to_owned(),
        });
    }
    Ok(())
}

async fn answer(demo: &ModelHandle, picture: &demo::Picture) -> Result<(), Failure> {
    println!("[{}] {}", picture.name, picture.question);
    print!("> ");
    let chat = Chat::new().user(picture.question).image(Image::from_bytes(picture.bytes));
    let (asked, mut first) = (Instant::now(), None);
    let mut reply = demo.chat(chat).await?;
    while let Some(event) = reply.next().await {
        let event = event?;
        first.get_or_insert_with(|| asked.elapsed());
        print!("{}", event.text());
    }
    let first = first.unwrap_or_default().as_millis();
    println!("\n  (first token after {first} ms, whole answer after {} ms)\n", asked.elapsed().as_millis());
    Ok(())
}

async fn snapshot(runtime: &Runtime) -> Result<Snapshot, Failure> {
    runtime.budget().snapshot().await.map_err(|error| Failure {
        error: error.to_string(),
        hint: "the runtime has stopped; start the command again".to_owned(),
    })
}

/// Returns the ledger once it equals `before`, or its state after `SETTLING_MAX`.
async fn settled(runtime: &Runtime, before: &Snapshot) -> Result<Snapshot, Failure> {
    let patience = Instant::now() + SETTLING_MAX;
    let mut looks = tokio::time::interval(Duration::from_millis(5));
    loop {
        looks.tick().await;
        let now = snapshot(runtime).await?;
        if now == *before || Instant::now() > patience {
            return Ok(now);
        }
    }
}
