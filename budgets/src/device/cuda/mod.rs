//! A GPU behind the CUDA driver: virtual addresses reserved, memory mapped behind them piece by piece.

mod context;
mod driver;
mod nvml;
mod pieces;
mod pinned;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys;

use super::{Address, Device, DeviceError, DeviceMemory};
use crate::{Bytes, Fence, Timeline, Timelines};
use context::{Context, Stream};
use driver::check;
pub use pinned::Pinned;

/// What a device was asked to do, for tests and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaCounts {
    /// Calls to `back`, refused ones too.
    pub backs: u64,
    /// Calls to `unback`.
    pub unbacks: u64,
    /// Backed now.
    pub backed: Bytes,
    /// The most that was ever backed at once.
    pub high_water: Bytes,
    /// Page-locked host memory that is held now.
    pub pinned: Bytes,
    /// Calls that took memory from the driver, of the device or page-locked, refused ones too: each piece that was
    /// created, each [`Pinned`], and each [`CudaDevice::with_overhead`]. After READY it stands still.
    pub allocations: u64,
}

/// One NVIDIA GPU through the driver's virtual-memory calls. The driver is found when this is made: a program that
/// never makes one needs none.
///
/// Memory that is backed reads as zero, and was written once: what a virtual GPU promises and does not have shows here
/// and not later.
pub struct CudaDevice {
    name: String,
    device: sys::CUdevice,
    /// Clears what is backed, beside whatever else the device does. It goes before the context that it is of.
    stream: Stream,
    context: Context,
    page: Bytes,
    overhead: AtomicU64,
    allocations: AtomicU64,
    pinned: AtomicU64,
    timelines: Timelines,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    reservations: BTreeMap<Address, Reservation>,
    counts: CudaCounts,
}

struct Reservation {
    bytes: Bytes,
    /// By offset.
    pieces: BTreeMap<Bytes, Piece>,
}

#[derive(Clone, Copy)]
struct Piece {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: Bytes,
}

impl CudaDevice {
    /// The device of this number, as `CUDA_VISIBLE_DEVICES` numbers them.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] without a driver, with one older than CUDA 12.4, or without such a device.
    pub fn open(ordinal: usize) -> Result<CudaDevice, DeviceError> {
        let device = driver::load(ordinal)?;
        let name = device_name(device)?;
        let uuid = driver::value("cuDeviceGetUuid", |out| unsafe { sys::cuDeviceGetUuid_v2(out, device) })?;
        // Before there is a context of ours, all that is used is foreign.
        let before = nvml::free_bytes(&uuid.bytes);
        let context = Context::retain(device)?;
        let stream = Stream::new(&context)?;
        let properties = driver::properties(device);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let page = driver::value("cuMemGetAllocationGranularity", |out| unsafe {
            sys::cuMemGetAllocationGranularity(out, &properties, minimum)
        })? as u64;
        let after = driver::memory()?.free;
        let overhead = before.map_or(Bytes::ZERO, |before| before.saturating_sub(after));
        Ok(CudaDevice {
            name,
            device,
            stream,
            context,
            page: Bytes(page),
            overhead: AtomicU64::new(overhead.0),
            allocations: AtomicU64::default(),
            pinned: AtomicU64::default(),
            timelines: Timelines::default(),
            state: Mutex::default(),
        })
    }

    /// What it was asked to do so far.
    pub fn counts(&self) -> CudaCounts {
        let counts = self.lock().counts;
        CudaCounts {
            pinned: Bytes(self.pinned.load(Ordering::Relaxed)),
            allocations: self.allocations.load(Ordering::Relaxed),
            ..counts
        }
    }

    /// Does what takes memory that no lease can hold (loads modules, makes library handles, instantiates graphs), and
    /// counts as overhead what is free no longer. What another process takes at that moment is counted too.
    ///
    /// # Errors
    /// The driver does not say how much is free.
    pub fn with_overhead<T>(&self, work: impl FnOnce() -> T) -> Result<T, DeviceError> {
        let (free, backed) = (self.memory()?.free, self.counts().backed);
        self.count_allocation();
        let outcome = work();
        let (now_free, now_backed) = (self.memory()?.free, self.counts().backed);
        let taken = (free + backed).saturating_sub(now_free + now_backed);
        self.overhead.fetch_add(taken.0, Ordering::Relaxed);
        Ok(outcome)
    }

    /// Makes the device's context that of the calling thread, for code that calls the driver itself.
    ///
    /// # Errors
    /// The device is lost.
    pub fn enter(&self) -> Result<(), DeviceError> {
        self.context.enter()
    }

    /// A number that the driver knows about the device, such as how many multiprocessors it has.
    ///
    /// # Errors
    /// The driver does not know it.
    pub fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, DeviceError> {
        let get = |out| unsafe { sys::cuDeviceGetAttribute(out, attribute, self.device) };
        driver::value("cuDeviceGetAttribute", get)
    }

    /// What a driver's result means, for code that calls the driver itself: refused, lost, or a bug.
    ///
    /// # Errors
    /// Whatever is not success.
    pub fn check(call: &'static str, result: sys::CUresult) -> Result<(), DeviceError> {
        check(call, result)
    }

    fn count_allocation(&self) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A piece is listed when it is mapped, in one assignment after the driver has done its part.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// One piece, mapped and not yet open.
    fn map(&self, address: Address, bytes: Bytes) -> Result<Piece, DeviceError> {
        let properties = driver::properties(self.device);
        let mut handle = 0;
        self.count_allocation();
        // SAFETY: the handle is there to write to.
        check("cuMemCreate", unsafe { sys::cuMemCreate(&mut handle, bytes.as_usize(), &properties, 0) })?;
        // SAFETY: the stretch is reserved by us, and nothing is mapped there.
        let mapped = check("cuMemMap", unsafe { sys::cuMemMap(address.0, bytes.as_usize(), 0, handle, 0) });
        if mapped.is_err() {
            // SAFETY: nobody has seen the handle.
            drop(check("cuMemRelease", unsafe { sys::cuMemRelease(handle) }));
        }
        mapped.map(|()| Piece { handle, bytes })
    }

    fn unmap(&self, address: Address, piece: Piece) -> Result<(), DeviceError> {
        // SAFETY: the piece is mapped there, and whoever gives it up has said that the device is past its last use.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(address.0, piece.bytes.as_usize()) })?;
        // SAFETY: each handle is released once.
        check("cuMemRelease", unsafe { sys::cuMemRelease(piece.handle) })
    }

    /// Maps and opens memory behind pieces that follow each other. On refusal nothing is mapped.
    fn fill(&self, start: Address, cut: &[(Bytes, Bytes)]) -> Result<Vec<(Bytes, Piece)>, DeviceError> {
        let (Some((from, _)), Some((last, bytes))) = (cut.first(), cut.last()) else { return Ok(Vec::new()) };
        let (from, to) = (*from, *last + *bytes);
        let mut mapped: Vec<(Bytes, Piece)> = Vec::new();
        let mut fill = || {
            for (offset, bytes) in cut {
                mapped.push((*offset, self.map(start.offset(*offset), *bytes)?));
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

    /// Writes zeros and waits for them.
    fn clear(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        // SAFETY: the stretch is mapped and open, and nobody uses it yet.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address.0, 0, bytes.as_usize(), self.stream.raw()) })?;
        // SAFETY: the stream is ours.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream.raw()) })
    }

    /// Takes back what was mapped for nothing. Whoever calls this has an error to tell already.
    fn unmap_all(&self, start: Address, pieces: &[(Bytes, Piece)]) {
        pieces.iter().for_each(|(offset, piece)| drop(self.unmap(start.offset(*offset), *piece)));
    }

    /// Replaces a piece by pages that keep the first `kept` bytes of its content. Until the piece is gone that takes as
    /// much memory beside it.
    fn carve(
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
                // From here on a failure leaves a hole in what others use.
                Ok(()) => self.move_home(aside, there, &copies, kept).map(|()| copies),
                Err(error) => {
                    self.unmap_all(aside, &copies);
                    Err(error)
                }
            }
        });
        // SAFETY: nothing is mapped there any more.
        drop(check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(aside.0, kept.as_usize()) }));
        Ok(carved?.into_iter().map(|(place, copy)| (offset + place, copy)).collect())
    }

    /// The content of a stretch once more, in pages elsewhere.
    fn copy_aside(&self, aside: Address, from: Address, bytes: Bytes) -> Result<Vec<(Bytes, Piece)>, DeviceError> {
        let pages: Vec<_> = (0..bytes.pages(self.page).0).map(|page| (self.page * page, self.page)).collect();
        let copies = self.fill(aside, &pages)?;
        // SAFETY: both stretches are mapped and open, and as long; the stream is ours.
        let copied = unsafe {
            check("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(aside.0, from.0, bytes.as_usize(), self.stream.raw()))
                .and_then(|()| check("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream.raw())))
        };
        copied.inspect_err(|_| self.unmap_all(aside, &copies))?;
        Ok(copies)
    }

    /// Maps pages from where they were filled to where they belong.
    fn move_home(
        &self,
        aside: Address,
        there: Address,
        copies: &[(Bytes, Piece)],
        bytes: Bytes,
    ) -> Result<(), DeviceError> {
        let moved = copies.iter().try_for_each(|(place, copy)| {
            let (from, to, bytes) = (aside.offset(*place), there.offset(*place), copy.bytes.as_usize());
            // SAFETY: the handle stays ours while its mapping moves, and nothing is mapped where it goes.
            unsafe {
                check("cuMemUnmap", sys::cuMemUnmap(from.0, bytes))?;
                check("cuMemMap", sys::cuMemMap(to.0, bytes, 0, copy.handle, 0))
            }
        });
        let opened = moved.and_then(|()| driver::open(self.device, there, bytes));
        opened
            .map_err(|error| DeviceError::Lost { reason: format!("memory in use could not be mapped again: {error}") })
    }
}

/// The same refusal, of so many bytes.
fn asked_for(bytes: Bytes, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Refused { free, hint, .. } => DeviceError::Refused { asked: bytes, free, hint },
        error => error,
    }
}

fn device_name(device: sys::CUdevice) -> Result<String, DeviceError> {
    let mut name = [0u8; 128];
    // SAFETY: the driver writes at most this many bytes, with a zero at the end.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) })?;
    Ok(String::from_utf8_lossy(name.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned())
}

impl State {
    /// The reservation that holds a stretch of whole pages, with the stretch's place in it.
    fn find(
        &mut self,
        page: Bytes,
        (address, bytes): (Address, Bytes),
        verb: &'static str,
    ) -> Result<(Address, &mut Reservation, Bytes, Bytes), DeviceError> {
        let bad = |reason| DeviceError::BadRange { address, bytes, verb, reason };
        let (start, reservation) =
            self.reservations.range_mut(..=address).next_back().ok_or(bad("it is not reserved"))?;
        let from = address.distance_from(*start);
        let to = from.checked_add(bytes).ok_or(bad("it is longer than any memory"))?;
        if to > reservation.bytes {
            return Err(bad("it is not within one reservation"));
        }
        if !from.is_multiple_of(page) || !bytes.is_multiple_of(page) || bytes.is_zero() {
            return Err(bad("it is not whole pages"));
        }
        Ok((*start, reservation, from, to))
    }
}

impl Reservation {
    /// Bytes that are backed between two offsets.
    fn backed(&self, from: Bytes, to: Bytes) -> Bytes {
        let reach = |(offset, piece): (&Bytes, &Piece)| {
            let (start, end) = ((*offset).max(from), (*offset + piece.bytes).min(to));
            end.saturating_sub(start)
        };
        self.pieces.range(..to).map(reach).sum()
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn page(&self) -> Bytes {
        self.page
    }

    fn is_host_memory(&self) -> bool {
        false
    }

    fn as_cuda(self: Arc<Self>) -> Option<Arc<CudaDevice>> {
        Some(self)
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.enter()?;
        driver::memory()
    }

    fn overhead(&self) -> Bytes {
        Bytes(self.overhead.load(Ordering::Relaxed))
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        self.enter()?;
        let bytes = bytes.round_up(self.page);
        let mut address = 0;
        // SAFETY: the address is there to write to; nothing is taken but addresses.
        let reserved =
            unsafe { sys::cuMemAddressReserve(&mut address, bytes.as_usize(), pieces::LARGE.as_usize(), 0, 0) };
        match check("cuMemAddressReserve", reserved) {
            Err(DeviceError::Driver { said, .. }) => return Err(DeviceError::NoAddresses { bytes, reason: said }),
            Err(DeviceError::Refused { .. }) => {
                let reason = "the driver has no memory for its tables".to_owned();
                return Err(DeviceError::NoAddresses { bytes, reason });
            }
            outcome => outcome?,
        }
        let reservation = Reservation { bytes, pieces: BTreeMap::new() };
        self.lock().reservations.insert(Address(address), reservation);
        Ok(Address(address))
    }

    fn release_reservation(&self, address: Address) -> Result<(), DeviceError> {
        self.enter()?;
        let mut state = self.lock();
        let reservation = state.reservations.remove(&address).ok_or(DeviceError::BadRange {
            address,
            bytes: Bytes::ZERO,
            verb: "released",
            reason: "no reservation starts there",
        })?;
        for (offset, piece) in reservation.pieces {
            self.unmap(address.offset(offset), piece)?;
            state.counts.backed -= piece.bytes;
        }
        // SAFETY: nothing is mapped there any more.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(address.0, reservation.bytes.as_usize()) })
    }

    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.enter()?;
        let mut state = self.lock();
        let (start, reservation, from, to) = state.find(self.page, (address, bytes), "backed")?;
        if !reservation.backed(from, to).is_zero() {
            let reason = "some of it is backed already";
            return Err(DeviceError::BadRange { address, bytes, verb: "backed", reason });
        }
        let filled =
            self.fill(start, &pieces::cut(from, to, self.page)).and_then(|mapped| match self.clear(address, bytes) {
                Ok(()) => Ok(mapped),
                Err(error) => {
                    mapped.iter().for_each(|(offset, piece)| drop(self.unmap(start.offset(*offset), *piece)));
                    Err(error)
                }
            });
        let filled = filled.map(|mapped| reservation.pieces.extend(mapped));
        state.counts.backs += 1;
        filled?;
        state.counts.backed += bytes;
        state.counts.high_water = state.counts.high_water.max(state.counts.backed);
        Ok(())
    }

    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.enter()?;
        let mut state = self.lock();
        let (start, reservation, from, to) = state.find(self.page, (address, bytes), "unbacked")?;
        if reservation.backed(from, to) != bytes {
            let reason = "not all of it is backed";
            return Err(DeviceError::BadRange { address, bytes, verb: "unbacked", reason });
        }
        // A piece that lies over an end of the stretch is carved there first.
        for end in [from, to] {
            let over = reservation.pieces.range(..end).next_back().map(|(offset, piece)| (*offset, *piece));
            if let Some((offset, piece)) = over.filter(|(offset, piece)| *offset + piece.bytes > end) {
                // What of it goes away need not be copied, unless it stays beyond the stretch too.
                let kept = if offset + piece.bytes <= to { end - offset } else { piece.bytes };
                let carved = self.carve(start, (offset, piece), kept)?;
                reservation.pieces.remove(&offset);
                reservation.pieces.extend(carved);
            }
        }
        let inside: Vec<(Bytes, Piece)> = reservation.pieces.range(from..to).map(|(at, piece)| (*at, *piece)).collect();
        for (offset, piece) in inside {
            self.unmap(start.offset(offset), piece)?;
            reservation.pieces.remove(&offset);
        }
        state.counts.unbacks += 1;
        state.counts.backed -= bytes;
        Ok(())
    }

    fn timeline(&self) -> Timeline {
        self.timelines.open()
    }

    fn fence_here(&self) -> Fence {
        self.timelines.fence_here()
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // The stream and the context follow as they drop.
        let addresses: Vec<Address> = self.lock().reservations.keys().copied().collect();
        for address in addresses {
            drop(self.release_reservation(address));
        }
    }
}
