//! Threads that fill pieces of memory in order, while the caller copies earlier pieces to their
//! destination.

use std::{
    collections::VecDeque,
    mem::MaybeUninit,
    sync::{Arc, Condvar, Mutex, PoisonError},
};

use rayon::ThreadPool;

/// Number of pieces that are filled at the same time, while earlier pieces are copied.
pub(super) const AHEAD: usize = 2;

/// Bytes that one thread fills at a time.
pub(super) const FILLED_AT_ONCE: usize = 512 << 10;

/// Cuts `source` into parts of at most `piece` bytes. The threads of `fillers` copy each part into
/// the memory that `memory` returns for it. Once a part is filled, `copy` is called with its number
/// and length, in order. When `memory` is asked for a part, at most [`AHEAD`] earlier parts have
/// not been copied, so a ring of more than [`AHEAD`] pieces suffices. `memory` must wait until the
/// piece that it returns may be overwritten.
pub(super) fn fill_pipelined<'m, E>(
    fillers: &ThreadPool,
    source: &[u8],
    piece: usize,
    mut memory: impl FnMut(usize) -> Result<&'m mut [MaybeUninit<u8>], E>,
    mut copy: impl FnMut(usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    // If the closure returns early, the scope waits for the fillers that have started.
    fillers.in_place_scope(|scope| {
        let mut filling: VecDeque<(usize, usize, Countdown)> = VecDeque::with_capacity(AHEAD);
        let mut send = |(part, length, left): (usize, usize, Countdown)| {
            left.wait();
            copy(part, length)
        };
        for (part, source) in source.chunks(piece).enumerate() {
            if filling.len() == AHEAD {
                send(filling.pop_front().expect("the queue is not empty"))?;
            }
            let memory = &mut memory(part)?[..source.len()];
            let left = Countdown::from(source.len().div_ceil(FILLED_AT_ONCE));
            for (source, place) in source.chunks(FILLED_AT_ONCE).zip(memory.chunks_mut(FILLED_AT_ONCE)) {
                let one = One(left.clone());
                scope.spawn(move |_| {
                    // Dropping `_one` counts down even on a panic, so that the caller does not wait
                    // forever for this part. The scope propagates the panic.
                    let _one = one;
                    assert_eq!(source.len(), place.len());
                    // SAFETY: source and destination have the same length, and the
                    // destination is mutably borrowed.
                    unsafe {
                        std::ptr::copy_nonoverlapping(source.as_ptr(), place.as_mut_ptr().cast(), source.len());
                    }
                });
            }
            filling.push_back((part, source.len(), left));
        }
        filling.into_iter().try_for_each(send)
    })
}

/// Number of chunks of a part that are not filled yet.
#[derive(Clone)]
struct Countdown(Arc<(Mutex<usize>, Condvar)>);

impl Countdown {
    fn from(count: usize) -> Self {
        Countdown(Arc::new((Mutex::new(count), Condvar::new())))
    }

    fn wait(&self) {
        let (left, none) = &*self.0;
        let left = left.lock().unwrap_or_else(PoisonError::into_inner);
        drop(none.wait_while(left, |left| *left > 0).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Counts down by one when dropped.
struct One(Countdown);

impl Drop for One {
    fn drop(&mut self) {
        let (left, none) = &*self.0.0;
        let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
        *left -= 1;
        if *left == 0 {
            none.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use rayon::ThreadPoolBuilder;

    use super::*;

    /// Pieces in a ring, like pinned memory.
    const PIECES: usize = AHEAD + 1;

    #[test]
    fn a_pipelined_fill_copies_every_byte_in_order() {
        let pool = ThreadPoolBuilder::new().num_threads(3).build().expect("threads");
        let piece = FILLED_AT_ONCE + 3;
        for length in [0, 1, piece - 1, piece, piece + 1, 7 * piece - 5] {
            let source: Vec<u8> = (0..length).map(|place| (place % 251) as u8).collect();
            let mut ring = vec![vec![MaybeUninit::new(0xff); piece]; PIECES];
            let starts: Vec<*mut MaybeUninit<u8>> = ring.iter_mut().map(Vec::as_mut_ptr).collect();
            let (out, copied) = (RefCell::new(Vec::new()), Cell::new(0));
            let memory = |part: usize| {
                assert!(part < copied.get() + PIECES, "part {part} overwrites a part that was not copied");
                // SAFETY: the piece has this length, and its last part was copied.
                Ok::<_, ()>(unsafe { std::slice::from_raw_parts_mut(starts[part % PIECES], piece) })
            };
            let copy = |part: usize, length: usize| {
                assert_eq!(part, copied.get(), "parts are copied in order");
                copied.set(part + 1);
                // SAFETY: the piece is filled, and every byte of it was initialized.
                let filled = unsafe { std::slice::from_raw_parts(starts[part % PIECES].cast::<u8>(), length) };
                out.borrow_mut().extend_from_slice(filled);
                Ok(())
            };
            fill_pipelined(&pool, &source, piece, memory, copy).expect("the fill succeeds");
            assert!(*out.borrow() == source, "{length} bytes");
        }
    }

    #[test]
    fn a_failed_copy_or_allocation_ends_the_pipelined_fill() {
        let pool = ThreadPoolBuilder::new().num_threads(2).build().expect("threads");
        let source = vec![7; 9 * 64];
        for (fails_in_memory, reached) in [(false, 4), (true, 3)] {
            let copied = Cell::new(0);
            let memory = |part| {
                if fails_in_memory && part == 4 {
                    Err("no memory")
                } else {
                    Ok(Vec::leak(vec![MaybeUninit::uninit(); 64]))
                }
            };
            let copy = |part, _| {
                if !fails_in_memory && part == 4 {
                    Err("no copy")
                } else {
                    copied.set(part + 1);
                    Ok(())
                }
            };
            let error = fill_pipelined(&pool, &source, 64, memory, copy).expect_err("the copy fails");
            assert_eq!((error, copied.get()), (if fails_in_memory { "no memory" } else { "no copy" }, reached));
        }
    }
}
