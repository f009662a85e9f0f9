//! The loaded device code, and launches of its kernels.

use std::{collections::HashMap, ffi::CStr, mem::MaybeUninit, sync::Arc};

use bursar_budgets::{Address, CudaDevice, DeviceError};
use cudarc::driver::sys;

use super::{
    contract::{EntryPoint, EntryPoints},
    error::OpenError,
    module_images::{ModuleImage, ModuleImages},
};
use crate::{DType, KernelError};

/// The loaded device code of one device.
pub(super) struct Functions {
    entry_points: EntryPoints<Function>,
    shared_most: usize,
    modules: Modules,
}

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(super) struct Function {
    raw: sys::CUfunction,
    /// `true` if the kernel may start before the preceding kernel has ended. Such a kernel waits
    /// for the preceding kernel on the device.
    waits: bool,
}

// SAFETY: modules and functions belong to the context, and any thread that has entered the
// context may use them.
unsafe impl Send for Functions {}
// SAFETY: nothing in `Functions` changes after loading, and any thread that has entered the context
// may use the functions.
unsafe impl Sync for Functions {}

impl Functions {
    /// Loads `images`, including every kernel in them. Without this, the driver would load each
    /// kernel, and allocate memory for it, at its first launch. `activation` is the activation
    /// type of all launches.
    pub(super) fn load(device: &Arc<CudaDevice>, images: &ModuleImages, activation: DType) -> Result<Self, OpenError> {
        device.enter()?;
        let shared = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared_most = device.attribute(shared)?;
        let mut modules = Modules { device: device.clone(), loaded: Vec::new() };
        let mut found = HashMap::new();
        for image in images.modules() {
            for function in functions_of(modules.load(image)?)? {
                found.insert((image.name.as_str(), prepare(function, shared_most)?), function);
            }
        }
        let entry_points =
            EntryPoints::find(activation, images.is_machine_code, |EntryPoint { source, name, waits }| {
                let place = (source, name);
                // PTX is compiled without the wait for the preceding kernel.
                let waits = waits && images.is_machine_code;
                let raw = found.get(&place).copied();
                raw.map(|raw| Function { raw, waits }).ok_or(OpenError::NoKernel { name: place.1 })
            })?;
        Ok(Functions { entry_points, shared_most: shared_most.max(0) as usize, modules })
    }

    pub(super) fn entry_points(&self) -> &EntryPoints<Function> {
        &self.entry_points
    }

    /// Returns the maximum bytes of shared memory per thread block.
    pub(super) fn shared_most(&self) -> usize {
        self.shared_most
    }

    /// Returns the address of the variable `name` in the module of the source file `file`.
    pub(super) fn variable(&self, file: &'static str, name: &CStr) -> Result<Address, OpenError> {
        // Search only this module: tools that watch the driver's calls would report each
        // unsuccessful search as an error.
        let module = self.modules.loaded.iter().find(|(known, _)| *known == file);
        let Some((_, module)) = module else { return Err(OpenError::NoKernel { name: file.to_owned() }) };
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: the module is loaded, and both output variables are writable.
        let found = unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, *module, name.as_ptr()) };
        CudaDevice::said("cuModuleGetGlobal", found)?;
        Ok(Address(address))
    }

    /// Returns `true` if the loaded code is Hopper's machine code, or `false` if the driver
    /// compiled it from PTX. Some launches differ between the two.
    pub(super) fn is_machine_code(&self) -> bool {
        self.entry_points.hopper.is_some()
    }
}

/// The loaded modules with the names of their source files. The modules are unloaded on drop.
struct Modules {
    device: Arc<CudaDevice>,
    loaded: Vec<(String, sys::CUmodule)>,
}

impl Modules {
    fn load(&mut self, image: &ModuleImage) -> Result<sys::CUmodule, OpenError> {
        let refused = |error: DeviceError| match error {
            DeviceError::Driver { said, .. } => OpenError::Image { module: image.name.clone(), said },
            error => error.into(),
        };
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin, or PTX terminated by a zero byte.
        let loaded = unsafe { sys::cuModuleLoadData(&mut module, image.code.as_ptr().cast()) };
        CudaDevice::said("cuModuleLoadData", loaded).map_err(refused)?;
        self.loaded.push((image.name.clone(), module));
        Ok(module)
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        // If the context is lost, the modules are gone with it.
        if self.device.enter().is_ok() {
            for (_, module) in &self.loaded {
                // SAFETY: each module is unloaded only here, and none of its kernels is running,
                // because all lanes have ended.
                drop(CudaDevice::said("cuModuleUnload", unsafe { sys::cuModuleUnload(*module) }));
            }
        }
    }
}

fn functions_of(module: sys::CUmodule) -> Result<Vec<sys::CUfunction>, DeviceError> {
    let mut count = 0;
    // SAFETY: the module is loaded, and the count is writable.
    CudaDevice::said("cuModuleGetFunctionCount", unsafe { sys::cuModuleGetFunctionCount(&mut count, module) })?;
    let mut functions = vec![std::ptr::null_mut(); count as usize];
    // SAFETY: the list has `count` entries.
    let listed = unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) };
    CudaDevice::said("cuModuleEnumerateFunctions", listed)?;
    Ok(functions)
}

/// Loads a function, allows it the maximum shared memory, and returns its name.
fn prepare(function: sys::CUfunction, shared_most: i32) -> Result<String, DeviceError> {
    use sys::CUfunction_attribute as Attribute;
    // SAFETY: the function belongs to a loaded module, and all output variables are writable.
    unsafe {
        CudaDevice::said("cuFuncLoad", sys::cuFuncLoad(function))?;
        let mut fixed = 0;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        CudaDevice::said("cuFuncGetAttribute", sys::cuFuncGetAttribute(&mut fixed, attribute, function))?;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        CudaDevice::said("cuFuncSetAttribute", sys::cuFuncSetAttribute(function, attribute, shared_most - fixed))?;
        let mut name = MaybeUninit::zeroed();
        CudaDevice::said("cuFuncGetName", sys::cuFuncGetName(name.as_mut_ptr(), function))?;
        Ok(CStr::from_ptr(name.assume_init()).to_string_lossy().into_owned())
    }
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Thread blocks in x, y and z.
    pub grid: [usize; 3],
    /// Threads per block in x and y.
    pub block: [usize; 2],
    /// Bytes of dynamic shared memory per block.
    pub shared: usize,
}

impl Extent {
    /// Returns an extent of `blocks` thread blocks in x, with `threads` threads per block.
    pub(super) fn line(blocks: usize, threads: usize) -> Self {
        Extent { grid: [blocks, 1, 1], block: [threads, 1], shared: 0 }
    }
}

/// A type that kernels take by value. The type must have the memory layout that
/// the device compiler expects.
pub(super) trait Argument: Copy {}
impl Argument for u32 {}
impl Argument for u64 {}
impl Argument for f32 {}
impl Argument for Address {}
impl Argument for super::link::Exchange {}
impl Argument for super::link::Rows {}
impl Argument for super::rotary::Sections {}
impl Argument for super::tensor_map::TensorMap {}

/// Maximum number of arguments of a launch, and of the 8-byte words that they occupy.
const WORDS: usize = 64;

/// The arguments of a launch, in the order of the kernel's parameters.
pub(super) struct Arguments {
    words: [u64; WORDS],
    /// Index of the first word of each argument.
    places: [usize; WORDS],
    count: usize,
    used: usize,
}

impl Default for Arguments {
    fn default() -> Self {
        Arguments { words: [0; WORDS], places: [0; WORDS], count: 0, used: 0 }
    }
}

impl Arguments {
    pub(super) fn with<A: Argument>(mut self, argument: A) -> Self {
        let words = size_of::<A>().div_ceil(size_of::<u64>());
        assert!(align_of::<A>() <= align_of::<u64>() && self.used + words <= WORDS, "a kernel has fewer parameters");
        // SAFETY: the assertion has checked that the argument fits after the words in use, and that
        // a word's alignment suffices for the argument.
        unsafe { self.words.as_mut_ptr().add(self.used).cast::<A>().write(argument) };
        self.places[self.count] = self.used;
        self.used += words;
        self.count += 1;
        self
    }

    /// Appends all arguments of another list.
    pub(super) fn followed_by(mut self, other: Arguments) -> Self {
        assert!(self.used + other.used <= WORDS, "a kernel has fewer parameters");
        self.words[self.used..][..other.used].copy_from_slice(&other.words[..other.used]);
        for (place, word) in self.places[self.count..].iter_mut().zip(&other.places[..other.count]) {
            *place = self.used + word;
        }
        self.used += other.used;
        self.count += other.count;
        self
    }

    /// Returns the address of each argument, in the form that the driver expects.
    fn pointers(&mut self) -> [*mut std::ffi::c_void; WORDS] {
        let words = self.words.as_mut_ptr();
        // SAFETY: each entry of `places` is an index into `words`.
        self.places.map(|place| unsafe { words.add(place).cast() })
    }
}

/// Builds a launch's [`Arguments`] from a list.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { $crate::cuda::launch::Arguments::default()$(.with($argument))* };
}
pub(super) use arguments;

/// Converts a count or a pitch to the type that kernels take. Panics if the number does not fit.
/// The op layer has already refused such shapes.
pub(super) fn count(number: usize) -> u32 {
    u32::try_from(number).expect("kernels count in 32 bits, and no shape here is larger")
}

impl super::Cuda {
    /// Launches a kernel with arguments in the order of its parameters. An
    /// empty grid launches nothing.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters in order and type, and all addresses among
    /// them must be valid.
    pub(super) unsafe fn launch(
        &self,
        kernel: Function,
        extent: Extent,
        mut arguments: Arguments,
    ) -> Result<(), KernelError> {
        if extent.grid.contains(&0) {
            return Ok(());
        }
        let [x, y, z] = extent.grid.map(count);
        let [wide, tall] = extent.block.map(count);
        let mut early = early_start();
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: wide,
            blockDimY: tall,
            blockDimZ: 1,
            sharedMemBytes: count(extent.shared),
            hStream: self.stream.raw(),
            attrs: &mut early,
            numAttrs: u32::from(kernel.waits),
        };
        let mut pointers = arguments.pointers();
        // SAFETY: the caller guarantees that the arguments match the kernel's parameters. The
        // driver copies the arguments before it returns.
        let launched =
            unsafe { sys::cuLaunchKernelEx(&config, kernel.raw, pointers.as_mut_ptr(), std::ptr::null_mut()) };
        Ok(CudaDevice::said("cuLaunchKernelEx", launched)?)
    }
}

/// Returns the launch attribute for programmatic dependent launch: a kernel that waits on the
/// device may start before the preceding kernel has ended. This hides the launch latency.
fn early_start() -> sys::CUlaunchAttribute {
    // SAFETY: the struct consists of numbers, for which zero is valid.
    let mut attribute: sys::CUlaunchAttribute = unsafe { MaybeUninit::zeroed().assume_init() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    attribute
}
