//! Which pictures are in the cache, which wait, and what goes into the next launch: pure.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use crate::compute::LAUNCHES;

/// A hash over all that a picture's embedding depends on: pixels and processor settings. Equal pictures share a key.
pub type PictureKey = [u8; 32];

/// One request's question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A picture that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PictureRequest {
    /// Which.
    pub key: PictureKey,
    /// Rows of the cache it takes.
    pub rows: usize,
    /// Patches it takes of a launch.
    pub patches: usize,
}

/// What happens to the vision actor.
#[derive(Clone, Debug)]
pub enum Input {
    /// A request's pictures are decoded and wanted, all together.
    Want(Ticket, Vec<PictureRequest>),
    /// The oldest launch under way has run.
    Encoded,
    /// A holder of these pictures is gone.
    Unpin(Vec<PictureKey>),
    /// Nobody waits for this request any more. One that was answered is unknown here.
    Withdraw(Ticket),
}

/// What is to be done, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Encode these pictures into these rows; the end comes as [`Input::Encoded`].
    Launch(Vec<(PictureKey, Arc<[u32]>)>),
    /// All of a request's pictures are in the cache, pinned until [`Input::Unpin`]; their rows, in the order wanted.
    Ready(Ticket, Vec<Arc<[u32]>>),
    /// A request wants more than the cache could ever hold.
    Refused {
        /// Whose.
        ticket: Ticket,
        /// Rows wanted, a picture that is named twice counted once.
        rows: usize,
        /// Rows there are.
        limit: usize,
    },
}

#[derive(Debug)]
struct Entry {
    rows: Arc<[u32]>,
    patches: usize,
    pins: usize,
    encoded: bool,
    /// When it was last wanted or unpinned; the smallest goes first.
    used: u64,
}

/// The cache's state.
#[derive(Debug)]
pub struct VisionCore {
    rows_total: usize,
    launch_patches: usize,
    free: Vec<u32>,
    entries: BTreeMap<PictureKey, Entry>,
    /// Requests that wait for rows, in order of arrival. Rows are given to all pictures of a request at once: two
    /// requests that each hold some and wait for the rest would wait forever.
    waiting: VecDeque<(Ticket, Vec<PictureRequest>)>,
    /// Requests whose pictures have rows, not all of them encoded.
    pending: VecDeque<(Ticket, Vec<PictureKey>)>,
    /// Pictures with rows that no launch has taken yet.
    queue: VecDeque<PictureKey>,
    /// The launches that the lane has, the oldest first.
    under_way: VecDeque<Vec<PictureKey>>,
    clock: u64,
}

impl VisionCore {
    /// An empty cache of `rows` rows, encoded in launches of at most `launch_patches` patches: the permits of the
    /// profile record.
    pub fn new(rows: usize, launch_patches: usize) -> Self {
        VisionCore {
            rows_total: rows,
            launch_patches,
            free: (0..rows as u32).rev().collect(),
            entries: BTreeMap::new(),
            waiting: VecDeque::new(),
            pending: VecDeque::new(),
            queue: VecDeque::new(),
            under_way: VecDeque::with_capacity(LAUNCHES),
            clock: 0,
        }
    }

    /// Takes one input, gives what is to be done.
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
            Input::Unpin(keys) => keys.iter().for_each(|key| self.unpin(key)),
        }
        self.serve_waiting();
        self.answer_pending(&mut effects);
        self.launch(&mut effects);
        effects
    }

    /// Rows that no picture holds, and pictures in the cache.
    pub fn counts(&self) -> (usize, usize) {
        (self.free.len(), self.entries.len())
    }

    /// Whether a picture has rows, encoded or about to be.
    pub fn holds(&self, key: &PictureKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Patches of the launch that the device runs.
    pub fn patches_under_way(&self) -> usize {
        self.under_way.front().into_iter().flatten().map(|key| self.entries[key].patches).sum()
    }

    /// The rows of pictures that are all in the cache, in this order, pinned as if they had been wanted; none if one of
    /// them is not there or not encoded yet, and then nothing is pinned. None also while somebody waits for rows: pictures
    /// that are recalled again and again would never make room for them.
    pub fn recall(&mut self, keys: &[PictureKey]) -> Option<Vec<Arc<[u32]>>> {
        if !self.waiting.is_empty() {
            return None;
        }
        let is_there = |key: &PictureKey| self.entries.get(key).is_some_and(|entry| entry.encoded);
        if !keys.iter().all(is_there) {
            return None;
        }
        let recall = |key: &PictureKey| {
            self.clock += 1;
            let entry = self.entries.get_mut(key).expect("looked up above");
            entry.pins += 1;
            entry.used = self.clock;
            entry.rows.clone()
        };
        Some(keys.iter().map(recall).collect())
    }

    /// Whether a picture has rows, or somebody waits for it.
    pub fn knows(&self, key: &PictureKey) -> bool {
        self.entries.contains_key(key) || self.needs_pixels(key)
    }

    /// Whether a launch to come may ask for the pixels of this picture. One that is in the cache now may have made room
    /// for others by the time a request that waits for it has its turn.
    pub fn needs_pixels(&self, key: &PictureKey) -> bool {
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

    fn unpin(&mut self, key: &PictureKey) {
        self.clock += 1;
        let entry = self.entries.get_mut(key).expect("a pinned picture keeps its rows");
        entry.pins -= 1;
        entry.used = self.clock;
    }

    /// Gives rows to those who wait, in order, for as long as there are enough.
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

    /// Frees rows of pictures that nobody holds, the longest unused first, until `pictures` fit. Frees nothing if
    /// they cannot.
    fn make_room(&mut self, pictures: &[PictureRequest]) -> bool {
        let missing = distinct(pictures).filter(|picture| !self.entries.contains_key(&picture.key));
        let needed: usize = missing.map(|picture| picture.rows).sum();
        let wanted = |key: &PictureKey| pictures.iter().any(|picture| picture.key == *key);
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
        self.clock += 1;
        if let Some(entry) = self.entries.get_mut(&picture.key) {
            entry.pins += 1;
            entry.used = self.clock;
            return;
        }
        let rows: Vec<u32> = self.free.drain(self.free.len() - picture.rows..).rev().collect();
        let entry = Entry { rows: rows.into(), patches: picture.patches, pins: 1, encoded: false, used: self.clock };
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

    /// Launches are as full as the order of arrival allows. Behind one that is under way only a full one is begun: what
    /// comes meanwhile would fill it.
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

    /// How many of the queue go into the next launch, and whether more would not.
    fn next_launch(&self) -> (usize, bool) {
        let mut permits = self.launch_patches;
        for (pictures, key) in self.queue.iter().enumerate() {
            match permits.checked_sub(self.entries[key].patches) {
                Some(left) => permits = left,
                None => return (pictures, true),
            }
        }
        (self.queue.len(), permits == 0)
    }
}

/// Each picture once, however often a request names it.
fn distinct(pictures: &[PictureRequest]) -> impl Iterator<Item = &PictureRequest> {
    pictures
        .iter()
        .enumerate()
        .filter(|(index, picture)| pictures[..*index].iter().all(|p| p.key != picture.key))
        .map(|(_, p)| p)
}

#[cfg(test)]
mod tests;
