//! NCCL's calls, as declared in `nccl.h` of 2.14 to 2.28.

use std::{
    error::Error,
    ffi::{CStr, c_char, c_void},
    path::PathBuf,
    sync::Arc,
};

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError};
use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::super::{blas::BlasSearch, error::OpenError};
use crate::DType;

/// File names. All versions of NCCL 2 have the same calls.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest version that is served, as the library counts: captured graphs and aborted communicators are right since.
const VERSION_MIN: i32 = 21_400;

/// An opaque pointer to a communicator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Communicator(pub(super) *mut c_void);

// SAFETY: any thread may use a communicator, one at a time, and abort it beside that; `Watch` sees to that.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// Constants from the header.
pub(super) mod number {
    pub const SUCCESS: i32 = 0;
    pub const UNHANDLED_CUDA_ERROR: i32 = 1;
    pub const IN_PROGRESS: i32 = 7;
    pub const UINT8: i32 = 1;
    pub const FLOAT16: i32 = 6;
    pub const FLOAT32: i32 = 7;
    pub const BFLOAT16: i32 = 9;
    pub const SUM: i32 = 0;
}

macro_rules! calls {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        pub(super) struct Calls {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> i32,)*
            text: unsafe extern "C" fn(i32) -> *const c_char,
            /// Declared after the calls, so that it is unloaded after them.
            _library: Library,
        }

        impl Calls {
            /// # Safety
            /// The library is NCCL.
            unsafe fn of(library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: the symbols have these types in NCCL, which the caller promises this library is.
                unsafe {
                    $(let $field = *library.get($symbol)?;)*
                    let text = *library.get(b"ncclGetErrorString")?;
                    Ok(Calls { $($field,)* text, _library: library })
                }
            }
        }
    };
}

calls! {
    version = b"ncclGetVersion": fn(*mut i32);
    init_all = b"ncclCommInitAll": fn(*mut *mut c_void, i32, *const i32);
    destroy = b"ncclCommDestroy": fn(*mut c_void);
    abort = b"ncclCommAbort": fn(*mut c_void);
    async_error = b"ncclCommGetAsyncError": fn(*mut c_void, *mut i32);
    group_start = b"ncclGroupStart": fn();
    group_end = b"ncclGroupEnd": fn();
    all_reduce = b"ncclAllReduce": fn(u64, u64, usize, i32, i32, *mut c_void, CUstream);
    all_gather = b"ncclAllGather": fn(u64, u64, usize, i32, *mut c_void, CUstream);
}

/// The library.
pub struct Nccl(pub(super) Arc<Calls>);

impl Nccl {
    /// Finds and loads NCCL in the folders of `search`, for `devices`. `why` says why it is wanted, for the error.
    ///
    /// # Errors
    /// [`OpenError::NoNccl`] and [`OpenError::BadNccl`].
    pub fn open(devices: &[Arc<CudaDevice>], search: &BlasSearch, why: &str) -> Result<Self, OpenError> {
        let (candidates, folders) = (search.files(&NAMES), search.folders());
        let find = || find(&candidates, folders, why);
        match devices.first() {
            // Kept as cuBLASLt is: closing it would leave what it loaded.
            Some(device) => Ok(Nccl(device.kept(&format!("NCCL of {candidates:?}"), find)?)),
            None => Ok(Nccl(Arc::new(find()?))),
        }
    }

    /// The version as the library counts: 2.27.5 is 22,705.
    pub fn version(&self) -> i32 {
        self.0.version_number()
    }
}

#[cfg(test)]
impl Calls {
    /// Calls that do nothing, but for these.
    pub(super) fn faked(
        abort: unsafe extern "C" fn(*mut c_void) -> i32,
        destroy: unsafe extern "C" fn(*mut c_void) -> i32,
        async_error: unsafe extern "C" fn(*mut c_void, *mut i32) -> i32,
    ) -> Self {
        extern "C" fn nothing() -> i32 {
            number::SUCCESS
        }
        extern "C" fn no_version(_: *mut i32) -> i32 {
            number::SUCCESS
        }
        extern "C" fn no_init(_: *mut *mut c_void, _: i32, _: *const i32) -> i32 {
            number::SUCCESS
        }
        extern "C" fn no_sum(_: u64, _: u64, _: usize, _: i32, _: i32, _: *mut c_void, _: CUstream) -> i32 {
            number::SUCCESS
        }
        extern "C" fn no_gather(_: u64, _: u64, _: usize, _: i32, _: *mut c_void, _: CUstream) -> i32 {
            number::SUCCESS
        }
        extern "C" fn words(_: i32) -> *const c_char {
            c"unhandled".as_ptr()
        }
        Calls {
            version: no_version,
            init_all: no_init,
            destroy,
            abort,
            async_error,
            group_start: nothing,
            group_end: nothing,
            all_reduce: no_sum,
            all_gather: no_gather,
            text: words,
            _library: libloading::os::unix::Library::this().into(),
        }
    }
}

impl Calls {
    fn version_number(&self) -> i32 {
        let mut version = 0;
        // SAFETY: the place is writable.
        if unsafe { (self.version)(&mut version) } == number::SUCCESS { version } else { 0 }
    }

    /// Turns a result into an error, given the device that it concerns. The library has one result for all that CUDA says.
    pub(super) fn said(&self, call: &'static str, result: i32, device: Option<&CudaDevice>) -> Result<(), DeviceError> {
        if matches!(result, number::SUCCESS | number::IN_PROGRESS) {
            return Ok(());
        }
        let memory = device.filter(|_| result == number::UNHANDLED_CUDA_ERROR).map(CudaDevice::memory);
        match memory {
            Some(Err(lost)) if lost.is_lost() => Err(lost),
            Some(Ok(memory)) if memory.free < TAKEN_MOST => {
                let hint = "stop other processes on the GPU: NCCL could not allocate memory for itself".to_owned();
                Err(DeviceError::Refused { asked: Bytes::ZERO, free: memory.free, hint })
            }
            _ => Err(DeviceError::Driver { call, said: self.words(result) }),
        }
    }

    /// The library's words for a result.
    pub(super) fn words(&self, result: i32) -> String {
        // SAFETY: it takes any number, and returns a text that lives as long as the library.
        let text = unsafe { (self.text)(result) };
        if text.is_null() {
            return format!("result {result}");
        }
        // SAFETY: as above.
        format!("{} ({result})", unsafe { CStr::from_ptr(text) }.to_string_lossy())
    }
}

/// More than NCCL takes of a device for a group; less free memory than this is why it failed.
const TAKEN_MOST: Bytes = Bytes::gib(2);

/// The library's number for an element type.
pub(super) fn number_of(dtype: DType) -> i32 {
    match dtype {
        DType::BF16 => number::BFLOAT16,
        DType::F16 => number::FLOAT16,
        DType::F32 => number::FLOAT32,
        other => unreachable!("{other:?} is never summed over ranks"),
    }
}

/// The first candidate that is NCCL. `folders` and `why` are for the error.
fn find(candidates: &[PathBuf], folders: &[PathBuf], why: &str) -> Result<Calls, OpenError> {
    let mut bad = None;
    for candidate in candidates {
        // SAFETY: a library by NVIDIA, whose initialisers may run at any time.
        let Ok(library) = (unsafe { Library::new(candidate) }) else { continue };
        // SAFETY: its name says it is NCCL; a library that lacks a call is refused.
        let reason = match unsafe { Calls::of(library) } {
            Ok(calls) if calls.version_number() >= VERSION_MIN => return Ok(calls),
            Ok(calls) => {
                format!("its version is {}; expected {VERSION_MIN} or later", calls.version_number())
            }
            // The system's own message is one level down.
            Err(error) => error.source().map_or_else(|| error.to_string(), ToString::to_string),
        };
        bad = Some((candidate.display().to_string(), reason));
    }
    Err(match bad {
        Some((library, reason)) => OpenError::BadNccl { library, reason },
        None => OpenError::NoNccl { why: why.to_owned(), names: NAMES.to_vec(), folders: folders.to_vec() },
    })
}

#[cfg(test)]
mod tests {
    use bursar_budgets::Hint;

    use super::*;

    #[test]
    fn a_machine_without_nccl_is_told_why_it_is_wanted_and_where_it_was_looked_for() {
        let nowhere = PathBuf::from("/nowhere/lib");
        let candidates = NAMES.map(|name| nowhere.join(name));
        let why = "cuda:0 cannot access the memory of cuda:1";
        let error = find(&candidates, &[nowhere], why).map(drop).expect_err("it is not there");
        let said = error.to_string();
        assert_eq!(
            said,
            "NCCL is needed because cuda:0 cannot access the memory of cuda:1, but was not found: looked for \
             libnccl.so.2, libnccl.so in the system's folders, /nowhere/lib"
        );
        let hint = error.hint().expect("there is something to do");
        assert!(hint.contains("pip install nvidia-nccl-cu12") && hint.contains("BURSAR_CUDA_LIB"), "{hint}");
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn a_library_that_is_called_nccl_and_is_not_it_is_named_with_what_it_lacks() {
        let other = PathBuf::from("libm.so.6");
        let error =
            find(&[PathBuf::from("/nowhere/libnccl.so.2"), other], &[], "").map(drop).expect_err("it is not it");
        let OpenError::BadNccl { library, reason } = &error else { panic!("{error:?}") };
        assert!(library == "libm.so.6" && reason.contains("ncclGetVersion"), "{error}");
        assert!(error.hint().is_some());
    }
}
