//! cuBLASLt's functions, as declared in `cublasLt.h` of CUDA 12.4 to 13.0.

use std::{error::Error, ffi::c_void, path::PathBuf, sync::Arc};

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError, DeviceMemory};
use cudarc::driver::sys::CUstream;
use libloading::Library;
use serde::{Deserialize, Serialize};

use super::super::super::{
    error::OpenError,
    search::{BLAS_NAMES, BlasSearch},
};

/// An opaque pointer to one of the library's objects.
pub(super) type Handle = *mut c_void;

/// An opaque algorithm, copied as bytes. Another process may use it with the same version of the
/// library, according to the manual on `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::cuda) struct Algorithm([u64; 8]);

/// One result of the library's heuristic.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Proposal {
    pub algorithm: Algorithm,
    pub workspace: usize,
    pub status: i32,
    waves: f32,
    reserved: [i32; 4],
}

impl Proposal {
    pub(super) const NONE: Proposal =
        Proposal { algorithm: Algorithm([0; 8]), workspace: 0, status: -1, waves: 0.0, reserved: [0; 4] };
}

/// Constants from `cublasLt.h`.
pub(super) mod number {
    pub const SUCCESS: i32 = 0;
    pub const COMPUTE_32F: i32 = 68;
    pub const DESC_TRANSA: i32 = 3;
    pub const DESC_EPILOGUE: i32 = 7;
    pub const DESC_BIAS_POINTER: i32 = 8;
    pub const DESC_A_SCALE_POINTER: i32 = 17;
    pub const DESC_B_SCALE_POINTER: i32 = 18;
    pub const DESC_BIAS_TYPE: i32 = 26;
    // The constants for scale modes exist from version 12.9 on. Earlier versions refuse them.
    pub const DESC_A_SCALE_MODE: i32 = 31;
    pub const DESC_B_SCALE_MODE: i32 = 32;
    pub const SCALE_EACH_ROW: i32 = 3;
    /// One scale for each 128 adjacent elements of the innermost dimension. In memory, scales of
    /// adjacent rows are adjacent.
    pub const SCALE_EACH_128: i32 = 4;
    /// One scale for each block of 128 x 128. Each row of blocks is padded to a
    /// multiple of four scales.
    pub const SCALE_EACH_BLOCK: i32 = 5;
    pub const OP_TRANSPOSED: i32 = 1;
    pub const EPILOGUE_BIAS: i32 = 4;
    pub const PREFERENCE_WORKSPACE: i32 = 1;
    pub const PREFERENCE_REDUCTION: i32 = 3;
    /// Partial sums are added in f32. Other schemes round each partial sum to the output's type.
    pub const REDUCTION_IN_COMPUTE_TYPE: u32 = 2;

    /// Returns the `cudaDataType` of elements of type `dtype`.
    pub fn of(dtype: crate::DType) -> i32 {
        match dtype {
            crate::DType::F32 => 0,
            crate::DType::BF16 => 14,
            crate::DType::F8E4M3 => 28,
            _ => 2,
        }
    }
}

macro_rules! calls {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        struct Calls {
            $($field: unsafe extern "C" fn($($argument),*) -> i32,)*
            version: unsafe extern "C" fn() -> usize,
            /// Declared after the functions, so that the library is unloaded after their last use.
            _library: Library,
        }

        impl Calls {
            /// # Safety
            /// `library` must be cuBLASLt.
            unsafe fn of(library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: the symbols have these types in cuBLASLt, and the caller guarantees that
                // the library is cuBLASLt.
                unsafe {
                    $(let $field = *library.get($symbol)?;)*
                    let version = *library.get(b"cublasLtGetVersion")?;
                    Ok(Calls { $($field,)* version, _library: library })
                }
            }
        }
    };
}

calls! {
    create = b"cublasLtCreate": fn(*mut Handle);
    destroy = b"cublasLtDestroy": fn(Handle);
    desc_create = b"cublasLtMatmulDescCreate": fn(*mut Handle, i32, i32);
    desc_destroy = b"cublasLtMatmulDescDestroy": fn(Handle);
    desc_set = b"cublasLtMatmulDescSetAttribute": fn(Handle, i32, *const c_void, usize);
    layout_create = b"cublasLtMatrixLayoutCreate": fn(*mut Handle, i32, u64, u64, i64);
    layout_destroy = b"cublasLtMatrixLayoutDestroy": fn(Handle);
    preference_create = b"cublasLtMatmulPreferenceCreate": fn(*mut Handle);
    preference_destroy = b"cublasLtMatmulPreferenceDestroy": fn(Handle);
    preference_set = b"cublasLtMatmulPreferenceSetAttribute": fn(Handle, i32, *const c_void, usize);
    heuristic = b"cublasLtMatmulAlgoGetHeuristic":
        fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Proposal, *mut i32);
    check = b"cublasLtMatmulAlgoCheck":
        fn(Handle, Handle, Handle, Handle, Handle, Handle, *const Algorithm, *mut Proposal);
    matmul = b"cublasLtMatmul":
        fn(Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void,
           Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, CUstream);
}

/// The library with a handle, shared by all lanes of a device.
pub(in crate::cuda) struct Blas {
    calls: Arc<Calls>,
    handle: Handle,
    device: Arc<CudaDevice>,
}

// SAFETY: the library documents that several threads may use a handle at the same time.
unsafe impl Send for Blas {}
// SAFETY: the library documents that several threads may use a handle at the same time, and
// nothing else changes.
unsafe impl Sync for Blas {}

/// An object created by the library: a description, a layout or a preference.
pub(super) struct Object {
    raw: Handle,
    destroy: unsafe extern "C" fn(Handle) -> i32,
    /// Keeps the library of `destroy` loaded.
    _calls: Arc<Calls>,
}

// SAFETY: the object is not tied to a thread, and this is the only pointer to it.
unsafe impl Send for Object {}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: this is the only pointer to the object, and this is its last use.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// Descriptions of one GEMM's operands.
pub(super) struct Operands<'a> {
    pub desc: &'a Object,
    pub weight: &'a Object,
    pub x: &'a Object,
    pub out: &'a Object,
}

/// Addresses of one GEMM's operands.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub weight: u64,
    pub x: u64,
    pub out: u64,
    /// Factor that `out` is multiplied by before the product is added: 0 or 1.
    pub keep: f32,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

impl Blas {
    /// Finds and loads the library, and creates a handle.
    pub(in crate::cuda) fn open(device: &Arc<CudaDevice>, search: &BlasSearch) -> Result<Self, OpenError> {
        device.enter()?;
        // Keep the library open as long as the device's context: closing it would leave the kernels
        // that it loaded on the device, and opening it again would load them a second time.
        let (candidates, folders) = (search.candidates(), search.folders());
        let calls = device.kept(&format!("cuBLASLt of {candidates:?}"), || find(&candidates, folders))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the handle is writable, and the context is current.
        check("cublasLtCreate", unsafe { (calls.create)(&mut handle) })?;
        Ok(Blas { calls, handle, device: device.clone() })
    }

    /// Returns the version as a number, such as 130,002 for 13.0.2.
    pub(in crate::cuda) fn version(&self) -> usize {
        // SAFETY: the function has no arguments and may be called at any time.
        unsafe { (self.calls.version)() }
    }

    pub(super) fn desc(&self) -> Result<Object, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a local variable, so the new handle may be written to it.
        let made = unsafe { (self.calls.desc_create)(&mut raw, number::COMPUTE_32F, number::of(crate::DType::F32)) };
        check("cublasLtMatmulDescCreate", made)?;
        Ok(self.object(raw, self.calls.desc_destroy))
    }

    pub(super) fn set<T: Copy>(&self, desc: &Object, attribute: i32, value: T) -> Result<(), DeviceError> {
        // SAFETY: the value has the attribute's size, because each caller passes a value
        // of the attribute's type.
        let set = unsafe { (self.calls.desc_set)(desc.raw, attribute, (&raw const value).cast(), size_of::<T>()) };
        check("cublasLtMatmulDescSetAttribute", set)
    }

    fn prefer<T: Copy>(&self, preference: &Object, attribute: i32, value: T) -> Result<(), DeviceError> {
        let set = self.calls.preference_set;
        // SAFETY: the value has the attribute's size, because each caller passes a value
        // of the attribute's type.
        let set = unsafe { set(preference.raw, attribute, (&raw const value).cast(), size_of::<T>()) };
        check("cublasLtMatmulPreferenceSetAttribute", set)
    }

    /// Describes a column-major matrix, which is how the library sees this project's rows.
    pub(super) fn layout(&self, kind: i32, rows: usize, columns: usize, pitch: usize) -> Result<Object, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a local variable, so the new handle may be written to it.
        let made = unsafe { (self.calls.layout_create)(&mut raw, kind, rows as u64, columns as u64, pitch as i64) };
        check("cublasLtMatrixLayoutCreate", made)?;
        Ok(self.object(raw, self.calls.layout_destroy))
    }

    /// Returns the library's proposals, best guess first.
    pub(super) fn proposals(
        &self,
        operands: &Operands<'_>,
        workspace_bytes: usize,
        most: usize,
    ) -> Result<Vec<Proposal>, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a local variable, so the new handle may be written to it.
        check("cublasLtMatmulPreferenceCreate", unsafe { (self.calls.preference_create)(&mut raw) })?;
        let preference = self.object(raw, self.calls.preference_destroy);
        let (mut found, mut proposals) = (0, vec![Proposal::NONE; most]);
        self.prefer(&preference, number::PREFERENCE_WORKSPACE, workspace_bytes)?;
        self.prefer(&preference, number::PREFERENCE_REDUCTION, number::REDUCTION_IN_COMPUTE_TYPE)?;
        // SAFETY: all objects are alive, and `proposals` has `most` entries.
        unsafe {
            let Operands { desc, weight, x, out } = operands;
            let asked = (self.calls.heuristic)(
                self.handle,
                desc.raw,
                weight.raw,
                x.raw,
                out.raw,
                out.raw,
                preference.raw,
                most as i32,
                proposals.as_mut_ptr(),
                &mut found,
            );
            check("cublasLtMatmulAlgoGetHeuristic", asked)?;
        }
        proposals.truncate(found.max(0) as usize);
        proposals.retain(|proposal| proposal.status == number::SUCCESS);
        Ok(proposals)
    }

    /// Returns `true` if an algorithm that was chosen for another GEMM supports this GEMM.
    pub(super) fn serves(&self, operands: &Operands<'_>, algorithm: &Algorithm, workspace_bytes: usize) -> bool {
        let mut proposal = Proposal::NONE;
        let Operands { desc, weight, x, out } = operands;
        // SAFETY: all objects are alive, and the proposal is writable.
        let checked = unsafe {
            let check = self.calls.check;
            check(self.handle, desc.raw, weight.raw, x.raw, out.raw, out.raw, algorithm, &mut proposal)
        };
        checked == number::SUCCESS && proposal.status == number::SUCCESS && proposal.workspace <= workspace_bytes
    }

    /// Launches a GEMM in the stream.
    ///
    /// # Safety
    /// `memory` must match the descriptions in `operands`.
    pub(super) unsafe fn multiply(
        &self,
        operands: &Operands<'_>,
        memory: Memory,
        algorithm: &Algorithm,
        stream: CUstream,
    ) -> Result<(), DeviceError> {
        let Operands { desc, weight, x, out } = operands;
        let one = 1.0f32;
        // SAFETY: the caller guarantees that the memory matches the operands; the factors are read
        // before the call returns.
        let status = unsafe {
            (self.calls.matmul)(
                self.handle,
                desc.raw,
                (&raw const one).cast(),
                memory.weight as *const c_void,
                weight.raw,
                memory.x as *const c_void,
                x.raw,
                (&raw const memory.keep).cast(),
                memory.out as *const c_void,
                out.raw,
                memory.out as *mut c_void,
                out.raw,
                algorithm,
                memory.workspace as *mut c_void,
                memory.workspace_bytes,
                stream,
            )
        };
        check("cublasLtMatmul", status).map_err(|error| match status {
            11 | 13 | 14 => self.why(error),
            _ => error,
        })
    }

    /// Replaces the error of a failed GEMM by a more specific error, if the device knows the cause.
    /// The library returns the same statuses for a broken context, for kernels that could not be
    /// loaded for lack of memory, and for a failed launch.
    fn why(&self, error: DeviceError) -> DeviceError {
        match self.device.memory() {
            Err(lost) if lost.is_lost() => lost,
            Ok(DeviceMemory { free, .. }) if free < LOADED_MOST => no_memory(free),
            _ => error,
        }
    }

    fn object(&self, raw: Handle, destroy: unsafe extern "C" fn(Handle) -> i32) -> Object {
        Object { raw, destroy, _calls: self.calls.clone() }
    }
}

/// Loads the first candidate that is a usable cuBLASLt. `folders` is only used
/// in the error message.
fn find(candidates: &[PathBuf], folders: &[PathBuf]) -> Result<Calls, OpenError> {
    let mut bad = None;
    for candidate in candidates {
        // SAFETY: the file is a library by NVIDIA, whose initializers may run at any time.
        let Ok(library) = (unsafe { Library::new(candidate) }) else { continue };
        // SAFETY: the file has a name of cuBLASLt, and a library that lacks one of
        // the functions is refused.
        match unsafe { Calls::of(library) } {
            Ok(calls) => return Ok(calls),
            Err(error) => {
                // The operating system's own message is the source of the error.
                let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                bad = Some((candidate.display().to_string(), reason));
            }
        }
    }
    Err(match bad {
        Some((library, reason)) => OpenError::BadBlas { library, reason },
        None => OpenError::NoBlas { names: BLAS_NAMES.to_vec(), folders: folders.to_vec() },
    })
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: the handle is destroyed only here, and the lanes that used it are gone.
            unsafe { (self.calls.destroy)(self.handle) };
        }
    }
}

/// A generous upper bound on the memory that the library loads for one GEMM: it loaded 14 MiB for
/// all GEMMs of a model.
const LOADED_MOST: Bytes = Bytes::mib(32);

/// Turns a status into an error. For a failed GEMM, [`Blas::why`] may replace the error with a more
/// specific error.
fn check(call: &'static str, status: i32) -> Result<(), DeviceError> {
    let name = match status {
        number::SUCCESS => return Ok(()),
        1 => "not initialized",
        3 => "no memory",
        7 => "an invalid value",
        8 => "an unsupported architecture",
        11 => "a mapping error",
        13 => "execution failed",
        14 => "an internal error",
        15 => "not supported",
        _ => "an unknown status",
    };
    match status {
        3 => Err(no_memory(Bytes::ZERO)),
        _ => Err(DeviceError::Driver { call, message: format!("{name} ({status})") }),
    }
}

fn no_memory(free: Bytes) -> DeviceError {
    let hint = "stop other processes on the GPU: cuBLASLt could not allocate memory for itself".to_owned();
    DeviceError::Refused { asked: Bytes::ZERO, free, hint }
}

#[cfg(test)]
mod tests {
    use bursar_budgets::Hint;

    use super::*;

    #[test]
    fn a_machine_without_cublaslt_is_told_where_it_was_looked_for_and_what_to_install() {
        let nowhere = PathBuf::from("/nowhere/lib");
        let candidates = BLAS_NAMES.map(|name| nowhere.join(name));
        let error = find(&candidates, &[nowhere]).map(drop).expect_err("the library does not exist");
        assert!(matches!(error, OpenError::NoBlas { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.starts_with("cuBLASLt was not found") && message.contains("/nowhere/lib"), "{message}");
        assert!(BLAS_NAMES.iter().all(|name| message.contains(name)), "{message}");
        let hint = error.hint().expect("the error has a hint");
        assert!(hint.contains("pip install nvidia-cublas") && hint.contains("BURSAR_CUDA_LIB"), "{hint}");
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn a_library_that_is_called_cublaslt_and_is_not_it_is_named_with_what_it_lacks() {
        // The test needs any library other than cuBLASLt.
        let other = PathBuf::from("libm.so.6");
        let error = find(&[PathBuf::from("/nowhere/libcublasLt.so.13"), other], &[])
            .map(drop)
            .expect_err("the file is not cuBLASLt");
        let OpenError::BadBlas { library, reason } = &error else { panic!("{error:?}") };
        assert!(library == "libm.so.6" && reason.contains("cublasLtCreate"), "{error}");
        assert!(error.hint().is_some());
    }
}
