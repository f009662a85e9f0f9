//! Distribution of the pictures of a launch over ranks: the pictures that each rank encodes, and
//! the exchange of the encoded rows among all ranks.

use bursar_kernels::{Backend, KernelError, Scope, Tensor};

/// Rows that a rank sends at a time. The limit keeps the workspace of the exchange below the
/// workspace of the tower.
const ROWS_AT_ONCE: usize = 256;

/// Assigns each picture to one of `ranks` ranks by its number of patches, and returns the indices
/// of each rank's pictures. The largest pictures are assigned first, each to the rank with the
/// fewest patches so far. If several ranks have the fewest, the first of them gets the picture
/// (Graham 1969, doi 10.1137/0117039).
pub fn share_out(patches: &[usize], ranks: usize) -> Vec<Vec<usize>> {
    let mut by_size: Vec<usize> = (0..patches.len()).collect();
    // The sort is stable: among pictures of equal size, the first is assigned first.
    by_size.sort_by_key(|picture| std::cmp::Reverse(patches[*picture]));
    let (mut shares, mut sums) = (vec![Vec::new(); ranks], vec![0; ranks]);
    for picture in by_size {
        let idlest = (0..ranks).min_by_key(|rank| sums[*rank]).expect("there is at least one rank");
        sums[idlest] += patches[picture];
        shares[idlest].push(picture);
    }
    shares.iter_mut().for_each(|share| share.sort_unstable());
    shares
}

/// The largest number of patches that [`share_out`] assigns to one rank, for a launch of `launch`
/// patches in pictures of at most `largest` patches.
///
/// Proof: consider a rank with several pictures, and let `p` be the number of patches of its
/// last picture. When the rank got that picture, no other rank had fewer patches. So the rank
/// has at most `p + (launch - p) / ranks` patches. Every rank already had a picture, and larger
/// pictures were assigned first. So more than `ranks` pictures have `p` or more patches, and `p`
/// is at most `launch / (ranks + 1)`.
pub fn most_of_a_rank(launch: usize, largest: usize, ranks: usize) -> usize {
    largest.max(2 * launch / (ranks + 1)).min(launch)
}

/// Copies the rows of `cache` `[rows, width]` that each rank has computed, `rows_of[rank]`, to the
/// caches of all other ranks.
pub fn exchange_rows<B: Backend>(
    scope: &Scope<'_, B>,
    rows_of: &[&[u32]],
    cache: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    let (rank, width) = (scope.rank().index(), cache.columns());
    let most = rows_of.iter().map(|rows| rows.len()).max().unwrap_or(0);
    for first in (0..most).step_by(ROWS_AT_ONCE) {
        let scope = scope.scope();
        let end = most.min(first + ROWS_AT_ONCE);
        let in_turn = |rows: &[u32]| rows[first.min(rows.len())..end.min(rows.len())].to_vec();
        // All ranks send the same number of rows. A rank that has fewer rows pads them with copies
        // of row 0, which no rank reads.
        let mut own = in_turn(rows_of[rank]);
        own.resize(end - first, 0);
        let own = scope.gather_rows(cache, &scope.upload([own.len()], &own)?)?; // [count, width]
        let mut all = scope.empty([end - first, rows_of.len() * width])?;
        scope.all_gather_into(&own, &mut all)?;
        for (other, rows) in rows_of.iter().enumerate().filter(|(other, _)| *other != rank) {
            let (scope, rows) = (scope.scope(), in_turn(rows));
            if !rows.is_empty() {
                let sent = all.row_range(0..rows.len());
                let to = scope.upload([rows.len()], &rows)?;
                scope.scatter_rows(&sent.column_range(other * width..(other + 1) * width), &to, cache)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_largest_pictures_go_first_each_to_the_idlest_rank() {
        assert_eq!(share_out(&[4, 16, 4, 8], 2), [vec![1], vec![0, 2, 3]]);
        assert_eq!(
            share_out(&[4, 4, 4], 2),
            [vec![0, 2], vec![1]],
            "the first of two equal pictures goes to the first rank"
        );
        assert_eq!(share_out(&[12], 4), [vec![0], vec![], vec![], vec![]], "a single picture goes to a single rank");
    }

    proptest! {
        #[test]
        fn each_picture_is_one_ranks_and_no_rank_has_more_than_the_most(
            patches in prop::collection::vec(1_usize..200, 1..40), ranks in 1_usize..9,
        ) {
            let shares = share_out(&patches, ranks);
            let mut all = shares.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..patches.len()).collect::<Vec<_>>());
            let (launch, largest) = (patches.iter().sum(), *patches.iter().max().expect("there is a picture"));
            let most = most_of_a_rank(launch, largest, ranks);
            for share in shares {
                prop_assert!(share.iter().map(|picture| patches[*picture]).sum::<usize>() <= most);
            }
        }
    }
}
