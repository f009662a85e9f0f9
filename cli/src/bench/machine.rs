//! The machine, build and time of a measurement. Each result records them, because figures of
//! different machines or builds cannot be compared.

use std::{
    fs,
    time::{Duration, Instant, SystemTime},
};

use bursar::{Bytes, Device};
use serde::Serialize;

/// The machine, the build and the time that a measurement belongs to.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The device's name, as reported by the driver.
    pub device: String,
    /// The driver's version, if the device is a GPU and the driver reports it.
    pub driver: Option<String>,
    pub device_bytes: Bytes,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// Version of this crate.
    pub version: &'static str,
    /// Commit of this crate's sources, if known.
    pub commit: Option<String>,
    /// ISO 8601, in UTC.
    pub date: String,
}

impl Machine {
    /// Describes this machine at the current time.
    pub fn of(device: &dyn Device, commit: Option<String>) -> Self {
        let driver =
            (!device.is_host_memory()).then(|| fs::read_to_string("/proc/driver/nvidia/version").ok()).flatten();
        Machine {
            device: device.name().to_owned(),
            driver: driver.as_deref().and_then(driver_version).map(str::to_owned),
            device_bytes: device.memory().map_or(Bytes::ZERO, |memory| memory.total),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            version: env!("CARGO_PKG_VERSION"),
            commit,
            date: date(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()),
        }
    }
}

/// Returns the first word that is a version, such as `580.159.04`.
fn driver_version(text: &str) -> Option<&str> {
    let is_version = |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.split_whitespace().find(is_version)
}

/// Formats seconds since 1970 as ISO 8601. The calendar algorithm is Hinnant's
/// ("chrono-compatible low-level date algorithms").
fn date(unix_seconds: u64) -> String {
    let (days, second) = (unix_seconds / 86_400 + 719_468, unix_seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

/// Clock ticks per second in `/proc`, on every supported Linux.
const TICKS: f64 = 100.0;

/// The longest time that a process may take before `main`. A longer time means that `/proc`
/// shows another machine's clock.
const BEFORE_MAIN_MAX: Duration = Duration::from_secs(60);

/// Returns the time since this process started, to 10 ms, if the system reports it. Otherwise,
/// or if the reported time is impossible (some containers show another clock), returns the
/// time since `main` began.
pub fn since_process_start(main: Instant) -> Duration {
    let since_main = main.elapsed();
    let times = fs::read_to_string("/proc/self/stat").ok().zip(fs::read_to_string("/proc/uptime").ok());
    let age = times.and_then(|(stat, uptime)| process_age(&stat, &uptime));
    // The tick clock may lag by one tick.
    age.filter(|age| *age >= since_main && *age <= since_main + BEFORE_MAIN_MAX).unwrap_or(since_main)
}

/// Returns the process's age, from the contents of `/proc/self/stat` and `/proc/uptime` (proc(5)).
/// The 22nd field is the start time. The second field is the process's name in parentheses, which
/// may contain any characters.
fn process_age(stat: &str, uptime: &str) -> Option<Duration> {
    let started: f64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let now: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    Duration::try_from_secs_f64(now - started / TICKS).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        let known = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_795_248_000, "2026-11-21T08:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ];
        for (seconds, expected) in known {
            assert_eq!(date(seconds), expected);
        }
    }

    #[test]
    fn a_process_age_is_parsed_whatever_the_process_name() {
        let stat = "77 (a ) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4250 20";
        assert_eq!(process_age(stat, "60.25 99.0"), Some(Duration::from_millis(17_750)));
        assert_eq!(process_age(stat, "2.0 1.0"), None, "a process cannot have started in the future");
        assert_eq!(process_age("nothing", "60.25"), None);
    }

    #[test]
    fn the_driver_version_is_parsed_from_its_text() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: gcc 13.3.0";
        assert_eq!(driver_version(open), Some("580.159.04"));
        assert_eq!(driver_version("no driver"), None);
    }
}
