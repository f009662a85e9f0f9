//! Rows of evicted pictures in host memory, the second tier of the vision cache: pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bursar_model::flow::PictureHash;

/// The picture rows in each slot of host memory. If there are too few free slots, the least
/// recently used picture is evicted.
///
/// Copies run in the order in which they were decided. Slots therefore have their content, and may
/// be reused, from the moment of the decision.
#[derive(Debug)]
pub(super) struct HostSlots {
    slots: usize,
    /// The lowest slots are used next, so that rows that are adjacent on the
    /// device are adjacent here.
    free: BTreeSet<u32>,
    stored: BTreeMap<PictureHash, Stored>,
    /// Pictures by their last use.
    by_use: BTreeMap<u64, PictureHash>,
}

#[derive(Debug)]
struct Stored {
    slots: Arc<[u32]>,
    used: u64,
}

impl HostSlots {
    /// A tier with `slots` empty slots, one row each.
    pub(super) fn new(slots: usize) -> Self {
        let free = (0..slots as u32).collect();
        HostSlots { slots, free, stored: BTreeMap::new(), by_use: BTreeMap::new() }
    }

    /// Whether there is a host tier.
    pub(super) fn is_there(&self) -> bool {
        self.slots > 0
    }

    pub(super) fn rows(&self) -> usize {
        self.slots - self.free.len()
    }

    pub(super) fn holds(&self, picture: &PictureHash) -> bool {
        self.stored.contains_key(picture)
    }

    /// The slots of a picture's rows, in order. Marks the picture as used at `now`, which must
    /// differ from the time of every other use.
    pub(super) fn fetch(&mut self, picture: &PictureHash, now: u64) -> Option<Arc<[u32]>> {
        let stored = self.stored.get_mut(picture)?;
        self.by_use.remove(&stored.used);
        self.by_use.insert(now, *picture);
        stored.used = now;
        Some(stored.slots.clone())
    }

    /// Stores a picture of `rows` rows that was last used at `used`, and returns its slots. Returns
    /// `None` if the picture is stored already, or if there are too few slots even when all
    /// pictures except kept ones are evicted.
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

    /// Evicts the least recently used pictures until `rows` slots are free. Evicts no picture if
    /// that cannot succeed.
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
