//! Drills with a supervised model of Qwen2.5-VL-7B's shape on a whole GPU: an account of every
//! byte, another process that starts while chats have pictures or while the model starts, GPUs with
//! too little memory, and loads that made another server lose requests. Without a GPU, each story
//! prints a note and passes.

use std::{
    fmt::Write as _,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant, SystemTime},
};

use crate::gpu::{
    Stage, all_memory_returned, eventually, options,
    other_process::{self, OtherProcess},
    started, story,
};
use bursar_actors::{
    chat::{Chat, ChatEvent, Image, ModelHandle, TokenScore},
    engine::{LoadOptions, Progress, Shortfall, StartError, Unfit},
    event::{Event, Recorded},
    profile::{AttemptReport, Phase, RESERVE_MAX},
    runtime::ModelSource,
};
use bursar_budgets::{Bytes, Class, Device, Hint};
use bursar_model::registry::random_checkpoint;
use tokio::task::{JoinHandle, JoinSet, block_in_place};

/// The name of the test that runs as the other process.
const OTHER_PROCESS: &str = "drills::another_process_takes_the_requested_bytes";

#[test]
fn another_process_takes_the_requested_bytes() {
    other_process::live();
}

const NAME: &str = "seven";

const LAYERS: u64 = 28;

/// The load options of an application without settings: the envelope of a GPU, and the whole GPU.
fn full() -> LoadOptions {
    LoadOptions { name: Some(NAME.into()), envelope: None, requests: Some(512), ..options() }
}

/// A model that serves, with the times and attempts of its start.
struct Started {
    model: ModelHandle,
    begun: Instant,
    phases: Vec<(Phase, Instant)>,
    attempts: Vec<AttemptReport>,
    ready: Instant,
}

impl Started {
    fn description(&self) -> String {
        let ends = self.phases.iter().skip(1).map(|(_, at)| *at).chain([self.ready]);
        let mut message = format!("ready after {:.2} s:", (self.ready - self.begun).as_secs_f64());
        for ((phase, at), end) in self.phases.iter().zip(ends) {
            write!(message, " {phase} {:.3} s", (end - *at).as_secs_f64()).expect("a String takes every write");
        }
        message
    }
}

/// Starts the model. Calls `at` at the beginning of each phase.
async fn start(
    stage: &Stage,
    options: LoadOptions,
    at: impl Fn(Phase) + Send + Sync + 'static,
) -> Result<Started, Arc<StartError>> {
    let source = ModelSource::random(random_checkpoint("qwen2.5-vl-7b", 7).expect("a known shape"));
    let events: Arc<Mutex<(Vec<_>, Vec<_>)>> = Arc::default();
    let (listening, begun) = (events.clone(), Instant::now());
    let listen = move |progress| match progress {
        Progress::Phase(phase) => {
            listening.lock().expect("the lock is not poisoned").0.push((phase, Instant::now()));
            at(phase);
        }
        Progress::Attempt(report) => listening.lock().expect("the lock is not poisoned").1.push(report),
        _ => {}
    };
    let model = started(stage.runtime.load_with(source, options, listen).await)?;
    let (phases, attempts) = std::mem::take(&mut *events.lock().expect("the lock is not poisoned"));
    Ok(Started { model, begun, phases, attempts, ready: Instant::now() })
}

/// The size of the KV cache, in tokens.
async fn kv_tokens(model: &ModelHandle) -> usize {
    model.serving().await.expect("the model serves").kv_tokens
}

/// Pseudorandom bytes, for pictures and token ids.
fn noise() -> &'static [u8] {
    static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
    NOISE.get_or_init(|| {
        let mut state = 88_172_645_463_325_252u64;
        (0..32 << 20)
            .map(|_| {
                // Xorshift (Marsaglia 2003).
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 24) as u8
            })
            .collect()
    })
}

/// A number that no earlier call returned.
fn fresh() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, SeqCst)
}

/// A question about a new picture, with a reply of this many tokens.
fn shown((wide, high): (u32, u32), reply: usize) -> Chat {
    let (bytes, first) = (3 * wide as usize * high as usize, 997 * fresh() as usize % (4 << 20));
    let image = Image::from_rgb(wide, high, &noise()[first..first + bytes]).expect("the byte count matches the size");
    greedy(Chat::new().user("Describe.").image(image), reply)
}

/// A prompt of random tokens.
fn counting_chat(tokens: usize, reply: usize) -> Chat {
    let first = fresh() as usize * 8192;
    let id = |at: usize| 1000 + u32::from(noise()[at]) * 256 + u32::from(noise()[at + 1]);
    greedy(
        Chat::from_tokens((first..).step_by(2).map(|at| id(at % (30 << 20))).take(tokens).collect::<Vec<_>>()),
        reply,
    )
}

fn greedy(chat: Chat, reply: usize) -> Chat {
    chat.temperature(0.0).max_tokens(reply).ignore_end()
}

/// Sends a chat. Checks that the reply and its scores have the requested lengths.
async fn ask(model: ModelHandle, chat: Chat, reply: usize, scores: Range<usize>) {
    let mut events = model.chat(chat).await.expect("the chat is accepted");
    let mut scored = 0;
    while let Some(event) = events.next().await {
        match event.expect("no request fails") {
            ChatEvent::Prompt(prompt) => {
                scored += prompt.len();
                prompt[1..]
                    .iter()
                    .for_each(|score| is_of_a_distribution(score.as_ref().expect("the logits are numbers")));
            }
            ChatEvent::Token(score) => {
                assert!(!score.top.is_empty());
                scored += 1;
            }
            ChatEvent::Done { usage, .. } => {
                assert_eq!(usage.completion_tokens, reply);
                return assert!(scores.contains(&scored), "{scored} scores were reported");
            }
            _ => {}
        }
    }
    panic!("a reply has an end")
}

const NONE: Range<usize> = 0..1;

/// Checks that the likeliest tokens come first, and that their probabilities add up to less than 1.
/// The chosen token must be one of these tokens, or no more likely than any of them.
fn is_of_a_distribution(score: &TokenScore) {
    let TokenScore { token, top } = score;
    let (own, least) = (token.log_probability, top.last().map_or(0.0, |last| last.log_probability));
    let listed = top.iter().find(|other| other.id == token.id).map(|other| other.log_probability);
    assert!(own.is_finite() && listed.map_or(own <= least, |listed| listed == own), "{score:?}");
    assert!(top.iter().is_sorted_by(|a, b| a.log_probability >= b.log_probability), "{score:?}");
    assert!(top.iter().map(|other| f64::from(other.log_probability).exp()).sum::<f64>() < 1.0, "{score:?}");
}

/// Sends all chats at once. Returns the time until all were answered.
async fn ask_all(model: &ModelHandle, chats: Vec<Chat>, reply: usize, scores: Range<usize>) -> Duration {
    let (begun, mut asked) = (Instant::now(), JoinSet::new());
    for chat in chats {
        asked.spawn(ask(model.clone(), chat, reply, scores.clone()));
    }
    while let Some(answered) = asked.join_next().await {
        answered.expect("no request fails");
    }
    begun.elapsed()
}

/// Users, each of whom sends one picture after another.
struct Users {
    enough: Arc<AtomicBool>,
    answered: Arc<AtomicU32>,
    users: Vec<JoinHandle<()>>,
}

impl Users {
    fn come(count: usize, model: &ModelHandle) -> Users {
        let (enough, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicU32>::default());
        let user = |_| {
            let (model, enough, answered) = (model.clone(), enough.clone(), answered.clone());
            tokio::spawn(async move {
                while !enough.load(SeqCst) {
                    ask(model.clone(), shown((1036, 1036), 64), 64, NONE).await;
                    answered.fetch_add(1, SeqCst);
                }
            })
        };
        let users = (0..count).map(user).collect();
        Users { enough, answered, users }
    }

    /// Lets users finish the requests that they have begun. Returns the
    /// number of answered requests.
    async fn go(self) -> u32 {
        self.enough.store(true, SeqCst);
        for user in self.users {
            user.await.expect("no request fails");
        }
        self.answered.load(SeqCst)
    }
}

/// The bytes that each shrink took from the KV cache, and the time from the decision to the shrink.
fn yields(events: &[Recorded]) -> Vec<(Bytes, Duration)> {
    let (mut decided, mut found) = (None::<SystemTime>, Vec::new());
    for recorded in events {
        match &recorded.event {
            Event::Shrink { .. } => drop(decided.get_or_insert(recorded.at)),
            Event::LeaseResized { class: Class::Kv, from, to, .. } if to < from => {
                if let Some(since) = decided.take() {
                    found.push((*from - *to, recorded.at.duration_since(since).unwrap_or_default()));
                }
            }
            _ => {}
        }
    }
    found
}

/// Collects all events of the runtime from now on.
fn listen(stage: &Stage) -> impl AsyncFnOnce() -> Vec<Recorded> {
    let mut events = stage.runtime.events();
    let (over, mut is_over) = tokio::sync::oneshot::channel::<()>();
    let listener = tokio::spawn(async move {
        let mut seen = Vec::new();
        loop {
            tokio::select! {
                biased;
                event = events.next() => seen.push(event.expect("the runtime runs").expect("no event is missed")),
                _ = &mut is_over => return seen,
            }
        }
    });
    async move || {
        drop(over);
        listener.await.expect("the listener does not panic")
    }
}

/// Checks that no memory was refused, and that nothing restarted.
fn nothing_broke(events: &[Recorded]) {
    for recorded in events {
        let is_bad = matches!(recorded.event, Event::Oom { .. } | Event::Restart { .. } | Event::Failed { .. });
        assert!(!is_bad, "{recorded:?}");
    }
}

#[test]
fn a_start_fills_the_card_and_accounts_for_every_byte() {
    story(async |stage| {
        let before = stage.measured().await;
        let folder: PathBuf = std::env::temp_dir().join(format!("bursar-drills-{}", std::process::id()));
        let (mut sizes, mut kept) = (Vec::new(), Vec::new());
        for is_warm in [false, true] {
            let options = LoadOptions { profiles: Some(folder.clone()), ..full() };
            let started = start(&stage, options, |_| {}).await.expect("the model starts");
            let serving = started.model.serving().await.expect("the model serves");
            assert_eq!(serving.is_warm, is_warm);
            println!("{}, {} tokens of keys and values", started.description(), serving.kv_tokens);
            sizes.push(serving.kv_tokens);
            let (now, free) =
                (stage.measured().await, stage.device.memory().expect("the device reports its memory").free);
            println!("{now}\nfree by the driver {free}");
            for (worst_case, peak) in &serving.record.peaks {
                println!("{peak:>12} planned and measured: {worst_case}");
            }
            let sources = stage.device.overhead_by_source();
            sources.iter().for_each(|(source, bytes)| println!("{bytes:>12} of overhead: {source}"));
            let beside = now.overhead - sources.iter().map(|(_, bytes)| *bytes).sum();
            println!("{beside:>12} of overhead: loaded at first use, or kept by the driver");
            assert!(beside <= Bytes::mib(128), "almost all memory of the model is in a named class");
            let (reserve, rounding) = (RESERVE_MAX.min(Bytes(now.total.0 / 64)), Bytes::mib(2 * LAYERS));
            assert!(
                (reserve..=reserve + rounding).contains(&now.free),
                "{} are free in addition to the canary",
                now.free
            );
            assert_eq!(now.canary, now.canary_wanted);
            let by_ledger = now.free + now.canary;
            assert_eq!(free, by_ledger, "the driver and the ledger report the same free memory");
            // Memory that was foreign before the model was loaded belongs to the driver, so only an
            // increase would be memory without a lease.
            println!("{} of new foreign memory", now.foreign.saturating_sub(before.foreign));
            assert!(now.foreign <= before.foreign + Bytes::mib(2), "all memory of the model is leased");
            let drift = async || {
                let Some(ours) = stage.device.process_bytes() else {
                    println!("drift is not checked: this driver does not report memory per process");
                    return Bytes::ZERO;
                };
                let now = stage.snapshot().await;
                ours.saturating_sub(now.granted + now.overhead)
            };
            assert_eq!(drift().await, Bytes::ZERO, "all memory of the model is leased");
            ask_all(&started.model, (0..8).map(|_| shown((1036, 1036), 16)).collect(), 16, NONE).await;
            let later = stage.measured().await;
            assert_eq!(
                (later.granted, later.overhead),
                (now.granted, now.overhead),
                "requests took no memory from the ledger"
            );
            assert_eq!(drift().await, Bytes::ZERO, "requests took no memory outside the ledger");
            stage.runtime.unload(NAME).await.expect("the model unloads");
            all_memory_returned(&stage, &before).await;
            kept.push(stage.measured().await.overhead);
        }
        assert_eq!(sizes[0], sizes[1]);
        assert!(kept[1] <= kept[0] + Bytes::mib(4), "no later start leaves more memory than the first: {kept:?}");
        std::fs::remove_dir_all(folder).expect("the folder exists");
    });
}

#[test]
fn another_process_gets_up_to_40_gib_during_64_chats() {
    story(async |stage| {
        let started = start(&stage, full(), |_| {}).await.expect("the model starts");
        let model = &started.model;
        let before = stage.measured().await;
        let kv = async || stage.snapshot().await.of_class(&Class::Kv);
        let (wants, mut other_process) = ([1, 8, 40].map(Bytes::gib), OtherProcess::moves_in(OTHER_PROCESS));
        // Measure first without users, and then with 64 users.
        for users in [0, 64] {
            let (users, events) = (Users::come(users, model), listen(&stage));
            let are_busy = async || users.users.is_empty() || users.answered.load(SeqCst) > 0;
            eventually("all users have asked and one is answered", are_busy).await;
            for wanted in wants {
                let begun = Instant::now();
                eventually("the other process holds the memory", async || {
                    block_in_place(|| other_process.hold(wanted)) == wanted
                })
                .await;
                let had = begun.elapsed();
                eventually("the cache has shrunk enough", async || stage.is_quiet().await).await;
                let (now, answered) = (stage.measured().await, users.answered.load(SeqCst));
                println!("{wanted} after {had:?}, quiet after {:?}, {answered} answers\n{now}", begun.elapsed());
                assert!(now.foreign >= wanted, "{now}");
            }
            assert!(kv().await + Bytes::gib(38) < before.of_class(&Class::Kv));
            block_in_place(|| other_process.hold(Bytes::ZERO));
            let went = Instant::now();
            eventually("the cache has its old size", async || kv().await == before.of_class(&Class::Kv)).await;
            println!("regained after {:?}", went.elapsed());
            let answered = users.go().await;
            let events = events().await;
            nothing_broke(&events);
            let yields = yields(&events);
            for (bytes, after) in &yields {
                print!("{bytes} in {:.0} ms, ", after.as_secs_f64() * 1e3);
            }
            println!("given up in {} changes; {answered} answers", yields.len());
        }
        drop(other_process);
        stage.runtime.unload(NAME).await.expect("the model unloads");
    });
}

#[test]
fn loads_that_failed_on_another_server_lose_no_request() {
    story(async |stage| {
        let started = start(&stage, full(), |_| {}).await.expect("the model starts");
        let (model, events) = (&started.model, listen(&stage));
        let mut other_process = OtherProcess::moves_in(OTHER_PROCESS);
        let wanted = Bytes::mib(7680);
        eventually("the other process holds the memory", async || {
            block_in_place(|| other_process.hold(wanted)) == wanted
        })
        .await;
        // Then the other process takes all but 200 MiB of the rest. The server that lost requests
        // under these loads also had only 200 MiB left.
        let free = block_in_place(|| other_process.leave(Bytes::mib(200)));
        println!("{free} are free while the other process holds its memory");
        let scored = |_| counting_chat(2048, 32).temperature(1.0).top_p(0.9).top_k(50).log_probabilities(5);
        let loads = [
            ("64 pictures of 1036 x 1036", (0..64).map(|_| shown((1036, 1036), 16)).collect(), 16, NONE),
            ("8 pictures of 2520 x 2520", (0..8).map(|_| shown((2520, 2520), 4)).collect(), 4, NONE),
            ("256 prompts of 2,048 with log-probabilities", (0..256).map(scored).collect(), 32, 32..33),
            (
                "log-probabilities of 8,000 tokens",
                vec![counting_chat(8000, 2).prompt_log_probabilities(1)],
                2,
                7999..8001,
            ),
        ];
        for (what, chats, reply, scores) in loads {
            let took = ask_all(model, chats, reply, scores).await;
            let free = stage.device.memory().expect("the device reports its memory").free;
            println!("{what}: {:.2} s, {free} free", took.as_secs_f64());
        }
        nothing_broke(&events().await);
        let now = stage.measured().await;
        println!("{now}");
        assert!(now.deficit.is_zero() && now.foreign >= wanted, "{now}");
        drop(other_process);
        stage.runtime.unload(NAME).await.expect("the model unloads");
    });
}

#[test]
fn a_refused_start_fits_with_suggestions_or_more_memory() {
    story(async |stage| {
        let before = stage.measured().await;
        let mut other_process = OtherProcess::moves_in(OTHER_PROCESS);
        let (left, first) = too_little(&stage, &mut other_process, Bytes::gib(4)).await;
        // `left - available` is memory that the plan cannot lease: the canary, and memory for
        // kernels.
        let Shortfall::Memory { needed, available, .. } = first.shortfall else { panic!("{first}") };
        let enough = needed + left.saturating_sub(available);
        let mut applied = 0;
        for knob in first.suggestions.iter().map(|suggestion| suggestion.knob) {
            let (_, error) = too_little(&stage, &mut other_process, enough - Bytes::mib(200)).await;
            let named = error.suggestions.iter().find(|suggestion| suggestion.knob == knob);
            let suggestion = named.expect("the error suggests the same knobs");
            let Some(changed) = suggestion.over(&full()) else { continue };
            let (name, from) = (&suggestion.name, suggestion.from);
            let value = suggestion.to.expect("the suggestion has a value");
            let started = start(&stage, changed, |_| {}).await;
            let started = started.unwrap_or_else(|error| panic!("{name} {value}: {error}; {}", error.hint()));
            println!("{name} {value} instead of {from}: {}", started.description());
            ask_all(&started.model, (0..4).map(|_| counting_chat(100, 8)).collect(), 8, NONE).await;
            stage.runtime.unload(NAME).await.expect("the model unloads");
            all_memory_returned(&stage, &before).await;
            applied += 1;
        }
        assert!(applied >= 2, "at least two suggestions fit by themselves");
        let left = other_process.leave(enough + Bytes::gib(2));
        let started = start(&stage, full(), |_| {}).await.expect("the model fits");
        println!("{left} are left: {}, {} tokens", started.description(), kv_tokens(&started.model).await);
        println!("{}", stage.measured().await);
        ask_all(&started.model, (0..16).map(|_| shown((1036, 1036), 16)).collect(), 16, NONE).await;
        drop(other_process);
        stage.runtime.unload(NAME).await.expect("the model unloads");
        all_memory_returned(&stage, &before).await;
    });
}

/// Tries a start with `left` bytes free. Returns the bytes that were actually free, and the error.
async fn too_little(stage: &Stage, other_process: &mut OtherProcess, left: Bytes) -> (Bytes, Box<Unfit>) {
    let left = other_process.leave(left);
    let error = start(stage, full(), |_| {}).await.map(drop).expect_err("memory is short");
    println!("{left} are left: {error}; {}", error.hint());
    let StartError::DoesNotFit(error) = &*error else { panic!("{error}") };
    (left, error.clone())
}

#[test]
fn another_process_in_any_start_phase_only_shrinks_the_cache() {
    story(async |stage| {
        let before = stage.measured().await;
        for phase in [Phase::Load, Phase::Probe, Phase::Capture, Phase::Back, Phase::Validate] {
            let other_process = Arc::new(Mutex::new(Some(OtherProcess::moves_in(OTHER_PROCESS))));
            let (is_ready, taking) = (Arc::<AtomicBool>::default(), Arc::new(Mutex::new(None)));
            let at = {
                let (other_process, is_ready, taking) = (other_process.clone(), is_ready.clone(), taking.clone());
                move |begun: Phase| {
                    let mut taking = taking.lock().expect("the lock is not poisoned");
                    if begun == phase && taking.is_none() {
                        let (other_process, is_ready) = (other_process.clone(), is_ready.clone());
                        // A separate thread takes the memory, so that the start is not delayed.
                        *taking = Some(std::thread::spawn(move || take_in_steps(&other_process, &is_ready)));
                    }
                }
            };
            let started = start(&stage, full(), at).await.unwrap_or_else(|error| panic!("{phase}: {error}"));
            is_ready.store(true, SeqCst);
            let taking = taking.lock().expect("the lock is not poisoned").take().expect("the phase has begun");
            let held = block_in_place(|| taking.join().expect("the other process continues"));
            let tokens = kv_tokens(&started.model).await;
            assert!(held >= Bytes::gib(1), "{phase}: the other process took memory");
            println!("{phase}: another process has {held}; {}, {tokens} tokens", started.description());
            for AttemptReport { attempt, target_tokens, phase, outcome } in &started.attempts {
                println!("  attempt {attempt} of {target_tokens} tokens reached {phase}: {outcome:?}");
            }
            ask_all(&started.model, (0..64).map(|_| shown((1036, 1036), 16)).collect(), 16, NONE).await;
            eventually("the cache has shrunk enough", async || stage.is_quiet().await).await;
            drop(started);
            stage.runtime.unload(NAME).await.expect("the model unloads");
            drop(other_process.lock().expect("the lock is not poisoned").take());
            all_memory_returned(&stage, &before).await;
        }
    });
}

/// Takes 1, 8 and 40 GiB, or what is available, until the model is ready. Returns the bytes that
/// the process then holds.
fn take_in_steps(other_process: &Mutex<Option<OtherProcess>>, is_ready: &AtomicBool) -> Bytes {
    let mut other_process = other_process.lock().expect("the lock is not poisoned");
    let other_process = other_process.as_mut().expect("the other process was started");
    let mut held = Bytes::ZERO;
    for wanted in [1, 8, 40].map(Bytes::gib) {
        while held < wanted && !is_ready.load(SeqCst) {
            held = other_process.hold(wanted);
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }
    held
}

#[test]
fn prompt_scores_add_little_time_and_delay_no_other_request() {
    story(async |stage| {
        let started = start(&stage, full(), |_| {}).await.expect("the model starts");
        let model = &started.model;
        let mut plain = None;
        for top in [None, Some(0), Some(20)] {
            let load = || counting_chat(8000, 2).prompt_log_probabilities(top);
            let scores = if top.is_some() { 7999..8001 } else { NONE };
            let (mut alone, mut waits) = (Vec::new(), Vec::new());
            for _ in 0..3 {
                alone.push(ask_all(model, vec![load()], 2, scores.clone()).await);
                let another = tokio::spawn(longest_wait(model.clone(), counting_chat(100, 256)));
                ask_all(model, vec![load()], 2, scores.clone()).await;
                waits.push(another.await.expect("no request fails"));
            }
            println!(
                "8,000 tokens, scored {top:?}: {alone:.3?}; another request waited {waits:.3?} for a token at most"
            );
            let fastest = [alone, waits].map(|times| times.into_iter().min().expect("three measurements each"));
            let [least, wait] = *plain.get_or_insert(fastest);
            assert!(
                fastest[0] < least * 4 && fastest[1] < wait * 2,
                "fastest {fastest:?}, compared with {least:?} and {wait:?}"
            );
        }
        stage.runtime.unload(NAME).await.expect("the model unloads");
    });
}

/// The longest time between two tokens of a reply.
async fn longest_wait(model: ModelHandle, chat: Chat) -> Duration {
    let mut events = model.chat(chat.log_probabilities(0)).await.expect("the chat is accepted");
    let (mut last, mut longest) = (None, Duration::ZERO);
    while let Some(event) = events.next().await {
        if let ChatEvent::Token(_) = event.expect("no request fails") {
            let now = Instant::now();
            longest = longest.max(last.replace(now).map_or(Duration::ZERO, |last| now - last));
        }
    }
    longest
}
