//! The share of questions that the demo model answers exactly through this runtime. The
//! questions come from a folder written by `draw.py`. Without a folder, they are about
//! the two bundled pictures. A second folder is a checkpoint that is used instead of the
//! embedded demo, such as the hybrid demo with decompressed weights.
//!
//! ```sh
//! python3 model/demo/draw.py --seed 20261121 --count 1000 --out /tmp/unseen   # needs numpy and Pillow
//! cargo run --release --example 5_evaluate_demo -- /tmp/unseen
//! cargo run --release --example 5_evaluate_demo -- /tmp/unseen /tmp/hybrid
//! cargo run --release --example 5_evaluate_demo
//! ```

use std::{collections::BTreeMap, fs, path::PathBuf, time::Instant};

use bursar::{Chat, Image, ModelHandle, ModelSource, Runtime, RuntimeConfig, demo};
use serde::Deserialize;
use tokio::task::JoinSet;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A line of `questions.jsonl`.
#[derive(Deserialize)]
struct Question {
    image: String,
    question: String,
    answer: String,
    kind: String,
}

/// Concurrent questions, far below the limit on requests that run or wait.
const AT_ONCE: usize = 16;

/// Minimum percentage of exact answers. A lower percentage means that something is broken. The
/// measured percentage is 99.9.
const EXACT_MIN: f64 = 98.0;

/// Questions about the bundled pictures: picture, question, answer, and the kind
/// of question in `draw.py`.
const BUNDLED: [(usize, &str, &str, &str); 7] = [
    (0, "Describe the picture.", "a red circle, a blue star and an orange triangle on a light background", "describe"),
    (0, "How many shapes are there?", "3", "count_shapes"),
    (0, "What colour is the star?", "blue", "colour"),
    (0, "Is there a green shape?", "no", "exists"),
    (1, "What number is written?", "427", "number"),
    (1, "How many shapes are there?", "2", "count_shapes"),
    (1, "What colour is the star?", "yellow", "colour"),
];

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut questions = match std::env::args_os().nth(1) {
        Some(folder) => read(PathBuf::from(folder))?,
        None => BUNDLED.iter().map(bundled).collect(),
    }
    .into_iter();

    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    let source = std::env::args_os().nth(2).map_or_else(ModelSource::demo, ModelSource::folder);
    let model = runtime.load(source).await?;
    let (started, mut asked) = (Instant::now(), JoinSet::new());
    let mut kinds: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    loop {
        while asked.len() < AT_ONCE
            && let Some((picture, question)) = questions.next()
        {
            asked.spawn(ask(model.clone(), picture, question));
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
    if share < EXACT_MIN {
        return Err(format!("less than {EXACT_MIN} % of the answers are exact").into());
    }
    Ok(())
}

/// The questions in a folder, each with the file of its picture.
fn read(folder: PathBuf) -> Result<Vec<(Picture, Question)>, Failure> {
    let lines = fs::read_to_string(folder.join("questions.jsonl"))?;
    let questions = lines.lines().map(|line| {
        let question: Question = serde_json::from_str(line)?;
        Ok((Picture::File(folder.join(&question.image)), question))
    });
    questions.collect()
}

fn bundled((picture, question, answer, kind): &(usize, &str, &str, &str)) -> (Picture, Question) {
    let demo::Picture { name, bytes, .. } = demo::pictures()[*picture];
    let [image, question, answer, kind] = [name, question, answer, kind].map(str::to_owned);
    (Picture::Bundled(bytes), Question { image, question, answer, kind })
}

/// The source of a picture. A file is opened when its question is asked.
enum Picture {
    File(PathBuf),
    Bundled(&'static [u8]),
}

async fn ask(model: ModelHandle, picture: Picture, question: Question) -> Result<(Question, String), Failure> {
    let image = match picture {
        Picture::File(path) => Image::open(path)?,
        Picture::Bundled(bytes) => Image::from_bytes(bytes),
    };
    let reply = model.chat(Chat::new().user(&question.question).image(image)).await?.text().await?;
    Ok((question, reply))
}
