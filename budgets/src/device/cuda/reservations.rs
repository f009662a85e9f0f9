//! Reserved addresses, and the memory that is mapped to them.

use std::collections::BTreeMap;

use cudarc::driver::sys;

use super::{
    driver::check,
    gpu::{CudaDevice, Piece, Reservation, State},
    pieces,
};
use crate::{Address, Bytes, DeviceError};

impl State {
    /// Finds the reservation that contains a range of whole pages. Returns the reservation's start
    /// address, the reservation, and the range's start and end offsets in it.
    fn find(
        &mut self,
        page: Bytes,
        (address, bytes): (Address, Bytes),
        verb: &'static str,
    ) -> Result<(Address, &mut Reservation, Bytes, Bytes), DeviceError> {
        let bad = |reason| DeviceError::BadRange { address, bytes, verb, reason };
        let (start, reservation) =
            self.reservations.range_mut(..=address).next_back().ok_or(bad("the address is not reserved"))?;
        let from = address.distance_from(*start);
        let to = from.checked_add(bytes).ok_or(bad("the range exceeds the address space"))?;
        if to > reservation.bytes {
            return Err(bad("the range does not lie within one reservation"));
        }
        if !from.is_multiple_of(page) || !bytes.is_multiple_of(page) || bytes.is_zero() {
            return Err(bad("the range is not made of whole pages"));
        }
        Ok((*start, reservation, from, to))
    }
}

impl Reservation {
    /// The number of bytes that are backed between two offsets.
    fn backed(&self, from: Bytes, to: Bytes) -> Bytes {
        let reach = |(offset, piece): (&Bytes, &Piece)| {
            let (start, end) = ((*offset).max(from), (*offset + piece.bytes).min(to));
            end.saturating_sub(start)
        };
        self.pieces.range(..to).map(reach).sum()
    }

    /// The number of bytes of all pieces.
    fn mapped(&self) -> Bytes {
        self.pieces.values().map(|piece| piece.bytes).sum()
    }
}

impl CudaDevice {
    pub(super) fn reserve_addresses(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        self.enter()?;
        let bytes = bytes.round_up(self.page);
        let mut address = 0;
        // SAFETY: the output pointer is valid, and the call only reserves addresses.
        let reserved =
            unsafe { sys::cuMemAddressReserve(&mut address, bytes.as_usize(), pieces::LARGE.as_usize(), 0, 0) };
        match check("cuMemAddressReserve", reserved) {
            Err(DeviceError::Driver { message, .. }) => {
                return Err(DeviceError::NoAddresses { bytes, reason: message });
            }
            Err(DeviceError::Refused { .. }) => {
                let reason = "the driver has no memory for its page tables".to_owned();
                return Err(DeviceError::NoAddresses { bytes, reason });
            }
            outcome => outcome?,
        }
        let reservation = Reservation { bytes, pieces: BTreeMap::new() };
        self.lock().reservations.insert(Address(address), reservation);
        Ok(Address(address))
    }

    /// Releases addresses and their memory.
    pub(super) fn release_addresses(&self, address: Address) -> Result<(), DeviceError> {
        self.enter_if_there()?;
        let mut state = self.lock();
        let State { reservations, counts } = &mut *state;
        let reservation = reservations.get_mut(&address).ok_or(DeviceError::BadRange {
            address,
            bytes: Bytes::ZERO,
            verb: "released",
            reason: "no reservation starts at this address",
        })?;
        // If a driver call fails, the reservation keeps the pieces that are still mapped, so that
        // the next call can release them.
        while let Some((offset, piece)) = reservation.pieces.first_key_value().map(|(at, piece)| (*at, *piece)) {
            self.unmap(address.offset(offset), piece)?;
            reservation.pieces.remove(&offset);
            counts.backed -= piece.bytes;
            self.release(piece)?;
        }
        // SAFETY: all pieces of this reservation were unmapped above.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(address.0, reservation.bytes.as_usize()) })?;
        reservations.remove(&address);
        Ok(())
    }

    pub(super) fn back_range(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.enter()?;
        let mut state = self.lock();
        let (start, reservation, from, to) = state.find(self.page, (address, bytes), "backed")?;
        if !reservation.backed(from, to).is_zero() {
            let reason = "part of the range is already backed";
            return Err(DeviceError::BadRange { address, bytes, verb: "backed", reason });
        }
        let filled = self.fill(start, &pieces::cut(from, to, self.page), |bytes| self.create(bytes)).and_then(
            |mapped| match self.clear(address, bytes) {
                Ok(()) => Ok(mapped),
                Err(error) => {
                    self.unmap_all(start, &mapped);
                    Err(error)
                }
            },
        );
        let filled = filled.map(|mapped| reservation.pieces.extend(mapped));
        state.counts.backs += 1;
        filled?;
        state.counts.backed += bytes;
        state.counts.high_water = state.counts.high_water.max(state.counts.backed);
        Ok(())
    }

    pub(super) fn unback_range(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.enter_if_there()?;
        let mut state = self.lock();
        let (start, reservation, from, to) = state.find(self.page, (address, bytes), "unbacked")?;
        if reservation.backed(from, to) != bytes {
            let reason = "part of the range is not backed";
            return Err(DeviceError::BadRange { address, bytes, verb: "unbacked", reason });
        }
        let before = reservation.mapped();
        let outcome = self.unmap_range(start, reservation, from, to);
        let freed = before - reservation.mapped();
        state.counts.unbacks += 1;
        state.counts.backed -= freed;
        outcome
    }

    /// Frees the memory between two offsets. After an error, the reservation still lists the pieces
    /// that are mapped.
    fn unmap_range(
        &self,
        start: Address,
        reservation: &mut Reservation,
        from: Bytes,
        to: Bytes,
    ) -> Result<(), DeviceError> {
        // First carve pieces that extend past an end of the range.
        for end in [from, to] {
            let over = reservation.pieces.range(..end).next_back().map(|(offset, piece)| (*offset, *piece));
            if let Some((offset, piece)) = over.filter(|(offset, piece)| *offset + piece.bytes > end) {
                // If the piece ends inside the range, copy only the part before the range. If the
                // piece ends after the range, copy all of it, because its part after the range
                // stays backed.
                let kept = if offset + piece.bytes <= to { end - offset } else { piece.bytes };
                self.carve(start, reservation, (offset, piece), kept)?;
            }
        }
        let inside: Vec<(Bytes, Piece)> = reservation.pieces.range(from..to).map(|(at, piece)| (*at, *piece)).collect();
        inside.into_iter().try_for_each(|(offset, piece)| {
            self.unmap(start.offset(offset), piece)?;
            reservation.pieces.remove(&offset);
            self.release(piece)
        })
    }
}
