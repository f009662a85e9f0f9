//! How many of a folder's questions does the demo model answer exactly, through this runtime?
//!
//! ```sh
//! python3 model/demo/draw.py --seed 20261121 --count 1000 --out /tmp/unseen   # needs numpy and Pillow
//! cargo run --release --example 5_evaluate_demo -- /tmp/unseen
//! ```

use std::{collections::BTreeMap, fs, path::PathBuf, time::Instant};

use bursar::{Chat, Image, ModelHandle, ModelSource, Runtime, RuntimeConfig};
use serde::Deserialize;
use tokio::task::JoinSet;

/// A line of `questions.jsonl`.
#[derive(Deserialize)]
struct Question {
    image: String,
    question: String,
    answer: String,
    kind: String,
}

/// Questions asked at once; the runtime takes 128.
const AT_ONCE: usize = 16;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let folder = PathBuf::from(std::env::args_os().nth(1).ok_or("name the folder that draw.py wrote")?);
    let lines = fs::read_to_string(folder.join("questions.jsonl"))?;
    let mut questions = lines.lines().map(serde_json::from_str).collect::<Result<Vec<Question>, _>>()?.into_iter();

    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    let model = runtime.load(ModelSource::demo()).await?;
    let (started, mut asked) = (Instant::now(), JoinSet::new());
    let mut kinds: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    loop {
        while asked.len() < AT_ONCE
            && let Some(question) = questions.next()
        {
            asked.spawn(ask(model.clone(), folder.clone(), question));
        }
        let Some(answered) = asked.join_next().await else { break };
        let (question, reply) = answered??;
        let right = reply.trim() == question.answer;
        if !right {
            println!(
                "{} {:?}\n  expected {:?}\n  got      {reply:?}",
                question.image, question.question, question.answer
            );
        }
        let (correct, total) = kinds.entry(question.kind).or_default();
        *correct += usize::from(right);
        *total += 1;
    }
    let (correct, total) = kinds.values().fold((0, 0), |sum, kind| (sum.0 + kind.0, sum.1 + kind.1));
    for (kind, (correct, total)) in kinds {
        println!("{kind:>14}  {correct:>4} of {total:>4}");
    }
    let (share, seconds) = (100.0 * correct as f64 / total.max(1) as f64, started.elapsed().as_secs_f64());
    println!("exact: {correct} of {total} = {share:.1} %, {:.1} answers a second", total as f64 / seconds);
    runtime.shutdown().await;
    Ok(())
}

async fn ask(
    model: ModelHandle,
    folder: PathBuf,
    question: Question,
) -> Result<(Question, String), Box<dyn std::error::Error + Send + Sync>> {
    let image = Image::open(folder.join(&question.image))?;
    let reply = model.chat(Chat::new().user(&question.question).image(image)).await?.text().await?;
    Ok((question, reply))
}
