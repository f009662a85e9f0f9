//! NCCL's functions, as declared in `nccl.h` of versions 2.14 to 2.28.

use std::{
    error::Error,
    ffi::{CStr, c_char, c_void},
    path::PathBuf,
    sync::Arc,
};

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError};
use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::super::{error::OpenError, search::BlasSearch};
use crate::DType;

/// File names of the library. All supported versions have the functions that this project uses.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest supported version, in the library's numbering. Captured graphs and aborted
/// communicators work correctly since this version.
const VERSION_MIN: i32 = 21_400;

/// An opaque pointer to a communicator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Communicator(pub(super) *mut c_void);

// SAFETY: any thread may use a communicator, one thread at a time. Another thread may abort the
// communicator at the same time. `Watch` follows these rules.
unsafe impl Send for Communicator {}
// SAFETY: `Watch` ensures that one thread at a time uses the communicator, apart from the thread
// that aborts it, which NCCL allows.
unsafe impl Sync for Communicator {}

/// Constants from `nccl.h`.
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
            /// Declared after the functions, so that the library is unloaded after their last use.
            _library: Library,
        }

        impl Calls {
            /// # Safety
            /// `library` must be NCCL.
            unsafe fn of(library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: the symbols have these types in NCCL, and the caller guarantees that
                // the library is NCCL.
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

/// NCCL, loaded at run time.
pub struct Nccl(pub(super) Arc<Calls>);

impl Nccl {
    /// Finds NCCL in the folders of `search` and loads it for `devices`. `why` is the reason why
    /// NCCL is needed, and becomes part of the error message.
    ///
    /// # Errors
    /// [`OpenError::NoNccl`] and [`OpenError::BadNccl`].
    pub fn open(devices: &[Arc<CudaDevice>], search: &BlasSearch, why: &str) -> Result<Self, OpenError> {
        let (candidates, folders) = (search.files(&NAMES), search.folders());
        let find = || find(&candidates, folders, why);
        match devices.first() {
            // Keep the library open as long as the device's context, like cuBLASLt: closing it
            // would leave the kernels that it loaded on the device.
            Some(device) => Ok(Nccl(device.kept(&format!("NCCL of {candidates:?}"), find)?)),
            None => Ok(Nccl(Arc::new(find()?))),
        }
    }

    /// Returns the version in the library's numbering: 2.27.5 is 22,705.
    pub fn version(&self) -> i32 {
        self.0.version_number()
    }
}

#[cfg(test)]
impl Calls {
    /// A fake library whose functions do nothing, except the given ones.
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
        // SAFETY: `version` is writable.
        if unsafe { (self.version)(&mut version) } == number::SUCCESS { version } else { 0 }
    }

    /// Returns an error unless the call succeeded or is still in progress. `device` is the device
    /// that the call concerned. NCCL returns the same code for all CUDA errors, so this function
    /// checks whether the device is lost or out of memory.
    pub(super) fn check(
        &self,
        call: &'static str,
        result: i32,
        device: Option<&CudaDevice>,
    ) -> Result<(), DeviceError> {
        if matches!(result, number::SUCCESS | number::IN_PROGRESS) {
            return Ok(());
        }
        let memory = device.filter(|_| result == number::UNHANDLED_CUDA_ERROR).map(CudaDevice::memory);
        match memory {
            Some(Err(lost)) if lost.is_lost() => Err(lost),
            Some(Ok(memory)) if memory.free < GROUP_BYTES_MAX => {
                let hint = "stop other processes on the GPU: NCCL could not allocate memory for itself".to_owned();
                Err(DeviceError::Refused { asked: Bytes::ZERO, free: memory.free, hint })
            }
            _ => Err(DeviceError::Driver { call, message: self.words(result) }),
        }
    }

    /// Returns NCCL's message for a result code.
    pub(super) fn words(&self, result: i32) -> String {
        // SAFETY: the function accepts any number, and returns null or a text that lives as
        // long as the library.
        let text = unsafe { (self.text)(result) };
        if text.is_null() {
            return format!("result {result}");
        }
        // SAFETY: the pointer is not null, and NCCL's messages are C strings that live as
        // long as the library.
        format!("{} ({result})", unsafe { CStr::from_ptr(text) }.to_string_lossy())
    }
}

/// An upper bound on the device memory that NCCL allocates for a group. If less memory is free, a
/// failure is reported as a lack of memory.
const GROUP_BYTES_MAX: Bytes = Bytes::gib(2);

/// Returns NCCL's constant for an element type.
pub(super) fn number_of(dtype: DType) -> i32 {
    match dtype {
        DType::BF16 => number::BFLOAT16,
        DType::F16 => number::FLOAT16,
        DType::F32 => number::FLOAT32,
        other => unreachable!("numbers of {other:?} are never summed over ranks"),
    }
}

/// Formats a version as NCCL's releases are named: 21,400 is 2.14.0. Before 2.9, the minor version
/// had one digit: 2,804 is 2.8.4.
fn version_text(number: i32) -> String {
    let (major, minor) = if number < 10_000 { (1_000, 10) } else { (10_000, 100) };
    format!("{}.{}.{}", number / major, number / 100 % minor, number % 100)
}

/// Loads the first candidate that is a usable NCCL. `folders` and `why` are only used
/// in the error message.
fn find(candidates: &[PathBuf], folders: &[PathBuf], why: &str) -> Result<Calls, OpenError> {
    let mut bad = None;
    for candidate in candidates {
        // SAFETY: the file is a library by NVIDIA, whose initializers may run at any time.
        let Ok(library) = (unsafe { Library::new(candidate) }) else { continue };
        // SAFETY: the file has a name of NCCL, and a library that lacks one of
        // the functions is refused.
        let reason = match unsafe { Calls::of(library) } {
            Ok(calls) if calls.version_number() >= VERSION_MIN => return Ok(calls),
            Ok(calls) => {
                let [found, least] = [calls.version_number(), VERSION_MIN].map(version_text);
                format!("its version is {found}; expected {least} or later")
            }
            // The operating system's own message is the source of the error.
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
    fn a_missing_nccl_error_names_the_reason_and_searched_folders() {
        let nowhere = PathBuf::from("/nowhere/lib");
        let candidates = NAMES.map(|name| nowhere.join(name));
        let why = "cuda:0 cannot access the memory of cuda:1";
        let error = find(&candidates, &[nowhere], why).map(drop).expect_err("the library does not exist");
        let message = error.to_string();
        assert_eq!(
            message,
            "NCCL is needed because cuda:0 cannot access the memory of cuda:1, but was not found: looked for \
             libnccl.so.2, libnccl.so in the system's folders, /nowhere/lib"
        );
        let hint = error.hint().expect("the error has a hint");
        assert!(hint.contains("pip install nvidia-nccl-cu12") && hint.contains("BURSAR_CUDA_LIB"), "{hint}");
    }

    #[test]
    fn versions_print_as_release_names() {
        assert_eq!([VERSION_MIN, 22_907, 2_804].map(version_text), ["2.14.0", "2.29.7", "2.8.4"]);
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn a_library_without_nccl_symbols_is_refused_by_name() {
        let other = PathBuf::from("libm.so.6");
        let error = find(&[PathBuf::from("/nowhere/libnccl.so.2"), other], &[], "")
            .map(drop)
            .expect_err("the file is not NCCL");
        let OpenError::BadNccl { library, reason } = &error else { panic!("{error:?}") };
        assert!(library == "libm.so.6" && reason.contains("ncclGetVersion"), "{error}");
        assert!(error.hint().is_some());
    }
}
