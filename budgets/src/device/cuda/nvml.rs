//! Facts that only NVIDIA's management library (NVML) reports, if it is installed: the free
//! memory of a device before this process has a context, the memory that each process holds,
//! and the driver's release.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::Bytes;

const NAMES: [&str; 3] = ["libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll"];

/// The maximum length of a driver release, including its terminating zero:
/// `NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE`.
const RELEASE_BYTES: usize = 80;

/// The result of a call whose buffer is too small for all processes:
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: c_int = 7;

/// The byte count of a process whose memory the library cannot determine:
/// `NVML_VALUE_NOT_AVAILABLE`.
const UNKNOWN: u64 = u64::MAX;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`, in the layout that version 2 of the call introduced.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

type Start = unsafe extern "C" fn() -> c_int;
type HandleByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type MemoryInfo = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int;
type Processes = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut Process) -> c_int;
type DriverVersion = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;

/// The library and one device. Initializing the library takes longer than a query,
/// so it stays loaded.
pub(super) struct Nvml {
    /// The device's handle, valid until the library is shut down.
    handle: *mut c_void,
    /// The initialized library. Dropping this `Nvml` shuts the library down.
    library: Library,
}

// SAFETY: NVML's manual declares its functions thread-safe, and the handle is only an identifier.
unsafe impl Send for Nvml {}
// SAFETY: NVML's manual declares its functions thread-safe, and the handle is only an identifier.
unsafe impl Sync for Nvml {}

impl Nvml {
    /// Returns `None` if the library is missing, cannot be initialized, or does not know a device
    /// with this UUID. For example, it does not know the UUID of a partition of a GPU.
    pub(super) fn of(uuid: &[c_char; 16]) -> Option<Nvml> {
        // SAFETY: this is NVIDIA's library, and loading it has no preconditions.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        let name = CString::new(name_of(uuid)).expect("the name of a GPU has only digits and dashes");
        // SAFETY: these function types have not changed since the library's first versions, and all
        // output pointers are valid.
        unsafe {
            if library.get::<Start>(b"nvmlInit_v2\0").ok()?() != 0 {
                return None;
            }
            // From here on, dropping `nvml` shuts the library down.
            let mut nvml = Nvml { handle: std::ptr::null_mut(), library };
            let by_uuid = *nvml.library.get::<HandleByUuid>(b"nvmlDeviceGetHandleByUUID\0").ok()?;
            (by_uuid(name.as_ptr(), &mut nvml.handle) == 0).then_some(nvml)
        }
    }

    pub(super) fn free_bytes(&self) -> Option<Bytes> {
        let mut memory = Memory::default();
        // SAFETY: this function type is stable, and the handle and the output pointer are valid.
        let status = unsafe {
            let info = self.library.get::<MemoryInfo>(b"nvmlDeviceGetMemoryInfo\0").ok()?;
            info(self.handle, &mut memory)
        };
        (status == 0).then_some(Bytes(memory.free))
    }

    /// The bytes that this process holds on the device. `None` if the library cannot determine
    /// them, or does not see this process: in a container, the library may see process ids of the
    /// host, or no processes.
    pub(super) fn process_bytes(&self) -> Option<Bytes> {
        let ours = std::process::id();
        let used = self.processes()?.into_iter().find(|process| process.pid == ours)?.used;
        (used != UNKNOWN).then_some(Bytes(used))
    }

    /// The processes with a compute context on the device.
    fn processes(&self) -> Option<Vec<Process>> {
        let mut capacity = 16;
        // More processes may start between two calls, but not many times in a row.
        for _ in 0..4 {
            let mut found = vec![Process::default(); capacity];
            let mut count = capacity as c_uint;
            // SAFETY: this function type is stable, the handle is valid, and the call writes
            // at most `count` entries.
            let status = unsafe {
                let running = self.library.get::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v3\0").ok()?;
                running(self.handle, &mut count, found.as_mut_ptr())
            };
            match status {
                0 => {
                    found.truncate(count as usize);
                    return Some(found);
                }
                INSUFFICIENT_SIZE => capacity = 2 * capacity.max(count as usize),
                _ => return None,
            }
        }
        None
    }

    /// The driver's release, such as 580.126.09.
    pub(super) fn driver_release(&self) -> Option<String> {
        let mut release: [c_char; RELEASE_BYTES] = [0; RELEASE_BYTES];
        // SAFETY: this function type is stable. The buffer is zeroed, and the call may not write to
        // its last byte, so the string is terminated.
        unsafe {
            let version = self.library.get::<DriverVersion>(b"nvmlSystemGetDriverVersion\0").ok()?;
            let known = version(release.as_mut_ptr(), (RELEASE_BYTES - 1) as c_uint) == 0;
            known.then(|| CStr::from_ptr(release.as_ptr()).to_string_lossy().into_owned())
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: `of` initialized the library once for this value, and this is its last use.
        if let Ok(shutdown) = unsafe { self.library.get::<Start>(b"nvmlShutdown\0") } {
            unsafe { shutdown() };
        }
    }
}

/// `GPU-` and the bytes in hexadecimal, in groups of 4, 2, 2, 2 and 6 bytes.
fn name_of(uuid: &[c_char; 16]) -> String {
    let hex = |bytes: &[c_char]| bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect::<String>();
    let groups = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| hex(&uuid[range]));
    format!("GPU-{}", groups.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_uuid_that_nvidia_smi_prints() {
        let uuid = std::array::from_fn(|index| (index as u8 * 17) as c_char);
        assert_eq!(name_of(&uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
