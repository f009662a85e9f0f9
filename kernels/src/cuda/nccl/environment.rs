//! What NCCL reads from the process's environment when it is first used.

/// Variables and the values that they get, unless they are set: no multicast over NVLink, which takes memory that no process
/// is told of, and no buffer registered with a captured graph, whose pages would stay when their lease ends.
const DEFAULTS: [(&str, &str); 2] = [("NCCL_NVLS_ENABLE", "0"), ("NCCL_GRAPH_REGISTER", "0")];

/// Keeps NCCL from multicast over NVLink (`NCCL_NVLS_ENABLE=0`), and from registering the buffers of captured graphs
/// (`NCCL_GRAPH_REGISTER=0`), unless the user set these variables. True if they are set now.
///
/// NCCL takes these from the environment alone, which can be changed safely only while a process has one thread: call it at
/// the start of `main`, as `bursar` does, before a runtime starts. Where there are more threads, or the system does not say,
/// it changes nothing. Without it NCCL is correct all the same. On two GPUs it never uses multicast.
pub fn keep_multicast_off() -> bool {
    let are_set = || DEFAULTS.iter().all(|(name, _)| std::env::var_os(name).is_some());
    if are_set() || !is_single_threaded() {
        return are_set();
    }
    for (name, value) in DEFAULTS {
        if std::env::var_os(name).is_none() {
            // SAFETY: no other thread is there to read or write the environment, and this one does nothing else meanwhile.
            unsafe { std::env::set_var(name, value) };
        }
    }
    true
}

/// Whether this process has one thread. False where the system does not say.
fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_left_alone_where_other_threads_may_read_it() {
        let before = DEFAULTS.map(|(name, _)| std::env::var_os(name));
        let beside = std::thread::spawn(|| (is_single_threaded(), keep_multicast_off()));
        // The thread that waits for it is one more.
        let (is_alone, are_set) = beside.join().expect("it does not panic");
        assert!(!is_alone && are_set == before.iter().all(Option::is_some));
        assert_eq!(DEFAULTS.map(|(name, _)| std::env::var_os(name)), before);
    }
}
