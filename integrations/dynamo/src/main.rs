//! The program `bursar-dynamo`: one model of Bursar as a worker of a Dynamo deployment.

use std::sync::Arc;

use bursar_dynamo::{BursarWorker, Options};
use clap::Parser;

/// Seconds within which Dynamo lets a worker end, replies and all. It kills what takes longer.
const ENDS_WITHIN: &str = "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT";

fn main() -> anyhow::Result<()> {
    // While this is the only thread.
    bursar::keep_multicast_off();
    let options = Options::parse();
    if std::env::var_os(ENDS_WITHIN).is_none() {
        // Its own 30 seconds (5 in debug builds) would cut `--drain` short. Ten are for giving the device back.
        let seconds = options.drain.saturating_add(10).to_string();
        // SAFETY: this is the only thread so far.
        unsafe { std::env::set_var(ENDS_WITHIN, seconds) };
    }
    let config = options.worker_config()?;
    dynamo_backend_common::run(Arc::new(BursarWorker::new(options)), config)
}
