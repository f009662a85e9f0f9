//! The device that a command leases, as typed.

use std::{env, ffi::OsString, net::SocketAddr, path::PathBuf, str::FromStr};

use bursar::{BlasSearch, Bytes, DeviceChoice, HostConfig, Runtime, crates::budgets::ParseBytesError};
use clap::Args;

use crate::{failure::Failure, logging};

/// The device to lease memory of.
#[derive(Args, Clone)]
pub struct DeviceOptions {
    /// The device: auto (the first GPU, or host memory if there is none), host, or cuda:N for the GPU with that number.
    #[arg(long, default_value = "auto", global = true)]
    device: Named,
    /// Capacity of the host memory that stands in for a GPU, such as 512MiB or 2GiB.
    #[arg(long, default_value = "512MiB", value_parser = capacity, global = true)]
    capacity: Bytes,
    /// The folder with libcublasLt, if it is not in a usual place.
    #[arg(long, value_name = "FOLDER", env = "BURSAR_CUDA_LIB", global = true)]
    cuda_lib: Option<PathBuf>,
    /// Where to record the profiles of starts, which make later starts faster; `none` for nowhere. By default
    /// bursar/profiles in the user's cache folder. `bench` uses only a folder given here; `drill` and `plan` use none.
    #[arg(long, value_name = "FOLDER|none", global = true)]
    profile_cache: Option<PathBuf>,
    /// Where the CUDA toolkit is.
    #[arg(long, hide = true, env = "CUDA_HOME", global = true)]
    cuda_home: Option<PathBuf>,
    /// A virtual environment, where NVIDIA's wheels install libraries.
    #[arg(long, hide = true, env = "VIRTUAL_ENV", global = true)]
    virtual_env: Option<PathBuf>,
    /// A conda environment, likewise.
    #[arg(long, hide = true, env = "CONDA_PREFIX", global = true)]
    conda_prefix: Option<PathBuf>,
    #[cfg(feature = "prometheus")]
    #[command(flatten)]
    metrics: crate::metrics::MetricsOptions,
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

/// Parses a capacity that this machine has.
fn capacity(typed: &str) -> Result<Bytes, String> {
    let capacity: Bytes = typed.parse().map_err(|error: ParseBytesError| error.to_string())?;
    HostConfig::new(capacity).check_capacity().map_err(|error| error.to_string())?;
    Ok(capacity)
}

impl DeviceOptions {
    pub fn choice(&self) -> DeviceChoice {
        match self.device {
            Named::Auto => DeviceChoice::Auto(self.capacity),
            Named::Host => DeviceChoice::Host(self.capacity),
            Named::Cuda(ordinal) => DeviceChoice::Cuda(ordinal),
        }
    }

    /// The address to serve metrics at, if one was given.
    pub fn metrics(&self) -> Option<SocketAddr> {
        #[cfg(feature = "prometheus")]
        return self.metrics.address();
        #[cfg(not(feature = "prometheus"))]
        None
    }

    /// Capacity of the host memory that stands in for a GPU.
    pub fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// Where to look for cuBLASLt.
    pub fn blas(&self) -> BlasSearch {
        let search = BlasSearch::usual();
        let search = self.cuda_home.iter().fold(search, BlasSearch::with_toolkit);
        // pip installs here with `--user`.
        let own = env::var_os("HOME").map(|home| PathBuf::from(home).join(".local"));
        let pythons = self.virtual_env.iter().chain(&self.conda_prefix).chain(&own);
        let search = pythons.fold(search, BlasSearch::with_python);
        self.cuda_lib.iter().fold(search, BlasSearch::first_in)
    }

    /// The folder that profiles are written to.
    pub fn profiles(&self) -> Option<PathBuf> {
        match &self.profile_cache {
            Some(_) => self.said_profiles(),
            None => profiles_by(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME")),
        }
    }

    /// The same, but only if given: measurements must not depend on earlier ones.
    pub fn said_profiles(&self) -> Option<PathBuf> {
        self.profile_cache.clone().filter(|said| said.as_os_str() != NOWHERE)
    }

    /// One sentence on the leased device, and why no GPU was taken if one was expected.
    pub fn describe(&self, runtime: &Runtime) -> String {
        let device = runtime.device();
        match (device.is_host_memory(), runtime.stands_in()) {
            (true, Some(why)) => format!("A host device of {} stands in for a GPU ({why}).", self.capacity),
            (true, None) => format!("A host device of {} stands in for a GPU.", self.capacity),
            (false, _) => format!("{} is the device.", device.name()),
        }
    }

    /// Serves the runtime's metrics from now on, if an address was given.
    pub async fn show(&self, runtime: &Runtime) -> Result<(), Failure> {
        #[cfg(feature = "prometheus")]
        self.metrics.serve(runtime).await?;
        Ok(())
    }

    /// Says on a terminal why no GPU was taken, if one was expected.
    pub fn tell(&self, runtime: &Runtime) {
        if runtime.stands_in().is_some() && logging::is_watched() {
            logging::note(format_args!("{}", self.describe(runtime)));
        }
    }
}

/// What a user types for no folder.
const NOWHERE: &str = "none";

/// Bursar's folder in the user's cache folder: `$XDG_CACHE_HOME`, which counts only if absolute (XDG Base Directory
/// Specification), or `~/.cache`. None without either.
fn profiles_by(xdg: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: Option<OsString>| path.map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute(xdg).or_else(|| absolute(home).map(|home| home.join(".cache")))?;
    Some(cache.join("bursar").join("profiles"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_kept_in_the_users_cache_folder() {
        let by = |xdg: Option<&str>, home: Option<&str>| {
            let folder = profiles_by(xdg.map(OsString::from), home.map(OsString::from));
            folder.map(|folder| folder.display().to_string())
        };
        let in_home = Some("/home/me/.cache/bursar/profiles".to_owned());
        assert_eq!(by(Some("/fast"), Some("/home/me")), Some("/fast/bursar/profiles".to_owned()));
        for xdg in [None, Some(""), Some("relative")] {
            assert_eq!(by(xdg, Some("/home/me")), in_home, "{xdg:?}");
        }
        assert_eq!(by(None, None), None);
        assert_eq!(by(None, Some("")), None);
    }

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
