//! Known names that are most similar to a mistyped name.

/// Up to `most` names of `known` with the smallest edit distance to `name`, nearest first. Names
/// with equal distances keep their order.
pub fn nearest_names<'n>(name: &str, known: impl IntoIterator<Item = &'n str>, most: usize) -> Vec<&'n str> {
    let mut nearest: Vec<_> = known.into_iter().map(|known| (changes(name, known), known)).collect();
    nearest.sort_by_key(|(changes, _)| *changes);
    nearest.into_iter().take(most).map(|(_, known)| known).collect()
}

/// The edit distance: the number of letters to insert, remove or replace (Levenshtein 1966). Only
/// one row of the dynamic-programming table is stored at a time.
fn changes(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (index, letter) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for column in 0..to.len() {
            let replaced = diagonal + usize::from(letter != to[column]);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inserted_removed_or_replaced_letter_counts_as_one_change() {
        for (from, to, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "", 3),
            ("layer", "layers", 1),
            ("layers", "layer", 1),
            ("layer", "later", 1),
            ("kitten", "sitting", 3),
            ("ab", "ba", 2),
            ("müll", "mull", 1),
        ] {
            assert_eq!(changes(from, to), expected, "{from:?} to {to:?}");
        }
    }

    #[test]
    fn the_nearest_names_come_first_and_ties_keep_their_order() {
        let known = ["qwen3-32b", "qwen3-8b", "qwen3-4b", "llama-3-8b"];
        assert_eq!(nearest_names("qwen3-9b", known, 3), ["qwen3-8b", "qwen3-4b", "qwen3-32b"]);
        assert_eq!(nearest_names("qwen3-9b", known, 9).len(), 4);
    }
}
