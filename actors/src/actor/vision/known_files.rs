//! Pure: known files, and the pictures that each file was decoded to, so that the next turn of a
//! conversation need not decode the files again.

use std::collections::BTreeMap;

use bursar_model::flow::{Grid, PictureHash};

/// Known files by their keys. The least recently used files are forgotten.
pub(super) struct KnownFiles<K> {
    /// Maximum pictures of all files together.
    limit: usize,
    pictures: usize,
    files: BTreeMap<K, Known>,
    /// The keys of the files, ordered by last use.
    by_use: BTreeMap<u64, K>,
    clock: u64,
}

struct Known {
    pictures: Vec<(PictureHash, Grid)>,
    used: u64,
}

impl<K: Ord + Copy> KnownFiles<K> {
    /// Creates an empty store for files that have up to `limit` pictures together.
    pub(super) fn new(limit: usize) -> Self {
        KnownFiles { limit, pictures: 0, files: BTreeMap::new(), by_use: BTreeMap::new(), clock: 0 }
    }

    /// The pictures that a file was decoded to. Marks the file as used.
    pub(super) fn pictures(&mut self, file: &K) -> Option<&[(PictureHash, Grid)]> {
        let known = self.files.get_mut(file)?;
        self.clock += 1;
        self.by_use.remove(&known.used);
        self.by_use.insert(self.clock, *file);
        known.used = self.clock;
        Some(&known.pictures)
    }

    /// Remembers a file. Forgets other files if the limit is exceeded.
    pub(super) fn learn(&mut self, file: K, pictures: Vec<(PictureHash, Grid)>) {
        self.forget(&file);
        self.clock += 1;
        self.pictures += pictures.len();
        self.by_use.insert(self.clock, file);
        self.files.insert(file, Known { pictures, used: self.clock });
        while self.pictures > self.limit
            && let Some((_, file)) = self.by_use.first_key_value()
        {
            self.forget(&file.clone());
        }
    }

    fn forget(&mut self, file: &K) {
        if let Some(known) = self.files.remove(file) {
            self.by_use.remove(&known.used);
            self.pictures -= known.pictures.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: Grid = Grid { t: 1, h: 2, w: 2 };

    #[test]
    fn known_files_keep_the_most_recently_used_within_a_limit() {
        let mut known = KnownFiles::new(3);
        for file in [5, 1, 4, 2, 2] {
            known.learn(file, vec![(PictureHash([7; 32]), GRID)]);
        }
        assert!(known.pictures(&1).is_some() && known.pictures(&5).is_none());
        known.learn(9, vec![(PictureHash([8; 32]), GRID), (PictureHash([7; 32]), GRID)]);
        assert_eq!(
            known.files.keys().copied().collect::<Vec<_>>(),
            [1, 9],
            "one used entry and one new entry are kept"
        );
        assert_eq!(known.pictures(&9).map(<[_]>::len), Some(2));
        known.learn(3, vec![(PictureHash([1; 32]), GRID); 4]);
        assert_eq!(
            (known.files.len(), known.pictures, known.by_use.len()),
            (0, 0, 0),
            "the file has more pictures than the limit"
        );
    }
}
