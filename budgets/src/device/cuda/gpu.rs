//! A GPU, through the CUDA driver: virtual addresses are reserved, and memory is mapped
//! to them in pieces.

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys;

use super::{
    context::{Context, Stream},
    driver::{self, check},
    meter::{Left, Meter},
    nvml::Nvml,
};
use crate::{Address, AtomicBytes, Bytes, Device, DeviceError, Timelines};

/// The number of open devices of this process, by ordinal.
pub(super) fn open_devices() -> MutexGuard<'static, BTreeMap<usize, usize>> {
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
    /// calls: each piece, each [`Pinned`](crate::Pinned), each [`CudaDevice::with_overhead`] and
    /// each [`CudaDevice::taken_by`]. After READY, requests must not increase this count. Resizes
    /// of the KV cache, and suspending or resuming a model, may increase it.
    pub allocations: u64,
}

/// One NVIDIA GPU, used through the driver's virtual memory interface. The driver is loaded when
/// the first GPU is opened, so a program that opens no GPU needs no driver.
///
/// Newly backed memory reads as zero, because `back` writes zeros to all of it. If a virtual GPU
/// promises more memory than it has, this write reveals the shortage.
pub struct CudaDevice {
    /// The values created by [`CudaDevice::kept`], by name. This field is dropped first, because
    /// the values may need the context.
    pub(super) kept: Mutex<BTreeMap<String, Arc<dyn Any + Send + Sync>>>,
    pub(super) name: String,
    pub(super) ordinal: usize,
    pub(super) device: sys::CUdevice,
    /// The stream that clears newly backed memory and copies split pieces, in parallel with the
    /// work of other streams. The stream must be dropped before the context.
    pub(super) stream: Stream,
    pub(super) context: Context,
    /// NVIDIA's management library, for facts that the driver does not report. `None` if the
    /// library is not available.
    pub(super) nvml: Option<Nvml>,
    pub(super) page: Bytes,
    /// The bytes of the context and of the spare pages, which live as long as this device.
    pub(super) context_bytes: Bytes,
    /// The part of `context_bytes` that NVML's count of this process does not include. The number
    /// is negative if the process held memory of the GPU before it opened this device. `None` if
    /// NVML does not see this process.
    pub(super) uncounted: Option<i64>,
    /// The count of memory that was taken outside leases after the device was opened.
    pub(super) meter: Meter,
    pub(super) allocations: AtomicU64,
    pub(super) pinned: AtomicBytes,
    pub(super) timelines: Timelines,
    pub(super) state: Mutex<State>,
    /// Unmapped pages, which receive the copies when a piece is split on a full GPU (see
    /// `carve.rs`).
    pub(super) spare: Mutex<Vec<Piece>>,
    /// The reason why the device was lost; empty while the device works.
    pub(super) lost: OnceLock<String>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) reservations: BTreeMap<Address, Reservation>,
    pub(super) counts: CudaCounts,
}

pub(super) struct Reservation {
    pub(super) bytes: Bytes,
    /// Pieces by offset from the start of the reservation.
    pub(super) pieces: BTreeMap<Bytes, Piece>,
}

#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) handle: sys::CUmemGenericAllocationHandle,
    pub(super) bytes: Bytes,
}

impl CudaDevice {
    /// Returns the value that `make` created under this name. `make` runs once per name, and the
    /// value lives as long as the context.
    ///
    /// # Errors
    /// Any error of `make`. Nothing is stored then, and the next call tries again.
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

    /// Measures the bytes that `work` takes, as [`with_overhead`](Self::with_overhead) does, but
    /// does not count these bytes as overhead. The caller pays for them with a lease of that size,
    /// for example for instantiated graphs. Other threads may back and unback memory during the
    /// measurement. Drop the returned value inside [`in_turn`](Self::in_turn).
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

    /// Takes both measurements of [`Left`] while the state is locked, so that no memory is backed
    /// or unbacked between the two.
    pub(super) fn left(&self) -> Result<Left, DeviceError> {
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
        self.record_loss(self.context.enter())
    }

    /// Like `enter`, but also succeeds on a lost device, so that its memory can be returned. With
    /// driver 580, all memory of a lost device can be returned.
    pub(super) fn enter_if_there(&self) -> Result<(), DeviceError> {
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

    /// Marks the device as lost, for code that calls the driver directly. Calls that need a working
    /// device then fail with the first reason that was given.
    pub fn lose(&self, reason: &str) {
        // Fails if a reason is already set: the first reason wins.
        drop(self.lost.set(reason.to_owned()));
    }

    /// Returns the outcome unchanged, and marks the device as lost if the outcome is
    /// [`DeviceError::Lost`].
    pub(super) fn record_loss<T>(&self, outcome: Result<T, DeviceError>) -> Result<T, DeviceError> {
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
    pub fn check(call: &'static str, result: sys::CUresult) -> Result<(), DeviceError> {
        check(call, result)
    }

    pub(super) fn count_allocation(&self) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A piece is listed in one step after the driver has mapped it, so a poisoned lock
        // guards a valid state.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
