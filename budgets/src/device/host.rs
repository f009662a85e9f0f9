//! Host memory that simulates a GPU: real memory with a fixed capacity and scripted faults.

mod control;
pub mod testing;

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, MutexGuard},
};

use testing::{HostCounts, Script};

use super::{
    address::Address,
    error::DeviceError,
    host_copy::HostCopy,
    interface::{Device, DeviceMemory},
    pages,
};
use crate::{Bytes, Fence, Timeline, Timelines};

/// Settings of a host device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// The name shown to users, also in metrics.
    pub name: String,
    pub capacity: Bytes,
    /// The page size: 2 MiB as on CUDA, unless a demo or test needs many small pages.
    pub page: Bytes,
    /// Simulated memory of a context, which is counted but not allocated.
    pub overhead: Bytes,
    /// Simulated driver name and version. The default is the operating
    /// system's name and architecture.
    pub driver: String,
}

impl HostConfig {
    /// A device with this capacity and CUDA's page size of 2 MiB.
    pub fn new(capacity: Bytes) -> Self {
        let driver = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
        HostConfig { name: "host".into(), capacity, page: Bytes::mib(2), overhead: Bytes::ZERO, driver }
    }

    /// Checks that the capacity is at least one page and at most the memory of the machine.
    ///
    /// # Errors
    /// [`DeviceError::Capacity`].
    pub fn check_capacity(&self) -> Result<(), DeviceError> {
        let (capacity, least, most) = (self.capacity, self.page, pages::system_memory());
        if (least..=most).contains(&capacity) { Ok(()) } else { Err(DeviceError::Capacity { capacity, least, most }) }
    }

    /// A device with 64 KiB pages, for demos and tests of a few MiB.
    pub fn small(capacity: Bytes) -> Self {
        HostConfig { page: Bytes::kib(64), ..HostConfig::new(capacity) }
    }
}

/// Host memory at reserved addresses with a fixed capacity. All memory rules can be tested on it
/// without a GPU.
///
/// ```
/// use bursar_budgets::*;
/// let device = HostDevice::new(HostConfig::small(Bytes::mib(1)))?;
/// let address = device.reserve(Bytes::gib(4))?; // addresses cost nothing
/// device.back(address, Bytes::mib(1))?;
/// let error = device.back(address.offset(Bytes::mib(1)), Bytes::kib(64)).unwrap_err();
/// assert_eq!(error.to_string(), "the device refused 65,536 B (64.0 KiB); 0 B (0 B) are free");
/// # Ok::<(), DeviceError>(())
/// ```
#[derive(Debug)]
pub struct HostDevice {
    config: HostConfig,
    timelines: Timelines,
    state: Mutex<State>,
    let_pass: Condvar,
}

#[derive(Debug, Default)]
struct State {
    reservations: BTreeMap<Address, Reservation>,
    counts: HostCounts,
    script: Script,
    lost: Option<String>,
    holds_calls: bool,
    /// The number of calls that may pass while calls are held.
    passes: u64,
    /// Simulated overhead in addition to `HostConfig::overhead`.
    overhead: Bytes,
    /// Simulated bytes that this process holds outside leases and overhead.
    drift: Bytes,
}

#[derive(Debug)]
struct Reservation {
    bytes: Bytes,
    /// Whether each page is backed. The list ends at the last page that a call has named, because
    /// reservations are much larger than their backed prefix.
    backed: Vec<bool>,
}

impl HostDevice {
    /// A device whose memory is all free, except for the configured overhead.
    ///
    /// # Errors
    /// [`DeviceError::BadPage`] if the page size is not a power of two, or is smaller than the
    /// system's page size. [`DeviceError::Capacity`] if the capacity is less than one page or more
    /// than the memory of the machine.
    pub fn new(config: HostConfig) -> Result<HostDevice, DeviceError> {
        let system = pages::system_page();
        if !config.page.0.is_power_of_two() || config.page < system {
            let reason = format!("it must be a power of two and at least {} bytes, the system's page size", system.0);
            return Err(DeviceError::BadPage { page: config.page, reason });
        }
        config.check_capacity()?;
        Ok(HostDevice { config, timelines: Timelines::default(), state: Mutex::default(), let_pass: Condvar::new() })
    }

    /// Waits while [`hold_calls`](testing::HostControl::hold_calls) blocks this call, and then
    /// locks the state.
    fn lock_at_length(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.counts.held_calls += 1;
        let mut state = self
            .let_pass
            .wait_while(state, |state| state.holds_calls && state.passes == 0)
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        state.counts.held_calls -= 1;
        state.passes = state.passes.saturating_sub(1);
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change of the state is complete before any code can panic, so a poisoned lock guards
        // a valid state.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    fn free(&self, config: &HostConfig) -> Bytes {
        let overhead = config.overhead + self.overhead;
        config.capacity.saturating_sub(overhead + self.drift + self.counts.foreign + self.counts.backed)
    }

    fn foreign_takes(&mut self, config: &HostConfig, bytes: Bytes) -> Bytes {
        let taken = bytes.min(self.free(config));
        self.counts.foreign += taken;
        taken
    }

    fn check_lost(&self) -> Result<(), DeviceError> {
        match &self.lost {
            Some(reason) => Err(DeviceError::Lost { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Finds a range of whole pages in one reservation. All its pages must be backed if `backed` is
    /// `true`, and unbacked otherwise.
    fn pages_in_state(
        &mut self,
        page: Bytes,
        address: Address,
        bytes: Bytes,
        backed: bool,
        verb: &'static str,
    ) -> Result<&mut [bool], DeviceError> {
        let bad = |reason| DeviceError::BadRange { address, bytes, verb, reason };
        let (start, reservation) =
            self.reservations.range_mut(..=address).next_back().ok_or(bad("the address is not reserved"))?;
        let offset = address.distance_from(*start);
        let end = offset.checked_add(bytes).ok_or(bad("the range exceeds the address space"))?;
        if end > reservation.bytes {
            return Err(bad("the range does not lie within one reservation"));
        }
        if !offset.is_multiple_of(page) || !bytes.is_multiple_of(page) || bytes.is_zero() {
            return Err(bad("the range is not made of whole pages"));
        }
        let pages = offset.pages(page).0 as usize..end.pages(page).0 as usize;
        let known = reservation.backed.len().max(pages.end);
        reservation.backed.resize(known, false);
        let pages_in_state = &mut reservation.backed[pages];
        if pages_in_state.iter().any(|is_backed| *is_backed != backed) {
            return Err(bad(if backed {
                "part of the range is not backed"
            } else {
                "part of the range is already backed"
            }));
        }
        Ok(pages_in_state)
    }

    /// Applies the faults that are scripted for this call to `back`. Returns `true` if
    /// the script refuses it.
    fn run_script(&mut self, config: &HostConfig) -> bool {
        let nth = self.counts.backs;
        let taken: Bytes = self.script.foreign_takes.iter().filter(|(at, _)| *at == nth).map(|(_, bytes)| bytes).sum();
        self.foreign_takes(config, taken);
        if self.script.lost_at == Some(nth) {
            self.lost = Some("the test script reported it lost".into());
        }
        self.script.refused_backs.contains(&nth)
    }

    /// Counts a call that takes addresses or memory. Returns whether the script refuses it.
    fn refuses_call(&mut self) -> bool {
        self.counts.calls += 1;
        self.script.refused_calls.contains(&self.counts.calls)
    }
}

impl Device for HostDevice {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn label(&self) -> String {
        self.config.name.clone()
    }

    fn driver(&self) -> String {
        self.config.driver.clone()
    }

    fn page(&self) -> Bytes {
        self.config.page
    }

    fn is_host_memory(&self) -> bool {
        true
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        let state = self.lock();
        state.check_lost()?;
        Ok(DeviceMemory { total: self.config.capacity, free: state.free(&self.config) })
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.lock().check_lost()
    }

    fn overhead(&self) -> Bytes {
        self.lock().overhead + self.config.overhead
    }

    fn process_bytes(&self) -> Option<Bytes> {
        let state = self.lock();
        Some(self.config.overhead + state.overhead + state.drift + state.counts.backed)
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        let mut state = self.lock();
        state.check_lost()?;
        let page = self.config.page;
        let none = |reason: String| DeviceError::NoAddresses { bytes, reason };
        // 2^47: the largest address space of a process on common 64-bit machines.
        if bytes.is_zero() || bytes > Bytes(1 << 47) {
            return Err(none("expected from 1 byte to 128 TiB".into()));
        }
        if state.refuses_call() {
            return Err(none("the test script refused it".into()));
        }
        let bytes = bytes.round_up(page);
        let address = pages::reserve(bytes, page).map_err(|error| none(error.to_string()))?;
        state.reservations.insert(address, Reservation { bytes, backed: Vec::new() });
        Ok(address)
    }

    fn release_reservation(&self, address: Address) -> Result<(), DeviceError> {
        let mut state = self.lock();
        let reservation = state.reservations.remove(&address).ok_or(DeviceError::BadRange {
            address,
            bytes: Bytes::ZERO,
            verb: "released",
            reason: "no reservation starts at this address",
        })?;
        let backed = reservation.backed.iter().filter(|backed| **backed).count() as u64;
        state.counts.backed -= self.config.page * backed;
        // SAFETY: this device reserved the range, and by contract the caller no longer uses it.
        unsafe { pages::release(address, reservation.bytes, self.config.page) };
        Ok(())
    }

    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        let mut state = self.lock_at_length();
        state.check_lost()?;
        state.pages_in_state(self.config.page, address, bytes, false, "backed")?;
        state.counts.backs += 1;
        let refused_by_script = state.refuses_call() | state.run_script(&self.config);
        state.check_lost()?;
        let free = state.free(&self.config);
        if refused_by_script || bytes > free {
            let hint = match free.checked_sub(bytes) {
                Some(_) => "the test script refused it; ask again".into(),
                None => format!("lease {} less, or raise `capacity`", bytes - free),
            };
            return Err(DeviceError::Refused { asked: bytes, free, hint });
        }
        // SAFETY: `pages_in_state` checked that the range is whole pages of a reservation of this
        // device.
        unsafe { pages::open(address, bytes) }.map_err(|error| DeviceError::Refused {
            asked: bytes,
            free,
            hint: format!("the machine itself is out of memory ({error}); lower `capacity`"),
        })?;
        state.pages_in_state(self.config.page, address, bytes, false, "backed")?.fill(true);
        state.counts.backed += bytes;
        state.counts.high_water = state.counts.high_water.max(state.counts.backed);
        Ok(())
    }

    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        let mut state = self.lock_at_length();
        state.pages_in_state(self.config.page, address, bytes, true, "unbacked")?;
        // SAFETY: `pages_in_state` found backed pages of this device, and by contract no code uses
        // them any more.
        unsafe { pages::close(address, bytes) }.map_err(|error| DeviceError::Lost {
            reason: format!("the operating system did not take memory back: {error}"),
        })?;
        state.pages_in_state(self.config.page, address, bytes, true, "unbacked")?.fill(false);
        state.counts.unbacks += 1;
        state.counts.backed -= bytes;
        Ok(())
    }

    fn copy_out(self: Arc<Self>, address: Address, bytes: Bytes) -> Result<HostCopy, DeviceError> {
        let mut state = self.lock_at_length();
        state.check_lost()?;
        state.pages_in_state(self.config.page, address, bytes, true, "copied")?;
        if state.refuses_call() {
            return Err(DeviceError::HostRefused { asked: bytes, message: "the test script refused it".into() });
        }
        let mut copy = Box::<[u8]>::new_uninit_slice(bytes.as_usize());
        // SAFETY: the range stays backed while the state is locked, and the caller guarantees that
        // nothing writes to it. The copy has the same length, and is fully initialized afterward.
        let copy = unsafe {
            std::ptr::copy_nonoverlapping(address.0 as *const u8, copy.as_mut_ptr().cast(), copy.len());
            copy.assume_init()
        };
        Ok(HostCopy::new(copy))
    }

    fn copy_in(&self, copy: &HostCopy, address: Address) -> Result<(), DeviceError> {
        let copy = copy.get::<Box<[u8]>>(address)?;
        let mut state = self.lock_at_length();
        state.check_lost()?;
        state.pages_in_state(self.config.page, address, Bytes(copy.len() as u64), true, "copied")?;
        // SAFETY: the range has the length of the copy and stays backed while the state is locked.
        // By contract no other code uses the range.
        unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), address.0 as *mut u8, copy.len()) };
        Ok(())
    }

    fn timeline(&self) -> Timeline {
        self.timelines.open()
    }

    fn fence_here(&self) -> Fence {
        self.timelines.fence_here()
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        let page = self.config.page;
        for (address, reservation) in std::mem::take(&mut self.lock().reservations) {
            // SAFETY: segments keep the device alive, so no segment uses these addresses any more.
            unsafe { pages::release(address, reservation.bytes, page) };
        }
    }
}
