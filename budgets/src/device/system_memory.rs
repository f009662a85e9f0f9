//! Available host memory of the process and its container, and settings of the memory allocator.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::Bytes;

/// The host memory that the process can still take: the minimum of the system's available memory
/// and the memory left in each cgroup of the process. `None` if the system does not report its
/// available memory.
pub fn system_memory_left() -> Option<Bytes> {
    let system = available(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    groups.lines().flat_map(groups_of).filter_map(|group| group.left()).chain([system]).min()
}

/// Makes the allocator return its freed memory to the system. This takes a few milliseconds. Does
/// nothing if the allocator is not glibc's.
pub fn give_back_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` returns only free heap pages to the system. Live allocations stay
    // valid.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Makes the allocator return blocks of 4 MiB and more to the system as soon as they are freed.
/// This is for a program whose large blocks are request bodies. By default, glibc keeps some freed
/// blocks of up to 32 MiB each. Does nothing if the allocator is not glibc's.
pub fn give_large_blocks_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` takes only integers, and only changes a tuning parameter of the allocator.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 4 << 20);
    }
}

/// A cgroup: its folder, and three names that depend on the cgroup version. The names are the file
/// with the limit, the file with the current use, and the key of inactive cached files in
/// `memory.stat`.
struct Group {
    folder: PathBuf,
    files: [&'static str; 3],
}

/// The memory cgroups in a line of /proc/self/cgroup, from the process's group up to the
/// root. In a container the process's group may be mounted as the root, so some of these
/// folders may not exist.
fn groups_of(line: &str) -> Vec<Group> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return Vec::new() };
    let (root, files) = match controllers {
        "" => ("/sys/fs/cgroup", ["memory.max", "memory.current", "inactive_file "]),
        _ if controllers.split(',').any(|controller| controller == "memory") => {
            let files = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];
            ("/sys/fs/cgroup/memory", files)
        }
        _ => return Vec::new(),
    };
    let own = Path::new(path.trim_start_matches('/'));
    own.ancestors().map(|part| Group { folder: Path::new(root).join(part), files }).collect()
}

impl Group {
    /// The memory that the group has left; `None` if the group has no limit. Inactive cached files
    /// count as available, because the kernel can evict them.
    fn left(&self) -> Option<Bytes> {
        let [limit, used, cached] = self.files;
        let read = |file: &str| fs::read_to_string(self.folder.join(file)).ok();
        let number = |text: &str| text.trim().parse().ok().map(Bytes);
        let cached = read("memory.stat")?.lines().find_map(|line| number(line.strip_prefix(cached)?));
        // Without a limit, the file contains "max", which is not a number.
        let left = number(&read(limit)?)?.saturating_sub(number(&read(used)?)?);
        Some(left.saturating_add(cached.unwrap_or_default()))
    }
}

/// The available memory in the text of /proc/meminfo.
fn available(meminfo: &str) -> Option<Bytes> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok().map(Bytes::kib)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn available_host_memory_is_read_from_meminfo() {
        let meminfo = "MemTotal:       24673888 kB\nMemAvailable:   22012344 kB\nBuffers: 1 kB\n";
        assert_eq!(available(meminfo), Some(Bytes::kib(22_012_344)));
        assert_eq!(available("MemTotal: 1 kB"), None);
        assert!(system_memory_left().is_some_and(|left| left > Bytes::ZERO));
    }

    #[test]
    fn every_parent_cgroup_is_listed() {
        let folders = |line| groups_of(line).into_iter().map(|group| group.folder).collect::<Vec<_>>();
        let of_v2 = ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup/"].map(PathBuf::from);
        assert_eq!(folders("0::/a/b"), of_v2);
        assert_eq!(folders("7:cpu,memory:/"), [PathBuf::from("/sys/fs/cgroup/memory/")]);
        assert!(folders("3:cpuset:/a").is_empty() && folders("nonsense").is_empty());
    }
}
