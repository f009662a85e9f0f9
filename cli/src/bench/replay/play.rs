//! Replay of arrivals through a served model: each request is sent at its time, and the times of
//! its tokens are recorded.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use bursar::{Chat, ChatError, ChatEvent, Hint, Image, ModelHandle, Usage};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::sleep_until,
};

use super::{
    super::{draw::Rng, measure::greedy},
    arrivals::{Arrivals, Asked, Caller, Kind, Piece, ReplayPicture, ReplayRequest},
    figures::Answered,
    times::Times,
};
use crate::failure::Failure;

/// Pictures and prompts are generated this long before their request is sent, so that generating
/// them does not delay other callers.
const AHEAD: Duration = Duration::from_millis(500);

/// The model, and the sources of prompts.
#[derive(Clone)]
pub struct Player {
    pub model: ModelHandle,
    /// Token ids that random prompts are drawn from.
    pub ids: Range<u32>,
    pub seed: u64,
    /// Whether the model's template shows tools.
    pub shows_tools: bool,
    /// Contents of picture files, read before the run starts.
    files: Arc<BTreeMap<PathBuf, Arc<[u8]>>>,
}

/// The results of all callers.
pub struct Played {
    /// Time from the start to the end of the last request.
    pub time: Duration,
    pub answered: Vec<Answered>,
    pub failed: Vec<String>,
}

type Outcome = Result<Answered, String>;

/// State that the callers of a run share.
struct RunParts {
    started: Instant,
    /// Cache salt of the run.
    salt: String,
    /// One permit for each request that may be in flight. A caller generates the content of a
    /// request after it has a permit, so that only few requests take memory.
    permits: Semaphore,
    outcomes_in: mpsc::Sender<(Instant, Outcome)>,
}

impl Player {
    pub fn new(model: ModelHandle, ids: Range<u32>, seed: u64, shows_tools: bool) -> Self {
        Player { model, ids, seed, shows_tools, files: Arc::default() }
    }

    /// Reads the picture files that these arrivals refer to.
    ///
    /// # Errors
    /// A file cannot be read. The failure names the file.
    pub fn read_pictures(&mut self, arrivals: &Arrivals) -> Result<(), Failure> {
        let mut files = BTreeMap::new();
        for turn in arrivals.callers.iter().flat_map(|caller| &caller.turns) {
            let Asked::Said { pictures, .. } = &turn.asked else { continue };
            for picture in pictures {
                if let ReplayPicture::File(path) = picture
                    && !files.contains_key(path)
                {
                    let bytes = std::fs::read(path).map_err(|error| Failure {
                        error: format!("picture {} cannot be read: {error}", path.display()),
                        hint: "set the folder of the pictures with --pictures-in, or omit it to generate pictures"
                            .to_owned(),
                    })?;
                    files.insert(path.clone(), bytes.into());
                }
            }
        }
        self.files = Arc::new(files);
        Ok(())
    }

    /// Sends all requests, and returns when every caller has ended. Caches do not reuse anything
    /// from other runs, because each run has a separate cache salt. At most `at_once` requests are
    /// in flight.
    pub async fn play(&self, arrivals: &Arrivals, run: usize, at_once: usize) -> Played {
        let (outcomes_in, mut outcomes) = mpsc::channel(arrivals.requests().max(1));
        let started = Instant::now() + AHEAD;
        let salt = format!("{} {run}", self.seed);
        let run = Arc::new(RunParts { started, salt, permits: Semaphore::new(at_once), outcomes_in });
        let mut callers = JoinSet::new();
        for (number, caller) in arrivals.callers.iter().cloned().enumerate() {
            let (player, run) = (self.clone(), run.clone());
            callers.spawn(async move { player.converse(caller, number, &run).await });
        }
        // The channel closes when the last caller has ended.
        drop(run);
        let mut played = Played { time: Duration::ZERO, answered: Vec::new(), failed: Vec::new() };
        while let Some((ended, outcome)) = outcomes.recv().await {
            played.time = played.time.max(Instant::saturating_duration_since(&ended, started));
            match outcome {
                Ok(answered) => played.answered.push(answered),
                Err(error) => played.failed.push(error),
            }
        }
        while let Some(ended) = callers.join_next().await {
            played.failed.extend(ended.err().map(|error| format!("the task of a caller failed: {error}")));
        }
        played
    }

    /// Sends one turn after another. After a failed turn, the caller sends nothing more.
    async fn converse(&self, caller: Caller, number: usize, run: &RunParts) {
        let mut at = run.started + caller.at;
        let opened = caller.system.iter().fold(Chat::new(), |chat, system| chat.system(system));
        let mut history = if self.shows_tools { opened.tools(caller.tools) } else { opened };
        for (place, ReplayRequest { kind, pause, asked, reply }) in caller.turns.into_iter().enumerate() {
            at += pause;
            sleep_until((at - AHEAD.min(at.saturating_duration_since(Instant::now()))).into()).await;
            let _permit = run.permits.acquire().await.expect("the semaphore is never closed");
            let draw = Rng::new(self.seed ^ (((number as u64) << 20) + place as u64 + 1));
            let outcome = match self.chat(history.clone(), asked, draw).await {
                Err(error) => Err(error),
                Ok(chat) => {
                    history = chat.clone();
                    sleep_until(at.into()).await;
                    self.ask(greedy(chat, reply).cache_salt(&*run.salt), kind).await
                }
            };
            at = Instant::now();
            match outcome {
                Ok((answered, text)) => {
                    history = history.assistant(text);
                    drop(run.outcomes_in.send((at, Ok(answered))).await);
                }
                Err(error) => return drop(run.outcomes_in.send((at, Err(error))).await),
            }
        }
    }

    /// Adds the next turn to the conversation.
    async fn chat(&self, history: Chat, asked: Asked, mut draw: Rng) -> Result<Chat, String> {
        match asked {
            Asked::Tokens(pieces) => Ok(Chat::from_tokens(self.tokens(&pieces, &mut draw))),
            Asked::Whole(chat) => Ok(*chat),
            Asked::Said { text, pictures } => self.show(history.user(text), pictures).await,
            Asked::Result { call, text, pictures } => {
                let chat = if self.shows_tools {
                    let id = call["id"].as_str().unwrap_or_default().to_owned();
                    history.tool_call(call).tool_result(id, text)
                } else {
                    history.user(text)
                };
                self.show(chat, pictures).await
            }
        }
    }

    fn tokens(&self, pieces: &[Piece], draw: &mut Rng) -> Vec<u32> {
        let of = |piece: &Piece| {
            // A piece with seed 0 has new tokens each time.
            let seed = if piece.seed == 0 { draw.next() } else { piece.seed ^ self.seed };
            let mut draw = Rng::new(seed);
            let ids = self.ids.clone();
            std::iter::repeat_with(move || ids.start + draw.below(ids.end - ids.start)).take(piece.tokens)
        };
        pieces.iter().flat_map(of).collect()
    }

    async fn show(&self, chat: Chat, pictures: Vec<ReplayPicture>) -> Result<Chat, String> {
        let mut shown = chat;
        for picture in pictures {
            let image = match picture {
                ReplayPicture::File(path) => Image::from_bytes(self.files[&path].clone()),
                ReplayPicture::Drawn { seed, width, height } => {
                    let seed = seed ^ self.seed;
                    let pixels = move || Rng::new(seed).bytes(3 * width as usize * height as usize);
                    let pixels = tokio::task::spawn_blocking(pixels).await.map_err(|error| error.to_string())?;
                    Image::from_rgb(width, height, pixels).map_err(|error| error.to_string())?
                }
            };
            shown = shown.image(image);
        }
        Ok(shown)
    }

    async fn ask(&self, chat: Chat, kind: Kind) -> Result<(Answered, String), String> {
        let asked = Instant::now();
        // Equal texts are counted together. The text of a missed deadline therefore leaves out the
        // elapsed time, which differs between requests.
        let message = |error: ChatError| match (&error, error.hint()) {
            (ChatError::TooLate { deadline, limit, .. }, _) => {
                format!("missed `{}` of {} ms", deadline.knob(), limit.as_millis())
            }
            (_, hint) if hint.to_string().is_empty() => error.to_string(),
            (_, hint) => format!("{error} ({hint})"),
        };
        let mut reply = self.model.chat(chat.token_ids()).await.map_err(message)?;
        let (mut first, mut last, mut intervals) = (None, asked, Vec::new());
        while let Some(event) = reply.next().await {
            match event.map_err(message)? {
                ChatEvent::TokenId(_) => {
                    let now = Instant::now();
                    match first {
                        None => first = Some(now),
                        Some(_) => intervals.push(now - last),
                    }
                    last = now;
                }
                ChatEvent::Done { usage, text, .. } => {
                    let Usage { prompt_tokens, cached_tokens, completion_tokens, .. } = usage;
                    let times = Times { first: first.unwrap_or(last) - asked, intervals, whole: last - asked };
                    let answered =
                        Answered { kind, times, prompt_tokens, cached_tokens, reply_tokens: completion_tokens };
                    return Ok((answered, text));
                }
                _ => {}
            }
        }
        Err("a reply ended without a Done event".to_owned())
    }
}
