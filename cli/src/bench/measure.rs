//! Requests that are sent through the serving engine and timed together.

use std::{
    iter,
    ops::Range,
    time::{Duration, Instant},
};

use bursar::{Bytes, Chat, ChatEvent, Image, ModelHandle, Usage};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::JoinSet;

use super::{
    draw::Rng,
    workload::{PictureLoad, Prompts},
};
use crate::failure::Failure;

/// Limit on host memory for pictures in flight: enough for the CPUs to decode every request's
/// pictures at full speed.
pub const HOST_BYTES: Bytes = Bytes::gib(8);

/// Token ids that prompts are drawn from: text tokens without special tokens. vLLM was measured
/// with the same range.
const IDS: Range<u32> = 1000..100_000;

/// Returns the range of ids to draw from, for a model whose text tokens have ids below `text_ids`.
pub fn ids(text_ids: u32) -> Range<u32> {
    let end = IDS.end.min(text_ids).max(1);
    IDS.start.min(end / 2)..end
}

/// Returns the progress bar of the command, which is hidden unless `shown`.
pub fn bar(shown: bool) -> ProgressBar {
    let bar = if shown { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template("measuring {msg}").expect("the template is valid"));
    bar
}

/// Question that is asked about every picture.
const QUESTION: &str = "Describe.";

pub struct Meter {
    model: ModelHandle,
    ids: Range<u32>,
    random: Rng,
}

/// The result of requests that were all answered.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Time from just before the first request to the end of the last.
    pub time: Duration,
    /// Prompt tokens of one request. All requests of a run have prompts of equal length.
    pub prompt_tokens: usize,
}

impl Meter {
    /// Measures `model`, whose text tokens have ids below `text_ids`.
    pub fn new(model: ModelHandle, text_ids: u32, seed: u64) -> Self {
        Meter { model, ids: ids(text_ids), random: Rng::new(seed) }
    }

    /// Sends prompts of new random tokens. Each is answered with `reply` tokens.
    ///
    /// # Errors
    /// A request failed, had a reply of another length, or found tokens in the prefix cache. In the
    /// last two cases, the figure would not be comparable with other figures.
    pub async fn text(&mut self, prompts: Prompts, reply: usize) -> Result<Run, Failure> {
        let chat = |random: &mut Rng| {
            let ids = iter::repeat_with(|| self.ids.start + random.below(self.ids.end - self.ids.start));
            Chat::from_tokens(ids.take(prompts.length).collect::<Vec<u32>>())
        };
        let chats = (0..prompts.count).map(|_| chat(&mut self.random)).collect();
        self.run(chats, reply).await
    }

    /// Sends requests with one picture of random pixels each, as raw pixels.
    ///
    /// # Errors
    /// See [`text`](Meter::text).
    pub async fn pictures(&mut self, pictures: &PictureLoad, reply: usize) -> Result<Run, Failure> {
        let bytes = 3 * pictures.width as usize * pictures.height as usize;
        let chats: Result<Vec<_>, Failure> = (0..pictures.count)
            .map(|_| {
                let image = Image::from_rgb(pictures.width, pictures.height, self.random.bytes(bytes))?;
                Ok(Chat::new().user(QUESTION).image(image))
            })
            .collect();
        self.run(chats?, reply).await
    }

    async fn run(&mut self, chats: Vec<Chat>, reply: usize) -> Result<Run, Failure> {
        // Give each request a new cache salt, so that no cached prefix is reused, not even a common
        // system turn.
        let salted = chats.into_iter().map(|chat| greedy(chat, reply).cache_salt(self.random.next().to_string()));
        let chats: Vec<Chat> = salted.collect();
        let started = Instant::now();
        let mut answers = JoinSet::new();
        for chat in chats {
            answers.spawn(answer(self.model.clone(), chat));
        }
        let mut prompt_tokens = 0;
        while let Some(answered) = answers.join_next().await {
            let usage = answered.map_err(|error| failure(format!("the task of a request failed: {error}")))??;
            check(usage, reply)?;
            prompt_tokens = usage.prompt_tokens;
        }
        Ok(Run { time: started.elapsed(), prompt_tokens })
    }
}

/// Sets greedy decoding with a fixed length, whatever the checkpoint's defaults are.
pub fn greedy(chat: Chat, reply: usize) -> Chat {
    let plain = chat.temperature(0.0).repetition_penalty(1.0).presence_penalty(0.0).frequency_penalty(0.0);
    plain.max_tokens(reply).ignore_end()
}

async fn answer(model: ModelHandle, chat: Chat) -> Result<Usage, Failure> {
    let mut reply = model.chat(chat).await?;
    while let Some(event) = reply.next().await {
        if let ChatEvent::Done { usage, .. } = event? {
            return Ok(usage);
        }
    }
    Err(failure("a reply ended without a Done event".to_owned()))
}

fn check(usage: Usage, reply: usize) -> Result<(), Failure> {
    if usage.completion_tokens != reply {
        return Err(failure(format!("a reply has {} tokens instead of {reply}", usage.completion_tokens)));
    }
    if usage.cached_tokens != 0 {
        return Err(failure(format!("{} tokens of a prompt were found in the prefix cache", usage.cached_tokens)));
    }
    Ok(())
}

fn failure(error: String) -> Failure {
    Failure { error, hint: "this is a bug in Bursar; please report it with the figure that was measured".to_owned() }
}
