//! A GPU, through the CUDA driver: virtual addresses are reserved, and memory is mapped
//! to them in pieces.

mod carve;
mod context;
mod driver;
mod large_pages;
mod mapping;
mod nvml;
mod overhead;
mod pieces;
mod pinned;

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys;

use super::{Address, Device, DeviceError, DeviceMemory, HostCopy, HostMemory, of_another_device};
use crate::{AtomicBytes, Bytes, Fence, Timeline, Timelines};
use context::{Context, Stream};
use driver::check;
use nvml::Nvml;
pub use overhead::Overhead;
use overhead::{Left, Meter};
pub use pinned::Pinned;

/// The approximate size of a context: 526 MiB on an H200 with driver 580.
const CONTEXT: Bytes = Bytes(526 << 20);

/// The smallest increase of NVML's count of this process when a device is opened. A process that
/// already had a context takes only the spare pages. The threshold is half of the spare pages.
const SPARE_AT_LEAST: Bytes = Bytes(carve::SPARE.0 / 2);

/// The largest part of a context that NVML's count may leave out. 6 MiB were observed.
const UNCOUNTED_MOST: Bytes = Bytes::mib(32);

/// The number of open devices of this process, by ordinal.
fn open_devices() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    static OPEN: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
    // A count changes in one step, so a poisoned lock guards valid counts.
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counters since the device was opened, for tests and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaCounts {
    /// Calls to `back`, including refused calls.
    pub backs: u64,
    pub unbacks: u64,
    pub backed: Bytes,
    /// The maximum number of bytes backed at once.
    pub high_water: Bytes,
    /// Page-locked host memory held now.
    pub pinned: Bytes,
    /// Calls that took device memory or page-locked memory from the driver, including refused
    /// calls: each piece, each [`Pinned`], each [`CudaDevice::with_overhead`] and each
    /// [`CudaDevice::taken_by`]. This must not increase after READY.
    pub allocations: u64,
}

/// One NVIDIA GPU, used through the driver's virtual memory interface. The driver is loaded when
/// the first device is opened, so a program that opens none needs no driver.
///
/// Backed memory reads as zero, because `back` writes zeros to all of it. If a virtual GPU promises
/// more memory than it has, this write reveals it.
pub struct CudaDevice {
    /// The values that the method `kept` made, by name. This field is dropped first, because the
    /// values may need the context.
    kept: Mutex<BTreeMap<String, Arc<dyn Any + Send + Sync>>>,
    name: String,
    ordinal: usize,
    device: sys::CUdevice,
    /// The stream that clears backed memory, in parallel with other work. It must be
    /// dropped before the context.
    stream: Stream,
    context: Context,
    /// NVIDIA's management library, for facts that the driver does not report. `None` if the
    /// library is not available.
    nvml: Option<Nvml>,
    page: Bytes,
    /// The context and the spare pages, which live as long as this device.
    context_bytes: Bytes,
    /// The part of `context_bytes` that NVML's count of this process does not include. Negative if
    /// the process held memory of the device before this value was created. `None` if NVML does
    /// not see this process.
    uncounted: Option<i64>,
    /// The count of memory that was taken outside leases after the device was opened.
    meter: Meter,
    allocations: AtomicU64,
    pinned: AtomicBytes,
    timelines: Timelines,
    state: Mutex<State>,
    /// Unmapped pages, for [`carve`] on a full GPU.
    spare: Mutex<Vec<Piece>>,
    /// The reason of the loss, if the device is lost.
    lost: OnceLock<String>,
}

#[derive(Default)]
struct State {
    reservations: BTreeMap<Address, Reservation>,
    counts: CudaCounts,
}

struct Reservation {
    bytes: Bytes,
    /// Pieces by offset from the start of the reservation.
    pieces: BTreeMap<Bytes, Piece>,
}

#[derive(Clone, Copy)]
struct Piece {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: Bytes,
}

impl CudaDevice {
    /// Opens the device with this ordinal, in the order of `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] if there is no driver or no such device. [`DeviceError::Unusable`]
    /// if the driver cannot be initialized, is older than CUDA 12.4, or another process uses the
    /// device exclusively. [`DeviceError::Lost`] if this process has lost the device before,
    /// because the driver (580) creates no second context after a loss.
    pub fn open(ordinal: usize) -> Result<CudaDevice, DeviceError> {
        let device = driver::load(ordinal)?;
        let name = device_name(device)?;
        let uuid = driver::value("cuDeviceGetUuid", |out| unsafe { sys::cuDeviceGetUuid_v2(out, device) })?;
        // Until this process has a context, all used memory belongs to other processes.
        let nvml = Nvml::of(&uuid.bytes);
        let before = nvml.as_ref().and_then(Nvml::free_bytes);
        let counted_before = nvml.as_ref().and_then(Nvml::process_bytes).unwrap_or_default();
        let context = Context::retain(device).map_err(|error| match error {
            DeviceError::Refused { free, .. } => {
                let hint =
                    "stop other processes on the GPU (nvidia-smi lists them); a CUDA context takes about 0.5 GiB";
                DeviceError::Refused { asked: CONTEXT, free: before.unwrap_or(free), hint: hint.to_owned() }
            }
            error => driver::gives_no_context(error),
        })?;
        let stream = Stream::new(&context)?;
        let properties = driver::properties(device);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let page = driver::value("cuMemGetAllocationGranularity", |out| unsafe {
            sys::cuMemGetAllocationGranularity(out, &properties, minimum)
        })? as u64;
        let mut opened = CudaDevice {
            kept: Mutex::default(),
            name,
            ordinal,
            device,
            stream,
            context,
            nvml,
            page: Bytes(page),
            context_bytes: Bytes::ZERO,
            uncounted: None,
            meter: Meter::default(),
            allocations: AtomicU64::default(),
            pinned: AtomicBytes::default(),
            timelines: Timelines::default(),
            state: Mutex::default(),
            spare: Mutex::default(),
            lost: OnceLock::new(),
        };
        opened.replenish();
        let after = driver::memory()?.free;
        // Without NVML, the context counts as memory of other processes.
        let fell = before.map_or(carve::SPARE, |before| before.saturating_sub(after));
        let counted = opened.nvml.as_ref().and_then(Nvml::process_bytes);
        // In a container, NVML may report another process under our process id. Use the count only
        // if it has just increased by a plausible amount.
        let counted =
            counted.filter(|counted| (SPARE_AT_LEAST..=fell).contains(&counted.saturating_sub(counted_before)));
        // Exclude memory that other processes took while the device was opened.
        let most = counted.map_or(fell, |counted| counted - counted_before + UNCOUNTED_MOST);
        opened.context_bytes = fell.min(most);
        opened.uncounted = counted.map(|counted| opened.context_bytes.0 as i64 - counted.0 as i64);
        *open_devices().entry(ordinal).or_default() += 1;
        Ok(opened)
    }

    /// The value that `make` returned under this name. `make` runs once per name, and the value is
    /// kept as long as the context.
    ///
    /// # Errors
    /// Any error of `make`. Nothing is kept then, and the next call tries again.
    pub fn kept<T: Any + Send + Sync, E>(&self, name: &str, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        // An entry is inserted in one step, so a poisoned lock guards a valid map.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Ok(known)) = kept.get(name).map(|known| known.clone().downcast::<T>()) {
            return Ok(known);
        }
        let made = Arc::new(make()?);
        kept.insert(name.to_owned(), made.clone());
        Ok(made)
    }

    pub fn counts(&self) -> CudaCounts {
        let counts = self.lock().counts;
        CudaCounts { pinned: self.pinned.load(), allocations: self.allocations.load(Ordering::Relaxed), ..counts }
    }

    /// Creates a value that takes memory which no lease can cover (loaded modules, library handles,
    /// streams). The memory is counted as overhead of `source` until the value is dropped. A ledger
    /// that reads [`Device::overhead`] before each grant then accounts for it. If the driver does
    /// not distinguish processes, memory that other processes take during the call is counted too.
    /// Only one thread measures at a time.
    ///
    /// # Errors
    /// Any error of `make`, or of the query for free memory. Memory that the driver keeps after a
    /// failed attempt stays counted.
    pub fn with_overhead<T, E: From<DeviceError>>(
        self: &Arc<Self>,
        source: &'static str,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Overhead<T>, E> {
        self.count_allocation();
        Ok(Overhead::of(self.meter.count(source, || self.left(), make)??, source, self))
    }

    /// Measures the bytes that `work` takes, as [`with_overhead`](Self::with_overhead) does, but
    /// does not count them. The caller pays for them with a lease of that size, for example for
    /// instantiated graphs. Other threads may back and unback memory during the measurement. Drop
    /// the value inside [`in_turn`](Self::in_turn).
    ///
    /// # Errors
    /// The driver does not report how much memory is free.
    pub fn taken_by<T>(&self, work: impl FnOnce() -> T) -> Result<(T, Bytes), DeviceError> {
        self.count_allocation();
        self.meter.taken_by(|| self.left(), work)
    }

    /// Runs `work` while no other thread measures. Use this to drop a value that
    /// [`taken_by`](Self::taken_by) has measured. `work` must not measure.
    pub fn in_turn<T>(&self, work: impl FnOnce() -> T) -> T {
        self.meter.in_turn(work)
    }

    /// Memory that is neither overhead nor held by other processes. Nothing is backed or
    /// unbacked during the measurement.
    fn left(&self) -> Result<Left, DeviceError> {
        let state = self.lock();
        let (free, backed) = (self.memory()?.free, state.counts.backed);
        Ok(Left { free: free + backed, ours: self.process_bytes().map(|ours| ours.saturating_sub(backed)) })
    }

    /// Makes the device's context current on the calling thread, for code that
    /// calls the driver directly.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] if the device is lost, or an error of the driver.
    pub fn enter(&self) -> Result<(), DeviceError> {
        self.check()?;
        self.heed(self.context.enter())
    }

    /// Like `enter`, but succeeds on a lost device, so that its memory can be returned: the driver
    /// (580) accepts the return of all memory.
    fn enter_if_there(&self) -> Result<(), DeviceError> {
        match self.enter() {
            Err(error) if !error.is_lost() => Err(error),
            _ => Ok(()),
        }
    }

    /// The ordinal in the order of `CUDA_VISIBLE_DEVICES`, which is also
    /// the CUDA runtime's ordinal.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Marks the device as lost, for code that calls the driver directly. All calls then fail with
    /// the reason that was given first.
    pub fn lose(&self, reason: &str) {
        // Fails if a reason is already set: the first reason wins.
        drop(self.lost.set(reason.to_owned()));
    }

    /// Returns the outcome unchanged, and marks the device as lost if the outcome is a loss.
    fn heed<T>(&self, outcome: Result<T, DeviceError>) -> Result<T, DeviceError> {
        outcome.inspect_err(|error| {
            if let DeviceError::Lost { reason } = error {
                self.lose(reason);
            }
        })
    }

    /// An attribute of the device, such as the number of SMs.
    ///
    /// # Errors
    /// The driver does not know the attribute.
    pub fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, DeviceError> {
        let get = |out| unsafe { sys::cuDeviceGetAttribute(out, attribute, self.device) };
        driver::value("cuDeviceGetAttribute", get)
    }

    /// Converts a driver's result to an error, for code that calls the driver directly: refused,
    /// lost, or a bug in Bursar.
    ///
    /// # Errors
    /// Any result but success.
    pub fn said(call: &'static str, result: sys::CUresult) -> Result<(), DeviceError> {
        check(call, result)
    }

    fn count_allocation(&self) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A piece is listed in one step after the driver has mapped it, so a poisoned lock
        // guards a valid state.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn device_name(device: sys::CUdevice) -> Result<String, DeviceError> {
    let mut name = [0u8; 128];
    // SAFETY: the driver writes at most `name.len()` bytes, including a terminating zero.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) })?;
    Ok(String::from_utf8_lossy(name.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned())
}

impl State {
    /// The reservation that contains a range of whole pages, and the range's start and end
    /// offsets in the reservation.
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
}

impl CudaDevice {
    fn take_addresses(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        self.enter()?;
        let bytes = bytes.round_up(self.page);
        let mut address = 0;
        // SAFETY: the output pointer is valid, and the call only reserves addresses.
        let reserved =
            unsafe { sys::cuMemAddressReserve(&mut address, bytes.as_usize(), pieces::LARGE.as_usize(), 0, 0) };
        match check("cuMemAddressReserve", reserved) {
            Err(DeviceError::Driver { said, .. }) => return Err(DeviceError::NoAddresses { bytes, reason: said }),
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
    fn give_addresses(&self, address: Address) -> Result<(), DeviceError> {
        self.enter_if_there()?;
        let mut state = self.lock();
        let reservation = state.reservations.remove(&address).ok_or(DeviceError::BadRange {
            address,
            bytes: Bytes::ZERO,
            verb: "released",
            reason: "no reservation starts at this address",
        })?;
        for (offset, piece) in reservation.pieces {
            self.unmap(address.offset(offset), piece)?;
            state.counts.backed -= piece.bytes;
        }
        // SAFETY: all pieces of this reservation were unmapped above.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(address.0, reservation.bytes.as_usize()) })
    }

    fn fill_in(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
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

    fn clear_out(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.enter_if_there()?;
        let mut state = self.lock();
        let (start, reservation, from, to) = state.find(self.page, (address, bytes), "unbacked")?;
        if reservation.backed(from, to) != bytes {
            let reason = "part of the range is not backed";
            return Err(DeviceError::BadRange { address, bytes, verb: "unbacked", reason });
        }
        // First carve pieces that extend past an end of the range.
        for end in [from, to] {
            let over = reservation.pieces.range(..end).next_back().map(|(offset, piece)| (*offset, *piece));
            if let Some((offset, piece)) = over.filter(|(offset, piece)| *offset + piece.bytes > end) {
                // Copy only the part before the range, unless the piece also extends past the
                // end of the range.
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
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn label(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    fn driver(&self) -> String {
        let release = self.nvml.as_ref().and_then(Nvml::driver_release);
        release.unwrap_or_else(|| format!("CUDA {}", driver::version().unwrap_or_default()))
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
        self.heed(driver::memory())
    }

    fn check(&self) -> Result<(), DeviceError> {
        match self.lost.get() {
            Some(reason) => Err(DeviceError::Lost { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    fn overhead(&self) -> Bytes {
        self.context_bytes + self.meter.counted()
    }

    fn overhead_by_source(&self) -> Vec<(&'static str, Bytes)> {
        let spare = carve::SPARE.min(self.context_bytes);
        let always = [("context", self.context_bytes - spare), ("spare pages", spare)];
        always.into_iter().chain(self.meter.by_source()).filter(|(_, bytes)| !bytes.is_zero()).collect()
    }

    fn process_bytes(&self) -> Option<Bytes> {
        let uncounted = self.uncounted?;
        // NVML's count cannot be split if this process has opened the same GPU twice.
        let is_alone = open_devices().get(&self.ordinal) == Some(&1);
        let counted = self.nvml.as_ref().filter(|_| is_alone)?.process_bytes()?.0 as i64;
        Some(Bytes((counted + uncounted).max(0) as u64))
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        self.heed(self.take_addresses(bytes))
    }

    fn release_reservation(&self, address: Address) -> Result<(), DeviceError> {
        self.heed(self.give_addresses(address))
    }

    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.heed(self.fill_in(address, bytes))
    }

    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.heed(self.clear_out(address, bytes))
    }

    fn copy_out(self: Arc<Self>, address: Address, bytes: Bytes) -> Result<HostCopy, DeviceError> {
        Ok(HostCopy::Pinned(self.heed(self.copy_to_host(address, bytes))?))
    }

    fn copy_in(&self, copy: &HostCopy, address: Address) -> Result<(), DeviceError> {
        let HostCopy::Pinned(copy) = copy else { return Err(of_another_device(address)) };
        self.heed(self.copy_from_host(copy, address))
    }

    fn host_memory(self: Arc<Self>, bytes: Bytes) -> Result<HostMemory, DeviceError> {
        Ok(HostMemory::pinned(self.heed(self.pinned(bytes))?))
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
        if let Some(open) = open_devices().get_mut(&self.ordinal) {
            *open -= 1;
        }
        // Return all memory here, because the stream and the context drop after this.
        let addresses: Vec<Address> = self.lock().reservations.keys().copied().collect();
        for address in addresses {
            drop(self.give_addresses(address));
        }
        let spare = std::mem::take(self.spare.get_mut().unwrap_or_else(PoisonError::into_inner));
        spare.into_iter().for_each(|page| drop(self.release(page)));
    }
}
