//! Splitting a piece of memory that is in use: the bytes to keep are copied to smaller pieces,
//! which replace the original piece.

use std::sync::PoisonError;

use cudarc::driver::sys;

use super::{
    driver::{self, check},
    gpu::{CudaDevice, Piece, Reservation},
    pieces,
};
use crate::{Address, Bytes, DeviceError};

/// The total size of the spare pages, which are counted as overhead. The bytes of a piece that stay
/// backed must be copied before the piece can be freed, and the copy needs pages even on a full
/// GPU. If the unbacked range lies inside one piece, the whole piece is copied, so the spare pages
/// add up to a whole piece.
pub(super) const SPARE: Bytes = pieces::LARGE;

impl CudaDevice {
    /// Allocates spare pages until their size is [`SPARE`] or the device has no more free memory.
    pub(super) fn replenish(&self) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        while self.page * (spare.len() as u64) < SPARE {
            match self.create(self.page) {
                Ok(page) => spare.push(page),
                // The device has no free memory now. The next carve tries again.
                Err(_) => return,
            }
        }
    }

    /// Allocates a page. If the device has no free memory, returns a spare page.
    fn page_for_a_copy(&self, bytes: Bytes) -> Result<Piece, DeviceError> {
        assert_eq!(bytes, self.page, "a copy consists of whole pages");
        self.create(bytes).or_else(|error| {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            if error.is_refused() { spare.pop().ok_or(error) } else { Err(error) }
        })
    }

    /// Replaces a piece by pages that contain its first `kept` bytes. Until the piece is freed,
    /// this needs `kept` bytes of additional memory. After an error, the reservation has the pieces
    /// that are still mapped.
    pub(super) fn carve(
        &self,
        start: Address,
        reservation: &mut Reservation,
        (offset, piece): (Bytes, Piece),
        kept: Bytes,
    ) -> Result<(), DeviceError> {
        let reserve = |out| unsafe { sys::cuMemAddressReserve(out, kept.as_usize(), 0, 0, 0) };
        let aside = Address(driver::value("cuMemAddressReserve", reserve)?);
        let there = start.offset(offset);
        let carved = self.copy_aside(aside, there, kept).and_then(|copies| {
            self.unmap(there, piece).inspect_err(|_| self.unmap_all(aside, &copies))?;
            // From here on, a failure leaves part of the memory that is in use unmapped.
            reservation.pieces.remove(&offset);
            let released = self.release(piece);
            self.move_home(aside, start, offset, &copies, reservation)?;
            released
        });
        // SAFETY: these temporary addresses were reserved above, and no code uses them any more.
        drop(check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(aside.0, kept.as_usize()) }));
        self.replenish();
        carved
    }

    /// Copies the content of a range to new pages at temporary addresses.
    fn copy_aside(&self, aside: Address, from: Address, bytes: Bytes) -> Result<Vec<(Bytes, Piece)>, DeviceError> {
        let pages: Vec<_> = (0..bytes.pages(self.page).0).map(|page| (self.page * page, self.page)).collect();
        let copies = self.fill(aside, &pages, |bytes| self.page_for_a_copy(bytes))?;
        // SAFETY: both ranges are mapped, accessible and equally long, and the stream
        // belongs to this device.
        let copied = unsafe {
            check("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(aside.0, from.0, bytes.as_usize(), self.stream.raw()))
                .and_then(|()| check("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream.raw())))
        };
        copied.inspect_err(|_| self.unmap_all(aside, &copies))?;
        Ok(copies)
    }

    /// Moves the mappings of pages from their temporary addresses to `offset` in a reservation, and
    /// adds each page to the reservation. If a page cannot be moved, the pages after it are freed.
    fn move_home(
        &self,
        aside: Address,
        start: Address,
        offset: Bytes,
        copies: &[(Bytes, Piece)],
        reservation: &mut Reservation,
    ) -> Result<(), DeviceError> {
        let mut left = copies.iter();
        let moved = left.try_for_each(|(place, copy)| {
            self.unmap(aside.offset(*place), *copy)?;
            let restored = offset + *place;
            self.map(start.offset(restored), *copy).inspect_err(|_| drop(self.release(*copy)))?;
            reservation.pieces.insert(restored, *copy);
            Ok(())
        });
        self.unmap_all(aside, left.as_slice());
        let bytes = copies.iter().map(|(_, copy)| copy.bytes).sum();
        let opened = moved.and_then(|()| driver::open(self.device, start.offset(offset), bytes));
        opened.map_err(|error: DeviceError| DeviceError::Lost {
            reason: format!("memory in use could not be remapped: {error}"),
        })
    }
}
