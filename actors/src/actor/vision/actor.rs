//! The vision actor, which executes the effects of its core. CPU threads decode files, and the
//! vision lane runs encoder batches.

use std::{collections::BTreeMap, sync::Arc};

use bursar_budgets::{Bytes, Class, Label, Lease, Owner, Request};
use bursar_kernels::ops::copy_blocks::CopyLists;
use bursar_model::{
    EncoderCost, Model,
    flow::{Grid, ImageLimits, PictureHash, ResizedImage},
    processor::{EncoderInput, MediaKey, MediaPlan, MediaProcessors},
};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tracing::{Instrument, Level, Span, debug, debug_span, enabled};

use super::{
    CacheLookup, Effect, EmbedRequest, EncodeRequest, Input, PinnedRows, PinnedSet, Ticket, VisionCore, VisionError,
    VisionMessage, known_files::KnownFiles,
};
use crate::{
    budget::Budget,
    compute::lane::{Answer, Copied, CopyJob, EncodeJob, Job, Lane, RefusalSink},
    metric::{self, Permit},
    order::{Line, Priority},
    responder::Responder,
    tenant::TenantWeights,
    token_interval::Pacing,
    tree,
};

/// The actor that prepares pictures and manages the cache of their embeddings.
pub struct VisionActor;

/// Maximum number of pictures of known files that the actor remembers. That many entries take about
/// 4 MB.
const KNOWN_MAX: usize = 32_768;

pub struct VisionArguments {
    pub budget: Budget,
    /// The owner of the leases of host memory.
    pub owner: Owner,
    /// The model's label, for leases and metrics.
    pub model_label: Label,
    /// The model, which packs pictures into encoder batches.
    pub model: Arc<Model>,
    /// The processors that decode, resize and hash pictures.
    pub processors: Arc<MediaProcessors>,
    /// Limits on a picture before it is decoded.
    pub limits: ImageLimits,
    pub lane: Lane,
    /// The number of rows of the vision cache.
    pub cache_rows: usize,
    /// Bytes of one row, for metrics.
    pub row_bytes: Bytes,
    /// The number of rows that fit in host memory.
    pub host_rows: usize,
    /// The permit of the profile record: patches in one encoder batch.
    pub launch_patches: usize,
    /// The promised token interval, which limits encoder batches while replies are in progress.
    pub pacing: Pacing,
    pub tenant_weights: TenantWeights,
    /// How many requests' pictures are decoded at once.
    pub decode_threads: usize,
    /// The callback for an encoder batch or copy that is refused memory. The callback makes the
    /// engine replace this actor.
    pub refused: RefusalSink,
}

pub struct VisionState {
    arguments: VisionArguments,
    core: VisionCore,
    pixels: BTreeMap<PictureHash, Pixels>,
    /// The pictures that each known file was decoded to. They are kept because the next turn of a
    /// conversation sends the files again.
    known: KnownFiles<MediaKey>,
    pending: BTreeMap<Ticket, Pending>,
    last_ticket: Ticket,
    /// Requests that wait for a thread to decode their files.
    undecoded: Line<Ticket, Undecoded>,
    /// The number of requests that have a decoding thread.
    decoding: usize,
    /// Whether one of the `decoding` requests waits for host memory. Only one request waits at a
    /// time, so that an urgent request waits for at most one other request.
    is_leasing: bool,
    /// `true` once an encoder batch or copy was refused memory. The engine has been informed, and
    /// is about to replace this actor.
    is_refused: bool,
}

/// Pixels that wait for their encoder batch, and the lease of the host memory that they occupy.
struct Pixels {
    image: ResizedImage,
    host: Arc<Lease>,
}

/// The pictures that a file was decoded to.
type Known = Vec<(PictureHash, Grid)>;

/// A request with files to decode. `held` has one entry per file: the file's pictures if they need
/// no pixels, otherwise `None`.
struct Undecoded {
    request: EmbedRequest,
    held: Vec<Option<Known>>,
}

/// A decoding thread in use. Dropping this value reports to the actor that the thread is free.
struct Decoder(ActorRef<VisionMessage>);

impl Drop for Decoder {
    fn drop(&mut self) {
        // An actor that has ended decodes nothing more.
        drop(self.0.send_message(VisionMessage::DecoderFree));
    }
}

struct Pending {
    priority: Priority,
    grids: Vec<Grid>,
    keys: Vec<PictureHash>,
    /// The files, in case they must be decoded after all: a picture without pixels may be evicted
    /// before the request is served.
    plans: Arc<[MediaPlan]>,
    reply: Responder<Result<PinnedSet, VisionError>>,
}

/// A wait for host memory. Dropping this value reports to the actor that the wait has ended.
struct Leasing(ActorRef<VisionMessage>);

impl Drop for Leasing {
    fn drop(&mut self) {
        drop(self.0.send_message(VisionMessage::Leased));
    }
}

impl Actor for VisionActor {
    type Msg = VisionMessage;
    type State = VisionState;
    type Arguments = VisionArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<VisionMessage>,
        arguments: VisionArguments,
    ) -> Result<VisionState, ActorProcessingErr> {
        myself.send_message(VisionMessage::Show)?;
        Ok(VisionState {
            core: VisionCore::new(arguments.cache_rows, arguments.launch_patches)
                .beside_streams(arguments.pacing.launch_patches())
                .with_tenants(arguments.tenant_weights.clone())
                .with_host(arguments.host_rows),
            undecoded: Line::new(arguments.tenant_weights.clone()),
            decoding: 0,
            is_leasing: false,
            pixels: BTreeMap::new(),
            known: KnownFiles::new(KNOWN_MAX),
            pending: BTreeMap::new(),
            last_ticket: Ticket::default(),
            is_refused: false,
            arguments,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<VisionMessage>,
        message: VisionMessage,
        state: &mut VisionState,
    ) -> Result<(), ActorProcessingErr> {
        state.core.step(Input::Streams(state.arguments.pacing.card.has_streams()));
        let effects = match message {
            VisionMessage::Embed { pictures, priority, reply } => {
                state.last_ticket = state.last_ticket.next();
                let request = EmbedRequest { ticket: state.last_ticket, priority, plans: pictures.into(), reply };
                state.embed(&myself, request)
            }
            VisionMessage::Name { files, reply } => {
                let mut name = |file| Some(state.known.pictures(file)?.iter().map(|(picture, _)| *picture).collect());
                reply.answer(files.iter().map_while(&mut name).collect());
                return Ok(());
            }
            VisionMessage::Prepared { request, held, pictures, host } => {
                let pixels = |EncoderInput { image, hash }| (hash, Pixels { image, host: host.clone() });
                state.want(*request, held, pictures.into_iter().map(pixels).collect())
            }
            VisionMessage::DecoderFree => {
                state.decoding -= 1;
                Vec::new()
            }
            VisionMessage::Leased => {
                state.is_leasing = false;
                Vec::new()
            }
            // Messages are dropped unread, because the driver submits its request again to the
            // successor.
            _ if state.is_refused && !matches!(message, VisionMessage::InjectFault(_)) => return Ok(()),
            VisionMessage::Encoded(Err(error)) | VisionMessage::Copied(Err(error)) if error.is_out_of_memory() => {
                state.is_refused = true;
                (state.arguments.refused)(error);
                return Ok(());
            }
            VisionMessage::Encoded(outcome) => {
                outcome?;
                state.core.step(Input::Encoded)
            }
            VisionMessage::Copied(outcome) => {
                outcome?;
                state.core.step(Input::Copied)
            }
            VisionMessage::Unpin(keys) => state.core.step(Input::Unpin(keys)),
            VisionMessage::Show => {
                myself.send_after(metric::SHOWN_EVERY, || VisionMessage::Show);
                Vec::new()
            }
            VisionMessage::InjectFault(fault) => return Err(fault.inject().into()),
        };
        effects.into_iter().for_each(|effect| state.act(&myself, effect));
        state.forget_cancelled(&myself);
        state.decode(&myself);
        let VisionState { core, pixels, .. } = state;
        if !pixels.is_empty() {
            let needed = core.need_pixels();
            pixels.retain(|key, _| needed.contains(key));
        }
        state.count_found();
        state.show();
        Ok(())
    }
}

impl VisionState {
    fn show(&self) {
        let VisionArguments { model_label: model, cache_rows, row_bytes, .. } = &self.arguments;
        metric::ENCODER_CACHE_HOST_BYTES.set(model, *row_bytes * self.core.host_rows() as u64);
        let (free, cached) = self.core.counts();
        metric::ENCODER_CACHE_BYTES.set(model, *row_bytes * (cache_rows - free) as u64);
        metric::ENCODER_CACHE_PICTURES.set(model, cached);
        let patches = self.core.patches_under_way();
        metric::PERMITS_USED.set(&(model.clone(), Permit::Patches), patches);
        self.arguments.pacing.card.set_patches(patches);
    }

    /// Records how many pictures got rows, and where they were found.
    fn count_found(&mut self) {
        let CacheLookup { pictures, hits, host_hits } = self.core.take_found();
        self.count_query(pictures, hits);
        metric::ENCODER_CACHE_HOST_HITS_TOTAL.add(&self.arguments.model_label, host_hits);
    }

    /// Records how many pictures were requested, and how many of them were in the cache.
    fn count_query(&self, pictures: usize, hits: usize) {
        metric::ENCODER_CACHE_QUERIES_TOTAL.add(&self.arguments.model_label, pictures);
        metric::ENCODER_CACHE_HITS_TOTAL.add(&self.arguments.model_label, hits);
    }

    /// Answers from the cache if it has all pictures. Otherwise queues the request for rows. Files
    /// are decoded before that if their pictures are neither on the device nor on the host. Without
    /// a host tier, all files are decoded.
    fn embed(&mut self, myself: &ActorRef<VisionMessage>, request: EmbedRequest) -> Vec<Effect> {
        let known: Vec<Option<Known>> =
            request.plans.iter().map(|plan| self.known.pictures(&plan.key()).map(<[_]>::to_vec)).collect();
        let keys = |known: &Known| known.iter().map(|(key, _)| *key).collect::<Vec<_>>();
        if let Some(all) = known.iter().cloned().collect::<Option<Vec<_>>>().map(|all| all.concat())
            && let Some(rows) = self.core.recall(&keys(&all))
        {
            self.count_query(all.len(), all.len());
            let pictures = all.into_iter().zip(rows).map(|((key, grid), rows)| PinnedRows { key, grid, rows });
            request.reply.answer(Ok(PinnedSet { pictures: pictures.collect(), vision: myself.clone() }));
            return Vec::new();
        }
        let is_held = |known: &Known| self.core.holds_all(&keys(known));
        let held: Vec<_> = known.into_iter().map(|known| known.filter(is_held)).collect();
        if held.iter().all(Option::is_some) {
            return self.want(request, held, Vec::new());
        }
        self.prepare(request, held);
        Vec::new()
    }

    /// Queues a request for rows.
    fn want(
        &mut self,
        request: EmbedRequest,
        held: Vec<Option<Known>>,
        decoded: Vec<(PictureHash, Pixels)>,
    ) -> Vec<Effect> {
        let EmbedRequest { ticket, priority, plans, reply } = request;
        let merge = self.arguments.processors.pictures.config().merge();
        let (mut wanted, mut grids) = (Vec::new(), Vec::new());
        let mut decoded = decoded.into_iter();
        for (plan, held) in plans.iter().zip(held) {
            let has_pixels = held.is_none();
            let pictures = held.unwrap_or_else(|| {
                let mut keep = |(key, pixels): (PictureHash, Pixels)| {
                    let grid = pixels.image.grid;
                    self.pixels.entry(key).or_insert(pixels);
                    (key, grid)
                };
                let pictures: Known = decoded.by_ref().take(plan.grid().pictures()).map(&mut keep).collect();
                self.known.learn(plan.key(), pictures.clone());
                pictures
            });
            for (key, grid) in pictures {
                let EncoderCost { patches, rows } = EncoderCost::of(grid.patches(), merge);
                wanted.push(EncodeRequest { key, rows, patches, has_pixels });
                grids.push(grid);
            }
        }
        let keys = wanted.iter().map(|picture| picture.key).collect();
        self.pending.insert(ticket, Pending { priority: priority.clone(), grids, keys, plans, reply });
        self.core.step(Input::Want(ticket, priority, wanted))
    }

    /// Queues a request until a thread is free to decode the files that are not held.
    fn prepare(&mut self, request: EmbedRequest, held: Vec<Option<Known>>) {
        self.undecoded.join(request.ticket, request.priority.clone(), Undecoded { request, held }, []);
    }

    /// Decodes the files of the next request, if a thread is free.
    fn decode(&mut self, myself: &ActorRef<VisionMessage>) {
        if !self.is_leasing
            && self.decoding < self.arguments.decode_threads.max(1)
            && let Some(next) = self.undecoded.order().first()
        {
            let Undecoded { request, held } = &self.undecoded[*next];
            let is_wanted: Vec<bool> = held.iter().map(Option::is_none).collect();
            let host_bytes = HostBytes::of(&request.plans, &is_wanted);
            let Undecoded { request, held } = self.undecoded.serve(*next, Some(host_bytes.pixels.as_usize()));
            self.decoding += 1;
            self.is_leasing = true;
            self.begin_decoding(Decoder(myself.clone()), request, held, is_wanted, host_bytes);
        }
    }

    /// Starts a task outside the actor that leases host memory and decodes the wanted files. A
    /// failure ends only this request.
    fn begin_decoding(
        &self,
        decoder: Decoder,
        mut request: EmbedRequest,
        held: Vec<Option<Known>>,
        is_wanted: Vec<bool>,
        host_bytes: HostBytes,
    ) {
        let myself = decoder.0.clone();
        let leasing = Leasing(myself.clone());
        let (budget, owner) = (self.arguments.budget.clone(), self.arguments.owner.clone());
        let (label, limits) = (self.arguments.model_label.clone(), self.arguments.limits.clone());
        let processors = self.arguments.processors.clone();
        let files = is_wanted.iter().filter(|is_wanted| **is_wanted).count();
        let span = debug_span!(parent: request.reply.span(), "decode", files);
        let plans = request.plans.clone();
        let prepare = async move {
            let prepare = async {
                let bytes = Request::new(owner, Class::Host, label, host_bytes.pixels + host_bytes.decoding);
                let host = Arc::new(budget.ask(tree::LEASE_FOR_VISION, bytes, true).await?);
                drop(leasing);
                let decoded = tokio::task::spawn_blocking(move || {
                    // The thread owns the lease and counts as busy, because it keeps decoding even
                    // if the request is dropped.
                    let _decoder = decoder;
                    let processed = processors.process(&plans, &limits, |file| is_wanted[file]);
                    processed.map(|pictures| (pictures, host))
                });
                // A panic ends this request with an error. Otherwise its driver would wait for a
                // successor although this actor lives.
                let (pictures, host) = decoded.await.map_err(|_| VisionError::DecoderDied)??;
                debug!(pictures = pictures.len(), "decoded");
                budget.resize(tree::LEASE_FOR_VISION, &host, host_bytes.pixels).await?;
                Ok::<_, VisionError>((pictures, host))
            };
            let prepared = tokio::select! {
                prepared = prepare => prepared,
                () = request.reply.given_up() => return,
            };
            match prepared {
                Ok((pictures, host)) => {
                    // An actor that has ended drops the reply, which makes the driver submit its
                    // request again.
                    let request = Box::new(request);
                    drop(myself.send_message(VisionMessage::Prepared { request, held, pictures, host }));
                }
                // This actor is ending. Dropping the reply reports the end, and the driver reads
                // the reason from the model's status.
                Err(VisionError::Host(error)) if error.is_shutdown() => drop(request),
                Err(error) => request.reply.answer(Err(error)),
            }
        };
        tokio::spawn(prepare.instrument(span));
    }

    /// Drops requests whose callers have disconnected. Later requests need not wait for them.
    fn forget_cancelled(&mut self, myself: &ActorRef<VisionMessage>) {
        self.undecoded.retain(|undecoded| !undecoded.request.reply.is_given_up());
        let gone: Vec<Ticket> =
            self.pending.iter().filter(|(_, pending)| pending.reply.is_given_up()).map(|(ticket, _)| *ticket).collect();
        for ticket in gone {
            self.pending.remove(&ticket);
            let effects = self.core.step(Input::Withdraw(ticket));
            effects.into_iter().for_each(|effect| self.act(myself, effect));
        }
    }

    fn act(&mut self, myself: &ActorRef<VisionMessage>, effect: Effect) {
        match effect {
            Effect::Encode(pictures) => self.encode(myself.clone(), &pictures),
            Effect::Copy { to_host, to_device } => {
                let myself = myself.clone();
                let answer = Answer::to(move |outcome: Result<_, _>| {
                    // An actor that has ended does not need the answer.
                    drop(myself.send_message(VisionMessage::Copied(outcome.map(drop))));
                });
                let job = CopyJob { copied: Copied::Rows(CopyLists { to_host, to_device }), answer };
                self.arguments.lane.submit(Job::Copy(Box::new(job)));
            }
            Effect::Lost(ticket) => {
                let Pending { priority, plans, reply, .. } =
                    self.pending.remove(&ticket).expect("each ticket is answered once");
                let held = vec![None; plans.len()];
                self.prepare(EmbedRequest { ticket, priority, plans, reply }, held);
            }
            Effect::Ready(ticket, rows) => {
                let Pending { grids, keys, reply, .. } =
                    self.pending.remove(&ticket).expect("each ticket is answered once");
                let pictures = grids.into_iter().zip(keys).zip(rows);
                let pictures: Vec<_> = pictures.map(|((grid, key), rows)| PinnedRows { key, grid, rows }).collect();
                reply.span().in_scope(|| debug!(pictures = pictures.len(), "encoded"));
                reply.answer(Ok(PinnedSet { pictures, vision: myself.clone() }));
            }
            Effect::Refused(ticket, reason) => {
                let pending = self.pending.remove(&ticket).expect("each ticket is answered once");
                pending.reply.answer(Err(reason.into()));
            }
        }
    }

    fn encode(&mut self, myself: ActorRef<VisionMessage>, pictures: &[(PictureHash, Arc<[u32]>)]) {
        let pixels: Vec<_> = pictures
            .iter()
            .map(|(key, rows)| (self.pixels.get(key).expect("the pixels exist until the batch starts"), rows))
            .collect();
        let views: Vec<_> = pixels.iter().map(|(pixels, rows)| (&pixels.image, &rows[..])).collect();
        let batch = Arc::new(self.arguments.model.pack(&views));
        let host = pixels.iter().map(|(pixels, _)| pixels.host.clone()).collect();
        let answer = Answer::to(move |outcome| {
            // An actor that has ended does not need the answer.
            drop(myself.send_message(VisionMessage::Encoded(outcome)));
        });
        let spans = if enabled!(Level::DEBUG) { self.wanting(pictures) } else { Vec::new() };
        self.arguments.lane.submit(Job::Encode(Box::new(EncodeJob { batch, host, spans, answer })));
    }

    /// The spans of the requests that wait for any of these pictures.
    fn wanting(&self, pictures: &[(PictureHash, Arc<[u32]>)]) -> Vec<Span> {
        let wants = |pending: &&Pending| pictures.iter().any(|(key, _)| pending.keys.contains(key));
        self.pending.values().filter(wants).map(|pending| pending.reply.span().clone()).collect()
    }
}

/// The most bytes of host memory that a request's pictures and videos take.
struct HostBytes {
    /// Bytes of the resized frames of all files, which stay in memory until they are encoded: an
    /// encoder batch reads the frames without a copy.
    pixels: Bytes,
    /// Bytes for decoding the largest file, which are needed until all files are decoded.
    decoding: Bytes,
}

impl HostBytes {
    /// The bytes for the wanted files.
    fn of(plans: &[MediaPlan], is_wanted: &[bool]) -> Self {
        let wanted = || plans.iter().zip(is_wanted).filter(|(_, is_wanted)| **is_wanted).map(|(plan, _)| plan);
        let pixels = wanted().map(MediaPlan::patches_bytes).sum();
        let decoding = wanted().map(MediaPlan::decoding_bytes).max().unwrap_or_default();
        HostBytes { pixels, decoding }
    }
}
