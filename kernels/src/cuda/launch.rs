//! Kernels by name, and their launches.

use std::{collections::HashMap, ffi::CStr, mem::MaybeUninit, sync::Arc};

use bursar_budgets::{Address, CudaDevice, DeviceError};
use cudarc::driver::sys;

use super::{
    error::OpenError,
    images::{Image, Images},
};
use crate::KernelError;

/// All kernels of the device code, loaded.
pub(super) struct Functions {
    device: Arc<CudaDevice>,
    /// By the name of their source file.
    modules: Vec<(&'static str, sys::CUmodule)>,
    by_name: HashMap<String, Kernel>,
    is_machine_code: bool,
    shared_most: usize,
}

#[derive(Clone, Copy)]
struct Kernel {
    function: sys::CUfunction,
    /// It may be started before the one in front has ended: it waits for that itself.
    waits: bool,
}

/// Source files whose kernels all wait for the one in front (`include/kernel_order.cuh`).
const WAITING: [&str; 13] = [
    "argmax",
    "attention_decode",
    "embed",
    "gate_up_middle",
    "gather_rows",
    "gelu",
    "layer_norm",
    "linear_few",
    "linear_gated_hopper",
    "rms_norm",
    "rotary",
    "scatter_rows",
    "silu_mul",
];

// SAFETY: modules and functions belong to the context, and may be used from any thread that has entered it.
unsafe impl Send for Functions {}
// SAFETY: as above; nothing here changes after loading.
unsafe impl Sync for Functions {}

impl Functions {
    /// Loads `images`, and every kernel of them now: the driver would otherwise load each at its first launch, and take
    /// memory then.
    pub(super) fn load(device: &Arc<CudaDevice>, images: &Images) -> Result<Self, OpenError> {
        device.enter()?;
        let shared = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared_most = device.attribute(shared)?;
        let (is_machine_code, shared) = (images.is_machine_code, shared_most.max(0) as usize);
        let mut functions = Functions {
            device: device.clone(),
            modules: Vec::new(),
            by_name: HashMap::new(),
            is_machine_code,
            shared_most: shared,
        };
        for image in images.modules {
            functions.load_image(image, shared_most)?;
        }
        Ok(functions)
    }

    fn load_image(&mut self, image: &Image, shared_most: i32) -> Result<(), OpenError> {
        let refused = |error: DeviceError| match error {
            DeviceError::Driver { said, .. } => OpenError::Image { module: image.name, said },
            error => error.into(),
        };
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin, or PTX with a zero at its end.
        let loaded = unsafe { sys::cuModuleLoadData(&mut module, image.code.as_ptr().cast()) };
        CudaDevice::said("cuModuleLoadData", loaded).map_err(refused)?;
        self.modules.push((image.name, module));
        let waits = self.is_machine_code && WAITING.contains(&image.name);
        for function in functions_of(module)? {
            let name = prepare(function, shared_most)?;
            self.by_name.insert(name, Kernel { function, waits });
        }
        Ok(())
    }

    /// The kernel of this name. One that is not there is our own bug: the fronts refuse what no kernel serves.
    fn get(&self, name: &str) -> Kernel {
        *self.by_name.get(name).unwrap_or_else(|| panic!("the device code has no kernel {name}"))
    }

    /// Shared memory that a block can have at most.
    pub(super) fn shared_most(&self) -> usize {
        self.shared_most
    }

    /// Where a variable of a source file lies. One that is not there is our own bug.
    pub(super) fn variable(&self, file: &str, name: &CStr) -> Result<Address, DeviceError> {
        // Not by asking all: each that has it not is an error to whoever watches the driver's answers.
        let module = self.modules.iter().find(|(known, _)| *known == file);
        let (_, module) = module.unwrap_or_else(|| panic!("the device code has no {file}"));
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: the module is loaded, and both numbers are there to write to.
        let found = unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, *module, name.as_ptr()) };
        CudaDevice::said("cuModuleGetGlobal", found).map(|()| Address(address))
    }

    /// Whether these are the machine code of Hopper, and not PTX that the driver has compiled: some launches differ.
    pub(super) fn is_machine_code(&self) -> bool {
        self.is_machine_code
    }
}

impl Drop for Functions {
    fn drop(&mut self) {
        // A context that is lost has taken them with it.
        if self.device.enter().is_ok() {
            for (_, module) in &self.modules {
                // SAFETY: each was loaded once, and no launch of it is under way: lanes end first.
                drop(CudaDevice::said("cuModuleUnload", unsafe { sys::cuModuleUnload(*module) }));
            }
        }
    }
}

fn functions_of(module: sys::CUmodule) -> Result<Vec<sys::CUfunction>, DeviceError> {
    let mut count = 0;
    // SAFETY: the module is loaded, and the count is there to write to.
    CudaDevice::said("cuModuleGetFunctionCount", unsafe { sys::cuModuleGetFunctionCount(&mut count, module) })?;
    let mut functions = vec![std::ptr::null_mut(); count as usize];
    // SAFETY: there is room for so many.
    let listed = unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) };
    CudaDevice::said("cuModuleEnumerateFunctions", listed)?;
    Ok(functions)
}

/// Loads a function, lets it have as much shared memory as there is, and gives its name.
fn prepare(function: sys::CUfunction, shared_most: i32) -> Result<String, DeviceError> {
    use sys::CUfunction_attribute as Attribute;
    // SAFETY: the function is its module's, and the numbers and the name are there to write to.
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

/// The extent of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Blocks in x, y and z.
    pub grid: [usize; 3],
    /// Threads of a block in x and y.
    pub block: [usize; 2],
    /// Bytes of dynamic shared memory of a block.
    pub shared: usize,
}

impl Extent {
    /// So many blocks in a line.
    pub(super) fn line(blocks: usize, threads: usize) -> Self {
        Extent { grid: [blocks, 1, 1], block: [threads, 1], shared: 0 }
    }
}

/// What a kernel can be handed by value: as the device's compiler sees it.
pub(super) trait Argument: Copy {}
impl Argument for u32 {}
impl Argument for u64 {}
impl Argument for f32 {}
impl Argument for Address {}
impl Argument for super::rotary::Sections {}
impl Argument for super::tensor_map::TensorMap {}

/// Words of arguments, and arguments, that a launch has room for.
const WORDS: usize = 56;

/// The arguments of a launch, in the order of the kernel's parameters.
pub(super) struct Arguments {
    words: [u64; WORDS],
    /// The first word of each.
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
    /// The same with one more.
    pub(super) fn with<A: Argument>(mut self, argument: A) -> Self {
        let words = size_of::<A>().div_ceil(size_of::<u64>());
        assert!(align_of::<A>() <= align_of::<u64>() && self.used + words <= WORDS, "a kernel has fewer parameters");
        // SAFETY: there is room for it, and its alignment is no stricter than a word's.
        unsafe { self.words.as_mut_ptr().add(self.used).cast::<A>().write(argument) };
        self.places[self.count] = self.used;
        self.used += words;
        self.count += 1;
        self
    }

    /// Where each lies, as the driver wants it.
    fn pointers(&mut self) -> [*mut std::ffi::c_void; WORDS] {
        let words = self.words.as_mut_ptr();
        // SAFETY: each place is one of the words.
        self.places.map(|place| unsafe { words.add(place).cast() })
    }
}

/// Spells out a launch's [`Arguments`]. Counts, pitches and extents are turned into the kernels' 32 bits.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { $crate::cuda::launch::Arguments::default()$(.with($argument))* };
}
pub(super) use arguments;

/// A count or pitch as kernels take it. What does not fit was refused long before.
pub(super) fn count(number: usize) -> u32 {
    u32::try_from(number).expect("kernels count in 32 bits, and no shape here is larger")
}

impl super::Cuda {
    /// Launches a kernel with arguments in the order of its parameters. An empty extent is nothing to do.
    ///
    /// # Safety
    /// The arguments are those of the kernel's parameters, in order and type, and what they point to is there.
    pub(super) unsafe fn launch(
        &self,
        name: &str,
        extent: Extent,
        mut arguments: Arguments,
    ) -> Result<(), KernelError> {
        if extent.grid.contains(&0) {
            return Ok(());
        }
        let Kernel { function, waits } = self.kernels.functions.get(name);
        let [x, y, z] = extent.grid.map(count);
        // More than any block can have: the driver says no, as it does to a real launch of that kind.
        let shared = if self.is_drilled() { u32::MAX } else { count(extent.shared) };
        let [wide, tall] = extent.block.map(count);
        let mut early = early_start();
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: wide,
            blockDimY: tall,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.stream.raw(),
            attrs: &mut early,
            numAttrs: u32::from(waits),
        };
        let mut pointers = arguments.pointers();
        // SAFETY: as the caller promises; the driver copies the arguments before it returns.
        let launched = unsafe { sys::cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut()) };
        Ok(CudaDevice::said("cuLaunchKernelEx", launched)?)
    }
}

/// Lets a kernel that waits by itself start before the one in front has ended (programmatic dependent launch), so that a
/// launch's delay hides behind it.
fn early_start() -> sys::CUlaunchAttribute {
    // SAFETY: all of it is numbers, for which zero is a value.
    let mut attribute: sys::CUlaunchAttribute = unsafe { MaybeUninit::zeroed().assume_init() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    attribute
}
