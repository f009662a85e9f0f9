//! Pure: which pictures are cached, which pictures wait, and which pictures the next encoder batch
//! contains.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    sync::Arc,
};

use bursar_kernels::ops::copy_blocks::{BlockCopy, PREPARED_JOBS};
use bursar_model::flow::PictureHash;
use thiserror::Error;

use crate::{
    compute::LAUNCHES,
    order::{Line, Priority},
    shared::host_slots::HostSlots,
    tenant::TenantWeights,
};

/// Maximum number of copies that run at once. The number is limited because a lane's queue is
/// bounded.
const COPIES: usize = 4;

const _: () = assert!(COPIES <= PREPARED_JOBS, "the device creates clocks for this many copy jobs");

/// The number of a request, in order of arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

impl Ticket {
    pub fn next(self) -> Ticket {
        Ticket(self.0 + 1)
    }
}

/// A picture that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeRequest {
    pub key: PictureHash,
    /// Cache rows that the picture takes.
    pub rows: usize,
    /// Patches of the picture in an encoder batch.
    pub patches: usize,
    /// Whether the picture's file was decoded. If not, the picture was
    /// [held](VisionCore::holds_all) when it was requested.
    pub has_pixels: bool,
}

/// An event for the vision actor.
#[derive(Clone, Debug)]
pub enum Input {
    /// A request's pictures are decoded or held. The request needs all of them at once, and
    /// waits with this priority.
    Want(Ticket, Priority, Vec<EncodeRequest>),
    /// The oldest running encoder batch has ended.
    Encoded,
    /// The oldest copies have ended.
    Copied,
    /// One holder has released these pictures.
    Unpin(Vec<PictureHash>),
    /// The request's caller has disconnected. A request that was already answered is ignored.
    Withdraw(Ticket),
    /// Whether replies are in progress on the same GPU.
    Streams(bool),
}

/// An action for the vision actor, which carries out the actions in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Encode these pictures into these rows. [`Input::Encoded`] reports the end of the encoder
    /// batch.
    Encode(Vec<(PictureHash, Arc<[u32]>)>),
    /// Copy rows. [`Input::Copied`] reports the end of the copies.
    Copy {
        /// Evicted rows and their host slots. They must be copied before `to_device`.
        to_host: Vec<BlockCopy>,
        /// Rows to fetch and their host slots.
        to_device: Vec<BlockCopy>,
    },
    /// One of the request's pictures without pixels was evicted from the device and the host before
    /// the request was served. The request must be submitted again with pixels.
    Lost(Ticket),
    /// All of a request's pictures are in the cache, pinned until [`Input::Unpin`]. The value is
    /// their rows, in the request's order.
    Ready(Ticket, Vec<Arc<[u32]>>),
    /// A request can never be served.
    Refused(Ticket, PicturesTooLarge),
}

/// The limit that the pictures of a request exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PicturesTooLarge {
    /// The pictures need more rows than the vision cache has. A repeated picture is counted once.
    #[error("the pictures take {rows} rows of the vision cache; the limit is {limit}")]
    Request { rows: usize, limit: usize },
    /// A picture has more patches than one batch of the vision encoder may have.
    #[error("a picture has {patches} patches; the limit of an encoder batch (`launch_patches`) is {limit}")]
    Picture { patches: usize, limit: usize },
}

#[derive(Debug)]
struct Entry {
    rows: Arc<[u32]>,
    patches: usize,
    pins: usize,
    state: State,
    /// When the picture was last unpinned. The picture with the smallest value is evicted first. A
    /// pinned picture is never evicted.
    used: u64,
}

/// The state of a picture's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The picture is in no encoder batch yet.
    Queued,
    /// The picture's encoder batch is running.
    Encoding,
    /// The rows are being copied from host memory.
    Copying,
    /// The rows may be read.
    There,
}

/// Copies that were decided and have not started.
#[derive(Debug, Default)]
struct Batch {
    to_host: Vec<BlockCopy>,
    to_device: Vec<BlockCopy>,
    /// The pictures that are being fetched.
    coming: Vec<PictureHash>,
}

/// Counts of pictures that got rows, by where they were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheLookup {
    pub pictures: usize,
    /// Pictures that were found on the device or in host memory, so that they need not be encoded.
    pub hits: usize,
    /// The part of `hits` that was fetched from host memory.
    pub host_hits: usize,
}

#[derive(Debug)]
pub struct VisionCore {
    rows_total: usize,
    launch_patches: usize,
    /// The most patches of an encoder batch while replies are in progress. A picture with more
    /// patches than this gets a batch to itself.
    patches_beside_streams: usize,
    has_streams: bool,
    free: BTreeSet<u32>,
    entries: BTreeMap<PictureHash, Entry>,
    /// Requests that wait for rows, or for space in the next encoder batch. A request gets rows for
    /// all its pictures at once: two requests that each held some rows and waited for the rest
    /// would deadlock.
    waiting: Line<Ticket, Vec<EncodeRequest>>,
    /// Whether the next request lacks rows.
    lacks_rows: bool,
    /// Requests whose pictures have rows but cannot all be read yet.
    pending: VecDeque<(Ticket, Vec<PictureHash>)>,
    /// Pictures that have rows and are in no encoder batch yet. The queue holds little more than
    /// the next batch takes, so that a more urgent request that arrives later can still overtake
    /// the waiting requests.
    queue: VecDeque<PictureHash>,
    /// The encoder batches that were submitted to the lane, the oldest first.
    under_way: VecDeque<Vec<PictureHash>>,
    /// The host tier for evicted pictures.
    host: HostSlots<PictureHash>,
    batch: Batch,
    /// The pictures that each of the lane's copies fetches, the oldest copies first.
    copying: VecDeque<Vec<PictureHash>>,
    found: CacheLookup,
    clock: u64,
}

impl VisionCore {
    /// Creates an empty cache of `rows` rows. An encoder batch has at most `launch_patches`
    /// patches. Both numbers are permits of the profile record.
    pub fn new(rows: usize, launch_patches: usize) -> Self {
        VisionCore {
            rows_total: rows,
            launch_patches,
            patches_beside_streams: launch_patches,
            has_streams: false,
            free: (0..rows as u32).collect(),
            entries: BTreeMap::new(),
            waiting: Line::new(TenantWeights::default()),
            lacks_rows: false,
            pending: VecDeque::new(),
            queue: VecDeque::new(),
            under_way: VecDeque::with_capacity(LAUNCHES),
            host: HostSlots::new(0),
            batch: Batch::default(),
            copying: VecDeque::with_capacity(COPIES),
            found: CacheLookup::default(),
            clock: 0,
        }
    }

    /// Limits encoder batches to `patches` while replies are in progress, because replies wait for
    /// the GPU while a batch runs.
    #[must_use]
    pub fn beside_streams(mut self, patches: Option<usize>) -> Self {
        self.patches_beside_streams = patches.unwrap_or(self.launch_patches).min(self.launch_patches);
        self
    }

    /// Divides the encoder among tenants by `weights`.
    #[must_use]
    pub fn with_tenants(self, weights: TenantWeights) -> Self {
        VisionCore { waiting: Line::new(weights), ..self }
    }

    /// Adds a host tier of `rows` rows for evicted pictures (ADR 15).
    #[must_use]
    pub fn with_host(self, rows: usize) -> Self {
        VisionCore { host: HostSlots::new(rows), ..self }
    }

    /// Processes one input. Returns the actions to take.
    pub fn step(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Want(ticket, priority, pictures) => self.want(ticket, priority, pictures, &mut effects),
            Input::Encoded => {
                let batch = self.under_way.pop_front().expect("only a batch under way can end");
                self.are_there(&batch);
            }
            Input::Copied => {
                let came = self.copying.pop_front().expect("only copies under way can end");
                self.are_there(&came);
            }
            Input::Withdraw(ticket) => self.withdraw(ticket),
            Input::Streams(has_streams) => {
                self.has_streams = has_streams;
                return effects;
            }
            Input::Unpin(keys) => keys.iter().for_each(|key| self.unpin(key)),
        }
        loop {
            self.serve_waiting(&mut effects);
            self.copy(&mut effects);
            self.answer_pending(&mut effects);
            if !self.start_batch(&mut effects) {
                return effects;
            }
        }
    }

    /// The number of free rows, and of pictures in the cache.
    pub fn counts(&self) -> (usize, usize) {
        (self.free.len(), self.entries.len())
    }

    /// Whether a picture has rows that can be read now, or after the end of its encoder batch or
    /// copy.
    pub fn holds(&self, key: &PictureHash) -> bool {
        self.entries.contains_key(key)
    }

    /// Whether none of these pictures needs pixels: there is a host tier, and each picture is on
    /// the device or the host.
    pub fn holds_all(&self, keys: &[PictureHash]) -> bool {
        self.host.is_there() && keys.iter().all(|key| self.holds(key) || self.host.holds(key))
    }

    pub fn host_rows(&self) -> usize {
        self.host.in_use()
    }

    /// Returns the counts of pictures that got rows since the last call.
    pub fn take_found(&mut self) -> CacheLookup {
        mem::take(&mut self.found)
    }

    /// The patches of the oldest running encoder batch.
    pub fn patches_under_way(&self) -> usize {
        self.under_way.front().into_iter().flatten().map(|key| self.entries[key].patches).sum()
    }

    /// Pins these pictures and returns their rows, in order. Returns `None` and pins nothing if a
    /// picture is missing or cannot be read yet. Also returns `None` while a request lacks rows:
    /// pictures that are recalled again and again could otherwise never be evicted for that
    /// request.
    pub fn recall(&mut self, keys: &[PictureHash]) -> Option<Vec<Arc<[u32]>>> {
        if self.is_short() {
            return None;
        }
        let is_there = |key: &PictureHash| self.entries.get(key).is_some_and(|entry| entry.state == State::There);
        if !keys.iter().all(is_there) {
            return None;
        }
        let recall = |key: &PictureHash| {
            let entry = self.entries.get_mut(key).expect("the entry was looked up before");
            entry.pins += 1;
            entry.rows.clone()
        };
        Some(keys.iter().map(recall).collect())
    }

    /// The pictures whose pixels a later encoder batch may need. A picture that is cached now is
    /// included if a waiting request has its pixels, because the picture may be evicted before that
    /// request is served.
    pub fn need_pixels(&self) -> BTreeSet<PictureHash> {
        let waiting = self.waiting.values().flatten().filter(|picture| picture.has_pixels);
        waiting.map(|picture| picture.key).chain(self.queue.iter().copied()).collect()
    }

    fn are_there(&mut self, keys: &[PictureHash]) {
        for key in keys {
            self.entries.get_mut(key).expect("a picture being copied keeps its rows").state = State::There;
        }
    }

    /// Whether a waiting request lacks rows.
    fn is_short(&self) -> bool {
        self.lacks_rows && !self.waiting.is_empty()
    }

    fn want(&mut self, ticket: Ticket, priority: Priority, pictures: Vec<EncodeRequest>, effects: &mut Vec<Effect>) {
        let rows = distinct(&pictures).map(|picture| picture.rows).sum();
        let patches = pictures.iter().map(|picture| picture.patches).max().unwrap_or(0);
        if patches > self.launch_patches {
            let picture = PicturesTooLarge::Picture { patches, limit: self.launch_patches };
            return effects.push(Effect::Refused(ticket, picture));
        }
        if rows > self.rows_total {
            return effects.push(Effect::Refused(ticket, PicturesTooLarge::Request { rows, limit: self.rows_total }));
        }
        // `true` if serving the request now makes no encoder batch larger, and takes no rows that
        // another request waits for.
        let delays_none = self.patches_to_encode(&pictures) == 0 && self.have_places(&pictures) && !self.is_short();
        if delays_none && self.copying.len() < COPIES && self.fits(&pictures) {
            return self.give_rows(ticket, &pictures);
        }
        self.waiting.join(ticket, priority, pictures, []);
    }

    fn withdraw(&mut self, ticket: Ticket) {
        if self.waiting.leave(ticket).is_some() {
            // The removed request may be the request that lacked rows.
            self.lacks_rows = false;
        }
        if let Some(place) = self.pending.iter().position(|(pending, _)| *pending == ticket) {
            let (_, keys) = self.pending.remove(place).expect("the pending ticket was just found");
            keys.iter().for_each(|key| self.unpin(key));
        }
    }

    fn unpin(&mut self, key: &PictureHash) {
        self.clock += 1;
        let entry = self.entries.get_mut(key).expect("a pinned picture keeps its rows");
        entry.pins -= 1;
        entry.used = self.clock;
    }

    /// Gives rows to waiting requests in order, while there are enough rows, the next encoder batch
    /// is not full, and copies may start. If the next request lacks rows, a limited number of
    /// requests that fit may overtake it.
    fn serve_waiting(&mut self, effects: &mut Vec<Effect>) {
        while self.copying.len() < COPIES && !self.is_batch_full() {
            let order = self.waiting.order();
            let is_lost = |ticket: &&Ticket| !self.have_places(&self.waiting[**ticket]);
            if let Some(lost) = order.iter().find(is_lost) {
                self.waiting.leave(*lost);
                effects.push(Effect::Lost(*lost));
                continue;
            }
            let Some(next) = order.first() else { return };
            self.lacks_rows = !self.has_rows_for(*next);
            if !self.lacks_rows {
                self.serve(*next);
                continue;
            }
            if !self.waiting.may_be_passed(*next) {
                return;
            }
            let Some(other) = order[1..].iter().find(|ticket| self.has_rows_for(**ticket)) else { return };
            self.waiting.pass(*next);
            self.serve(*other);
        }
    }

    /// Whether each of these pictures has pixels, or is on the device or the host.
    fn have_places(&self, pictures: &[EncodeRequest]) -> bool {
        pictures.iter().all(|picture| picture.has_pixels || self.holds_all(&[picture.key]))
    }

    /// Patches of the pictures that are neither on the device nor on the host.
    fn patches_to_encode(&self, pictures: &[EncodeRequest]) -> usize {
        let is_new = |picture: &&EncodeRequest| !self.holds(&picture.key) && !self.host.holds(&picture.key);
        distinct(pictures).filter(is_new).map(|picture| picture.patches).sum()
    }

    /// Gives a waiting request its rows. The rows must fit.
    fn serve(&mut self, ticket: Ticket) {
        let patches = self.patches_to_encode(&self.waiting[ticket]);
        let pictures = self.waiting.serve(ticket, Some(patches));
        self.give_rows(ticket, &pictures);
    }

    fn give_rows(&mut self, ticket: Ticket, pictures: &[EncodeRequest]) {
        self.evict_for(pictures);
        let keys: Vec<_> = pictures.iter().map(|picture| picture.key).collect();
        let is_cached = |key: &&PictureHash| self.holds(key);
        let (cached, missing): (Vec<_>, Vec<_>) = keys.iter().partition(is_cached);
        let host_hits = missing.iter().filter(|key| self.host.holds(key)).count();
        self.found.pictures += keys.len();
        self.found.hits += cached.len() + host_hits;
        self.found.host_hits += host_hits;
        pictures.iter().for_each(|picture| self.pin(picture));
        self.pending.push_back((ticket, keys));
    }

    fn copy(&mut self, effects: &mut Vec<Effect>) {
        let Batch { to_host, to_device, coming } = mem::take(&mut self.batch);
        if !to_host.is_empty() || !to_device.is_empty() {
            self.copying.push_back(coming);
            effects.push(Effect::Copy { to_host, to_device });
        }
    }

    /// Rows that must be allocated for these pictures.
    fn rows_lacking(&self, pictures: &[EncodeRequest]) -> usize {
        distinct(pictures).filter(|picture| !self.holds(&picture.key)).map(|picture| picture.rows).sum()
    }

    /// Pictures that may be evicted for the `wanted` pictures: the time of their last use, their
    /// hashes, and how many rows they have.
    fn idle<'a>(&'a self, wanted: &'a [EncodeRequest]) -> impl Iterator<Item = (u64, PictureHash, usize)> + 'a {
        let is_wanted = |key: &PictureHash| wanted.iter().any(|picture| picture.key == *key);
        let idle = self
            .entries
            .iter()
            .filter(move |(key, entry)| entry.pins == 0 && entry.state == State::There && !is_wanted(key));
        idle.map(|(key, entry)| (entry.used, *key, entry.rows.len()))
    }

    fn has_rows_for(&self, waiting: Ticket) -> bool {
        self.fits(&self.waiting[waiting])
    }

    /// Whether these pictures fit, if idle pictures are evicted.
    fn fits(&self, pictures: &[EncodeRequest]) -> bool {
        let lacking = self.rows_lacking(pictures);
        lacking <= self.free.len()
            || lacking <= self.free.len() + self.idle(pictures).map(|(.., rows)| rows).sum::<usize>()
    }

    /// Evicts unpinned pictures, the least recently used first, until there are rows for
    /// `pictures`, which must [fit](Self::fits). Evicted pictures are copied to host memory, if
    /// they fit there without evicting the pictures that are being fetched from host memory.
    fn evict_for(&mut self, pictures: &[EncodeRequest]) {
        let needed = self.rows_lacking(pictures);
        let wanted = |key: &PictureHash| pictures.iter().any(|picture| picture.key == *key);
        let mut idle: Vec<_> = if needed > self.free.len() { self.idle(pictures).collect() } else { Vec::new() };
        idle.sort_unstable();
        let mut free = self.free.len();
        let victims: Vec<_> = idle
            .into_iter()
            .take_while(|(_, _, rows)| {
                let short = free < needed;
                free += if short { *rows } else { 0 };
                short
            })
            .collect();
        assert!(free >= needed, "{needed} rows were free before, but only {free} are free now");
        for (_, key, _) in victims {
            let Entry { rows, used, .. } = self.entries.remove(&key).expect("the victim is cached");
            let is_kept = |key: &PictureHash| wanted(key) || self.batch.coming.contains(key);
            let slots = self.host.store(key, rows.len(), used, is_kept);
            self.batch.to_host.extend(slots.iter().flat_map(|slots| copies(&rows, slots)));
            self.free.extend(rows.iter());
        }
    }

    fn pin(&mut self, picture: &EncodeRequest) {
        if let Some(entry) = self.entries.get_mut(&picture.key) {
            entry.pins += 1;
            return;
        }
        // Take the lowest free rows, so that adjacent rows can be copied together.
        let rows: Vec<u32> = (0..picture.rows).map_while(|_| self.free.pop_first()).collect();
        self.clock += 1;
        let state = match self.host.fetch(&picture.key, self.clock) {
            // Copying is quicker than encoding on any device.
            Some(slots) => {
                self.batch.to_device.extend(copies(&rows, &slots));
                self.batch.coming.push(picture.key);
                State::Copying
            }
            None => {
                self.queue.push_back(picture.key);
                State::Queued
            }
        };
        let entry = Entry { rows: rows.into(), patches: picture.patches, pins: 1, state, used: 0 };
        self.entries.insert(picture.key, entry);
    }

    fn answer_pending(&mut self, effects: &mut Vec<Effect>) {
        self.pending.retain(|(ticket, keys)| {
            if !keys.iter().all(|key| self.entries[key].state == State::There) {
                return true;
            }
            effects.push(Effect::Ready(*ticket, keys.iter().map(|key| self.entries[key].rows.clone()).collect()));
            false
        });
    }

    /// Starts an encoder batch with as many queued pictures as fit, in order. While a batch runs,
    /// the next batch starts only if it is full. A batch that is not full waits, because later
    /// arrivals may still fill it. Returns `false` if no batch can start.
    fn start_batch(&mut self, effects: &mut Vec<Effect>) -> bool {
        let (pictures, is_full) = self.next_batch();
        let is_idle = self.under_way.is_empty();
        if self.under_way.len() >= LAUNCHES || pictures == 0 || (!is_full && !is_idle) {
            return false;
        }
        let batch: Vec<_> = self.queue.drain(..pictures).collect();
        let encoded = |key| {
            let entry: &mut Entry = self.entries.get_mut(key).expect("a queued picture has rows");
            entry.state = State::Encoding;
            (*key, entry.rows.clone())
        };
        let pictures = batch.iter().map(encoded).collect();
        self.under_way.push_back(batch);
        effects.push(Effect::Encode(pictures));
        true
    }

    /// Whether the next encoder batch is full, so that a picture that is queued now would have to
    /// wait for the batch after it.
    fn is_batch_full(&self) -> bool {
        let (pictures, is_full) = self.next_batch();
        pictures > 0 && is_full
    }

    /// How many queued pictures the next encoder batch takes, and whether that batch is full.
    fn next_batch(&self) -> (usize, bool) {
        let mut permits = if self.has_streams { self.patches_beside_streams } else { self.launch_patches };
        for (pictures, key) in self.queue.iter().enumerate() {
            match permits.checked_sub(self.entries[key].patches) {
                Some(left) => permits = left,
                // A picture is not split. No picture exceeds the limit of a whole batch.
                None => return (pictures.max(1), true),
            }
        }
        (self.queue.len(), permits == 0)
    }
}

/// The copies between a picture's rows and its slots.
fn copies(rows: &[u32], slots: &[u32]) -> impl Iterator<Item = BlockCopy> {
    assert_eq!(rows.len(), slots.len(), "a picture has as many slots on the host as rows on the device");
    rows.iter().zip(slots).map(|(&block, &slot)| BlockCopy { block, slot })
}

/// Each picture once, even if a request repeats it.
fn distinct(pictures: &[EncodeRequest]) -> impl Iterator<Item = &EncodeRequest> {
    pictures
        .iter()
        .enumerate()
        .filter(|(index, picture)| pictures[..*index].iter().all(|p| p.key != picture.key))
        .map(|(_, p)| p)
}

#[cfg(test)]
mod tests;
