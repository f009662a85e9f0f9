//! Calls to the CUDA driver, and the conversion of their results to errors.

use std::{ffi::CStr, mem::MaybeUninit};

use cudarc::driver::sys::{self, CUresult};

use crate::{Address, Bytes, DeviceError, DeviceMemory};

/// The oldest supported driver: CUDA 12.4.
const VERSION_MIN: i32 = 12_040;

/// Loads the driver and looks up a device.
pub(super) fn load(ordinal: usize) -> Result<sys::CUdevice, DeviceError> {
    // SAFETY: the call only tries to open libraries by name.
    if !unsafe { sys::is_culib_present() } {
        let hint = "install the NVIDIA driver (it brings libcuda.so.1), or use the host device";
        return Err(missing("the CUDA driver is not installed: libcuda was not found".to_owned(), hint));
    }
    // SAFETY: the library is present, and this is its first call.
    let initialised = unsafe { sys::cuInit(0) };
    started(initialised, || describe(initialised))?;
    served(version()?)?;
    let count = value("cuDeviceGetCount", |out| unsafe { sys::cuDeviceGetCount(out) })?;
    if ordinal as i64 >= i64::from(count) {
        let reason =
            format!("CUDA device {ordinal} does not exist; the driver reports {count} devices, numbered from 0");
        return Err(missing(reason, "choose a smaller number, or check CUDA_VISIBLE_DEVICES"));
    }
    value("cuDeviceGet", |out| unsafe { sys::cuDeviceGet(out, ordinal as i32) })
}

/// The CUDA version of the driver; 12.4 is 12040.
pub(super) fn version() -> Result<i32, DeviceError> {
    value("cuDriverGetVersion", |out| unsafe { sys::cuDriverGetVersion(out) })
}

fn missing(reason: String, hint: &str) -> DeviceError {
    DeviceError::NoDevice { reason, hint: hint.to_owned() }
}

fn unusable(reason: String, hint: &str) -> DeviceError {
    DeviceError::Unusable { reason, hint: hint.to_owned() }
}

/// Checks the result of the driver's first call. A machine without a GPU may have a driver, or the
/// stub library that toolkits install for linking.
fn started(result: CUresult, words: impl Fn() -> String) -> Result<(), DeviceError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_STUB_LIBRARY => {
            let hint = "check that nvidia-smi lists a GPU, or use the host device";
            Err(missing(format!("the CUDA driver found no GPU: {}", words()), hint))
        }
        _ => {
            let hint = "run nvidia-smi and check that the driver matches its kernel module, or use the host device";
            Err(unusable(format!("the CUDA driver could not be initialized: {}", words()), hint))
        }
    }
}

/// Converts a driver error of context creation to an error with a hint. Errors about memory and
/// about a lost device stay unchanged.
pub(super) fn gives_no_context(error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Driver { message, .. } => unusable(
            format!("the driver could not create a CUDA context on the device: {message}"),
            "stop other processes on the GPU (nvidia-smi lists them), or check whether its compute mode allows only \
             one process \
             (nvidia-smi -q -d COMPUTE)",
        ),
        error => error,
    }
}

/// Checks that the driver is new enough. A `version` of 12040 is 12.4.
fn served(version: i32) -> Result<(), DeviceError> {
    if version >= VERSION_MIN {
        return Ok(());
    }
    let (major, minor) = (version / 1000, version % 1000 / 10);
    let reason = format!("the driver supports CUDA {major}.{minor}; expected 12.4 or later");
    Err(unusable(reason, "install a newer NVIDIA driver (550 or later), or use the host device"))
}

pub(super) fn memory() -> Result<DeviceMemory, DeviceError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both output pointers are valid.
    check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
    Ok(DeviceMemory { total: Bytes(total as u64), free: Bytes(free as u64) })
}

/// The allocation properties of a piece on this device.
pub(super) fn properties(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    // SAFETY: the struct contains only numbers, pointers and enums, and zero is a valid value of
    // each.
    let mut properties: sys::CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties
}

/// Lets the device read and write the memory that is mapped at these addresses.
pub(super) fn open(device: sys::CUdevice, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
    let access = sys::CUmemAccessDesc {
        location: properties(device).location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the caller has mapped the whole range, and the count matches the single descriptor.
    check("cuMemSetAccess", unsafe { sys::cuMemSetAccess(address.0, bytes.as_usize(), &access, 1) })
}

/// Whether `device` can read and write memory of `other`.
pub(super) fn reaches(device: sys::CUdevice, other: sys::CUdevice) -> Result<bool, DeviceError> {
    // SAFETY: the output pointer is valid.
    let is_linked = value("cuDeviceCanAccessPeer", |out| unsafe { sys::cuDeviceCanAccessPeer(out, device, other) })?;
    Ok(is_linked != 0)
}

/// The name and text of a result.
pub(super) fn describe(result: CUresult) -> String {
    let text = |get: unsafe extern "C" fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver returns null, or a string that lives as long as the driver.
        unsafe {
            get(result, &mut text);
            if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
        }
    };
    let name = text(error_name).unwrap_or_else(|| format!("error {}", result as u32));
    match text(error_string) {
        Some(sentence) => format!("{name} ({sentence})"),
        None => name,
    }
}

unsafe extern "C" fn error_name(result: CUresult, out: *mut *const std::ffi::c_char) -> CUresult {
    // SAFETY: the caller passes a valid output pointer.
    unsafe { sys::cuGetErrorName(result, out) }
}

unsafe extern "C" fn error_string(result: CUresult, out: *mut *const std::ffi::c_char) -> CUresult {
    // SAFETY: the caller passes a valid output pointer.
    unsafe { sys::cuGetErrorString(result, out) }
}

/// Calls a function that writes one value, and returns the value.
pub(super) fn value<T>(name: &'static str, call: impl FnOnce(*mut T) -> CUresult) -> Result<T, DeviceError> {
    let mut value = MaybeUninit::zeroed();
    check(name, call(value.as_mut_ptr()))?;
    // SAFETY: a successful call has written the value, by the contract of the driver's functions.
    Ok(unsafe { value.assume_init() })
}

/// Converts a driver's result. The requested size is unknown here, so a refusal has `asked` = 0 and
/// the caller sets the field.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<(), DeviceError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let free = match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => memory().map_or(Bytes::ZERO, |memory| memory.free),
        _ => Bytes::ZERO,
    };
    meaning(call, result, || describe(result), free)
}

/// Converts a driver's result, given the driver's message and the number of free bytes.
fn meaning(call: &'static str, result: CUresult, words: impl Fn() -> String, free: Bytes) -> Result<(), DeviceError> {
    use CUresult::*;
    match result {
        CUDA_SUCCESS => Ok(()),
        CUDA_ERROR_OUT_OF_MEMORY => {
            let hint = "lease less, or stop other processes on the GPU (nvidia-smi lists them)".to_owned();
            Err(DeviceError::Refused { asked: Bytes::ZERO, free, hint })
        }
        // These errors are sticky: the context is broken, and every later call
        // reports the same error.
        CUDA_ERROR_ILLEGAL_ADDRESS
        | CUDA_ERROR_LAUNCH_FAILED
        | CUDA_ERROR_LAUNCH_TIMEOUT
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_MISALIGNED_ADDRESS
        | CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUDA_ERROR_INVALID_PC
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_ASSERT
        | CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_CONTAINED
        | CUDA_ERROR_TENSOR_MEMORY_LEAK
        | CUDA_ERROR_MPS_CLIENT_TERMINATED
        | CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUDA_ERROR_DEINITIALIZED
        | CUDA_ERROR_EXTERNAL_DEVICE
        | CUDA_ERROR_UNKNOWN => Err(DeviceError::Lost { reason: format!("{call}: {}", words()) }),
        _ => Err(DeviceError::Driver { call, message: words() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hint;

    #[test]
    fn an_old_driver_is_refused_with_the_required_version() {
        let error = served(12_030).expect_err("CUDA 12.3 is too old");
        assert!(matches!(error, DeviceError::Unusable { .. }));
        assert_eq!(error.to_string(), "the driver supports CUDA 12.3; expected 12.4 or later");
        assert!(error.hint().expect("the error has a hint").contains("550"));
        for version in [12_040, 12_080, 13_000, 13_010] {
            served(version).expect("this version is new enough");
        }
        assert!(served(11_080).expect_err("CUDA 11.8 is too old").to_string().contains("CUDA 11.8"));
    }

    #[test]
    fn a_missing_driver_is_no_device_with_an_install_hint() {
        // SAFETY: the call only tries to open libraries by name.
        if unsafe { sys::is_culib_present() } {
            return println!("skipped, there is a driver here");
        }
        let error = load(0).expect_err("there is no CUDA driver");
        assert!(
            matches!(&error, DeviceError::NoDevice { reason, .. } if reason.contains("CUDA driver is not installed")),
            "{error}"
        );
        assert!(error.hint().expect("the error has a hint").contains("install the NVIDIA driver"));
    }

    #[test]
    fn a_driver_that_fails_to_start_makes_the_device_unusable() {
        let error_of = |result| started(result, || "text".to_owned()).expect_err("the driver does not start");
        started(CUresult::CUDA_SUCCESS, String::new).expect("the driver starts");
        assert!(matches!(error_of(CUresult::CUDA_ERROR_NO_DEVICE), DeviceError::NoDevice { .. }));
        let mismatch = error_of(CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
        assert!(matches!(mismatch, DeviceError::Unusable { .. }), "a mismatch does not count as no device: {mismatch}");
        assert!(mismatch.hint().expect("the error has a hint").contains("nvidia-smi"));
    }

    #[test]
    fn a_device_in_exclusive_use_is_unusable_but_not_lost() {
        let busy = meaning("a call", CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE, || "text".to_owned(), Bytes::ZERO);
        let busy = gives_no_context(busy.expect_err("the call fails"));
        assert!(matches!(&busy, DeviceError::Unusable { reason, .. } if reason.ends_with("text")), "{busy}");
        assert!(busy.hint().expect("the error has a hint").contains("compute mode"));
    }

    #[test]
    fn driver_results_map_to_refused_lost_or_other_errors() {
        check("a call", CUresult::CUDA_SUCCESS).expect("CUDA_SUCCESS is not an error");
        let error_of =
            |result| meaning("a call", result, || "text".to_owned(), Bytes::ZERO).expect_err("the call fails");
        for sticky in [
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_CONTAINED,
            CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
        ] {
            assert!(error_of(sticky).is_lost(), "{sticky:?}");
        }
        let refused = meaning("a call", CUresult::CUDA_ERROR_OUT_OF_MEMORY, || "text".to_owned(), Bytes::mib(3));
        let refused = refused.expect_err("the call fails");
        assert!(matches!(refused, DeviceError::Refused { free, .. } if free == Bytes::mib(3)) && !refused.is_lost());
        let error = error_of(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        assert!(!error.is_lost() && !error.is_refused(), "a launch that is too large fails only its own pass: {error}");
    }
}
