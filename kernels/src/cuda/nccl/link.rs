//! A rank's end of a link through NCCL: its communicator and its exchange memory.

use std::{
    any::Any,
    cell::Cell,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use bursar_budgets::{Address, Bytes, CudaDevice, Device, DeviceError};
use cudarc::driver::sys::CUstream;

use super::super::{
    contract::all_reduce::{DATA_AT, UNIT},
    copy_link::{ByteRows, bytes, copy_rows},
    elementwise,
    error::OpenError,
    kernels::CudaKernels,
    lane::Cuda,
    stream::{Event, Stream},
};
use super::{
    library::{Calls, Communicator, Nccl, number, number_of},
    watch::{Shared, Watch},
};
use crate::{DType, KernelError, Rank, Tensor, calls, ops::transfer};

/// A rank's end of a link between GPU ranks through NCCL.
///
/// Sums are computed in the activation type and in NCCL's order: a sum is rounded once for each
/// rank after the first, and once more when it is added to the output. All ranks get the same bits.
/// The bits are reproducible as long as NCCL chooses the same algorithm. All ranks must launch the
/// same operations in the same order. A rank that does not join in time, or that is dropped, breaks
/// the link: the results of the other ranks are undefined from then on, and they get
/// [`DeviceError::Lost`] when they next wait for results.
pub struct NcclLink {
    rank: Rank,
    communicator: Communicator,
    calls: Arc<Calls>,
    memory: Address,
    /// Bytes of each of the two halves of the data.
    half: usize,
    watch: Watch,
    /// Number of collectives captured so far.
    captured: Cell<u64>,
    _group: Arc<Group>,
}

/// State that all ends of a link share.
struct Group {
    shared: Arc<Shared>,
    watches: Option<JoinHandle<()>>,
    /// Dropped after the thread has ended. Gives the communicators back and subtracts their memory
    /// from each device's overhead.
    _counted: Counted,
}

type Counted = Box<dyn Any + Send + Sync>;

/// The communicators of a group. Dropping this returns them to NCCL.
struct Communicators(Arc<Shared>);

impl Drop for Communicators {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.shared.end();
        // The thread does not panic; even if it did, the communicators must be given back.
        drop(self.watches.take().map(JoinHandle::join));
    }
}

/// Maximum rows of one collective. The row numbers up to here are stored in the part of exchange
/// memory where a [`CudaLink`](super::super::CudaLink) has its control data.
const ROWS_MAX: usize = 1 << 16;
const _: () = assert!(ROWS_MAX * size_of::<u32>() <= DATA_AT);

/// Sizes, in bytes, of the collectives that run before anything is measured, so that NCCL allocates
/// everything that it needs: NCCL connects ranks differently depending on the size of a collective.
/// A collective of the largest size follows.
const FIRST: [usize; 4] = [1 << 10, 64 << 10, 1 << 20, 16 << 20];

impl NcclLink {
    /// Creates the ends of a link between ranks, in the order of their indices. `memory` is each
    /// rank's exchange memory, of [`CudaLink::bytes`](super::super::CudaLink::bytes) of `largest`.
    /// `patience` is how long the ranks wait for a rank that lags behind. The device memory that
    /// NCCL takes counts as overhead until the last end is dropped.
    ///
    /// The work in the streams of all ends must be complete, and graphs captured with them must be
    /// dropped, before the last end is dropped.
    ///
    /// # Errors
    /// NCCL refuses, or has no memory; two ranks share a GPU, which NCCL does not support.
    ///
    /// # Safety
    /// Each memory is backed, begins on a page, is open to the devices of all ranks that can reach
    /// it, and stays so until all work of all ranks has ended.
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
            unsafe { number_rows(kernels, *memory) }?;
        }
        let (calls, mut made) = (&nccl.0, None);
        let counted = counted(&devices, &mut || {
            let communicators = initialised(calls, &devices)?;
            let asked = devices.clone();
            let lost = move || asked.iter().position(|device| device.memory().is_err_and(|error| error.is_lost()));
            let watches = Watch::over(calls, &communicators, patience, Box::new(lost));
            // From here on the communicators are given back if a later step fails.
            let given_back = Communicators(watches[0].shared().clone());
            let data: Vec<_> = memory.iter().map(|memory| data_at(*memory)).collect();
            warm_up((calls, &given_back.0), &devices, &communicators, &data, half, patience)?;
            made = Some((communicators, watches));
            Ok(given_back)
        })?;
        let (communicators, watches) = made.expect("what was counted was made");
        let shared = watches[0].shared().clone();
        let watched = shared.clone();
        let thread = thread::Builder::new().name("bursar-nccl".to_owned()).spawn(move || watched.watch());
        let thread = thread.expect("the operating system starts a thread");
        let group = Arc::new(Group { shared, watches: Some(thread), _counted: counted });
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

    /// This rank's position in the group.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub(in super::super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Number of collectives captured so far.
    pub(in super::super) fn captured(&self) -> u64 {
        self.captured.get()
    }

    pub(in super::super) fn all_reduce(&self, cuda: &Cuda, call: calls::AllReduce<'_>) -> Result<(), KernelError> {
        cuda.enter()?;
        let (dtype, columns) = (call.partial.dtype(), call.partial.columns());
        let width = bytes(dtype, columns);
        let at_once = (self.half / width.max(1)).min(ROWS_MAX);
        if at_once == 0 {
            return Err(KernelError::NoKernel { op: "all_reduce" });
        }
        let rows = call.partial.rows();
        for first in (0..rows).step_by(at_once) {
            let some = first..rows.min(first + at_once);
            let (count, data) = (some.len(), data_at(self.memory));
            let (partial, out) = (call.partial.row_range(some.clone()), call.out.row_range(some));
            let sums = ByteRows { start: data, pitch: width };
            copy_rows(&cuda.stream, ByteRows::of(&partial), sums, [count, width])?;
            self.launch(cuda, "ncclAllReduce", |calls, communicator, stream| {
                let (elements, kind) = (count * columns, number_of(dtype));
                // SAFETY: `count` rows were copied there before, and the communicator and
                // the stream are alive.
                unsafe { (calls.all_reduce)(data.0, data.0, elements, kind, number::SUM, communicator, stream) }
            })?;
            if call.accumulate {
                self.add(cuda, &out)?;
            } else {
                copy_rows(&cuda.stream, sums, ByteRows::of(&out), [count, width])?;
            }
        }
        Ok(())
    }

    /// Adds the sums in exchange memory to the rows of `out`.
    fn add(&self, cuda: &Cuda, out: &Tensor<'_>) -> Result<(), KernelError> {
        // SAFETY: the creator of the link guarantees that its memory is valid. Earlier work of the
        // stream has written the sums, and the row numbers were written when the link was created.
        let (sums, rows) = unsafe {
            let sums = Tensor::persistent(data_at(self.memory), [out.rows(), out.columns()], out.dtype());
            (sums, Tensor::persistent(self.memory, [out.rows()], DType::U32))
        };
        elementwise::add_rows(cuda, calls::AddRows { x: sums, from: rows.view(), to: rows.view(), out: out.view() })
    }

    pub(in super::super) fn all_gather(&self, cuda: &Cuda, call: calls::AllGather<'_>) -> Result<(), KernelError> {
        cuda.enter()?;
        let (rows, ranks, data) = (call.part.rows(), self.rank.of(), data_at(self.memory));
        let width = bytes(call.part.dtype(), call.part.columns());
        // Both halves together hold the parts of all ranks. A row that is too wide for this
        // is gathered in pieces.
        let [rows_at_once, piece] = gathered_at_once(2 * self.half, ranks, width);
        if piece == 0 && width > 0 {
            return Err(KernelError::NoKernel { op: "all_gather" });
        }
        for column in (0..width).step_by(piece.max(1)) {
            let wide = piece.min(width - column);
            for first in (0..rows).step_by(rows_at_once) {
                let count = rows_at_once.min(rows - first);
                let sent = count * wide;
                let of_rank = |rank: usize| ByteRows { start: data.offset(Bytes((rank * sent) as u64)), pitch: wide };
                let (own, size) = (of_rank(self.rank.index()), [count, wide]);
                copy_rows(&cuda.stream, ByteRows::of(&call.part).at_row(first).at_byte(column), own, size)?;
                self.launch(cuda, "ncclAllGather", |calls, communicator, stream| {
                    // SAFETY: this rank's part was copied there before, and there is space for the
                    // parts of all ranks.
                    unsafe { (calls.all_gather)(own.start.0, data.0, sent, number::UINT8, communicator, stream) }
                })?;
                for rank in 0..ranks {
                    let to = ByteRows::of(&call.out).at_row(first).at_byte(rank * width + column);
                    copy_rows(&cuda.stream, of_rank(rank), to, size)?;
                }
            }
        }
        Ok(())
    }

    fn launch(
        &self,
        cuda: &Cuda,
        call: &'static str,
        run: impl FnOnce(&Calls, *mut std::ffi::c_void, CUstream) -> i32,
    ) -> Result<(), KernelError> {
        let is_captured = cuda.captures.get();
        self.watch.launch(u64::from(!is_captured), || {
            let launched = run(&self.calls, self.communicator.0, cuda.stream.raw());
            Ok::<_, KernelError>(self.calls.said(call, launched, Some(cuda.kernels.device.as_ref()))?)
        })?;
        self.captured.set(self.captured.get() + u64::from(is_captured));
        Ok(())
    }
}

impl Drop for NcclLink {
    fn drop(&mut self) {
        self.watch.leave();
    }
}

/// Returns how many rows, and how many bytes of each row, are gathered at once into `scratch`
/// bytes. Each of `ranks` ranks contributes rows of `width` bytes.
fn gathered_at_once(scratch: usize, ranks: usize, width: usize) -> [usize; 2] {
    let of_rank = scratch / ranks / UNIT * UNIT;
    let piece = width.min(of_rank);
    [(of_rank / piece.max(1)).max(1), piece]
}

fn data_at(memory: Address) -> Address {
    memory.offset(Bytes(DATA_AT as u64))
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

/// Writes the row numbers into the part of exchange memory where a link through kernels
/// has its control data.
///
/// # Safety
/// The memory is exchange memory, and nothing uses it yet.
unsafe fn number_rows(kernels: &Arc<CudaKernels>, memory: Address) -> Result<(), OpenError> {
    let cuda = Cuda::new(kernels)?;
    let scheme: Vec<u8> = (0..ROWS_MAX as u32).flat_map(u32::to_ne_bytes).collect();
    // SAFETY: the caller guarantees that the memory is exchange memory that nothing else uses.
    let mut rows = unsafe { Tensor::persistent(memory, [scheme.len()], DType::U8) };
    match transfer::fill(&cuda, &scheme, &mut rows).and_then(|()| cuda.wait()) {
        Err(KernelError::Device(error)) => Err(error.into()),
        Err(error) => unreachable!("a copy fails only on its device: {error}"),
        Ok(()) => Ok(()),
    }
}

/// Creates a communicator on each of these devices.
fn initialised(calls: &Calls, devices: &[Arc<CudaDevice>]) -> Result<Vec<Communicator>, DeviceError> {
    let ordinals: Vec<i32> = devices.iter().map(|device| device.ordinal() as i32).collect();
    let mut made = vec![std::ptr::null_mut(); devices.len()];
    // SAFETY: `made` and `ordinals` have an entry for each device.
    let result = unsafe { (calls.init_all)(made.as_mut_ptr(), ordinals.len() as i32, ordinals.as_ptr()) };
    calls.said("ncclCommInitAll", result, devices.first().map(AsRef::as_ref))?;
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
        calls.said("ncclGroupStart", unsafe { (calls.group_start)() }, None)?;
        let all = communicators.iter().zip(&streams).enumerate();
        let launched: Vec<i32> = all.map(|(rank, (one, stream))| each(rank, *one, stream.raw())).collect();
        // SAFETY: `group_end` has no arguments, and it is called once for each `group_start`.
        let ended = unsafe { (calls.group_end)() };
        launched
            .into_iter()
            .zip(devices)
            .try_for_each(|(result, device)| calls.said(call, result, Some(device.as_ref())))?;
        calls.said("ncclGroupEnd", ended, devices.first().map(AsRef::as_ref))
    };
    for size in FIRST.into_iter().chain([half]).map(|size| size.min(half)) {
        together("ncclAllReduce", &|rank, one, stream| {
            let (at, elements) = (data[rank].0, size / DType::BF16.size());
            // SAFETY: a half holds this many elements, and the communicators and streams are alive.
            unsafe { (calls.all_reduce)(at, at, elements, number::BFLOAT16, number::SUM, one.0, stream) }
        })?;
        together("ncclAllGather", &|rank, one, stream| {
            let sent = size.min(2 * half / data.len());
            let own = data[rank].0 + (rank * sent) as u64;
            // SAFETY: both halves together hold `sent` bytes of each rank.
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
            let said = format!("the first collectives did not complete within {} s", patience.as_secs_f64());
            // Otherwise the collectives would still wait for each other when
            // the streams are dropped.
            shared.break_off(&[], said.clone());
            return Err(DeviceError::Driver { call: "ncclAllReduce", said });
        }
        thread::park_timeout(Duration::from_millis(1));
    }
    streams.iter().try_for_each(Stream::wait)
}

/// Returns what `make` makes. Its memory counts as overhead of all of these devices
/// until it is dropped.
fn counted(
    devices: &[Arc<CudaDevice>],
    make: &mut dyn FnMut() -> Result<Communicators, DeviceError>,
) -> Result<Counted, DeviceError> {
    Ok(match devices {
        [] => Box::new(make()?),
        [first, others @ ..] => Box::new(first.with_overhead("NCCL", || counted(others, make))?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gathered_at_once_fits_for_all_ranks_and_covers_each_row() {
        for (scratch, ranks, width) in [(64 << 10, 2, 76_032 * 4), (1 << 20, 8, 304), (4096, 3, 4096), (96, 3, 30)] {
            let [rows, piece] = gathered_at_once(scratch, ranks, width);
            assert!(piece > 0 && rows > 0 && rows * piece * ranks <= scratch, "{rows} rows of {piece} in {scratch}");
            assert!(rows == 1 || piece == width, "a row in pieces goes alone");
        }
    }
}
