//! Cuts a piece of memory that is in use: what remains is copied to smaller pieces, which replace it.

use std::sync::PoisonError;

use cudarc::driver::sys;

use super::{
    CudaDevice, Piece,
    driver::{self, check},
    pieces,
};
use crate::{Address, Bytes, DeviceError};

/// Pages kept aside and counted as overhead. What remains of a piece must be copied before the piece can go, even on a
/// full card. Both ends of a hole may lie in one piece, so this is the size of a whole one.
pub(super) const SPARE: Bytes = pieces::LARGE;

impl CudaDevice {
    /// Refills the spare pages, as far as the device has memory.
    pub(super) fn replenish(&self) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        while self.page * (spare.len() as u64) < SPARE {
            match self.create(self.page) {
                Ok(page) => spare.push(page),
                // The memory is taken. The next carve tries again.
                Err(_) => return,
            }
        }
    }

    /// A new page or, if the device has none left, a spare one.
    fn page_for_a_copy(&self, bytes: Bytes) -> Result<Piece, DeviceError> {
        assert_eq!(bytes, self.page, "a copy is made of pages");
        self.create(bytes).or_else(|error| {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            if error.is_refused() { spare.pop().ok_or(error) } else { Err(error) }
        })
    }

    /// Replaces a piece by pages that hold the first `kept` bytes of its content. Until the piece is gone, this takes
    /// that much more memory.
    pub(super) fn carve(
        &self,
        start: Address,
        (offset, piece): (Bytes, Piece),
        kept: Bytes,
    ) -> Result<Vec<(Bytes, Piece)>, DeviceError> {
        let reserve = |out| unsafe { sys::cuMemAddressReserve(out, kept.as_usize(), 0, 0, 0) };
        let aside = Address(driver::value("cuMemAddressReserve", reserve)?);
        let there = start.offset(offset);
        let carved = self.copy_aside(aside, there, kept).and_then(|copies| {
            match self.unmap(there, piece) {
                // From here on, a failure leaves a hole in memory that is in use.
                Ok(()) => self.move_home(aside, there, &copies, kept).map(|()| copies),
                Err(error) => {
                    self.unmap_all(aside, &copies);
                    Err(error)
                }
            }
        });
        // SAFETY: nothing is mapped there any more.
        drop(check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(aside.0, kept.as_usize()) }));
        self.replenish();
        Ok(carved?.into_iter().map(|(place, copy)| (offset + place, copy)).collect())
    }

    /// Copies the content of a stretch to pages elsewhere.
    fn copy_aside(&self, aside: Address, from: Address, bytes: Bytes) -> Result<Vec<(Bytes, Piece)>, DeviceError> {
        let pages: Vec<_> = (0..bytes.pages(self.page).0).map(|page| (self.page * page, self.page)).collect();
        let copies = self.fill(aside, &pages, |bytes| self.page_for_a_copy(bytes))?;
        // SAFETY: both stretches are mapped, accessible and equally long; the stream is ours.
        let copied = unsafe {
            check("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(aside.0, from.0, bytes.as_usize(), self.stream.raw()))
                .and_then(|()| check("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream.raw())))
        };
        copied.inspect_err(|_| self.unmap_all(aside, &copies))?;
        Ok(copies)
    }

    /// Moves the mappings of pages from where they were filled to their final addresses.
    fn move_home(
        &self,
        aside: Address,
        there: Address,
        copies: &[(Bytes, Piece)],
        bytes: Bytes,
    ) -> Result<(), DeviceError> {
        let moved = copies.iter().try_for_each(|(place, copy)| {
            let (from, to, bytes) = (aside.offset(*place), there.offset(*place), copy.bytes.as_usize());
            // SAFETY: we keep the handle while its mapping moves, and nothing is mapped at the new address.
            unsafe {
                check("cuMemUnmap", sys::cuMemUnmap(from.0, bytes))?;
                check("cuMemMap", sys::cuMemMap(to.0, bytes, 0, copy.handle, 0))
            }
        });
        let opened = moved.and_then(|()| driver::open(self.device, there, bytes));
        opened.map_err(|error| DeviceError::Lost { reason: format!("memory in use could not be remapped: {error}") })
    }
}
