//! The way between host and device: page-locked pieces that copies go through, so that the device fetches what it needs
//! while the host writes the next.

use std::sync::Arc;

use bursar_budgets::{Address, Bytes, CudaDevice, DeviceError, Pinned};
use cudarc::driver::sys;

use super::stream::{Event, Stream};

/// One piece. A copy of any size goes through several.
const PIECE: Bytes = Bytes::mib(8);
const PIECES: usize = 4;

/// Where uploads start inside a piece: copies from an odd place are slow.
const ALIGNMENT: usize = 256;

/// A ring of page-locked pieces.
pub(super) struct Stage {
    pieces: Vec<Piece>,
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
        Ok(Stage { pieces: (0..PIECES).map(piece).collect::<Result<_, DeviceError>>()?, current: 0, used: 0 })
    }

    /// Copies `source` to `to`, in the order of the stream. The source may change once this returns.
    pub(super) fn upload(&mut self, stream: &Stream, mut source: &[u8], mut to: Address) -> Result<(), DeviceError> {
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
        self.used = 0;
        self.pieces[self.current].read.wait()
    }
}
