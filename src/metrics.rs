//! Where a command serves its metrics.

use std::net::SocketAddr;

use bursar::{MetricsAddress, Runtime, ServeMetricsError};
use clap::Args;

use crate::{failure::Failure, logging};

/// Where metrics are served.
#[derive(Args, Clone)]
pub struct MetricsOptions {
    /// Serves metrics there while the command runs: a port of the loopback, or an address and a port, such as 9464 or
    /// 0.0.0.0:9464; port 0 takes any that is free. /metrics is for Prometheus, /events has the last events, /health/live and
    /// /health/ready say whether to restart the process and whether to ask it. No password guards them, and nothing of
    /// prompts, pictures or replies is in them.
    #[arg(long, value_name = "ADDR", env = "BURSAR_METRICS", global = true)]
    metrics: Option<MetricsAddress>,
}

impl MetricsOptions {
    /// The address given by the flag.
    pub fn address(&self) -> Option<SocketAddr> {
        self.metrics.map(|MetricsAddress(address)| address)
    }

    /// Serves a new runtime's metrics while the command runs, and prints the address.
    pub async fn serve(&self, runtime: &Runtime) -> Result<(), Failure> {
        let Some(address) = self.metrics else { return Ok(()) };
        let server = runtime.serve_metrics(address).await?;
        logging::note(format_args!("metrics: http://{}/metrics", server.addr()));
        server.detach();
        Ok(())
    }
}

impl From<ServeMetricsError> for Failure {
    fn from(error: ServeMetricsError) -> Self {
        Failure::of(&error)
    }
}
