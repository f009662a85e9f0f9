//! Copies of blocks, rows and states to host memory and back on a GPU, and the rates of copies of
//! blocks. Without a GPU, each test prints that it is skipped.

use std::sync::Arc;

use bursar_budgets::{Bytes, CudaDevice, Device};
use bursar_kernels::*;

use crate::{
    GpuLock, gpu_lock,
    ground::{Blocks, copy_to_host_and_back, first_gpu, load, rows_go_and_come_back, states_go_and_come_back},
};

fn backend() -> Option<(GpuLock, Arc<CudaDevice>, Cuda)> {
    let (lock, device) = (gpu_lock(), first_gpu()?);
    let kernels = load(&device, CudaTarget::of(&device).expect("the device reports its target"));
    Some((lock, device, Cuda::new(&kernels).expect("a stream").with_copies().expect("a stream for copies")))
}

#[test]
fn blocks_that_went_to_the_host_come_back_after_what_overwrote_them() {
    let Some((_lock, device, cuda)) = backend() else { return };
    for _ in 0..20 {
        copy_to_host_and_back(&cuda, &(device.clone() as Arc<dyn Device>));
        rows_go_and_come_back(&cuda, &(device.clone() as Arc<dyn Device>));
        states_go_and_come_back(&cuda, &(device.clone() as Arc<dyn Device>));
    }
}

#[test]
fn rates_of_copies_are_told() {
    let Some((_lock, device, cuda)) = backend() else { return };
    // The shape of a 7B model: 896 KiB per block, 32 KiB of it in each layer.
    let shape = KvShape { layers: 28, kv_heads: 4, head_dim: 128, dtype: DType::BF16 };
    let blocks = Blocks::new(&(device.clone() as Arc<dyn Device>), shape, 512, 512);
    let bytes = shape.block_bytes() * (512 * shape.layers) as u64;
    type BlockMap = fn(u32) -> u32;
    let fours: BlockMap = |at| (at / 4 * 20 + at % 4) % 512;
    let maps = [("adjacent", (|at| at) as BlockMap), ("in fours", fours), ("single blocks", |at| at * 5 % 512)];
    for (what, map) in maps {
        let pairs: Vec<_> = (0..512).map(|at| (at, map(at))).collect();
        for (direction, to_host, to_device) in [("to the host", &pairs[..], &[][..]), ("back", &[], &pairs)] {
            let took = blocks.copy(&cuda, to_host, to_device).wait().expect("the copies complete");
            let rate = bytes.0 as f64 / took.as_secs_f64() / 1e9;
            println!("{what}, {direction}: {} in {took:?}, {rate:.1} GB/s", Bytes(bytes.0));
        }
    }
    device.check().expect("the device reports no error");
}
