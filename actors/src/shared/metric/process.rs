//! Metrics of the process itself, with the names that Prometheus' own libraries use. The values are
//! read at each scrape, on Linux only.

#[cfg(target_os = "linux")]
use super::{
    PROCESS_CPU_SECONDS_TOTAL, PROCESS_MAX_FDS, PROCESS_OPEN_FDS, PROCESS_RESIDENT_MEMORY_BYTES,
    PROCESS_START_TIME_SECONDS, PROCESS_VIRTUAL_MEMORY_BYTES,
};

/// Sets the gauges. If a value cannot be read, for example in a sandbox without `/proc`, its gauge
/// and the later gauges are left out.
pub(crate) fn show() {
    #[cfg(target_os = "linux")]
    drop(show_on_linux());
}

#[cfg(target_os = "linux")]
fn show_on_linux() -> procfs::ProcResult<()> {
    use procfs::process::{LimitValue, Process};
    let process = Process::myself()?;
    let (stat, ticks) = (process.stat()?, procfs::ticks_per_second());
    PROCESS_CPU_SECONDS_TOTAL.reach(&(), (stat.utime + stat.stime) / ticks);
    PROCESS_RESIDENT_MEMORY_BYTES.set(&(), (stat.rss * procfs::page_size()) as f64);
    PROCESS_VIRTUAL_MEMORY_BYTES.set(&(), stat.vsize as f64);
    PROCESS_OPEN_FDS.set(&(), process.fd_count()?);
    let most = match process.limits()?.max_open_files.soft_limit {
        LimitValue::Value(most) => most as f64,
        LimitValue::Unlimited => f64::INFINITY,
    };
    PROCESS_MAX_FDS.set(&(), most);
    PROCESS_START_TIME_SECONDS.set(&(), procfs::boot_time_secs()? as f64 + stat.starttime as f64 / ticks as f64);
    Ok(())
}
