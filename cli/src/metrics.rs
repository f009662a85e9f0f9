//! The flag for a command's metrics server.

use std::net::SocketAddr;

use bursar::{MetricsAddress, Runtime, ServeMetricsError};
use clap::Args;

use crate::{failure::Failure, logging};

/// Where metrics are served.
#[derive(Args, Clone)]
pub struct MetricsOptions {
    /// Serves metrics at this address while the command runs: a port of the loopback interface,
    /// such as 9464, or an address with a port, such as 0.0.0.0:9464. Port 0 picks a free port.
    /// /metrics is for Prometheus, /events has the latest events, and /health/live and
    /// /health/ready are for liveness and readiness checks. There is no authentication. Prompts,
    /// pictures and replies are never served.
    #[arg(long, value_name = "ADDR", env = "BURSAR_METRICS", global = true)]
    metrics: Option<MetricsAddress>,
}

impl MetricsOptions {
    /// Returns the address that the flag gives.
    pub fn address(&self) -> Option<SocketAddr> {
        self.metrics.map(|MetricsAddress(address)| address)
    }

    /// Serves the metrics of new runtimes while the command runs, and prints the address.
    pub async fn serve(&self, runtimes: &[Runtime]) -> Result<(), Failure> {
        let (Some(address), Some((first, others))) = (self.metrics, runtimes.split_first()) else { return Ok(()) };
        let server = first.serve_metrics(address).await?;
        others.iter().for_each(|runtime| server.add(runtime));
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
