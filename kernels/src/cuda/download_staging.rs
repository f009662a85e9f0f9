//! Downloads in flight to the host, each followed by an event in the stream. The host can wait for
//! one download without waiting for later launches.

use std::sync::{Arc, Mutex, PoisonError};

use bursar_budgets::{Address, Bytes, CudaDevice, DeviceError, Pinned};
use cudarc::driver::sys;

use super::{
    link::CudaLink,
    rank_link::Witness,
    stream::{Event, Stream},
};
use crate::{KernelError, Tensor, calls::Arrival};

/// Free staging buffers: page-locked memory, each buffer with an event. A lane has two steps in
/// flight, so there are never more than a few buffers, two of them long. After the stress, which
/// runs before the model is ready, the long buffers are as long as the envelope can require,
/// because the stress includes a worst case that downloads every token's scores for two steps at
/// once.
#[derive(Clone)]
pub(super) struct StagingPool(Arc<Mutex<Vec<StagingBuffer>>>);

struct StagingBuffer {
    memory: Pinned,
    come: Event,
}

/// The minimum length of a buffer. Most downloads are a few tokens. The reports of 1,524 sequences
/// with all of their likeliest tokens also fit. Longer buffers are a multiple of this length: the
/// logits of 256 sequences with a large vocabulary are 149 MiB, and rounding up to a power of two
/// would lock 107 MiB that are never used.
const SHORTEST: Bytes = Bytes::kib(256);

/// The buffer that a copy writes to.
#[derive(Debug, PartialEq, Eq)]
enum Find {
    /// The free buffer with this index.
    Free(usize),
    /// A new buffer of this many bytes. The free buffer with this index, if any, is too
    /// short and is dropped.
    New(Bytes, Option<usize>),
}

/// Finds the shortest free buffer of at least `bytes` bytes, or asks for a new buffer. `free` has
/// the lengths of the free buffers. A new buffer replaces the longest of the long buffers that were
/// too short, so there are never more long buffers than concurrent copies.
fn find(free: impl Iterator<Item = usize> + Clone, bytes: usize) -> Find {
    let fits = free.clone().enumerate().filter(|(_, length)| *length >= bytes);
    if let Some((index, _)) = fits.min_by_key(|(_, length)| *length) {
        return Find::Free(index);
    }
    let long = free.enumerate().filter(|(_, length)| *length > SHORTEST.as_usize());
    let outgrown = long.max_by_key(|(_, length)| *length).map(|(index, _)| index);
    Find::New(Bytes(bytes as u64).round_up(SHORTEST).max(SHORTEST), outgrown)
}

/// A copy in flight.
pub(super) struct Download {
    buffer: Option<StagingBuffer>,
    bytes: usize,
    /// `Some` if the bytes depend on collectives through a link. If the witness is a note, the note
    /// is copied into the buffer after the bytes.
    witness: Option<Witness>,
    free: StagingPool,
}

impl Download {
    pub(super) fn begin(
        free: &StagingPool,
        device: &Arc<CudaDevice>,
        stream: &Stream,
        source: &Tensor<'_>,
        witness: Option<Witness>,
    ) -> Result<Self, DeviceError> {
        let bytes = source.bytes().as_usize();
        let buffer = free.take(bytes + witness.as_ref().map_or(0, |_| CudaLink::NOTE), device)?;
        let copy = |at: usize, from: Address, bytes: usize| {
            // SAFETY: the buffer is long enough, and nothing else uses it. The creators of the
            // tensor and of the link guarantee that their memory is valid.
            let copied = unsafe {
                sys::cuMemcpyDtoHAsync_v2(buffer.memory.address().add(at).cast(), from.0, bytes, stream.raw())
            };
            CudaDevice::check("cuMemcpyDtoHAsync", copied)
        };
        if bytes > 0 {
            copy(0, source.address(), bytes)?;
        }
        if let Some(Witness::Note(failed_at)) = witness {
            copy(bytes, failed_at, CudaLink::NOTE)?;
        }
        buffer.come.record(stream)?;
        Ok(Download { buffer: Some(buffer), bytes, witness, free: free.clone() })
    }
}

impl StagingPool {
    /// Creates a pool with two short buffers, one for each step in flight, so that small copies
    /// leave the long buffers free.
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let buffer = |_| Ok(StagingBuffer { memory: device.pinned(SHORTEST)?, come: Event::new(device)? });
        Ok(StagingPool(Arc::new(Mutex::new((0..2).map(buffer).collect::<Result<_, DeviceError>>()?))))
    }

    /// Takes the shortest free buffer that is long enough, or creates a new buffer.
    fn take(&self, bytes: usize, device: &Arc<CudaDevice>) -> Result<StagingBuffer, DeviceError> {
        let (length, outgrown) = {
            let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match find(free.iter().map(|buffer| buffer.memory.len()), bytes) {
                Find::Free(index) => return Ok(free.swap_remove(index)),
                Find::New(length, outgrown) => (length, outgrown.map(|index| free.swap_remove(index))),
            }
        };
        if let Some(buffer) = outgrown {
            // The last copy into the dropped buffer may still be running.
            buffer.come.wait()?;
        }
        Ok(StagingBuffer { memory: device.pinned(length)?, come: Event::new(device)? })
    }
}

impl Arrival for Download {
    fn is_ready(&self) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| buffer.come.is_past())
    }

    fn wait(self: Box<Self>, out: &mut [u8]) -> Result<(), KernelError> {
        let buffer = self.buffer.as_ref().expect("the buffer exists until the value is dropped");
        assert_eq!(out.len(), self.bytes, "the output has the size of the download");
        buffer.come.wait()?;
        let read = |at: usize, out: &mut [u8]| {
            // SAFETY: the wait above returned after the copy had ended, and the buffer is long
            // enough for the bytes and the note.
            unsafe { std::ptr::copy_nonoverlapping(buffer.memory.address().add(at), out.as_mut_ptr(), out.len()) };
        };
        if let Some(Witness::Note(_)) = self.witness {
            let mut failed = [0; CudaLink::NOTE];
            read(self.bytes, &mut failed);
            CudaLink::check(failed)?;
        }
        self.witness.as_ref().map_or(Ok(()), Witness::check)?;
        read(0, out);
        Ok(())
    }
}

impl Drop for Download {
    /// Returns the buffer to the pool. The buffer may be reused at once, because the next copy is
    /// later in the same stream.
    fn drop(&mut self) {
        let mut free = self.free.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.extend(self.buffer.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: usize = 152_064 * 4;

    /// Takes buffers for the copies one after another, starting with the two short buffers of a new
    /// pool. Returns the lengths of all buffers afterward.
    fn after(copies: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut places = vec![SHORTEST.as_usize(); 2];
        for bytes in copies {
            match find(places.iter().copied(), bytes) {
                Find::Free(index) => assert!(places[index] >= bytes),
                Find::New(length, outgrown) => {
                    outgrown.map(|index| places.swap_remove(index));
                    places.push(length.as_usize());
                }
            }
        }
        places
    }

    #[test]
    fn pinned_staging_memory_stays_near_the_longest_copy() {
        for places in [after([256 * ROW]), after((1..=256).map(|rows| rows * ROW)), after([16, 256 * ROW, 77 * ROW, 4])]
        {
            let in_all: usize = places.iter().sum();
            assert!(places.len() == 3 && in_all < 256 * ROW + 3 * SHORTEST.as_usize(), "{places:?}");
        }
    }

    #[test]
    fn a_copy_takes_the_shortest_free_buffer_that_fits() {
        let short = SHORTEST.as_usize();
        assert_eq!(find([short, 9 * short, short].into_iter(), 4), Find::Free(0));
        assert_eq!(find([short, 9 * short, 7 * short].into_iter(), 6 * short), Find::Free(2));
        assert_eq!(find([9 * short].into_iter(), 4), Find::Free(0));
        assert_eq!(find([].into_iter(), 0), Find::New(SHORTEST, None));
        assert_eq!(
            find([short, short].into_iter(), short + 1),
            Find::New(SHORTEST * 2, None),
            "short buffers are kept"
        );
    }
}
