//! A user's actor next to a model, with memory from one ledger. The album asks the model for a
//! caption of each picture and writes the caption into leased memory. It monitors the model's
//! scheduler and survives a refused lease. When the album dies, its bytes are returned to the
//! ledger, and its supervisor, which is also a user's actor, starts another album.
//!
//! `cargo run --release --example 7_actor_beside_a_model`

use std::{slice, sync::Arc, time::Duration};

use bursar::{
    Budget, Bytes, Chat, ChatError, Class, Device, DeviceChoice, Hint, Image, LeaseError, LoadOptions, ModelHandle,
    ModelSource, Runtime, RuntimeConfig, Segment, demo,
    messages::{Responder, SchedulerMessage},
    ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent, call_t},
};
use tokio::sync::watch;

type Failure = Box<dyn std::error::Error>;

/// Bytes per caption in the album: the length of the text, then the text.
const SLOT: usize = 256;
/// The page size: the device backs memory in whole pages.
const PAGE: Bytes = Bytes::mib(2);

enum AlbumMessage {
    /// Asks the model for a caption of the picture and stores it.
    Add(Image, RpcReplyPort<Result<usize, ChatError>>),
    Read(usize, RpcReplyPort<Option<String>>),
    /// Leases memory for more captions, or returns an error if there is not enough.
    Grow(Bytes, RpcReplyPort<Result<Bytes, Busy>>),
    /// Returns the number of KV blocks that the model's requests hold, or `None` if the scheduler
    /// does not answer.
    Blocks(RpcReplyPort<Option<usize>>),
    /// Returns the number of schedulers that have died since this album started.
    Deaths(RpcReplyPort<usize>),
    Fail,
}

/// Not enough memory at the moment, with a hint.
#[derive(Debug)]
struct Busy {
    why: String,
    hint: String,
}

impl From<LeaseError> for Busy {
    fn from(error: LeaseError) -> Self {
        Busy { hint: error.hint(), why: error.to_string() }
    }
}

struct Album;

#[derive(Clone)]
struct AlbumArguments {
    model: ModelHandle,
    budget: Budget,
    device: Arc<dyn Device>,
}

struct AlbumState {
    arguments: AlbumArguments,
    /// Leased and backed memory. The memory is released when this state is dropped, even if
    /// the actor dies.
    segments: Vec<Segment>,
    captions: usize,
    /// The serving generation of the monitored scheduler.
    generation: u64,
    deaths: usize,
}

impl Actor for Album {
    type Msg = AlbumMessage;
    type State = AlbumState;
    type Arguments = AlbumArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<AlbumMessage>,
        arguments: AlbumArguments,
    ) -> Result<AlbumState, ActorProcessingErr> {
        // Monitoring does not link the actors: the engine remains the scheduler's
        // supervisor and replaces it.
        let serving = arguments.model.serving().await?;
        myself.monitor(serving.scheduler.get_cell());
        let (segments, generation) = (Vec::new(), serving.generation);
        let mut state = AlbumState { arguments, segments, captions: 0, generation, deaths: 0 };
        state.grow(PAGE).await.map_err(|busy| busy.why)?;
        Ok(state)
    }

    async fn handle(
        &self,
        _: ActorRef<AlbumMessage>,
        message: AlbumMessage,
        state: &mut AlbumState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            AlbumMessage::Add(picture, reply) => {
                let answer = reply.send(state.add(picture).await);
                Ok(answer?)
            }
            AlbumMessage::Read(caption, reply) => Ok(reply.send(state.read(caption))?),
            AlbumMessage::Grow(bytes, reply) => {
                let grown = state.grow(bytes).await;
                Ok(reply.send(grown)?)
            }
            AlbumMessage::Blocks(reply) => {
                let (question, answer) = Responder::new();
                state.arguments.model.serving().await?.scheduler.send_message(SchedulerMessage::KvUse(question))?;
                Ok(reply.send(answer.await.ok().map(|blocks| blocks.held))?)
            }
            AlbumMessage::Deaths(reply) => Ok(reply.send(state.deaths)?),
            AlbumMessage::Fail => Err("the album has a bug".into()),
        }
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<AlbumMessage>,
        event: SupervisionEvent,
        state: &mut AlbumState,
    ) -> Result<(), ActorProcessingErr> {
        if let SupervisionEvent::ActorTerminated(dead, ..) | SupervisionEvent::ActorFailed(dead, _) = event {
            let serving = state.arguments.model.serving_after(state.generation).await?;
            let successor = serving.scheduler.get_cell();
            println!("  album: scheduler {} is dead, {} replaces it", dead.get_id(), successor.get_id());
            myself.monitor(successor);
            (state.generation, state.deaths) = (serving.generation, state.deaths + 1);
        }
        Ok(())
    }
}

impl AlbumState {
    /// Asks the model for a caption of a picture and returns the caption's number. The caption is
    /// stored only if a slot is free.
    async fn add(&mut self, picture: Image) -> Result<usize, ChatError> {
        let chat = Chat::new().user("Describe the picture.").image(picture).max_tokens(40);
        let caption = self.arguments.model.chat(chat).await?.text().await?;
        let number = self.captions;
        if let Some(slot) = self.slot(number) {
            let length = caption.len().min(SLOT - 1);
            slot[0] = length as u8;
            slot[1..=length].copy_from_slice(&caption.as_bytes()[..length]);
            self.captions += 1;
        }
        Ok(number)
    }

    fn read(&mut self, caption: usize) -> Option<String> {
        let slot = (caption < self.captions).then(|| self.slot(caption)).flatten()?;
        Some(String::from_utf8_lossy(&slot[1..=usize::from(slot[0])]).into_owned())
    }

    /// Leases memory for more captions, if the ledger has enough now.
    async fn grow(&mut self, bytes: Bytes) -> Result<Bytes, Busy> {
        let lease = self.arguments.budget.try_lease(Class::external("album"), bytes.round_up(PAGE)).await?;
        let refused = |error| Busy { why: format!("{error}"), hint: "the device did not back leased memory".into() };
        let segment = Segment::reserve(self.arguments.device.clone(), lease.bytes(), lease).map_err(refused)?;
        segment.back_to(segment.reserved()).map_err(refused)?;
        let backed = segment.backed();
        self.segments.push(segment);
        Ok(backed)
    }

    /// Returns the slot of a caption, or `None` if the number is beyond the leased memory.
    fn slot(&mut self, number: usize) -> Option<&mut [u8]> {
        let mut first = 0;
        let segment = self.segments.iter().find(|segment| {
            let slots = segment.backed().0 as usize / SLOT;
            first += slots;
            number < first
        })?;
        let slots = segment.backed().0 as usize / SLOT;
        let address = segment.address().0 as usize + (number + slots - first) * SLOT;
        // SAFETY: the slot is inside the backed prefix of a segment of host memory, and this state
        // owns the segment. The returned slice borrows the state mutably, and no other code knows
        // the segment's address, so no other reference to the slot exists.
        Some(unsafe { slice::from_raw_parts_mut(address as *mut u8, SLOT) })
    }
}

/// A user's supervisor, which replaces a dead album.
struct Curator;

impl Actor for Curator {
    type Msg = ();
    type State = (AlbumArguments, watch::Sender<Option<ActorRef<AlbumMessage>>>);
    type Arguments = Self::State;

    async fn pre_start(&self, myself: ActorRef<()>, state: Self::State) -> Result<Self::State, ActorProcessingErr> {
        let (album, _) = Album::spawn_linked(None, Album, state.0.clone(), myself.get_cell()).await?;
        state.1.send_replace(Some(album));
        Ok(state)
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<()>,
        event: SupervisionEvent,
        (arguments, albums): &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        if let SupervisionEvent::ActorFailed(dead, error) = event {
            println!("  curator: album {} has failed: {error}", dead.get_id());
            let (album, _) = Album::spawn_linked(None, Album, arguments.clone(), myself.get_cell()).await?;
            println!("  curator: album {} replaces it", album.get_id());
            albums.send_replace(Some(album));
        }
        Ok(())
    }
}

/// Time limit for a call to an album, which may itself wait for the model.
const PATIENCE_MS: u64 = 30_000;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    // The album writes its memory from the CPU, which is not possible with GPU memory.
    let device = DeviceChoice::Host(Bytes::mib(512));
    let runtime = Runtime::start(RuntimeConfig { device, ..RuntimeConfig::default() }).await?;
    let options = LoadOptions { memory_fraction: Some(0.5), ..LoadOptions::small() };
    let model = runtime.load_with(ModelSource::demo(), options, |_| {}).await?;
    let before = runtime.budget().snapshot().await?;

    let (albums, mut album_now) = watch::channel(None);
    let arguments = AlbumArguments { model: model.clone(), budget: runtime.budget().clone(), device: runtime.device() };
    let (curator, _) = Curator::spawn(None, Curator, (arguments, albums)).await?;
    let album = album_now.wait_for(Option::is_some).await?.clone().ok_or("no album is running")?;

    println!("The album asks the model in its handler and writes the answers into memory that it leases:");
    for picture in demo::pictures() {
        let number = call_t!(album, AlbumMessage::Add, PATIENCE_MS, Image::from_bytes(picture.bytes))??;
        let caption = call_t!(album, AlbumMessage::Read, PATIENCE_MS, number)?.ok_or("the caption is missing")?;
        println!("  {}: {caption}", picture.name);
    }
    let blocks = call_t!(album, AlbumMessage::Blocks, PATIENCE_MS)?.ok_or("the scheduler did not answer")?;
    println!("  kv: {blocks} blocks are held now\n\n{}", runtime.budget().snapshot().await?);

    println!("The album asks for more memory than is free:");
    let Err(Busy { why, hint }) = call_t!(album, AlbumMessage::Grow, PATIENCE_MS, Bytes::gib(4))? else {
        return Err("the device is smaller than 4 GiB".into());
    };
    println!("  busy: {why}\n  hint: {hint}");
    let more = call_t!(album, AlbumMessage::Grow, PATIENCE_MS, Bytes::mib(4))?.map_err(|busy| busy.why)?;
    println!("  a smaller request is granted: {more}\n");

    println!("The scheduler is killed. The album is notified, and the next caption still arrives:");
    model.serving().await?.scheduler.kill();
    let mut looks = tokio::time::interval(Duration::from_millis(1));
    while call_t!(album, AlbumMessage::Deaths, PATIENCE_MS)? == 0 {
        looks.tick().await;
    }
    let picture = Image::from_bytes(demo::pictures()[1].bytes);
    let number = call_t!(album, AlbumMessage::Add, PATIENCE_MS, picture)??;
    println!("  caption {number}: {}\n", call_t!(album, AlbumMessage::Read, PATIENCE_MS, number)?.ok_or("no caption")?);

    println!("The album fails because of a bug in its own code:");
    album.send_message(AlbumMessage::Fail)?;
    let is_another =
        |now: &Option<ActorRef<AlbumMessage>>| now.as_ref().is_some_and(|now| now.get_id() != album.get_id());
    drop(tokio::time::timeout(Duration::from_millis(PATIENCE_MS), album_now.wait_for(is_another)).await??);
    // The old album's bytes are returned once the device has finished its current work, because a
    // step may still be running.
    tokio::time::timeout(Duration::from_millis(PATIENCE_MS), async {
        while runtime.budget().snapshot().await.is_ok_and(|now| now.of_class(&Class::external("album")) != PAGE) {
            looks.tick().await;
        }
    })
    .await?;
    println!("  the new album holds {PAGE}: the {} of the dead album were returned", PAGE + more);

    curator.stop_and_wait(None, None).await?;
    tokio::time::timeout(Duration::from_millis(PATIENCE_MS), async {
        while runtime.budget().snapshot().await.is_ok_and(|now| now != before) {
            looks.tick().await;
        }
    })
    .await?;
    println!("\nThe curator and its album have stopped, and the ledger is back to its earlier state.");
    runtime.shutdown().await;
    Ok(())
}
