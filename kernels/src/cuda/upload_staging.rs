//! Staging between host and device: copies go through page-locked buffers ("pieces"), so that the
//! device fetches one piece while the host writes the next.

use std::{mem::MaybeUninit, slice, sync::Arc, thread};

use bursar_budgets::{Address, Bytes, CudaDevice, DeviceError, Pinned};
use cudarc::driver::sys;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{
    pipelined_fill::{AHEAD, FILLED_AT_ONCE, fill_pipelined},
    stream::{Event, Stream},
};

/// Bytes per piece. A larger copy goes through several pieces.
const PIECE: Bytes = Bytes::mib(8);

/// Number of pieces in the ring.
const PIECES: usize = 4;
const _: () = assert!(PIECES > AHEAD, "some pieces are copied while others are filled");

/// Alignment of uploads inside a piece, in bytes. Copies from unaligned addresses are slow.
const ALIGNMENT: usize = 256;

/// Number of threads that fill pieces together. One thread copies 9 GB/s out of a mapped file; the
/// bus transfers six times as much.
const FILLERS: usize = 8;

/// A ring of page-locked pieces.
pub(super) struct Stage {
    pieces: Vec<Piece>,
    /// Created by the first copy that is larger than all pieces together. Such copies occur in
    /// backends that load weights, but not in lanes.
    fillers: Option<ThreadPool>,
    current: usize,
    /// Bytes of the current piece that are written.
    used: usize,
}

struct Piece {
    memory: Pinned,
    /// Event recorded after the last copy out of the piece.
    read: Event,
}

impl Stage {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        let piece = |_| Ok(Piece { memory: device.pinned(PIECE)?, read: Event::new(device)? });
        let pieces = (0..PIECES).map(piece).collect::<Result<_, DeviceError>>()?;
        Ok(Stage { pieces, fillers: None, current: 0, used: 0 })
    }

    /// Copies `source` to `to`, in stream order. The caller may change the source once this
    /// function has returned.
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
            // SAFETY: the range is inside the piece, and the device has finished its last copy
            // out of the piece.
            unsafe {
                let place = self.pieces[self.current].memory.address().add(self.used);
                std::ptr::copy_nonoverlapping(now.as_ptr(), place, length);
                let copied = sys::cuMemcpyHtoDAsync_v2(to.0, place.cast(), length, stream.raw());
                CudaDevice::check("cuMemcpyHtoDAsync", copied)?;
            }
            self.used = (self.used + length).next_multiple_of(ALIGNMENT).min(PIECE.as_usize());
            (source, to) = (later, to.offset(Bytes(length as u64)));
        }
        Ok(())
    }

    /// Does the same as `upload` with all filler threads, starting with the next piece.
    fn upload_together(&mut self, stream: &Stream, source: &[u8], to: Address) -> Result<(), DeviceError> {
        self.turn(stream)?;
        let (pieces, first) = (&self.pieces, self.current);
        let piece = |part: usize| &pieces[(first + part) % PIECES];
        // Mark the piece as full: if this function returns early, no piece is written again before
        // the device has read it.
        self.used = PIECE.as_usize();
        let memory = |part: usize| {
            piece(part).read.wait()?;
            let start = piece(part).memory.address().cast::<MaybeUninit<u8>>();
            // SAFETY: the piece has this length, and the device has finished its last
            // copy out of it.
            Ok(unsafe { slice::from_raw_parts_mut(start, PIECE.as_usize()) })
        };
        let copy = |part: usize, length: usize| {
            let place = piece(part).memory.address();
            // SAFETY: the part is inside the destination range, which the caller guarantees to be
            // valid, and the piece is filled.
            let copied = unsafe {
                let to = to.offset(PIECE * part as u64);
                sys::cuMemcpyHtoDAsync_v2(to.0, place.cast(), length, stream.raw())
            };
            CudaDevice::check("cuMemcpyHtoDAsync", copied)?;
            piece(part).read.record(stream)
        };
        let fillers = self.fillers.as_ref().expect("a backend that loads weights has fill threads");
        fill_pipelined(fillers, source, PIECE.as_usize(), memory, copy)?;
        self.current = (first + source.len().div_ceil(PIECE.as_usize()) - 1) % PIECES;
        Ok(())
    }

    /// Copies from `from` to `out`, after all earlier work of the stream.
    pub(super) fn download(&mut self, stream: &Stream, mut from: Address, out: &mut [u8]) -> Result<(), DeviceError> {
        for out in out.chunks_mut(PIECE.as_usize()) {
            self.turn(stream)?;
            let place = self.pieces[self.current].memory.address();
            // SAFETY: the piece is at least as long as `out`, and nothing else uses the piece.
            let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(place.cast(), from.0, out.len(), stream.raw()) };
            CudaDevice::check("cuMemcpyDtoHAsync", copied)?;
            stream.wait()?;
            // SAFETY: the copy into the piece is done, and the piece is at least as long as `out`.
            unsafe { std::ptr::copy_nonoverlapping(place, out.as_mut_ptr(), out.len()) };
            from = from.offset(Bytes(out.len() as u64));
        }
        Ok(())
    }

    /// Makes the next piece current, and waits until the device has finished the last
    /// copy out of it.
    fn turn(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.pieces[self.current].read.record(stream)?;
        self.current = (self.current + 1) % PIECES;
        // The piece counts as full until the wait below has succeeded.
        self.used = PIECE.as_usize();
        self.pieces[self.current].read.wait()?;
        self.used = 0;
        Ok(())
    }
}

/// Starts the filler threads. Returns `None` if the host cannot start threads, in which
/// case loads are slower.
fn fillers() -> Option<ThreadPool> {
    let count = thread::available_parallelism().map_or(1, usize::from).min(FILLERS);
    let named = ThreadPoolBuilder::new().num_threads(count).thread_name(|index| format!("bursar-fill-{index}"));
    named.build().ok()
}
