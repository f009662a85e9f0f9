//! Which device a command leases, as it is typed.

use std::{
    io::{IsTerminal, stderr},
    path::PathBuf,
    str::FromStr,
};

use bursar::{BlasSearch, Bytes, DeviceChoice, Runtime};
use clap::Args;

/// The device that is leased.
#[derive(Args, Clone)]
pub struct DeviceOptions {
    /// The device: auto (the first GPU, or host memory where there is none), host, or cuda:N for the GPU of that number.
    #[arg(long, default_value = "auto", global = true)]
    device: Named,
    /// Capacity of the host memory that stands in for a GPU, such as 512MiB or 2GiB.
    #[arg(long, default_value = "512MiB", global = true)]
    capacity: Bytes,
    /// The folder that has libcublasLt, if it is in no usual place.
    #[arg(long, value_name = "FOLDER", env = "BURSAR_CUDA_LIB", global = true)]
    cuda_lib: Option<PathBuf>,
    /// Where the CUDA toolkit is.
    #[arg(long, hide = true, env = "CUDA_HOME", global = true)]
    cuda_home: Option<PathBuf>,
    /// NVIDIA's wheels bring libraries.
    #[arg(long, hide = true, env = "VIRTUAL_ENV", global = true)]
    virtual_env: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Auto,
    Host,
    Cuda(usize),
}

impl FromStr for Named {
    type Err = String;

    fn from_str(typed: &str) -> Result<Self, String> {
        match (typed, typed.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(Named::Auto),
            ("host", _) => Ok(Named::Host),
            (_, Some(Ok(ordinal))) => Ok(Named::Cuda(ordinal)),
            _ => Err("a device is auto, host, or cuda: and a number, such as cuda:0".to_owned()),
        }
    }
}

impl DeviceOptions {
    /// As the runtime takes it.
    pub fn choice(&self) -> DeviceChoice {
        match self.device {
            Named::Auto => DeviceChoice::Auto(self.capacity),
            Named::Host => DeviceChoice::Host(self.capacity),
            Named::Cuda(ordinal) => DeviceChoice::Cuda(ordinal),
        }
    }

    /// Of host memory that stands in for a GPU.
    pub fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// Where cuBLASLt is looked for.
    pub fn blas(&self) -> BlasSearch {
        let search = BlasSearch::usual();
        let search = self.cuda_home.iter().fold(search, BlasSearch::with_toolkit);
        let search = self.virtual_env.iter().fold(search, BlasSearch::with_python);
        self.cuda_lib.iter().fold(search, BlasSearch::first_in)
    }

    /// What is leased, as a sentence.
    pub fn describe(&self, runtime: &Runtime) -> String {
        let device = runtime.device();
        match device.is_host_memory() {
            true => format!("A host device of {} stands in for a GPU.", self.capacity),
            false => format!("{} is the device.", device.name()),
        }
    }

    /// Says on a terminal why no GPU was taken, if one would have been.
    pub fn tell(&self, runtime: &Runtime) {
        if let (Some(why), true) = (runtime.stands_in(), stderr().is_terminal()) {
            eprintln!("{} ({why})", self.describe(runtime));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_by_its_kind_and_number() {
        assert_eq!("auto".parse(), Ok(Named::Auto));
        assert_eq!("host".parse(), Ok(Named::Host));
        assert_eq!("cuda:3".parse(), Ok(Named::Cuda(3)));
        for wrong in ["", "cuda", "cuda:", "cuda:-1", "cuda:x", "gpu", "Host"] {
            assert!(wrong.parse::<Named>().is_err(), "{wrong}");
        }
    }
}
