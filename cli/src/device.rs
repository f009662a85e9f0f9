//! The command-line options that select the device.

use std::{cmp::Ordering, env, ffi::OsString, net::SocketAddr, num::NonZeroUsize, path::PathBuf, str::FromStr};

use bursar::{
    BlasSearch, Bytes, DeviceChoice, HostConfig, LoadOptions, MinDevicesFor, ModelSource, Placement, PlacementRequest,
    Runtime,
};
use bursar_actors::runtime::gpus;
use bursar_budgets::ParseBytesError;
use clap::Args;

use crate::{failure::Failure, logging};

/// The options for the device whose memory is leased.
#[derive(Args, Clone)]
pub struct DeviceOptions {
    /// Device to use: auto (the first GPU, or host memory if there is no GPU), host, or cuda:N for
    /// the GPU with number N. Several devices, such as cuda:0,1 or host:2, share each model.
    #[arg(long, default_value = "auto", global = true)]
    device: Named,
    /// Number of devices that share each model, counted from the named device. With auto, each
    /// model uses the smallest number of the named devices, or of all GPUs, that it fits on. With
    /// auto, or if more devices are named, `serve` gives each model separate devices. N,N sets the
    /// number for each model, in order.
    #[arg(long, visible_aliases = ["tp", "tp-size"], value_name = "N|auto", global = true)]
    tensor_parallel_size: Option<EachRanks>,
    /// Size of the host memory that stands in for a GPU, such as 2GiB. Default 512MiB.
    /// Not allowed with cuda:N.
    #[arg(long, value_parser = capacity, global = true)]
    capacity: Option<Bytes>,
    /// Folder with libcublasLt, if it is not in a usual place. Separate several folders with
    /// colons, for example to add the folder of libnccl.
    #[arg(long, value_name = "FOLDER", env = "BURSAR_CUDA_LIB", global = true)]
    cuda_lib: Option<PathBuf>,
    /// Folder for the profiles of starts, which make later starts faster, or `none`. By default,
    /// bursar/profiles in the user's cache folder. `bench` uses only a folder given here. `drill`
    /// and `plan` never use one.
    #[arg(long, value_name = "FOLDER|none", global = true)]
    profile_cache: Option<PathBuf>,
    /// Folder of the CUDA toolkit.
    #[arg(long, hide = true, env = "CUDA_HOME", global = true)]
    cuda_home: Option<PathBuf>,
    /// A virtual environment, where NVIDIA's wheels install libraries.
    #[arg(long, hide = true, env = "VIRTUAL_ENV", global = true)]
    virtual_env: Option<PathBuf>,
    /// A conda environment, where NVIDIA's packages install libraries.
    #[arg(long, hide = true, env = "CONDA_PREFIX", global = true)]
    conda_prefix: Option<PathBuf>,
    #[command(flatten)]
    metrics: crate::metrics::MetricsOptions,
}

/// The maximum number of devices that can share a model.
pub const RANKS_MAX: i64 = 8;

/// The number of devices that share each model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ranks {
    /// The smallest number that the model fits on.
    Auto,
    Number(usize),
}

impl Ranks {
    fn number(self) -> Option<usize> {
        match self {
            Ranks::Auto => None,
            Ranks::Number(ranks) => Some(ranks),
        }
    }
}

impl FromStr for Ranks {
    type Err = String;

    fn from_str(typed: &str) -> Result<Self, String> {
        match (typed, typed.parse()) {
            ("auto", _) => Ok(Ranks::Auto),
            (_, Ok(ranks)) if (1..=RANKS_MAX as usize).contains(&ranks) => Ok(Ranks::Number(ranks)),
            _ => Err(format!("expected a number of devices from 1 to {RANKS_MAX}, or auto")),
        }
    }
}

/// One number for all models, or one number for each model.
#[derive(Clone, Debug, PartialEq, Eq)]
enum EachRanks {
    All(Ranks),
    Each(Vec<Ranks>),
}

impl FromStr for EachRanks {
    type Err = String;

    fn from_str(typed: &str) -> Result<Self, String> {
        let mut each = typed.split(',').map(str::parse).collect::<Result<Vec<Ranks>, _>>()?;
        Ok(if each.len() == 1 { EachRanks::All(each.remove(0)) } else { EachRanks::Each(each) })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Named {
    Auto,
    /// This many host devices.
    Host(usize),
    /// The GPUs with these numbers.
    Cuda(Vec<usize>),
}

impl Named {
    /// Returns the named devices. If a single device is named, returns it and the devices that
    /// follow it, `devices` in all.
    fn at_least(&self, devices: usize) -> Named {
        match self {
            Named::Host(1) => Named::Host(devices),
            Named::Cuda(ordinals) if ordinals.len() == 1 => Named::Cuda((ordinals[0]..ordinals[0] + devices).collect()),
            named => named.clone(),
        }
    }
}

impl FromStr for Named {
    type Err = String;

    fn from_str(typed: &str) -> Result<Self, String> {
        let wrong = "expected auto, host, or cuda:N such as cuda:0; for several devices cuda:0,1 or host:2";
        let most = RANKS_MAX as usize;
        match (typed, typed.strip_prefix("cuda:"), typed.strip_prefix("host:")) {
            ("auto", ..) => Ok(Named::Auto),
            ("host", ..) => Ok(Named::Host(1)),
            (_, Some(ordinals), _) => {
                let ordinals = ordinals.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
                let ordinals = ordinals.map_err(|_| wrong)?;
                let is_twice = |ordinal: &usize| ordinals.iter().filter(|other| *other == ordinal).count() > 1;
                match ordinals.iter().find(|ordinal| is_twice(ordinal)) {
                    Some(twice) => Err(format!("cuda:{twice} is named twice; a GPU can hold only one part of a model")),
                    None if ordinals.len() > most => Err(format!("at most {most} GPUs can share a model")),
                    None => Ok(Named::Cuda(ordinals)),
                }
            }
            (.., Some(ranks)) => match ranks.parse() {
                Ok(ranks) if (1..=most).contains(&ranks) => Ok(Named::Host(ranks)),
                Ok(_) => Err(format!("expected a number from 1 to {most} after host:")),
                Err(_) => Err(wrong.to_owned()),
            },
            _ => Err(wrong.to_owned()),
        }
    }
}

fn at_odds(named: usize, size: usize) -> Failure {
    Failure {
        error: format!("--device names {named} devices, but --tensor-parallel-size is {size}"),
        hint: "name as many devices as --tensor-parallel-size (for `serve`, a multiple is allowed too), or leave \
               --tensor-parallel-size out"
            .to_owned(),
    }
}

fn too_few(named: usize, taken: usize) -> Failure {
    Failure {
        error: format!("--device names {named} devices, but the numbers of --tensor-parallel-size add up to {taken}"),
        hint: "name that many devices, or give one number, so that models share devices".to_owned(),
    }
}

fn count_of_models(models: usize) -> String {
    if models == 1 { "1 model".to_owned() } else { format!("{models} models") }
}

fn idle(named: usize, taken: usize, models: usize) -> Failure {
    let use_them = if models == 1 { "1 model uses" } else { "the models use" };
    Failure {
        error: format!("--device names {named} devices, but {use_them} only {taken}; the other devices would be idle"),
        hint: "name fewer devices, load more models, or let more devices share each model; `auto` allows idle devices"
            .to_owned(),
    }
}

/// Default size of the host memory that stands in for a GPU.
const CAPACITY: Bytes = Bytes::mib(512);

fn capacity_of_a_gpu() -> Failure {
    Failure {
        error: "--capacity sets the size of host memory, but --device names a GPU".to_owned(),
        hint: "leave --capacity out; to limit a model on a GPU, use --memory-fraction, --kv-tokens or --kv-bytes"
            .to_owned(),
    }
}

/// Parses a capacity, which must not exceed the memory of this machine.
fn capacity(typed: &str) -> Result<Bytes, String> {
    let capacity: Bytes = typed.parse().map_err(|error: ParseBytesError| error.to_string())?;
    HostConfig::new(capacity).check_capacity().map_err(|error| error.to_string())?;
    Ok(capacity)
}

impl DeviceOptions {
    /// Returns the device that these options name, for a runtime that will load these models.
    ///
    /// # Errors
    /// See [`choice`](Self::choice).
    pub fn choice_for(&self, models: Vec<(ModelSource, LoadOptions)>) -> Result<DeviceChoice, Failure> {
        let of = self.choice()?;
        Ok(if self.is_any_number() { DeviceChoice::MinDevices(Box::new(MinDevicesFor { of, models })) } else { of })
    }

    /// Returns the devices on which `serve` starts runtimes, and the models that each runtime
    /// loads. As long as devices are left, each model gets separate devices in these cases:
    /// - --device names a larger number of devices than share each model.
    /// - --tensor-parallel-size is `auto` or has one value for each model.
    ///
    /// # Errors
    /// - The number of devices is not a multiple of the ranks of a model.
    /// - Some devices would be idle.
    /// - Several devices are named, but fewer than the models need in total.
    /// - [`PlacementRequest::place`] fails.
    pub async fn placed(
        &self,
        models: Vec<(ModelSource, LoadOptions)>,
        canary: Option<Bytes>,
    ) -> Result<Vec<Placement>, Failure> {
        let (named, count) = (self.named(), models.len());
        let all = |device: Named| DeviceOptions { device, tensor_parallel_size: None, ..self.clone() }.choice();
        let (ranks, of) = match &self.tensor_parallel_size {
            Some(EachRanks::Each(each)) => {
                // `auto` takes at least one device.
                let taken = each.iter().map(|ranks| ranks.number().unwrap_or(1)).sum();
                let device = self.device.at_least(taken);
                match named.cmp(&taken) {
                    Ordering::Less if named > 1 => return Err(too_few(named, taken)),
                    Ordering::Greater if !each.contains(&Ranks::Auto) => return Err(idle(named, taken, count)),
                    _ => (None, all(device)?),
                }
            }
            Some(EachRanks::All(Ranks::Auto)) if count > 1 => (None, self.choice()?),
            Some(EachRanks::All(Ranks::Number(ranks))) if named > *ranks && named.is_multiple_of(*ranks) => {
                if count * ranks < named {
                    return Err(idle(named, count * ranks, count));
                }
                (Some(*ranks), all(self.device.clone())?)
            }
            _ => {
                let (device, ranks) = (self.choice_for(models)?, self.ranks());
                return Ok(vec![Placement { device, ranks, models: (0..count).collect() }]);
            }
        };
        Ok(PlacementRequest { of, ranks, models, canary }.place().await?)
    }

    /// Whether a model may be shared by as many devices as it needs.
    pub fn is_any_number(&self) -> bool {
        self.for_all() == Some(Ranks::Auto)
    }

    /// Returns the value of --tensor-parallel-size, if the user gave one value for all models.
    fn for_all(&self) -> Option<Ranks> {
        match self.tensor_parallel_size {
            Some(EachRanks::All(ranks)) => Some(ranks),
            Some(EachRanks::Each(_)) | None => None,
        }
    }

    /// Returns [`LoadOptions::ranks`] for each of `models` models: the number that
    /// --tensor-parallel-size lists for the model. `None` if the value for the model is `auto`, or
    /// if --tensor-parallel-size does not list a value for each model.
    ///
    /// # Errors
    /// The number of values is not the number of models.
    pub fn ranks_of_each(&self, models: usize) -> Result<Vec<Option<NonZeroUsize>>, Failure> {
        match &self.tensor_parallel_size {
            Some(EachRanks::Each(each)) if each.len() != models => Err(Failure {
                error: format!("--tensor-parallel-size has {} numbers for {}", each.len(), count_of_models(models)),
                hint: "give one number for all models, or one number per `--model`, in order".to_owned(),
            }),
            Some(EachRanks::Each(each)) => {
                Ok(each.iter().map(|ranks| ranks.number().and_then(NonZeroUsize::new)).collect())
            }
            Some(EachRanks::All(_)) | None => Ok(vec![None; models]),
        }
    }

    /// Returns the device that these options name. If --tensor-parallel-size is `auto`, returns all
    /// devices that may be used.
    ///
    /// # Errors
    /// - The number of named devices is not the number that should share a model.
    /// - A capacity is given for a GPU.
    pub fn choice(&self) -> Result<DeviceChoice, Failure> {
        if matches!(self.device, Named::Cuda(_)) && self.capacity.is_some() {
            return Err(capacity_of_a_gpu());
        }
        let (capacity, named) = (self.capacity(), self.named());
        let ranks = match self.for_all() {
            Some(Ranks::Number(ranks)) if named != 1 && named != ranks => return Err(at_odds(named, ranks)),
            Some(Ranks::Number(ranks)) => ranks,
            Some(Ranks::Auto) | None => named,
        };
        Ok(match (&self.device, ranks) {
            (Named::Auto, 1) => DeviceChoice::Auto(capacity),
            (Named::Auto, _) => DeviceChoice::AutoRanks(ranks, capacity),
            (Named::Host(_), 1) => DeviceChoice::Host(capacity),
            (Named::Host(_), _) => DeviceChoice::HostRanks(ranks, capacity),
            (Named::Cuda(ordinals), 1) => DeviceChoice::Cuda(ordinals[0]),
            (Named::Cuda(ordinals), _) if named == 1 => {
                DeviceChoice::CudaRanks((ordinals[0]..ordinals[0] + ranks).collect())
            }
            (Named::Cuda(ordinals), _) => DeviceChoice::CudaRanks(ordinals.clone()),
        })
    }

    /// Returns the number of devices that share each model. With `auto`, this is the largest
    /// allowed number.
    pub fn ranks(&self) -> usize {
        match (self.for_all(), &self.device) {
            (Some(Ranks::Number(ranks)), _) => ranks,
            (Some(Ranks::Auto), Named::Auto) => gpus().max(1),
            (Some(Ranks::Auto) | None, _) => self.named(),
        }
    }

    fn named(&self) -> usize {
        match &self.device {
            Named::Auto => 1,
            Named::Host(ranks) => *ranks,
            Named::Cuda(ordinals) => ordinals.len(),
        }
    }

    /// Returns the address to serve metrics at, if the user gave one.
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics.address()
    }

    /// Returns the capacity of the host memory that stands in for a GPU.
    pub fn capacity(&self) -> Bytes {
        self.capacity.unwrap_or(CAPACITY)
    }

    /// Returns where to search for cuBLASLt.
    pub fn blas(&self) -> BlasSearch {
        // `pip install --user` installs libraries in this folder.
        let own = env::var_os("HOME").map(|home| PathBuf::from(home).join(".local"));
        let pythons: Vec<_> = self.virtual_env.iter().chain(&self.conda_prefix).chain(&own).collect();
        let folders: Vec<_> = self.cuda_lib.iter().flat_map(env::split_paths).collect();
        let search = BlasSearch::usual().with_toolkits(self.cuda_home.as_slice()).with_pythons(&pythons);
        search.first_in(&folders)
    }

    /// Returns the folder that profiles are written to and read from.
    pub fn profiles(&self) -> Option<PathBuf> {
        match &self.profile_cache {
            Some(_) => self.said_profiles(),
            None => profiles_by(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME")),
        }
    }

    /// Returns the profile folder only if a flag names it. `bench` uses this folder and never the
    /// default folder, because its figures must not depend on earlier starts.
    pub fn said_profiles(&self) -> Option<PathBuf> {
        self.profile_cache.clone().filter(|folder| folder.as_os_str() != NOWHERE)
    }

    /// Describes the leased device in one sentence, with the reason if a GPU was expected and not
    /// found.
    pub fn describe(&self, runtime: &Runtime) -> String {
        let device = runtime.device();
        match (device.is_host_memory(), runtime.host_fallback_reason()) {
            (true, why) => {
                let of = self.capacity();
                let message = match device.ranks().len().max(1) {
                    1 => format!("A host device of {of} stands in for a GPU"),
                    ranks => format!("{ranks} host devices of {of} each stand in for GPUs"),
                };
                why.map_or_else(|| format!("{message}."), |why| format!("{message} ({why})."))
            }
            (false, _) => format!("{} is the device.", device.name()),
        }
    }

    /// Starts to serve the runtimes' metrics, if an address was given.
    pub async fn serve_metrics(&self, runtimes: &[Runtime]) -> Result<(), Failure> {
        self.metrics.serve(runtimes).await
    }

    /// Reports on a terminal why no GPU is used, if a GPU was expected.
    pub fn report_missing_gpu(&self, runtime: &Runtime) {
        if runtime.host_fallback_reason().is_some() && logging::is_watched() {
            logging::note(format_args!("{}", self.describe(runtime)));
        }
    }
}

/// The value of --profile-cache that turns profiles off.
const NOWHERE: &str = "none";

/// Returns Bursar's folder in the user's cache folder. The cache folder is `$XDG_CACHE_HOME`, if
/// that is an absolute path (XDG Base Directory Specification), or else `~/.cache`. Returns `None`
/// if neither is known.
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
        assert_eq!("host".parse(), Ok(Named::Host(1)));
        assert_eq!("host:4".parse(), Ok(Named::Host(4)));
        assert_eq!("cuda:3".parse(), Ok(Named::Cuda(vec![3])));
        assert_eq!("cuda:2,0".parse(), Ok(Named::Cuda(vec![2, 0])));
        let wrong =
            ["", "cuda", "cuda:", "cuda:-1", "cuda:x", "gpu", "Host", "cuda:1,", "cuda:1,1", "host:0", "host:9"];
        for wrong in wrong {
            assert!(wrong.parse::<Named>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_model_is_split_over_the_named_or_requested_devices() {
        #[derive(clap::Parser)]
        struct Typed {
            #[command(flatten)]
            device: DeviceOptions,
        }
        let chosen = |line: &str| {
            let words = ["bursar"].into_iter().chain(line.split_whitespace());
            let typed = <Typed as clap::Parser>::try_parse_from(words).map_err(|error| error.to_string())?;
            let models = vec![(ModelSource::demo(), LoadOptions::default())];
            let choice = typed.device.choice_for(models).map_err(|failure| failure.error)?;
            Ok::<_, String>((format!("{choice:?}"), typed.device.ranks()))
        };
        for (line, choice, ranks) in [
            ("", "Auto(512.0 MiB)", 1),
            ("--capacity 4MiB --tp 2", "AutoRanks(2, 4.0 MiB)", 2),
            ("--capacity 4MiB --device host --tensor-parallel-size 1", "Host(4.0 MiB)", 1),
            ("--capacity 4MiB --device host --tp-size 4", "HostRanks(4, 4.0 MiB)", 4),
            ("--capacity 4MiB --device host:2", "HostRanks(2, 4.0 MiB)", 2),
            ("--device cuda:1", "Cuda(1)", 1),
            ("--device cuda:1 --tp 2", "CudaRanks([1, 2])", 2),
            ("--device cuda:3,1 --tp 2", "CudaRanks([3, 1])", 2),
            ("--tp auto", "MinDevices(Auto(512.0 MiB) for [\"demo\"])", gpus().max(1)),
            ("--device host:4 --tp auto", "MinDevices(HostRanks(4, 512.0 MiB) for [\"demo\"])", 4),
            ("--device cuda:3,1 --tp auto", "MinDevices(CudaRanks([3, 1]) for [\"demo\"])", 2),
        ] {
            assert_eq!(chosen(line), Ok((choice.to_owned(), ranks)), "{line}");
        }
        let error = chosen("--device cuda:0,1 --tp 4").expect_err("two GPUs are not four ranks");
        assert_eq!(error, "--device names 2 devices, but --tensor-parallel-size is 4");
        let error = chosen("--device cuda:1 --capacity 4MiB").expect_err("a GPU has no --capacity");
        assert_eq!(error, "--capacity sets the size of host memory, but --device names a GPU");
        for wrong in ["9", "0", "two", "2,", "1,9"] {
            let error = chosen(&format!("--tp {wrong}")).expect_err(wrong);
            assert!(error.contains("expected a number of devices from 1 to 8, or auto"), "{error}");
        }
    }
}
