//! Captured graphs on a GPU. A replay reads the contents that the graph's inputs have at the time
//! of the replay. Without a GPU, each test prints that it is skipped.

use std::sync::Arc;

use bursar_budgets::{Bytes, CudaDevice, Device, DeviceError, Workspace};
use bursar_kernels::{ops::transfer::fill_elements, *};

use crate::{
    gpu_lock,
    ground::{first_gpu, leased, load},
};

/// The first GPU with its kernels, if there is a GPU.
fn kernels() -> Option<(Arc<CudaDevice>, Arc<CudaKernels>)> {
    let device = first_gpu()?;
    let kernels = load(&device, CudaTarget::of(&device).expect("the device reports its target"));
    Some((device, kernels))
}

#[test]
fn a_graph_reads_its_inputs_anew_and_a_capture_that_fails_leaves_the_backend_as_it_was() {
    let _lock = gpu_lock();
    let Some((device, kernels)) = kernels() else { return };
    let cuda = Cuda::new(&kernels).expect("a stream");
    let (inputs, outputs) = (leased(device.clone(), Bytes(1)), leased(device.clone(), Bytes(1)));
    let workspace = Workspace::over(leased(device.clone(), Bytes::mib(64)));
    let rows = [3.0f32, 1.0, 2.0, 0.5, 0.25, 9.0];
    // SAFETY: the segment is backed for a whole page, and only this thread uses it.
    let mut x = unsafe { Tensor::persistent(inputs.address(), [2, 3], DType::F32) };
    // SAFETY: the segment is backed for a whole page, and only this thread uses it.
    let mut places = unsafe { Tensor::persistent(outputs.address(), [2], DType::U32) };
    let counter = WorkCounter::default();
    let read = |places: &Tensor<'_>| {
        Scope::new(&cuda, &workspace, &counter).download::<u32>(places).expect("the result is downloaded")
    };

    fill_elements(&cuda, &[7u32, 7], &mut places).expect("the content is uploaded");
    let captured = cuda.capture(&mut || Scope::new(&cuda, &workspace, &counter).argmax_into(&x, &mut places));
    let graph = captured.expect("the graph is captured").expect("the GPU supports graphs");
    assert_eq!(read(&places), [7, 7], "capturing runs no kernel");
    for turn in 0..3 {
        let turned: Vec<f32> = (0..6).map(|at| rows[(at + turn) % 6]).collect();
        fill_elements(&cuda, &turned, &mut x).expect("the content is uploaded");
        graph.replay().expect("the graph runs");
        let largest =
            |row: &[f32]| (0..3).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("the row has three elements") as u32;
        assert_eq!(read(&places), [largest(&turned[..3]), largest(&turned[3..])], "{turned:?}");
    }

    // The caller gets the error of `run`. A copy cannot be captured: it returns an error instead
    // of breaking the stream.
    let refused = cuda.capture(&mut || {
        let scope = Scope::new(&cuda, &workspace, &counter);
        scope.argmax_into(&x, &mut places)?;
        scope.download::<u32>(&places).map(drop)
    });
    assert!(matches!(refused, Err(KernelError::Device(DeviceError::Driver { .. }))), "{:?}", refused.err());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        cuda.capture(&mut || panic!("a panic during capture")).map(drop)
    }));
    assert!(panicked.is_err());
    graph.replay().expect("the graph runs");
    assert_eq!(read(&places).len(), 2);
    drop(graph);
    let again = cuda.capture(&mut || Scope::new(&cuda, &workspace, &counter).argmax_into(&x, &mut places));
    again.expect("the graph is captured").expect("the GPU supports graphs").replay().expect("the graph runs");
    device.check().expect("the device reports no error");
}
