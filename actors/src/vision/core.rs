//! Which pictures are cached, which wait, and what the next launch encodes: pure.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    sync::Arc,
};

use bursar_kernels::ops::copy_blocks::BlockCopy;
use bursar_model::flow::PictureHash;

use super::host::HostSlots;
use crate::{
    compute::LAUNCHES,
    order::{Line, Priority},
    tenant::TenantWeights,
};

/// Copies under way at once. Their number is bounded because a lane's queue is.
const COPIES: usize = 4;

/// The number of a request, in order of arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The number after this one.
    pub fn next(self) -> Ticket {
        Ticket(self.0 + 1)
    }
}

/// A picture that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeRequest {
    /// The picture's key.
    pub key: PictureHash,
    /// Rows of the cache that it takes.
    pub rows: usize,
    /// Patches of a launch that it takes.
    pub patches: usize,
    /// Whether its file was decoded. If not, it was [held](VisionCore::holds_all) when it was asked for.
    pub has_pixels: bool,
}

/// An event for the vision actor.
#[derive(Clone, Debug)]
pub enum Input {
    /// A request's pictures are decoded or held. It needs all of them at once, and waits at this rank.
    Want(Ticket, Priority, Vec<EncodeRequest>),
    /// The oldest running launch has ended.
    Encoded,
    /// The oldest copies have ended.
    Copied,
    /// One holder has released these pictures.
    Unpin(Vec<PictureHash>),
    /// The request's caller has gone. A request already answered is unknown here.
    Withdraw(Ticket),
    /// Replies are under way on the same card, or no longer.
    Streams(bool),
}

/// What must be done, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Encode these pictures into these rows. The end comes as [`Input::Encoded`].
    Launch(Vec<(PictureHash, Arc<[u32]>)>),
    /// Copy rows. The end comes as [`Input::Copied`].
    Copy {
        /// Rows that leave, and their slots. They are copied first.
        to_host: Vec<BlockCopy>,
        /// Rows that come back, and their slots.
        to_device: Vec<BlockCopy>,
    },
    /// Before the request's turn a picture without pixels has lost both its places. The request has to come again, with
    /// pixels.
    Lost(Ticket),
    /// All of a request's pictures are in the cache, pinned until [`Input::Unpin`]. Holds their rows, in the request's
    /// order.
    Ready(Ticket, Vec<Arc<[u32]>>),
    /// A request needs more rows than the cache has.
    Refused {
        /// The request.
        ticket: Ticket,
        /// Rows needed, counting a repeated picture once.
        rows: usize,
        /// Rows of the cache.
        limit: usize,
    },
}

#[derive(Debug)]
struct Entry {
    rows: Arc<[u32]>,
    patches: usize,
    pins: usize,
    state: State,
    /// When it was last unpinned. The smallest is evicted first, and none before it was unpinned.
    used: u64,
}

/// How far a picture's rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is in no launch yet.
    Queued,
    /// Its launch is under way.
    Launched,
    /// Its rows are being copied from host memory.
    Coming,
    /// Its rows may be read.
    There,
}

/// Copies that are decided and not begun.
#[derive(Debug, Default)]
struct Batch {
    to_host: Vec<BlockCopy>,
    to_device: Vec<BlockCopy>,
    /// The pictures that come.
    coming: Vec<PictureHash>,
}

/// Pictures that got rows, by where they were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheLookup {
    /// All of them.
    pub pictures: usize,
    /// Those that need no launch of their own.
    pub hits: usize,
    /// Those of these that came back from host memory.
    pub host_hits: usize,
}

/// The state of the cache.
#[derive(Debug)]
pub struct VisionCore {
    rows_total: usize,
    launch_patches: usize,
    /// Patches of a launch while replies are under way. A larger picture is launched alone.
    patches_beside_streams: usize,
    has_streams: bool,
    free: BTreeSet<u32>,
    entries: BTreeMap<PictureHash, Entry>,
    /// Requests waiting for rows, or for room in the next launch. A request gets rows for all its pictures at once: two
    /// requests that each held some and waited for the rest would wait forever.
    waiting: Line<Ticket, Vec<EncodeRequest>>,
    /// The one that is next lacks rows.
    lacks_rows: bool,
    /// Requests whose pictures have rows but are not all encoded.
    pending: VecDeque<(Ticket, Vec<PictureHash>)>,
    /// Pictures with rows that are in no launch yet: little more than the next launch takes, so that later requests may
    /// still be before others.
    queue: VecDeque<PictureHash>,
    /// The launches that the lane has, the oldest first.
    under_way: VecDeque<Vec<PictureHash>>,
    /// Where pictures go that are evicted.
    host: HostSlots,
    batch: Batch,
    /// The pictures that come with each of the copies that the lane has, the oldest first.
    copying: VecDeque<Vec<PictureHash>>,
    found: CacheLookup,
    clock: u64,
}

impl VisionCore {
    /// An empty cache of `rows` rows, encoded in launches of at most `launch_patches` patches: the permits of the
    /// profile record.
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

    /// Limits launches while replies are under way, because these wait for the card meanwhile.
    #[must_use]
    pub fn beside_streams(mut self, patches: Option<usize>) -> Self {
        self.patches_beside_streams = patches.unwrap_or(self.launch_patches).min(self.launch_patches);
        self
    }

    /// Shares launches out by these weights.
    #[must_use]
    pub fn with_tenants(self, weights: TenantWeights) -> Self {
        VisionCore { waiting: Line::new(weights), ..self }
    }

    /// Lets evicted pictures go to so many rows in host memory (ADR 15).
    #[must_use]
    pub fn with_host(self, rows: usize) -> Self {
        VisionCore { host: HostSlots::new(rows), ..self }
    }

    /// Takes one input. Returns what must be done.
    pub fn step(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Want(ticket, rank, pictures) => self.want(ticket, rank, pictures, &mut effects),
            Input::Encoded => {
                let launched = self.under_way.pop_front().expect("a launch came back that was not under way");
                self.are_there(&launched);
            }
            Input::Copied => {
                let came = self.copying.pop_front().expect("copies came back that were not under way");
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
            if !self.launch(&mut effects) {
                return effects;
            }
        }
    }

    /// Free rows, and pictures in the cache.
    pub fn counts(&self) -> (usize, usize) {
        (self.free.len(), self.entries.len())
    }

    /// Whether a picture has rows, readable or about to be.
    pub fn holds(&self, key: &PictureHash) -> bool {
        self.entries.contains_key(key)
    }

    /// Whether all of these have rows or are in host memory, where there is such a place, so that no pixels are needed.
    pub fn holds_all(&self, keys: &[PictureHash]) -> bool {
        self.host.is_there() && keys.iter().all(|key| self.holds(key) || self.host.holds(key))
    }

    /// Rows in host memory.
    pub fn host_rows(&self) -> usize {
        self.host.rows()
    }

    /// What got rows since this was last asked.
    pub fn take_found(&mut self) -> CacheLookup {
        mem::take(&mut self.found)
    }

    /// Patches of the running launch.
    pub fn patches_under_way(&self) -> usize {
        self.under_way.front().into_iter().flatten().map(|key| self.entries[key].patches).sum()
    }

    /// The rows of these pictures, in order, and pinned. None, with nothing pinned, if one is missing or not readable
    /// yet. None also while a request lacks rows: pictures recalled again and again would never make room for it.
    pub fn recall(&mut self, keys: &[PictureHash]) -> Option<Vec<Arc<[u32]>>> {
        if self.is_short() {
            return None;
        }
        let is_there = |key: &PictureHash| self.entries.get(key).is_some_and(|entry| entry.state == State::There);
        if !keys.iter().all(is_there) {
            return None;
        }
        let recall = |key: &PictureHash| {
            let entry = self.entries.get_mut(key).expect("looked up above");
            entry.pins += 1;
            entry.rows.clone()
        };
        Some(keys.iter().map(recall).collect())
    }

    /// The pictures whose pixels a later launch may need. One that is cached now may be evicted before a waiting request
    /// gets its turn.
    pub fn need_pixels(&self) -> BTreeSet<PictureHash> {
        let waiting = self.waiting.values().flatten().filter(|picture| picture.has_pixels);
        waiting.map(|picture| picture.key).chain(self.queue.iter().copied()).collect()
    }

    fn are_there(&mut self, keys: &[PictureHash]) {
        for key in keys {
            self.entries.get_mut(key).expect("a picture on its way keeps its rows").state = State::There;
        }
    }

    /// Whether a request waits that lacks rows.
    fn is_short(&self) -> bool {
        self.lacks_rows && !self.waiting.is_empty()
    }

    fn want(&mut self, ticket: Ticket, rank: Priority, pictures: Vec<EncodeRequest>, effects: &mut Vec<Effect>) {
        let rows = distinct(&pictures).map(|picture| picture.rows).sum();
        let too_large = pictures.iter().any(|picture| picture.patches > self.launch_patches);
        if rows > self.rows_total || too_large {
            return effects.push(Effect::Refused { ticket, rows, limit: self.rows_total });
        }
        // No launch is larger for it, and none waits for the rows that it takes.
        let delays_none = self.patches_to_encode(&pictures) == 0 && self.have_places(&pictures) && !self.is_short();
        if delays_none && self.copying.len() < COPIES && self.fits(&pictures) {
            return self.give_rows(ticket, &pictures);
        }
        self.waiting.join(ticket, rank, pictures);
    }

    fn withdraw(&mut self, ticket: Ticket) {
        if self.waiting.leave(ticket).is_some() {
            // It may have been the one.
            self.lacks_rows = false;
        }
        if let Some(place) = self.pending.iter().position(|(pending, _)| *pending == ticket) {
            let (_, keys) = self.pending.remove(place).expect("just found");
            keys.iter().for_each(|key| self.unpin(key));
        }
    }

    fn unpin(&mut self, key: &PictureHash) {
        self.clock += 1;
        let entry = self.entries.get_mut(key).expect("a pinned picture keeps its rows");
        entry.pins -= 1;
        entry.used = self.clock;
    }

    /// Gives rows to waiting requests in order, while there are enough, the next launch is not full, and copies may begin.
    /// If the next lacks rows others may pass it that do not, so many.
    fn serve_waiting(&mut self, effects: &mut Vec<Effect>) {
        while self.copying.len() < COPIES && !self.is_launch_full() {
            let order = self.waiting.order();
            let is_lost = |ticket: &&Ticket| !self.waiting.get(**ticket).is_some_and(|wanted| self.have_places(wanted));
            if let Some(lost) = order.iter().find(is_lost) {
                self.waiting.leave(*lost);
                effects.push(Effect::Lost(*lost));
                continue;
            }
            let Some(next) = order.first() else { return };
            self.lacks_rows = !self.has_room(*next);
            if !self.lacks_rows {
                self.serve(*next);
                continue;
            }
            match order[1..].iter().find(|ticket| self.has_room(**ticket)) {
                Some(other) if self.waiting.lets_pass(*next) => self.serve(*other),
                _ => return,
            }
        }
    }

    /// Whether each of these has pixels or a place.
    fn have_places(&self, pictures: &[EncodeRequest]) -> bool {
        pictures.iter().all(|picture| picture.has_pixels || self.holds_all(&[picture.key]))
    }

    /// Patches of those that are nowhere yet.
    fn patches_to_encode(&self, pictures: &[EncodeRequest]) -> usize {
        let is_new = |picture: &&EncodeRequest| !self.holds(&picture.key) && !self.host.holds(&picture.key);
        distinct(pictures).filter(is_new).map(|picture| picture.patches).sum()
    }

    /// Gives a waiting request its rows, for which there is room.
    fn serve(&mut self, ticket: Ticket) {
        let patches = self.patches_to_encode(self.waiting.get(ticket).expect("it waits"));
        let pictures = self.waiting.serve(ticket, patches);
        self.give_rows(ticket, &pictures);
    }

    fn give_rows(&mut self, ticket: Ticket, pictures: &[EncodeRequest]) {
        self.make_room(pictures);
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

    /// Begins the copies that were decided.
    fn copy(&mut self, effects: &mut Vec<Effect>) {
        let Batch { to_host, to_device, coming } = mem::take(&mut self.batch);
        if !to_host.is_empty() || !to_device.is_empty() {
            self.copying.push_back(coming);
            effects.push(Effect::Copy { to_host, to_device });
        }
    }

    /// Rows that these need beside those that they have.
    fn rows_lacking(&self, pictures: &[EncodeRequest]) -> usize {
        distinct(pictures).filter(|picture| !self.holds(&picture.key)).map(|picture| picture.rows).sum()
    }

    /// Pictures that may be evicted for these: when they were last used, and their rows.
    fn idle<'a>(&'a self, wanted: &'a [EncodeRequest]) -> impl Iterator<Item = (u64, PictureHash, usize)> + 'a {
        let is_wanted = |key: &PictureHash| wanted.iter().any(|picture| picture.key == *key);
        let idle = self
            .entries
            .iter()
            .filter(move |(key, entry)| entry.pins == 0 && entry.state == State::There && !is_wanted(key));
        idle.map(|(key, entry)| (entry.used, *key, entry.rows.len()))
    }

    fn has_room(&self, waiting: Ticket) -> bool {
        self.waiting.get(waiting).is_some_and(|pictures| self.fits(pictures))
    }

    /// Whether there is room for these, if idle pictures go.
    fn fits(&self, pictures: &[EncodeRequest]) -> bool {
        let lacking = self.rows_lacking(pictures);
        lacking <= self.free.len()
            || lacking <= self.free.len() + self.idle(pictures).map(|(.., rows)| rows).sum::<usize>()
    }

    /// Evicts unpinned pictures, the longest unused first, until `pictures`, which [fit](Self::fits), have room. They go to
    /// host memory, if there is room beside what is fetched from there.
    fn make_room(&mut self, pictures: &[EncodeRequest]) {
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
        assert!(free >= needed, "{needed} rows were there a moment ago, and now {free} are");
        for (_, key, _) in victims {
            let Entry { rows, used, .. } = self.entries.remove(&key).expect("listed above");
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
        // The first, so that neighbours stay neighbours and are copied together.
        let rows: Vec<u32> = (0..picture.rows).map_while(|_| self.free.pop_first()).collect();
        self.clock += 1;
        let state = match self.host.fetch(&picture.key, self.clock) {
            // Copying is quicker than encoding on any device.
            Some(slots) => {
                self.batch.to_device.extend(copies(&rows, &slots));
                self.batch.coming.push(picture.key);
                State::Coming
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

    /// Begins a launch, as full as the order allows. While one runs, another begins only if it is full, because later
    /// arrivals would fill it. False if none can begin.
    fn launch(&mut self, effects: &mut Vec<Effect>) -> bool {
        let (pictures, is_full) = self.next_launch();
        let is_idle = self.under_way.is_empty();
        if self.under_way.len() >= LAUNCHES || pictures == 0 || (!is_full && !is_idle) {
            return false;
        }
        let launched: Vec<_> = self.queue.drain(..pictures).collect();
        let launch = |key| {
            let entry: &mut Entry = self.entries.get_mut(key).expect("a queued picture has rows");
            entry.state = State::Launched;
            (*key, entry.rows.clone())
        };
        let pictures = launched.iter().map(launch).collect();
        self.under_way.push_back(launched);
        effects.push(Effect::Launch(pictures));
        true
    }

    /// Whether pictures that are queued now would be in a launch after the next.
    fn is_launch_full(&self) -> bool {
        let (pictures, is_full) = self.next_launch();
        pictures > 0 && is_full
    }

    /// How many queued pictures go into the next launch, and whether it is full.
    fn next_launch(&self) -> (usize, bool) {
        let mut permits = if self.has_streams { self.patches_beside_streams } else { self.launch_patches };
        for (pictures, key) in self.queue.iter().enumerate() {
            match permits.checked_sub(self.entries[key].patches) {
                Some(left) => permits = left,
                // A picture is not cut. No picture exceeds a whole launch.
                None => return (pictures.max(1), true),
            }
        }
        (self.queue.len(), permits == 0)
    }
}

/// A picture's copies, from or to its slots.
fn copies(rows: &[u32], slots: &[u32]) -> impl Iterator<Item = BlockCopy> {
    assert_eq!(rows.len(), slots.len(), "a picture has as many rows wherever it is");
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
