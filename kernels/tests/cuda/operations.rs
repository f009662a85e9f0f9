//! Results of each operation on a GPU, compared with its definition. Without a GPU, each test
//! prints that it is skipped.

mod rounding;

use std::{
    sync::{Arc, OnceLock},
    time::Instant,
};

use bursar_budgets::{Bytes, CudaDevice, HostConfig, HostDevice, Segment, Workspace};
use bursar_kernels::{
    ops::{
        fill_random::{MatrixSlice, fill_random, fill_random_part},
        rms_norm::RmsNorm,
    },
    *,
};
use cudarc::driver::sys;
use half::{bf16, f16};

use crate::{
    GpuLock, gpu_lock,
    ground::{
        self, Fp8, How, Pass, Product, Random, Scaled, Variant, assert_close, first_gpu, is_product, leased, load,
        narrowed, passes, rounded, search,
    },
};

struct Gpu {
    device: Arc<CudaDevice>,
    kernels: Vec<Arc<CudaKernels>>,
}

/// The first GPU with its kernels for f16 and, if supported, for bf16. `None` without a GPU.
fn gpu() -> Option<(GpuLock, &'static Gpu)> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let turn = gpu_lock();
    let gpu = GPU.get_or_init(|| {
        let device = first_gpu()?;
        let best = CudaTarget::of(&device).expect("the device reports its target");
        let mut targets = vec![best, CudaTarget { activation: DType::F16, ..best }];
        targets.dedup();
        let mut gpu = Gpu { device, kernels: Vec::new() };
        gpu.kernels = targets.into_iter().map(|target| gpu.load(target)).collect();
        Some(gpu)
    });
    Some((turn, gpu.as_ref()?))
}

impl Gpu {
    fn load(&self, target: CudaTarget) -> Arc<CudaKernels> {
        load(&self.device, target)
    }

    /// Compares the result of every operation with its definition, within its planned memory.
    fn compare(&self, kernels: &Arc<CudaKernels>) {
        let target = kernels.target();
        let activation = target.activation();
        for pass in passes().into_iter().filter(|pass| is_served(pass, &target)) {
            let (plan, dry, counter) = (Plan::new(target), Workspace::dry(), WorkCounter::default());
            pass.run(&Scope::new(&plan, &dry, &counter)).unwrap();
            let expected = pass.expected(activation);
            let backends =
                [GemmBackend::Library, GemmBackend::Ours].into_iter().take(1 + usize::from(is_product(&pass)));
            for products_by in backends {
                let found = self.compute(kernels, dry.high_water(), products_by, |scope| pass.run(scope));
                let what = format!("{pass:?} in {activation} by {products_by:?} on {target:?}");
                assert_close(&what, &found, &expected, tolerance(&pass, activation));
            }
        }
    }

    /// Runs `pass` in memory where every unwritten element is NaN.
    fn compute<T>(
        &self,
        kernels: &Arc<CudaKernels>,
        bytes: Bytes,
        products_by: GemmBackend,
        pass: impl FnOnce(&Scope<'_, Cuda>) -> Result<T, KernelError>,
    ) -> T {
        self.compute_and_count(kernels, bytes, products_by, pass).0
    }

    /// Like [`compute`](Gpu::compute). Also returns how many GEMMs were not autotuned.
    fn compute_and_count<T>(
        &self,
        kernels: &Arc<CudaKernels>,
        bytes: Bytes,
        products_by: GemmBackend,
        pass: impl FnOnce(&Scope<'_, Cuda>) -> Result<T, KernelError>,
    ) -> (T, usize) {
        let segment = leased(self.device.clone(), bytes.max(Bytes(1)));
        self.device.enter().expect("the device can be entered");
        // SAFETY: the segment has this many backed bytes, and nothing else uses it.
        let poisoned = unsafe { sys::cuMemsetD8_v2(segment.address().0, 0xff, segment.backed().as_usize()) };
        assert_eq!(poisoned, sys::CUresult::CUDA_SUCCESS);
        // The pass runs in another stream, which does not wait for this memset. A GPU shared with
        // other processes may take a while.
        //
        // SAFETY: `enter` has made the device's context current in this thread.
        assert_eq!(unsafe { sys::cuCtxSynchronize() }, sys::CUresult::CUDA_SUCCESS);
        let (cuda, counter) =
            (Cuda::new(kernels).expect("a stream").with_gemm_backend(products_by), WorkCounter::default());
        let workspace = Workspace::over(segment);
        let outcome = pass(&Scope::new(&cuda, &workspace, &counter)).unwrap();
        // A pass that downloads nothing may still be running, and its memory is freed next.
        cuda.wait_for_all().expect("the work completes");
        assert!(workspace.high_water() <= bytes.max(Bytes(1)).round_up(Bytes(256)));
        (outcome, cuda.guesses())
    }
}

/// Whether a GPU supports the pass: weights must have the type of activations, and the head
/// size must be supported.
fn is_served(pass: &Pass, target: &Target) -> bool {
    let is_among = |head_dim: &usize, sizes: Option<&[usize]>| sizes.is_none_or(|sizes| sizes.contains(head_dim));
    match pass {
        Pass::Embed { dtype, .. }
        | Pass::RmsNorm { dtype, .. }
        | Pass::LayerNorm { dtype, .. }
        | Pass::Linear { dtype, .. }
        | Pass::GatedLinear { dtype, .. }
        | Pass::PositionGrid { dtype, .. } => *dtype == target.activation(),
        Pass::Paged { head_dim, .. } => is_among(head_dim, target.paged_head_dims()),
        Pass::PagedPictures(pass) if pass.is_fp8 && !target.has_quantized_cache() => false,
        Pass::PagedPictures(pass) => is_among(&pass.sizes[2], target.paged_head_dims()),
        Pass::Packed { head_dim, .. } => is_among(head_dim, target.packed_head_dims()),
        Pass::PagedFp8 { head_dim, .. } => target.has_quantized_cache() && is_among(head_dim, target.paged_head_dims()),
        Pass::RotaryKv(rotary) => target.has_quantized_cache() || !rotary.is_fp8,
        Pass::Mixed(mixed) => mixed.dtype == target.activation(),
        Pass::Routed(routed) => routed.dtype == target.activation(),
        Pass::Variant(variant) => variant.dtype().is_none_or(|dtype| dtype == target.activation()),
        Pass::Fp8(fp8) => fp8.is_served(target),
        _ => true,
    }
}

/// Copies are exact. Results computed in f32 differ by the rounding to the stored type. Attention
/// also rounds its weights before it multiplies the values, and some of cuBLASLt's kernels round
/// the product before they add its bias.
fn tolerance(pass: &Pass, activation: DType) -> f64 {
    // Half a unit in the last place, for numbers between 1 and 2.
    let rounding = if activation == DType::BF16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    match pass {
        Pass::Embed { .. }
        | Pass::GatherRows { .. }
        | Pass::ScatterRows { .. }
        | Pass::Argmax { .. }
        | Pass::Clustered(_) => 0.0,
        // Ids must be equal. Log-probabilities are f32.
        Pass::Sample { .. } => 2e-6,
        Pass::Paged { .. } | Pass::PagedFp8 { .. } | Pass::PagedPictures(_) => 2.0 * rounding,
        Pass::Packed { .. } | Pass::Linear { .. } => 2.0 * rounding,
        // Half a step of E4M3, because the expected numbers are not rounded to E4M3.
        Pass::RotaryKv(rotary) if rotary.is_fp8 => 1.0 / 16.0,
        // The output of the gate and up GEMM is rounded before the down GEMM, and so is the output
        // of each expert's down GEMM.
        Pass::Mixed(_) => 4.0 * rounding,
        Pass::Step(step) => step.tolerance(rounding),
        // Gate and up are rounded before they are multiplied, unless one kernel computes both.
        Pass::GatedLinear { .. } => 4.0 * rounding,
        Pass::Variant(Variant::GeluLinear { .. }) => 4.0 * rounding,
        // Within a group of columns, the tensor cores keep about 13 bits of a sum of E4M3 products.
        // A gate multiplies two such sums.
        Pass::Fp8(fp8) => (4.0 * rounding).max(if fp8.is_gated() { 1.2e-2 } else { 6e-3 }),
        _ => rounding,
    }
}

#[test]
fn every_operation_gives_what_its_definition_gives_takes_what_its_plan_says_and_touches_nothing_else() {
    let Some((_gpu_lock, gpu)) = gpu() else { return };
    for kernels in &gpu.kernels {
        gpu.compare(kernels);
    }
}

/// Compares the results of code that the driver compiles for this GPU from the PTX
/// of another, older generation.
fn compare_older(capability: (u32, u32), activations: &[DType]) {
    let Some((_gpu_lock, gpu)) = gpu() else { return };
    let best = CudaTarget::of(&gpu.device).expect("the device reports its target");
    if capability < best.capability {
        for activation in activations.iter().copied() {
            gpu.compare(&gpu.load(CudaTarget { capability, activation, ..best }));
        }
    }
}

#[test]
fn what_is_compiled_for_ada_gives_it_too() {
    compare_older((8, 9), &[DType::BF16, DType::F16]);
}

#[test]
fn what_is_compiled_for_ampere_gives_it_too() {
    compare_older((8, 0), &[DType::BF16, DType::F16]);
}

#[test]
fn what_is_compiled_for_turing_gives_it_too() {
    compare_older((7, 5), &[DType::F16]);
}

/// The bits of the random elements that `backend` writes, as part of a matrix whose rows have
/// `pitch` numbers.
fn drawn<B: Backend>(
    backend: &B,
    workspace: &Workspace,
    dtype: DType,
    deviation: f32,
    shape: [usize; 2],
    pitch: usize,
) -> Vec<u32> {
    // SAFETY: the workspace has backed this many bytes, and no other tensor uses them.
    let mut out = unsafe { Tensor::persistent(workspace.address(), shape, dtype) };
    fill_random_part(backend, MatrixSlice { seed: 7, first: 11, pitch }, deviation, &mut out)
        .expect("the type can hold weights");
    let counter = WorkCounter::default();
    let scope = Scope::new(backend, workspace, &counter);
    match dtype {
        DType::F32 => scope.download::<f32>(&out).unwrap().into_iter().map(f32::to_bits).collect(),
        DType::BF16 => {
            scope.download::<bf16>(&out).unwrap().into_iter().map(|number| number.to_bits().into()).collect()
        }
        DType::F8E4M3 => scope.download::<E4m3>(&out).unwrap().into_iter().map(|code| code.0.into()).collect(),
        _ => scope.download::<f16>(&out).unwrap().into_iter().map(|number| number.to_bits().into()).collect(),
    }
}

#[test]
fn random_weights_have_the_bits_that_the_cpu_draws() {
    let Some((_gpu_lock, gpu)) = gpu() else { return };
    // More elements than the threads of one launch, so that some threads draw twice.
    let shape = [8192 + 7, 257];
    let bytes = Bytes(4 * (shape[0] * shape[1]) as u64);
    let host = Workspace::over(leased(Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(16))).unwrap()), bytes));
    let best = CudaTarget::of(&gpu.device).expect("the device reports its target");
    // Before compute capability 8.9, kernels convert to E4M3 with bit operations.
    let older = gpu.load(CudaTarget { capability: best.capability.min((7, 5)), activation: DType::F16, ..best });
    for kernels in gpu.kernels.iter().chain([&older]) {
        let cuda = Cuda::new(kernels).expect("a stream");
        for dtype in [kernels.target().activation(), DType::F32, DType::F8E4M3] {
            // The largest E4M3 number is 448.
            let deviation = if dtype == DType::F8E4M3 { 100.0 } else { 0.02 };
            for pitch in [shape[1], shape[1] + 3] {
                let memory = Workspace::over(leased(gpu.device.clone(), bytes));
                let found = drawn(&cuda, &memory, dtype, deviation, shape, pitch);
                let expected = drawn(&Cpu::new(2), &host, dtype, deviation, shape, pitch);
                let other = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
                assert_eq!(other, 0, "{dtype} numbers in rows of {pitch} differ on {:?}", kernels.target());
            }
        }
    }
}

/// A GEMM and a gated GEMM of the first rows of the same `x`.
struct Products {
    activation: DType,
    x: Vec<f32>,
    plain: Vec<f32>,
    gated: Vec<f32>,
}

impl Products {
    const IN: usize = 264;
    const OUT: usize = 136;
    const ROWS: usize = 300;

    fn new(activation: DType) -> Self {
        let mut random = Random::new(5);
        let mut floats = |rows: usize| random.floats(rows * Self::IN);
        Products { activation, x: floats(Self::ROWS), plain: floats(Self::OUT), gated: floats(2 * Self::OUT) }
    }

    /// Results for all rows: of the ungated GEMM, then of the gated GEMM.
    fn expected(&self) -> [Vec<f64>; 2] {
        let [x, plain, gated] = [&self.x, &self.plain, &self.gated].map(|numbers| rounded(self.activation, numbers));
        let product = |weight: &[f64], row: usize, out: usize| -> f64 {
            let (x, weight) = (&x[row * Self::IN..][..Self::IN], &weight[out * Self::IN..][..Self::IN]);
            x.iter().zip(weight).map(|(x, weight)| x * weight).sum()
        };
        let places = || (0..Self::ROWS).flat_map(|row| (0..Self::OUT).map(move |out| (row, out)));
        let gate = |gate: f64, up: f64| gate / (1.0 + (-gate).exp()) * up;
        [
            places().map(|(row, out)| product(&plain, row, out)).collect(),
            places().map(|(row, out)| gate(product(&gated, row, out), product(&gated, row, Self::OUT + out))).collect(),
        ]
    }

    /// Computes the first rows with weights at fixed addresses and compares them with `expected`.
    fn run(&self, scope: &Scope<'_, Cuda>, weights: &[Tensor<'_>; 2], rows: usize, expected: &[Vec<f64>; 2]) {
        let x = narrowed(scope, [rows, Self::IN], self.activation, &self.x[..rows * Self::IN]).unwrap();
        let plain = scope.linear(&x, &weights[0], None).unwrap();
        let gated = scope.gated_linear(&x, &weights[1], None).unwrap();
        // The same tolerance as in the test of all operations.
        let dtype = self.activation;
        let passes = [
            Pass::Linear { rows, in_features: Self::IN, out_features: Self::OUT, dtype, bias: false, how: How::New },
            Pass::GatedLinear { rows, in_features: Self::IN, features: Self::OUT, dtype, bias: false },
        ];
        for ((found, expected), pass) in [plain, gated].iter().zip(expected).zip(passes) {
            let found: Vec<f32> = match dtype {
                DType::BF16 => scope.download::<bf16>(found).unwrap().into_iter().map(f32::from).collect(),
                _ => scope.download::<f16>(found).unwrap().into_iter().map(f32::from).collect(),
            };
            assert_close(&format!("{pass:?}"), &found, &expected[..found.len()], tolerance(&pass, dtype));
        }
    }
}

#[test]
fn after_autotuning_no_product_is_guessed_and_two_lanes_agree() {
    let Some((_gpu_lock, gpu)) = gpu() else { return };
    for kernels in &gpu.kernels {
        // Load separate kernels, because other tests measure other GEMMs with the shared kernels.
        let kernels = &gpu.load(target_of(kernels));
        let products = Products::new(kernels.target().activation());
        let expected = products.expected();
        let shelf = Workspace::over(leased(gpu.device.clone(), Bytes::mib(1)));
        let workspace = Workspace::over(leased(gpu.device.clone(), Bytes::mib(256)));
        let (cuda, counter) = (Cuda::new(kernels).expect("a stream"), WorkCounter::default());
        let upload = Scope::new(&cuda, &shelf, &counter);
        let weight = |rows: usize, numbers: &[f32]| {
            narrowed(&upload, [rows, Products::IN], products.activation, numbers).expect("the workspace suffices")
        };
        let weights = [weight(Products::OUT, &products.plain), weight(2 * Products::OUT, &products.gated)];
        let run = |cuda: &Cuda, rows: usize| {
            products.run(&Scope::new(cuda, &workspace, &counter), &weights, rows, &expected);
        };
        run(&cuda, 3);
        assert_eq!(cuda.guesses(), 2, "both products run without autotuning");

        let autotune = |cuda: &Cuda| {
            cuda.autotune(true);
            run(cuda, Products::ROWS);
            Scope::new(cuda, &workspace, &counter).measure_products().expect("the measurements run");
            cuda.autotune(false);
        };
        autotune(&cuda);
        for rows in (1..=256).chain([Products::ROWS]) {
            run(&cuda, rows);
        }
        assert_eq!(cuda.guesses(), 2, "each autotuned product has an algorithm that ran");

        // There are more lanes here than counters for this project's GEMM kernel. The lanes without
        // counters use cuBLASLt.
        let lane = |_| Cuda::new(kernels).expect("a stream").with_gemm_backend(GemmBackend::Ours);
        let lanes: Vec<Cuda> = (0..9).map(lane).collect();
        for lane in &lanes {
            run(lane, 5);
            assert_eq!(lane.guesses(), 0, "algorithms that one lane measured are known to all lanes");
        }

        // As after a restart, newly loaded kernels use the measurements that the first kernels
        // wrote.
        let written = serde_json::to_value(kernels.tuning()).expect("the measurements can be serialized");
        let start = |written: &serde_json::Value| {
            let another = gpu.load(target_of(kernels));
            another.tune(&serde_json::from_value(written.clone()).expect("the measurements can be deserialized"));
            another
        };
        let another = start(&written);
        let cuda = Cuda::new(&another).expect("a stream");
        (1..=256).chain([Products::ROWS]).for_each(|rows| run(&cuda, rows));
        assert_eq!(cuda.guesses(), 0, "no algorithm was guessed");
        autotune(&cuda);
        assert_eq!(another.tuning(), kernels.tuning(), "no product was measured again");

        // Ranks that measure independently still make the same choices.
        let gpus = [gpu.device.clone(), gpu.device.clone()];
        let ranks = CudaKernels::load_ranks(&gpus, target_of(kernels), &search()).expect("the kernels load");
        for rank in &ranks {
            let cuda = Cuda::new(rank).expect("a stream");
            autotune(&cuda);
            (1..=256).chain([Products::ROWS]).for_each(|rows| run(&cuda, rows));
            assert_eq!(cuda.guesses(), 0, "the algorithm that the first rank found ran here too");
            assert_eq!(rank.tuning(), ranks[0].tuning());
        }

        // Edited measurements are rejected.
        let mut spoiled = written;
        for way in spoiled["fastest"].as_array_mut().expect("a list").iter_mut().map(|entry| &mut entry[1]) {
            match way.as_object().and_then(|way| way.keys().next().cloned()).as_deref() {
                Some("Library") => way["Library"] = serde_json::to_value([u64::MAX; 8]).expect("numbers"),
                Some("Few") => way["Few"] = 0.into(),
                _ => {}
            }
        }
        let another = start(&spoiled);
        assert_eq!(another.tuning().products(), 0);
        let cuda = Cuda::new(&another).expect("a stream");
        autotune(&cuda);
        assert_eq!(another.tuning().products(), kernels.tuning().products());
        run(&cuda, 5);
    }
}

/// A GEMM with scales per block. cuBLASLt takes only row counts that are a multiple of four.
fn by_blocks(rows: usize, in_features: usize, out_features: usize, how: How, bias: bool) -> Fp8 {
    Fp8 { rows, in_features, out_features, scaled: Scaled::Blocks(128), product: Product::Linear { how, bias } }
}

/// Compares a sample of the results with the definition: the corners and random positions.
fn assert_some_close(fp8: &Fp8, activation: DType, found: &[f32], what: &str) {
    let mut random = Random::new(9);
    let mut places: Vec<(usize, usize)> =
        (0..400).map(|_| (random.below(fp8.rows), random.below(fp8.out_features))).collect();
    places.extend([0, fp8.rows - 1].into_iter().flat_map(|row| [(row, 0), (row, fp8.out_features - 1)]));
    let expected = fp8.linear_at(activation, &mut Random::new(3), &places);
    let found: Vec<f32> = places.iter().map(|place| found[fp8.index_of(activation, *place)]).collect();
    assert_close(
        &format!("{fp8:?} in {activation}, {what}"),
        &found,
        &expected,
        tolerance(&Pass::Fp8(fp8.clone()), activation),
    );
}

#[test]
fn the_library_has_an_algorithm_for_scales_by_block() {
    let Some((_gpu_lock, gpu)) = gpu() else { return };
    // Groups of 128 columns: 4, 12 and 28 groups, which are whole, and 5 and 9 groups, the last
    // of which is padded.
    let cases = [
        (4, 512, 384),
        (64, 1536, 4608),
        (256, 3584, 512),
        (100, 640, 264),
        (1000, 1152, 384),
        (4100, 1024, 640),
        // This project's kernel computes the last three rows of this case.
        (4099, 1024, 640),
        // This project's kernel computes all rows of these cases.
        (5, 512, 384),
        (130, 640, 264),
        (2047, 640, 264),
        (64, 528, 384),
    ];
    for kernels in &gpu.kernels {
        let (target, library) = (kernels.target(), kernels.library());
        let version = library.rsplit(' ').next().and_then(|number| number.parse::<usize>().ok()).unwrap_or(0);
        if target_of(kernels).capability != (9, 0) || version < 120_900 {
            println!("{} with {library} has no algorithm for scales by block", target.name());
            continue;
        }
        let activation = target.activation();
        for ((rows, in_features, out_features), how) in cases.into_iter().zip([How::New, How::Add].into_iter().cycle())
        {
            let fp8 = by_blocks(rows, in_features, out_features, how, false);
            let (plan, dry, counter) = (Plan::new(target), Workspace::dry(), WorkCounter::default());
            fp8.run(&Scope::new(&plan, &dry, &counter), &mut Random::new(3)).unwrap();
            let run = |scope: &Scope<'_, Cuda>| fp8.run(scope, &mut Random::new(3));
            let (found, asked) = gpu.compute_and_count(kernels, dry.high_water(), GemmBackend::Library, run);
            let is_asked = (rows % 4 == 0 || rows >= 2048) && in_features % 128 == 0;
            assert_eq!(asked, usize::from(is_asked), "{fp8:?} in {activation} with {library}");
            assert_some_close(&fp8, activation, &found, "by the library");
            // The library may have no algorithm that adds a bias.
            let biased = by_blocks(rows, in_features, out_features, How::New, true);
            let run = |scope: &Scope<'_, Cuda>| biased.run(scope, &mut Random::new(3));
            let (found, asked) =
                gpu.compute_and_count(kernels, dry.high_water() + Bytes::mib(1), GemmBackend::Library, run);
            println!("{rows} x {in_features} x {out_features} with a bias in {activation}: {asked} by {library}");
            assert_some_close(&biased, activation, &found, "by the library, with a bias");
        }
    }
}

#[test]
fn products_by_blocks_are_right_whichever_way_autotuning_takes() {
    let Some((_gpu_lock, gpu)) = gpu() else { return };
    for kernels in
        gpu.kernels.iter().filter(|kernels| kernels.target().has_quantized(QuantizationScheme::BLOCK, [640, 1024]))
    {
        let kernels = &gpu.load(target_of(kernels));
        let activation = kernels.target().activation();
        let workspace = Workspace::over(leased(gpu.device.clone(), Bytes::mib(256)));
        let (cuda, counter) = (Cuda::new(kernels).expect("a stream"), WorkCounter::default());
        let run = |rows: usize| {
            let fp8 = by_blocks(rows, 1024, 640, How::New, false);
            (fp8.run(&Scope::new(&cuda, &workspace, &counter), &mut Random::new(3)).expect("the product runs"), fp8)
        };
        cuda.autotune(true);
        run(300);
        run(12);
        Scope::new(&cuda, &workspace, &counter).measure_products().expect("the measurements run");
        cuda.autotune(false);
        for rows in [1, 4, 5, 64, 100, 129, 130, 256, 299, 300, 304, 1001] {
            let (found, fp8) = run(rows);
            assert_some_close(&fp8, activation, &found, "autotuned");
        }
        assert_eq!(cuda.guesses(), 0, "our kernels compute sizes for which the library has no measurement");
    }
}

fn target_of(kernels: &CudaKernels) -> CudaTarget {
    match kernels.target() {
        Target::Cuda(target) => target,
        target => panic!("{target:?}"),
    }
}

/// Layers of Qwen2.5-VL-7B without attention: the GEMMs of a decode step.
struct Layers {
    weights: Vec<[Tensor<'static>; 4]>,
    bias: Tensor<'static>,
    norm: Tensor<'static>,
    _memory: Segment,
}

impl Layers {
    const HIDDEN: usize = 3584;
    const QKV: usize = 4608;
    const INTERMEDIATE: usize = 18_944;

    fn drawn(cuda: &Cuda, gpu: &Gpu, count: usize) -> Self {
        let (hidden, intermediate) = (Self::HIDDEN, Self::INTERMEDIATE);
        let shapes = [[Self::QKV, hidden], [hidden, hidden], [2 * intermediate, hidden], [hidden, intermediate]];
        let elements = shapes.iter().map(|[out, into]| out * into).sum::<usize>() * count + Self::QKV + hidden;
        let dtype = cuda.target().activation();
        let memory = leased(gpu.device.clone(), dtype.bytes(elements));
        let (mut end, mut seed) = (Bytes(0), 0);
        let mut tensor = |shape: &[usize], deviation: f32| {
            // SAFETY: this many bytes are backed, they live as long as the layers, and each tensor
            // has a separate range of them.
            let mut tensor = unsafe { Tensor::persistent(memory.address().offset(end), Shape::new(shape), dtype) };
            (end, seed) = (end + tensor.bytes(), seed + 1);
            fill_random(cuda, seed, deviation, &mut tensor).expect("the type can hold weights");
            tensor
        };
        let weights = (0..count).map(|_| shapes.each_ref().map(|shape| tensor(shape, 0.02))).collect();
        let (bias, norm) = (tensor(&[Self::QKV], 0.1), tensor(&[hidden], 1.0));
        cuda.wait().expect("the weights are drawn");
        Layers { weights, bias, norm, _memory: memory }
    }

    fn run(&self, scope: &Scope<'_, Cuda>, hidden: &mut Tensor<'_>) -> Result<(), KernelError> {
        for [qkv, out, gate_up, down] in &self.weights {
            let scope = scope.scope();
            let qkv = scope.linear(&scope.rms_norm(hidden, RmsNorm::new(&self.norm, 1e-6))?, qkv, Some(&self.bias))?;
            scope.linear_add(&qkv.column_range(0..Self::HIDDEN), out, None, hidden)?;
            let gated = scope.gated_linear(&scope.rms_norm(hidden, RmsNorm::new(&self.norm, 1e-6))?, gate_up, None)?;
            scope.linear_add(&gated, down, None, hidden)?;
        }
        Ok(())
    }
}

#[test]
fn a_captured_step_with_products_that_were_measured_is_no_slower_than_with_the_librarys() {
    const LAYERS: usize = 4;
    const ROWS: [usize; 4] = [1, 16, 64, 2048];
    let Some((_gpu_lock, gpu)) = gpu() else { return };
    let target = CudaTarget::of(&gpu.device).expect("the device reports its target");
    let workspace = Workspace::over(leased(gpu.device.clone(), Bytes::mib(512)));
    let memory = leased(gpu.device.clone(), Bytes::mib(16));
    let mut taken = Vec::new();
    for products_by in [GemmBackend::Library, GemmBackend::Measured, GemmBackend::Ours] {
        // Measurements are kept with the kernels, so each backend loads its own kernels.
        let kernels = gpu.load(target);
        let cuda = Cuda::new(&kernels).expect("a stream").with_gemm_backend(products_by);
        let (layers, counter) = (Layers::drawn(&cuda, gpu, LAYERS), WorkCounter::default());
        for rows in ROWS {
            let shape = [rows, Layers::HIDDEN];
            // SAFETY: this many bytes are backed, and only this thread uses them.
            let mut hidden = unsafe { Tensor::persistent(memory.address(), shape, target.activation) };
            fill_random(&cuda, 1, 1.0, &mut hidden).expect("weights have the activation type");
            let started = Instant::now();
            cuda.autotune(true);
            layers.run(&Scope::new(&cuda, &workspace, &counter), &mut hidden).expect("the layers run");
            Scope::new(&cuda, &workspace, &counter).measure_products().expect("the measurements run");
            cuda.autotune(false);
            let autotuned = started.elapsed();
            let captured = cuda.capture(&mut || layers.run(&Scope::new(&cuda, &workspace, &counter), &mut hidden));
            let graph = captured.expect("the graph is captured").expect("the GPU supports graphs");
            let replay = |times: usize| {
                let started = Instant::now();
                (0..times).for_each(|_| graph.replay().expect("the graph runs"));
                cuda.wait().expect("the replays complete");
                started.elapsed().as_secs_f64() * 1e6 / times as f64
            };
            replay(20);
            let shortest = (0..5).map(|_| replay(50)).min_by(f64::total_cmp).expect("there are five measurements");
            println!("{products_by:?}, {rows} rows: {LAYERS} layers in {shortest:.0} us, autotuned in {autotuned:.0?}");
            taken.push(shortest);
        }
    }
    for (library, measured) in taken[..ROWS.len()].iter().zip(&taken[ROWS.len()..]) {
        assert!(*measured <= 1.05 * library, "{measured:.0} us; the library takes {library:.0} us");
    }
}
