//! The way between host and device: page-locked pieces that copies go through, so that the device fetches what it needs
//! while the host writes the next.

use std::{mem::MaybeUninit, slice, sync::Arc, thread};

use bursar_budgets::{Address, Bytes, CudaDevice, DeviceError, Pinned};
use cudarc::driver::sys;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{
    pour::{AHEAD, FILLED_AT_ONCE, pour},
    stream::{Event, Stream},
};

/// One piece. A copy of any size goes through several.
const PIECE: Bytes = Bytes::mib(8);
const PIECES: usize = 4;
const _: () = assert!(PIECES > AHEAD, "some cross the bus while others are filled");

/// Where uploads start inside a piece: copies from an odd place are slow.
const ALIGNMENT: usize = 256;

/// Threads that fill pieces together. One of them copies 9 GB/s out of a mapped file; the bus takes six times that.
const FILLERS: usize = 8;

/// A ring of page-locked pieces.
pub(super) struct Stage {
    pieces: Vec<Piece>,
    /// Made by the first copy that is larger than all pieces: the backends that load weights have them, lanes do not.
    fillers: Option<ThreadPool>,
    current: usize,
    /// How much of the current piece is written.
    used: usize,
}

struct Piece {
    memory: Pinned,
    /// Behind the last copy out of it.
    read: Event,
}

impl Stage {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let piece = |_| Ok(Piece { memory: device.pinned(PIECE)?, read: Event::new(device)? });
        let pieces = (0..PIECES).map(piece).collect::<Result<_, DeviceError>>()?;
        Ok(Stage { pieces, fillers: None, current: 0, used: 0 })
    }

    /// Copies `source` to `to`, in the order of the stream. The source may change once this returns.
    pub(super) fn upload(&mut self, stream: &Stream, mut source: &[u8], mut to: Address) -> Result<(), DeviceError> {
        if source.len() > PIECES * PIECE.as_usize() && self.fillers.is_none() {
            self.fillers = fillers();
        }
        if source.len() > FILLED_AT_ONCE && self.fillers.is_some() {
            return self.upload_together(stream, source, to);
        }
        while !source.is_empty() {
            if self.used == PIECE.as_usize() {
                self.turn(stream)?;
            }
            let length = source.len().min(PIECE.as_usize() - self.used);
            let (now, later) = source.split_at(length);
            // SAFETY: the stretch is inside the piece, and the device is past its last copy out of it.
            unsafe {
                let place = self.pieces[self.current].memory.address().add(self.used);
                std::ptr::copy_nonoverlapping(now.as_ptr(), place, length);
                let copied = sys::cuMemcpyHtoDAsync_v2(to.0, place.cast(), length, stream.raw());
                CudaDevice::said("cuMemcpyHtoDAsync", copied)?;
            }
            self.used = (self.used + length).next_multiple_of(ALIGNMENT).min(PIECE.as_usize());
            (source, to) = (later, to.offset(Bytes(length as u64)));
        }
        Ok(())
    }

    /// The same by all fillers, piece after piece from the next one on.
    fn upload_together(&mut self, stream: &Stream, source: &[u8], to: Address) -> Result<(), DeviceError> {
        self.turn(stream)?;
        let (pieces, first) = (&self.pieces, self.current);
        let piece = |part: usize| &pieces[(first + part) % PIECES];
        // Whatever ends this early: nobody writes to a piece again before the device is past it.
        self.used = PIECE.as_usize();
        let memory = |part: usize| {
            piece(part).read.wait()?;
            let start = piece(part).memory.address().cast::<MaybeUninit<u8>>();
            // SAFETY: the piece is as long, and the device is past its last copy out of it.
            Ok(unsafe { slice::from_raw_parts_mut(start, PIECE.as_usize()) })
        };
        let copy = |part: usize, length: usize| {
            let place = piece(part).memory.address();
            // SAFETY: the part is inside of what the caller vouches for, and the piece is filled.
            let copied = unsafe {
                let to = to.offset(PIECE * part as u64);
                sys::cuMemcpyHtoDAsync_v2(to.0, place.cast(), length, stream.raw())
            };
            CudaDevice::said("cuMemcpyHtoDAsync", copied)?;
            piece(part).read.record(stream)
        };
        let fillers = self.fillers.as_ref().expect("whoever calls this has them");
        pour(fillers, source, PIECE.as_usize(), memory, copy)?;
        self.current = (first + source.len().div_ceil(PIECE.as_usize()) - 1) % PIECES;
        Ok(())
    }

    /// Copies from `from` to `out`, after all that the stream was given.
    pub(super) fn download(&mut self, stream: &Stream, mut from: Address, out: &mut [u8]) -> Result<(), DeviceError> {
        for out in out.chunks_mut(PIECE.as_usize()) {
            self.turn(stream)?;
            let place = self.pieces[self.current].memory.address();
            // SAFETY: the piece is as long, and nothing else uses it.
            let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(place.cast(), from.0, out.len(), stream.raw()) };
            CudaDevice::said("cuMemcpyDtoHAsync", copied)?;
            stream.wait()?;
            // SAFETY: the copy is done.
            unsafe { std::ptr::copy_nonoverlapping(place, out.as_mut_ptr(), out.len()) };
            from = from.offset(Bytes(out.len() as u64));
        }
        Ok(())
    }

    /// Goes on to the next piece, when the device is past what it held.
    fn turn(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.pieces[self.current].read.record(stream)?;
        self.current = (self.current + 1) % PIECES;
        // Full until the device is known to be past it.
        self.used = PIECE.as_usize();
        self.pieces[self.current].read.wait()?;
        self.used = 0;
        Ok(())
    }
}

/// None where the host starts no threads: a load is slower then.
fn fillers() -> Option<ThreadPool> {
    let count = thread::available_parallelism().map_or(1, usize::from).min(FILLERS);
    let named = ThreadPoolBuilder::new().num_threads(count).thread_name(|index| format!("bursar-fill-{index}"));
    named.build().ok()
}
