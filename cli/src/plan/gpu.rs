//! GPUs that need not be in this machine, described by their properties.

use std::str::FromStr;

use bursar::Bytes;
use bursar_kernels::{CudaTarget, DType};

/// The properties of a GPU that a plan depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    pub name: String,
    pub capability: (u32, u32),
    pub processors: usize,
    /// Memory as the driver reports it, if known.
    pub total: Option<Bytes>,
}

/// Name, compute capability, number of multiprocessors, and memory in MiB. The H200's values were
/// measured. The other values are commonly reported by drivers and rounded down.
const KNOWN: [(&str, (u32, u32), usize, u64); 9] = [
    ("h200", (9, 0), 132, 143_155),
    ("h100", (9, 0), 132, 80_900),
    ("a100", (8, 0), 108, 80_900),
    ("a100-40gb", (8, 0), 108, 40_300),
    ("l40s", (8, 9), 142, 45_400),
    ("l4", (8, 9), 58, 22_400),
    ("rtx4090", (8, 9), 128, 24_100),
    ("a10", (8, 6), 72, 22_400),
    ("t4", (7, 5), 40, 14_900),
];

/// NVIDIA's architectures, from the oldest one that the kernels support.
const SERVED: [u32; 11] = [75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121];

/// A bound above the number of multiprocessors of any GPU.
const PROCESSORS_MOST: usize = 1024;

/// One GPU for each memory size, by name: 24, 48, 80 and 141 GB.
const OF_EACH_SIZE: [&str; 4] = ["rtx4090", "l40s", "h100", "h200"];

impl Gpu {
    /// Returns a GPU for each common memory size, the smallest first.
    pub fn of_each_size() -> impl Iterator<Item = Self> {
        OF_EACH_SIZE.into_iter().filter_map(|wanted| KNOWN.into_iter().find(|(name, ..)| *name == wanted).map(Gpu::of))
    }

    /// Returns the default GPU for a machine without a GPU, if the user names no GPU.
    pub fn expected() -> Self {
        Gpu::of(KNOWN[0])
    }

    fn of((name, capability, processors, mib): (&str, (u32, u32), usize, u64)) -> Self {
        Gpu { name: name.to_owned(), capability, processors, total: Some(Bytes::mib(mib)) }
    }

    /// Returns the kernel target of this GPU.
    pub fn target(&self) -> CudaTarget {
        let activation = if self.capability >= (8, 0) { DType::BF16 } else { DType::F16 };
        CudaTarget { capability: self.capability, sms: self.processors, activation }
    }
}

impl FromStr for Gpu {
    type Err = String;

    /// Parses `h200`, `sm_90` (with as many multiprocessors as the first known GPU of that
    /// compute capability) or `sm_90:114`.
    fn from_str(typed: &str) -> Result<Self, String> {
        let named = typed.to_ascii_lowercase();
        if let Some(known) = KNOWN.into_iter().find(|(name, ..)| *name == named) {
            return Ok(Gpu::of(known));
        }
        let names = || KNOWN.map(|(name, ..)| name).join(", ");
        let wrong = || format!("expected one of {}, sm_NN, or sm_NN:PROCESSORS, such as sm_90:132", names());
        let numbers = named.strip_prefix("sm_").ok_or_else(wrong)?;
        let (architecture, processors) = match numbers.split_once(':') {
            Some((architecture, processors)) => (architecture, Some(processors)),
            None => (numbers, None),
        };
        let number: u32 = architecture.parse().map_err(|_| wrong())?;
        let capability = (number / 10, number % 10);
        if !SERVED.contains(&number) {
            let served = SERVED.map(|number| format!("sm_{number}")).join(", ");
            return Err(format!("GPUs of sm_{number} are not supported; expected one of {served}"));
        }
        let alike = KNOWN.into_iter().find(|(_, of, ..)| *of == capability);
        let processors = match (processors, alike) {
            (Some(processors), _) => {
                let count = processors.parse().ok().filter(|count| (1..=PROCESSORS_MOST).contains(count));
                count.ok_or_else(|| {
                    format!("{processors:?} is not a number of multiprocessors; expected 1 to {PROCESSORS_MOST}")
                })?
            }
            (None, Some((_, _, processors, _))) => processors,
            (None, None) => return Err(format!("give the number of multiprocessors: {named}:PROCESSORS")),
        };
        Ok(Gpu { name: named, capability, processors, total: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_named_by_its_product_or_its_architecture() {
        let numbers = |typed: &str| typed.parse::<Gpu>().map(|gpu| (gpu.capability, gpu.processors));
        assert_eq!(numbers("H200"), Ok(((9, 0), 132)));
        assert_eq!(numbers("sm_90"), Ok(((9, 0), 132)));
        assert_eq!(numbers("sm_86:28"), Ok(((8, 6), 28)));
        assert_eq!(numbers("sm_120:170"), Ok(((12, 0), 170)));
        let sizes: Vec<_> = Gpu::of_each_size().map(|gpu| gpu.total).collect();
        assert!(sizes.len() == OF_EACH_SIZE.len() && sizes.is_sorted(), "{sizes:?}");
        assert_eq!(Gpu::expected().total, Some(Bytes::mib(143_155)));
        assert_eq!("sm_90".parse::<Gpu>().map(|gpu| gpu.total), Ok(None), "the name does not say which GPU it is");
        for wrong in ["", "sm_", "sm_x", "sm_90:", "sm_90:0", "sm_90:9999", "sm_sm_90", "gtx", "sm_120"] {
            assert!(numbers(wrong).is_err(), "{wrong}");
        }
        assert!(numbers("h300").is_err_and(|error| error.contains("h200")));
    }
}
