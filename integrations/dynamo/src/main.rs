//! The program `bursar-dynamo`: one Bursar model as a worker of a Dynamo deployment.

use std::sync::Arc;

use bursar_dynamo::{BursarWorker, Options};
use clap::Parser;

/// The environment variable with the number of seconds that a worker may take to shut down,
/// including the time until its running replies end. Dynamo kills a worker that needs longer.
const ENDS_WITHIN: &str = "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT";

fn main() -> anyhow::Result<()> {
    // This call must run before any other thread starts.
    bursar::keep_multicast_off();
    let options = Options::parse();
    if std::env::var_os(ENDS_WITHIN).is_none() {
        // Dynamo's default of 30 seconds (5 in debug builds) would cut `--drain` short. The
        // additional ten seconds are for releasing the device.
        let seconds = options.drain.saturating_add(10).to_string();
        // SAFETY: no other thread runs yet, so nothing reads the environment concurrently.
        unsafe { std::env::set_var(ENDS_WITHIN, seconds) };
    }
    let config = options.worker_config()?;
    dynamo_backend_common::run(Arc::new(BursarWorker::new(options)), config)
}
