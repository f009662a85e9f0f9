//! What the driver itself does not say: how much of a device is free before this process has a context on it, how much of
//! it each process holds, and the driver's release. From NVIDIA's management library (NVML), where it is installed.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::Bytes;

const NAMES: [&str; 3] = ["libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll"];

/// Bytes that the driver's release takes at most, with its zero: `NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE`.
const RELEASE_BYTES: usize = 80;

/// What a call says when more processes are there than it was given room for: `NVML_ERROR_INSUFFICIENT_SIZE`.
const TOO_LITTLE_ROOM: c_int = 7;

/// What stands for the bytes of a process that the library may not know: `NVML_VALUE_NOT_AVAILABLE`.
const UNKNOWN: u64 = u64::MAX;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`, as it is since the second version of the call.
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

/// The library, with a device that it knows. To start it takes longer than to ask it, so it is kept.
pub(super) struct Nvml {
    /// The device's, which is good until the library is shut down.
    handle: *mut c_void,
    /// Started, and shut down when this drops.
    library: Library,
}

// SAFETY: its functions may be called from any thread (NVML's manual: "thread-safe"), and a handle is but a name for them.
unsafe impl Send for Nvml {}
// SAFETY: as above.
unsafe impl Sync for Nvml {}

impl Nvml {
    /// None where the library is missing, or does not know the device by this name (as with a part of one).
    pub(super) fn of(uuid: &[c_char; 16]) -> Option<Nvml> {
        // SAFETY: it is NVIDIA's library, whose start has no conditions.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        let name = CString::new(name_of(uuid)).expect("digits and dashes");
        // SAFETY: the functions have these types since the library's first versions, and all they write to is there.
        unsafe {
            if library.get::<Start>(b"nvmlInit_v2\0").ok()?() != 0 {
                return None;
            }
            // From here on it is shut down whatever follows.
            let mut nvml = Nvml { handle: std::ptr::null_mut(), library };
            let by_uuid = *nvml.library.get::<HandleByUuid>(b"nvmlDeviceGetHandleByUUID\0").ok()?;
            (by_uuid(name.as_ptr(), &mut nvml.handle) == 0).then_some(nvml)
        }
    }

    /// Free bytes of the device.
    pub(super) fn free_bytes(&self) -> Option<Bytes> {
        let mut memory = Memory::default();
        // SAFETY: as above.
        let said = unsafe {
            let info = self.library.get::<MemoryInfo>(b"nvmlDeviceGetMemoryInfo\0").ok()?;
            info(self.handle, &mut memory)
        };
        (said == 0).then_some(Bytes(memory.free))
    }

    /// What this process holds of the device. None where the library does not see it: in a container it may know processes
    /// by the numbers of their host, or none of them.
    pub(super) fn process_bytes(&self) -> Option<Bytes> {
        let ours = std::process::id();
        let used = self.processes()?.into_iter().find(|process| process.pid == ours)?.used;
        (used != UNKNOWN).then_some(Bytes(used))
    }

    /// Who computes on the device.
    fn processes(&self) -> Option<Vec<Process>> {
        let mut room = 16;
        // More may come between two calls, but not again and again.
        for _ in 0..4 {
            let mut found = vec![Process::default(); room];
            let mut count = room as c_uint;
            // SAFETY: as above; as many are written as there is said to be room for.
            let said = unsafe {
                let running = self.library.get::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v3\0").ok()?;
                running(self.handle, &mut count, found.as_mut_ptr())
            };
            match said {
                0 => {
                    found.truncate(count as usize);
                    return Some(found);
                }
                TOO_LITTLE_ROOM => room = 2 * room.max(count as usize),
                _ => return None,
            }
        }
        None
    }

    /// The driver's release, as 580.126.09.
    pub(super) fn driver_release(&self) -> Option<String> {
        let mut release: [c_char; RELEASE_BYTES] = [0; RELEASE_BYTES];
        // SAFETY: as above; the last byte is not offered, so that a zero stands behind whatever is written.
        unsafe {
            let version = self.library.get::<DriverVersion>(b"nvmlSystemGetDriverVersion\0").ok()?;
            let known = version(release.as_mut_ptr(), (RELEASE_BYTES - 1) as c_uint) == 0;
            known.then(|| CStr::from_ptr(release.as_ptr()).to_string_lossy().into_owned())
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: it was started once for this, and nobody is left to ask it.
        if let Ok(shutdown) = unsafe { self.library.get::<Start>(b"nvmlShutdown\0") } {
            unsafe { shutdown() };
        }
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
