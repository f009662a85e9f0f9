//! Pictures' rows in host memory, the second place of a picture: pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bursar_model::flow::PictureHash;

/// Which slots of host memory have which picture's rows. Where there is too little room, the longest unused goes.
///
/// Copies run in the order in which they were decided, so slots have their content, and may be given away again, from the
/// decision on.
#[derive(Debug)]
pub(super) struct HostSlots {
    slots: usize,
    /// The first are used next, so that neighbours on the device are neighbours here.
    free: BTreeSet<u32>,
    stored: BTreeMap<PictureHash, Stored>,
    /// By their last use.
    by_use: BTreeMap<u64, PictureHash>,
}

#[derive(Debug)]
struct Stored {
    slots: Arc<[u32]>,
    used: u64,
}

impl HostSlots {
    /// An empty place for so many rows.
    pub(super) fn new(slots: usize) -> Self {
        let free = (0..slots as u32).collect();
        HostSlots { slots, free, stored: BTreeMap::new(), by_use: BTreeMap::new() }
    }

    /// Whether it can hold anything.
    pub(super) fn is_there(&self) -> bool {
        self.slots > 0
    }

    /// Rows that it has.
    pub(super) fn rows(&self) -> usize {
        self.slots - self.free.len()
    }

    /// Whether it has a picture.
    pub(super) fn holds(&self, picture: &PictureHash) -> bool {
        self.stored.contains_key(picture)
    }

    /// The slots of a picture's rows, in order. This uses it, at `now`, which no other use was at.
    pub(super) fn fetch(&mut self, picture: &PictureHash, now: u64) -> Option<Arc<[u32]>> {
        let stored = self.stored.get_mut(picture)?;
        self.by_use.remove(&stored.used);
        self.by_use.insert(now, *picture);
        stored.used = now;
        Some(stored.slots.clone())
    }

    /// Takes in a picture of so many rows that was last used at `used`. Returns its slots; none if it has them already, or
    /// if there is too little room beside what is `kept`.
    pub(super) fn store(
        &mut self,
        picture: PictureHash,
        rows: usize,
        used: u64,
        is_kept: impl Fn(&PictureHash) -> bool,
    ) -> Option<Arc<[u32]>> {
        if self.fetch(&picture, used).is_some() || !self.make_room(rows, is_kept) {
            return None;
        }
        let slots: Arc<[u32]> = (0..rows).map_while(|_| self.free.pop_first()).collect();
        self.by_use.insert(used, picture);
        self.stored.insert(picture, Stored { slots: slots.clone(), used });
        Some(slots)
    }

    /// Forgets the longest unused until there is room. Forgets nothing if there cannot be.
    fn make_room(&mut self, rows: usize, is_kept: impl Fn(&PictureHash) -> bool) -> bool {
        let mut free = self.free.len();
        let mut victims = Vec::new();
        let mut unused = self.by_use.values().filter(|picture| !is_kept(picture));
        while free < rows {
            let Some(victim) = unused.next() else { return false };
            free += self.stored[victim].slots.len();
            victims.push(*victim);
        }
        for victim in victims {
            let Stored { slots, used } = self.stored.remove(&victim).expect("listed above");
            self.by_use.remove(&used);
            self.free.extend(slots.iter());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(name: u8) -> PictureHash {
        PictureHash([name; 32])
    }

    fn slots(slots: &[u32]) -> Option<Arc<[u32]>> {
        Some(slots.into())
    }

    #[test]
    fn the_longest_unused_pictures_make_room_and_those_kept_do_not() {
        let mut place = HostSlots::new(8);
        let none = |_: &PictureHash| false;
        assert_eq!(place.store(hash(1), 3, 1, none), slots(&[0, 1, 2]));
        assert_eq!(place.store(hash(2), 4, 2, none), slots(&[3, 4, 5, 6]));
        assert_eq!(place.store(hash(2), 4, 3, none), None, "it is here");
        assert_eq!(place.fetch(&hash(1), 4), slots(&[0, 1, 2]));
        assert_eq!(place.store(hash(3), 9, 5, none), None, "it is too large");
        assert_eq!(place.store(hash(3), 2, 5, |picture| *picture == hash(2)), slots(&[0, 1]), "the second is kept");
        assert_eq!(place.store(hash(4), 8, 6, |picture| *picture == hash(3)), None);
        assert!(place.holds(&hash(2)) && place.holds(&hash(3)) && !place.holds(&hash(1)), "nothing went for nothing");
        assert_eq!(place.rows(), 6);
        assert_eq!(place.store(hash(5), 4, 7, none), slots(&[2, 3, 4, 5]), "the second was used before the third");
        assert!(place.holds(&hash(3)) && !place.holds(&hash(2)));
    }
}
