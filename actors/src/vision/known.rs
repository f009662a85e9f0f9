//! Known files: the pictures that files were decoded to while those are cached, so that the next turn of a conversation
//! need not decode them again. Pure.

use std::collections::BTreeMap;

use bursar_model::flow::{Grid, PictureHash};

/// A bounded map of files by their keys. It is bounded because many files can decode to one picture, which may stay
/// cached for long.
pub(super) struct KnownFiles<K> {
    limit: usize,
    files: BTreeMap<K, Known>,
    clock: u64,
}

struct Known {
    pictures: Vec<(PictureHash, Grid)>,
    learned: u64,
}

impl<K: Ord + Copy> KnownFiles<K> {
    /// Holds up to `limit` files.
    pub(super) fn new(limit: usize) -> Self {
        KnownFiles { limit, files: BTreeMap::new(), clock: 0 }
    }

    /// The pictures that a file was decoded to.
    pub(super) fn pictures(&self, file: &K) -> Option<&[(PictureHash, Grid)]> {
        self.files.get(file).map(|known| &known.pictures[..])
    }

    /// Remembers a file. If there is no room, the file learned first is forgotten.
    pub(super) fn learn(&mut self, file: K, pictures: Vec<(PictureHash, Grid)>) {
        self.clock += 1;
        self.files.insert(file, Known { pictures, learned: self.clock });
        if self.files.len() > self.limit {
            let first = self.files.iter().min_by_key(|(_, known)| known.learned).map(|(file, _)| *file);
            first.map(|file| self.files.remove(&file));
        }
    }

    /// Forgets files with a picture that is no longer cached.
    pub(super) fn forget(&mut self, is_there: impl Fn(&PictureHash) -> bool) {
        self.files.retain(|_, known| known.pictures.iter().all(|(picture, _)| is_there(picture)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: Grid = Grid { t: 1, h: 2, w: 2 };

    #[test]
    fn files_of_a_cached_picture_are_remembered_up_to_a_limit() {
        let mut known = KnownFiles::new(3);
        for file in [5, 1, 4, 2, 2, 9] {
            known.learn(file, vec![(PictureHash([7; 32]), GRID)]);
        }
        known.learn(9, vec![(PictureHash([8; 32]), GRID), (PictureHash([7; 32]), GRID)]);
        assert_eq!(known.files.keys().copied().collect::<Vec<_>>(), [2, 4, 9], "those learned last");
        assert_eq!(known.pictures(&9).map(<[_]>::len), Some(2));
        known.forget(|picture| *picture == PictureHash([7; 32]));
        assert!(known.pictures(&9).is_none() && known.pictures(&2).is_some());
    }
}
