//! Pure: how a range of addresses is cut into pieces, which are the driver's allocations.
//!
//! The driver maps and unmaps an allocation as a whole. Mapping a piece of 2 MiB takes as long as
//! mapping a piece of 64 MiB (about 35 µs), so a cache of 100 GiB would take seconds to back in
//! small pieces. A cache made of a single piece could not shrink.

use crate::Bytes;

/// The size of most pieces. The memory of an H200 takes about 9,000 pieces of this size.
pub(super) const LARGE: Bytes = Bytes(16 << 20);

/// Cuts the range from `start` to `end`, which are offsets from the start of a reservation in whole
/// pages. The result consists of pages up to the next multiple of the large size, then large
/// pieces, then pages for the rest. Returns the start and length of each piece.
pub(super) fn cut(start: Bytes, end: Bytes, page: Bytes) -> Vec<(Bytes, Bytes)> {
    let mut pieces = Vec::new();
    let mut at = start;
    while at < end {
        let is_large = at.is_multiple_of(LARGE) && end - at >= LARGE;
        let bytes = if is_large { LARGE.max(page) } else { page };
        pieces.push((at, bytes));
        at += bytes;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: Bytes = Bytes(2 << 20);

    fn mib(pieces: &[(Bytes, Bytes)]) -> Vec<(u64, u64)> {
        pieces.iter().map(|(at, bytes)| (at.0 >> 20, bytes.0 >> 20)).collect()
    }

    #[test]
    fn a_range_is_large_pieces_with_pages_at_its_ends() {
        let pieces = cut(Bytes::mib(12), Bytes::mib(52), PAGE);
        assert_eq!(mib(&pieces), [(12, 2), (14, 2), (16, 16), (32, 16), (48, 2), (50, 2)]);
        assert_eq!(cut(Bytes::mib(4), Bytes::mib(4), PAGE), []);
    }

    #[test]
    fn pieces_cover_every_range_exactly_once() {
        for start in 0..20 {
            for pages in 0..40 {
                let (start, end) = (PAGE * start, PAGE * (start + pages));
                let mut at = start;
                for (piece, bytes) in cut(start, end, PAGE) {
                    assert_eq!(piece, at);
                    at += bytes;
                }
                assert_eq!(at, end);
            }
        }
    }
}
