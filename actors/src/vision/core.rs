//! Which pictures are cached, which wait, and what the next launch encodes: pure.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use bursar_model::flow::PictureHash;

use crate::compute::LAUNCHES;

/// The number of a request.
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
pub struct PictureRequest {
    /// The picture's key.
    pub key: PictureHash,
    /// Rows of the cache that it takes.
    pub rows: usize,
    /// Patches of a launch that it takes.
    pub patches: usize,
}

/// An event for the vision actor.
#[derive(Clone, Debug)]
pub enum Input {
    /// A request's pictures are decoded. It needs all of them at once.
    Want(Ticket, Vec<PictureRequest>),
    /// The oldest running launch has ended.
    Encoded,
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
    encoded: bool,
    /// When it was last unpinned. The smallest is evicted first, and none before it was unpinned.
    used: u64,
}

/// The state of the cache.
#[derive(Debug)]
pub struct VisionCore {
    rows_total: usize,
    launch_patches: usize,
    /// Patches of a launch while replies are under way. A larger picture is launched alone.
    patches_beside_streams: usize,
    has_streams: bool,
    free: Vec<u32>,
    entries: BTreeMap<PictureHash, Entry>,
    /// Requests waiting for rows, in order of arrival. A request gets rows for all its pictures at once: two requests
    /// that each held some and waited for the rest would wait forever.
    waiting: VecDeque<(Ticket, Vec<PictureRequest>)>,
    /// Requests whose pictures have rows but are not all encoded.
    pending: VecDeque<(Ticket, Vec<PictureHash>)>,
    /// Pictures with rows that are in no launch yet.
    queue: VecDeque<PictureHash>,
    /// The launches that the lane has, the oldest first.
    under_way: VecDeque<Vec<PictureHash>>,
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
            free: (0..rows as u32).rev().collect(),
            entries: BTreeMap::new(),
            waiting: VecDeque::new(),
            pending: VecDeque::new(),
            queue: VecDeque::new(),
            under_way: VecDeque::with_capacity(LAUNCHES),
            clock: 0,
        }
    }

    /// Limits launches while replies are under way, because these wait for the card meanwhile.
    #[must_use]
    pub fn beside_streams(mut self, patches: Option<usize>) -> Self {
        self.patches_beside_streams = patches.unwrap_or(self.launch_patches).min(self.launch_patches);
        self
    }

    /// Takes one input. Returns what must be done.
    pub fn step(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Want(ticket, pictures) => self.want(ticket, pictures, &mut effects),
            Input::Encoded => {
                for key in self.under_way.pop_front().expect("a launch came back that was not under way") {
                    self.entries.get_mut(&key).expect("a launched picture keeps its rows").encoded = true;
                }
            }
            Input::Withdraw(ticket) => self.withdraw(ticket),
            Input::Streams(has_streams) => {
                self.has_streams = has_streams;
                return effects;
            }
            Input::Unpin(keys) => keys.iter().for_each(|key| self.unpin(key)),
        }
        self.serve_waiting();
        self.answer_pending(&mut effects);
        self.launch(&mut effects);
        effects
    }

    /// Free rows, and pictures in the cache.
    pub fn counts(&self) -> (usize, usize) {
        (self.free.len(), self.entries.len())
    }

    /// Whether a picture has rows, encoded or about to be.
    pub fn holds(&self, key: &PictureHash) -> bool {
        self.entries.contains_key(key)
    }

    /// Patches of the running launch.
    pub fn patches_under_way(&self) -> usize {
        self.under_way.front().into_iter().flatten().map(|key| self.entries[key].patches).sum()
    }

    /// The rows of these pictures, in order, and pinned. None, with nothing pinned, if one is missing or not encoded
    /// yet. None also while a request waits for rows: pictures recalled again and again would never make room for it.
    pub fn recall(&mut self, keys: &[PictureHash]) -> Option<Vec<Arc<[u32]>>> {
        if !self.waiting.is_empty() {
            return None;
        }
        let is_there = |key: &PictureHash| self.entries.get(key).is_some_and(|entry| entry.encoded);
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

    /// Whether a later launch may need this picture's pixels. A picture cached now may be evicted before a waiting
    /// request gets its turn.
    pub fn needs_pixels(&self, key: &PictureHash) -> bool {
        let is_launched = self.under_way.iter().flatten().any(|launched| launched == key);
        let is_queued = !is_launched && self.entries.get(key).is_some_and(|entry| !entry.encoded);
        is_queued || self.waiting.iter().flat_map(|(_, pictures)| pictures).any(|picture| picture.key == *key)
    }

    fn want(&mut self, ticket: Ticket, pictures: Vec<PictureRequest>, effects: &mut Vec<Effect>) {
        let rows = distinct(&pictures).map(|picture| picture.rows).sum();
        let too_large = pictures.iter().any(|picture| picture.patches > self.launch_patches);
        if rows > self.rows_total || too_large {
            effects.push(Effect::Refused { ticket, rows, limit: self.rows_total });
        } else {
            self.waiting.push_back((ticket, pictures));
        }
    }

    fn withdraw(&mut self, ticket: Ticket) {
        self.waiting.retain(|(waiting, _)| *waiting != ticket);
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

    /// Gives rows to waiting requests in order, while there are enough.
    fn serve_waiting(&mut self) {
        while let Some((ticket, pictures)) = self.waiting.pop_front() {
            if !self.make_room(&pictures) {
                self.waiting.push_front((ticket, pictures));
                return;
            }
            pictures.iter().for_each(|picture| self.pin(picture));
            self.pending.push_back((ticket, pictures.iter().map(|picture| picture.key).collect()));
        }
    }

    /// Evicts unpinned pictures, the longest unused first, until `pictures` fit. Evicts nothing if they cannot fit.
    fn make_room(&mut self, pictures: &[PictureRequest]) -> bool {
        let missing = distinct(pictures).filter(|picture| !self.entries.contains_key(&picture.key));
        let needed: usize = missing.map(|picture| picture.rows).sum();
        let wanted = |key: &PictureHash| pictures.iter().any(|picture| picture.key == *key);
        let mut idle: Vec<_> = self
            .entries
            .iter()
            .filter(|(key, entry)| entry.pins == 0 && entry.encoded && !wanted(key))
            .map(|(key, entry)| (entry.used, *key, entry.rows.len()))
            .collect();
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
        if free < needed {
            return false;
        }
        for (_, key, _) in victims {
            let entry = self.entries.remove(&key).expect("listed above");
            self.free.extend(entry.rows.iter().rev());
        }
        true
    }

    fn pin(&mut self, picture: &PictureRequest) {
        if let Some(entry) = self.entries.get_mut(&picture.key) {
            entry.pins += 1;
            return;
        }
        let rows: Vec<u32> = self.free.drain(self.free.len() - picture.rows..).rev().collect();
        let entry = Entry { rows: rows.into(), patches: picture.patches, pins: 1, encoded: false, used: 0 };
        self.entries.insert(picture.key, entry);
        self.queue.push_back(picture.key);
    }

    fn answer_pending(&mut self, effects: &mut Vec<Effect>) {
        self.pending.retain(|(ticket, keys)| {
            if !keys.iter().all(|key| self.entries[key].encoded) {
                return true;
            }
            effects.push(Effect::Ready(*ticket, keys.iter().map(|key| self.entries[key].rows.clone()).collect()));
            false
        });
    }

    /// Begins launches, as full as the order of arrival allows. While one runs, another begins only if it is full,
    /// because later arrivals would fill it.
    fn launch(&mut self, effects: &mut Vec<Effect>) {
        while self.under_way.len() < LAUNCHES {
            let (pictures, is_full) = self.next_launch();
            if pictures == 0 || (!is_full && !self.under_way.is_empty()) {
                return;
            }
            let launched: Vec<_> = self.queue.drain(..pictures).collect();
            let pictures = launched.iter().map(|key| (*key, self.entries[key].rows.clone())).collect();
            self.under_way.push_back(launched);
            effects.push(Effect::Launch(pictures));
        }
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

/// Each picture once, even if a request repeats it.
fn distinct(pictures: &[PictureRequest]) -> impl Iterator<Item = &PictureRequest> {
    pictures
        .iter()
        .enumerate()
        .filter(|(index, picture)| pictures[..*index].iter().all(|p| p.key != picture.key))
        .map(|(_, p)| p)
}

#[cfg(test)]
mod tests;
