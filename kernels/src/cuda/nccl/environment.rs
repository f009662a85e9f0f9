//! Environment variables that NCCL reads when it is first used.

/// Variables, and the values that they are set to unless the user has set them. Multicast
/// over NVLink is off because it takes memory that is not reported to any process.
/// Registration of buffers with captured graphs is off because the registered pages would
/// stay allocated after their lease ends.
const DEFAULTS: [(&str, &str); 2] = [("NCCL_NVLS_ENABLE", "0"), ("NCCL_GRAPH_REGISTER", "0")];

/// Turns off NCCL's multicast over NVLink (`NCCL_NVLS_ENABLE=0`) and its registration of captured
/// graphs' buffers (`NCCL_GRAPH_REGISTER=0`), unless the user has set these variables. Returns
/// `true` if both variables are set on return.
///
/// NCCL reads these settings only from the environment, which can be changed safely only while the
/// process has a single thread. Call this function at the start of `main`, as `bursar` does, before
/// a runtime starts. If the process has several threads, or if the operating system does not report
/// the number of threads, the function changes nothing. NCCL also works correctly without this
/// call. On two GPUs NCCL never uses multicast.
pub fn keep_multicast_off() -> bool {
    let are_set = || DEFAULTS.iter().all(|(name, _)| std::env::var_os(name).is_some());
    if are_set() || !is_single_threaded() {
        return are_set();
    }
    for (name, value) in DEFAULTS {
        if std::env::var_os(name).is_none() {
            // SAFETY: no other thread exists that could read or write the environment
            // at the same time.
            unsafe { std::env::set_var(name, value) };
        }
    }
    true
}

/// Returns `true` if this process has a single thread, or `false` if the operating system does not
/// report the number of threads.
fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_unchanged_when_other_threads_exist() {
        let before = DEFAULTS.map(|(name, _)| std::env::var_os(name));
        let beside = std::thread::spawn(|| (is_single_threaded(), keep_multicast_off()));
        // The thread that waits in `join` is a second thread of the process.
        let (is_alone, are_set) = beside.join().expect("the thread does not panic");
        assert!(!is_alone && are_set == before.iter().all(Option::is_some));
        assert_eq!(DEFAULTS.map(|(name, _)| std::env::var_os(name)), before);
    }
}
