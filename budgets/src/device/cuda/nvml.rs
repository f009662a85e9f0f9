//! How much of a device is free before this process has a context on it, which the driver itself does not say. From
//! NVIDIA's management library, where it is installed.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

type Init = unsafe extern "C" fn() -> c_int;
type HandleByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type MemoryInfo = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int;
type DriverVersion = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;

const NAMES: [&str; 3] = ["libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll"];

/// Free bytes of the device; none where the library is missing, or does not know the device by this name (as with a
/// part of one).
pub(super) fn free_bytes(uuid: &[c_char; 16]) -> Option<crate::Bytes> {
    // SAFETY: it is NVIDIA's library, whose start has no conditions.
    let library = NAMES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok())?;
    let name = CString::new(name_of(uuid)).expect("digits and dashes");
    let (mut handle, mut memory) = (std::ptr::null_mut(), Memory::default());
    // SAFETY: the functions have these types since the library's first versions, and all they write to is there.
    unsafe {
        let init = library.get::<Init>(b"nvmlInit_v2\0").ok()?;
        let by_uuid = library.get::<HandleByUuid>(b"nvmlDeviceGetHandleByUUID\0").ok()?;
        let info = library.get::<MemoryInfo>(b"nvmlDeviceGetMemoryInfo\0").ok()?;
        let shutdown = library.get::<Init>(b"nvmlShutdown\0").ok()?;
        if init() != 0 {
            return None;
        }
        let found = by_uuid(name.as_ptr(), &mut handle) == 0 && info(handle, &mut memory) == 0;
        shutdown();
        found.then_some(crate::Bytes(memory.free))
    }
}

/// Bytes that the driver's release takes at most, with its zero: `NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE`.
const RELEASE_BYTES: usize = 80;

/// The driver's release, as 580.126.09; none where the library is missing.
pub(super) fn driver_release() -> Option<String> {
    // SAFETY: as above.
    let library = NAMES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok())?;
    let mut release: [c_char; RELEASE_BYTES] = [0; RELEASE_BYTES];
    // SAFETY: as above; the last byte is not offered, so that a zero stands behind whatever is written.
    unsafe {
        let init = library.get::<Init>(b"nvmlInit_v2\0").ok()?;
        let version = library.get::<DriverVersion>(b"nvmlSystemGetDriverVersion\0").ok()?;
        let shutdown = library.get::<Init>(b"nvmlShutdown\0").ok()?;
        if init() != 0 {
            return None;
        }
        let known = version(release.as_mut_ptr(), (RELEASE_BYTES - 1) as c_uint) == 0;
        shutdown();
        known.then(|| CStr::from_ptr(release.as_ptr()).to_string_lossy().into_owned())
    }
}

/// `GPU-` and the bytes in groups of 4, 2, 2, 2 and 6.
fn name_of(uuid: &[c_char; 16]) -> String {
    let hex = |bytes: &[c_char]| bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect::<String>();
    let groups = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| hex(&uuid[range]));
    format!("GPU-{}", groups.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_as_nvidia_smi_names_it() {
        let uuid = std::array::from_fn(|index| (index as u8 * 17) as c_char);
        assert_eq!(name_of(&uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
