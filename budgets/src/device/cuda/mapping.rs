//! Pieces of memory at reserved addresses: creating, mapping, opening
//! access, clearing and unmapping.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{
    driver::{self, check},
    gpu::{CudaDevice, Piece},
};
use crate::{Address, Bytes, DeviceError};

impl CudaDevice {
    /// Allocates a piece without mapping it.
    pub(super) fn create(&self, bytes: Bytes) -> Result<Piece, DeviceError> {
        let properties = driver::properties(self.device);
        let mut handle = 0;
        self.count_allocation();
        // SAFETY: the output pointer is valid.
        check("cuMemCreate", unsafe { sys::cuMemCreate(&mut handle, bytes.as_usize(), &properties, 0) })?;
        Ok(Piece { handle, bytes })
    }

    /// Frees a piece that is no longer mapped.
    pub(super) fn release(&self, piece: Piece) -> Result<(), DeviceError> {
        // SAFETY: each handle is released only once.
        check("cuMemRelease", unsafe { sys::cuMemRelease(piece.handle) })
    }

    /// Maps a piece at an address. The memory is not accessible yet.
    pub(super) fn map(&self, address: Address, piece: Piece) -> Result<(), DeviceError> {
        // SAFETY: the range belongs to a reservation of this device, and nothing is mapped there.
        check("cuMemMap", unsafe { sys::cuMemMap(address.0, piece.bytes.as_usize(), 0, piece.handle, 0) })
    }

    /// Unmaps a piece. The caller must remove the piece from its reservation before anything else
    /// can fail, because a piece cannot be unmapped twice, and must then [release](Self::release)
    /// the piece.
    pub(super) fn unmap(&self, address: Address, piece: Piece) -> Result<(), DeviceError> {
        // SAFETY: the piece is mapped there, and the caller guarantees that the device is
        // past its last use.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(address.0, piece.bytes.as_usize()) })
    }

    /// Maps consecutive pieces, each allocated with `create`, and makes them accessible. `cut`
    /// lists each piece's offset from `start` and its size. If any step fails, nothing stays
    /// mapped.
    pub(super) fn fill(
        &self,
        start: Address,
        cut: &[(Bytes, Bytes)],
        create: impl Fn(Bytes) -> Result<Piece, DeviceError>,
    ) -> Result<Vec<(Bytes, Piece)>, DeviceError> {
        let (Some((from, _)), Some((last, bytes))) = (cut.first(), cut.last()) else { return Ok(Vec::new()) };
        let (from, to) = (*from, *last + *bytes);
        let mut mapped: Vec<(Bytes, Piece)> = Vec::new();
        let mut fill = || {
            for (offset, bytes) in cut {
                let piece = create(*bytes)?;
                if let Err(error) = self.map(start.offset(*offset), piece) {
                    drop(self.release(piece));
                    return Err(error);
                }
                mapped.push((*offset, piece));
            }
            driver::open(self.device, start.offset(from), to - from)
        };
        match fill() {
            Ok(()) => Ok(mapped),
            Err(error) => {
                self.unmap_all(start, &mapped);
                Err(asked_for(to - from, error))
            }
        }
    }

    /// Whether this GPU can read and write memory of `other` directly.
    ///
    /// # Errors
    /// The driver's error, if the query fails.
    pub fn reaches(&self, other: &CudaDevice) -> Result<bool, DeviceError> {
        Ok(other.device == self.device || driver::reaches(self.device, other.device)?)
    }

    /// Gives each GPU in `others` that can reach this GPU access to the memory that is backed at
    /// these addresses.
    ///
    /// # Errors
    /// The driver's error, if the driver refuses.
    pub fn open_to<'d>(
        &self,
        others: impl Iterator<Item = &'d Arc<CudaDevice>>,
        address: Address,
        bytes: Bytes,
    ) -> Result<(), DeviceError> {
        for other in others.filter(|other| other.device != self.device) {
            if other.reaches(self)? {
                self.record_loss(driver::open(other.device, address, bytes))?;
            }
        }
        Ok(())
    }

    /// Writes zeros and waits until they are written.
    pub(super) fn clear(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        // SAFETY: the range is mapped and accessible, and nothing uses it yet.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address.0, 0, bytes.as_usize(), self.stream.raw()) })?;
        self.stream.wait()
    }

    /// Unmaps and frees the pieces that were mapped before an error. The caller reports that error,
    /// so errors here are ignored.
    pub(super) fn unmap_all(&self, start: Address, pieces: &[(Bytes, Piece)]) {
        for (offset, piece) in pieces {
            drop(self.unmap(start.offset(*offset), *piece).and_then(|()| self.release(*piece)));
        }
    }
}

/// Adds the requested size to a refusal.
fn asked_for(bytes: Bytes, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Refused { free, hint, .. } => DeviceError::Refused { asked: bytes, free, hint },
        error => error,
    }
}
