//! The communicators of a group of ranks, and the first collectives through them.

use std::{
    cell::Cell,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bursar_budgets::{Address, Bytes, CudaDevice, Device, DeviceError};
use cudarc::driver::sys::CUstream;

use super::{
    super::{
        contract::all_reduce::UNIT,
        error::OpenError,
        kernels::CudaKernels,
        lane::Cuda,
        stream::{Event, Stream},
    },
    library::{Calls, Communicator, Nccl, number},
    link::{Communicators, Counted, Group, NcclLink, ROWS_MAX, data_at},
    watch::{Shared, Watch},
};
use crate::{DType, KernelError, Rank, Tensor, ops::transfer};

/// Sizes, in bytes, of the collectives that run before anything is measured, so that NCCL allocates
/// everything that it needs: NCCL connects ranks differently depending on the size of a collective.
/// A collective of the largest size follows.
const FIRST: [usize; 4] = [1 << 10, 64 << 10, 1 << 20, 16 << 20];

impl NcclLink {
    /// Creates the ends of a link between ranks, in the order of their indices. `memory` is the
    /// address of each rank's exchange memory, which has the size that
    /// [`CudaLink::bytes`](super::super::CudaLink::bytes) returns for `largest`. `patience` is how
    /// long the ranks wait for a rank that lags behind. The device memory that NCCL allocates
    /// counts as overhead until the last end is dropped.
    ///
    /// The work in the streams of all ends must be complete, and graphs captured with them must be
    /// dropped, before the last end is dropped.
    ///
    /// # Errors
    /// NCCL refuses a call or cannot allocate memory, the first collectives do not complete within
    /// `patience`, or two ranks share a GPU, which NCCL does not support.
    ///
    /// # Safety
    /// Each rank's exchange memory must begin on a page boundary. Until all work of all ranks has
    /// ended, the memory must be backed, and each rank's device that can reach the memory must have
    /// access to it.
    pub unsafe fn between(
        nccl: &Nccl,
        kernels: &[&Arc<CudaKernels>],
        memory: &[Address],
        largest: Bytes,
        patience: Duration,
    ) -> Result<Vec<NcclLink>, OpenError> {
        let devices: Vec<_> = kernels.iter().map(|kernels| kernels.device.clone()).collect();
        assert_eq!(devices.len(), memory.len(), "each rank has exchange memory");
        refuse_shared(&devices)?;
        let half = largest.round_up(Bytes(UNIT as u64)).as_usize();
        for (kernels, memory) in kernels.iter().zip(memory) {
            // SAFETY: the caller guarantees that this is exchange memory, and nothing uses it yet.
            unsafe { write_row_indices(kernels, *memory) }?;
        }
        let (calls, mut made) = (&nccl.0, None);
        let counted = counted(&devices, &mut || {
            let communicators = initialised(calls, &devices)?;
            let asked = devices.clone();
            let lost = move || asked.iter().position(|device| device.memory().is_err_and(|error| error.is_lost()));
            let watches = Watch::over(calls, &communicators, patience, Box::new(lost));
            // From this line on, the communicators are given back if a later step fails.
            let given_back = Communicators(watches[0].shared().clone());
            let data: Vec<_> = memory.iter().map(|memory| data_at(*memory)).collect();
            warm_up((calls, &given_back.0), &devices, &communicators, &data, half, patience)?;
            made = Some((communicators, watches));
            Ok(given_back)
        })?;
        let (communicators, watches) = made.expect("the communicators exist if no step failed");
        let shared = watches[0].shared().clone();
        let watched = shared.clone();
        let thread = thread::Builder::new().name("bursar-nccl".to_owned()).spawn(move || watched.watch());
        let thread = thread.expect("the operating system starts a thread");
        let group = Arc::new(Group::new(shared, thread, counted));
        let ends = Rank::all(memory.len()).zip(communicators).zip(memory).zip(watches);
        let end = |(((rank, communicator), memory), watch): (((Rank, Communicator), &Address), Watch)| NcclLink {
            rank,
            communicator,
            calls: calls.clone(),
            memory: *memory,
            half,
            watch,
            captured: Cell::default(),
            _group: group.clone(),
        };
        Ok(ends.map(end).collect())
    }
}

fn refuse_shared(devices: &[Arc<CudaDevice>]) -> Result<(), DeviceError> {
    let mut ordinals: Vec<_> = devices.iter().map(|device| device.ordinal()).collect();
    ordinals.sort_unstable();
    match ordinals.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(DeviceError::Unusable {
            reason: format!("NCCL allows one rank per GPU, but cuda:{} was given to several ranks", pair[0]),
            hint: "name each GPU once".to_owned(),
        }),
    }
}

/// Writes the row indices 0 to `ROWS_MAX - 1`, which [`NcclLink::add`] reads, into the region of
/// exchange memory where a `CudaLink` has its control data.
///
/// # Safety
/// `memory` must be exchange memory that nothing uses yet.
unsafe fn write_row_indices(kernels: &Arc<CudaKernels>, memory: Address) -> Result<(), OpenError> {
    let cuda = Cuda::new(kernels)?;
    let scheme: Vec<u8> = (0..ROWS_MAX as u32).flat_map(u32::to_ne_bytes).collect();
    // SAFETY: the caller guarantees that the memory is exchange memory that nothing else uses.
    let mut rows = unsafe { Tensor::persistent(memory, [scheme.len()], DType::U8) };
    match transfer::fill(&cuda, &scheme, &mut rows).and_then(|()| cuda.wait()) {
        Err(KernelError::Device(error)) => Err(error.into()),
        Err(error) => unreachable!("a copy fails only with a device error: {error}"),
        Ok(()) => Ok(()),
    }
}

/// Creates a communicator on each of these devices.
fn initialised(calls: &Calls, devices: &[Arc<CudaDevice>]) -> Result<Vec<Communicator>, DeviceError> {
    let ordinals: Vec<i32> = devices.iter().map(|device| device.ordinal() as i32).collect();
    let mut made = vec![std::ptr::null_mut(); devices.len()];
    // SAFETY: `made` and `ordinals` have an entry for each device.
    let result = unsafe { (calls.init_all)(made.as_mut_ptr(), ordinals.len() as i32, ordinals.as_ptr()) };
    calls.check("ncclCommInitAll", result, devices.first().map(AsRef::as_ref))?;
    Ok(made.into_iter().map(Communicator).collect())
}

/// Runs collectives of several sizes, and waits for them.
fn warm_up(
    (calls, shared): (&Calls, &Shared),
    devices: &[Arc<CudaDevice>],
    communicators: &[Communicator],
    data: &[Address],
    half: usize,
    patience: Duration,
) -> Result<(), DeviceError> {
    let streams = devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>()?;
    let ends = devices.iter().map(Event::new).collect::<Result<Vec<_>, _>>()?;
    let together = |call: &'static str, each: &dyn Fn(usize, Communicator, CUstream) -> i32| {
        // A single thread launches for all ranks, which NCCL allows only within a group.
        // SAFETY: `group_start` has no arguments, and `group_end` is called once for it.
        calls.check("ncclGroupStart", unsafe { (calls.group_start)() }, None)?;
        let all = communicators.iter().zip(&streams).enumerate();
        let launched: Vec<i32> = all.map(|(rank, (one, stream))| each(rank, *one, stream.raw())).collect();
        // SAFETY: `group_end` has no arguments, and it is called once for each `group_start`.
        let ended = unsafe { (calls.group_end)() };
        launched
            .into_iter()
            .zip(devices)
            .try_for_each(|(result, device)| calls.check(call, result, Some(device.as_ref())))?;
        calls.check("ncclGroupEnd", ended, devices.first().map(AsRef::as_ref))
    };
    for size in FIRST.into_iter().chain([half]).map(|size| size.min(half)) {
        together("ncclAllReduce", &|rank, one, stream| {
            let (at, elements) = (data[rank].0, size / DType::BF16.size());
            // SAFETY: each half of the exchange memory has space for this many elements, and the
            // communicators and streams are alive.
            unsafe { (calls.all_reduce)(at, at, elements, number::BFLOAT16, number::SUM, one.0, stream) }
        })?;
        together("ncclAllGather", &|rank, one, stream| {
            let sent = size.min(2 * half / data.len());
            let own = data[rank].0 + (rank * sent) as u64;
            // SAFETY: both halves together have space for `sent` bytes of each rank, and the
            // communicators and streams are alive.
            unsafe { (calls.all_gather)(own, data[rank].0, sent, number::UINT8, one.0, stream) }
        })?;
    }
    for ((device, stream), end) in devices.iter().zip(&streams).zip(&ends) {
        device.enter()?;
        end.record(stream)?;
    }
    let began = Instant::now();
    while !ends.iter().all(Event::is_past) {
        if began.elapsed() > patience {
            let message = format!("the first collectives did not complete within {} s", patience.as_secs_f64());
            // Without this call, the collectives would still wait for each other when
            // the streams are dropped.
            shared.abort(&[], message.clone());
            return Err(DeviceError::Driver { call: "ncclAllReduce", message });
        }
        thread::park_timeout(Duration::from_millis(1));
    }
    streams.iter().try_for_each(Stream::wait)
}

/// Calls `make` and returns its result. The memory that `make` allocates counts as overhead of all
/// of these devices until the result is dropped.
fn counted(
    devices: &[Arc<CudaDevice>],
    make: &mut dyn FnMut() -> Result<Communicators, DeviceError>,
) -> Result<Counted, DeviceError> {
    Ok(match devices {
        [] => Box::new(make()?),
        [first, others @ ..] => Box::new(first.with_overhead("NCCL", || counted(others, make))?),
    })
}
