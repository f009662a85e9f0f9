//! The loaded device code and its kernels.

use std::{collections::HashMap, ffi::CStr, mem::MaybeUninit, sync::Arc};

use bursar_budgets::{Address, CudaDevice, DeviceError};
use cudarc::driver::sys;

use super::{
    contract::{EntryPoint, EntryPoints},
    error::OpenError,
    module_images::{ModuleImage, ModuleImages},
};
use crate::DType;

/// The loaded device code of one device.
pub(super) struct Functions {
    entry_points: EntryPoints<Function>,
    shared_most: usize,
    modules: Modules,
}

/// A kernel of a module that is loaded into the context.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) raw: sys::CUfunction,
    /// `true` if the kernel may start before the preceding kernel has ended. Such a kernel waits
    /// for the preceding kernel on the device.
    pub(super) waits: bool,
}

// SAFETY: modules and functions belong to the context, and any thread that has entered the
// context may use them.
unsafe impl Send for Functions {}
// SAFETY: nothing in `Functions` changes after loading, and any thread that has entered the context
// may use the functions.
unsafe impl Sync for Functions {}

impl Functions {
    /// Loads `images`, including every kernel in them. Otherwise, the driver would load each kernel
    /// and allocate the kernel's memory at the first launch of the kernel. `activation` is the
    /// activation type of all launches.
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
        let entry_points = EntryPoints::find(activation, images.generation(), |EntryPoint { source, name, waits }| {
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
        CudaDevice::check("cuModuleGetGlobal", found)?;
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
            DeviceError::Driver { message, .. } => OpenError::Image { module: image.name.clone(), message },
            error => error.into(),
        };
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin, or PTX terminated by a zero byte.
        let loaded = unsafe { sys::cuModuleLoadData(&mut module, image.code.as_ptr().cast()) };
        CudaDevice::check("cuModuleLoadData", loaded).map_err(refused)?;
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
                drop(CudaDevice::check("cuModuleUnload", unsafe { sys::cuModuleUnload(*module) }));
            }
        }
    }
}

fn functions_of(module: sys::CUmodule) -> Result<Vec<sys::CUfunction>, DeviceError> {
    let mut count = 0;
    // SAFETY: the module is loaded, and the count is writable.
    CudaDevice::check("cuModuleGetFunctionCount", unsafe { sys::cuModuleGetFunctionCount(&mut count, module) })?;
    let mut functions = vec![std::ptr::null_mut(); count as usize];
    // SAFETY: the list has `count` entries, and the module is loaded.
    let listed = unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) };
    CudaDevice::check("cuModuleEnumerateFunctions", listed)?;
    Ok(functions)
}

/// Loads a function, allows it the maximum shared memory, and returns its name.
fn prepare(function: sys::CUfunction, shared_most: i32) -> Result<String, DeviceError> {
    use sys::CUfunction_attribute as Attribute;
    // SAFETY: the function belongs to a loaded module, and all output variables are writable.
    unsafe {
        CudaDevice::check("cuFuncLoad", sys::cuFuncLoad(function))?;
        let mut fixed = 0;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        CudaDevice::check("cuFuncGetAttribute", sys::cuFuncGetAttribute(&mut fixed, attribute, function))?;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        CudaDevice::check("cuFuncSetAttribute", sys::cuFuncSetAttribute(function, attribute, shared_most - fixed))?;
        let mut name = MaybeUninit::zeroed();
        CudaDevice::check("cuFuncGetName", sys::cuFuncGetName(name.as_mut_ptr(), function))?;
        Ok(CStr::from_ptr(name.assume_init()).to_string_lossy().into_owned())
    }
}
