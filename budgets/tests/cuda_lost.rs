//! Loss of a GPU. Driver 580 creates no second context in a process that lost its GPU, so this test
//! is a separate program. Without a GPU, the test prints that it was skipped and passes.

use std::sync::Arc;

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError, Hint};
use cudarc::driver::sys;

/// A kernel that writes to an address where nothing is mapped.
const WILD: &std::ffi::CStr = c".version 7.0
.target sm_52
.address_size 64
.visible .entry wild() {
    .reg .u64 %address;
    .reg .u32 %value;
    mov.u64 %address, 16;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}";

/// Runs the kernel. Returns what the driver reports afterward.
fn run_wild(device: &CudaDevice) -> sys::CUresult {
    device.enter().expect("the device works");
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    let (stream, none) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: all pointers passed to the driver are valid, and the kernel's fault
    // stays on the device.
    unsafe {
        assert_eq!(sys::cuModuleLoadData(&mut module, WILD.as_ptr().cast()), sys::CUresult::CUDA_SUCCESS);
        let name = c"wild".as_ptr();
        assert_eq!(sys::cuModuleGetFunction(&mut function, module, name), sys::CUresult::CUDA_SUCCESS);
        let launched = sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, none, none);
        assert_eq!(launched, sys::CUresult::CUDA_SUCCESS);
        sys::cuCtxSynchronize()
    }
}

#[test]
fn a_device_lost_by_a_wild_write_takes_memory_back() {
    let device = match CudaDevice::open(0) {
        Ok(device) => Arc::new(device),
        Err(error @ DeviceError::NoDevice { .. }) => {
            return println!("skipped, {error}; {}", error.hint().expect("the error has a hint"));
        }
        Err(error) => panic!("{error}"),
    };
    let total = Bytes::gib(2);
    let before = device.memory().expect("the driver reports memory").free;
    let address = device.reserve(Bytes::gib(4)).expect("addresses are reserved");
    device.back(address, total).expect("memory is free");
    let pinned = device.pinned(Bytes::mib(1)).expect("the host has a MiB");
    assert_eq!(run_wild(&device), sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    for what in ["the first", "and every other"] {
        let error = device.memory().expect_err("the device is lost");
        assert!(error.is_lost(), "{what} call after the loss: {error}");
        println!("{what}: {error}");
    }
    assert!(device.check().expect_err("the device reports its loss").is_lost());
    for error in [
        device.back(address.offset(total), Bytes::mib(2)).expect_err("a lost device gives no memory"),
        device.reserve(Bytes::gib(1)).map(drop).expect_err("a lost device gives no addresses"),
        device.pinned(Bytes::mib(1)).map(drop).expect_err("a lost device gives no pinned memory"),
        device.with_overhead("nothing", || Ok::<_, DeviceError>(())).map(drop).expect_err("a lost device is not used"),
    ] {
        assert!(error.is_lost(), "{error}");
    }
    device.unback(address, total).expect("a lost device takes memory back");
    device.release_reservation(address).expect("a lost device takes addresses back");
    drop(pinned);
    assert_eq!((device.counts().backed, device.counts().pinned), (Bytes::ZERO, Bytes::ZERO));
    drop(Arc::into_inner(device).expect("no other handle is left"));
    // The driver decides whether this process can create another context. If not, the hint of the
    // error tells the user to restart the program.
    match CudaDevice::open(0) {
        Ok(device) => {
            let after = device.memory().expect("the driver reports memory").free;
            assert!(before.saturating_sub(after) <= Bytes::mib(4), "{before} free before the loss, {after} after");
            println!("this driver makes another context");
        }
        Err(error) => {
            assert!(error.is_lost() && error.hint().expect("a hint").contains("start the program again"), "{error}");
            println!("this driver makes no other context: {error}");
        }
    }
}
